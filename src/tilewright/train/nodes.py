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
from jaxtyping import Bool, Float, Int

from tilewright.graph.data import NodeData, SparseRows
from tilewright.graph.edges import find_negative_degree, from_edge_index, negative_degree, with_self_loops
from tilewright.graph.features import SparseFeatures
from tilewright.graph.partition import PartitionedTable
from tilewright.graph.sample import NeighbourSampler, Sample
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
    make_optimizer,
    over_runs,
    runs_task,
    start_runs,
)
from tilewright.train.loop import Metrics, Task

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
        labels: labels `[N]`; -1 for no label.
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
    config: Config, data: NodeData, options: GNNOptions, runs: int = 1, layout: str = "auto", mesh: Mesh | None = None
) -> Task:
    """Builds the task of training on the whole graph; an epoch is one step."""
    check_trainable(config, data)
    seeds = options.seed + np.arange(runs)
    optimizer = make_optimizer(config, options, 1)
    graph = whole_graph(config, data, layout, mesh)
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
        gnn_run_fingerprint(data, config, options, **data_sizes(data), runs=runs),
        starting=partial(start_runs, config, optimizer, seeds, replicated),
        seeds=seeds,
        step=step,
        batches=lambda _: repeat(graph),
        evaluate=lambda weights, _: measure(weights, graph),
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NodeBatch:
    """Stacked samples of all runs, with features and labels.

    Attributes:
        sample: sampled neighbourhoods; `nodes` and `edges` are empty, since only the host reads them.
        x: features of the input rows, `[runs, M, F]`.
        labels: labels of the roots, `[runs, B]`; -1 in padding.
        edge_attr: features of each layer's edges, `[runs, N * fan_out, D]`; None without.
    """

    sample: Sample
    x: Any
    labels: Any
    edge_attr: Any = None


def count_right(scores: Float[Array, "B C"], labels: Int[Array, " B"]) -> Int[Array, ""]:
    """Counts the rows with the largest score at the label."""
    return (scores.argmax(1).astype(labels.dtype) == labels).sum()


@dataclass(frozen=True)
class NodeBatches:
    """Mini-batches of nodes with sampled neighbourhoods, for several runs at once.

    The features stay on the host, which sends the rows of each sample to the device.

    Attributes:
        data: the graph.
        sampler: sampler of its neighbourhoods.
        seeds: seed of each run.
        size: nodes per batch.
        edge_attr: features of the sampler's edges; None without.
    """

    data: NodeData
    sampler: NeighbourSampler
    seeds: Int[np.ndarray, " runs"]
    size: int
    edge_attr: Float[np.ndarray, "E D"] | None = None

    def batch(self, roots: Int[np.ndarray, "runs R"], draw: tuple[int, ...]) -> NodeBatch:
        """Samples the neighbourhoods of the roots for all runs; `draw` and the seed determine the random numbers."""
        samples = [self.sampler.sample(ids, (int(seed), *draw)) for ids, seed in zip(roots, self.seeds, strict=True)]
        labels = np.full((len(roots), self.size), -1, np.int32)
        labels[:, : roots.shape[1]] = self.data.labels[roots]
        x = np.stack([self.data.rows(sample.nodes) for sample in samples])
        on_device = [replace(sample, nodes=sample.nodes[:0], edges=()) for sample in samples]
        sample: Sample = jax.tree.map(lambda *each: jnp.stack(each), *on_device)
        edge_attr = None
        if (features := self.edge_attr) is not None:
            by_layer = zip(*(sample.edges for sample in samples), strict=True)
            edge_attr = [jnp.stack([jnp.asarray(features[ids]) for ids in each]) for each in by_layer]
        return NodeBatch(sample, jnp.asarray(x), jnp.asarray(labels), edge_attr)

    def covering(self, ids: Int[np.ndarray, "runs ids"], draw: tuple[int, ...], first: int = 0) -> Iterator[NodeBatch]:
        """Yields batches that cover the nodes, from batch `first` on."""
        for n in range(first, -(-ids.shape[1] // self.size)):
            yield self.batch(ids[:, n * self.size : (n + 1) * self.size], (*draw, n))

    def trained(self, first: int) -> Iterator[NodeBatch]:
        """Yields training batches from step `first` on; an epoch covers the training nodes once."""
        epoch, done = divmod(first, -(-len(self.data.train) // self.size))
        for n in count(epoch):
            order = [np.random.default_rng((int(seed), n)).permutation(self.data.train) for seed in self.seeds]
            yield from self.covering(np.stack(order), (n, 0), done if n == epoch else 0)


def make_sampler(config: Config, data: NodeData, fan_outs: Sequence[int], batch_size: int) -> NeighbourSampler:
    """Builds the neighbourhood sampler of a graph's `sampled_edges`."""
    edges = data.edge_index[:, sampled_edges(config, data)]
    return NeighbourSampler(edges, data.num_nodes, fan_outs, batch_size, self_loops=config.self_loops == "table")


def sampled_edges(config: Config, data: NodeData) -> Bool[np.ndarray, " E"]:
    """Returns the mask of the edges to sample from: all but self-loops, if the model or the samples have their own."""
    return (data.edge_index[0] != data.edge_index[1]) | (config.self_loops == "given")


def sampled_task(config: Config, data: NodeData, options: GNNOptions, fan_outs: Sequence[int], runs: int = 1) -> Task:
    """Builds the task of training on sampled neighbourhoods. Evaluation samples with the same fan-outs."""
    check_trainable(config, data)
    if data.weights is not None:
        raise ValueError(f"expected no edge weights for sampled training, found some in {data.name}; leave out edge_weight")
    if len(fan_outs) != config.layers:
        raise ValueError(f"expected a fan-out for each of {config.layers} layers, found {len(fan_outs)}: {list(fan_outs)}")
    seeds = options.seed + np.arange(runs)
    sampler = make_sampler(config, data, fan_outs, options.batch_size)
    if (numbers := runs * sampler.rows * data.num_features) > MOST_NUMBERS:
        raise ValueError(
            f"expected batches of at most {MOST_NUMBERS:,} features, found {numbers:,}: {runs} x {sampler.rows:,} rows of "
            f"{data.num_features:,}, by fan-outs {list(sampler.fan_outs)} and a batch size of {sampler.batch_size}"
        )
    edge_attr = None if data.edge_attr is None else data.edge_attr[sampled_edges(config, data)]
    batches = NodeBatches(data, sampler, seeds, options.batch_size, edge_attr)
    per_epoch = -(-len(data.train) // options.batch_size)
    optimizer = make_optimizer(config, options, per_epoch)

    def batch_scores(weights: Weights, batch: NodeBatch, **options: Any) -> tuple[Array, Any]:
        sample = batch.sample
        given = {"edge_attr": batch.edge_attr, "rows": sample.rows, **options}
        return gnn.apply(config, weights[0], sample.layers, batch.x, weights[1], **given)

    def step(weights: Weights, opt_state: Any, batch: NodeBatch, key: Array) -> tuple[Weights, Any, Metrics]:
        def scores(params: Any, statistics: Any) -> tuple[Array, Any]:
            return batch_scores((params, statistics), batch, train=True, key=key)

        counts = batch.labels >= 0
        weights, opt_state, metrics, values = descend_rows(weights, opt_state, optimizer, scores, batch.labels, counts)
        share = per_epoch / len(data.train)  # makes the mean over an epoch's steps exact
        return weights, opt_state, {**metrics, "train": share * count_right(values, batch.labels).astype(jnp.float32)}

    @jax.jit
    @over_runs
    def right(weights: Weights, batch: NodeBatch) -> Int[Array, ""]:
        return count_right(batch_scores(weights, batch)[0], batch.labels)

    def accuracy_on(weights: Weights, ids: Int[np.ndarray, " ids"], draw: tuple[int, ...]) -> Float[np.ndarray, " runs"]:
        drawn = batches.covering(np.broadcast_to(ids, (runs, len(ids))), draw)
        return np.sum([right(weights, batch) for batch in drawn], 0) / len(ids) if len(ids) else np.full(runs, np.nan)

    def evaluate(weights: Weights, step: int) -> Metrics:
        epoch = step // per_epoch - 1
        return {part: accuracy_on(weights, getattr(data, part), (epoch, n)) for n, part in ((1, "val"), (2, "test"))}

    return runs_task(
        options,
        gnn_run_fingerprint(data, config, options, **data_sizes(data), runs=runs, fan_outs=list(fan_outs)),
        starting=partial(start_runs, config, optimizer, seeds),
        seeds=seeds,
        step=jax.jit(over_runs(step), donate_argnums=(0, 1)),
        batches=batches.trained,
        evaluate=evaluate,
        steps_per_epoch=per_epoch,
    )
