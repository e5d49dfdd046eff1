"""The operation on a CPU's vector unit; the kernel itself is `cpu.cc`.

XLA adds a row up in an order that depends on how many rows there are. Here it does not, so that a row's result is the same bit
for bit whatever the number of rows.
"""

import jax
import numpy as np
from jax import Array
from jaxtyping import Float


def rms_norm(x: Float[Array, "*rows H"], weight: Float[Array, " H"], eps: float) -> Float[Array, "*rows H"]:
    """As `reference.rms_norm`; float32 or bfloat16, `x` and weight alike."""
    call = jax.ffi.ffi_call("tilewright_rms_norm", jax.ShapeDtypeStruct(x.shape, x.dtype))
    return call(x, weight, eps=np.float32(eps))
