"""`tilewright neuron simulate`: a program on a simulated Neuron chip."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from rich.console import Console
from rich.progress import Progress

from tilewright.cli.calibrate import NeuronOptions, half_layers, print_notes, print_ranges
from tilewright.cli.options import option_class, settings
from tilewright.cli.outputs import TracedFiles
from tilewright.hardware.neuron import instance_of
from tilewright.hardware.tpu import chip_of
from tilewright.metrics.metric import significant
from tilewright.metrics.tables import print_table
from tilewright.models.published_configs import model_config
from tilewright.perfmodel.calibration import Calibration, constants_to_sweep, prediction_basis
from tilewright.perfmodel.inference import Work, inference_program
from tilewright.perfmodel.machine import Machine, Settings, machine_constants, machine_of, with_machine_constants
from tilewright.perfmodel.program import NeuronProgram
from tilewright.perfmodel.programs import dflash_program, diffusion_program, gather_reduce_program, hlo_program
from tilewright.perfmodel.results import MOMENTS, SimulationResult, trace
from tilewright.perfmodel.schedule import read_schedule
from tilewright.perfmodel.simulate import simulate
from tilewright.perfmodel.training import TrainingStep, training_program
from tilewright.perfmodel.uncertainty import EVENT_DRAWS, Sweep, sweep_constants
from tilewright.report.charts import LaneChart
from tilewright.report.neuron import engines_chart, engines_table, write_simulation

MOST_OPERATIONS = 48_000
LEAST_DRAWS = 8
"""Limits of a sweep without `--draws`: simulated operations in all draws together, and the fewest draws."""

Kind = Literal["decode", "prefill", "training", "dflash", "diffusion", "gather-reduce", "hlo"]


@dataclass(frozen=True)
class RuntimeSettings:
    """Settings of the Neuron runtime.

    Attributes:
        streams: streams of collectives. By default 1.
        dma_packet_size: bytes of the packets of compute. By default 4096.
        cc_packet_size: bytes of the packets of collectives, one value per stream. By default 65536.
    """

    streams: int = 1
    dma_packet_size: int = 4096
    cc_packet_size: tuple[int, ...] = (65536,)


@dataclass(frozen=True)
class GraphSettings:
    """Settings of a gather-reduce.

    Attributes:
        nodes: number of nodes. By default 16384.
        degree: edges of each node. By default 16.
        features: features of each node. By default 256.
    """

    nodes: int = 16384
    degree: int = 16
    features: int = 256


@option_class
class ProgramOptions(NeuronOptions):
    """Options of the simulated program and machine.

    Attributes:
        model_config: llama3-8b, llama3-70b, qwen3-0.6b, qwen3-4b, qwen3-8b, qwen3-32b, or a folder with a config.json.
        instance: inf2.48xlarge, trn1.32xlarge, trn2.48xlarge, trn2-ultraserver or trn3-16.
        cores: tensor-parallel width.
        fsdp: fully sharded ranks, for training.
        schedule: sync, sequence, domino, column, tiles+ring or ring, for prefill and decode.
        batch: batch size; for training, sequences of each fully sharded rank.
        input: prompt tokens or cached positions; for training, positions of each sequence.
        block: block size of a DFlash round.
        salient: share of positions that a sparse denoising step computes.
        prefetch_distance: layers by which training gathers weights ahead, in steps of half a layer (attention or MLP).
        scatter_delay: layers by which training delays the reduce-scatter of gradients, in the same steps.
        threaded: order training's collectives by a token.
        hlo: a file with scheduled HLO.
        chip: the TPU that the HLO was compiled for.
        draws: draws of the constants that have a range; by default 24, fewer for programs of more than 2,000 operations.
    """

    model_config: str = "llama3-8b"
    instance: str = "inf2.48xlarge"
    cores: int = 8
    fsdp: int = 1
    schedule: str = "sync"
    runtime: Annotated[RuntimeSettings, settings(RuntimeSettings, "settings of the Neuron runtime")] = RuntimeSettings()
    batch: int = 4
    input: int = 1024
    block: int = 16
    salient: float = 0.25
    prefetch_distance: str = "0.5"
    scatter_delay: str = "0.5"
    threaded: bool = True
    graph: Annotated[GraphSettings, settings(GraphSettings, "sizes of a gather-reduce")] = GraphSettings()
    hlo: Path | None = None
    chip: str = "v5e:4x2"
    draws: int | None = None

    def machine(self, calibration: Calibration | None = None) -> Machine:
        """Makes the machine. Raises a `ValueError` for an unknown instance, too many cores, or settings out of range."""
        runtime = Settings(self.runtime.dma_packet_size, self.runtime.cc_packet_size, self.runtime.streams)
        instance = instance_of(self.instance)
        if self.cores < 1 or self.fsdp < 1:
            raise ValueError(f"expected cores and fsdp from 1, found {self.cores} and {self.fsdp}")
        found = machine_of(instance, runtime, fsdp=self.fsdp, tp=self.cores)
        return found if calibration is None else with_machine_constants(found, calibration.constants)

    def sweep(self, kind: Kind, machine: Machine, calibration: Calibration | None, progress: Callable[[], None]) -> Sweep:
        """Simulates the program with each draw of the constants."""
        operations = len(self.program(kind, machine).ops)
        draws = self.draws or max(LEAST_DRAWS, min(EVENT_DRAWS, MOST_OPERATIONS // operations))

        def predict(changes: Mapping[str, float]) -> dict[str, float]:
            changed = with_machine_constants(machine, changes)
            program = self.program(kind, changed)
            return {program.name: 1e3 * simulate(program, changed).total_s}

        drawn = constants_to_sweep(calibration, machine_constants(machine))
        return sweep_constants(predict, drawn, draws, unit="total ms", progress=progress, basis=prediction_basis(calibration))

    def program(self, kind: Kind, machine: Machine) -> NeuronProgram:
        """Makes the program. Raises a `ValueError` for sizes that do not fit each other."""
        if kind == "gather-reduce":
            return gather_reduce_program(machine, self.graph.nodes, self.graph.degree, self.graph.features)
        if kind == "hlo":
            if self.hlo is None:
                raise ValueError("expected --hlo with a file of scheduled HLO, found none")
            chip = chip_of(self.chip)
            return hlo_program(read_schedule(self.hlo.read_text(encoding="utf-8"), chip), chip, machine, self.hlo.name)
        config = model_config(self.model_config)
        if kind == "training":
            shifts = half_layers("prefetch_distance", self.prefetch_distance), half_layers("scatter_delay", self.scatter_delay)
            step = TrainingStep(self.batch, self.input, self.threaded, *shifts)
            return training_program(config, machine, step)
        if kind == "dflash":
            return dflash_program(config, machine, self.batch, self.block, self.input)
        if kind == "diffusion":
            return diffusion_program(config, machine, self.batch, self.input, self.salient)
        return inference_program(config, machine, Work(kind, self.batch, self.input), self.schedule)


def simulate_program(
    kind: Kind,
    /,
    *,
    options: ProgramOptions = ProgramOptions(),
    files: TracedFiles = TracedFiles(),
) -> None:
    """Simulates a program on an absent Neuron chip and shows the work of its engines.

    A prediction of a discrete-event model, not a measurement: docs/neuron.md. docs/metrics.md defines the figures.

    Args:
        kind: decode, prefill, training, dflash (a speculative round), diffusion (a sparse denoising step), gather-reduce, or
            hlo (a program that XLA scheduled for a TPU).
    """
    console = files.console()
    calibration = options.calibration(options.instance, options.draws)
    machine = options.machine(calibration)
    program = options.program(kind, machine)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        row = bar.add_task(program.name, total=len(program.ops))
        result = simulate(program, machine, progress=lambda done: bar.update(row, completed=done))
        row = bar.add_task("ranges", total=options.draws)
        ranges = options.sweep(kind, machine, calibration, lambda: bar.advance(row)).record()
    figures = {**result.record(), "operations": len(program.ops), "measured": False, "ranges": {"total_ms": ranges}}
    show(console, figures)
    about = {"instance": options.instance, "mesh": str(dict(machine.mesh.axes)), "streams": options.runtime.streams}
    title = f"{program.name} on {options.instance}"
    files.write(console, figures, lambda path: write_simulation(path, title, figures, engine_chart(result), about))
    files.write_trace(console, lambda: trace([(program.name, result)]))


def engine_chart(result: SimulationResult) -> LaneChart:
    """Returns the chart of each engine's spans."""
    lanes: dict[str, list[tuple[float, float, str]]] = {name: [] for name in result.busy_s}
    for span in result.spans:
        collective = result.program.ops[span.op].collective
        kind = "compute" if span.engine in ("tensor", "vector", "scalar", "gpsimd") else "dma"
        if collective is not None:
            kind = collective.purpose if collective.purpose in ("tp", "fsdp") else "other"
        lanes[span.engine].append((1e3 * span.begin_s, 1e3 * span.end_s, kind))
    return engines_chart("What each engine does", list(lanes.items()), 1e3 * result.total_s)


def show(console: Console, figures: dict[str, Any]) -> None:
    """Prints a table of engines, and the parts of the time."""
    print_table(console, engines_table(f"{figures['program']} on {figures['instance']}", figures))
    times = ", ".join(f"{name} {significant(figures[f'{name}_ms'])}" for name in MOMENTS)
    console.print(f"{significant(figures['total_ms'])} ms: {times}")
    shares = ", ".join(f"{name} {share:.1%}" for name, share in figures["dma_share"].items())
    memory = f"{figures['memory_gib']:.2f} of {figures['memory_limit_gib']:.1f} GiB"
    console.print(f"bytes through the DMA engines: {shares}; device memory: {memory}; busy longest: {figures['limit']}")
    print_ranges(console, "ranges", figures["ranges"].values())
    print_notes(console, [figures])
