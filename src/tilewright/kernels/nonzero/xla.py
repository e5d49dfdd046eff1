"""Indices of a mask's true elements, compiled by XLA for any device."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int32


def nonzero(mask: Bool[Array, " R"]) -> tuple[Int32[Array, " R"], Int32[Array, ""]]:
    """Returns the indices of true elements in order, padded with zeros, and their number."""
    rank = jnp.cumsum(mask, dtype=jnp.int32)
    places = jnp.where(mask, rank - 1, mask.size)
    index = jnp.zeros(mask.size, jnp.int32).at[places].set(jnp.arange(mask.size, dtype=jnp.int32), mode="drop")
    return index, rank[-1]
