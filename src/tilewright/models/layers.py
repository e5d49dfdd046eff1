"""Rotary embeddings: the rotation of each position."""

import math
from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int


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
