"""Heads on a CPU's vector unit; the kernel is in `attention/cpu.cc`.

Legend: B rows of a batch, T positions, N query heads, K key/value heads, D head size, h rotated pairs of a head's entries.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Float32

from tilewright.kernels.heads import xla
from tilewright.kernels.linear.cpu import Joint
from tilewright.kernels.native import or_empty
from tilewright.kernels.operations import HEAD_MULTIPLE, Heads
from tilewright.kernels.rms_norm import cpu as norm_cpu


def refuses_head_dim(head_dim: int) -> str:
    """Returns the reason why the CPU kernels do not support this head size; empty if they do."""
    return f"head size {head_dim} is no multiple of {HEAD_MULTIPLE}" if head_dim % HEAD_MULTIPLE else ""


def operands_of(projection: Joint, spec: Heads) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the CPU kernels' operands for a projection, with or without queries: heads, norms and rotation.

    The kernels neither norm values nor take keys for them: the operands hold the finished values.
    """
    if spec.keys_are_values or spec.v_norm is not None:
        *parts, values = projection.split()
        if spec.keys_are_values:
            parts.append(values)
        if spec.v_norm is not None:
            by_head = values.reshape(*values.shape[:2], -1, spec.head_dim)
            values = norm_cpu.rms_norm(by_head, *spec.v_norm).reshape(values.shape)
        parts.append(values)
        projection = Joint(jnp.concatenate(parts, axis=-1), tuple(part.shape[-1] for part in parts))
    sizes = [size // spec.head_dim for size in projection.parts]
    queries = sizes[: len(sizes) % 2]
    key = sizes[-1] if len(sizes) > 1 else 0
    norms = {name: None if norm is None else norm.weight for name, norm in (("q_norm", spec.q_norm), ("k_norm", spec.k_norm))}
    eps = next((norm.eps for norm in (spec.q_norm, spec.k_norm) if norm is not None), 0.0)
    cos, sin = spec.rope
    return (projection.array, sum(queries), key, spec.head_dim), {**norms, "eps": eps, "cos": cos, "sin": sin}


def heads(projection: Joint, spec: Heads) -> tuple[Any, Any, Any]:
    """Splits a projection into queries, keys and values; XLA does for unsupported head sizes. See `Operations.heads`."""
    if refuses_head_dim(spec.head_dim):
        return xla.heads(projection.split(), spec, norm=norm_cpu.rms_norm)
    operands, options = operands_of(projection, spec)
    q, k, v = norm_rotate(*operands, **options)
    return (q if q.shape[2] else None), (k if k.shape[1] else None), (v if v.shape[1] else None)


def norm_rotate(
    qkv: Float[Array, "B T _"],
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    q_norm: Float[Array, " D"] | None,
    k_norm: Float[Array, " D"] | None,
    eps: float,
    cos: Float32[Array, "B T h"],
    sin: Float32[Array, "B T h"],
) -> tuple[Float[Array, "B T N D"], Float[Array, "B K T D"], Float[Array, "B K T D"]]:
    """Splits a joined projection into queries, and keys and values in the layout of a cache.

    Args:
        qkv: `heads` queries, `kv_heads` keys and `kv_heads` values side by side. Queries, or keys and values, may be absent.
        q_norm, k_norm: weights of the RMSNorm of each head's queries and keys; None for no norm.
        cos, sin: cosines and sines of each position's angles, for a rotation of halves (see `models.layers.rotate`).
    """
    b, t, _ = qkv.shape
    keys = jax.ShapeDtypeStruct((b, kv_heads, t, head_dim), qkv.dtype)
    results = (jax.ShapeDtypeStruct((b, t, heads, head_dim), qkv.dtype), keys, keys)
    norms = or_empty(q_norm, qkv.dtype), or_empty(k_norm, qkv.dtype)
    q, k, v = jax.ffi.ffi_call("tilewright_norm_rotate", results)(qkv, *norms, cos, sin, eps=np.float32(eps))
    return q, k, v
