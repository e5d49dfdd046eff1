"""Attention on a CPU's vector or tile unit; the kernels are in `cpu.cc`.

Only keys that some query sees are read. A query's result is bitwise independent of other queries, and of whether entries are
contiguous or in pages: pages hold whole panels of 16 keys, and sums continue from page to page. Inputs and outputs are float32
or bfloat16; scores and sums are float32. For 8-bit keys and values only `attend_projected` has a kernel; targets use no other.

Legend: B rows of queries, T queries of a row, N query heads, K key/value heads, D head size, U block keys, A rows of a cache.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from tilewright.kernels.attention.xla import reader, within_window
from tilewright.kernels.heads.cpu import operands_of, refuses_head_dim
from tilewright.kernels.linear.cpu import Joint
from tilewright.kernels.masks import AttentionMask, packed, visible
from tilewright.kernels.native import or_empty
from tilewright.kernels.operations import PLAIN_SCORES, Heads, KeyValueRows, PagedCache, Quantised, Scores
from tilewright.kernels.paged.xla import seen_columns


def refuses_scores(scores: Scores) -> str:
    return "" if scores.plain else "needs scores without a softcap and without sinks"


def refuses_attend(
    q: Array | jax.ShapeDtypeStruct, cache: Any, mask: AttentionMask, block_kv: Any = None, scores: Scores = PLAIN_SCORES
) -> str:
    """Returns the reason why the kernel does not support these operands; empty if it does."""
    if cache is None:
        return "needs a cache and has no gradient"
    if isinstance(cache, PagedCache) and isinstance(cache.pool.k, Quantised):
        return "keys and values are in 8 bits"
    return refuses_head_dim(q.shape[3]) or refuses_scores(scores)


def attend(
    q: Float[Array, "B T N D"],
    cache: Any,
    mask: AttentionMask,
    block_kv: tuple[Float[Array, "B K U D"], Float[Array, "B K U D"]] | None = None,
    scores: Scores = PLAIN_SCORES,
) -> Float[Array, "B T N D"]:
    """Computes attention under any mask; see `Operations.attend`."""
    found = visible(q, mask, block_kv, reader(cache, q))
    rows = found.q.shape[0]
    table = None
    held = cache
    if isinstance(cache, PagedCache):
        cache, found = within_window(cache, found, mask)
        held, table = cache.pool, cache.table
    elif cache.k.shape[0] != rows:  # rows of the cache are shared: treat each as a page of several rows of queries
        table = jnp.repeat(jnp.arange(cache.k.shape[0], dtype=jnp.int32), rows // cache.k.shape[0])[:, None]
    nothing = jnp.zeros((rows, held[0].shape[1], 0, q.shape[3]), q.dtype)
    keys = (nothing, nothing) if found.block_kv is None else found.block_kv
    bits = None
    if found.is_visible is not None:
        bits = packed(jnp.broadcast_to(found.is_visible, (*found.q.shape[:2], found.is_visible.shape[2])))
    ranges = or_empty(table, jnp.int32), found.lengths.astype(jnp.int32), or_empty(found.first, jnp.int32)
    call = jax.ffi.ffi_call("tilewright_attention", jax.ShapeDtypeStruct(found.q.shape, q.dtype))
    out: Any = call(found.q, *held, *ranges, *keys, or_empty(bits, jnp.uint32), scale=np.float32(scores.scale or 0))
    return out.reshape(q.shape)


def refuses_attend_projected(ops: Any, projection: Any, heads: Heads, cache: Any, mask: AttentionMask) -> str:
    """Returns the reason why the kernel does not support these operands; empty if it does."""
    if cache is None:
        return "needs a cache and has no gradient"
    if not mask.appends or mask.counts is None:
        return "needs causal masks without segments, with a count of queries per row"
    return refuses_head_dim(heads.head_dim) or refuses_scores(heads.scores)


def attend_projected(
    ops: Any, projection: Joint, heads: Heads, cache: KeyValueRows | PagedCache, mask: AttentionMask
) -> tuple[Float[Array, "B T _"], Any]:
    """Computes `Operations.attend_projected` in one call, for causal masks: norm, rotation, cache write and attention.

    The cache is updated in place if nothing else reads it afterwards. A row of count 0 leaves the cache unchanged.
    """
    (qkv, queries, kv_heads, d), options = operands_of(projection, heads)
    start, counts = mask.context_lengths[:, 0], mask.counts
    table = None
    eight_bits = False
    if isinstance(cache, PagedCache):
        table = cache.table
        eight_bits = isinstance(cache.pool.k, Quantised)
        if mask.window is not None:
            table, start = seen_columns(table, start, mask.window, qkv.shape[1], cache.pool.page_size)
    held, structure = jax.tree.flatten(cache.pool if isinstance(cache, PagedCache) else cache)
    assert held[0].shape[1::2] == (kv_heads, d), "the heads of cache and projection differ"
    out = jax.ShapeDtypeStruct((*qkv.shape[:2], queries * d), qkv.dtype)
    results = (out, *(jax.ShapeDtypeStruct(part.shape, part.dtype) for part in held))
    norms = (or_empty(options[norm], qkv.dtype) for norm in ("q_norm", "k_norm"))
    is_visible = {"window": np.int64(mask.window or 0), "scale": np.float32(heads.scores.scale or 0)}
    name = "tilewright_quantised_attend_projected" if eight_bits else "tilewright_attend_projected"
    call = jax.ffi.ffi_call(name, results, input_output_aliases={7 + n: 1 + n for n in range(len(held))})
    places = start.astype(jnp.int32), counts.astype(jnp.int32), *held, or_empty(table, jnp.int32)
    attended, *parts = call(qkv, *norms, options["cos"], options["sin"], *places, eps=np.float32(options["eps"]), **is_visible)
    after = jax.tree.unflatten(structure, parts)
    return attended, cache._replace(pool=after) if isinstance(cache, PagedCache) else after
