"""The operation as XLA compiles it, on any device."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Int, Shaped


def scatter_rows(
    table: Shaped[Array, "*table"], index: Int[Array, " R"], rows: Shaped[Array, "R H"]
) -> Shaped[Array, "*table"]:
    """The table with these rows at these places, no two the same; a row whose index is below 0 or beyond the last goes nowhere.

    A table of more dims than two is one of rows `[V, H]` all the same.
    """
    flat = table.reshape(-1, rows.shape[1])
    at = jnp.where(index < 0, flat.shape[0], index)
    return flat.at[at].set(rows.astype(table.dtype), mode="drop").reshape(table.shape)


def swap_rows(
    table: Shaped[Array, "*table"], index: Int[Array, " R"], rows: Shaped[Array, "R H"]
) -> tuple[Shaped[Array, "*table"], Shaped[Array, "R H"]]:
    """The table with these rows, and the rows that stood there before; zeros for those that go nowhere."""
    flat = table.reshape(-1, rows.shape[1])
    here = (index >= 0) & (index < flat.shape[0])
    old = jnp.where(here[:, None], flat[jnp.where(here, index, 0)], jnp.zeros((), table.dtype))
    return scatter_rows(table, index, rows), old
