"""`tilewright bench linear`: the linear layers of real models on this machine's kernels, XLA, and what a caller adds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Annotated, Any

import jax
from cyclopts import Parameter
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tilewright.bench.bandwidth import DotProducts, MemoryBuffers, threads
from tilewright.bench.linear import XLA_DTYPES, Format, Load, measure, steps, summary
from tilewright.cli.common import SEVERAL, CompileCache, JsonFile, check_json_file, human_console, keep_programs, write_json
from tilewright.compiled.figures import print_table, significant
from tilewright.compiled.machine import chip_name
from tilewright.kernels import native
from tilewright.kernels.linear.cases import LinearCase, named


@Parameter(name="*")
@dataclass(frozen=True)
class LinearOptions:
    """Options of what is measured. Each of the first four takes several values.

    Attributes:
        model: "demo", "qwen3-0.6b", "qwen3-1.7b" or "qwen3-4b"; no checkpoint is needed.
        layers: of q, k, v, o, gate_up, down and head; by default all but v, which is as large as k.
        rows: numbers of rows.
        dtype: formats of the weights: float32, bfloat16, int8, or llama.cpp's and others' blocks of 4 to 8 bits.
        weights_mb: copies of a layer's weights take up at least this much (MB) and take turns, as the layers of a model do;
            less than a cache holds measures the cache.
        repetitions: how often each is timed.
    """

    model: Annotated[tuple[str, ...], SEVERAL] = ("qwen3-0.6b",)
    layers: Annotated[tuple[str, ...], SEVERAL] = ("q", "k", "o", "gate_up", "down", "head")
    rows: Annotated[tuple[int, ...], SEVERAL] = (1, 2, 4, 8, 16, 32, 64, 128, 512)
    dtype: Annotated[tuple[Format, ...], SEVERAL] = ("bfloat16",)
    weights_mb: float = 100.0
    repetitions: int = 5
    compile_cache: CompileCache = True

    def check(self) -> list[LinearCase]:
        """The layers asked for.

        Raises:
            ValueError: an option is out of its range.
        """
        cases = named(self.model, self.layers)
        if not self.rows or min(self.rows) < 1:
            raise ValueError(f"expected rows of at least 1, found {', '.join(map(str, self.rows)) or 'none'}")
        if not self.dtype:
            raise ValueError("expected a dtype, found none")
        if self.repetitions < 1:
            raise ValueError(f"expected repetitions of at least 1, found {self.repetitions}")
        if not 0 < self.weights_mb < float("inf"):
            raise ValueError(f"expected weights_mb above 0, found {self.weights_mb:g}")
        alone = [name for name in self.dtype if name not in XLA_DTYPES]
        if alone and native.kernels().isa is None:
            raise ValueError(f"{alone[0]} needs the CPU kernels, which cannot be used here: {native.kernels().reason}")
        return cases


def linear(*, options: LinearOptions = LinearOptions(), json_file: JsonFile = None) -> None:
    """Times the linear layers of real models against XLA and against the machine's memory.

    Parameters
    ----------
    json_file
        Write the figures as JSON to this file, "-" for standard output.
    """
    report(options, json_file)


def report(
    options: LinearOptions, json_file: str | None, peers: Sequence[Load] = (), versions: Mapping[str, str] | None = None
) -> None:
    """Measures, prints a table for each model and dtype, and writes the figures.

    Args:
        peers: further sides, which this package does not come with.
        versions: of what the peers use, for the JSON.
    """
    check_json_file(json_file)
    cases = options.check()
    keep_programs(options.compile_cache)
    console = human_console(json_file)
    found = native.kernels()
    if found.isa is None:
        console.print(f"without CPU kernels ({found.reason}): these are XLA's figures", style="dim", markup=False)
    rows, dtypes = tuple(dict.fromkeys(options.rows)), tuple(dict.fromkeys(options.dtype))
    records: list[dict[str, Any]] = []
    memory, dots = MemoryBuffers(), DotProducts() if DotProducts.possible() else None
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        each = steps(len(rows), len(dtypes), options.repetitions, len(peers))
        task = bar.add_task("", total=each * len(cases))
        for case in cases:
            bar.update(task, description=f"{case.model} {case.layer}")
            advance = partial(bar.advance, task)
            records += measure(case, rows, dtypes, memory, dots, options.weights_mb, options.repetitions, peers, advance)
    summaries = []
    for (model, dtype), group in groupby(sorted(records, key=group_of), key=group_of):
        listed = list(group)
        verdicts = summary(listed)
        show(console, listed, verdicts)
        summaries.append({"model": model, "dtype": dtype, "criteria": verdicts})
    about = {"chip": chip_name(), "threads": threads(), "isa": found.isa, "kernels": f"cpu {found.isa}" if found.isa else "xla"}
    about |= {"kernels_reason": found.reason or None, "jax_version": jax.__version__, **(versions or {})}
    settings = {"dtype": dtypes, "weights_mb": options.weights_mb, "repetitions": options.repetitions}
    write_json(json_file, {**about, **settings, "summary": summaries, "data": records})


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


def table(records: Sequence[Mapping[str, Any]]) -> Table:
    """A line for each layer and number of rows."""
    others = [name.removeprefix("ratio_to_") for name in records[0] if name.startswith("ratio_to_")]
    model, dtype = group_of(records[0])
    caption = (
        "weight GB/s, also as shares of copy and read bandwidth; GFLOP/s, also as a share of 8-bit dot products in registers; "
        "× 1 row: time over that of one row; vs: their time over ours"
    )
    title = f"{model}, {dtype} weights, {'CPU kernels' if records[0]['side'].startswith('cpu') else 'XLA'}"
    shown = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    shown.add_column("layer")
    short = [name.replace("bfloat16", "bf16").replace("float32", "f32").replace("_", "\n") for name in others]
    shares = ("GB/s", "of\ncopy", "of\nread", "GFLOP\n/s", "of\ndot")
    for column in ("rows", "ms", *shares, "×\n1 row", *(f"vs\n{name}" for name in short)):
        shown.add_column(column, justify="right")
    for _, group in groupby(records, key=lambda record: record["layer"]):
        for line, record in enumerate(listed := list(group)):
            label = [record["layer"], f"{record['inputs']}→{record['outputs']}"]
            once, dots = record["over_one_row"], record["share_of_dot_products"]
            shown.add_row(
                "\n".join(label) if len(listed) == 1 else "".join(label[line : line + 1]),
                str(record["rows"]),
                significant(record["median_ms"], 4),
                f"{record['weights_gb_per_s']:.1f}",
                f"{record['share_of_copy_bandwidth']:.0%}",
                f"{record['share_of_read_bandwidth']:.0%}",
                f"{record['gflop_per_s']:.0f}",
                "" if dots is None else f"{dots:.0%}",
                "" if once is None else f"{once:.2f}",
                *(f"{record[f'ratio_to_{name}']:.2f}" for name in others),
                end_section=line == len(listed) - 1,
            )
    return shown
