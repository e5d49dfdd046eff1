"""Who runs: the queue, the slots and their pages. Plain host code without a device, told what happened and asked what is next.

Requests are served in the order in which they came. Where pages run out, the newest of those that run gives its own up and goes
back to the head of the queue; its tokens are computed again later, and as randomness belongs to its seed and positions it goes
on as it would have.
"""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tilewright.decode.shadow import NGramShadow
from tilewright.decode.shapes import ShapeTable
from tilewright.engine.pages import Pages, page_keys
from tilewright.engine.service import Taken


@dataclass(eq=False)
class Job(Taken):
    """A request on its way, in a slot or not.

    Attributes:
        shadow: follows its text for n-gram drafting, where a team has that.
        queued: tokens that it was queued with.
        prompt_scores: what prefill said of the prompt, as far as it went, still on the device; None once it was told, or where
            nobody asks.
    """

    shadow: NGramShadow | None = None
    queued: int = 0
    prompt_scores: list[tuple[Any, int]] | None = None

    @property
    def scored(self) -> bool:
        """Whether it asks for log-probabilities."""
        return self.ticket.ask.logprobs is not None

    @property
    def scoring(self) -> bool:
        """Whether prefill has still to score some of the prompt."""
        scored = sum(count for _, count in self.prompt_scores or ())
        return self.prompt_scores is not None and scored < len(self.request.prompt) - 1

    @property
    def alternatives(self) -> int:
        """How many come with each token."""
        return self.ticket.ask.logprobs or 0

    @property
    def length(self) -> int:
        """Tokens that are settled."""
        return len(self.request.prompt) + len(self.request.tokens)

    @property
    def tokens(self) -> list[int]:
        return [*self.request.prompt, *self.request.tokens]


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
        held: how many positions the context of each of a team's drafters holds.
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
        """Whether it has ended by its length for sure, though that was not read yet."""
        return self.known + self.least >= self.job.request.end - 1


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
        tapping: the names of the drafters whose contexts may fall behind; pages are kept as far as all of them hold them.
        preemptions, prefix_queries, prefix_hits: as `request.Figures` has them.
    """

    def __init__(
        self, table: ShapeTable, pages: Pages, context: int, prefix_cache: bool, tapping: Sequence[str] = ()
    ):  # fmt: skip
        self.table, self.pages, self.context, self.prefix_cache, self.tapping = table, pages, context, prefix_cache, tapping
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
        tokens = job.tokens
        whole = self.prefix_cache and not job.scoring
        # At least one position is computed: a drafter's context may begin with what comes of the last one.
        shared = self.pages.find(page_keys(tokens[:-1], self.pages.page_size)) if whole else []
        needed = self.pages_for(len(tokens)) - len(shared)
        others = sum(seat is not None for seat in self.seats)
        taken = self.pages.take(needed) if needed + others <= self.pages.free or not others else None
        if taken is None:
            self.pages.release(shared)
            return None
        cached = len(shared) * self.pages.page_size
        if whole:
            self.prefix_queries += len(tokens)
            self.prefix_hits += cached
        held = dict.fromkeys(self.tapping, len(tokens) - 1)
        if not job.ticket.preemptions:
            job.ticket.cached_tokens = cached
        return Seat(job, slot, [*shared, *taken], len(tokens) - 1, cached, len(tokens) - 1, kept=len(shared), held=held)

    def pages_for(self, positions: int) -> int:
        return -(-min(positions, self.context) // self.pages.page_size)

    def next_chunk(self) -> Chunk | None:
        """The next piece of the oldest prompt that is not computed yet."""
        seat = next((seat for seat in self.seated if not seat.prefilled), None)
        if seat is None:
            return None
        _, size = next(self.table.prefill_plan(max(1, seat.prompt - seat.filled)))
        return Chunk(seat, seat.filled, min(size, seat.prompt - seat.filled), size)

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
        """Whether somebody waits for the end of the next dispatch: for a place, for a prompt, or for its first rounds."""
        seats = [seat for seat in self.seats if seat is not None]
        waits = (not seat.prefilled or not (seat.most or seat.job.request.tokens) for seat in seats)
        return bool(self.waiting) or any(waits)

    def reach(self, seat: Seat, rounds: int, width: int) -> int:
        """The positions that a seat may write in so many more rounds: those that it may settle, and a block behind them."""
        settled = min(seat.known + seat.most + rounds * width, seat.job.request.end - 1)
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
        """How many pages seats lack for so many more rounds."""
        return sum(max(0, self.pages_for(self.reach(seat, rounds, width)) - len(seat.pages)) for seat in seats)

    def sent(self, seats: Sequence[Seat], rounds: int, width: int) -> None:
        """Takes in that rounds were sent."""
        for seat in seats:
            seat.least, seat.most = seat.least + rounds, seat.most + rounds * width

    def read(self, seat: Seat, rounds: int, width: int, settled: int, drafter: str | None = None) -> None:
        """Takes in what rounds that were sent have settled for a seat.

        Args:
            drafter: whose turn it was, of a team.
        """
        seat.least, seat.most = seat.least - rounds, seat.most - rounds * width
        seat.known += settled
        if drafter in seat.held:
            seat.held[drafter] = seat.known

    def preempt(self, seat: Seat) -> None:
        """Takes a job's slot and pages away and puts it back into the queue."""
        self.leave(seat)
        seat.job.ticket.preemptions += 1
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
        keys = list(page_keys(seat.job.tokens[: until + 1], self.pages.page_size))
        for page, key in list(zip(seat.pages, keys, strict=False))[seat.kept : full]:
            self.pages.keep(page, key)
        seat.kept = full

    def forget(self) -> list[Job]:
        """Puts all that run back into the queue and keeps no page: what the device held is lost."""
        seats = self.seated
        for seat in seats:
            seat.kept = len(seat.pages)  # nothing of it is to be found
            self.preempt(seat)
        self.pages.forget()
        return [seat.job for seat in seats]
