"""The shared layers against NumPy in float64."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.kernels.heads.xla import rotate_by_product, rotate_halves
from tilewright.kernels.operations import Joined
from tilewright.kernels.select import PLAIN
from tilewright.models import layers
from tilewright.models.config import for_context
from tilewright.models.decoder import config_from_hf, config_to_hf
from tilewright.models.layers import Llama3Scaling

seeds = st.integers(0, 2**31 - 1)
LLAMA31 = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


@given(
    seeds,
    st.sampled_from([1, 5]),
    st.sampled_from([1, 2, 130]),
    st.sampled_from([1e-6, 1e-5, 0.1]),
    st.sampled_from([1e-4, 1.0, 100.0]),
)
def test_rms_norm(seed: int, rows: int, size: int, eps: float, magnitude: float):
    rng = np.random.default_rng(seed)
    x = normal(rng, rows, size) * np.float32(magnitude)
    weight = normal(rng, size)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + eps) * weight
    np.testing.assert_allclose(PLAIN.rms_norm(jnp.asarray(x), jnp.asarray(weight), eps), expected, rtol=1e-5, atol=1e-7)


def test_rms_norm_of_bfloat16_is_computed_in_float32():
    """Rounded once, at the end; and a sum of 4,096 squares would stop growing in bfloat16."""
    x = jnp.asarray(normal(np.random.default_rng(0), 4, 4096), jnp.bfloat16)
    wide = np.asarray(x, np.float64)
    expected = jnp.asarray(wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True)), jnp.bfloat16)
    out = PLAIN.rms_norm(x, jnp.ones(4096, jnp.bfloat16), 1e-9)
    assert out.dtype == jnp.bfloat16
    assert float(np.mean(np.asarray(out) == np.asarray(expected))) > 0.999


@given(seeds, st.sampled_from([1, 3]), st.sampled_from([1, 40]), st.sampled_from([2, 33]))
def test_swiglu(seed: int, rows: int, hidden: int, inner: int):
    rng = np.random.default_rng(seed)
    arrays = normal(rng, rows, hidden), normal(rng, hidden, inner), normal(rng, hidden, inner), normal(rng, inner, hidden)
    x, gate, up, down = (a.astype(np.float64) for a in arrays)
    expected = ((x @ gate) / (1 + np.exp(-(x @ gate))) * (x @ up)) @ down
    wide = [jnp.asarray(a) for a in arrays]
    actual = PLAIN.linear(PLAIN.gated_linear(wide[0], Joined((wide[1], wide[2]), gated=True)), wide[3])
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=2e-6 * hidden * inner)


def llama3_frequencies(head_dim: int, theta: float, scaling: Llama3Scaling) -> np.ndarray:
    """Llama 3.1's bands of wavelengths: keep the short, stretch the long, blend in between."""
    frequencies = 1 / theta ** (np.arange(0, head_dim, 2) / head_dim)
    wavelengths = 2 * np.pi / frequencies
    longest_kept = scaling.original_max_position_embeddings / scaling.high_freq_factor
    shortest_stretched = scaling.original_max_position_embeddings / scaling.low_freq_factor
    blend = (scaling.original_max_position_embeddings / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    kept_or_blended = np.where(wavelengths < longest_kept, frequencies, blended)
    return np.where(wavelengths > shortest_stretched, frequencies / scaling.factor, kept_or_blended)


@given(
    st.integers(1, 64).map(lambda half: 2 * half),
    st.floats(100.0, 1e7),
    st.builds(
        Llama3Scaling, st.floats(1.0, 64.0), st.floats(0.5, 2.0), st.floats(2.5, 8.0), st.sampled_from([16, 32, 1024, 8192])
    ),
)
def test_llama3_frequencies(head_dim: int, theta: float, scaling: Llama3Scaling):
    expected = llama3_frequencies(head_dim, theta, scaling)
    np.testing.assert_allclose(layers.rope_frequencies(head_dim, theta, scaling), expected, rtol=1e-12)


def test_llama31_frequencies_lie_in_all_three_bands():
    plain = np.array(layers.rope_frequencies(128, 500000.0, None))
    ratio = np.array(layers.rope_frequencies(128, 500000.0, LLAMA31)) / plain
    np.testing.assert_allclose(plain, 500000.0 ** (-np.arange(64) / 64), rtol=1e-12)
    assert (np.isclose(ratio, 1.0).sum(), np.isclose(ratio, 1 / 8).sum()) == (29, 29)  # below 2048 and above 8192 positions
    assert (np.diff(ratio) <= 1e-12).all()


@given(seeds, st.sampled_from([(1, 1, 1), (2, 5, 3)]), st.sampled_from([1, 6, 16]), st.integers(0, 30000))
def test_rotate(seed: int, sizes: tuple[int, int, int], half: int, first: int):
    """Each pair (i, i + D/2) is a complex number, turned by position times frequency."""
    rng = np.random.default_rng(seed)
    x = normal(rng, *sizes, 2 * half)
    positions = first + rng.integers(0, 50, sizes[:2])
    frequencies = layers.rope_frequencies(2 * half, 10000.0, None)
    # The angle is a float32 product, so its error grows with the position.
    angles = positions[..., None].astype(np.float64) * np.array(frequencies)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)[:, :, None]
    rope = layers.rope_tables(jnp.asarray(positions, jnp.int32), frequencies)
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    np.testing.assert_allclose(rotate_halves(jnp.asarray(x), *rope), expected, atol=1e-5 + 1e-6 * positions.max(), rtol=0)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rotation_by_a_product_is_the_same(dtype: jnp.dtype):
    x = jax.random.normal(jax.random.key(0), (2, 3, 4, 16), dtype)
    rope = layers.rope_tables(jnp.arange(6).reshape(2, 3), layers.rope_frequencies(16, 1e4, None))
    by_product = rotate_by_product(x, *rope)
    halves = rotate_halves(x, *rope)
    assert by_product.dtype == halves.dtype == dtype
    np.testing.assert_allclose(np.float32(by_product), np.float32(halves), atol=1e-6 if dtype == jnp.float32 else 2**-7)


def test_rotate_makes_scores_depend_on_distance_alone():
    rng = np.random.default_rng(0)
    q = jnp.asarray(normal(rng, 1, 1, 1, 32))
    k = jnp.asarray(normal(rng, 1, 1, 1, 32))
    frequencies = layers.rope_frequencies(32, 1e4, LLAMA31)

    def score(at: int, to: int) -> float:
        turned = [rotate_halves(x, *layers.rope_tables(jnp.full((1, 1), p), frequencies)) for x, p in ((q, at), (k, to))]
        return float(jnp.sum(turned[0] * turned[1]))

    assert score(7, 3) == pytest.approx(score(104, 100), abs=1e-4)
    assert abs(score(7, 3) - score(3, 7)) > 1e-2


PHI4_MINI: dict[str, Any] = {
    "model_type": "phi3",
    "architectures": ["Phi3ForCausalLM"],
    "vocab_size": 200064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.75,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "sliding_window": 262144,
    "tie_word_embeddings": True,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1 + n / 2 for n in range(48)]},
}
"""The form of the published configuration."""


def longrope(fields: dict[str, Any], length: int) -> tuple[np.ndarray, float]:
    """Inverse frequencies for texts of a length, and the attention factor, as transformers has them
    (`_compute_longrope_parameters`)."""
    scaling = fields["rope_scaling"]
    original = fields["original_max_position_embeddings"]
    dim = int(fields["hidden_size"] // fields["num_attention_heads"] * fields["partial_rotary_factor"])
    factors = np.asarray(scaling["long_factor" if length > original else "short_factor"])
    factor = fields["max_position_embeddings"] / original
    attention = np.sqrt(1 + np.log(factor) / np.log(original)) if factor > 1 else 1.0
    return 1 / (factors * fields["rope_theta"] ** (np.arange(0, dim, 2) / dim)), attention


@pytest.mark.parametrize("kind", ["longrope", "su"])
def test_longrope_goes_by_the_declared_context(kind: str):
    fields = {**PHI4_MINI, "rope_scaling": {**PHI4_MINI["rope_scaling"], "type": kind}}
    whole = config_from_hf(fields)
    for context, length in ((None, 131072), (200000, 131072), (4097, 4097), (4096, 4096), (100, 100)):
        config = for_context(whole, context)
        frequencies, attention = longrope(fields, length)
        np.testing.assert_allclose(config.rope_frequencies, frequencies, rtol=1e-12)
        cos, sin = config.rope_tables(jnp.asarray([[0, 3]]))["global"]
        np.testing.assert_allclose(cos[0, 1], np.cos(3 * frequencies) * attention, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(sin[0, 0], 0)
        assert config.max_position_embeddings == length
        if context is None:
            assert config_from_hf(json.loads(json.dumps(config_to_hf(config)))) == config
    plain = config_from_hf({**fields, "rope_scaling": None})
    assert for_context(plain, 100) is plain, "nothing follows from its context"
