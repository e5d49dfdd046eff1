"""Products for `Operations.begin`: beginnings of a layer's halves that are more than one operation."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from tilewright.kernels.operations import Norm, Operations, Projection


class Gated(NamedTuple):
    """A projection, and the gate `[B, T, N * D]` of what attention makes of it."""

    projection: Projection
    gate: Array


def gated_projection(
    ops: Operations, x: Float[Array, "*rows H"], w: Any, norm: Norm | None = None, count: Int[Array, ""] | None = None
) -> Gated:
    """Queries, keys and values, and the gate, of rows.

    Args:
        w: the joined matrices, their biases or None, and the gate's matrix.
    """
    qkv, bias, gate = w
    return Gated(ops.project(x, qkv, norm, bias=bias), ops.linear(x, gate, norm=norm))


def gelu_gated(
    ops: Operations, x: Float[Array, "*rows H"], w: Any, norm: Norm | None = None, count: Int[Array, ""] | None = None
) -> Float[Array, "*rows I"]:
    """`gelu(x @ gate) * (x @ up)` by the approximation with tanh (Hendrycks and Gimpel, arXiv 1606.08415, section 2).

    Args:
        w: gate and up.
        count: see `Operations`.
    """
    h = x if norm is None else ops.rms_norm(x, *norm)
    gate, up = (ops.linear(h, each, count=count) for each in w)
    return (jax.nn.gelu(gate.astype(jnp.float32), approximate=True) * up.astype(jnp.float32)).astype(x.dtype)
