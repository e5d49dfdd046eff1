"""The operations on a TPU, where causal attention over pages is the ragged paged attention kernel that ships with JAX.

That kernel wants a head's keys and values side by side, so that a page of all heads is one transfer: a pool of its own layout,
`PairedPages`. It takes queries that are the last of their row, each seeing all up to its own entry. So it serves
`append_attend`, in bfloat16 and where heads fill whole tiles (`fits`); in float32 it multiplies in bfloat16 passes. For queries
with other lengths or keys of their own (a drafter's block) the rows' entries are copied out of the pages, and attention over a
cache in one block does the rest.

Legend: P pages, E entries of a page, M pages that a row may have, B rows, T positions, N query heads, K key/value heads, D head
size, U own keys, R queries of all rows (B * T).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention
from jax.typing import DTypeLike
from jaxtyping import BFloat16, Float, Int, Int32, Shaped

from tilewright.kernels.operations import Heads, Pages
from tilewright.kernels.paged import xla

LANES = 128
BLOCK_ENTRIES = 512
"""Entries of a row that are in VMEM at the same time, twice."""
BLOCK_QUERIES = 32


class PairedPages(NamedTuple):
    """A pool `[P, E, 2 K, D]` of pages in which each head's key is followed by its value."""

    kv: Any

    @property
    def page_size(self) -> int:
        return self.kv.shape[1]


def fits(kv_heads: int, head_dim: int, dtype: DTypeLike) -> bool:
    """Whether the kernel takes pages of such heads: as many pairs of them as fill whole tiles, of whole lanes."""
    return head_dim % LANES == 0 and jnp.dtype(dtype) == jnp.bfloat16 and (kv_heads in (1, 2, 4) or kv_heads % 8 == 0)


def empty(pages: int, kv_heads: int, entries: int, head_dim: int, dtype: DTypeLike) -> PairedPages:
    """A pool of pages that hold zeros."""
    return PairedPages(jnp.zeros((pages, entries, 2 * kv_heads, head_dim), dtype))


def append(
    pool: PairedPages,
    table: Int32[Array, "B M"],
    k: Shaped[Array, "B K T D"],
    v: Shaped[Array, "B K T D"],
    start: Int[Array, " B"],
    count: Int[Array, " B"],
) -> PairedPages:
    """As `xla.append`."""
    b, heads, t, d = k.shape
    pages, entries, _, _ = pool.kv.shape
    page, entry = xla.places(table, start, count, t, pages, entries)
    pairs = jnp.stack([k, v], axis=2).transpose(0, 3, 1, 2, 4).reshape(b, t, 2 * heads, d)
    return PairedPages(pool.kv.at[page, entry].set(pairs, mode="drop"))


def apart(pool: PairedPages) -> Pages:
    """The pool's keys and values, each for itself."""
    pages, entries, heads, d = pool.kv.shape
    k, v = jnp.moveaxis(pool.kv.reshape(pages, entries, heads // 2, 2, d), 3, 0).transpose(0, 1, 3, 2, 4)
    return Pages(k, v)


def prefix_attention(
    q: Float[Array, "B T N D"],
    pool: PairedPages,
    table: Int32[Array, "B M"],
    lengths: Int[Array, "B T"],
    own: tuple[Float[Array, "B K U D"], Float[Array, "B K U D"]] | None,
    attend: Callable[..., Array],
) -> Float[Array, "B T N D"]:
    """As `xla.prefix_attention`. Only the rows' own pages are copied and taken apart, not the whole pool."""
    b, m = table.shape
    mine = apart(PairedPages(jnp.take(pool.kv, jnp.maximum(table, 0).reshape(-1), axis=0)))
    own_table = jnp.where(table >= 0, jnp.arange(b * m, dtype=table.dtype).reshape(b, m), table)
    return xla.prefix_attention(q, mine, own_table, lengths, own, attend)


def causal_attention(
    q: BFloat16[Array, "B T N D"],
    pool: PairedPages,
    table: Int32[Array, "B M"],
    start: Int[Array, " B"],
    count: Int[Array, " B"],
) -> BFloat16[Array, "B T N D"]:
    """What the query at `start + t` sees up to its own entry, which is in the pool; zeros from `count` on."""
    b, t, n, d = q.shape
    # The kernel wants at least one query and one entry of each row; what comes of those of a row of count 0 is left out below.
    sizes = jnp.maximum(count, 1).astype(jnp.int32)
    ends = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(sizes)])
    at = jnp.arange(t)[None]
    place = ends[:-1, None] + at
    meant = at < sizes[:, None]
    # Queries of all rows one after the other, without gaps.
    packed = jnp.zeros((b * t, n, d), q.dtype).at[jnp.where(meant, place, b * t)].set(q, mode="drop")
    pages = min(table.shape[1], max(1, BLOCK_ENTRIES // pool.page_size))
    out = ragged_paged_attention(
        packed, pool.kv, jnp.where(count > 0, start + count, 1).astype(jnp.int32), jnp.maximum(table, 0), ends,
        jnp.full(1, b, jnp.int32), sm_scale=d**-0.5, num_kv_pages_per_block=pages,
        num_queries_per_block=min(b * t, BLOCK_QUERIES),
    )  # fmt: skip
    spread = jnp.take(out, jnp.minimum(place, b * t - 1), axis=0)
    return jnp.where((at < count[:, None])[:, :, None, None], spread, jnp.zeros((), q.dtype))


def append_attend(
    projection: Any,
    how: Heads,
    pool: PairedPages,
    table: Int32[Array, "B M"],
    start: Int[Array, " B"],
    count: Int[Array, " B"],
    heads: Callable[[Any, Heads], tuple[Any, Any, Any]],
) -> tuple[Float[Array, "B T _"], PairedPages]:
    """Appends the projection's keys and values, and lets the query at `start + t` see all entries up to its own."""
    q, k, v = heads(projection, how)
    pool = append(pool, table, k, v, start, count)
    out = causal_attention(q, pool, table, start, count)
    return out.reshape(*out.shape[:2], -1), pool
