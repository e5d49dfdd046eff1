"""The operations as XLA compiles them, on any device. What a row has no page for is neither written nor seen.

Legend: P pages, E entries of a page, M pages that a row may have, B rows, T positions, N query heads, K key/value heads, D head
size, U own keys, S entries of a row (M * E).
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int, Int32, Shaped

from tilewright.kernels.attention import xla
from tilewright.kernels.operations import Heads, Pages


def empty(pages: int, kv_heads: int, entries: int, head_dim: int, dtype: DTypeLike) -> Pages:
    """A pool of pages that hold zeros."""
    shape = (pages, kv_heads, entries, head_dim)
    return Pages(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def places(
    table: Int32[Array, "B M"], start: Int[Array, " B"], count: Int[Array, " B"], size: int, pages: int, entries: int
) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """Page and entry of `size` positions from `start` on; the page is `pages`, which there is not, where nothing is written."""
    at = jnp.arange(size)[None]
    position = start[:, None] + at
    column = position // entries
    page = jnp.take_along_axis(table, jnp.clip(column, 0, table.shape[1] - 1), axis=1)
    written = (at < count[:, None]) & (column >= 0) & (column < table.shape[1]) & (page >= 0)
    return jnp.where(written, page, pages), position % entries


def append(
    pool: Pages,
    table: Int32[Array, "B M"],
    k: Shaped[Array, "B K T D"],
    v: Shaped[Array, "B K T D"],
    start: Int[Array, " B"],
    count: Int[Array, " B"],
) -> Pages:
    """The pool with the first `count` of each row's new entries at its positions from `start` on, and nothing else."""
    pages, _, entries, _ = pool.k.shape
    page, entry = places(table, start, count, k.shape[2], pages, entries)

    def put(held: Array, new: Array) -> Array:
        return held.at[page, :, entry].set(new.transpose(0, 2, 1, 3), mode="drop")

    return Pages(put(pool.k, k), put(pool.v, v))


def in_rows(pages: Shaped[Array, "P K E D"], table: Int32[Array, "B M"]) -> Shaped[Array, "B K S D"]:
    """Each row's entries side by side."""
    found = jnp.take(pages, jnp.maximum(table, 0), axis=0)  # [B, M, K, E, D]
    b, m, k, e, d = found.shape
    return found.transpose(0, 2, 1, 3, 4).reshape(b, k, m * e, d)


def held(table: Int32[Array, "B M"], entries: int) -> Int[Array, " B"]:
    """How many of its first entries each row has pages for."""
    return jnp.sum(jnp.cumprod((table >= 0).astype(jnp.int32), axis=1), axis=1) * entries


def prefix_attention(
    q: Float[Array, "B T N D"],
    pool: Pages,
    table: Int32[Array, "B M"],
    lengths: Int[Array, "B T"],
    own: tuple[Float[Array, "B K U D"], Float[Array, "B K U D"]] | None = None,
    attend: Callable[..., Array] = xla.prefix_attention,
) -> Float[Array, "B T N D"]:
    """Attention of each query over the first `lengths` entries of its row, and over all of `own`.

    Args:
        attend: the same over the entries in rows, to which they are copied.
    """
    lengths = jnp.minimum(lengths, held(table, pool.page_size)[:, None])
    k, v = in_rows(pool.k, table), in_rows(pool.v, table)
    # What no query sees is what other rows left there, NaN included, which a weight of zero does not take away.
    reach = jnp.max(lengths, axis=1)[:, None, None, None]
    return attend(q, k, jnp.where(jnp.arange(v.shape[2])[:, None] < reach, v, jnp.zeros((), v.dtype)), lengths, own)


def append_attend(
    projection: Any,
    how: Heads,
    pool: Pages,
    table: Int32[Array, "B M"],
    start: Int[Array, " B"],
    count: Int[Array, " B"],
    heads: Callable[[Any, Heads], tuple[Any, Any, Any]],
    attend: Callable[..., Array] = xla.prefix_attention,
) -> tuple[Float[Array, "B T _"], Pages]:
    """Appends the projection's keys and values, and lets the query at `start + t` see all entries up to its own."""
    q, k, v = heads(projection, how)
    pool = append(pool, table, k, v, start, count)
    at = jnp.arange(q.shape[1])[None]
    lengths = jnp.where(at < count[:, None], start[:, None] + at + 1, 0)
    out = prefix_attention(q, pool, table, lengths, attend=attend)
    return out.reshape(*out.shape[:2], -1), pool
