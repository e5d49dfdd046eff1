"""8-bit keys and values with one scale per vector, that is per position and head.

An entry depends only on its own vector, not on its neighbours. The scale is symmetric: the largest absolute number over 127. It
is float32 and takes 4 bytes next to the 64 of a head of 64. A bfloat16 scale would take 2, but values would be rounded twice,
and XLA on a CPU converts whole bfloat16 arrays to write a few entries.

The error of a number is at most half a step: `largest / 254`.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Shaped

from tilewright.kernels.operations import Quantised

LEVELS = 127.0
SMALLEST = 1e-30
"""Vectors whose numbers are all smaller count as zeros, since a division by their step would overflow."""


def quantise(x: Float[Array, "*entries D"]) -> Quantised:
    """Quantises vectors to 8 bits. A vector with a non-finite number gets a NaN scale, so that the error stays visible."""
    wide = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=-1, keepdims=True)  # NaN if there is one
    zeros = largest < SMALLEST
    units = jnp.rint(wide * jnp.where(zeros, 0.0, LEVELS / largest))
    finite = jnp.isfinite(largest)
    scale = jnp.where(finite, jnp.where(zeros, 0.0, largest / LEVELS), jnp.nan)
    return Quantised(jnp.where(finite, units, 0.0).astype(jnp.int8), scale[..., 0])


def dequantise(held: Quantised, dtype: DTypeLike) -> Float[Array, "*entries D"]:
    """Dequantises vectors and rounds them to a dtype."""
    return (held.values.astype(jnp.float32) * held.scale[..., None]).astype(dtype)


def as_held(new: Shaped[Array, "*entries D"], held: Array | Quantised) -> Any:
    """Converts new entries to the format of a pool."""
    return quantise(new) if isinstance(held, Quantised) else new
