"""`tilewright inspect overlap`: what schedules leave exposed of a model's communication, on TPUs that are not there."""

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
from tilewright.cli.options import KernelChoice, Words, check_known, check_least, check_share, check_some, option_class
from tilewright.cli.outputs import TracedFiles, progress, write_file
from tilewright.metrics.metric import significant
from tilewright.metrics.tables import grouped, print_table
from tilewright.models.published_configs import model_config
from tilewright.perfmodel.timeline import trace
from tilewright.report.overlap import CAVEATS, OverlapReport, layer_estimates, layer_table, place, write_overlap

FOOTNOTE = (
    "One layer, compiler estimates and a model of links and memory. under way: at least one collective is; hidden beside "
    "compute or waiting for memory, exposed where the core waits for it; least: what its busiest link takes beyond the "
    "compute; total: compute, exposed, and waiting for memory; × bound: against the same layer without any communication. "
    f"{CAVEATS}"
)


@option_class
class OverlapOptions(TpuProgramOptions):
    """Options of what is compiled. Those of several values take them with commas or blanks between them.

    Attributes:
        chip: topologies of TPUs, several: v5e:4x2, v5p:2x2x2, v6e:4x2. All devices of each divide the model.
        tensor_parallel: over how many devices the model is divided; by default all of a topology, as it must be.
        schedule: sync, sequence, ring, domino, column, exact, or auto for what is estimated to be fastest: several.
        order: what holds the order of hops and products, several: own (the schedule's ties), compiler (no ties), program_order
            (jax.experimental.overlap.program_order of JAX 0.12 in their place).
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
        """One for each chip. Raises a `ValueError` where an option is none that there is, or does not fit the others."""
        check_known(self, schedule=overlap.SCHEDULES, order=ORDERINGS)
        check_some(self, "phase", "chip")
        check_least(self, tensor_parallel=1)
        config = model_config(self.model_config)
        found = []
        for chip, calibration in self.calibrations(self.chip).items():
            how = (self.layers, self.kernels, self.hop_us, self.compiler_options, calibration)
            setup = overlap.OverlapSetup(chip, self.model_config, config, *how)
            setup.check(self.tensor_parallel)
            found.append(setup)
        return found

    def names(self, console: Console) -> list[str]:
        """Schedules with their orderings; a line says so where the installed JAX lacks one.

        Raises:
            ValueError: it lacks the only one that is asked for.
        """
        lacking = [PROGRAM_ORDER] if program_order() is None and PROGRAM_ORDER in self.order else []
        orders = [order for order in self.order if order not in lacking]
        told = f"{PROGRAM_ORDER} left out: it comes with JAX 0.12, and this is {jax.__version__}"
        if not orders:
            raise ValueError(told)
        if lacking:
            console.print(told, style="yellow")
        return [ordered_name(schedule, order) for schedule in self.schedule for order in orders]

    def phases(self) -> list[overlap.Phase]:
        """Raises ValueError where one is spelled otherwise."""
        return [overlap.read_phase(text) for text in self.phase]


@option_class
class OverlapFiles(TracedFiles):
    """The same, with the programs.

    Attributes:
        graph: the programs as graphs (operations, engines, cycles, bytes, dependencies), as JSON for a simulator.
    """

    graph: Path | None = None

    def write_graph(self, console: Console, about: Mapping[str, Any], named: Sequence[tuple[str, overlap.OverlapRun]]) -> None:
        """Writes the graphs of programs, each with its chip and phase, if they were asked for."""
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

    Compiler estimates and a model of links and memory, no measurements; every figure is defined in docs/metrics.md.

    Args:
        fail_above: exit with status 1 if a schedule leaves more than this share of its communication exposed, from 0 to 1;
            sync, in any order, counts only where no other schedule is asked for.
    """
    console = files.console()
    check_share("--fail-above", fail_above)
    phases = options.phases()
    setups = options.setups()
    schedules = (*options.names(console), overlap.BOUND)
    runs: list[overlap.OverlapRun] = []
    with progress(console, len(setups) * len(phases) * len(schedules)) as step:
        for setup, phase in product(setups, phases):
            runs += overlap.runs_of(setup, phase, schedules, step)
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
    """A table for each chip and phase."""
    for name, of in grouped(figures, place).items():
        first = of[0]
        print_table(console, layer_table(f"{options.model_config} on {name}: one of {first['model_layers']} layers", of))
        links, exposed = (significant(first[f"all_links_{name}_ms"]) for name in ("communication", "least_exposed"))
        console.print(f"through all links of every chip: {links} ms, {exposed} ms of them beyond the bound's compute")
        console.print(layer_estimates(of, "schedule"), markup=False)
        print_notes(console, of)
    console.print(FOOTNOTE)
