"""Grouped matmuls compiled by XLA, for any device."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from tilewright.kernels.operations import Joined


def grouped_linear(
    x: Float[Array, "R I"], w: Float[Array, "G I O"], sizes: Int[Array, " G"], out_dtype: DTypeLike | None = None
) -> Float[Array, "R O"]:
    """Multiplies each row by its group's matrix; see `reference.py`.

    The result has `out_dtype`, by default the dtype of `x`. float32 matmuls have full precision on every chip.
    """
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    y = jax.lax.ragged_dot(x, w, sizes, precision=precision, preferred_element_type=jnp.dtype(out_dtype or x.dtype))
    return jnp.where(jnp.arange(len(x))[:, None] < jnp.sum(sizes), y, 0)


def grouped_gated(x: Float[Array, "R I"], joined: Joined, sizes: Int[Array, " G"]) -> Float[Array, "R O"]:
    """Computes `silu(x @ gate) * (x @ up)` with the two matrices of each row's group."""
    gate, up = (grouped_linear(x, w, sizes) for w in joined.parts)
    return jax.nn.silu(gate) * up
