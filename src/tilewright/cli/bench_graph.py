"""`tilewright bench graph`: compares usual implementations of message passing with neighbour tables."""

from collections.abc import Sequence
from typing import Any

import jax
from rich.console import Console

from tilewright.bench.graph import EXPERIMENTS, PUBLISHED, BenchGraph, Experiment, measure, prepare, read_graph
from tilewright.cli.common import keep_programs
from tilewright.cli.options import COMMON, Repetitions, Words, check_choices, check_least, option_class
from tilewright.cli.outputs import PageFiles, circumstances, progress
from tilewright.compiled.aot import tpu_topology
from tilewright.compiled.compare import steps
from tilewright.compiled.machine import chip_name
from tilewright.graph.table import LAYOUTS
from tilewright.kernels import native
from tilewright.metrics.tables import print_table
from tilewright.models.params import Dtype
from tilewright.report.graph import terminal_tables, write_graph
from tilewright.report.page import Report

FOOT = ("graph", "chip", "kernels", "repetitions", "dtype", "jax_version")
"""Settings at the end of the page."""


@option_class(group=COMMON)
class GraphOptions:
    """Options of the measurement. Several values are separated by spaces or commas.

    Attributes:
        experiment: scatter-add, gather-scatter, graphsage, gcn, gin, gat.
        layout: layouts of the neighbour tables: padded, bucketed, csr, or auto for the best one on this machine.
        data: an .npz file, "karate", uniform:NODES:MAXDEGREE, rmat:NODES:EDGES, or "seed" for uniform:2048:64. Features are
            always random.
        features: number of features per node, and width of a model's layers.
        dtype: "float32" or "bfloat16".
        chip: TPUs to compile for instead of measuring, such as v5e:1x1, v5p:1x1x1.
    """

    experiment: Words = PUBLISHED
    layout: Words = ("auto",)
    data: str = "seed"
    features: int = 128
    dtype: Dtype = "float32"
    chip: Words = ()
    repetitions: Repetitions = 5

    def __post_init__(self) -> None:
        check_choices(self, experiment=EXPERIMENTS, layout=LAYOUTS)
        check_least(self, features=1, repetitions=1)
        for chip in self.chip:
            tpu_topology(chip)


def bench_graph(*, options: GraphOptions = GraphOptions(), outputs: PageFiles = PageFiles()) -> None:
    """Compares graph neural networks on neighbour tables with gather, mask and sum, and with segment sums.

    docs/metrics.md defines every figure.
    """
    console = outputs.console()
    keep_programs()
    graph = read_graph(options.data)
    experiments = prepare(graph, options.experiment, options.layout, options.features, options.dtype, options.chip)
    records = run(console, experiments, options.repetitions, options.chip)
    notes = [note for experiment in experiments for note in experiment.notes]
    figures = {**about(graph, options), "notes": notes, "data": records}
    foot = circumstances({name: figures.get(name) for name in FOOT})
    shape = "{nodes:,} nodes, {edges:,} edges, up to {max_degree:,} neighbours".format(**graph.record())
    lead = f"{shape}, {options.features} features in {options.dtype}; models of two layers."
    report = Report("Message passing in fixed shapes", lead, records, foot, notes)
    outputs.write(console, figures, lambda path: write_graph(path, report))
    for table in terminal_tables(records):
        print_table(console, table)
    for note in notes:
        console.print(note, style="yellow", markup=False)


def run(console: Console, experiments: Sequence[Experiment], repetitions: int, chips: Sequence[str]) -> list[dict[str, Any]]:
    """Runs all experiments with a progress bar."""
    records: list[dict[str, Any]] = []
    total = sum(steps(len(one.functions), repetitions, len(chips), not chips) for one in experiments)
    with progress(console, total) as step:
        for experiment in experiments:
            step(experiment.name, 0)
            if experiment.functions:
                records += measure(experiment, repetitions, chips, step)[1]
    differing = [record for record in records if record["agrees"] is False]
    for one in differing:
        message = f"{one['experiment']}, {one['name']}: DIFFERS from {one['compared_with']} by {one['largest_difference']}"
        console.print(message, style="red", markup=False)
    return records


def about(graph: BenchGraph, options: GraphOptions) -> dict[str, Any]:
    """Returns the settings of the measurement."""
    settings = {"features": options.features, "dtype": options.dtype, "jax_version": jax.__version__}
    if options.chip:
        return {**graph.record(), **settings, "measured": False}
    isa = native.kernels().isa if jax.default_backend() == "cpu" else None
    kernels = {"chip": chip_name(), "kernels": f"cpu {isa}" if isa else "xla", "repetitions": options.repetitions}
    return {**graph.record(), **settings, "measured": True, **kernels}
