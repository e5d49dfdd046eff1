"""Heads compiled by XLA, for any device.

Legend: B rows of a batch, T positions, N query heads, K key/value heads, D head size.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from tilewright.kernels.operations import Heads, Norm
from tilewright.kernels.rms_norm.reference import rms_norm


def split_heads(x: Float[Array, "B T _"], head_dim: int) -> Float[Array, "B T N {head_dim}"]:
    # Without the barrier XLA splits the heads inside the matmul, for which a TPU first transposes the whole weight.
    return jax.lax.optimization_barrier(x).reshape(*x.shape[:2], -1, head_dim)


def rotate_halves(
    x: Float[Array, "B T N D"], cos: Float[Array, "B T h"], sin: Float[Array, "B T h"]
) -> Float[Array, "B T N D"]:
    """Applies rotary embedding to halves of the first 2 h entries (Hugging Face's `rotate_half`), in float32."""
    rotated, rest = jnp.split(x, [2 * cos.shape[-1]], axis=-1)
    cos = cos[:, :, None]
    sin = sin[:, :, None]
    first, second = jnp.split(rotated.astype(jnp.float32), 2, axis=-1)
    result = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
    return result if rest.shape[-1] == 0 else jnp.concatenate([result, rest], axis=-1)


def rotate_by_product(
    x: Float[Array, "B T N D"], cos: Float[Array, "B T h"], sin: Float[Array, "B T h"]
) -> Float[Array, "B T N D"]:
    """Applies rotary embedding on a TPU: a permutation matrix swaps the halves exactly, since splitting lanes is expensive."""
    half = cos.shape[-1]
    rest = x.shape[-1] - 2 * cos.shape[-1]
    if half == 0:
        return x
    swap = jax.scipy.linalg.block_diag(jnp.roll(jnp.eye(2 * half, dtype=x.dtype), half, axis=0), jnp.eye(rest, dtype=x.dtype))
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    swapped = jnp.matmul(x, swap, precision=precision, preferred_element_type=jnp.float32)
    still = jnp.ones((*cos.shape[:-1], rest), cos.dtype)
    parts = ((cos, cos, still), (-sin, sin, 0 * still)) if rest else ((cos, cos), (-sin, sin))
    cos, sin = (jnp.concatenate(each, axis=-1)[:, :, None] for each in parts)
    return (x.astype(jnp.float32) * cos + swapped * sin).astype(x.dtype)


def heads(
    projection: tuple[Array, ...],
    spec: Heads,
    rotate: Callable[[Array, Array, Array], Array] = rotate_halves,
    norm: Callable[[Array, Array, float], Array] = rms_norm,
) -> tuple[Any, Any, Any]:
    """Splits a projection (q, k, v), (k, v) or (q,), each `[B, T, heads * D]`, into heads; (q, k) if keys are values.

    Returns:
        Queries `[B, T, N, D]`, keys and values `[B, K, T, D]`; None for absent ones.
    """
    parts = [split_heads(part, spec.head_dim) for part in projection]
    if spec.keys_are_values:
        parts.append(parts[-1])
    q, kv = (parts[0], parts[1:]) if len(parts) != 2 else (None, parts)

    def rotated(x: Array, weight: Norm | None) -> Array:
        return rotate(x if weight is None else norm(x, *weight), *spec.rope)

    queries = None if q is None else rotated(q, spec.q_norm)
    if not kv:
        return queries, None, None
    values = kv[1] if spec.v_norm is None else norm(kv[1], *spec.v_norm)
    return queries, rotated(kv[0], spec.k_norm).transpose(0, 2, 1, 3), values.transpose(0, 2, 1, 3)
