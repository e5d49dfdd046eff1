"""Reference attention in float32, without grouping: over a contiguous or paged cache, under any mask.

Legend: B rows of queries, T queries of a row, N query heads, K key/value heads, D head size, U block keys.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

from tilewright.kernels.masks import AttentionMask, block_seen, depths
from tilewright.kernels.operations import PLAIN_SCORES, KeyValueRows, PagedCache, Scores, softcapped
from tilewright.kernels.paged.reference import in_rows


def attend(
    q: Float[Array, "B T N D"],
    cache: KeyValueRows | PagedCache | None,
    mask: AttentionMask,
    block_kv: tuple[Float[Array, "B K U D"], Float[Array, "B K U D"]] | None = None,
    scores: Scores = PLAIN_SCORES,
) -> Float[Array, "B T N D"]:
    """Computes attention under an `AttentionMask`; query head n uses key head `n * K // N`. No visible key gives zeros."""
    if isinstance(cache, PagedCache):
        cache = KeyValueRows(*(in_rows(part, cache.table) for part in cache.pool))
    parts: list[tuple[Array, Array, Array]] = []
    if cache is not None:
        k, v = (jnp.repeat(part, q.shape[0] // part.shape[0], axis=0) for part in cache)
        parts.append((k, v, seen_cached(mask, q.shape[1], k.shape[2], block_kv is None)))
    if block_kv is not None:
        is_visible = block_seen(mask, jnp.arange(q.shape[1]), block_kv[0].shape[2])
        parts.append((*block_kv, jnp.ones((1, q.shape[1], block_kv[0].shape[2]), bool) if is_visible is None else is_visible))
    group = q.shape[2] // parts[0][0].shape[1]
    k, v = (jnp.repeat(jnp.concatenate([part[n] for part in parts], 2).astype(jnp.float32), group, axis=1) for n in (0, 1))
    is_visible = jnp.concatenate([jnp.broadcast_to(part[2], (*q.shape[:2], part[2].shape[2])) for part in parts], axis=2)
    exact = jax.lax.Precision.HIGHEST
    products = jnp.einsum("btnd,bnsd->bnts", q.astype(jnp.float32), k, precision=exact)
    products = softcapped(products * scores.scale_of(q.shape[3]), scores.softcap)
    seen_by_heads = jnp.broadcast_to(is_visible[:, None], products.shape)
    if scores.sinks is not None:
        sinks = jnp.broadcast_to(scores.sinks.astype(jnp.float32)[None, :, None, None], (*products.shape[:3], 1))
        products = jnp.concatenate([products, sinks], axis=-1)
        seen_by_heads = jnp.concatenate([seen_by_heads, jnp.ones_like(sinks, bool)], axis=-1)
    weights = jax.nn.softmax(products, axis=-1, where=seen_by_heads)[..., : is_visible.shape[-1]]
    weights = jnp.where(jnp.any(is_visible, axis=-1)[:, None, :, None], weights, 0.0)
    v = jnp.where(jnp.any(is_visible, axis=1)[:, None, :, None], v, 0.0)
    return jnp.einsum("bnts,bnsd->btnd", weights, v, precision=exact).astype(q.dtype)


def seen_cached(mask: AttentionMask, size: int, entries: int, holds_block: bool) -> Bool[Array, "B T S"]:
    """Returns the mask of cache entries per query: its context, and its block if the cache holds the block."""
    context = jnp.broadcast_to(mask.context_lengths, (mask.context_lengths.shape[0], size))[:, :, None]
    entry = jnp.arange(entries)
    is_visible = entry < context
    at = jnp.arange(size)[None, :, None]
    if mask.window is not None:
        depth = depths(mask.block)[:, :, None] if mask.form == "bits" else -1 if mask.form == "none" else at
        depth = 0 if mask.shared_window else depth
        is_visible = is_visible & (entry > context + depth - mask.window)
    if mask.counts is not None:
        is_visible = is_visible & (at < mask.counts[:, None, None])
    if not holds_block:
        return is_visible
    block = block_seen(mask, jnp.arange(size), size)
    block = jnp.ones((1, size, size), bool) if block is None else block
    if mask.form == "full" and mask.counts is not None:
        block = block & (jnp.arange(size) < mask.counts[:, None, None])
    place = jnp.broadcast_to(entry - context, is_visible.shape)
    inside = (place >= 0) & (place < size)
    block = jnp.broadcast_to(block, (*is_visible.shape[:2], size))
    return is_visible | (inside & jnp.take_along_axis(block, jnp.clip(place, 0, size - 1), axis=2))
