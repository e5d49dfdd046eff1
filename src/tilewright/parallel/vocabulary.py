"""The loss of next tokens where each device of an axis has part of the vocabulary.

Logits are made in blocks of rows and are never whole, neither in rows nor in vocabulary; of each row the devices exchange two
numbers. After the vocabulary-parallel cross-entropy of Shoeybi et al., "Megatron-LM" (2019), section 3.

Legend: R rows, H hidden size, W a device's part of the vocabulary.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32, Int

from tilewright.parallel.rings import Axis

BLOCK_BYTES = 2**25
"""Logits of a block on one device, in float32; more where the head has more inputs than that is rows."""

Logits = Callable[[Array, Any], Array]
"""`logits(x [R, H], head) -> float32 [R, W]`."""


def cross_entropy(
    logits: Logits,
    axis: Axis,
    x: Float[Array, "R H"],
    head: Any,
    labels: Int[Array, " R"],
    weights: Float32[Array, " R"],
) -> Float32[Array, ""]:
    """The sum over rows of `weights` times the loss of the row's label in nats, within `jax.shard_map`.

    Args:
        logits: this device's, of some rows and its part of the head.
        axis: whose devices have parts of the vocabulary, in their order, and the same rows.
        head: this device's part.

    Returns:
        a device's equal share of it: the sum over the axis is the loss, and so gradients are summands too.
    """
    part = jax.eval_shape(logits, x, head).shape[-1]
    # The head's gradient, float32, is read and written for each block: blocks of a quarter of its size make that little.
    rows = max(1, min(len(x), max(BLOCK_BYTES // (4 * part), x.shape[1] // 4)))
    return _share(logits, axis, rows, x, head, labels, weights)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _share(logits: Logits, axis: Axis, rows: int, x: Array, head: Any, labels: Array, weights: Array) -> Array:
    def block(total: Array, of: Any) -> tuple[Array, None]:
        x, labels, weights = of
        loss, _, _ = _losses(logits(x, head), labels, axis)
        return total + jnp.sum(loss * weights), None

    return jax.lax.scan(block, jnp.float32(0), _blocks(rows, x, labels, weights))[0] / jax.lax.axis_size(axis)


def _losses(logits: Float32[Array, "R W"], labels: Int[Array, " R"], axis: Axis) -> tuple[Array, Array, Array]:
    """Each row's loss, the probabilities of this device's part, and where its label is in it."""
    own = labels[:, None] - jax.lax.axis_index(axis) * logits.shape[1] == jnp.arange(logits.shape[1])
    mine = jnp.stack([jax.nn.logsumexp(logits, axis=-1), jnp.sum(jnp.where(own, logits, 0.0), axis=-1)])
    totals, labelled = jnp.moveaxis(jax.lax.all_gather(mine, axis), 1, 0)
    total = jax.nn.logsumexp(totals, axis=0)
    return total - jnp.sum(labelled, axis=0), jnp.exp(logits - total[:, None]), own


def _blocks(rows: int, *arrays: Array) -> tuple[Array, ...]:
    """Arrays of R rows in blocks of so many, with zeros behind the last."""
    return tuple(jnp.pad(x, ((0, -len(x) % rows), *((0, 0),) * (x.ndim - 1))).reshape(-1, rows, *x.shape[1:]) for x in arrays)


def _forward(logits: Logits, axis: Axis, rows: int, x: Array, head: Any, labels: Array, weights: Array) -> tuple[Array, Any]:
    """The gradient is made with the value, while a block's logits are at hand; the head's is summed in float32."""

    def block(sums: tuple[Array, Any], of: Any) -> tuple[tuple[Array, Any], Array]:
        x, labels, weights = of
        made, back = jax.vjp(logits, x, head)
        loss, share, own = _losses(made, labels, axis)
        x_cotangent, head_cotangent = back(weights[:, None] * jnp.where(own, share - 1, share))
        total = jax.tree.map(lambda total, new: total + new.astype(jnp.float32), sums[1], head_cotangent)
        return (sums[0] + jnp.sum(loss * weights), total), x_cotangent

    start = (jnp.float32(0), jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), head))
    (total, head_cotangent), x_cotangent = jax.lax.scan(block, start, _blocks(rows, x, labels, weights))
    x_cotangent = x_cotangent.reshape(-1, x.shape[1])[: len(x)]
    head_cotangent = jax.tree.map(lambda cotangent, w: cotangent.astype(w.dtype), head_cotangent, head)
    return total / jax.lax.axis_size(axis), (x_cotangent, head_cotangent)


def _backward(logits: Logits, axis: Axis, rows: int, kept: tuple[Array, Any], cotangent: Array) -> tuple[Any, ...]:
    x_cotangent, head_cotangent = jax.tree.map(lambda each: cotangent.astype(each.dtype) * each, kept)
    return x_cotangent, head_cotangent, None, None


_share.defvjp(_forward, _backward)
