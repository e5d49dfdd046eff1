"""Key/value caches of a fixed size, written in place.

A target's cache holds position p in slot p. What lies at or beyond a row's length is stale: masked until a later write
replaces it, so a rejected draft needs no clean-up. A drafter's context is kept the same way, or, with a draft window, as a ring
in which position p lies in slot p modulo the window.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from tilewright.models.dflash import ContextKV


def allocate(layers: int, batch: int, kv_heads: int, capacity: int, head_dim: int, dtype: DTypeLike) -> ContextKV:
    """Empty caches, `[batch, kv_heads, capacity, head_dim]` for the keys and values of each layer."""
    shape = (batch, kv_heads, capacity, head_dim)
    return tuple((jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(layers))


def write(cache: Float[Array, "B K S D"], new: Float[Array, "B K T D"], start: Int[Array, " B"]) -> Float[Array, "B K S D"]:
    """Writes each row's T entries from its slot `start` on. `start + T` must not pass the capacity."""
    for row in range(cache.shape[0]):  # unrolled: a scatter would run entry by entry on a CPU
        cache = jax.lax.dynamic_update_slice(cache, new[row : row + 1], (row, 0, start[row], 0))
    return cache


def latest_positions(slots: int, stop: Int[Array, " B"]) -> Int[Array, "B S"]:
    """The position that each slot of a ring holds when positions before `stop` have been written; negative if none."""
    last = stop[:, None] - 1
    return last - (last - jnp.arange(slots)[None]) % slots


def write_ring(
    cache: Float[Array, "B K S D"], new: Float[Array, "B K T D"], start: Int[Array, " B"], stop: Int[Array, " B"]
) -> Float[Array, "B K S D"]:
    """Writes positions `start` to `stop - 1`, at most T of them, into a ring of S slots; only the last S of them stay.

    Entries of `new` from `stop` on are dropped: in a ring they would replace positions that are still visible.
    """
    index = latest_positions(cache.shape[2], stop) - start[:, None]
    picked = jnp.take_along_axis(new, jnp.clip(index, 0, new.shape[2] - 1)[:, None, :, None], axis=2)
    return jnp.where((index >= 0)[:, None, :, None], picked, cache)


def visible_context(slots: int, stop: Int[Array, " B"]) -> Int[Array, " B"]:
    """How many slots, from the first, hold a position before `stop`; in a ring of S slots those are the last S positions."""
    return jnp.minimum(stop, slots)
