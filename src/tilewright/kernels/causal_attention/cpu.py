"""The operation on a CPU's vector unit, with its gradient; the kernels themselves are `cpu.cc`.

Beside the projection and the result only the logarithm of each query's sum is kept for the gradient (Dao et al. 2022,
arXiv 2205.14135), and no scores are written to memory. Float32 or bfloat16, in and out; everything between is float32.

Legend: B rows of a batch, T positions, N query heads, K key/value heads, D head size, h pairs of its entries that are rotated.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Float32

from tilewright.kernels.native import or_nothing

"""Head sizes that the kernels take are multiples of this."""


class ProjectionSizes(NamedTuple):
    """Heads of a joined projection, and the epsilon of their norms."""

    heads: int
    head_dim: int
    eps: float


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def causal_attention(
    sizes: ProjectionSizes,
    qkv: Float[Array, "B T _"],
    q_norm: Float32[Array, " D"] | None,
    k_norm: Float32[Array, " D"] | None,
    cos: Float32[Array, "B T h"],
    sin: Float32[Array, "B T h"],
) -> Float[Array, "B T _"]:
    """Causal attention of a joined projection, with a gradient for all but the rotation's angles, which are no parameters."""
    return forward(sizes, qkv, q_norm, k_norm, cos, sin)[0]


def forward(
    sizes: ProjectionSizes, qkv: Array, q_norm: Array | None, k_norm: Array | None, cos: Array, sin: Array
) -> tuple[Array, tuple[Any, ...]]:
    b, t, _ = qkv.shape
    out = jax.ShapeDtypeStruct((b, t, sizes.heads * sizes.head_dim), qkv.dtype)
    results = (out, jax.ShapeDtypeStruct((b, sizes.heads, t), jnp.float32))
    operands = (qkv, or_nothing(q_norm, jnp.float32), or_nothing(k_norm, jnp.float32), cos, sin)
    attended, sums = jax.ffi.ffi_call("tilewright_causal_attention", results)(*operands, eps=np.float32(sizes.eps))
    return attended, (qkv, q_norm, k_norm, cos, sin, attended, sums)


def backward(sizes: ProjectionSizes, kept: tuple[Any, ...], due: Float[Array, "B T _"]) -> tuple[Any, ...]:
    qkv, q_norm, k_norm, cos, sin, attended, sums = kept
    norms = [or_nothing(norm, jnp.float32) for norm in (q_norm, k_norm)]
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (qkv, *norms)]
    call = jax.ffi.ffi_call("tilewright_causal_attention_grad", results)
    dqkv, *norms_due = call(qkv, *norms, cos, sin, attended, sums, due, eps=np.float32(sizes.eps))
    dq_norm, dk_norm = (None if norm is None else due for norm, due in zip((q_norm, k_norm), norms_due, strict=True))
    return dqkv, dq_norm, dk_norm, jnp.zeros_like(cos), jnp.zeros_like(sin)


causal_attention.defvjp(forward, backward)
