"""The loop that all training shares: steps, evaluations, progress, and checkpoints from which a run resumes exactly.

A task gives its step, compiled; the loop knows nothing of models, losses, optimisers or devices. It reads no figure before it
must, so that the device always has the next step at hand.
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
"""Named numbers: each an array, of the dims of the task's seed."""

Step = Callable[[Any, Any, Any, Array], tuple[Any, Any, Metrics]]
"""`step(params, opt_state, batch, key) -> (params, opt_state, metrics)`, compiled; DONATES the first two.

The metrics hold a `finite.Finite` under `FINITE` and may hold a weight under `WEIGHT`; neither is shown.
"""

WEIGHT = "weight"
"""Key of the metrics of a step that says how much the step counts in means over steps: the tokens in its loss."""

REFRESH_S = 0.2
"""Seconds from one look of the progress bar at metrics to the next; each look waits for the device."""
LINE_S = 60.0
"""Seconds from one line to the next where there is no terminal."""


@dataclass(frozen=True)
class TrainOptions:
    """Options of every training run; each kind of run adds its own."""

    learning_rate: float
    weight_decay: float
    batch_size: int
    seed: int
    save_every: int

    ABOVE_ZERO: ClassVar[tuple[str, ...]] = ("learning_rate", "batch_size", "save_every")
    AT_LEAST_ZERO: ClassVar[tuple[str, ...]] = ("weight_decay", "seed")
    MAY_CHANGE: ClassVar[tuple[str, ...]] = ("save_every",)
    """Options that a resumed run may change."""

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
        """Fingerprint of the run: what a checkpoint must agree with."""
        return {name: value for name, value in asdict(self).items() if name not in self.MAY_CHANGE}


@dataclass(frozen=True)
class Task:
    """One thing to train.

    Attributes:
        title: what the progress bar shows.
        run_fingerprint: whatever must agree for a checkpoint to be resumed, as plain data.
        init: gives parameters and state of the optimiser before the first step.
        step: see `Step`; it decides where its arrays lie. `gradient_step` makes the plain one.
        batches: `batches(first)` yields the batches of the steps from `first` on (from 0), without end, each of one shape.
        evaluate: `evaluate(params, step)` gives the metrics of held-out data after so many steps.
        steps: when it is done.
        evaluate_every, save_every: in steps; both also come after the last one.
        seed: of each step's key; an array `[runs]` where several runs train side by side, which all metrics then are too.
        progress: what a step gets done, for the rate: ("tokens", 4096).
        flops: operations that a step needs (see `flops.token_flops`); 0 where nobody counts them.
        devices: how many share them.
        score: the figure, higher being better, that says after which evaluation the parameters are best. By default those after
            the last step are the result.
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
    """Result of a run.

    Attributes:
        params: after the last step, or where `Task.score` was best.
        curve: a row for each evaluation: its "step", the metrics of the steps since the one before (see `mean_metrics`), and
            its own.
        rate: of this process, in what `Task.progress` counts a second.
        seconds: of this process, compilation included.
        ledger: what was compiled, or loaded from the disk, in that time.
        utilisation: share of the devices' peak that the model's operations make up, from this process's first step to its last;
            None where one of the two is not known.
    """

    params: Any
    curve: dict[str, np.ndarray]
    rate: float
    seconds: float
    ledger: Ledger = field(default_factory=Ledger)
    utilisation: float | None = None

    def last(self, figure: str) -> Any:
        """A figure of the last evaluation."""
        return self.curve[figure][-1]


def descend(
    loss: Callable[[Any], tuple[Array, Any]], optimizer: optax.GradientTransformation, params: Any, opt_state: Any
) -> tuple[Any, Any, Metrics, Any]:
    """One step of an optimiser down `loss(params) -> (loss, more)`: parameters, its state, and loss and more from before.

    The loss is among the metrics of a step, which say too whether it and its gradient are finite.
    """
    (value, more), gradient = jax.value_and_grad(loss, has_aux=True)(params)
    with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes in places
        update, opt_state = optimizer.update(gradient, opt_state, params)
    return optax.apply_updates(params, update), opt_state, {"loss": value, FINITE: finite(value, gradient)}, more


def gradient_step(
    loss: Callable[[Any, Any, Any, Array], tuple[Array, Any]],
    optimizer: optax.GradientTransformation,
    frozen: Any = None,
    placed: Any = None,
) -> Step:
    """The plain step of a task: one gradient.

    Args:
        loss: `loss(params, frozen, batch, key) -> (loss, weight)`; a weight of None weighs all steps alike.
        frozen: arrays that the loss reads and that stay as they are (a drafter's target).
        placed: the shardings of parameters, state and metrics, where the compiler is to divide the step; by default one device.
    """

    @partial(jax.jit, donate_argnums=(0, 1), out_shardings=placed)
    def step(params: Any, opt_state: Any, frozen: Any, batch: Any, key: Array) -> tuple[Any, Any, Metrics]:
        found = descend(lambda p: loss(p, frozen, batch, key), optimizer, params, opt_state)
        params, opt_state, metrics, weight = found
        return params, opt_state, metrics if weight is None else {**metrics, WEIGHT: weight}

    return lambda params, opt_state, batch, key: step(params, opt_state, frozen, batch, key)


@jax.jit
def step_keys(seed: Int[Array, "..."], step: Int[Array, ""]) -> Array:
    """The randomness of a step, of each run: a function of its seed and the step alone."""

    def one(seed: Array) -> Array:
        return jax.random.fold_in(jax.random.key(seed), step)

    return jax.vmap(one)(seed) if seed.ndim else one(seed)


@partial(jax.jit, donate_argnums=0)
def keep_better(best: tuple[Array, Any], score: Float[Array, "..."], params: Any) -> tuple[Array, Any]:
    """Score and parameters of the best evaluation; DONATES `best`. Runs are the first dims of every array.

    A score that is no number counts as better: where there is nothing to measure it on, the last parameters stay.
    """
    better = ~(score <= best[0])

    def choose(old: Array, new: Array) -> Array:
        return jnp.where(jnp.expand_dims(better, range(better.ndim, new.ndim)), new, old)

    return jax.tree.map(choose, best, (score, params))


def stacked(rows: Sequence[Metrics]) -> dict[str, np.ndarray]:
    """An array for each figure, with a row for each of `rows`."""
    return {name: np.stack([np.asarray(row[name]) for row in rows]) for name in rows[0]} if rows else {}


def mean_metrics(rows: Sequence[Metrics]) -> Metrics:
    """Mean of each figure, weighted where the rows have weights: NaN where all weights are 0.

    A single row without a weight is returned as it is, still on the device, so that nobody waits for it.
    """
    if not all(WEIGHT in row for row in rows):  # a checkpoint of an earlier version has rows without weights
        rows = [{name: value for name, value in row.items() if name != WEIGHT} for row in rows]
        return rows[0] if len(rows) == 1 else {name: values.mean(0) for name, values in stacked(rows).items()}
    means = stacked(rows)
    weights = means.pop(WEIGHT, np.zeros(0))
    if not weights.any():
        return {name: np.full_like(values[0], np.nan) for name, values in means.items()}
    return {name: np.average(values, axis=0, weights=weights).astype(values.dtype) for name, values in means.items()}


def unstacked(metrics: Mapping[str, np.ndarray], prefix: str) -> list[Metrics]:
    """The rows behind those arrays whose names begin with `prefix`."""
    named = {name.removeprefix(prefix): values for name, values in metrics.items() if name.startswith(prefix)}
    return [dict(zip(named, row, strict=True)) for row in zip(*named.values(), strict=True)]


class TrainingRun:
    """A task under way.

    Attributes:
        params, opt_state: where it stands; every step DONATES them.
        best: score and parameters of the best evaluation; None where the last ones count.
        step: steps taken so far.
        saved: after how many of them the checkpoint was written; None where there is none.
        watch: over losses and gradients.
        curve: the metrics of each evaluation.
        recent: the metrics of the steps since the last one.
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
        """Goes to where the checkpoint stands; False if there is none."""
        if self.out is None or not checkpoint.steps_in(self.out):
            return False
        like = jax.tree.map(given_back, (self.params, self.opt_state, self.best))
        found = checkpoint.read(self.out, like, self.task.run_fingerprint)
        (self.params, self.opt_state, self.best), self.step, metrics = found
        if self.step > self.task.steps:
            raise ValueError(
                f"the checkpoint in {self.out} stands at step {self.step} already, beyond the {self.task.steps} asked for"
            )
        self.curve = unstacked(metrics, "curve.")
        self.recent = unstacked(metrics, "recent.")
        self.saved = self.step
        return True

    def save(self) -> None:
        """Writes the checkpoint, if one is wanted. Raises a `NotFiniteTraining` where a step since the last one went wrong."""
        self.watch.settle()
        if self.out is not None:
            series = {"curve.": stacked(self.curve), "recent.": stacked(self.recent)}
            metrics = {prefix + name: values for prefix, each in series.items() for name, values in each.items()}
            checkpoint.write(self.out, (self.params, self.opt_state, self.best), self.step, metrics, self.task.run_fingerprint)
            self.saved = self.step

    def advance(self, batch: Any) -> None:
        """Takes one step. Raises a `NotFiniteTraining` where one of those before it went wrong."""
        key = step_keys(self.seed, np.int32(self.step))
        self.params, self.opt_state, metrics = self.task.step(self.params, self.opt_state, batch, key)
        self.recent.append({name: value for name, value in metrics.items() if name != FINITE})
        self.step += 1
        self.watch.note(self.step, metrics[FINITE])

    def take(self, batch: Any) -> bool:
        """Takes one step, and evaluates and saves where that is due. Returns whether it was the last one."""
        task = self.task
        try:
            self.advance(batch)
            last = self.step == task.steps
            if self.step % task.evaluate_every == 0 or last:
                self.evaluate()
            if self.step % task.save_every == 0 or last:
                self.save()
        except NotFiniteTraining as error:
            kept = "nothing was saved" if self.saved is None else f"the checkpoint of step {self.saved} stays"
            raise NotFiniteTraining(f"{task.title}: {error}; {kept}") from error
        return last

    def evaluate(self) -> None:
        """Adds a point to the curve, and keeps the parameters where they are the best so far."""
        self.curve.append({"step": self.step, **mean_metrics(self.recent), **self.task.evaluate(self.params, self.step)})
        self.recent = []
        if self.best is not None:
            self.best = keep_better(self.best, jnp.asarray(self.curve[-1][str(self.task.score)], jnp.float32), self.params)

    def shown(self) -> str:
        """The newest metrics as a line."""
        newest = {**(self.curve[-1] if self.curve else {}), **mean_metrics(self.recent[-10:])}
        means = {name: float(np.mean(values)) for name, values in newest.items() if name != "step"}
        return "  ".join(f"{name.replace('_', ' ')} {mean:.3f}" for name, mean in means.items() if not np.isnan(mean))


def given_back(leaf: Array) -> jax.ShapeDtypeStruct:
    """Frees an array, whose memory is wanted for another in its place, and gives its shape, dtype and sharding."""
    like = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
    leaf.delete()
    return like


def progress_bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[metrics]}"))
    return Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, disable=not console.is_terminal)


class TrainingPace:
    """Speed of a run.

    Attributes:
        first: after which step, and when, the first of this process was handed out: then all is compiled.
    """

    def __init__(self, task: Task, step: int):
        self.task = task
        self.start = step
        self.step = step
        self.began = time.perf_counter()
        self.first: tuple[int, float] | None = None
        self.peak = peak_flop_per_s(task.devices) if task.flops else None

    def note(self, step: int) -> None:
        """So many steps are taken."""
        self.step = step
        self.first = self.first or (step, time.perf_counter())

    def seconds(self) -> float:
        return time.perf_counter() - self.began

    def rate(self) -> float:
        """In what `Task.progress` counts a second, compilation included."""
        return (self.step - self.start) * self.task.progress[1] / self.seconds()

    def utilisation(self) -> float | None:
        """See `TrainResult`."""
        if self.peak is None or self.first is None or self.step == self.first[0]:
            return None
        done, since = (now - then for now, then in zip((self.step, time.perf_counter()), self.first, strict=True))
        return done * self.task.flops / since / self.peak

    def shown(self) -> str:
        """All of it as a line."""
        used = self.utilisation()
        return f"{self.rate():,.1f} {self.task.progress[0]}/s" + ("" if used is None else f"  {used:.1%} of peak")


def train(task: Task, console: Console, out: Path | None = None) -> TrainResult:
    """Takes all steps of a task; with `out`, from the checkpoint there if there is one. The curve ends at the last step.

    Raises:
        ValueError: the checkpoint is that of another run, or beyond the last step.
        NotFinite: the loss or a gradient was no finite number. The last checkpoint stays as it is.
    """
    run = TrainingRun(task, out)
    if run.resume():
        console.print(f"resuming {task.title} at step {run.step} of {task.steps}", markup=False)
    pace = TrainingPace(task, run.step)
    looked = time.perf_counter()
    wait = REFRESH_S if console.is_terminal else LINE_S
    with Ledger() as ledger, progress_bar(console) as bar:
        row = bar.add_task(task.title, total=task.steps, completed=run.step, metrics="")
        for batch in islice(task.batches(run.step), task.steps - run.step):
            last = run.take(batch)
            pace.note(run.step)
            if last or time.perf_counter() - looked > wait:
                metrics = f"{run.shown()}  {pace.shown()}"
                looked = time.perf_counter()
                bar.update(row, completed=run.step, metrics=metrics)
                if not console.is_terminal:
                    console.print(f"{task.title}: step {run.step} of {task.steps}  {metrics}", markup=False)
        if not run.curve or run.curve[-1]["step"] != run.step:  # the checkpoint was the last step, and not measured there
            run.evaluate()
    params = run.params if run.best is None else run.best[1]
    return TrainResult(params, stacked(run.curve), pace.rate(), pace.seconds(), ledger, pace.utilisation())
