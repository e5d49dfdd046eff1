"""Attention compiled by XLA, for any device; also attention with boolean masks.

Pages are read a block of entries at a time, as far as the longest row needs, under an online softmax (Milakov & Gimelshein
2018). A block beyond a row's end leaves the row's result bitwise unchanged, so that results do not depend on the lengths of
other rows. 8-bit keys and values are copied out of the pool as they are and dequantised a block at a time.

Legend: B rows of a batch, T query positions, S key positions, N query heads, K key/value heads, D head size, U block keys, A
rows of a cache, C pages that are read together, R queries of a key head (`group_rows`).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int, Int32

from tilewright.kernels.masks import AttentionMask, Visible, block_seen, visible
from tilewright.kernels.operations import PLAIN_SCORES, UNMAPPED, PagedCache, Scores, attend_in_steps, softcapped
from tilewright.kernels.paged.xla import mapped_entries, read, seen_columns

MASKED = -1e30
"""Score of a masked key; finite, so that a row without visible keys has no NaN."""
WHOLE = 4096
"""Limit of queries whose scores over a cache are stored at once, except over pages. With more, a loop is used, with which
transfers of other layers cannot overlap."""
QUERIES = 512
"""Queries per iteration of that loop, and limit of queries without a cache: their gradients recompute the scores."""
BLOCK_ENTRIES = 512
"""Entries per row that are read from pages at a time. A page table with no more entries is read as a whole, without a loop."""


class KeyValues(NamedTuple):
    """Keys and values `[A, K, S, D]` with their mask `[B or 1, T, S]`.

    If A is not B, consecutive rows of queries share a row of keys.
    """

    k: Array
    v: Array
    mask: Array


def group_rows(q: Float[Array, "B T N D"], heads: int) -> Float[Array, "B K R D"]:
    """Folds the queries of a group into the rows of their key head, `R = N / K * T`, so that each key is read once."""
    b, t, n, d = q.shape
    return q.reshape(b, t, heads, n // heads, d).transpose(0, 2, 3, 1, 4).reshape(b, heads, n // heads * t, d)


def ungroup_rows(rows: Float[Array, "B K R D"], t: int) -> Float[Array, "B T N D"]:
    """Inverts `group_rows`."""
    b, heads, r, d = rows.shape
    return rows.reshape(b, heads, r // t, t, d).transpose(0, 3, 1, 2, 4).reshape(b, t, heads * (r // t), d)


def sink_rows(sinks: Float[Array, " N"], heads: int, t: int) -> Float[Array, "1 K R 1"]:
    """Returns the sink of each row of `group_rows`."""
    return jnp.repeat(sinks.astype(jnp.float32).reshape(heads, -1), t, axis=1)[None, :, :, None]


def by_cache(x: Float[Array, "B K R _"], rows: int) -> Float[Array, "{rows} K _ _"]:
    """Groups queries that share a row of a cache, so that its keys are read once."""
    b, k, r, d = x.shape
    if rows == b:
        return x
    return x.reshape(rows, b // rows, k, r, d).swapaxes(1, 2).reshape(rows, k, -1, d)


def by_queries(x: Float[Array, "A K _ _"], rows: int) -> Float[Array, "{rows} K _ _"]:
    """Inverts `by_cache` for this number of rows of queries."""
    a, k, _, d = x.shape
    if rows == a:
        return x
    return x.reshape(a, k, rows // a, -1, d).swapaxes(1, 2).reshape(rows, k, -1, d)


def seen_entries(
    entry: Int[Array, " S"], lengths: Int[Array, "B T"], first: Int[Array, "B T"] | None = None
) -> Bool[Array, "B T S"]:
    """Returns the mask of entries below `lengths`, and from `first` on if given."""
    below = entry[None, None] < lengths[:, :, None]
    return below if first is None else below & (entry[None, None] >= first[:, :, None])


def attention_over(
    q: Float[Array, "B T N D"], parts: Sequence[KeyValues], rule: Scores = PLAIN_SCORES
) -> Float[Array, "B T N D"]:
    """Computes grouped-query attention over several sets of keys under one softmax, without concatenating the sets.

    Scores and softmax are float32. A query without visible keys gets zeros.
    """
    t, n, d = q.shape[1:]
    heads = parts[0].k.shape[1]
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    rows = group_rows(q * rule.scale_of(d), heads)

    def scores(part: KeyValues) -> Array:
        grouped = by_cache(rows, part.k.shape[0])
        found = jnp.einsum("bkrd,bksd->bkrs", grouped, part.k, precision=precision, preferred_element_type=jnp.float32)
        return by_queries(found, q.shape[0])

    batch = max(part.mask.shape[0] for part in parts)
    is_visible = jnp.concatenate([jnp.broadcast_to(part.mask, (batch, *part.mask.shape[1:])) for part in parts], axis=-1)
    is_visible = jnp.tile(is_visible, (1, n // heads, 1))[:, None]
    masked = jnp.where(is_visible, softcapped(jnp.concatenate([scores(part) for part in parts], axis=-1), rule.softcap), MASKED)
    if rule.sinks is not None:  # behind all parts, so that the parts keep their offsets
        sinks = jnp.broadcast_to(sink_rows(rule.sinks, heads, t), (*masked.shape[:3], 1))
        masked = jnp.concatenate([masked, sinks], axis=-1)
    weights = jnp.where(jnp.any(is_visible, axis=-1, keepdims=True), jax.nn.softmax(masked, axis=-1), 0.0).astype(q.dtype)
    out = jnp.zeros_like(rows)
    first = 0
    for part in parts:
        size = part.k.shape[2]
        share = jax.lax.slice_in_dim(weights, first, first + size, axis=-1)
        grouped = by_cache(share, part.v.shape[0])
        out = out + by_queries(jnp.einsum("bkrs,bksd->bkrd", grouped, part.v, precision=precision), q.shape[0])
        first += size
    return ungroup_rows(out, t)


def attention(
    q: Float[Array, "B T N D"],
    k: Float[Array, "B K S D"],
    v: Float[Array, "B K S D"],
    mask: Bool[Array, "#B T S"],
    rule: Scores = PLAIN_SCORES,
) -> Float[Array, "B T N D"]:
    """Computes grouped-query attention over one set of keys; see `attention_over`."""
    return attention_over(q, [KeyValues(k, v, mask)], rule)


attend_projected = attend_in_steps


def attend(
    q: Float[Array, "B T N D"],
    cache: Any,
    mask: AttentionMask,
    block_kv: tuple[Float[Array, "B K U D"], Float[Array, "B K U D"]] | None = None,
    scores: Scores = PLAIN_SCORES,
) -> Float[Array, "B T N D"]:
    """Computes attention under any mask; see `Operations.attend`."""
    if cache is None:
        return attend_block(q, mask, block_kv, scores)
    found = visible(q, mask, block_kv, reader(cache, q))
    if isinstance(cache, PagedCache):
        return over_pages(*within_window(cache, found, mask), scores).reshape(q.shape)

    def over_rows(q: Array, lengths: Array, first: Array | None, is_visible: Array | None) -> Array:
        cached = seen_entries(jnp.arange(cache.k.shape[2]), lengths, first)
        any_row = jnp.any(cached.reshape(cache.k.shape[0], -1, cached.shape[2]), axis=1)
        # Entries that no query sees may hold NaN, which a weight of zero does not remove.
        values = jnp.where(any_row[:, None, :, None], cache.v, jnp.zeros((), cache.v.dtype))
        return attention_over(q, [KeyValues(cache.k, values, cached), *block_part(found.block_kv, q, is_visible)], scores)

    queries = (found.q, found.lengths, found.first, found.is_visible)
    return by_blocks(over_rows, *queries, most=WHOLE).reshape(q.shape)


def attend_block(q: Array, mask: AttentionMask, block_kv: tuple[Array, Array] | None, scores: Scores = PLAIN_SCORES) -> Array:
    """Computes attention over the keys and values of the block alone, with a gradient.

    Scores of at most `QUERIES` queries are stored at once.
    """
    if block_kv is None:
        raise ValueError("expected a cache, or keys and values of the block, found neither")
    keys, values = block_kv

    def over_block(q: Array, queries: Array) -> Array:
        is_visible = block_seen(mask, queries[0], keys.shape[2])
        return attention_over(q, block_part(block_kv, q, is_visible), scores)

    if mask.counts is not None or mask.form in ("none", "bits"):
        seen = seen_by_any(mask, q.shape[1], keys.shape[2])
        block_kv = keys, jnp.where(seen[:, None, :, None], values, jnp.zeros((), values.dtype))
    return by_blocks(over_block, q, jnp.arange(q.shape[1])[None])


def seen_by_any(mask: AttentionMask, queries: int, size: int) -> Bool[Array, "B {size}"]:
    """Returns which positions of a block are visible to some query, from `QUERIES` queries at a time."""
    each = min(queries, QUERIES)
    numbers = jnp.minimum(jnp.arange(-(-queries // each) * each), queries - 1).reshape(-1, each)

    def seen(some: Int[Array, " T"]) -> Bool[Array, "B U"]:
        is_visible = block_seen(mask, some, size)
        assert is_visible is not None, "the mask has a rule"
        return jnp.any(is_visible, axis=1)

    return jax.lax.scan(lambda found, some: (found | seen(some), None), seen(numbers[0]), numbers[1:])[0]


def block_part(block_kv: tuple[Array, Array] | None, q: Array, is_visible: Array | None) -> list[KeyValues]:
    """Returns the block keys as a list for `attention_over`; empty without block keys."""
    if block_kv is None:
        return []
    return [KeyValues(*block_kv, jnp.ones((1, q.shape[1], block_kv[0].shape[2]), bool) if is_visible is None else is_visible)]


def by_blocks(
    run: Callable[..., Array], q: Float[Array, "B T N D"], *rest: Array | None, most: int = QUERIES
) -> Float[Array, "B T N D"]:
    """Runs `run(q, *rest)`, in blocks of queries if there are more than `most`; queries are the second dim of `rest` too."""
    t = q.shape[1]
    if t <= most:
        return run(q, *rest)
    size = -(-t // -(-t // QUERIES))

    def cut(x: Array) -> Array:
        wide = jnp.pad(x, ((0, 0), (0, -t % size), *((0, 0),) * (x.ndim - 2)))
        return jnp.moveaxis(wide.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)

    out = jax.lax.map(jax.checkpoint(lambda part: run(*part)), jax.tree.map(cut, (q, *rest)))
    return jnp.moveaxis(out, 0, 1).reshape(q.shape[0], -1, *q.shape[2:])[:, :t]


def reader(cache: Any, q: Array) -> Callable[[Array, int], tuple[Array, Array]]:
    """Returns the function that copies entries of each row of queries out of a cache; see `masks.visible`."""

    def found(start: Int[Array, " B"], size: int) -> tuple[Array, Array]:
        shared = start.shape[0] // (cache.table if isinstance(cache, PagedCache) else cache.k).shape[0]
        if isinstance(cache, PagedCache):
            entries = cache.pool.page_size
            column = start[:, None] // entries + jnp.arange((size + entries - 2) // entries + 1)
            column = jnp.clip(column, 0, cache.table.shape[1] - 1)
            table = jnp.take_along_axis(jnp.repeat(cache.table, shared, axis=0), column, axis=1)
            begin = start % entries
            rows = read(cache.pool, table, q.dtype)
        else:
            begin = start
            rows = tuple(jnp.repeat(part, shared, axis=0) if shared > 1 else part for part in cache)
        at = jnp.clip(begin[:, None] + jnp.arange(size), 0, rows[0].shape[2] - 1)[:, None, :, None]
        k, v = (jnp.take_along_axis(part, at, axis=2) for part in rows)
        return k, v

    return found


def least_entry(found: Visible) -> Int[Array, " B"]:
    """Returns the first entry that some query of each row sees; 0 if no query sees any."""
    assert found.first is not None
    far = jnp.iinfo(jnp.int32).max
    least = jnp.min(jnp.where(found.first < found.lengths, found.first, far), axis=1)
    return jnp.where(least == far, 0, least)


def within_window(cache: PagedCache, found: Visible, mask: AttentionMask) -> tuple[PagedCache, Visible]:
    """Restricts a page table to the columns within a mask's window, and shifts ranges of entries accordingly."""
    b, t = found.lengths.shape
    table = jnp.repeat(cache.table, b // cache.table.shape[0], axis=0) if b != cache.table.shape[0] else cache.table
    if found.first is None or mask.window is None or (mask.context_lengths.shape[1] > 1 and t > 1):
        return cache._replace(table=table), found
    begin = least_entry(found)
    start = begin + mask.window - 1
    table, after = seen_columns(table, start, mask.window, t + 1, cache.pool.page_size)
    skipped = (start - after)[:, None]
    # Where no query sees a cached entry, the columns are the first ones, and lengths may lie behind them.
    lengths = jnp.clip(found.lengths - skipped, 0, table.shape[1] * cache.pool.page_size)
    return cache._replace(table=table), found._replace(lengths=lengths, first=jnp.maximum(found.first - skipped, 0))


def pages_in_rows(
    cache: PagedCache, some: Int32[Array, "B C"], begin: Any, found: Visible, lengths: Int[Array, "B T"]
) -> tuple[Array, Array, Array]:
    """Returns keys and values of some columns of a page table, whose first entry is `begin`, and their positions."""
    k, v = read(cache.pool, some, found.q.dtype)
    position = begin + jnp.arange(k.shape[2])
    if found.first is None:
        read_by_some = position[:, None] < jnp.max(lengths, axis=1)[:, None, None, None]
    else:
        read_by_some = jnp.any(seen_entries(position, lengths, found.first), axis=1)[:, None, :, None]
    # Entries that no query sees hold data of other rows, perhaps NaN, which a weight of zero does not remove.
    return k, jnp.where(read_by_some, v, jnp.zeros((), v.dtype)), position


def over_pages(cache: PagedCache, found: Visible, scores: Scores) -> Float[Array, "B T N D"]:
    """Computes attention over pages, a block of entries at a time, and over block keys."""
    q = found.q
    t, n, d = q.shape[1:]
    entries = cache.pool.page_size
    lengths = jnp.minimum(found.lengths, mapped_entries(cache.table, entries)[:, None])
    columns = max(1, BLOCK_ENTRIES // entries)
    if cache.table.shape[1] <= columns:
        k, v, position = pages_in_rows(cache, cache.table, 0, found, lengths)
        cached = KeyValues(k, v, seen_entries(position, lengths, found.first))
        return attention_over(q, [cached, *block_part(found.block_kv, q, found.is_visible)], scores)
    heads = cache.pool.kv_heads
    rows = group_rows(q * scores.scale_of(d), heads)
    size = columns * entries
    table = jnp.pad(cache.table, ((0, 0), (0, -cache.table.shape[1] % columns)), constant_values=UNMAPPED)
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None

    def add(carry: tuple[Array, ...], k: Array, v: Array, is_visible: Array) -> tuple[Array, ...]:
        """Adds keys to the running maximum and sum of weights `[B, K, R, 1]` and the accumulator `[B, K, R, D]`."""
        largest, total, values = carry
        is_visible = jnp.tile(is_visible, (1, n // heads, 1))[:, None]
        found = jnp.einsum("bkrd,bksd->bkrs", rows, k, precision=precision, preferred_element_type=jnp.float32)
        found = jnp.where(is_visible, softcapped(found, scores.softcap), MASKED)
        now = jnp.maximum(largest, jnp.max(found, axis=-1, keepdims=True))
        weights = jnp.where(is_visible, jnp.exp(found - now), 0.0)  # before any visible key the running maximum is MASKED
        rescale = jnp.exp(largest - now)
        more = jnp.einsum(
            "bkrs,bksd->bkrd", weights.astype(v.dtype), v, precision=precision, preferred_element_type=jnp.float32
        )
        return now, total * rescale + jnp.sum(weights, axis=-1, keepdims=True), values * rescale + more

    def add_block(number: Any, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        some = jax.lax.dynamic_slice_in_dim(table, number * columns, columns, axis=1)
        k, v, position = pages_in_rows(cache, some, number * size, found, lengths)
        return add(carry, k, v, seen_entries(position, lengths, found.first))

    nothing = jnp.zeros((*rows.shape[:3], 1), jnp.float32)
    carry = (nothing + MASKED, nothing, jnp.zeros(rows.shape, jnp.float32))
    if scores.sinks is not None:
        carry = (nothing + sink_rows(scores.sinks, heads, t), nothing + 1, carry[2])
    for k, v, is_visible in block_part(found.block_kv, q, found.is_visible):
        carry = add(carry, k, v, is_visible)
    _, total, values = jax.lax.fori_loop(0, (jnp.max(lengths) + size - 1) // size, add_block, carry)
    return ungroup_rows((values / jnp.where(total > 0, total, 1.0)).astype(q.dtype), t)
