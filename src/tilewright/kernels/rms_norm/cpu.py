"""RMSNorm on a CPU's vector unit; the kernel is `cpu.cc`.

XLA's order of summation depends on the number of rows. This kernel's does not, so a row's result is bitwise independent of the
number of rows.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Float32


def rms_norm(x: Float[Array, "*rows H"], weight: Float[Array, " H"], eps: float) -> Float[Array, "*rows H"]:
    """Applies RMSNorm over the last dim; `x` and weight are both float32 or both bfloat16."""
    call = jax.ffi.ffi_call("tilewright_rms_norm", jax.ShapeDtypeStruct(x.shape, x.dtype))
    return call(x, weight, eps=np.float32(eps))


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def trained_norm(
    x: Float32[Array, "*rows H"], weight: Float32[Array, " H"], eps: float, dtype: DTypeLike
) -> Float[Array, "*rows H"]:
    """Applies RMSNorm with a gradient, in one pass, rounded once to `dtype` (float32 or bfloat16)."""
    call = jax.ffi.ffi_call("tilewright_normalise", jax.ShapeDtypeStruct(x.shape, dtype))
    return call(x, weight, eps=np.float32(eps))


def trained_forward(x: Array, weight: Array, eps: float, dtype: DTypeLike) -> tuple[Array, tuple[Array, Array]]:
    return trained_norm(x, weight, eps, dtype), (x, weight)


def trained_backward(eps: float, dtype: DTypeLike, residuals: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
    x, weight = residuals
    results = (jax.ShapeDtypeStruct(x.shape, jnp.float32), jax.ShapeDtypeStruct(weight.shape, jnp.float32))
    dx, dw = jax.ffi.ffi_call("tilewright_normalise_grad", results)(x, weight, cotangent, eps=np.float32(eps))
    return dx, dw


trained_norm.defvjp(trained_forward, trained_backward)
