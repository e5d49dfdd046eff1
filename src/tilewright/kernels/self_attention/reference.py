"""Reference self-attention in float32, head by head.

Legend: B rows of a batch, T positions, N query heads, K key/value heads, D head size.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from tilewright.kernels.rms_norm.reference import rms_norm


def self_attention(
    qkv: Float[Array, "B T _"],
    kv_heads: int,
    head_dim: int,
    q_norm: Float[Array, " D"] | None,
    k_norm: Float[Array, " D"] | None,
    eps: float,
    cos: Float[Array, "B T h"],
    sin: Float[Array, "B T h"],
    first: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T _"]:
    """Computes attention of each position's query over the keys from its `first` to its own position, with scale `D ** -0.5`.

    Args:
        qkv: queries of all heads, then `kv_heads` keys, then `kv_heads` values, side by side. Query head n uses key head
            `n * K // N`.
        q_norm, k_norm: weights of the RMSNorm of each head's queries and keys; None for no norm.
        eps: epsilon of both norms.
        cos, sin: cosines and sines of each position's angles; the rotation is over halves.
    """
    b, t, width = qkv.shape
    heads = width // head_dim - 2 * kv_heads
    x = qkv.astype(jnp.float32).reshape(b, t, -1, head_dim)

    def rotated(x: Array, norm: Array | None) -> Array:
        x = x if norm is None else rms_norm(x, norm, eps)
        first, second = jnp.split(x, 2, axis=-1)
        c = cos[:, :, None]
        s = sin[:, :, None]
        return jnp.concatenate([first * c - second * s, second * c + first * s], axis=-1)

    group = heads // kv_heads
    q = rotated(x[:, :, :heads], q_norm)
    k = jnp.repeat(rotated(x[:, :, heads : heads + kv_heads], k_norm), group, axis=2)
    v = jnp.repeat(x[:, :, heads + kv_heads :], group, axis=2)
    exact = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("btnd,bsnd->bnts", q, k, precision=exact) * head_dim**-0.5
    is_visible = jnp.tril(jnp.ones((1, t, t), bool))
    is_visible = is_visible if first is None else is_visible & (jnp.arange(t) >= first[:, :, None])
    weights = jax.nn.softmax(scores, axis=-1, where=is_visible[:, None])
    return jnp.einsum("bnts,bsnd->btnd", weights, v, precision=exact).reshape(b, t, -1).astype(qkv.dtype)
