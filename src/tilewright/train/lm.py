"""Training of models that predict tokens, and next-token training of decoder language models."""

from collections.abc import Mapping
from dataclasses import asdict, replace
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
from tilewright.train.checkpoint import fingerprint
from tilewright.train.data import TokenStream
from tilewright.train.flops import token_flops
from tilewright.train.loop import TrainResult, train
from tilewright.train.predictions import Predicted, Predictor
from tilewright.train.sharded import prediction_loss
from tilewright.train.step import ONE_DEVICE, Objective, TrainingPlacement, make_task
from tilewright.train.text import Batches, TextOptions, Windows


def next_tokens(
    tokens: Int[Array, "B T1"], in_loss: Bool[Array, "B T1"], segments: Int[Array, "B T1"] | None = None
) -> Predicted:
    """Returns next-token predictions of the tokens in the loss.

    With the number of each token's segment, segments do not see each other, their positions begin at 0, and their first tokens
    are not predicted.
    """
    weights = in_loss[:, 1:].astype(jnp.float32)
    if segments is None:
        return Predicted(tokens[:, :-1], tokens[:, 1:], weights, jnp.sum(weights, axis=1))
    goes_on = segments[:, 1:] == segments[:, :-1]
    weights = jnp.where(goes_on, weights, 0.0)
    place = jnp.arange(tokens.shape[1] - 1)
    begin = jax.lax.cummax(jnp.where(jnp.pad(goes_on[:, :-1], ((0, 0), (1, 0))), 0, place), axis=1)
    return Predicted(tokens[:, :-1], tokens[:, 1:], weights, jnp.sum(weights, axis=1), segments[:, :-1], place - begin)


def language_model(config: DecoderConfig) -> Predictor:
    """Returns a decoder that learns to predict the next token."""
    return Predictor(config=config, predict=lambda batch, key: next_tokens(*batch), attend=decoder.causal_attend)


def next_token_loss(
    config: DecoderConfig, ops: Operations, params: DecoderParams, tokens: Int[Array, "B T"], in_loss: Bool[Array, "B T"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Computes the mean next-token cross-entropy in nats, and the number of predicted tokens; see `Predictor.loss`."""
    return language_model(config).loss(ops, params, next_tokens(tokens, in_loss))


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


def train_predictor(
    title: str,
    model: Predictor,
    windows: Batches,
    out: Path,
    console: Console,
    start: DecoderParams | None = None,
    run_fingerprint: Mapping[str, Any] = MappingProxyType({}),
    placement: TrainingPlacement = ONE_DEVICE,
) -> TrainResult:
    """Trains a model that predicts tokens; see `loop.train` for checkpoints and resumption.

    Args:
        title: title of the progress bar.
        model: the model, and what it learns from.
        windows: batches of this process.
        out: folder for checkpoints.
        console: console for progress.
        start: float32 parameters to start from; by default random ones. Parameters that are already sharded over the mesh (see
            `step.model_shardings`) are DONATED.
        run_fingerprint: further settings that a checkpoint must match.
        placement: devices and strategy.

    Raises:
        ValueError: the mesh does not divide the model or a batch; see also `loop.train`.
    """
    options = windows.options
    ops = placement.ops(options)

    def init() -> DecoderParams:
        if start is not None:
            return start
        return initialise(model.specs, jax.random.key(options.seed), shardings=placement.shardings(model.specs))

    objective = Objective(
        title,
        model.specs,
        hidden_matrices,
        prediction_loss(model, ops, placement),
        draw=lambda frozen, batch, key: model.predict(batch, key),
        measured=prediction_loss(model.unbalanced, ops, placement),
        flops=model.copies * token_flops(model.sizes, model.copies * options.sequence_length),
    )
    settings = {"config": asdict(model.config), "start": None if start is None else fingerprint(start), **run_fingerprint}
    return train(make_task(objective, init, windows, settings, placement), console, out)


def check_segments(config: DecoderConfig, segments: bool) -> None:
    """Raises a `ValueError` for segments of a model with linear attention, whose states continue over the ends of documents."""
    if segments and config.delta is not None:
        raise ValueError("expected a model without linear attention for --text segments=true, found one with it")


def train_lm(
    config: DecoderConfig,
    stream: TokenStream,
    held_out: TokenStream,
    options: TextOptions,
    out: Path,
    console: Console,
    start: DecoderParams | None = None,
    run_fingerprint: Mapping[str, Any] = MappingProxyType({}),
    placement: TrainingPlacement = ONE_DEVICE,
    segments: bool = False,
) -> TrainResult:
    """Trains a language model on the windows of a text; see `train_predictor` for the arguments.

    With `segments`, documents of a window do not see each other; see `check_segments`.
    """
    check_segments(config, segments)
    length = options.sequence_length + 1
    windows = Windows(stream, held_out, length, options, placement.local_rows(options.batch_size), segments)
    model = language_model(config)
    return train_predictor("language model", model, windows, out, console, start, run_fingerprint, placement)
