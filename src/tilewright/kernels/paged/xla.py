"""Paged writes and reads compiled by XLA, for any device. Positions without a page are neither written nor visible.

Legend: P pages, E entries of a page, M pages that a row may have, C of them that are read together, B rows, T positions, K
key/value heads, D head size, S entries that are read together.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Int, Int32, Shaped

from tilewright.kernels.operations import UNMAPPED, KeyValuePages, Pool, Quantised
from tilewright.kernels.paged.quantise import as_held, dequantise


def pages(count: int, kv_heads: int, entries: int, head_dim: int, dtype: DTypeLike, devices: int = 1) -> KeyValuePages:
    """Returns a pool of zero pages, with the same layout for any number of devices; int8 pages have scales."""
    shape = (count, kv_heads, entries, head_dim)

    def zeros() -> Array | Quantised:
        held = jnp.zeros(shape, dtype)
        return Quantised(held, jnp.zeros(shape[:3], jnp.float32)) if held.dtype == jnp.int8 else held

    return KeyValuePages(zeros(), zeros())


def places(
    table: Int32[Array, "B M"], start: Int[Array, " B"], count: Int[Array, " B"], size: int, pages: int, entries: int
) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """Returns page and entry of `size` positions from `start` on; page `pages`, which does not exist, marks skipped
    positions."""
    at = jnp.arange(size)[None]
    position = start[:, None] + at
    column = position // entries
    page = jnp.take_along_axis(table, jnp.clip(column, 0, table.shape[1] - 1), axis=1)
    written = (at < count[:, None]) & (column >= 0) & (column < table.shape[1]) & (page >= 0)
    return jnp.where(written, page, pages), position % entries


def write(
    pool: Pool,
    table: Int32[Array, "B M"],
    k: Shaped[Array, "B K T D"],
    v: Shaped[Array, "B K T D"],
    start: Int[Array, " B"],
    counts: Int[Array, " B"],
) -> Pool:
    """Returns the pool with the first `counts` of each row's new entries at its positions from `start` on."""
    if not isinstance(pool, KeyValuePages):
        return pool.write(table, k, v, start, counts)
    count, _, entries, _ = pool.k.shape
    page, entry = places(table, start, counts, k.shape[2], count, entries)

    def write_part(held: Array, new: Array) -> Array:
        return held.at[page, :, entry].set(jnp.swapaxes(new, 1, 2), mode="drop")

    return jax.tree.map(write_part, pool, KeyValuePages(as_held(k, pool.k), as_held(v, pool.v)))


def in_rows(pages: Shaped[Array, "P K E *D"], table: Int32[Array, "B M"]) -> Shaped[Array, "B K S *D"]:
    """Returns each row's entries in order."""
    found = jnp.take(pages, jnp.maximum(table, 0), axis=0)  # [B, M, K, E, *D]
    b, m, k, e, *d = found.shape
    return jnp.swapaxes(found, 1, 2).reshape(b, k, m * e, *d)


def read(pool: Pool, table: Int32[Array, "B M"], dtype: DTypeLike) -> tuple[Array, Array]:
    """Returns keys and values `[B, K, S, D]` of the pages in a table, each row's in order."""
    if not isinstance(pool, KeyValuePages):
        return pool.read(table)

    def rows(held: Array | Quantised) -> Array:
        found = jax.tree.map(lambda part: in_rows(part, table), held)
        return dequantise(found, dtype) if isinstance(found, Quantised) else found

    return rows(pool.k), rows(pool.v)


def mapped_entries(table: Int32[Array, "B M"], entries: int) -> Int[Array, " B"]:
    """Returns the number of entries in each row's leading mapped pages."""
    return jnp.sum(jnp.cumprod((table >= 0).astype(jnp.int32), axis=1), axis=1) * entries


def seen_columns(
    table: Int[Array, "B M"], start: Int[Array, " B"], window: int, size: int, page_size: int
) -> tuple[Int[Array, "B C"], Int[Array, " B"]]:
    """Returns the page-table columns within the window of queries at `size` positions from `start`, and the shifted `start`.

    The number of columns suffices for any row. Pages before a row's window are not read and may be unmapped.
    """
    columns = min(table.shape[1], (window + size - 2) // page_size + 2)
    first = jnp.maximum(start - window + 1, 0) // page_size
    at = first[:, None] + jnp.arange(columns)[None]
    found = jnp.take_along_axis(table, jnp.minimum(at, table.shape[1] - 1), axis=1)
    return jnp.where(at < table.shape[1], found, UNMAPPED), start - first * page_size
