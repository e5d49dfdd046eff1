"""Where the caches of a batch lie: each row in memory of its own, or all rows in pages of one pool."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Int

from tilewright.decode import cache
from tilewright.decode.cache import KVCache
from tilewright.kernels.operations import Operations


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Aside:
    """Vectors `[B, 1, S, F]` that are set aside for each position of each row."""

    rows: Any

    def append(self, ops: Operations, new: Array, start: Int[Array, " B"], count: Int[Array, " B"]) -> "Aside":
        """With the first `count` of each row's new vectors `[B, T, F]` at its positions from `start` on."""
        return Aside(ops.append(self.rows, new[:, None], start, count))

    def at(self, ops: Operations, positions: Int[Array, "B T"]) -> Array:
        """The vectors at these positions, `[B, T, F]`; of a position that there is not, any."""
        batch, _, capacity, size = self.rows.shape
        entries = jnp.arange(batch)[:, None] * capacity + jnp.minimum(positions, capacity - 1)
        return ops.take(self.rows.reshape(-1, size), entries)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedAside:
    """The same in pages `[P, E, F]`, which a table `[B, M]` gives to rows as `cache.Paged` has it."""

    pages: Any
    table: Any

    def append(self, ops: Operations, new: Array, start: Int[Array, " B"], count: Int[Array, " B"]) -> "PagedAside":
        size = new.shape[-1]
        slot = jnp.arange(new.shape[1])[None]
        entries = jnp.where(slot < count[:, None], self.entries(start[:, None] + slot), -1)
        flat = self.pages.reshape(-1, size)
        wanted = jnp.where(entries < 0, flat.shape[0], entries).reshape(-1)  # beyond the end: dropped
        kept = flat.at[wanted].set(new.reshape(-1, size).astype(flat.dtype), mode="drop")
        return replace(self, pages=kept.reshape(self.pages.shape))

    def at(self, ops: Operations, positions: Int[Array, "B T"]) -> Array:
        flat = self.pages.reshape(-1, self.pages.shape[-1])
        return ops.take(flat, jnp.maximum(self.entries(positions), 0))

    def entries(self, positions: Int[Array, "B T"]) -> Int[Array, "B T"]:
        """Where positions lie among all entries of all pages; below 0 where a row has no page."""
        size = self.pages.shape[1]
        page = jnp.minimum(positions // size, self.table.shape[1] - 1)
        at = jnp.take_along_axis(self.table, page, axis=1)
        inside = (at >= 0) & (positions < self.table.shape[1] * size)
        return jnp.where(inside, at * size + positions % size, -1)


@dataclass(frozen=True)
class Layout:
    """Each row has room for `capacity` positions of its own."""

    batch: int
    capacity: int

    def caches(
        self, ops: Operations, layers: int, kv_heads: int, head_dim: int, dtype: DTypeLike, window: int | None = None
    ) -> tuple[KVCache, ...]:
        """Empty caches, one for each layer; with a window such as keep that many last positions alone.

        Args:
            ops: what will compute over them.
        """
        return cache.allocate_windows(layers, self.batch, kv_heads, self.capacity, head_dim, dtype, window)

    def aside(self, size: int, dtype: DTypeLike) -> Any:
        """Room for a vector of `size` at each position."""
        return Aside(jnp.zeros((self.batch, 1, self.capacity, size), dtype))


@dataclass(frozen=True)
class PagedLayout(Layout):
    """All rows share `pages` pages of `page_size` positions, by a table that each program is given (`with_table`).

    What keeps a window alone stays in rows.
    """

    pages: int
    page_size: int

    def caches(
        self, ops: Operations, layers: int, kv_heads: int, head_dim: int, dtype: DTypeLike, window: int | None = None
    ) -> tuple[KVCache, ...]:
        if window is not None:
            return super().caches(ops, layers, kv_heads, head_dim, dtype, window)
        return cache.allocate_paged(ops, layers, None, self.pages, kv_heads, self.page_size, head_dim, dtype)

    def aside(self, size: int, dtype: DTypeLike) -> Any:
        return PagedAside(jnp.zeros((self.pages, self.page_size, size), dtype), None)


PAGED = (cache.Paged, PagedAside)


def is_paged(part: Any) -> bool:
    """Whether a part of a state lies in pages, which all rows share; every other array has the rows as its first dim."""
    return isinstance(part, PAGED)


def rows_of(state: Any, rows: Int[Array, " n"], table: Int[Array, "n M"]) -> Any:
    """The state of some rows, whose pages a table names; the pages are the whole pool."""
    return jax.tree.map(lambda part: replace(part, table=table) if is_paged(part) else part[rows], state, is_leaf=is_paged)


def with_rows(state: Any, some: Any, rows: Int[Array, " n"]) -> Any:
    """The state in which these rows, all different, are what `some` says."""

    def put(old: Any, new: Any) -> Any:
        return replace(new, table=None) if is_paged(old) else old.at[rows].set(new, unique_indices=True)

    return jax.tree.map(put, state, some, is_leaf=is_paged)
