"""The CPU's gather and reduce against NumPy in float64.

As a program (`test_gather_reduce_cpu.py ISA`) this file runs its checks on one instruction set. It prints a digest of those
results whose bits do not depend on that, then one of all results.
"""

import hashlib
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.test_instruction_sets import NEED
from tilewright.kernels import native
from tilewright.kernels.gather_reduce import cpu, reference

UNIT = {"float32": 2.0**-24, "bfloat16": 2.0**-8}
REDUCES: tuple[reference.Reduce, ...] = ("sum", "mean", "max", "min")
Graph = tuple[Any, Any]
"""Offsets and sources, of NumPy."""
SLOPE = 0.2
SHAPES = [(1, 1), (1, 5), (1, 16), (1, 33), (1, 100), (1, 301), (8, 8), (9, 3), (2, 16), (3, 40), (1, 128), (2, 150)]
"""Heads and the features of each: fewer than a vector, whole vectors, part of one, more than one turn."""

gather = jax.jit(cpu.gather_reduce_csr, static_argnames="reduce")
attend = jax.jit(cpu.attend_csr, static_argnums=5)
attend_grad = jax.jit(cpu.attend_csr_grad, static_argnums=9)
edge_dot = jax.jit(cpu.edge_dot_csr, static_argnums=4)


def graph(seed: int, rows: int, nodes: int, most: int = 6, hub: int = 0) -> Graph:
    """Random rows, some of them empty, one with `hub` edges more.

    There are as many sources for any seed, so that a program compiled once serves; the last of them are no edges.
    """
    rng = np.random.default_rng(seed)
    degrees = rng.integers(0, most + 1, rows) * (rng.random(rows) < 0.8)
    degrees[rng.integers(rows)] += hub
    offsets = np.concatenate([[0], np.cumsum(degrees)]).astype(np.int32)
    return offsets, rng.integers(0, nodes, rows * most + max(hub, 100) + 1).astype(np.int32)


def owners(g: Graph) -> tuple[np.ndarray, np.ndarray]:
    """Row and source of each edge."""
    offsets, sources = g
    return np.repeat(np.arange(len(offsets) - 1), np.diff(offsets)), sources[: offsets[-1]]


def normal(seed: int, *shape: int, dtype: str = "float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32), dtype)


def wide(x: jax.Array | np.ndarray) -> np.ndarray:
    return np.asarray(x, np.float64)


def expected(x: np.ndarray, g: Graph, weights: np.ndarray | None, reduce: str) -> tuple[np.ndarray, np.ndarray]:
    """The result in float64, and the sum of the messages' sizes, which the error of a chain of sums is proportional to."""
    rows, sources = owners(g)
    count = np.diff(g[0])[:, None]
    messages = x[sources]
    if weights is not None:
        split = weights[: len(rows)].reshape(len(rows), -1)
        messages = messages * np.repeat(split, x.shape[1] // split.shape[1], axis=1)
    size = np.zeros((len(count), x.shape[1]))
    np.add.at(size, rows, np.abs(messages))
    if reduce in ("max", "min"):
        out = np.full_like(size, -np.inf if reduce == "max" else np.inf)
        (np.maximum if reduce == "max" else np.minimum).at(out, rows, messages)
        return np.where(count > 0, out, 0), size
    out = np.zeros_like(size)
    np.add.at(out, rows, messages)
    return (out / np.maximum(count, 1), size / np.maximum(count, 1)) if reduce == "mean" else (out, size)


def check_gather(got: jax.Array, x: jax.Array, g: Graph, weights: jax.Array | None, reduce: str) -> None:
    want, size = expected(wide(x), g, None if weights is None else wide(weights), reduce)
    assert got.dtype == x.dtype
    steps = int(np.diff(g[0]).max()) + 4
    bound = steps * UNIT["float32"] * size + UNIT[x.dtype.name] * np.abs(want) + 1e-37
    assert (np.abs(wide(got) - want) <= bound).all(), reduce


def check_dot(got: np.ndarray, target: jax.Array, x: jax.Array, g: Graph) -> None:
    rows, sources = owners(g)
    products = (wide(target)[rows] * wide(x)[sources]).reshape(len(rows), got.shape[1], -1)
    bound = (products.shape[2] + 4) * UNIT["float32"] * np.abs(products).sum(axis=2) + 1e-37
    assert (np.abs(got[: len(rows)] - products.sum(axis=2)) <= bound).all()
    assert not got[len(rows) :].any(), "sources that belong to no row get zero"


def softmax_sum(given: Sequence[np.ndarray], g: Graph) -> tuple[np.ndarray, ...]:
    """Attention in float64, given features and both scores: the result, each row's largest score, its sum of exponentials."""
    (x, source, target), (rows, sources) = given, owners(g)
    heads = source.shape[1]
    score = target[rows] + source[sources]
    score = np.where(score > 0, score, SLOPE * score)
    most = np.full(target.shape, -np.inf)
    total = np.zeros(target.shape)
    np.maximum.at(most, rows, score)
    most[np.diff(g[0]) == 0] = 0
    share = np.exp(score - most[rows])
    np.add.at(total, rows, share)
    share /= total[rows]
    out = np.zeros((*target.shape, x.shape[1] // heads))
    np.add.at(out, rows, share[:, :, None] * x[sources].reshape(len(rows), heads, -1))
    return out.reshape(len(target), -1), most, total


def transpose(g: Graph, nodes: int) -> tuple[Graph, Graph]:
    """The graph by source, and the given offsets with the place of each edge in there."""
    rows, sources = owners(g)
    order = np.argsort(sources, kind="stable")
    places = np.empty_like(order)
    places[order] = np.arange(len(order))
    offsets = np.concatenate([[0], np.cumsum(np.bincount(sources, minlength=nodes))])
    rest = np.full(len(g[1]) - len(rows), -1)
    targets, places = (np.concatenate([array, rest]).astype(np.int32) for array in (rows[order], places))
    return (offsets.astype(np.int32), targets), (g[0], places)


def check_grads(grads: Sequence[jax.Array], given: Sequence[np.ndarray], dy: np.ndarray, g: Graph, unit: float) -> None:
    """Returns directional derivatives along random directions, by differences of float64 results."""
    for place, grad in enumerate(grads):
        direction = np.random.default_rng(place).standard_normal(grad.shape)
        moved = [[a + step * direction if i == place else a for i, a in enumerate(given)] for step in (1e-6, -1e-6)]
        plus, minus = (np.sum(softmax_sum(at, g)[0] * dy) for at in moved)
        size = np.linalg.norm(wide(grad)) * np.linalg.norm(direction) + np.linalg.norm(dy)
        assert abs(np.sum(wide(grad) * direction) - (plus - minus) / 2e-6) <= (1e-5 + 2 * unit) * size, place


@jax.jit
def everything(
    x: jax.Array,
    dy: jax.Array,
    source: jax.Array,
    target: jax.Array,
    weights: jax.Array,
    g: Graph,
    transposed: Graph,
    forward: Graph,
) -> tuple[list[jax.Array], jax.Array, tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """All results for one graph, in one program, since a program for each takes longer to compile than all of them to run."""
    gathered = [cpu.gather_reduce_csr(x, g[0], g[1], w, reduce) for reduce in REDUCES for w in (None, weights[:, 0], weights)]
    attended = cpu.attend_csr(x, source, target, g[0], g[1], SLOPE)
    grads = cpu.attend_csr_grad(dy, *attended, x, source, target, transposed, forward, SLOPE)
    return gathered, cpu.edge_dot_csr(dy, x, g[0], g[1], heads=source.shape[1]), attended, grads


def check(seed: int, g: Graph, nodes: int, shape: tuple[int, int], dtype: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Checks every operation; returns the results without weights, and all results."""
    (heads, features), rows = shape, len(g[0]) - 1
    x = normal(seed, nodes, heads * features, dtype=dtype)
    dy = normal(seed + 1, rows, heads * features, dtype=dtype)
    source, target, weights = (normal(seed + 2 + i, size, heads) for i, size in enumerate((nodes, rows, len(g[1]))))
    gathered, dots, attended, grads = everything(x, dy, source, target, weights, g, *transpose(g, nodes))
    for i, got in enumerate(gathered):
        check_gather(got, x, g, (None, weights[:, 0], weights)[i % 3], REDUCES[i // 3])
    check_dot(np.asarray(dots), dy, x, g)
    given = (wide(x), wide(source), wide(target))
    unit = (30 + int(np.diff(g[0]).max())) * UNIT["float32"] + UNIT[dtype]
    for got, want in zip(attended, softmax_sum(given, g), strict=True):
        np.testing.assert_allclose(wide(got), want, rtol=unit, atol=8 * unit)
    assert [grad.dtype for grad in grads] == [x.dtype, jnp.float32, jnp.float32]
    check_grads(grads, given, wide(dy), g, UNIT[dtype])
    arrays = [np.asarray(array.astype(jnp.float32)) for array in (*gathered, dots, *attended, *grads)]
    return arrays[: len(gathered) : 3], arrays


@NEED
@given(
    st.integers(0, 999),
    st.sampled_from([1, 2, 17]),
    st.sampled_from([1, 2, 13]),
    st.sampled_from(SHAPES),
    st.sampled_from(["float32", "bfloat16"]),
)
def test_any_graph_and_width(seed: int, rows: int, nodes: int, shape: tuple[int, int], dtype: str):
    check(seed, graph(seed, rows, nodes, hub=seed % 3 * 50), nodes, shape, dtype)


@NEED
def test_the_reference_means_the_same():
    g = graph(1, 12, 9)
    x = normal(0, 9, 24)
    for weights in (None, normal(1, len(g[1])), normal(2, len(g[1]), 3)):
        for reduce in REDUCES:
            # Sources beyond the last offset are for the kernel to skip.
            edges = g[0][-1]
            cut = None if weights is None else weights[:edges]
            want = reference.gather_reduce_csr(x, jnp.asarray(g[0]), jnp.asarray(g[1][:edges]), cut, reduce)
            np.testing.assert_allclose(gather(x, *g, weights, reduce=reduce), want, rtol=1e-5, atol=1e-6)


@NEED
@pytest.mark.parametrize("shape", [(1, 3), (1, 20), (4, 3), (2, 24)])
@pytest.mark.parametrize("reduce", REDUCES)
def test_nothing_leaks_from_what_is_not_a_neighbour(shape: tuple[int, int], reduce: reference.Reduce):
    offsets = np.array([0, 2, 2, 3], np.int32)
    sources = np.array([1, 3, 3, 0], np.int32)
    x = normal(0, 5, shape[0] * shape[1]).at[jnp.array([0, 2, 4])].set(jnp.nan)
    weights = normal(1, 4, shape[0]).at[3].set(jnp.nan)
    assert np.isfinite(gather(x, offsets, sources, weights, reduce=reduce)).all()
    assert np.isfinite(edge_dot(x[1:4].at[1].set(jnp.nan), x, offsets, np.array([3, 3, 1, 0], np.int32), shape[0])).all()
    score = jnp.zeros((5, shape[0])).at[2].set(jnp.nan)
    assert np.isfinite(attend(x, score, score[:3].at[2].set(0.0), offsets, sources, 0.2)[0]).all()


@NEED
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("reduce", REDUCES)
def test_a_neighbours_nan_stays_in_its_own_feature(dtype: str, reduce: reference.Reduce):
    for place in (0, 1, 2):
        sources = np.array([0, 1, 2], np.int32)
        x = normal(0, 3, 20, dtype=dtype).at[place, 7].set(jnp.nan)
        got = np.isnan(np.asarray(gather(x, np.array([0, 3], np.int32), sources, reduce=reduce), np.float32))[0]
        assert np.flatnonzero(got).tolist() == [7]


@NEED
def test_infinite_features_are_extremes():
    x = jnp.array([[-jnp.inf, jnp.inf], [-jnp.inf, 1.0]], jnp.float32)
    offsets = np.array([0, 2, 2], np.int32)
    sources = np.array([0, 1], np.int32)
    np.testing.assert_array_equal(gather(x, offsets, sources, reduce="max"), [[-np.inf, np.inf], [0, 0]])
    np.testing.assert_array_equal(gather(x, offsets, sources, reduce="min"), [[-np.inf, 1], [0, 0]])


@NEED
@pytest.mark.parametrize(("rows", "nodes", "features"), [(0, 3, 4), (3, 0, 4), (3, 3, 0), (5, 2, 7)])
def test_no_edges_give_zeros(rows: int, nodes: int, features: int):
    offsets = np.zeros(rows + 1, np.int32)
    sources = np.zeros(0, np.int32)
    x = normal(0, nodes, features)
    for reduce in REDUCES:
        for weights in (None, jnp.zeros(0), jnp.zeros((0, 1))):
            for run in (gather, reference.gather_reduce_csr):
                found = run(x, jnp.asarray(offsets), jnp.asarray(sources), weights, reduce=reduce)
                np.testing.assert_array_equal(found, np.zeros((rows, features)))
    score = jnp.ones((nodes, 1))
    results = attend(x, score, jnp.ones((rows, 1)), offsets, sources, 0.2)
    transposed = (np.zeros(nodes + 1, np.int32), sources)
    forward = (offsets, sources)
    grads = attend_grad(jnp.ones((rows, features)), *results, x, score, jnp.ones((rows, 1)), transposed, forward, 0.2)
    for got, size in zip((*results, *grads), (rows, rows, rows, nodes, nodes, rows), strict=True):
        assert got.shape[0] == size
        assert not np.asarray(got).any()
    assert edge_dot(jnp.zeros((rows, features)), x, offsets, sources, 1).shape == (0, 1)


BAD = [
    ([0, 2, 3], [0, 4, 1], "source 1 is 4, but there are 4 nodes"),
    ([0, 2, 3], [0, 1, -1], "source 2 is -1, but there are 4 nodes"),
    ([0, 3, 2], [0, 1, 2], "offset 2 is 2, below the one before it"),
    ([-1, 2, 3], [0, 1, 2], "offset 0 is -1"),
    ([0, 2, 4], [0, 1, 2], "the last offset is 4, but there are 3 sources"),
]


@NEED
@pytest.mark.parametrize(("offsets", "sources", "message"), BAD)
def test_what_does_not_fit_is_named(offsets: list[int], sources: list[int], message: str):
    g = np.array(offsets, np.int32), np.array(sources, np.int32)
    x = normal(0, 4, 8)
    score = jnp.zeros((4, 2))
    target = jnp.zeros((2, 2))
    for run in (
        lambda: gather(x, *g),
        lambda: edge_dot(x[:2], x, *g, 2),
        lambda: attend(x, score, target, *g, 0.2),
        lambda: attend_grad(x, x, score, score, x[:2], target, score, g, (np.zeros(5, np.int32), g[1]), 0.2),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            jax.block_until_ready(run())


@NEED
def test_sources_that_belong_to_no_row_are_not_read():
    got = gather(normal(0, 4, 8), np.array([1, 2], np.int32), np.array([99, 3, -7], np.int32))
    np.testing.assert_array_equal(got[0], normal(0, 4, 8)[3])


def main(isa: str) -> None:
    found = native.kernels()
    assert found.isa == isa, found
    exact = hashlib.sha256()
    every = hashlib.sha256()
    # A hub with more edges than one thread takes alone; the other shapes are small.
    shared = graph(0, 3000, 500, hub=9000)
    cases = [(graph(0, 30, 20), 20, shape) for shape in SHAPES[1::2]] + [(shared, 500, (2, 24)), (shared, 500, (1, 50))]
    for seed, (g, nodes, shape) in enumerate(cases):
        for digest, arrays in zip((exact, every), check(seed, g, nodes, shape, ("float32", "bfloat16")[seed % 2]), strict=True):
            for array in arrays:
                digest.update(array.tobytes())
    print(exact.hexdigest(), every.hexdigest())


if __name__ == "__main__":
    main(*sys.argv[1:])
