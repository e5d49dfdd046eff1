"""Layout of the rows' caches: pages of a shared pool, which block tables map to rows."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Int

from tilewright.kernels.operations import Operations
from tilewright.models.config import HeadSizes
from tilewright.runtime import cache
from tilewright.runtime.cache import KVCache

ROUNDS_AHEAD = 4
"""Rounds of a dispatch for which rows always have pages in layers with a window."""
LARGEST_PAGE = 64
"""Default positions of a page."""


@partial(jax.tree_util.register_dataclass, data_fields=["bits", "table"], meta_fields=["dtype"])
@dataclass(frozen=True)
class AuxiliaryBuffer:
    """Buffer of auxiliary vectors, one for each position, in pages `[P, E, F]` with a block table `[B, M]` (`cache.Paged`).

    Attributes:
        bits: the vectors' bits as unsigned integers: XLA:CPU would convert a whole bfloat16 array to read a few entries.
    """

    bits: Any
    table: Any
    dtype: Any
    group: ClassVar[int] = 0

    @staticmethod
    def empty(pages: int, page_size: int, size: int, dtype: DTypeLike) -> "AuxiliaryBuffer":
        unsigned = jnp.dtype(f"uint{8 * jnp.dtype(dtype).itemsize}")
        return AuxiliaryBuffer(jnp.zeros((pages, page_size, size), unsigned), None, jnp.dtype(dtype))

    def append(self, ops: Operations, new: Array, start: Int[Array, " B"], count: Int[Array, " B"]) -> "AuxiliaryBuffer":
        """Writes the first `count` of each row's new vectors `[B, T, F]` to its positions from `start` on."""
        size = new.shape[-1]
        slot = jnp.arange(new.shape[1])[None]
        entries = jnp.where(slot < count[:, None], self.entries(start[:, None] + slot), -1)
        bits = jax.lax.bitcast_convert_type(new.reshape(-1, size).astype(self.dtype), self.bits.dtype)
        return replace(self, bits=ops.scatter_rows(self.bits, entries.reshape(-1), bits))

    def at(self, ops: Operations, positions: Int[Array, "B T"]) -> Array:
        """Returns the vectors at these positions, `[B, T, F]`; undefined at positions without a page."""
        found = jnp.take(self.bits.reshape(-1, self.bits.shape[-1]), jnp.maximum(self.entries(positions), 0), axis=0)
        return jax.lax.bitcast_convert_type(found, self.dtype)

    def entries(self, positions: Int[Array, "B T"]) -> Int[Array, "B T"]:
        """Returns the indices of positions among all entries of all pages; -1 where a row has no page."""
        size = self.bits.shape[1]
        page = jnp.minimum(positions // size, self.table.shape[1] - 1)
        at = jnp.take_along_axis(self.table, page, axis=1)
        inside = (at >= 0) & (positions < self.table.shape[1] * size)
        return jnp.where(inside, at * size + positions % size, -1)


class WindowPages(NamedTuple):
    """Number of pages of a group of layers with a window."""

    window: int
    pages: int


@dataclass(frozen=True)
class Layout:
    """Rows that share pages of `page_size` positions. Each program gets one block table for each group of layers.

    Drafters' contexts with a window are not paged.

    Attributes:
        batch: number of rows.
        capacity: the most positions of a row.
        pages: number of pages of the group of layers without a window.
        windows: the other groups.
        snapshots: number of snapshots of the target's states outside of pages, in rows behind those of the batch.
    """

    batch: int
    capacity: int
    pages: int
    page_size: int
    windows: tuple[WindowPages, ...] = ()
    snapshots: int = 0

    @staticmethod
    def full(batch: int, capacity: int, windows: Iterable[int | None] = (), ahead: int = 0) -> "Layout":
        """Returns a layout with pages for all positions of all rows; capacity is a multiple of `cache.PAGE_MULTIPLE`.

        Args:
            windows: windows of the target's layers.
            ahead: see `window_pages`.
        """
        size = math.gcd(capacity, LARGEST_PAGE)
        return Layout(batch, capacity, batch * capacity // size, size).with_windows(windows, ahead)

    def with_windows(self, windows: Iterable[int | None], ahead: int) -> "Layout":
        """Adds a group for each window of the layers, with pages for all rows, at most those of the first group."""
        found = sorted({window for window in windows if window is not None})
        most = [self.batch * window_pages(window, ahead, self.page_size, self.capacity) for window in found]
        groups = [WindowPages(window, min(self.pages, pages)) for window, pages in zip(found, most, strict=True)]
        return replace(self, windows=tuple(groups))

    @property
    def groups(self) -> int:
        """Number of groups of layers."""
        return 1 + len(self.windows)

    @property
    def state_rows(self) -> int:
        """Number of rows of states outside of pages."""
        return self.batch + self.snapshots

    def target_caches(
        self, ops: Operations, layers: Iterable[tuple[int | None, HeadSizes]], dtype: DTypeLike, devices: int = 1
    ) -> tuple[KVCache, ...]:
        """Returns empty caches of layers with these windows and heads, each in the pages of its group."""
        groups = {None: (0, self.pages)} | {each.window: (n, each.pages) for n, each in enumerate(self.windows, 1)}

        def allocate(window: int | None, heads: HeadSizes) -> KVCache:
            group, pages = groups[window]
            (paged,) = cache.allocate_paged(ops, 1, None, pages, heads.kv_heads, self.page_size, heads.head_dim, dtype, devices)
            return replace(paged, group=group)

        return tuple(allocate(*layer) for layer in layers)

    def caches(
        self,
        ops: Operations,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: DTypeLike,
        window: int | None = None,
        devices: int = 1,
    ) -> tuple[KVCache, ...]:
        """Returns empty caches, one for each layer; ring buffers of the last positions if there is a window.

        Args:
            ops: operations that will use the caches.
            devices: number of devices that share the heads.
        """
        if window is not None:
            return cache.allocate_rings(layers, self.batch, kv_heads, self.capacity, head_dim, dtype, window)
        return cache.allocate_paged(ops, layers, None, self.pages, kv_heads, self.page_size, head_dim, dtype, devices)

    def auxiliary(self, size: int, dtype: DTypeLike) -> Any:
        """Returns an empty buffer for a vector of `size` entries at each position."""
        return AuxiliaryBuffer.empty(self.pages, self.page_size, size, dtype)


def look_ahead(chunk: int, widest: int) -> int:
    """Returns how many positions are written ahead of a row's oldest query: a prefill chunk, or the rounds of some dispatches.

    If the pages of a window hold fewer positions than a dispatch would write, the dispatch runs fewer rounds.
    """
    return 2 * max(chunk, ROUNDS_AHEAD * widest)


def window_pages(window: int, ahead: int, page_size: int, capacity: int) -> int:
    """Returns the most pages that a row holds in layers with a window.

    Args:
        ahead: positions that are written behind the last position that a query may still attend to, and those before the window
            that a drafter reads.
    """
    return min((window + ahead) // page_size + 3, -(-capacity // page_size))


PAGED = (cache.Paged, AuxiliaryBuffer)


def is_paged(part: Any) -> bool:
    """True if a part of a state is in pages that all rows share; every other array has the rows as its first dim."""
    return isinstance(part, PAGED)


def rows_of(state: Any, rows: Int[Array, " n"], tables: Int[Array, "G n M"]) -> Any:
    """Selects some rows of a state. The tables, one for each group, name their pages; the pages are the whole pool."""

    def select(part: Any) -> Any:
        return replace(part, table=tables[part.group]) if is_paged(part) else part[rows]

    return jax.tree.map(select, state, is_leaf=is_paged)


def with_rows(state: Any, some: Any, rows: Int[Array, " n"]) -> Any:
    """Writes rows, which are all different, back to a state."""

    def write(old: Any, new: Any) -> Any:
        return replace(new, table=None) if is_paged(old) else old.at[rows].set(new, unique_indices=True)

    return jax.tree.map(write, state, some, is_leaf=is_paged)


def restore_states(caches: Any, some: Any, rows: Int[Array, " n"]) -> Any:
    """Returns the caches of some rows, with states outside of pages replaced by those of `rows`; a row below 0 replaces none.

    Args:
        caches: caches of all rows.
        some: caches of the selected rows.
    """

    def restore(whole: Any, part: Any) -> Any:
        if is_paged(whole):
            return part
        return jnp.where((rows >= 0).reshape(-1, *[1] * (part.ndim - 1)), whole[jnp.maximum(rows, 0)], part)

    return jax.tree.map(restore, caches, some, is_leaf=is_paged)


def save_states(caches: Any, some: Any, rows: Int[Array, " n"]) -> Any:
    """Copies the states of `some` rows outside of pages to `rows` of the caches; a row below 0 is not copied."""

    def keep(whole: Any, part: Any) -> Any:
        return whole if is_paged(whole) else whole.at[jnp.where(rows < 0, len(whole), rows)].set(part, mode="drop")

    return jax.tree.map(keep, caches, some, is_leaf=is_paged)
