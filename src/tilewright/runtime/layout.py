"""Where the caches of rows lie: in pages of one pool, which a table gives to rows."""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Int

from tilewright.kernels.operations import Operations
from tilewright.runtime import cache
from tilewright.runtime.cache import KVCache

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
        """Where positions lie among all entries of all pages; below 0 where a row has no page."""
        size = self.bits.shape[1]
        page = jnp.minimum(positions // size, self.table.shape[1] - 1)
        at = jnp.take_along_axis(self.table, page, axis=1)
        inside = (at >= 0) & (positions < self.table.shape[1] * size)
        return jnp.where(inside, at * size + positions % size, -1)


@dataclass(frozen=True)
class Layout:
    """Rows that share `pages` pages of `page_size` positions, by a table that each program is given.

    What keeps a window of positions alone stays in rows.

    Attributes:
        batch: rows.
        capacity: positions of a row, at most.
    """

    batch: int
    capacity: int
    pages: int
    page_size: int

    @staticmethod
    def full(batch: int, capacity: int) -> "Layout":
        """One whose pages hold every row to its end; capacity is a multiple of `cache.PAGE_MULTIPLE`."""
        size = math.gcd(capacity, LARGEST_PAGE)
        return Layout(batch, capacity, batch * capacity // size, size)

    def caches(
        self, ops: Operations, layers: int, kv_heads: int, head_dim: int, dtype: DTypeLike, window: int | None = None,
        devices: int = 1,
    ) -> tuple[KVCache, ...]:  # fmt: skip
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


PAGED = (cache.Paged, AuxiliaryBuffer)


def is_paged(part: Any) -> bool:
    """True if a part of a state lies in pages, which all rows share; every other array has the rows as its first dim."""
    return isinstance(part, PAGED)


def rows_of(state: Any, rows: Int[Array, " n"], table: Int[Array, "n M"]) -> Any:
    """The state of some rows, whose pages a table names; the pages are the whole pool."""
    return jax.tree.map(lambda part: replace(part, table=table) if is_paged(part) else part[rows], state, is_leaf=is_paged)


def with_rows(state: Any, some: Any, rows: Int[Array, " n"]) -> Any:
    """The state in which these rows, all different, are what `some` says."""

    def put(old: Any, new: Any) -> Any:
        return replace(new, table=None) if is_paged(old) else old.at[rows].set(new, unique_indices=True)

    return jax.tree.map(put, state, some, is_leaf=is_paged)
