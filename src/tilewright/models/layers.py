"""Rotary position embedding: frequencies, their scaling for long contexts, and tables of cosines and sines."""

import math
from dataclasses import dataclass, replace
from typing import Literal

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int


def plain_frequencies(dim: int, theta: float) -> list[float]:
    """Returns `dim // 2` inverse frequencies without scaling, in radians per position."""
    return [theta ** (-2 * i / dim) for i in range(dim // 2)]


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3's frequency scaling: long wavelengths are stretched, short ones kept."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int
    rope_type: Literal["llama3"] = "llama3"

    @property
    def attention_factor(self) -> float:
        return 1.0

    def frequencies(self, dim: int, theta: float) -> list[float]:
        def scaled(frequency: float) -> float:
            rotations = self.original_max_position_embeddings * frequency / (2 * math.pi)
            fraction = (rotations - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
            fraction = min(max(fraction, 0.0), 1.0)
            return fraction * frequency + (1 - fraction) * frequency / self.factor

        return [scaled(frequency) for frequency in plain_frequencies(dim, theta)]


@dataclass(frozen=True)
class LinearScaling:
    """Linear scaling: positions divided by a factor (Chen et al. 2023, arXiv 2306.15595)."""

    factor: float
    rope_type: Literal["linear"] = "linear"

    @property
    def attention_factor(self) -> float:
        return 1.0

    def frequencies(self, dim: int, theta: float) -> list[float]:
        return [frequency / self.factor for frequency in plain_frequencies(dim, theta)]


@dataclass(frozen=True)
class YarnScaling:
    """YaRN scaling: slow dimensions are stretched, fast ones kept, with a ramp between (arXiv 2309.00071).

    Attributes:
        attention_factor: multiplier of cosines and sines.
        beta_fast, beta_slow: rotations within the original length. Dimensions with at least `beta_fast` are kept, those with at
            most `beta_slow` are stretched.
        truncate: the ramp begins and ends at whole dimensions.
        llama_4_scaling_beta: coefficient of the scale of queries at positions from the original length on; None for no scale.
            Such positions are not supported, so the context ends there.
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    rope_type: Literal["yarn"] = "yarn"
    llama_4_scaling_beta: float | None = None

    @staticmethod
    def default_attention_factor(factor: float, mscale: float = 1.0) -> float:
        """Returns the paper's factor, which keeps the spread of attention scores."""
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    def frequencies(self, dim: int, theta: float) -> list[float]:
        def dimension(rotations: float) -> float:
            return dim * math.log(self.original_max_position_embeddings / (rotations * 2 * math.pi)) / (2 * math.log(theta))

        low = dimension(self.beta_fast)
        high = dimension(self.beta_slow)
        if self.truncate:
            low = math.floor(low)
            high = math.ceil(high)
        low = max(low, 0)
        high = min(high, dim - 1)
        width = high - low or 0.001  # the libraries' value for an empty ramp

        def scaled(i: int, frequency: float) -> float:
            stretched = min(max((i - low) / width, 0.0), 1.0)
            return frequency * (1 - stretched) + frequency / self.factor * stretched

        return [scaled(i, frequency) for i, frequency in enumerate(plain_frequencies(dim, theta))]


@dataclass(frozen=True)
class LongRopeScaling:
    """LongRoPE scaling: each frequency is divided by its own factor, from one of two sets (arXiv 2402.13753).

    One set is for contexts within the original length, the other for longer ones. A cached key keeps the rotation it was
    written with, so the declared context decides, not the current length of a text.

    Attributes:
        short_factor, long_factor: divisor of each frequency.
        attention_factor: multiplier of cosines and sines, for both sets.
        long: use `long_factor`.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    attention_factor: float
    long: bool
    rope_type: Literal["longrope"] = "longrope"

    @staticmethod
    def default_attention_factor(factor: float, original: int) -> float:
        """Returns the paper's factor for a context of `factor` times the original length."""
        return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))

    def for_context(self, context: int) -> "LongRopeScaling":
        """Returns the scaling for a context of at most `context` positions."""
        return replace(self, long=context > self.original_max_position_embeddings)

    def frequencies(self, dim: int, theta: float) -> list[float]:
        factors = self.long_factor if self.long else self.short_factor
        return [frequency / factor for frequency, factor in zip(plain_frequencies(dim, theta), factors, strict=True)]


@dataclass(frozen=True)
class ProportionalScaling:
    """Rotation by the fastest frequencies of a whole head only (Gemma 4); its other entries do not turn.

    Entry i turns with entry i + D / 2 of a head of size D, unlike under a `partial_rotary_factor` of the configuration.

    Attributes:
        partial_rotary_factor: fraction of the frequencies that are kept.
        factor: divisor of these frequencies.
    """

    partial_rotary_factor: float
    factor: float = 1.0
    rope_type: Literal["proportional"] = "proportional"

    @property
    def attention_factor(self) -> float:
        return 1.0

    def frequencies(self, dim: int, theta: float) -> list[float]:
        kept = int(self.partial_rotary_factor * dim // 2)
        return [frequency / self.factor if i < kept else 0.0 for i, frequency in enumerate(plain_frequencies(dim, theta))]


RopeScaling = Llama3Scaling | LinearScaling | YarnScaling | LongRopeScaling | ProportionalScaling
"""Changes of the plain frequencies, most of them for contexts longer than in pretraining; fields are those of `config.json`."""


def rope_frequencies(dim: int, theta: float, scaling: RopeScaling | None) -> list[float]:
    """Returns `dim // 2` inverse frequencies of the rotary embedding, in radians per position.

    Args:
        dim: number of rotated entries of a head.
    """
    return plain_frequencies(dim, theta) if scaling is None else scaling.frequencies(dim, theta)


Rope = tuple[Float[Array, "B T half"], Float[Array, "B T half"]]
"""Cosines and sines for each position; `half` is half the number of rotated entries of a head, 0 without rotation."""


def rope_tables(positions: Int[Array, "B T"], frequencies: list[float], attention_factor: float = 1.0) -> Rope:
    """Computes the rotation of each position, in float32."""
    angles = positions[..., None].astype(jnp.float32) * jnp.asarray(frequencies, jnp.float32)
    cos = jnp.cos(angles)
    sin = jnp.sin(angles)
    return (cos, sin) if attention_factor == 1 else (cos * attention_factor, sin * attention_factor)
