"""`tilewright neuron simulate`: a program on a simulated Neuron chip."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import Progress

from tilewright.cli.calibrate import NeuronModelOptions, print_notes, print_ranges
from tilewright.cli.options import Numbers, option_class
from tilewright.cli.outputs import TracedFiles
from tilewright.cli.plan_training import halves_of
from tilewright.hardware.neuron import instance_of
from tilewright.hardware.tpu import chip_of
from tilewright.metrics.metric import significant
from tilewright.metrics.tables import print_table
from tilewright.models.published_configs import model_config
from tilewright.perfmodel.calibration import Calibration, basis_of, swept_with
from tilewright.perfmodel.inference import Work, inference_program
from tilewright.perfmodel.machine import Machine, Settings, machine_constants, machine_of, with_figures
from tilewright.perfmodel.program import NeuronProgram
from tilewright.perfmodel.programs import dflash_program, diffusion_program, gather_reduce_program, hlo_program
from tilewright.perfmodel.results import MOMENTS, SimulationResult, trace
from tilewright.perfmodel.schedule import read_schedule
from tilewright.perfmodel.simulate import simulate
from tilewright.perfmodel.training import TrainingStep, training_program
from tilewright.perfmodel.uncertainty import EVENT_DRAWS, Sweep, swept
from tilewright.report.charts import LaneChart
from tilewright.report.neuron import engines_chart, engines_table, write_simulation

MOST_OPERATIONS = 48_000
LEAST_DRAWS = 8
"""Operations that a sweep simulates by default in all its draws, and the fewest draws."""

Kind = Literal["decode", "prefill", "training", "dflash", "diffusion", "gather-reduce", "hlo"]


@option_class
class ProgramOptions(NeuronModelOptions):
    """Options of what is simulated, and on what.

    Attributes:
        cores: tensor-parallel width.
        fsdp: fully sharded ranks, for training.
        schedule: sync, sequence, domino, column, tiles+ring or ring, for prefill and decode.
        streams: of collectives.
        dma_packet_size, cc_packet_size: bytes of compute's packets, and of collectives', by stream.
        batch, input: rows, and prompt tokens or cached positions; for training sequences and positions of each fully sharded
            rank.
        block: of a DFlash round.
        salient: share of positions that a sparse denoising step computes.
        prefetch_distance: by how many layers training gathers weights ahead, in steps of half a layer (attention or MLP).
        scatter_delay: by how many layers it scatters gradients behind, in the same steps.
        threaded: whether training's collectives are in the order of a token.
        nodes, degree, features: of a gather-reduce.
        hlo: a file with scheduled HLO.
        chip: the TPU that the HLO was compiled for.
        draws: of the constants that have a range; by default 24, and fewer of programs of more than 2,000 operations.
    """

    cores: int = 8
    fsdp: int = 1
    schedule: str = "sync"
    streams: int = 1
    dma_packet_size: int = 4096
    cc_packet_size: Numbers = (65536,)
    batch: int = 4
    input: int = 1024
    block: int = 16
    salient: float = 0.25
    prefetch_distance: str = "0.5"
    scatter_delay: str = "0.5"
    threaded: bool = True
    nodes: int = 16384
    degree: int = 16
    features: int = 256
    hlo: Path | None = None
    chip: str = "v5e:4x2"
    draws: int | None = None

    def machine(self, calibration: Calibration | None = None) -> Machine:
        """Raises ValueError for an unknown instance, cores that it has not, or settings that the runtime does not take."""
        settings = Settings(self.dma_packet_size, self.cc_packet_size, self.streams)
        instance = instance_of(self.instance)
        if self.cores < 1 or self.fsdp < 1:
            raise ValueError(f"expected cores and fsdp from 1, found {self.cores} and {self.fsdp}")
        found = machine_of(instance, settings, fsdp=self.fsdp, tp=self.cores)
        return found if calibration is None else with_figures(found, calibration.constants)

    def sweep(self, kind: Kind, machine: Machine, calibration: Calibration | None, progress: Callable[[], None]) -> Sweep:
        """The program's time at drawn constants."""
        operations = len(self.program(kind, machine).ops)
        draws = self.draws or max(LEAST_DRAWS, min(EVENT_DRAWS, MOST_OPERATIONS // operations))

        def predict(changes: Mapping[str, float]) -> dict[str, float]:
            changed = with_figures(machine, changes)
            program = self.program(kind, changed)
            return {program.name: 1e3 * simulate(program, changed).total_s}

        drawn = swept_with(calibration, machine_constants(machine))
        return swept(predict, drawn, draws, unit="total ms", progress=progress, basis=basis_of(calibration))

    def program(self, kind: Kind, machine: Machine) -> NeuronProgram:
        """Raises ValueError where sizes do not fit one another."""
        if kind == "gather-reduce":
            return gather_reduce_program(machine, self.nodes, self.degree, self.features)
        if kind == "hlo":
            if self.hlo is None:
                raise ValueError("expected --hlo with a file of scheduled HLO, found none")
            chip = chip_of(self.chip)
            return hlo_program(read_schedule(self.hlo.read_text(encoding="utf-8"), chip), chip, machine, self.hlo.name)
        config = model_config(self.model_config)
        if kind == "training":
            shifts = halves_of("prefetch_distance", self.prefetch_distance), halves_of("scatter_delay", self.scatter_delay)
            step = TrainingStep(self.batch, self.input, self.threaded, *shifts)
            return training_program(config, machine, step)
        if kind == "dflash":
            return dflash_program(config, machine, self.batch, self.block, self.input)
        if kind == "diffusion":
            return diffusion_program(config, machine, self.batch, self.input, self.salient)
        return inference_program(config, machine, Work(kind, self.batch, self.input), self.schedule)


def simulate_program(
    kind: Kind,
    *,
    options: ProgramOptions = ProgramOptions(),
    files: TracedFiles = TracedFiles(),
) -> None:
    """Simulates a program on a Neuron chip that need not be there, and shows what its engines do.

    A discrete-event model, no measurement: docs/neuron.md. Every figure is defined in docs/metrics.md.

    Args:
        kind: decode, prefill, training, dflash (a speculative round), diffusion (a sparse denoising step), gather-reduce, or
            hlo (what XLA scheduled for a TPU).
    """
    console = files.console()
    calibration = options.calibration(options.draws)
    machine = options.machine(calibration)
    program = options.program(kind, machine)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        row = bar.add_task(program.name, total=len(program.ops))
        result = simulate(program, machine, progress=lambda done: bar.update(row, completed=done))
        row = bar.add_task("ranges", total=options.draws)
        ranges = options.sweep(kind, machine, calibration, lambda: bar.advance(row)).record()
    figures = {**result.record(), "operations": len(program.ops), "measured": False, "ranges": {"total_ms": ranges}}
    show(console, figures)
    about = {"instance": options.instance, "mesh": str(dict(machine.mesh.axes)), "streams": options.streams}
    title = f"{program.name} on {options.instance}"
    files.write(console, figures, lambda path: write_simulation(path, title, figures, engines_of(result), about))
    files.write_trace(console, lambda: trace([(program.name, result)]))


def engines_of(result: SimulationResult) -> LaneChart:
    """Spans of each engine, as the page draws them."""
    lanes: dict[str, list[tuple[float, float, str]]] = {name: [] for name in result.busy_s}
    for span in result.spans:
        collective = result.program.ops[span.op].collective
        kind = "compute" if span.engine in ("tensor", "vector", "scalar", "gpsimd") else "dma"
        if collective is not None:
            kind = collective.purpose if collective.purpose in ("tp", "fsdp") else "other"
        lanes[span.engine].append((1e3 * span.begin_s, 1e3 * span.end_s, kind))
    return engines_chart("What each engine does", list(lanes.items()), 1e3 * result.total_s)


def show(console: Console, figures: dict[str, Any]) -> None:
    """A table of engines, and what the time goes to."""
    print_table(console, engines_table(f"{figures['program']} on {figures['instance']}", figures))
    times = ", ".join(f"{name} {significant(figures[f'{name}_ms'])}" for name in MOMENTS)
    console.print(f"{significant(figures['total_ms'])} ms: {times}")
    shares = ", ".join(f"{name} {share:.1%}" for name, share in figures["dma_share"].items())
    memory = f"{figures['memory_gib']:.2f} of {figures['memory_limit_gib']:.1f} GiB"
    console.print(f"bytes through the DMA engines: {shares}; device memory: {memory}; busy longest: {figures['limit']}")
    print_ranges(console, "ranges", figures["ranges"].values())
    print_notes(console, [figures])
