"""Who runs: the queue, the slots and their pages. Plain host code without a device, told what happened and asked what is next.

Requests are served in the order in which they came. Where pages run out, the newest of those that run gives its own up and goes
back to the head of the queue; its tokens are computed again later, and as randomness belongs to its seed and positions it goes
on as it would have, wherever a row's results do not depend on the rows beside it (`kernels.operations.is_batch_invariant`).
"""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tilewright.runtime.pages import FIRST, Pages, page_key
from tilewright.runtime.service import Taken
from tilewright.runtime.shapes import ShapeTable

OVERHEAD = 64
"""What a prefill takes besides its positions, in positions: weights are read, and a dispatch is sent."""


@dataclass(eq=False)
class Job(Taken):
    """A request on its way, in a slot or not.

    Attributes:
        followed: what the one who chooses rounds keeps of it.
        queued: tokens that it was queued with.
        prompt_scores: what prefill said of the prompt, as far as it went: the scores of a program, still on the device, its row
            there, and for how many positions. None once it was told, or where nobody asks.
        keys: of its full pages, as far as they were needed. What is settled does not change, so each is computed once.
    """

    followed: Any = None
    queued: int = 0
    prompt_scores: list[tuple[Any, int, int]] | None = None
    keys: list[bytes] = field(default_factory=list)

    @property
    def scored(self) -> bool:
        """True if the request asks for log-probabilities."""
        return self.handle.request.logprobs is not None

    @property
    def scoring(self) -> bool:
        """True if prefill has still to score some of the prompt."""
        scored = sum(count for _, _, count in self.prompt_scores or ())
        return self.prompt_scores is not None and scored < len(self.processor.prompt) - 1

    @property
    def alternatives(self) -> int:
        """Number of alternatives that come with each token."""
        return self.handle.request.logprobs or 0

    @property
    def length(self) -> int:
        """Tokens that are settled."""
        return len(self.processor.prompt) + len(self.processor.tokens)

    @property
    def tokens(self) -> list[int]:
        return [*self.processor.prompt, *self.processor.tokens]

    def page_key(self, page: int, page_size: int) -> bytes:
        """The key of one of its full pages, behind which a token has to be settled."""
        prompt, new = self.processor.prompt, self.processor.tokens
        while len(self.keys) <= page:
            start = len(self.keys) * page_size
            stop = start + page_size + 1
            held = [*prompt[start:stop], *new[max(0, start - len(prompt)) : max(0, stop - len(prompt))]]
            assert len(held) == stop - start, "a page is found by what is settled"
            self.keys.append(page_key(self.keys[-1] if self.keys else FIRST, held))
        return self.keys[page]


@dataclass(eq=False)
class Seat:
    """A job in a slot.

    Attributes:
        pages: of its positions, in order.
        known: the position of its last settled token, as far as dispatches were read.
        least: how many tokens those that were not read yet settle at least, unless it ends; `most` at most.
        filled: positions whose keys and values are computed, by prefills that were sent.
        prompt: positions that prefill computes: all before the known one.
        begun: whether a chunk was sent; the first one, which may have no position at all, also puts the job into its slot.
        kept: of its pages, from the first, those that others may find.
        held: how many positions each of the drafter's contexts holds that may fall behind.
    """

    job: Job
    slot: int
    pages: list[int]
    known: int
    filled: int
    prompt: int
    begun: bool = False
    least: int = 0
    most: int = 0
    kept: int = 0
    held: dict[str, int] = field(default_factory=dict)

    @property
    def prefilled(self) -> bool:
        return self.begun and self.filled >= self.prompt

    @property
    def ending(self) -> bool:
        """True if it has ended by its length for sure, though that was not read yet."""
        return self.known + self.least >= self.job.processor.end - 1


@dataclass(frozen=True)
class Chunk:
    """A piece of a prompt: `count` positions from `start` on, by the program for `size` of them."""

    seat: Seat
    start: int
    count: int
    size: int


class Scheduler:
    """The accounts of an engine.

    Attributes:
        waiting: jobs without a slot, the oldest first.
        seats: by slot.
        pages: of the pool.
        contexts: the drafter's that may fall behind; pages are kept as far as all of them hold them.
        preemptions, prefix_queries, prefix_hits: as `request.EngineStats` has them.
    """

    def __init__(
        self, table: ShapeTable, pages: Pages, context: int, prefix_cache: bool, contexts: Sequence[str] = ()
    ):  # fmt: skip
        self.table, self.pages, self.context, self.prefix_cache, self.contexts = table, pages, context, prefix_cache, contexts
        self.waiting: list[Job] = []
        self.waiting_tokens = 0
        self.seats: list[Seat | None] = [None] * table.batches[-1]
        self.preemptions = self.prefix_queries = self.prefix_hits = 0

    @property
    def seated(self) -> list[Seat]:
        """The oldest first."""
        return sorted((seat for seat in self.seats if seat is not None), key=lambda seat: seat.job.number)

    @property
    def busy(self) -> bool:
        return bool(self.waiting) or any(self.seats)

    def wait(self, job: Job) -> None:
        """Puts a job into the queue, at the place of its number."""
        insort(self.waiting, job, key=lambda each: each.number)
        job.queued = job.length  # which may grow, while what it has in flight is read
        self.waiting_tokens += job.queued

    def drop(self, job: Job) -> None:
        """Takes a job out of the queue."""
        self.waiting.remove(job)
        self.waiting_tokens -= job.queued

    def admit(self) -> list[Seat]:
        """Gives slots and pages to those that wait, in order, as long as there are any."""
        admitted = []
        while self.waiting and None in self.seats:
            seat = self.seat(self.waiting[0], self.seats.index(None))
            if seat is None:
                break
            self.drop(seat.job)
            self.seats[seat.slot] = seat
            admitted.append(seat)
        return admitted

    def seat(self, job: Job, slot: int) -> Seat | None:
        """A seat for a job with pages for all that is settled of it, those that are known shared; None without the pages.

        Each of the others is left a page to grow into, lest they have to give way at once.
        """
        length, size = job.length, self.pages.page_size
        whole = self.prefix_cache and not job.scoring
        # At least one position is computed: a drafter's context may begin with what comes of the last one.
        shared = self.pages.find(job.page_key(page, size) for page in range((length - 2) // size)) if whole else []
        needed = self.pages_for(length) - len(shared)
        others = sum(seat is not None and len(seat.pages) < self.pages_for(self.context) for seat in self.seats)
        taken = self.pages.take(needed) if needed + others <= self.pages.free or not any(self.seats) else None
        if taken is None:
            self.pages.release(shared)
            return None
        cached = len(shared) * size
        if whole:
            self.prefix_queries += length
            self.prefix_hits += cached
        held = dict.fromkeys(self.contexts, length - 1)
        if not job.handle.preemptions:
            job.handle.cached_tokens = cached
        return Seat(job, slot, [*shared, *taken], length - 1, cached, length - 1, kept=len(shared), held=held)

    def pages_for(self, positions: int) -> int:
        return -(-min(positions, self.context) // self.pages.page_size)

    def next_chunks(self) -> list[Chunk]:
        """The next piece of the oldest prompt that is not computed yet, or of several that are short, if that is less work."""
        seats = [seat for seat in self.seated if not seat.prefilled]
        if not seats:
            return []
        rows, size = self.table.together
        short = [seat for seat in seats if seat.prompt - seat.filled <= size][:rows]
        if short[:1] == seats[:1] and self.computed_together([seat.prompt - seat.filled for seat in short]):
            return [Chunk(seat, seat.filled, seat.prompt - seat.filled, size) for seat in short]
        left = seats[0].prompt - seats[0].filled
        _, size = next(self.table.prefill_plan(max(1, left)))
        return [Chunk(seats[0], seats[0].filled, min(size, left), size)]

    def computed_together(self, lengths: Sequence[int]) -> bool:
        """True if it is less work to compute the first short ones of prompts of these lengths in one piece than apart."""
        rows, size = self.table.together
        short = [length for length in lengths if length <= size][:rows]
        apart = sum(chunk + OVERHEAD for length in short for _, chunk in self.table.prefill_plan(max(1, length)))
        return len(short) > 1 and rows * size + OVERHEAD < apart

    def filled(self, chunk: Chunk) -> None:
        """Takes in that a chunk was sent. What comes later runs behind it, so its pages may be found from now on."""
        chunk.seat.begun = True
        chunk.seat.filled += chunk.count
        self.keep(chunk.seat, chunk.seat.filled)

    def runnable(self) -> list[Seat]:
        """Those that rounds can run for, the oldest first."""
        return [seat for seat in self.seated if seat.prefilled and not seat.ending]

    @property
    def hurried(self) -> bool:
        """True if somebody waits for the end of the next dispatch: for a place, for a prompt, or for its first rounds."""
        seats = [seat for seat in self.seats if seat is not None]
        waits = (not seat.prefilled or not (seat.most or seat.job.processor.tokens) for seat in seats)
        return bool(self.waiting) or any(waits)

    def reach(self, seat: Seat, rounds: int, width: int) -> int:
        """The positions that a seat may write in so many more rounds: those that it may settle, and a block behind them."""
        settled = min(seat.known + seat.most + rounds * width, seat.job.processor.end - 1)
        return min(settled + width, self.context)

    def make_room(self, seats: Sequence[Seat], rounds: int, width: int) -> tuple[list[Seat], int]:
        """Pages for rounds of some seats; where there are too few, fewer rounds, and then fewer seats.

        Returns:
            the seats that may run, and for how many rounds. The others are back in the queue.
        """
        while rounds > 1 and self.lacking(seats, rounds, width) > self.pages.free:
            rounds //= 2
        kept: list[Seat] = []
        for seat in sorted(seats, key=lambda each: each.job.number):
            while self.seats[seat.slot] is seat:
                taken = self.pages.take(self.lacking([seat], rounds, width))
                if taken is not None:
                    seat.pages += taken
                    kept.append(seat)
                    break
                self.preempt(self.seated[-1])
        return [seat for seat in kept if self.seats[seat.slot] is seat], rounds

    def lacking(self, seats: Sequence[Seat], rounds: int, width: int) -> int:
        """Number of pages that seats lack for so many more rounds."""
        return sum(max(0, self.pages_for(self.reach(seat, rounds, width)) - len(seat.pages)) for seat in seats)

    def sent(self, seats: Sequence[Seat], rounds: int, width: int) -> None:
        """Takes in that rounds were sent."""
        for seat in seats:
            seat.least, seat.most = seat.least + rounds, seat.most + rounds * width

    def read(self, seat: Seat, rounds: int, width: int, settled: int, drafter: str | None = None) -> None:
        """Takes in what rounds that were sent have settled for a seat.

        Args:
            drafter: whose context the rounds extended.
        """
        seat.least, seat.most = seat.least - rounds, seat.most - rounds * width
        seat.known += settled
        if drafter in seat.held:
            seat.held[drafter] = seat.known

    def preempt(self, seat: Seat) -> None:
        """Takes a job's slot and pages away and puts it back into the queue."""
        self.leave(seat)
        seat.job.handle.preemptions += 1
        self.preemptions += 1
        if seat.job.scoring:
            seat.job.prompt_scores = []  # from the beginning again
        self.wait(seat.job)

    def leave(self, seat: Seat) -> None:
        """Frees a slot and gives up its pages, of which the full ones may be found by others."""
        self.keep(seat, min([seat.filled if not seat.prefilled else seat.job.length - 1, *seat.held.values()]))
        self.seats[seat.slot] = None
        self.pages.release(seat.pages)
        seat.pages = []

    def keep(self, seat: Seat, until: int) -> None:
        """Lets others find the full pages before a position."""
        full = until // self.pages.page_size
        if not self.prefix_cache or full <= seat.kept:
            return
        for page in range(seat.kept, full):
            self.pages.keep(seat.pages[page], seat.job.page_key(page, self.pages.page_size))
        seat.kept = full

    def forget(self) -> list[Job]:
        """Puts all that run back into the queue and keeps no page: what the device held is lost."""
        seats = self.seated
        for seat in seats:
            seat.kept = len(seat.pages)  # nothing of it is to be found
            self.preempt(seat)
        self.pages.forget()
        return [seat.job for seat in seats]
