"""The pieces that the model families share: linear layers, RMSNorm, rotary embeddings, SwiGLU, attention.

Legend: B rows of a batch, T query positions, S key positions, H hidden size, N query heads, K key/value heads, D head size.
"""

import math
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from tilewright.kernels.linear.cpu import PackedMatrix, TrainedMatrix
from tilewright.kernels.select import gated_linear, linear


def swiglu(
    x: Float[Array, "*rows H"],
    gate: Float[Array, "H I"] | PackedMatrix | TrainedMatrix,
    up: Float[Array, "H I"] | TrainedMatrix | None,
    down: Float[Array, "I H"] | PackedMatrix | TrainedMatrix,
) -> Float[Array, "*rows H"]:
    """`(silu(x @ gate) * (x @ up)) @ down` (Shazeer 2020)."""
    return linear(gated_linear(x, gate, up), down)


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
    return jax.lax.platform_dependent(x, *rope, tpu=rotate_by_product, default=rotate_halves)


def rotate_halves(
    x: Float[Array, "B T N D"], cos: Float[Array, "B T h"], sin: Float[Array, "B T h"]
) -> Float[Array, "B T N D"]:
    cos, sin = cos[:, :, None], sin[:, :, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def rotate_by_product(
    x: Float[Array, "B T N D"], cos: Float[Array, "B T h"], sin: Float[Array, "B T h"]
) -> Float[Array, "B T N D"]:
    """The same for a TPU, which has no cheap way to cut a register's lanes in half: a matrix of ones swaps them, exactly."""
    half = x.shape[-1] // 2
    swap = jnp.roll(jnp.eye(x.shape[-1], dtype=x.dtype), half, axis=0)
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    swapped = jnp.matmul(x, swap, precision=precision, preferred_element_type=jnp.float32)
    cos, sin = (jnp.concatenate(parts, axis=-1)[:, :, None] for parts in ((cos, cos), (-sin, sin)))
    return (x.astype(jnp.float32) * cos + swapped * sin).astype(x.dtype)
