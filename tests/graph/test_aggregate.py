"""Aggregation over every layout against SciPy in float64, and its gradients against differences and against JAX's own."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

from graph.test_table import random_edges
from tilewright.graph.aggregate import aggregate
from tilewright.graph.table import NeighborTable
from tilewright.kernels import select

LAYOUTS = ["padded", "bucketed", "csr"]
TABLES = [("padded", "given"), ("padded", "rcm"), ("bucketed", "given"), ("bucketed", "rcm"), ("csr", "given"), ("csr", "rcm")]
SOME_TABLES = [("padded", "given"), ("bucketed", "given"), ("bucketed", "rcm"), ("csr", "given")]
REDUCTIONS = ["sum", "mean", "max", "min"]
NODES = 11
EDGES = 40
WIDTH = 3


def dense(ids: np.ndarray, weights: np.ndarray, nodes: int, sources: int) -> np.ndarray:
    """`A[i, j]`: the summed weights of the edges j → i."""
    return scipy.sparse.coo_array((weights.astype(np.float64), (ids[1], ids[0])), shape=(nodes, sources)).toarray()


def expected(ids: np.ndarray, weights: np.ndarray, x: np.ndarray, reduce: str, nodes: int = NODES) -> np.ndarray:
    messages = x[ids[0]].astype(np.float64) * weights[:, None]
    out = np.zeros((nodes, x.shape[1]))
    for node in np.unique(ids[1]):
        out[node] = getattr(messages[ids[1] == node], reduce)(axis=0)
    return out


def drawn(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Edges, weights and features; small multiples of 1/8, so that float32 is exact and extremes have ties."""
    rng = np.random.default_rng(seed)
    return (
        random_edges(seed, NODES, EDGES),
        (rng.integers(1, 5, EDGES) / 4).astype(np.float32),
        (rng.integers(-8, 9, (NODES, WIDTH)) / 8).astype(np.float32),
    )


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize(("layout", "order"), TABLES)
def test_against_scipy_in_the_callers_order(layout: str, order: str, reduce: str):
    ids, weights, x = drawn(3)
    table = NeighborTable.from_edges(ids, NODES, layout=layout, order=order, limit=4)
    run = jax.jit(lambda *given: aggregate(given[0], given[1], reduce, *given[2:]))
    np.testing.assert_allclose(run(table, x), expected(ids, np.ones(EDGES), x, reduce), rtol=1e-6)
    actual = run(table, x, weights)
    np.testing.assert_allclose(actual, expected(ids, weights, x, reduce), rtol=1e-6)
    np.testing.assert_array_equal(run(dataclasses.replace(table, weights=jnp.asarray(weights)), x), actual)
    permuted = jax.jit(lambda x, w: aggregate(table, x, reduce, w, permuted=True))
    np.testing.assert_array_equal(table.unpermute(permuted(table.permute(jnp.asarray(x)), weights)), actual)


@settings(max_examples=12)
@given(seed=st.integers(0, 2**31 - 1), nodes=st.integers(1, 6), edges=st.integers(0, 12), layout=st.sampled_from(LAYOUTS))
def test_any_small_graph(seed: int, nodes: int, edges: int, layout: str):
    """Empty graphs, isolated nodes, self-loops, duplicates, a hub with all edges; features of odd width."""
    ids = random_edges(seed, nodes, edges)
    if seed % 3 == 0:
        ids[1] = 0
    x = np.random.default_rng(seed).normal(size=(nodes, 1)).astype(np.float32)
    table = NeighborTable.from_edges(ids, nodes, layout=layout, limit=2)
    np.testing.assert_allclose(aggregate(table, x), dense(ids, np.ones(edges), nodes, nodes) @ x, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_nodes_and_no_edges(layout: str):
    none = NeighborTable.from_edges(np.zeros((2, 0), int), 0, layout=layout)
    assert aggregate(none, jnp.zeros((0, 3))).shape == (0, 3)
    by_x, by_w = jax.grad(lambda x, w: aggregate(none, x, "sum", w).sum(), (0, 1))(jnp.zeros((0, 3)), jnp.zeros(0))
    assert (by_x.shape, by_w.shape) == ((0, 3), (0,))
    table = NeighborTable.from_edges([[], []], 2, layout=layout)
    for reduce in REDUCTIONS:
        run = lambda x, w, reduce=reduce: aggregate(table, x, reduce, w).sum()  # noqa: E731
        by_x, by_w = jax.jit(jax.grad(run, (0, 1)))(jnp.ones((2, 3)), jnp.zeros(0))
        np.testing.assert_array_equal(aggregate(table, jnp.ones((2, 3)), reduce), np.zeros((2, 3)))
        np.testing.assert_array_equal(by_x, np.zeros((2, 3)))
        assert by_w.shape == (0,)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("weighted", [False, True])
def test_normalisations(layout: str, weighted: bool):
    """GCN's against the formula: nodes without a self-loop get one, the others keep theirs."""
    ids, weights, x = drawn(5)
    ids[:, 0] = 2
    a = dense(ids, weights if weighted else np.ones(EDGES), NODES, NODES)
    loops = ids[0] == ids[1]
    assert np.bincount(ids[0, loops]).max() > 1, "a node with two self-loops"
    last = np.ones(NODES)
    last[ids[0, loops]] = weights[loops] if weighted else 1
    looped = a - np.diag(np.diag(a)) + np.diag(last)
    root = 1 / np.sqrt(looped.sum(1))
    table = NeighborTable.from_edges(ids, NODES, weights if weighted else None, layout=layout, limit=4)
    actual = aggregate(table, x, normalisation="symmetric")
    np.testing.assert_allclose(actual, (root[:, None] * looped * root) @ x, atol=1e-6)
    degrees = a.sum(1, keepdims=True)
    by_row = np.divide(a, degrees, out=np.zeros_like(a), where=degrees > 0) @ x
    np.testing.assert_allclose(aggregate(table, x, normalisation="row"), by_row, atol=1e-6)


def test_two_self_loops_are_the_last_of_them():
    """The results are those of PyG 2.8.1's `GCNConv`, which stand here. A weight that does not count has no gradient."""
    ids = np.array([[0, 0, 1, 0, 2], [0, 0, 0, 1, 1]])
    weights = np.array([2, 5, 1, 3, 4], np.float32)
    x = np.array([[1], [10], [100]], np.float32)
    table = NeighborTable.from_edges(ids, 3, layout="csr", capacity=6)
    run = jax.jit(partial(aggregate, normalisation="symmetric"))
    np.testing.assert_allclose(run(table, x)[:, 0], [4.582482814788818, 61.47660827636719, 100], rtol=1e-6)
    room = np.append(weights, np.float32(7))
    found = run(table, x, weights=room)
    np.testing.assert_allclose(found[:, 0], [2.2767088413238525, 143.1043701171875, 100], rtol=1e-6)
    by_weight = jax.grad(lambda w: run(table, x, weights=w).sum())(jnp.asarray(room))
    assert by_weight[0] == by_weight[-1] == 0
    assert (by_weight[1:-1] != 0).all()


def test_negative_degrees():
    """They are an error that names the node; in a compiled program its rows are NaN, as in PyG. A degree of 0 gives 0."""
    ids = np.array([[0, 1, 2], [1, 2, 2]])
    x = np.ones((3, 1), np.float32)
    weights = np.array([1, -3, 1], np.float32)
    table = NeighborTable.from_edges(ids, 3, layout="csr")
    with pytest.raises(ValueError, match="at least 0 for the symmetric normalisation, found -2 at node 2"):
        aggregate(table, x, weights=weights, normalisation="symmetric")
    compiled = jax.jit(partial(aggregate, normalisation="symmetric"))
    assert np.isnan(compiled(table, x, weights=weights)[:, 0]).tolist() == [False, False, True]
    np.testing.assert_allclose(compiled(table, x, weights=jnp.asarray([-1.0, 0, 0]))[:, 0], [1, 0, 0])
    np.testing.assert_allclose(aggregate(table, x, weights=weights)[:, 0], [0, 1, -2])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fewer_sources_than_nodes(layout: str):
    """A relation between two kinds of nodes, whose number is that of the destinations."""
    rng = np.random.default_rng(0)
    ids = np.stack([rng.integers(0, 4, 30), rng.permutation(np.arange(30) % 9)])
    x = rng.normal(size=(4, 2)).astype(np.float32)
    table = NeighborTable.from_edges(ids, num_sources=4, layout=layout, limit=4)
    assert (table.num_nodes, table.given_sources) == (9, 4)
    assert "9 nodes from 4 sources" in str(table)
    a = dense(ids, np.ones(30), 9, 4)
    run = jax.jit(lambda x: aggregate(table, x))
    np.testing.assert_allclose(run(x), a @ x, atol=1e-5)
    np.testing.assert_allclose(jax.grad(lambda x: run(x)[:, 0].sum())(jnp.asarray(x))[:, 0], a.sum(0))
    with pytest.raises(ValueError, match="at least as many sources as nodes for the symmetric normalisation, found 4 and 9"):
        aggregate(table, x, normalisation="symmetric")
    with pytest.raises(ValueError, match="values of 4 nodes, found 9"):
        aggregate(table, np.ones((9, 2), np.float32))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_more_sources_than_nodes(layout: str):
    """Each side of the symmetric normalisation has its own degrees."""
    rng = np.random.default_rng(0)
    ids = np.stack([rng.integers(0, 9, 30), rng.integers(0, 4, 30)])
    x = rng.normal(size=(9, 2)).astype(np.float32)
    table = NeighborTable.from_edges(ids, 4, num_sources=9, layout=layout, limit=4)
    a = dense(ids, np.ones(30), 4, 9)
    np.testing.assert_allclose(aggregate(table, x), a @ x, atol=1e-5)
    a[np.arange(4), np.arange(4)] += np.diag(a[:, :4]) == 0
    scaled = a / np.sqrt(a.sum(1, keepdims=True)) / np.sqrt(np.maximum(a.sum(0), 1))
    np.testing.assert_allclose(aggregate(table, x, normalisation="symmetric"), scaled @ x, atol=1e-5)
    by_x = jax.grad(lambda x: aggregate(table, x)[:, 0].sum())(jnp.asarray(x))
    np.testing.assert_allclose(by_x[:, 0], dense(ids, np.ones(30), 4, 9).sum(0))


@pytest.mark.parametrize(("layout", "order"), SOME_TABLES)
@pytest.mark.parametrize("reduce", [pytest.param("sum", marks=pytest.mark.slow), "mean"])
def test_gradients_by_differences(layout: str, order: str, reduce: str):
    ids, weights, x = drawn(7)
    table = NeighborTable.from_edges(ids, NODES, layout=layout, order=order, limit=4)
    run = jax.jit(lambda x, w: jnp.sin(aggregate(table, x, reduce, w)))
    check_grads(run, (jnp.asarray(x), jnp.asarray(weights)), order=1, modes=["rev"], atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_the_normalisations_by_differences(layout: str):
    ids, weights, x = drawn(8)
    table = NeighborTable.from_edges(ids, NODES, layout=layout, limit=4)

    @jax.jit
    def run(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        return aggregate(table, x, "sum", w, "symmetric"), aggregate(table, x, "sum", w, "row")

    check_grads(run, (jnp.asarray(x), jnp.asarray(weights)), order=1, modes=["rev"], atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(("layout", "order"), SOME_TABLES)
@pytest.mark.parametrize("reduce", ["max", pytest.param("min", marks=pytest.mark.slow)])
def test_an_extremes_gradient_is_shared_by_ties(layout: str, order: str, reduce: str):
    """As JAX's own for a segment's extreme, which shares equally; many of the messages are equal."""
    ids, weights, x = drawn(9)
    table = NeighborTable.from_edges(ids, NODES, layout=layout, order=order, limit=4)
    segment = jax.ops.segment_max if reduce == "max" else jax.ops.segment_min
    cotangent = jnp.asarray(np.random.default_rng(0).normal(size=(NODES, WIDTH)), jnp.float32)

    def plain(x: jax.Array, w: jax.Array) -> jax.Array:
        best = segment(x[ids[0]] * w[:, None], jnp.asarray(ids[1]), NODES)
        return (jnp.where(jnp.isfinite(best), best, 0) * cotangent).sum()

    def fast(x: jax.Array, w: jax.Array) -> jax.Array:
        return (aggregate(table, x, reduce, w) * cotangent).sum()

    given = jnp.asarray(x), jnp.asarray(weights)
    for actual, wanted in zip(jax.jit(jax.grad(fast, (0, 1)))(*given), jax.grad(plain, (0, 1))(*given), strict=True):
        np.testing.assert_allclose(actual, wanted, atol=1e-5)
    unweighted = jax.jit(jax.grad(lambda x: (aggregate(table, x, reduce) * cotangent).sum()))(given[0])
    np.testing.assert_allclose(unweighted, jax.grad(plain)(given[0], jnp.ones(EDGES)), atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_no_program_scatters(layout: str, reduce: str):
    """As it is handed to the compiler, for which a scatter would be a loop on a CPU. JAX's own gradient of a gather has one."""
    if layout == "csr" and not select.has_csr_kernels():
        pytest.skip("lists are reduced by XLA's segment sums, which scatter, where there are no CPU kernels")
    ids, weights, x = drawn(1)
    table = NeighborTable.from_edges(ids, NODES, layout=layout, order="rcm", limit=4)
    options: dict[str, Any] = {"normalisation": "symmetric"} if reduce == "sum" else {}
    run = lambda x, w: (aggregate(table, x, reduce, w, **options) ** 2).sum()  # noqa: E731
    assert "stablehlo.scatter" not in jax.jit(jax.value_and_grad(run, (0, 1))).lower(x, weights).as_text()
    assert "stablehlo.scatter" in jax.jit(jax.grad(lambda x: x[ids[0]].sum())).lower(x).as_text()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("reduce", ["mean", "max"])
def test_bfloat16(layout: str, reduce: str):
    ids, weights, x = drawn(2)
    table = NeighborTable.from_edges(ids, NODES, weights, layout=layout, limit=4)
    half = jnp.asarray(x, jnp.bfloat16)
    actual = jax.jit(lambda x: aggregate(table, x, reduce))(half)
    assert actual.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(actual, np.float32), expected(ids, weights, x, reduce), atol=0.05, rtol=0.01)
    gradient = jax.jit(jax.grad(lambda x: aggregate(table, x, reduce).astype(jnp.float32).sum()))
    by_half = gradient(half)
    assert by_half.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(by_half, np.float32), gradient(jnp.asarray(x)), atol=0.05, rtol=0.02)


def test_nothing_is_traced_where_the_order_is_the_callers():
    table = NeighborTable.from_edges([[0, 1], [1, 2]], 3, layout="padded")
    x = jnp.ones((3, 2))
    text = str(jax.make_jaxpr(lambda x: table.unpermute(table.permute(x)))(x))
    assert "gather" not in text
    assert "pjit" not in text


def test_bad_input():
    table = NeighborTable.from_edges([[0, 1], [1, 2]], 3)
    x = np.ones((3, 2), np.float32)
    spoilt = x.copy()
    spoilt[1, 1] = np.nan
    weights = jnp.asarray([1.0, jnp.nan])
    for message, args, options in [
        (r"features without NaN, found one at \[1, 1\]", (spoilt,), {}),
        (r"weights without NaN, found one at \[1\]", (x,), {"weights": weights}),
        (r"values of 3 nodes, found 4: the table belongs to another graph", (np.ones((4, 2), np.float32),), {}),
        (r"features within float32, found 1e\+300 at \[1, 1\]", (np.where(spoilt == 1, 1, 1e300),), {}),
        (r"shape \[3, F\], found \[4, 2\]", (np.ones((4, 2), np.float32),), {"permuted": True}),
        (r"a weight for each of 2 edges, found shape \[3\]", (x,), {"weights": jnp.ones(3)}),
        (r"one of sum, mean, max, min, found 'median'", (x, "median"), {}),
        (
            r"symmetric or row with reduce='sum', found 'symmetric' with reduce='max'",
            (x, "max"),
            {"normalisation": "symmetric"},
        ),
        (r"symmetric or row with reduce='sum', found 'both'", (x,), {"normalisation": "both"}),
        (r"float32 or bfloat16, found float16", (jnp.ones((3, 2), jnp.float16),), {}),
    ]:
        with pytest.raises(ValueError, match=message):
            aggregate(table, *args, **options)
    with pytest.raises(ValueError, match="values of 3 nodes, found 2"):
        table.unpermute(jnp.ones((2, 1)))
