"""Linear layers: this package's CPU kernels against XLA and whatever else is passed in, side by side.

What is measured is a layer as decoding meets it, its weights not in a cache: a program applies many copies of the weights one
after another, together far larger than a last-level cache, each result feeding the next input. All sides and numbers of rows
of a layer take turns, and so do a copy and a read of memory and dot products of 8-bit numbers: ratios between any two of them
come from the same minutes.
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
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from tilewright.bench.bandwidth import DotProducts, MemoryBuffers
from tilewright.compiled.compare import RUN_S
from tilewright.compiled.timing import REPETITIONS, alternate, medians, spread
from tilewright.kernels import native
from tilewright.kernels.linear import blocks, cpu, xla
from tilewright.kernels.linear.cases import LinearCase
from tilewright.kernels.operations import Joined

XLA_DTYPES = ("float32", "bfloat16")
"""Dtypes of weights that XLA multiplies. The input is float32 for float32 weights, else bfloat16."""

Format = cpu.Format
"""Formats of weights that the kernels multiply."""

CALLS = 16
"""Most calls in a program: enough to hide its dispatch, few enough to compile soon."""

PAUSE_S = 0.002
"""Between runs: threads that wait for work in a busy loop, as OpenMP's do, would slow down the next side."""

Weights = TypeVar("Weights")


@dataclass(frozen=True)
class Side:
    """One way of computing a layer, its weights loaded.

    Attributes:
        name: of the side, for fields such as `ratio_to_<name>`.
        weight_bytes: of one copy of the weights.
        calls: how often a program applies the layer.
        start: `start(rows)` gives `run(programs)`, which runs so many programs, over other copies each, and waits for the last.
    """

    name: str
    weight_bytes: int
    calls: int
    start: Callable[[int], Callable[[int], None]]


Load = Callable[[LinearCase, Sequence[np.ndarray], float], Side]
"""`load(case, matrices, weights_mb)`: float32 `[I, O]`, two of them for a gated layer; and what all copies come to at least."""


def rotation(weight_bytes: int, weights_mb: float) -> tuple[int, int]:
    """Number of groups, and of copies in each, by which a weight comes to `weights_mb` (1e6 bytes) or just above."""
    copies = max(1, math.ceil(weights_mb * 1e6 / weight_bytes))
    groups = math.ceil(copies / CALLS)
    return groups, math.ceil(copies / groups)


def copied(weight_bytes: int, weights_mb: float, copy: Callable[[], Weights]) -> list[list[Weights]]:
    """Groups of copies, each at a place of its own in memory."""
    groups, calls = rotation(weight_bytes, weights_mb)
    return [[copy() for _ in range(calls)] for _ in range(groups)]


def chain(apply: Callable[[Array, Any], Array], x: Float[Array, "R I"], group: Sequence[Any]) -> Float[Array, "R I"]:
    """Applies the layer with each weight in turn. DONATES `x`.

    A number of each result, times zero, goes into the next input: otherwise XLA would run the calls side by side, or drop them.
    """
    for weights in group:
        y = jax.lax.optimization_barrier(apply(x, weights))
        x = jax.lax.dynamic_update_slice(x, x[:1, :1] + 0 * y[:1, :1], (0, 0))
    return x


def jax_side(
    name: str, case: LinearCase, weights: Any, apply: Callable[[Array, Any], Array], dtype: DTypeLike, weights_mb: float
) -> Side:
    """A side that is a JAX function of an input of `dtype` and a tree of weights."""
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


def drawn(shape: tuple[int, int], kind: Format) -> blocks.QuantisedMatrix:
    """A matrix `[I, O]` of any integers in a format that comes from files alone; all scales are 1."""
    form, (inputs, outputs) = blocks.FORMS[cast(blocks.BlockFormat, kind)], shape
    count = -(-inputs // blocks.BLOCK)

    def ones(each: int, dtype: DTypeLike) -> np.ndarray | None:
        """Numbers of which a group has `each`."""
        return np.ones((outputs, -(-count * each // form.group)), dtype) if each else None

    return blocks.QuantisedMatrix(
        cast(blocks.BlockFormat, kind),
        np.random.default_rng(0).integers(0, 256, (outputs, count, 4 * form.bits), np.uint8),
        np.ones((outputs, -(-count * form.scales // form.group)), np.float16),
        ones(form.minima, np.float16),
        ones(form.steps, np.int8),
        ones(form.lows, np.int8),
    )


def cpu_side(dtype: Format, case: LinearCase, matrices: Sequence[np.ndarray], weights_mb: float) -> Side:
    given = [jnp.asarray(w) for w in matrices] if dtype in cpu.MADE else [drawn(w.shape, dtype) for w in matrices]
    weights = cpu.pack_gated(given[0], given[1], dtype) if case.gated else cpu.pack(given[0], dtype)
    return jax_side(f"cpu_{dtype}", case, weights, cpu.linear, "float32" if dtype == "float32" else "bfloat16", weights_mb)


def load_sides(case: LinearCase, dtypes: Sequence[Format], weights_mb: float, peers: Sequence[Load]) -> list[Side]:
    """Every side of a layer: the CPU kernels in each format if they can be used here, XLA in its two, and the peers."""
    rng = np.random.default_rng(0)
    count = 2 if case.gated else 1
    size = (case.inputs, case.outputs)
    matrices = [rng.standard_normal(size, np.float32) / np.float32(math.sqrt(case.inputs)) for _ in range(count)]
    own = [partial(cpu_side, dtype) for dtype in dtypes] if native.kernels().isa else []
    loads = [*own, *(partial(xla_side, dtype) for dtype in XLA_DTYPES), *peers]
    return [load(case, matrices, weights_mb) for load in loads]


def ready(side: Side, rows: int) -> Callable[[], float]:
    """A run of one side that takes about `RUN_S` and returns seconds for a call of the layer."""
    run = side.start(rows)

    def timed(programs: int) -> float:
        time.sleep(PAUSE_S)
        began = time.perf_counter()
        run(programs)
        return (time.perf_counter() - began) / programs

    first = timed(1)
    # The first run of all also touches memory for the first time; unless it was long, a second one says more.
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
    """The figures of one layer: a record for each of `dtypes` and `rows`. `on_run` is called `steps` times in all."""
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
    """Number of times that `measure` calls `on_run`."""
    sides = rows * ((dtypes if native.kernels().isa else 0) + 2 + peers)
    return sides + repetitions * (sides + 2 + DotProducts.possible())


def figures(
    case: LinearCase, sides: Sequence[Side], times: Mapping[tuple[str, int], Sequence[float]], dtype: str, rows: int
) -> dict[str, Any]:
    """One record. Ratios to another side are its time over ours: above 1, ours is faster.

    What is measured in `dtype` is the CPU kernel, or else XLA.
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
    """A bound that the layers of a model are held to, at the worst of them.

    Attributes:
        name: of the figure in `summary`.
        field: of a record, or what the names of several begin with; then the worst of them counts.
        rows: the rows that it is about.
        bound: what the figure should reach, or with `at_most` not exceed.
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
    """Standing of one model and dtype under each criterion: the worst layer, the median, and every layer.

    A criterion for which nothing was measured is left out.
    """
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
            told = {"name": criterion.name, "bound": criterion.bound, "at_most": criterion.at_most, "met": met}
            told |= {"worst": values[layer], "worst_layer": layer, "median": statistics.median(values.values())}
            found.append({**told, "layers": values})
    return found
