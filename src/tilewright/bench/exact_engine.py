"""Paths of `verify-exact` through the engine: requests submitted in various orders."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import Literal

import numpy as np

from tilewright.bench.exact import ExactRequest, PathAnswer, PathResult, Plain, derived_requests
from tilewright.llm.language_model import LanguageModel
from tilewright.runtime.engine import Engine
from tilewright.runtime.options import EngineOptions
from tilewright.runtime.request import EngineStats, GenerateRequest, RequestHandle, RequestOutput
from tilewright.runtime.shapes import ShapeTable
from tilewright.speculation.team import Team

Order = Literal["given", "reversed", "shuffled"]

PAGE_SIZE = 16
"""The smallest page size: requests cross pages, run out of pages and share pages most often."""
PATIENCE_S = 300.0
"""Seconds without progress after which the engine counts as stuck."""
SCARCE = (0.4, 0.2, 0.7)
"""Sizes of the small page pool, as fractions of what all slots could need. The next size is tried if expected events
(preemptions, prefix hits) did not happen."""


@dataclass(frozen=True)
class Arrivals:
    """Order and timing of requests to the engine.

    Attributes:
        together: maximum number of concurrent requests; None for no limit.
        every: minimum number of generated tokens between two submissions.
        again: after the requests, submit derived requests of every second one (`derived_requests`).
        strangers: submit a second request with each one and cancel the second after its first tokens.
        logprobs: every third request returns log-probabilities, and every sixth those of its prompt.
        scarce: the page pool is too small for all running requests.
    """

    name: str
    order: Order = "given"
    together: int | None = None
    every: int = 0
    again: bool = False
    strangers: bool = False
    logprobs: bool = False
    scarce: bool = False


ARRIVALS = {
    each.name: each
    for each in (
        Arrivals("as given"),
        Arrivals("reversed", "reversed"),
        Arrivals("shuffled", "shuffled"),
        Arrivals("staggered", every=6),
        Arrivals("prefix hits", again=True),
        Arrivals("preempted", scarce=True),
        Arrivals("neighbours cancelled", strangers=True),
        Arrivals("log-probabilities", logprobs=True),
        Arrivals("everything", "shuffled", every=6, again=True, strangers=True, logprobs=True, scarce=True),
    )
}
"""Arrivals by name. "everything" combines all features."""


def make_engine(lm: LanguageModel, batches: Sequence[int], capacity: int) -> Engine:
    """Returns a warmed, running engine with as many slots as the largest batch. Compilations are counted, not refused."""
    widths = lm.drafter.widths if isinstance(lm.drafter, Team) else ()
    table = ShapeTable(tuple(batches), (capacity,), lm.table.chunks, widths)
    # The queue has room for all requests.
    engine = lm.engine(EngineOptions(table, PAGE_SIZE, queue_requests=2**20, queue_tokens=2**30, guard="off"))
    engine.warm()
    engine.start()
    return engine


@dataclass
class Client:
    """Submits requests and collects their tokens.

    Attributes:
        updates: all updates, each with the index of its request; strangers have negative indices.
        tokens: tokens of each request.
        running, strangers: handles of unfinished requests and strangers, by index.
        since: tokens generated since the last submission.
    """

    engine: Engine
    requests: Sequence[ExactRequest]
    arrivals: Arrivals
    updates: SimpleQueue[tuple[int, RequestOutput]] = field(default_factory=SimpleQueue)
    tokens: list[list[int]] = field(default_factory=list)
    running: dict[int, RequestHandle] = field(default_factory=dict)
    strangers: dict[int, RequestHandle] = field(default_factory=dict)
    since: int = 0
    problem: str = ""

    def run(self) -> None:
        """Runs until all requests have ended or the engine is stuck."""
        self.tokens = [[] for _ in self.requests]
        waiting = deque(range(len(self.requests)))
        while waiting or self.running or self.strangers:
            while waiting and self.may_submit():
                self.submit_next(waiting.popleft())
            try:
                self.add(*self.updates.get(timeout=PATIENCE_S))
            except Empty:
                self.problem = f"the engine was stuck: no output for {PATIENCE_S:g} s"
                for handle in [*self.running.values(), *self.strangers.values()]:
                    self.engine.cancel(handle)
                return

    def may_submit(self) -> bool:
        together = len(self.requests) if self.arrivals.together is None else self.arrivals.together
        return not self.running or (len(self.running) < together and self.since >= self.arrivals.every)

    def submit_next(self, place: int) -> None:
        source = self.requests[place]
        self.since = 0
        if self.arrivals.strangers:
            sampling = replace(source.sampling, ignore_eos=True, stop=())
            self.strangers[-1 - place] = self.submit(-1 - place, GenerateRequest(source.prompt[::-1], sampling))
        logprobs = self.arrivals.logprobs and place % 3 == 0
        request = GenerateRequest(source.prompt, source.sampling, 2 if logprobs else None, logprobs and place % 6 == 0)
        self.running[place] = self.submit(place, request)

    def submit(self, place: int, request: GenerateRequest) -> RequestHandle:
        return self.engine.submit(request, lambda update: self.updates.put((place, update)))

    def add(self, place: int, update: RequestOutput) -> None:
        """Adds an update of a request or of a stranger."""
        if place < 0:
            if update.end is not None:
                del self.strangers[place]
            elif update.tokens:
                self.engine.cancel(self.strangers[place])
        else:
            self.tokens[place] += [each.token for each in update.tokens]
            self.since += len(update.tokens)
            if update.end is not None:
                del self.running[place]
        if update.end == "error":
            self.problem = update.error


class EnginePath:
    """Runs requests through one engine.

    Args:
        seed: seed of the shuffled order.
    """

    def __init__(self, engine: Engine, plain: Plain, arrivals: Arrivals, seed: int):
        self.engine = engine
        self.plain = plain
        self.arrivals = arrivals
        self.seed = seed

    def __call__(self, requests: Sequence[ExactRequest]) -> PathResult:
        ordered = [requests[n] for n in self.order(len(requests))]
        if self.arrivals.again:
            ordered += [each for one in ordered[::2] for each in derived_requests(self.plain, one)]
        for each in ordered:
            self.plain.answer(each)  # compiles the reference programs before the engine's compilations are counted
        before = self.engine.stats()
        answers = []
        problem = ""
        for share in SCARCE if self.arrivals.scarce else (1.0,):
            client = Client(self.engine, ordered, self.arrivals)
            self.engine.scheduler.pages.forget()  # no prefix hits from earlier runs
            with self.scarcity(ordered, share) as reserved:
                client.run()
                problem = problem or client.problem or left_over(self.engine, reserved)
            answers += [PathAnswer(one, tokens) for one, tokens in zip(ordered, client.tokens, strict=True)]
            if problem or not self.lacking(exercised_between(before, self.engine.stats())):
                break
        after = self.engine.stats()
        if after.compilations > before.compilations:
            problem = problem or f"{after.compilations - before.compilations} programs compiled while requests ran"
        exercised = exercised_between(before, after)
        return PathResult(answers, exercised, self.lacking(exercised), problem)

    def order(self, count: int) -> list[int]:
        if self.arrivals.order == "shuffled":
            return np.random.default_rng(self.seed % 2**64).permutation(count).tolist()
        return list(range(count))[:: -1 if self.arrivals.order == "reversed" else 1]

    @contextmanager
    def scarcity(self, requests: Sequence[ExactRequest], share: float) -> Iterator[int]:
        """Reserves pages if the pool is to be scarce, but leaves enough for each single request. Yields the number of reserved
        pages.

        The engine is idle at the beginning and at the end, so that its page accounts do not change.
        """
        pages = self.engine.scheduler.pages
        scheduler = self.engine.scheduler
        drafter = self.engine.decoding.model.drafter
        widest = 1 if drafter is None else drafter.block_size
        page_counts = sorted(scheduler.pages_for(each.end + widest) for each in requests)
        free = max(page_counts[-1], int(share * sum(page_counts[-len(scheduler.slots) :])))
        reserved = pages.take(max(0, pages.free - free)) if self.arrivals.scarce else []
        assert reserved is not None, "more pages taken than free"
        yield len(reserved)
        pages.release(reserved)

    def lacking(self, exercised: dict[str, int]) -> list[str]:
        """Returns the names of events that these arrivals should have caused and did not."""
        expected = {
            "preemptions": self.arrivals.scarce,
            "prefix tokens": self.arrivals.again,
            "cancelled": self.arrivals.strangers,
            "accepted drafts": self.engine.decoding.model.drafter is not None,
        }
        return [name for name, is_expected in expected.items() if is_expected and not exercised.get(name)]


def left_over(engine: Engine, reserved: int) -> str:
    """Describes what an idle engine still holds besides `reserved` pages; empty if nothing."""
    until = time.monotonic() + PATIENCE_S
    while engine.busy and time.monotonic() < until:  # a dispatch after the last end may still be in flight
        time.sleep(0.001)
    stats = engine.stats()
    leftovers = {"running": stats.running, "waiting": stats.waiting, "pages": stats.pages_used - reserved}
    return ", ".join(f"{count} {name} left over" for name, count in leftovers.items() if count)


def exercised_between(before: EngineStats, after: EngineStats) -> dict[str, int]:
    """Returns counts of the engine's events between two readings of its statistics."""
    counted = {
        "rounds": after.rounds - before.rounds,
        "accepted drafts": after.accepted - before.accepted,
        "preemptions": after.preemptions - before.preemptions,
        "prefix tokens": after.prefix_hits - before.prefix_hits,
        "cancelled": after.ended.get("cancelled", 0) - before.ended.get("cancelled", 0),
    }
    widths = {f"of {name}": count - before.widths.get(name, 0) for name, count in after.widths.items() if name != "fixed"}
    return {name: count for name, count in (counted | widths).items() if count}
