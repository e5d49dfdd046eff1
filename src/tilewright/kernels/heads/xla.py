"""The operation as XLA compiles it, on any device.

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
    # Without the barrier XLA lets the projection write its heads apart, for which a TPU first transposes the whole weight.
    return jax.lax.optimization_barrier(x).reshape(*x.shape[:2], -1, head_dim)


def rotate_halves(
    x: Float[Array, "B T N D"], cos: Float[Array, "B T h"], sin: Float[Array, "B T h"]
) -> Float[Array, "B T N D"]:
    """Rotary embedding over the halves of the first 2 h entries (`rotate_half`, as Hugging Face has it), in float32."""
    rotated, rest = jnp.split(x, [2 * cos.shape[-1]], axis=-1)
    cos = cos[:, :, None]
    sin = sin[:, :, None]
    first, second = jnp.split(rotated.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
    return turned if rest.shape[-1] == 0 else jnp.concatenate([turned, rest], axis=-1)


def rotate_by_product(
    x: Float[Array, "B T N D"], cos: Float[Array, "B T h"], sin: Float[Array, "B T h"]
) -> Float[Array, "B T N D"]:
    """Rotary embedding for a TPU, which cannot cut a register's lanes in half cheaply: a matrix of ones swaps them, exactly."""
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
    """Queries `[B, T, N, D]`, keys and values `[B, K, T, D]` of q, k and v, of k and v alone, or of q alone, each
    `[B, T, heads * D]`; None for what is not among them."""
    parts = [split_heads(part, spec.head_dim) for part in projection]
    q, kv = (parts[0], parts[1:]) if len(parts) != 2 else (None, parts)

    def turned(x: Array, weight: Norm | None) -> Array:
        return rotate(x if weight is None else norm(x, *weight), *spec.rope)

    queries = None if q is None else turned(q, spec.q_norm)
    if not kv:
        return queries, None, None
    return queries, turned(kv[0], spec.k_norm).transpose(0, 2, 1, 3), kv[1].transpose(0, 2, 1, 3)
