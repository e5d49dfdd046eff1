"""The TPU kernel for attention: interpreted against the reference, and compiled for absent TPUs."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.attention_checks import by_lengths
from tilewright.compiled.aot import compile_for
from tilewright.kernels.attention import pallas_tpu, reference
from tilewright.kernels.masks import AttentionMask
from tilewright.kernels.operations import KeyValueRows

Case = tuple[jax.Array, jax.Array, jax.Array, jax.Array, tuple[jax.Array, jax.Array] | None]

SIZES = [(1, 1, 2, 2, 40, 0), (3, 5, 1, 3, 17, 5), (2, 12, 2, 2, 32, 16), (1, 3, 3, 1, 1, 1)]
"""Rows, queries, key heads, query heads to each, entries, own entries: whole and part blocks of entries and of queries."""


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pallas_tpu, "ROWS", 16)
    monkeypatch.setattr(pallas_tpu, "ENTRIES", 16)


def run(case: Case) -> np.ndarray:
    return np.asarray(jax.jit(by_lengths(partial(pallas_tpu.attend, interpret=True)))(*case).astype(jnp.float32))


def case_of(seed: int, sizes: tuple[int, ...], dtype: jnp.dtype = jnp.float32) -> Case:
    b, t, heads, group, s, u = sizes
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), dtype)

    extra = (normal(b, heads, u, 128), normal(b, heads, u, 128)) if u else None
    lengths = jnp.asarray(rng.integers(0, s + 1, (b, t)), jnp.int32)
    return normal(b, t, heads * group, 128), normal(b, heads, s, 128), normal(b, heads, s, 128), lengths, extra


@given(st.integers(0, 2**31 - 1), st.sampled_from(SIZES))
def test_equals_the_reference(seed: int, sizes: tuple[int, ...]):
    """Tests lengths from 0, which gives zeros, to the whole cache."""
    case = case_of(seed, sizes)
    # Sums of up to 48 weighted values of size 1 in float32, in another order.
    np.testing.assert_allclose(run(case), by_lengths(reference.attend)(*case), atol=4e-6, rtol=0)


def test_bfloat16_stays_close():
    case = case_of(3, SIZES[2], jnp.bfloat16)
    np.testing.assert_allclose(run(case), by_lengths(reference.attend)(*case).astype(jnp.float32), atol=0.03, rtol=0)


def test_what_no_query_sees_has_no_influence():
    """Stale entries behind the lengths, in a block that is read and in one that is not."""
    q, k, v, _, _ = case_of(4, (1, 4, 2, 2, 40, 0))
    lengths = jnp.asarray([[3, 5, 0, 11]], jnp.int32)
    clean = run((q, k, v, lengths, None))
    stale = run((q, k.at[:, :, 11:].set(1e6), v.at[:, :, 11:].set(-1e6), lengths, None))
    np.testing.assert_array_equal(clean, stale)
    assert np.isfinite(clean).all()
    assert (clean[0, 2] == 0).all()


def test_what_fits():
    q, k, _, _, extra = case_of(5, SIZES[1])

    def refused(q: jax.Array, k: jax.Array, block_kv: Any, window: int | None = None) -> str:
        return pallas_tpu.refuses(q, KeyValueRows(k, k), AttentionMask(jnp.zeros((3, 1), jnp.int32), window=window), block_kv)

    assert not refused(q, k, extra)
    assert not refused(q, k, None)
    assert refused(q[..., :64], k[..., :64], None)
    assert refused(q.astype(jnp.bfloat16), k, None)
    assert refused(q, k, None, window=5)
    assert extra is not None
    wide = jnp.zeros((3, 1, pallas_tpu.BLOCK_KEYS + 1, 128))
    assert refused(q, k, (wide, wide))


@pytest.mark.tpu
@pytest.mark.parametrize("extras", [0, 15])
def test_on_a_tpu_the_scores_are_never_in_memory(monkeypatch: pytest.MonkeyPatch, extras: int):
    monkeypatch.undo()
    shaped = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    keys = (shaped((1, 8, 1152, 128)),) * 2
    extra = (shaped((1, 8, extras, 128)),) * 2 if extras else None
    lengths = jax.ShapeDtypeStruct((1, 128), jnp.int32)
    compiled = compile_for("v5e:1x1", by_lengths(pallas_tpu.attend), shaped((1, 128, 32, 128)), *keys, lengths, extra)
    assert any("tpu_custom_call" in name for name in compiled.without_cycles)
    assert not compiled.traffic().contains_shape((8, 512, 1152))
