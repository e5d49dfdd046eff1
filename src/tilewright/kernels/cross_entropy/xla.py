"""The operation in blocks of rows, on any device: the logits of one block are all that is ever in memory.

Where a gradient is wanted it is made with the value, while a block's logits are at hand: three products in all, none twice.
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

from tilewright.kernels.operations import softcapped

BLOCK_BYTES = 2**25
"""Logits of a block, in float32; at least LEAST_ROWS rows, so that a large vocabulary's products stay products of matrices."""
LEAST_ROWS = 256

Linear = Callable[..., Array]
"""`linear(x, head, out_dtype)`, of a bundle of operations."""
Logits = Callable[[Array, Any], Array]
"""`logits(x, head)`, in float32."""


def capped_products(linear: Linear, cap: float | None, x: Float[Array, "M H"], head: Any) -> Float32[Array, "M V"]:
    """Logits of some rows."""
    return softcapped(linear(x, head, jnp.float32), cap)


def block_rows(rows: int, vocab: int) -> int:
    """Number of rows that are worked on at once: as even blocks as there have to be."""
    most = max(LEAST_ROWS, BLOCK_BYTES // (4 * vocab))
    return -(-rows // -(-rows // most))


def losses(logits: Float32[Array, "M V"], labels: Int[Array, " M"]) -> tuple[Array, Array, Array]:
    """Each row's loss, and its powers with their sum."""
    top = jnp.max(logits, axis=-1)
    powers = jnp.exp(logits - top[:, None])
    total = jnp.sum(powers, axis=-1)
    picked = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    return jnp.log(total) + top - picked, powers, total


def divided(rows: int, *arrays: Array) -> tuple[Array, ...]:
    """Arrays of M rows as blocks of so many; zeros behind the last."""
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


def backward(logits: Logits, rows: int, kept: tuple[Array, Any, Array], due: Array) -> tuple[Array, Any, None, Array]:
    dx, dhead, loss = kept
    return due.astype(dx.dtype) * dx, jax.tree.map(lambda x: due.astype(x.dtype) * x, dhead), None, due * loss


weighted.defvjp(forward, backward)


def cross_entropy(
    x: Float[Array, "*rows H"],
    head: Any,
    labels: Int[Array, "*rows"],
    weights: Float32[Array, "*rows"],
    cap: float | None = None,
    *,
    linear: Linear,
) -> Float32[Array, ""]:
    """The sum over rows of `weights` times the loss of the row's label, in nats: see `reference.py`.

    Args:
        head: as `linear` takes it.
    """
    flat = x.reshape(labels.size, -1)
    logits = partial(capped_products, linear, cap)
    vocab = jax.eval_shape(logits, flat, head).shape[-1]
    return weighted(logits, block_rows(len(flat), vocab), flat, head, labels.reshape(-1), weights.reshape(-1))
