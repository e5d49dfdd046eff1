"""Row lookup on a CPU; the kernel is `cpu.cc`.

XLA:CPU has no gather for bfloat16: it converts the whole table to float32 in each dispatch.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int, Shaped

from tilewright.kernels.linear.blocks import PackedTable


def gather_rows(table: Shaped[Array, "V H"] | PackedTable, index: Int[Array, "*rows"]) -> Shaped[Array, "*rows H"]:
    """Returns the rows `table[index]`, for indices from 0 to V - 1, without a gradient."""
    if isinstance(table, PackedTable):
        out = jax.ShapeDtypeStruct((*index.shape, table.width), jnp.dtype(table.dtype))
        call = jax.ffi.ffi_call("tilewright_gather_block_rows", out)
        return call(table.panels, index.astype(jnp.int32), rows=np.int64(table.rows))
    call = jax.ffi.ffi_call("tilewright_gather_rows", jax.ShapeDtypeStruct((*index.shape, table.shape[1]), table.dtype))
    return call(table, index.astype(jnp.int32))
