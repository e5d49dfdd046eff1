"""The operation on a CPU's vector unit; the kernel itself is `cpu.cc`.

XLA adds a row up in an order that depends on how many rows there are. Here it does not, so that a row's result is the same bit
for bit whatever the number of rows.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Float32


def rms_norm(x: Float[Array, "*rows H"], weight: Float[Array, " H"], eps: float) -> Float[Array, "*rows H"]:
    """RMSNorm over the last dim, in float32 or bfloat16, `x` and weight alike."""
    call = jax.ffi.ffi_call("tilewright_rms_norm", jax.ShapeDtypeStruct(x.shape, x.dtype))
    return call(x, weight, eps=np.float32(eps))


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def trained_norm(
    x: Float32[Array, "*rows H"], weight: Float32[Array, " H"], eps: float, dtype: DTypeLike
) -> Float[Array, "*rows H"]:
    """The norm with its gradient in one pass, rounded once, to `dtype`: float32 or bfloat16."""
    call = jax.ffi.ffi_call("tilewright_normalise", jax.ShapeDtypeStruct(x.shape, dtype))
    return call(x, weight, eps=np.float32(eps))


def trained_forward(x: Array, weight: Array, eps: float, dtype: DTypeLike) -> tuple[Array, tuple[Array, Array]]:
    return trained_norm(x, weight, eps, dtype), (x, weight)


def trained_backward(eps: float, dtype: DTypeLike, kept: tuple[Array, Array], due: Array) -> tuple[Array, Array]:
    x, weight = kept
    results = (jax.ShapeDtypeStruct(x.shape, jnp.float32), jax.ShapeDtypeStruct(weight.shape, jnp.float32))
    dx, dw = jax.ffi.ffi_call("tilewright_normalise_grad", results)(x, weight, due, eps=np.float32(eps))
    return dx, dw


trained_norm.defvjp(trained_forward, trained_backward)
