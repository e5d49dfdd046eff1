"""Times the linear layers of real models: this package's CPU kernels against XLA and against the machine's memory.

    python benchmarks/linear_layers.py [--model qwen3-0.6b ...] [--rows 1 16 ...] [--dtype q8_0 ...] [--json FILE]

No checkpoint is needed. A program applies many copies of a layer's weights one after another, together far larger than a
last-level cache, and each output feeds the next input: weights come from memory, as in decoding. All implementations and row
counts of a layer are timed in alternation, together with a memory copy, a memory read and 8-bit dot products (`bandwidth.py`),
so that every ratio compares measurements of the same minutes. `tests/oracle/bench_linear.py` adds torch.

Fields of a JSON record (one per layer, weight format and row count): `median_ms` and `range_ms` of the layer; `over_one_row`,
the median over that of one row; `weight_mb`, 1e6 bytes of one copy of the weights; `weights_gb_per_s`, weight bytes over the
median, and its shares of copy and read bandwidth; `gflop_per_s`, two operations per weight and row over the median, and for
integer formats its share of 8-bit dot products; `<side>_ms` and `ratio_to_<side>` of every other implementation, its time over
ours.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from bandwidth import DotProducts, MemoryBuffers
from cyclopts import App
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float
from rich.console import Console

from tilewright.cli.common import keep_programs
from tilewright.cli.options import Repetitions, Several, check_least, option_class
from tilewright.cli.outputs import JsonFile, human_console, progress, write_json
from tilewright.compiled.compare import RUN_S
from tilewright.compiled.machine import chip_name, cores
from tilewright.compiled.timing import REPETITIONS, alternate, medians, spread
from tilewright.kernels import native
from tilewright.kernels.linear import blocks, cpu, xla
from tilewright.kernels.linear.cases import LinearCase, named
from tilewright.kernels.operations import Joined
from tilewright.metrics.metric import Metric
from tilewright.metrics.tables import FigureTable, grouped, print_table

XLA_DTYPES = ("float32", "bfloat16")
"""Dtypes of weights that XLA multiplies. The input is float32 for float32 weights, else bfloat16."""

Format = cpu.Format
"""Weight formats of the CPU kernels."""

CALLS = 16
"""Maximum number of layer calls in a program: enough to hide its dispatch, few enough to compile quickly."""

PAUSE_S = 0.002
"""Pause between runs: worker threads that spin while idle, such as OpenMP's, would slow down the next implementation."""

Weights = TypeVar("Weights")


@dataclass(frozen=True)
class Side:
    """One implementation of a layer, with its weights loaded.

    Attributes:
        name: name of the implementation, for fields such as `ratio_to_<name>`.
        weight_bytes: bytes of one copy of the weights.
        calls: layer calls in a program.
        start: `start(rows)` returns `run(programs)`, which runs that number of programs over successive copies and waits for
        the last.
    """

    name: str
    weight_bytes: int
    calls: int
    start: Callable[[int], Callable[[int], None]]


Load = Callable[[LinearCase, Sequence[np.ndarray], float], Side]
"""`load(case, matrices, weights_mb)`: float32 matrices `[I, O]` (two for a gated layer) and the minimum size of all copies."""


def rotation(weight_bytes: int, weights_mb: float) -> tuple[int, int]:
    """Returns the number of groups and of copies per group that take `weights_mb` (1e6 bytes) or slightly more."""
    copies = max(1, math.ceil(weights_mb * 1e6 / weight_bytes))
    groups = math.ceil(copies / CALLS)
    return groups, math.ceil(copies / groups)


def copied(weight_bytes: int, weights_mb: float, copy: Callable[[], Weights]) -> list[list[Weights]]:
    """Returns groups of copies, each copy in its own memory."""
    groups, calls = rotation(weight_bytes, weights_mb)
    return [[copy() for _ in range(calls)] for _ in range(groups)]


def chain(apply: Callable[[Array, Any], Array], x: Float[Array, "R I"], group: Sequence[Any]) -> Float[Array, "R I"]:
    """Applies the layer with each weight in sequence. DONATES `x`.

    One element of each result, times zero, is added to the next input: otherwise XLA would run the calls in parallel or drop
    them.
    """
    for weights in group:
        y = jax.lax.optimization_barrier(apply(x, weights))
        x = jax.lax.dynamic_update_slice(x, x[:1, :1] + 0 * y[:1, :1], (0, 0))
    return x


def jax_side(
    name: str, case: LinearCase, weights: Any, apply: Callable[[Array, Any], Array], dtype: DTypeLike, weights_mb: float
) -> Side:
    """Returns a side that is a JAX function of an input of `dtype` and a tree of weights."""
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
    groups = copied(nbytes, weights_mb, lambda: jax.tree.map(jnp.copy, weights))

    def start(rows: int) -> Callable[[int], None]:
        x = jnp.ones((rows, case.inputs), dtype)
        program = jax.jit(partial(chain, apply), donate_argnums=0).lower(x, groups[0]).compile()

        def run(programs: int) -> None:
            nonlocal x
            for i in range(programs):
                x = program(x, groups[i % len(groups)])
            x.block_until_ready()

        return run

    return Side(name, nbytes, len(groups[0]), start)


def xla_side(dtype: str, case: LinearCase, matrices: Sequence[np.ndarray], weights_mb: float) -> Side:
    def apply(x: Array, weights: Sequence[Array]) -> Array:
        return xla.gated_linear(x, Joined(weights, gated=True)) if case.gated else xla.linear(x, weights[0])

    weights = [jnp.asarray(w, dtype) for w in matrices]
    return jax_side(f"xla_{dtype}", case, weights, apply, dtype, weights_mb)


def random_blocks(shape: tuple[int, int], kind: Format) -> blocks.QuantisedMatrix:
    """Returns a matrix `[I, O]` of random integers in a format that only files have; all scales are 1."""
    form, (inputs, outputs) = blocks.FORMS[cast(blocks.BlockFormat, kind)], shape
    count = -(-inputs // blocks.BLOCK)

    def ones(per_group: int, dtype: DTypeLike) -> np.ndarray | None:
        return np.ones((outputs, -(-count * per_group // form.group)), dtype) if per_group else None

    return blocks.QuantisedMatrix(
        cast(blocks.BlockFormat, kind),
        np.random.default_rng(0).integers(0, 256, (outputs, count, 4 * form.bits), np.uint8),
        np.ones((outputs, -(-count * form.scales // form.group)), np.float16),
        ones(form.minima, np.float16),
        ones(form.steps, np.int8),
        ones(form.lows, np.int8),
    )


def cpu_side(dtype: Format, case: LinearCase, matrices: Sequence[np.ndarray], weights_mb: float) -> Side:
    sources = [jnp.asarray(w) for w in matrices] if dtype in cpu.MADE else [random_blocks(w.shape, dtype) for w in matrices]
    weights = cpu.pack_gated(sources[0], sources[1], dtype) if case.gated else cpu.pack(sources[0], dtype)
    return jax_side(f"cpu_{dtype}", case, weights, cpu.linear, "float32" if dtype == "float32" else "bfloat16", weights_mb)


def load_sides(case: LinearCase, dtypes: Sequence[Format], weights_mb: float, peers: Sequence[Load]) -> list[Side]:
    """Returns every side of a layer: the CPU kernels in each format (if they run here), XLA in its two dtypes, the peers."""
    rng = np.random.default_rng(0)
    count = 2 if case.gated else 1
    size = (case.inputs, case.outputs)
    matrices = [rng.standard_normal(size, np.float32) / np.float32(math.sqrt(case.inputs)) for _ in range(count)]
    kernels = [partial(cpu_side, dtype) for dtype in dtypes] if native.kernels().isa else []
    loads = [*kernels, *(partial(xla_side, dtype) for dtype in XLA_DTYPES), *peers]
    return [load(case, matrices, weights_mb) for load in loads]


def ready(side: Side, rows: int) -> Callable[[], float]:
    """Compiles one side. The returned function runs for about `RUN_S` and returns seconds per call of the layer."""
    run = side.start(rows)

    def timed(programs: int) -> float:
        time.sleep(PAUSE_S)
        start = time.perf_counter()
        run(programs)
        return (time.perf_counter() - start) / programs

    first = timed(1)
    # The very first run also maps memory. Unless it was long, a second run gives a better estimate.
    programs = max(1, round(RUN_S / (timed(1) if first < RUN_S else first)))
    return lambda: timed(programs) / side.calls


def measure(
    case: LinearCase,
    rows: Sequence[int],
    dtypes: Sequence[Format],
    memory: MemoryBuffers,
    dots: DotProducts | None = None,
    weights_mb: float = 100.0,
    repetitions: int = REPETITIONS,
    peers: Sequence[Load] = (),
    on_run: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Measures one layer. Returns a record for each of `dtypes` and `rows`. Calls `on_run` `steps` times."""
    sides = load_sides(case, dtypes, weights_mb, peers)
    runs: dict[tuple[str, int], Callable[[], float]] = {}
    for side in sides:
        for n in rows:
            runs[side.name, n] = ready(side, n)
            on_run()
    limits = {("copy", 0): memory.copy, ("read", 0): memory.read} | ({} if dots is None else {("dot", 0): dots.rate})
    times = alternate({**limits, **runs}, repetitions, on_run)
    return [figures(case, sides, times, dtype, n) for dtype in dtypes for n in rows]


def steps(rows: int, dtypes: int, repetitions: int, peers: int) -> int:
    """Returns the number of times that `measure` calls `on_run`."""
    sides = rows * ((dtypes if native.kernels().isa else 0) + 2 + peers)
    return sides + repetitions * (sides + 2 + DotProducts.possible())


def figures(
    case: LinearCase, sides: Sequence[Side], times: Mapping[tuple[str, int], Sequence[float]], dtype: str, rows: int
) -> dict[str, Any]:
    """Returns one record, of the CPU kernel in `dtype`, or of XLA without CPU kernels.

    A ratio to another side is its time over ours: above 1, ours is faster.
    """
    by_name = {side.name: side for side in sides}
    side = by_name.get(f"cpu_{dtype}") or by_name[f"xla_{dtype}"]
    middle = medians(times)
    seconds = middle[side.name, rows]
    one_row = middle.get((side.name, 1))
    rate = side.weight_bytes / seconds / 1e9
    copy = middle["copy", 0]
    read = middle["read", 0]
    dot = middle.get(("dot", 0))
    operations = 2 * rows * case.parameters / seconds / 1e9
    in_dots = dot if side.name.startswith("cpu_") and dtype not in XLA_DTYPES else None
    others = {other.name: middle[other.name, rows] for other in sides if not other.name.startswith("cpu_")}
    return {
        "model": case.model,
        "layer": case.layer,
        "inputs": case.inputs,
        "outputs": case.outputs,
        "gated": case.gated,
        "dtype": dtype,
        "rows": rows,
        "side": side.name,
        "median_ms": 1e3 * seconds,
        "range_ms": spread([1e3 * each for each in times[side.name, rows]]).range,
        "over_one_row": seconds / one_row if one_row else None,
        "weight_mb": side.weight_bytes / 1e6,
        "weights_gb_per_s": rate,
        "copy_gb_per_s": copy,
        "share_of_copy_bandwidth": rate / copy,
        "read_gb_per_s": read,
        "share_of_read_bandwidth": rate / read,
        "gflop_per_s": operations,
        "dot_gflop_per_s": dot,
        "share_of_dot_products": operations / in_dots if in_dots else None,
        **{f"{name}_ms": 1e3 * other for name, other in others.items()},
        **{f"ratio_to_{name}": other / seconds for name, other in others.items()},
    }


@dataclass(frozen=True)
class Criterion:
    """A bound on a figure of the worst layer of a model.

    Attributes:
        name: name in `summary`.
        field: field of a record, or a prefix of several fields; then the worst field counts.
        rows: row counts to which the bound applies.
        bound: minimum, or with `at_most` maximum, of the figure.
    """

    name: str
    field: str
    rows: tuple[int, ...]
    bound: float
    at_most: bool = False


CRITERIA = (
    Criterion("rows_16_over_rows_1", "over_one_row", (16,), 1.25, at_most=True),
    Criterion("share_of_copy_bandwidth_at_1_row", "share_of_copy_bandwidth", (1,), 0.7),
    Criterion("share_of_dot_products_at_32_rows", "share_of_dot_products", (32,), 0.6),
    Criterion("ratio_to_torch_bfloat16_at_1_to_16_rows", "ratio_to_torch_bfloat16", (1, 2, 4, 8, 16), 1.0),
    Criterion("ratio_to_torch_bfloat16_at_512_rows", "ratio_to_torch_bfloat16", (512,), 0.8),
)


def summary(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Compares one model and dtype with each measured criterion: the worst layer, the median, and every layer."""
    found = []
    for criterion in CRITERIA:
        values: dict[str, float] = {}
        worse = max if criterion.at_most else min
        for record in records:
            for field, value in record.items():
                if record["rows"] in criterion.rows and field.startswith(criterion.field) and value is not None:
                    values[record["layer"]] = worse(value, values.get(record["layer"], value))
        if values:
            layer = worse(values, key=values.__getitem__)
            met = values[layer] <= criterion.bound if criterion.at_most else values[layer] >= criterion.bound
            verdict = {"name": criterion.name, "bound": criterion.bound, "at_most": criterion.at_most, "met": met}
            verdict |= {"worst": values[layer], "worst_layer": layer, "median": statistics.median(values.values())}
            found.append({**verdict, "layers": values})
    return found


@option_class
class LinearOptions:
    """Options of the measurement. Each of the first four takes several values.

    Attributes:
        model: "demo", "qwen3-0.6b", "qwen3-1.7b" or "qwen3-4b"; no checkpoint is needed.
        layers: q, k, v, o, gate_up, down and head; by default all but v, which has k's size.
        rows: numbers of rows.
        dtype: weight formats: float32, bfloat16, or blocks of 4 to 8 bits. "q8_0" is the format of --weights int8, "q4_1" of
            int4.
        weights_mb: minimum size of all copies of a layer's weights (MB); less than a cache holds measures the cache.
    """

    model: Several[str] = ("qwen3-0.6b",)
    layers: Several[str] = ("q", "k", "o", "gate_up", "down", "head")
    rows: Several[int] = (1, 2, 4, 8, 16, 32, 64, 128, 512)
    dtype: Several[Format] = ("bfloat16",)
    weights_mb: float = 100.0
    repetitions: Repetitions = 5

    def cases(self) -> list[LinearCase]:
        """Returns the chosen layers. Raises a `ValueError` if an option is out of range."""
        cases = named(self.model, self.layers)
        check_least(self, rows=1, repetitions=1)
        if not 0 < self.weights_mb < float("inf"):
            raise ValueError(f"expected weights_mb above 0, found {self.weights_mb:g}")
        kernels_only = [name for name in self.dtype if name not in XLA_DTYPES]
        if kernels_only and native.kernels().isa is None:
            raise ValueError(f"{kernels_only[0]} needs the CPU kernels, which cannot run here: {native.kernels().reason}")
        return cases


def report(
    options: LinearOptions, json_file: str | None, peers: Sequence[Load] = (), versions: Mapping[str, str] | None = None
) -> None:
    """Measures, prints a table for each model and dtype, and writes the JSON.

    Args:
        peers: further implementations.
        versions: versions of the peers' packages, for the JSON.
    """
    console = human_console(json_file)
    cases = options.cases()
    keep_programs()
    kernels = native.kernels()
    if kernels.isa is None:
        console.print(f"no CPU kernels ({kernels.reason}): measuring XLA", style="dim", markup=False)
    rows = tuple(dict.fromkeys(options.rows))
    dtypes = tuple(dict.fromkeys(options.dtype))
    records: list[dict[str, Any]] = []
    memory = MemoryBuffers()
    dots = DotProducts() if DotProducts.possible() else None
    with progress(console, len(cases) * steps(len(rows), len(dtypes), options.repetitions, len(peers))) as step:
        for case in cases:
            step(f"{case.model} {case.layer}", 0)
            records += measure(case, rows, dtypes, memory, dots, options.weights_mb, options.repetitions, peers, step)
    groups = sorted(grouped(records, lambda record: (record["model"], record["dtype"])).items())
    summaries = [{"model": model, "dtype": dtype, "criteria": summary(group)} for (model, dtype), group in groups]
    about = {
        "chip": chip_name(),
        "threads": cores(),
        "isa": kernels.isa,
        "kernels": f"cpu {kernels.isa}" if kernels.isa else "xla",
    }
    about |= {"kernels_reason": kernels.reason or None, "jax_version": jax.__version__, **(versions or {})}
    settings = {"dtype": dtypes, "weights_mb": options.weights_mb, "repetitions": options.repetitions}
    write_json(json_file, {**about, **settings, "summary": summaries, "data": records})
    for (_, group), verdict in zip(groups, summaries, strict=True):
        show(console, group, verdict["criteria"])


def show(console: Console, records: Sequence[Mapping[str, Any]], verdicts: Sequence[Mapping[str, Any]]) -> None:
    """Prints the table of one model and dtype, and its criteria."""
    print_table(console, table(records))
    for verdict in verdicts:
        bound = f"{'at most' if verdict['at_most'] else 'at least'} {verdict['bound']:g}"
        worst = f"worst {verdict['worst']:.2f} ({verdict['worst_layer']}), median {verdict['median']:.2f}"
        name = verdict["name"].replace("_", " ")
        console.print(f"{name}: {worst}; bound: {bound}", style="green" if verdict["met"] else "red", markup=False)


COLUMNS = (
    Metric("median_ms", head="ms", digits=4),
    Metric("weights_gb_per_s", head="GB/s", form=".1f"),
    Metric("share_of_copy_bandwidth", head="of\ncopy", form=".0%"),
    Metric("share_of_read_bandwidth", head="of\nread", form=".0%"),
    Metric("gflop_per_s", head="GFLOP\n/s", form=".0f"),
    Metric("share_of_dot_products", head="of\ndot", form=".0%"),
    Metric("over_one_row", head="×\n1 row", form=".2f"),
)
CAPTION = (
    "weight GB/s, also as shares of copy and read bandwidth; GFLOP/s, also as a share of 8-bit dot products in registers; "
    "× 1 row: time over that of one row; vs: their time over ours"
)


def table(records: Sequence[Mapping[str, Any]]) -> FigureTable:
    """Returns the table of one model and dtype, a line for each layer and row count."""
    first = records[0]
    title = f"{first['model']}, {first['dtype']} weights, {'CPU kernels' if first['side'].startswith('cpu') else 'XLA'}"
    others = [name.removeprefix("ratio_to_") for name in first if name.startswith("ratio_to_")]
    heads = [name.replace("bfloat16", "bf16").replace("float32", "f32").replace("_", "\n") for name in others]
    ratios = [Metric(f"ratio_to_{name}", head=f"vs\n{head}", form=".2f") for name, head in zip(others, heads, strict=True)]
    lines = [
        {**one, "name": str(one["rows"]), "shape": f"{one['layer']} {one['inputs']}→{one['outputs']}, rows"} for one in records
    ]
    return FigureTable(title, "layer", grouped(lines, "shape"), [*COLUMNS, *ratios], caption=CAPTION)


def main(*, options: LinearOptions = LinearOptions(), json_file: JsonFile = None) -> None:
    report(options, json_file)


if __name__ == "__main__":
    app = App(help=__doc__)
    app.default(main)
    app()
