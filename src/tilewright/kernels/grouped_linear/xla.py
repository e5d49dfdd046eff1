"""The operation as XLA compiles it, on any device."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from tilewright.kernels.operations import Joined


def grouped_linear(
    x: Float[Array, "R I"], w: Float[Array, "G I O"], sizes: Int[Array, " G"], out_dtype: DTypeLike | None = None
) -> Float[Array, "R O"]:
    """The product of each row with the matrix of its group; see `reference.py`.

    In the dtype of `x` unless another is asked for. In float32 it is a true float32 product on every chip.
    """
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    y = jax.lax.ragged_dot(x, w, sizes, precision=precision, preferred_element_type=jnp.dtype(out_dtype or x.dtype))
    return jnp.where(jnp.arange(len(x))[:, None] < jnp.sum(sizes), y, 0)


def grouped_gated(x: Float[Array, "R I"], joined: Joined, sizes: Int[Array, " G"]) -> Float[Array, "R O"]:
    """`silu(x @ gate) * (x @ up)` with the two matrices of each row's group."""
    gate, up = (grouped_linear(x, w, sizes) for w in joined.parts)
    return jax.nn.silu(gate) * up
