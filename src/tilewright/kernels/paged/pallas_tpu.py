"""The operations on a TPU, where causal attention over pages is the ragged paged attention kernel that ships with JAX.

That kernel wants a head's keys and values side by side, so that a page of all heads is one transfer: a pool of its own layout,
`PairedPages`. Its heads are whole lanes, and as many as fill whole tiles. Smaller heads are packed: two of 64 lie side by side
in one of 128. A query of either has zeros where the other's keys are, so that its scores are its own, and of its result it
keeps the half with its own values. Where heads do not come out even, zeros fill up (`packing`).

The kernel takes queries that are the last of their row, each seeing all up to its own entry. So it serves `append_attend`, in
bfloat16; in float32 it would multiply in bfloat16 passes (`refuses`). For queries with other lengths or keys of their own (a
drafter's block) entries are copied out of the rows' pages, a block at a time.

Legend: P pages, E entries of a page, M pages that a row may have, B rows, T positions, N query heads, K key/value heads, D head
size, U extra keys, F packed heads, G queries of a head (N / K).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import BFloat16, Float, Int, Int32, Shaped

from tilewright.kernels.attention.xla import prefix_attention as attend_rows
from tilewright.kernels.operations import PLAIN_SCORES, Heads, Scores
from tilewright.kernels.paged import xla

LANES = 128
SUBLANES = 8
BLOCK_ENTRIES = 512
"""Entries of a row that are in VMEM at the same time, twice."""
BLOCK_QUERIES = 32


@partial(jax.tree_util.register_dataclass, data_fields=["kv"], meta_fields=["kv_heads", "head_dim"])
@dataclass(frozen=True)
class PairedPages:
    """A pool `[P, E, 2 F, lanes]` of pages in which each packed head's keys are followed by its values.

    Attributes:
        kv_heads, head_dim: of the heads that are packed, K and D; over several devices those of each.
    """

    kv: Any
    kv_heads: int
    head_dim: int

    @property
    def page_size(self) -> int:
        return self.kv.shape[1]


def refuses(head_dim: int, dtype: DTypeLike) -> str:
    """The reason why the kernel does not take keys and values of this dtype, or heads of this size; empty if it does."""
    if jnp.dtype(dtype) == jnp.bfloat16:
        return f"its heads have {LANES} lanes, and here {head_dim}: the compiler refuses more" if head_dim > LANES else ""
    if jnp.dtype(dtype) == jnp.int8:
        return "it takes one scale for all keys and one for all values, and those of 8 bits have one for each position"
    return f"it multiplies in bfloat16, and keys and values are {jnp.dtype(dtype).name}"


def packing(kv_heads: int, head_dim: int) -> tuple[int, int, int]:
    """The layout of K heads of D in a page: heads that share one of the kernel's, lanes of each, heads that the kernel sees."""
    shared = max(1, LANES // head_dim)
    lanes = LANES // shared if head_dim <= LANES else -(-head_dim // LANES) * LANES
    filled = -(-kv_heads // shared)
    tiled = next((count for count in (1, 2, 4) if count >= filled), -(-filled // SUBLANES) * SUBLANES)
    return shared, lanes, tiled


def empty(pages: int, kv_heads: int, entries: int, head_dim: int, dtype: DTypeLike, devices: int = 1) -> PairedPages:
    """A pool of pages that hold zeros; over several devices each packs its own part of the heads."""
    local_heads = kv_heads // devices
    shared, lanes, packed = packing(local_heads, head_dim)
    return PairedPages(jnp.zeros((pages, entries, devices * 2 * packed, shared * lanes), dtype), local_heads, head_dim)


def pack(heads: Shaped[Array, "*rows K D"]) -> Shaped[Array, "*rows F lanes"]:
    """Heads side by side as `packing` has them, zeros between and behind."""
    *rows, k, d = heads.shape
    shared, lanes, packed = packing(k, d)
    around = [(0, 0)] * len(rows)
    return jnp.pad(heads, [*around, (0, packed * shared - k), (0, lanes - d)]).reshape(*rows, packed, shared * lanes)


def append(
    pool: PairedPages,
    table: Int32[Array, "B M"],
    k: Shaped[Array, "B K T D"],
    v: Shaped[Array, "B K T D"],
    start: Int[Array, " B"],
    count: Int[Array, " B"],
) -> PairedPages:
    """Writes new entries of each row into its pages; see `xla.append`."""
    pages, entries, _, _ = pool.kv.shape
    page, entry = xla.places(table, start, count, k.shape[2], pages, entries)
    keys, values = (pack(each.transpose(0, 2, 1, 3)) for each in (k, v))
    pairs = jnp.stack([keys, values], axis=3).reshape(*page.shape, *pool.kv.shape[2:])
    return replace(pool, kv=pool.kv.at[page, entry].set(pairs, mode="drop"))


def in_rows(pool: PairedPages, table: Int32[Array, "B M"]) -> tuple[Shaped[Array, "B K S D"], Shaped[Array, "B K S D"]]:
    """Each row's keys and its values side by side."""
    found = jnp.take(pool.kv, jnp.maximum(table, 0), axis=0)  # [B, M, E, 2 F, lanes]
    shared, lanes, packed = packing(pool.kv_heads, pool.head_dim)
    pairs = found.reshape(table.shape[0], -1, packed, 2, shared, lanes)
    k, v = (
        pairs[:, :, :, which].reshape(*pairs.shape[:2], packed * shared, lanes)[:, :, : pool.kv_heads, : pool.head_dim]
        for which in (0, 1)
    )
    return k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)


def prefix_attention(
    q: Float[Array, "B T N D"],
    pool: PairedPages,
    table: Int32[Array, "B M"],
    lengths: Int[Array, "B T"],
    extra: tuple[Float[Array, "B K U D"], Float[Array, "B K U D"]] | None,
    attend: Callable[..., Array],
    rule: Scores = PLAIN_SCORES,
) -> Float[Array, "B T N D"]:
    """Attention of each query over the first entries of its row, and over all of `extra`; see `xla.prefix_attention`."""
    sizes = pool.kv_heads, pool.page_size
    return xla.attention_over_blocks(q, partial(in_rows, pool), sizes, table, lengths, extra, attend, rule)


def pack_queries(q: Float[Array, "R N D"], kv_heads: int) -> Float[Array, "R _ lanes"]:
    """Queries of packed heads: each has its own numbers in the lanes of its head, and zeros in those of the others."""
    r, n, d = q.shape
    shared, lanes, packed = packing(kv_heads, d)
    grouped = jnp.pad(
        q.reshape(r, kv_heads, n // kv_heads, d), [(0, 0), (0, packed * shared - kv_heads), (0, 0), (0, lanes - d)]
    ).reshape(r, packed, shared, n // kv_heads, 1, lanes)
    same = jnp.eye(shared, dtype=bool)[:, None, :, None]
    return jnp.where(same, grouped, jnp.zeros((), q.dtype)).reshape(r, -1, shared * lanes)


def unpack_results(out: Float[Array, "R _ lanes"], kv_heads: int, head_dim: int, heads: int) -> Float[Array, "R N D"]:
    """Of what the queries of `pack_queries` got, each one's own lanes."""
    shared, lanes, packed = packing(kv_heads, head_dim)
    parts = out.reshape(out.shape[0], packed, shared, heads // kv_heads, shared, lanes)
    diagonal = jnp.stack([parts[:, :, n, :, n, :head_dim] for n in range(shared)], axis=2)
    return diagonal.reshape(out.shape[0], packed * shared, -1, head_dim)[:, :kv_heads].reshape(out.shape[0], heads, head_dim)


def causal_attention(
    q: BFloat16[Array, "B T N D"],
    pool: PairedPages,
    table: Int32[Array, "B M"],
    start: Int[Array, " B"],
    count: Int[Array, " B"],
    rule: Scores = PLAIN_SCORES,
) -> BFloat16[Array, "B T N D"]:
    """Attention of the query at `start + t` over all entries up to its own, which is in the pool; zeros from `count` on."""
    # JAX's experimental kernel: imported where a TPU is compiled for, and nowhere else.
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    b, t, n, d = q.shape
    # The kernel wants at least one query and one entry of each row; what comes of those of a row of count 0 is left out below.
    sizes = jnp.maximum(count, 1).astype(jnp.int32)
    ends = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(sizes)])
    at = jnp.arange(t)[None]
    place = ends[:-1, None] + at
    meant = at < sizes[:, None]
    # Queries of all rows one after the other, without gaps.
    dense = jnp.zeros((b * t, n, d), q.dtype).at[jnp.where(meant, place, b * t)].set(q, mode="drop")
    pages = min(table.shape[1], max(1, BLOCK_ENTRIES // pool.page_size))
    out = ragged_paged_attention(
        pack_queries(dense, pool.kv_heads),
        pool.kv,
        jnp.where(count > 0, start + count, 1).astype(jnp.int32),
        jnp.maximum(table, 0),
        ends,
        jnp.full(1, b, jnp.int32),
        sm_scale=rule.scale_of(d),
        sliding_window=rule.window,
        soft_cap=rule.softcap,
        num_kv_pages_per_block=pages,
        num_queries_per_block=min(b * t, BLOCK_QUERIES),
    )
    spread = jnp.take(unpack_results(out, pool.kv_heads, d, n), jnp.minimum(place, b * t - 1), axis=0)
    return jnp.where((at < count[:, None])[:, :, None, None], spread, jnp.zeros((), q.dtype))


def append_attend(
    projection: Any,
    spec: Heads,
    pool: PairedPages,
    table: Int32[Array, "B M"],
    start: Int[Array, " B"],
    count: Int[Array, " B"],
    heads: Callable[[Any, Heads], tuple[Any, Any, Any]],
) -> tuple[Float[Array, "B T _"], PairedPages]:
    """Appends the projection's keys and values, and lets the query at `start + t` see all entries up to its own."""
    q, k, v = heads(projection, spec)
    pool = append(pool, table, k, v, start, count)
    if spec.scores.sinks is None:
        out = causal_attention(q, pool, table, start, count, spec.scores)
    else:  # the kernel has none
        sizes = (pool.kv_heads, pool.page_size)
        lengths = xla.lengths_of(start, count, q.shape[1])
        out = xla.attention_over_blocks(q, partial(in_rows, pool), sizes, table, lengths, None, attend_rows, spec.scores)
    return out.reshape(*out.shape[:2], -1), pool
