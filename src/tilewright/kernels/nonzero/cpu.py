"""The operation on a CPU; the kernel itself is `cpu.cc`.

XLA:CPU sums up in several passes, each a call, and scatters entry by entry.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int32


def nonzero(mask: Bool[Array, " R"]) -> tuple[Int32[Array, " R"], Int32[Array, ""]]:
    """The places where a mask holds, in order, with zeros behind them; and how many they are."""
    results = (jax.ShapeDtypeStruct(mask.shape, jnp.int32), jax.ShapeDtypeStruct((), jnp.int32))
    index, count = jax.ffi.ffi_call("tilewright_nonzero", results)(mask)
    return index, count
