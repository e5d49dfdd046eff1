"""`tilewright inspect overlap`: exposed communication of a model under each schedule, on absent TPUs."""

import json
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from tilewright.bench import overlap
from tilewright.bench.ordering import ORDERINGS, OWN, PROGRAM_ORDER, ordered_name, program_order, read_name
from tilewright.cli.calibrate import CompilerOptions, TpuProgramOptions, end_if_exposed, print_notes, print_ranges
from tilewright.cli.options import (
    OUTPUT,
    KernelChoice,
    Words,
    check_choices,
    check_least,
    check_share,
    check_some,
    option_class,
)
from tilewright.cli.outputs import TracedFiles, progress, write_file
from tilewright.metrics.metric import significant
from tilewright.metrics.tables import grouped, print_table
from tilewright.models.published_configs import model_config
from tilewright.perfmodel.timeline import trace
from tilewright.report.overlap import CAVEATS, OverlapReport, layer_estimates, layer_table, place, write_overlap

FOOTNOTE = (
    "One layer; compiler estimates and a model of links and memory. under way: time with a collective in flight, hidden "
    "(beside compute or waits for memory) or exposed (the core waits for the collective); least: time of the busiest link "
    "beyond the compute; total: compute, exposed time and waits for memory; × bound: ratio to the layer without communication. "
    f"{CAVEATS}"
)


@option_class
class OverlapOptions(TpuProgramOptions):
    """Options of the programs to compile. Several values are separated by commas or blanks.

    Attributes:
        chip: topologies of TPUs, several: v5e:4x2, v5p:2x2x2, v6e:4x2. All devices of a topology share the model.
        tensor_parallel: number of devices; must be all devices of the topology, which is the default.
        schedule: sync, sequence, ring, domino, column, exact, or auto for the estimated fastest: several.
        order: control of the order of hops and matmuls, several: own (the schedule's dependencies), compiler (none),
            program_order (jax.experimental.overlap.program_order of JAX 0.12).
        phase: prefill:BATCHxPOSITIONS or decode:BATCHxPOSITIONS, several; a decode step has that many positions cached.
    """

    chip: Words = ("v5e:4x2",)
    tensor_parallel: int | None = None
    schedule: Words = ("sync", "sequence", "ring")
    order: Words = (OWN,)
    phase: Words = ("prefill:4x1024", "decode:8x4096")
    kernels: KernelChoice = "auto"
    compiler_options: CompilerOptions = False

    def setups(self) -> list[overlap.OverlapSetup]:
        """Makes a setup for each chip. Raises a `ValueError` for an option that is unknown or does not fit the others."""
        check_choices(self, schedule=overlap.SCHEDULES, order=ORDERINGS)
        check_some(self, "phase", "chip")
        check_least(self, tensor_parallel=1)
        config = model_config(self.model_config)
        found = []
        for chip, calibration in self.calibrations(self.chip).items():
            compiling = (self.layers, self.kernels, self.hop_us, self.compiler_options, calibration)
            setup = overlap.OverlapSetup(chip, self.model_config, config, *compiling)
            setup.check(self.tensor_parallel)
            found.append(setup)
        return found

    def names(self, console: Console) -> list[str]:
        """Returns schedules with their orderings, and prints a line if the installed JAX lacks an ordering.

        Raises:
            ValueError: JAX lacks the only ordering.
        """
        lacking = [PROGRAM_ORDER] if program_order() is None and PROGRAM_ORDER in self.order else []
        orders = [order for order in self.order if order not in lacking]
        missing = f"--order {PROGRAM_ORDER} needs JAX 0.12, found {jax.__version__}"
        if not orders:
            raise ValueError(missing)
        if lacking:
            console.print(f"{missing}: left out", style="yellow")
        return [ordered_name(schedule, order) for schedule in self.schedule for order in orders]

    def phases(self) -> list[overlap.Phase]:
        """Parses the phases. Raises a `ValueError` for another form."""
        return [overlap.read_phase(text) for text in self.phase]


@option_class(group=OUTPUT)
class OverlapFiles(TracedFiles):
    """Output files of `inspect overlap`.

    Attributes:
        graph: JSON file of the programs as graphs (operations, engines, cycles, bytes, dependencies), for a simulator.
    """

    graph: Path | None = None

    def write_graph(self, console: Console, about: Mapping[str, Any], named: Sequence[tuple[str, overlap.OverlapRun]]) -> None:
        """Writes the graphs of programs, each with its chip and phase, if `--graph` is given."""
        if self.graph is not None:
            programs = [{"name": name, "schedule": run.schedule, **run.timeline.graph.record()} for name, run in named]
            text = json.dumps({**about, "programs": programs})
            write_file(console, self.graph, lambda path: path.write_text(text, encoding="utf-8"))


def inspect_overlap(
    *,
    options: OverlapOptions = OverlapOptions(),
    files: OverlapFiles = OverlapFiles(),
    fail_above: float | None = None,
) -> None:
    """Compiles a model's layers for TPUs and shows how much of their communication each schedule hides.

    Compiler estimates and a model of links and memory, not measurements. docs/metrics.md defines the figures.

    Args:
        fail_above: exit with status 1 if a schedule leaves more than this share of its communication exposed, from 0 to 1.
            sync counts only if it is the only schedule.
    """
    console = files.console()
    check_share("--fail-above", fail_above)
    phases = options.phases()
    setups = options.setups()
    schedules = (*options.names(console), overlap.BOUND)
    runs: list[overlap.OverlapRun] = []
    with progress(console, len(setups) * len(phases) * len(schedules)) as step:
        for setup, phase in product(setups, phases):
            runs += overlap.make_runs(setup, phase, schedules, step)
    figures = overlap.records(runs)
    about = options.facts({setup.chip: setup.fabric for setup in setups}, "kernels", "compiler_options")
    ranges = {name: one.record() for name, one in overlap.sweeps(runs, options.draws).items()}
    show(console, options, figures)
    for name, one in ranges.items():
        print_ranges(console, name, [one])
    named = [(f"{run.setup.chip} {run.phase.name}", run) for run in runs]
    shown = {name: [overlap.lanes(run) for other, run in named if other == name] for name, _ in named}
    report = OverlapReport(f"Communication of {about['model']} under schedules", figures, shown, about, ranges)
    found = {**about, "measured": False, "data": figures, "ranges": ranges}
    files.write(console, found, lambda path: write_overlap(path, report))
    files.write_trace(console, lambda: trace((f"{name} {run.schedule}", run.timeline) for name, run in named))
    files.write_graph(console, about, named)
    counted = [one for one in figures if read_name(one["schedule"])[0] != overlap.SYNC] or figures
    end_if_exposed(console, {f"{place(one)} {one['schedule']}": one["exposed_share"] for one in counted}, fail_above)


def show(console: Console, options: OverlapOptions, figures: Sequence[Mapping[str, Any]]) -> None:
    """Prints a table for each chip and phase."""
    for name, rows in grouped(figures, place).items():
        first = rows[0]
        print_table(console, layer_table(f"{options.model_config} on {name}: one of {first['model_layers']} layers", rows))
        links, exposed = (significant(first[f"all_links_{name}_ms"]) for name in ("communication", "least_exposed"))
        console.print(
            f"with all links of every chip: {links} ms of communication, {exposed} ms beyond the compute of the bound"
        )
        console.print(layer_estimates(rows, "schedule"), markup=False)
        print_notes(console, rows)
    console.print(FOOTNOTE)
