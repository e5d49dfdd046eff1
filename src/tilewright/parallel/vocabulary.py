"""Vocabulary-parallel cross-entropy: next-token loss with the vocabulary sharded over an axis.

Logits are computed in blocks of rows and are never materialised whole, neither in rows nor in vocabulary. Devices exchange two
numbers per row. After Shoeybi et al., "Megatron-LM" (2019), section 3.

Legend: R rows, H hidden size, W entries of a device's part of the vocabulary.
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
"""Bytes of a block's float32 logits on one device; more where a quarter of the hidden size is more rows."""

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
    """Sums `weights` times the loss of each row's label, in nats. Within `jax.shard_map`.

    Args:
        logits: function of some rows and this device's part of the head, to this device's logits.
        axis: axis that shards the vocabulary, in device order, and replicates the rows.
        head: this device's part of the head.

    Returns:
        an equal share of the loss per device: the sum over the axis is the loss, so gradients are partial sums, too.
    """
    part = jax.eval_shape(logits, x, head).shape[-1]
    # Each block reads and writes the head's float32 gradient; blocks of at least H / 4 rows keep this cost small.
    rows = max(1, min(len(x), max(BLOCK_BYTES // (4 * part), x.shape[1] // 4)))
    return _share(logits, axis, rows, x, head, labels, weights)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _share(logits: Logits, axis: Axis, rows: int, x: Array, head: Any, labels: Array, weights: Array) -> Array:
    def block(total: Array, inputs: Any) -> tuple[Array, None]:
        x, labels, weights = inputs
        loss, _, _ = _losses(logits(x, head), labels, axis)
        return total + jnp.sum(loss * weights), None

    return jax.lax.scan(block, jnp.float32(0), _blocks(rows, x, labels, weights))[0] / jax.lax.axis_size(axis)


def _losses(logits: Float32[Array, "R W"], labels: Int[Array, " R"], axis: Axis) -> tuple[Array, Array, Array]:
    """Returns each row's loss, the probabilities of this device's part, and a mask of the label in this part."""
    is_label = labels[:, None] - jax.lax.axis_index(axis) * logits.shape[1] == jnp.arange(logits.shape[1])
    local = jnp.stack([jax.nn.logsumexp(logits, axis=-1), jnp.sum(jnp.where(is_label, logits, 0.0), axis=-1)])
    totals, labelled = jnp.moveaxis(jax.lax.all_gather(local, axis), 1, 0)
    total = jax.nn.logsumexp(totals, axis=0)
    return total - jnp.sum(labelled, axis=0), jnp.exp(logits - total[:, None]), is_label


def _blocks(rows: int, *arrays: Array) -> tuple[Array, ...]:
    """Splits arrays of R rows into blocks of `rows` rows, padded with zeros."""
    return tuple(jnp.pad(x, ((0, -len(x) % rows), *((0, 0),) * (x.ndim - 1))).reshape(-1, rows, *x.shape[1:]) for x in arrays)


def _forward(logits: Logits, axis: Axis, rows: int, x: Array, head: Any, labels: Array, weights: Array) -> tuple[Array, Any]:
    """Computes the gradient with the value, from the logits of each block; sums the head's gradient in float32."""

    def block(sums: tuple[Array, Any], inputs: Any) -> tuple[tuple[Array, Any], Array]:
        x, labels, weights = inputs
        block_logits, back = jax.vjp(logits, x, head)
        loss, share, is_label = _losses(block_logits, labels, axis)
        x_cotangent, head_cotangent = back(weights[:, None] * jnp.where(is_label, share - 1, share))
        total = jax.tree.map(lambda total, new: total + new.astype(jnp.float32), sums[1], head_cotangent)
        return (sums[0] + jnp.sum(loss * weights), total), x_cotangent

    start = (jnp.float32(0), jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), head))
    (total, head_cotangent), x_cotangent = jax.lax.scan(block, start, _blocks(rows, x, labels, weights))
    x_cotangent = x_cotangent.reshape(-1, x.shape[1])[: len(x)]
    head_cotangent = jax.tree.map(lambda cotangent, w: cotangent.astype(w.dtype), head_cotangent, head)
    return total / jax.lax.axis_size(axis), (x_cotangent, head_cotangent)


def _backward(logits: Logits, axis: Axis, rows: int, residuals: tuple[Array, Any], cotangent: Array) -> tuple[Any, ...]:
    x_cotangent, head_cotangent = jax.tree.map(lambda each: cotangent.astype(each.dtype) * each, residuals)
    return x_cotangent, head_cotangent, None, None


_share.defvjp(_forward, _backward)
