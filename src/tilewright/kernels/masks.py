"""Attention masks as data, and the canonical forms that kernels use.

Legend: B rows of queries, T queries of a row, A rows of a cache, K key/value heads, U positions of a block, W words of bits,
D head size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int, UInt32

WORD = 32
"""Bits of a word."""


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class AttentionMask:
    """Keys visible to each query of a batch: a context, and positions of a block that follows the context.

    The block's keys are the argument `block_kv` `[B, K, U, D]` of attention if given, else cache entries behind the query's
    context: position j of the block is entry `context_lengths[b, t] + j`, and the block has one position per query. A query
        without
    visible keys gets zeros. Entries that no query sees may hold anything, including NaN.

    A cache with fewer rows than queries, `B = A * rows`, is shared: each of its rows serves `B / A` consecutive rows of
    queries.

    Attributes:
        context_lengths: int32 `[B, T]`, or `[B, 1]` for all queries of a row: number of visible cache entries, from the first.
        block: visible positions of the block. "causal": up to the query's own; "full": all (in a cache: those below `counts`);
            uint32 bits `[B, T, ceil(U / 32)]`, position 0 in the lowest bit of the first word; None: no position.
        segment_ids: int32 `[B, T]`: block positions of another segment are not visible. Segments are contiguous.
        counts: int32 `[B]`: queries from this index on see nothing.
        window: keys at positions `<= position - window` are not visible. Query t has position `context + t`; with bits,
            `context + n - 1` for its n set bits (the depth of a tree node); without a block, `context - 1`, as its own entry is
            the last of the context. Positions of the block's keys follow the same rule.
        shared_window: every query of a row has the window of the first position behind its context, and the window hides no
            position of the block.
    """

    context_lengths: Any
    block: Any = None
    segment_ids: Any = None
    counts: Any = None
    window: int | None = None
    shared_window: bool = False

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        word = isinstance(self.block, str)
        bits = None if word else self.block
        static = (self.block if word else None, self.window, self.shared_window)
        return (self.context_lengths, bits, self.segment_ids, self.counts), static

    @classmethod
    def tree_unflatten(cls, static: tuple[Any, ...], data: tuple[Any, ...]) -> "AttentionMask":
        (word, window, shared_window), (context_lengths, bits, segment_ids, counts) = static, data
        return cls(context_lengths, bits if word is None else word, segment_ids, counts, window, shared_window)

    @property
    def form(self) -> str:
        """Kind of the block: "none", "causal", "full" or "bits"."""
        return "none" if self.block is None else self.block if isinstance(self.block, str) else "bits"

    @property
    def appends(self) -> bool:
        """True for plain causal masks: each row's queries follow its context, and each sees all entries up to its own."""
        plain = self.segment_ids is None and not self.shared_window
        return self.form == "causal" and plain and self.context_lengths.shape[1] == 1


def causal_from(start: Int[Array, " B"], counts: Int[Array, " B"] | None = None, window: int | None = None) -> AttentionMask:
    """Returns the mask of queries at `start` `[B]` and behind, each of which sees all entries up to its own."""
    return AttentionMask(start[:, None], "causal", counts=counts, window=window)


class Visible(NamedTuple):
    """Canonical form of a mask: a range of cache entries per query, and keys beside the cache.

    Attributes:
        q: queries `[B, T, N, D]`; `[B * T, 1, N, D]` if each query must be a row of its own.
        lengths: int32 `[B, T]`: end of each query's range of cache entries.
        first: int32 `[B, T]`: start of that range; None for 0.
        block_kv: keys and values `[B, K, U, D]` beside the cache, with zeros for values that no query sees; None without such
            keys.
        is_visible: `[B or 1, T, U]`: mask of these keys per query; None if all are visible.
    """

    q: Array
    lengths: Array
    first: Array | None
    block_kv: tuple[Array, Array] | None
    is_visible: Array | None


def unpacked(bits: UInt32[Array, "*rows W"], size: int) -> Bool[Array, "*rows {size}"]:
    """Unpacks bits to booleans, the lowest bit of the first word first."""
    apart = (bits[..., None] >> jnp.arange(WORD, dtype=jnp.uint32)) & 1
    return apart.reshape(*bits.shape[:-1], -1)[..., :size] == 1


def packed(is_visible: Bool[Array, "*rows U"]) -> UInt32[Array, "*rows W"]:
    """Packs booleans into words of bits, the first into the lowest bit of the first word."""
    more = -is_visible.shape[-1] % WORD
    words = jnp.pad(is_visible, [(0, 0)] * (is_visible.ndim - 1) + [(0, more)]).reshape(*is_visible.shape[:-1], -1, WORD)
    return jnp.sum(words.astype(jnp.uint32) << jnp.arange(WORD, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)


def depths(bits: UInt32[Array, "*rows W"]) -> Int[Array, "*rows"]:
    """Returns the number of set bits minus one: the depth of a tree node whose bits are its ancestors and itself."""
    return jnp.sum(jax.lax.population_count(bits).astype(jnp.int32), axis=-1) - 1


def of_queries(x: Array, queries: Int[Array, " T"]) -> Array:
    """Selects the columns of some queries from an array `[B, T, ...]`; an array `[B, 1, ...]` is returned unchanged."""
    return x if x.shape[1] in (1, len(queries)) else jnp.take(x, queries, axis=1, mode="clip")


def block_seen(mask: AttentionMask, queries: Int[Array, " T"], size: int) -> Bool[Array, "#B T U"] | None:
    """Returns the mask of a block of `size` positions for some queries; None if every query sees all positions."""
    key = jnp.arange(size)
    rules: list[Array] = []
    if mask.form == "none":
        rules.append(jnp.zeros((1, len(queries), size), bool))
    if mask.form == "causal":
        rules.append((key <= queries[:, None])[None])
    if mask.form == "bits":
        rules.append(unpacked(of_queries(mask.block, queries), size))
    if mask.segment_ids is not None:
        rules.append(of_queries(mask.segment_ids, queries)[:, :, None] == mask.segment_ids[:, None, :size])
    window = None if mask.shared_window else mask.window
    if window is not None and mask.form == "bits":
        found = mask.block.shape[1]
        if size > found:
            raise ValueError(f"expected bits for all {size} positions of the block, as the mask has a window; found {found}")
        depth = depths(mask.block)
        rules.append(depth[:, None, :size] > of_queries(depth, queries)[:, :, None] - window)
    elif window is not None:
        rules.append((key > queries[:, None] - window)[None])
    if mask.counts is not None:
        rules.append((queries < mask.counts[:, None])[:, :, None])
    if not rules:
        return None
    is_visible = rules[0]
    for rule in rules[1:]:
        is_visible = is_visible & rule
    return jnp.broadcast_to(is_visible, (is_visible.shape[0], len(queries), size))


def cached_range(
    mask: AttentionMask, queries: Int[Array, " T"], block_is_cached: bool
) -> tuple[Int[Array, "B T"], Int[Array, "B T"] | None]:
    """Returns the end and, with a window, the start of each query's range of cache entries.

    Args:
        block_is_cached: the block follows the context in the cache, and a range of entries covers its visible positions.
    """
    context = of_queries(mask.context_lengths, queries).astype(jnp.int32)
    context = jnp.broadcast_to(context, (context.shape[0], len(queries)))
    at = queries[None]
    if mask.form == "bits":
        position = context + of_queries(depths(mask.block), queries)
    else:
        position = context - 1 if mask.form == "none" else context + at
    first = None
    if mask.window is not None:
        first = jnp.maximum((context if mask.shared_window else position) - mask.window + 1, 0)
    end = context
    if block_is_cached and mask.form == "causal":
        end = position + 1
    elif block_is_cached and mask.form == "full":
        end = context + (len(queries) if mask.counts is None else mask.counts[:, None])
    return (end if mask.counts is None else jnp.where(at < mask.counts[:, None], end, 0)), first


def visible(
    q: Array,
    mask: AttentionMask,
    block_kv: tuple[Array, Array] | None,
    read: Callable[[Array, int], tuple[Array, Array]],
) -> Visible:
    """Converts a mask over a cache to its canonical form.

    Args:
        block_kv: keys and values of the block, if they are not in the cache.
        read: `(start [B], size)` copies `size` entries per row of queries out of the cache, keys and values `[B, K, size, D]`.
            Only called if the block is in the cache and ranges of entries do not cover its visible positions.
    """
    b, t = q.shape[:2]
    queries = jnp.arange(t)
    by_lengths = block_kv is None and mask.form in ("causal", "full") and mask.segment_ids is None
    has_block = mask.form != "none" and not by_lengths
    lengths, first = cached_range(mask, queries, by_lengths)
    size = t if block_kv is None else block_kv[0].shape[2]
    is_visible = block_seen(mask, queries, size) if has_block else None
    start = mask.context_lengths[:, :1]
    # Context lengths differ by query: keys between the ends of two queries belong to neither, so each query becomes a row.
    if t > 1 and mask.context_lengths.shape[1] > 1 and (first is not None or (has_block and block_kv is None)):
        q = q.reshape(b * t, 1, *q.shape[2:])
        lengths = lengths.reshape(b * t, 1)
        first = None if first is None else first.reshape(b * t, 1)
        is_visible = None if is_visible is None else jnp.broadcast_to(is_visible, (b, t, size)).reshape(b * t, 1, size)
        start = mask.context_lengths.reshape(b * t, 1)
        block_kv = jax.tree.map(lambda part: jnp.repeat(part, t, axis=0), block_kv)
    if not has_block:
        return Visible(q, lengths, first, None, None)
    k, v = read(start[:, 0], size) if block_kv is None else block_kv
    if is_visible is not None:
        v = jnp.where(jnp.any(is_visible, axis=1)[:, None, :, None], v, jnp.zeros((), v.dtype))
    return Visible(q, lengths, first, (k, v), is_visible)
