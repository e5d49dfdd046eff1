"""`tilewright bench linear`: the linear layers of real models on this machine's kernels, XLA, and what a caller adds."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from rich.console import Console

from tilewright.bench.bandwidth import DotProducts, MemoryBuffers
from tilewright.bench.linear import XLA_DTYPES, Format, Load, measure, steps, summary
from tilewright.cli.common import keep_programs
from tilewright.cli.options import CompileCache, Repetitions, Several, check_least, option_class
from tilewright.cli.outputs import JsonFile, human_console, progress, write_json
from tilewright.compiled.machine import chip_name, cores
from tilewright.kernels import native
from tilewright.kernels.linear.cases import LinearCase, named
from tilewright.metrics.linear import LINEAR
from tilewright.metrics.metric import Metric, chosen
from tilewright.metrics.tables import FigureTable, grouped, print_table


@option_class
class LinearOptions:
    """Options of what is measured. Each of the first four takes several values.

    Attributes:
        model: "demo", "qwen3-0.6b", "qwen3-1.7b" or "qwen3-4b"; no checkpoint is needed.
        layers: of q, k, v, o, gate_up, down and head; by default all but v, which is as large as k.
        rows: numbers of rows.
        dtype: formats of the weights: float32, bfloat16, or llama.cpp's and others' blocks of 4 to 8 bits. "q8_0" is what
            --weights int8 makes of a matrix, "q4_1" what int4 does.
        weights_mb: copies of a layer's weights take up at least this much (MB) and take turns, as the layers of a model do;
            less than a cache holds measures the cache.
    """

    model: Several[str] = ("qwen3-0.6b",)
    layers: Several[str] = ("q", "k", "o", "gate_up", "down", "head")
    rows: Several[int] = (1, 2, 4, 8, 16, 32, 64, 128, 512)
    dtype: Several[Format] = ("bfloat16",)
    weights_mb: float = 100.0
    repetitions: Repetitions = 5
    compile_cache: CompileCache = True

    def check(self) -> list[LinearCase]:
        """The layers asked for. Raises a `ValueError` where an option is out of its range."""
        cases = named(self.model, self.layers)
        check_least(self, rows=1, repetitions=1)
        if not self.dtype:
            raise ValueError("expected a dtype, found none")
        if not 0 < self.weights_mb < float("inf"):
            raise ValueError(f"expected weights_mb above 0, found {self.weights_mb:g}")
        alone = [name for name in self.dtype if name not in XLA_DTYPES]
        if alone and native.kernels().isa is None:
            raise ValueError(f"{alone[0]} needs the CPU kernels, which cannot be used here: {native.kernels().reason}")
        return cases


def linear(*, options: LinearOptions = LinearOptions(), json_file: JsonFile = None) -> None:
    """Times the linear layers of real models against XLA and against the machine's memory."""
    report(options, json_file)


def report(
    options: LinearOptions, json_file: str | None, peers: Sequence[Load] = (), versions: Mapping[str, str] | None = None
) -> None:
    """Measures, prints a table for each model and dtype, and writes the figures.

    Args:
        peers: further sides, which this package does not come with.
        versions: of what the peers use, for the JSON.
    """
    console = human_console(json_file)
    cases = options.check()
    keep_programs(options.compile_cache)
    found = native.kernels()
    if found.isa is None:
        console.print(f"without CPU kernels ({found.reason}): these are XLA's figures", style="dim", markup=False)
    rows = tuple(dict.fromkeys(options.rows))
    dtypes = tuple(dict.fromkeys(options.dtype))
    records: list[dict[str, Any]] = []
    memory = MemoryBuffers()
    dots = DotProducts() if DotProducts.possible() else None
    with progress(console, len(cases) * steps(len(rows), len(dtypes), options.repetitions, len(peers))) as step:
        for case in cases:
            step(f"{case.model} {case.layer}", 0)
            records += measure(case, rows, dtypes, memory, dots, options.weights_mb, options.repetitions, peers, step)
    groups = sorted(grouped(records, group_of).items())
    summaries = [{"model": model, "dtype": dtype, "criteria": summary(listed)} for (model, dtype), listed in groups]
    about = {"chip": chip_name(), "threads": cores(), "isa": found.isa, "kernels": f"cpu {found.isa}" if found.isa else "xla"}
    about |= {"kernels_reason": found.reason or None, "jax_version": jax.__version__, **(versions or {})}
    settings = {"dtype": dtypes, "weights_mb": options.weights_mb, "repetitions": options.repetitions}
    write_json(json_file, {**about, **settings, "summary": summaries, "data": records})
    for (_, listed), verdict in zip(groups, summaries, strict=True):
        show(console, listed, verdict["criteria"])


def group_of(record: Mapping[str, Any]) -> tuple[str, str]:
    """Key of the records that share a table."""
    return record["model"], record["dtype"]


def show(console: Console, records: Sequence[Mapping[str, Any]], verdicts: Sequence[Mapping[str, Any]]) -> None:
    """The table of one model and dtype, and what it comes to."""
    print_table(console, table(records))
    for verdict in verdicts:
        bound = f"{'at most' if verdict['at_most'] else 'at least'} {verdict['bound']:g}"
        worst = f"worst {verdict['worst']:.2f} ({verdict['worst_layer']}), median {verdict['median']:.2f}"
        name = verdict["name"].replace("_", " ")
        console.print(f"{name}: {worst}; wanted {bound}", style="green" if verdict["met"] else "red", markup=False)


SHOWN = (
    "median_ms weights_gb_per_s share_of_copy_bandwidth share_of_read_bandwidth gflop_per_s share_of_dot_products over_one_row"
)
CAPTION = (
    "weight GB/s, also as shares of copy and read bandwidth; GFLOP/s, also as a share of 8-bit dot products in registers; "
    "× 1 row: time over that of one row; vs: their time over ours"
)


def table(records: Sequence[Mapping[str, Any]]) -> FigureTable:
    """A line for each layer and number of rows."""
    model, dtype = group_of(records[0])
    title = f"{model}, {dtype} weights, {'CPU kernels' if records[0]['side'].startswith('cpu') else 'XLA'}"
    others = [name.removeprefix("ratio_to_") for name in records[0] if name.startswith("ratio_to_")]
    heads = [name.replace("bfloat16", "bf16").replace("float32", "f32").replace("_", "\n") for name in others]
    ratios = [Metric(f"ratio_to_{name}", head=f"vs\n{head}", form=".2f") for name, head in zip(others, heads, strict=True)]
    lines = [
        {**one, "name": str(one["rows"]), "shape": f"{one['layer']} {one['inputs']}→{one['outputs']}, rows"} for one in records
    ]
    return FigureTable(title, "layer", grouped(lines, "shape"), [*chosen(LINEAR, SHOWN), *ratios], caption=CAPTION)
