"""Training a DFlash 2 drafter: the loss of a DFlash drafter, and beside it that of its selector.

The selector learns to tell the right token among the most likely ones of its slot, given the right token before it. Where the
right token is not among them, it takes the place of the last. Both losses weigh the slots alike, and both reach the backbone.

Sources of the recipe: the trainers' (speculators #1006, Model-Optimizer #2216); the authors publish none.
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
    draw_blocks,
    run_blocks,
    train_blocks,
    weighted_nll,
)
from tilewright.train.loop import TrainResult
from tilewright.train.partitioned import TrainingPlacement
from tilewright.train.text import TextOptions


@dataclass(frozen=True)
class DFlash2Options(DFlashOptions):
    """Options that only the training of a DFlash 2 drafter has.

    Attributes:
        selector_weight: of the selector's loss against the backbone's.
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
    """The weighted mean cross-entropy in nats of the right token among the candidates; `logits` are scaled already.

    Args:
        smoothing: as in `drafter.weighted_nll`.
    """
    candidates, _ = select.top_k(jax.lax.stop_gradient(logits), config.selector_top_k)
    wanted = blocks.wanted[..., None]
    there = jnp.any(candidates == wanted, axis=-1)
    candidates = candidates.at[..., -1].set(jnp.where(there, candidates[..., -1], blocks.wanted))
    pairs = dflash2.pair_scores(ops, params.selector, hidden, blocks.before[..., None], candidates)
    scores = jnp.take_along_axis(logits, candidates, axis=-1) + pairs[:, :, 0]
    among = blocks._replace(wanted=jnp.argmax(candidates == wanted, axis=-1))
    return weighted_nll(scores, among, smoothing)[0]


def drafter_losses(
    target: DecoderConfig,
    config: DFlash2Config,
    options: DFlash2Options,
    ops: Operations,
    params: DFlash2Params,
    frozen: Frozen,
    batch: Sequence[Array],
    key: Array,
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
    """The backbone's loss and the selector's, both in nats, and the sum of the slots' weights."""
    blocks = draw_blocks(target, config, options, batch, key, frozen.vocab)
    run = partial(convolution.run_block, config, ops, params)
    arguments = (frozen.params, params.backbone, run, batch, blocks.anchors, config.windows)
    hidden = run_blocks(target, config, ops, *arguments).hidden
    logits = dflash2.scaled_logits(config, ops.linear(hidden, frozen.head, jnp.float32))
    chosen = selector_loss(config, ops, params, hidden, logits, blocks, options.dpace)
    backbone, total = weighted_nll(logits, blocks, options.dpace)
    return backbone, chosen, total


def start_of(target: DecoderConfig, config: DFlash2Config, target_params: DecoderParams, key: Array) -> DFlash2Params:
    """A backbone that starts as a DFlash drafter's, and additions that do nothing yet."""
    params = dflash2.fresh(config, key)
    return replace(params, backbone=drafter.warm_start(target, config, target_params, params.backbone))


def hidden_matrices(params: DFlash2Params) -> DFlash2Params:
    """True for every matrix; a codebook is an embedding, not one of them."""
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
    placement: TrainingPlacement = TrainingPlacement(),
) -> TrainResult:
    """Trains a drafter. Its loss is the backbone's and `selector_weight` times the selector's; see `drafter.train_drafter`."""
    ops = placement.ops(options)

    def loss(params: Any, frozen: Any, batch: Any, key: Array) -> tuple[Array, Array]:
        backbone, chosen, total = drafter_losses(target, config, drafter_options, ops, params, frozen, batch, key)
        return backbone + drafter_options.selector_weight * chosen, total

    kind = BlockKind(
        "DFlash 2 drafter", dflash2.declare(config), hidden_matrices, loss, partial(start_of, target, config, target_params)
    )
    given = (target, target_params, config, stream, held_out, options, drafter_options, out, console, start, placement)
    return train_blocks(kind, *given)
