"""The ways that `verify-exact` holds against plain decoding, drafter by drafter: batches, other widths, engines."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from tilewright.bench.exact import ExactFinding, ExactRequest, PathAnswer, PathResult, Plain, requests_of
from tilewright.bench.exact_engine import ARRIVALS, Arrivals, EnginePath, make_engine
from tilewright.bench.speculative_figures import BASELINE
from tilewright.compiled.store import warm
from tilewright.kernels.operations import is_batch_invariant
from tilewright.llm.language_model import LanguageModel
from tilewright.llm.stream import Stream
from tilewright.runtime.interfaces import Drafter
from tilewright.runtime.output import Result
from tilewright.runtime.shapes import ShapeTable
from tilewright.speculation.drafters.ngrams_first import ngrams_first
from tilewright.speculation.team import Team

CHUNKS = (16, 64)
"""Lengths of a prefill chunk: short, so that prompts take several."""
MOST_ROUNDS = 3
"""Of a dispatch whose choice was drawn."""
MOST_TRIED = ("as given", "everything")
"""Orders of arrival that run every kind of sampling, whatever the effort."""
TEAM = "auto"
"""Name under which the team of all drafters is shown."""
TEAM_WIDTHS = (4,)
"""Of its blocks, besides each drafter's own."""

Loaded = tuple[Any, Any]
"""A drafter with its parameters, as `LanguageModel.load_drafter` gives them."""


@dataclass(frozen=True)
class Effort:
    """Size of a verification: requests, batches, widths, kinds of sampling and orders of arrival.

    Attributes:
        requests: how many.
        max_new_tokens: the most of a request.
        batches: numbers of rows, from 1.
        widths: of blocks, besides each drafter's own.
        alone, served: kinds of sampling without the engine, and with it.
        arrivals: names of `exact_engine.ARRIVALS`.
        whole: every order of arrival runs every kind of sampling that is served, and a team's engine has rounds for all numbers
            of rows. Else most orders run the last kind alone, and that engine, whose programs are many, only the most rows.
    """

    requests: int
    max_new_tokens: int
    batches: tuple[int, ...]
    widths: tuple[int, ...]
    alone: tuple[str, ...]
    served: tuple[str, ...]
    arrivals: tuple[str, ...]
    whole: bool = False

    def kinds(self, arrivals: Arrivals) -> tuple[str, ...]:
        """The kinds of sampling that an order of arrival runs."""
        return self.served if self.whole or arrivals.name in MOST_TRIED else self.served[-1:]

    def engine_batches(self, drafter: object) -> tuple[int, ...]:
        """The numbers of rows that an engine with this drafter compiles rounds for."""
        return self.batches if self.whole or not isinstance(drafter, Team) else self.batches[-1:]


EVERY = ("greedy", "sampled", "penalised", "mixed")
QUICK = Effort(6, 24, (1, 4), (), ("greedy", "sampled"), ("greedy", "mixed"), ("as given", "everything"))
USUAL = Effort(16, 32, (1, 8), (4,), ("greedy", "sampled", "penalised"), ("greedy", "mixed"), tuple(ARRIVALS))
THOROUGH = Effort(64, 128, (1, 2, 4, 8), (2, 4, 8), EVERY, EVERY, tuple(ARRIVALS), whole=True)


class Alone(NamedTuple):
    """A way without the engine: rows decoded together, in blocks of a width (None: the drafter's own)."""

    name: str
    batch: int
    block: int | None = None


class AlonePath:
    """Decodes requests in batches; with a team in rounds drawn from all that it may do.

    Args:
        seed: of what is drawn.
    """

    def __init__(self, lm: LanguageModel, batch: int, seed: int):
        self.lm = lm
        self.batch = batch
        self.rng = np.random.default_rng(seed % 2**64)

    def __call__(self, asked: Sequence[ExactRequest]) -> PathResult:
        groups = [asked[i : i + self.batch] for i in range(0, len(asked), self.batch)]
        streams = [self.lm.start([one.prompt for one in group], [one.sampling for one in group]) for group in groups]
        warm((stream.engine.programs, key) for stream in streams for key in stream.keys)
        results = [result for stream in streams for result in self.decode(stream)]
        answers = [PathAnswer(one, result.tokens) for one, result in zip(asked, results, strict=True)]
        exercised = exercised_by(results)
        lacking = [name for name in ("accepted drafts",) if self.lm.drafter is not None and not exercised.get(name)]
        return PathResult(answers, exercised, lacking)

    def decode(self, stream: Stream) -> list[Result]:
        drafter = self.lm.drafter
        while not stream.finished:
            if isinstance(drafter, Team):
                choice = drafter.choices[self.rng.integers(len(drafter.choices))]
                stream.advance(int(self.rng.integers(1, MOST_ROUNDS + 1)), choice)
            else:
                stream.advance()
        return stream.results()


def exercised_by(results: Sequence[Result]) -> dict[str, int]:
    """Counts of rounds, accepted drafts and choices in results; rounds are counted for each row."""
    chosen = Counter(f"of {choice}" for result in results for choice in result.choices)
    counted = {
        "rounds": sum(len(result.acceptance_lengths) for result in results),
        "accepted drafts": sum(sum(result.accepted) for result in results),
    }
    return {name: count for name, count in (counted | dict(sorted(chosen.items()))).items() if count}


class Verification:
    """All ways of one model.

    Attributes:
        plain: what they are held against.

    Args:
        lm: the target; its drafter, if it has one, takes no part.
        drafters: by the names that they are shown with; a team of one of each kind joins them.
        prompts: token ids.
        seed: of all that is drawn.

    Raises:
        ValueError: a request that does not fit the model's context.
    """

    def __init__(
        self, lm: LanguageModel, drafters: Mapping[str, Loaded], prompts: Sequence[Sequence[int]], effort: Effort, seed: int
    ):
        self.prompts = prompts
        self.effort = effort
        self.seed = seed
        self.drafters: dict[str, Loaded] = {BASELINE: (None, None), **drafters}
        if drafters:
            self.drafters[TEAM] = team_of(lm, drafters.values())
        asked = self.asked("greedy")
        for one in asked:
            lm.check_length(one.prompt, one.sampling)
        longest = max(one.end for one in asked) + max(block_size(drafter) for drafter, _ in self.drafters.values())
        self.capacity = -(-longest // CHUNKS[-1]) * CHUNKS[-1]
        self.base = with_table(lm, ShapeTable(effort.batches, (self.capacity,), CHUNKS))
        self.plain = Plain(self.base)

    def asked(self, kind: str) -> list[ExactRequest]:
        return requests_of(self.prompts, kind, self.seed, self.effort.max_new_tokens)

    def alone(self, drafter: Any) -> list[Alone]:
        """The ways of a drafter without the engine. Of plain decoding, not the one that all are held against."""
        batches = self.effort.batches
        if isinstance(drafter, Team):
            return [Alone(f"batches of {batches[-1]}, widths drawn", batches[-1])]
        own = [] if drafter is None and not self.plain.uncached else [Alone("one at a time", 1)]
        blocks = [Alone(f"one at a time, block {n}", 1, n) for n in self.effort.widths if n < block_size(drafter)]
        return [*own, *blocks, *(Alone(f"batches of {n}", n) for n in batches[1:])]

    def served(self) -> list[Arrivals]:
        """The ways of each drafter through an engine."""
        few = [n for n in self.effort.batches[:-1] if "as given" in self.effort.arrivals]
        return [*(Arrivals(f"{n} at a time", together=n) for n in few), *(ARRIVALS[name] for name in self.effort.arrivals)]

    def count(self) -> int:
        """Number of findings to come."""
        every = [drafter for drafter, _ in self.drafters.values()]
        served = sum(len(self.effort.kinds(arrivals)) for arrivals in self.served())
        return sum(len(self.alone(one)) * len(self.effort.alone) + served for one in every)

    def findings(self, on_path: Callable[[str], None] = lambda name: None) -> Iterator[ExactFinding]:
        """Runs all ways, and compares what each gave.

        Args:
            on_path: told what comes next.
        """
        for name, (drafter, params) in self.drafters.items():
            for way in self.alone(drafter):
                wanted = drafter if way.block is None else replace(drafter, block_size=way.block)
                lm = self.base.with_drafter(wanted, params)
                lm.pacing = None  # rounds are drawn
                yield from self.run(name, way.name, self.effort.alone, AlonePath(lm, way.batch, self.seed), on_path)
            if not self.effort.arrivals:
                continue
            on_path(f"{name}: the engine compiles")
            lm = self.base.with_drafter(drafter, params)
            engine = make_engine(lm, self.effort.engine_batches(drafter), self.capacity)
            try:
                for arrivals in self.served():
                    path = EnginePath(engine, self.plain, arrivals, self.seed)
                    kinds = self.effort.kinds(arrivals)
                    yield from self.run(name, f"engine, {arrivals.name}", kinds, path, on_path)
            finally:
                engine.stop()

    def run(
        self,
        drafter: str,
        name: str,
        kinds: Sequence[str],
        path: Callable[[Sequence[ExactRequest]], PathResult],
        on_path: Callable[[str], None],
    ) -> Iterator[ExactFinding]:
        for kind in kinds:
            on_path(f"{drafter}: {name}, {kind}")
            asked = self.asked(kind)
            for one in asked:
                self.plain.answer(one)  # is no part of the path's time
            began = time.perf_counter()
            ran = path(asked)
            yield self.plain.finding(name, drafter, kind, asked, ran, time.perf_counter() - began)


def with_table(lm: LanguageModel, table: ShapeTable) -> LanguageModel:
    """A copy of a language model without its drafter, for another table of shapes."""
    other = copy(lm)
    other.table = table
    return other.with_drafter(None)


def team_of(lm: LanguageModel, drafters: Iterable[Loaded]) -> Loaded:
    """Those that take turns: the first drafter of each kind."""
    kinds: dict[str, Loaded] = {}
    for drafter, params in drafters:
        kinds.setdefault(drafter.name, (drafter, params))
    members, params = zip(*kinds.values(), strict=True)
    alike = is_batch_invariant(lm.ops, lm.dtype, lm.kv_dtype, lm.target.needs_xla)
    return Team(ngrams_first(members), TEAM_WIDTHS, not alike), params


def block_size(drafter: Drafter | Team | None) -> int:
    return 1 if drafter is None else drafter.block_size
