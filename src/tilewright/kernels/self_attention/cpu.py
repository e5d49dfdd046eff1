"""Self-attention of whole sequences on a CPU's vector unit, with its gradient; the kernels are `cpu.cc`.

Besides projection and result, the gradient only needs the log-sum-exp of each query (Dao et al. 2022, arXiv 2205.14135); scores
are never written to memory. Inputs and outputs are float32 or bfloat16, intermediate values float32.

Legend: B rows of a batch, T positions, N query heads, K key/value heads, D head size, h rotated pairs of a head's entries.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Float32, Int, Int32

from tilewright.kernels.heads.cpu import operands_of, refuses_head_dim
from tilewright.kernels.linear.cpu import Joint
from tilewright.kernels.masks import AttentionMask
from tilewright.kernels.native import or_empty
from tilewright.kernels.operations import Heads


class ProjectionSizes(NamedTuple):
    """Number and size of query heads in a joined projection, and the epsilon of their norms."""

    heads: int
    head_dim: int
    eps: float


def refuses(ops: Any, projection: Any, heads: Heads, cache: Any, mask: AttentionMask) -> str:
    """Returns the reason why the kernel does not support these operands; empty if it does."""
    if cache is not None or mask.form != "causal" or mask.counts is not None:
        return "needs causal masks of whole sequences without a cache"
    return refuses_head_dim(heads.head_dim) or ("" if heads.scores.default else "needs default scores")


def attend_projected(
    ops: Any, projection: Joint, heads: Heads, cache: None, mask: AttentionMask
) -> tuple[Float[Array, "B T _"], None]:
    """Computes `Operations.attend_projected` without a cache in one call, for causal masks with segments and windows."""
    (qkv, count, _, size), options = operands_of(projection, heads)
    sizes = ProjectionSizes(count, size, options["eps"])
    first = first_keys(mask, qkv.shape[1])
    return self_attention(sizes, qkv, *(options[name] for name in ("q_norm", "k_norm", "cos", "sin")), first), None


def first_keys(mask: AttentionMask, size: int) -> Int32[Array, "B T"] | None:
    """Returns the first visible key of each query; None if all queries see keys from the first on."""
    at = jnp.arange(size, dtype=jnp.int32)[None]
    first = None
    if mask.segment_ids is not None:
        begins = jnp.pad(mask.segment_ids[:, 1:] != mask.segment_ids[:, :-1], ((0, 0), (1, 0)))
        first = jax.lax.cummax(jnp.where(begins, at, 0), axis=1)
    if mask.window is not None:
        least = jnp.broadcast_to(jnp.maximum(at - mask.window + 1, 0), (mask.context_lengths.shape[0], size))
        first = least if first is None else jnp.maximum(first, least)
    return first


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def self_attention(
    sizes: ProjectionSizes,
    qkv: Float[Array, "B T _"],
    q_norm: Float32[Array, " D"] | None,
    k_norm: Float32[Array, " D"] | None,
    cos: Float32[Array, "B T h"],
    sin: Float32[Array, "B T h"],
    first: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T _"]:
    """Computes attention of each query of a joined projection over the keys from its `first` to its own.

    The gradient of the rotation's cosines and sines is zero, as they are no parameters.
    """
    return forward(sizes, qkv, q_norm, k_norm, cos, sin, first)[0]


def forward(
    sizes: ProjectionSizes, qkv: Array, q_norm: Array | None, k_norm: Array | None, cos: Array, sin: Array, first: Array | None
) -> tuple[Array, tuple[Any, ...]]:
    b, t, _ = qkv.shape
    out = jax.ShapeDtypeStruct((b, t, sizes.heads * sizes.head_dim), qkv.dtype)
    results = (out, jax.ShapeDtypeStruct((b, sizes.heads, t), jnp.float32))
    norms = or_empty(q_norm, jnp.float32), or_empty(k_norm, jnp.float32)
    operands = (qkv, *norms, cos, sin, or_empty(first, jnp.int32))
    attended, sums = jax.ffi.ffi_call("tilewright_self_attention", results)(*operands, eps=np.float32(sizes.eps))
    return attended, (qkv, q_norm, k_norm, cos, sin, first, attended, sums)


def backward(sizes: ProjectionSizes, residuals: tuple[Any, ...], cotangent: Float[Array, "B T _"]) -> tuple[Any, ...]:
    qkv, q_norm, k_norm, cos, sin, first, attended, sums = residuals
    norms = [or_empty(norm, jnp.float32) for norm in (q_norm, k_norm)]
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (qkv, *norms)]
    call = jax.ffi.ffi_call("tilewright_self_attention_grad", results)
    operands = (qkv, *norms, cos, sin, or_empty(first, jnp.int32), attended, sums, cotangent)
    dqkv, *dnorms = call(*operands, eps=np.float32(sizes.eps))
    dq_norm, dk_norm = (None if norm is None else grad for norm, grad in zip((q_norm, k_norm), dnorms, strict=True))
    return dqkv, dq_norm, dk_norm, jnp.zeros_like(cos), jnp.zeros_like(sin), None


self_attention.defvjp(forward, backward)
