"""Classifying whole graphs, by cross-validation: the folds train side by side."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int, Int32

from tilewright.graph.batch import PADDING, Capacity, GraphBatch, pack
from tilewright.graph.data import GraphData
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


class GraphTask:
    """Mini-batches of graphs drawn at random, `iterations` in an epoch, as the GIN paper's authors do. Implements `train.Task`.

    A run is a fold with a seed. An epoch is one program, whatever graphs it draws.

    Raises:
        ValueError: there is no such fold, or GAT, whose self-loops graphs don't have.
    """

    def __init__(self, config: Config, data: GraphData, options: TrainOptions, folds: Sequence[int], seeds: int = 1):
        if isinstance(config, GATConfig):
            raise ValueError("expected gcn, sage or gin to classify graphs, found gat")
        if wrong := [fold for fold in folds if not 0 <= fold < len(data.folds)]:
            raise ValueError(f"{data.name}: expected folds from 1 to {len(data.folds)}, found {wrong[0] + 1}")
        self.config, self.options, self.data = config, options, data
        self.title, self.epochs, self.save_every, self.chunk = data.name, options.epochs, options.save_every, 1
        self.runs = [(fold, options.seed + n) for n in range(seeds) for fold in folds]
        self.seeds = np.array([1000 * seed + fold for fold, seed in self.runs])
        kept = {k: v for k, v in asdict(options).items() if k not in ("epochs", "save_every")}
        sizes = {
            "data": data.name,
            "graphs": data.num_graphs,
            "nodes": len(data.features),
            "runs": [list(r) for r in self.runs],
        }
        self.identity: dict[str, Any] = {"family": type(config).__name__, **asdict(config), **kept, **sizes}
        self.batch_size = min(options.batch_size, *(len(data.folds[fold][0]) for fold in folds))
        self.optimizer = make_optimizer(config, options, options.iterations)
        self.features = jnp.asarray(data.features)
        self.capacity = Capacity.of(data, self.plan())
        tests = [data.folds[fold][1] for fold, _ in self.runs]
        held_out = np.full((len(tests), max(map(len, tests))), PADDING)
        for row, test in zip(held_out, tests, strict=True):
            row[: len(test)] = test
        self.test_capacity = Capacity.of(data, [held_out])
        self.test = jax.tree.map(jnp.asarray, pack(data, held_out, self.test_capacity))
        self.epoch_step = jax.jit(self._epoch, donate_argnums=0)

    def start(self) -> RunState:
        return start_runs(self.config, self.optimizer, self.seeds)

    def plan(self) -> Iterator[Int32[np.ndarray, "runs iterations B"]]:
        """The graphs of every epoch."""
        return (self.draw(epoch) for epoch in range(self.epochs))

    def draw(self, epoch: int) -> Int32[np.ndarray, "runs iterations B"]:
        """The graphs of one epoch: each batch is a random subset of its fold's training graphs."""
        batches = []
        for fold, seed in self.runs:
            ids = self.data.folds[fold][0]
            scores = np.random.default_rng((seed, fold, epoch)).random((self.options.iterations, len(ids)), np.float32)
            batches.append(ids[np.argpartition(scores, self.batch_size - 1, axis=1)[:, : self.batch_size]])
        return np.stack(batches)

    def advance(self, state: RunState, first: int, count: int) -> tuple[RunState, Curves]:
        rows = []
        for epoch in range(first, first + count):
            batches = pack(self.data, self.draw(epoch), self.capacity)
            state, row = self.epoch_step(state, batches, self.features, self.test, epoch)
            rows.append(jax.tree.map(np.asarray, row))
        return state, {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def _epoch(
        self, state: RunState, batches: GraphBatch, features: Array, test: GraphBatch, epoch: Int[Array, ""]
    ) -> tuple[RunState, dict[str, Array]]:
        """All steps of an epoch, of all runs, and what they reached."""
        keys = jax.vmap(lambda seed: jax.random.fold_in(jax.random.key(seed), epoch))(jnp.asarray(self.seeds))

        def one(state: RunState, batches: GraphBatch, test: GraphBatch, key: Array) -> tuple[RunState, dict[str, Array]]:
            def step(state: RunState, given: tuple[GraphBatch, Array]) -> tuple[RunState, tuple[Array, Array]]:
                batch, n = given
                return self._step(state, batch, features, jax.random.fold_in(key, n))

            state, (losses, right) = jax.lax.scan(step, state, (batches, jnp.arange(self.options.iterations)))
            scores, _ = self.scores(state.params, state.statistics, test, features, self.test_capacity)
            reached = accuracy(scores, test.labels, test.labels != PADDING)
            return state, {"loss": losses.mean(), "train": right.mean(), "val": jnp.float32(jnp.nan), "test": reached}

        return over_runs(one)(state, batches, test, keys)

    def _step(self, state: RunState, batch: GraphBatch, features: Array, key: Array) -> tuple[RunState, tuple[Array, Array]]:
        """One step of one run; also its loss and its accuracy, both in training."""
        there = batch.labels != PADDING

        def scores(params: Any, statistics: Any) -> tuple[Array, Any]:
            return self.scores(params, statistics, batch, features, self.capacity, train=True, key=key)

        state, loss, values = gradient_step(state, self.optimizer, scores, batch.labels, there)
        return state, (loss, accuracy(values, batch.labels, there))

    def scores(
        self, params: Any, statistics: Any, batch: GraphBatch, features: Array, capacity: Capacity, **how: Any
    ) -> tuple[Array, Any]:
        x, table, pool = batch.features(features), batch.table(capacity), batch.pool(capacity)
        return gnn.apply(self.config, params, table, x, statistics, rows=batch.rows, pool=pool, **how)
