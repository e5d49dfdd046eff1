"""Requests put to the engine in every order, and what it gives for them, for `verify-exact`."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import Literal

import numpy as np

from tilewright.bench.exact import ExactRequest, PathAnswer, PathResult, Plain, made_of
from tilewright.llm.language_model import LanguageModel
from tilewright.runtime.engine import Engine
from tilewright.runtime.options import EngineOptions
from tilewright.runtime.request import EngineStats, GenerateRequest, RequestHandle, RequestOutput
from tilewright.runtime.shapes import ShapeTable
from tilewright.speculation.team import Team

Order = Literal["given", "reversed", "shuffled"]

PAGE_SIZE = 16
"""The smallest there is: requests cross pages, run out of them and share them most often."""
PATIENCE_S = 300.0
"""Seconds without any progress after which the engine counts as stuck."""
SCARCE = (0.4, 0.2, 0.7)
"""Of the pages that as many requests as there are slots may come to need, how many a scarce pool has; the next where something
that was to happen did not: nobody had to give way, or no page outlasted its request until another one began alike."""


@dataclass(frozen=True)
class Arrivals:
    """An order in which requests arrive at the engine.

    Attributes:
        together: the most at a time; None for all at once.
        every: tokens that come of earlier ones between two arrivals.
        again: requests that begin like every second of these follow.
        strangers: beside each request there is another, given up when its first tokens come.
        logprobs: every third request asks for log-probabilities, and every sixth for those of its prompt.
        scarce: the pool is too small for those that run.
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
"""By name; "everything" is all of them at once."""


def make_engine(lm: LanguageModel, batches: Sequence[int], capacity: int) -> Engine:
    """An engine that is ready, with as many slots as the largest batch. A compile that it asks for is counted, not refused."""
    widths = lm.drafter.widths if isinstance(lm.drafter, Team) else ()
    table = ShapeTable(tuple(batches), (capacity,), lm.table.chunks, widths)
    # The queue takes all that is asked at once.
    engine = lm.engine(EngineOptions(table, PAGE_SIZE, queue_requests=2**20, queue_tokens=2**30, guard="off"))
    engine.warm()
    engine.start()
    return engine


@dataclass
class Client:
    """Asks and listens.

    Attributes:
        heard: all updates, each with the place of its request; strangers have places below 0.
        tokens: of each request, as they came.
        running, strangers: the handles of those that have not ended, by place.
        since: tokens of requests since the last one was asked.
    """

    engine: Engine
    asked: Sequence[ExactRequest]
    arrivals: Arrivals
    heard: SimpleQueue[tuple[int, RequestOutput]] = field(default_factory=SimpleQueue)
    tokens: list[list[int]] = field(default_factory=list)
    running: dict[int, RequestHandle] = field(default_factory=dict)
    strangers: dict[int, RequestHandle] = field(default_factory=dict)
    since: int = 0
    problem: str = ""

    def run(self) -> None:
        """Until all have ended, or the engine is stuck."""
        self.tokens = [[] for _ in self.asked]
        left = deque(range(len(self.asked)))
        while left or self.running or self.strangers:
            while left and self.may_ask():
                self.ask(left.popleft())
            try:
                self.take(*self.heard.get(timeout=PATIENCE_S))
            except Empty:
                self.problem = f"the engine was stuck: nothing came in {PATIENCE_S:g} s"
                for handle in [*self.running.values(), *self.strangers.values()]:
                    self.engine.cancel(handle)
                return

    def may_ask(self) -> bool:
        together = len(self.asked) if self.arrivals.together is None else self.arrivals.together
        return not self.running or (len(self.running) < together and self.since >= self.arrivals.every)

    def ask(self, place: int) -> None:
        asked = self.asked[place]
        self.since = 0
        if self.arrivals.strangers:
            sampling = replace(asked.sampling, ignore_eos=True, stop=())
            self.strangers[-1 - place] = self.submit(-1 - place, GenerateRequest(asked.prompt[::-1], sampling))
        logprobs = self.arrivals.logprobs and place % 3 == 0
        request = GenerateRequest(asked.prompt, asked.sampling, 2 if logprobs else None, logprobs and place % 6 == 0)
        self.running[place] = self.submit(place, request)

    def submit(self, place: int, request: GenerateRequest) -> RequestHandle:
        return self.engine.submit(request, lambda update: self.heard.put((place, update)))

    def take(self, place: int, update: RequestOutput) -> None:
        """Takes in what came of a request, or of a stranger."""
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
    """Runs requests through one engine as they arrive.

    Args:
        seed: of the shuffled order.
    """

    def __init__(self, engine: Engine, plain: Plain, arrivals: Arrivals, seed: int):
        self.engine = engine
        self.plain = plain
        self.arrivals = arrivals
        self.seed = seed

    def __call__(self, asked: Sequence[ExactRequest]) -> PathResult:
        in_order = [asked[n] for n in self.order(len(asked))]
        if self.arrivals.again:
            in_order += [each for one in in_order[::2] for each in made_of(self.plain, one)]
        for each in in_order:
            self.plain.answer(each)  # whatever that compiles is not the engine's doing
        before = self.engine.stats()
        answers = []
        problem = ""
        for share in SCARCE if self.arrivals.scarce else (1.0,):
            client = Client(self.engine, in_order, self.arrivals)
            self.engine.pages.forget()  # nothing that was computed before is found
            with self.scarcity(in_order, share) as held:
                client.run()
                problem = problem or client.problem or left_over(self.engine, held)
            answers += [PathAnswer(one, tokens) for one, tokens in zip(in_order, client.tokens, strict=True)]
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
    def scarcity(self, asked: Sequence[ExactRequest], share: float) -> Iterator[int]:
        """Holds pages back if they are to be scarce, but those that each request needs by itself; yields how many.

        The engine has nothing to do when this begins and ends, so that its accounts stand still.
        """
        pages = self.engine.pages
        scheduler = self.engine.scheduler
        drafter = self.engine.model.drafter
        widest = 1 if drafter is None else drafter.block_size
        needs = sorted(scheduler.pages_for(each.end + widest) for each in asked)
        left = max(needs[-1], int(share * sum(needs[-len(scheduler.slots) :])))
        held = pages.take(max(0, pages.free - left)) if self.arrivals.scarce else []
        assert held is not None, "no more pages are taken than are free"
        yield len(held)
        pages.release(held)

    def lacking(self, exercised: dict[str, int]) -> list[str]:
        """Names of the events that this order of arrival should have caused and did not."""
        wanted = {
            "preemptions": self.arrivals.scarce,
            "prefix tokens": self.arrivals.again,
            "cancelled": self.arrivals.strangers,
            "accepted drafts": self.engine.model.drafter is not None,
        }
        return [name for name, needed in wanted.items() if needed and not exercised.get(name)]


def left_over(engine: Engine, held: int) -> str:
    """Text on what an engine that has nothing to do still holds, besides `held` pages; empty if nothing."""
    until = time.monotonic() + PATIENCE_S
    while engine.busy and time.monotonic() < until:  # a dispatch behind the last end is still to be read
        time.sleep(0.001)
    stats = engine.stats()
    kept = {"running": stats.running, "waiting": stats.waiting, "pages": stats.pages_used - held}
    return ", ".join(f"{count} {name} left over" for name, count in kept.items() if count)


def exercised_between(before: EngineStats, after: EngineStats) -> dict[str, int]:
    """Counts of what an engine did between two readings of its statistics."""
    counted = {
        "rounds": after.rounds - before.rounds,
        "accepted drafts": after.accepted - before.accepted,
        "preemptions": after.preemptions - before.preemptions,
        "prefix tokens": after.prefix_hits - before.prefix_hits,
        "cancelled": after.ended.get("cancelled", 0) - before.ended.get("cancelled", 0),
    }
    widths = {f"of {name}": count - before.widths.get(name, 0) for name, count in after.widths.items() if name != "fixed"}
    return {name: count for name, count in (counted | widths).items() if count}
