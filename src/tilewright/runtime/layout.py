"""Where the caches of rows lie: in pages of one pool, which a table gives to rows."""

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
from tilewright.runtime import cache
from tilewright.runtime.cache import KVCache

ROUNDS_AHEAD = 4
"""Rounds of a dispatch for which rows always have pages of their layers with a window."""
LARGEST_PAGE = 64
"""Positions of a page, unless something else is asked for."""


@partial(jax.tree_util.register_dataclass, data_fields=["bits", "table"], meta_fields=["dtype"])
@dataclass(frozen=True)
class AuxiliaryBuffer:
    """Auxiliary buffer: a vector for each position, in pages `[P, E, F]`, which a table `[B, M]` gives to rows (`cache.Paged`).

    Attributes:
        bits: the vectors' bits, as unsigned integers: XLA:CPU would convert all that is bfloat16 to write a few entries of it.
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
        """With the first `count` of each row's new vectors `[B, T, F]` at its positions from `start` on."""
        size = new.shape[-1]
        slot = jnp.arange(new.shape[1])[None]
        entries = jnp.where(slot < count[:, None], self.entries(start[:, None] + slot), -1)
        flat = self.bits.reshape(-1, size)
        wanted = jnp.where(entries < 0, flat.shape[0], entries).reshape(-1)  # beyond the end: dropped
        bits = jax.lax.bitcast_convert_type(new.reshape(-1, size).astype(self.dtype), flat.dtype)
        return replace(self, bits=flat.at[wanted].set(bits, mode="drop").reshape(self.bits.shape))

    def at(self, ops: Operations, positions: Int[Array, "B T"]) -> Array:
        """The vectors at these positions, `[B, T, F]`; of a position that there is not, any."""
        found = jnp.take(self.bits.reshape(-1, self.bits.shape[-1]), jnp.maximum(self.entries(positions), 0), axis=0)
        return jax.lax.bitcast_convert_type(found, self.dtype)

    def entries(self, positions: Int[Array, "B T"]) -> Int[Array, "B T"]:
        """Places of positions among all entries of all pages; below 0 where a row has no page."""
        size = self.bits.shape[1]
        page = jnp.minimum(positions // size, self.table.shape[1] - 1)
        at = jnp.take_along_axis(self.table, page, axis=1)
        inside = (at >= 0) & (positions < self.table.shape[1] * size)
        return jnp.where(inside, at * size + positions % size, -1)


class WindowPages(NamedTuple):
    """A group of layers that see a window of positions, and its pages."""

    window: int
    pages: int


@dataclass(frozen=True)
class Layout:
    """Rows that share pages of `page_size` positions, by tables that each program is given: one for each group of layers.

    What keeps a window of a drafter's positions alone stays in rows.

    Attributes:
        batch: rows.
        capacity: positions of a row, at most.
        pages: of the group of layers that see every position.
        windows: the other groups.
        snapshots: of the target's states that lie in no page, which have rows of their own behind those of the batch.
    """

    batch: int
    capacity: int
    pages: int
    page_size: int
    windows: tuple[WindowPages, ...] = ()
    snapshots: int = 0

    @staticmethod
    def full(batch: int, capacity: int, windows: Iterable[int | None] = (), ahead: int = 0) -> "Layout":
        """One whose pages hold every row to its end; capacity is a multiple of `cache.PAGE_MULTIPLE`.

        Args:
            windows: of the target's layers.
            ahead: see `window_pages`.
        """
        size = math.gcd(capacity, LARGEST_PAGE)
        return Layout(batch, capacity, batch * capacity // size, size).with_windows(windows, ahead)

    def with_windows(self, windows: Iterable[int | None], ahead: int) -> "Layout":
        """With a group for each window that some layers have: pages for all rows, or as many as there are of the others."""
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
        """Rows of states that lie in no page."""
        return self.batch + self.snapshots

    def target_caches(
        self, ops: Operations, windows: Iterable[int | None], kv_heads: int, head_dim: int, dtype: DTypeLike, devices: int = 1
    ) -> tuple[KVCache, ...]:
        """Empty caches of layers with these windows, each in the pages of its group."""
        groups = {None: (0, self.pages)} | {each.window: (n, each.pages) for n, each in enumerate(self.windows, 1)}

        def of_layer(window: int | None) -> KVCache:
            group, pages = groups[window]
            (one,) = cache.allocate_paged(ops, 1, None, pages, kv_heads, self.page_size, head_dim, dtype, devices)
            return replace(one, group=group)

        return tuple(map(of_layer, windows))

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
        """Empty caches, one for each layer; with a window such as keep that many last positions alone.

        Args:
            ops: what will compute over them.
            devices: among which the heads are divided.
        """
        if window is not None:
            return cache.allocate_rings(layers, self.batch, kv_heads, self.capacity, head_dim, dtype, window)
        return cache.allocate_paged(ops, layers, None, self.pages, kv_heads, self.page_size, head_dim, dtype, devices)

    def auxiliary(self, size: int, dtype: DTypeLike) -> Any:
        """Room for a vector of `size` at each position."""
        return AuxiliaryBuffer.empty(self.pages, self.page_size, size, dtype)


def look_ahead(chunk: int, widest: int) -> int:
    """Positions that are written ahead of a row's oldest query: a chunk of a prompt, or the rounds of a few dispatches.

    Where the pages behind a window are fewer than more rounds take, a dispatch has fewer.
    """
    return 2 * max(chunk, ROUNDS_AHEAD * widest)


def window_pages(window: int, ahead: int, page_size: int, capacity: int) -> int:
    """Pages that a row holds of layers with a window, at most.

    Args:
        ahead: positions that are written behind the last one that may still be asked for.
    """
    return min((window + ahead) // page_size + 3, -(-capacity // page_size))


PAGED = (cache.Paged, AuxiliaryBuffer)


def is_paged(part: Any) -> bool:
    """True if a part of a state lies in pages, which all rows share; every other array has the rows as its first dim."""
    return isinstance(part, PAGED)


def rows_of(state: Any, rows: Int[Array, " n"], tables: Int[Array, "G n M"]) -> Any:
    """The state of some rows, whose pages tables name, one for each group; the pages are the whole pool."""

    def of(part: Any) -> Any:
        return replace(part, table=tables[part.group]) if is_paged(part) else part[rows]

    return jax.tree.map(of, state, is_leaf=is_paged)


def with_rows(state: Any, some: Any, rows: Int[Array, " n"]) -> Any:
    """The state in which these rows, all different, are what `some` says."""

    def put(old: Any, new: Any) -> Any:
        return replace(new, table=None) if is_paged(old) else old.at[rows].set(new, unique_indices=True)

    return jax.tree.map(put, state, some, is_leaf=is_paged)


def restored(caches: Any, own: Any, rows: Int[Array, " n"]) -> Any:
    """The caches of some rows, of which states that lie in no page are those of other rows, where these are not below 0.

    Args:
        caches: of all rows.
        own: of these.
    """

    def of(whole: Any, own: Any) -> Any:
        if is_paged(whole):
            return own
        return jnp.where((rows >= 0).reshape(-1, *[1] * (own.ndim - 1)), whole[jnp.maximum(rows, 0)], own)

    return jax.tree.map(of, caches, own, is_leaf=is_paged)


def kept(caches: Any, own: Any, rows: Int[Array, " n"]) -> Any:
    """The caches in which these rows' states that lie in no page are what `own` says; those below 0 go nowhere."""

    def put(whole: Any, own: Any) -> Any:
        return whole if is_paged(whole) else whole.at[jnp.where(rows < 0, len(whole), rows)].set(own, mode="drop")

    return jax.tree.map(put, caches, own, is_leaf=is_paged)
