"""Training of a DFlash 2 drafter: the loss of a DFlash drafter plus the loss of the selector.

The selector learns to pick the label among the most likely candidates of a slot, given the label of the slot before. A label
outside the candidates replaces the last candidate. Both losses use the same slot weights, and both train the backbone.

Sources of the recipe: the trainers speculators #1006 and Model-Optimizer #2216; the authors have published none.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float
from rich.console import Console

from tilewright.kernels import select
from tilewright.kernels.operations import Operations
from tilewright.models import convolution, dflash2
from tilewright.models.decoder import DecoderConfig, DecoderParams
from tilewright.models.dflash2 import DFlash2Config, DFlash2Params
from tilewright.train import drafter
from tilewright.train.data import TokenSource
from tilewright.train.drafter import (
    AnchorBlocks,
    BlockKind,
    DFlashOptions,
    Frozen,
    run_blocks,
    train_blocks,
    weighted_nll,
)
from tilewright.train.loop import TrainResult
from tilewright.train.step import ONE_DEVICE, TrainingPlacement
from tilewright.train.text import TextOptions


@dataclass(frozen=True)
class DFlash2Options(DFlashOptions):
    """Options of the training of a DFlash 2 drafter.

    Attributes:
        selector_weight: weight of the selector's loss relative to the backbone's.
    """

    selector_weight: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.selector_weight >= 0:
            raise ValueError(f"expected a selector weight of at least 0, found {self.selector_weight}")


def selector_loss(
    config: DFlash2Config,
    ops: Operations,
    params: DFlash2Params,
    hidden: Float[Array, "BA S H"],
    logits: Float[Array, "BA S W"],
    blocks: AnchorBlocks,
    smoothing: float | None = None,
) -> Float[Array, ""]:
    """Computes the weighted mean cross-entropy of the labels among the candidates, in nats.

    Args:
        config: configuration of the drafter.
        ops: operations.
        params: parameters of the drafter.
        hidden: hidden states of the slots.
        logits: scaled logits of the slots.
        blocks: labels and weights.
        smoothing: D-PACE smoothing, as in `drafter.weighted_nll`.
    """
    candidates, _ = select.top_k(jax.lax.stop_gradient(logits), config.selector_top_k)
    labels = blocks.labels[..., None]
    is_candidate = jnp.any(candidates == labels, axis=-1)
    candidates = candidates.at[..., -1].set(jnp.where(is_candidate, candidates[..., -1], blocks.labels))
    pairs = dflash2.pair_scores(ops, params.selector, hidden, blocks.before[..., None], candidates)
    scores = jnp.take_along_axis(logits, candidates, axis=-1) + pairs[:, :, 0]
    among = blocks._replace(labels=jnp.argmax(candidates == labels, axis=-1))
    return weighted_nll(scores, among, smoothing)[0]


def drafter_losses(
    target: DecoderConfig,
    config: DFlash2Config,
    options: DFlash2Options,
    ops: Operations,
    params: DFlash2Params,
    frozen: Frozen,
    batch: Sequence[Array],
    blocks: AnchorBlocks,
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
    """Computes the backbone's loss and the selector's loss in nats, and the sum of the slot weights."""
    run = partial(convolution.run_block, config, ops, params)
    arguments = (frozen.params, params.backbone, run, batch, blocks.anchors, config.windows)
    hidden = run_blocks(target, config, ops, *arguments).hidden
    logits = dflash2.scaled_logits(config, ops.linear(hidden, frozen.head, jnp.float32))
    selector = selector_loss(config, ops, params, hidden, logits, blocks, options.dpace)
    backbone, total = weighted_nll(logits, blocks, options.dpace)
    return backbone, selector, total


def initial_params(target: DecoderConfig, config: DFlash2Config, target_params: DecoderParams, key: Array) -> DFlash2Params:
    """Initialises the backbone like a DFlash drafter's, and convolutions and selector without effect."""
    params = dflash2.fresh(config, key)
    return replace(params, backbone=drafter.warm_start(target, config, target_params, params.backbone))


def hidden_matrices(params: DFlash2Params) -> DFlash2Params:
    """Returns True for every matrix except the codebooks, which are embeddings."""
    matrices = jax.tree.map(lambda x: x.ndim == 2, params)
    return replace(matrices, selector=replace(matrices.selector, predecessor=False, successor=False))


def train_dflash2(
    target: DecoderConfig,
    target_params: DecoderParams,
    config: DFlash2Config,
    stream: TokenSource,
    held_out: TokenSource,
    options: TextOptions,
    drafter_options: DFlash2Options,
    out: Path,
    console: Console,
    start: DFlash2Params | None = None,
    placement: TrainingPlacement = ONE_DEVICE,
) -> TrainResult:
    """Trains a DFlash 2 drafter; see `drafter.train_drafter`. The loss is backbone + `selector_weight` × selector."""
    ops = placement.ops(options)

    def loss(params: Any, frozen: Any, drawn: Any) -> tuple[Array, Array]:
        backbone, selector, total = drafter_losses(target, config, drafter_options, ops, params, frozen, *drawn)
        return backbone + drafter_options.selector_weight * selector, total

    kind = BlockKind(
        "DFlash 2 drafter",
        dflash2.declare(config),
        hidden_matrices,
        loss,
        partial(initial_params, target, config, target_params),
    )
    arguments = (target, target_params, config, stream, held_out, options, drafter_options, out, console, start, placement)
    return train_blocks(kind, *arguments)
