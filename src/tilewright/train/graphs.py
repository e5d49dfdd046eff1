"""Classifying whole graphs, by cross-validation: the folds train side by side."""

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
from tilewright.models.gnn import Config, GATConfig
from tilewright.train.gnn import (
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


@dataclass(frozen=True)
class GraphBatches:
    """Draws mini-batches of graphs for every run, which is a fold with a seed.

    Attributes:
        runs: fold (from 0) and seed of each.
        iterations, size: batches in an epoch, and graphs in a batch.
    """

    data: GraphData
    runs: Sequence[tuple[int, int]]
    iterations: int
    size: int

    def draw(self, epoch: int) -> Int32[np.ndarray, "runs iterations B"]:
        """Ids of graphs; each batch is a random subset of its fold's training graphs."""
        batches = []
        for fold, seed in self.runs:
            ids = self.data.folds[fold][0]
            scores = np.random.default_rng((seed, fold, epoch)).random((self.iterations, len(ids)), np.float32)
            batches.append(ids[np.argpartition(scores, self.size - 1, axis=1)[:, : self.size]])
        return np.stack(batches)

    def packed(self, first: int, capacity: Capacity) -> Iterator[GraphBatch]:
        """The batches of step `first` and those after it, of all runs, `[runs, ...]`."""
        for epoch in count(first // self.iterations):
            drawn = pack(self.data, self.draw(epoch), capacity)
            for n in range(self.iterations):
                if epoch * self.iterations + n >= first:
                    yield jax.tree.map(lambda leaf, n=n: leaf[:, n], drawn)

    def tests(self) -> Int32[np.ndarray, "runs T"]:
        """Ids of each run's test graphs."""
        tests = [self.data.folds[fold][1] for fold, _ in self.runs]
        padded = np.full((len(tests), max(map(len, tests))), PADDING, np.int32)
        for row, test in zip(padded, tests, strict=True):
            row[: len(test)] = test
        return padded


def check_folds(config: Config, data: GraphData, folds: Sequence[int]) -> None:
    if isinstance(config, GATConfig):
        raise ValueError("expected gcn, sage or gin to classify graphs, found gat")
    if wrong := [fold for fold in folds if not 0 <= fold < len(data.folds)]:
        raise ValueError(f"{data.name}: expected folds from 1 to {len(data.folds)}, found {wrong[0] + 1}")


def graphs_task(config: Config, data: GraphData, options: GNNOptions, folds: Sequence[int], seeds: int = 1) -> Task:
    """Mini-batches of graphs drawn at random, `iterations` in an epoch, as the GIN paper's authors do.

    Raises:
        ValueError: there is no such fold, or GAT, whose self-loops graphs don't have.
    """
    check_folds(config, data, folds)
    runs = [(fold, options.seed + n) for n in range(seeds) for fold in folds]
    size = min(options.batch_size, *(len(data.folds[fold][0]) for fold in folds))
    drawn = GraphBatches(data, runs, options.iterations, size)
    optimizer = make_optimizer(config, options, options.iterations)
    capacity = Capacity.of(data, map(drawn.draw, range(options.epochs)))
    test_capacity = Capacity.of(data, [drawn.tests()])
    tests = jax.tree.map(jnp.asarray, pack(data, drawn.tests(), test_capacity))
    features = jnp.asarray(data.features)

    def scores_of(weights: Weights, batch: GraphBatch, x: Array, capacity: Capacity, **how: Any) -> tuple[Array, Any]:
        table = batch.table(capacity)
        pool = batch.pool(capacity)
        return gnn.apply(config, weights[0], table, batch.features(x), weights[1], rows=batch.rows, pool=pool, **how)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(weights: Weights, opt_state: Any, x: Array, batch: GraphBatch, keys: Array) -> tuple[Weights, Any, Metrics]:
        def one(weights: Weights, opt_state: Any, batch: GraphBatch, key: Array) -> tuple[Weights, Any, Metrics]:
            def scores(params: Any, statistics: Any) -> tuple[Array, Any]:
                return scores_of((params, statistics), batch, x, capacity, train=True, key=key)

            there = batch.labels != PADDING
            weights, opt_state, metrics, values = descend_rows(weights, opt_state, optimizer, scores, batch.labels, there)
            return weights, opt_state, {**metrics, "train": accuracy(values, batch.labels, there)}

        return over_runs(one)(weights, opt_state, batch, keys)

    @jax.jit
    def measure(weights: Weights, x: Array, tests: GraphBatch) -> Metrics:
        def one(weights: Weights, test: GraphBatch) -> Metrics:
            scores, _ = scores_of(weights, test, x, test_capacity)
            return {"test": accuracy(scores, test.labels, test.labels != PADDING)}

        return over_runs(one)(weights, tests)

    sizes = {"graphs": data.num_graphs, "nodes": len(data.features), "runs": [list(run) for run in runs]}
    of_runs = np.array([1000 * seed + fold for fold, seed in runs])
    return runs_task(
        options,
        run_fingerprint_of(data, config, options, **sizes),
        starting=partial(start_runs, config, optimizer, of_runs),
        seeds=of_runs,
        step=lambda weights, opt_state, batch, keys: step(weights, opt_state, features, batch, keys),
        batches=lambda first: drawn.packed(first, capacity),
        evaluate=lambda weights, _: measure(weights, features, tests),
        steps_per_epoch=options.iterations,
        score=None,
    )
