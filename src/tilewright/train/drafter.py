"""Training of a DFlash drafter for a frozen target (arXiv 2602.06036 §4.2, A.1).

Each step draws random anchors in each sequence. An anchor is the last token before a draft block: the block's queries attend to
the features of positions before the anchor (`kv < anchor`) and bidirectionally to their own block. Slot k learns the token at
position anchor + k with weight exp(-(k - 1) / gamma). Embedding and head are the target's, and frozen.
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

from tilewright.kernels.masks import AttentionMask
from tilewright.kernels.operations import Heads, KeyValueRows, Norm, Operations, Projection
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
from tilewright.train.step import ONE_DEVICE, Loss, Objective, TrainingPlacement, make_task
from tilewright.train.taps import batches_with_states, tapped_layers, target_states
from tilewright.train.text import TextOptions


@dataclass(frozen=True)
class DFlashOptions:
    """Options of the training of a DFlash drafter.

    Attributes:
        anchors: draft blocks per sequence and step.
        gamma: decay of the slots' loss weights; None takes the published value for the block size (7 for 16, 5 for 10, 4 for
            8).
        dpace: smoothing, from 0 to 1, of weights by expected acceptance (D-PACE, arXiv 2605.18810); None for the decay.
        keep_taps: folder that caches the target's hidden states (see `taps.RowsWithStates`); None computes them in each step.
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
    """Draws distinct random anchors among the positions that are in the loss with their next position.

    Returns:
        the anchors, and a mask of valid anchors (a sequence may have too few positions). A is the smaller of `anchors` and
        T - 1.
    """
    candidate = in_loss[:, :-1] & in_loss[:, 1:]
    score = jnp.where(candidate, jax.random.uniform(key, candidate.shape), -1.0)
    best, position = jax.lax.top_k(score, min(anchors, score.shape[1]))
    return position, best >= 0


def block_labels(
    tokens: Int[Array, "B T"], in_loss: Bool[Array, "B T"], anchors: Int[Array, "B A"], block_size: int, end: int
) -> tuple[Int[Array, "B A S"], Float[Array, "B A S"]]:
    """Returns the label of each slot, and 1 for counted labels: inside the sequence, in the loss, in the same text."""
    positions = anchors[:, :, None] + jnp.arange(block_size)
    inside = positions < tokens.shape[1]
    index = jnp.minimum(positions, tokens.shape[1] - 1).reshape(tokens.shape[0], -1)
    labels = jnp.take_along_axis(tokens, index, axis=1).reshape(positions.shape)
    counted = inside & jnp.take_along_axis(in_loss, index, axis=1).reshape(positions.shape)
    ends = (labels == end).astype(jnp.int32)
    ended_before = jnp.cumsum(ends, axis=-1) - ends > 0
    return labels, (counted & ~ended_before).astype(jnp.float32)


RunBlock = Callable[..., Float[Array, "BA T H"]]
"""`dflash.run_block`, or another drafter's, with bound configuration, operations and parameters."""


class DraftedStates(NamedTuple):
    """Hidden states of the draft blocks, and the states of the target that they attend to.

    Attributes:
        hidden: input of the head for each drafted slot, S = block_size - 1, of the block at each anchor, `[BA, S, H]`.
        features: context features of all positions, `[B, T, H]`.
        stream: the target's residual stream after its last layer, before the final norm, `[B, T, H]`; None if not requested.
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
    """Runs the target over whole sequences, and the drafter over the block at each anchor.

    Args:
        target: configuration of the target.
        config: configuration of the drafter.
        ops: operations.
        target_params: parameters of the target.
        params: parameters of the drafter that compute the context features.
        run_block: runs the drafter's layers.
        batch: batch as in `taps.target_states`.
        anchors: positions of the anchors.
        windows: attention window of each layer in positions; None for all positions.
        whole: run all layers of the target; by default only those up to the last tap.
    """
    states = target_states(target, config.target_layer_ids, ops, target_params, batch, whole)
    tokens = batch[0]
    taps = dflash.normal_taps(config, ops, states.taps, Norm(target_params.norm, target.rms_norm_eps))
    features = dflash.context_features(config, ops, params, taps)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    context = tuple(zip(dflash.context_kv(config, ops, params, features, positions), windows, strict=True))
    block = anchors.reshape(-1, 1) + jnp.arange(config.slots)
    last = jnp.take_along_axis(tokens, anchors, axis=1).reshape(-1, 1)
    masks = jnp.full((last.shape[0], config.slots - 1), config.mask_token_id, last.dtype)
    x = target_params.embed[jnp.concatenate([last, masks], axis=1)]

    def attend(ops: Operations, projection: Projection, heads: Heads, anchors: Array, context_kv: Any) -> tuple[Array, Any]:
        (q, k, v), (pair, window) = ops.heads(projection, heads), context_kv
        out = ops.attend(q, KeyValueRows(*pair), AttentionMask(anchors.reshape(-1, 1), "full", window=window), (k, v))
        return out.reshape(*q.shape[:2], -1), context_kv

    hidden = run_block(x, block, context, attend, anchors)[:, config.first_slot :]
    return DraftedStates(hidden, features, states.stream)


class Frozen(NamedTuple):
    """Frozen arrays that the loss of a drafter reads.

    Attributes:
        params: parameters of the target.
        vocab: draft vocabulary with its head; None for the whole vocabulary.
    """

    params: DecoderParams
    vocab: DraftVocab | None = None

    @property
    def head(self) -> Any:
        """Output head of the drafter, `[hidden, W]`."""
        return decoder.output_head(self.params) if self.vocab is None else self.vocab.head


def frozen_inputs(config: DFlashConfig, target_params: DecoderParams, source: TokenSource, start: Any = None) -> Frozen:
    """Collects the target's parameters and the draft vocabulary, if the drafter has one.

    The vocabulary is that of `start`, or else the most frequent tokens of the training text.
    """
    if config.draft_vocab_size is None:
        return Frozen(target_params)
    frequent = jnp.asarray(frequent_tokens(source, config.vocab_size, config.draft_vocab_size))
    previous = None if start is None else dflash.backbone_of(start).vocab
    ids = frequent if previous is None else previous.ids
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
    """Computes the drafter's logits of the S = block_size - 1 drafted slots of the block at each anchor.

    `batch` is as in `taps.target_states`.
    """
    run = partial(dflash.run_block, config, ops, params)
    windows = (None,) * config.num_layers
    hidden = run_blocks(target, config, ops, frozen.params, params, run, batch, anchors, windows).hidden
    return ops.linear(hidden, frozen.head, jnp.float32)


class AnchorBlocks(NamedTuple):
    """Random draft blocks of a batch: BA blocks with S drafted slots.

    Attributes:
        anchors: positions of the anchors, `[B, A]`.
        before: label of the slot before each slot, `[BA, S]`.
        labels: label of the slot, by the drafter's ids, `[BA, S]`.
        weights: loss weight of the slot, `[BA, S]`; 0 for a label outside the draft vocabulary.
        missed: True for a label outside the draft vocabulary, `[BA, S]`.
    """

    anchors: Array
    before: Array
    labels: Array
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
    """Draws random blocks with labels and slot weights. `batch` is as in `taps.target_states`."""
    tokens, in_loss = batch[:2]
    anchors, valid = draw_anchors(in_loss, options.anchors, key)
    end = target.eos_token_ids[0] if target.eos_token_ids else -1
    labels, counted = block_labels(tokens, in_loss, anchors, config.block_size, end)
    weights = counted[:, :, 1:] * valid.astype(jnp.float32)[:, :, None]
    if options.dpace is None:
        slot = jnp.arange(config.block_size - 1, dtype=jnp.float32)
        weights = weights * jnp.exp(-slot / options.decay(config.block_size))
    before, labels, weights = (x.reshape(-1, config.block_size - 1) for x in (labels[:, :, :-1], labels[:, :, 1:], weights))
    if vocab is None:
        return AnchorBlocks(anchors, before, labels, weights, jnp.zeros_like(weights, bool))
    labels = draft_ids(vocab.ids, config.vocab_size)[labels]
    missed = (labels == config.num_proposable) & (weights > 0)
    return AnchorBlocks(
        anchors, before, jnp.minimum(labels, config.num_proposable - 1), jnp.where(missed, 0.0, weights), missed
    )


def gather_slots(x: Float[Array, "B T *rest"], anchors: Int[Array, "B A"], size: int) -> Float[Array, "BA S *rest"]:
    """Gathers the entries of each block's `size` positions from its anchor on; positions past the end repeat the last one."""
    index = jnp.minimum(anchors[:, :, None] + jnp.arange(size), x.shape[1] - 1)
    return jax.vmap(lambda row, at: row[at])(x, index).reshape(-1, size, *x.shape[2:])


def slot_nll(logits: Float[Array, "BA S W"], labels: Int[Array, "BA S"]) -> Float[Array, "BA S"]:
    """Computes the cross-entropy of each slot in nats."""
    return jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]


def acceptance_weights(nll: Float[Array, "BA S"], blocks: AnchorBlocks, smoothing: float) -> Float[Array, "BA S"]:
    """Weighs each slot by its contribution to the expected number of accepted drafts (D-PACE, arXiv 2605.18810).

    The weight of slot k is the sum over j >= k of the product of q_1 ... q_j, with q = `(1 - smoothing) * p + smoothing` and
    p the probability of the label. No gradient flows through the weights.
    """
    p = jnp.where(blocks.missed, 0.0, jnp.exp(-jax.lax.stop_gradient(nll)))
    smooth = (1 - smoothing) * p + smoothing
    counted = blocks.weights > 0
    prefix = jnp.cumprod(jnp.where(counted | blocks.missed, smooth, 1.0), axis=-1)
    return blocks.weights * jnp.cumsum(jnp.where(counted, prefix, 0.0)[..., ::-1], axis=-1)[..., ::-1]


def slot_weights(nll: Float[Array, "BA S"], blocks: AnchorBlocks, smoothing: float | None) -> Float[Array, "BA S"]:
    """Returns the slot weights: the weights of the blocks, or `acceptance_weights` with a smoothing."""
    return blocks.weights if smoothing is None else acceptance_weights(nll, blocks, smoothing)


def weighted_mean(values: Float[Array, "BA S"], weights: Float[Array, "BA S"]) -> Float[Array, ""]:
    """Computes the weighted mean; 0 if all weights are 0."""
    return jnp.sum(values * weights) / jnp.maximum(jnp.sum(weights), 1e-6)


def weighted_nll(
    logits: Float[Array, "BA S W"], blocks: AnchorBlocks, smoothing: float | None = None
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Computes the weighted mean cross-entropy in nats (0 if all weights are 0), and the sum of the weights.

    `smoothing` is as in `slot_weights`.
    """
    nll = slot_nll(logits, blocks.labels)
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
    blocks: AnchorBlocks,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Computes the weighted mean cross-entropy in nats over the slots of drawn blocks, and the sum of the weights."""
    logits = draft_logits(target, config, ops, frozen, params, batch, blocks.anchors)
    return weighted_nll(logits, blocks, options.dpace)


def warm_start(target: DecoderConfig, config: DFlashConfig, target_params: DecoderParams, params: DFlashParams) -> DFlashParams:
    """Initialises a drafter from its target's last layers, whose output fits the target's head.

    The drafter's layers are copies of the target's last layers, the final norm is the target's, and `fc` passes on the normed
    input of the target's last layer. Query and key norms that the target lacks (Llama) stay as initialised. A drafter with
    other sizes than its target, or whose target has experts in these layers, keeps random layers and gets the norm only.
    """
    sizes = ("intermediate_size", "num_heads", "num_kv_heads", "head_dim")
    params = replace(params, norm=target_params.norm)
    same_sizes = (
        all(getattr(config, name) == getattr(target, name) for name in sizes) and config.num_layers <= target.num_layers
    )
    last = target_params.layers[-config.num_layers :]
    read = target.num_layers - 2
    unsupported = any(layer.attention_out_norm is not None or layer.router is not None for layer in last)
    if not same_sizes or unsupported or target.delta is not None or params.layers[0].q_norm is None:
        return params

    def copied(layer: Layer, source: Layer) -> Layer:
        norms = layer if source.q_norm is None else source
        return replace(source, q_norm=norms.q_norm, k_norm=norms.k_norm, qkv_bias=None, kind=LayerKind())

    params = replace(params, layers=tuple(map(copied, params.layers, last)))
    if read not in config.target_layer_ids:
        return params
    h = config.hidden_size
    place = config.target_layer_ids.index(read)
    fc = params.fc.at[place * h : (place + 1) * h].add(jnp.eye(h, dtype=params.fc.dtype))
    return replace(params, fc=fc, hidden_norm=target_params.layers[-1].input_norm)


def hidden_matrices(params: DFlashParams) -> DFlashParams:
    """Returns True for every matrix; a drafter has no embedding and no head."""
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
    placement: TrainingPlacement = ONE_DEVICE,
) -> TrainResult:
    """Trains a DFlash drafter with `drafter_loss`.

    Args:
        target: configuration of the target.
        target_params: parameters of the target, sharded by `placement`.
        config: configuration of the drafter.
        stream: training text.
        held_out: held-out text.
        options: options of the training loop.
        drafter_options: options of the loss.
        out: folder for checkpoints.
        console: console for progress.
        start: parameters of a drafter to train further, perhaps trained with another block size; by default the target's last
            layers if their sizes fit.
        placement: devices.
    """

    def fresh(key: Array) -> DFlashParams:
        return warm_start(target, config, target_params, initialise(dflash.declare(config), key))

    ops = placement.ops(options)

    def loss(params: Any, frozen: Any, drawn: Any) -> tuple[Array, Array]:
        return drafter_loss(target, config, drafter_options, ops, params, frozen, *drawn)

    kind = BlockKind("DFlash drafter", dflash.declare(config), hidden_matrices, loss, fresh)
    arguments = (target, target_params, config, stream, held_out, options, drafter_options, out, console, start, placement)
    return train_blocks(kind, *arguments)


@dataclass(frozen=True)
class BlockKind:
    """Training of one kind of drafter that drafts a block in one pass.

    Attributes:
        title: title of the progress bar.
        specs: declaration of the parameters.
        is_hidden_matrix: see `text.make_optimizer`.
        loss: see `step.Loss`; `frozen` is a `Frozen`, and drawn are the batch and its `AnchorBlocks`.
        fresh: initialises parameters from a key.
        whole: True if the loss reads the output of the target's last layer.
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
    """Trains a drafter of a `BlockKind`; see `train_drafter` for the arguments. The draft vocabulary of `start` is kept."""
    dflash.check_fits(config, target)
    if untrained := [name for name in config.variations if name != "windows" or not isinstance(config, DFlash2Config)]:
        raise ValueError(f"expected a drafter without features that training lacks, found {', '.join(untrained)}")
    check_anchors(drafter_options, options)

    def init() -> Any:
        return kind.fresh(jax.random.key(options.seed)) if start is None else dflash.with_vocab(start, None)

    settings = run_fingerprint(config, drafter_options, target_params, start)
    frozen = frozen_inputs(config, target_params, stream, start)
    target_arguments = (target, target_params, tapped_layers(target, config.target_layer_ids, kind.whole), settings["target"])
    state_arguments = (drafter_options.keep_taps, *target_arguments, placement.mesh is not None)
    batches = batches_with_states(stream, held_out, options, *state_arguments)

    def draw(frozen: Frozen, batch: Any, key: Array) -> tuple[Any, AnchorBlocks]:
        return batch, draw_blocks(target, config, drafter_options, batch, key, frozen.vocab)

    objective = Objective(kind.title, kind.specs, kind.is_hidden_matrix, kind.loss, draw, frozen)
    result = train(make_task(objective, init, batches, settings, placement), console, out)
    return replace(result, params=dflash.with_vocab(result.params, frozen.vocab))


def save_drafter(folder: Path, model: Any, config: DFlashConfig, params: Any, dtype: DTypeLike) -> None:
    """Writes a drafter of a `BlockKind` with its draft vocabulary; see `checkpoint.save_params`.

    Args:
        folder: folder for the drafter.
        model: module of the kind, such as `models.dflash`.
        config: configuration of the drafter.
        params: parameters of the drafter.
        dtype: dtype of the saved parameters.
    """
    vocab = dflash.backbone_of(params).vocab
    maps = None if vocab is None else maps_from_target_ids(np.asarray(vocab.ids), config.vocab_size)
    stored = dflash.with_vocab(params, None)
    save_params(folder, model.config_to_hf(config), model.declare(config), stored, dtype, maps)


def check_anchors(drafter_options: DFlashOptions, options: TextOptions) -> None:
    """Raises a `ValueError` for at least as many anchors as positions in a sequence."""
    if drafter_options.anchors >= options.sequence_length:
        raise ValueError(
            f"expected fewer anchors than the sequence length {options.sequence_length}, found {drafter_options.anchors}"
        )


def run_fingerprint(
    config: DFlashConfig, drafter_options: DFlashOptions, target_params: DecoderParams, start: Any
) -> dict[str, Any]:
    """Returns the fingerprint of a drafter's training, which a checkpoint must match."""
    loss = {name: value for name, value in asdict(drafter_options).items() if name != "keep_taps"}
    settings = {"config": asdict(config), "drafter": loss, "target": fingerprint(target_params)}
    return settings | {"start": None if start is None else fingerprint(start)}
