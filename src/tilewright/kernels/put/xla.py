"""The operation as XLA compiles it, on any device."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Int, Shaped


def put(table: Shaped[Array, "V H"], index: Int[Array, " R"], rows: Shaped[Array, "R H"]) -> Shaped[Array, "V H"]:
    """The table with these rows at these places, no two the same; a row whose index is below 0 or beyond V goes nowhere."""
    at = jnp.where(index < 0, table.shape[0], index)
    return table.at[at].set(rows.astype(table.dtype), mode="drop")
