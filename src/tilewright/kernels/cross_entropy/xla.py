"""Cross-entropy in blocks of rows, on any device: memory holds the logits of one block at a time.

The gradient is computed with the value, while a block's logits exist: three matmuls in total, none repeated.
(Liger Kernel, arXiv 2410.10989, section 3.2.)

Legend: M rows, H hidden size, V vocabulary.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32, Int

from tilewright.kernels.linear.xla import linear
from tilewright.kernels.operations import softcapped

BLOCK_BYTES = 2**25
"""Bytes of a block's float32 logits. A block has at least LEAST_ROWS rows, for efficient matmuls with a large vocabulary."""
LEAST_ROWS = 256

Linear = Callable[..., Array]
"""`linear(x, head, out_dtype)` of a bundle of operations."""
Logits = Callable[[Array, Any], Array]
"""`logits(x, head)` in float32."""


def capped_products(linear: Linear, cap: float | None, x: Float[Array, "M H"], head: Any) -> Float32[Array, "M V"]:
    """Returns the logits of some rows, with a softcap."""
    return softcapped(linear(x, head, jnp.float32), cap)


def block_rows(rows: int, vocab: int) -> int:
    """Returns the number of rows per block, with blocks as even as possible."""
    most = max(LEAST_ROWS, BLOCK_BYTES // (4 * vocab))
    return -(-rows // -(-rows // most))


def losses(logits: Float32[Array, "M V"], labels: Int[Array, " M"]) -> tuple[Array, Array, Array]:
    """Returns each row's loss, the exponentials of its shifted logits, and their sum."""
    top = jnp.max(logits, axis=-1)
    powers = jnp.exp(logits - top[:, None])
    total = jnp.sum(powers, axis=-1)
    picked = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    return jnp.log(total) + top - picked, powers, total


def divided(rows: int, *arrays: Array) -> tuple[Array, ...]:
    """Splits arrays of M rows into blocks of `rows`, padded with zeros."""
    return tuple(jnp.pad(x, ((0, -len(x) % rows), *((0, 0),) * (x.ndim - 1))).reshape(-1, rows, *x.shape[1:]) for x in arrays)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def weighted(
    logits: Logits, rows: int, x: Float[Array, "M H"], head: Any, labels: Int[Array, " M"], weights: Float32[Array, " M"]
) -> Float32[Array, ""]:
    def block(total: Array, part: Any) -> tuple[Array, None]:
        x, labels, weights = part
        return total + jnp.sum(losses(logits(x, head), labels)[0] * weights), None

    return jax.lax.scan(block, jnp.float32(0), divided(rows, x, labels, weights))[0]


def forward(
    logits: Logits, rows: int, x: Array, head: Any, labels: Array, weights: Array
) -> tuple[Array, tuple[Array, Any, Array]]:
    def block(sums: tuple[Array, Any], part: Any) -> tuple[tuple[Array, Any], tuple[Array, Array]]:
        x, labels, weights = part
        made, back = jax.vjp(logits, x, head)
        loss, powers, total = losses(made, labels)
        is_label = jnp.arange(made.shape[1]) == labels[:, None]
        dx, dhead = back(powers * (weights / total)[:, None] - jnp.where(is_label, weights[:, None], 0.0))
        return (sums[0] + jnp.sum(loss * weights), jax.tree.map(jnp.add, sums[1], dhead)), (dx, loss)

    start = (jnp.float32(0), jax.tree.map(jnp.zeros_like, head))
    (total, dhead), (dx, loss) = jax.lax.scan(block, start, divided(rows, x, labels, weights))
    count = len(x)
    return total, (dx.reshape(-1, x.shape[1])[:count], dhead, loss.reshape(-1)[:count])


def backward(
    logits: Logits, rows: int, residuals: tuple[Array, Any, Array], cotangent: Array
) -> tuple[Array, Any, None, Array]:
    dx, dhead, loss = residuals
    scaled_head = jax.tree.map(lambda x: cotangent.astype(x.dtype) * x, dhead)
    return cotangent.astype(dx.dtype) * dx, scaled_head, None, cotangent * loss


weighted.defvjp(forward, backward)


def cross_entropy(
    x: Float[Array, "*rows H"],
    head: Any,
    labels: Int[Array, "*rows"],
    weights: Float32[Array, "*rows"],
    cap: float | None = None,
    *,
    linear: Linear = linear,
) -> Float32[Array, ""]:
    """Returns the sum over rows of `weights` times the loss of the row's label, in nats; see `reference.py`.

    Args:
        head: a head that `linear` accepts.
    """
    flat = x.reshape(labels.size, -1)
    logits = partial(capped_products, linear, cap)
    vocab = jax.eval_shape(logits, flat, head).shape[-1]
    return weighted(logits, block_rows(len(flat), vocab), flat, head, labels.reshape(-1), weights.reshape(-1))
