"""Training of a LiLiCorr drafter (arXiv 2608.20530): the loss of a DFlash drafter plus two losses of the lattice.

The lattice is a transformer over the K most likely candidates of each slot. Its cross-entropy trains the choice of the label
among a slot's candidates, given the label of the slot before. A block counts up to the first slot whose label is not a
candidate. Its penalty is the expected gap between the target's logits of the label and of the chosen candidate, so that
mistakes cost more where the target is certain. Both losses train the backbone, through the candidates' probabilities and the
slots' hidden states.

Source of the recipe: NVIDIA/Model-Optimizer #2342, `hf_lilicorr.py`, variant "base". There a block counts only if all of its
slots are in the loss; here a block counts up to the first slot outside the loss, since short answers have few whole blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int
from rich.console import Console

from tilewright.kernels import select
from tilewright.kernels.operations import Operations, Transposed, softcapped
from tilewright.models import lilicorr
from tilewright.models.decoder import DecoderConfig, DecoderParams
from tilewright.models.lilicorr import LiLiCorrConfig, LiLiCorrParams
from tilewright.train import drafter
from tilewright.train.data import TokenSource
from tilewright.train.drafter import (
    AnchorBlocks,
    BlockKind,
    DFlashOptions,
    DraftedStates,
    Frozen,
    gather_slots,
    run_blocks,
    slot_nll,
    train_blocks,
    weighted_mean,
    weighted_nll,
)
from tilewright.train.loop import TrainResult
from tilewright.train.step import ONE_DEVICE, TrainingPlacement
from tilewright.train.text import TextOptions


@dataclass(frozen=True)
class LiLiCorrOptions(DFlashOptions):
    """Options of the training of a LiLiCorr drafter.

    Attributes:
        lattice_weight: weight of the lattice's cross-entropy relative to the backbone's loss. The published value is 0.25.
        penalty_weight: weight of the penalty for candidates that are unlikely for the target. The published value is 0.25.
    """

    lattice_weight: float = 0.25
    penalty_weight: float = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (("lattice", self.lattice_weight), ("penalty", self.penalty_weight)):
            if not value >= 0:
                raise ValueError(f"expected a {name} weight of at least 0, found {value}")


def lattice_scores(
    config: LiLiCorrConfig,
    ops: Operations,
    params: LiLiCorrParams,
    frozen: Frozen,
    drafted: DraftedStates,
    logits: Float[Array, "BA S W"],
    candidates: Int[Array, "BA S K"],
    anchors: Int[Array, "B A"],
) -> Float[Array, "BA S K K"]:
    """Computes `lilicorr.transition_scores` of the blocks; gradients flow through the logits of the candidates."""
    values = jnp.take_along_axis(logits, candidates, axis=-1)
    log_probs = values - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    feature = gather_slots(drafted.features, jnp.maximum(anchors - 1, 0), 1)[:, 0]
    has_context = anchors.reshape(-1) > 0
    tokens = candidates if frozen.vocab is None else frozen.vocab.ids[candidates]
    embedded = frozen.params.embed[tokens]
    inputs = (embedded, log_probs, drafted.hidden, jnp.where(has_context[:, None], feature, 0), has_context)
    return lilicorr.transition_scores(config, ops, params.lattice, *inputs)


def target_logits(
    target: DecoderConfig, ops: Operations, frozen: Frozen, stream: Float[Array, "BA S H"], candidates: Int[Array, "BA S K"]
) -> Float[Array, "BA S K"]:
    """Computes the target's logits of the candidates, given by the drafter's ids."""
    head = frozen.head
    rows = head.w[candidates] if isinstance(head, Transposed) else jnp.moveaxis(head[:, candidates], 0, -1)
    normed = ops.rms_norm(stream, frozen.params.norm, target.rms_norm_eps)
    highest = jax.lax.Precision.HIGHEST
    logits = jnp.einsum("bsh,bskh->bsk", normed, rows, precision=highest, preferred_element_type=jnp.float32)
    return softcapped(logits, target.logit_softcap)


def lattice_losses(
    scores: Float[Array, "BA S K K"],
    candidates: Int[Array, "BA S K"],
    expected: Float[Array, "BA S K"] | None,
    blocks: AnchorBlocks,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Computes the lattice's cross-entropy in nats and its expected penalty, both means over the counted slots.

    Args:
        scores: transition scores.
        candidates: candidates of each slot.
        expected: the target's logits of the candidates; None for no penalty.
        blocks: labels and weights.
    """
    is_label = candidates == blocks.labels[..., None]
    is_candidate = jnp.any(is_label, axis=-1) & (blocks.weights > 0)
    counted = jnp.cumprod(is_candidate.astype(jnp.float32), axis=-1)
    place = jnp.argmax(is_label, axis=-1)
    before = jnp.pad(place[:, :-1], ((0, 0), (1, 0)))  # the first slot follows the anchor, which is row 0
    rows = jnp.take_along_axis(scores, before[:, :, None, None], axis=2)[:, :, 0]
    cross_entropy = weighted_mean(slot_nll(rows, place), counted)
    if expected is None:
        return cross_entropy, jnp.zeros(())
    label_logit = jnp.take_along_axis(expected, place[..., None], axis=-1)
    penalty = jnp.sum(jax.nn.softmax(rows, axis=-1) * jnp.maximum(label_logit - expected, 0), axis=-1)
    return cross_entropy, weighted_mean(penalty, counted)


def drafter_losses(
    target: DecoderConfig,
    config: LiLiCorrConfig,
    options: LiLiCorrOptions,
    ops: Operations,
    params: LiLiCorrParams,
    frozen: Frozen,
    batch: Sequence[Array],
    blocks: AnchorBlocks,
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
    """Computes the backbone's loss, the two losses of `lattice_losses`, and the sum of the slot weights.

    The penalty is 0 if its weight is 0.
    """
    run = partial(lilicorr.run_block, config, ops)
    arguments = (params.backbone, partial(run, params), batch, blocks.anchors, (None,) * config.num_layers)
    drafted = run_blocks(target, config, ops, frozen.params, *arguments, whole=options.penalty_weight > 0)
    logits = ops.linear(drafted.hidden, frozen.head, jnp.float32)
    candidates, _ = select.top_k(jax.lax.stop_gradient(logits), config.candidate_top_k)
    scores = lattice_scores(config, ops, params, frozen, drafted, logits, candidates, blocks.anchors)
    expected = None
    if drafted.stream is not None:
        stream = gather_slots(drafted.stream, blocks.anchors, config.block_size - 1)
        expected = target_logits(target, ops, frozen, stream, candidates)
    backbone, total = weighted_nll(logits, blocks, options.dpace)
    return backbone, *lattice_losses(scores, candidates, expected, blocks), total


def hidden_matrices(config: LiLiCorrConfig, params: LiLiCorrParams) -> LiLiCorrParams:
    """Returns True for every parameter that is declared as a matrix."""
    return jax.tree.map(lambda spec, _: spec.kind == "matrix", lilicorr.declare(config), params)


def train_lilicorr(
    target: DecoderConfig,
    target_params: DecoderParams,
    config: LiLiCorrConfig,
    stream: TokenSource,
    held_out: TokenSource,
    options: TextOptions,
    drafter_options: LiLiCorrOptions,
    out: Path,
    console: Console,
    start: LiLiCorrParams | None = None,
    placement: TrainingPlacement = ONE_DEVICE,
) -> TrainResult:
    """Trains a LiLiCorr drafter; see `drafter.train_drafter`. The loss is the weighted sum of `drafter_losses`."""
    ops = placement.ops(options)
    weights = (drafter_options.lattice_weight, drafter_options.penalty_weight)

    def loss(params: Any, frozen: Any, drawn: Any) -> tuple[Array, Array]:
        backbone, cross_entropy, penalty, total = drafter_losses(target, config, drafter_options, ops, params, frozen, *drawn)
        return backbone + weights[0] * cross_entropy + weights[1] * penalty, total

    kind = BlockKind(
        "LiLiCorr drafter",
        lilicorr.declare(config),
        partial(hidden_matrices, config),
        loss,
        partial(initial_params, target, config, target_params),
        whole=weights[1] > 0,
    )
    arguments = (target, target_params, config, stream, held_out, options, drafter_options, out, console, start, placement)
    return train_blocks(kind, *arguments)


def initial_params(target: DecoderConfig, config: LiLiCorrConfig, target_params: DecoderParams, key: Array) -> LiLiCorrParams:
    """Initialises the backbone like a DFlash drafter's, and a random lattice."""
    params = lilicorr.fresh(config, key)
    return replace(params, backbone=drafter.warm_start(target, config, target_params, params.backbone))
