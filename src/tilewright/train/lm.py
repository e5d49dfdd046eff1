"""Next-token training of a decoder language model."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int
from rich.console import Console

from tilewright.kernels.operations import Operations
from tilewright.models import decoder
from tilewright.models.decoder import DecoderConfig, DecoderParams, Layer
from tilewright.models.params import initialise
from tilewright.train.balance import Loads
from tilewright.train.checkpoint import fingerprint
from tilewright.train.data import TokenStream
from tilewright.train.flops import token_flops
from tilewright.train.loop import TrainResult, train
from tilewright.train.sharded import ShardedSetup, next_tokens, over_mesh, place_batch, sharded_loss
from tilewright.train.text import Loss, TextOptions, Windows, make_optimizer, text_task


def next_token_loss(
    config: DecoderConfig, ops: Operations, params: DecoderParams, tokens: Int[Array, "B T"], in_loss: Bool[Array, "B T"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Computes the mean next-token cross-entropy in nats, and the number of predicted tokens.

    For a mixture of experts the loss includes the weighted balancing loss over all positions.
    """
    loads = Loads(config, ops)
    hidden = decoder.forward_full(config, loads.ops, params, tokens[:, :-1]).hidden
    weights = in_loss[:, 1:].astype(jnp.float32)
    total = jnp.sum(weights)
    loss = decoder.cross_entropy(config, ops, params, hidden, tokens[:, 1:], weights) / jnp.maximum(total, 1.0)
    return loss + loads.loss(), total


def hidden_matrices(params: DecoderParams) -> DecoderParams:
    """Returns True for the matrices inside the layers, the arrays of weight decay and (except experts') Muon."""
    flags = jax.tree.map(lambda _: False, params)
    layers = tuple(exclude_biases(jax.tree.map(lambda x: x.ndim >= 2, layer)) for layer in params.layers)
    return DecoderParams(flags.embed, layers, flags.norm, flags.head)


def exclude_biases(flags: Layer) -> Layer:
    """Sets the flags of experts' biases to False, whose arrays have two dimensions."""
    router = flags.router
    if router is None or router.expert_bias is None:
        return flags
    return replace(flags, router=replace(router, expert_bias=(False, False)))


def batch_loss(config: DecoderConfig, ops: Operations, setup: ShardedSetup | None) -> Loss:
    """Returns the loss of a batch for `text_task`, on one device or over a mesh."""

    def loss(params: Any, frozen: None, batch: Any, key: Array) -> tuple[Array, Array]:
        if setup is None:
            return next_token_loss(config, ops, params, *batch)
        over = sharded_loss(replace(setup, config=config))
        predicted, total = next_tokens(*batch)
        return over(params, predicted), total

    return loss


def train_lm(
    config: DecoderConfig,
    stream: TokenStream,
    held_out: TokenStream,
    options: TextOptions,
    out: Path,
    console: Console,
    start: DecoderParams | None = None,
    run_fingerprint: Mapping[str, Any] = MappingProxyType({}),
    setup: ShardedSetup | None = None,
) -> TrainResult:
    """Trains a language model; see `loop.train` for checkpoints and resumption.

    Args:
        config: configuration of the model.
        stream: training text.
        held_out: held-out text.
        options: options of the training loop.
        out: folder for checkpoints.
        console: console for progress.
        start: float32 parameters to start from; by default random ones. Parameters that are already sharded over the mesh (see
            `sharded.model_shardings`) are DONATED.
        run_fingerprint: further settings that a checkpoint must match.
        setup: mesh and plan; by default one device.

    Raises:
        ValueError: the mesh does not divide the model or a batch; see also `loop.train`.
    """

    def init() -> DecoderParams:
        if start is not None:
            return start
        return initialise(
            decoder.declare(config), jax.random.key(options.seed), shardings=None if setup is None else setup.shardings
        )

    settings = {"config": asdict(config), "start": None if start is None else fingerprint(start), **run_fingerprint}
    length = options.sequence_length + 1
    flops = token_flops(config, options.sequence_length)
    measured = batch_loss(replace(config, balance=0.0), options.ops, setup)
    task = partial(
        text_task,
        "language model",
        batch_loss(config, options.ops, setup),
        init,
        hidden_matrices,
        flops=flops,
        measured=measured,
    )
    if setup is None:
        return train(task(Windows(stream, held_out, length, options), settings), console, out)
    setup.check_batch((options.batch_size, length))
    windows = Windows(stream, held_out, length, options, setup.local_rows(options.batch_size))
    single = task(windows, settings, place=partial(place_batch, setup))
    return train(over_mesh(single, setup, make_optimizer(options, hidden_matrices), init), console, out)
