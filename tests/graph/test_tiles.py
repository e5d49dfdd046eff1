"""Messages in tiles against the path that stores them: results, gradients, dropout, and arrays of the compiled program."""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from graph.test_messages import edges_with_a_hub
from tilewright.graph import rows, tiles
from tilewright.graph.messages import softmax
from tilewright.graph.table import NeighborTable
from tilewright.kernels import select
from tilewright.models import gnn
from tilewright.models.gnn_families import GATv2Config

pytestmark = pytest.mark.usefixtures("quick_compiles")

NODES = 9
EDGES = 40
ROOM = EDGES + 3
HEADS, SIZE = 2, 3
WIDTH = HEADS * SIZE


def drawn(seed: int, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def attention(x_j: Any, target_i: Any, edge: Any, index: Any) -> jax.Array:
    """GATv2's weights, with features of edges and dropout."""
    inner = x_j + target_i + edge.reshape(-1, HEADS, SIZE)
    return index.dropout(index.softmax(jnp.tanh(inner).sum(-1)), 0.3, jax.random.key(5))


def results(table: NeighborTable, form: str, x: Any, target: Any, edge: Any, scale: Any) -> Any:
    """Reduces messages of a form that covers stages, both ends, edges and an array that the function closes over."""
    wide = x.reshape(-1, HEADS, SIZE)
    if form == "weight":
        around = (target * scale).reshape(-1, HEADS, SIZE)
        out = table.propagate(wide, weight=attention, target=(None, around), edge=edge)
    elif form == "message":

        def message(x_j: Any, target_i: Any, edge: Any, index: Any) -> jax.Array:
            weights = attention(x_j, target_i.reshape(-1, HEADS, SIZE), edge, index)
            return (x_j * scale.reshape(HEADS, SIZE)).astype(x_j.dtype) * weights[:, :, None]

        out = table.propagate(wide, message, target=(None, target), edge=edge)
    else:

        def pair(x_j: Any, target_i: Any, edge: Any) -> jax.Array:
            return jnp.tanh(x_j * scale + target_i) * edge

        out = table.propagate(x, pair, form.split(), target=(None, target), edge=edge)
    return out.reshape(NODES, -1)


FORMS = ["weight", "message", "sum", "mean std", "max sum"]
CASES = [
    ("csr", "weight", 7),
    ("csr", "message", 7),
    ("csr", "sum", 1),
    ("csr", "mean std", 16),
    ("csr", "max sum", 42),
    ("bucketed", "weight", 7),
    ("bucketed", "message", 16),
    ("bucketed", "mean std", 1),
    ("padded", "sum", 30),
    ("padded", "max sum", 7),
]


@pytest.mark.parametrize(("layout", "form", "slots"), CASES)
def test_results_and_gradients(monkeypatch: pytest.MonkeyPatch, layout: str, form: str, slots: int):
    """A hub that several tiles share, isolated nodes, duplicates, self-loops and padding; tiles that end within rows."""
    ids = edges_with_a_hub(1)
    table = NeighborTable.from_edges(ids, NODES, layout=layout, limit=4, capacity=ROOM)
    x, target, edge, scale, due = drawn(2, (NODES, WIDTH), (NODES, WIDTH), (ROOM, WIDTH), (WIDTH,), (NODES, 2 * WIDTH))

    def loss(*given: Any) -> jax.Array:
        out = results(table, form, *given)
        return (out * due[:, : out.shape[1]]).sum()

    stored = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))(x, target, edge, scale)
    monkeypatch.setattr(rows, "CHUNK", 3 * WIDTH * slots)
    monkeypatch.setattr(tiles, "LAYOUTS", (rows.CsrRows, rows.BucketRows))
    run = jax.jit(lambda *given: jax.value_and_grad(loss, (0, 1, 2, 3))(*given))
    text = run.lower(x, target, edge, scale).as_text()
    assert "stablehlo.while" in text
    if layout != "csr" or select.has_csr_kernels():
        assert "stablehlo.scatter" not in text
    for actual, expected in zip(jax.tree.leaves(run(x, target, edge, scale)), jax.tree.leaves(stored), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", ["csr", "bucketed"])
def test_bfloat16_and_kinds_of_edges(monkeypatch: pytest.MonkeyPatch, layout: str):
    ids = edges_with_a_hub(3)
    table = NeighborTable.from_edges(ids, NODES, layout=layout, limit=4)
    x, scale = (jnp.asarray(each, jnp.bfloat16) for each in drawn(4, (NODES, WIDTH), (3, WIDTH)))
    kinds = jnp.asarray(np.arange(EDGES) % 3)

    def loss(x: Any, scale: Any) -> jax.Array:
        out = table.propagate(x, lambda x_j, kind: x_j * scale[kind], "mean", kind=kinds)
        assert out.dtype == jnp.bfloat16
        return (out.astype(jnp.float32) ** 2).sum()

    stored = jax.jit(jax.value_and_grad(loss, (0, 1)))(x, scale)
    monkeypatch.setattr(rows, "CHUNK", 11 * WIDTH)
    monkeypatch.setattr(tiles, "LAYOUTS", (rows.CsrRows, rows.BucketRows))
    tiled = jax.jit(lambda *given: jax.value_and_grad(loss, (0, 1))(*given))(x, scale)
    for actual, expected in zip(jax.tree.leaves(tiled), jax.tree.leaves(stored), strict=True):
        np.testing.assert_allclose(np.float32(actual), np.float32(expected), rtol=2e-2, atol=2e-2)


def test_tiles_without_any_edge(monkeypatch: pytest.MonkeyPatch):
    """Room for edges, but none: results and gradients are zeros."""
    monkeypatch.setattr(rows, "CHUNK", WIDTH)
    table = NeighborTable.from_edges(np.zeros((2, 0), int), 3, layout="csr", capacity=4)
    edge = jnp.ones((4, WIDTH))
    x = jnp.ones((3, WIDTH))
    value, grad = jax.value_and_grad(lambda x: table.propagate(x, lambda x_j, e: x_j * e + 1, e=edge).sum())(x)
    assert value == 0
    assert not grad.any()


@pytest.mark.parametrize("chunk", [rows.CHUNK, 5 * WIDTH])
def test_messages_of_whole_numbers_are_refused_for_any_number_of_edges(monkeypatch: pytest.MonkeyPatch, chunk: int):
    table = NeighborTable.from_edges(edges_with_a_hub(3), NODES, layout="csr", limit=4)
    monkeypatch.setattr(rows, "CHUNK", chunk)
    (x,) = drawn(6, (NODES, WIDTH))
    with pytest.raises(ValueError, match="expected messages in float32 or bfloat16, found int32"):
        table.propagate(jnp.asarray(x), lambda x_j: (x_j > 0).astype(jnp.int32), "sum")


def test_functions_that_are_not_tiled():
    """Functions that treat edges jointly, draw random numbers, or use the edges otherwise keep all edges in one call."""
    (x,) = drawn(6, (NODES, WIDTH))
    operands = {"x_j": tiles.Operand(jnp.asarray(x), "sources")}
    size = rows.CHUNK // WIDTH

    def planned(function: Any) -> bool:
        return tiles.plan(function, {**operands, "index": "index"}, 2 * size) is not None

    assert planned(lambda x_j, index: softmax(x_j, index) * 2)
    assert planned(lambda x_j, index: x_j / x_j.sum(-1, keepdims=True))
    assert not planned(lambda x_j, index: x_j - x_j.mean(0))
    assert not planned(lambda x_j, index: x_j.T @ x_j)
    assert not planned(lambda x_j, index: jnp.cumsum(x_j, 0))
    assert not planned(jax.jit(lambda x_j, index=None: x_j - x_j.max(0)))
    assert not planned(lambda x_j, index: x_j * jax.random.normal(jax.random.key(0), x_j.shape))
    assert not planned(lambda x_j, index: index.reduce(x_j, "sum"))
    assert not planned(lambda x_j, index: x_j * jnp.ones((2 * size, 1)))
    assert tiles.plan(lambda x_j, index: x_j, {**operands, "index": "index"}, size) is None


@pytest.mark.parametrize("edge_features", [0, 4])
def test_no_array_of_edges_and_features_in_training_of_gatv2(monkeypatch: pytest.MonkeyPatch, edge_features: int):
    if not select.has_csr_kernels():
        pytest.skip("without compiled kernels, rows are padded")
    nodes, edges, heads, size = 300, 3001, 2, 8
    rng = np.random.default_rng(0)
    table = NeighborTable.from_edges(rng.integers(0, nodes, (2, edges)), nodes, layout="csr")
    config = GATv2Config(features=16, classes=16, hidden=size, heads=heads, dropout=0.0, edge_features=edge_features)
    params, statistics = gnn.init(config, jax.random.key(0))
    x, edge_attr = drawn(7, (nodes, 16), (edges, edge_features or 1))
    given = jnp.asarray(edge_attr) if edge_features else None

    def loss(params: Any) -> jax.Array:
        scores, _ = gnn.apply(config, params, table, jnp.asarray(x), statistics, edge_attr=given)
        return (scores**2).sum()

    def largest() -> int:
        """Returns the features per edge of the largest array with a row for each edge."""
        text = jax.jit(lambda params: jax.grad(loss)(params)).lower(params).compile().as_text()
        assert text is not None
        found = [list(map(int, dims.split(","))) for dims in re.findall(r"[a-z]+\d+\[([\d,]+)\]", text)]
        return max(math.prod(dims) // edges for dims in found if edges in dims or math.prod(dims) >= edges * heads * size)

    assert largest() >= heads * size  # one tile: all edges
    monkeypatch.setattr(rows, "CHUNK", 2**13)
    assert largest() <= max(heads, edge_features)
