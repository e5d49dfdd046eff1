"""Classifying the nodes of one graph: on the whole graph at once, or on sampled neighbourhoods of fixed shapes."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float, Int

from tilewright.graph.data import NodeData, SparseRows, with_self_loops
from tilewright.graph.features import SparseFeatures
from tilewright.graph.partition import PartitionedTable
from tilewright.graph.sample import NeighbourSampler, Sample
from tilewright.graph.table import NeighborTable
from tilewright.graph.train import (
    Curves,
    RunState,
    TrainOptions,
    accuracy,
    gradient_step,
    make_optimizer,
    over_runs,
    start_runs,
)
from tilewright.models import gnn
from tilewright.models.gnn import Config, GATConfig

PARTS = ("train", "val", "test")
CHUNK = 10
"""Epochs in one dispatch of full-graph training."""


SPARSE = 0.1
"""Share of non-zero features below which the product with a matrix reads those only."""


def identity_of(data: NodeData, config: Config, options: TrainOptions, runs: int, **more: object) -> dict[str, Any]:
    """What a checkpoint must agree with."""
    sizes = {"data": data.name, "nodes": data.num_nodes, "edges": data.edge_index.shape[1], "trained_nodes": len(data.train)}
    kept = {k: v for k, v in asdict(options).items() if k not in ("epochs", "save_every")}
    return {"family": type(config).__name__, **asdict(config), **kept, **sizes, "runs": runs, **more}


def check_trainable(data: NodeData) -> None:
    if not len(data.train):
        raise ValueError(f"{data.name}: no node to train on")


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
    edges = with_self_loops(data.edge_index, data.num_nodes) if isinstance(config, GATConfig) else data.edge_index
    parts = np.zeros((data.num_nodes, 3), bool)
    for n, part in enumerate(PARTS):
        parts[getattr(data, part), n] = True
    if mesh is not None:
        divided = PartitionedTable.build(edges, mesh, data.num_nodes, layout=layout)
        x, labels = divided.arrange(data.rows(np.arange(data.num_nodes))), divided.arrange(data.labels, fill=-1)
        return WholeGraph(divided, x, labels, divided.arrange(parts).T, divided.rows)
    table = NeighborTable.from_edges(edges, data.num_nodes, layout=layout)
    order = np.arange(data.num_nodes) if table.order is None else np.asarray(table.order)
    return WholeGraph(table, on_device(data, order), jnp.asarray(data.labels[order]), jnp.asarray(parts[order].T))


def on_device(data: NodeData, order: Int[np.ndarray, " N"]) -> Any:
    """The features in this order; on a CPU those of a few percent of entries stay sparse."""
    x = data.features
    if isinstance(x, SparseRows) and jax.default_backend() == "cpu" and len(x.data) < SPARSE * data.num_nodes * x.columns:
        return SparseFeatures.of(x.take(order))
    return jnp.asarray(data.rows(order))


class FullGraphTask:
    """All nodes in every step; an epoch is one step. Implements `train.Task`."""

    def __init__(
        self,
        config: Config,
        data: NodeData,
        options: TrainOptions,
        runs: int = 1,
        layout: str = "auto",
        mesh: Mesh | None = None,
    ):
        check_trainable(data)
        self.config, self.options = config, options
        self.title, self.epochs, self.save_every = f"{data.name}", options.epochs, options.save_every
        self.chunk = CHUNK
        self.identity = identity_of(data, config, options, runs)
        self.seeds = options.seed + np.arange(runs)
        self.optimizer = make_optimizer(config, options, 1)
        self.graph, self.mesh = whole_graph(config, data, layout, mesh), mesh
        self.epochs_step = jax.jit(self._epochs, donate_argnums=0)

    def start(self) -> RunState:
        return start_runs(self.config, self.optimizer, self.seeds)

    def advance(self, state: RunState, first: int, count: int) -> tuple[RunState, Curves]:
        if self.mesh is not None:
            state = jax.device_put(state, NamedSharding(self.mesh, PartitionSpec()))
        state, curves = self.epochs_step(state, self.graph, jnp.asarray(self.seeds), first, count)
        return state, {name: np.asarray(values)[:count] for name, values in curves.items()}

    def _epochs(
        self, state: RunState, graph: WholeGraph, seeds: Int[Array, " runs"], first: Int[Array, ""], count: Int[Array, ""]
    ) -> tuple[RunState, dict[str, Array]]:
        """`count` epochs, at most `CHUNK`, in one program whatever their number."""

        def epoch(n: Array, carry: tuple[RunState, dict[str, Array]]) -> tuple[RunState, dict[str, Array]]:
            state, curves = carry
            keys = jax.vmap(lambda seed: jax.random.fold_in(jax.random.key(seed), first + n))(seeds)
            state, now = over_runs(lambda state, key: self._epoch(state, graph, key))(state, keys)
            return state, {name: values.at[n].set(now[name]) for name, values in curves.items()}

        empty = {name: jnp.zeros((CHUNK, len(seeds)), jnp.float32) for name in ("loss", *PARTS)}
        return jax.lax.fori_loop(0, count, epoch, (state, empty))

    def _epoch(self, state: RunState, graph: WholeGraph, key: Array) -> tuple[RunState, dict[str, Array]]:
        """One step of one run, and what it reached."""

        def scores(params: Any, statistics: Any) -> tuple[Array, Any]:
            return gnn.apply(self.config, params, graph.table, graph.x, statistics, train=True, key=key, rows=graph.rows)

        state, loss, _ = gradient_step(state, self.optimizer, scores, graph.labels, graph.parts[0])
        after, _ = gnn.apply(self.config, state.params, graph.table, graph.x, state.statistics, rows=graph.rows)
        reached = {part: accuracy(after, graph.labels, graph.parts[n]) for n, part in enumerate(PARTS)}
        return state, {"loss": loss, **reached}


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
    """How many rows have their largest score at their label."""
    return (scores.argmax(1).astype(labels.dtype) == labels).sum()


class SampledTask:
    """Mini-batches of nodes with sampled neighbourhoods; an epoch passes over the training nodes once. Implements `train.Task`.

    Features stay with the host, which hands over the rows of each sample. Validation and test sample too, with the same
    fan-outs.
    """

    def __init__(self, config: Config, data: NodeData, options: TrainOptions, fan_outs: Sequence[int], runs: int = 1):
        check_trainable(data)
        if len(fan_outs) != config.layers:
            raise ValueError(f"expected a fan-out for each of {config.layers} layers, found {len(fan_outs)}: {list(fan_outs)}")
        self.config, self.options, self.data = config, options, data
        self.title, self.epochs, self.save_every, self.chunk = data.name, options.epochs, options.save_every, 1
        self.identity = identity_of(data, config, options, runs, fan_outs=list(fan_outs))
        self.seeds = options.seed + np.arange(runs)
        attends = isinstance(config, GATConfig)
        edges = data.edge_index[:, data.edge_index[0] != data.edge_index[1]] if attends else data.edge_index
        self.sampler = NeighbourSampler(edges, data.num_nodes, fan_outs, options.batch_size, self_loops=attends)
        self.optimizer = make_optimizer(config, options, -(-len(data.train) // options.batch_size))
        self.step = jax.jit(over_runs(self._step), donate_argnums=0)
        self.measure = jax.jit(over_runs(self._measure))

    def start(self) -> RunState:
        return start_runs(self.config, self.optimizer, self.seeds)

    def batch(self, roots: Int[np.ndarray, "runs R"], where: tuple[int, ...]) -> NodeBatch:
        """The samples of all runs around these roots; `where` tells this batch's randomness from that of others."""
        samples = [self.sampler.sample(mine, (int(seed), *where)) for mine, seed in zip(roots, self.seeds, strict=True)]
        labels = np.full((len(roots), self.options.batch_size), -1, np.int32)
        labels[:, : roots.shape[1]] = self.data.labels[roots]
        x = np.stack([self.data.rows(sample.nodes) for sample in samples])
        sample: Sample = jax.tree.map(lambda *each: jnp.stack(each), *[replace(s, nodes=s.nodes[:0]) for s in samples])
        return NodeBatch(sample, jnp.asarray(x), jnp.asarray(labels))

    def batches(self, ids: Int[np.ndarray, "runs ids"], where: tuple[int, ...]) -> Iterator[NodeBatch]:
        size = self.options.batch_size
        for n, start in enumerate(range(0, ids.shape[1], size)):
            yield self.batch(ids[:, start : start + size], (*where, n))

    def advance(self, state: RunState, first: int, count: int) -> tuple[RunState, Curves]:
        rows = []
        for epoch in range(first, first + count):
            state, row = self.epoch(state, epoch)
            rows.append(row)
        return state, {name: np.stack([row[name] for row in rows]).astype(np.float32) for name in rows[0]}

    def epoch(self, state: RunState, epoch: int) -> tuple[RunState, dict[str, np.ndarray]]:
        order = [np.random.default_rng((int(seed), epoch)).permutation(self.data.train) for seed in self.seeds]
        losses, right = [], []
        for n, batch in enumerate(self.batches(np.stack(order), (epoch, 0))):
            state, loss, correct = self.step(state, batch, self.keys(epoch, n))
            losses.append(loss)
            right.append(correct)
        row = {"loss": np.mean(losses, 0), "train": np.sum(right, 0) / len(self.data.train)}
        for n, part in ((1, "val"), (2, "test")):
            row[part] = self.accuracy_on(state, getattr(self.data, part), (epoch, n))
        return state, row

    def keys(self, epoch: int, step: int) -> Array:
        """One key for each run."""
        epochs = [jax.random.fold_in(jax.random.key(int(seed)), epoch) for seed in self.seeds]
        return jnp.stack([jax.random.fold_in(key, step) for key in epochs])

    def accuracy_on(self, state: RunState, ids: Int[np.ndarray, " ids"], where: tuple[int, ...]) -> Float[np.ndarray, " runs"]:
        """Accuracy of each run on these nodes."""
        if not len(ids):
            return np.full(len(self.seeds), np.nan)
        everywhere = np.broadcast_to(ids, (len(self.seeds), len(ids)))
        right = [self.measure(state, batch) for batch in self.batches(everywhere, where)]
        return np.sum(right, 0) / len(ids)

    def _step(self, state: RunState, batch: NodeBatch, key: Array) -> tuple[RunState, Array, Array]:
        """One step of one run; also its loss, and how many roots it told right (in training, with dropout)."""

        def scores(params: Any, statistics: Any) -> tuple[Array, Any]:
            return self.scores(params, statistics, batch, train=True, key=key)

        state, loss, values = gradient_step(state, self.optimizer, scores, batch.labels, batch.labels >= 0)
        return state, loss, count_right(values, batch.labels)

    def _measure(self, state: RunState, batch: NodeBatch) -> Int[Array, ""]:
        return count_right(self.scores(state.params, state.statistics, batch)[0], batch.labels)

    def scores(self, params: Any, statistics: Any, batch: NodeBatch, **how: Any) -> tuple[Array, Any]:
        return gnn.apply(self.config, params, batch.sample.layers, batch.x, statistics, rows=batch.sample.rows, **how)
