"""Classifying the nodes of one graph: on the whole graph at once, or on sampled neighbourhoods of fixed shapes."""

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

from tilewright.graph.data import NodeData, SparseRows
from tilewright.graph.edges import from_edge_index, negative_degree, negative_degree_of
from tilewright.graph.features import SparseFeatures
from tilewright.graph.partition import PartitionedTable
from tilewright.graph.sample import NeighbourSampler, Sample
from tilewright.graph.table import NeighborTable
from tilewright.models import gnn
from tilewright.models.gnn import Config, GATConfig, GCNConfig
from tilewright.train.gnn import (
    PARTS,
    GNNOptions,
    Weights,
    accuracy,
    descend_rows,
    make_optimizer,
    over_runs,
    run_fingerprint_of,
    runs_task,
    start_runs,
)
from tilewright.train.loop import Metrics, Task

MOST_NUMBERS = 2**30
"""Features that a sampled batch of all runs may hold: 4 GB in float32."""
SPARSE = 0.1
"""Share of non-zero features below which the product with a matrix reads those only."""


def sizes_of(data: NodeData) -> dict[str, int]:
    """Sizes of the data, for a run's fingerprint."""
    return {"nodes": data.num_nodes, "edges": data.edge_index.shape[1], "trained_nodes": len(data.train)}


def check_trainable(config: Config, data: NodeData) -> None:
    if not len(data.train):
        raise ValueError(f"{data.name}: no node to train on")
    if data.weights is None:
        return
    if not isinstance(config, GCNConfig):
        raise ValueError(f"{data.name} has weights of edges, which GCN alone reads; leave edge_weight out for other models")
    if (found := negative_degree_of(from_edge_index(data.edge_index, data.num_nodes, weights=data.weights))) is not None:
        raise negative_degree(*found)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WholeGraph:
    """A graph on the device, in table order.

    Attributes:
        table: the neighbours.
        x: features `[N, F]`.
        labels: `[N]`; -1 where there is none.
        parts: which nodes are trained on, validate and test, bool `[3, N]`.
        rows: which rows are nodes; None if all are.
    """

    table: Any
    x: Any
    labels: Any
    parts: Any
    rows: Any = None


def whole_graph(config: Config, data: NodeData, layout: str = "auto", mesh: Mesh | None = None) -> WholeGraph:
    """Puts a graph onto the device, or divides it over those of a mesh, with self-loops for GAT."""
    edges = data.edge_index
    loops = isinstance(config, GATConfig)
    parts = np.zeros((data.num_nodes, 3), bool)
    for n, part in enumerate(PARTS):
        parts[getattr(data, part), n] = True
    if mesh is not None:
        sharded = PartitionedTable.build(edges, mesh, data.num_nodes, data.weights, layout=layout, self_loops=loops)
        x = sharded.permute(data.rows(np.arange(data.num_nodes)))
        labels = sharded.permute(data.labels, fill=-1)
        return WholeGraph(sharded, x, labels, sharded.permute(parts).T, sharded.rows)
    table = NeighborTable.from_edges(edges, data.num_nodes, data.weights, layout=layout, self_loops=loops)
    order = np.arange(data.num_nodes) if table.order is None else np.asarray(table.order)
    return WholeGraph(table, on_device(data, order), jnp.asarray(data.labels[order]), jnp.asarray(parts[order].T))


def on_device(data: NodeData, order: Int[np.ndarray, " N"]) -> Any:
    """The features in this order; on a CPU those of a few percent of entries stay sparse."""
    x = data.features
    if isinstance(x, SparseRows) and jax.default_backend() == "cpu" and len(x.data) < SPARSE * data.num_nodes * x.columns:
        return SparseFeatures.of(x.take(order))
    return jnp.asarray(data.rows(order))


def full_graph_task(
    config: Config, data: NodeData, options: GNNOptions, runs: int = 1, layout: str = "auto", mesh: Mesh | None = None
) -> Task:
    """All nodes in every step; an epoch is one step."""
    check_trainable(config, data)
    seeds = options.seed + np.arange(runs)
    optimizer = make_optimizer(config, options, 1)
    graph = whole_graph(config, data, layout, mesh)
    everywhere = None if mesh is None else NamedSharding(mesh, PartitionSpec())

    @partial(jax.jit, donate_argnums=(0, 1), out_shardings=everywhere)
    def step(weights: Weights, opt_state: Any, graph: WholeGraph, keys: Array) -> tuple[Weights, Any, Metrics]:
        def one(weights: Weights, opt_state: Any, key: Array) -> tuple[Weights, Any, Metrics]:
            def scores(params: Any, statistics: Any) -> tuple[Array, Any]:
                return gnn.apply(config, params, graph.table, graph.x, statistics, train=True, key=key, rows=graph.rows)

            return descend_rows(weights, opt_state, optimizer, scores, graph.labels, graph.parts[0])[:3]

        return over_runs(one)(weights, opt_state, keys)

    @jax.jit
    def measure(weights: Weights, graph: WholeGraph) -> Metrics:
        def one(params: Any, statistics: Any) -> Metrics:
            scores, _ = gnn.apply(config, params, graph.table, graph.x, statistics, rows=graph.rows)
            return {part: accuracy(scores, graph.labels, graph.parts[n]) for n, part in enumerate(PARTS)}

        return over_runs(one)(*weights)

    return runs_task(
        options,
        run_fingerprint_of(data, config, options, **sizes_of(data), runs=runs),
        starting=partial(start_runs, config, optimizer, seeds, everywhere),
        seeds=seeds,
        step=step,
        batches=lambda _: repeat(graph),
        evaluate=lambda weights, _: measure(weights, graph),
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NodeBatch:
    """A sample of every run, stacked, with what a step needs of it.

    Attributes:
        sample: the neighbourhoods (its `nodes` are for the host).
        x: features of the input rows, `[runs, M, F]`.
        labels: of the roots, `[runs, B]`; -1 in padding.
    """

    sample: Sample
    x: Any
    labels: Any


def count_right(scores: Float[Array, "B C"], labels: Int[Array, " B"]) -> Int[Array, ""]:
    """Number of rows that have their largest score at their label."""
    return (scores.argmax(1).astype(labels.dtype) == labels).sum()


@dataclass(frozen=True)
class NodeBatches:
    """Draws mini-batches of nodes with their sampled neighbourhoods, for several runs at once.

    Features stay with the host, which hands over the rows of each sample.
    """

    data: NodeData
    sampler: NeighbourSampler
    seeds: Int[np.ndarray, " runs"]
    size: int

    def batch(self, roots: Int[np.ndarray, "runs R"], where: tuple[int, ...]) -> NodeBatch:
        """The samples of all runs around these roots; `where` tells this batch's randomness from that of others."""
        samples = [self.sampler.sample(mine, (int(seed), *where)) for mine, seed in zip(roots, self.seeds, strict=True)]
        labels = np.full((len(roots), self.size), -1, np.int32)
        labels[:, : roots.shape[1]] = self.data.labels[roots]
        x = np.stack([self.data.rows(sample.nodes) for sample in samples])
        sample: Sample = jax.tree.map(lambda *each: jnp.stack(each), *[replace(s, nodes=s.nodes[:0]) for s in samples])
        return NodeBatch(sample, jnp.asarray(x), jnp.asarray(labels))

    def covering(self, ids: Int[np.ndarray, "runs ids"], where: tuple[int, ...], first: int = 0) -> Iterator[NodeBatch]:
        """These nodes, batch by batch, from batch `first` on."""
        for n in range(first, -(-ids.shape[1] // self.size)):
            yield self.batch(ids[:, n * self.size : (n + 1) * self.size], (*where, n))

    def trained(self, first: int) -> Iterator[NodeBatch]:
        """The batches of step `first` and those after it; an epoch passes over the training nodes once."""
        epoch, done = divmod(first, -(-len(self.data.train) // self.size))
        for n in count(epoch):
            order = [np.random.default_rng((int(seed), n)).permutation(self.data.train) for seed in self.seeds]
            yield from self.covering(np.stack(order), (n, 0), done if n == epoch else 0)


def sampler_of(config: Config, data: NodeData, fan_outs: Sequence[int], batch_size: int) -> NeighbourSampler:
    """A sampler of a graph's neighbourhoods, without its self-loops where a layer counts each node itself: in GCN and GAT."""
    itself = isinstance(config, GCNConfig | GATConfig)
    edges = data.edge_index[:, data.edge_index[0] != data.edge_index[1]] if itself else data.edge_index
    return NeighbourSampler(edges, data.num_nodes, fan_outs, batch_size, self_loops=isinstance(config, GATConfig))


def sampled_task(config: Config, data: NodeData, options: GNNOptions, fan_outs: Sequence[int], runs: int = 1) -> Task:
    """Mini-batches of nodes with sampled neighbourhoods. Validation and test sample too, with the same fan-outs."""
    check_trainable(config, data)
    if data.weights is not None:
        raise ValueError(f"{data.name} has weights of edges, which training on a whole graph reads and sampling does not")
    if len(fan_outs) != config.layers:
        raise ValueError(f"expected a fan-out for each of {config.layers} layers, found {len(fan_outs)}: {list(fan_outs)}")
    seeds = options.seed + np.arange(runs)
    sampler = sampler_of(config, data, fan_outs, options.batch_size)
    if (numbers := runs * sampler.rows * data.num_features) > MOST_NUMBERS:
        raise ValueError(
            f"expected batches of at most {MOST_NUMBERS:,} features, found {numbers:,}: {runs} x {sampler.rows:,} rows of "
            f"{data.num_features:,}, by fan-outs {list(sampler.fan_outs)} and a batch size of {sampler.batch_size}"
        )
    batches = NodeBatches(data, sampler, seeds, options.batch_size)
    per_epoch = -(-len(data.train) // options.batch_size)
    optimizer = make_optimizer(config, options, per_epoch)

    def scores_of(weights: Weights, batch: NodeBatch, **how: Any) -> tuple[Array, Any]:
        return gnn.apply(config, weights[0], batch.sample.layers, batch.x, weights[1], rows=batch.sample.rows, **how)

    def step(weights: Weights, opt_state: Any, batch: NodeBatch, key: Array) -> tuple[Weights, Any, Metrics]:
        def scores(params: Any, statistics: Any) -> tuple[Array, Any]:
            return scores_of((params, statistics), batch, train=True, key=key)

        counts = batch.labels >= 0
        weights, opt_state, metrics, values = descend_rows(weights, opt_state, optimizer, scores, batch.labels, counts)
        share = per_epoch / len(data.train)  # so that the mean over an epoch's steps is exact
        return weights, opt_state, {**metrics, "train": share * count_right(values, batch.labels).astype(jnp.float32)}

    @jax.jit
    @over_runs
    def right(weights: Weights, batch: NodeBatch) -> Int[Array, ""]:
        return count_right(scores_of(weights, batch)[0], batch.labels)

    def accuracy_on(weights: Weights, ids: Int[np.ndarray, " ids"], where: tuple[int, ...]) -> Float[np.ndarray, " runs"]:
        drawn = batches.covering(np.broadcast_to(ids, (runs, len(ids))), where)
        return np.sum([right(weights, batch) for batch in drawn], 0) / len(ids) if len(ids) else np.full(runs, np.nan)

    def evaluate(weights: Weights, step: int) -> Metrics:
        where = step // per_epoch - 1
        return {part: accuracy_on(weights, getattr(data, part), (where, n)) for n, part in ((1, "val"), (2, "test"))}

    return runs_task(
        options,
        run_fingerprint_of(data, config, options, **sizes_of(data), runs=runs, fan_outs=list(fan_outs)),
        starting=partial(start_runs, config, optimizer, seeds),
        seeds=seeds,
        step=jax.jit(over_runs(step), donate_argnums=(0, 1)),
        batches=batches.trained,
        evaluate=evaluate,
        steps_per_epoch=per_epoch,
    )
