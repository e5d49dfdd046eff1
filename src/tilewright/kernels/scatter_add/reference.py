"""Reference of message sums: mask, and sum in float32."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32


def scatter_add(messages: Float[Array, "R K F"], degrees: Int32[Array, " R"]) -> Float[Array, "R F"]:
    """Sums, for each of R rows, its first `degrees` of K messages in float32; the result has the messages' dtype.

    The other slots may hold anything, including NaN.
    """
    counts = (jnp.arange(messages.shape[1]) < degrees[:, None])[:, :, None]
    return jnp.where(counts, messages.astype(jnp.float32), 0).sum(axis=1).astype(messages.dtype)
