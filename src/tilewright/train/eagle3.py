"""Training of an EAGLE-3 drafter for a frozen target (arXiv 2503.01840); see `chain.py`."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int
from rich.console import Console

from tilewright.kernels.operations import Heads, Operations, Projection
from tilewright.models import decoder, eagle3
from tilewright.models.decoder import DecoderConfig, DecoderParams
from tilewright.models.eagle3 import Eagle3Config, Eagle3Params
from tilewright.models.params import initialise
from tilewright.train.chain import ChainKind, ChainOptions, Teacher, chain_attention, end_token, following, train_chain
from tilewright.train.data import TokenSource, frequent_tokens
from tilewright.train.loop import TrainResult
from tilewright.train.step import ONE_DEVICE, TrainingPlacement
from tilewright.train.taps import target_states
from tilewright.train.text import TextOptions

Eagle3Options = ChainOptions


def default_draft_vocab(vocab_size: int) -> int:
    """Returns the default size of the draft vocabulary: all up to 8,192 tokens, else at most 32,000 like published drafters."""
    return vocab_size if vocab_size <= 8192 else min(vocab_size, 32000)


def ask_target(
    target: DecoderConfig,
    config: Eagle3Config,
    ops: Operations,
    target_params: DecoderParams,
    ids: Int[Array, " W"],
    batch: Sequence[Array],
) -> Teacher:
    """Runs the target over whole sequences, or reads its cached states. `batch` is as in `taps.target_states`."""
    states = target_states(target, config.target_layer_ids, ops, target_params, batch, whole=True)
    assert states.stream is not None
    logits = decoder.logits(target, ops, target_params, states.stream)
    return Teacher(states.taps, jax.nn.softmax(logits[..., ids], axis=-1), jnp.argmax(logits, axis=-1))


def unroll(
    config: Eagle3Config,
    ops: Operations,
    params: Eagle3Params,
    embedding: Float[Array, "V H"],
    taps: Sequence[Float[Array, "B T G"]],
    tokens: Int[Array, "B T"],
) -> Iterator[Float[Array, "B T W"]]:
    """Runs the chain of each position over the tokens after it.

    Yields:
        the draft logits of each step; those of step i at position t predict the token at t + 2 + i.
    """
    h = eagle3.fuse(config, ops, params, taps)
    pairs = []
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    for i in range(config.block_size - 1):

        def attend(projection: Projection, heads: Heads) -> Array:
            q, k, v = ops.heads(projection, heads)
            pairs.append((k, v))
            return chain_attention(q, pairs).reshape(*q.shape[:2], -1)

        h = eagle3.step(config, ops, params, h, embedding[following(tokens, i + 1)], positions + i, attend)
        yield eagle3.draft_logits(config, ops, params, h)


def eagle3_kind(target: DecoderConfig, config: Eagle3Config, ops: Operations) -> ChainKind:
    """Builds the training of an EAGLE-3 drafter; `frozen` has the target's parameters and the ids of the draft vocabulary."""

    def teach(frozen: Any, batch: Sequence[Array], exact: bool) -> Teacher:
        return ask_target(target, config, ops, frozen[0], frozen[1], batch)

    def unrolled(params: Any, frozen: Any, teacher: Teacher, tokens: Array) -> Iterator[Array]:
        return unroll(config, ops, params, frozen[0].embed, teacher.taps, tokens)

    return ChainKind(
        title="EAGLE-3 drafter",
        config=config,
        end=end_token(target),
        specs=eagle3.declare(config),
        is_hidden_matrix=hidden_matrices,
        ids=lambda frozen: frozen[1],
        teach=teach,
        unrolled=unrolled,
    )


def warm_start(
    target: DecoderConfig, config: Eagle3Config, target_params: DecoderParams, ids: Int[Array, " W"], params: Eagle3Params
) -> Eagle3Params:
    """Initialises a drafter with its target's final norm and head, and with features that pass on the last tap.

    The MLP is a copy of the target's last MLP if sizes and structure fit.
    """
    h = target.hidden_size
    last = target_params.layers[-1]
    layer = params.layer
    if config.intermediate_size == target.intermediate_size and last.router is None and last.mlp_out_norm is None:
        norm = last.post_attention_norm
        layer = replace(layer, post_attention_norm=norm, gate_up=last.gate_up, down=last.down)
    head = target_params.embed.T if target_params.head is None else target_params.head
    fc = params.fc.at[-h:].add(jnp.eye(h, dtype=params.fc.dtype))
    return replace(params, fc=fc, layer=layer, norm=target_params.norm, head=head[:, ids])


def hidden_matrices(params: Eagle3Params) -> Eagle3Params:
    """Returns True for all matrices except the head: the arrays of Muon and weight decay."""
    return replace(jax.tree.map(lambda x: x.ndim == 2, params), head=False)


def train_eagle3(
    target: DecoderConfig,
    target_params: DecoderParams,
    config: Eagle3Config,
    stream: TokenSource,
    held_out: TokenSource,
    options: TextOptions,
    eagle3_options: Eagle3Options,
    out: Path,
    console: Console,
    placement: TrainingPlacement = ONE_DEVICE,
) -> tuple[TrainResult, list[float]]:
    """Trains an EAGLE-3 drafter with `chain.chain_loss`.

    The embedding is the target's, the vocabulary that of `frequent_tokens`. The arguments are those of `drafter.train_drafter`.

    Returns:
        the result, and the agreement with the target per draft step (see `chain.chain_agreement`).

    Raises:
        ValueError: the drafter does not fit the target or has an embedding, or sequences are too short.
    """
    eagle3.check_fits(config, target)
    if config.own_embedding:
        raise ValueError("expected a drafter that reads its target's embedding, found a drafter with an embedding")
    ids = jnp.asarray(frequent_tokens(stream, config.vocab_size, config.draft_vocab_size))

    def init() -> Eagle3Params:
        drawn = initialise(eagle3.declare(config), jax.random.key(options.seed))
        return warm_start(target, config, target_params, ids, drawn)

    kind = eagle3_kind(target, config, placement.ops(options))
    settings = {"config": asdict(config), "eagle3": {"decay": eagle3_options.decay}}
    texts = (stream, held_out, options, eagle3_options, settings, out, console, placement)
    result, agreed = train_chain(kind, target, (target_params, ids), target_params, init, *texts)
    return replace(result, params=replace(result.params, target_ids=ids)), agreed
