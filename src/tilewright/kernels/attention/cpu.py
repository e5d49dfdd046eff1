"""The operation on a CPU's vector unit, and what stands around it in a layer; the kernels themselves are `cpu.cc`.

Only keys that some query sees are read, and a query's result is the same bit for bit whatever is computed beside it. All is
float32 or bfloat16, in and out; scores and sums are float32.

Legend: B rows of a batch, T query positions, N query heads, K key/value heads, D head size, h pairs of its entries that are
rotated, S cache entries, U extra ones.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Float32, Int

from tilewright.kernels.native import or_nothing
from tilewright.kernels.operations import HEAD_MULTIPLE


def refuses_heads(head_dim: int) -> str:
    """The reason why the CPU kernels do not take heads of this size; empty if they do."""
    return f"heads of {head_dim} are no multiple of {HEAD_MULTIPLE}" if head_dim % HEAD_MULTIPLE else ""


def refuses(q: Array | jax.ShapeDtypeStruct, *rest: object) -> str:
    """The reason why the kernel does not take these; empty if it does."""
    return refuses_heads(q.shape[3])


def prefix_attention(
    q: Float[Array, "B T N D"],
    k: Float[Array, "B K S D"],
    v: Float[Array, "B K S D"],
    lengths: Int[Array, "B T"],
    extra: tuple[Float[Array, "B K U D"], Float[Array, "B K U D"]] | None = None,
) -> Float[Array, "B T N D"]:
    """Attention of each query over the first `lengths` entries of a cache, and over all of `extra`.

    A query that sees nothing gets zeros.
    """
    if extra is None:
        extra = (k[:, :, :0], v[:, :, :0])
    call = jax.ffi.ffi_call("tilewright_attention", jax.ShapeDtypeStruct(q.shape, q.dtype))
    return call(q, k, v, lengths.astype(jnp.int32), *extra)


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
    """A joined projection's queries, and its keys and values as a cache has them.

    Args:
        qkv: `heads` queries, `kv_heads` keys and as many values side by side. There may be no queries, or no keys and values.
        q_norm, k_norm: weights of the RMS norm of each head's queries and keys; None: there is none.
        cos, sin: of each position's angles; the rotation is over halves (see `models.layers.rotate`).
    """
    b, t, _ = qkv.shape
    keys = jax.ShapeDtypeStruct((b, kv_heads, t, head_dim), qkv.dtype)
    results = (jax.ShapeDtypeStruct((b, t, heads, head_dim), qkv.dtype), keys, keys)
    norms = or_nothing(q_norm, qkv.dtype), or_nothing(k_norm, qkv.dtype)
    q, k, v = jax.ffi.ffi_call("tilewright_norm_rotate", results)(qkv, *norms, cos, sin, eps=np.float32(eps))
    return q, k, v


def append_attend(
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
    k_cache: Float[Array, "B K S D"],
    v_cache: Float[Array, "B K S D"],
    start: Int[Array, " B"],
    count: Int[Array, " B"],
    window: int | None = None,
    scale: float | None = None,
) -> tuple[Float[Array, "B T _"], Float[Array, "B K S D"], Float[Array, "B K S D"]]:
    """`norm_rotate`, keys and values written into the caches, and causal attention over these: a layer's attention in a call.

    The caches are written where they are, if nothing else reads them afterwards.

    Args:
        start: where each row's first new entry goes.
        count: how many of the T new entries each row keeps, from the first; with 0 its caches stay as they are, wherever the
            row starts.
        window, scale: as of `operations.Scores`.

    Returns:
        What query t sees up to its own entry, heads side by side, and zeros from `count` on; and the caches.
    """
    assert k_cache.shape[1::2] == (kv_heads, head_dim), "the caches' heads are the projection's"
    out = jax.ShapeDtypeStruct((*qkv.shape[:2], heads * head_dim), qkv.dtype)
    results = (out, *(jax.ShapeDtypeStruct(cache.shape, cache.dtype) for cache in (k_cache, v_cache)))
    norms = or_nothing(q_norm, qkv.dtype), or_nothing(k_norm, qkv.dtype)
    seen = {"window": np.int64(window or 0), "scale": np.float32(scale or 0)}
    places = start.astype(jnp.int32), count.astype(jnp.int32)
    call = jax.ffi.ffi_call("tilewright_append_attend", results, input_output_aliases={7: 1, 8: 2})
    attended, keys, values = call(qkv, *norms, cos, sin, *places, k_cache, v_cache, eps=np.float32(eps), **seen)
    return attended, keys, values
