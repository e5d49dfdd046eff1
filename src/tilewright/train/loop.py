"""Training loop of all kinds of models: steps, evaluations, progress, and checkpoints from which a run resumes exactly.

A task brings its compiled step; the loop is independent of models, losses, optimizers and devices. The loop delays reading
metrics, so that the device always has a next step queued.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jaxtyping import Float, Int
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tilewright.compiled.ledger import Ledger
from tilewright.train.checkpoint import Checkpoints, checkpoint_folder, saved_steps
from tilewright.train.finite import FINITE, NotFiniteTraining, Watch, finite
from tilewright.train.flops import peak_flop_per_s
from tilewright.train.log import LINE_S, RECORDED, LogOptions, Metrics, TrainingLog, mean_metrics, stacked

Step = Callable[[Any, Any, Any, Array], tuple[Any, Any, Metrics]]
"""Compiled `step(params, opt_state, batch, key) -> (params, opt_state, metrics)`; DONATES the first two arguments.

The metrics have a `finite.Finite` under `FINITE` and may have a weight under `WEIGHT`; neither is printed.
"""


@runtime_checkable
class DataPosition(Protocol):
    """Protocol of a data source whose position is part of the checkpoint."""

    def state(self) -> dict[str, Any]:
        """Returns the position of all processes after the batches so far, as JSON-able data. All processes call this method."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Moves to a position that `state` returned, before the first batch."""
        ...


REFRESH_S = 0.2
"""Seconds between updates of the progress bar; each update waits for the device."""


@dataclass(frozen=True)
class TrainOptions:
    """Options of all training runs; subclasses add further options."""

    learning_rate: float
    weight_decay: float
    batch_size: int
    seed: int
    save_every: int
    keep: int
    checkpoints: str | None
    log: LogOptions

    ABOVE_ZERO: ClassVar[tuple[str, ...]] = ("learning_rate", "batch_size", "save_every", "keep")
    AT_LEAST_ZERO: ClassVar[tuple[str, ...]] = ("weight_decay", "seed")
    MAY_CHANGE: ClassVar[tuple[str, ...]] = ("save_every", "keep", "checkpoints", "log")
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
        position: source of the batches that has a position of its own; None for batches that depend on the step only.
        keep: number of checkpoints to keep, the last ones. Each has the parameters of the best evaluation, too.
        checkpoints: folder or URL of the checkpoints; None for a folder in that of the run.
        log: settings of the log.
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
    position: DataPosition | None = None
    keep: int = 1
    checkpoints: str | None = None
    log: LogOptions = field(default_factory=LogOptions)


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
        saved: step of the last checkpoint, which may still be written; None without checkpoint.
        watch: checks of losses and gradients.
        curve: metrics of each evaluation.
        recent: metrics of the steps since the last evaluation.
        log: log of the steps and evaluations.
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
        self.checkpoints: Checkpoints | None = None
        self.log = TrainingLog(task.log, task.progress, task.flops, peak_flop_per_s(task.devices) if task.flops else None)

    def open(self) -> bool:
        """Opens the run's log and checkpoints, and loads the last checkpoint; returns False without one.

        Raises:
            ValueError: the checkpoint is damaged, belongs to another run, or is after the last step.
        """
        resumed = self.load()
        self.log.open(self.out, self.step, self.task.title, self.task.run_fingerprint)
        return resumed

    def load(self) -> bool:
        """Opens the run's checkpoints and loads the last one; see `open`."""
        if self.out is None:
            return False
        steps = saved_steps(self.out, self.task.checkpoints)
        self.checkpoints = Checkpoints(checkpoint_folder(self.out, self.task.checkpoints), self.task.keep)
        if not steps:
            return False
        like = jax.tree.map(freed, (self.params, self.opt_state, self.best))
        found = self.checkpoints.load(steps[-1], like, self.task.run_fingerprint)
        self.params, self.opt_state, self.best = found.state
        self.step = self.saved = found.step
        if self.step > self.task.steps:
            place = self.checkpoints.folder
            raise ValueError(f"expected at least the {self.step} steps of the checkpoint in {place}, found {self.task.steps}")
        self.curve = unstacked(found.metrics, "curve.")
        self.recent = unstacked(found.metrics, "recent.")
        if (self.task.position is None) != (found.position is None):
            expected, given = ("without", "with") if found.position is None else ("with", "without")
            raise ValueError(
                f"{self.checkpoints.folder}: expected a run {expected} a position in the data, found one {given} it"
            )
        if self.task.position is not None and found.position is not None:
            self.task.position.restore(found.position)
        return True

    def save(self) -> None:
        """Starts to write a checkpoint if the run has a folder, and returns when the next step may begin.

        Raises:
            NotFiniteTraining: a step was not finite.
            OSError, ValueError: the previous checkpoint could not be written.
        """
        self.log.end_steps(wait=True)
        self.watch.check_all()
        if self.checkpoints is not None:
            self.log.flush()  # a run that resumes has no metrics of earlier steps
            series = {"curve.": stacked(self.curve), "recent.": stacked(self.recent)}
            metrics = {prefix + name: values for prefix, each in series.items() for name, values in each.items()}
            position = None if self.task.position is None else self.task.position.state()
            state = (self.params, self.opt_state, self.best)
            with self.log.apart():
                self.checkpoints.save(state, self.step, metrics, self.task.run_fingerprint, position)
            self.saved = self.step

    def close(self) -> None:
        """Waits until the last checkpoint is written, and closes the log. Raises the error of a failed checkpoint."""
        try:
            if self.checkpoints is not None:
                self.checkpoints.close()
        finally:
            self.log.close()

    def advance(self, batch: Any) -> None:
        """Takes one step. Raises a `NotFiniteTraining` if an earlier step was not finite."""
        key = step_keys(self.seed, np.int32(self.step))
        self.params, self.opt_state, metrics = self.task.step(self.params, self.opt_state, batch, key)
        self.step += 1
        self.recent.append({name: value for name, value in metrics.items() if name not in (FINITE, *RECORDED)})
        self.watch.note(self.step, metrics[FINITE])
        self.log.note(self.step, {name: value for name, value in metrics.items() if name != FINITE})

    def take(self, batch: Any) -> bool:
        """Takes one step, evaluates and saves if scheduled, and returns True after the last step."""
        task = self.task
        try:
            self.log.begin(self.step + 1)
            self.advance(batch)
            last = self.step == task.steps
            if task.evaluate_every == 1:  # a part of the step, which nothing waits for
                self.evaluate()
            elif self.step % task.evaluate_every == 0 or last:
                self.log.flush()
                with self.log.apart():
                    self.evaluate()
                    jax.block_until_ready(self.curve[-1])
            if self.step % task.save_every == 0 or last:
                self.save()
        except NotFiniteTraining as error:
            checkpoint_state = "nothing was saved" if self.saved is None else f"the checkpoint of step {self.saved} stays"
            raise NotFiniteTraining(f"{task.title}: {error}; {checkpoint_state}") from error
        return last

    def evaluate(self) -> None:
        """Adds a point to the curve, and keeps the parameters if they are the best so far."""
        found = self.task.evaluate(self.params, self.step)
        self.curve.append({"step": self.step, **mean_metrics(self.recent), **found})
        self.log.evaluated(self.step, found)
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
        out: folder for checkpoints and logs; by default none are written.

    Raises:
        ValueError: the checkpoint belongs to another run, or has more steps than the task.
        NotFiniteTraining: a loss or gradient was not finite. The last checkpoint stays.
    """
    run = TrainingRun(task, out)
    with closing(run), Ledger() as ledger, progress_bar(console) as bar:
        if run.open():
            console.print(f"resuming {task.title} at step {run.step} of {task.steps}", markup=False)
        pace = TrainingPace(task, run.step)
        refreshed = time.perf_counter()
        row = bar.add_task(task.title, total=task.steps, completed=run.step, metrics="")

        def print_line() -> None:
            nonlocal refreshed
            line = f"{task.title}: step {run.log.row_step} of {task.steps}  {run.log.line()}"
            console.print(line, markup=False, soft_wrap=True)
            refreshed = time.perf_counter()

        if task.log.every is not None and not console.is_terminal:
            run.log.on_row = lambda: None if run.log.row_step == task.steps else print_line()
        for batch in run.log.batches(islice(task.batches(run.step), task.steps - run.step)):
            last = run.take(batch)
            pace.note(run.step)
            waited = time.perf_counter() - refreshed
            if console.is_terminal and (last or waited > REFRESH_S):
                bar.update(row, completed=run.step, metrics=f"{run.shown()}  {pace.shown()}")
                refreshed = time.perf_counter()
            elif not console.is_terminal and (last or (task.log.every is None and waited > LINE_S)):
                run.log.flush()
                print_line()
        if not run.curve or run.curve[-1]["step"] != run.step:  # the checkpoint of the last step has no evaluation
            run.evaluate()
    params = run.params if run.best is None else run.best[1]
    return TrainResult(params, stacked(run.curve), pace.rate(), pace.seconds(), ledger, pace.utilisation())
