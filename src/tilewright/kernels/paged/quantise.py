"""Keys and values in 8 bits, one scale for each vector: of one position and one head.

An entry depends on nothing but its own vector, so that it does not matter what is computed or stored beside it. The scale is
symmetric, the largest absolute number over 127. It is float32: of a head of 64 it takes 4 bytes beside 64, where bfloat16 would
take 2; but then the numbers would be rounded twice, and XLA on a CPU converts whole arrays of bfloat16 to write a few entries.

A number is at most half a step away from what it was: `largest / 254`.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Shaped

from tilewright.kernels.operations import Quantised

LEVELS = 127.0
SMALLEST = 1e-30
"""Vectors without a larger number count as zeros: their steps could not be divided by."""


def quantise(x: Float[Array, "*entries D"]) -> Quantised:
    """Vectors in 8 bits. One with a number that is not finite gives none that is, so that it does not go unseen."""
    wide = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=-1, keepdims=True)  # NaN if there is one
    zeros = largest < SMALLEST
    units = jnp.rint(wide * jnp.where(zeros, 0.0, LEVELS / largest))
    finite = jnp.isfinite(largest)
    scale = jnp.where(finite, jnp.where(zeros, 0.0, largest / LEVELS), jnp.nan)
    return Quantised(jnp.where(finite, units, 0.0).astype(jnp.int8), scale[..., 0])


def dequantise(held: Quantised, dtype: DTypeLike) -> Float[Array, "*entries D"]:
    """The vectors, rounded to a dtype."""
    return (held.values.astype(jnp.float32) * held.scale[..., None]).astype(dtype)


def as_held(new: Shaped[Array, "*entries D"], held: Array | Quantised) -> Any:
    """New entries as a pool has them."""
    return quantise(new) if isinstance(held, Quantised) else new
