"""The pieces that the model families share: linear layers, RMSNorm, rotary embeddings, SwiGLU, attention.

Legend: B rows of a batch, T query positions, S key positions, H hidden size, N query heads, K key/value heads, D head size.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

MASKED = -1e30
"""Score of a key that a query may not see: finite, so that a row without any visible key stays free of NaN."""


def linear(x: Float[Array, "*rows I"], w: Float[Array, "I O"]) -> Float[Array, "*rows O"]:
    """`x @ w`. In float32 the product is a true float32 product on every chip (TPU and GPU round by default)."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.matmul(x, w, precision=precision)


def rms_norm(x: Float[Array, "*rows H"], weight: Float[Array, " H"], eps: float) -> Float[Array, "*rows H"]:
    """Root-mean-square normalisation, computed in float32 (Zhang & Sennrich 2019)."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return weight * (wide * scale).astype(x.dtype)


def swiglu(
    x: Float[Array, "*rows H"], gate: Float[Array, "H I"], up: Float[Array, "H I"], down: Float[Array, "I H"]
) -> Float[Array, "*rows H"]:
    """`(silu(x @ gate) * (x @ up)) @ down` (Shazeer 2020)."""
    return linear(jax.nn.silu(linear(x, gate)) * linear(x, up), down)


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's frequency scaling (`rope_type: "llama3"`): long wavelengths are stretched, short ones kept."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int
    rope_type: Literal["llama3"] = "llama3"


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> list[float]:
    """Inverse frequencies of the rotary embedding, in radians per position; `head_dim // 2` of them."""
    frequencies = [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    if scaling is None:
        return frequencies

    def scaled(frequency: float) -> float:
        turns = scaling.original_max_position_embeddings * frequency / (2 * math.pi)
        share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        share = min(max(share, 0.0), 1.0)
        return share * frequency + (1 - share) * frequency / scaling.factor

    return [scaled(frequency) for frequency in frequencies]


Rope = tuple[Float[Array, "B T half"], Float[Array, "B T half"]]
"""Cosines and sines for each position, `half` being half the head size."""


def rope_tables(positions: Int[Array, "B T"], frequencies: list[float]) -> Rope:
    """The rotation of each position, in float32."""
    angles = positions[..., None].astype(jnp.float32) * jnp.asarray(frequencies, jnp.float32)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Float[Array, "B T N D"], rope: Rope) -> Float[Array, "B T N D"]:
    """Rotary embedding over halves (`rotate_half`, as Hugging Face checkpoints expect), computed in float32."""
    cos, sin = (table[:, :, None, :] for table in rope)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


class KeyValues(NamedTuple):
    """Keys and values `[B, K, S, D]` with the mask `[B or 1, T, S]` of the queries that see each of them."""

    k: Array
    v: Array
    mask: Array


def group_rows(q: Float[Array, "B T N D"], heads: int) -> Float[Array, "B K R D"]:
    """Folds the queries of a group into the rows of their key head, `R = N / K * T`, so that a key is read once for them all."""
    b, t, n, d = q.shape
    return q.reshape(b, t, heads, n // heads, d).transpose(0, 2, 3, 1, 4).reshape(b, heads, n // heads * t, d)


def ungroup_rows(rows: Float[Array, "B K R D"], t: int) -> Float[Array, "B T N D"]:
    """The inverse of `group_rows`."""
    b, heads, r, d = rows.shape
    return rows.reshape(b, heads, r // t, t, d).transpose(0, 3, 1, 2, 4).reshape(b, t, heads * (r // t), d)


def attention_over(q: Float[Array, "B T N D"], parts: Sequence[KeyValues]) -> Float[Array, "B T N D"]:
    """Grouped-query attention over several sets of keys under one softmax, without joining the sets in memory.

    The scale is `D ** -0.5`; scores and softmax are float32.
    """
    t, n, d = q.shape[1:]
    heads = parts[0].k.shape[1]
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    rows = group_rows(q * d**-0.5, heads)

    def scores(part: KeyValues) -> Array:
        product = jnp.einsum("bkrd,bksd->bkrs", rows, part.k, precision=precision, preferred_element_type=jnp.float32)
        return jnp.where(jnp.tile(part.mask, (1, n // heads, 1))[:, None], product, MASKED)

    weights = jax.nn.softmax(jnp.concatenate([scores(part) for part in parts], axis=-1), axis=-1).astype(q.dtype)
    out, first = jnp.zeros_like(rows), 0
    for part in parts:
        size = part.k.shape[2]
        share = jax.lax.slice_in_dim(weights, first, first + size, axis=-1)
        out = out + jnp.einsum("bkrs,bksd->bkrd", share, part.v, precision=precision)
        first += size
    return ungroup_rows(out, t)


def attention(
    q: Float[Array, "B T N D"], k: Float[Array, "B K S D"], v: Float[Array, "B K S D"], mask: Bool[Array, "#B T S"]
) -> Float[Array, "B T N D"]:
    """Grouped-query attention over one set of keys; see `attention_over`."""
    return attention_over(q, [KeyValues(k, v, mask)])
