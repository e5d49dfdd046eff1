"""The operation as XLA compiles it, on any device."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float


def linear(x: Float[Array, "*rows I"], w: Float[Array, "I O"], out_dtype: DTypeLike | None = None) -> Float[Array, "*rows O"]:
    """`x @ w`. In float32 the product is a true float32 product on every chip (TPU and GPU round by default)."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.matmul(x, w, precision=precision, preferred_element_type=out_dtype)


def gated_linear(x: Float[Array, "*rows I"], gate: Float[Array, "I O"], up: Float[Array, "I O"]) -> Float[Array, "*rows O"]:
    """`silu(x @ gate) * (x @ up)`."""
    return jax.nn.silu(linear(x, gate)) * linear(x, up)
