"""The operation on a CPU; the kernel itself is `cpu.cc`.

XLA:CPU has no gather of bfloat16: it converts the whole table to float32 first, in each dispatch.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Int, Shaped


def take(table: Shaped[Array, "V H"], index: Int[Array, "*rows"]) -> Shaped[Array, "*rows H"]:
    """As `table[index]`, for indices from 0 to V - 1. There is no gradient."""
    call = jax.ffi.ffi_call("tilewright_take", jax.ShapeDtypeStruct((*index.shape, table.shape[1]), table.dtype))
    return call(table, index.astype(jnp.int32))
