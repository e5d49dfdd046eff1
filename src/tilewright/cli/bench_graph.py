"""`tilewright bench graph`: message passing as it is usually written, against neighbour tables."""

import datetime
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
from cyclopts import Parameter
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from tilewright.bench.graph import EXPERIMENTS, PUBLISHED, BenchGraph, Experiment, measure, prepare, read_graph
from tilewright.cli.common import (
    CompileCache,
    JsonFile,
    check_output_file,
    human_console,
    keep_programs,
    whole_file,
    write_json,
)
from tilewright.compiled.aot import tpu_topology
from tilewright.compiled.compare import steps
from tilewright.compiled.figures import print_table, significant
from tilewright.compiled.machine import chip_name
from tilewright.graph.table import LAYOUTS
from tilewright.kernels import native
from tilewright.models.params import Dtype
from tilewright.report.graph import GraphReport, write_graph
from tilewright.report.terminal import number

CAPTION = (
    "speedup: against the first line of each experiment; bandwidth: the least time for these bytes over the time taken, "
    "above 100 % where caches help; round trips: arrays written to memory and read back; DMAs: descriptors of these kernels"
)
ESTIMATES = (
    "Compiler estimates; nothing ran. Kilocycles leave out the operations counted beside them, gathers and Pallas kernels; of "
    "memory: the least for these bytes. Each operand of a kernel counts once: what its DMAs read is in the JSON"
)


def words(type_: Any, tokens: Sequence[Any]) -> tuple[str, ...]:
    """Words apart or with commas between them."""
    return tuple(word for token in tokens for word in token.value.split(","))


SEVERAL = Parameter(consume_multiple=True, negative=(), converter=words)


@Parameter(name="*")
@dataclass(frozen=True)
class GraphOptions:
    """Options of what is measured. Several values stand apart or with commas between them.

    Attributes:
        experiment: scatter-add, gather-scatter, graphsage, gcn, gin, gat.
        layout: of the neighbour tables: padded, bucketed, csr, or auto for the one that suits the machine.
        data: an .npz file, "karate", uniform:NODES:MAXDEGREE, rmat:NODES:EDGES, or "seed" for uniform:2048:64. Features are
            random in any case.
        features: for each node, and the width of a model's layers.
        dtype: "float32" or "bfloat16".
        chip: TPUs to compile for instead of measuring, such as v5e:1x1, v5p:1x1x1.
        repetitions: how often each is timed.
    """

    experiment: Annotated[tuple[str, ...], SEVERAL] = PUBLISHED
    layout: Annotated[tuple[str, ...], SEVERAL] = ("auto",)
    data: str = "seed"
    features: int = 128
    dtype: Dtype = "float32"
    chip: Annotated[tuple[str, ...], SEVERAL] = ()
    repetitions: int = 5
    compile_cache: CompileCache = True

    def check(self) -> None:
        """Raises a `ValueError` for an option out of its range."""
        for what, known, given in (("experiment", EXPERIMENTS, self.experiment), ("layout", LAYOUTS, self.layout)):
            unknown = [one for one in given if one not in known]
            if unknown or not given:
                raise ValueError(f"expected the {what} {', '.join(known)}, found {', '.join(unknown) or 'none'}")
        for what in ("features", "repetitions"):
            if getattr(self, what) < 1:
                raise ValueError(f"expected {what} of at least 1, found {getattr(self, what)}")
        for chip in self.chip:
            tpu_topology(chip)


def bench_graph(
    *, options: GraphOptions = GraphOptions(), json_file: JsonFile = None, html: Path | None = None
) -> None:  # fmt: skip
    """Compares graph neural networks on neighbour tables with gathering, masking and summing, side by side.

    Parameters
    ----------
    json_file
        Write the figures as JSON to this file, "-" for standard output.
    html
        Write a page with the tables and charts to this file.
    """
    check_output_file("--json", json_file)
    check_output_file("--html", None if html is None else str(html))
    options.check()
    keep_programs(options.compile_cache)
    console = human_console(json_file)
    graph = read_graph(options.data)
    chips = tuple(dict.fromkeys(options.chip))
    experiments = prepare(
        graph, tuple(dict.fromkeys(options.experiment)), options.layout, options.features, options.dtype, chips
    )
    records = run(console, experiments, options.repetitions, chips)
    for place in dict.fromkeys(record["place"] for record in records):
        print_table(console, table([record for record in records if record["place"] == place]))
    notes = [note for experiment in experiments for note in experiment.notes]
    for note in notes:
        console.print(note, style="yellow", markup=False)
    figures = {**about(graph, options), "notes": notes, "data": records}
    write_json(json_file, figures)
    if html is not None:
        report = GraphReport("Message passing in fixed shapes", lead(graph, options), records, environment(figures), notes)
        with whole_file(html) as partial:
            write_graph(partial, report)
        console.print(f"{html} written", markup=False)


def run(
    console: Console, experiments: Sequence[Experiment], repetitions: int, chips: Sequence[str]
) -> list[dict[str, Any]]:  # fmt: skip
    """Compares all experiments, with a bar that says how far it is."""
    records: list[dict[str, Any]] = []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        total = sum(steps(len(one.functions), repetitions, len(chips), not chips) for one in experiments)
        task = bar.add_task("", total=total)
        for experiment in experiments:
            bar.update(task, description=experiment.name)
            if experiment.functions:
                records += measure(experiment, repetitions, chips, lambda: bar.advance(task))[1]
    differing = [record for record in records if record["agrees"] is False]
    for one in differing:
        told = f"{one['experiment']}, {one['name']}: DIFFERS from {one['compared_with']} by {one['largest_difference']}"
        console.print(told, style="red", markup=False)
    return records


def about(graph: BenchGraph, options: GraphOptions) -> dict[str, Any]:
    """Settings that the figures depend on."""
    settings = {"features": options.features, "dtype": options.dtype, "jax_version": jax.__version__}
    if options.chip:
        return {**graph.record(), **settings, "measured": False}
    isa = native.kernels().isa if jax.default_backend() == "cpu" else None
    kernels = {"chip": chip_name(), "kernels": f"cpu {isa}" if isa else "xla", "repetitions": options.repetitions}
    return {**graph.record(), **settings, "measured": True, **kernels}


def lead(graph: BenchGraph, options: GraphOptions) -> str:
    """The sentence under the page's title."""
    facts = graph.record()
    shape = f"{facts['nodes']:,} nodes, {facts['edges']:,} edges, up to {facts['max_degree']:,} neighbours"
    return f"{shape}, {options.features} features in {options.dtype}; models of two layers."


def environment(figures: Mapping[str, Any]) -> dict[str, Any]:
    """The foot of the page."""
    names = ("graph", "chip", "kernels", "repetitions", "dtype", "jax_version")
    command = shlex.join(["tilewright", *sys.argv[1:]])
    return {**{name: figures.get(name) for name in names}, "command": command, "date": datetime.date.today().isoformat()}


def table(records: Sequence[Mapping[str, Any]]) -> Table:
    """The programs of one place."""
    measured = records[0]["measured"]
    shown = Table(title=Text(records[0]["place"]), caption=CAPTION if measured else ESTIMATES, box=box.SIMPLE_HEAD)
    shown.padding = (0, 1, 0, 0)
    shown.add_column("program")
    times = ("ms", "speed-\nup", "band-\nwidth") if measured else ("kilo-\ncycles", "left\nout", "of\nmemory")
    for column in (*times, "MB\nread", "MB\nwrit-\nten", "round\ntrips", "TPU\nDMAs", "NKI\nDMAs"):
        shown.add_column(column, justify="right")
    for n, one in enumerate(records):
        first = n == 0 or records[n - 1]["experiment"] != one["experiment"]
        last = n + 1 == len(records) or records[n + 1]["experiment"] != one["experiment"]
        if measured:
            cells = [significant(one["median_ms"], 4), f"{one['speedup']:.2f}", f"{one['share_of_bandwidth']:.0%}"]
        else:
            bound = one["memory_cycles"]
            cells = [f"{one['estimated_cycles'] / 1e3:,.1f}", str(one["without_estimate"])]
            cells.append(number(None if bound is None else bound / 1e3, ",.1f"))
        cells += [f"{one[f'{key}_bytes'] / 1e6:,.2f}" for key in ("read", "written")]
        cells += [f"{one['round_trips']:,}", *(number(one[f"{kind}_dma_descriptors"], ",") for kind in ("tpu", "nki"))]
        if first:
            shown.add_row(Text(one["experiment"], style="bold"))
        shown.add_row(f"  {one['name']}", *cells, end_section=last)
    return shown
