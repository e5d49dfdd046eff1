"""Decoding paths that `verify-exact` compares with plain decoding, for each drafter: batches, block widths, engines."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from tilewright.bench.exact import ExactFinding, ExactRequest, PathAnswer, PathResult, Plain, make_requests
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
"""Lengths of prefill chunks, short so that prompts take several chunks."""
MOST_ROUNDS = 3
"""Maximum number of rounds in a dispatch of a randomly chosen round."""
MOST_TRIED = ("as given", "everything")
"""Arrivals that run every kind of sampling at every effort."""
TEAM = "auto"
"""Name of the team of all drafters in results."""
TEAM_WIDTHS = (4,)
"""Block widths of the team, besides each drafter's own."""

Loaded = tuple[Any, Any]
"""Drafter and parameters, as `LanguageModel.load_drafter` returns them."""


@dataclass(frozen=True)
class Effort:
    """Size of a verification: requests, batches, widths, kinds of sampling and arrivals.

    Attributes:
        requests: number of requests.
        max_new_tokens: maximum number of tokens per request.
        batches: numbers of rows, including 1.
        widths: block widths, besides each drafter's own.
        alone, served: kinds of sampling without and with the engine.
        arrivals: names in `exact_engine.ARRIVALS`.
        whole: run every kind of sampling with all arrivals, and compile a team's engine for all numbers of rows. Otherwise most
            arrivals run the last kind only, and a team's engine compiles for the largest number of rows only.
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
        """Returns the kinds of sampling that run with these arrivals."""
        return self.served if self.whole or arrivals.name in MOST_TRIED else self.served[-1:]

    def engine_batches(self, drafter: object) -> tuple[int, ...]:
        """Returns the numbers of rows for which an engine with this drafter compiles rounds."""
        return self.batches if self.whole or not isinstance(drafter, Team) else self.batches[-1:]


EVERY = ("greedy", "sampled", "penalised", "mixed")
QUICK = Effort(6, 24, (1, 4), (), ("greedy", "sampled"), ("greedy", "mixed"), ("as given", "everything"))
USUAL = Effort(16, 32, (1, 8), (4,), ("greedy", "sampled", "penalised"), ("greedy", "mixed"), tuple(ARRIVALS))
THOROUGH = Effort(64, 128, (1, 2, 4, 8), (2, 4, 8), EVERY, EVERY, tuple(ARRIVALS), whole=True)


class Alone(NamedTuple):
    """Path without the engine: batch size and block width (None: the drafter's own)."""

    name: str
    batch: int
    block: int | None = None


class AlonePath:
    """Decodes requests in batches; with a team, in rounds of randomly chosen drafters and widths.

    Args:
        seed: seed of the choices.
    """

    def __init__(self, lm: LanguageModel, batch: int, seed: int):
        self.lm = lm
        self.batch = batch
        self.rng = np.random.default_rng(seed % 2**64)

    def __call__(self, requests: Sequence[ExactRequest]) -> PathResult:
        groups = [requests[i : i + self.batch] for i in range(0, len(requests), self.batch)]
        streams = [self.lm.start([one.prompt for one in group], [one.sampling for one in group]) for group in groups]
        warm((stream.engine.decoding.programs, key) for stream in streams for key in stream.keys)
        results = [result for stream in streams for result in self.decode(stream)]
        answers = [PathAnswer(one, result.tokens) for one, result in zip(requests, results, strict=True)]
        exercised = count_exercised(results)
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
        return list(stream.results())


def count_exercised(results: Sequence[Result]) -> dict[str, int]:
    """Returns counts of rounds (per row), accepted drafts and choices in results."""
    chosen = Counter(f"of {choice}" for result in results for choice in result.choices)
    counted = {
        "rounds": sum(len(result.acceptance_lengths) for result in results),
        "accepted drafts": sum(sum(result.accepted) for result in results),
    }
    return {name: count for name, count in (counted | dict(sorted(chosen.items()))).items() if count}


class Verification:
    """All paths of one model.

    Attributes:
        plain: reference of the comparison.

    Args:
        lm: target; its own drafter is not used.
        drafters: drafters by name; a team with one drafter of each kind is added.
        prompts: token ids.
        seed: seed of all random choices.

    Raises:
        ValueError: A request does not fit the model's context.
    """

    def __init__(
        self, lm: LanguageModel, drafters: Mapping[str, Loaded], prompts: Sequence[Sequence[int]], effort: Effort, seed: int
    ):
        self.prompts = prompts
        self.effort = effort
        self.seed = seed
        self.drafters: dict[str, Loaded] = {BASELINE: (None, None), **drafters}
        if drafters:
            self.drafters[TEAM] = make_team(lm, drafters.values())
        requests = self.requests("greedy")
        for one in requests:
            lm.check_length(one.prompt, one.sampling)
        longest = max(one.end for one in requests) + max(block_size(drafter) for drafter, _ in self.drafters.values())
        self.capacity = -(-longest // CHUNKS[-1]) * CHUNKS[-1]
        self.base = with_table(lm, ShapeTable(effort.batches, (self.capacity,), CHUNKS))
        self.plain = Plain(self.base)

    def requests(self, kind: str) -> list[ExactRequest]:
        return make_requests(self.prompts, kind, self.seed, self.effort.max_new_tokens)

    def alone(self, drafter: Any) -> list[Alone]:
        """Returns a drafter's paths without the engine; for plain decoding, without the path that is the reference itself."""
        batches = self.effort.batches
        if isinstance(drafter, Team):
            return [Alone(f"batches of {batches[-1]}, random widths", batches[-1])]
        single = [] if drafter is None and not self.plain.uncached else [Alone("one at a time", 1)]
        blocks = [Alone(f"one at a time, block {n}", 1, n) for n in self.effort.widths if n < block_size(drafter)]
        return [*single, *blocks, *(Alone(f"batches of {n}", n) for n in batches[1:])]

    def served(self) -> list[Arrivals]:
        """Returns the arrivals of a drafter's engine paths."""
        few = [n for n in self.effort.batches[:-1] if "as given" in self.effort.arrivals]
        return [*(Arrivals(f"{n} at a time", together=n) for n in few), *(ARRIVALS[name] for name in self.effort.arrivals)]

    def count(self) -> int:
        """Returns the number of findings."""
        drafters = [drafter for drafter, _ in self.drafters.values()]
        served = sum(len(self.effort.kinds(arrivals)) for arrivals in self.served())
        return sum(len(self.alone(one)) * len(self.effort.alone) + served for one in drafters)

    def findings(self, on_path: Callable[[str], None] = lambda name: None) -> Iterator[ExactFinding]:
        """Runs all paths and compares their answers with the reference.

        Args:
            on_path: called with the name of the next path.
        """
        for name, (drafter, params) in self.drafters.items():
            for path in self.alone(drafter):
                widened = drafter if path.block is None else replace(drafter, block_size=path.block)
                lm = self.base.with_drafter(widened, params)
                lm.pacing = None  # rounds are chosen at random
                yield from self.run(name, path.name, self.effort.alone, AlonePath(lm, path.batch, self.seed), on_path)
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
            requests = self.requests(kind)
            for one in requests:
                self.plain.answer(one)  # excluded from the path's time
            started_at = time.perf_counter()
            ran = path(requests)
            yield self.plain.finding(name, drafter, kind, requests, ran, time.perf_counter() - started_at)


def with_table(lm: LanguageModel, table: ShapeTable) -> LanguageModel:
    """Returns a copy of a language model for another table of shapes, without a drafter."""
    other = copy(lm)
    other.table = table
    return other.with_drafter(None)


def make_team(lm: LanguageModel, drafters: Iterable[Loaded]) -> Loaded:
    """Returns a team of the first drafter of each kind."""
    kinds: dict[str, Loaded] = {}
    for drafter, params in drafters:
        kinds.setdefault(drafter.name, (drafter, params))
    members, params = zip(*kinds.values(), strict=True)
    invariant = is_batch_invariant(lm.ops, lm.dtype, lm.kv_dtype, lm.target.needs_xla, lm.quantised)
    return Team(ngrams_first(members), TEAM_WIDTHS, not invariant), params


def block_size(drafter: Drafter | Team | None) -> int:
    return 1 if drafter is None else drafter.block_size
