"""The operation as XLA compiles it, on any device; also attention under any mask.

Legend: B rows of a batch, T query positions, S key positions, N query heads, K key/value heads, D head size.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from tilewright.kernels.operations import PLAIN_SCORES, Scores, softcapped

MASKED = -1e30
"""Score of a key that a query may not see: finite, so that a row without any visible key stays free of NaN."""


class KeyValues(NamedTuple):
    """Keys and values `[B, K, S, D]` with the mask `[B or 1, T, S]` of the queries that see each of them."""

    k: Array
    v: Array
    mask: Array


def group_rows(q: Float[Array, "B T N D"], heads: int) -> Float[Array, "B K R D"]:
    """Folds the queries of a group into the rows of their key head, `R = N / K * T`: a key is then read once for them all."""
    b, t, n, d = q.shape
    return q.reshape(b, t, heads, n // heads, d).transpose(0, 2, 3, 1, 4).reshape(b, heads, n // heads * t, d)


def ungroup_rows(rows: Float[Array, "B K R D"], t: int) -> Float[Array, "B T N D"]:
    """The inverse of `group_rows`."""
    b, heads, r, d = rows.shape
    return rows.reshape(b, heads, r // t, t, d).transpose(0, 3, 1, 2, 4).reshape(b, t, heads * (r // t), d)


def sink_rows(sinks: Float[Array, " N"], heads: int, t: int) -> Float[Array, "1 K R 1"]:
    """The sink of each row of `group_rows`."""
    return jnp.repeat(sinks.astype(jnp.float32).reshape(heads, -1), t, axis=1)[None, :, :, None]


def seen_entries(entry: Int[Array, " S"], lengths: Int[Array, "B T"], rule: Scores) -> Bool[Array, "B T S"]:
    """Mask of the entries among the first `lengths`, and the last of the window."""
    after = entry[None, None] < lengths[:, :, None]
    return after if rule.window is None else after & (entry[None, None] >= lengths[:, :, None] - rule.window)


def attention_over(
    q: Float[Array, "B T N D"], parts: Sequence[KeyValues], rule: Scores = PLAIN_SCORES
) -> Float[Array, "B T N D"]:
    """Grouped-query attention over several sets of keys under one softmax, without joining the sets in memory.

    Scores and softmax are float32. A query that sees nothing gets zeros.
    """
    t, n, d = q.shape[1:]
    heads = parts[0].k.shape[1]
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    rows = group_rows(q * rule.scale_of(d), heads)

    def scores(part: KeyValues) -> Array:
        return jnp.einsum("bkrd,bksd->bkrs", rows, part.k, precision=precision, preferred_element_type=jnp.float32)

    batch = max(part.mask.shape[0] for part in parts)
    seen = jnp.concatenate([jnp.broadcast_to(part.mask, (batch, *part.mask.shape[1:])) for part in parts], axis=-1)
    seen = jnp.tile(seen, (1, n // heads, 1))[:, None]
    masked = jnp.where(seen, softcapped(jnp.concatenate([scores(part) for part in parts], axis=-1), rule.softcap), MASKED)
    if rule.sinks is not None:  # behind all parts, which take their shares by slices from the first on
        sinks = jnp.broadcast_to(sink_rows(rule.sinks, heads, t), (*masked.shape[:3], 1))
        masked = jnp.concatenate([masked, sinks], axis=-1)
    weights = jnp.where(jnp.any(seen, axis=-1, keepdims=True), jax.nn.softmax(masked, axis=-1), 0.0).astype(q.dtype)
    out = jnp.zeros_like(rows)
    first = 0
    for part in parts:
        size = part.k.shape[2]
        share = jax.lax.slice_in_dim(weights, first, first + size, axis=-1)
        out = out + jnp.einsum("bkrs,bksd->bkrd", share, part.v, precision=precision)
        first += size
    return ungroup_rows(out, t)


def attention(
    q: Float[Array, "B T N D"],
    k: Float[Array, "B K S D"],
    v: Float[Array, "B K S D"],
    mask: Bool[Array, "#B T S"],
    rule: Scores = PLAIN_SCORES,
) -> Float[Array, "B T N D"]:
    """Grouped-query attention over one set of keys; see `attention_over`."""
    return attention_over(q, [KeyValues(k, v, mask)], rule)


def prefix_attention(
    q: Float[Array, "B T N D"],
    k: Float[Array, "B K S D"],
    v: Float[Array, "B K S D"],
    lengths: Int[Array, "B T"],
    extra: tuple[Float[Array, "B K U D"], Float[Array, "B K U D"]] | None = None,
    rule: Scores = PLAIN_SCORES,
) -> Float[Array, "B T N D"]:
    """Attention of each query over a cache's first `lengths` entries, the last of a window alone, and over all of `extra`."""
    parts = [KeyValues(k, v, seen_entries(jnp.arange(k.shape[2]), lengths, rule))]
    if extra is not None:
        parts.append(KeyValues(*extra, jnp.ones((1, q.shape[1], extra[0].shape[2]), bool)))
    return attention_over(q, parts, rule)
