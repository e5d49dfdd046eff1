"""Reference linear layer in float32."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float


def linear(x: Float[Array, "*rows I"], w: Float[Array, "I O"]) -> Float[Array, "*rows O"]:
    """Computes `x @ w`."""
    wide = jnp.matmul(x.astype(jnp.float32), w.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
    return wide.astype(x.dtype)


def gated_linear(x: Float[Array, "*rows I"], gate: Float[Array, "I O"], up: Float[Array, "I O"]) -> Float[Array, "*rows O"]:
    """Computes `silu(x @ gate) * (x @ up)` (Shazeer 2020)."""
    wide = x.astype(jnp.float32)
    return (jax.nn.silu(linear(wide, gate)) * linear(wide, up)).astype(x.dtype)
