"""Training a LiLiCorr drafter (arXiv 2608.20530): the loss of a DFlash drafter, and beside it that of its lattice.

The lattice learns to tell the right token among the K most likely ones of a slot, where the right token of the slot before is
the one that was taken there. A block counts as far as its right tokens are among the candidates: behind a slot without, no walk
is right. Besides, what the lattice gives to wrong candidates is weighed by how much less likely the target finds each of them
than the right token, so that it is dear where the target is sure and cheap where it is not. Both reach the backbone, by the
candidates' probabilities and the slots' hidden states.

Source of the recipe: NVIDIA/Model-Optimizer #2342, `hf_lilicorr.py`, the variant that it calls base. There a block counts only
if all of its slots are in the loss; here it counts up to the first that is not, as short answers have few whole blocks.
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
    at_slots,
    draw_blocks,
    run_blocks,
    slot_nll,
    train_blocks,
    weighted_mean,
    weighted_nll,
)
from tilewright.train.loop import TrainResult
from tilewright.train.partitioned import TrainingPlacement
from tilewright.train.text import TextOptions


@dataclass(frozen=True)
class LiLiCorrOptions(DFlashOptions):
    """Options that only the training of a LiLiCorr drafter has.

    Attributes:
        lattice_weight: of the lattice's cross-entropy against the backbone's loss. The published value is 0.25.
        penalty_weight: of what the lattice gives to candidates that the target finds unlikely. The published value is 0.25.
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
    """`lilicorr.transition_scores` of the blocks at anchors, whose logits pass their gradient on."""
    values = jnp.take_along_axis(logits, candidates, axis=-1)
    log_probs = values - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    feature = at_slots(drafted.features, jnp.maximum(anchors - 1, 0), 1)[:, 0]
    anchored = anchors.reshape(-1) > 0
    tokens = candidates if frozen.vocab is None else frozen.vocab.ids[candidates]
    embedded = frozen.params.embed[tokens]
    inputs = (embedded, log_probs, drafted.hidden, jnp.where(anchored[:, None], feature, 0), anchored)
    return lilicorr.transition_scores(config, ops, params.lattice, *inputs)


def target_logits(
    target: DecoderConfig, ops: Operations, frozen: Frozen, stream: Float[Array, "BA S H"], candidates: Int[Array, "BA S K"]
) -> Float[Array, "BA S K"]:
    """The target's logits of these tokens alone, which are named by the drafter's ids."""
    head = frozen.head
    rows = head.w[candidates] if isinstance(head, Transposed) else jnp.moveaxis(head[:, candidates], 0, -1)
    normed = ops.rms_norm(stream, frozen.params.norm, target.rms_norm_eps)
    highest = jax.lax.Precision.HIGHEST
    found = jnp.einsum("bsh,bskh->bsk", normed, rows, precision=highest, preferred_element_type=jnp.float32)
    return softcapped(found, target.logit_softcap)


def lattice_losses(
    scores: Float[Array, "BA S K K"],
    candidates: Int[Array, "BA S K"],
    said: Float[Array, "BA S K"] | None,
    blocks: AnchorBlocks,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The lattice's cross-entropy in nats, and its expected penalty, both means over the slots that count.

    Args:
        said: the target's logits of the candidates; None for no penalty.
    """
    right = candidates == blocks.wanted[..., None]
    there = jnp.any(right, axis=-1) & (blocks.weights > 0)
    counted = jnp.cumprod(there.astype(jnp.float32), axis=-1)
    place = jnp.argmax(right, axis=-1)
    before = jnp.pad(place[:, :-1], ((0, 0), (1, 0)))  # before the first slot stands the anchor, in every row
    rows = jnp.take_along_axis(scores, before[:, :, None, None], axis=2)[:, :, 0]
    chosen = weighted_mean(slot_nll(rows, place), counted)
    if said is None:
        return chosen, jnp.zeros(())
    own = jnp.take_along_axis(said, place[..., None], axis=-1)
    dear = jnp.sum(jax.nn.softmax(rows, axis=-1) * jnp.maximum(own - said, 0), axis=-1)
    return chosen, weighted_mean(dear, counted)


def drafter_losses(
    target: DecoderConfig,
    config: LiLiCorrConfig,
    options: LiLiCorrOptions,
    ops: Operations,
    params: LiLiCorrParams,
    frozen: Frozen,
    batch: Sequence[Array],
    key: Array,
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
    """The backbone's loss and the lattice's two (see `lattice_losses`), and the sum of the slots' weights.

    The penalty is 0 where it has no weight in the loss.
    """
    blocks = draw_blocks(target, config, options, batch, key, frozen.vocab)
    run = partial(lilicorr.run_block, config, ops)
    arguments = (params.backbone, partial(run, params), batch, blocks.anchors, (None,) * config.num_layers)
    drafted = run_blocks(target, config, ops, frozen.params, *arguments, whole=options.penalty_weight > 0)
    logits = ops.linear(drafted.hidden, frozen.head, jnp.float32)
    candidates, _ = select.top_k(jax.lax.stop_gradient(logits), config.candidate_top_k)
    scores = lattice_scores(config, ops, params, frozen, drafted, logits, candidates, blocks.anchors)
    said = None
    if drafted.stream is not None:
        stream = at_slots(drafted.stream, blocks.anchors, config.block_size - 1)
        said = target_logits(target, ops, frozen, stream, candidates)
    own, total = weighted_nll(logits, blocks, options.dpace)
    return own, *lattice_losses(scores, candidates, said, blocks), total


def hidden_matrices(config: LiLiCorrConfig, params: LiLiCorrParams) -> LiLiCorrParams:
    """True for every matrix, of which biases and what nodes begin with are none."""
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
    placement: TrainingPlacement = TrainingPlacement(),
) -> TrainResult:
    """Trains a drafter. Its loss is the backbone's and, weighed, the lattice's two; see `drafter.train_drafter`."""
    ops = placement.ops(options)
    weights = (drafter_options.lattice_weight, drafter_options.penalty_weight)

    def loss(params: Any, frozen: Any, batch: Any, key: Array) -> tuple[Array, Array]:
        own, chosen, dear, total = drafter_losses(target, config, drafter_options, ops, params, frozen, batch, key)
        return own + weights[0] * chosen + weights[1] * dear, total

    kind = BlockKind(
        "LiLiCorr drafter",
        lilicorr.declare(config),
        partial(hidden_matrices, config),
        loss,
        partial(start_of, target, config, target_params),
        whole=weights[1] > 0,
    )
    given = (target, target_params, config, stream, held_out, options, drafter_options, out, console, start, placement)
    return train_blocks(kind, *given)


def start_of(target: DecoderConfig, config: LiLiCorrConfig, target_params: DecoderParams, key: Array) -> LiLiCorrParams:
    """A backbone that starts as a DFlash drafter's, and a random lattice."""
    params = lilicorr.fresh(config, key)
    return replace(params, backbone=drafter.warm_start(target, config, target_params, params.backbone))
