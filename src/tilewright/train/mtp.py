"""Training of an MTP head for a frozen target; see `chain.py`.

DeepSeek-V3 (arXiv 2412.19437, section 2.2) trains a head with its model, for one token. Here the head is unrolled: each step
reads its own normalised output, as when drafting. The output head is the target's, and frozen.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int
from rich.console import Console

from tilewright.kernels.operations import Heads, Operations, Projection, softcapped
from tilewright.models import decoder, mtp
from tilewright.models.decoder import DecoderConfig, DecoderParams
from tilewright.models.draft_vocab import DraftVocab
from tilewright.models.mtp import MtpConfig, MtpParams
from tilewright.models.params import initialise
from tilewright.train.chain import ChainKind, ChainOptions, Teacher, chain_attention, end_token, following, train_chain
from tilewright.train.data import TokenSource, frequent_tokens
from tilewright.train.loop import TrainResult
from tilewright.train.step import ONE_DEVICE, TrainingPlacement
from tilewright.train.taps import target_states
from tilewright.train.text import TextOptions

MtpOptions = ChainOptions


class Frozen(NamedTuple):
    """Frozen arrays that the loss reads.

    Attributes:
        params: parameters of the target.
        vocab: draft vocabulary with its head; None for the whole vocabulary.
    """

    params: DecoderParams
    vocab: DraftVocab | None

    @property
    def head(self) -> Any:
        """Output head of the drafter, `[hidden, W]`."""
        return decoder.output_head(self.params) if self.vocab is None else self.vocab.head


def unroll(
    config: MtpConfig,
    ops: Operations,
    params: MtpParams,
    embedding: Float[Array, "V H"],
    states: Float[Array, "B T H"],
    tokens: Int[Array, "B T"],
) -> Iterator[Float[Array, "B T H"]]:
    """Runs the chain of each position over the tokens after it.

    Args:
        states: the target's hidden states after its final norm.

    Yields:
        the output of each step, the head's input; that of step i at position t predicts the token at t + 2 + i.
    """
    h = states
    pairs = []
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    for i in range(config.block_size - 1):

        def attend(projection: Projection, heads: Heads) -> Array:
            q, k, v = ops.heads(projection, heads)
            pairs.append((k, v))
            return chain_attention(q, pairs, heads.scores).reshape(*q.shape[:2], -1)

        h = mtp.step(config, ops, params, h, embedding[following(tokens, i + 1)], positions + i, attend)
        yield h


def mtp_kind(target: DecoderConfig, config: MtpConfig, ops: Operations) -> ChainKind:
    """Builds the training of an MTP head; `frozen` is a `Frozen`."""

    def logits(frozen: Frozen, hidden: Array) -> Array:
        return softcapped(ops.linear(hidden, frozen.head, jnp.float32), target.logit_softcap)

    def teach(frozen: Frozen, batch: Sequence[Array], exact: bool) -> Teacher:
        """Runs the target; without `exact`, through the head of the draft vocabulary only, which costs a fraction."""
        found = target_states(target, config.target_layer_ids, ops, frozen.params, batch, whole=True)
        assert found.stream is not None
        states = ops.rms_norm(found.stream, frozen.params.norm, target.rms_norm_eps)
        best = following(batch[0], 1)
        if exact:
            best = ops.head_argmax(states, decoder.output_head(frozen.params))[0]
        return Teacher((states,), jax.nn.softmax(logits(frozen, states), axis=-1), best)

    def unrolled(params: MtpParams, frozen: Frozen, teacher: Teacher, tokens: Array) -> Iterator[Array]:
        for hidden in unroll(config, ops, params, frozen.params.embed, teacher.taps[0], tokens):
            yield logits(frozen, hidden)

    return ChainKind(
        title="MTP head",
        config=config,
        end=end_token(target),
        specs=mtp.declare(config),
        is_hidden_matrix=lambda params: jax.tree.map(lambda x: x.ndim == 2, params),
        ids=lambda frozen: None if frozen.vocab is None else frozen.vocab.ids,
        teach=teach,
        unrolled=unrolled,
    )


def train_mtp(
    target: DecoderConfig,
    target_params: DecoderParams,
    config: MtpConfig,
    stream: TokenSource,
    held_out: TokenSource,
    options: TextOptions,
    mtp_options: MtpOptions,
    out: Path,
    console: Console,
    placement: TrainingPlacement = ONE_DEVICE,
) -> tuple[TrainResult, list[float]]:
    """Trains an MTP head with `chain.chain_loss`; its vocabulary is that of `frequent_tokens`.

    A token counts in the loss if the text's token is in the draft vocabulary. The arguments are those of
    `drafter.train_drafter`.

    Returns:
        the result, and the agreement with the target per draft step (see `chain.chain_agreement`).

    Raises:
        ValueError: the head does not fit the target, or sequences are too short.
    """
    mtp.check_fits(config, target)
    vocab = None
    if config.draft_vocab_size is not None:
        ids = jnp.asarray(frequent_tokens(stream, config.vocab_size, config.draft_vocab_size))
        head = target_params.embed.T if target_params.head is None else target_params.head
        vocab = DraftVocab(ids, head[:, ids])

    def init() -> MtpParams:
        # A start from the target's last layer began at 16 nats, a random one at 9, and stayed behind (SmolLM2, 50 steps).
        return initialise(mtp.declare(config), jax.random.key(options.seed))

    kind = mtp_kind(target, config, placement.ops(options))
    settings = {"config": asdict(config), "mtp": {"decay": mtp_options.decay}}
    texts = (stream, held_out, options, mtp_options, settings, out, console, placement)
    result, agreed = train_chain(kind, target, Frozen(target_params, vocab), target_params, init, *texts)
    return replace(result, params=replace(result.params, vocab=vocab)), agreed
