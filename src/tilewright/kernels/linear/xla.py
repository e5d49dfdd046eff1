"""Linear layers compiled by XLA, for any device."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from tilewright.kernels.linear.scaled import ScaledMatrix, widened
from tilewright.kernels.operations import Joined, Norm, Transposed
from tilewright.kernels.rms_norm.reference import rms_norm

TPU_ROWS = 8
"""Rows that fill a TPU's registers."""

Product = Callable[[Array, Any, DTypeLike | None], Array]


def product(
    x: Float[Array, "*rows I"], w: Float[Array, "I O"] | ScaledMatrix, out_dtype: DTypeLike | None = None
) -> Float[Array, "*rows O"]:
    """Computes `x @ w`. float32 matmuls have full precision on every chip (TPUs and GPUs round by default)."""
    if isinstance(w, ScaledMatrix):
        return scaled_product(x, w, out_dtype, product)
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.matmul(x, w, precision=precision, preferred_element_type=out_dtype)


def mixed_product(
    x: Float[Array, "*rows I"], w: Float[Array, "I O"], out_dtype: DTypeLike | None = None
) -> Float[Array, "*rows O"]:
    """Computes `x @ w` in bfloat16 with float32 sums, for any dtypes; the result has `out_dtype`, by default that of `x`."""
    y = jnp.matmul(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), preferred_element_type=jnp.float32)
    return y.astype(out_dtype or x.dtype)


def scaled_product(
    x: Float[Array, "*rows I"], w: ScaledMatrix, out_dtype: DTypeLike | None, product: Product
) -> Float[Array, "*rows O"]:
    """Computes `x @ w` by a matmul of arrays into which XLA fuses the conversion of weights, so that memory traffic stays
    small.

    With one scale per output, the sums are multiplied by the scale; block-quantised weights are first rounded to the dtype of
    `x`.
    """
    if (more := w.shape[0] - x.shape[-1]) > 0:  # zero padding of a table
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, more)])
    if w.in_blocks:
        return product(x, w.dequantised(x.dtype), out_dtype)
    y = product(x, w.values.astype(x.dtype), jnp.float32) * widened(w.scales)[0]
    if w.minima is not None:
        y = y + jnp.sum(x, axis=-1, keepdims=True, dtype=jnp.float32) * widened(w.minima)[0]
    return y.astype(out_dtype or x.dtype)


def tpu_product(
    x: Float[Array, "*rows I"], w: Float[Array, "I O"] | ScaledMatrix, out_dtype: DTypeLike | None = None
) -> Float[Array, "*rows O"]:
    """Computes `x @ w` on a TPU, repeating a single row.

    XLA assigns a single row to the vector unit, which multiplies slower than memory can be read.
    """
    if isinstance(w, ScaledMatrix):
        return scaled_product(x, w, out_dtype, tpu_product)
    if math.prod(x.shape[:-1]) != 1:
        return product(x, w, out_dtype)
    rows = jax.lax.optimization_barrier(jnp.broadcast_to(x.reshape(1, -1), (TPU_ROWS, x.shape[-1])))
    return product(rows, w, out_dtype)[0].reshape(*x.shape[:-1], w.shape[1])


def normed(x: Float[Array, "*rows I"], norm: Norm | None) -> Float[Array, "*rows I"]:
    return x if norm is None else rms_norm(x, *norm)


def linear(
    x: Float[Array, "*rows I"],
    w: Any,
    out_dtype: DTypeLike | None = None,
    norm: Norm | None = None,
    add: Float[Array, "*rows O"] | None = None,
    count: Int[Array, ""] | None = None,
    product: Product = product,
) -> Float[Array, "*rows O"]:
    """Computes `x @ w + add`, with `norm` applied to `x` first if given.

    Args:
        w: a matrix `[I, O]`, perhaps quantised, or `Transposed`.
    """
    y = product(normed(x, norm), w.w.T if isinstance(w, Transposed) else w, out_dtype)
    return y if add is None else add + y


def project(
    x: Float[Array, "*rows I"],
    joined: Joined,
    norm: Norm | None = None,
    first: int = 0,
    last: int | None = None,
    bias: tuple[Float[Array, "... _"], ...] | None = None,
    count: Int[Array, ""] | None = None,
    product: Product = product,
) -> tuple[Float[Array, "*rows _"], ...]:
    """Computes the matmuls with matrices `first` to `last - 1`, each plus its bias."""
    x = normed(x, norm)
    products = tuple(product(x, w, None) for w in joined.parts[first:last])
    return products if bias is None else tuple(y + b for y, b in zip(products, bias[first:last], strict=True))


def gated_linear(
    x: Float[Array, "*rows I"],
    joined: Joined,
    norm: Norm | None = None,
    count: Int[Array, ""] | None = None,
    product: Product = product,
) -> Float[Array, "*rows O"]:
    """Computes `silu(x @ gate) * (x @ up)` (Shazeer 2020)."""
    gate, up = project(x, joined, norm, product=product)
    return jax.nn.silu(gate) * up
