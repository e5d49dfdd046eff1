"""Sampled neighbourhoods: the right neighbours, one shape, and the whole graph's scores where nothing is left out."""

from collections import Counter
from functools import partial
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
from tilewright.graph.loader import NeighborLoader
from tilewright.graph.sample import ALL, NeighbourSampler, Sample, SampleCapacity, SampledLayer
from tilewright.kernels import native
from tilewright.kernels.neighbours import cpu, reference
from tilewright.models import gnn
from tilewright.models.gnn import FAMILIES

KARATE = karate_club()


pytestmark = pytest.mark.usefixtures("quick_compiles")


def forest(edge_index: Any, num_nodes: int, fan_outs: Any, batch_size: int, **options: Any) -> NeighbourSampler:
    return NeighbourSampler(edge_index, num_nodes, fan_outs, batch_size, deduplicate=False, **options)


def table(edge_index: Any, num_nodes: int, fan_outs: Any, batch_size: int, **options: Any) -> NeighbourSampler:
    return NeighbourSampler(edge_index, num_nodes, fan_outs, batch_size, deduplicate=True, **options)


def leaves(sample: Sample) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(sample)]


def near(node: int) -> set[int]:
    return set(KARATE.edge_index[0][KARATE.edge_index[1] == node].tolist())


def test_a_sample_is_a_forest_of_the_graphs_edges():
    sampler = forest(KARATE.edge_index, 34, (3, 2), batch_size=5)
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


@pytest.mark.parametrize("make", [forest, table])
def test_samples_are_a_function_of_their_seed_and_have_one_shape(make: Any):
    sampler = make(KARATE.edge_index, 34, (4, 3), batch_size=6)

    def drawn(roots: Any, seed: Any) -> list[np.ndarray]:
        return leaves(sampler.sample(np.asarray(roots, np.int64), seed))

    first = drawn([0, 33], (1, 2))
    again = drawn([0, 33], (1, 2))
    other = drawn([0, 33], (1, 3))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))
    for more in (drawn([], 0), drawn([1, 2, 3, 4, 5, 6], 9)):
        assert [leaf.shape for leaf in more] == [leaf.shape for leaf in first]


def sampled_scores(config: Any, params: Any, state: Any, sample: Sample, x: jax.Array) -> jax.Array:
    spoilt = jnp.where(sample.rows[:, None], x[sample.nodes], 1e6)
    return gnn.apply(config, params, sample.layers, spoilt, state, rows=sample.rows)[0]


@pytest.mark.parametrize("make", [forest, table])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_sample_that_leaves_nothing_out_has_the_whole_graphs_scores(family: str, make: Any):
    edges = with_self_loops(from_edge_index(KARATE.edge_index, 34)).edge_index if family == "gat" else KARATE.edge_index
    config = FAMILIES[family](4, 2, layers=2, hidden=3)
    params, state = gnn.init(config, jax.random.key(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(34, 4)), jnp.float32)
    sampler = make(KARATE.edge_index, 34, (17, 17), batch_size=4, self_loops=family == "gat")
    roots = np.array([33, 11, 2])
    found = jax.jit(partial(sampled_scores, config))(params, state, sampler.sample(roots, 0), x)
    wanted, _ = gnn.apply(config, params, DenseNeighbours.from_edges(edges, 34), x, state)
    np.testing.assert_allclose(found[:3], wanted[roots], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("make", [forest, table])
@pytest.mark.parametrize("options", [{"reduce": "sum"}, {"reduce": "mean"}, {"normalisation": "symmetric"}])
def test_sampled_reductions_are_right_on_average(options: dict[str, Any], make: Any):
    x = np.random.default_rng(0).normal(1, 1, (34, 2)).astype(np.float32)
    roots = np.array([0, 33])
    sampler = make(KARATE.edge_index, 34, (6,), batch_size=2)

    @jax.jit
    def reduced(sample: Any, x: jax.Array) -> jax.Array:
        return sample.layers[0].aggregate(x, **options)

    drawn = [sampler.sample(roots, seed) for seed in range(300)]
    found = np.stack([reduced(Sample(None, None, sample.layers), jnp.asarray(x[sample.nodes])) for sample in drawn])
    wanted = np.asarray(DenseNeighbours.from_edges(KARATE.edge_index, 34).aggregate(jnp.asarray(x), **options))[roots]
    error = found.std(0, ddof=1) / len(drawn) ** 0.5
    assert (np.abs(found.mean(0) - wanted) < 4 * error).all()


@pytest.mark.parametrize("make", [forest, table])
@pytest.mark.parametrize("reduce", ["max", "min"])
def test_extremes_leave_padding_out(reduce: Any, make: Any):
    sampler = make(np.array([[1, 2], [0, 0]]), 4, (3,), batch_size=3)
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


@pytest.mark.parametrize("make", [forest, table])
def test_a_graph_without_edges(make: Any):
    sampler = make(np.zeros((2, 0), np.int32), 3, (2,), batch_size=2)
    sample = sampler.sample(np.array([2]), 0)
    layer = sample.layers[0]
    rows = layer.num_sources
    assert layer.aggregate(jnp.ones((rows, 1))).tolist() == [[0.0], [0.0]]
    score = jnp.ones((rows, 1))
    out, gradient = jax.value_and_grad(lambda score: layer.attend(jnp.ones((rows, 1, 1)), score, score[:2]).sum())(score)
    assert float(out) == 0.0
    assert not np.any(gradient), "a row without neighbours takes part in nothing"


def test_all_neighbours_of_each_node():
    """-1 makes slots for the largest degree, draws every neighbour, and takes lists."""
    sampler = forest(KARATE.edge_index.tolist(), 34, (ALL, 2), batch_size=2)
    assert sampler.fan_outs == (17, 2)
    sample = sampler.sample([33, 11], 0)
    layer = sample.layers[-1]
    slots = np.asarray(layer.slots(jnp.asarray(sample.nodes[: layer.num_sources], jnp.float32)))
    assert set(slots[0, :17].tolist()) == near(33)
    assert layer.degrees.tolist() == [17, 1]


def graphs() -> st.SearchStrategy[tuple[np.ndarray, int]]:
    """Edges, also none, several between the same nodes, and self-loops, and the number of nodes."""

    def edges(nodes: int) -> st.SearchStrategy[tuple[np.ndarray, int]]:
        ends = st.lists(st.tuples(*[st.integers(0, nodes - 1)] * 2), max_size=40)
        return ends.map(lambda pairs: (np.array(pairs, np.int32).reshape(-1, 2).T.copy(), nodes))

    return st.integers(1, 9).flatmap(edges)


@given(graphs(), st.lists(st.integers(1, 4), min_size=1, max_size=3), st.booleans(), st.booleans(), st.data())
def test_the_compiled_sampler_draws_what_its_reference_draws(
    graph: tuple[np.ndarray, int], fan_outs: list[int], deduplicate: bool, self_loops: bool, data: Any
):
    edges, nodes = graph
    edges = edges[:, (edges[0] != edges[1]) | (not self_loops)]
    compiled = NeighbourSampler(edges, nodes, fan_outs, 5, self_loops, deduplicate)
    assert not compiled.reason
    plain = NeighbourSampler(edges, nodes, fan_outs, 5, self_loops, deduplicate)
    plain.kernels = reference
    roots = data.draw(st.lists(st.integers(0, nodes - 1), max_size=5))
    seed = data.draw(st.integers(0, 2**64 - 1))
    found, wanted = compiled.samples([roots], [seed])[0], plain.samples([roots], [seed])[0]
    for one, other in zip(leaves(found), leaves(wanted), strict=True):
        np.testing.assert_array_equal(one, other)


@given(st.integers(1, 300), st.integers(0, 2**64 - 1))
def test_grouping_is_stable(groups: int, seed: int):
    keys = np.random.default_rng(seed).integers(0, groups, 200).astype(np.int32)
    for one, other in zip(cpu.group(keys, groups), reference.group(keys, groups), strict=True):
        np.testing.assert_array_equal(one, other)


def test_every_subset_is_as_likely_as_any_other():
    """Over rows, and over keys."""
    offsets = np.array([0, 5])
    sources = np.arange(5, dtype=np.int32)
    rows = 20_000
    by_row = cpu.draw(np.zeros(rows, np.int32), offsets, sources, 3, 7, 3 * np.arange(rows), 3 * rows)[1]
    one = np.zeros(1, np.int32), offsets, sources, 3
    by_key = [cpu.draw(*one, key, np.zeros(1, np.int64), 3)[1] for key in range(0, 2 * rows, 2)]
    for drawn in (by_row, np.concatenate(by_key)):
        found = Counter(tuple(sorted(row)) for row in drawn.reshape(rows, 3).tolist())
        assert len(found) == 10  # 5 over 3
        assert max(abs(count - 2000) for count in found.values()) < 200  # more than four standard deviations


@given(graphs(), st.booleans(), st.integers(0, 99))
def test_a_deduplicated_sample_has_the_graphs_edges(graph: tuple[np.ndarray, int], self_loops: bool, seed: int):
    """One row for each node, the right number of different edges in each row, and both directions alike."""
    edges, nodes = graph
    edges = edges[:, (edges[0] != edges[1]) | (not self_loops)]
    sampler = table(edges, nodes, (2, 3), 6, self_loops=self_loops)
    roots = np.random.default_rng(seed).permutation(nodes)[:4]
    sample = sampler.samples([roots], [seed])[0]
    real = sample.nodes[sample.rows]
    assert sorted(set(real.tolist())) == sorted(real.tolist())
    assert real[: len(roots)].tolist() == roots.tolist()
    for layer, ids, fan_out in zip(sample.layers, sample.edges, (3, 2), strict=True):
        forward, backward = layer.table.forward, layer.table.backward
        count = forward.offsets[-1]
        assert (np.bincount(forward.rows[:count], minlength=layer.num_nodes) == np.diff(forward.offsets)).all()
        drawn = ids[:count]
        ends = sample.nodes[forward.sources[:count]], sample.nodes[forward.rows[:count]]
        given_edges = drawn >= 0
        np.testing.assert_array_equal(np.stack(ends)[:, given_edges], edges[:, drawn[given_edges]])
        assert len(set(drawn[given_edges].tolist())) == given_edges.sum()
        np.testing.assert_array_equal(*(end[~given_edges] for end in ends))
        assert not (ids[count:] >= 0).any()
        places = np.arange(layer.num_nodes)
        live = sample.rows[: layer.num_nodes] & (np.diff(forward.offsets) > 0)
        degrees = np.bincount(edges[1], minlength=nodes)
        wanted = np.minimum(degrees[sample.nodes[places[live]]], fan_out) + self_loops
        np.testing.assert_array_equal(np.diff(forward.offsets)[live], wanted)
        back = np.stack([backward.rows, backward.sources])[:, :count]
        np.testing.assert_array_equal(back, np.stack([forward.sources, forward.rows])[:, backward.edges[:count]])
        np.testing.assert_array_equal(backward.slots[backward.edges[:count]], np.arange(count))


def test_a_node_that_is_a_root_twice_has_two_rows():
    sample = table(KARATE.edge_index, 34, (3,), 4, self_loops=True).samples([[5, 5, 6]], [0])[0]
    assert sample.nodes[:3].tolist() == [5, 5, 6]
    (layer,) = sample.layers
    firsts = layer.table.forward.offsets[:3]
    assert layer.table.forward.sources[firsts].tolist() == [0, 1, 2]


def test_samples_fit_one_of_two_capacities():
    """Roots of a low degree have the usual shape; others, which the trials do not have, the one for any sample."""
    star = np.stack([np.arange(1, 2001), np.zeros(2000, np.int64)])
    chain = np.stack([np.arange(1, 2000), np.arange(2, 2001)])
    sampler = table(np.concatenate([star, chain], 1), 2001, (ALL, ALL), 8, roots=np.arange(1, 2001))
    usual, largest = sampler.capacities
    assert usual.rows[-1] < 40
    assert largest == SampleCapacity((8, 2001, 2001), (8 * 2000, 8 * 2000 + 3999))
    leaf = sampler.samples([np.arange(100, 108)], [0])[0]
    hub = sampler.samples([np.array([0])], [0])[0]
    assert (len(leaf.nodes), len(hub.nodes)) == (usual.rows[-1], 4010)
    assert hub.rows.sum() == 2001
    both = sampler.samples([np.arange(100, 108), np.array([0])], [0, 0])
    assert [len(sample.nodes) for sample in both] == [4010, 4010]


def test_without_a_compiler_numpy_samples_and_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(native, "host_library", lambda operation: (None, "there is no C++ compiler"))
    sampler = forest(KARATE.edge_index, 34, (3,), 4)
    assert sampler.kernels is reference
    assert sampler.reason == "there is no C++ compiler"
    with pytest.raises(RuntimeError, match="expected the compiled sampler, found none: there is no C"):
        cpu.group(np.zeros(1, np.int32), 1)
    assert str(NeighborLoader(KARATE, [2])).endswith("sampled by NumPy, since there is no C++ compiler")


def test_what_is_refused():
    edges = KARATE.edge_index
    with pytest.raises(ValueError, match=r"at least 1, or -1 for all neighbours, found fan-outs \[3, 0\]"):
        NeighbourSampler(edges, 34, (3, 0), batch_size=4)
    with pytest.raises(ValueError, match=r"expected source ids in 0..32, found 33 at edge \d+"):
        NeighbourSampler(edges, 33, (3,), batch_size=4)
    with pytest.raises(ValueError, match="expected a graph with nodes to sample from"):
        NeighbourSampler(np.zeros((2, 0), np.int32), 0, (3,), batch_size=4)
    with pytest.raises(ValueError, match=r"less than 2\^31 rows, found 3,840,000,000 for fan-outs \[14999999\]"):
        forest(edges, 34, (14_999_999,), batch_size=256)
    sampler = NeighbourSampler(edges, 34, (3,), batch_size=4)
    with pytest.raises(ValueError, match="expected at most 4 roots, found 5"):
        sampler.sample(np.arange(5), 0)
    with pytest.raises(ValueError, match="expected roots from 0 to 33, found 34"):
        sampler.sample([3, 34], 0)
    with pytest.raises(ValueError, match=r"roots to be a list of node ids, found float64 of shape \[2\]"):
        sampler.sample([0.5, 1], 0)
    with pytest.raises(ValueError, match=r"roots to be a list of node ids, found bool of shape \[34\]"):
        sampler.sample(np.ones(34, bool), 0)
