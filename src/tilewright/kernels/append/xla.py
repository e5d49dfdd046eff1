"""The operations as XLA compiles them, on any device.

Legend: B rows of a batch, T new entries, S entries of a cache, N query heads, K key/value heads, D head size.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int, Shaped

from tilewright.kernels.attention.xla import prefix_attention
from tilewright.kernels.operations import Heads


def write(
    buffer: Shaped[Array, "B S *rest"], new: Shaped[Array, "B T *rest"], start: Int[Array, " B"], count: Int[Array, " B"]
) -> Shaped[Array, "B S *rest"]:
    """Writes the first `count` of each row's new entries from its entry `start` on; `start + count` must not pass S."""
    return write_along(1, buffer, new, start, count)


def append(
    cache: Shaped[Array, "B K S D"], new: Shaped[Array, "B K T D"], start: Int[Array, " B"], count: Int[Array, " B"]
) -> Shaped[Array, "B K S D"]:
    """Writes new entries of each row into a cache, whose heads come before its entries; see `write`."""
    return write_along(2, cache, new, start, count)


def write_along(dim: int, buffer: Array, new: Array, start: Array, count: Array) -> Array:
    """`write`, the entries being those of `dim`.

    Row by row, a window of T entries is read, changed and put back in place: a scatter would run entry by entry on a CPU. Where
    the window would pass the end, it lies before it, and the new entries lie as much further back in it.
    """
    size = new.shape[dim]
    slots = buffer.shape[dim]
    assert size <= slots, "more new entries than the buffer has"
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


def append_all(
    caches: Sequence[Shaped[Array, "B K S D"]],
    new: Sequence[Shaped[Array, "B K T D"]],
    start: Int[Array, " B"],
    count: Int[Array, " B"],
) -> tuple[Shaped[Array, "B K S D"], ...]:
    """`append` for several caches, to each its own entries at the same places."""
    return tuple(append(cache, entries, start, count) for cache, entries in zip(caches, new, strict=True))


def append_attend(
    projection: Any,
    spec: Heads,
    k: Float[Array, "B K S D"],
    v: Float[Array, "B K S D"],
    start: Int[Array, " B"],
    count: Int[Array, " B"],
    heads: Callable[[Any, Heads], tuple[Any, Any, Any]],
    attend: Callable[..., Array],
    append_all: Callable[..., tuple[Array, ...]] = append_all,
) -> tuple[Float[Array, "B T _"], Float[Array, "B K S D"], Float[Array, "B K S D"]]:
    """Appends the projection's keys and values, and lets the query at `start + t` see all entries up to its own."""
    q, *new = heads(projection, spec)
    k, v = append_all((k, v), new, start, count)
    # What is asked behind the last entry means nothing, but kernels check their lengths.
    lengths = jnp.minimum(start[:, None] + jnp.arange(q.shape[1])[None] + 1, k.shape[2])
    if not spec.scores.default:
        return prefix_attention(q, k, v, lengths, rule=spec.scores).reshape(*q.shape[:2], -1), k, v
    return attend(q, k, v, lengths).reshape(*q.shape[:2], -1), k, v
