"""The training loop that language models and drafters share: optimiser, progress, checkpoints that resume exactly."""

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from safetensors import safe_open
from safetensors.numpy import save_file


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
    """

    steps: int = 1000
    batch_size: int = 16
    sequence_length: int = 256
    learning_rate: float = 6e-4
    optimizer: Literal["adamw", "muon"] = "adamw"
    muon_learning_rate: float = 0.02
    warmup: float = 0.04
    weight_decay: float = 0.01
    clip: float = 1.0
    seed: int = 0
    evaluate_every: int = 200
    save_every: int = 200

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "sequence_length", "learning_rate", "clip", "evaluate_every", "save_every"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, found {getattr(self, name)}")


def make_optimizer(options: TrainOptions, is_hidden_matrix: Callable[[Any], Any]) -> optax.GradientTransformation:
    """AdamW or Muon under warm-up, cosine decay and clipping.

    `is_hidden_matrix(params)` gives the tree of booleans that says which arrays Muon takes and weight decay applies to.
    """

    def rate(peak: float) -> optax.Schedule:
        warmup = max(1, round(options.warmup * options.steps))
        return optax.warmup_cosine_decay_schedule(0.0, peak, warmup, options.steps, peak / 20)

    adamw = optax.adamw(rate(options.learning_rate), b2=0.95, weight_decay=options.weight_decay, mask=is_hidden_matrix)
    if options.optimizer == "adamw":
        return optax.chain(optax.clip_by_global_norm(options.clip), adamw)
    muon = optax.contrib.muon(rate(options.muon_learning_rate), weight_decay=options.weight_decay)

    def label(params: Any) -> Any:
        return jax.tree.map(lambda hidden: "muon" if hidden else "adamw", is_hidden_matrix(params))

    return optax.chain(
        optax.clip_by_global_norm(options.clip),
        optax.transforms.partition({"muon": muon, "adamw": adamw}, label),
    )


def named_leaves(tree: Any) -> dict[str, Any]:
    """Each array of a tree under its path."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def save_state(path: Path, state: Any, step: int, identity: dict[str, Any]) -> None:
    """Writes a training state; the file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    arrays = {name: np.asarray(leaf) for name, leaf in named_leaves(state).items()}
    save_file(arrays, partial, metadata={"step": str(step), "identity": json.dumps(identity, sort_keys=True)})
    os.replace(partial, path)


def load_state(path: Path, like: Any, identity: dict[str, Any]) -> tuple[Any, int]:
    """Reads a training state of the same run.

    Raises:
        ValueError: the checkpoint belongs to a run with other options; each that differs is named.
    """
    with safe_open(path, "numpy") as file:
        metadata = file.metadata()
        saved = json.loads(metadata["identity"])
        expected = json.loads(json.dumps(identity))
        differs = [k for k in sorted({*saved, *expected}) if saved.get(k) != expected.get(k)]
        if differs:
            told = "; ".join(f"{k}: checkpoint {saved.get(k)!r}, now {expected.get(k)!r}" for k in differs)
            raise ValueError(f"{path} belongs to another run ({told}); name another --out, or pass the same options")
        leaves = [jnp.asarray(file.get_tensor(name), leaf.dtype) for name, leaf in named_leaves(like).items()]
    return jax.tree.unflatten(jax.tree.structure(like), leaves), int(metadata["step"])


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


def count_batches(task: Task, start: int) -> Iterator[tuple[int, Any]]:
    """The batches from step `start` on, through as many epochs as it takes."""
    step, epoch = 0, 0
    while True:
        before = step
        for batch in task.batches(epoch):
            if step >= start:
                yield step, batch
            step += 1
        assert step > before, "an epoch without a batch"
        epoch += 1


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

    def step_fn(state: tuple[Any, Any], frozen: Any, batch: Any, key: Array) -> tuple[tuple[Any, Any], Array]:
        params, opt_state = state
        (loss, _), gradient = jax.value_and_grad(task.loss, has_aux=True)(params, frozen, batch, key)
        update, opt_state = optimizer.update(gradient, opt_state, params)
        return (optax.apply_updates(params, update), opt_state), loss

    train_step = jax.jit(step_fn, donate_argnums=0)
    evaluate_step = jax.jit(task.loss)

    def evaluate(params: Any) -> float:
        if not task.held_out:
            return float("nan")
        parts = [evaluate_step(params, task.frozen, batch, jax.random.key(n)) for n, batch in enumerate(task.held_out)]
        return float(sum(loss * n for loss, n in parts) / sum(n for _, n in parts))

    identity = {k: v for k, v in asdict(options).items() if k not in ("evaluate_every", "save_every")} | task.identity
    path = out / "state.safetensors"
    params = init()
    state, start, curve = (params, optimizer.init(params)), 0, []
    if path.exists():
        state, start = load_state(path, state, identity)
        curve = [p for p in json.loads((out / "curve.json").read_text()) if p["step"] <= start]
        console.print(f"resuming {title} at step {start} of {options.steps}")

    def checkpoint(step: int) -> None:
        out.mkdir(parents=True, exist_ok=True)
        partial = out / "curve.partial"
        partial.write_text(json.dumps(curve))
        os.replace(partial, out / "curve.json")
        save_state(path, state, step, identity)

    key = jax.random.key(options.seed)
    began, done = time.perf_counter(), 0
    recent: list[Array] = []
    with progress_bar(console) as bar:
        row = bar.add_task(title, total=options.steps, completed=start, loss="-", held_out="-", rate="-")
        for step, batch in count_batches(task, start):
            if step >= options.steps:
                break
            state, loss = train_step(state, task.frozen, batch, jax.random.fold_in(key, step))
            recent.append(loss)
            done += 1
            last = step + 1 == options.steps
            if (step + 1) % 10 == 0 or last:
                mean = float(jnp.mean(jnp.stack(recent[-10:])))
                rate = done * task.tokens_per_step / (time.perf_counter() - began)
                bar.update(row, completed=step + 1, loss=f"{mean:.3f}", rate=f"{rate:,.0f}")
            if (step + 1) % options.evaluate_every == 0 or last:
                point = {"step": step + 1, "loss": float(jnp.mean(jnp.stack(recent))), "held_out_loss": evaluate(state[0])}
                recent = []
                curve.append(point)
                bar.update(row, held_out=f"{point['held_out_loss']:.3f}")
            if (step + 1) % options.save_every == 0 or last:
                checkpoint(step + 1)
    seconds = time.perf_counter() - began
    end = curve[-1] if curve else {"loss": float("nan"), "held_out_loss": evaluate(state[0])}
    rate = done * task.tokens_per_step / seconds if done else 0.0
    return TrainResult(state[0], options.steps, end["loss"], end["held_out_loss"], rate, seconds, curve)
