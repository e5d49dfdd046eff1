"""KV caches of a fixed size, written in place.

A `KVCache` holds the keys and values of one layer for all rows of a batch. There are several layouts. Entries at or beyond a
row's length are stale: they are masked until a later write replaces them, so a rejected draft needs no clean-up.

Legend: B rows of a batch, T new positions, S slots, N query heads, K key/value heads, D head size, M pages that a row may have.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from tilewright.kernels import select
from tilewright.kernels.masks import AttentionMask
from tilewright.kernels.operations import (
    PLAIN_SCORES,
    UNMAPPED,
    Heads,
    KeyValuePages,
    KeyValueRows,
    Operations,
    PagedCache,
    Pool,
    Projection,
    Quantised,
    Scores,
)
from tilewright.kernels.paged.quantise import dequantise, quantise


@runtime_checkable
class KVCache(Protocol):
    """Interface of the keys and values of one layer, in any layout. A pytree."""

    def append(self, ops: Operations, k: Array, v: Array, start: Array, count: Array) -> Any:
        """Writes the first `count` `[B]` of each row's new entries `[B, K, T, D]` to its positions from `start` on.

        Nothing else is written: a row with count 0 does not change. Returns the cache.
        """
        ...

    def attend(
        self,
        ops: Operations,
        q: Array,
        mask: AttentionMask,
        block_kv: tuple[Array, Array] | None = None,
        scores: Scores = PLAIN_SCORES,
    ) -> Array:
        """Attention `[B, T, N, D]` of queries over the cache and over `block_kv`; see `Operations.attend`."""
        ...

    def visible(self, stop: Array) -> Array:
        """Number of entries, from the first on, that hold a position before `stop`, `[B]`."""
        ...

    def attend_before(self, ops: Operations, q: Array, stop: Array, block_kv: tuple[Array, Array]) -> Array:
        """Attention of queries from `stop` `[B]` on over the cached positions before `stop`, and over all of `block_kv`."""
        ...

    def rows(self, first: int | Array, count: int) -> Any:
        """Returns the cache of `count` rows from `first` on."""
        ...

    def with_rows(self, first: int | Array, some: Any) -> Any:
        """Returns the cache with the rows from `first` on replaced by `some`."""
        ...


@runtime_checkable
class CausalCache(KVCache, Protocol):
    """Cache that a target can decode over: it keeps every position."""

    def attend_projected(self, ops: Operations, projection: Projection, heads: Heads, mask: AttentionMask) -> tuple[Array, Any]:
        """Appends a projection's keys and values behind each row's context, and attends; see `Operations.attend_projected`."""
        ...

    def as_held(self, k: Array, v: Array) -> tuple[Array, Array]:
        """Returns keys and values as they are read from the cache after an append: rounded, if its entries have 8 bits."""
        ...


def attend_visible(cache: Any, ops: Operations, q: Array, stop: Array, block_kv: tuple[Array, Array]) -> Array:
    """Attention of all queries over a cache's positions before `stop` `[B]`, and over all of `block_kv`."""
    return cache.attend(ops, q, AttentionMask(cache.visible(stop)[:, None], "full"), block_kv)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class InRows:
    """Cache with keys and values `[B, K, S, D]`."""

    k: Any
    v: Any

    def attend(
        self,
        ops: Operations,
        q: Float[Array, "B T N D"],
        mask: AttentionMask,
        block_kv: tuple[Float[Array, "B K U D"], Float[Array, "B K U D"]] | None = None,
        scores: Scores = PLAIN_SCORES,
    ) -> Float[Array, "B T N D"]:
        return ops.attend(q, KeyValueRows(self.k, self.v), mask, block_kv, scores)

    def visible(self, stop: Int[Array, " B"]) -> Int[Array, " B"]:
        return jnp.minimum(stop, self.k.shape[2])

    def attend_before(
        self,
        ops: Operations,
        q: Float[Array, "B T N D"],
        stop: Int[Array, " B"],
        block_kv: tuple[Float[Array, "B K U D"], Float[Array, "B K U D"]],
    ) -> Float[Array, "B T N D"]:
        return attend_visible(self, ops, q, stop, block_kv)

    def rows(self, first: int | Array, count: int) -> Any:
        return jax.tree.map(lambda part: jax.lax.dynamic_slice_in_dim(part, first, count), self)

    def with_rows(self, first: int | Array, some: Any) -> Any:
        return jax.tree.map(lambda part, rows: jax.lax.dynamic_update_slice_in_dim(part, rows, first, 0), self, some)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Contiguous(InRows):
    """Cache with position p in slot p."""

    def append(
        self,
        ops: Operations,
        k: Float[Array, "B K T D"],
        v: Float[Array, "B K T D"],
        start: Int[Array, " B"],
        count: Int[Array, " B"],
    ) -> "Contiguous":
        return Contiguous(*ops.write(KeyValueRows(self.k, self.v), k, v, start, count))

    def attend_projected(
        self, ops: Operations, projection: Projection, heads: Heads, mask: AttentionMask
    ) -> tuple[Array, "Contiguous"]:
        out, after = ops.attend_projected(ops, projection, heads, KeyValueRows(self.k, self.v), mask)
        return out, Contiguous(*after)

    def as_held(self, k: Array, v: Array) -> tuple[Array, Array]:
        return k, v


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Ring(InRows):
    """Ring buffer with position p in slot p modulo S: it keeps the last S positions."""

    def append(
        self,
        ops: Operations,
        k: Float[Array, "B K T D"],
        v: Float[Array, "B K T D"],
        start: Int[Array, " B"],
        count: Int[Array, " B"],
    ) -> "Ring":
        last = (start + count)[:, None] - 1
        # The position that each slot then holds, as an index into the new entries; negative if it keeps an older one.
        index = last - (last - jnp.arange(self.k.shape[2])[None]) % self.k.shape[2] - start[:, None]

        def write(cached: Array, new: Array) -> Array:
            picked = jnp.take_along_axis(new, jnp.clip(index, 0, new.shape[2] - 1)[:, None, :, None], axis=2)
            return jnp.where((index >= 0)[:, None, :, None], picked, cached)

        return replace(self, k=write(self.k, k), v=write(self.v, v))


@partial(jax.tree_util.register_dataclass, data_fields=["k", "v", "sinks"], meta_fields=["window", "causal"])
@dataclass(frozen=True)
class Sliding(Ring):
    """Ring buffer of a layer with sliding-window attention: a query at position p attends to the positions above `p - window`.

    Attributes:
        causal: the queries of a block attend only to positions of the block up to their own.
        sinks: see `operations.Scores`; not cached, but set when attention is computed.
    """

    window: int
    causal: bool = False
    sinks: Any = None

    def attend_before(
        self,
        ops: Operations,
        q: Float[Array, "B T N D"],
        stop: Int[Array, " B"],
        block_kv: tuple[Float[Array, "B K U D"], Float[Array, "B K U D"]],
    ) -> Float[Array, "B T N D"]:
        last = stop[:, None] - 1
        slots = self.k.shape[2]
        held = last - (last - jnp.arange(slots)[None]) % slots  # negative for slots never written
        positions = stop[:, None] + jnp.arange(q.shape[1])[None]
        seen = (held[:, None] >= 0) & (held[:, None] > positions[:, :, None] - self.window)
        block = jnp.ones((1, q.shape[1], block_kv[0].shape[2]), bool)
        parts = [select.KeyValues(self.k, self.v, seen), select.KeyValues(*block_kv, jnp.tril(block) if self.causal else block)]
        return select.attention_over(q, parts, Scores(sinks=self.sinks))


@partial(jax.tree_util.register_dataclass, data_fields=["pool", "table"], meta_fields=["group"])
@dataclass(frozen=True)
class Paged:
    """Paged cache: a block table maps the positions of a row to pages of a pool that all rows share.

    The caller fills the table. It allocates a row's pages before they are written or read, and lets no row write to a page that
    another row reads. A selection of rows has their rows of the table and the whole pool. The latest pool is the valid one, so
    selected rows must be put back before others are selected.

    Attributes:
        pool: pool made by `Operations.pages`.
        table: int32 `[B, M]`; `UNMAPPED` for columns without a page.
        group: number of the group of layers whose table it is.
    """

    pool: Any
    table: Any
    group: int = 0

    def append(
        self,
        ops: Operations,
        k: Float[Array, "B K T D"],
        v: Float[Array, "B K T D"],
        start: Int[Array, " B"],
        count: Int[Array, " B"],
    ) -> "Paged":
        return replace(self, pool=ops.write(PagedCache(self.pool, self.table), k, v, start, count).pool)

    def attend_projected(
        self, ops: Operations, projection: Projection, heads: Heads, mask: AttentionMask
    ) -> tuple[Array, "Paged"]:
        out, after = ops.attend_projected(ops, projection, heads, PagedCache(self.pool, self.table), mask)
        return out, replace(self, pool=after.pool)

    def attend(
        self,
        ops: Operations,
        q: Float[Array, "B T N D"],
        mask: AttentionMask,
        block_kv: tuple[Float[Array, "B K U D"], Float[Array, "B K U D"]] | None = None,
        scores: Scores = PLAIN_SCORES,
    ) -> Float[Array, "B T N D"]:
        return ops.attend(q, PagedCache(self.pool, self.table), mask, block_kv, scores)

    def as_held(
        self, k: Float[Array, "B K T D"], v: Float[Array, "B K T D"]
    ) -> tuple[Float[Array, "B K T D"], Float[Array, "B K T D"]]:
        if not isinstance(self.pool, KeyValuePages) or not isinstance(self.pool.k, Quantised):
            return k, v
        return dequantise(quantise(k), k.dtype), dequantise(quantise(v), v.dtype)

    def visible(self, stop: Int[Array, " B"]) -> Int[Array, " B"]:
        return jnp.minimum(stop, select.mapped_entries(self.table, self.pool.page_size))

    def attend_before(
        self,
        ops: Operations,
        q: Float[Array, "B T N D"],
        stop: Int[Array, " B"],
        block_kv: tuple[Float[Array, "B K U D"], Float[Array, "B K U D"]],
    ) -> Float[Array, "B T N D"]:
        return attend_visible(self, ops, q, stop, block_kv)

    def rows(self, first: int | Array, count: int) -> "Paged":
        return replace(self, table=jax.lax.dynamic_slice_in_dim(self.table, first, count))

    def with_rows(self, first: int | Array, some: "Paged") -> "Paged":
        table = jax.lax.dynamic_update_slice_in_dim(self.table, some.table, first, 0)
        return replace(self, pool=some.pool, table=table)


def allocate(layers: int, batch: int, kv_heads: int, capacity: int, head_dim: int, dtype: DTypeLike) -> tuple[Contiguous, ...]:
    """Returns empty caches of `capacity` positions, one for each layer."""
    shape = (batch, kv_heads, capacity, head_dim)
    return tuple(Contiguous(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(layers))


def allocate_rings(
    layers: int, batch: int, kv_heads: int, capacity: int, head_dim: int, dtype: DTypeLike, window: int
) -> tuple[Ring, ...]:
    """Returns empty ring buffers for the last `window` positions, one for each layer."""
    return tuple(Ring(one.k, one.v) for one in allocate(layers, batch, kv_heads, min(window, capacity), head_dim, dtype))


PAGE_MULTIPLE = 16
"""Divisor of page sizes: the CPU kernels' panels of keys and a TPU's tiles have this length."""


def allocate_paged(
    ops: Operations,
    layers: int,
    table: np.ndarray | None,
    pages: int,
    kv_heads: int,
    page_size: int,
    head_dim: int,
    dtype: DTypeLike,
    devices: int = 1,
) -> tuple[Paged, ...]:
    """Returns empty pools of `pages` pages, one for each layer, all with this table; each layer has its own copy, for donation.

    Args:
        ops: operations that will use the pools, and lay out their pages.
        table: int `[B, M]`: row b's positions from `i * page_size` on lie in page `table[b, i]`, or nowhere if that is
            `UNMAPPED`. None if each program gets its own table (`layout.rows_of`).
        page_size: positions of a page.
        devices: number of devices that share the heads.

    Raises:
        ValueError: a page size that is not a multiple of 16, or a table with invalid page numbers.
    """
    if page_size < 1 or page_size % PAGE_MULTIPLE:
        raise ValueError(f"expected a page size that is a multiple of {PAGE_MULTIPLE}, found {page_size}")

    def pools() -> Iterator[Pool]:
        return (ops.pages(pages, kv_heads, page_size, head_dim, dtype, devices) for _ in range(layers))

    if table is None:
        return tuple(Paged(pool, None) for pool in pools())
    if table.ndim != 2 or not np.issubdtype(table.dtype, np.integer):
        raise ValueError(f"expected a table of integers [rows, pages], found {table.dtype} {list(table.shape)}")
    wrong = table[(table < UNMAPPED) | (table >= pages)]
    if wrong.size:
        raise ValueError(f"expected pages from 0 to {pages - 1}, or {UNMAPPED} for none, found {wrong[0]}")
    return tuple(Paged(pool, jnp.array(table, jnp.int32)) for pool in pools())
