"""Key/value caches of a fixed size, written in place.

One `KVCache` holds the keys and values of one layer, for all rows of a batch, in one of several layouts. What lies at or beyond
a row's length is stale: masked until a later write replaces it, so a rejected draft needs no clean-up.

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
from tilewright.kernels.operations import UNMAPPED, Heads, Operations, Pool, Projection, Scores


@runtime_checkable
class KVCache(Protocol):
    """Keys and values of one layer, whatever their layout. A pytree."""

    def append(self, ops: Operations, k: Array, v: Array, start: Array, count: Array) -> Any:
        """The cache with the first `count` `[B]` of each row's new entries `[B, K, T, D]` at its positions from `start` on.

        Nothing else is written: a row of count 0 stays as it is.
        """
        ...

    def attend(self, ops: Operations, q: Array, lengths: Array, own: tuple[Array, Array] | None = None) -> Array:
        """Attention `[B, T, N, D]` of queries over the first `lengths` `[B, T]` entries, and all of `own` `[B, K, T, D]`."""
        ...

    def visible(self, stop: Array) -> Array:
        """Number of entries, from the first, that hold a position before `stop`, `[B]`."""
        ...

    def attend_before(self, ops: Operations, q: Array, stop: Array, own: tuple[Array, Array]) -> Array:
        """Attention of queries at `stop` `[B]` and behind it over what it holds before `stop`, and over all of `own`."""
        ...

    def rows(self, first: int | Array, count: int) -> Any:
        """Caches of `count` rows, from the `first` on."""
        ...

    def with_rows(self, first: int | Array, some: Any) -> Any:
        """The cache with these rows replaced."""
        ...


@runtime_checkable
class CausalCache(KVCache, Protocol):
    """A cache that a target can decode over: one that keeps every position."""

    def append_attend(
        self, ops: Operations, projection: Projection, heads: Heads, start: Array, count: Array
    ) -> tuple[Array, Any]:
        """Appends a projection's keys and values; its query at `start + t` sees all entries up to its own, `[B, T, N * D]`."""
        ...


def attend_visible(cache: Any, ops: Operations, q: Array, stop: Array, own: tuple[Array, Array]) -> Array:
    """Attention of all queries over what a cache holds before `stop` `[B]`, and over all of `own`."""
    return cache.attend(ops, q, jnp.broadcast_to(cache.visible(stop)[:, None], q.shape[:2]), own)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class InRows:
    """Keys and values `[B, K, S, D]`."""

    k: Any
    v: Any

    def attend(
        self,
        ops: Operations,
        q: Float[Array, "B T N D"],
        lengths: Int[Array, "B T"],
        own: tuple[Float[Array, "B K U D"], Float[Array, "B K U D"]] | None = None,
    ) -> Float[Array, "B T N D"]:
        return ops.prefix_attention(q, self.k, self.v, lengths, own)

    def visible(self, stop: Int[Array, " B"]) -> Int[Array, " B"]:
        return jnp.minimum(stop, self.k.shape[2])

    def attend_before(
        self,
        ops: Operations,
        q: Float[Array, "B T N D"],
        stop: Int[Array, " B"],
        own: tuple[Float[Array, "B K U D"], Float[Array, "B K U D"]],
    ) -> Float[Array, "B T N D"]:
        return attend_visible(self, ops, q, stop, own)

    def rows(self, first: int | Array, count: int) -> Any:
        return jax.tree.map(lambda part: jax.lax.dynamic_slice_in_dim(part, first, count), self)

    def with_rows(self, first: int | Array, some: Any) -> Any:
        return jax.tree.map(lambda part, rows: jax.lax.dynamic_update_slice_in_dim(part, rows, first, 0), self, some)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Contiguous(InRows):
    """Position p lies in slot p."""

    def append(
        self,
        ops: Operations,
        k: Float[Array, "B K T D"],
        v: Float[Array, "B K T D"],
        start: Int[Array, " B"],
        count: Int[Array, " B"],
    ) -> "Contiguous":
        return Contiguous(ops.append(self.k, k, start, count), ops.append(self.v, v, start, count))

    def append_attend(
        self, ops: Operations, projection: Projection, heads: Heads, start: Int[Array, " B"], count: Int[Array, " B"]
    ) -> tuple[Array, "Contiguous"]:
        out, k, v = ops.append_attend(projection, heads, self.k, self.v, start, count)
        return out, Contiguous(k, v)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Ring(InRows):
    """Position p lies in slot p modulo S: only the last S positions stay, in no particular order."""

    def append(
        self,
        ops: Operations,
        k: Float[Array, "B K T D"],
        v: Float[Array, "B K T D"],
        start: Int[Array, " B"],
        count: Int[Array, " B"],
    ) -> "Ring":
        last = (start + count)[:, None] - 1
        # The position that each slot holds afterwards, as an index into the new entries; negative where it holds an older one.
        index = last - (last - jnp.arange(self.k.shape[2])[None]) % self.k.shape[2] - start[:, None]

        def put(cached: Array, new: Array) -> Array:
            picked = jnp.take_along_axis(new, jnp.clip(index, 0, new.shape[2] - 1)[:, None, :, None], axis=2)
            return jnp.where((index >= 0)[:, None, :, None], picked, cached)

        return replace(self, k=put(self.k, k), v=put(self.v, v))


@partial(jax.tree_util.register_dataclass, data_fields=["k", "v", "sinks"], meta_fields=["window", "causal"])
@dataclass(frozen=True)
class Sliding(Ring):
    """A ring for a layer whose query at position p sees the positions above `p - window` alone: each row of a block its own.

    Attributes:
        causal: the queries of a block see only those of its positions that are not behind their own.
        sinks: see `operations.Scores`; no part of what is kept, but set where attention is computed.
    """

    window: int
    causal: bool = False
    sinks: Any = None

    def attend_before(
        self,
        ops: Operations,
        q: Float[Array, "B T N D"],
        stop: Int[Array, " B"],
        own: tuple[Float[Array, "B K U D"], Float[Array, "B K U D"]],
    ) -> Float[Array, "B T N D"]:
        last = stop[:, None] - 1
        slots = self.k.shape[2]
        held = last - (last - jnp.arange(slots)[None]) % slots  # negative where there was no such position yet
        positions = stop[:, None] + jnp.arange(q.shape[1])[None]
        seen = (held[:, None] >= 0) & (held[:, None] > positions[:, :, None] - self.window)
        block = jnp.ones((1, q.shape[1], own[0].shape[2]), bool)
        parts = [select.KeyValues(self.k, self.v, seen), select.KeyValues(*own, jnp.tril(block) if self.causal else block)]
        return select.attention_over(q, parts, Scores(sinks=self.sinks))


@partial(jax.tree_util.register_dataclass, data_fields=["pool", "table"], meta_fields=["group"])
@dataclass(frozen=True)
class Paged:
    """Position p of a row lies in a page that a table gives to the row for it; the pages are a pool that all rows share.

    Whoever fills the table sees to it that a row's pages are there before they are written or seen, and that no row writes to a
    page that another one reads. Some rows of it are those of the table, beside the whole pool: of rows that were taken out the
    latest pool is what counts, so they are put back before the next ones are taken.

    Attributes:
        pool: what `Operations.pages` made.
        table: int32 `[B, M]`; `UNMAPPED` where a row has no page.
        group: of layers, whose table it is.
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
        return replace(self, pool=ops.paged_append(self.pool, self.table, k, v, start, count))

    def append_attend(
        self, ops: Operations, projection: Projection, heads: Heads, start: Int[Array, " B"], count: Int[Array, " B"]
    ) -> tuple[Array, "Paged"]:
        table = self.table
        window = heads.scores.window
        if window is not None:
            table, start = seen_columns(table, start, window, heads.rope[0].shape[1], self.pool.page_size)
        out, pool = ops.paged_append_attend(projection, heads, self.pool, table, start, count)
        return out, replace(self, pool=pool)

    def attend(
        self,
        ops: Operations,
        q: Float[Array, "B T N D"],
        lengths: Int[Array, "B T"],
        own: tuple[Float[Array, "B K U D"], Float[Array, "B K U D"]] | None = None,
    ) -> Float[Array, "B T N D"]:
        return ops.paged_attention(q, self.pool, self.table, lengths, own)

    def visible(self, stop: Int[Array, " B"]) -> Int[Array, " B"]:
        return jnp.minimum(stop, select.held(self.table, self.pool.page_size))

    def attend_before(
        self,
        ops: Operations,
        q: Float[Array, "B T N D"],
        stop: Int[Array, " B"],
        own: tuple[Float[Array, "B K U D"], Float[Array, "B K U D"]],
    ) -> Float[Array, "B T N D"]:
        return attend_visible(self, ops, q, stop, own)

    def rows(self, first: int | Array, count: int) -> "Paged":
        return replace(self, table=jax.lax.dynamic_slice_in_dim(self.table, first, count))

    def with_rows(self, first: int | Array, some: "Paged") -> "Paged":
        table = jax.lax.dynamic_update_slice_in_dim(self.table, some.table, first, 0)
        return replace(self, pool=some.pool, table=table)


def seen_columns(
    table: Int[Array, "B M"], start: Int[Array, " B"], window: int, size: int, page_size: int
) -> tuple[Int[Array, "B C"], Int[Array, " B"]]:
    """The columns that queries at `size` positions from `start` on see through a window, and where they begin there.

    So many columns as any row may need: what lies before a row's window is not read, and may have no page.
    """
    columns = min(table.shape[1], (window + size - 2) // page_size + 2)
    first = jnp.maximum(start - window + 1, 0) // page_size
    at = first[:, None] + jnp.arange(columns)[None]
    found = jnp.take_along_axis(table, jnp.minimum(at, table.shape[1] - 1), axis=1)
    return jnp.where(at < table.shape[1], found, UNMAPPED), start - first * page_size


def allocate(layers: int, batch: int, kv_heads: int, capacity: int, head_dim: int, dtype: DTypeLike) -> tuple[Contiguous, ...]:
    """Empty caches of `capacity` positions, one for each layer."""
    shape = (batch, kv_heads, capacity, head_dim)
    return tuple(Contiguous(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(layers))


def allocate_rings(
    layers: int, batch: int, kv_heads: int, capacity: int, head_dim: int, dtype: DTypeLike, window: int
) -> tuple[Ring, ...]:
    """Empty caches for a context that keeps its last `window` positions alone."""
    return tuple(Ring(one.k, one.v) for one in allocate(layers, batch, kv_heads, min(window, capacity), head_dim, dtype))


PAGE_MULTIPLE = 16
"""Page sizes are multiples of this: of the panels that the CPU kernels read keys in, and of a TPU's tiles."""


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
    """Empty pools of `pages` pages, one for each layer, all with this table; each layer has its own copy, for donation.

    Args:
        ops: what will compute over them, which lays pages out.
        table: int `[B, M]`: row b's positions from `i * page_size` on lie in page `table[b, i]`; `UNMAPPED` where it has none.
            None where each program is given one (`layout.rows_of`).
        page_size: positions of a page.
        devices: among which the heads are divided.

    Raises:
        ValueError: a page size that is no multiple of 16, or a table that names pages which are not there.
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
