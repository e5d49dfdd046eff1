"""Attention on a TPU: keys and values pass through VMEM block by block under an online softmax (Milakov & Gimelshein 2018;
Dao et al. 2022), and scores never reach HBM. Only blocks of a cache that some query sees are read; pages are first copied out
of the pool into a block.

Legend: B rows of queries, T queries, N query heads, K key/value heads, S cache entries, U block keys, D head size, R rows of
a key head (N / K * T, see `xla.group_rows`), Q rows and C entries of a block, L lanes.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Bool, Float, Int

from tilewright.kernels.attention import xla
from tilewright.kernels.attention.xla import MASKED, group_rows, ungroup_rows
from tilewright.kernels.masks import AttentionMask, visible
from tilewright.kernels.operations import PLAIN_SCORES, KeyValueRows, PagedCache, Scores

LANES = 128
ROWS = 512
"""Limit of Q."""
ENTRIES = 512
"""Limit of C."""
BLOCK_KEYS = 1024
"""Limit of U, as block keys are in VMEM as a whole."""


def refuses(
    q: Array | jax.ShapeDtypeStruct, cache: Any, mask: AttentionMask, block_kv: Any = None, scores: Scores = PLAIN_SCORES
) -> str:
    """Returns the reason why the kernel does not support these operands; empty if it does."""
    if isinstance(cache, PagedCache):
        slots, dtype = cache.table.shape[1] * cache.pool.page_size, q.dtype
        if slots > xla.BLOCK_ENTRIES:
            return f"needs at most {xla.BLOCK_ENTRIES} paged entries per row"
    elif cache is None:
        return "needs a cache and has no gradient"
    else:
        slots, dtype = cache.k.shape[2], cache.k.dtype
    if mask.window is not None or not scores.default:
        return "needs masks without a window and default scores"
    whole = q.shape[3] % LANES == 0 and slots > 0 and q.shape[1] > 0
    few = block_kv is None or 0 < block_kv[0].shape[2] <= BLOCK_KEYS
    if whole and few and q.dtype == dtype and q.dtype in (jnp.float32, jnp.bfloat16):
        return ""
    return "needs head sizes that are multiples of 128, one dtype (float32 or bfloat16), and few keys in the block"


def kernel(live_ref, q_ref, lengths_ref, k_ref, v_ref, *rest, entries: int, has_block: bool, masked: bool):
    """Processes a block: q and out [1, 1, Q, D], lengths [1, Q, 1], k and v [1, 1, C, D], block k and v [1, 1, U, D], mask [1,
    Q, U].

    Scratch, persistent over all blocks of the same queries: running maximum and sum of weights [Q, L], accumulator [Q, D].
    """
    (block_k_ref, block_v_ref), rest = (rest[:2], rest[2:]) if has_block else ((None, None), rest)
    (seen_ref,), rest = (rest[:1], rest[1:]) if masked else ((None,), rest)
    out_ref, largest_ref, total_ref, values_ref = rest
    live = live_ref[pl.program_id(0)]
    block = pl.program_id(3)
    precision = jax.lax.Precision.HIGHEST if q_ref.dtype == jnp.float32 else None

    def take(keys: Array, values: Array, is_visible: Array | None) -> None:
        """Adds keys under the online softmax."""
        scores = jax.lax.dot_general(
            q_ref[0, 0], keys, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
        )
        scores = scores * keys.shape[1] ** -0.5
        if is_visible is not None:
            scores = jnp.where(is_visible, scores, MASKED)
        before = largest_ref[:, :1]
        largest = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
        weights = jnp.exp(scores - largest)
        if is_visible is not None:
            weights = jnp.where(is_visible, weights, 0.0)  # before any visible key the running maximum is MASKED
        rescale = jnp.exp(before - largest)
        total_ref[...] = total_ref[...] * rescale + jnp.sum(weights, axis=1, keepdims=True)
        added = jnp.dot(weights.astype(values.dtype), values, precision=precision, preferred_element_type=jnp.float32)
        values_ref[...] = values_ref[...] * rescale + added
        largest_ref[...] = jnp.broadcast_to(largest, largest_ref.shape)

    @pl.when(block == 0)
    def _():
        largest_ref[...] = jnp.full(largest_ref.shape, MASKED, jnp.float32)
        total_ref[...] = jnp.zeros(total_ref.shape, jnp.float32)
        values_ref[...] = jnp.zeros(values_ref.shape, jnp.float32)
        if block_k_ref is not None and block_v_ref is not None:
            take(block_k_ref[0, 0], block_v_ref[0, 0], None if seen_ref is None else seen_ref[0] != 0)

    first = block * entries

    @pl.when(first < live)
    def _():
        # Entries that no query sees may hold NaN, which a weight of zero would not remove.
        at = first + jax.lax.broadcasted_iota(jnp.int32, (entries, 1), 0)
        values = jnp.where(at < live, v_ref[0, 0], jnp.zeros_like(v_ref[0, 0]))
        at = first + jax.lax.broadcasted_iota(jnp.int32, (1, entries), 1)
        take(k_ref[0, 0], values, at < lengths_ref[0])

    @pl.when(block == pl.num_programs(3) - 1)
    def _():
        total = total_ref[:, :1]
        out_ref[0, 0] = jnp.where(total > 0, values_ref[...] / total, 0.0).astype(out_ref.dtype)


def attend(
    q: Float[Array, "B T N D"],
    cache: Any,
    mask: AttentionMask,
    block_kv: tuple[Float[Array, "B K U D"], Float[Array, "B K U D"]] | None = None,
    scores: Scores = PLAIN_SCORES,
    interpret: bool = False,
) -> Float[Array, "B T N D"]:
    """Computes attention under a mask without a window; see `Operations.attend`.

    Args:
        interpret: run without a TPU, slowly.
    """
    found = visible(q, mask, block_kv, xla.reader(cache, q))
    lengths = found.lengths
    if isinstance(cache, PagedCache):
        cache, found = xla.within_window(cache, found, mask)
        lengths = jnp.minimum(lengths, xla.mapped_entries(cache.table, cache.pool.page_size)[:, None])
        keys, values, _ = xla.pages_in_rows(cache, cache.table, 0, found, lengths)
        cache = KeyValueRows(keys, values)
    return over_rows(found.q, cache.k, cache.v, lengths, found.block_kv, found.is_visible, interpret).reshape(q.shape)


def over_rows(
    q: Float[Array, "B T N D"],
    k: Float[Array, "A K S D"],
    v: Float[Array, "A K S D"],
    lengths: Int[Array, "B T"],
    block_kv: tuple[Float[Array, "B K U D"], Float[Array, "B K U D"]] | None,
    is_visible: Bool[Array, "#B T U"] | None,
    interpret: bool = False,
) -> Float[Array, "B T N D"]:
    """Computes attention of each query over the first `lengths` cache entries and over the block keys that `is_visible` marks.

    Scores and sums are float32. A query without visible keys gets zeros.
    """
    (b, t, n, d), (heads, slots) = q.shape, k.shape[1:3]
    shared = b // k.shape[0]
    grouped = group_rows(q, heads)
    rows = min(ROWS, grouped.shape[2])
    entries = min(ENTRIES, slots)
    blocks = pl.cdiv(slots, entries)
    each = jnp.tile(lengths.astype(jnp.int32), (1, n // heads))[:, :, None]
    live = jnp.minimum(jnp.max(lengths, axis=1), slots).astype(jnp.int32)

    def entry_block(row: Any, head: Any, _: Any, block: Any, live: Any) -> tuple[Any, ...]:
        """Stays at the last visible block, since a block that is already in VMEM is not fetched again."""
        last = jnp.maximum(pl.cdiv(live[row], entries) - 1, 0)
        return jax.lax.div(row, shared), head, jnp.minimum(block, last), 0

    def query_block(row: Any, head: Any, part: Any, *_: Any) -> tuple[Any, ...]:
        return row, head, part, 0

    cached = pl.BlockSpec((1, 1, entries, d), entry_block)
    queries = pl.BlockSpec((1, 1, rows, d), query_block)
    block_size = 0 if block_kv is None else block_kv[0].shape[2]
    whole = pl.BlockSpec((1, 1, block_size, d), lambda row, head, *_: (row, head, 0, 0))
    parts = pl.cdiv(grouped.shape[2], rows)
    mask = []
    if is_visible is not None:
        mask = [jnp.tile(jnp.broadcast_to(is_visible, (b, *is_visible.shape[1:])).astype(jnp.int32), (1, n // heads, 1))]
    masks = [pl.BlockSpec((1, rows, block_size), lambda row, head, part, *_: (row, part, 0)) for _ in mask]
    keys = 2 * parts * b * heads * (slots + block_size) * d  # keys and values, once per block of queries
    out = pl.pallas_call(
        partial(kernel, entries=entries, has_block=block_kv is not None, masked=is_visible is not None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(b, heads, parts, blocks),
            in_specs=[
                queries,
                pl.BlockSpec((1, rows, 1), lambda row, head, part, *_: (row, part, 0)),
                cached,
                cached,
                *([] if block_kv is None else [whole, whole]),
                *masks,
            ],
            out_specs=queries,
            scratch_shapes=[pltpu.VMEM((rows, size), jnp.float32) for size in (LANES, LANES, d)],
        ),
        out_shape=jax.ShapeDtypeStruct(grouped.shape, q.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=4 * q.size * (slots + block_size),
            bytes_accessed=(2 * q.size + keys) * q.dtype.itemsize + each.size * 4 * LANES,
            transcendentals=b * n * t * (slots + block_size),
        ),
        interpret=interpret,
        name="attention",
    )(live, grouped, each, k, v, *(() if block_kv is None else block_kv), *mask)
    return ungroup_rows(out, t)
