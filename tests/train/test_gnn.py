"""Training: it learns, goes on exactly where it was interrupted, and compiles once whatever is sampled."""

from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tilewright.compiled.ledger import no_compile_guard
from tilewright.graph.batch import PADDING
from tilewright.graph.data import GraphData, NodeData, SparseRows, karate_club, label_kind, offsets, undirected
from tilewright.graph.loader import Neighborhoods
from tilewright.graph.sample import ALL
from tilewright.models import gnn, gnn_families
from tilewright.models.gnn import FAMILIES, GATConfig, GCNConfig, GINConfig, GraphSAGEConfig
from tilewright.parallel.mesh import make_mesh
from tilewright.train.checkpoint import saved_steps
from tilewright.train.gnn import (
    GNNOptions,
    accuracy,
    best_run,
    content_fingerprint,
    is_counted,
    make_optimizer,
    mean_loss,
    metric_at_best_validation,
    score_of_tally,
    tally,
)
from tilewright.train.graphs import graphs_task
from tilewright.train.loop import TrainingRun, TrainResult, train
from tilewright.train.nodes import NodeBatches, full_graph_task, sampled_task, whole_graph
from train.support import silent

OPTIONS = GNNOptions(epochs=60, save_every=20, batch_size=4, iterations=3)


def rings_and_stars() -> GraphData:
    """Sixteen graphs: rings are of class 0, stars of class 1; two of each are held out in both folds."""
    edges = []
    sizes = []
    for n in range(16):
        size = 4 + n // 4
        ring = [(i, (i + 1) % size) for i in range(size)]
        edges.append(undirected(np.array(ring if n % 2 == 0 else [(0, i) for i in range(1, size)])))
        sizes.append(size)
    ids = np.arange(16, dtype=np.int32)
    labels = (np.arange(16) % 2).astype(np.int32)
    ends = offsets(sizes), offsets([each.shape[1] for each in edges])
    features = np.ones((sum(sizes), 1), np.float32)
    folds = tuple((np.setdiff1d(ids, test), test) for test in (ids[:4], ids[4:7]))
    return GraphData("made", *ends, np.concatenate(edges, 1), features, labels, folds)


def task(kind: str, options: GNNOptions = OPTIONS) -> Any:
    """A tiny task of each kind, of two runs."""
    if kind == "whole":
        return full_graph_task(GCNConfig(34, 2), karate_club(), options, runs=2)
    if kind == "sampled":
        data = karate_club()
        some = replace(data, train=np.array([0, 33, 1, 2, 32, 31], np.int32), val=data.test[5:9], test=data.test[9:14])
        return sampled_task(GraphSAGEConfig(34, 2), some, options, (3, 2), runs=2)
    return graphs_task(GINConfig(1, 2, hidden=4, layers=2), rings_and_stars(), options, range(2))


def same(a: TrainResult, b: TrainResult) -> None:
    same_leaves((a.params, a.curve), (b.params, b.curve))


def same_leaves(a: Any, b: Any) -> None:
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(("family", "least"), [("gcn", 0.9), ("gat", 0.9)])
def test_the_karate_club_is_told_apart(family: str, least: float):
    config = FAMILIES[family](34, 2, hidden=8)
    result = train(full_graph_task(config, karate_club(), replace(OPTIONS, epochs=100), runs=2), silent())
    assert result.curve["loss"].shape == (100, 2)
    assert result.last("test").min() >= least
    assert result.curve["loss"][-1].max() < 0.3 < result.curve["loss"][0].min()
    assert np.isnan(result.curve["val"]).all()


def test_graphs_are_told_apart():
    options = replace(OPTIONS, epochs=20, iterations=8, batch_size=8, weight_decay=0.0)
    result = train(
        graphs_task(GINConfig(1, 2, hidden=8, layers=2, dropout=0.0), rings_and_stars(), options, range(2)), silent()
    )
    assert result.last("test").min() == 1.0


@pytest.mark.parametrize("kind", ["whole", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("sampled", "graphs"))])
def test_an_interrupted_run_ends_as_if_it_had_not_been(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also in the middle of an epoch: those of the sampled nodes have two steps, those of the graphs three."""
    epochs, stop = {"whole": (9, 8), "sampled": (4, 5), "graphs": (4, 8)}[kind]
    options = replace(OPTIONS, epochs=epochs, save_every=3 if kind == "whole" else 2)
    wanted = train(task(kind, options), silent())
    advance = TrainingRun.advance

    def interrupted(self: TrainingRun, batch: Any) -> None:
        if self.step == stop:
            raise KeyboardInterrupt
        advance(self, batch)

    with monkeypatch.context() as patched:
        patched.setattr(TrainingRun, "advance", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(task(kind, options), silent(), tmp_path)
    assert saved_steps(tmp_path)
    same(train(task(kind, options), silent(), tmp_path), wanted)
    same(train(task(kind, options), silent(), tmp_path), wanted)  # and once more where nothing is left to do


@pytest.mark.parametrize("kind", ["whole", "sampled", "graphs"])
def test_batches_go_on_from_any_step(kind: str):
    made = task(kind, replace(OPTIONS, epochs=4))
    for first in (1, 3, 5):
        wanted = next(islice(made.batches(0), first, None))
        same_leaves(next(made.batches(first)), wanted)


@pytest.mark.parametrize("family", ["gcn", "gat", "sage"])
def test_self_loops_count_alike_in_samples(family: str):
    """A sample that leaves nothing out has the whole graph's scores, also where nodes are their own neighbours, some twice.

    In GCN and GAT they count once, in GraphSAGE as often as they are there, as in PyG.
    """
    edges = np.array([[0, 1, 1, 2, 0, 2, 3, 2], [1, 0, 2, 1, 0, 2, 3, 2]], np.int32)
    ids = np.arange(4, dtype=np.int32)
    features = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    data = NodeData("loops", edges, features, ids % 2, ids, ids[:0], ids[:0])
    config = FAMILIES[family](3, 2, layers=1)
    params, state = gnn.init(config, jax.random.key(0))
    graph = whole_graph(config, data)
    sample = Neighborhoods(data, (ALL,), 4, config.self_loops).sampler.sample(ids, 0)
    wanted = graph.table.unpermute(gnn.apply(config, params, graph.table, graph.x, state)[0])
    found, _ = gnn.apply(config, params, sample.layers, jnp.asarray(features[sample.nodes]), state, rows=sample.rows)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def edge_data(nodes: int = 24) -> NodeData:
    """A ring with shortcuts; a node's label is the sign of its incoming edges' features, which the nodes do not know."""
    rng = np.random.default_rng(0)
    ring = np.arange(nodes)
    edges = np.stack([np.tile(ring, 3), np.concatenate([np.roll(ring, 1), np.roll(ring, 5), ring])])
    labels = rng.integers(0, 2, nodes).astype(np.int32)
    edge_attr = np.stack([2.0 * labels[edges[1]] - 1, rng.normal(size=edges.shape[1])], 1).astype(np.float32)
    ids = np.arange(nodes, dtype=np.int32)
    x = np.ones((nodes, 3), np.float32)
    return NodeData("edges", edges.astype(np.int32), x, labels, ids[::2], ids[:0], ids[1::2], edge_attr=edge_attr)


EDGE_FAMILIES = {
    "gatv2": gnn_families.GATv2Config(3, 2, hidden=4, heads=2, edge_features=2),
    "transformer": gnn_families.GraphTransformerConfig(3, 2, hidden=4, heads=2, edge_features=2),
    "gine": gnn_families.GINEConfig(3, 2, hidden=8, layers=2, edge_features=2),
    "pna": gnn_families.PNAConfig(3, 2, hidden=8, edge_features=2, mean_log_degree=1.4),
}


@pytest.mark.parametrize("family", EDGE_FAMILIES)
def test_samples_of_everything_have_the_whole_graphs_scores(family: str):
    """With features of edges, self-loops among the edges, and nodes that a batch does not fill."""
    data = edge_data()
    config = EDGE_FAMILIES[family]
    params, state = gnn.init(config, jax.random.key(0))
    graph = whole_graph(config, data)
    wanted = jax.jit(partial(gnn.apply, config))(params, graph.table, graph.x, state, edge_attr=graph.edge_attr)[0]
    batches = NodeBatches(Neighborhoods(data, (ALL, ALL), 5, config.self_loops), np.zeros(1, int))
    batch = jax.tree.map(lambda leaf: leaf[0], batches.batch(np.array([[7, 0, 22]]), (0,)))
    found = jax.jit(partial(gnn.apply, config))(params, batch.layers, batch.x, state, edge_attr=batch.edge_attr)[0]
    np.testing.assert_allclose(found[:3], graph.table.unpermute(wanted)[np.array([7, 0, 22])], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sampled", [False, True])
def test_features_of_edges_are_learned(sampled: bool):
    options = replace(OPTIONS, epochs=80, learning_rate=0.1, batch_size=12)
    config = replace(EDGE_FAMILIES["transformer"], dropout=0.0, layers=1)
    made = sampled_task(config, edge_data(), options, (3,)) if sampled else full_graph_task(config, edge_data(), options)
    result = train(made, silent())
    assert result.last("test")[0] > 0.9


def test_graphs_with_features_of_edges_are_classified():
    """The class of a graph is the sign of its edges' features."""
    data = rings_and_stars()
    graph = np.repeat(np.arange(16), np.diff(data.edge_offsets))
    edge_attr = (2.0 * (graph // 2 % 2) - 1)[:, None].astype(np.float32)
    data = replace(data, labels=(np.arange(16) // 2 % 2).astype(np.int32), edge_attr=edge_attr)
    config = replace(EDGE_FAMILIES["pna"], features=1, edge_features=1, dropout=0.0, layers=1)
    result = train(graphs_task(config, data, replace(OPTIONS, epochs=30, learning_rate=0.02, batch_size=8), [0]), silent())
    assert result.last("test")[0] == 1.0


def test_features_of_edges_must_fit_the_model():
    data = edge_data()
    with pytest.raises(ValueError, match="expected 0 features of edges for GCNConfig, found 2 in edges"):
        full_graph_task(GCNConfig(3, 2), data, OPTIONS)
    with pytest.raises(ValueError, match="expected 2 features of edges for GATv2Config, found 0 in edges"):
        sampled_task(EDGE_FAMILIES["gatv2"], replace(data, edge_attr=None), OPTIONS, (2, 2))
    config = replace(EDGE_FAMILIES["gatv2"], edge_features=0)
    graph = whole_graph(config, replace(data, edge_attr=None), mesh=make_mesh({"nodes": 2}))
    params, _ = gnn.init(config, jax.random.key(0))
    with pytest.raises(ValueError, match="neighbours with propagate for GATv2Config, found a PartitionedTable"):
        gnn.apply(config, params, graph.table, graph.x)
    table = whole_graph(config, replace(data, edge_attr=None)).table
    with pytest.raises(ValueError, match="expected 0 features of edges, found 3"):
        gnn.apply(config, params, table, jnp.asarray(data.features), edge_attr=jnp.ones((72, 3)))


def test_weights_of_edges_count_in_gcn():
    """On one device and on several: scores by the formula, with the last of two self-loops."""
    edges = np.array([[0, 1, 1, 2, 0, 0], [1, 0, 2, 1, 0, 0]], np.int32)
    ids = np.arange(3, dtype=np.int32)
    weights = np.array([1, 2, 0.5, 3, 9, 4], np.float32)
    features = np.random.default_rng(0).normal(size=(3, 2)).astype(np.float32)
    data = NodeData("weighted", edges, features, ids % 2, ids, ids[:0], ids[:0], weights)
    config = GCNConfig(2, 2, layers=1)
    params, _ = gnn.init(config, jax.random.key(0))
    matrix = np.array([[4, 2, 0], [1, 1, 3], [0, 0.5, 1]])
    root = np.diag(matrix.sum(1) ** -0.5)
    wanted = root @ matrix @ root @ features @ np.asarray(params.layers[0].weight)
    for mesh in (None, make_mesh({"nodes": 2})):
        graph = whole_graph(config, data, mesh=mesh)
        scores = jax.jit(gnn.apply, static_argnums=0)(config, params, graph.table, graph.x)[0]
        np.testing.assert_allclose(graph.table.unpermute(scores), wanted, atol=1e-5)


def test_the_weights_that_validate_best_are_kept():
    """Not those after the last epoch; of the runs that which validates best."""
    club = karate_club()
    data = replace(club, val=club.test[::2], test=club.test[1::2])
    made = full_graph_task(GCNConfig(34, 2, hidden=4), data, replace(OPTIONS, epochs=40, learning_rate=0.3), runs=3)
    result = train(made, silent())
    val = result.curve["val"]
    assert (val[-1] < val.max(0)).any(), "the last epoch is not the best"
    measured = made.evaluate(result.params, 40)
    np.testing.assert_array_equal(measured["val"], val.max(0))
    np.testing.assert_array_equal(measured["test"], metric_at_best_validation(result, "test"))
    best = int(val.max(0).argmax())
    same_leaves(best_run(result), jax.tree.map(lambda leaf: leaf[best], result.params))


def test_without_validation_the_last_weights_are_kept():
    made = task("whole", replace(OPTIONS, epochs=6))
    run = TrainingRun(made, None)
    for batch in islice(made.batches(0), 6):
        run.advance(batch)
    result = train(made, silent())
    same_leaves(result.params, run.params)
    same_leaves(best_run(result), jax.tree.map(lambda leaf: leaf[0], run.params))


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path):
    options = replace(OPTIONS, epochs=2)
    train(task("whole", options), silent(), tmp_path)
    with pytest.raises(ValueError, match=r"belongs to another run \(learning_rate: checkpoint 0.01, now 0.1\)"):
        train(task("whole", replace(options, learning_rate=0.1)), silent(), tmp_path)


def test_the_fingerprint_tells_data_of_one_size_apart():
    """Each part of the data by itself; of the same content it is the same."""
    club = karate_club()
    graphs = rings_and_stars()
    assert isinstance(club.features, np.ndarray)
    bag = SparseRows(np.arange(35, dtype=np.int32), np.arange(34, dtype=np.int32), np.ones(34, np.float32), 34)
    nodes = [
        club,
        replace(club, edge_index=club.edge_index[:, ::-1]),
        replace(club, features=club.features / 2),
        replace(club, labels=1 - club.labels),
        replace(club, train=club.train + 1),
        replace(club, test=club.test[::-1]),
        replace(club, val=club.test[:1]),
        replace(club, weights=np.ones(156, np.float32)),
        replace(club, features=bag),
        replace(club, features=replace(bag, data=bag.data / 2)),
    ]
    whole = [graphs, replace(graphs, labels=1 - graphs.labels), replace(graphs, folds=graphs.folds[::-1])]
    found = [content_fingerprint(data) for data in (*nodes, *whole)]
    assert len(set(found)) == len(found)
    assert found[0] == content_fingerprint(replace(karate_club(), name="another"))
    for made, data in ((task("whole"), club), (task("graphs"), graphs)):
        assert made.run_fingerprint["content"] == content_fingerprint(data)


def test_a_run_does_not_depend_on_those_beside_it():
    options = replace(OPTIONS, epochs=5)
    together = train(task("whole", options), silent())
    second = full_graph_task(GCNConfig(34, 2), karate_club(), replace(options, seed=1))
    alone = train(second, silent())
    np.testing.assert_allclose(together.curve["loss"][:, 1:], alone.curve["loss"], rtol=1e-5)
    assert not np.allclose(together.curve["loss"][:, 0], together.curve["loss"][:, 1])


@pytest.mark.parametrize("kind", ["whole", "sampled", "graphs"])
def test_a_training_run_is_one_compilation(kind: str):
    made = task(kind, replace(OPTIONS, epochs=7))
    run = TrainingRun(made, None)
    batches = made.batches(0)

    def epoch() -> None:
        for batch in islice(batches, made.evaluate_every):
            run.advance(batch)
        run.evaluate()

    epoch()
    with no_compile_guard("fail", "the epochs after the first"):
        for _ in range(3):
            epoch()
    assert [point["loss"].shape for point in run.curve] == 4 * [(2,)]
    assert all(np.isfinite(point["loss"]).all() for point in run.curve)


def test_weight_decay_is_l2_on_the_papers_matrices():
    options = GNNOptions(weight_decay=0.5)
    for config, decayed in ((GCNConfig(3, 2), 1), (GATConfig(3, 2, heads=2), 6)):
        params: Any = gnn.init(config, jax.random.key(0))[0]
        optimizer = make_optimizer(config, options, 1)
        zero = jax.tree.map(jnp.zeros_like, params)
        with jax.numpy_dtype_promotion("standard"):
            update, _ = optimizer.update(zero, optimizer.init(params), params)
        moved = [bool((leaf != 0).any()) for leaf in jax.tree.leaves(update)]
        assert sum(moved) == decayed


def test_the_rate_is_halved():
    config = GCNConfig(3, 2)
    params: Any = gnn.init(config, jax.random.key(0))[0]
    optimizer = make_optimizer(config, GNNOptions(weight_decay=0.0, halve_every=2), steps_per_epoch=3)
    state = optimizer.init(params)
    ones = jax.tree.map(jnp.ones_like, params)
    sizes = []
    with jax.numpy_dtype_promotion("standard"):
        for _ in range(13):
            update, state = optimizer.update(ones, state, params)
            sizes.append(float(jnp.abs(jax.tree.leaves(update)[0]).mean()))
    np.testing.assert_allclose([sizes[6] / sizes[5], sizes[12] / sizes[5]], [0.5, 0.25], rtol=1e-3)


def test_rows_that_do_not_count_change_nothing():
    scores = jnp.array([[2.0, -1.0], [0.5, 1.0], [jnp.nan, 3.0]])
    labels = jnp.array([0, 0, PADDING])
    counts = jnp.array([True, True, False])
    wanted = np.mean([np.log1p(np.exp(-3.0)), np.log1p(np.exp(0.5))])
    np.testing.assert_allclose(mean_loss(scores, labels, counts), wanted, rtol=1e-6)
    assert float(accuracy(scores, labels, counts)) == 0.5
    gradient = jax.grad(lambda s: mean_loss(s, labels, counts))(scores)
    assert not gradient[2].any()
    assert bool(jnp.isfinite(gradient).all())
    assert np.isnan(float(accuracy(scores, labels, jnp.zeros(3, bool))))


def test_the_best_epochs_are_found():
    val = np.array([[0.1, 0.5], [0.6, 0.4], [0.6, 0.3]])
    test = np.array([[0.2, 0.8], [0.3, 0.6], [0.4, 0.1]])
    result = TrainResult((), {"val": val, "test": test}, 0.0, 0.0)
    assert metric_at_best_validation(result, "test").tolist() == [0.3, 0.8]
    assert result.last("test").tolist() == [0.4, 0.1]


def test_what_cannot_be_trained():
    data = karate_club()
    with pytest.raises(ValueError, match="karate: expected training nodes, found none"):
        full_graph_task(GCNConfig(34, 2), replace(data, train=data.train[:0]), OPTIONS)
    weighted = replace(data, weights=np.ones(156, np.float32))
    with pytest.raises(ValueError, match="expected no edge weights for models other than GCN, found some in karate"):
        full_graph_task(GraphSAGEConfig(34, 2), weighted, OPTIONS)
    with pytest.raises(ValueError, match="expected no edge weights for sampled neighbours, found some in karate"):
        sampled_task(GCNConfig(34, 2), weighted, OPTIONS, (3, 3))
    with pytest.raises(ValueError, match="at least 0 for the symmetric normalisation, found -15 at node 0"):
        full_graph_task(GCNConfig(34, 2), replace(data, weights=-np.ones(156, np.float32)), OPTIONS)
    with pytest.raises(ValueError, match=r"expected a fan-out for each of 2 layers, found 1: \[3\]"):
        sampled_task(GCNConfig(34, 2), data, OPTIONS, (3,))
    with pytest.raises(ValueError, match="made: expected folds from 1 to 2, found 3"):
        graphs_task(GINConfig(1, 2), rings_and_stars(), OPTIONS, [2])
    with pytest.raises(ValueError, match="expected one of gcn, sage, gin to classify graphs, found GATConfig"):
        graphs_task(GATConfig(1, 2), rings_and_stars(), OPTIONS, [0])
    with pytest.raises(ValueError, match="expected epochs above 0, found 0"):
        GNNOptions(epochs=0)
    with pytest.raises(ValueError, match=r"expected weight_decay of at least 0, found -1"):
        GNNOptions(weight_decay=-1.0)


def noisy_groups(labels: np.ndarray, nodes: int = 48) -> NodeData:
    """Rings of nodes with equal labels; the features are the labels plus noise that the mean over a ring removes."""
    rng = np.random.default_rng(0)
    each = labels[np.arange(nodes) % len(labels)]
    after = (np.arange(nodes) + len(labels)) % nodes
    edges = undirected(np.stack([np.arange(nodes), after], 1))
    x = each.reshape(nodes, -1) + 0.3 * rng.normal(size=(nodes, each.reshape(nodes, -1).shape[1]))
    ids = rng.permutation(nodes).astype(np.int32)
    return NodeData("groups", edges, x.astype(np.float32), each, ids[:24], ids[24:36], ids[36:])


TARGETS = {
    "multilabel": np.array([[0, 0, 1], [1, 0, 1], [0, 1, 0], [1, 1, 0]], np.int32),
    "regression": np.array([[-1.0, 2.0], [0.5, 1.0], [2.0, -1.0]], np.float32),
}


@pytest.mark.parametrize("inductive", [False, True])
@pytest.mark.parametrize("kind", TARGETS)
def test_several_labels_and_numbers_are_learned_on_whole_graphs_and_samples(kind: str, inductive: bool):
    """On samples of all neighbours the scores are those of the whole graph."""
    data = noisy_groups(TARGETS[kind])
    config = GraphSAGEConfig(data.num_features, data.num_classes, hidden=16, dropout=0.0)
    options = GNNOptions(epochs=60, batch_size=24, weight_decay=0.0, learning_rate=0.03)
    whole = train(full_graph_task(config, data, options, inductive=inductive), silent())
    sampled = train(sampled_task(config, data, options, (2, 2), inductive=inductive), silent())
    assert whole.last("test")[0] > 0.9
    for part in ("val", "test"):
        np.testing.assert_allclose(sampled.last(part), whole.last(part), atol=0.03)


def test_inductive_training_sees_no_other_nodes():
    """Features of other nodes change the evaluation, and not the weights."""
    data = noisy_groups(TARGETS["regression"])
    config = GraphSAGEConfig(2, 2, hidden=4, dropout=0.0)
    assert isinstance(data.features, np.ndarray)
    spoilt = data.features + np.float32(5) * ~np.isin(np.arange(48), data.train)[:, None]
    for inductive in (True, False):
        clean, other = (
            train(full_graph_task(config, graph, GNNOptions(epochs=3), inductive=inductive), silent()).curve
            for graph in (data, replace(data, features=spoilt))
        )
        assert np.allclose(clean["loss"], other["loss"]) == inductive
        assert not np.allclose(clean["test"], other["test"])


def test_scores_of_labels():
    """Against their definitions; batches add up, and rows without labels do not count."""
    rng = np.random.default_rng(1)
    scores = rng.normal(size=(12, 3)).astype(np.float32)
    counts = np.arange(12) < 9
    for labels in (rng.integers(0, 2, (12, 3)).astype(np.int32), rng.normal(size=(12, 3)).astype(np.float32)):
        labels[~counts] = -1 if labels.dtype == np.int32 else np.nan
        np.testing.assert_array_equal(is_counted(jnp.asarray(labels)), counts)
        s, y = scores[counts], labels[counts]
        if labels.dtype == np.int32:
            hit = ((s > 0) & (y > 0)).sum()
            wanted = hit / (hit + ((s > 0) != (y > 0)).sum() / 2)
            losses = np.log1p(np.exp(-np.where(y > 0, s, -s))).mean()
        else:
            wanted = (1 - ((s - y) ** 2).sum(0) / ((y - y.mean(0)) ** 2).sum(0)).mean()
            losses = ((s - y) ** 2).mean()
        halves = [tally(*(jnp.asarray(each[part]) for each in (scores, labels, counts))) for part in (slice(5), slice(5, 12))]
        assert float(score_of_tally(label_kind(labels), sum(halves))) == pytest.approx(wanted, abs=1e-5)
        assert float(accuracy(*map(jnp.asarray, (scores, labels, counts)))) == pytest.approx(wanted, abs=1e-5)
        assert float(mean_loss(*map(jnp.asarray, (scores, labels, counts)))) == pytest.approx(losses, abs=1e-5)
