"""Training a DFlash drafter for a frozen target (arXiv 2602.06036 §4.2, A.1).

Each sequence gets random anchors, new ones at every step. An anchor stands for the known token of a block: the block's queries
see the features of positions strictly before it (`kv < anchor`) and their own block in both directions, and slot k learns the
token at position anchor + k with weight exp(-(k - 1) / gamma). Embedding and head are the target's, and stay as they are.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int
from rich.console import Console

from tilewright.kernels.operations import Heads, Norm, Operations, Projection
from tilewright.kernels.select import MASKED, group_rows, ungroup_rows
from tilewright.models import decoder, dflash
from tilewright.models.checkpoint import save_params
from tilewright.models.config import LayerKind
from tilewright.models.decoder import DecoderConfig, DecoderParams, Layer
from tilewright.models.dflash import DFlashConfig, DFlashParams
from tilewright.models.dflash2 import DFlash2Config
from tilewright.models.draft_vocab import DraftVocab, draft_ids, maps_from_target_ids
from tilewright.models.params import initialise
from tilewright.train.checkpoint import fingerprint
from tilewright.train.data import TokenSource, frequent_tokens
from tilewright.train.loop import TrainResult, train
from tilewright.train.partitioned import TrainingPlacement, partitioned_task
from tilewright.train.taps import batches_with_states, tapped_layers, target_states
from tilewright.train.text import Loss, TextOptions


@dataclass(frozen=True)
class DFlashOptions:
    """Options that only the training of a DFlash drafter has.

    Attributes:
        anchors: blocks drawn from each sequence at each step.
        gamma: decay of the slots' loss weights; None takes the published value for the block size (7 for 16, 5 for 10, 4 for
            8).
        dpace: smoothing, from 0 to 1, of weights that follow the drafts that are expected to be accepted (D-PACE, arXiv
            2605.18810); None for the decay.
        keep_taps: folder for the target's states, which are computed once then (see `taps.KeptRows`).
    """

    anchors: int = 32
    gamma: float | None = None
    dpace: float | None = None
    keep_taps: Path | None = None

    def __post_init__(self) -> None:
        if self.anchors < 1:
            raise ValueError(f"expected at least 1 anchor, found {self.anchors}")
        if self.gamma is not None and not self.gamma > 0:
            raise ValueError(f"expected a gamma above 0, found {self.gamma}")
        if self.dpace is not None and not 0 <= self.dpace <= 1:
            raise ValueError(f"expected a D-PACE smoothing from 0 to 1, found {self.dpace}")
        if self.gamma is not None and self.dpace is not None:
            raise ValueError("expected a gamma or a D-PACE smoothing, found both")

    def decay(self, block_size: int) -> float:
        if self.gamma is not None:
            return self.gamma
        return float(np.interp(block_size, (8, 10, 16), (4.0, 5.0, 7.0))) if block_size <= 16 else 7.0 * block_size / 16


def draw_anchors(in_loss: Bool[Array, "B T"], anchors: int, key: Array) -> tuple[Int[Array, "B A"], Bool[Array, "B A"]]:
    """Distinct random anchors: positions that are in the loss and whose next position is too.

    Returns:
        the anchors, and which of them are real (a sequence may have too few candidates). A is `anchors`, or T - 1 where that is
        less: rows of short records have no room for more.
    """
    candidate = in_loss[:, :-1] & in_loss[:, 1:]
    score = jnp.where(candidate, jax.random.uniform(key, candidate.shape), -1.0)
    best, position = jax.lax.top_k(score, min(anchors, score.shape[1]))
    return position, best >= 0


def block_labels(
    tokens: Int[Array, "B T"], in_loss: Bool[Array, "B T"], anchors: Int[Array, "B A"], block_size: int, end: int
) -> tuple[Int[Array, "B A S"], Float[Array, "B A S"]]:
    """The token that each slot should predict, and 1 where that counts: inside the sequence, in the loss, in the same text."""
    positions = anchors[:, :, None] + jnp.arange(block_size)
    inside = positions < tokens.shape[1]
    index = jnp.minimum(positions, tokens.shape[1] - 1).reshape(tokens.shape[0], -1)
    labels = jnp.take_along_axis(tokens, index, axis=1).reshape(positions.shape)
    counted = inside & jnp.take_along_axis(in_loss, index, axis=1).reshape(positions.shape)
    ends = (labels == end).astype(jnp.int32)
    ended_before = jnp.cumsum(ends, axis=-1) - ends > 0
    return labels, (counted & ~ended_before).astype(jnp.float32)


def anchored_attention(
    q: Float[Array, "BA S N D"],
    context: tuple[Float[Array, "B K T D"], Float[Array, "B K T D"]],
    block: tuple[Float[Array, "BA K S D"], Float[Array, "BA K S D"]],
    anchors: Int[Array, "B A"],
    window: int | None = None,
) -> Float[Array, "BA S N D"]:
    """Attention for many blocks of one sequence at once: they share the sequence's context keys. The softmax is float32.

    With a window, a query at position p sees only the positions above `p - window` of the context.
    """
    batch, count = anchors.shape
    size = q.shape[1]
    d = q.shape[3]
    heads = context[0].shape[1]
    length = context[0].shape[2]
    rows = group_rows(q * d**-0.5, heads)

    def by_sequence(x: Float[Array, "BA K R _"]) -> Float[Array, "B K AR _"]:
        return x.reshape(batch, count, heads, -1, x.shape[-1]).transpose(0, 2, 1, 3, 4).reshape(batch, heads, -1, x.shape[-1])

    def by_block(x: Float[Array, "B K AR _"]) -> Float[Array, "BA K R _"]:
        split = x.reshape(batch, heads, count, -1, x.shape[-1])
        return split.transpose(0, 2, 1, 3, 4).reshape(batch * count, heads, -1, x.shape[-1])

    scores = partial(jnp.einsum, preferred_element_type=jnp.float32)
    seen = by_block(scores("bkrd,bktd->bkrt", by_sequence(rows), context[0]))
    first = anchors.reshape(-1, 1, 1)
    position = jnp.arange(length)
    visible = position < first
    if window is not None:
        near = position > first + jnp.arange(size)[:, None] - window
        visible = jnp.tile(visible & near, (1, q.shape[2] // heads, 1))
    seen = jnp.where(visible[:, None], seen, MASKED)
    own = scores("bkrd,bksd->bkrs", rows, block[0])
    weights = jax.nn.softmax(jnp.concatenate([seen, own], axis=-1), axis=-1).astype(q.dtype)
    from_context = jnp.einsum("bkrt,bktd->bkrd", by_sequence(weights[..., :length]), context[1])
    out = by_block(from_context) + jnp.einsum("bkrs,bksd->bkrd", weights[..., length:], block[1])
    return ungroup_rows(out, size)


RunBlock = Callable[..., Float[Array, "BA T H"]]
"""`dflash.run_block`, or another drafter's, with configuration, operations and parameters given."""


class DraftedStates(NamedTuple):
    """Hidden states of the blocks at anchors, and what they read.

    Attributes:
        hidden: what the head reads of every slot that drafts, S = block_size - 1, for the block at every anchor, `[BA, S, H]`.
        features: of all positions, `[B, T, H]`.
        stream: the target's residual stream after its last layer, before its final norm, `[B, T, H]`; None where it was not
            asked for.
    """

    hidden: Array
    features: Array
    stream: Array | None


def run_blocks(
    target: DecoderConfig,
    config: DFlashConfig,
    ops: Operations,
    target_params: DecoderParams,
    params: DFlashParams,
    run_block: RunBlock,
    batch: Sequence[Array],
    anchors: Int[Array, "B A"],
    windows: Sequence[int | None],
    whole: bool = False,
) -> DraftedStates:
    """Runs the target over whole sequences, and the drafter over the block at every anchor.

    Args:
        params: what makes the context.
        batch: as in `taps.target_states`.
        windows: how many positions a query sees in each layer; None for all.
        whole: run all of the target; else what lies above its last tap is left out.
    """
    states = target_states(target, config.target_layer_ids, ops, target_params, batch, whole)
    tokens = batch[0]
    taps = dflash.normal_taps(config, ops, states.taps, Norm(target_params.norm, target.rms_norm_eps))
    features = dflash.context_features(config, ops, params, taps)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    context = tuple(zip(dflash.context_kv(config, ops, params, features, positions), windows, strict=True))
    block = anchors.reshape(-1, 1) + jnp.arange(config.slots)
    known = jnp.take_along_axis(tokens, anchors, axis=1).reshape(-1, 1)
    masks = jnp.full((known.shape[0], config.slots - 1), config.mask_token_id, known.dtype)
    x = target_params.embed[jnp.concatenate([known, masks], axis=1)]

    def attend(ops: Operations, projection: Projection, heads: Heads, anchors: Array, kept: Any) -> tuple[Array, Any]:
        (q, k, v), (pair, window) = ops.heads(projection, heads), kept
        return anchored_attention(q, pair, (k, v), anchors, window).reshape(*q.shape[:2], -1), kept

    hidden = run_block(x, block, context, attend, anchors)[:, config.first_slot :]
    return DraftedStates(hidden, features, states.stream)


class Frozen(NamedTuple):
    """Arrays that a drafter learns from, which are not trained.

    Attributes:
        params: the target's.
        vocab: the draft vocabulary with its head; None where any token can be proposed.
    """

    params: DecoderParams
    vocab: DraftVocab | None = None

    @property
    def head(self) -> Any:
        """The output head, `[hidden, W]`."""
        return decoder.output_head(self.params) if self.vocab is None else self.vocab.head


def frozen_of(config: DFlashConfig, target_params: DecoderParams, source: TokenSource, start: Any = None) -> Frozen:
    """The target, and the draft vocabulary, if the drafter has one.

    That is the one of the drafter to go on from, else the most frequent tokens of the training text.
    """
    if config.draft_vocab_size is None:
        return Frozen(target_params)
    frequent = jnp.asarray(frequent_tokens(source, config.vocab_size, config.draft_vocab_size))
    begun = None if start is None else dflash.backbone_of(start).vocab
    ids = frequent if begun is None else begun.ids
    head = target_params.embed.T if target_params.head is None else target_params.head
    return Frozen(target_params, DraftVocab(ids, head[:, ids]))


def draft_logits(
    target: DecoderConfig,
    config: DFlashConfig,
    ops: Operations,
    frozen: Frozen,
    params: DFlashParams,
    batch: Sequence[Array],
    anchors: Int[Array, "B A"],
) -> Float[Array, "BA S W"]:
    """The drafter's logits for every slot that drafts, S = block_size - 1, for the block at every anchor.

    Args:
        batch: as in `taps.target_states`.
    """
    run = partial(dflash.run_block, config, ops, params)
    everything = (None,) * config.num_layers
    hidden = run_blocks(target, config, ops, frozen.params, params, run, batch, anchors, everything).hidden
    return ops.linear(hidden, frozen.head, jnp.float32)


class AnchorBlocks(NamedTuple):
    """Random blocks of a batch, BA of them with S slots to be drafted.

    Attributes:
        anchors: the known tokens' positions, `[B, A]`.
        before: the right token of the slot before each one, `[BA, S]`.
        wanted: the right token of the slot itself, by the drafter's ids, `[BA, S]`.
        weights: of each slot in the loss, `[BA, S]`; 0 for a token that cannot be proposed.
        missed: slots whose token cannot be proposed, `[BA, S]`.
    """

    anchors: Array
    before: Array
    wanted: Array
    weights: Array
    missed: Array


def draw_blocks(
    target: DecoderConfig,
    config: DFlashConfig,
    options: DFlashOptions,
    batch: Sequence[Array],
    key: Array,
    vocab: DraftVocab | None = None,
) -> AnchorBlocks:
    """Random blocks, their labels, and the slots' weights by position.

    Args:
        batch: as in `taps.target_states`.
    """
    tokens, in_loss = batch[:2]
    anchors, real = draw_anchors(in_loss, options.anchors, key)
    end = target.eos_token_ids[0] if target.eos_token_ids else -1
    labels, counted = block_labels(tokens, in_loss, anchors, config.block_size, end)
    weights = counted[:, :, 1:] * real.astype(jnp.float32)[:, :, None]
    if options.dpace is None:
        slot = jnp.arange(config.block_size - 1, dtype=jnp.float32)
        weights = weights * jnp.exp(-slot / options.decay(config.block_size))
    before, wanted, weights = (x.reshape(-1, config.block_size - 1) for x in (labels[:, :, :-1], labels[:, :, 1:], weights))
    if vocab is None:
        return AnchorBlocks(anchors, before, wanted, weights, jnp.zeros_like(weights, bool))
    wanted = draft_ids(vocab.ids, config.vocab_size)[wanted]
    missed = (wanted == config.proposed) & (weights > 0)
    return AnchorBlocks(anchors, before, jnp.minimum(wanted, config.proposed - 1), jnp.where(missed, 0.0, weights), missed)


def at_slots(x: Float[Array, "B T *rest"], anchors: Int[Array, "B A"], size: int) -> Float[Array, "BA S *rest"]:
    """The entries of each block's positions, from its anchor on; of positions beyond the end, the last one's."""
    index = jnp.minimum(anchors[:, :, None] + jnp.arange(size), x.shape[1] - 1)
    return jax.vmap(lambda row, at: row[at])(x, index).reshape(-1, size, *x.shape[2:])


def slot_nll(logits: Float[Array, "BA S W"], wanted: Int[Array, "BA S"]) -> Float[Array, "BA S"]:
    """The cross-entropy of each slot in nats."""
    return jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, wanted[..., None], axis=-1)[..., 0]


def acceptance_weights(nll: Float[Array, "BA S"], blocks: AnchorBlocks, smoothing: float) -> Float[Array, "BA S"]:
    """Weight of each slot by what it adds to the drafts that are expected to be accepted (D-PACE, arXiv 2605.18810).

    A slot counts as far as those before it are likely to be right, and as further ones hang on it: the sum, over the slots from
    it on, of the products of all probabilities up to there, each `(1 - smoothing) * p + smoothing`. No gradient flows.
    """
    p = jnp.where(blocks.missed, 0.0, jnp.exp(-jax.lax.stop_gradient(nll)))
    smooth = (1 - smoothing) * p + smoothing
    counted = blocks.weights > 0
    prefix = jnp.cumprod(jnp.where(counted | blocks.missed, smooth, 1.0), axis=-1)
    return blocks.weights * jnp.cumsum(jnp.where(counted, prefix, 0.0)[..., ::-1], axis=-1)[..., ::-1]


def slot_weights(nll: Float[Array, "BA S"], blocks: AnchorBlocks, smoothing: float | None) -> Float[Array, "BA S"]:
    """The weights of the slots: those of the blocks, or with a smoothing `acceptance_weights`."""
    return blocks.weights if smoothing is None else acceptance_weights(nll, blocks, smoothing)


def weighted_mean(values: Float[Array, "BA S"], weights: Float[Array, "BA S"]) -> Float[Array, ""]:
    """The weighted mean; 0 where all weights are."""
    return jnp.sum(values * weights) / jnp.maximum(jnp.sum(weights), 1e-6)


def weighted_nll(
    logits: Float[Array, "BA S W"], blocks: AnchorBlocks, smoothing: float | None = None
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The weighted mean cross-entropy in nats, 0 where all weights are; and the sum of the weights.

    Args:
        smoothing: as in `slot_weights`.
    """
    nll = slot_nll(logits, blocks.wanted)
    weights = slot_weights(nll, blocks, smoothing)
    return weighted_mean(nll, weights), jnp.sum(weights)


def drafter_loss(
    target: DecoderConfig,
    config: DFlashConfig,
    options: DFlashOptions,
    ops: Operations,
    params: DFlashParams,
    frozen: Frozen,
    batch: Sequence[Array],
    key: Array,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The weighted mean cross-entropy in nats over the slots of random blocks, and the sum of the weights."""
    blocks = draw_blocks(target, config, options, batch, key, frozen.vocab)
    logits = draft_logits(target, config, ops, frozen, params, batch, blocks.anchors)
    return weighted_nll(logits, blocks, options.dpace)


def warm_start(target: DecoderConfig, config: DFlashConfig, target_params: DecoderParams, params: DFlashParams) -> DFlashParams:
    """Starts a drafter from its target's last layers, which already write what the target's head reads.

    Each drafter layer is a copy of one of them, the final norm is the target's, and `fc` passes on the stream that the last of
    them reads, normed as there. Queries and keys keep their own norms where the target has none (Llama). A drafter whose sizes
    differ from its target's, or whose target has experts there, keeps its random layers and gets the norm alone.
    """
    sizes = ("intermediate_size", "num_heads", "num_kv_heads", "head_dim")
    params = replace(params, norm=target_params.norm)
    alike = all(getattr(config, name) == getattr(target, name) for name in sizes) and config.num_layers <= target.num_layers
    last = target_params.layers[-config.num_layers :]
    read = target.num_layers - 2
    unlike = any(layer.attention_out_norm is not None or layer.router is not None for layer in last)
    if not alike or unlike or target.delta is not None or params.layers[0].q_norm is None:
        return params

    def copied(own: Layer, theirs: Layer) -> Layer:
        norms = own if theirs.q_norm is None else theirs
        return replace(theirs, q_norm=norms.q_norm, k_norm=norms.k_norm, qkv_bias=None, kind=LayerKind())

    params = replace(params, layers=tuple(map(copied, params.layers, last)))
    if read not in config.target_layer_ids:
        return params
    h = config.hidden_size
    at = config.target_layer_ids.index(read)
    fc = params.fc.at[at * h : (at + 1) * h].add(jnp.eye(h, dtype=params.fc.dtype))
    return replace(params, fc=fc, hidden_norm=target_params.layers[-1].input_norm)


def hidden_matrices(params: DFlashParams) -> DFlashParams:
    """True for every matrix: a drafter has no embedding and no head of its own."""
    return jax.tree.map(lambda x: x.ndim == 2, params)


def train_drafter(
    target: DecoderConfig,
    target_params: DecoderParams,
    config: DFlashConfig,
    stream: TokenSource,
    held_out: TokenSource,
    options: TextOptions,
    drafter_options: DFlashOptions,
    out: Path,
    console: Console,
    start: DFlashParams | None = None,
    placement: TrainingPlacement = TrainingPlacement(),
) -> TrainResult:
    """Trains a drafter. Its losses are those of `drafter_loss`.

    Args:
        target_params: sharded over a mesh as `placement` has it.
        start: of a drafter to go on from, which may have been trained for another block size; by default the target's last
            layers where these fit.
    """

    def fresh(key: Array) -> DFlashParams:
        return warm_start(target, config, target_params, initialise(dflash.declare(config), key))

    loss = partial(drafter_loss, target, config, drafter_options, placement.ops(options))
    kind = BlockKind("DFlash drafter", dflash.declare(config), hidden_matrices, loss, fresh)
    given = (target, target_params, config, stream, held_out, options, drafter_options, out, console, start, placement)
    return train_blocks(kind, *given)


@dataclass(frozen=True)
class BlockKind:
    """Training of one kind of drafter that drafts a block in one pass.

    Attributes:
        title: what the progress bar shows.
        specs: its declaration.
        is_hidden_matrix: see `text.make_optimizer`.
        loss: see `text.Loss`; `frozen` is a `Frozen`.
        fresh: parameters to begin with, from a key.
        whole: whether the loss reads what the target's last layer gives.
    """

    title: str
    specs: Any
    is_hidden_matrix: Callable[[Any], Any]
    loss: Loss
    fresh: Callable[[Array], Any]
    whole: bool = False


def train_blocks(
    kind: BlockKind,
    target: DecoderConfig,
    target_params: DecoderParams,
    config: DFlashConfig,
    stream: TokenSource,
    held_out: TokenSource,
    options: TextOptions,
    drafter_options: DFlashOptions,
    out: Path,
    console: Console,
    start: Any,
    placement: TrainingPlacement,
) -> TrainResult:
    """Trains a drafter of any of these kinds; arguments as for `train_drafter`. It keeps the draft vocabulary of `start`."""
    dflash.check_fits(config, target)
    if untrained := [name for name in config.variations if name != "windows" or not isinstance(config, DFlash2Config)]:
        raise ValueError(f"expected a drafter as they are trained here, found one with {', '.join(untrained)}")
    check_anchors(drafter_options, options)

    def init() -> Any:
        return kind.fresh(jax.random.key(options.seed)) if start is None else dflash.with_vocab(start, None)

    same = run_fingerprint(config, drafter_options, target_params, start)
    frozen = frozen_of(config, target_params, stream, start)
    read = (target, target_params, tapped_layers(target, config.target_layer_ids, kind.whole), same["target"])
    kept = (drafter_options.keep_taps, *read, placement.mesh is not None)
    batches = batches_with_states(stream, held_out, options, *kept)
    trained = (init, kind.specs, kind.is_hidden_matrix, placement)
    task = partitioned_task(kind.title, batches, same, kind.loss, frozen, *trained)
    result = train(task, console, out)
    return replace(result, params=dflash.with_vocab(result.params, frozen.vocab))


def save_drafter(folder: Path, model: Any, config: DFlashConfig, params: Any, dtype: DTypeLike) -> None:
    """Writes a drafter of one of DFlash's kinds, with its draft vocabulary; see `checkpoint.save_params`.

    Args:
        model: the module of its kind, `models.dflash` or another that declares and describes one.
    """
    vocab = dflash.backbone_of(params).vocab
    maps = None if vocab is None else maps_from_target_ids(np.asarray(vocab.ids), config.vocab_size)
    stored = dflash.with_vocab(params, None)
    save_params(folder, model.config_to_hf(config), model.declare(config), stored, dtype, maps)


def check_anchors(drafter_options: DFlashOptions, options: TextOptions) -> None:
    """Raises a `ValueError` if a sequence has too few positions for the anchors."""
    if drafter_options.anchors >= options.sequence_length:
        raise ValueError(
            f"expected fewer anchors than the sequence length {options.sequence_length}, found {drafter_options.anchors}"
        )


def run_fingerprint(
    config: DFlashConfig, drafter_options: DFlashOptions, target_params: DecoderParams, start: Any
) -> dict[str, Any]:
    """Fingerprint of a drafter's training: what a checkpoint must agree with."""
    own = {name: value for name, value in asdict(drafter_options).items() if name != "keep_taps"}
    same = {"config": asdict(config), "drafter": own, "target": fingerprint(target_params)}
    return same | {"start": None if start is None else fingerprint(start)}
