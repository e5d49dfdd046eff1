"""The operation on a CPU; the kernel itself is `cpu.cc`.

XLA:CPU has no updates of bfloat16: it converts the whole table to float32, and back, to write a few rows.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Int, Shaped


def scatter_rows(
    table: Shaped[Array, "*table"], index: Int[Array, " R"], rows: Shaped[Array, "R H"]
) -> Shaped[Array, "*table"]:
    """Writes rows at their places in a table, in place if nothing else reads it afterwards; see `xla.scatter_rows`.

    It is taken in the shape that it has: a table that is reshaped for the call, and back, XLA copies both times.
    """
    call = jax.ffi.ffi_call(
        "tilewright_scatter_rows", jax.ShapeDtypeStruct(table.shape, table.dtype), input_output_aliases={0: 0}
    )
    return call(table, index.astype(jnp.int32), rows.astype(table.dtype))


def swap_rows(
    table: Shaped[Array, "*table"], index: Int[Array, " R"], rows: Shaped[Array, "R H"]
) -> tuple[Shaped[Array, "*table"], Shaped[Array, "R H"]]:
    """Writes rows into a table, in place, and gives those that stood there; see `xla.swap_rows`.

    Read by a call of its own, the old rows would cost a copy of the table.
    """
    results = (jax.ShapeDtypeStruct(table.shape, table.dtype), jax.ShapeDtypeStruct(rows.shape, table.dtype))
    call = jax.ffi.ffi_call("tilewright_swap_rows", results, input_output_aliases={0: 0})
    after, old = call(table, index.astype(jnp.int32), rows.astype(table.dtype))
    return after, old
