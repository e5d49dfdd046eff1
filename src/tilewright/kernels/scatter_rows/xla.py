"""Row updates compiled by XLA, for any device."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Int, Shaped


def scatter_rows(
    table: Shaped[Array, "*table"], index: Int[Array, " R"], rows: Shaped[Array, "R H"]
) -> Shaped[Array, "*table"]:
    """Returns the table with these rows at distinct indices; rows with an index below 0 or beyond the last are dropped.

    A table of more than two dims is treated as rows `[V, H]`.
    """
    flat = table.reshape(-1, rows.shape[1])
    at = jnp.where(index < 0, flat.shape[0], index)
    return flat.at[at].set(rows.astype(table.dtype), mode="drop").reshape(table.shape)


def swap_rows(
    table: Shaped[Array, "*table"], index: Int[Array, " R"], rows: Shaped[Array, "R H"]
) -> tuple[Shaped[Array, "*table"], Shaped[Array, "R H"]]:
    """Returns the updated table and the previous rows; zeros for dropped rows."""
    flat = table.reshape(-1, rows.shape[1])
    here = (index >= 0) & (index < flat.shape[0])
    old = jnp.where(here[:, None], flat[jnp.where(here, index, 0)], jnp.zeros((), table.dtype))
    return scatter_rows(table, index, rows), old
