"""A partitioned graph against the same graph on one device, and against dense matrices in NumPy."""

from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import Array
from jaxtyping import Float, Int

from tilewright.graph.aggregate import aggregate
from tilewright.graph.exchange import Shard
from tilewright.graph.partition import PartitionedTable, cut, run
from tilewright.graph.table import NeighborTable
from tilewright.models import gnn
from tilewright.parallel.mesh import make_mesh
from tilewright.train.gnn import descend_rows

MESH = make_mesh({"nodes": 3})
FEATURES = 5
CLASSES = 3
CONFIGS = {
    "gcn": gnn.GCNConfig(FEATURES, CLASSES, hidden=6, dropout=0),
    "sage": gnn.GraphSAGEConfig(FEATURES, CLASSES, hidden=6, dropout=0),
    "gat": gnn.GATConfig(FEATURES, CLASSES, hidden=3, heads=2, dropout=0),
    "gin": gnn.GINConfig(FEATURES, CLASSES, hidden=6, layers=2, dropout=0, learn_epsilon=True),
}
ORDERS = ["given", "rcm", *(["metis"] if find_spec("pymetis") else [])]
FORMS = [("ring", "csr"), ("ring", "bucketed"), ("all_gather", "csr"), ("all_gather", "bucketed")]


def graph(nodes: int = 37, edges: int = 150, seed: int = 0) -> Int[np.ndarray, "2 E"]:
    """Random edges with a hub, a node without neighbours, loops and repeated edges."""
    rng = np.random.default_rng(seed)
    random = rng.integers(nodes - 1, size=(2, edges))
    hub = np.stack([rng.integers(nodes, size=nodes), np.full(nodes, 3)])
    return np.concatenate([random, hub, random[:, :3], [[5], [5]]], axis=1)


def features(nodes: int = 37, *more: int) -> Float[np.ndarray, "..."]:
    return np.random.default_rng(1).normal(size=(nodes, *(more or (FEATURES,)))).astype(np.float32)


def close(found: Any, wanted: Any, tolerance: float = 2e-5) -> None:
    """Sums in another order: some units in the last place of values of size one, more where they are larger."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=tolerance, atol=tolerance)


def table_of(exchange: str, layout: str, edges: Any = None, **options: Any) -> PartitionedTable:
    nodes = options.pop("num_nodes", 37)
    edges = graph() if edges is None else edges
    return PartitionedTable.build(edges, options.pop("mesh", MESH), nodes, exchange=exchange, layout=layout, limit=8, **options)


OPTIONS: list[dict[str, Any]] = [
    {"reduce": "sum"},
    {"reduce": "mean"},
    {"reduce": "max"},
    {"reduce": "min"},
    {"normalisation": "row"},
    {"normalisation": "symmetric"},
]


@pytest.mark.parametrize(
    ("form", "weighted"),
    [(FORMS[0], False), pytest.param(FORMS[1], True, marks=pytest.mark.slow), (FORMS[2], True), (FORMS[3], False)],
)
def test_reductions_and_gradients_are_those_of_one_device(form: tuple[str, str], weighted: bool):
    cases = OPTIONS if form[1] == "csr" else OPTIONS[::2]  # programs of buckets take a while to compile
    edges = graph()
    x = features()
    due = features(37, FEATURES, len(cases))[::-1]
    x[::3] = np.round(x[::3])  # ties
    weights = np.random.default_rng(2).choice([0.5, 1, 2], edges.shape[1]) if weighted else None
    single = NeighborTable.from_edges(edges, 37, weights, layout="csr")
    several = table_of(*form, weights=weights)

    def results(table: Any, x: Array, due: Array) -> tuple[Array, Array]:
        def weigh(x: Array) -> tuple[Array, Array]:
            outs = jnp.stack([table.aggregate(x, **options) for options in cases], axis=-1)
            return jnp.sum(outs * due), outs

        return jax.grad(weigh, has_aux=True)(x)

    found = jax.jit(results)(several, several.permute(x), several.permute(due))
    close([several.unpermute(each) for each in found], jax.jit(results)(single, jnp.asarray(x), jnp.asarray(due)))


@pytest.mark.parametrize("form", FORMS[:3])
def test_attention_and_its_gradients_are_those_of_one_device(form: tuple[str, str]):
    x = features(37, 2, 3)
    due = features(37, 2, 3)[::-1]
    source = features(37, 2) * 5 - 60
    target = features(37, 2)[::-1]
    single = NeighborTable.from_edges(graph(), 37, layout="csr")
    several = table_of(*form)

    def results(table: Any, due: Array, *given: Array) -> Any:
        def weigh(*given: Array) -> tuple[Array, Array]:
            out = table.attend(*given)
            return jnp.sum(out * due), out

        return jax.grad(weigh, (0, 1, 2), has_aux=True)(*given)

    found = jax.jit(results)(several, *(several.permute(value) for value in (due, x, source, target)))
    wanted = jax.jit(results)(single, *(jnp.asarray(value) for value in (due, x, source, target)))
    close(jax.tree.map(several.unpermute, found), wanted)


@pytest.mark.parametrize("form", [("ring", "csr"), ("all_gather", "bucketed")])
def test_dropped_attention_weights(form: tuple[str, str]):
    """With equal scores a node's result counts its neighbours that stayed; the gradient drops the same ones."""
    several = table_of(*form)
    due = jnp.asarray(features(37, 2, 3))
    zeros = several.permute(np.zeros((37, 2), np.float32))

    @jax.jit
    def results(table: PartitionedTable, x: Array, zeros: Array, due: Array, key: Array) -> tuple[Array, Array]:
        out, back = jax.vjp(lambda x: table.attend(x, zeros, zeros, dropout=0.5, key=key), x)
        return out, back(due)[0]

    def result_and_gradient(key: int) -> tuple[np.ndarray, np.ndarray]:
        ones = several.permute(np.ones((37, 2, 3), np.float32))
        out, back = results(several, ones, zeros, several.permute(due), jax.random.key(key))
        return np.asarray(several.unpermute(out)), np.asarray(several.unpermute(back))

    (out, back), (again, _), (other, _) = result_and_gradient(0), result_and_gradient(0), result_and_gradient(1)
    degrees = np.bincount(graph()[1], minlength=37)
    stayed = out[:, :, 0] * degrees[:, None] / 2
    np.testing.assert_allclose(stayed, np.rint(stayed), atol=1e-4)
    assert abs(stayed.sum() / (2 * degrees.sum()) - 0.5) < 0.1
    np.testing.assert_array_equal(out, again)
    assert not np.array_equal(out, other)
    np.testing.assert_allclose((out * due).sum((0, 2)), back.sum((0, 2)), rtol=1e-4)


@pytest.mark.parametrize(("family", "exchange"), [*((each, "ring") for each in CONFIGS), ("gat", "all_gather")])
def test_a_training_step_is_that_of_one_device(family: str, exchange: str):
    config = CONFIGS[family]
    x = features()
    labels = np.random.default_rng(3).integers(CLASSES, size=37)
    counts = np.arange(37) % 3 != 0
    loops = family == "gat"
    params: Any
    params, state = gnn.init(config, jax.random.key(0))
    single = NeighborTable.from_edges(graph(), 37, layout="csr", self_loops=loops)
    several = table_of(exchange, "csr", self_loops=loops)
    optimizer = optax.sgd(0.1)

    @jax.jit
    def step(table: Any, x: Array, labels: Array, counts: Array, rows: Array | None) -> Any:
        def scores(params: Any, statistics: Any) -> tuple[Array, Any]:
            return gnn.apply(config, params, table, x, statistics, train=True, rows=rows)

        after, _, figures, scored = descend_rows((params, state), optimizer.init(params), optimizer, scores, labels, counts)
        return after, figures["loss"], scored

    wanted = step(single, jnp.asarray(x), jnp.asarray(labels), jnp.asarray(counts), None)
    given = [several.permute(value) for value in (x, labels, counts)]
    after, loss, scored = step(several, *given, several.rows)
    close((after, loss, several.unpermute(scored)), wanted, 1e-4)
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(after))


@pytest.mark.parametrize("family", CONFIGS)
def test_one_call_runs_a_model(family: str):
    config = CONFIGS[family]
    x = features()
    params, state = gnn.init(config, jax.random.key(0))
    several = table_of("ring", "csr", mesh=make_mesh({"nodes": 2}), order="rcm", self_loops=family == "gat")
    single = NeighborTable.from_edges(graph(), 37, layout="csr", self_loops=family == "gat")
    scores, _ = run(config, params, several, x, state)
    wanted, _ = gnn.apply(config, params, single, jnp.asarray(x), state)
    close(scores, wanted)


@st.composite
def edge_lists(draw: st.DrawFn) -> tuple[int, Int[np.ndarray, "2 E"]]:
    nodes = draw(st.integers(1, 9))
    ids = st.integers(0, nodes - 1)
    return nodes, np.array(draw(st.lists(st.tuples(ids, ids), max_size=40)), np.int64).reshape(-1, 2).T


@settings(max_examples=5)
@given(edge_lists(), st.sampled_from(FORMS), st.sampled_from(ORDERS), st.integers(1, 3))
def test_any_graph_on_any_number_of_devices(listed: Any, form: tuple[str, str], order: str, devices: int):
    nodes, edges = listed
    table = table_of(*form, edges, num_nodes=nodes, mesh=make_mesh({"nodes": devices}), order=order)
    x = features(nodes, 2)
    dense = np.zeros((nodes, nodes))
    np.add.at(dense, (edges[1], edges[0]), 1)
    permuted = table.permute(x)
    total, largest = jax.jit(lambda table, x: (table.aggregate(x), table.aggregate(x, reduce="max")))(table, permuted)
    close(table.unpermute(total), dense @ x)
    close(table.unpermute(largest), np.stack([x[row > 0].max(0) if row.any() else np.zeros(2) for row in dense]))
    close(table.unpermute(permuted), x)


def test_padding_leaves_no_trace():
    table = table_of("ring", "csr")
    x = table.permute(features())
    spoilt = jnp.where(table.rows[:, None], x, jnp.nan)
    assert (~table.rows).sum() > 0
    for options in ({}, {"reduce": "max"}, {"normalisation": "symmetric"}):
        close(table.unpermute(table.aggregate(spoilt, **options)), table.unpermute(table.aggregate(x, **options)), 0)


def test_bfloat16_stays_within_its_precision():
    table = table_of("ring", "csr")
    x = features()
    single = aggregate(NeighborTable.from_edges(graph(), 37), x, "mean")
    found = table.unpermute(table.aggregate(table.permute(x.astype(jnp.bfloat16)), reduce="mean"))
    assert found.dtype == jnp.bfloat16
    close(found, single, 2**-6)


def test_blocks_hold_about_as_many_nodes_and_edges():
    np.testing.assert_array_equal(cut(np.full(12, 7), 4), [0, 3, 6, 9, 12])
    np.testing.assert_array_equal(cut(np.zeros(8, int), 4), [0, 2, 4, 6, 8])
    skewed = np.array([100] * 10 + [0] * 90)
    starts = cut(skewed, 4)
    assert np.diff(starts).max() <= 50
    assert max(skewed[a:b].sum() for a, b in pairwise(starts)) <= 500
    np.testing.assert_array_equal(cut(np.zeros(0, int), 3), [0, 0, 0, 0])


def test_blocks_without_edges_between_them_do_not_meet():
    path = np.stack([np.arange(31), np.arange(1, 32)])
    table = table_of("ring", "csr", np.concatenate([path, path[::-1]], 1), num_nodes=32, mesh=make_mesh({"nodes": 8}))
    assert table.shards.plan.hops == (0, 1, 7)
    text = jax.jit(table.aggregate).lower(table.permute(features(32))).as_text()
    assert text.count("collective_permute") == 2
    assert "3 of 8 hops of a ring" in str(table)
    assert "32 nodes and 62 edges on 8 devices (axis 'nodes')" in str(table)


def test_blocks_are_those_of_metis():
    """Three cliques, numbered at random, have a device each."""
    pytest.importorskip("pymetis")
    place = np.random.default_rng(0).permutation(24)
    cliques = np.array([(c * 8 + a, c * 8 + b) for c in range(3) for a in range(8) for b in range(8) if a != b])
    edges = place[cliques.T]
    table = table_of("ring", "csr", edges, num_nodes=24, order="metis")
    assert table.shards.plan.hops == (0,)  # no device needs features of another
    x = features(24)
    wanted = aggregate(NeighborTable.from_edges(edges, 24), x)
    close(table.unpermute(table.aggregate(table.permute(x))), wanted)


def test_features_are_gathered_only_where_asked_for():
    for exchange, permutes, gathers in (("ring", 2, 0), ("all_gather", 0, 1)):
        table = table_of(exchange, "csr")
        text = jax.jit(table.aggregate).lower(table.permute(features())).as_text()
        assert (text.count("collective_permute"), text.count('all_gather"')) == (permutes, gathers)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exchange": "bus"}, "expected the exchange ring or all_gather, found 'bus'"),
        ({"layout": "padded"}, "expected the layout auto or bucketed or csr, found 'padded'"),
        ({"order": "random"}, "expected the order given or rcm or metis, found 'random'"),
        ({"limit": 3}, "expected limit to be a power of two of at least 2, found 3"),
        ({"axis": "tensor"}, r"expected one of the mesh's axes \('nodes',\), found 'tensor'"),
        ({"weights": [1.0]}, "expected a weight for each of 191 edges"),
        ({"num_nodes": 30}, "expected source ids in 0..29"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str):
    given: dict[str, Any] = {"num_nodes": 37, **options}
    with pytest.raises(ValueError, match=message):
        PartitionedTable.build(graph(), MESH, **given)


def test_a_block_is_usable_within_a_shard_map_of_ones_own():
    table = table_of("ring", "csr")
    x = features()

    def inside(shards: Shard, x: Array) -> Array:
        scale = jax.lax.pmax(jnp.abs(x).max(), "nodes")
        return shards.local().aggregate(x / scale)

    mapped = jax.shard_map(inside, mesh=MESH, in_specs=table.spec, out_specs=table.spec, check_vma=False)
    wanted = aggregate(NeighborTable.from_edges(graph(), 37), x / np.abs(x).max())
    close(table.unpermute(jax.jit(mapped)(table.shards, table.permute(x))), wanted)


def test_wrong_arrays_are_refused():
    table = table_of("ring", "csr")
    x = table.permute(features())
    with pytest.raises(ValueError, match="expected values of 37 nodes, found 36: the table belongs to another graph"):
        table.permute(features(36))
    with pytest.raises(ValueError, match=rf"expected the {table.num_nodes} rows of `permute`, found 37"):
        table.aggregate(jnp.asarray(features()))
    with pytest.raises(ValueError, match=rf"expected {table.num_nodes} rows, found 37"):
        table.unpermute(jnp.asarray(features()))
    with pytest.raises(ValueError, match=r"expected features in float32 or bfloat16, found float16"):
        table.aggregate(x.astype(jnp.float16))
    with pytest.raises(ValueError, match="expected features in float32 or bfloat16, found float16"):
        table.attend(jnp.ones((len(x), 2, 3), jnp.float16), jnp.ones((len(x), 2)), jnp.ones((len(x), 2)))
    with pytest.raises(ValueError, match="found 'row' with reduce='max'"):
        table.aggregate(x, reduce="max", normalisation="row")
    with pytest.raises(ValueError, match="expected to reduce by one of sum, mean, max, min, found 'prod'"):
        table.aggregate(x, reduce="prod")
    params, _ = gnn.init(CONFIGS["gcn"], jax.random.key(0))
    spoilt = features()
    spoilt[4, 2] = np.nan
    with pytest.raises(ValueError, match=r"expected features without NaN, found one at \[4, 2\]"):
        run(CONFIGS["gcn"], params, table, spoilt)
