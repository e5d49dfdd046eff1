"""Reference RMSNorm."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float


def rms_norm(x: Float[Array, "*rows H"], weight: Float[Array, " H"], eps: float) -> Float[Array, "*rows H"]:
    """Returns `weight * x / sqrt(mean(x^2) + eps)`; the quotient is computed in float32 and rounded before the
    multiplication."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return weight * (wide * scale).astype(x.dtype)
