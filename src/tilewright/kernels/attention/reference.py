"""Attention over a cache as it is defined, in float32 and without grouping."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from tilewright.kernels.operations import PLAIN_SCORES, Scores, softcapped


def prefix_attention(
    q: Float[Array, "B T N D"],
    k: Float[Array, "B K S D"],
    v: Float[Array, "B K S D"],
    lengths: Int[Array, "B T"],
    extra: tuple[Float[Array, "B K U D"], Float[Array, "B K U D"]] | None = None,
    rule: Scores = PLAIN_SCORES,
) -> Float[Array, "B T N D"]:
    """Attention of each query over the first `lengths` entries of a cache, the last of a window alone, and over all of `extra`.

    A query head n reads key head `n * K // N`. A query that sees nothing gets zeros.
    """
    entry = jnp.arange(k.shape[2])[None, None]
    lengths = lengths[:, :, None]
    seen = (entry < lengths) & (entry >= (0 if rule.window is None else lengths - rule.window))
    if extra is not None:
        k = jnp.concatenate([k, extra[0]], axis=2)
        v = jnp.concatenate([v, extra[1]], axis=2)
        seen = jnp.concatenate([seen, jnp.ones((*seen.shape[:2], extra[0].shape[2]), bool)], axis=2)
    group = q.shape[2] // k.shape[1]
    wide_k, wide_v = (jnp.repeat(x.astype(jnp.float32), group, axis=1) for x in (k, v))
    exact = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("btnd,bnsd->bnts", q.astype(jnp.float32), wide_k, precision=exact)
    scores = softcapped(scores * rule.scale_of(q.shape[3]), rule.softcap)
    seen_by_heads = jnp.broadcast_to(seen[:, None], scores.shape)
    if rule.sinks is not None:
        sinks = jnp.broadcast_to(rule.sinks.astype(jnp.float32)[None, :, None, None], (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, sinks], axis=-1)
        seen_by_heads = jnp.concatenate([seen_by_heads, jnp.ones_like(sinks, bool)], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1, where=seen_by_heads)[..., : seen.shape[-1]]
    weights = jnp.where(jnp.any(seen, axis=-1)[:, None, :, None], weights, 0.0)
    return jnp.einsum("bnts,bnsd->btnd", weights, wide_v, precision=exact).astype(q.dtype)
