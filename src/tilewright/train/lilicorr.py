"""Training a LiLiCorr drafter (arXiv 2608.20530): the loss of a DFlash drafter, and beside it that of its lattice.

The lattice learns to tell the right token among the K most likely ones of a slot, where the right token of the slot before is
the one that was taken there. A block counts as far as its right tokens are among the candidates: behind a slot without, no walk
is right. Besides, what the lattice gives to wrong candidates is weighed by how much less likely the target finds each of them
than the right token, so that it is dear where the target is sure and cheap where it is not. Both reach the backbone, by the
candidates' probabilities and the slots' hidden states.

Source of the recipe: NVIDIA/Model-Optimizer #2342, `hf_lilicorr.py`, the variant that it calls base. There a block counts only
if all of its slots are in the loss; here it counts up to the first that is not, as short answers have few whole blocks.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int
from rich.console import Console

from tilewright.kernels import select
from tilewright.kernels.operations import Operations, Transposed
from tilewright.models import decoder, dflash, lilicorr
from tilewright.models.decoder import DecoderConfig, DecoderParams
from tilewright.models.lilicorr import LiLiCorrConfig, LiLiCorrParams
from tilewright.models.params import initialise
from tilewright.train import drafter
from tilewright.train.data import Stream
from tilewright.train.drafter import (
    Blocks,
    DFlashOptions,
    Drafted,
    at_slots,
    draw_blocks,
    run_blocks,
    weighted_mean,
    weighted_nll,
)
from tilewright.train.loop import TrainResult, train
from tilewright.train.partitioned import Division, partitioned_task
from tilewright.train.text import TextOptions, Windows


@dataclass(frozen=True)
class LiLiCorrOptions(DFlashOptions):
    """What is particular to the training of a LiLiCorr drafter.

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
    embedding: Float[Array, "V H"],
    drafted: Drafted,
    logits: Float[Array, "BA S V"],
    candidates: Int[Array, "BA S K"],
    anchors: Int[Array, "B A"],
) -> Float[Array, "BA S K K"]:
    """`lilicorr.transition_scores` of the blocks at anchors, whose logits pass their gradient on."""
    values = jnp.take_along_axis(logits, candidates, axis=-1)
    log_probs = values - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    feature = at_slots(drafted.features, jnp.maximum(anchors - 1, 0), 1)[:, 0]
    anchored = anchors.reshape(-1) > 0
    inputs = (embedding[candidates], log_probs, drafted.hidden, jnp.where(anchored[:, None], feature, 0), anchored)
    return lilicorr.transition_scores(config, ops, params.lattice, *inputs)


def target_logits(
    target: DecoderConfig,
    ops: Operations,
    target_params: DecoderParams,
    stream: Float[Array, "BA S H"],
    candidates: Int[Array, "BA S K"],
) -> Float[Array, "BA S K"]:
    """The target's logits of these tokens alone."""
    head = decoder.output_head(target_params)
    rows = head.w[candidates] if isinstance(head, Transposed) else jnp.moveaxis(head[:, candidates], 0, -1)
    normed = ops.rms_norm(stream, target_params.norm, target.rms_norm_eps)
    return jnp.einsum("bsh,bskh->bsk", normed, rows, precision=jax.lax.Precision.HIGHEST)


def lattice_losses(
    scores: Float[Array, "BA S K K"],
    candidates: Int[Array, "BA S K"],
    said: Float[Array, "BA S K"],
    blocks: Blocks,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The lattice's cross-entropy in nats, and its expected penalty, both means over the slots that count.

    Args:
        said: the target's logits of the candidates.
    """
    right = candidates == blocks.wanted[..., None]
    there = jnp.any(right, axis=-1) & (blocks.weights > 0)
    counted = jnp.cumprod(there.astype(jnp.float32), axis=-1)
    place = jnp.argmax(right, axis=-1)
    before = jnp.pad(place[:, :-1], ((0, 0), (1, 0)))  # before the first slot stands the anchor, in every row
    rows = jnp.take_along_axis(scores, before[:, :, None, None], axis=2)[:, :, 0]
    own = jnp.take_along_axis(said, place[..., None], axis=-1)
    dear = jnp.sum(jax.nn.softmax(rows, axis=-1) * jnp.maximum(own - said, 0), axis=-1)
    return weighted_nll(rows, place, counted), weighted_mean(dear, counted)


def drafter_losses(
    target: DecoderConfig,
    config: LiLiCorrConfig,
    options: LiLiCorrOptions,
    ops: Operations,
    params: LiLiCorrParams,
    target_params: DecoderParams,
    batch: tuple[Int[Array, "B T"], Bool[Array, "B T"]],
    key: Array,
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
    """The backbone's loss and the lattice's two (see `lattice_losses`), and the sum of the slots' weights."""
    blocks, run = draw_blocks(target, config, options, batch, key), partial(dflash.run_block, config, ops, params.backbone)
    arguments = (target_params, params.backbone, run, batch[0], blocks.anchors, (None,) * config.num_layers)
    drafted = run_blocks(target, config, ops, *arguments)
    logits = ops.linear(drafted.hidden, decoder.output_head(target_params), jnp.float32)
    candidates, _ = select.top_k(jax.lax.stop_gradient(logits), config.candidate_top_k)
    scores = lattice_scores(config, ops, params, target_params.embed, drafted, logits, candidates, blocks.anchors)
    stream = jax.lax.stop_gradient(at_slots(drafted.stream, blocks.anchors, config.block_size - 1))
    said = target_logits(target, ops, target_params, stream, candidates)
    own = weighted_nll(logits, blocks.wanted, blocks.weights)
    return own, *lattice_losses(scores, candidates, said, blocks), jnp.sum(blocks.weights)


def hidden_matrices(config: LiLiCorrConfig, params: LiLiCorrParams) -> LiLiCorrParams:
    """True for every matrix, of which biases and what nodes begin with are none."""
    return jax.tree.map(lambda spec, _: spec.kind == "matrix", lilicorr.declare(config), params)


def train_lilicorr(
    target: DecoderConfig,
    target_params: DecoderParams,
    config: LiLiCorrConfig,
    stream: Stream,
    held_out: Stream,
    options: TextOptions,
    drafter_options: LiLiCorrOptions,
    out: Path,
    console: Console,
    start: LiLiCorrParams | None = None,
    division: Division = Division(),
) -> TrainResult:
    """Trains a drafter. Its loss is the backbone's and, weighed, the lattice's two; see `drafter.train_drafter`."""
    dflash.check_fits(config, target)
    drafter.check_anchors(drafter_options, options)
    ops, weights = division.ops(options), (drafter_options.lattice_weight, drafter_options.penalty_weight)

    def loss(params: Any, frozen: Any, batch: Any, key: Array) -> tuple[Array, Array]:
        own, chosen, dear, total = drafter_losses(target, config, drafter_options, ops, params, frozen, batch, key)
        return own + weights[0] * chosen + weights[1] * dear, total

    def init() -> LiLiCorrParams:
        if start is not None:
            return start
        return start_of(target, config, target_params, jax.random.key(options.seed))

    same = drafter.identity(config, drafter_options, target_params, start)
    windows = Windows(stream, held_out, options.sequence_length, options)
    trained = (init, lilicorr.declare(config), partial(hidden_matrices, config), division)
    return train(partitioned_task("LiLiCorr drafter", windows, same, loss, target_params, *trained), console, out)


def start_of(target: DecoderConfig, config: LiLiCorrConfig, target_params: DecoderParams, key: Array) -> LiLiCorrParams:
    """A backbone that starts as a DFlash drafter's, and a random lattice."""
    params = initialise(lilicorr.declare(config), key)
    return replace(params, backbone=drafter.warm_start(target, config, target_params, params.backbone))
