"""GraphSAGE, GCN, GIN and GAT against the papers' equations in NumPy, whatever holds the neighbours."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.dense_graph import DenseNeighbours, numpy_scores
from tilewright.graph.data import SparseRows, karate_club
from tilewright.graph.edges import from_edge_index, with_self_loops
from tilewright.graph.features import SparseFeatures
from tilewright.graph.table import NeighborTable
from tilewright.kernels import native, select
from tilewright.kernels.operations import Operations
from tilewright.models import gnn, gnn_families
from tilewright.models.gnn import FAMILIES, BatchNorm, GATConfig, GCNConfig, GINConfig, GraphSAGEConfig, RunningStatistics
from tilewright.models.gnn_checkpoint import load_gnn, save_gnn

NODES = 9
FEATURES = 5
CLASSES = 3


pytestmark = pytest.mark.usefixtures("quick_compiles")


def random_edges(seed: int = 0, nodes: int = NODES, edges: int = 20) -> np.ndarray:
    """A directed graph without self-loops or duplicates; its last node has no edge."""
    rng = np.random.default_rng(seed)
    pairs = rng.integers(0, nodes - 1, (4 * edges, 2))
    pairs = np.unique(pairs[pairs[:, 0] != pairs[:, 1]], axis=0)
    return rng.permutation(pairs)[:edges].T.astype(np.int32)


def edges_for(family: str) -> np.ndarray:
    loops = gnn_families.FAMILIES[family].self_loops == "table"
    return with_self_loops(from_edge_index(random_edges(), NODES)).edge_index if loops else random_edges()


def make(family: str, **sizes: Any) -> tuple[Any, Any, Any]:
    """A model whose every array is random, biases and statistics too."""
    given: dict[str, Any] = {"hidden": 4} | sizes
    config = gnn_families.FAMILIES[family](FEATURES, CLASSES, **given)
    params, state = gnn.init(config, jax.random.key(0))
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda leaf: leaf + jnp.asarray(0.3 * rng.normal(size=leaf.shape), jnp.float32), params)
    state = jax.tree.map(lambda leaf: leaf + jnp.asarray(rng.uniform(0, 0.5, leaf.shape), jnp.float32), state)
    return config, params, state


@partial(jax.jit, static_argnums=0, static_argnames="train")
def run(config: Any, params: Any, graph: Any, x: Any, state: Any = (), **options: Any) -> Any:
    return gnn.apply(config, params, graph, x, state, **options)


def features(rows: int = NODES, seed: int = 2) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=(rows, FEATURES)), jnp.float32)


MODELS = [
    ("gcn", {}),
    ("gcn", {"layers": 3}),
    ("gcn", {"hidden": 8}),
    ("sage", {}),
    ("sage", {"layers": 1}),
    ("sage", {"hidden": 9}),
    ("gat", {"heads": 2}),
    ("gat", {"heads": 3, "output_heads": 2, "layers": 3}),
    ("gin", {"layers": 2}),
    ("gin", {"layers": 1, "learn_epsilon": True, "hidden": 7}),
]


@pytest.mark.parametrize(("family", "sizes"), MODELS)
def test_scores_are_those_of_the_papers_equations(family: str, sizes: dict[str, Any]):
    config, params, state = make(family, **sizes)
    edges = edges_for(family)
    x = features()
    dense = DenseNeighbours.from_edges(edges, NODES)
    wanted = numpy_scores(family, params, np.asarray(dense.matrix), np.asarray(x), state)
    found, after = run(config, params, dense, x, state)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    assert jax.tree.structure(after) == jax.tree.structure(state)


@pytest.mark.parametrize(("family", "layout"), [("gcn", "bucketed"), ("sage", "csr"), ("gat", "padded"), ("gin", "csr")])
def test_scores_and_gradients_are_the_same_on_a_table(family: str, layout: Any):
    config, params, state = make(family, layers=2)
    edges = edges_for(family)
    x = features()
    dense = DenseNeighbours.from_edges(edges, NODES)
    table = NeighborTable.from_edges(edges, NODES, layout=layout)

    @partial(jax.jit, static_argnums=3)
    def scores_and_gradients(params: Any, x: jax.Array, graph: Any, table: bool) -> Any:
        def loss(params: Any, x: jax.Array) -> Any:
            scores = gnn.apply(config, params, graph, graph.permute(x) if table else x, state, train=True)[0]
            return (scores**2).sum(), graph.unpermute(scores) if table else scores

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(params, x)

    found = scores_and_gradients(params, x, table, True)
    wanted = scores_and_gradients(params, x, dense, False)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_are_scored_by_their_readout(family: str):
    config, params, state = make(family, layers=2)
    edges = edges_for(family)
    x = features()
    dense = DenseNeighbours.from_edges(edges, NODES)
    members = np.array([[0, 1, 2, 3, 4, 5, 6, 7, 8], [0, 0, 0, 0, 1, 1, 1, 1, 1]])
    pool = DenseNeighbours.from_edges(members, 3, NODES)  # the third graph has no node
    wanted = numpy_scores(family, params, np.asarray(dense.matrix), np.asarray(x), state, np.asarray(pool.matrix, np.float64))
    found, _ = run(config, params, dense, x, state, pool=pool)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_dropout_is_random_only_in_training_and_a_function_of_its_key(family: str):
    config, params, state = make(family, dropout=0.5)
    graph = DenseNeighbours.from_edges(edges_for(family), NODES)
    x = features()

    def scores(train: bool, key: int | None) -> np.ndarray:
        made = None if key is None else jax.random.key(key)
        return np.asarray(run(config, params, graph, x, state, train=train, key=made)[0])

    np.testing.assert_array_equal(scores(True, 3), scores(True, 3))
    assert not np.array_equal(scores(True, 3), scores(True, 4))
    np.testing.assert_array_equal(scores(False, 3), scores(False, None))


@pytest.mark.parametrize("family", FAMILIES)
def test_prepared_parameters_score_the_same(family: str):
    config, params, state = make(family)
    table = NeighborTable.from_edges(edges_for(family), NODES, layout="padded")
    x = jnp.asarray(features())
    ops = select.operations()
    ready = ops.prepare(gnn.declare(config), params)

    @partial(jax.jit, static_argnums=0)
    def scores(ops: Operations, params: Any, x: jax.Array) -> jax.Array:
        return gnn.apply(config, params, table, x, state, ops=ops)[0]

    np.testing.assert_allclose(scores(ops, ready, x), scores(select.PLAIN, params, x), rtol=1e-5, atol=1e-5)
    if native.kernels().isa:
        assert "tilewright_linear" in scores.lower(ops, ready, x).as_text()


def test_gat_drops_attention_weights_in_training_each_layer_its_own(monkeypatch: pytest.MonkeyPatch):
    config, params, _ = make("gat", dropout=0.5)
    graph = DenseNeighbours.from_edges(edges_for("gat"), NODES)
    given = []
    attend = DenseNeighbours.attend
    monkeypatch.setattr(DenseNeighbours, "attend", lambda *args: given.append(args[5:]) or attend(*args))
    for train in (True, False):
        gnn.apply(config, params, graph, jnp.asarray(features()), train=train, key=jax.random.key(0))
    assert [rate for rate, _ in given[:2]] == [0.5, 0.5]
    first, second = (jax.random.key_data(key) for _, key in given[:2])
    assert not jnp.array_equal(first, second)
    assert [key for _, key in given[2:]] == [None, None]


def test_dropout_keeps_the_mean():
    x = jnp.ones((400, 100))
    dropped = np.asarray(gnn.dropout(x, 0.6, jax.random.key(0)))
    assert set(np.unique(dropped)) == {np.float32(0), np.float32(2.5)}
    assert abs(dropped.mean() - 1) < 0.03


def test_batch_norm_sees_no_padding():
    rng = np.random.default_rng(0)
    x = rng.normal(2, 3, (12, 4)).astype(np.float32)
    rows = np.arange(12) < 7
    x[7:] = np.nan
    norm = BatchNorm(jnp.full(4, 1.5), jnp.full(4, 0.5))
    running = RunningStatistics(jnp.full(4, 1.0), jnp.full(4, 2.0))
    out, after = gnn.batch_norm(jnp.asarray(x), norm, running, jnp.asarray(rows), train=True)
    real = x[:7].astype(np.float64)
    wanted = (real - real.mean(0)) / np.sqrt(real.var(0) + 1e-5) * 1.5 + 0.5
    np.testing.assert_allclose(out[:7], wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(after.mean, 0.9 + 0.1 * real.mean(0), rtol=1e-5)
    np.testing.assert_allclose(after.variance, 1.8 + 0.1 * real.var(0, ddof=1), rtol=1e-5)
    later, same = gnn.batch_norm(jnp.asarray(x), norm, running, jnp.asarray(rows), train=False)
    np.testing.assert_allclose(later[:7], (real - 1) / np.sqrt(2 + 1e-5) * 1.5 + 0.5, rtol=1e-4, atol=1e-5)
    assert same is running


def test_gin_training_is_the_same_with_padding_behind():
    config, params, state = make("gin", layers=2)
    edges = random_edges()
    x = features()
    small = DenseNeighbours.from_edges(edges, NODES)
    large = DenseNeighbours.from_edges(edges, NODES + 5)
    wanted, after = run(config, params, small, x, state, train=True)
    padded = jnp.concatenate([x, 100 * jnp.ones((5, FEATURES))])
    rows = jnp.arange(NODES + 5) < NODES
    found, other = run(config, params, large, padded, state, train=True, rows=rows)
    np.testing.assert_allclose(found[:NODES], wanted, rtol=1e-4, atol=1e-5)
    for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "layout"),
    [("sage", "csr"), ("gin", "bucketed"), ("gatv2", "csr"), ("transformer", "csr"), ("pna", "csr")],
)
def test_sparse_features_give_the_scores_of_dense_ones(family: str, layout: str):
    config, params, state = make(family, layers=2)
    x = np.where(np.random.default_rng(5).random((NODES, FEATURES)) < 0.4, np.asarray(features()), 0).astype(np.float32)
    x[3] = 0
    row, column = np.nonzero(x)
    indptr = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=NODES))]).astype(np.int32)
    sparse = SparseFeatures.from_rows(SparseRows(indptr, column.astype(np.int32), x[row, column], FEATURES), layout)
    makes_graph = DenseNeighbours if family in FAMILIES else NeighborTable
    graph = makes_graph.from_edges(edges_for(family), NODES)

    @jax.jit
    def loss(params: Any, x: Any) -> jax.Array:
        return (gnn.apply(config, params, graph, x, state)[0] ** 2).sum()

    found, gradient = jax.value_and_grad(loss)(params, sparse)
    wanted, wanted_gradient = jax.value_and_grad(loss)(params, jnp.asarray(x))
    np.testing.assert_allclose(found, wanted, rtol=1e-4)
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(wanted_gradient), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)
    kept = np.asarray(sparse.dropped(0.5, jax.random.key(0)).values)
    assert ((kept == 0) | np.isclose(kept, 2 * x[row, column])).all()
    assert (kept == 0).any()
    assert (kept != 0).any()


def test_messages_of_edges_and_nodes_need_dense_features():
    config, params, state = make("gine", edge_features=2)
    edges = random_edges()
    none = np.zeros(0, np.int32)
    sparse = SparseFeatures.from_rows(SparseRows(np.zeros(NODES + 1, np.int32), none, none.astype(np.float32), FEATURES))
    edge_attr = jnp.zeros((edges.shape[1], 2))
    with pytest.raises(ValueError, match="expected dense features of nodes, which GINE's messages add"):
        gnn.apply(config, params, NeighborTable.from_edges(edges, NODES), sparse, state, edge_attr=edge_attr)


def test_bfloat16_models_score_in_float32():
    config = GINConfig(FEATURES, CLASSES, hidden=4, layers=2)
    params, state = gnn.init(config, jax.random.key(0), "bfloat16")
    table = NeighborTable.from_edges(random_edges(), NODES, layout="padded")
    scores, _ = run(config, params, table, features().astype(jnp.bfloat16), state)
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    wanted, _ = run(config, wide, table, features(), state)
    assert scores.dtype == jnp.float32
    np.testing.assert_allclose(scores, wanted, rtol=0.1, atol=0.1)


@pytest.mark.parametrize(
    ("make_config", "problem"),
    [
        (lambda: GCNConfig(0, 2), "expected features of at least 1, found 0"),
        (lambda: GraphSAGEConfig(3, 2, layers=0), "expected layers of at least 1, found 0"),
        (lambda: GATConfig(3, 2, heads=0), "expected heads of at least 1, found 0"),
        (lambda: GINConfig(3, 2, dropout=1.0), "expected a dropout from 0 to below 1, found 1.0"),
    ],
)
def test_sizes_that_make_no_sense(make_config: Any, problem: str):
    with pytest.raises(ValueError, match=problem):
        make_config()


def test_what_does_not_fit_is_refused():
    config, params, state = make("gin", layers=2)
    graph = DenseNeighbours.from_edges(random_edges(), NODES)
    x = features()
    with pytest.raises(ValueError, match="expected 5 features, found 4"):
        gnn.apply(config, params, graph, x[:, :4], state)
    with pytest.raises(ValueError, match="layer 0: the neighbours are those of 9 rows, found 8 rows"):
        gnn.apply(config, params, graph, x[:8], state)
    with pytest.raises(ValueError, match="expected neighbours for 2 layers, found 3"):
        gnn.apply(config, params, [graph] * 3, x, state)
    with pytest.raises(ValueError, match="expected the statistics of 2 layers as the state, found 0"):
        gnn.apply(config, params, graph, x)
    nothing = np.zeros(0, np.int32)
    sparse = SparseFeatures.from_rows(SparseRows(np.zeros(NODES + 1, np.int32), nothing, nothing.astype(np.float32), FEATURES))
    with pytest.raises(ValueError, match="expected dense features"):
        gnn.apply(config, params, graph, sparse, state, pool=graph)
    if native.kernels().isa:
        with pytest.raises(ValueError, match="expected unprepared matrices for sparse features"):
            gnn.apply(config, params, graph, sparse, state, ops=select.operations())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_scores_the_same(family: str, tmp_path: Path):
    config, params, state = make(family)
    save_gnn(tmp_path, config, params, state)
    again = load_gnn(tmp_path)
    assert again[0] == config
    for a, b in zip(jax.tree.leaves(again[1:]), jax.tree.leaves((params, state)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_configuration_that_is_none(tmp_path: Path):
    config, params, state = make("gcn")
    save_gnn(tmp_path, config, params, state)
    path = tmp_path / "config.json"
    written = json.loads(path.read_text())
    path.write_text(json.dumps(written | {"hidden": "4", "dropout": True}))
    with pytest.raises(ValueError, match=r"hidden must be of type int, found '4'; dropout must be of type float, found True"):
        load_gnn(tmp_path)
    path.write_text(json.dumps(written | {"model_type": "gcnii"}))
    with pytest.raises(
        ValueError, match="model_type must be one of gcn, sage, gat, gin, gatv2, transformer, gine, pna, found 'gcnii'"
    ):
        load_gnn(tmp_path)
    path.write_text(json.dumps(written | {"layers": 3}))
    with pytest.raises(ValueError, match="do not fit the configuration"):
        load_gnn(tmp_path)


def test_a_deep_model_on_a_real_graph_has_finite_gradients():
    data = karate_club()
    config = replace(GCNConfig(34, 2), layers=5)
    params, state = gnn.init(config, jax.random.key(0))
    table = NeighborTable.from_edges(data.edge_index, 34, layout="csr")

    @jax.jit
    def loss(params: Any) -> jax.Array:
        return (gnn.apply(config, params, table, jnp.eye(34), state, train=True, key=jax.random.key(1))[0] ** 2).sum()

    leaves = jax.tree.leaves(jax.grad(loss)(params))
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in leaves)
    assert all(bool((leaf != 0).any()) for leaf in leaves)
