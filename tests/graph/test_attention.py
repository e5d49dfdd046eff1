"""Attention over neighbours and the softmax of edges, for every layout against NumPy in float64 and against differences."""

import inspect
import re
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from graph.test_table import random_edges
from tilewright.graph import rows
from tilewright.graph.aggregate import aggregate
from tilewright.graph.attention import attend, segment_softmax
from tilewright.graph.sample import SampledLayer
from tilewright.graph.table import NeighborTable
from tilewright.kernels import select
from tilewright.models import gnn

TABLES = [("padded", "given"), ("bucketed", "given"), ("bucketed", "rcm"), ("csr", "given"), ("csr", "rcm")]
NODES = 9
EDGES = 35


def expected(
    ids: np.ndarray, x: np.ndarray, source: np.ndarray, target: np.ndarray, slope: float = 0.2
) -> tuple[np.ndarray, np.ndarray]:
    """The result and the weights of the edges, node by node in float64."""
    scores = (source[ids[0]] + target[ids[1]]).astype(np.float64)
    scores = np.where(scores > 0, scores, slope * scores)
    weights = np.zeros_like(scores)
    out = np.zeros((target.shape[0], *x.shape[1:]))
    for node in np.unique(ids[1]):
        here = np.flatnonzero(ids[1] == node)
        powers = np.exp(scores[here] - scores[here].max(0))
        weights[here] = powers / powers.sum(0)
        out[node] = (weights[here][:, :, None] * x[ids[0][here]]).sum(0)
    return out, weights


def drawn(seed: int, heads: int, sources: int = NODES, size: int = 3) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    shapes = [(sources, heads, size), (sources, heads), (NODES, heads)]
    return tuple(rng.normal(size=shape).astype(np.float32) for shape in shapes)


def table_of(ids: np.ndarray, layout: str, order: str = "given") -> NeighborTable:
    return NeighborTable.from_edges(ids, NODES, layout=layout, order=order, limit=4)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize(("layout", "order"), TABLES)
def test_attend(layout: str, order: str, heads: int):
    ids = random_edges(4, NODES, EDGES)
    x, source, target = drawn(1, heads)
    table = table_of(ids, layout, order)
    slope = 0.2 if heads == 1 else 0.5
    actual = jax.jit(partial(attend, negative_slope=slope))(table, x, source, target)
    np.testing.assert_allclose(actual, expected(ids, x, source, target, slope)[0], atol=1e-5)
    assert np.any(np.bincount(ids[1], minlength=NODES) == 0)  # a node without neighbours is among them, and gets zeros


@pytest.mark.parametrize(("layout", "order"), TABLES)
def test_gradients_by_differences(layout: str, order: str):
    table = table_of(random_edges(5, NODES, EDGES), layout, order)
    given = tuple(jnp.asarray(value) for value in drawn(2, 2))
    run = jax.jit(lambda *given: attend(table, *given))
    check_grads(run, given, order=1, modes=["rev"], atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(("layout", "order"), TABLES)
def test_dropout_takes_weights_after_the_softmax(layout: str, order: str):
    """Each edge's weight in each head by itself, the same in every layout for the same key; against JAX's own gradients."""
    ids = random_edges(5, NODES, EDGES)
    key = jax.random.key(3)
    kept = gnn.dropout(jnp.ones((EDGES, 2)), 0.4, key)
    given = drawn(2, 2)
    due = drawn(8, 2)[0]

    def plainly(x: Any, source: Any, target: Any) -> Any:
        powers = jnp.exp(jax.nn.leaky_relu(source[ids[0]] + target[ids[1]], 0.2))
        weights = powers / jax.ops.segment_sum(powers, ids[1], NODES)[ids[1]] * kept
        return jax.ops.segment_sum(weights[:, :, None] * x[ids[0]], ids[1], NODES)

    def results(run: Any) -> Any:
        def weighed(*given: Any) -> Any:
            out = run(*given)
            return (out * due).sum(), out

        return jax.jit(jax.grad(weighed, (0, 1, 2), has_aux=True))(*given)

    found = results(partial(attend, table_of(ids, layout, order), dropout=0.4, key=key))
    for actual, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(results(plainly)), strict=True):
        np.testing.assert_allclose(actual, wanted, atol=1e-5)


def test_dropout_keeps_the_mean():
    """Also that of a node with one neighbour, which dropout before the softmax would not."""
    ids, (x, source, target) = np.array([[3, 0, 1, 2], [0, 1, 1, 1]]), drawn(2, 2)
    table = table_of(ids, "padded")
    run = jax.vmap(lambda key: attend(table, x, source, target, dropout=0.3, key=key))
    outs = np.asarray(jax.jit(run)(jax.random.split(jax.random.key(0), 2000)))
    deviation = outs.std(0) / 2000**0.5
    assert (np.abs(outs.mean(0) - expected(ids, x, source, target)[0]) < 5 * deviation + 1e-6).all()


@pytest.mark.parametrize("layout", ["padded", "bucketed", "csr"])
@pytest.mark.parametrize("sources", [14, 5])
def test_other_sources_than_nodes(layout: str, sources: int):
    rng = np.random.default_rng(0)
    ids = np.stack([rng.integers(0, sources, EDGES), rng.integers(0, NODES, EDGES)])
    x, source, target = drawn(3, 2, sources=sources)
    table = NeighborTable.from_edges(ids, NODES, num_sources=sources, layout=layout, limit=4)
    np.testing.assert_allclose(jax.jit(attend)(table, x, source, target), expected(ids, x, source, target)[0], atol=1e-5)


@pytest.mark.parametrize("layout", ["padded", "bucketed", "csr"])
def test_large_scores_and_bfloat16(layout: str):
    """The largest of a row is taken off before the exponential; what padding points at has the largest score of all."""
    ids = random_edges(6, NODES, EDGES)
    x, source, target = drawn(4, 1)
    source = source * 100
    source[0] = 5000
    ids[0][ids[0] == 0] = 1
    half = np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32)
    run = jax.jit(partial(attend, table_of(ids, layout), source_score=source, target_score=target))
    actual = run(jnp.asarray(x, jnp.bfloat16))
    assert actual.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(actual, np.float32), expected(ids, half, source, target)[0], atol=0.03)
    gradient = jax.jit(jax.grad(lambda x: run(x).astype(jnp.float32).sum()))(jnp.asarray(x, jnp.bfloat16))
    assert gradient.dtype == jnp.bfloat16
    assert jnp.isfinite(gradient).all()


@pytest.mark.parametrize("layout", ["padded", "bucketed", "csr"])
def test_no_program_scatters_and_no_edge_has_features(layout: str, monkeypatch: pytest.MonkeyPatch):
    """As it is handed to the compiler: features are gathered for some slots at a time, never for all edges."""
    if layout == "csr" and not select.has_csr_kernels():
        pytest.skip("lists are reduced by XLA's segment sums, which scatter, where there are no CPU kernels")
    monkeypatch.setattr(rows, "CHUNK", 1000)
    table = table_of(random_edges(7, NODES, EDGES), layout, "rcm")
    given = drawn(5, 2, size=37)
    run = jax.jit(jax.value_and_grad(lambda *given: (attend(table, *given) ** 2).sum(), (0, 1, 2)))
    text = run.lower(*given).as_text()
    assert "stablehlo.scatter" not in text
    gathered = [int(count) for count in re.findall(r"tensor<(\d+)x2x37xf32>", text)]
    assert gathered
    assert max(gathered) <= NODES


@pytest.mark.parametrize(("layout", "order"), TABLES)
def test_segment_softmax(layout: str, order: str):
    ids = random_edges(8, NODES, EDGES)
    _, source, target = drawn(6, 2)
    table = table_of(ids, layout, order)
    scores = source[ids[0]] + target[ids[1]]
    leaky = jnp.where(scores > 0, scores, 0.2 * scores)
    wanted = expected(ids, np.zeros((NODES, 2, 1)), source, target)[1]
    run = jax.jit(lambda scores: segment_softmax(table, scores))
    np.testing.assert_allclose(run(leaky), wanted, atol=1e-5)
    np.testing.assert_allclose(run(leaky[:, 0]), wanted[:, 0], atol=1e-5)
    check_grads(run, (leaky,), order=1, modes=["rev"], atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("layout", ["padded", "bucketed", "csr", "sampled"])
def test_the_slope_at_zero_is_the_negative_one(layout: str):
    """As in PyTorch; without dropout and with it, where other programs run."""
    x = jnp.asarray([[[1.0]], [[3.0]]])
    zeros = jnp.zeros((2, 1))
    table: Any = NeighborTable.from_edges([[0, 1], [0, 0]], 2, layout="csr" if layout == "sampled" else layout)
    if layout == "sampled":
        table = SampledLayer(jnp.array([2]), jnp.zeros(3, jnp.int32), 2)
        x = jnp.asarray([[[0.0]], [[1.0]], [[3.0]]])
        zeros = jnp.zeros((3, 1))

    def total(source: jax.Array, key: jax.Array | None = None) -> jax.Array:
        return table.attend(x, source, zeros[: table.num_nodes], dropout=1e-6, key=key).sum()

    for key in (None, jax.random.key(0)):
        # Both weights are 1/2, the mean is 2: the weight's derivative (3 - 2) / 2 times the slope.
        np.testing.assert_allclose(jax.jit(jax.grad(total))(zeros, key)[-2:, 0], [-0.1, 0.1], rtol=1e-5)


ROOM = EDGES + 6


@cache
def results_with_room(layout: str, capacity: int | None, nodes: int) -> tuple[Any, ...]:
    """Gradients by weights and scores of edges, results, and gradients by values of nodes."""
    ids = random_edges(4, NODES, EDGES) if nodes else np.zeros((2, 0), int)
    table = NeighborTable.from_edges(ids, nodes, layout=layout, limit=4, capacity=capacity)
    count = table.num_edges
    rng = np.random.default_rng(0)
    scores, due = (rng.normal(size=(ROOM, 2)).astype(np.float32)[:count] for _ in range(2))

    def weigh(weights: Any, scores: Any, x: Any, source: Any, target: Any) -> tuple[jax.Array, Any]:
        outs = segment_softmax(table, scores), aggregate(table, x[:, 0], weights=weights), attend(table, x, source, target)
        return (outs[0] * due).sum() + jnp.sin(outs[1]).sum() + jnp.cos(outs[2]).sum(), outs

    x, source, target = (each[:nodes] for each in drawn(1, 2))
    given = scores[:, 0], scores, x, source, target
    gradients, outs = jax.jit(jax.grad(weigh, (0, 1, 2, 3, 4), has_aux=True))(*given)
    return *gradients[:2], *outs, *gradients[2:]


@pytest.mark.parametrize("layout", ["padded", "bucketed", "csr"])
@pytest.mark.parametrize("nodes", [NODES, 0])
def test_room_for_more_edges(layout: str, nodes: int):
    """Results and gradients are those without room; what no edge is gets zeros."""
    edges = EDGES if nodes else 0
    exact = results_with_room("csr", None, nodes)
    roomy = results_with_room(layout, ROOM, nodes)
    for n, (wanted, found) in enumerate(zip(exact, roomy, strict=True)):
        np.testing.assert_allclose(found[:edges] if n < 3 else found, wanted, atol=1e-5)
        assert n >= 3 or not np.any(found[edges:])


def test_bad_input():
    table = table_of(random_edges(9, NODES, EDGES), "bucketed")
    x, source, target = drawn(7, 2)
    spoilt = source.copy()
    spoilt[3, 1] = np.nan
    with pytest.raises(ValueError, match=r"source scores without NaN, found one at \[3, 1\]"):
        attend(table, x, spoilt, target)
    with pytest.raises(ValueError, match=r"target scores \[9, heads\], found shape \[8, 2\]"):
        attend(table, x, source, target[:8])
    with pytest.raises(ValueError, match="values of 9 nodes, found 8"):
        attend(table, x[:8], source[:8], target)
    with pytest.raises(ValueError, match=r"M = 9 and N = 9, found \[8, 2, 3\], \[8, 2\] and \[9, 2\]"):
        table.attend(jnp.asarray(x[:8]), jnp.asarray(source[:8]), jnp.asarray(target))
    with pytest.raises(ValueError, match=r"scores of 35 edges, found shape \[34\]"):
        segment_softmax(table, np.zeros(34, np.float32))


def test_integers_are_refused():
    """Weights and gradients would be cut to whole numbers. The tests' type checker keeps them out otherwise."""
    table = table_of(random_edges(9, NODES, EDGES), "bucketed")
    given = [jnp.asarray(each) for each in drawn(7, 2)]
    softmax = inspect.unwrap(segment_softmax)
    for n, message in enumerate(["features in float32 or bfloat16", "floating-point scores", "floating-point scores"]):
        whole = [each.astype(jnp.int32) if place == n else each for place, each in enumerate(given)]
        with pytest.raises(ValueError, match=f"expected {message}, found int32"):
            inspect.unwrap(NeighborTable.attend)(table, *whole)
    with pytest.raises(ValueError, match="expected floating-point scores, found int32"):
        softmax(table, np.zeros(EDGES, np.int32))


@pytest.mark.parametrize("layout", ["padded", "bucketed", "csr"])
@pytest.mark.parametrize("nodes", [0, 3])
def test_no_nodes_and_no_edges(layout: str, nodes: int):
    table = NeighborTable.from_edges(np.zeros((2, 0), int), nodes, layout=layout)
    given = jnp.ones((nodes, 2, 3)), jnp.ones((nodes, 2)), jnp.ones((nodes, 2))
    np.testing.assert_array_equal(attend(table, *given), np.zeros((nodes, 2, 3)))
    grads = jax.grad(lambda *given: attend(table, *given).sum(), (0, 1, 2))(*given)
    assert all(not np.any(each) and each.shape == operand.shape for each, operand in zip(grads, given, strict=True))
    assert segment_softmax(table, jnp.ones((0, 2))).shape == (0, 2)
    assert segment_softmax(table, jnp.ones(0)).shape == (0,)
