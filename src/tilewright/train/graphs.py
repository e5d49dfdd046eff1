"""Training of graph classification by cross-validation; the folds train side by side."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int32

from tilewright.graph.batch import PADDING, Capacity, GraphBatch, pack
from tilewright.graph.data import GraphData
from tilewright.models import gnn
from tilewright.models.gnn import FAMILIES, Config
from tilewright.train.gnn import (
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
from tilewright.train.log import Metrics
from tilewright.train.loop import Task


@dataclass(frozen=True)
class GraphBatches:
    """Mini-batches of graphs for each run; a run is a fold with a seed.

    Attributes:
        data: the graphs with folds.
        runs: fold (from 0) and seed of each run.
        iterations: batches per epoch.
        size: graphs per batch.
    """

    data: GraphData
    runs: Sequence[tuple[int, int]]
    iterations: int
    size: int

    def draw(self, epoch: int) -> Int32[np.ndarray, "runs iterations B"]:
        """Draws the graph ids of an epoch; each batch is a random subset of the fold's training graphs."""
        batches = []
        for fold, seed in self.runs:
            ids = self.data.folds[fold][0]
            scores = np.random.default_rng((seed, fold, epoch)).random((self.iterations, len(ids)), np.float32)
            batches.append(ids[np.argpartition(scores, self.size - 1, axis=1)[:, : self.size]])
        return np.stack(batches)

    def packed(self, first: int, capacity: Capacity) -> Iterator[GraphBatch]:
        """Yields the batches of all runs from step `first` on, `[runs, ...]`."""
        for epoch in count(first // self.iterations):
            drawn = pack(self.data, self.draw(epoch), capacity)
            for n in range(self.iterations):
                if epoch * self.iterations + n >= first:
                    yield jax.tree.map(lambda leaf, n=n: leaf[:, n], drawn)

    def tests(self) -> Int32[np.ndarray, "runs T"]:
        """Returns the ids of each run's test graphs, padded."""
        tests = [self.data.folds[fold][1] for fold, _ in self.runs]
        padded = np.full((len(tests), max(map(len, tests))), PADDING, np.int32)
        for row, test in zip(padded, tests, strict=True):
            row[: len(test)] = test
        return padded


def check_folds(config: Config, data: GraphData, folds: Sequence[int]) -> None:
    check_edge_features(config, data)
    if config.self_loops == "table":
        given = [name for name, kind in FAMILIES.items() if kind.self_loops != "table"]
        raise ValueError(f"expected one of {', '.join(given)} to classify graphs, found {type(config).__name__}")
    if wrong := [fold for fold in folds if not 0 <= fold < len(data.folds)]:
        raise ValueError(f"{data.name}: expected folds from 1 to {len(data.folds)}, found {wrong[0] + 1}")


def graphs_task(config: Config, data: GraphData, options: GNNOptions, folds: Sequence[int], seeds: int = 1) -> Task:
    """Builds the task of training on random mini-batches of graphs, with the protocol of the GIN paper.

    Args:
        config: configuration of the model.
        data: the graphs with folds.
        options: options of the training loop.
        folds: folds to test on, from 0.
        seeds: runs per fold.

    Raises:
        ValueError: a fold does not exist, or the model is GAT, which needs self-loops.
    """
    check_folds(config, data, folds)
    runs = [(fold, options.seed + n) for n in range(seeds) for fold in folds]
    size = min(options.batch_size, *(len(data.folds[fold][0]) for fold in folds))
    drawn = GraphBatches(data, runs, options.iterations, size)
    optimizer = make_optimizer(config, options, options.iterations)
    capacity = Capacity.from_batches(data, map(drawn.draw, range(options.epochs)))
    test_capacity = Capacity.from_batches(data, [drawn.tests()])
    tests = jax.tree.map(jnp.asarray, pack(data, drawn.tests(), test_capacity))
    features = jnp.asarray(data.features)
    edge_attr = None if data.edge_attr is None else jnp.asarray(data.edge_attr)

    def batch_scores(weights: Weights, batch: GraphBatch, x: Array, capacity: Capacity, **options: Any) -> tuple[Array, Any]:
        table = batch.table(capacity)
        pool = batch.pool(capacity)
        edges = batch.edge_attr(edge_attr)
        x = batch.features(x)
        return gnn.apply(config, weights[0], table, x, weights[1], edge_attr=edges, rows=batch.rows, pool=pool, **options)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(weights: Weights, opt_state: Any, x: Array, batch: GraphBatch, keys: Array) -> tuple[Weights, Any, Metrics]:
        def one_run(weights: Weights, opt_state: Any, batch: GraphBatch, key: Array) -> tuple[Weights, Any, Metrics]:
            def scores(params: Any, statistics: Any) -> tuple[Array, Any]:
                return batch_scores((params, statistics), batch, x, capacity, train=True, key=key)

            counts = batch.labels != PADDING
            weights, opt_state, metrics, values = descend_rows(weights, opt_state, optimizer, scores, batch.labels, counts)
            return weights, opt_state, {**metrics, "train": accuracy(values, batch.labels, counts)}

        return over_runs(one_run)(weights, opt_state, batch, keys)

    @jax.jit
    def measure(weights: Weights, x: Array, tests: GraphBatch) -> Metrics:
        def one_run(weights: Weights, test: GraphBatch) -> Metrics:
            scores, _ = batch_scores(weights, test, x, test_capacity)
            return {"test": accuracy(scores, test.labels, test.labels != PADDING)}

        return over_runs(one_run)(weights, tests)

    sizes = {"graphs": data.num_graphs, "nodes": len(data.features), "runs": [list(run) for run in runs]}
    run_seeds = np.array([1000 * seed + fold for fold, seed in runs])
    return runs_task(
        options,
        gnn_run_fingerprint(data, config, options, **sizes),
        starting=partial(start_runs, config, optimizer, run_seeds),
        seeds=run_seeds,
        step=lambda weights, opt_state, batch, keys: step(weights, opt_state, features, batch, keys),
        batches=lambda first: drawn.packed(first, capacity),
        evaluate=lambda weights, _: measure(weights, features, tests),
        steps_per_epoch=options.iterations,
        score=None,
    )
