"""Rotary embeddings: the rotation of each position."""

import math
from dataclasses import dataclass, replace
from typing import Literal

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int


def plain_frequencies(dim: int, theta: float) -> list[float]:
    """Inverse frequencies without scaling, in radians per position; `dim // 2` of them."""
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
            turns = self.original_max_position_embeddings * frequency / (2 * math.pi)
            share = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
            share = min(max(share, 0.0), 1.0)
            return share * frequency + (1 - share) * frequency / self.factor

        return [scaled(frequency) for frequency in plain_frequencies(dim, theta)]


@dataclass(frozen=True)
class LinearScaling:
    """Positions divided by a factor (Chen et al. 2023, arXiv 2306.15595)."""

    factor: float
    rope_type: Literal["linear"] = "linear"

    @property
    def attention_factor(self) -> float:
        return 1.0

    def frequencies(self, dim: int, theta: float) -> list[float]:
        return [frequency / self.factor for frequency in plain_frequencies(dim, theta)]


@dataclass(frozen=True)
class YarnScaling:
    """YaRN: stretched where a dimension turns seldom, kept where it turns often, a ramp between (arXiv 2309.00071).

    Attributes:
        attention_factor: what cosines and sines are multiplied by.
        beta_fast, beta_slow: turns within the original length from which on frequencies are kept, and below which they are
            stretched.
        truncate: the ramp begins and ends at whole dimensions.
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    rope_type: Literal["yarn"] = "yarn"

    @staticmethod
    def default_attention_factor(factor: float, mscale: float = 1.0) -> float:
        """The paper's, by which scores keep their spread."""
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    def frequencies(self, dim: int, theta: float) -> list[float]:
        def dimension(turns: float) -> float:
            return dim * math.log(self.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low = dimension(self.beta_fast)
        high = dimension(self.beta_slow)
        if self.truncate:
            low = math.floor(low)
            high = math.ceil(high)
        low = max(low, 0)
        high = min(high, dim - 1)
        width = high - low or 0.001  # as the libraries have it where the ramp is a step

        def scaled(i: int, frequency: float) -> float:
            stretched = min(max((i - low) / width, 0.0), 1.0)
            return frequency * (1 - stretched) + frequency / self.factor * stretched

        return [scaled(i, frequency) for i, frequency in enumerate(plain_frequencies(dim, theta))]


@dataclass(frozen=True)
class LongRopeScaling:
    """LongRoPE: each frequency divided by a factor of its own, of one of two sets (arXiv 2402.13753).

    One set is for contexts within the original length, the other for longer ones. A key in a cache was rotated by one of them
    for good, so that the context that is declared decides, and not how long a text has become.

    Attributes:
        short_factor, long_factor: of each frequency.
        attention_factor: what cosines and sines are multiplied by, whichever set it is.
        long: whether it is the set for longer contexts.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    attention_factor: float
    long: bool
    rope_type: Literal["longrope"] = "longrope"

    @staticmethod
    def default_attention_factor(factor: float, original: int) -> float:
        """The paper's, for a context of `factor` times the original length."""
        return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))

    def within(self, context: int) -> "LongRopeScaling":
        """The scaling of a context of at most so many positions."""
        return replace(self, long=context > self.original_max_position_embeddings)

    def frequencies(self, dim: int, theta: float) -> list[float]:
        factors = self.long_factor if self.long else self.short_factor
        return [frequency / factor for frequency, factor in zip(plain_frequencies(dim, theta), factors, strict=True)]


RopeScaling = Llama3Scaling | LinearScaling | YarnScaling | LongRopeScaling
"""How frequencies are changed for contexts longer than those of pretraining; a field each of a `config.json`'s."""


def rope_frequencies(dim: int, theta: float, scaling: RopeScaling | None) -> list[float]:
    """Inverse frequencies of the rotary embedding, in radians per position; `dim // 2` of them.

    Args:
        dim: how many of a head's entries are rotated.
    """
    return plain_frequencies(dim, theta) if scaling is None else scaling.frequencies(dim, theta)


Rope = tuple[Float[Array, "B T half"], Float[Array, "B T half"]]
"""Cosines and sines for each position, `half` being half of a head's entries that are rotated; 0 where none are."""


def rope_tables(positions: Int[Array, "B T"], frequencies: list[float], attention_factor: float = 1.0) -> Rope:
    """The rotation of each position, in float32."""
    angles = positions[..., None].astype(jnp.float32) * jnp.asarray(frequencies, jnp.float32)
    cos = jnp.cos(angles)
    sin = jnp.sin(angles)
    return (cos, sin) if attention_factor == 1 else (cos * attention_factor, sin * attention_factor)
