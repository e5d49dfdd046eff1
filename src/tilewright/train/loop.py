"""Training loop of all kinds of models: steps, evaluations, progress, and checkpoints from which a run resumes exactly.

A task brings its compiled step; the loop is independent of models, losses, optimizers and devices. The loop delays reading
metrics, so that the device always has a next step queued.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jaxtyping import Float, Int
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tilewright.compiled.ledger import Ledger
from tilewright.train import checkpoint
from tilewright.train.finite import FINITE, NotFiniteTraining, Watch, finite
from tilewright.train.flops import peak_flop_per_s

Metrics = dict[str, Any]
"""Arrays by name, each with the shape of the task's seed."""

Step = Callable[[Any, Any, Any, Array], tuple[Any, Any, Metrics]]
"""Compiled `step(params, opt_state, batch, key) -> (params, opt_state, metrics)`; DONATES the first two arguments.

The metrics have a `finite.Finite` under `FINITE` and may have a weight under `WEIGHT`; neither is printed.
"""

WEIGHT = "weight"
"""Key of a step's weight in means over steps: the number of tokens in its loss."""

REFRESH_S = 0.2
"""Seconds between updates of the progress bar; each update waits for the device."""
LINE_S = 60.0
"""Seconds between progress lines without a terminal."""


@dataclass(frozen=True)
class TrainOptions:
    """Options of all training runs; subclasses add further options."""

    learning_rate: float
    weight_decay: float
    batch_size: int
    seed: int
    save_every: int

    ABOVE_ZERO: ClassVar[tuple[str, ...]] = ("learning_rate", "batch_size", "save_every")
    AT_LEAST_ZERO: ClassVar[tuple[str, ...]] = ("weight_decay", "seed")
    MAY_CHANGE: ClassVar[tuple[str, ...]] = ("save_every",)
    """Options that may change when a run resumes."""

    def __post_init__(self) -> None:
        for name in self.ABOVE_ZERO:
            if not getattr(self, name) > 0:
                raise ValueError(f"expected {name} above 0, found {getattr(self, name)}")
        for name in self.AT_LEAST_ZERO:
            if not getattr(self, name) >= 0:
                raise ValueError(f"expected {name} of at least 0, found {getattr(self, name)}")
        if self.seed >= 2**31:
            raise ValueError(f"expected a seed below {2**31}, found {self.seed}")

    def run_fingerprint(self) -> dict[str, Any]:
        """Returns the fingerprint of the run, which a checkpoint must match."""
        return {name: value for name, value in asdict(self).items() if name not in self.MAY_CHANGE}


@dataclass(frozen=True)
class Task:
    """Description of a training run for the loop.

    Attributes:
        title: title of the progress bar.
        run_fingerprint: plain data that a checkpoint must match.
        init: returns the initial parameters and optimizer state.
        step: see `Step`; the step determines the shardings. `step.train_step` builds the usual one.
        batches: `batches(first)` yields the batches from step `first` (from 0) on, without end, all of one shape.
        evaluate: `evaluate(params, step)` returns the metrics of held-out data after `step` steps.
        steps: number of steps.
        evaluate_every: steps between evaluations; the last step is evaluated as well.
        save_every: steps between checkpoints; the last step is saved as well.
        seed: seed of the steps' keys; an array `[runs]` for several runs side by side, whose metrics have this shape.
        progress: unit and amount of work per step, such as ("tokens", 4096).
        flops: floating-point operations per step (see `flops.token_flops`); 0 if unknown.
        devices: number of devices.
        score: name of a metric, higher is better; the result has the parameters of the best evaluation. By default the result
            has the last parameters.
    """

    title: str
    run_fingerprint: dict[str, Any]
    init: Callable[[], tuple[Any, Any]]
    step: Step
    batches: Callable[[int], Iterator[Any]]
    evaluate: Callable[[Any, int], Metrics]
    steps: int
    evaluate_every: int
    save_every: int
    seed: int | Int[np.ndarray, " runs"]
    progress: tuple[str, float]
    flops: float = 0.0
    devices: int = 1
    score: str | None = None


@dataclass(frozen=True)
class TrainResult:
    """Result of a training run.

    Attributes:
        params: parameters after the last step, or at the best `Task.score`.
        curve: a row per evaluation: "step", the mean metrics of the steps since the previous evaluation (see `mean_metrics`),
            and the metrics of the evaluation.
        rate: work of this process per second, in the unit of `Task.progress`.
        seconds: seconds of this process, including compilation.
        ledger: compiled and loaded programs.
        utilisation: model FLOPs utilisation from this process's first step to its last; None if operations or peak are unknown.
    """

    params: Any
    curve: dict[str, np.ndarray]
    rate: float
    seconds: float
    ledger: Ledger = field(default_factory=Ledger)
    utilisation: float | None = None

    def last(self, name: str) -> Any:
        """Returns a metric of the last evaluation."""
        return self.curve[name][-1]


def descend(
    loss: Callable[[Any], tuple[Array, Any]], optimizer: optax.GradientTransformation, params: Any, opt_state: Any
) -> tuple[Any, Any, Metrics, Any]:
    """Takes one optimizer step.

    Args:
        loss: `loss(params) -> (loss, auxiliary output)`.
        optimizer: the optimizer.
        params: parameters before the step.
        opt_state: state of the optimizer before the step.

    Returns:
        parameters, optimizer state, metrics with the loss and its `Finite` flags, and the auxiliary output before the step.
    """
    (value, more), gradient = jax.value_and_grad(loss, has_aux=True)(params)
    params, opt_state = updated(optimizer, gradient, params, opt_state)
    return params, opt_state, {"loss": value, FINITE: finite(value, gradient)}, more


def updated(optimizer: optax.GradientTransformation, gradient: Any, params: Any, opt_state: Any) -> tuple[Any, Any]:
    """Returns parameters and optimizer state after the update by a gradient."""
    with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes in places
        update, opt_state = optimizer.update(gradient, opt_state, params)
    return optax.apply_updates(params, update), opt_state


@jax.jit
def step_keys(seed: Int[Array, "..."], step: Int[Array, ""]) -> Array:
    """Returns the random keys of a step for each run, which depend on seed and step only."""

    def step_key(seed: Array) -> Array:
        return jax.random.fold_in(jax.random.key(seed), step)

    return jax.vmap(step_key)(seed) if seed.ndim else step_key(seed)


@partial(jax.jit, donate_argnums=0)
def keep_better(best: tuple[Array, Any], score: Float[Array, "..."], params: Any) -> tuple[Array, Any]:
    """Updates the score and the parameters of the best evaluation; DONATES `best`. Runs are the leading dimensions.

    A NaN score counts as better, so that without validation data the last parameters remain.
    """
    better = ~(score <= best[0])

    def choose(old: Array, new: Array) -> Array:
        return jnp.where(jnp.expand_dims(better, range(better.ndim, new.ndim)), new, old)

    return jax.tree.map(choose, best, (score, params))


def stacked(rows: Sequence[Metrics]) -> dict[str, np.ndarray]:
    """Stacks the metrics of several rows by name."""
    return {name: np.stack([np.asarray(row[name]) for row in rows]) for name in rows[0]} if rows else {}


def mean_metrics(rows: Sequence[Metrics]) -> Metrics:
    """Returns the mean of each metric, weighted if all rows have weights; NaN if all weights are 0.

    A single row without weight is returned unchanged, still on the device, to avoid a transfer.
    """
    if not all(WEIGHT in row for row in rows):  # checkpoints of earlier versions have rows without weights
        rows = [{name: value for name, value in row.items() if name != WEIGHT} for row in rows]
        return rows[0] if len(rows) == 1 else {name: values.mean(0) for name, values in stacked(rows).items()}
    means = stacked(rows)
    weights = means.pop(WEIGHT, np.zeros(0))
    if not weights.any():
        return {name: np.full_like(values[0], np.nan) for name, values in means.items()}
    return {name: np.average(values, axis=0, weights=weights).astype(values.dtype) for name, values in means.items()}


def unstacked(metrics: Mapping[str, np.ndarray], prefix: str) -> list[Metrics]:
    """Splits the arrays whose names begin with `prefix` into rows; the inverse of `stacked`."""
    named = {name.removeprefix(prefix): values for name, values in metrics.items() if name.startswith(prefix)}
    return [dict(zip(named, row, strict=True)) for row in zip(*named.values(), strict=True)]


class TrainingRun:
    """State of a running task.

    Attributes:
        params: current parameters; each step DONATES them.
        opt_state: current optimizer state; each step DONATES it.
        best: score and parameters of the best evaluation; None without `Task.score`.
        step: number of steps so far.
        saved: step of the last checkpoint; None without checkpoint.
        watch: checks of losses and gradients.
        curve: metrics of each evaluation.
        recent: metrics of the steps since the last evaluation.
    """

    def __init__(self, task: Task, out: Path | None):
        self.task = task
        self.out = out
        self.seed = jnp.asarray(task.seed)
        self.params, self.opt_state = task.init()
        self.best: tuple[Any, Any] | None = None
        if task.score is not None:
            self.best = (jnp.full(self.seed.shape, -jnp.inf, jnp.float32), jax.tree.map(jnp.copy, self.params))
        self.step = 0
        self.curve: list[Metrics] = []
        self.recent: list[Metrics] = []
        self.watch = Watch()
        self.saved: int | None = None

    def resume(self) -> bool:
        """Loads the checkpoint; returns False without one. Raises a `ValueError` for a checkpoint after the last step."""
        if self.out is None or not checkpoint.saved_steps(self.out):
            return False
        like = jax.tree.map(freed, (self.params, self.opt_state, self.best))
        found = checkpoint.read(self.out, like, self.task.run_fingerprint)
        (self.params, self.opt_state, self.best), self.step, metrics = found
        if self.step > self.task.steps:
            raise ValueError(
                f"expected at least the {self.step} steps of the checkpoint in {self.out}, found {self.task.steps}"
            )
        self.curve = unstacked(metrics, "curve.")
        self.recent = unstacked(metrics, "recent.")
        self.saved = self.step
        return True

    def save(self) -> None:
        """Writes a checkpoint if the run has a folder. Raises a `NotFiniteTraining` after a step that was not finite."""
        self.watch.check_all()
        if self.out is not None:
            series = {"curve.": stacked(self.curve), "recent.": stacked(self.recent)}
            metrics = {prefix + name: values for prefix, each in series.items() for name, values in each.items()}
            checkpoint.write(self.out, (self.params, self.opt_state, self.best), self.step, metrics, self.task.run_fingerprint)
            self.saved = self.step

    def advance(self, batch: Any) -> None:
        """Takes one step. Raises a `NotFiniteTraining` if an earlier step was not finite."""
        key = step_keys(self.seed, np.int32(self.step))
        self.params, self.opt_state, metrics = self.task.step(self.params, self.opt_state, batch, key)
        self.recent.append({name: value for name, value in metrics.items() if name != FINITE})
        self.step += 1
        self.watch.note(self.step, metrics[FINITE])

    def take(self, batch: Any) -> bool:
        """Takes one step, evaluates and saves if scheduled, and returns True after the last step."""
        task = self.task
        try:
            self.advance(batch)
            last = self.step == task.steps
            if self.step % task.evaluate_every == 0 or last:
                self.evaluate()
            if self.step % task.save_every == 0 or last:
                self.save()
        except NotFiniteTraining as error:
            checkpoint_state = "nothing was saved" if self.saved is None else f"the checkpoint of step {self.saved} stays"
            raise NotFiniteTraining(f"{task.title}: {error}; {checkpoint_state}") from error
        return last

    def evaluate(self) -> None:
        """Adds a point to the curve, and keeps the parameters if they are the best so far."""
        self.curve.append({"step": self.step, **mean_metrics(self.recent), **self.task.evaluate(self.params, self.step)})
        self.recent = []
        if self.best is not None:
            self.best = keep_better(self.best, jnp.asarray(self.curve[-1][str(self.task.score)], jnp.float32), self.params)

    def shown(self) -> str:
        """Formats the newest metrics as a line."""
        newest = {**(self.curve[-1] if self.curve else {}), **mean_metrics(self.recent[-10:])}
        means = {name: float(np.mean(values)) for name, values in newest.items() if name != "step"}
        return "  ".join(f"{name.replace('_', ' ')} {mean:.3f}" for name, mean in means.items() if not np.isnan(mean))


def freed(leaf: Array) -> jax.ShapeDtypeStruct:
    """Frees an array, so that the loaded one can use its memory, and returns its shape, dtype and sharding."""
    like = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
    leaf.delete()
    return like


def progress_bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[metrics]}"))
    return Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, disable=not console.is_terminal)


class TrainingPace:
    """Measures the speed of a run.

    Attributes:
        first: number and time of this process's first dispatched step, after which all programs are compiled.
    """

    def __init__(self, task: Task, step: int):
        self.task = task
        self.start = step
        self.step = step
        self.started_at = time.perf_counter()
        self.first: tuple[int, float] | None = None
        self.peak = peak_flop_per_s(task.devices) if task.flops else None

    def note(self, step: int) -> None:
        """Sets the number of steps so far."""
        self.step = step
        self.first = self.first or (step, time.perf_counter())

    def seconds(self) -> float:
        return time.perf_counter() - self.started_at

    def rate(self) -> float:
        """Returns the work per second in the unit of `Task.progress`, including compilation."""
        return (self.step - self.start) * self.task.progress[1] / self.seconds()

    def utilisation(self) -> float | None:
        """Returns the model FLOPs utilisation; see `TrainResult`."""
        if self.peak is None or self.first is None or self.step == self.first[0]:
            return None
        steps, seconds = (now - then for now, then in zip((self.step, time.perf_counter()), self.first, strict=True))
        return steps * self.task.flops / seconds / self.peak

    def shown(self) -> str:
        """Formats rate and utilisation as a line."""
        used = self.utilisation()
        return f"{self.rate():,.1f} {self.task.progress[0]}/s" + ("" if used is None else f"  {used:.1%} of peak")


def train(task: Task, console: Console, out: Path | None = None) -> TrainResult:
    """Runs a task to its last step, and evaluates there; resumes from a checkpoint in `out`.

    Args:
        task: the task.
        console: console for progress.
        out: folder for checkpoints; by default none are written.

    Raises:
        ValueError: the checkpoint belongs to another run, or has more steps than the task.
        NotFiniteTraining: a loss or gradient was not finite. The last checkpoint stays.
    """
    run = TrainingRun(task, out)
    if run.resume():
        console.print(f"resuming {task.title} at step {run.step} of {task.steps}", markup=False)
    pace = TrainingPace(task, run.step)
    refreshed = time.perf_counter()
    wait = REFRESH_S if console.is_terminal else LINE_S
    with Ledger() as ledger, progress_bar(console) as bar:
        row = bar.add_task(task.title, total=task.steps, completed=run.step, metrics="")
        for batch in islice(task.batches(run.step), task.steps - run.step):
            last = run.take(batch)
            pace.note(run.step)
            if last or time.perf_counter() - refreshed > wait:
                metrics = f"{run.shown()}  {pace.shown()}"
                refreshed = time.perf_counter()
                bar.update(row, completed=run.step, metrics=metrics)
                if not console.is_terminal:
                    console.print(f"{task.title}: step {run.step} of {task.steps}  {metrics}", markup=False)
        if not run.curve or run.curve[-1]["step"] != run.step:  # the checkpoint of the last step has no evaluation
            run.evaluate()
    params = run.params if run.best is None else run.best[1]
    return TrainResult(params, stacked(run.curve), pace.rate(), pace.seconds(), ledger, pace.utilisation())
