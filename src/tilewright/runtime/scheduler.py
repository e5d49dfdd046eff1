"""Scheduler: the request queue, the slots and their pages. Host code only; every engine has one, whatever its decoding.

Requests are served in order of arrival. Where pages run out, the newest running sequence is preempted and returns to the head
of the queue. Its tokens are computed again later. Its randomness depends only on its seed and positions, so the output does not
change if a row's results do not depend on the rows beside it (`kernels.operations.is_batch_invariant`).
"""

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tilewright.kernels.operations import UNMAPPED
from tilewright.models.config import Canvas, MaskedBlocks
from tilewright.runtime.constraints import ConstraintState
from tilewright.runtime.groups import PageGroup, RowPages, usable_prefix
from tilewright.runtime.output import OutputProcessor, Result
from tilewright.runtime.pages import FIRST, Pages, page_key
from tilewright.runtime.pooling import PooledChunk, Pooling
from tilewright.runtime.request import Listener, RequestHandle
from tilewright.runtime.shapes import ShapeTable, prefill_plan
from tilewright.runtime.snapshots import OVERHEAD, Snapshots


@dataclass(eq=False)
class TokenSequence:
    """Request that an engine has accepted, in a slot or in the queue.

    Attributes:
        processor: output processor with the text so far.
        faults: number of failed dispatches that it was in.
        chooser_state: state of the chooser of rounds.
        queued: number of tokens when it entered the queue.
        prompt_logprobs: results of prefill so far: a program's log-probabilities, still on the device, the row there, and the
            number of positions. None once they were delivered, or if the request wants none.
        keys: prefix-cache keys of its full pages, computed on demand and once, since committed tokens do not change.
        constraint: state in its constraint behind the last token that was read; None without a constraint.
        adapter: number of its low-rank adapter, 0 for none. Sequences with different adapters share no pages.
        pooling: pooling of a request for an embedding; None for any other.
        pooled: computed chunks of its prompt.
        denoising: denoising options of its blocks; None for a request that is not denoised.
        room: positions that it reserves from the start, computed in every dispatch without a prefill; 0 if its prompt is
            prefilled and it gets pages as it grows.
    """

    handle: RequestHandle
    listener: Listener
    processor: OutputProcessor
    faults: int = 0
    chooser_state: Any = None
    queued: int = 0
    prompt_logprobs: list[tuple[Any, int, int]] | None = None
    keys: list[bytes] = field(default_factory=list)
    constraint: ConstraintState | None = None
    adapter: int = 0
    pooling: Pooling | None = None
    pooled: list[PooledChunk] = field(default_factory=list)
    denoising: Any = None
    room: int = 0

    @property
    def number(self) -> int:
        return self.handle.number

    @property
    def wants_logprobs(self) -> bool:
        """True if the request asks for log-probabilities."""
        return self.handle.request.logprobs is not None

    @property
    def wants_prompt_logprobs(self) -> bool:
        """True if log-probabilities of the prompt are still missing."""
        count = sum(count for _, _, count in self.prompt_logprobs or ())
        return self.prompt_logprobs is not None and count < len(self.processor.prompt) - 1

    @property
    def needs_every_position(self) -> bool:
        """True if prefill must compute the whole prompt in spite of cached pages, because each position has an output."""
        return self.wants_prompt_logprobs or self.pooling == "mean"

    @property
    def alternatives(self) -> int:
        """Number of alternatives whose log-probabilities come with each token."""
        return self.handle.request.logprobs or 0

    @property
    def length(self) -> int:
        """Number of committed tokens."""
        return len(self.processor.prompt) + len(self.processor.tokens)

    @property
    def tokens(self) -> list[int]:
        return [*self.processor.prompt, *self.processor.tokens]

    def result(self) -> Result:
        """Returns the result so far."""
        return replace(self.processor.result(), passes=self.handle.steps)

    def page_key(self, page: int, page_size: int) -> bytes:
        """Returns the prefix-cache key of one of its full pages. The token behind the page must be committed."""
        prompt = self.processor.prompt
        new = self.processor.tokens
        first = page_key(FIRST, [self.adapter]) if self.adapter else FIRST
        while len(self.keys) <= page:
            start = len(self.keys) * page_size
            stop = start + page_size + 1
            tokens = [*prompt[start:stop], *new[max(0, start - len(prompt)) : max(0, stop - len(prompt))]]
            assert len(tokens) == stop - start, "a page's key needs all of its tokens and the next one"
            self.keys.append(page_key(self.keys[-1] if self.keys else first, tokens))
        return self.keys[page]


@dataclass(eq=False)
class RunningSequence:
    """Sequence in a slot.

    Attributes:
        groups: its pages in each group of layers.
        last_position: position of its last committed token, from the dispatches that were read.
        least, most: bounds of the tokens that the dispatches in flight commit, unless the sequence ends.
        filled: positions whose keys and values the dispatched prefills compute.
        prompt: positions that prefill computes: all before the last token; for an embedding, the last one, too; all finished
            blocks, where blocks are denoised.
        started: whether a chunk was dispatched. The first chunk, which may be empty, also initialises the slot.
        context_positions: number of positions in each of the drafter's contexts that may lag behind.
        row: state of the decoding, which alone changes it; the scheduler alone changes everything else.
        stops: positions before `prompt` at which a chunk ends, for a snapshot of the states.
        snapshot: snapshot that its states will start from; `UNMAPPED` for none.
    """

    sequence: TokenSequence
    slot: int
    groups: list[RowPages]
    last_position: int
    filled: int
    prompt: int
    started: bool = False
    least: int = 0
    most: int = 0
    context_positions: dict[str, int] = field(default_factory=dict)
    row: Any = None
    stops: Sequence[int] = ()
    snapshot: int = UNMAPPED

    @property
    def pages(self) -> list[int]:
        """Page numbers of its positions, in order, in the group of layers without a window."""
        return self.groups[0].columns

    @property
    def prefilled(self) -> bool:
        return self.started and self.filled >= self.prompt

    @property
    def remaining(self) -> int:
        """Positions that prefill still computes before the next stop."""
        return next((stop for stop in self.stops if stop > self.filled), self.prompt) - self.filled

    @property
    def oldest(self) -> int:
        """First position of any later query."""
        return self.last_position if self.prefilled else self.filled

    @property
    def ending(self) -> bool:
        """True if it reaches its length limit with the dispatches in flight."""
        return self.sequence.pooling is not None or self.last_position + self.least >= self.sequence.processor.end - 1


@dataclass(frozen=True)
class Chunk:
    """Piece of a prompt: `count` positions from `start` on, run by the program for `size` positions.

    Attributes:
        restored: snapshot that the row's states start from; `UNMAPPED` if they continue, or start empty.
        saved: snapshot that receives the states behind the chunk; `UNMAPPED` for none.
    """

    running: RunningSequence
    start: int
    count: int
    size: int
    restored: int = UNMAPPED
    saved: int = UNMAPPED


class Scheduler:
    """Queue, slots and pages of an engine.

    Attributes:
        waiting: sequences without a slot, the oldest first.
        slots: the sequence in each slot; None for a free slot.
        groups: groups of layers; the first has no window.
        contexts: names of the drafter's contexts that may lag behind. Pages are published only as far as all of them reach.
        snapshots: snapshots of states outside of pages, with which every shared prefix ends; None without such states.
        chunks, together: lengths of prefill chunks, and rows and length of the program for several prompts, that may run now;
            those of the table, unless some programs are still missing.
        blocks: the blocks that are denoised; None where tokens follow one another. Pages and chunks hold whole blocks, unless
            finished tokens see only those before them.
        preemptions, prefix_queries, prefix_hits: see `request.EngineStats`.
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
        blocks: MaskedBlocks | Canvas | None = None,
    ):
        """Args:
        windows: the further groups, of layers with a window.
        """
        self.table = table
        self.chunks = table.chunks
        self.together = table.together
        self.context = context
        self.prefix_cache = prefix_cache
        self.contexts = contexts
        self.blocks = blocks
        self.groups = [PageGroup(pages), *windows]
        self.snapshots = snapshots
        self.waiting: list[TokenSequence] = []
        self.waiting_tokens = 0
        self.slots: list[RunningSequence | None] = [None] * table.batches[-1]
        self.preemptions = self.prefix_queries = self.prefix_hits = 0

    @property
    def pages(self) -> Pages:
        """Pages of the group of layers without a window."""
        return self.groups[0].pages

    @property
    def running(self) -> list[RunningSequence]:
        """Sequences in slots, the oldest first."""
        return sorted((running for running in self.slots if running is not None), key=lambda running: running.sequence.number)

    @property
    def busy(self) -> bool:
        return bool(self.waiting) or any(self.slots)

    def wait(self, sequence: TokenSequence) -> None:
        """Inserts a sequence into the queue, in the order of the numbers."""
        insort(self.waiting, sequence, key=lambda each: each.number)
        sequence.queued = sequence.length  # the length may grow while dispatches in flight are read
        self.waiting_tokens += sequence.queued

    def drop(self, sequence: TokenSequence) -> None:
        """Removes a sequence from the queue."""
        self.waiting.remove(sequence)
        self.waiting_tokens -= sequence.queued

    def remove(self, sequence: TokenSequence) -> None:
        """Removes a sequence from its slot or from the queue."""
        running = next((running for running in self.running if running.sequence is sequence), None)
        if running is None:
            self.drop(sequence)
        else:
            self.leave(running)

    def admit(self, servable: Callable[[TokenSequence], bool] = lambda sequence: True) -> list[RunningSequence]:
        """Gives slots and pages to waiting sequences, in order, until slots or pages run out.

        Args:
            servable: whether the programs for a sequence exist; the others stay in the queue, and later ones pass them.
        """
        admitted = []
        for sequence in [sequence for sequence in self.waiting if servable(sequence)]:
            if None not in self.slots:
                break
            running = self.place(sequence, self.slots.index(None))
            if running is None:
                break
            self.drop(running.sequence)
            self.slots[running.slot] = running
            admitted.append(running)
        return admitted

    def place(self, sequence: TokenSequence, slot: int) -> RunningSequence | None:
        """Allocates pages for all committed tokens of a sequence, and shares cached ones. Returns None if pages are lacking.

        In layers with a window it allocates the pages of the first chunk only. A free page is left for each running sequence
        that may grow, so that none of them is preempted at once.
        """
        length = sequence.length
        whole = self.prefix_cache and not sequence.needs_every_position
        keys, stops = self.prefix_of(sequence) if whole else ([], ())
        cached = len(keys) * self.pages.page_size
        rows = [group.shared(keys) for group in self.groups]
        first_chunk = self.pages_for(min(length, cached + self.table.chunks[-1]))
        end = max(length, sequence.room)
        columns = [self.pages_for(end) if group.window is None else first_chunk for group in self.groups]
        growing = sum(running is not None and self.may_grow(running) for running in self.slots)
        if not self.has_room(rows, columns, growing if any(self.slots) else 0):
            for group, row in zip(self.groups, rows, strict=True):
                group.release(row)
            return None
        for group, row, end in zip(self.groups, rows, columns, strict=True):
            group.grow(row, end)
        if whole:
            self.prefix_queries += length
            self.prefix_hits += cached
        context_positions = dict.fromkeys(self.contexts, length - 1)
        if not sequence.handle.preemptions:
            sequence.handle.cached_tokens = cached
        snapshot = self.snapshots.acquire(keys[-1]) if keys and self.snapshots is not None else UNMAPPED
        prompt = 0 if sequence.room else self.prefilled_positions(length) if sequence.pooling is None else length
        started = sequence.room > 0
        return RunningSequence(
            sequence,
            slot,
            rows,
            length - 1,
            cached,
            prompt,
            started,
            context_positions=context_positions,
            stops=stops,
            snapshot=snapshot,
        )

    def prefilled_positions(self, length: int) -> int:
        """Returns how many positions of a sequence of this length prefill computes before its tokens are generated."""
        return length - 1 if self.blocks is None else self.blocks.first_block(length)[0]

    def may_grow(self, running: RunningSequence) -> bool:
        """True if a sequence may need more pages than it has."""
        return not running.sequence.room and len(running.pages) < self.pages_for(self.context)

    def prefix_of(self, sequence: TokenSequence) -> tuple[list[bytes], Sequence[int]]:
        """Returns the keys of the cached pages that a sequence can share, and where its prefill stops for a snapshot.

        It stops at the last full page, for requests that repeat the whole prompt, and behind the pages that it has in common
        with an earlier sequence, if that position has no snapshot: further requests may diverge there, too.
        """
        size = self.pages.page_size
        # At least one position is computed, since a drafter's context may start from the result of the last one.
        most = (sequence.length - 2) // size
        keys = partial(sequence.page_key, page_size=size)
        common = usable_prefix(self.groups, keys, most)
        if self.snapshots is None:
            return common, ()
        found = usable_prefix(self.groups, keys, most, self.snapshots.has)
        return found, self.snapshots.stops(len(found) * size, (len(common) * size, most * size))

    def has_room(self, rows: Sequence[RowPages], columns: Sequence[int], spare: int = 0) -> bool:
        """True if every group has the pages that a row lacks up to its column, and `spare` more."""
        each = zip(self.groups, rows, columns, strict=True)
        return all(group.lacking(row, end) + spare <= group.pages.free for group, row, end in each)

    def pages_for(self, positions: int) -> int:
        return -(-min(positions, self.context) // self.pages.page_size)

    def next_chunks(self) -> list[Chunk]:
        """Returns the next prefill chunks, with pages for them; preempts the newest sequences where pages are lacking."""
        while chunks := self.planned_chunks():
            if all(self.make_room_for(chunk.running, self.pages_for(chunk.start + chunk.count)) for chunk in chunks):
                break
        # A chunk's own sequence may have been preempted for another chunk.
        return [self.with_snapshots(chunk) for chunk in chunks if self.slots[chunk.running.slot] is chunk.running]

    def with_snapshots(self, chunk: Chunk) -> Chunk:
        """Returns a chunk that is dispatched next, with the snapshots that it restores and takes."""
        running = chunk.running
        end = chunk.start + chunk.count
        if self.snapshots is None or end not in running.stops or self.snapshots.has(self.key_before(running, end)):
            return replace(chunk, restored=running.snapshot)
        return replace(chunk, restored=running.snapshot, saved=self.snapshots.take())

    def key_before(self, running: RunningSequence, end: int) -> bytes:
        """Returns the key of the page that ends at a position."""
        return running.sequence.page_key(end // self.pages.page_size - 1, self.pages.page_size)

    def planned_chunks(self) -> list[Chunk]:
        """Returns the next chunk of the oldest unfinished prompt, or of several short prompts where that costs less."""
        batch = [running for running in self.running if not running.prefilled]
        if not batch:
            return []
        rows, size = self.together
        short = [running for running in batch if running.remaining <= size][:rows]
        if short[:1] == batch[:1] and self.computed_together([running.remaining for running in short]):
            return [Chunk(running, running.filled, running.remaining, size) for running in short]
        left = batch[0].remaining
        _, size = next(prefill_plan(max(1, left), self.chunks))
        return [Chunk(batch[0], batch[0].filled, min(size, left), size)]

    def computed_together(self, lengths: Sequence[int]) -> bool:
        """True if one prefill of the first short prompts of these lengths costs less than separate ones."""
        rows, size = self.together
        short = [length for length in lengths if length <= size][:rows]
        apart = sum(chunk + OVERHEAD for length in short for _, chunk in prefill_plan(max(1, length), self.chunks))
        return len(short) > 1 and rows * size + OVERHEAD < apart

    def on_prefilled(self, chunk: Chunk) -> None:
        """Records a dispatched chunk. Later dispatches run behind it, so its full pages are published at once."""
        running = chunk.running
        running.started = True
        running.filled += chunk.count
        self.release_snapshot(running)
        self.publish(running, min(running.filled, running.sequence.length - 1))
        if self.snapshots is not None and chunk.saved != UNMAPPED:
            self.snapshots.publish(chunk.saved, self.key_before(running, running.filled))

    def release_snapshot(self, running: RunningSequence) -> None:
        """Releases the snapshot that a sequence was to start from."""
        if self.snapshots is not None and running.snapshot != UNMAPPED:
            self.snapshots.release(running.snapshot)
            running.snapshot = UNMAPPED

    def runnable(self) -> list[RunningSequence]:
        """Returns the sequences that rounds can run for, the oldest first."""
        return [running for running in self.running if running.prefilled and not running.ending]

    @property
    def hurried(self) -> bool:
        """True if a request waits for the next dispatch to end: for a slot, for its prefill, or for its first rounds."""
        batch = [running for running in self.slots if running is not None]
        waits = (not running.prefilled or not (running.most or running.sequence.processor.tokens) for running in batch)
        return bool(self.waiting) or any(waits)

    def reach(self, running: RunningSequence, rounds: int, width: int) -> int:
        """Returns the positions that further rounds may write: the tokens that they may commit, and a block behind them."""
        committed = min(running.last_position + running.most + rounds * width, running.sequence.processor.end - 1)
        return min(committed + width, self.context)

    def make_room(self, batch: Sequence[RunningSequence], rounds: int, width: int) -> tuple[list[RunningSequence], int]:
        """Allocates pages for rounds of these sequences; if pages are lacking, runs fewer rounds, and then fewer sequences.

        Returns:
            the sequences that can run, and the number of rounds. The other sequences are back in the queue.
        """
        for running in batch:
            self.slide(running)
        while rounds > 1 and not self.all_have_room(batch, rounds, width):
            rounds //= 2
        fitting = [
            running
            for running in sorted(batch, key=lambda each: each.sequence.number)
            if self.make_room_for(running, self.pages_for(self.reach(running, rounds, width)))
        ]
        return [running for running in fitting if self.slots[running.slot] is running], rounds

    def slide(self, running: RunningSequence) -> None:
        """Releases the pages that no later query of a sequence attends to."""
        for group, row in zip(self.groups, running.groups, strict=True):
            group.slide(row, running.oldest)

    def make_room_for(self, running: RunningSequence, columns: int) -> bool:
        """Allocates pages up to a column in every group, preempting the newest sequences. False if this one was preempted."""
        self.slide(running)
        while self.slots[running.slot] is running:
            if self.has_room(running.groups, [columns] * len(self.groups)):
                for group, row in zip(self.groups, running.groups, strict=True):
                    group.grow(row, columns)
                return True
            self.preempt(self.running[-1])
        return False

    def all_have_room(self, batch: Sequence[RunningSequence], rounds: int, width: int) -> bool:
        """True if there are enough free pages for that many more rounds of these sequences."""
        columns = [self.pages_for(self.reach(running, rounds, width)) for running in batch]
        return all(
            sum(group.lacking(running.groups[n], end) for running, end in zip(batch, columns, strict=True)) <= group.pages.free
            for n, group in enumerate(self.groups)
        )

    def on_dispatched(self, batch: Sequence[RunningSequence], least: int, most: int) -> None:
        """Records a dispatch that commits at least `least` and at most `most` tokens for each row."""
        for running in batch:
            running.least += least
            running.most += most

    def on_completed(self, running: RunningSequence, least: int, most: int, committed: int, drafter: str | None = None) -> None:
        """Records how many tokens a dispatch has committed for one of its rows.

        Args:
            least, most: the bounds given to `on_dispatched`.
            drafter: the drafter whose context the dispatch extended.
        """
        running.least -= least
        running.most -= most
        running.last_position += committed
        if drafter in running.context_positions:
            running.context_positions[drafter] = running.last_position

    def preempt(self, running: RunningSequence) -> None:
        """Takes a sequence's slot and pages away, and returns it to the queue."""
        self.leave(running)
        running.sequence.handle.preemptions += 1
        self.preemptions += 1
        if running.sequence.wants_prompt_logprobs:
            running.sequence.prompt_logprobs = []  # prefill starts again
        running.sequence.pooled = []
        self.wait(running.sequence)

    def leave(self, running: RunningSequence) -> None:
        """Frees a slot and its pages; its full pages are published."""
        # A block's keys and values are final one pass after its tokens are delivered. A page may hold a part of a causal block.
        pending = self.blocks.length if self.blocks is not None and self.blocks.causal else 1
        computed = max(0, running.sequence.length - pending) if running.prefilled else running.filled
        self.publish(running, min([computed, *running.context_positions.values()]))
        self.release_snapshot(running)
        self.slots[running.slot] = None
        for group, row in zip(self.groups, running.groups, strict=True):
            group.release(row)

    def publish(self, running: RunningSequence, until: int) -> None:
        """Publishes the full pages before a position in the prefix cache."""
        size = self.pages.page_size
        for group, row in zip(self.groups, running.groups, strict=True) if self.prefix_cache else ():
            group.publish(row, until // size, lambda page: running.sequence.page_key(page, size))

    def forget(self) -> list[TokenSequence]:
        """Returns all running sequences to the queue and drops all cached pages, because the device's state is lost."""
        batch = self.running
        for running in batch:
            for row in running.groups:
                row.published = len(row.columns)  # so that preemption publishes none of its pages
            self.preempt(running)
        for group in self.groups:
            group.pages.forget()
        if self.snapshots is not None:
            self.snapshots.forget()
        return [running.sequence for running in batch]

    def stats(self) -> dict[str, int]:
        """Returns the scheduler's counters of `EngineStats`, without those of the queue."""
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
