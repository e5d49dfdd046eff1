"""What all graph training shares: options, optimiser, loss, the loop with progress and checkpoints.

Several runs (seeds, or folds) train side by side in one program: every array of the state has a leading dim of runs.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jaxtyping import Bool, Float, Int
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tilewright.graph import checkpoint
from tilewright.models import gnn
from tilewright.models.gnn import Config, GCNConfig

Curves = dict[str, np.ndarray]
"""`[epochs, runs]` each: "loss", and the accuracies "train", "val", "test"; NaN where there is nothing to measure on."""


@dataclass(frozen=True)
class TrainOptions:
    """How to train; the sizes of the model stand in its configuration.

    Attributes:
        epochs: passes over the training nodes; of graph classification, rounds of `iterations` steps.
        learning_rate: of Adam.
        weight_decay: added to the gradient of the matrices (L2), of GCN's first layer only.
        halve_every: epochs after which the learning rate is halved, again and again; 0 for never.
        seed: of the first run; the others follow it.
        batch_size: nodes (sampled) or graphs in a step.
        iterations: steps in an epoch of graph classification.
        save_every: epochs from one checkpoint to the next.
    """

    epochs: int = 200
    learning_rate: float = 0.01
    weight_decay: float = 5e-4
    halve_every: int = 0
    seed: int = 0
    batch_size: int = 32
    iterations: int = 50
    save_every: int = 50

    def __post_init__(self) -> None:
        for name in ("epochs", "learning_rate", "batch_size", "iterations", "save_every"):
            if not getattr(self, name) > 0:
                raise ValueError(f"expected {name} above 0, found {getattr(self, name)}")
        for name in ("weight_decay", "halve_every", "seed"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"expected {name} of at least 0, found {getattr(self, name)}")


def over_runs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Maps over the leading dim of all arguments: one run after another on a CPU, whose kernels fill it, else all at once."""
    if jax.default_backend() == "cpu":
        return lambda *arguments: jax.lax.map(lambda each: function(*each), arguments)
    return jax.vmap(function)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RunState:
    """What training changes: parameters, running statistics of batch norm, state of the optimiser."""

    params: Any
    statistics: Any
    optimiser: Any


def make_optimizer(config: Config, options: TrainOptions, steps_per_epoch: int) -> optax.GradientTransformation:
    """Adam on the gradient plus the decayed weights, as the papers' L2 term is (and not AdamW)."""

    def decayed(params: Any) -> Any:
        mask = jax.tree.map(lambda value: value.ndim >= 2, params)
        off = jax.tree.map(lambda _: False, mask)
        return replace(off, layers=(mask.layers[0], *off.layers[1:])) if isinstance(config, GCNConfig) else mask

    rate: optax.ScalarOrSchedule = options.learning_rate
    if options.halve_every:
        rate = optax.exponential_decay(rate, options.halve_every * steps_per_epoch, 0.5, staircase=True)
    return optax.chain(optax.add_decayed_weights(options.weight_decay, decayed), optax.adam(rate))


def start_runs(config: Config, optimizer: optax.GradientTransformation, seeds: Int[np.ndarray, " runs"]) -> RunState:
    """The state of all runs before training."""

    def one(seed: Array) -> RunState:
        made: Any = gnn.init(config, jax.random.key(seed))
        return RunState(made[0], made[1], optimizer.init(made[0]))

    return jax.jit(jax.vmap(one))(jnp.asarray(seeds))


def gradient_step(
    state: RunState,
    optimizer: optax.GradientTransformation,
    scores: Callable[[Any, Any], tuple[Array, Any]],
    labels: Int[Array, " N"],
    counts: Bool[Array, " N"],
) -> tuple[RunState, Array, Array]:
    """One step on the mean cross-entropy of the rows that count.

    Args:
        scores: `scores(params, statistics) -> (scores, statistics)`, in training.

    Returns:
        the state afterwards, and the loss and the scores before.
    """

    def loss_of(params: Any) -> tuple[Array, tuple[Any, Array]]:
        values, statistics = scores(params, state.statistics)
        return mean_loss(values, labels, counts), (statistics, values)

    params: Any = state.params
    (loss, (statistics, values)), gradient = jax.value_and_grad(loss_of, has_aux=True)(params)
    with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes in places
        update, optimiser = optimizer.update(gradient, state.optimiser, params)
    return RunState(optax.apply_updates(params, update), statistics, optimiser), loss, values


def mean_loss(scores: Float[Array, "N C"], labels: Int[Array, " N"], counts: Bool[Array, " N"]) -> Float[Array, ""]:
    """The mean cross-entropy of the rows that count; padding rows may hold anything."""
    chosen = jnp.where(counts, labels, 0)
    losses = optax.softmax_cross_entropy_with_integer_labels(jnp.where(counts[:, None], scores, 0), chosen)
    return jnp.where(counts, losses, 0).sum() / jnp.maximum(counts.sum(), 1).astype(jnp.float32)


def accuracy(scores: Float[Array, "N C"], labels: Int[Array, " N"], counts: Bool[Array, " N"]) -> Float[Array, ""]:
    """The share of the rows that count whose largest score is the label's; NaN where none counts."""
    right = (scores.argmax(1).astype(labels.dtype) == labels) & counts
    return right.sum().astype(jnp.float32) / counts.sum().astype(jnp.float32)


@runtime_checkable
class Task(Protocol):
    """One thing to train.

    Attributes:
        title: what the progress bar shows.
        epochs: when it is done.
        chunk: epochs in one call of `advance`.
        save_every: epochs from one checkpoint to the next.
        identity: whatever must agree for a checkpoint to be resumed.
    """

    title: str
    epochs: int
    chunk: int
    save_every: int
    identity: dict[str, Any]

    def start(self) -> RunState:
        """The state before training."""
        ...

    def advance(self, state: RunState, first: int, count: int) -> tuple[RunState, Curves]:
        """Trains epochs `first` to `first + count - 1`; DONATES the state. The curves have `count` rows."""
        ...


@dataclass(frozen=True)
class TrainResult:
    """What the runs reached.

    Attributes:
        state: of all runs, after the last epoch.
        curves: see `Curves`.
        seconds: of this process, compilation included.
    """

    state: RunState
    curves: Curves
    seconds: float

    def last(self, part: str) -> Float[np.ndarray, " runs"]:
        """Accuracy of each run after its last epoch."""
        return self.curves[part][-1]

    def at_best_validation(self, part: str) -> Float[np.ndarray, " runs"]:
        """Accuracy of each run at its first epoch of the highest validation accuracy; the last where nothing validates."""
        if np.isnan(self.curves["val"]).any():
            return self.last(part)
        best = self.curves["val"].argmax(0)
        return self.curves[part][best, np.arange(len(best))]

    def best_mean_epoch(self, part: str) -> int:
        """The epoch (from 1) at which the mean over all runs is highest."""
        return int(self.curves[part].mean(1).argmax()) + 1

    def run(self, n: int) -> tuple[Any, Any]:
        """Parameters and statistics of one run."""
        return jax.tree.map(lambda leaf: leaf[n], (self.state.params, self.state.statistics))


def progress_bar(console: Console) -> Progress:
    shown = "loss {task.fields[loss]}  validation {task.fields[val]}  test {task.fields[test]}"
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(shown))
    return Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, disable=not console.is_terminal)


def shown(curves: Curves) -> dict[str, Any]:
    """The means over the runs at the last epoch."""
    means = {name: float(values[-1].mean()) for name, values in curves.items()}
    told = {name: "–" if np.isnan(means[name]) else f"{means[name]:.1%}" for name in ("val", "test")}
    return {"loss": f"{means['loss']:.3f}", **told}


def train(task: Task, console: Console, out: Path | None = None) -> TrainResult:
    """Trains all epochs of a task; with `out`, from the checkpoint `state.safetensors` there if there is one.

    Raises:
        ValueError: the checkpoint is that of another run.
    """
    state, epoch, curves, began = task.start(), 0, {}, time.perf_counter()
    path = None if out is None else out / "state.safetensors"
    if path is not None and path.exists():
        state, epoch, curves = checkpoint.load(path, state, task.identity)
        console.print(f"resuming {task.title} at epoch {epoch} of {task.epochs}", markup=False)
    with progress_bar(console) as bar:
        row = bar.add_task(task.title, total=task.epochs, completed=epoch, loss="–", val="–", test="–")
        while epoch < task.epochs:
            until_saved = task.save_every - epoch % task.save_every
            count = min(task.chunk, task.epochs - epoch, until_saved)
            state, new = task.advance(state, epoch, count)
            curves = {name: np.concatenate([curves[name], rows]) if curves else rows for name, rows in new.items()}
            epoch += count
            bar.update(row, completed=epoch, **shown(curves))
            if path is not None and (epoch % task.save_every == 0 or epoch == task.epochs):
                checkpoint.save(path, state, epoch, curves, task.identity)
    return TrainResult(state, curves, time.perf_counter() - began)
