"""Loaders in PyG's names: what batches hold, their shapes, and the report of padding."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from graph.test_batch import random_graphs
from tilewright.graph.data import karate_club
from tilewright.graph.loader import DataLoader, LinkNeighborLoader, NeighborBatch, NeighborLoader, prefetched
from tilewright.models import gnn
from tilewright.models.gnn_families import GATv2Config

pytestmark = pytest.mark.usefixtures("quick_compiles")

CLUB = karate_club()


def shapes(batch: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.shape, batch)


def numbered() -> Any:
    """The karate club, whose features of edges are the edges' ends."""
    return replace(CLUB, edge_attr=CLUB.edge_index.T.astype(np.float32))


def test_batches_of_nodes_cover_the_nodes_in_one_shape():
    """Each edge's features are those of its ends; the last batch is padded; another epoch has another order."""
    loader = NeighborLoader(numbered(), [3, 2], np.arange(34) < 10, batch_size=4, shuffle=True, seed=1)
    epochs = [list(loader) for _ in range(2)]
    assert len(loader) == len(epochs[0]) == 3
    assert str(loader) == "3 batches of one shape: 4 roots with fan-outs [3, 2] are 48 rows of 34 features"
    orders = []
    for epoch in epochs:
        assert all(shapes(batch) == shapes(epoch[0]) for batch in epoch)
        roots = [np.asarray(batch.x).argmax(1)[:4][np.asarray(batch.y) >= 0] for batch in epoch]
        orders.append(np.concatenate(roots))
        assert sorted(orders[-1]) == list(range(10))
        for batch in epoch:
            nodes = np.asarray(batch.x).argmax(1)
            for layer, edge_attr in zip(batch.layers, batch.edge_attr, strict=True):
                rows = layer.table.forward
                count = int(rows.offsets[-1])
                ends = nodes[np.asarray(rows.sources)[:count]], nodes[np.asarray(rows.rows)[:count]]
                np.testing.assert_array_equal(np.asarray(edge_attr)[:count].T, ends)
    assert not np.array_equal(*orders)
    assert loader.report.batches == 3
    assert (loader.report.rows, loader.report.edges) == (3 * 48, 3 * (4 * 3 + 16 * 2))
    assert str(loader.report).startswith("3 batches of 1 shape, each of which a program compiles for once; filled: ")


@pytest.mark.parametrize("self_loops", [False, True])
def test_batches_do_not_depend_on_the_number_of_threads(self_loops: bool):
    """Also if an epoch is left early."""
    epochs = []
    for workers in (0, 1, 3):
        loader = NeighborLoader(numbered(), [3, 2], batch_size=5, shuffle=True, self_loops=self_loops, num_workers=workers)
        assert next(iter(loader)).y.shape == (5,)
        epochs.append(jax.tree.leaves(list(loader)))
        assert loader.report.batches == 7
    for epoch in epochs[1:]:
        for one, other in zip(epochs[0], epoch, strict=True):
            np.testing.assert_array_equal(one, other)


def test_errors_of_a_thread_are_raised():
    def broken() -> int:
        raise ValueError("expected something else")

    found = prefetched([lambda: 1, broken, lambda: 3], 2)
    assert next(found) == 1
    with pytest.raises(ValueError, match="something else"):
        next(found)


def test_a_model_compiles_once_for_an_epoch():
    config = GATv2Config(34, 2, hidden=2, heads=2, edge_features=2)
    params, _ = gnn.init(config, jax.random.key(0))
    loader = NeighborLoader(numbered(), [4, 4], batch_size=8, self_loops=True, drop_last=True)
    traced = []

    @jax.jit
    def scores(params: Any, batch: NeighborBatch) -> jax.Array:
        traced.append(shapes(batch))
        return gnn.apply(config, params, batch.layers, batch.x, edge_attr=batch.edge_attr, rows=batch.rows)[0]

    found = [scores(params, batch) for batch in loader]
    assert len(found) == 4
    assert all(np.isfinite(each).all() for each in found)
    assert len(traced) == 1


def test_links_have_their_ends_as_roots():
    edge_label_index = CLUB.edge_index[:, :10]
    labels = np.arange(10) % 3
    loader = LinkNeighborLoader(CLUB, [2], edge_label_index, labels, neg_sampling_ratio=0.5, batch_size=4)
    batches = list(loader)
    assert loader.links == 6
    for n, batch in enumerate(batches):
        assert shapes(batch) == shapes(batches[0])
        count = min(4, 10 - 4 * n)
        ends = np.asarray(batch.x)[: 2 * loader.links].argmax(1).reshape(2, -1)
        np.testing.assert_array_equal(ends[:, :count], edge_label_index[:, 4 * n : 4 * n + count])
        negatives = count // 2
        expected = [*labels[4 * n : 4 * n + count], *[0] * negatives, *[-1] * (6 - count - negatives)]
        assert np.asarray(batch.y).tolist() == expected


@pytest.mark.parametrize("layout", ["csr", "padded"])
def test_batches_of_graphs_have_at_most_two_shapes(layout: str):
    data = random_graphs(40, seed=3)
    features = data.features.copy()
    data = replace(data, features=features, edge_attr=np.arange(data.edge_index.shape[1], dtype=np.float32)[:, None])
    loader = DataLoader(data, np.arange(30), batch_size=4, shuffle=True, layout=layout)
    assert len(loader) == 8
    seen = []
    for batch in loader:
        labels = np.asarray(batch.y)
        nodes = np.asarray(batch.rows).sum()
        seen.append(np.asarray(batch.x)[:nodes])
        assert (labels >= 0).sum() == (4 if len(seen) < 8 else 2)
        assert batch.pool.num_nodes == 4
    wanted = data.features[: data.node_offsets[30]]
    np.testing.assert_allclose(np.sort(np.concatenate(seen), 0), np.sort(wanted, 0))
    report = loader.report
    assert report.filled_rows == data.node_offsets[30]
    assert report.filled_edges == data.edge_offsets[30]
    assert 1 <= len(report.shapes) <= len(loader.capacities) <= 2
    assert report.rows < 2 * report.filled_rows + 8 * 8


def test_pygs_data_is_read():
    edges = np.array([[0, 1, 2], [1, 2, 0]])
    data = SimpleNamespace(x=np.ones((3, 2)), edge_index=edges, y=np.array([[0], [1], [1]]), train_mask=np.array([1, 0, 1]))
    loader = NeighborLoader(data, [1], batch_size=3)
    assert loader.data.train.tolist() == [0, 2]
    assert np.asarray(next(iter(loader)).y).tolist() == [0, 1, 1]


def test_bad_input():
    for make, message in [
        (lambda: NeighborLoader(CLUB, [2], np.array([34])), r"ids from 0 to 33, found int64 \[1\]"),
        (lambda: NeighborLoader(CLUB, [2], num_workers=-1), "num_workers of at least 0, found -1"),
        (lambda: NeighborLoader(CLUB, [2], batch_size=0), "batch_size of at least 1, found 0"),
        (lambda: LinkNeighborLoader(CLUB, [2], edge_label=[1]), r"labels from 0 of 156 edges, found int64 \[1\]"),
        (lambda: LinkNeighborLoader(CLUB, [2], neg_sampling_ratio=-1), "neg_sampling_ratio of at least 0, found -1"),
        (lambda: DataLoader(random_graphs(4), [4]), r"graph ids from 0 to 3, found \[4\]"),
        (lambda: DataLoader(random_graphs(4), [1, 1]), "different graph ids, found some twice"),
    ]:
        with pytest.raises(ValueError, match=message):
            make()
