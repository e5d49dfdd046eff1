"""Training of an EAGLE-3 drafter for a frozen target: training-time test (EAGLE-3, arXiv 2503.01840 §3.2).

The drafting chain is unrolled over all positions of a sequence at once. Step i combines the drafter's own output of step i - 1
(at step 0 the target's features) with the embedding of the token i + 1 positions later, and learns the target's distribution of
the following token. A position attends to step 0 up to itself, and to later steps at itself only, as when drafting.
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
"""Sequences that an accelerator computes at a time; a single one would leave it mostly idle."""
POSITIONS = 1024
"""Positions, approximately, that a CPU computes at a time, since it repacks a matrix for each product."""


@dataclass(frozen=True)
class Eagle3Options:
    """Options of the training of an EAGLE-3 drafter.

    Attributes:
        decay: loss weight of a draft step relative to the step before; the published value is 0.8.
        keep_taps: folder that caches the target's hidden states (see `taps.RowsWithStates`); None computes them in each step.
    """

    decay: float = 0.8
    keep_taps: Path | None = None

    def __post_init__(self) -> None:
        if not 0 < self.decay <= 1:
            raise ValueError(f"expected a decay above 0 and at most 1, found {self.decay}")


def default_draft_vocab(vocab_size: int) -> int:
    """Returns the default size of the draft vocabulary: all up to 8,192 tokens, else at most 32,000 like published drafters."""
    return vocab_size if vocab_size <= 8192 else min(vocab_size, 32000)


class Teacher(NamedTuple):
    """Hidden states and predictions of the target, which the drafter learns from.

    Attributes:
        taps: hidden states after the tapped layers, `[B, T, G]` each.
        probabilities: probabilities of the next token over the draft vocabulary, `[B, T, W]`.
        best: most likely next token, `[B, T]`.
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
    """Runs the target over whole sequences, or reads its cached states. `batch` is as in `taps.target_states`."""
    states = target_states(target, config.target_layer_ids, ops, target_params, batch, whole=True)
    assert states.stream is not None
    logits = decoder.logits(target, ops, target_params, states.stream)
    return Teacher(states.taps, jax.nn.softmax(logits[..., ids], axis=-1), jnp.argmax(logits, axis=-1))


def together(rows: int, length: int) -> int:
    """Returns the number of sequences to compute at a time, a divisor of `rows`."""
    most = POSITIONS // length if jax.default_backend() == "cpu" else SEQUENCES
    return next(size for size in range(max(1, min(most, rows)), 0, -1) if rows % size == 0)


def following(x: Array, n: int) -> Array:
    """Shifts `x` `[B, T, ...]` by `n` positions to the left, with zeros at the end."""
    return jnp.pad(x[:, n:], ((0, 0), (0, n), *((0, 0),) * (x.ndim - 2)))


def chain_attention(
    q: Float[Array, "B T N D"], pairs: Sequence[tuple[Float[Array, "B K T D"], Float[Array, "B K T D"]]]
) -> Float[Array, "B T N D"]:
    """Computes the attention of one unrolled step, with a float32 softmax.

    A query attends to the first step's entries up to its position, and to the later steps' entries at its position.

    Args:
        q: queries.
        pairs: keys and values of all steps so far; the last ones belong to the current step.
    """
    b, t, n, d = q.shape
    (k, v), chain = pairs[0], pairs[1:]
    grouped = (q * d**-0.5).reshape(b, t, k.shape[1], -1, d)
    scores = partial(jnp.einsum, preferred_element_type=jnp.float32)
    before = scores("btkgd,bksd->bkgts", grouped, k)
    before = jnp.where(jnp.tril(jnp.ones((t, t), bool)), before, MASKED)
    same_position = [scores("btkgd,bktd->bkgt", grouped, later)[..., None] for later, _ in chain]
    weights = jax.nn.softmax(jnp.concatenate([before, *same_position], axis=-1), axis=-1).astype(q.dtype)
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


def step_counts(tokens: Int[Array, "B T"], in_loss: Bool[Array, "B T"], steps: int, end: int) -> list[Bool[Array, "B T"]]:
    """Returns a mask per step: positions whose label is in the loss, and in the same text as the last token."""
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
    """Computes the weighted mean cross-entropy in nats against the target's distribution over the draft vocabulary.

    A token counts if the target's most likely token is in the draft vocabulary; otherwise no greedy draft can be accepted.
    Forward and backward passes compute a few sequences at a time, so that memory does not grow with the batch.

    Args:
        target: configuration of the target.
        config: configuration of the drafter.
        options: options of the loss.
        ops: operations.
        params: parameters of the drafter.
        frozen: parameters of the target, and the target ids of the draft vocabulary.
        batch: as in `taps.target_states`.

    Returns:
        the loss, and the sum of the weights.
    """
    target_params, ids = frozen

    @jax.checkpoint
    def chains_loss(params: Eagle3Params, teacher: Teacher, tokens: Array, in_loss: Array) -> tuple[Array, Array]:
        reachable = jnp.zeros(config.vocab_size, bool).at[ids].set(True)[teacher.best]
        counted = step_counts(tokens, in_loss, config.block_size - 1, end_token(target))
        summed = jnp.float32(0)
        total = jnp.float32(0)
        for i, logits in enumerate(unroll(config, ops, params, target_params.embed, teacher.taps, tokens)):
            weights = options.decay**i * (counted[i] & following(reachable, i + 1)).astype(jnp.float32)
            expected = jnp.sum(following(teacher.probabilities, i + 1) * logits, axis=-1)
            summed += jnp.sum((jax.nn.logsumexp(logits, axis=-1) - expected) * weights)
            total += jnp.sum(weights)
        return summed, total

    def group_loss(group: Sequence[Array]) -> tuple[Array, Array]:
        return chains_loss(params, ask_target(target, config, ops, target_params, ids, group), *group[:2])

    size = together(*batch[0].shape)  # groups take strided rows, so that a batch stays sharded over a mesh
    groups = [x.reshape(size, -1, *x.shape[1:]).swapaxes(0, 1) for x in batch]
    summed, total = (jnp.sum(part) for part in jax.lax.map(group_loss, groups))
    return summed / jnp.maximum(total, 1e-6), total


def step_agreement(
    target: DecoderConfig,
    config: Eagle3Config,
    ops: Operations,
    params: Eagle3Params,
    frozen: tuple[DecoderParams, Int[Array, " W"]],
    batch: Sequence[Array],
) -> tuple[Int[Array, " steps"], Int[Array, " steps"]]:
    """Counts positions where the drafter's most likely token is the target's, per step, and all counted positions per step.

    The chains read the text, not their own proposals: step i measures a draft after i accepted drafts.

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
    """Returns the token that ends a text; -1 if the target has none."""
    return target.eos_token_ids[0] if target.eos_token_ids else -1


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
    placement: TrainingPlacement = TrainingPlacement(),
) -> tuple[TrainResult, list[float]]:
    """Trains an EAGLE-3 drafter with `drafter_loss`. The embedding is the target's, the vocabulary that of `frequent_tokens`.

    The arguments are those of `drafter.train_drafter`.

    Returns:
        the result, and per draft step the share of held-out positions where drafter and target agree (see `step_agreement`).

    Raises:
        ValueError: the drafter does not fit the target or has an embedding, or sequences are too short.
    """
    eagle3.check_fits(config, target)
    if config.own_embedding:
        raise ValueError("expected a drafter that reads its target's embedding, found a drafter with an embedding")
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

    settings = {"config": asdict(config), "eagle3": {"decay": eagle3_options.decay}, "target": fingerprint(target_params)}
    target_arguments = (target, target_params, tapped_layers(target, config.target_layer_ids, whole=True), settings["target"])
    state_arguments = (eagle3_options.keep_taps, *target_arguments, placement.mesh is not None)
    windows = batches_with_states(stream, held_out, options, *state_arguments)
    frozen = (target_params, ids)
    model_arguments = (init, eagle3.declare(config), hidden_matrices, placement)
    result = train(partitioned_task("EAGLE-3 drafter", windows, settings, loss, frozen, *model_arguments), console, out)
    agree = jax.jit(partial(step_agreement, target, config, ops))
    counts = [agree(result.params, frozen, batch) for batch in windows.held_out_batches()]
    hits, totals = (np.sum([np.asarray(part[n]) for part in counts], axis=0) for n in range(2))
    agreed = (hits / np.maximum(totals, 1)).tolist()
    console.print("agreement with the target, by draft step: " + " ".join(f"{share:.3f}" for share in agreed))
    return replace(result, params=replace(result.params, target_ids=ids)), agreed
