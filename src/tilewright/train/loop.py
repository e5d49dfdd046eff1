"""The training loop that language models and drafters share: optimiser, progress, checkpoints that resume exactly."""

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from tilewright.train.precision import check_products, trained


@dataclass(frozen=True)
class TrainOptions:
    """How to train; what to train on and the model's sizes stand elsewhere.

    Attributes:
        steps: optimiser steps.
        batch_size: sequences a step.
        sequence_length: tokens a sequence.
        learning_rate: peak rate of AdamW (and, with "muon", of everything that is no hidden matrix).
        optimizer: "adamw", or "muon" (Jordan et al. 2024) for the hidden matrices at `muon_learning_rate`.
        warmup: share of the steps over which the rate rises; it then falls to a twentieth by a cosine.
        weight_decay: decoupled, on matrices only.
        clip: largest global norm of a gradient.
        seed: of the initialisation and of the data's order.
        evaluate_every, save_every: in steps.
        products: "float32", or "bfloat16" with float32 sums by the CPU kernels (see `precision.py`); weights are float32.
    """

    steps: int = 1000
    batch_size: int = 16
    sequence_length: int = 256
    learning_rate: float = 6e-4
    optimizer: str = "adamw"
    muon_learning_rate: float = 0.02
    warmup: float = 0.04
    weight_decay: float = 0.01
    clip: float = 1.0
    seed: int = 0
    evaluate_every: int = 200
    save_every: int = 200
    products: str = "float32"

    def __post_init__(self) -> None:
        counts = ("steps", "batch_size", "sequence_length", "evaluate_every", "save_every")
        for name in (*counts, "learning_rate", "muon_learning_rate", "clip"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, found {getattr(self, name)}")
        if self.optimizer not in ("adamw", "muon"):
            raise ValueError(f"expected the optimizer adamw or muon, found {self.optimizer!r}")
        check_products(self.products)
        if not 0 <= self.warmup < 1:
            raise ValueError(f"expected a warmup from 0 to below 1, found {self.warmup}")
        if not self.weight_decay >= 0:
            raise ValueError(f"expected a weight_decay of 0 or more, found {self.weight_decay}")


def make_optimizer(options: TrainOptions, is_hidden_matrix: Callable[[Any], Any]) -> optax.GradientTransformation:
    """AdamW or Muon under warm-up, cosine decay and clipping.

    `is_hidden_matrix(params)` gives the tree of booleans that says which arrays Muon takes and weight decay applies to.
    """

    def rate(peak: float) -> optax.Schedule:
        warmup = min(max(1, round(options.warmup * options.steps)), options.steps - 1)
        return optax.warmup_cosine_decay_schedule(0.0, peak, warmup, options.steps, peak / 20)

    adamw = optax.adamw(rate(options.learning_rate), b2=0.95, weight_decay=options.weight_decay, mask=is_hidden_matrix)
    clip = optax.clip_by_global_norm(options.clip)
    if options.optimizer == "adamw":
        return promoting(optax.chain(clip, adamw))
    muon = optax.contrib.muon(rate(options.muon_learning_rate), weight_decay=options.weight_decay)

    def label(params: Any) -> Any:
        return jax.tree.map(lambda hidden: "muon" if hidden else "adamw", is_hidden_matrix(params))

    return promoting(optax.chain(clip, optax.transforms.partition({"muon": muon, "adamw": adamw}, label)))


def promoting(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """optax mixes dtypes in places, which JAX's strict promotion would refuse."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        with jax.numpy_dtype_promotion("standard"):
            return inner.update(updates, state, params)

    return optax.GradientTransformation(inner.init, update)


def named_leaves(tree: Any) -> dict[str, Any]:
    """Each array of a tree under its path."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def save_state(path: Path, state: Any, step: int, identity: dict[str, Any], recent: Sequence[float] = ()) -> None:
    """Writes a training state and the losses since the last evaluation; the file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    arrays = {name: np.asarray(leaf) for name, leaf in named_leaves(state).items()}
    metadata = {"step": str(step), "identity": json.dumps(identity, sort_keys=True), "recent": json.dumps(list(recent))}
    save_file(arrays, partial, metadata=metadata)
    os.replace(partial, path)


def load_state(path: Path, like: Any, identity: dict[str, Any]) -> tuple[Any, int, list[float]]:
    """Reads a training state of the same run.

    Returns:
        the state, its step, and the losses since the last evaluation.

    Raises:
        ValueError: the checkpoint belongs to a run with other options (each that differs is named), or is no checkpoint.
    """
    try:
        with safe_open(path, "numpy") as file:
            metadata = file.metadata() or {}
            require_same_run(path, json.loads(metadata.get("identity", "{}")), json.loads(json.dumps(identity)))
            leaves = [jnp.asarray(file.get_tensor(name), leaf.dtype) for name, leaf in named_leaves(like).items()]
    except SafetensorError as error:
        raise ValueError(f"{path} is not a readable checkpoint: {error}") from error
    state = jax.tree.unflatten(jax.tree.structure(like), leaves)
    return state, int(metadata["step"]), json.loads(metadata.get("recent", "[]"))


def require_same_run(path: Path, saved: dict[str, Any], expected: dict[str, Any]) -> None:
    differs = [k for k in sorted({*saved, *expected}) if saved.get(k) != expected.get(k)]
    if differs:
        told = "; ".join(f"{k}: checkpoint {saved.get(k)!r}, now {expected.get(k)!r}" for k in differs)
        raise ValueError(f"{path} belongs to another run ({told}); name another --out, or pass the same options")


@dataclass(frozen=True)
class Task:
    """One thing to train.

    Attributes:
        loss: `loss(trained, frozen, batch, key) -> (mean loss, number of tokens predicted)`.
        frozen: arrays that the loss reads and that stay as they are (a drafter's target).
        batches: `batches(epoch)` yields that epoch's batches, each a pytree of arrays of one shape.
        held_out: batches of the held-out split, always the same.
        tokens_per_step: for the rate that is shown.
        identity: whatever must agree for a checkpoint to be resumed.
    """

    loss: Callable[[Any, Any, Any, Array], tuple[Array, Array]]
    frozen: Any
    batches: Callable[[int], Iterator[Any]]
    held_out: list[Any]
    tokens_per_step: int
    identity: dict[str, Any]


@dataclass(frozen=True)
class TrainResult:
    """What a run reached. Losses are in nats a token."""

    params: Any
    steps: int
    loss: float
    held_out_loss: float
    tokens_per_s: float
    seconds: float
    curve: list[dict[str, float]]

    def figures(self) -> dict[str, Any]:
        """The figures for `--json`."""
        return {k: v for k, v in asdict_shallow(self).items() if k != "params"}


def asdict_shallow(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def batches_from(task: Task, start: int, stop: int) -> Iterator[Any]:
    """The batches of steps `start` to `stop - 1`, through as many epochs as it takes."""
    step, epoch = 0, 0
    while step < stop:
        before = step
        for batch in task.batches(epoch):
            if start <= step < stop:
                yield batch
            step += 1
        assert step > before, "an epoch without a batch"
        epoch += 1


class Run:
    """A task under way: its compiled programs, and where it stands.

    Attributes:
        state: parameters and optimiser state; every step DONATES it.
        step: steps taken so far.
        curve: one point for each evaluation.
        recent: losses of the steps since the last evaluation.
    """

    def __init__(
        self, task: Task, init: Callable[[], Any], options: TrainOptions, optimizer: optax.GradientTransformation, out: Path
    ):
        self.task, self.out = task, out
        self.identity = {k: v for k, v in asdict(options).items() if k not in ("evaluate_every", "save_every")} | task.identity
        self.key = jax.random.key(options.seed)
        params = init()
        self.state: tuple[Any, Any] = (params, optimizer.init(params))
        self.step = 0
        self.curve: list[dict[str, float]] = []
        self.recent: list[Array] = []

        def loss_of(params: Any, frozen: Any, batch: Any, key: Array) -> tuple[Array, Array]:
            if options.products == "bfloat16":
                params, frozen = trained(params), trained(frozen)
            return task.loss(params, frozen, batch, key)

        def train_step(state: tuple[Any, Any], frozen: Any, batch: Any, key: Array) -> tuple[tuple[Any, Any], Array]:
            params, opt_state = state
            (loss, _), gradient = jax.value_and_grad(loss_of, has_aux=True)(params, frozen, batch, key)
            update, opt_state = optimizer.update(gradient, opt_state, params)
            return (optax.apply_updates(params, update), opt_state), loss

        self.train_step = jax.jit(train_step, donate_argnums=0)
        self.evaluate_step = jax.jit(loss_of)

    @property
    def checkpoint(self) -> Path:
        return self.out / "state.safetensors"

    def resume(self) -> bool:
        """Goes to where the checkpoint in `out` stands; False if there is none."""
        if not self.checkpoint.exists():
            return False
        self.state, self.step, recent = load_state(self.checkpoint, self.state, self.identity)
        self.recent = [jnp.float32(loss) for loss in recent]
        self.curve = [p for p in json.loads((self.out / "curve.json").read_text()) if p["step"] <= self.step]
        return True

    def save(self) -> None:
        """Writes the checkpoint. The curve goes first: points beyond the state's step are dropped on resuming."""
        self.out.mkdir(parents=True, exist_ok=True)
        partial = self.out / "curve.partial"
        partial.write_text(json.dumps(self.curve))
        os.replace(partial, self.out / "curve.json")
        save_state(self.checkpoint, self.state, self.step, self.identity, [float(loss) for loss in self.recent])

    def advance(self, batch: Any) -> None:
        """Takes one step. Its randomness is a function of the seed and the step alone."""
        key = jax.random.fold_in(self.key, self.step)
        self.state, loss = self.train_step(self.state, self.task.frozen, batch, key)
        self.recent.append(loss)
        self.step += 1

    def recent_loss(self, steps: int | None = None) -> float:
        """The mean loss of the last `steps` steps, at most those since the last evaluation."""
        return float(jnp.mean(jnp.stack(self.recent[-steps:] if steps else self.recent)))

    def held_out_loss(self) -> float:
        """The mean over all held-out tokens; NaN without a held-out split."""
        if not self.task.held_out:
            return float("nan")
        batches = enumerate(self.task.held_out)
        parts = [self.evaluate_step(self.state[0], self.task.frozen, batch, jax.random.key(n)) for n, batch in batches]
        return float(sum(loss * n for loss, n in parts) / sum(n for _, n in parts))

    def evaluate(self) -> None:
        """Adds a point to the curve."""
        self.curve.append({"step": self.step, "loss": self.recent_loss(), "held_out_loss": self.held_out_loss()})
        self.recent = []


def progress_bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}  held-out {task.fields[held_out]}  {task.fields[rate]} tokens/s"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )


def train(
    task: Task,
    init: Callable[[], Any],
    options: TrainOptions,
    optimizer: optax.GradientTransformation,
    out: Path,
    console: Console,
    title: str,
) -> TrainResult:
    """Trains until `options.steps`, resuming from `out/state.safetensors` where that exists."""
    run = Run(task, init, options, optimizer, out)
    if run.resume():
        console.print(f"resuming {title} at step {run.step} of {options.steps}")
    start, began = run.step, time.perf_counter()

    def rate() -> float:
        return (run.step - start) * task.tokens_per_step / (time.perf_counter() - began)

    with progress_bar(console) as bar:
        row = bar.add_task(title, total=options.steps, completed=start, loss="-", held_out="-", rate="-")
        for batch in batches_from(task, start, options.steps):
            run.advance(batch)
            last = run.step == options.steps
            if run.step % 10 == 0 or last:
                bar.update(row, completed=run.step, loss=f"{run.recent_loss(10):.3f}", rate=f"{rate():,.0f}")
            if run.step % options.evaluate_every == 0 or last:
                run.evaluate()
                bar.update(row, held_out=f"{run.curve[-1]['held_out_loss']:.3f}")
            if run.step % options.save_every == 0 or last:
                run.save()
    end = run.curve[-1]
    return TrainResult(
        run.state[0], options.steps, end["loss"], end["held_out_loss"], rate(), time.perf_counter() - began, run.curve
    )
