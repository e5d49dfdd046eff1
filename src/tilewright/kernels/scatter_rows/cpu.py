"""Row updates on a CPU; the kernel is `cpu.cc`.

XLA:CPU has no bfloat16 updates: it converts the whole table to float32 and back to write a few rows.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Int, Shaped


def scatter_rows(
    table: Shaped[Array, "*table"], index: Int[Array, " R"], rows: Shaped[Array, "R H"]
) -> Shaped[Array, "*table"]:
    """Writes rows into a table, in place if nothing else reads the table afterwards; see `xla.scatter_rows`.

    The table keeps its shape, because XLA would copy it for each reshape around the call.
    """
    call = jax.ffi.ffi_call(
        "tilewright_scatter_rows", jax.ShapeDtypeStruct(table.shape, table.dtype), input_output_aliases={0: 0}
    )
    return call(table, index.astype(jnp.int32), rows.astype(table.dtype))


def swap_rows(
    table: Shaped[Array, "*table"], index: Int[Array, " R"], rows: Shaped[Array, "R H"]
) -> tuple[Shaped[Array, "*table"], Shaped[Array, "R H"]]:
    """Writes rows into a table, in place, and returns the previous rows; see `xla.swap_rows`.

    A separate read of the previous rows would force a copy of the table.
    """
    results = (jax.ShapeDtypeStruct(table.shape, table.dtype), jax.ShapeDtypeStruct(rows.shape, table.dtype))
    call = jax.ffi.ffi_call("tilewright_swap_rows", results, input_output_aliases={0: 0})
    after, old = call(table, index.astype(jnp.int32), rows.astype(table.dtype))
    return after, old
