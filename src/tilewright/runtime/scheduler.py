"""Who runs: the queue, the slots and their pages. Plain host code without a device, told what happened and asked what is next.

Every engine has one, whatever its model; one that needs no pages has a page of the whole context for each slot.

Requests are served in the order in which they came. Where pages run out, the newest of those that run gives its own up and goes
back to the head of the queue; its tokens are computed again later, and as randomness belongs to its seed and positions it goes
on as it would have, wherever a row's results do not depend on the rows beside it (`kernels.operations.is_batch_invariant`).
"""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tilewright.kernels.operations import UNMAPPED
from tilewright.runtime.constraints import ConstraintState
from tilewright.runtime.groups import PageGroup, RowPages, usable_prefix
from tilewright.runtime.output import OutputProcessor
from tilewright.runtime.pages import FIRST, Pages, page_key
from tilewright.runtime.pooling import PooledChunk, Pooling
from tilewright.runtime.request import Listener, RequestHandle
from tilewright.runtime.shapes import ShapeTable
from tilewright.runtime.snapshots import OVERHEAD, Snapshots


@dataclass(eq=False)
class TokenSequence:
    """A request that an engine has taken, in a slot or not.

    Attributes:
        processor: of its text so far.
        faults: how many dispatches failed with it aboard.
        followed: what the one who chooses rounds keeps of it.
        queued: tokens that it was queued with.
        prompt_logprobs: what prefill said of the prompt, as far as it went: the log-probabilities that a program gave, still on
            the device, its row there, and for how many positions. None once it was told, or where nobody asks.
        keys: of its full pages, as far as they were needed. What is committed does not change, so each is computed once.
        constraint: where it stands in its constraint, behind the last token that was read; None without one.
        adapter: the number of its low-rank adapter, 0 for none. What one computes is in pages that no other finds.
        pooling: of a request for an embedding; None for any other.
        pooled: chunks of its prompt that were computed.
    """

    handle: RequestHandle
    listener: Listener
    processor: OutputProcessor
    faults: int = 0
    followed: Any = None
    queued: int = 0
    prompt_logprobs: list[tuple[Any, int, int]] | None = None
    keys: list[bytes] = field(default_factory=list)
    constraint: ConstraintState | None = None
    adapter: int = 0
    pooling: Pooling | None = None
    pooled: list[PooledChunk] = field(default_factory=list)

    @property
    def number(self) -> int:
        return self.handle.number

    @property
    def wants_logprobs(self) -> bool:
        """True if the request asks for log-probabilities."""
        return self.handle.request.logprobs is not None

    @property
    def wants_prompt_logprobs(self) -> bool:
        """True if prefill has still to tell log-probabilities of the prompt."""
        told = sum(count for _, _, count in self.prompt_logprobs or ())
        return self.prompt_logprobs is not None and told < len(self.processor.prompt) - 1

    @property
    def needs_every_position(self) -> bool:
        """True if prefill must compute the whole prompt, whatever pages are kept: something is told of each position."""
        return self.wants_prompt_logprobs or self.pooling == "mean"

    @property
    def alternatives(self) -> int:
        """Number of alternatives that come with each token."""
        return self.handle.request.logprobs or 0

    @property
    def length(self) -> int:
        """Tokens that are committed."""
        return len(self.processor.prompt) + len(self.processor.tokens)

    @property
    def tokens(self) -> list[int]:
        return [*self.processor.prompt, *self.processor.tokens]

    def page_key(self, page: int, page_size: int) -> bytes:
        """The key of one of its full pages, behind which a token has to be committed."""
        prompt = self.processor.prompt
        new = self.processor.tokens
        first = page_key(FIRST, [self.adapter]) if self.adapter else FIRST
        while len(self.keys) <= page:
            start = len(self.keys) * page_size
            stop = start + page_size + 1
            held = [*prompt[start:stop], *new[max(0, start - len(prompt)) : max(0, stop - len(prompt))]]
            assert len(held) == stop - start, "a page is found by what is committed"
            self.keys.append(page_key(self.keys[-1] if self.keys else first, held))
        return self.keys[page]


@dataclass(eq=False)
class RunningSequence:
    """A sequence in a slot.

    Attributes:
        groups: its pages in each group of layers.
        known: the position of its last committed token, as far as dispatches were read.
        least: how many tokens those that were not read yet commit at least, unless it ends; `most` at most.
        filled: positions whose keys and values are computed, by prefills that were sent.
        prompt: positions that prefill computes: all before the known one, and of a request for an embedding that one, too.
        begun: whether a chunk was sent; the first one, which may have no position at all, also puts the sequence into its slot.
        held: how many positions each of the drafter's contexts holds that may fall behind.
        drafts: behind its last committed token, where the host knows them: after rounds under masks.
        automaton_sent: the device knows the state of its constraint's automaton; else the host has to say.
        steps: taken since something was handed out, of a model that commits many tokens over and over.
        stops: positions before `prompt` at which a chunk ends, for a snapshot of its states.
        snapshot: that its states are still to begin with; `UNMAPPED` for none.
    """

    sequence: TokenSequence
    slot: int
    groups: list[RowPages]
    known: int
    filled: int
    prompt: int
    begun: bool = False
    least: int = 0
    most: int = 0
    held: dict[str, int] = field(default_factory=dict)
    drafts: Sequence[int] = ()
    automaton_sent: bool = False
    steps: int = 0
    stops: Sequence[int] = ()
    snapshot: int = UNMAPPED

    @property
    def pages(self) -> list[int]:
        """Pages of its positions, in order, in the group of layers that see all of them."""
        return self.groups[0].columns

    @property
    def prefilled(self) -> bool:
        return self.begun and self.filled >= self.prompt

    @property
    def due(self) -> int:
        """Positions that prefill still computes, up to where it stops for a snapshot."""
        return next((stop for stop in self.stops if stop > self.filled), self.prompt) - self.filled

    @property
    def oldest(self) -> int:
        """The first position that a query may stand at from now on."""
        return self.known if self.prefilled else self.filled

    @property
    def ending(self) -> bool:
        """True if it has ended by its length for sure, though that was not read yet."""
        return self.sequence.pooling is not None or self.known + self.least >= self.sequence.processor.end - 1


@dataclass(frozen=True)
class Chunk:
    """A piece of a prompt: `count` positions from `start` on, by the program for `size` of them.

    Attributes:
        restored: the snapshot that the row's states begin with; `UNMAPPED` where they go on, or begin anew.
        kept: the snapshot that they become behind it; `UNMAPPED` for none.
    """

    running: RunningSequence
    start: int
    count: int
    size: int
    restored: int = UNMAPPED
    kept: int = UNMAPPED


class Scheduler:
    """The accounts of an engine.

    Attributes:
        waiting: sequences without a slot, the oldest first.
        slots: who runs in each.
        groups: of layers, the first being those that see every position.
        contexts: the drafter's that may fall behind; pages are kept as far as all of them hold them.
        snapshots: of states that lie in no page, with one of which every shared prefix ends; None where there are no states.
        preemptions, prefix_queries, prefix_hits: as `request.EngineStats` has them.
    """

    def __init__(
        self,
        table: ShapeTable,
        pages: Pages,
        context: int,
        prefix_cache: bool,
        contexts: Sequence[str] = (),
        windows: Sequence[PageGroup] = (),
        snapshots: Snapshots | None = None,
    ):
        """Args:
        windows: groups besides, of layers that see a window.
        """
        self.table = table
        self.context = context
        self.prefix_cache = prefix_cache
        self.contexts = contexts
        self.groups = [PageGroup(pages), *windows]
        self.snapshots = snapshots
        self.waiting: list[TokenSequence] = []
        self.waiting_tokens = 0
        self.slots: list[RunningSequence | None] = [None] * table.batches[-1]
        self.preemptions = self.prefix_queries = self.prefix_hits = 0

    @property
    def pages(self) -> Pages:
        """Accounts of the group of layers that see every position."""
        return self.groups[0].pages

    @property
    def running(self) -> list[RunningSequence]:
        """The oldest first."""
        return sorted((running for running in self.slots if running is not None), key=lambda running: running.sequence.number)

    @property
    def busy(self) -> bool:
        return bool(self.waiting) or any(self.slots)

    def wait(self, sequence: TokenSequence) -> None:
        """Puts a sequence into the queue, at the place of its number."""
        insort(self.waiting, sequence, key=lambda each: each.number)
        sequence.queued = sequence.length  # which may grow, while what it has in flight is read
        self.waiting_tokens += sequence.queued

    def drop(self, sequence: TokenSequence) -> None:
        """Takes a sequence out of the queue."""
        self.waiting.remove(sequence)
        self.waiting_tokens -= sequence.queued

    def remove(self, sequence: TokenSequence) -> None:
        """Takes a sequence out, wherever it is."""
        running = next((running for running in self.running if running.sequence is sequence), None)
        if running is None:  # it waits, perhaps since it had to give way
            self.drop(sequence)
        else:
            self.leave(running)

    def admit(self) -> list[RunningSequence]:
        """Gives slots and pages to those that wait, in order, as long as there are any."""
        admitted = []
        while self.waiting and None in self.slots:
            running = self.place(self.waiting[0], self.slots.index(None))
            if running is None:
                break
            self.drop(running.sequence)
            self.slots[running.slot] = running
            admitted.append(running)
        return admitted

    def place(self, sequence: TokenSequence, slot: int) -> RunningSequence | None:
        """A sequence in a slot, with pages for all that is committed of it, known ones shared; None where pages are lacking.

        Of layers with a window it has those of its first chunk. Each of the others is left a page to grow into, lest they have
        to give way at once.
        """
        length = sequence.length
        whole = self.prefix_cache and not sequence.needs_every_position
        keys, stops = self.prefix_of(sequence) if whole else ([], ())
        cached = len(keys) * self.pages.page_size
        rows = [group.shared(keys) for group in self.groups]
        begun = self.pages_for(min(length, cached + self.table.chunks[-1]))
        columns = [self.pages_for(length) if group.window is None else begun for group in self.groups]
        others = sum(running is not None and len(running.pages) < self.pages_for(self.context) for running in self.slots)
        if not self.has_room(rows, columns, others if any(self.slots) else 0):
            for group, row in zip(self.groups, rows, strict=True):
                group.release(row)
            return None
        for group, row, end in zip(self.groups, rows, columns, strict=True):
            group.grow(row, end)
        if whole:
            self.prefix_queries += length
            self.prefix_hits += cached
        held = dict.fromkeys(self.contexts, length - 1)
        if not sequence.handle.preemptions:
            sequence.handle.cached_tokens = cached
        snapshot = self.snapshots.acquire(keys[-1]) if keys and self.snapshots is not None else UNMAPPED
        prompt = length - 1 if sequence.pooling is None else length
        return RunningSequence(sequence, slot, rows, length - 1, cached, prompt, held=held, stops=stops, snapshot=snapshot)

    def prefix_of(self, sequence: TokenSequence) -> tuple[list[bytes], Sequence[int]]:
        """The keys of the pages that a sequence can share, and where its prefill stops for a snapshot.

        It does at its last full page, for those that repeat all of it, and behind the pages that it has in common with an
        earlier one, if there is none yet: where two texts part, others may.
        """
        size = self.pages.page_size
        # At least one position is computed: a drafter's context may begin with what comes of the last one.
        most = (sequence.length - 2) // size
        keys = partial(sequence.page_key, page_size=size)
        common = usable_prefix(self.groups, keys, most)
        if self.snapshots is None:
            return common, ()
        found = usable_prefix(self.groups, keys, most, self.snapshots.has)
        return found, self.snapshots.stops(len(found) * size, (len(common) * size, most * size))

    def has_room(self, rows: Sequence[RowPages], columns: Sequence[int], spare: int = 0) -> bool:
        """True if every group has pages for a row up to its column, and so many besides."""
        each = zip(self.groups, rows, columns, strict=True)
        return all(group.lacking(row, end) + spare <= group.pages.free for group, row, end in each)

    def pages_for(self, positions: int) -> int:
        return -(-min(positions, self.context) // self.pages.page_size)

    def next_chunks(self) -> list[Chunk]:
        """The next pieces of prompts, for which there are pages: where these are lacking, the newest sequences give way."""
        while chunks := self.planned_chunks():
            if all(self.make_room_for(chunk.running, self.pages_for(chunk.start + chunk.count)) for chunk in chunks):
                break
        # One that came first may have had to give way to one behind it.
        return [self.with_snapshots(chunk) for chunk in chunks if self.slots[chunk.running.slot] is chunk.running]

    def with_snapshots(self, chunk: Chunk) -> Chunk:
        """A chunk that is sent next, with the snapshots that it begins with and leaves."""
        running = chunk.running
        end = chunk.start + chunk.count
        if self.snapshots is None or end not in running.stops or self.snapshots.has(self.key_before(running, end)):
            return replace(chunk, restored=running.snapshot)
        return replace(chunk, restored=running.snapshot, kept=self.snapshots.take())

    def key_before(self, running: RunningSequence, end: int) -> bytes:
        """The key of the page that ends at a position."""
        return running.sequence.page_key(end // self.pages.page_size - 1, self.pages.page_size)

    def planned_chunks(self) -> list[Chunk]:
        """The next piece of the oldest prompt that is not computed yet, or of several that are short, if that is less work."""
        batch = [running for running in self.running if not running.prefilled]
        if not batch:
            return []
        rows, size = self.table.together
        short = [running for running in batch if running.due <= size][:rows]
        if short[:1] == batch[:1] and self.computed_together([running.due for running in short]):
            return [Chunk(running, running.filled, running.due, size) for running in short]
        left = batch[0].due
        _, size = next(self.table.prefill_plan(max(1, left)))
        return [Chunk(batch[0], batch[0].filled, min(size, left), size)]

    def computed_together(self, lengths: Sequence[int]) -> bool:
        """True if it is less work to compute the first short ones of prompts of these lengths in one piece than apart."""
        rows, size = self.table.together
        short = [length for length in lengths if length <= size][:rows]
        apart = sum(chunk + OVERHEAD for length in short for _, chunk in self.table.prefill_plan(max(1, length)))
        return len(short) > 1 and rows * size + OVERHEAD < apart

    def on_prefilled(self, chunk: Chunk) -> None:
        """Takes in that a chunk was sent. What comes later runs behind it, so its pages may be found from now on."""
        running = chunk.running
        running.begun = True
        running.filled += chunk.count
        self.release_snapshot(running)
        self.publish(running, min(running.filled, running.sequence.length - 1))
        if self.snapshots is not None and chunk.kept != UNMAPPED:
            self.snapshots.publish(chunk.kept, self.key_before(running, running.filled))

    def release_snapshot(self, running: RunningSequence) -> None:
        """Gives up the snapshot that a sequence was to begin with: it has, or it will not."""
        if self.snapshots is not None and running.snapshot != UNMAPPED:
            self.snapshots.release(running.snapshot)
            running.snapshot = UNMAPPED

    def runnable(self) -> list[RunningSequence]:
        """Those that rounds can run for, the oldest first."""
        return [running for running in self.running if running.prefilled and not running.ending]

    @property
    def hurried(self) -> bool:
        """True if somebody waits for the end of the next dispatch: for a place, for a prompt, or for its first rounds."""
        batch = [running for running in self.slots if running is not None]
        waits = (not running.prefilled or not (running.most or running.sequence.processor.tokens) for running in batch)
        return bool(self.waiting) or any(waits)

    def reach(self, running: RunningSequence, rounds: int, width: int) -> int:
        """The positions that so many more rounds may write: those that they may commit, and a block behind them."""
        committed = min(running.known + running.most + rounds * width, running.sequence.processor.end - 1)
        return min(committed + width, self.context)

    def make_room(self, batch: Sequence[RunningSequence], rounds: int, width: int) -> tuple[list[RunningSequence], int]:
        """Pages for rounds of these; where there are too few, fewer rounds, and then fewer sequences.

        Returns:
            those that may run, and for how many rounds. The others are back in the queue.
        """
        for running in batch:
            self.slide(running)
        while rounds > 1 and not self.all_have_room(batch, rounds, width):
            rounds //= 2
        kept = [
            running
            for running in sorted(batch, key=lambda each: each.sequence.number)
            if self.make_room_for(running, self.pages_for(self.reach(running, rounds, width)))
        ]
        return [running for running in kept if self.slots[running.slot] is running], rounds

    def slide(self, running: RunningSequence) -> None:
        """Gives up what a sequence's queries see no more."""
        for group, row in zip(self.groups, running.groups, strict=True):
            group.slide(row, running.oldest)

    def make_room_for(self, running: RunningSequence, columns: int) -> bool:
        """Pages up to a column, in every group; the newest give theirs up for it. False if it had to give way itself."""
        self.slide(running)
        while self.slots[running.slot] is running:
            if self.has_room(running.groups, [columns] * len(self.groups)):
                for group, row in zip(self.groups, running.groups, strict=True):
                    group.grow(row, columns)
                return True
            self.preempt(self.running[-1])
        return False

    def all_have_room(self, batch: Sequence[RunningSequence], rounds: int, width: int) -> bool:
        """True if there are the pages that these lack for so many more rounds."""
        columns = [self.pages_for(self.reach(running, rounds, width)) for running in batch]
        return all(
            sum(group.lacking(running.groups[n], end) for running, end in zip(batch, columns, strict=True)) <= group.pages.free
            for n, group in enumerate(self.groups)
        )

    def on_dispatched(self, batch: Sequence[RunningSequence], rounds: int, width: int) -> None:
        """Takes in that rounds were sent."""
        for running in batch:
            running.least = running.least + rounds
            running.most = running.most + rounds * width

    def on_completed(
        self, running: RunningSequence, rounds: int, width: int, committed: int, drafter: str | None = None
    ) -> None:
        """Takes in what rounds that were sent have committed for one of them.

        Args:
            drafter: whose context the rounds extended.
        """
        running.least = running.least - rounds
        running.most = running.most - rounds * width
        running.known += committed
        if drafter in running.held:
            running.held[drafter] = running.known

    def preempt(self, running: RunningSequence) -> None:
        """Takes a sequence's slot and pages away and puts it back into the queue."""
        self.leave(running)
        running.sequence.handle.preemptions += 1
        self.preemptions += 1
        if running.sequence.wants_prompt_logprobs:
            running.sequence.prompt_logprobs = []  # from the beginning again
        running.sequence.pooled = []
        self.wait(running.sequence)

    def leave(self, running: RunningSequence) -> None:
        """Frees a slot and gives up its pages, of which the full ones may be found by others."""
        self.publish(
            running, min([running.filled if not running.prefilled else running.sequence.length - 1, *running.held.values()])
        )
        self.release_snapshot(running)
        self.slots[running.slot] = None
        for group, row in zip(self.groups, running.groups, strict=True):
            group.release(row)

    def publish(self, running: RunningSequence, until: int) -> None:
        """Lets others find the full pages before a position."""
        size = self.pages.page_size
        for group, row in zip(self.groups, running.groups, strict=True) if self.prefix_cache else ():
            group.publish(row, until // size, lambda page: running.sequence.page_key(page, size))

    def forget(self) -> list[TokenSequence]:
        """Puts all that run back into the queue and keeps no page: what the device held is lost."""
        batch = self.running
        for running in batch:
            for row in running.groups:
                row.published = len(row.columns)  # nothing of it is to be found
            self.preempt(running)
        for group in self.groups:
            group.pages.forget()
        if self.snapshots is not None:
            self.snapshots.forget()
        return [running.sequence for running in batch]

    def stats(self) -> dict[str, int]:
        """Those of `EngineStats` that are read off here, but for the queue's."""
        pages = self.pages
        return {
            "running": sum(running is not None for running in self.slots),
            "slots": len(self.slots),
            "pages": pages.count,
            "pages_used": pages.used,
            "pages_cached": pages.cached,
            "prefix_queries": self.prefix_queries,
            "prefix_hits": self.prefix_hits,
            "preemptions": self.preemptions,
        }
