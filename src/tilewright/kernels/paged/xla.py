"""The operations as XLA compiles them, on any device. What a row has no page for is neither written nor seen.

Attention reads a block of entries at a time, as many blocks as the longest row needs, under a running softmax (Milakov &
Gimelshein 2018). A block that a row does not reach leaves its result as it is, bit for bit: so it does not depend on how long
the other rows are. Keys and values of 8 bits are copied out of the pool as they are, and converted a block at a time.

Legend: P pages, E entries of a page, M pages that a row may have, B rows, T positions, N query heads, K key/value heads, D head
size, U extra keys, S entries that are read together, R queries of a key head (`attention.xla.group_rows`).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int, Int32, Shaped

from tilewright.kernels.attention import xla
from tilewright.kernels.attention.xla import MASKED, group_rows, ungroup_rows
from tilewright.kernels.operations import PLAIN_SCORES, UNMAPPED, Heads, KeyValuePages, Quantised, Scores, softcapped
from tilewright.kernels.paged.quantise import as_held, dequantise

BLOCK_ENTRIES = 512
"""Entries of each row that attention reads at a time. A table of no more pages than that is read whole, without a loop."""


def empty(pages: int, kv_heads: int, entries: int, head_dim: int, dtype: DTypeLike, devices: int = 1) -> KeyValuePages:
    """A pool of pages that hold zeros, laid out alike for any number of devices; of int8 with scales."""
    shape = (pages, kv_heads, entries, head_dim)

    def zeros() -> Array | Quantised:
        held = jnp.zeros(shape, dtype)
        return Quantised(held, jnp.zeros(shape[:3], jnp.float32)) if held.dtype == jnp.int8 else held

    return KeyValuePages(zeros(), zeros())


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
    pool: KeyValuePages,
    table: Int32[Array, "B M"],
    k: Shaped[Array, "B K T D"],
    v: Shaped[Array, "B K T D"],
    start: Int[Array, " B"],
    count: Int[Array, " B"],
) -> KeyValuePages:
    """The pool with the first `count` of each row's new entries at its positions from `start` on, and nothing else."""
    pages, _, entries, _ = pool.k.shape
    page, entry = places(table, start, count, k.shape[2], pages, entries)

    def put(held: Array, new: Array) -> Array:
        return held.at[page, :, entry].set(jnp.swapaxes(new, 1, 2), mode="drop")

    return jax.tree.map(put, pool, KeyValuePages(as_held(k, pool.k), as_held(v, pool.v)))


def in_rows(pages: Shaped[Array, "P K E *D"], table: Int32[Array, "B M"]) -> Shaped[Array, "B K S *D"]:
    """Each row's entries side by side."""
    found = jnp.take(pages, jnp.maximum(table, 0), axis=0)  # [B, M, K, E, *D]
    b, m, k, e, *d = found.shape
    return jnp.swapaxes(found, 1, 2).reshape(b, k, m * e, *d)


def held(table: Int32[Array, "B M"], entries: int) -> Int[Array, " B"]:
    """Number of its first entries for which each row has pages."""
    return jnp.sum(jnp.cumprod((table >= 0).astype(jnp.int32), axis=1), axis=1) * entries


def prefix_attention(
    q: Float[Array, "B T N D"],
    pool: KeyValuePages,
    table: Int32[Array, "B M"],
    lengths: Int[Array, "B T"],
    extra: tuple[Float[Array, "B K U D"], Float[Array, "B K U D"]] | None = None,
    attend: Callable[..., Array] = xla.prefix_attention,
    rule: Scores = PLAIN_SCORES,
) -> Float[Array, "B T N D"]:
    """Attention of each query over the first `lengths` entries of its row, the last of a window alone, and over all of `extra`.

    Args:
        attend: the operation over entries that lie in rows, for tables of one block.
    """

    def rows(held: Array | Quantised, some: Array) -> Array:
        found = jax.tree.map(lambda part: in_rows(part, some), held)
        return dequantise(found, q.dtype) if isinstance(found, Quantised) else found

    def read(some: Int32[Array, "B C"]) -> tuple[Array, Array]:
        return rows(pool.k, some), rows(pool.v, some)

    return attention_over_blocks(q, read, (pool.k.shape[1], pool.page_size), table, lengths, extra, attend, rule)


def attention_over_blocks(
    q: Float[Array, "B T N D"],
    read: Callable[[Array], tuple[Array, Array]],
    sizes: tuple[int, int],
    table: Int32[Array, "B M"],
    lengths: Int[Array, "B T"],
    extra: tuple[Float[Array, "B K U D"], Float[Array, "B K U D"]] | None,
    attend: Callable[..., Array],
    rule: Scores = PLAIN_SCORES,
) -> Float[Array, "B T N D"]:
    """Attention over pages of any layout, a block of entries at a time; see `prefix_attention`.

    Args:
        read: copies the keys and values `[B, K, S, D]` of some columns of the table out of the pool.
        sizes: K and E.
    """
    (heads, entries), (_, t, n, d) = sizes, q.shape
    lengths = jnp.minimum(lengths, held(table, entries)[:, None])
    reach = jnp.max(lengths, axis=1)[:, None, None, None]

    def block(some: Array, first: Any) -> tuple[Array, Array, Array]:
        """The keys and values of some columns, and their positions."""
        k, v = read(some)
        position = first + jnp.arange(k.shape[2])
        # What no query sees is what other rows left there, NaN included, which a weight of zero does not take away.
        return k, jnp.where(position[:, None] < reach, v, jnp.zeros((), v.dtype)), position

    columns = max(1, BLOCK_ENTRIES // entries)
    if table.shape[1] <= columns:
        k, v, _ = block(table, 0)
        return attend(q, k, v, lengths, extra) if rule.default else xla.prefix_attention(q, k, v, lengths, extra, rule)
    rows = group_rows(q * rule.scale_of(d), heads)
    size = columns * entries
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % columns)), constant_values=UNMAPPED)
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None

    def add(carry: tuple[Array, ...], k: Array, v: Array, seen: Array) -> tuple[Array, ...]:
        """Takes in some keys: largest scores and sums of weights `[B, K, R, 1]`, weighted values `[B, K, R, D]`."""
        largest, total, values = carry
        seen = jnp.tile(seen, (1, n // heads, 1))[:, None]
        scores = jnp.einsum("bkrd,bksd->bkrs", rows, k, precision=precision, preferred_element_type=jnp.float32)
        scores = jnp.where(seen, softcapped(scores, rule.softcap), MASKED)
        now = jnp.maximum(largest, jnp.max(scores, axis=-1, keepdims=True))
        weights = jnp.where(seen, jnp.exp(scores - now), 0.0)  # a query that has seen nothing yet has MASKED for its largest
        kept = jnp.exp(largest - now)
        more = jnp.einsum(
            "bkrs,bksd->bkrd", weights.astype(v.dtype), v, precision=precision, preferred_element_type=jnp.float32
        )
        return now, total * kept + jnp.sum(weights, axis=-1, keepdims=True), values * kept + more

    def add_block(number: Any, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        some = jax.lax.dynamic_slice_in_dim(table, number * columns, columns, axis=1)
        k, v, position = block(some, number * size)
        return add(carry, k, v, xla.seen_entries(position, lengths, rule))

    nothing = jnp.zeros((*rows.shape[:3], 1), jnp.float32)
    carry = (nothing + MASKED, nothing, jnp.zeros(rows.shape, jnp.float32))
    if rule.sinks is not None:
        carry = (nothing + xla.sink_rows(rule.sinks, heads, t), nothing + 1, carry[2])
    if extra is not None:
        carry = add(carry, *extra, jnp.ones((1, t, extra[0].shape[2]), bool))
    _, total, values = jax.lax.fori_loop(0, (jnp.max(lengths) + size - 1) // size, add_block, carry)
    return ungroup_rows((values / jnp.where(total > 0, total, 1.0)).astype(q.dtype), t)


def lengths_of(start: Int[Array, " B"], count: Int[Array, " B"], size: int) -> Int[Array, "B T"]:
    """Number of entries that each query sees, all up to its own; none from `count` on."""
    at = jnp.arange(size)[None]
    return jnp.where(at < count[:, None], start[:, None] + at + 1, 0)


def append_attend(
    projection: Any,
    spec: Heads,
    pool: KeyValuePages,
    table: Int32[Array, "B M"],
    start: Int[Array, " B"],
    count: Int[Array, " B"],
    heads: Callable[[Any, Heads], tuple[Any, Any, Any]],
    attend: Callable[..., Array] = xla.prefix_attention,
) -> tuple[Float[Array, "B T _"], KeyValuePages]:
    """Appends the projection's keys and values, and lets the query at `start + t` see all entries up to its own."""
    q, k, v = heads(projection, spec)
    pool = append(pool, table, k, v, start, count)
    lengths = lengths_of(start, count, q.shape[1])
    out = prefix_attention(q, pool, table, lengths, attend=attend, rule=spec.scores)
    return out.reshape(*out.shape[:2], -1), pool
