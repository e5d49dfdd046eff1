"""Many graphs in one table of fixed size: each is reduced as if it were alone."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tilewright.graph.batch import PADDING, Capacity, GraphBatch, pack, round_up
from tilewright.graph.data import GraphData, offsets, undirected
from tilewright.graph.table import NeighborTable

pytestmark = pytest.mark.usefixtures("quick_compiles")


def random_graphs(count: int = 8, seed: int = 0) -> GraphData:
    """Graphs of 1 to 7 nodes, some without edges, some with edges from a node to itself."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 8, count)
    edges = [undirected(rng.integers(0, size, (rng.integers(0, 6), 2)).reshape(-1, 2)) for size in sizes]
    features = rng.normal(size=(sizes.sum(), 3)).astype(np.float32)
    labels = rng.integers(0, 2, count).astype(np.int32)
    ids = np.arange(count, dtype=np.int32)
    ends = offsets(sizes.tolist()), offsets([each.shape[1] for each in edges])
    return GraphData("made", *ends, np.concatenate(edges, 1), features, labels, ((ids[:-2], ids[-2:]),))


def alone(data: GraphData, graph: int) -> tuple[NeighborTable, jax.Array]:
    """One graph in a table of its own, and its features."""
    nodes = slice(*data.node_offsets[graph : graph + 2].tolist())
    edges = data.edge_index[:, slice(*data.edge_offsets[graph : graph + 2])]
    return NeighborTable.from_edges(edges, nodes.stop - nodes.start, layout="padded"), jnp.asarray(data.features[nodes])


@pytest.mark.parametrize("layout", ["csr", "padded"])
def test_messages_of_a_batch_are_those_of_each_graph(layout: str):
    """With features of edges; the gradients, which read the transposed rows, too."""
    data = random_graphs(seed=2)
    rng = np.random.default_rng(0)
    edge_attr = rng.normal(size=(data.edge_index.shape[1], 3)).astype(np.float32)
    data = replace(data, edge_attr=edge_attr)
    batches = np.array([[3, 0], [7, PADDING]])
    capacity = Capacity.from_batches(data, batches)
    packed = pack(data, batches, capacity)

    def total(table: Any, x: Any, edge_attr: Any) -> jax.Array:
        return jnp.sin(table.propagate(x, lambda x_i, x_j, e: jnp.tanh(x_i + 2 * x_j) * e, e=edge_attr)).sum()

    @jax.jit
    def gradients(features: Any, edge_attr: Any, batch: GraphBatch) -> tuple[jax.Array, ...]:
        def run(features: Any, edge_attr: Any) -> jax.Array:
            return total(batch.table(capacity, layout), batch.features(features), batch.edge_attr(edge_attr))

        return jax.grad(run, (0, 1))(features, edge_attr)

    for ids, batch in zip(batches, (jax.tree.map(lambda leaf, n=n: jnp.asarray(leaf[n]), packed) for n in (0, 1)), strict=True):
        found = gradients(jnp.asarray(data.features), jnp.asarray(edge_attr), batch)
        for graph in ids[ids != PADDING]:
            table, x = alone(data, graph)
            edges = slice(*data.edge_offsets[graph : graph + 2])
            wanted = jax.jit(jax.grad(total, (1, 2)))(table, x, jnp.asarray(edge_attr[edges]))
            np.testing.assert_allclose(found[0][slice(*data.node_offsets[graph : graph + 2])], wanted[0], atol=1e-5)
            np.testing.assert_allclose(found[1][edges], wanted[1], atol=1e-5)


def test_edges_in_one_direction_are_refused():
    data = random_graphs(seed=2)
    edges = data.edge_index.copy()
    edges[:, 0] = [1, 0]
    with pytest.raises(ValueError, match="made: expected edges in both directions, found edge"):
        pack(replace(data, edge_index=edges), np.array([[0]]), Capacity.from_batches(data, [np.array([0])]))


def of_padding(batch: GraphBatch, x: jax.Array) -> jax.Array:
    """The features, with padding rows that would spoil whatever they reached."""
    return jnp.where(batch.rows[:, None], x, jnp.nan)


@pytest.mark.parametrize("layout", ["csr", "padded"])
def test_graphs_of_a_batch_are_reduced_as_if_alone(layout: str):
    data = random_graphs(seed=1)
    batches = np.array([[3, 0, PADDING], [7, 7, 1], [PADDING, 5, 2]])
    capacity = Capacity.from_batches(data, batches)
    packed = pack(data, batches, capacity)
    features = jnp.asarray(data.features)

    @jax.jit
    def reduced(batch: GraphBatch) -> tuple[jax.Array, ...]:
        x = of_padding(batch, batch.features(features))
        table = batch.table(capacity, layout)
        pool = batch.pool(capacity, layout)
        back = jax.grad(lambda x: (jnp.where(batch.rows[:, None], table.aggregate(x), 0) ** 2).sum())(x)
        readout = jax.grad(lambda x: (pool.aggregate(x) ** 2).sum())(x)
        normal = table.aggregate(x, normalisation="symmetric")
        return table.aggregate(x), normal, pool.aggregate(x), pool.aggregate(x, "mean"), back, readout

    for n, ids in enumerate(batches):
        batch = jax.tree.map(lambda leaf, n=n: jnp.asarray(leaf[n]), packed)
        near, normal, total, mean, back, readout = reduced(batch)
        assert batch.labels.tolist() == [PADDING if graph == PADDING else data.labels[graph] for graph in ids]
        for place, graph in enumerate(ids):
            rows = slice(int(batch.starts[place]), int(batch.starts[place + 1]))
            if graph == PADDING:
                assert rows.start == rows.stop
                assert not total[place].any()
                continue
            table, x = alone(data, graph)
            np.testing.assert_allclose(near[rows], table.aggregate(x), rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(normal[rows], table.aggregate(x, normalisation="symmetric"), rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(total[place], x.sum(0), rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(mean[place], x.mean(0), rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(readout[rows], jnp.broadcast_to(2 * x.sum(0), x.shape), rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(back[rows], 2 * table.aggregate(table.aggregate(x)), rtol=1e-4, atol=1e-4)


def test_rows_and_shapes_are_those_of_the_capacity():
    data = random_graphs()
    batches = np.array([[[3, 0], [1, 2]], [[4, 5], [6, 7]]])
    capacity = Capacity.from_batches(data, batches)
    packed = pack(data, batches, capacity)
    assert packed.nodes.shape == (2, 2, capacity.nodes)
    assert packed.sources.shape == (2, 2, capacity.edges)
    sizes = np.diff(data.node_offsets)
    np.testing.assert_array_equal((packed.nodes != PADDING).sum(-1), sizes[batches].sum(-1))
    assert capacity.nodes >= sizes[batches].sum(-1).max()
    assert pack(data, np.array([0]), capacity).nodes.shape == (capacity.nodes,)


def test_capacities_come_on_a_coarse_scale():
    assert [round_up(n) for n in (0, 1, 8, 9, 100, 128, 129, 1000, 1025)] == [8, 8, 8, 16, 104, 128, 144, 1024, 1152]
    assert len({round_up(n) for n in range(1024, 2048)}) <= 9
    assert all(n <= round_up(n) <= max(8, 1.13 * n + 8) for n in range(5000))


def test_what_does_not_fit_is_refused():
    data = random_graphs()
    capacity = Capacity.from_batches(data, np.array([[0, 1]]))
    with pytest.raises(ValueError, match="expected graph ids from 0 to 7, found 8"):
        pack(data, np.array([8]), capacity)
    with pytest.raises(ValueError, match="expected at most 2 graphs, found 3"):
        pack(data, np.array([0, 1, 2]), capacity)
    with pytest.raises(ValueError, match=r"expected at most 8 nodes, found a batch of 1\d"):
        pack(data, np.argsort(np.diff(data.node_offsets))[-2:], Capacity(2, 8, 100, 9, 9))
    with pytest.raises(ValueError, match="expected the layout auto, csr or padded, found 'bucketed'"):
        jax.tree.map(jnp.asarray, pack(data, np.array([0]), capacity)).table(capacity, "bucketed")
