"""Inference plans: throughput, TTFT and TPOT by cores, batch, input and tensor-parallel strategy."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tilewright.hardware.neuron import NeuronInstance
from tilewright.hardware.ranged import refuse_name
from tilewright.perfmodel.builder import BF16
from tilewright.perfmodel.calibration import Calibration, constants_to_sweep, prediction_basis
from tilewright.perfmodel.collectives import algorithms, steps_of
from tilewright.perfmodel.estimate import ProgramEstimate, estimate
from tilewright.perfmodel.inference import HOPS, SCHEDULES, TILED, Phase, Work, inference_program
from tilewright.perfmodel.machine import Machine, Settings, machine_constants, machine_of, with_machine_constants
from tilewright.perfmodel.program import Algorithm, Collective, NeuronProgram
from tilewright.perfmodel.shapes import Config
from tilewright.perfmodel.uncertainty import EVENT_DRAWS, Sweep, sweep_constants

FEW_LAYERS = (1, 3)
"""Numbers of layers that are simulated."""

BASELINES = ("sync", "sequence")
"""Strategies without overlap that the rest are compared with, each under its best algorithm. `sequence` is the stricter one."""

TILE_BYTES = (2**20, 2**21, 2**22)
COLUMN_TILES = (2, 4, 8)
"""Tile sizes and numbers of column tiles of an adaptive plan."""


@dataclass(frozen=True)
class PhaseChoice:
    """Options of a phase.

    Attributes:
        schedule: tensor-parallel strategy.
        streams: number of collective streams.
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
    """Comparison of tensor-parallel strategies for inference: a model, an instance, and shapes.

    Attributes:
        name: name of the model.
        config: configuration of the model.
        instance: Neuron instance.
        cores: tensor-parallel widths.
        batches, inputs: numbers of rows, and prompt tokens per row.
        output: generated tokens; the decode step is the one in the middle.
        schedules: strategies, some of `inference.SCHEDULES`.
        adaptive: search tile sizes, streams and prefetching for each shape and phase.
        calibration: source of fitted constants.
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
            raise ValueError("expected batches of at least 2 rows for domino, which splits them into micro-batches; found 1")
        for cores in self.cores:
            self.machine(cores)

    def machine(self, cores: int, streams: int = 1, changes: Mapping[str, float] | None = None) -> Machine:
        """Returns the machine of a number of cores.

        Raises:
            ValueError: the instance has fewer cores.
        """
        if not 1 <= cores <= self.instance.cores:
            raise ValueError(f"expected 1 to {self.instance.cores} cores of {self.instance.name}, found {cores}")
        found = machine_of(self.instance, Settings(streams=streams), tp=cores)
        fitted = {} if self.calibration is None else self.calibration.constants
        return with_machine_constants(found, {**fitted, **(changes or {})})

    def work(self, phase: Phase, place: tuple[int, int, int], choice: PhaseChoice) -> Work:
        """Returns the work of a prefill, or of a decode step in the middle of the output."""
        tokens, rows, _ = place
        positions = tokens if phase == "prefill" else tokens + self.output // 2
        return Work(phase, rows, positions, choice.tile_bytes, choice.tiles, choice.prefetch, choice.algorithm)

    @property
    def places(self) -> list[tuple[int, int, int]]:
        """All combinations of input, batch and cores."""
        return [(tokens, rows, cores) for tokens in self.inputs for rows in self.batches for cores in self.cores]


def phase_estimate(
    plan: InferencePlan,
    phase: Phase,
    place: tuple[int, int, int],
    choice: PhaseChoice,
    changes: Mapping[str, float] | None = None,
) -> ProgramEstimate:
    """Estimates a phase under a choice of options."""
    tokens, _, cores = place
    machine = plan.machine(cores, choice.streams, changes)
    work = plan.work(phase, place, choice)
    room = tokens + plan.output

    def build(layers: int) -> NeuronProgram:
        return inference_program(plan.config, machine, work, choice.schedule, layers, room)

    return estimate(plan.config.num_layers, FEW_LAYERS, build, machine)


def tried_algorithms(machine: Machine, size: float) -> list[Algorithm]:
    """Returns the algorithms to simulate for all-reduces of `size` bytes: the fastest one, and one with least memory traffic.

    The latter may win where compute loads weights at the same time.
    """
    found = {name: Collective("all-reduce", size, algorithm=name) for name in algorithms(machine.mesh, "tp")}  # type: ignore[arg-type]
    fastest = min(found, key=lambda name: machine.collective_s(found[name]))
    steps = {name: steps_of(machine.mesh, one) for name, one in found.items()}
    lightest = min(found, key=lambda name: (sum(step.bytes * step.hbm_touches for step in steps[name]), name != fastest))
    return list(dict.fromkeys([fastest, lightest]))  # type: ignore[list-item]


def choices(plan: InferencePlan, phase: Phase, schedule: str, place: tuple[int, int, int]) -> list[PhaseChoice]:
    """Returns the options to try for a strategy: algorithms of collectives; for `domino` and `column`, a second stream."""
    machine = plan.machine(place[2])
    several = schedule in ("domino", "column") and machine.cc_cores > 1
    size = BF16 * plan.work(phase, place, PhaseChoice(schedule)).tokens * plan.config.hidden_size
    names: list[Algorithm] = ["auto"] if schedule in HOPS or place[2] == 1 else tried_algorithms(machine, size)
    return [PhaseChoice(schedule, streams, name) for streams in ((1, 2) if several else (1,)) for name in names]


def best_choice(
    plan: InferencePlan, phase: Phase, place: tuple[int, int, int], schedule: str
) -> tuple[PhaseChoice, ProgramEstimate]:
    """Finds the fastest options of a phase under a strategy."""
    tried = {choice: phase_estimate(plan, phase, place, choice) for choice in choices(plan, phase, schedule, place)}
    best = min(tried, key=lambda choice: tried[choice].total_s)
    if not plan.adaptive:
        return best, tried[best]
    moves: list[Callable[[PhaseChoice], Iterator[PhaseChoice]]] = [
        lambda choice: (replace(choice, prefetch=each) for each in (True, False)),
        lambda choice: (replace(choice, tile_bytes=each) for each in TILE_BYTES),
        lambda choice: (replace(choice, tiles=each) for each in (COLUMN_TILES if schedule in TILED else (choice.tiles,))),
    ]
    for move in moves:  # one option after another: their gains hardly interact
        for choice in move(best):
            if choice not in tried:
                tried[choice] = phase_estimate(plan, phase, place, choice)
        best = min(tried, key=lambda choice: tried[choice].total_s)
    return best, tried[best]


def compare(plan: InferencePlan, done: Callable[[str], None] = lambda _: None) -> list[dict[str, Any]]:
    """Returns a record per shape and strategy, with metrics named as in docs/metrics.md; baselines first.

    Args:
        done: called with a description of each finished record.
    """
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
    """Returns the relative improvement of a ratio to the baseline."""
    if ratio is None:
        return None
    return 1 - ratio if better == "less" else ratio - 1


def record(plan: InferencePlan, place: tuple[int, int, int], schedule: str) -> dict[str, Any]:
    """Returns the record of both phases of a shape under a strategy."""
    tokens, rows, cores = place
    (options, (prefill, decode)) = zip(
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
        "prefill": {**options[0].record(), **prefill.record()},
        "decode": {**options[1].record(), **decode.record()},
        "notes": list(decode.notes),
    }


def winner(records: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Returns the record with most tokens per second, among those that fit into memory if any do; ties by TTFT."""
    fitting = [one for one in records if one["fits"]] or list(records)
    return max(fitting, key=lambda one: (one["tokens_per_s"], -one["ttft_ms"]))


def sweeps(
    plan: InferencePlan,
    records: Sequence[Mapping[str, Any]],
    best: Mapping[str, Any],
    draws: int = EVENT_DRAWS,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, Sweep]:
    """Computes ranges of both phases of every strategy at the winner's cores, batch and input: `ttft_ms` and `tpot_ms`.

    Each strategy keeps its best options at the default constants.

    Args:
        records: records of `compare`.
        best: record with the shape of the comparison.
        progress: called after each draw.
    """
    place = (best["input_tokens"], best["batch_rows"], best["cores"])
    same = [one for one in records if (one["input_tokens"], one["batch_rows"], one["cores"]) == place]
    constants = constants_to_sweep(plan.calibration, machine_constants(plan.machine(place[2])))

    def ranges(phase: Phase, unit: str) -> Sweep:
        choice_by_name = {one["schedule"]: choice_of(one, phase) for one in same}

        def predict(changes: Mapping[str, float]) -> dict[str, float]:
            estimates = {name: phase_estimate(plan, phase, place, one, changes) for name, one in choice_by_name.items()}
            return {name: 1e3 * one.total_s for name, one in estimates.items()}

        return sweep_constants(
            predict, constants, draws, unit=unit, progress=progress, basis=prediction_basis(plan.calibration)
        )

    return {"ttft_ms": ranges("prefill", "TTFT ms"), "tpot_ms": ranges("decode", "TPOT ms")}


def choice_of(record: Mapping[str, Any], phase: Phase) -> PhaseChoice:
    """Reads the options of a phase from a record."""
    values = record[phase]
    tiling = (1024 * values["tile_kib"], values["tiles"], values["prefetch"])
    return PhaseChoice(record["schedule"], values["streams"], values["algorithm"] or "auto", *tiling)
