"""Training of node classification on one graph: on the whole graph, or on sampled neighbourhoods of fixed shapes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, repeat
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float, Int

from tilewright.graph.data import NodeData, SparseRows, label_kind, no_labels
from tilewright.graph.edges import find_negative_degree, from_edge_index, negative_degree, with_self_loops
from tilewright.graph.features import SparseFeatures
from tilewright.graph.loader import NeighborBatch, Neighborhoods, prefetched
from tilewright.graph.partition import PartitionedTable
from tilewright.graph.table import make_table
from tilewright.models import gnn
from tilewright.models.gnn import Config
from tilewright.train.gnn import (
    PARTS,
    GNNOptions,
    Weights,
    accuracy,
    check_edge_features,
    descend_rows,
    gnn_run_fingerprint,
    is_counted,
    make_optimizer,
    over_runs,
    runs_task,
    score_of_tally,
    start_runs,
    tally,
)
from tilewright.train.log import Metrics
from tilewright.train.loop import Task

MOST_NUMBERS = 2**30
"""Largest number of features in a sampled batch of all runs: 4 GB in float32."""
SPARSE = 0.1
"""Largest share of non-zero features that are stored sparsely on a CPU."""


def data_sizes(data: NodeData) -> dict[str, int]:
    """Returns the sizes of the data, for a run's fingerprint."""
    return {"nodes": data.num_nodes, "edges": data.edge_index.shape[1], "trained_nodes": len(data.train)}


def check_trainable(config: Config, data: NodeData) -> None:
    if not len(data.train):
        raise ValueError(f"{data.name}: expected training nodes, found none")
    check_edge_features(config, data)
    if data.weights is None:
        return
    if not config.takes_weights:
        raise ValueError(
            f"expected no edge weights for models other than GCN, found some in {data.name}; leave out edge_weight"
        )
    if (found := find_negative_degree(from_edge_index(data.edge_index, data.num_nodes, weights=data.weights))) is not None:
        raise negative_degree(*found)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WholeGraph:
    """Graph on the device, in table order.

    Attributes:
        table: neighbour table.
        x: features `[N, F]`.
        labels: labels `[N]` or `[N, T]`, see `data.NodeData`.
        parts: masks of training, validation and test nodes, bool `[3, N]`.
        rows: mask of the rows that are nodes; None if all rows are.
        edge_attr: features of the table's edges; None without.
    """

    table: Any
    x: Any
    labels: Any
    parts: Any
    rows: Any = None
    edge_attr: Any = None


def whole_graph(config: Config, data: NodeData, layout: str = "auto", mesh: Mesh | None = None) -> WholeGraph:
    """Moves a graph to the device or partitions it over a mesh, with the self-loops that the model expects."""
    edges = data.edge_index
    loops = config.self_loops == "table"
    parts = np.zeros((data.num_nodes, 3), bool)
    for n, part in enumerate(PARTS):
        parts[getattr(data, part), n] = True
    if mesh is not None:
        sharded = PartitionedTable.build(edges, mesh, data.num_nodes, data.weights, layout=layout, self_loops=loops)
        x = sharded.permute(data.rows(np.arange(data.num_nodes)))
        labels = sharded.permute(data.labels, fill=-1)
        return WholeGraph(sharded, x, labels, sharded.permute(parts).T, sharded.rows)
    given = from_edge_index(edges, data.num_nodes, weights=data.weights, features=data.edge_attr)
    given = with_self_loops(given) if loops else given
    table = make_table(given, layout)
    order = np.arange(data.num_nodes) if table.order is None else np.asarray(table.order)
    x = device_features(data, order)
    edge_attr = None if given.features is None else jnp.asarray(given.features)
    return WholeGraph(table, x, jnp.asarray(data.labels[order]), jnp.asarray(parts[order].T), edge_attr=edge_attr)


def device_features(data: NodeData, order: Int[np.ndarray, " N"]) -> Any:
    """Moves the features to the device in this order; on a CPU, sparse features stay sparse (see `SPARSE`)."""
    x = data.features
    if isinstance(x, SparseRows) and jax.default_backend() == "cpu" and len(x.data) < SPARSE * data.num_nodes * x.columns:
        return SparseFeatures.from_rows(x.take(order))
    return jnp.asarray(data.rows(order))


def full_graph_task(
    config: Config,
    data: NodeData,
    options: GNNOptions,
    runs: int = 1,
    layout: str = "auto",
    mesh: Mesh | None = None,
    inductive: bool = False,
) -> Task:
    """Builds the task of training on the whole graph; an epoch is one step.

    With `inductive`, messages pass between training nodes alone in training, and along all edges in evaluations.
    """
    check_trainable(config, data)
    seeds = options.seed + np.arange(runs)
    optimizer = make_optimizer(config, options, 1)
    graph = whole_graph(config, data, layout, mesh)
    trained = whole_graph(config, within_training(data), layout, mesh) if inductive else graph
    replicated = None if mesh is None else NamedSharding(mesh, PartitionSpec())

    def graph_scores(params: Any, statistics: Any, graph: WholeGraph, **options: Any) -> tuple[Array, Any]:
        edge_attr = graph.edge_attr
        return gnn.apply(config, params, graph.table, graph.x, statistics, edge_attr=edge_attr, rows=graph.rows, **options)

    @partial(jax.jit, donate_argnums=(0, 1), out_shardings=replicated)
    def step(weights: Weights, opt_state: Any, graph: WholeGraph, keys: Array) -> tuple[Weights, Any, Metrics]:
        def one_run(weights: Weights, opt_state: Any, key: Array) -> tuple[Weights, Any, Metrics]:
            def scores(params: Any, statistics: Any) -> tuple[Array, Any]:
                return graph_scores(params, statistics, graph, train=True, key=key)

            return descend_rows(weights, opt_state, optimizer, scores, graph.labels, graph.parts[0])[:3]

        return over_runs(one_run)(weights, opt_state, keys)

    @jax.jit
    def measure(weights: Weights, graph: WholeGraph) -> Metrics:
        def one_run(params: Any, statistics: Any) -> Metrics:
            scores, _ = graph_scores(params, statistics, graph)
            return {part: accuracy(scores, graph.labels, graph.parts[n]) for n, part in enumerate(PARTS)}

        return over_runs(one_run)(*weights)

    return runs_task(
        options,
        gnn_run_fingerprint(data, config, options, **data_sizes(data), runs=runs, **learned(inductive)),
        starting=partial(start_runs, config, optimizer, seeds, replicated),
        seeds=seeds,
        step=step,
        batches=lambda _: repeat(trained),
        evaluate=lambda weights, _: measure(weights, graph),
    )


def learned(inductive: bool) -> dict[str, bool]:
    """Returns the part of a run's fingerprint that only inductive runs have."""
    return {"inductive": True} if inductive else {}


def within_training(data: NodeData) -> NodeData:
    """Returns the graph with the edges between training nodes alone, which inductive training sees."""
    trained = np.zeros(data.num_nodes, bool)
    trained[data.train] = True
    return data.with_edges(trained[data.edge_index[0]] & trained[data.edge_index[1]])


@dataclass(frozen=True)
class NodeBatches:
    """Mini-batches of nodes with sampled neighbourhoods, for several runs at once; all arrays have a leading `[runs]`.

    The features stay on the host, which sends the rows of each sample to the device. A thread samples ahead.

    Attributes:
        neighborhoods: sampled neighbourhoods of the graph.
        seeds: seed of each run.
    """

    neighborhoods: Neighborhoods
    seeds: Int[np.ndarray, " runs"]

    @property
    def size(self) -> int:
        """Nodes per batch."""
        return self.neighborhoods.sampler.batch_size

    def batch(self, roots: Int[np.ndarray, "runs R"], draw: tuple[int, ...]) -> NeighborBatch:
        """Samples the neighbourhoods of the roots for all runs; `draw` and the seed determine the random numbers."""
        given = self.neighborhoods.data.labels
        labels = [np.concatenate([given[ids], no_labels(given, self.size - len(ids))]) for ids in roots]
        each = self.neighborhoods.batches(list(roots), [(int(seed), *draw) for seed in self.seeds], labels)
        return jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *each)

    def calls(self, ids: Int[np.ndarray, "runs ids"], draw: tuple[int, ...], first: int = 0) -> Iterator[Any]:
        """Yields calls for the batches that cover the nodes, from batch `first` on."""
        for n in range(first, -(-ids.shape[1] // self.size)):
            yield partial(self.batch, ids[:, n * self.size : (n + 1) * self.size], (*draw, n))

    def covering(self, ids: Int[np.ndarray, "runs ids"], draw: tuple[int, ...]) -> Iterator[NeighborBatch]:
        """Yields batches that cover the nodes."""
        return prefetched(self.calls(ids, draw), 1)

    def trained(self, first: int) -> Iterator[NeighborBatch]:
        """Yields training batches from step `first` on; an epoch covers the training nodes once."""
        train = self.neighborhoods.data.train
        epoch, done = divmod(first, -(-len(train) // self.size))

        def calls() -> Iterator[Any]:
            for n in count(epoch):
                order = [np.random.default_rng((int(seed), n)).permutation(train) for seed in self.seeds]
                yield from self.calls(np.stack(order), (n, 0), done if n == epoch else 0)

        return prefetched(calls(), 1)


def sampled_task(
    config: Config, data: NodeData, options: GNNOptions, fan_outs: Sequence[int], runs: int = 1, inductive: bool = False
) -> Task:
    """Builds the task of training on sampled neighbourhoods; for `inductive`, see `full_graph_task`.

    Evaluations sample with the same fan-outs.
    """
    check_trainable(config, data)
    if len(fan_outs) != config.layers:
        raise ValueError(f"expected a fan-out for each of {config.layers} layers, found {len(fan_outs)}: {list(fan_outs)}")
    seeds = options.seed + np.arange(runs)
    neighborhoods = Neighborhoods(data, fan_outs, options.batch_size, config.self_loops, data.train)
    trained = neighborhoods
    if inductive:
        trained = Neighborhoods(within_training(data), fan_outs, options.batch_size, config.self_loops, data.train)
    sampler = neighborhoods.sampler
    kind = label_kind(data.labels)
    if (numbers := runs * sampler.rows * data.num_features) > MOST_NUMBERS:
        raise ValueError(
            f"expected batches of at most {MOST_NUMBERS:,} features, found {numbers:,}: {runs} x {sampler.rows:,} rows of "
            f"{data.num_features:,}, by fan-outs {list(sampler.fan_outs)} and a batch size of {sampler.batch_size}"
        )
    batches = NodeBatches(neighborhoods, seeds)
    per_epoch = -(-len(data.train) // options.batch_size)
    optimizer = make_optimizer(config, options, per_epoch)

    def batch_scores(weights: Weights, batch: NeighborBatch, **options: Any) -> tuple[Array, Any]:
        given = {"edge_attr": batch.edge_attr, "rows": batch.rows, **options}
        return gnn.apply(config, weights[0], batch.layers, batch.x, weights[1], **given)

    def step(weights: Weights, opt_state: Any, batch: NeighborBatch, key: Array) -> tuple[Weights, Any, Metrics]:
        def scores(params: Any, statistics: Any) -> tuple[Array, Any]:
            return batch_scores((params, statistics), batch, train=True, key=key)

        counts = is_counted(batch.y)
        weights, opt_state, metrics, values = descend_rows(weights, opt_state, optimizer, scores, batch.y, counts)
        score = accuracy(values, batch.y, counts)
        if kind == "class":  # the mean over an epoch's steps is exact
            score = tally(values, batch.y, counts)[0] * (per_epoch / len(data.train))
        return weights, opt_state, {**metrics, "train": score}

    @jax.jit
    @over_runs
    def measured(weights: Weights, batch: NeighborBatch) -> Float[Array, "K *T"]:
        return tally(batch_scores(weights, batch)[0], batch.y, is_counted(batch.y))

    def accuracy_on(weights: Weights, ids: Int[np.ndarray, " ids"], draw: tuple[int, ...]) -> Float[np.ndarray, " runs"]:
        drawn = batches.covering(np.broadcast_to(ids, (runs, len(ids))), draw)
        if not len(ids):
            return np.full(runs, np.nan)
        tallies = np.sum([measured(weights, batch) for batch in drawn], 0)
        return np.array([score_of_tally(kind, each) for each in tallies])

    def evaluate(weights: Weights, step: int) -> Metrics:
        epoch = step // per_epoch - 1
        return {part: accuracy_on(weights, getattr(data, part), (epoch, n)) for n, part in ((1, "val"), (2, "test"))}

    return runs_task(
        options,
        gnn_run_fingerprint(
            data, config, options, **data_sizes(data), runs=runs, fan_outs=list(fan_outs), **learned(inductive)
        ),
        starting=partial(start_runs, config, optimizer, seeds),
        seeds=seeds,
        step=jax.jit(over_runs(step), donate_argnums=(0, 1)),
        batches=replace(batches, neighborhoods=trained).trained,
        evaluate=evaluate,
        steps_per_epoch=per_epoch,
    )
