"""Next-token training of a decoder language model."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int
from rich.console import Console

from tilewright.models import decoder
from tilewright.models.decoder import DecoderConfig, DecoderParams
from tilewright.models.params import initialise
from tilewright.train.data import Stream, require_windows
from tilewright.train.loop import Task, TrainOptions, TrainResult, make_optimizer, train


def next_token_loss(
    config: DecoderConfig, params: DecoderParams, tokens: Int[Array, "B T"], in_loss: Bool[Array, "B T"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Mean cross-entropy in nats of each token given those before it, and the number of tokens predicted."""
    hidden = decoder.forward_full(config, params, tokens[:, :-1]).hidden
    logits = decoder.logits(config, params, hidden)
    labels, weights = tokens[:, 1:], in_loss[:, 1:].astype(jnp.float32)
    label_logits = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    nll = jax.nn.logsumexp(logits, axis=-1) - label_logits
    total = jnp.sum(weights)
    return jnp.sum(nll * weights) / jnp.maximum(total, 1.0), total


def hidden_matrices(params: DecoderParams) -> DecoderParams:
    """True for the matrices inside the layers: what Muon takes, and what weight decay applies to."""
    flags = jax.tree.map(lambda _: False, params)
    return DecoderParams(flags.embed, jax.tree.map(lambda x: x.ndim == 2, params.layers), flags.norm, flags.head)


def held_out_batches(stream: Stream, options: TrainOptions, limit: int = 32) -> list[Any]:
    """The first batches of the held-out stream, the same at every evaluation."""
    batches: Iterator[Any] = stream.windows(options.sequence_length + 1, options.batch_size, options.seed, 0)
    return [batch for _, batch in zip(range(limit), batches, strict=False)]


def train_lm(
    config: DecoderConfig, stream: Stream, held_out: Stream, options: TrainOptions, out: Path, console: Console
) -> TrainResult:
    """Trains a language model from random weights on `stream`; see `loop.train` for checkpoints and resumption."""
    require_windows(stream, options.sequence_length + 1, options.batch_size, "the training text")
    require_windows(held_out, options.sequence_length + 1, options.batch_size, "the held-out text")

    def loss(params: Any, frozen: None, batch: Any, key: Array) -> tuple[Array, Array]:
        return next_token_loss(config, params, jnp.asarray(batch[0]), jnp.asarray(batch[1]))

    def init() -> DecoderParams:
        return initialise(decoder.declare(config), jax.random.key(options.seed))

    task = Task(
        loss=loss,
        frozen=None,
        batches=lambda epoch: stream.windows(options.sequence_length + 1, options.batch_size, options.seed, epoch),
        held_out=held_out_batches(held_out, options),
        tokens_per_step=options.batch_size * options.sequence_length,
        identity={"config": asdict(config), "training_tokens": len(stream.tokens)},
    )
    return train(task, init, options, make_optimizer(options, hidden_matrices), out, console, "language model")
