"""Cache writes compiled by XLA, for any device; also writes into other buffers of rows.

Legend: B rows of a batch, T new entries, S entries of a cache, K key/value heads, D head size.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Int, Shaped

from tilewright.kernels.operations import KeyValueRows, PagedCache
from tilewright.kernels.paged import xla as paged


def write_buffer(
    buffer: Shaped[Array, "B S *rest"], new: Shaped[Array, "B T *rest"], start: Int[Array, " B"], count: Int[Array, " B"]
) -> Shaped[Array, "B S *rest"]:
    """Writes the first `count` of each row's new entries at its entry `start`; `start + count` must not exceed S."""
    return write_along(1, buffer, new, start, count)


def write(
    cache: Any, k: Shaped[Array, "B K T D"], v: Shaped[Array, "B K T D"], start: Int[Array, " B"], counts: Int[Array, " B"]
) -> Any:
    """Writes new entries of each row into a cache, `KeyValueRows` or a `PagedCache`; see `Operations.write`."""
    if isinstance(cache, PagedCache):
        return cache._replace(pool=paged.write(cache.pool, cache.table, k, v, start, counts))
    return KeyValueRows(*(write_along(2, held, new, start, counts) for held, new in zip(cache, (k, v), strict=True)))


def write_along(dim: int, buffer: Array, new: Array, start: Array, count: Array) -> Array:
    """Writes entries along a dim; see `write_buffer`.

    For each row, a window of T entries is read, updated and written back in place, because a scatter runs entry by entry on a
    CPU. A window that would pass the end is moved back, and the new entries are shifted within it by as much.
    """
    size = new.shape[dim]
    slots = buffer.shape[dim]
    assert size <= slots, "more new entries than the buffer holds"
    place = jnp.arange(size).reshape(-1, *(1,) * (buffer.ndim - dim - 1))
    for row in range(buffer.shape[0]):
        begin = jnp.clip(start[row], 0, slots - size)
        shift = start[row] - begin
        at = (row, *(begin if axis == dim else 0 for axis in range(1, buffer.ndim)))
        window = jax.lax.dynamic_slice(buffer, at, (1, *new.shape[1:]))
        entries = new[row : row + 1]
        shifted = jax.lax.dynamic_slice_in_dim(jnp.concatenate([entries, entries], axis=dim), (size - shift) % size, size, dim)
        written = (place >= shift) & (place < shift + count[row])
        buffer = jax.lax.dynamic_update_slice(buffer, jnp.where(written, shifted, window), at)
    return buffer
