"""What the operation means: float32 logits, and the first index of the largest."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from tilewright.kernels.linear import reference


def head_argmax(x: Float[Array, "*rows H"], head: Float[Array, "..."], transposed: bool = False) -> Int32[Array, "*rows"]:
    """`argmax(x @ head)` over the last dim, for a head `[H, V]`, or `[V, H]` if it is `transposed`."""
    logits = reference.linear(x.astype(jnp.float32), (head.T if transposed else head).astype(jnp.float32))
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)
