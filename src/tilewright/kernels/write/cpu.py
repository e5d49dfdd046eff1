"""Cache writes on a CPU; the kernel is `cpu.cc`.

XLA:CPU has no bfloat16 updates: it converts the whole cache to float32 and back to write a few entries.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Int, Shaped

from tilewright.kernels.native import or_empty
from tilewright.kernels.operations import KeyValuePages, PagedCache, Quantised


def refuses(cache: Any, *rest: Any) -> str:
    """Returns the reason why the kernel does not support a cache; empty if it does."""
    eight_bits = isinstance(cache, PagedCache) and isinstance(cache.pool.k, Quantised)
    return "keys and values are in 8 bits" if eight_bits else ""


def write(
    cache: Any, k: Shaped[Array, "B K T D"], v: Shaped[Array, "B K T D"], start: Int[Array, " B"], counts: Int[Array, " B"]
) -> Any:
    """Writes new entries of each row into a cache, in place if nothing else reads it afterwards; see `Operations.write`."""
    table = or_empty(cache.table if isinstance(cache, PagedCache) else None, jnp.int32)

    def write_part(held: Array, new: Array) -> Array:
        shape = jax.ShapeDtypeStruct(held.shape, held.dtype)
        call = jax.ffi.ffi_call("tilewright_write", shape, input_output_aliases={0: 0})
        return call(held, new, start.astype(jnp.int32), counts.astype(jnp.int32), table)

    if isinstance(cache, PagedCache):
        return cache._replace(pool=KeyValuePages(write_part(cache.pool.k, k), write_part(cache.pool.v, v)))
    return cache._replace(k=write_part(cache.k, k), v=write_part(cache.v, v))
