"""The shared layers against NumPy in float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.models import layers
from tilewright.models.layers import KeyValues, RopeScaling

seeds = st.integers(0, 2**31 - 1)
LLAMA31 = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def attention_float64(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Head by head and query by query, over the visible keys only; NaN where a query sees none."""
    (b, t, n, d), heads = q.shape, k.shape[1]
    mask = np.broadcast_to(mask, (b, t, k.shape[2]))
    out = np.full((b, t, n, d), np.nan)
    for row, at, head in np.ndindex(b, t, n):
        seen = mask[row, at]
        if seen.any():
            keys = k[row, head // (n // heads)][seen].astype(np.float64)
            values = v[row, head // (n // heads)][seen].astype(np.float64)
            out[row, at, head] = softmax(keys @ q[row, at, head].astype(np.float64) / math.sqrt(d)) @ values
    return out


@given(seeds, st.sampled_from([1, 4]), st.sampled_from([1, 70]), st.sampled_from([1, 33]))
def test_linear(seed: int, rows: int, d_in: int, d_out: int):
    rng = np.random.default_rng(seed)
    x, w = normal(rng, rows, d_in), normal(rng, d_in, d_out)
    expected = x.astype(np.float64) @ w.astype(np.float64)
    np.testing.assert_allclose(layers.linear(jnp.asarray(x), jnp.asarray(w)), expected, rtol=0, atol=2e-6 * d_in)


def test_float32_products_ask_for_full_precision():
    """TPU and GPU would round the inputs otherwise; bfloat16 leaves the choice to the chip."""
    x, bf16 = jnp.ones((2, 4)), jnp.ones((2, 4), jnp.bfloat16)
    assert "HIGHEST" in str(jax.make_jaxpr(layers.linear)(x, x.T))
    assert "HIGHEST" not in str(jax.make_jaxpr(layers.linear)(bf16, bf16.T))


@given(
    seeds,
    st.sampled_from([1, 5]),
    st.sampled_from([1, 2, 130]),
    st.sampled_from([1e-6, 1e-5, 0.1]),
    st.sampled_from([1e-4, 1.0, 100.0]),
)
def test_rms_norm(seed: int, rows: int, size: int, eps: float, magnitude: float):
    rng = np.random.default_rng(seed)
    x, weight = normal(rng, rows, size) * np.float32(magnitude), normal(rng, size)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + eps) * weight
    np.testing.assert_allclose(layers.rms_norm(jnp.asarray(x), jnp.asarray(weight), eps), expected, rtol=1e-5, atol=1e-7)


def test_rms_norm_of_bfloat16_is_computed_in_float32():
    """The sum of 4,096 squares would stop growing in bfloat16."""
    out = layers.rms_norm(jnp.full((1, 4096), 3.0, jnp.bfloat16), jnp.ones(4096, jnp.bfloat16), 1e-6)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out.astype(jnp.float32), 1.0)


@given(seeds, st.sampled_from([1, 3]), st.sampled_from([1, 40]), st.sampled_from([2, 33]))
def test_swiglu(seed: int, rows: int, hidden: int, inner: int):
    rng = np.random.default_rng(seed)
    arrays = normal(rng, rows, hidden), normal(rng, hidden, inner), normal(rng, hidden, inner), normal(rng, inner, hidden)
    x, gate, up, down = (a.astype(np.float64) for a in arrays)
    expected = ((x @ gate) / (1 + np.exp(-(x @ gate))) * (x @ up)) @ down
    actual = layers.swiglu(*(jnp.asarray(a) for a in arrays))
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=2e-6 * hidden * inner)


def llama3_frequencies(head_dim: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """By wavelength bands, as the Llama 3.1 release states it: keep the short, stretch the long, blend in between."""
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
        RopeScaling, st.floats(1.0, 64.0), st.floats(0.5, 2.0), st.floats(2.5, 8.0), st.sampled_from([16, 32, 1024, 8192])
    ),
)
def test_llama3_frequencies(head_dim: int, theta: float, scaling: RopeScaling):
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
    np.testing.assert_allclose(layers.rotate(jnp.asarray(x), rope), expected, atol=1e-5 + 1e-6 * positions.max(), rtol=0)


def test_rotate_makes_scores_depend_on_distance_alone():
    rng = np.random.default_rng(0)
    q, k = jnp.asarray(normal(rng, 1, 1, 1, 32)), jnp.asarray(normal(rng, 1, 1, 1, 32))
    frequencies = layers.rope_frequencies(32, 1e4, LLAMA31)

    def score(at: int, to: int) -> float:
        turned = [layers.rotate(x, layers.rope_tables(jnp.full((1, 1), p), frequencies)) for x, p in ((q, at), (k, to))]
        return float(jnp.sum(turned[0] * turned[1]))

    assert score(7, 3) == pytest.approx(score(104, 100), abs=1e-4)
    assert abs(score(7, 3) - score(3, 7)) > 1e-2


@st.composite
def attention_cases(draw: st.DrawFn):
    # Few sizes, so that most examples find their shapes compiled.
    heads, group = draw(st.sampled_from([(3, 1), (1, 4), (2, 3)]))
    b, t, s, half = draw(st.sampled_from([(1, 1, 9, 4), (3, 4, 6, 2)]))
    rng = np.random.default_rng(draw(seeds))
    q = normal(rng, b, t, heads * group, 2 * half) * 3
    k, v = normal(rng, b, heads, s, 2 * half), normal(rng, b, heads, s, 2 * half)
    mask = rng.random((draw(st.sampled_from([1, b])), t, s)) < draw(st.sampled_from([0.15, 0.6, 1.0]))
    return q, k, v, mask


@given(attention_cases())
def test_attention(case: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]):
    """All group sizes and masks; a query that sees nothing gives something finite, whatever it is."""
    expected = attention_float64(*case)
    actual = np.asarray(layers.attention(*(jnp.asarray(a) for a in case)))
    assert np.isfinite(actual).all()
    seen = ~np.isnan(expected)
    np.testing.assert_allclose(actual[seen], expected[seen], atol=2e-5, rtol=0)


@given(attention_cases(), st.integers(1, 8))
def test_attention_over_parts_is_attention_over_their_union(
    case: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray], cut: int
):
    q, k, v, mask = (jnp.asarray(a) for a in case)
    cut = min(cut, k.shape[2])
    parts = [KeyValues(k[:, :, part], v[:, :, part], mask[:, :, part]) for part in (slice(cut), slice(cut, None))]
    whole = np.asarray(layers.attention(q, k, v, mask))
    seen = np.broadcast_to(np.asarray(mask).any(axis=-1), whole.shape[:2])
    np.testing.assert_allclose(np.asarray(layers.attention_over(q, parts))[seen], whole[seen], atol=2e-6, rtol=0)


def test_hidden_keys_have_no_influence_at_all():
    rng = np.random.default_rng(1)
    q, k, v = (jnp.asarray(normal(rng, *shape)) for shape in ((1, 2, 4, 8), (1, 2, 5, 8), (1, 2, 5, 8)))
    mask = jnp.asarray([[[True, True, False, True, False]] * 2])
    hidden = ~mask[0, 0][None, None, :, None]
    out = layers.attention(q, k, v, mask)
    changed = layers.attention(q, jnp.where(hidden, 50.0, k), jnp.where(hidden, -1e6, v), mask)
    np.testing.assert_array_equal(out, changed)


def test_attention_of_bfloat16_stays_bfloat16_and_close():
    rng = np.random.default_rng(2)
    q, k, v = (jnp.asarray(normal(rng, *shape), jnp.bfloat16) for shape in ((2, 3, 4, 16), (2, 2, 6, 16), (2, 2, 6, 16)))
    mask = np.ones((1, 3, 6), bool)
    out = layers.attention(q, k, v, jnp.asarray(mask))
    assert out.dtype == jnp.bfloat16
    expected = attention_float64(np.asarray(q, np.float32), np.asarray(k, np.float32), np.asarray(v, np.float32), mask)
    np.testing.assert_allclose(out.astype(jnp.float32), expected, atol=0.03)


def test_group_rows_puts_a_group_beside_its_key_head():
    q = jnp.arange(2 * 3 * 6 * 2, dtype=jnp.float32).reshape(2, 3, 6, 2)
    rows = layers.group_rows(q, 2)
    assert rows.shape == (2, 2, 9, 2)
    for head, at in np.ndindex(6, 3):
        np.testing.assert_array_equal(rows[:, head // 3, head % 3 * 3 + at], q[:, at, head])
    np.testing.assert_array_equal(layers.ungroup_rows(rows, 3), q)
