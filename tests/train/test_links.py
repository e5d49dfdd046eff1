"""Link prediction: what a split holds back, negative pairs, areas under the curve, and that it learns."""

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.graph.data import NodeData, karate_club
from tilewright.models.gnn import GATConfig, GCNConfig
from tilewright.train.gnn import GNNOptions
from tilewright.train.links import area_under_curve, draw_negatives, link_task, pair_keys, split_links
from tilewright.train.loop import train
from train.support import silent

pytestmark = pytest.mark.usefixtures("quick_compiles")

CLUB = karate_club()


def pairs(edges: np.ndarray) -> set[tuple[int, int]]:
    return {(int(a), int(b)) for a, b in edges.T}


def test_held_out_edges_pass_no_messages():
    """Both directions of an edge are in one part, self-loops in none; a directed graph's edges are split one by one."""
    loop = np.array([[3], [3]], np.int32)
    data = replace(
        CLUB, edge_index=np.concatenate([CLUB.edge_index, loop], 1), edge_attr=np.arange(157.0, dtype=np.float32)[:, None]
    )
    split = split_links(data, val=0.1, test=0.2, seed=1)
    assert [split.links[part].shape[1] for part in ("train", "val", "test")] == [54, 8, 16]
    every = [pairs(split.links[part]) for part in ("train", "val", "test")]
    assert set.union(*every) == {(a, b) for a, b in pairs(CLUB.edge_index) if a < b}
    assert not every[0] & every[1] | every[1] & every[2] | every[0] & every[2]
    both = [each | {(b, a) for a, b in each} for each in every]
    assert pairs(split.train_graph.edge_index) == both[0] | {(3, 3)}
    assert pairs(split.test_graph.edge_index) == both[0] | both[1] | {(3, 3)}
    assert split.test_graph.edge_attr is not None
    np.testing.assert_array_equal(data.edge_index[:, split.test_graph.edge_attr[:, 0].astype(int)], split.test_graph.edge_index)
    directed = split_links(replace(CLUB, edge_index=np.array([[0, 1, 2, 3, 3], [1, 2, 3, 0, 1]], np.int32)), 0.2, 0.2)
    assert [directed.links[part].shape[1] for part in ("train", "val", "test")] == [3, 1, 1]
    for part, found in split.negatives.items():
        assert found.shape == split.links[part].shape
        assert not pairs(found) & (pairs(CLUB.edge_index) | {(n, n) for n in range(34)})


@given(st.integers(2, 6), st.integers(0, 99))
def test_negative_pairs_have_no_edge(nodes: int, seed: int):
    rng = np.random.default_rng(seed)
    every = np.array([(a, b) for a in range(nodes) for b in range(nodes) if a != b]).T
    kept = rng.permutation(every.shape[1])[: every.shape[1] - 1]
    keys = np.sort(pair_keys(every[:, kept], nodes))
    found = draw_negatives(keys, nodes, 5, rng)
    assert pairs(found) == pairs(every) - pairs(every[:, kept])
    with pytest.raises(ValueError, match=f"found edges between all {nodes} nodes"):
        draw_negatives(np.sort(pair_keys(every, nodes)), nodes, 1, rng)


def test_the_one_free_pair_of_many_is_found():
    """Draws at random would need 90,000 attempts for each."""
    keys = np.array([key for key in range(300 * 300) if key // 300 != key % 300 and key != 2103])
    found = draw_negatives(keys, 300, 50, np.random.default_rng(0))
    assert found.T.tolist() == [[7, 3]] * 50
    with pytest.raises(ValueError, match="found edges between all 1 nodes"):
        draw_negatives(keys[:0], 1, 1, np.random.default_rng(0))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=9), st.lists(st.integers(0, 5), min_size=1, max_size=9))
def test_the_area_is_the_share_of_ordered_pairs(positive: list[int], negative: list[int]):
    wanted = np.mean([(a > b) + (a == b) / 2 for a in positive for b in negative])
    assert area_under_curve(np.array(positive, np.float32), np.array(negative, np.float32)) == pytest.approx(wanted)


def communities(nodes: int = 60) -> NodeData:
    """Three groups with edges within them only, of nodes that know their group but for noise."""
    rng = np.random.default_rng(0)
    group = np.arange(nodes) % 3
    near = (group[:, None] == group) & (rng.random((nodes, nodes)) < 0.5)
    edges = np.stack(np.nonzero(near | near.T)).astype(np.int32)
    x = (np.eye(3)[group] + 0.3 * rng.normal(size=(nodes, 3))).astype(np.float32)
    none = np.zeros(0, np.int32)
    return NodeData("communities", edges[:, edges[0] != edges[1]], x, group.astype(np.int32), none, none, none)


@pytest.mark.parametrize("config", [GCNConfig(3, 4, hidden=8, dropout=0.0), GATConfig(3, 4, hidden=4, heads=2, dropout=0.0)])
def test_links_within_communities_are_predicted(config: GCNConfig | GATConfig):
    """Pairs of one group without an edge cannot be told apart, so that 0.75 to 0.85 is the best."""
    result = train(link_task(config, communities(), GNNOptions(epochs=40, weight_decay=0.0), runs=2), silent())
    assert result.last("test").shape == (2,)
    assert result.last("test").min() > 0.7
    assert result.last("train").min() > 0.7


def test_steps_draw_new_negatives_and_can_be_resumed():
    made = link_task(GCNConfig(3, 4, hidden=4), communities(), GNNOptions(epochs=3))
    drawn = [np.asarray(batch[2]) for batch in islice(made.batches(0), 3)]
    assert not np.array_equal(drawn[0], drawn[1])
    np.testing.assert_array_equal(next(made.batches(2))[2], drawn[2])


def test_what_is_refused():
    with pytest.raises(ValueError, match="expected edges for val, test, found 2 edges in all"):
        split_links(replace(CLUB, edge_index=np.array([[0, 1], [1, 2]], np.int32)))
    with pytest.raises(ValueError, match="expected no edge weights for models other than GCN, found some in karate"):
        link_task(GATConfig(34, 4), replace(CLUB, weights=np.ones(156, np.float32)), GNNOptions())
