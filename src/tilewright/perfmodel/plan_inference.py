"""Plans of inference: throughput, time to the first token and time per token by cores, batch, input and schedule."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tilewright.hardware.neuron import NeuronInstance
from tilewright.hardware.ranged import refuse_name
from tilewright.perfmodel.builder import BF16
from tilewright.perfmodel.calibration import Calibration, basis_of, swept_with
from tilewright.perfmodel.collectives import algorithms, steps_of
from tilewright.perfmodel.estimate import ProgramEstimate, estimate
from tilewright.perfmodel.inference import HOPS, SCHEDULES, TILED, Phase, Work, inference_program
from tilewright.perfmodel.machine import Machine, Settings, machine_constants, machine_of, with_figures
from tilewright.perfmodel.program import Algorithm, Collective, NeuronProgram
from tilewright.perfmodel.shapes import Config
from tilewright.perfmodel.uncertainty import EVENT_DRAWS, Sweep, swept

FEW_LAYERS = (1, 3)
"""Layers that are simulated."""

BASELINES = ("sync", "sequence")
"""Schedules that the others are compared with, each under the algorithm that suits it best: nothing runs beside their
collectives, and `sequence` is what a good peer does."""

TILE_BYTES = (2**20, 2**21, 2**22)
COLUMN_TILES = (2, 4, 8)
"""Tile sizes and numbers of column tiles that an adaptive plan tries."""


@dataclass(frozen=True)
class PhaseChoice:
    """Options of a phase: schedule, streams, tiles and prefetching.

    Attributes:
        streams: of collectives.
        algorithm, tile_bytes, tiles, prefetch: see `inference.Work`.
    """

    schedule: str
    streams: int = 1
    algorithm: Algorithm = "auto"
    tile_bytes: float = 2**21
    tiles: int = 2
    prefetch: bool = False

    def record(self) -> dict[str, Any]:
        runtime = {"streams": self.streams, "algorithm": None if self.schedule in HOPS else self.algorithm}
        return {**runtime, "tile_kib": self.tile_bytes / 1024, "tiles": self.tiles, "prefetch": self.prefetch}


@dataclass(frozen=True)
class InferencePlan:
    """Comparison of inference schedules: a model, an instance, and the shapes to compare them at.

    Attributes:
        name: of the model.
        cores: tensor-parallel widths.
        batches, inputs: rows, and prompt tokens of each.
        output: tokens generated; a decoding step is taken in the middle of them.
        schedules: some of `inference.SCHEDULES`.
        adaptive: whether tile sizes, streams and prefetching are searched for each shape and phase.
        settings: of the runtime; streams are the plan's.
        calibration: whose fitted constants are taken.
    """

    name: str
    config: Config = field(repr=False)
    instance: NeuronInstance
    cores: tuple[int, ...]
    batches: tuple[int, ...]
    inputs: tuple[int, ...]
    output: int
    schedules: tuple[str, ...] = ("sync", "sequence", "domino", "ring")
    adaptive: bool = False
    settings: Settings = field(default_factory=Settings)
    calibration: Calibration | None = None

    def __post_init__(self) -> None:
        for schedule in self.schedules:
            if schedule not in SCHEDULES:
                refuse_name("a schedule", schedule, SCHEDULES)
        for name in ("cores", "batches", "inputs", "schedules"):
            if not getattr(self, name):
                raise ValueError(f"expected at least one of {name}, found none")
        for name, values in (("batch", self.batches), ("input", self.inputs), ("output", (self.output,))):
            if min(values) < 1:
                raise ValueError(f"expected {name} from 1, found {min(values)}")
        if "domino" in self.schedules and min(self.batches) < 2:
            raise ValueError("expected batches of at least 2 rows for domino, whose micro-batches divide them; found 1")
        for cores in self.cores:
            self.machine(cores)

    def machine(self, cores: int, streams: int = 1, changes: Mapping[str, float] | None = None) -> Machine:
        """The cores, which the instance must have.

        Raises:
            ValueError: it has not.
        """
        if not 1 <= cores <= self.instance.cores:
            had = f"1 to {self.instance.cores} cores of {self.instance.name}"
            raise ValueError(f"expected {had}, found {cores}")
        found = machine_of(self.instance, replace(self.settings, streams=streams), tp=cores)
        fitted = {} if self.calibration is None else self.calibration.constants
        return with_figures(found, {**fitted, **(changes or {})})

    def work(self, phase: Phase, place: tuple[int, int, int], choice: PhaseChoice) -> Work:
        """A prefill, or a decoding step in the middle of the output."""
        tokens, rows, _ = place
        positions = tokens if phase == "prefill" else tokens + self.output // 2
        cut = (choice.tile_bytes, choice.tiles, choice.prefetch)
        return Work(phase, rows, positions, *cut, choice.algorithm)

    @property
    def places(self) -> list[tuple[int, int, int]]:
        """Input, batch and cores of everything that is compared."""
        return [(tokens, rows, cores) for tokens in self.inputs for rows in self.batches for cores in self.cores]


def phase_estimate(
    plan: InferencePlan,
    phase: Phase,
    place: tuple[int, int, int],
    choice: PhaseChoice,
    changes: Mapping[str, float] | None = None,
) -> ProgramEstimate:
    """Figures of a phase under a choice."""
    tokens, _, cores = place
    machine = plan.machine(cores, choice.streams, changes)
    work = plan.work(phase, place, choice)
    room = tokens + plan.output

    def build(layers: int) -> NeuronProgram:
        return inference_program(plan.config, machine, work, choice.schedule, layers, room)

    return estimate(plan.config.num_layers, FEW_LAYERS, build, machine)


def tried_algorithms(machine: Machine, size: float) -> list[Algorithm]:
    """Algorithms that are worth simulating for all-reduces of so many bytes: the fastest by itself, and the one that passes
    fewest bytes through memory, which is better where compute loads its weights meanwhile."""
    found = {name: Collective("all-reduce", size, algorithm=name) for name in algorithms(machine.mesh, "tp")}  # type: ignore[arg-type]
    fastest = min(found, key=lambda name: machine.collective_s(found[name]))
    steps = {name: steps_of(machine.mesh, one) for name, one in found.items()}
    lightest = min(found, key=lambda name: (sum(step.bytes * step.hbm_touches for step in steps[name]), name != fastest))
    return list(dict.fromkeys([fastest, lightest]))  # type: ignore[list-item]


def choices(plan: InferencePlan, phase: Phase, schedule: str, place: tuple[int, int, int]) -> list[PhaseChoice]:
    """Options to try for a schedule, whatever else is searched: algorithms of its collectives, and for domino and columns
    another stream where it helps."""
    machine = plan.machine(place[2])
    several = schedule in ("domino", "column") and machine.cc_cores > 1
    size = BF16 * plan.work(phase, place, PhaseChoice(schedule)).tokens * plan.config.hidden_size
    names: list[Algorithm] = ["auto"] if schedule in HOPS or place[2] == 1 else tried_algorithms(machine, size)
    return [PhaseChoice(schedule, streams, name) for streams in ((1, 2) if several else (1,)) for name in names]


def best_choice(
    plan: InferencePlan, phase: Phase, place: tuple[int, int, int], schedule: str
) -> tuple[PhaseChoice, ProgramEstimate]:
    """The fastest way to run a phase under a schedule."""
    tried = {choice: phase_estimate(plan, phase, place, choice) for choice in choices(plan, phase, schedule, place)}
    best = min(tried, key=lambda choice: tried[choice].total_s)
    if not plan.adaptive:
        return best, tried[best]
    moves: list[Callable[[PhaseChoice], Iterator[PhaseChoice]]] = [
        lambda choice: (replace(choice, prefetch=each) for each in (True, False)),
        lambda choice: (replace(choice, tile_bytes=each) for each in TILE_BYTES),
        lambda choice: (replace(choice, tiles=each) for each in (COLUMN_TILES if schedule in TILED else (choice.tiles,))),
    ]
    for move in moves:  # one after another: what one gains hardly depends on the others
        for choice in move(best):
            if choice not in tried:
                tried[choice] = phase_estimate(plan, phase, place, choice)
        best = min(tried, key=lambda choice: tried[choice].total_s)
    return best, tried[best]


def compare(plan: InferencePlan, done: Callable[[str], None] = lambda _: None) -> list[dict[str, Any]]:
    """A record for each place and schedule, named as in docs/metrics.md; the baselines first."""
    found = []
    for place in plan.places:
        records = {}
        for schedule in sorted(plan.schedules, key=lambda name: name not in BASELINES):
            records[schedule] = record(plan, place, schedule)
            done(f"{place[2]} cores, {schedule}")
        for one in records.values():
            for baseline, over in zip(BASELINES, ("", "_over_sequence"), strict=True):
                base = records.get(baseline)
                for name, better in (("ttft_ms", "less"), ("tpot_ms", "less"), ("tokens_per_s", "more")):
                    ratio = None if base is None else one[name] / base[name]
                    one[f"{name.removesuffix('_ms')}_gain{over}"] = ratio_gain(ratio, better)
        found += records.values()
    return found


def ratio_gain(ratio: float | None, better: str) -> float | None:
    """By which share something became better."""
    if ratio is None:
        return None
    return 1 - ratio if better == "less" else ratio - 1


def record(plan: InferencePlan, place: tuple[int, int, int], schedule: str) -> dict[str, Any]:
    """Both phases of a place under a schedule."""
    tokens, rows, cores = place
    (ways, (prefill, decode)) = zip(
        *(best_choice(plan, phase, place, schedule) for phase in ("prefill", "decode")), strict=True
    )
    return {
        "schedule": schedule,
        "cores": cores,
        "batch_rows": rows,
        "input_tokens": tokens,
        "output_tokens": plan.output,
        "ttft_ms": 1e3 * prefill.total_s,
        "tpot_ms": 1e3 * decode.total_s,
        "tokens_per_s": rows / decode.total_s,
        "memory_gib": max(prefill.memory_bytes, decode.memory_bytes) / 2**30,
        "memory_limit_gib": decode.hbm_bytes / 2**30,
        "fits": prefill.fits and decode.fits,
        "prefill": {**ways[0].record(), **prefill.record()},
        "decode": {**ways[1].record(), **decode.record()},
        "notes": list(decode.notes),
    }


def winner(records: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The record with most tokens a second, of what fits where anything does; of equal ones the first token sooner."""
    fitting = [one for one in records if one["fits"]] or list(records)
    return max(fitting, key=lambda one: (one["tokens_per_s"], -one["ttft_ms"]))


def sweeps(
    plan: InferencePlan,
    records: Sequence[Mapping[str, Any]],
    best: Mapping[str, Any],
    draws: int = EVENT_DRAWS,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, Sweep]:
    """Ranges of both phases of every schedule at the winner's cores, batch and input, by `ttft_ms` and `tpot_ms`.

    Each schedule keeps the options that are best at the constants that are used.

    Args:
        records: of `compare`.
        best: one of them, at whose place the schedules are set against each other.
        progress: is called after each draw.
    """
    place = (best["input_tokens"], best["batch_rows"], best["cores"])
    same = [one for one in records if (one["input_tokens"], one["batch_rows"], one["cores"]) == place]
    constants = swept_with(plan.calibration, machine_constants(plan.machine(place[2])))

    def ranges(phase: Phase, unit: str) -> Sweep:
        taken = {one["schedule"]: choice_of(one, phase) for one in same}

        def predict(changes: Mapping[str, float]) -> dict[str, float]:
            return {name: 1e3 * phase_estimate(plan, phase, place, one, changes).total_s for name, one in taken.items()}

        return swept(predict, constants, draws, unit=unit, progress=progress, basis=basis_of(plan.calibration))

    return {"ttft_ms": ranges("prefill", "TTFT ms"), "tpot_ms": ranges("decode", "TPOT ms")}


def choice_of(record: Mapping[str, Any], phase: Phase) -> PhaseChoice:
    """The options of a phase that a record is of."""
    of = record[phase]
    cut = (1024 * of["tile_kib"], of["tiles"], of["prefetch"])
    return PhaseChoice(record["schedule"], of["streams"], of["algorithm"] or "auto", *cut)
