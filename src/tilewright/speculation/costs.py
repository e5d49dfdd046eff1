"""Costs of rounds on this machine: measured when a shape is first used and stored in a file for later processes."""

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
from tilewright.parallel.mesh import broadcast_seconds
from tilewright.runtime.interfaces import PLAIN, Choice, Drafter
from tilewright.runtime.programs import STEPS_PER_DISPATCH, Programs
from tilewright.runtime.runner import ModelRunner
from tilewright.runtime.sampling import Sampling, row_sampling
from tilewright.runtime.state import StepInfo
from tilewright.speculation.drafters.ngrams_first import NGramsFirst
from tilewright.speculation.policy import Cost
from tilewright.speculation.team import Team

BUDGET_S = 0.4
"""Time limit for measuring one choice, unless a single run takes longer."""
RUN_S = 0.02
"""Length of a run. Rounds are repeated to fill it, about as many as a usual dispatch has: the first rounds after a pause are
slower."""
REST_S = 0.002
"""Pause before each run, like the one in which a host processes the previous dispatch. A dispatch after a pause takes several
times as long as one that follows at once, since threads sleep and caches cool down."""
LEAST_SHARE = 0.2
"""Least share of a run that is attributed to its rounds. The rest is the cost of a dispatch, which is measured apart."""
LEAST_DISPATCH_S = 1e-9
"""Lower bound of a dispatch's cost; stored times are above 0."""
DRAWN = Sampling(temperature=1.0, top_p=0.9, seed=0)
"""Sampling parameters of measured rows that sample their tokens."""
IDLE_ROUNDS = 8
IDLE_RUNS = 5
"""Limits for measuring idle rounds: rounds per run, and runs, of which the fastest counts."""
RUNS = 15
"""Maximum number of runs of a choice. The fastest counts, since disturbances only make a run longer."""


@dataclass(frozen=True)
class RoundCosts:
    """Costs of one shape.

    Attributes:
        dispatch: fixed cost of a dispatch in seconds.
        rounds: cost of each measured choice.
    """

    dispatch: float
    rounds: dict[Choice, Cost]


def measure(timer: "RoundTimer", choices: Collection[Choice]) -> RoundCosts:
    """Times rounds of the choices alternately, in the middle of empty caches.

    Args:
        choices: choices to measure; plain decoding is one of them.
    """
    timer.write_texts()
    # Rounds in which n-grams may draft in a model's place are measured with n-gram drafts and without.
    timed = [(choice, True) for choice in choices] + [(choice, False) for choice in choices if timer.may_draft_ngrams(choice)]
    rounds = dict.fromkeys(timed, 2)
    runs: dict[tuple[Choice, bool], list[Run]] = {key: [] for key in timed}
    empty: list[float] = []
    began = time.perf_counter()
    for run in range(RUNS + 1):
        for choice, repeats in timed[:: -1 if run % 2 else 1]:
            timed_run = timer.timed(choice, rounds[choice, repeats], repeats)
            if run == 0:  # the first run also touches memory for the first time
                rounds[choice, repeats] = max(2, timer.rounds_for(choice, timer.timed(choice, 2, repeats)))
                continue
            runs[choice, repeats].append(timed_run)
            empty.append(timer.empty())
        if run and timer.broadcast(time.perf_counter() - began) > BUDGET_S * len(rounds):
            break
    dispatch = max(min(empty), LEAST_DISPATCH_S)
    fastest = {key: min(repetitions).beyond(dispatch) for key, repetitions in runs.items()}
    step = min(run.seconds_per_round for run in fastest.values())
    costs: dict[Choice, Cost] = {}
    for (choice, repeats), run in fastest.items():
        if repeats:
            costs[choice] = run.cost(step, timer.drafter.variant(choice).may_be_idle)
        else:
            costs[choice] = run.cost(costs[choice].drafting, may_be_idle=True)
    return RoundCosts(dispatch, with_idle_rounds(timer, dispatch, no_dearer_when_narrower(costs)))


def with_idle_rounds(timer: "RoundTimer", dispatch: float, costs: Mapping[Choice, Cost]) -> dict[Choice, Cost]:
    """Adds the costs of idle rounds, measured relative to decode steps on a text without repetitions.

    An idle round runs a decode step within the program of a wider round. Steps are timed alternately on the same text, since
    sampling may be slower there. If the model repeats itself, so that no run has mostly idle rounds, the cost is a step's.
    """
    step = costs[PLAIN].drafting
    rounds = max(2, min(IDLE_ROUNDS, math.ceil(RUN_S / step)))
    # Idle rounds of all widths of a drafter run the same step.
    narrow = {choice.drafter: choice for choice in sorted(costs, reverse=True) if timer.drafter.variant(choice).may_be_idle}
    idle: dict[str, float] = {}
    for name, choice in narrow.items():
        began = time.perf_counter()
        fastest_round = math.inf
        fastest_step = math.inf
        for _ in range(IDLE_RUNS):
            run = timer.timed(choice, rounds, repeats=False).beyond(dispatch)
            fastest_step = min(fastest_step, timer.timed(PLAIN, rounds, repeats=False).beyond(dispatch).seconds / rounds)
            if run.idle > run.drafting:
                fastest_round = min(fastest_round, (run.seconds - run.drafting * costs[choice].drafting) / run.idle)
            if timer.broadcast(time.perf_counter() - began) > BUDGET_S:
                break
        idle[name] = 0.0 if fastest_round == math.inf else fastest_round / fastest_step * step
    return {
        choice: cost if cost.idle is None else replace(cost, idle=max(cost.idle, idle.get(choice.drafter, 0.0)))
        for choice, cost in costs.items()
    }


class Run(NamedTuple):
    """A timed dispatch: seconds, and the numbers of its drafting and idle rounds (see `policy.Cost`)."""

    seconds: float
    drafting: int
    idle: int = 0

    @property
    def seconds_per_round(self) -> float:
        """Average seconds of a round."""
        return self.seconds / (self.drafting + self.idle)

    def beyond(self, dispatch: float) -> "Run":
        """Returns the run without the fixed cost of its dispatch."""
        return self._replace(seconds=max(self.seconds - dispatch, LEAST_SHARE * self.seconds))

    def cost(self, idle: float, may_be_idle: bool) -> Cost:
        """Returns the cost of the rounds. If the drafter may be idle, each idle round is taken to cost `idle` seconds."""
        if not may_be_idle:
            return Cost(self.seconds_per_round)
        drafting = (self.seconds - self.idle * idle) / max(self.drafting, 1)
        return Cost(max(drafting, idle), idle)


def no_dearer_when_narrower(costs: Mapping[Choice, Cost]) -> dict[Choice, Cost]:
    """Lowers each cost to that of the drafter's wider blocks, and a step's to the lowest: disturbances only lengthen runs."""
    best = {**costs, PLAIN: Cost(min(cost.drafting for cost in costs.values()))}
    for choice in sorted(costs, reverse=True):
        wider = [best[other].drafting for other in best if other.differs_in_width(choice) and other.verified > choice.verified]
        drafting = min([best[choice].drafting, *wider])
        idle = best[choice].idle
        best[choice] = Cost(drafting, None if idle is None else min(idle, drafting))
    return best


def no_dearer_with_fewer_rows(costs: Mapping[int, RoundCosts]) -> dict[int, RoundCosts]:
    """Lowers the costs of each batch size, relative to a step, to those of larger ones.

    A row more never makes blocks cheaper beside a step, and disturbances lengthen the long runs of blocks most.

    Args:
        costs: costs by number of rows.
    """
    found: dict[int, RoundCosts] = {}
    least: dict[Choice, Cost] = {}
    for rows in sorted(costs, reverse=True):
        step = costs[rows].rounds[PLAIN].drafting
        for choice, cost in costs[rows].rounds.items():
            relative = cost.times(1 / step)
            larger = least.get(choice, relative)
            idle = None if relative.idle is None or larger.idle is None else min(relative.idle, larger.idle)
            least[choice] = Cost(min(relative.drafting, larger.drafting), idle)
        found[rows] = RoundCosts(costs[rows].dispatch, {choice: least[choice].times(step) for choice in costs[rows].rounds})
    return found


class RoundTimer:
    """Times rounds in the first slots of a runner without requests. Each row starts in the middle of its cache.

    Attributes:
        start, end: first position of the timed rounds and end of the cache, for each row, int32 `[B]`.
        repeated, varied: texts with and without repetitions, int32 `[B, capacity]`; see `write_texts`.
        sampling: sampling parameters of the rows.
    """

    def __init__(self, runner: ModelRunner, rows: int, drawn: bool = False):
        """Args:
        rows: rows of the batch.
        drawn: True samples tokens, False decodes greedily.
        """
        programs = runner.programs
        layout = runner.programs.layout
        assert programs.drafter is not None, "only a team's rounds are timed"
        self.runner = runner
        self.rows = rows
        self.drafter = programs.drafter
        self.vocab_size = programs.target.config.vocab_size
        self.sampling = DRAWN if drawn else Sampling()
        # In a small pool rows share pages, which takes as long to read and write.
        fewest_pages = -(-(2 * self.drafter.block_size + 4) // layout.page_size)
        row_pages = min(max(layout.pages // rows, fewest_pages), layout.capacity // layout.page_size)
        slots = np.ones(layout.batch, np.int32)
        positions = row_pages * layout.page_size
        # The last block is written in one piece: it may pass the row's end, but not its pages.
        reserve = 0 if positions == layout.capacity else self.drafter.block_size
        self.start = slots * (positions // 2)
        self.end = slots * max(positions // 2 + 2, positions - reserve)
        # Each row has its own text: rows of one text would choose the same experts.
        first_tokens = np.arange(layout.batch, dtype=np.int32)[:, None]
        self.repeated = np.repeat(first_tokens % self.vocab_size, layout.capacity, axis=1)
        self.varied = (1 + first_tokens + np.arange(layout.capacity, dtype=np.int32)[None]) % self.vocab_size
        self.table = np.full((layout.groups, rows, layout.capacity // layout.page_size), UNMAPPED, np.int32)
        for table, pages in zip(self.table, (layout.pages, *(group.pages for group in layout.windows)), strict=True):
            share = max(1, min(pages // rows, row_pages))  # a window's pages serve several columns that lie far apart
            table[:, :row_pages] = (np.arange(rows)[:, None] * share + np.arange(row_pages)[None] % share) % pages
        if runner.state is None:
            runner.reset()

    def advance(self, rounds: int, choice: Choice) -> StepInfo:
        """Runs rounds and waits for the result."""
        programs = self.runner.programs
        key = programs.round_key(choice, self.rows, programs.table.capacities[-1], self.runner.sampling)
        slots = np.arange(self.rows, dtype=np.int32)
        running = np.ones(self.rows, bool)
        return StepInfo.unpacked(self.runner.run_rounds(key, slots, self.table, running, rounds))

    def broadcast(self, seconds: float) -> float:
        """Returns the time of the first process, so that all processes agree."""
        return broadcast_seconds(self.runner.programs.target.mesh, seconds)

    def may_draft_ngrams(self, choice: Choice) -> bool:
        """Returns True if n-grams may draft in the place of the choice's drafter."""
        assert isinstance(self.drafter, Team)
        place = self.drafter.place(choice)
        return place is not None and isinstance(self.drafter.members[place], NGramsFirst)

    def rewind(self, repeats: bool) -> None:
        """Moves every row back to the middle of one of the texts."""
        state = self.runner.state
        start = self.start
        assert state is not None
        text = self.repeated if repeats else self.varied
        rows = {"tokens": text, "last_position": start, "end": self.end, "done": start < 0, "ignore_eos": start > 0}
        contexts = replace(state.draft_cache, lengths=(start,) * len(state.draft_cache.lengths))
        sampling = row_sampling([self.sampling] * len(start), start)
        self.runner.state = replace(state, **rows, sampling=sampling, draft_cache=contexts)

    def write_texts(self) -> None:
        """Writes the two texts.

        In `repeated`, every continuation of the target occurred before, followed by another token: an n-gram drafter finds a
        match in each round, and each round adds one token. In `varied`, tokens differ as far as the vocabulary allows, and each
        row begins with a different one.
        """
        self.timed(PLAIN, 2)  # the first run also touches memory for the first time
        rounds = self.rounds_for(PLAIN, self.timed(PLAIN, 2), BUDGET_S)
        self.rewind(repeats=True)
        room = self.start[0] // 3 - 2  # the row's first token fills the rest
        tokens = self.advance(rounds, PLAIN).tokens[:room, :, 0]
        begin = self.repeated[: tokens.shape[1], -1][None]
        before = np.concatenate([begin, tokens[:-1]])
        after = np.concatenate([tokens[1:], begin])
        text = np.stack([before, tokens, (after + 1) % self.vocab_size], axis=1)
        self.repeated[: tokens.shape[1], : 3 * len(tokens)] = text.reshape(-1, tokens.shape[1]).T

    def rounds_for(self, choice: Choice, timed: Run, target_s: float = RUN_S) -> int:
        """Returns the number of rounds that fill `target_s` seconds and fit into the cache."""
        room = int(self.end[0] - self.start[0]) - self.drafter.variant(choice).block_size
        return max(1, min(STEPS_PER_DISPATCH, room, math.ceil(target_s / timed.seconds * (timed.drafting + timed.idle))))

    def empty(self) -> float:
        """Returns the seconds of a dispatch without rounds; 0 without loops on the device.

        An empty dispatch is short and seldom disturbed. A difference of two long dispatches would be mostly noise.
        """
        return self.timed(PLAIN, 0).seconds if self.runner.programs.target.loops else 0.0

    def timed(self, choice: Choice, rounds: int, repeats: bool = True) -> Run:
        """Times a dispatch of `rounds` rounds from the middle of one of the texts."""
        self.rewind(repeats)
        rest = time.perf_counter() + REST_S
        while time.perf_counter() < rest:  # busy: a processor that slept would wake up slow
            pass
        began = time.perf_counter()
        infos = self.advance(rounds, choice)
        seconds = self.broadcast(time.perf_counter() - began)
        drafts = (infos.drafted > 0) & ~infos.from_ngrams
        drafting = len(infos.drafted) if choice == PLAIN else int(np.sum(np.any(drafts, axis=1)))
        return Run(seconds, drafting, len(infos.drafted) - drafting)


class CostFiles:
    """Measured costs on disk: one file per configuration and shape, in a folder that only its owner may write to.

    Args:
        folder: folder of the files; created if missing.
        dependencies: names that costs depend on besides the machine and JAX, such as kernel libraries.
        notify: called with one line when a file cannot be used.
    """

    def __init__(self, folder: Path, dependencies: Collection[str], notify: Callable[[str], None]):
        self.folder = folder
        self.notify = notify
        self.made_on = {"machine": digest(*dependencies), "chip": chip_name(), "jax": jax.__version__}

    def check_folder(self) -> None:
        """Raises a `ValueError` if another user may write to the folder."""
        for folder in (self.folder.parent, self.folder):
            require_private(folder)

    def path(self, about: Mapping[str, Any]) -> Path:
        return self.folder / (hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16] + ".json")

    def read(self, about: Mapping[str, Any], choices: Collection[Choice]) -> RoundCosts | None:
        """Returns the stored costs of the given choices; None without a usable file."""
        path = self.path(about)
        try:
            self.check_folder()
            content = json.loads(path.read_text(encoding="utf-8"))
            made_on = dict(content["made_on"])
            costs = parsed(content)
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError, OSError) as error:
            self.notify(f"measuring the cost of rounds: cannot use {path} ({shortened(error)})")
            return None
        if made_on != self.made_on:
            differing = [name for name, value in self.made_on.items() if made_on.get(name) != value]
            self.notify(f"measuring the cost of rounds: {path} was written with another {' and '.join(differing) or 'machine'}")
            return None
        return RoundCosts(costs.dispatch, {choice: cost for choice, cost in costs.rounds.items() if choice in choices})

    def write(self, about: Mapping[str, Any], costs: RoundCosts) -> None:
        """Writes costs to a file. Prints one line instead if the folder is unsafe or not writable."""
        rounds = [
            {
                "drafter": choice.drafter,
                "width": choice.width,
                "nodes": choice.nodes,
                "drafting_s": cost.drafting,
                "idle_s": cost.idle,
            }
            for choice, cost in sorted(costs.rounds.items())
        ]
        content = {"made_on": self.made_on, "about": dict(about), "dispatch_s": costs.dispatch, "rounds": rounds}
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.folder.mkdir(exist_ok=True, mode=0o700)
            self.check_folder()
            with tempfile.NamedTemporaryFile("w", dir=self.folder, delete=False, encoding="utf-8") as partial:
                partial.write(json.dumps(content, indent=1) + "\n")
            os.replace(partial.name, self.path(about))
        except (OSError, ValueError) as error:
            self.notify(f"the cost of rounds was not saved: {shortened(error)}")


def shortened(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 160 else text[:157] + "..."


def parsed(content: Any) -> RoundCosts:
    """Parses the JSON of a file.

    Raises:
        ValueError, TypeError, KeyError: `CostFiles.write` did not write this.
    """
    rounds = {
        Choice(str(entry["drafter"]), int(entry["width"]), int(entry.get("nodes", 0))): cost_of(entry)
        for entry in content["rounds"]
    }
    if PLAIN not in rounds:
        raise ValueError("expected the cost of plain decoding, found none")
    return RoundCosts(positive(content["dispatch_s"]), rounds)


def cost_of(entry: Mapping[str, Any]) -> Cost:
    return Cost(positive(entry["drafting_s"]), None if entry["idle_s"] is None else positive(entry["idle_s"]))


def positive(value: Any) -> float:
    if not isinstance(value, float) or not 0 < value < math.inf:
        raise ValueError(f"expected a time above 0, found {value!r}")
    return value


def configuration(programs: Programs, team: Team, rows: int, drawn: bool, weights: str) -> dict[str, Any]:
    """Returns everything that costs depend on besides the machine, as JSON: models, shape, dtypes and kernels."""
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
        **({} if programs.models.corpus is None else {"corpus": len(programs.models.corpus.tokens)}),
    }


def described(drafter: Any) -> dict[str, Any]:
    """Returns a drafter's kind and fields as JSON."""
    values = {field.name: getattr(drafter, field.name) for field in fields(drafter) if field.name != "ops"}
    about = {name: described(value) if isinstance(value, Drafter) else str(value) for name, value in values.items()}
    return {"kind": drafter.name, **about}
