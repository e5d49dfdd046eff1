"""Paged KV cache on a TPU, with the ragged paged attention kernel that ships with JAX for causal attention.

The kernel needs a head's keys and values side by side, so that a page of all heads is one transfer; `PairedPages` is a pool in
this layout. The kernel's heads are whole lanes, and their number fills whole tiles. Smaller heads are packed: two heads of 64
share one of 128. A query has zeros in the lanes of the other head's keys, so that its scores are correct, and keeps the half of
its result with its own head's values. Zeros fill up incomplete heads (`packing`).

The kernel's queries are the last entries of their row, and each sees all entries up to its own. It therefore implements
`attend_projected`, in bfloat16; for float32 it would multiply in bfloat16 passes (`refuses_pages`). For other masks, or own
keys (those of a drafter's block), XLA copies entries out of the pages, a block at a time.

Legend: P pages, E entries of a page, M pages that a row may have, B rows, T positions, N query heads, K key/value heads, D head
size, F packed heads, G queries of a head (N / K).
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import BFloat16, Float, Int, Int32, Shaped

from tilewright.kernels.masks import AttentionMask
from tilewright.kernels.operations import PLAIN_SCORES, Heads, KeyValuePages, PagedCache, Quantised, Scores
from tilewright.kernels.paged import xla

LANES = 128
SUBLANES = 8
BLOCK_ENTRIES = 512
"""Entries of a row that are in VMEM at a time, double-buffered."""
BLOCK_QUERIES = 32


@partial(jax.tree_util.register_dataclass, data_fields=["kv"], meta_fields=["kv_heads", "head_dim"])
@dataclass(frozen=True)
class PairedPages:
    """A pool `[P, E, 2 F, lanes]` of pages, in which the keys of each packed head precede its values.

    Attributes:
        kv_heads, head_dim: K and D, the heads that are packed; per device if the pool is sharded.
    """

    kv: Any
    kv_heads: int
    head_dim: int

    @property
    def page_size(self) -> int:
        return self.kv.shape[1]

    def write(
        self,
        table: Int32[Array, "B M"],
        k: Shaped[Array, "B K T D"],
        v: Shaped[Array, "B K T D"],
        start: Int[Array, " B"],
        counts: Int[Array, " B"],
    ) -> "PairedPages":
        """Writes new entries of each row into its pages; see `xla.write`."""
        pages, entries, _, _ = self.kv.shape
        page, entry = xla.places(table, start, counts, k.shape[2], pages, entries)
        keys, values = (pack(each.transpose(0, 2, 1, 3)) for each in (k, v))
        pairs = jnp.stack([keys, values], axis=3).reshape(*page.shape, *self.kv.shape[2:])
        return replace(self, kv=self.kv.at[page, entry].set(pairs, mode="drop"))

    def read(self, table: Int32[Array, "B M"]) -> tuple[Shaped[Array, "B K S D"], Shaped[Array, "B K S D"]]:
        """Copies each row's keys and values out of the pool."""
        return in_rows(self, table)


def refuses_pages(count: int, kv_heads: int, entries: int, head_dim: int, dtype: DTypeLike, devices: int = 1) -> str:
    """Returns the reason why the kernel does not support this dtype or head size; empty if it does."""
    if jnp.dtype(dtype) == jnp.bfloat16:
        return f"needs head sizes up to {LANES}, the compiler's limit, and not {head_dim}" if head_dim > LANES else ""
    if jnp.dtype(dtype) == jnp.int8:
        return "has one scale for all keys and one for all values, while 8-bit keys and values have one per position"
    return f"multiplies in bfloat16, while keys and values are {jnp.dtype(dtype).name}"


def packing(kv_heads: int, head_dim: int) -> tuple[int, int, int]:
    """Returns the layout of K heads of size D in a page: heads per packed head, lanes of each, number of packed heads."""
    shared = max(1, LANES // head_dim)
    lanes = LANES // shared if head_dim <= LANES else -(-head_dim // LANES) * LANES
    filled = -(-kv_heads // shared)
    tiled = next((count for count in (1, 2, 4) if count >= filled), -(-filled // SUBLANES) * SUBLANES)
    return shared, lanes, tiled


def pages(count: int, kv_heads: int, entries: int, head_dim: int, dtype: DTypeLike, devices: int = 1) -> PairedPages:
    """Returns a pool of zero pages; if sharded, each device packs its own heads."""
    local_heads = kv_heads // devices
    shared, lanes, packed = packing(local_heads, head_dim)
    return PairedPages(jnp.zeros((count, entries, devices * 2 * packed, shared * lanes), dtype), local_heads, head_dim)


def pack(heads: Shaped[Array, "*rows K D"]) -> Shaped[Array, "*rows F lanes"]:
    """Packs heads as `packing` lays them out, with zeros between and behind."""
    *rows, k, d = heads.shape
    shared, lanes, packed = packing(k, d)
    around = [(0, 0)] * len(rows)
    return jnp.pad(heads, [*around, (0, packed * shared - k), (0, lanes - d)]).reshape(*rows, packed, shared * lanes)


def in_rows(pool: PairedPages, table: Int32[Array, "B M"]) -> tuple[Shaped[Array, "B K S D"], Shaped[Array, "B K S D"]]:
    """Copies each row's keys and values out of the pool."""
    found = jnp.take(pool.kv, jnp.maximum(table, 0), axis=0)  # [B, M, E, 2 F, lanes]
    shared, lanes, packed = packing(pool.kv_heads, pool.head_dim)
    pairs = found.reshape(table.shape[0], -1, packed, 2, shared, lanes)
    k, v = (
        pairs[:, :, :, part].reshape(*pairs.shape[:2], packed * shared, lanes)[:, :, : pool.kv_heads, : pool.head_dim]
        for part in (0, 1)
    )
    return k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)


def pack_queries(q: Float[Array, "R N D"], kv_heads: int) -> Float[Array, "R _ lanes"]:
    """Packs queries: each has its values in the lanes of its own head, and zeros in those of the others."""
    r, n, d = q.shape
    shared, lanes, packed = packing(kv_heads, d)
    grouped = jnp.pad(
        q.reshape(r, kv_heads, n // kv_heads, d), [(0, 0), (0, packed * shared - kv_heads), (0, 0), (0, lanes - d)]
    ).reshape(r, packed, shared, n // kv_heads, 1, lanes)
    same = jnp.eye(shared, dtype=bool)[:, None, :, None]
    return jnp.where(same, grouped, jnp.zeros((), q.dtype)).reshape(r, -1, shared * lanes)


def unpack_results(out: Float[Array, "R _ lanes"], kv_heads: int, head_dim: int, heads: int) -> Float[Array, "R N D"]:
    """Extracts each query's own lanes from the results for the queries of `pack_queries`."""
    shared, lanes, packed = packing(kv_heads, head_dim)
    parts = out.reshape(out.shape[0], packed, shared, heads // kv_heads, shared, lanes)
    diagonal = jnp.stack([parts[:, :, n, :, n, :head_dim] for n in range(shared)], axis=2)
    return diagonal.reshape(out.shape[0], packed * shared, -1, head_dim)[:, :kv_heads].reshape(out.shape[0], heads, head_dim)


def ragged_attention(
    q: BFloat16[Array, "B T N D"],
    pool: PairedPages,
    table: Int32[Array, "B M"],
    start: Int[Array, " B"],
    count: Int[Array, " B"],
    scores: Scores = PLAIN_SCORES,
    window: int | None = None,
) -> BFloat16[Array, "B T N D"]:
    """Computes attention of the query at `start + t` over all entries up to its own, which are in the pool; zeros from `count`
    on."""
    # JAX's experimental kernel is imported only when compiling for a TPU.
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    b, t, n, d = q.shape
    # The kernel needs at least one query and one entry per row; results of rows with count 0 are discarded below.
    sizes = jnp.maximum(count, 1).astype(jnp.int32)
    ends = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(sizes)])
    at = jnp.arange(t)[None]
    place = ends[:-1, None] + at
    valid = at < sizes[:, None]
    # Queries of all rows, densely concatenated.
    dense = jnp.zeros((b * t, n, d), q.dtype).at[jnp.where(valid, place, b * t)].set(q, mode="drop")
    pages = min(table.shape[1], max(1, BLOCK_ENTRIES // pool.page_size))
    out = ragged_paged_attention(
        pack_queries(dense, pool.kv_heads),
        pool.kv,
        jnp.where(count > 0, start + count, 1).astype(jnp.int32),
        jnp.maximum(table, 0),
        ends,
        jnp.full(1, b, jnp.int32),
        sm_scale=scores.scale_of(d),
        sliding_window=window,
        soft_cap=scores.softcap,
        num_kv_pages_per_block=pages,
        num_queries_per_block=min(b * t, BLOCK_QUERIES),
    )
    spread = jnp.take(unpack_results(out, pool.kv_heads, d, n), jnp.minimum(place, b * t - 1), axis=0)
    return jnp.where((at < count[:, None])[:, :, None, None], spread, jnp.zeros((), q.dtype))


def refuses_attend_projected(ops: Any, projection: Any, heads: Heads, cache: Any, mask: AttentionMask) -> str:
    """Returns the reason why the kernel does not support these operands; empty if it does."""
    if not isinstance(cache, PagedCache):
        return "needs a paged cache"
    pool = cache.pool
    if isinstance(pool, KeyValuePages):
        held = pool.k.values if isinstance(pool.k, Quantised) else pool.k
        count, kv_heads, entries, head_dim = held.shape
        return refuses_pages(count, kv_heads, entries, head_dim, held.dtype) or "the pages have XLA's layout"
    if not mask.appends or mask.counts is None:
        return "needs causal masks without segments, with a count of queries per row"
    return "" if heads.scores.sinks is None else "does not support sinks"


def attend_projected(
    ops: Any, projection: Any, heads: Heads, cache: PagedCache, mask: AttentionMask
) -> tuple[Float[Array, "B T _"], PagedCache]:
    """Computes `Operations.attend_projected` for causal masks over pages."""
    q, k, v = ops.heads(projection, heads)
    start, counts = mask.context_lengths[:, 0], mask.counts
    cache = ops.write(cache, k, v, start, counts)
    table = cache.table
    if mask.window is not None:
        table, start = xla.seen_columns(table, start, mask.window, q.shape[1], cache.pool.page_size)
    out = ragged_attention(q, cache.pool, table, start, counts, heads.scores, mask.window)
    return out.reshape(*out.shape[:2], -1), cache
