"""`tilewright inspect training`: exposed communication of a train step over a mesh, on absent TPUs."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, Literal

from rich.console import Console

from tilewright.bench import overlap_training as training
from tilewright.cli.calibrate import TpuProgramOptions, print_notes, print_ranges
from tilewright.cli.common import mesh_axes
from tilewright.cli.inspect_overlap import end_if_exposed
from tilewright.cli.options import Flag, Words, check_share, check_some, flag, option_class
from tilewright.cli.outputs import TracedFiles, progress
from tilewright.hardware.tpu import chip_of
from tilewright.metrics.tables import grouped, print_table
from tilewright.models.published_configs import model_config
from tilewright.parallel.exchanges import FullyShardedPlan, Sublayers
from tilewright.perfmodel.timeline import trace
from tilewright.report.overlap import CAVEATS, OverlapReport, layer_estimates
from tilewright.report.overlap_training import TERMINAL, place, step_table, transfers_table, write_training

TRAVELLERS = ("weights", "gradients", "activations")

FOOTNOTE = (
    "Compiler estimates and a model of links and memory, for both passes of the middle layer. exposed: time that the core "
    "waits for collectives; hidden: communication beside compute. peak: device memory of the compiled step, and an estimate "
    "for all layers. all layers: time of the whole step, without the update of layers that were not compiled. "
    f"{CAVEATS}"
)


@option_class
class TrainingInspection(TpuProgramOptions):
    """Options of the programs to compile. Several values are separated by commas or blanks.

    Attributes:
        chip: topologies of TPUs, several: v5e:4x4, v5p:2x2x4, v6e:4x4. The mesh has all devices of a topology.
        mesh: devices along "fsdp" and "tp": fsdp=8,tp=2.
        prefetch_distance: layers by which weights are gathered ahead, several.
        scatter_delay: layers by which the reduce-scatter of gradients is delayed, several. Each delay is compiled with every
            distance.
        rings: tensors with decomposed collectives, hop by hop: weights, gradients, activations, several, or all.
        reduce_dtype: dtype of the sum of gradients between devices; bfloat16 in the auto-sharded step.
        batch_size: sequences of a step, over all devices.
        length: positions of each sequence.
        layers: number of layers to compile; a middle one is reported. By default two more than twice the largest shift.
        peers: also compile the step without ordering tokens and the auto-sharded (GSPMD) step.
    """

    chip: Words = ("v5e:4x4",)
    mesh: str = "fsdp=8,tp=2"
    prefetch_distance: Words = ("1",)
    scatter_delay: Words = ("1",)
    rings: Words = ()
    reduce_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    batch_size: int = 16
    length: int = 2048
    peers: bool = True

    def plans(self) -> dict[str, FullyShardedPlan]:
        """Maps names in tables to plans. Raises a `ValueError` for a shift that is no number, or unknown rings."""
        check_some(self, "chip", "prefetch_distance", "scatter_delay")
        for name in ("prefetch_distance", "scatter_delay"):
            for text in getattr(self, name):
                if not text.isdecimal():
                    raise ValueError(f"expected {flag(name)} in whole layers, found {text!r}")
        unknown = sorted(set(self.rings) - {*TRAVELLERS, "all"})
        if unknown:
            raise ValueError(f"expected --rings among {', '.join(TRAVELLERS)} or all, found {', '.join(unknown)}")
        rings = set(TRAVELLERS) if "all" in self.rings else set(self.rings)
        forms: Any = {name: "ring" if name in rings else "whole" for name in TRAVELLERS}
        found = {}
        for distance, delay in product(map(int, self.prefetch_distance), map(int, self.scatter_delay)):
            shifts = Sublayers(distance, distance), Sublayers(delay, delay)
            found[f"prefetch {distance}, delay {delay}"] = FullyShardedPlan(
                *shifts, dtype="bfloat16", reduce_dtype=self.reduce_dtype, **forms
            )
        return found

    def cases(self) -> list[training.TrainingCase]:
        """Makes a case for each chip. Raises a `ValueError` for an option that does not fit the others."""
        for chip in self.chip:
            chip_of(chip)
        config = model_config(self.model_config)
        axes = mesh_axes(self.mesh)
        shift = max(map(int, (*self.prefetch_distance, *self.scatter_delay)))
        layers = max(training.LEAST_LAYERS, 2 * shift + 2) if self.layers is None else self.layers
        shape = (self.model_config, config, axes, layers, self.batch_size, self.length, self.hop_us)
        cases = [training.TrainingCase(chip, *shape, fitted) for chip, fitted in self.calibrations(self.chip).items()]
        for case in cases:
            for plan in self.plans().values():
                case.placement(plan)
        return cases


def inspect_training(
    *,
    options: TrainingInspection = TrainingInspection(),
    files: TracedFiles = TracedFiles(),
    transfers: Flag = False,
    fail_above: float | None = None,
) -> None:
    """Compiles a train step over a mesh for TPUs and shows the communication that each shift hides, and its memory.

    For comparison, compiles the same step without ordering tokens, and the auto-sharded (GSPMD) step with the flags of MaxText.
    Compiler estimates and a model of links and memory, not measurements. docs/metrics.md defines the figures.

    Args:
        transfers: print the begin, end, exposed time and concurrent operations of each transfer of the reported layer.
        fail_above: exit with status 1 if a plan leaves more than this share of its communication exposed, from 0 to 1; the
            steps for comparison do not count.
    """
    console = files.console()
    check_share("--fail-above", fail_above)
    plans = options.plans()
    cases = options.cases()
    plans = training.select_programs(plans, options.peers)
    programs: list[training.TrainingProgram] = []
    with progress(console, len(cases) * len(plans)) as step:
        for case in cases:
            programs += training.compiled_programs(case, plans, step)
    figures = training.records(programs)
    about = options.facts({case.chip: case.fabric for case in cases}, "mesh")
    ranges = {name: one.record() for name, one in training.sweeps(programs, options.draws).items()}
    show(console, figures, transfers)
    for name, one in ranges.items():
        print_ranges(console, name, [one])
    named = [(place(one), program) for one, program in zip(figures, programs, strict=True)]
    shown = {name: [training.lanes(program) for other, program in named if other == name] for name, _ in named}
    report = OverlapReport(f"Communication of training {about['model']}", figures, shown, about, ranges)
    found = {**about, "measured": False, "data": figures, "ranges": ranges}
    files.write(console, found, lambda path: write_training(path, report))
    files.write_trace(console, lambda: trace((f"{one.case.chip} {one.name}", one.timeline) for one in programs))
    counted = [one for one in figures if one["program"] not in (training.PLAIN_STEP, training.UNTHREADED, training.ANNOTATED)]
    end_if_exposed(console, {f"{place(one)} {one['program']}": one["exposed_share"] for one in counted}, fail_above)


def show(console: Console, figures: Sequence[Mapping[str, Any]], transfers: bool) -> None:
    """Prints a table for each chip, and a table of transfers for each program if `transfers` is true."""
    for name, rows in grouped(figures, place).items():
        first = rows[0]
        layers = f"layer {first['reported_layer']} of {first['layers_compiled']} compiled, {first['model_layers']} in all"
        print_table(console, step_table(f"{name}: {layers}", rows, *TERMINAL))
        console.print(layer_estimates(rows, "program"), markup=False)
        print_notes(console, rows)
        for one in rows if transfers else ():
            print_table(console, transfers_table(one))
    console.print(FOOTNOTE)
