"""Reference argmax of a head: the largest float32 logit and its first index."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32, Int32

from tilewright.kernels.linear import reference


def head_argmax(
    x: Float[Array, "*rows H"], head: Float[Array, "..."], transposed: bool = False
) -> tuple[Int32[Array, "*rows"], Float32[Array, "*rows"]]:
    """Returns argmax and maximum of `x @ head`, for a head `[H, V]`, or `[V, H]` if `transposed`."""
    logits = reference.linear(x.astype(jnp.float32), (head.T if transposed else head).astype(jnp.float32))
    return jnp.argmax(logits, axis=-1).astype(jnp.int32), jnp.max(logits, axis=-1)
