"""The operation on a CPU; the kernel itself is `cpu.cc`.

XLA:CPU has no updates of bfloat16: it converts the whole table to float32, and back, to write a few rows.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Int, Shaped


def put(table: Shaped[Array, "*table"], index: Int[Array, " R"], rows: Shaped[Array, "R H"]) -> Shaped[Array, "*table"]:
    """As `xla.put`; the table is written where it is, if nothing else reads it afterwards.

    It is taken in the shape that it has: a table that is reshaped for the call, and back, XLA copies both times.
    """
    call = jax.ffi.ffi_call("tilewright_put", jax.ShapeDtypeStruct(table.shape, table.dtype), input_output_aliases={0: 0})
    return call(table, index.astype(jnp.int32), rows.astype(table.dtype))


def exchange(
    table: Shaped[Array, "*table"], index: Int[Array, " R"], rows: Shaped[Array, "R H"]
) -> tuple[Shaped[Array, "*table"], Shaped[Array, "R H"]]:
    """As `xla.exchange`, in place as `put`: read by a call of its own, the old rows would cost a copy of the table."""
    results = (jax.ShapeDtypeStruct(table.shape, table.dtype), jax.ShapeDtypeStruct(rows.shape, table.dtype))
    call = jax.ffi.ffi_call("tilewright_exchange", results, input_output_aliases={0: 0})
    after, old = call(table, index.astype(jnp.int32), rows.astype(table.dtype))
    return after, old
