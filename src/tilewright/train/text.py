"""Training on text: options, optimizers and batches of language models and drafters."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, count, islice
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Int

from tilewright.kernels.operations import Operations
from tilewright.kernels.select import PLAIN, training_operations
from tilewright.train.checkpoint import fingerprint
from tilewright.train.data import TokenStream, require_windows
from tilewright.train.log import RECORDED, LogOptions, Metrics
from tilewright.train.loop import TrainOptions, TrainResult
from tilewright.train.muon import muon as make_muon

Batch = tuple[np.ndarray, ...]
"""Tokens, loss mask and, with segments, numbers of documents, `[batch, length]` each."""

HELD_OUT_BATCHES = 32


@dataclass(frozen=True)
class TextOptions(TrainOptions):
    """Options of training on text.

    Attributes:
        steps: number of optimizer steps.
        batch_size: sequences per step.
        sequence_length: tokens per sequence.
        learning_rate: peak learning rate of AdamW (with "muon", of all arrays except the hidden matrices).
        optimizer: "adamw", or "muon" (Jordan et al. 2024) for the hidden matrices with `muon_learning_rate`.
        muon_learning_rate: peak learning rate of Muon.
        warmup: share of the steps over which the learning rate rises from 0; with 0, the first step has the peak.
        schedule: learning rate after the warm-up: "cosine" decays to a twentieth of the peak; "wsd" stays constant and decays
            linearly over the last `cooldown` (warm-up, stable, decay: MiniCPM, arXiv 2404.06395 §4), so that a run can stop
            before, and another run continue from its weights.
        cooldown: share of the steps over which "wsd" decays; 0 for a run that another one continues.
        weight_decay: decoupled weight decay of matrices.
        clip: largest global norm of a gradient.
        state_dtype: dtype of the optimizer's stored moving averages: "float32", or "bfloat16", which halves their memory.
        seed: seed of the initial weights and of the order of the data.
        evaluate_every: steps between evaluations.
        save_every: steps between checkpoints.
        keep: number of checkpoints to keep, the last ones.
        checkpoints: folder or URL of the checkpoints; None for a folder in that of the run.
        log: settings of the log.
        matmul_dtype: dtype of matrix products: "float32"; "bfloat16" with float32 sums; or "auto", bfloat16 if the chip has
            instructions for it (see `kernels.select.training_operations`). Weights are float32.
        compute_dtype: dtype of the loss: "float32", or "bfloat16", which reads trained and frozen parameters in bfloat16 while
            the optimizer keeps float32 copies. It halves the memory traffic of accelerators.
        accumulate: parts of a batch that run one after another, whose gradients are summed. The loss is that of the batch at
            once; memory holds the activations of one part.
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
    state_dtype: str = "float32"
    seed: int = 0
    evaluate_every: int = 200
    save_every: int = 200
    keep: int = 1
    checkpoints: str | None = None
    log: LogOptions = field(default_factory=LogOptions)
    matmul_dtype: str = "auto"
    compute_dtype: str = "float32"
    accumulate: int = 1

    ABOVE_ZERO: ClassVar[tuple[str, ...]] = (
        *TrainOptions.ABOVE_ZERO,
        "steps",
        "sequence_length",
        "muon_learning_rate",
        "clip",
        "evaluate_every",
        "accumulate",
    )
    MAY_CHANGE: ClassVar[tuple[str, ...]] = (*TrainOptions.MAY_CHANGE, "evaluate_every", "accumulate")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.optimizer not in ("adamw", "muon"):
            raise ValueError(f"expected the optimizer adamw or muon, found {self.optimizer!r}")
        training_operations(self.matmul_dtype)  # raises for a dtype that cannot run
        for name in ("compute_dtype", "state_dtype"):
            if (dtype := getattr(self, name)) not in ("float32", "bfloat16"):
                raise ValueError(f"expected the {name.replace('_', ' ')} float32 or bfloat16, found {dtype!r}")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"expected a warmup from 0 to below 1, found {self.warmup}")
        if self.schedule not in ("cosine", "wsd"):
            raise ValueError(f"expected the schedule cosine or wsd, found {self.schedule!r}")
        if not 0 <= self.cooldown <= 1 - self.warmup:
            raise ValueError(f"expected a cooldown from 0 to {1 - self.warmup:g} (1 - warmup), found {self.cooldown}")

    def run_fingerprint(self) -> dict[str, Any]:
        """Returns the fingerprint of the run, which a checkpoint must match.

        With "wsd" the number of steps and the start of the decay may change.
        """
        left_out: tuple[str, ...] = ("steps", "warmup", "cooldown") if self.schedule == "wsd" else ()
        return {name: value for name, value in super().run_fingerprint().items() if name not in left_out}

    @property
    def ops(self) -> Operations:
        """Operations of the loss."""
        return training_operations(self.matmul_dtype, self.compute_dtype)


Packing = Literal["concatenate", "first-fit", "best-fit"]


@dataclass(frozen=True)
class StreamOptions:
    """Options of a stream.

    Attributes:
        shuffle: sequences in memory of which batches are drawn at random; 1 keeps the order of the files.
        shards: parts of the data, each of which fills its own rows of a batch.
    """

    shuffle: int = 1024
    shards: int = 1

    def __post_init__(self) -> None:
        for name in ("shuffle", "shards"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} of at least 1, found {getattr(self, name)}")


def rate(options: TextOptions, peak: float) -> optax.Schedule:
    """Returns the schedule of the learning rate with this peak."""
    warmup = min(max(1, round(options.warmup * options.steps)), options.steps - 1) if options.warmup else 0
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
    """Builds AdamW or Muon with schedule, clipping and stored dtype.

    Args:
        options: options of the training loop.
        is_hidden_matrix: `is_hidden_matrix(params)` returns a tree of booleans, True for arrays of Muon and weight decay.
        ops: operations of Muon's products; by default XLA's, which the partitioner can shard.
    """
    learning_rate = rate(options, options.learning_rate)
    adamw = optax.adamw(learning_rate, b2=0.95, weight_decay=options.weight_decay, mask=is_hidden_matrix)
    clip = recording(optax.clip_by_global_norm(options.clip), learning_rate)
    if options.optimizer == "adamw":
        return stored_in(options.state_dtype, optax.chain(clip, adamw))
    muon = make_muon(rate(options, options.muon_learning_rate), options.weight_decay, ops or PLAIN)

    def label(params: Any) -> Any:
        def name(hidden: bool, param: Any) -> str:  # experts' stacked matrices use AdamW, since Muon updates single matrices
            return "muon" if hidden and param.ndim == 2 else "adamw"

        return jax.tree.map(name, is_hidden_matrix(params), params)

    return stored_in(options.state_dtype, optax.chain(clip, optax.transforms.partition({"muon": muon, "adamw": adamw}, label)))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepRecord:
    """Metrics of the last step in the optimizer's state. The fields are scalars, or what a tree of the state's form has.

    Attributes:
        steps: number of steps.
        gradient_norm: global norm of the gradient before clipping.
        learning_rate: learning rate of AdamW.
    """

    steps: Any
    gradient_norm: Any
    learning_rate: Any


def recording(clip: optax.GradientTransformation, learning_rate: optax.Schedule) -> optax.GradientTransformation:
    """Returns the clipping with a `StepRecord` as its state; XLA computes the gradient's norm once for both.

    Args:
        clip: clipping without a state.
        learning_rate: schedule of AdamW's learning rate.
    """

    def init(params: Any) -> Any:
        return StepRecord(jnp.int32(0), jnp.float32(0), jnp.float32(0))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        record = StepRecord(state.steps + 1, optax.tree.norm(updates), jnp.asarray(learning_rate(state.steps), jnp.float32))
        updates, _ = clip.update(updates, clip.init(params), params)
        return updates, record

    return optax.GradientTransformation(init, update)


def recorded(opt_state: Any) -> Metrics:
    """Returns the metrics of the last step in an optimizer's state; empty for an optimizer that records none."""
    parts = jax.tree.leaves(opt_state, is_leaf=lambda part: isinstance(part, StepRecord))
    records = [part for part in parts if isinstance(part, StepRecord)]
    return {name: getattr(records[0], name) for name in RECORDED} if records else {}


def stored_in(dtype: str, optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns the optimizer with the arrays of its state stored in a dtype; its updates are computed in float32."""
    if dtype == "float32":
        return optimizer

    def cast(state: Any, dtype: str) -> Any:
        return jax.tree.map(lambda x: x.astype(dtype) if x.ndim and jnp.issubdtype(x.dtype, jnp.floating) else x, state)

    def init(params: Any) -> Any:
        return cast(optimizer.init(params), dtype)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = optimizer.update(updates, cast(state, "float32"), params)
        return updates, cast(state, dtype)

    return optax.GradientTransformation(init, update)


@runtime_checkable
class Batches(Protocol):
    """Protocol of a run's batches, such as `Windows` of a text."""

    @property
    def options(self) -> TextOptions: ...

    def batches(self, first: int) -> Iterator[Any]:
        """Yields training batches from step `first` on."""
        ...

    def held_out_batches(self) -> list[Any]:
        """Returns the held-out batches, the same ones at every evaluation."""
        ...

    @property
    def tokens_per_step(self) -> float:
        """Tokens per step, on average."""
        ...

    def run_fingerprint(self) -> dict[str, Any]:
        """Returns the fingerprint of the run, which a checkpoint must match."""
        ...


def require_texts(stream: TokenStream, held_out: TokenStream, length: int, options: TextOptions) -> None:
    """Raises a `ValueError` for training text shorter than a batch, or for texts without tokens in the loss.

    Args:
        stream: training text.
        held_out: held-out text.
        length: tokens per window.
        options: options of the training loop.
    """
    require_windows(stream, length, options.batch_size, "the training text")
    if not len(held_out.starts_in_loss(length)):
        raise ValueError(f"expected tokens in the loss in the held-out text, found none among {len(held_out.tokens)}")


@dataclass(frozen=True)
class Windows:
    """Batches of windows of a text.

    Attributes:
        stream: training text.
        held_out: held-out text.
        length: tokens per window.
        options: options of the training loop, with the seed of the order.
        rows: rows of each batch on the devices of this process; None for all rows.
        segments: batches also have the number of each token's document, so that documents of a window do not see each other.
    """

    stream: TokenStream
    held_out: TokenStream
    length: int
    options: TextOptions
    rows: Int[np.ndarray, " R"] | None = None
    segments: bool = False

    def __post_init__(self) -> None:
        require_texts(self.stream, self.held_out, self.length, self.options)

    def epoch(self, number: int) -> Iterator[Batch]:
        """Yields the training batches of an epoch."""
        options = self.options
        return self.stream.windows(self.length, options.batch_size, options.seed, number, self.rows, self.segments)

    def batches(self, first: int) -> Iterator[Batch]:
        """Yields training batches, epoch by epoch, from step `first` on."""
        return islice(chain.from_iterable(self.epoch(number) for number in count()), first, None)

    @property
    def tokens_per_step(self) -> float:
        """Tokens per step."""
        return self.options.batch_size * self.options.sequence_length

    def held_out_batches(self) -> list[Batch]:
        """Returns the batches of the held-out text, the same ones at every evaluation."""
        options = self.options
        batches = self.held_out.padded_windows(self.length, options.batch_size, options.seed, self.rows, self.segments)
        return list(islice(batches, HELD_OUT_BATCHES))

    def run_fingerprint(self) -> dict[str, Any]:
        """Returns the fingerprint of the run, which a checkpoint must match."""
        text = fingerprint((self.stream.tokens, self.stream.in_loss))
        segments = {"segments": fingerprint(self.stream.documents)} if self.segments else {}
        return {**self.options.run_fingerprint(), "training_tokens": len(self.stream.tokens), "text": text, **segments}


def text_metrics(result: TrainResult) -> dict[str, Any]:
    """Returns the metrics for `--json`; a loss without tokens is null."""
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
