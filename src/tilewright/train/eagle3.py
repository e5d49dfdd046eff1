"""Training an EAGLE-3 drafter for a frozen target: training-time test (EAGLE-3, arXiv 2503.01840 §3.2).

The chain that will draft is unrolled over every position of a sequence at once. Step i pairs what the drafter itself put out
at step i - 1 (at step 0 the target's features) with the embedding of the token i + 1 further on, and learns what the target
says about the token after that. A pair sees the pairs of step 0 up to its own position, and of later steps only those of its
own chain, just as when drafting.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int
from rich.console import Console

from tilewright.kernels.operations import Heads, Operations, Projection
from tilewright.kernels.select import MASKED
from tilewright.models import decoder, eagle3
from tilewright.models.decoder import DecoderConfig, DecoderParams
from tilewright.models.eagle3 import Eagle3Config, Eagle3Params
from tilewright.models.params import initialise
from tilewright.train.checkpoint import fingerprint
from tilewright.train.data import TokenSource, frequent_tokens
from tilewright.train.loop import TrainResult, train
from tilewright.train.partitioned import TrainingPlacement, partitioned_task
from tilewright.train.taps import batches_with_states, tapped_layers, target_states
from tilewright.train.text import TextOptions

SEQUENCES = 8
"""Sequences that an accelerator works on at a time: one alone leaves most of it idle."""
POSITIONS = 1024
"""About how many positions a CPU works on at a time: it lays out a matrix anew for each product with it."""


@dataclass(frozen=True)
class Eagle3Options:
    """Options that only the training of an EAGLE-3 drafter has.

    Attributes:
        decay: weight of a draft step's loss against that of the step before; the published value is 0.8.
        keep_taps: folder for the target's states, which are computed once then (see `taps.KeptRows`).
    """

    decay: float = 0.8
    keep_taps: Path | None = None

    def __post_init__(self) -> None:
        if not 0 < self.decay <= 1:
            raise ValueError(f"expected a decay above 0 and at most 1, found {self.decay}")


def default_draft_vocab(vocab_size: int) -> int:
    """A small vocabulary whole; of a large one as many tokens as the published drafters have."""
    return vocab_size if vocab_size <= 8192 else min(vocab_size, 32000)


class Teacher(NamedTuple):
    """The target's states and predictions of each sequence, which a drafter learns from.

    Attributes:
        taps: its hidden states after the tapped layers, each `[B, T, G]`.
        probabilities: of the next token, over the draft vocabulary alone, `[B, T, W]`.
        best: its most likely next token, `[B, T]`.
    """

    taps: tuple[Array, ...]
    probabilities: Array
    best: Array


def ask_target(
    target: DecoderConfig,
    config: Eagle3Config,
    ops: Operations,
    target_params: DecoderParams,
    ids: Int[Array, " W"],
    batch: Sequence[Array],
) -> Teacher:
    """Runs the target over whole sequences, or reads what is kept of it.

    Args:
        batch: as in `taps.target_states`.
    """
    states = target_states(target, config.target_layer_ids, ops, target_params, batch, whole=True)
    assert states.stream is not None
    logits = decoder.logits(target, ops, target_params, states.stream)
    return Teacher(states.taps, jax.nn.softmax(logits[..., ids], axis=-1), jnp.argmax(logits, axis=-1))


def together(rows: int, length: int) -> int:
    """Number of sequences of a batch that are worked on at a time, a divisor of the batch's rows."""
    most = POSITIONS // length if jax.default_backend() == "cpu" else SEQUENCES
    return next(size for size in range(max(1, min(most, rows)), 0, -1) if rows % size == 0)


def following(x: Array, n: int) -> Array:
    """Each position's entry `n` positions on, `x` being `[B, T, ...]`; zeros beyond the end."""
    return jnp.pad(x[:, n:], ((0, 0), (0, n), *((0, 0),) * (x.ndim - 2)))


def chain_attention(
    q: Float[Array, "B T N D"], pairs: Sequence[tuple[Float[Array, "B K T D"], Float[Array, "B K T D"]]]
) -> Float[Array, "B T N D"]:
    """Attention of one unrolled step; `pairs` has keys and values of all steps so far, its own last. The softmax is float32.

    A query sees the first step's entries up to its own position, and of each later step the one at its own position.
    """
    b, t, n, d = q.shape
    (k, v), chain = pairs[0], pairs[1:]
    grouped = (q * d**-0.5).reshape(b, t, k.shape[1], -1, d)
    scores = partial(jnp.einsum, preferred_element_type=jnp.float32)
    before = scores("btkgd,bksd->bkgts", grouped, k)
    before = jnp.where(jnp.tril(jnp.ones((t, t), bool)), before, MASKED)
    own = [scores("btkgd,bktd->bkgt", grouped, later)[..., None] for later, _ in chain]
    weights = jax.nn.softmax(jnp.concatenate([before, *own], axis=-1), axis=-1).astype(q.dtype)
    out = jnp.einsum("bkgts,bksd->btkgd", weights[..., :t], v)
    for step, (_, later) in enumerate(chain):
        out = out + jnp.einsum("bkgt,bktd->btkgd", weights[..., t + step], later)
    return out.reshape(b, t, n, d)


def unroll(
    config: Eagle3Config,
    ops: Operations,
    params: Eagle3Params,
    embedding: Float[Array, "V H"],
    taps: Sequence[Float[Array, "B T G"]],
    tokens: Int[Array, "B T"],
) -> Iterator[Float[Array, "B T W"]]:
    """Runs every position's chain over the tokens that follow it.

    Yields:
        the draft logits of each step; those of step i at position t are about the token at t + 2 + i.
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


def step_counts(tokens: Int[Array, "B T"], in_loss: Bool[Array, "B T"], steps: int, end: int) -> list[Bool[Array, "B T"]]:
    """For each step, the positions whose predicted token is in the loss, and in the same text as the known token."""
    alive = jnp.ones_like(in_loss)
    counted = []
    for i in range(steps):
        alive = alive & (following(tokens, i + 1) != end)
        counted.append(alive & following(in_loss, i + 2))
    return counted


def drafter_loss(
    target: DecoderConfig,
    config: Eagle3Config,
    options: Eagle3Options,
    ops: Operations,
    params: Eagle3Params,
    frozen: tuple[DecoderParams, Int[Array, " W"]],
    batch: Sequence[Array],
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The weighted mean cross-entropy in nats against the target's distribution over the draft vocabulary; the weights' sum.

    Tokens count where the target's own choice is in the draft vocabulary: elsewhere no greedy draft can be accepted. A few
    sequences are worked on at a time, backwards too, so that memory does not grow with the batch.

    Args:
        frozen: the target, and the target's ids of the draft ids.
        batch: as in `taps.target_states`.
    """
    target_params, ids = frozen

    @jax.checkpoint
    def of_chains(params: Eagle3Params, teacher: Teacher, tokens: Array, in_loss: Array) -> tuple[Array, Array]:
        reachable = jnp.zeros(config.vocab_size, bool).at[ids].set(True)[teacher.best]
        counted = step_counts(tokens, in_loss, config.block_size - 1, end_token(target))
        summed = jnp.float32(0)
        total = jnp.float32(0)
        for i, logits in enumerate(unroll(config, ops, params, target_params.embed, teacher.taps, tokens)):
            weights = options.decay**i * (counted[i] & following(reachable, i + 1)).astype(jnp.float32)
            said = jnp.sum(following(teacher.probabilities, i + 1) * logits, axis=-1)
            summed += jnp.sum((jax.nn.logsumexp(logits, axis=-1) - said) * weights)
            total += jnp.sum(weights)
        return summed, total

    def of_group(group: Sequence[Array]) -> tuple[Array, Array]:
        return of_chains(params, ask_target(target, config, ops, target_params, ids, group), *group[:2])

    size = together(*batch[0].shape)  # every so many rows form a group, so that a batch over a mesh stays divided
    groups = [x.reshape(size, -1, *x.shape[1:]).swapaxes(0, 1) for x in batch]
    summed, total = (jnp.sum(part) for part in jax.lax.map(of_group, groups))
    return summed / jnp.maximum(total, 1e-6), total


def step_agreement(
    target: DecoderConfig,
    config: Eagle3Config,
    ops: Operations,
    params: Eagle3Params,
    frozen: tuple[DecoderParams, Int[Array, " W"]],
    batch: Sequence[Array],
) -> tuple[Int[Array, " steps"], Int[Array, " steps"]]:
    """For each step, at how many positions the drafter's first choice is the target's, and of how many.

    The chains read the text as it is, not their own proposals: step i tells how good a draft is after i that were right.

    Args:
        batch: as in `taps.target_states`.
    """
    (target_params, ids), (tokens, in_loss) = frozen, batch[:2]
    teacher = ask_target(target, config, ops, target_params, ids, batch)
    counted = step_counts(tokens, in_loss, config.block_size - 1, end_token(target))
    chains = unroll(config, ops, params, target_params.embed, teacher.taps, tokens)
    choices = [ids[jnp.argmax(logits, axis=-1)] == following(teacher.best, i + 1) for i, logits in enumerate(chains)]
    agreed = [jnp.sum(same & flags) for same, flags in zip(choices, counted, strict=True)]
    return jnp.stack(agreed), jnp.stack([jnp.sum(flags) for flags in counted])


def end_token(target: DecoderConfig) -> int:
    """The token that ends a text; -1, which is no token, where the target has none."""
    return target.eos_token_ids[0] if target.eos_token_ids else -1


def warm_start(
    target: DecoderConfig, config: Eagle3Config, target_params: DecoderParams, ids: Int[Array, " W"], params: Eagle3Params
) -> Eagle3Params:
    """Starts a drafter with its target's final norm and head, and with features that pass on the last tap.

    The MLP is that of the target's last layer, which writes what this head reads, if it has the size and the form for it.
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
    """True for the matrices inside: what Muon takes, and what weight decay applies to."""
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
    placement: TrainingPlacement = TrainingPlacement(),
) -> tuple[TrainResult, list[float]]:
    """Trains a drafter that reads its target's embedding. Its losses are those of `drafter_loss`.

    Its draft vocabulary is that of `frequent_tokens`.

    Returns:
        what was reached, and for each draft step the share of held-out positions where drafter and target agree (see
        `step_agreement`).
    """
    eagle3.check_fits(config, target)
    if config.own_embedding:
        raise ValueError("expected a drafter that reads its target's embedding, found one with its own")
    if options.sequence_length <= config.block_size:
        raise ValueError(
            f"expected a sequence length above the block size {config.block_size}, found {options.sequence_length}"
        )
    ids = jnp.asarray(frequent_tokens(stream, config.vocab_size, config.draft_vocab_size))
    ops = placement.ops(options)

    def loss(params: Any, frozen: Any, batch: Any, key: Array) -> tuple[Array, Array]:
        return drafter_loss(target, config, eagle3_options, ops, params, frozen, batch)

    def init() -> Eagle3Params:
        drawn = initialise(eagle3.declare(config), jax.random.key(options.seed))
        return warm_start(target, config, target_params, ids, drawn)

    same = {"config": asdict(config), "eagle3": {"decay": eagle3_options.decay}, "target": fingerprint(target_params)}
    read = (target, target_params, tapped_layers(target, config.target_layer_ids, whole=True), same["target"])
    kept = (eagle3_options.keep_taps, *read, placement.mesh is not None)
    windows = batches_with_states(stream, held_out, options, *kept)
    frozen = (target_params, ids)
    trained = (init, eagle3.declare(config), hidden_matrices, placement)
    result = train(partitioned_task("EAGLE-3 drafter", windows, same, loss, frozen, *trained), console, out)
    agree = jax.jit(partial(step_agreement, target, config, ops))
    counts = [agree(result.params, frozen, batch) for batch in windows.held_out_batches()]
    hits, totals = (np.sum([np.asarray(part[n]) for part in counts], axis=0) for n in range(2))
    agreed = (hits / np.maximum(totals, 1)).tolist()
    console.print("agreement with the target, by draft step: " + " ".join(f"{share:.3f}" for share in agreed))
    return replace(result, params=replace(result.params, target_ids=ids)), agreed
