"""Causal attention as it is defined, in float32, head by head.

Legend: B rows of a batch, T positions, N query heads, K key/value heads, D head size.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from tilewright.kernels.rms_norm.reference import rms_norm


def causal_attention(
    qkv: Float[Array, "B T _"],
    kv_heads: int,
    head_dim: int,
    q_norm: Float[Array, " D"] | None,
    k_norm: Float[Array, " D"] | None,
    eps: float,
    cos: Float[Array, "B T h"],
    sin: Float[Array, "B T h"],
) -> Float[Array, "B T _"]:
    """Attention of each position's query over all keys up to its own position; scale `D ** -0.5`.

    Args:
        qkv: queries of all heads, then `kv_heads` keys, then as many values, side by side. Query head n reads key head
            `n * K // N`.
        q_norm, k_norm: weights of the RMS norm of each head's queries and keys; None: there is none.
        eps: of both norms.
        cos, sin: of each position's angles; the rotation is over halves.
    """
    b, t, width = qkv.shape
    heads = width // head_dim - 2 * kv_heads
    x = qkv.astype(jnp.float32).reshape(b, t, -1, head_dim)

    def turned(x: Array, norm: Array | None) -> Array:
        x = x if norm is None else rms_norm(x, norm, eps)
        first, second = jnp.split(x, 2, axis=-1)
        c = cos[:, :, None]
        s = sin[:, :, None]
        return jnp.concatenate([first * c - second * s, second * c + first * s], axis=-1)

    group = heads // kv_heads
    q = turned(x[:, :, :heads], q_norm)
    k = jnp.repeat(turned(x[:, :, heads : heads + kv_heads], k_norm), group, axis=2)
    v = jnp.repeat(x[:, :, heads + kv_heads :], group, axis=2)
    exact = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("btnd,bsnd->bnts", q, k, precision=exact) * head_dim**-0.5
    weights = jax.nn.softmax(scores, axis=-1, where=jnp.tril(jnp.ones((t, t), bool)))
    return jnp.einsum("bnts,bsnd->btnd", weights, v, precision=exact).reshape(b, t, -1).astype(qkv.dtype)
