"""Message passing with functions of one's own: every layout against segment sums, with gradients, and what is refused."""

import inspect
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from graph.test_table import random_edges
from tilewright.graph.aggregate import aggregate, propagate
from tilewright.graph.attention import attend
from tilewright.graph.messages import MessagePassing, softmax
from tilewright.graph.table import NeighborTable
from tilewright.kernels import select

pytestmark = pytest.mark.usefixtures("quick_compiles")

LAYOUTS = ["padded", "bucketed", "csr"]
NODES = 9
EDGES = 40
ROOM = EDGES + 5
WIDTH = 3


def drawn(seed: int, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def edges_with_a_hub(seed: int) -> np.ndarray:
    """A hub whose row is split, an isolated node, duplicates and self-loops."""
    ids = random_edges(seed, NODES - 1, EDGES)
    ids[1, :12] = 3
    ids[:, 20:23] = ids[:, :1]
    ids[0, 30] = ids[1, 30]
    return ids


def segments(ids: np.ndarray, messages: jax.Array, reduce: str) -> jax.Array:
    """Reductions by JAX's own segment operations, whose gradients scatter."""
    counts = jnp.asarray(np.bincount(ids[1], minlength=NODES), jnp.float32)[:, None]
    if reduce in ("max", "min"):
        best = (jax.ops.segment_max if reduce == "max" else jax.ops.segment_min)(messages, ids[1], NODES)
        return jnp.where(counts > 0, best, 0)
    total = jax.ops.segment_sum(messages, ids[1], NODES)
    if reduce == "sum":
        return total
    mean = total / jnp.maximum(counts, 1)
    if reduce == "mean":
        return mean
    return jax.ops.segment_sum((messages - mean[ids[1]]) ** 2, ids[1], NODES) / jnp.maximum(counts, 1)


CASES = [("padded", "min"), ("bucketed", "sum"), ("bucketed", "max"), ("csr", "mean"), ("csr", "var")]


@pytest.mark.parametrize(("layout", "reduce"), CASES)
def test_messages_and_their_gradients(layout: str, reduce: str):
    """By values of both ends and of edges, and by arrays that the function closes over; with room for more edges."""
    ids = edges_with_a_hub(1)
    x, edge_attr, weight, due = drawn(2, (NODES, WIDTH), (ROOM, WIDTH), (2 * WIDTH, WIDTH), (NODES, WIDTH))
    table = NeighborTable.from_edges(ids, NODES, layout=layout, limit=4, capacity=ROOM)

    def fast(x: Any, edge_attr: Any, weight: Any) -> jax.Array:
        def message(x_i: jax.Array, x_j: jax.Array, edge_attr: jax.Array) -> jax.Array:
            return jnp.tanh(jnp.concatenate([x_i, x_j], -1) @ weight) * edge_attr

        return (propagate(x, table, message, reduce, edge_attr=edge_attr) * due).sum()

    def plain(x: Any, edge_attr: Any, weight: Any) -> jax.Array:
        messages = jnp.tanh(jnp.concatenate([x[ids[1]], x[ids[0]]], -1) @ weight) * edge_attr[:EDGES]
        return (segments(ids, messages, reduce) * due).sum()

    run = jax.jit(jax.value_and_grad(fast, (0, 1, 2)))
    if layout != "csr" or select.has_csr_kernels():
        assert "stablehlo.scatter" not in run.lower(x, edge_attr, weight).as_text()
    found = jax.tree.leaves(run(x, edge_attr, weight))
    wanted = jax.tree.leaves(jax.jit(jax.value_and_grad(plain, (0, 1, 2)))(x, edge_attr, weight))
    for actual, expected in zip(found, wanted, strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-5)
    assert not np.any(found[2][EDGES:])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_attention_as_a_message_and_as_a_weight(layout: str):
    """Both forms give GAT's attention, which has a kernel of its own; so do the gradients."""
    ids = edges_with_a_hub(3)[:, ::2]
    given = drawn(4, (NODES, 2, WIDTH), (NODES, 2), (NODES, 2))
    table = NeighborTable.from_edges(ids, NODES, layout=layout, limit=4)

    def weight(s_j: jax.Array, t_i: jax.Array, index: Any) -> jax.Array:
        return softmax(jax.nn.leaky_relu(s_j + t_i, 0.2), index)

    def message(x_j: jax.Array, s_j: jax.Array, t_i: jax.Array, index: Any) -> jax.Array:
        return x_j * weight(s_j, t_i, index)[:, :, None]

    def loss(out: jax.Array) -> jax.Array:
        return (out**2).sum()

    ways = [
        lambda x, s, t: loss(attend(table, x, s, t)),
        lambda x, s, t: loss(propagate(x, table, weight=weight, s=s, t=t)),
        lambda x, s, t: loss(propagate(x, table, message, s=s, t=t)),
    ]
    wanted, *others = (jax.tree.leaves(jax.jit(jax.value_and_grad(way, (0, 1, 2)))(*given)) for way in ways)
    for found in others:
        for actual, expected in zip(found, wanted, strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_a_message_the_features_are_aggregated(layout: str):
    ids = edges_with_a_hub(5)
    x, weights = drawn(6, (NODES, 2, WIDTH), (EDGES,))
    flat = x.reshape(NODES, -1)
    plain = NeighborTable.from_edges(ids, NODES, layout=layout, limit=4)
    weighted = NeighborTable.from_edges(ids, NODES, weights, layout=layout, limit=4)
    np.testing.assert_array_equal(propagate(flat, plain, reduce="max"), aggregate(plain, flat, "max"))
    np.testing.assert_array_equal(propagate(x, plain).reshape(NODES, -1), aggregate(plain, flat))
    np.testing.assert_allclose(propagate(x, plain, weight=weights).reshape(NODES, -1), aggregate(weighted, flat), atol=1e-5)
    both = propagate(flat, weighted, reduce=["mean", "std"])
    np.testing.assert_allclose(both[:, : 2 * WIDTH], aggregate(weighted, flat, "mean"), atol=1e-5)
    variance = segments(ids, jnp.asarray(flat[ids[0]] * weights[:, None]), "var")
    np.testing.assert_allclose(both[:, 2 * WIDTH :], np.where(variance > 1e-5, np.sqrt(variance), 0), atol=1e-3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_kinds_of_nodes_and_kinds_of_edges(layout: str):
    """Values of the nodes beside the sources', and integers of edges."""
    rng = np.random.default_rng(0)
    ids = np.stack([rng.integers(0, 5, EDGES), rng.integers(0, NODES, EDGES)])
    kinds = rng.integers(0, 3, EDGES)
    sources, nodes, scale = drawn(7, (5, WIDTH), (NODES, WIDTH), (3, WIDTH))
    table = NeighborTable.from_edges(ids, NODES, num_sources=5, layout=layout, limit=4)

    def out(sources: Any, nodes: Any, scale: Any) -> jax.Array:
        return propagate((sources, nodes), table, lambda x_i, x_j, kind: (x_j - x_i) * scale[kind], kind=kinds)

    def plain(sources: Any, nodes: Any, scale: Any) -> jax.Array:
        return segments(ids, (sources[ids[0]] - nodes[ids[1]]) * scale[kinds], "sum")

    given = sources, nodes, scale
    np.testing.assert_allclose(jax.jit(out)(*given), plain(*given), atol=1e-5)
    found, wanted = (jax.jit(jax.grad(lambda *v, f=f: jnp.sin(f(*v)).sum(), (0, 1, 2)))(*given) for f in (out, plain))
    for actual, expected in zip(found, wanted, strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_padding_is_as_finite_as_the_edges(layout: str):
    """A distance has no gradient where both ends are one node; padding that named node 0 twice would give NaN."""
    ids = np.array([[1, 2, 0, 1], [0, 0, 2, 2]])
    (x,) = drawn(8, (4, WIDTH))
    table = NeighborTable.from_edges(ids, 4, layout=layout, capacity=7)

    def message(x_i: jax.Array, x_j: jax.Array) -> jax.Array:
        return jnp.sqrt(((x_i - x_j) ** 2).sum(-1, keepdims=True))

    gradient = jax.grad(lambda x: propagate(x, table, message).sum())(jnp.asarray(x))
    assert np.isfinite(gradient).all()
    assert (gradient[:3] != 0).any(1).all()


@pytest.mark.parametrize(("layout", "nodes", "capacity"), [("padded", 0, None), ("bucketed", 3, None), ("csr", 3, 4)])
def test_no_edges(layout: str, nodes: int, capacity: int | None):
    table = NeighborTable.from_edges(np.zeros((2, 0), int), nodes, layout=layout, capacity=capacity)
    x = jnp.ones((nodes, 2))
    edge_attr = jnp.ones((capacity or 0, 2))

    def total(x: jax.Array, edge_attr: jax.Array, reduce: str) -> jax.Array:
        out = propagate(x, table, lambda x_i, x_j, e: x_i + x_j * e, reduce, e=edge_attr)
        assert out.shape == (nodes, 2)
        return out.sum() + propagate(x, table, weight=lambda e, index: softmax(e, index), e=edge_attr).sum()

    for reduce in ("sum", "max"):
        value, gradients = jax.value_and_grad(total, (0, 1))(x, edge_attr, reduce)
        assert value == 0
        assert not any(np.any(each) for each in gradients)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EdgeConv(MessagePassing):
    """EdgeConv (Wang et al. 2019), as PyG's documentation writes it."""

    weight: jax.Array
    aggr = "max"

    def __call__(self, x: jax.Array, edges: Any) -> jax.Array:
        return self.propagate(edges, x=x)

    def message(self, x_i: jax.Array, x_j: jax.Array) -> jax.Array:  # pyright: ignore[reportIncompatibleMethodOverride]
        return jnp.concatenate([x_i, x_j - x_i], axis=-1) @ self.weight


class Mean(MessagePassing):
    aggr = "mean"


def test_layers_in_pygs_form():
    ids = edges_with_a_hub(9)
    x, weight = drawn(10, (NODES, WIDTH), (2 * WIDTH, 4))
    table = NeighborTable.from_edges(ids, NODES, layout="csr")
    messages = jnp.concatenate([x[ids[1]], x[ids[0]] - x[ids[1]]], -1) @ weight
    layer = EdgeConv(jnp.asarray(weight))
    np.testing.assert_allclose(layer(jnp.asarray(x), table), segments(ids, messages, "max"), atol=1e-5)
    by_weight = jax.jit(jax.grad(lambda layer: layer(jnp.asarray(x), table).sum()))(layer)
    assert by_weight.weight.shape == weight.shape
    np.testing.assert_array_equal(Mean().propagate(table, x=jnp.asarray(x)), aggregate(table, x, "mean"))


def test_the_registry_says_why_no_kernel_runs():
    fused = select.message_kernel(False, False, "max", "tpu")
    assert (fused.runs, fused.refused) == ("Pallas", ())
    stored = select.message_kernel(True, False, "max", "tpu")
    assert stored.runs == "XLA"
    assert dict(stored.refused)["Pallas"] == "a function computes the messages"
    assert "none computes std" in dict(select.message_kernel(False, True, "std", "tpu").refused)["Pallas"]
    assert select.message_kernel(False, False, "std", "tpu") == fused
    assert "summed only" in dict(select.message_kernel(False, True, "max", "tpu").refused)["Pallas"]


def test_bad_input():
    x, edge_attr = drawn(11, (NODES, WIDTH), (EDGES, WIDTH))
    table = NeighborTable.from_edges(edges_with_a_hub(1), NODES)
    spoilt = edge_attr.copy()
    spoilt[4, 1] = np.nan
    message = lambda x_j, edge_attr: x_j * edge_attr  # noqa: E731
    for match, args, options in [
        ("the value 'edge_attr' for the parameter 'edge_attr' of a message, found", (message,), {}),
        ("a parameter for, found other", (message,), {"edge_attr": edge_attr, "other": edge_attr}),
        (r"edge_attr without NaN, found one at \[4, 1\]", (message,), {"edge_attr": spoilt}),
        (r"40 rows of 'edge_attr' for 'edge_attr', found shape \[39, 3\]", (message,), {"edge_attr": edge_attr[:-1]}),
        ("one or several of sum, mean, max, min, var, std, found 'median'", (message, "median"), {"edge_attr": edge_attr}),
        ("reduce='sum' with weight, found 'max'", (None, "max"), {"weight": edge_attr[:, 0]}),
        ("a message or a weight, found both", (message,), {"weight": edge_attr, "edge_attr": edge_attr}),
        (r"\[edges, H\] that divide the features, found \[40, 2\]", (), {"weight": edge_attr[:, :2]}),
        ("messages in float32 or bfloat16, found int32", (lambda x_j: (x_j > 0).astype(int),), {}),
        ("a message for each of", (lambda x_j: x_j.sum(0),), {}),
        ("values of 9 nodes, found 8", (lambda x_j, y_i: x_j * y_i,), {"y": x[:8]}),
    ]:
        with pytest.raises(ValueError, match=match):
            inspect.unwrap(propagate)(x, table, *args, **options)
