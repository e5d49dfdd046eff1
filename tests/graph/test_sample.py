"""Sampled neighbourhoods: the right neighbours, one shape, and the whole graph's scores where nothing is left out."""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.dense_graph import DenseNeighbours
from tilewright.graph.data import karate_club
from tilewright.graph.edges import from_edge_index, with_self_loops
from tilewright.graph.sample import ALL, NeighbourSampler, Sample, SampledLayer, draw
from tilewright.models import gnn
from tilewright.models.gnn import FAMILIES

KARATE = karate_club()


pytestmark = pytest.mark.usefixtures("quick_compiles")


@given(st.lists(st.integers(0, 12), min_size=1, max_size=20), st.integers(1, 6), st.integers(0, 9))
def test_draws_are_different_numbers_in_range(counts: list[int], k: int, seed: int):
    picks = draw(np.array(counts), k, np.random.default_rng(seed))
    for row, count in zip(picks, counts, strict=True):
        drawn = row[: min(count, k)]
        assert len(set(drawn)) == len(drawn)
        assert all(0 <= number < count for number in drawn)


def test_every_subset_is_as_likely_as_any_other():
    picks = draw(np.full(20_000, 5), 3, np.random.default_rng(0))
    found = Counter(tuple(sorted(row)) for row in picks)
    assert len(found) == 10  # 5 over 3
    assert max(abs(count - 2000) for count in found.values()) < 200  # more than four standard deviations


def near(node: int) -> set[int]:
    return set(KARATE.edge_index[0][KARATE.edge_index[1] == node].tolist())


def test_a_sample_is_a_forest_of_the_graphs_edges():
    sampler = NeighbourSampler(KARATE.edge_index, 34, (3, 2), batch_size=5)
    sample = sampler.sample(np.array([0, 33, 11]), seed=7)
    assert sample.nodes.shape == (5 * 4 * 3,)
    assert sample.nodes[:3].tolist() == [0, 33, 11]
    assert np.asarray(sample.rows)[:5].tolist() == [True] * 3 + [False] * 2
    for layer in sample.layers:
        slots = np.asarray(layer.slots(jnp.asarray(sample.nodes[: layer.num_sources], jnp.float32)))
        for row in range(layer.num_nodes):
            drawn = slots[row, : int(layer.degrees[row])].tolist()
            known = near(int(sample.nodes[row])) if sample.rows[row] else set()
            assert len(drawn) == min(layer.fan_out, len(known)) == len(set(drawn))
            assert set(drawn) <= known
            assert int(layer.neighbours[row]) == len(known)


def test_samples_are_a_function_of_their_seed_and_have_one_shape():
    sampler = NeighbourSampler(KARATE.edge_index, 34, (4, 3), batch_size=6)

    def leaves(roots: Any, seed: Any) -> list[np.ndarray]:
        return [np.asarray(leaf) for leaf in jax.tree.leaves(sampler.sample(np.asarray(roots, np.int64), seed))]

    first = leaves([0, 33], (1, 2))
    again = leaves([0, 33], (1, 2))
    other = leaves([0, 33], (1, 3))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))
    for more in (leaves([], 0), leaves([1, 2, 3, 4, 5, 6], 9)):
        assert [leaf.shape for leaf in more] == [leaf.shape for leaf in first]


def sampled_scores(config: Any, params: Any, state: Any, sample: Sample, x: jax.Array) -> jax.Array:
    spoilt = jnp.where(sample.rows[:, None], x[sample.nodes], 1e6)
    return gnn.apply(config, params, sample.layers, spoilt, state, rows=sample.rows)[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sample_that_leaves_nothing_out_has_the_whole_graphs_scores(family: str):
    edges = with_self_loops(from_edge_index(KARATE.edge_index, 34)).edge_index if family == "gat" else KARATE.edge_index
    config = FAMILIES[family](4, 2, layers=2, hidden=3)
    params, state = gnn.init(config, jax.random.key(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(34, 4)), jnp.float32)
    sampler = NeighbourSampler(KARATE.edge_index, 34, (17, 17), batch_size=4, self_loops=family == "gat")
    roots = np.array([33, 11, 2])
    found = sampled_scores(config, params, state, sampler.sample(roots, 0), x)
    wanted, _ = gnn.apply(config, params, DenseNeighbours.from_edges(edges, 34), x, state)
    np.testing.assert_allclose(found[:3], wanted[roots], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("options", [{"reduce": "sum"}, {"reduce": "mean"}, {"normalisation": "symmetric"}])
def test_sampled_reductions_are_right_on_average(options: dict[str, Any]):
    x = np.random.default_rng(0).normal(1, 1, (34, 2)).astype(np.float32)
    roots = np.array([0, 33])
    sampler = NeighbourSampler(KARATE.edge_index, 34, (6,), batch_size=2)

    @jax.jit
    def reduced(sample: Any, x: jax.Array) -> jax.Array:
        return sample.layers[0].aggregate(x, **options)

    drawn = [sampler.sample(roots, seed) for seed in range(300)]
    found = np.stack([reduced(Sample(None, None, sample.layers), jnp.asarray(x[sample.nodes])) for sample in drawn])
    wanted = np.asarray(DenseNeighbours.from_edges(KARATE.edge_index, 34).aggregate(jnp.asarray(x), **options))[roots]
    error = found.std(0, ddof=1) / len(drawn) ** 0.5
    assert (np.abs(found.mean(0) - wanted) < 4 * error).all()


@pytest.mark.parametrize("reduce", ["max", "min"])
def test_extremes_leave_padding_out(reduce: Any):
    sampler = NeighbourSampler(np.array([[1, 2], [0, 0]]), 4, (3,), batch_size=3)
    sample = sampler.sample(np.array([0, 3]), 0)
    x = jnp.where(sample.rows[:, None], jnp.asarray(sample.nodes)[:, None].astype(jnp.float32), jnp.nan)
    found = sample.layers[0].aggregate(x, reduce=reduce)
    assert found[:, 0].tolist() == [2.0 if reduce == "max" else 1.0, 0.0, 0.0]


def test_dropped_attention_weights_keep_the_mean():
    layer = SampledLayer(jnp.array([2, 0, 1]), jnp.zeros(9, jnp.int32), 2, self_loops=True)
    score = jnp.zeros((9, 1))
    run = jax.vmap(lambda key: layer.attend(jnp.ones((9, 1, 1)), score, score[:3], dropout=0.5, key=key))
    outs = np.asarray(jax.jit(run)(jax.random.split(jax.random.key(0), 2000)))[:, :, 0, 0]
    for node, neighbours in enumerate((3, 1, 2)):  # itself among them: so many equal weights, each there twice or not at all
        assert set(np.rint(outs[:, node] * neighbours)) == set(range(0, 2 * neighbours + 1, 2))
    np.testing.assert_allclose(outs.mean(0), 1, atol=0.1)


def test_a_graph_without_edges():
    sampler = NeighbourSampler(np.zeros((2, 0), np.int32), 3, (2,), batch_size=2)
    sample = sampler.sample(np.array([2]), 0)
    layer = sample.layers[0]
    assert layer.aggregate(jnp.ones((6, 1))).tolist() == [[0.0], [0.0]]
    score = jnp.ones((6, 1))
    out, gradient = jax.value_and_grad(lambda score: layer.attend(jnp.ones((6, 1, 1)), score, score[:2]).sum())(score)
    assert float(out) == 0.0
    assert not np.any(gradient), "a row without neighbours takes part in nothing"


def test_all_neighbours_of_each_node():
    """-1 makes slots for the largest degree, draws every neighbour, and takes lists."""
    sampler = NeighbourSampler(KARATE.edge_index.tolist(), 34, (ALL, 2), batch_size=2)
    assert sampler.fan_outs == (17, 2)
    sample = sampler.sample([33, 11], 0)
    layer = sample.layers[-1]
    slots = np.asarray(layer.slots(jnp.asarray(sample.nodes[: layer.num_sources], jnp.float32)))
    assert set(slots[0, :17].tolist()) == near(33)
    assert layer.degrees.tolist() == [17, 1]


def test_what_is_refused():
    edges = KARATE.edge_index
    with pytest.raises(ValueError, match=r"at least 1, or -1 for all neighbours, found fan-outs \[3, 0\]"):
        NeighbourSampler(edges, 34, (3, 0), batch_size=4)
    with pytest.raises(ValueError, match=r"expected source ids in 0..32, found 33 at edge \d+"):
        NeighbourSampler(edges, 33, (3,), batch_size=4)
    with pytest.raises(ValueError, match="expected a graph with nodes to sample from"):
        NeighbourSampler(np.zeros((2, 0), np.int32), 0, (3,), batch_size=4)
    with pytest.raises(ValueError, match=r"less than 2\^31 rows, found 3,840,000,000 for fan-outs \[14999999\]"):
        NeighbourSampler(edges, 34, (14_999_999,), batch_size=256)
    sampler = NeighbourSampler(edges, 34, (3,), batch_size=4)
    with pytest.raises(ValueError, match="expected at most 4 roots, found 5"):
        sampler.sample(np.arange(5), 0)
    with pytest.raises(ValueError, match="expected roots from 0 to 33, found 34"):
        sampler.sample([3, 34], 0)
    with pytest.raises(ValueError, match=r"roots to be a list of node ids, found float64 of shape \[2\]"):
        sampler.sample([0.5, 1], 0)
    with pytest.raises(ValueError, match=r"roots to be a list of node ids, found bool of shape \[34\]"):
        sampler.sample(np.ones(34, bool), 0)
