"""Training of a DSpark drafter (arXiv 2607.05147): DFlash's blocks, and a serial head that reads the label before each slot.

Each slot learns the label by cross-entropy, and the target's distribution by the L1 distance. Half of that distance is the
probability that the target rejects a draft. The logits include the serial head.

Source of the recipe: deepseek-ai/DeepSpec, `deepspec/modeling/dspark/loss.py`. Its third loss, for the confidence head, and the
head are left out. The slot weights are DFlash's (`DFlashOptions.gamma`).
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

from tilewright.kernels.operations import Operations, softcapped
from tilewright.models import dflash, dspark
from tilewright.models.decoder import DecoderConfig, DecoderParams
from tilewright.models.dspark import DSparkConfig, DSparkParams
from tilewright.models.params import initialise
from tilewright.train import drafter
from tilewright.train.data import TokenSource
from tilewright.train.drafter import (
    AnchorBlocks,
    BlockKind,
    DFlashOptions,
    Frozen,
    gather_slots,
    run_blocks,
    slot_nll,
    slot_weights,
    train_blocks,
    weighted_mean,
)
from tilewright.train.loop import TrainResult
from tilewright.train.step import ONE_DEVICE, TrainingPlacement
from tilewright.train.text import TextOptions


@dataclass(frozen=True)
class DSparkOptions(DFlashOptions):
    """Options of the training of a DSpark drafter.

    Attributes:
        l1_weight: share of the L1 distance in the loss, from 0 to 1; the rest is cross-entropy. The published value is 0.9.
    """

    l1_weight: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.l1_weight <= 1:
            raise ValueError(f"expected an L1 weight from 0 to 1, found {self.l1_weight}")


def drafter_losses(
    target: DecoderConfig,
    config: DSparkConfig,
    options: DSparkOptions,
    ops: Operations,
    params: DSparkParams,
    frozen: Frozen,
    batch: Sequence[Array],
    blocks: AnchorBlocks,
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
    """Computes the weighted mean cross-entropy in nats, the weighted mean L1 distance, and the sum of the slot weights.

    The distance is 0 if its weight is 0. Both distributions are over the draft vocabulary.
    """
    run = partial(dflash.run_block, config, ops)
    arguments = (params.backbone, partial(run, params.backbone), batch, blocks.anchors, (None,) * config.num_layers)
    drafted = run_blocks(target, config, ops, frozen.params, *arguments, whole=options.l1_weight > 0)
    logits = ops.linear(drafted.hidden, frozen.head, jnp.float32)
    logits = logits + dspark.serial_logits(ops, params.selector, blocks.before)
    nll = slot_nll(logits, blocks.labels)
    distance = jnp.zeros(blocks.labels.shape)
    if drafted.stream is not None:
        # The target's state at a position predicts the next token: at the anchor, the first drafted one.
        stream = gather_slots(drafted.stream, blocks.anchors, config.block_size - 1)
        expected = ops.linear(ops.rms_norm(stream, frozen.params.norm, target.rms_norm_eps), frozen.head, jnp.float32)
        expected = softcapped(expected, target.logit_softcap)
        distance = jnp.sum(jnp.abs(jax.nn.softmax(logits, axis=-1) - jax.nn.softmax(expected, axis=-1)), axis=-1)
    weights = slot_weights(nll, blocks, options.dpace)
    return weighted_mean(nll, weights), weighted_mean(distance, weights), jnp.sum(weights)


def hidden_matrices(params: DSparkParams) -> DSparkParams:
    """Returns True for every matrix except the two of the serial head, which are embeddings."""
    matrices = jax.tree.map(lambda x: x.ndim == 2, params)
    return replace(matrices, selector=replace(matrices.selector, predecessor=False, successor=False))


def train_dspark(
    target: DecoderConfig,
    target_params: DecoderParams,
    config: DSparkConfig,
    stream: TokenSource,
    held_out: TokenSource,
    options: TextOptions,
    drafter_options: DSparkOptions,
    out: Path,
    console: Console,
    start: DSparkParams | None = None,
    placement: TrainingPlacement = ONE_DEVICE,
) -> TrainResult:
    """Trains a DSpark drafter; see `drafter.train_drafter`. `l1_weight` weighs the losses of `drafter_losses`."""
    ops = placement.ops(options)
    share = drafter_options.l1_weight

    def loss(params: Any, frozen: Any, drawn: Any) -> tuple[Array, Array]:
        nll, distance, total = drafter_losses(target, config, drafter_options, ops, params, frozen, *drawn)
        return (1 - share) * nll + share * distance, total

    def fresh(key: Array) -> DSparkParams:
        params = initialise(dspark.declare(config), key)
        return replace(params, backbone=drafter.warm_start(target, config, target_params, params.backbone))

    kind = BlockKind("DSpark drafter", dspark.declare(config), hidden_matrices, loss, fresh, whole=share > 0)
    arguments = (target, target_params, config, stream, held_out, options, drafter_options, out, console, start, placement)
    return train_blocks(kind, *arguments)
