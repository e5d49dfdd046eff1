"""Training on text: options, optimisers, and the task that language models and drafters share."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, count, islice
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jaxtyping import Int

from tilewright.kernels.operations import Operations
from tilewright.kernels.select import PLAIN, training_operations
from tilewright.train.checkpoint import fingerprint
from tilewright.train.data import TokenStream, require_windows
from tilewright.train.loop import Metrics, Task, TrainOptions, TrainResult, gradient_step
from tilewright.train.muon import muon as make_muon

Batch = tuple[np.ndarray, np.ndarray]
"""Tokens, and which of them are in the loss, `[batch, length]` each."""

Loss = Callable[[Any, Any, Any, Array], tuple[Array, Array]]
"""`loss(params, frozen, batch, key) -> (mean loss in nats, how much was predicted)`, of a batch on the device."""

HELD_OUT_BATCHES = 32


@dataclass(frozen=True)
class TextOptions(TrainOptions):
    """Training options of language models; the data and the model's sizes stand elsewhere.

    Attributes:
        steps: optimiser steps.
        batch_size: sequences a step.
        sequence_length: tokens a sequence.
        learning_rate: peak rate of AdamW (and, with "muon", of everything that is no hidden matrix).
        optimizer: "adamw", or "muon" (Jordan et al. 2024) for the hidden matrices at `muon_learning_rate`.
        warmup: share of the steps over which the rate rises.
        schedule: what it does then: "cosine" falls to a twentieth of the peak; "wsd" stays, and falls in a straight line over
            the last `cooldown` (warm-up, stable, decay: MiniCPM, arXiv 2404.06395 §4), so that a run can be stopped anywhere
            before, and another one go on from its weights.
        cooldown: share of the steps over which "wsd" falls; 0 for a run that another one goes on from.
        weight_decay: decoupled, on matrices only.
        clip: largest global norm of a gradient.
        seed: of the initialisation and of the data's order.
        evaluate_every, save_every: in steps.
        matmul_dtype: of matrix products: "float32"; "bfloat16" with float32 sums; or "auto", bfloat16 where the chip has
            instructions for it (see `kernels.select.training_operations`). Weights are float32.
        compute_dtype: of what the loss is computed in: "float32", or "bfloat16", in which it then reads trained and frozen
            parameters, while the optimiser keeps the former in float32. Half of the memory traffic, for accelerators.
    """

    steps: int = 1000
    batch_size: int = 16
    sequence_length: int = 256
    learning_rate: float = 6e-4
    optimizer: str = "adamw"
    muon_learning_rate: float = 0.02
    warmup: float = 0.04
    schedule: str = "cosine"
    cooldown: float = 0.2
    weight_decay: float = 0.01
    clip: float = 1.0
    seed: int = 0
    evaluate_every: int = 200
    save_every: int = 200
    matmul_dtype: str = "auto"
    compute_dtype: str = "float32"

    ABOVE_ZERO: ClassVar[tuple[str, ...]] = (
        *TrainOptions.ABOVE_ZERO,
        "steps",
        "sequence_length",
        "muon_learning_rate",
        "clip",
        "evaluate_every",
    )
    MAY_CHANGE: ClassVar[tuple[str, ...]] = ("save_every", "evaluate_every")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.optimizer not in ("adamw", "muon"):
            raise ValueError(f"expected the optimizer adamw or muon, found {self.optimizer!r}")
        training_operations(self.matmul_dtype)  # says what cannot run
        if self.compute_dtype not in ("float32", "bfloat16"):
            raise ValueError(f"expected the compute dtype float32 or bfloat16, found {self.compute_dtype!r}")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"expected a warmup from 0 to below 1, found {self.warmup}")
        if self.schedule not in ("cosine", "wsd"):
            raise ValueError(f"expected the schedule cosine or wsd, found {self.schedule!r}")
        if not 0 <= self.cooldown <= 1 - self.warmup:
            raise ValueError(f"expected a cooldown from 0 to what the warmup leaves, found {self.cooldown}")

    def run_fingerprint(self) -> dict[str, Any]:
        """Fingerprint of the run: what a checkpoint must agree with.

        Under "wsd" that is not when the run ends, nor where its rate begins to fall.
        """
        left_out = ("steps", "warmup", "cooldown") if self.schedule == "wsd" else ()
        if self.compute_dtype == "float32":
            left_out = (*left_out, "compute_dtype")  # checkpoints of before there was a choice
        same = {name: value for name, value in super().run_fingerprint().items() if name not in left_out}
        return {"products" if name == "matmul_dtype" else name: value for name, value in same.items()}  # its key in checkpoints

    @property
    def ops(self) -> Operations:
        """Operations that compute: of arrays in bfloat16 XLA's own."""
        return PLAIN if self.compute_dtype == "bfloat16" else training_operations(self.matmul_dtype)


def in_compute_dtype(options: TextOptions, loss: Loss) -> Loss:
    """A loss that reads all floating-point parameters in the dtype that `options` name; gradients are of those as given."""
    if options.compute_dtype == "float32":
        return loss

    def rounded(leaf: Array) -> Array:
        return leaf.astype(options.compute_dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    def computed(params: Any, frozen: Any, batch: Any, key: Array) -> tuple[Array, Array]:
        return loss(jax.tree.map(rounded, params), jax.tree.map(rounded, frozen), batch, key)

    return computed


def rate(options: TextOptions, peak: float) -> optax.Schedule:
    """The learning rate at each step, with this peak."""
    warmup = min(max(1, round(options.warmup * options.steps)), options.steps - 1)
    if options.schedule == "cosine":
        return optax.warmup_cosine_decay_schedule(0.0, peak, warmup, options.steps, peak / 20)
    falling = round(options.cooldown * options.steps)
    parts = [optax.linear_schedule(0.0, peak, warmup), optax.constant_schedule(peak)]
    if not falling:
        return optax.join_schedules(parts, [warmup])
    return optax.join_schedules([*parts, optax.linear_schedule(peak, 0.0, falling)], [warmup, options.steps - falling])


def make_optimizer(
    options: TextOptions, is_hidden_matrix: Callable[[Any], Any], ops: Operations | None = None
) -> optax.GradientTransformation:
    """AdamW or Muon under a schedule and clipping.

    Args:
        is_hidden_matrix: `is_hidden_matrix(params)` gives the tree of booleans that says which arrays Muon takes and weight
            decay applies to.
        ops: what Muon's products are taken with; XLA's by default, which the partitioner divides over a mesh.
    """

    adamw = optax.adamw(rate(options, options.learning_rate), b2=0.95, weight_decay=options.weight_decay, mask=is_hidden_matrix)
    clip = optax.clip_by_global_norm(options.clip)
    if options.optimizer == "adamw":
        return optax.chain(clip, adamw)
    muon = make_muon(rate(options, options.muon_learning_rate), options.weight_decay, ops or PLAIN)

    def label(params: Any) -> Any:
        def of(hidden: bool, param: Any) -> str:  # those of experts are stacked, and Muon's updates are of single matrices
            return "muon" if hidden and param.ndim == 2 else "adamw"

        return jax.tree.map(of, is_hidden_matrix(params), params)

    return optax.chain(clip, optax.transforms.partition({"muon": muon, "adamw": adamw}, label))


@runtime_checkable
class Batches(Protocol):
    """Protocol of the batches that a run is fed with: `Windows` of a text, say."""

    @property
    def options(self) -> TextOptions: ...

    def batches(self, first: int) -> Iterator[Any]:
        """Training batches from step `first` on."""
        ...

    def held_out_batches(self) -> list[Any]:
        """Held-out batches, the same at every evaluation."""
        ...

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a step computes, on average."""
        ...

    def run_fingerprint(self) -> dict[str, Any]:
        """Fingerprint of the run: what a checkpoint must agree with."""
        ...


def require_texts(stream: TokenStream, held_out: TokenStream, length: int, options: TextOptions) -> None:
    """Raises a `ValueError` where the training text is too short for a batch, or one of the texts has nothing to learn.

    Args:
        length: tokens of a window.
    """
    require_windows(stream, length, options.batch_size, "the training text")
    if not len(held_out.starts_in_loss(length)):
        raise ValueError(f"the held-out text has no token to be predicted: its {len(held_out.tokens)} are all given")


@dataclass(frozen=True)
class Windows:
    """Batches of windows of a text, in an order that `options` set.

    Attributes:
        stream, held_out: what is trained on, and what is held out.
        length: tokens of a window.
        options: how to train.
        rows: of each batch that this process's devices compute on; None for all. Nothing else depends on it.
    """

    stream: TokenStream
    held_out: TokenStream
    length: int
    options: TextOptions
    rows: Int[np.ndarray, " R"] | None = None

    def __post_init__(self) -> None:
        require_texts(self.stream, self.held_out, self.length, self.options)

    def epoch(self, number: int) -> Iterator[Batch]:
        """Training batches of one epoch."""
        return self.stream.windows(self.length, self.options.batch_size, self.options.seed, number, self.rows)

    def batches(self, first: int) -> Iterator[Batch]:
        """Training batches, epoch by epoch, from step `first` on."""
        return islice(chain.from_iterable(self.epoch(number) for number in count()), first, None)

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a step computes."""
        return self.options.batch_size * self.options.sequence_length

    def held_out_batches(self) -> list[Batch]:
        """Batches of the held-out text, the same at every evaluation."""
        batches = self.held_out.padded_windows(self.length, self.options.batch_size, self.options.seed, self.rows)
        return list(islice(batches, HELD_OUT_BATCHES))

    def run_fingerprint(self) -> dict[str, Any]:
        """Fingerprint of the run: what a checkpoint must agree with."""
        text = fingerprint((self.stream.tokens, self.stream.in_loss))
        return {**self.options.run_fingerprint(), "training_tokens": len(self.stream.tokens), "text": text}


def text_task(
    title: str,
    loss: Loss,
    init: Callable[[], Any],
    is_hidden_matrix: Callable[[Any], Any],
    windows: Batches,
    run_fingerprint: dict[str, Any],
    frozen: Any = None,
    place: Callable[[Any], Any] = lambda batch: batch,
    flops: float = 0.0,
    measured: Loss | None = None,
) -> Task:
    """The task of training on windows of a text.

    Args:
        init: gives the parameters to start from, which are copied, for training donates its own.
        is_hidden_matrix: see `make_optimizer`.
        run_fingerprint: what a checkpoint must agree with, besides the options and the text.
        frozen: what the loss reads beside the parameters.
        place: puts a batch where the loss, in evaluations, wants it; by default it comes as it is.
        flops: operations that a token needs.
        measured: the loss of held-out text, where that leaves something out.
    """
    options = windows.options
    held_out = list(map(place, windows.held_out_batches()))
    optimizer = make_optimizer(options, is_hidden_matrix, options.ops)
    loss = in_compute_dtype(options, loss)

    measure = jax.jit(measured or loss)
    tokens = windows.tokens_per_step

    def evaluate(params: Any, step: int) -> Metrics:
        parts = [measure(params, frozen, batch, jax.random.key(n)) for n, batch in enumerate(held_out)]
        return {"held_out_loss": sum(loss * n for loss, n in parts) / sum(n for _, n in parts)}

    def start() -> tuple[Any, Any]:
        params = jax.tree.map(jnp.copy, init())
        return params, optimizer.init(params)

    return Task(
        title,
        {**windows.run_fingerprint(), **run_fingerprint},
        init=start,
        step=gradient_step(loss, optimizer, frozen),
        batches=windows.batches,
        evaluate=evaluate,
        steps=options.steps,
        evaluate_every=options.evaluate_every,
        save_every=options.save_every,
        seed=options.seed,
        progress=("tokens", tokens),
        flops=flops * tokens,
    )


def text_metrics(result: TrainResult) -> dict[str, Any]:
    """The figures for `--json`; a loss is null where no token was in it."""
    fields = {"step": "step", "loss": "loss_nats_per_token", "held_out_loss": "held_out_loss_nats_per_token"}

    def number(name: str, n: int) -> float | None:
        value = result.curve[name][n].item()
        return None if np.isnan(value) else value

    curve = [{field: number(name, n) for name, field in fields.items()} for n in range(len(result.curve["step"]))]
    steps = curve[-1]["step"]
    last = {field: value for field, value in curve[-1].items() if field != "step"}
    times = {"tokens_per_s": result.rate, "seconds": result.seconds, **result.ledger.figures()}
    used = {} if result.utilisation is None else {"model_flops_utilization": result.utilisation}
    return {"steps": steps, **last, **times, **used, "curve": curve}
