"""Indices of a mask's true elements on a CPU; the kernel is `cpu.cc`.

XLA:CPU computes the cumulative sum in several passes, each a call, and scatters entry by entry.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int32


def nonzero(mask: Bool[Array, " R"]) -> tuple[Int32[Array, " R"], Int32[Array, ""]]:
    """Returns the indices of true elements in order, padded with zeros, and their number."""
    results = (jax.ShapeDtypeStruct(mask.shape, jnp.int32), jax.ShapeDtypeStruct((), jnp.int32))
    index, count = jax.ffi.ffi_call("tilewright_nonzero", results)(mask)
    return index, count
