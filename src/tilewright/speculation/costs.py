"""What rounds cost on this machine: measured for a shape when it is first used, and kept in a file for the next process."""

import hashlib
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tilewright.compiled.cache import digest, require_private
from tilewright.compiled.machine import chip_name
from tilewright.kernels.operations import UNMAPPED
from tilewright.parallel.mesh import agreed_seconds
from tilewright.runtime.interfaces import PLAIN, Choice, Drafter
from tilewright.runtime.programs import STEPS_PER_DISPATCH, Programs
from tilewright.runtime.runner import ModelRunner
from tilewright.runtime.sampling import Sampling, row_sampling
from tilewright.runtime.state import StepInfo
from tilewright.speculation.drafters.ngrams_first import NGramsFirst
from tilewright.speculation.policy import Cost
from tilewright.speculation.team import Team

BUDGET_S = 0.4
"""How long a choice may be measured, unless a single run takes longer."""
RUN_S = 0.02
"""How long a run should take: rounds are repeated until it does, about as many as a session's dispatch has. The first ones
after a rest are slower."""
REST_S = 0.002
"""How long the device waits before each run, as it does while a host takes in what the last one gave: a dispatch after it takes
several times as long as one that follows at once, for threads sleep and caches forget."""
LEAST_SHARE = 0.2
"""Of a run at least so much is taken to be its rounds; what else a dispatch takes is measured apart, and may be disturbed."""
LEAST_DISPATCH_S = 1e-9
"""Never none: costs are kept as times above 0."""
DRAWN = Sampling(temperature=1.0, top_p=0.9, seed=0)
"""How rows that draw do so while they are measured."""
IDLE_ROUNDS = 8
IDLE_RUNS = 5
"""The most rounds of a run that measures what it costs to find nothing, and the most such runs, of which the fastest counts."""
RUNS = 15
"""The most runs of a choice, of which the fastest counts: what disturbs a run only makes it longer."""


@dataclass(frozen=True)
class RoundCosts:
    """Of one shape.

    Attributes:
        dispatch: seconds that a dispatch takes besides its rounds.
        rounds: of each choice that was measured.
    """

    dispatch: float
    rounds: dict[Choice, Cost]


def measure(timer: "RoundTimer", choices: Collection[Choice]) -> RoundCosts:
    """Times rounds of the choices in turns, in the middle of empty caches.

    Args:
        choices: plain decoding among them.
    """
    timer.write_texts()
    # Where n-grams may draft in a model's place, rounds are measured with them and without.
    timed = [(choice, True) for choice in choices] + [(choice, False) for choice in choices if timer.looks_up(choice)]
    rounds = dict.fromkeys(timed, 2)
    taken: dict[tuple[Choice, bool], list[Run]] = {each: [] for each in timed}
    empty: list[float] = []
    began = time.perf_counter()
    for run in range(RUNS + 1):
        for choice, repeats in timed[:: -1 if run % 2 else 1]:
            found = timer.timed(choice, rounds[choice, repeats], repeats)
            if run == 0:  # what comes first also touches memory for the first time
                rounds[choice, repeats] = max(2, timer.enough(choice, timer.timed(choice, 2, repeats)))
                continue
            taken[choice, repeats].append(found)
            empty.append(timer.empty())
        if run and timer.agreed(time.perf_counter() - began) > BUDGET_S * len(rounds):
            break
    dispatch = max(min(empty), LEAST_DISPATCH_S)
    least = {each: min(runs).beyond(dispatch) for each, runs in taken.items()}
    step = min(run.each for run in least.values())
    costs: dict[Choice, Cost] = {}
    for (choice, repeats), run in least.items():
        if repeats:
            costs[choice] = run.cost(step, timer.drafter.turn(choice).may_be_idle)
        else:
            costs[choice] = run.cost(costs[choice].drafting, may_be_idle=True)
    return RoundCosts(dispatch, with_idle_rounds(timer, dispatch, no_dearer_when_narrower(costs)))


def with_idle_rounds(timer: "RoundTimer", dispatch: float, costs: Mapping[Choice, Cost]) -> dict[Choice, Cost]:
    """The costs with those of rounds that find nothing to propose, as they are beside steps in a text that says nothing twice.

    They run a step, but in a program that might have done more. Steps are timed there too, in turns, for such a text may be
    harder to draw from than others. Where the model itself says something twice, and no run has mostly such rounds, they are
    left at a step's.
    """
    step = costs[PLAIN].drafting
    rounds = max(2, min(IDLE_ROUNDS, math.ceil(RUN_S / step)))
    # All widths of a drafter run the same step there.
    narrow = {choice.drafter: choice for choice in sorted(costs, reverse=True) if timer.drafter.turn(choice).may_be_idle}
    idle: dict[str, float] = {}
    for name, choice in narrow.items():
        began = time.perf_counter()
        least = math.inf
        least_step = math.inf
        for _ in range(IDLE_RUNS):
            run = timer.timed(choice, rounds, repeats=False).beyond(dispatch)
            least_step = min(least_step, timer.timed(PLAIN, rounds, repeats=False).beyond(dispatch).seconds / rounds)
            if run.idle > run.drafting:
                least = min(least, (run.seconds - run.drafting * costs[choice].drafting) / run.idle)
            if timer.agreed(time.perf_counter() - began) > BUDGET_S:
                break
        idle[name] = 0.0 if least == math.inf else least / least_step * step
    return {
        choice: cost if cost.idle is None else replace(cost, idle=max(cost.idle, idle.get(choice.drafter, 0.0)))
        for choice, cost in costs.items()
    }


class Run(NamedTuple):
    """A dispatch: its seconds, and in how many of its rounds the drafter ran, or was idle (see `policy.Cost`)."""

    seconds: float
    drafting: int
    idle: int = 0

    @property
    def each(self) -> float:
        """Seconds of a round."""
        return self.seconds / (self.drafting + self.idle)

    def beyond(self, dispatch: float) -> "Run":
        """Its rounds alone, given what a dispatch takes besides."""
        return self._replace(seconds=max(self.seconds - dispatch, LEAST_SHARE * self.seconds))

    def cost(self, idle: float, may_be_idle: bool) -> Cost:
        """Cost of its rounds; those in which the drafter was idle cost `idle` each, where it may be."""
        if not may_be_idle:
            return Cost(self.each)
        drafting = (self.seconds - self.idle * idle) / max(self.drafting, 1)
        return Cost(max(drafting, idle), idle)


def no_dearer_when_narrower(costs: Mapping[Choice, Cost]) -> dict[Choice, Cost]:
    """The costs, none above that of a wider block of the same drafter, nor a step's above any: what disturbs a run only makes
    it longer."""
    best = {**costs, PLAIN: Cost(min(cost.drafting for cost in costs.values()))}
    for choice in sorted(costs, reverse=True):
        wider = [best[one].drafting for one in best if one.drafter == choice.drafter and one.width > choice.width]
        drafting = min([best[choice].drafting, *wider])
        idle = best[choice].idle
        best[choice] = Cost(drafting, None if idle is None else min(idle, drafting))
    return best


class RoundTimer:
    """The first slots of a runner that serves nobody, the pool shared among them: each row stands in the middle of its cache.

    Attributes:
        start, end: where the rows stand, and where their caches end, int32 `[B]`.
        repeated, varied: two texts that they may hold, int32 `[B, capacity]`; see `write_texts`.
        sampling: how they draw.
    """

    def __init__(self, runner: ModelRunner, rows: int, drawn: bool = False):
        """Args:
        rows: that rounds run with.
        drawn: whether they draw, rather than take the most likely tokens.
        """
        programs = runner.programs
        layout = runner.programs.layout
        assert programs.drafter is not None, "rounds are chosen among drafters'"
        self.runner = runner
        self.rows = rows
        self.drafter = programs.drafter
        self.vocab_size = programs.target.config.vocab_size
        self.sampling = DRAWN if drawn else Sampling()
        # In a pool with fewer pages than that, rows share them: what is read and written takes as long.
        least = -(-(2 * self.drafter.block_size + 4) // layout.page_size)
        each = min(max(layout.pages // rows, least), layout.capacity // layout.page_size)
        slots = np.ones(layout.batch, np.int32)
        positions = each * layout.page_size
        # The last block is written in one piece: past the row's end, but not past its pages.
        behind = 0 if positions == layout.capacity else self.drafter.block_size
        self.start = slots * (positions // 2)
        self.end = slots * max(positions // 2 + 2, positions - behind)
        # Each row has a token of its own, and so another text: those of one text would choose the same experts.
        begins = np.arange(layout.batch, dtype=np.int32)[:, None]
        self.repeated = np.repeat(begins % self.vocab_size, layout.capacity, axis=1)
        self.varied = (1 + begins + np.arange(layout.capacity, dtype=np.int32)[None]) % self.vocab_size
        self.table = np.full((layout.groups, rows, layout.capacity // layout.page_size), UNMAPPED, np.int32)
        for table, pages in zip(self.table, (layout.pages, *(group.pages for group in layout.windows)), strict=True):
            own = max(1, min(pages // rows, each))  # of a window's pages, some stand for several columns that lie far apart
            table[:, :each] = (np.arange(rows)[:, None] * own + np.arange(each)[None] % own) % pages
        if runner.state is None:
            runner.reset()

    def advance(self, rounds: int, choice: Choice) -> StepInfo:
        """Runs rounds, and waits for them."""
        programs = self.runner.programs
        key = programs.round_key(choice, self.rows, programs.table.capacities[-1], self.runner.sampling)
        slots = np.arange(self.rows, dtype=np.int32)
        running = np.ones(self.rows, bool)
        return StepInfo.unpacked(self.runner.run_rounds(key, slots, self.table, running, rounds))

    def agreed(self, seconds: float) -> float:
        """A time by the clock of the first of the processes that measure together."""
        return agreed_seconds(self.runner.programs.target.mesh, seconds)

    def looks_up(self, choice: Choice) -> bool:
        """True if n-grams may draft in the place of a choice's own drafter."""
        assert isinstance(self.drafter, Team)
        place = self.drafter.place(choice)
        return place is not None and isinstance(self.drafter.members[place], NGramsFirst)

    def rewind(self, repeats: bool) -> None:
        """Puts every row back into the middle of one of the texts."""
        state = self.runner.state
        start = self.start
        assert state is not None
        text = self.repeated if repeats else self.varied
        rows = {"tokens": text, "known": start, "end": self.end, "done": start < 0, "ignore_eos": start > 0}
        contexts = replace(state.draft_cache, held=(start,) * len(state.draft_cache.held))
        sampling = row_sampling([self.sampling] * len(start), start)
        self.runner.state = replace(state, **rows, sampling=sampling, draft_cache=contexts)

    def write_texts(self) -> None:
        """Makes one text such that all that the target says next was said before, with another token behind it.

        So an n-gram drafter finds something in each round, and each round adds one token. In the other text no token stands
        twice, as far as there are others; each row's begins elsewhere.
        """
        self.timed(PLAIN, 2)  # what comes first also touches memory for the first time
        rounds = self.enough(PLAIN, self.timed(PLAIN, 2), BUDGET_S)
        self.rewind(repeats=True)
        room = self.start[0] // 3 - 2  # behind it the row's own token goes on as the text begins
        said = self.advance(rounds, PLAIN).tokens[:room, :, 0]
        begin = self.repeated[: said.shape[1], -1][None]
        before = np.concatenate([begin, said[:-1]])
        after = np.concatenate([said[1:], begin])
        text = np.stack([before, said, (after + 1) % self.vocab_size], axis=1)
        self.repeated[: said.shape[1], : 3 * len(said)] = text.reshape(-1, said.shape[1]).T

    def enough(self, choice: Choice, timed: Run, wanted: float = RUN_S) -> int:
        """Number of rounds that make a run of so many seconds, and have room."""
        room = int(self.end[0] - self.start[0]) - self.drafter.turn(choice).block_size
        return max(1, min(STEPS_PER_DISPATCH, room, math.ceil(wanted / timed.seconds * (timed.drafting + timed.idle))))

    def empty(self) -> float:
        """Seconds of a dispatch that runs no round: it is short, so that one of a few is hardly ever disturbed. A difference of
        long ones would be mostly noise on a machine that others use. Without loops on the device there is none."""
        return self.timed(PLAIN, 0).seconds if self.runner.programs.target.loops else 0.0

    def timed(self, choice: Choice, rounds: int, repeats: bool = True) -> Run:
        """A dispatch of so many rounds, from the middle of one of the texts on."""
        self.rewind(repeats)
        rest = time.perf_counter() + REST_S
        while time.perf_counter() < rest:  # a host is at work meanwhile: a processor that slept would wake up slow
            pass
        began = time.perf_counter()
        infos = self.advance(rounds, choice)
        seconds = self.agreed(time.perf_counter() - began)
        drafts = (infos.drafted > 0) & ~infos.from_ngrams
        drafting = len(infos.drafted) if choice == PLAIN else int(np.sum(np.any(drafts, axis=1)))
        return Run(seconds, drafting, len(infos.drafted) - drafting)


class CostFiles:
    """Measured costs on disk, a file for each configuration and shape, in a folder that is its owner's alone.

    Args:
        folder: made if it is not there.
        made_of: what costs depend on besides the machine and JAX, such as the names of kernel libraries.
        say: told in one line why a file is not used.
    """

    def __init__(self, folder: Path, made_of: Collection[str], say: Callable[[str], None]):
        self.folder = folder
        self.say = say
        self.made_on = {"machine": digest(*made_of), "chip": chip_name(), "jax": jax.__version__}

    def check_folder(self) -> None:
        """Raises a `ValueError` if somebody else could have written the files."""
        for folder in (self.folder.parent, self.folder):
            require_private(folder)

    def path(self, about: Mapping[str, Any]) -> Path:
        return self.folder / (hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16] + ".json")

    def read(self, about: Mapping[str, Any], choices: Collection[Choice]) -> RoundCosts | None:
        """The costs of a configuration, of those choices that were measured; None where nothing fits."""
        path = self.path(about)
        try:
            self.check_folder()
            found = json.loads(path.read_text(encoding="utf-8"))
            made_on = dict(found["made_on"])
            costs = parsed(found)
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError, OSError) as error:
            self.say(f"measuring what rounds cost: {path} cannot be used ({shortened(error)})")
            return None
        if made_on != self.made_on:
            differing = [name for name, value in self.made_on.items() if made_on.get(name) != value]
            self.say(f"measuring what rounds cost: {path} is from another {' and '.join(differing) or 'machine'}")
            return None
        return RoundCosts(costs.dispatch, {choice: cost for choice, cost in costs.rounds.items() if choice in choices})

    def write(self, about: Mapping[str, Any], costs: RoundCosts) -> None:
        """Keeps costs; a folder that is not safe, or cannot be written to, is left alone, and one line says so."""
        rounds = [
            {"drafter": one.drafter, "width": one.width, "drafting_s": cost.drafting, "idle_s": cost.idle}
            for one, cost in sorted(costs.rounds.items())
        ]
        kept = {"made_on": self.made_on, "about": dict(about), "dispatch_s": costs.dispatch, "rounds": rounds}
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.folder.mkdir(exist_ok=True, mode=0o700)
            self.check_folder()
            with tempfile.NamedTemporaryFile("w", dir=self.folder, delete=False, encoding="utf-8") as partial:
                partial.write(json.dumps(kept, indent=1) + "\n")
            os.replace(partial.name, self.path(about))
        except (OSError, ValueError) as error:
            self.say(f"what rounds cost is not kept: {shortened(error)}")


def shortened(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 160 else text[:157] + "..."


def parsed(found: Any) -> RoundCosts:
    """The costs in a file's JSON.

    Raises:
        ValueError, TypeError, KeyError: they are not what `CostFiles.write` wrote.
    """
    rounds = {Choice(str(one["drafter"]), int(one["width"])): cost_of(one) for one in found["rounds"]}
    if PLAIN not in rounds:
        raise ValueError("it has no cost of plain decoding")
    return RoundCosts(positive(found["dispatch_s"]), rounds)


def cost_of(one: Mapping[str, Any]) -> Cost:
    return Cost(positive(one["drafting_s"]), None if one["idle_s"] is None else positive(one["idle_s"]))


def positive(value: Any) -> float:
    if not isinstance(value, float) or not 0 < value < math.inf:
        raise ValueError(f"expected a time above 0, found {value!r}")
    return value


def configuration(programs: Programs, team: Team, rows: int, drawn: bool, weights: str) -> dict[str, Any]:
    """Everything that costs depend on besides the machine: models, shape and how they are computed, as JSON."""
    target = programs.target
    layout = programs.layout
    return {
        "target": str(target.config),
        "schedule": str(target.schedule),
        "mesh": None if target.mesh is None else dict(target.mesh.shape),
        "kernels": target.ops.name,
        "dtype": jnp.dtype(programs.dtype).name,
        "weights": weights,
        "kv_dtype": target.kv_dtype,
        "drafters": [described(member) for member in team.members],
        "masked": team.masked,
        "shape": {"rows": rows, "slots": layout.batch, "capacity": layout.capacity, "drawn": drawn},
        "pages": {"pages": layout.pages, "page_size": layout.page_size},
        "loops": target.loops,
    }


def described(drafter: Any) -> dict[str, Any]:
    """A drafter's kind and its fields, as JSON."""
    own = {each.name: getattr(drafter, each.name) for each in fields(drafter) if each.name != "ops"}
    about = {name: described(value) if isinstance(value, Drafter) else str(value) for name, value in own.items()}
    return {"kind": drafter.name, **about}
