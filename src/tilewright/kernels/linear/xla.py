"""The operation as XLA compiles it, on any device."""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

TPU_ROWS = 8
"""Rows that a TPU's registers hold at least."""


def linear(x: Float[Array, "*rows I"], w: Float[Array, "I O"], out_dtype: DTypeLike | None = None) -> Float[Array, "*rows O"]:
    """`x @ w`. In float32 the product is a true float32 product on every chip (TPU and GPU round by default)."""
    plain = partial(product, out_dtype=out_dtype)
    if math.prod(x.shape[:-1]) != 1:
        return plain(x, w)
    return jax.lax.platform_dependent(x, w, tpu=partial(product_of_one_row, out_dtype=out_dtype), default=plain)


def product(x: Float[Array, "*rows I"], w: Float[Array, "I O"], out_dtype: DTypeLike | None) -> Float[Array, "*rows O"]:
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.matmul(x, w, precision=precision, preferred_element_type=out_dtype)


def product_of_one_row(
    x: Float[Array, "*one I"], w: Float[Array, "I O"], out_dtype: DTypeLike | None
) -> Float[Array, "*one O"]:
    """The row several times over: a single one XLA gives to a TPU's vector unit, which multiplies slower than memory reads."""
    rows = jax.lax.optimization_barrier(jnp.broadcast_to(x.reshape(1, -1), (TPU_ROWS, x.shape[-1])))
    return product(rows, w, out_dtype)[0].reshape(*x.shape[:-1], w.shape[1])


def gated_linear(x: Float[Array, "*rows I"], gate: Float[Array, "I O"], up: Float[Array, "I O"]) -> Float[Array, "*rows O"]:
    """`silu(x @ gate) * (x @ up)`."""
    return jax.nn.silu(linear(x, gate)) * linear(x, up)
