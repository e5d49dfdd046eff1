"""RMS normalisation: the kernel against NumPy in float64, and its promise that rows are independent bit for bit."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.kernels import native, select
from tilewright.kernels.rms_norm import cpu, reference

needs_native = pytest.mark.skipif(native.kernels().isa is None, reason=native.kernels().reason or "no kernels")
WIDTHS = st.sampled_from([1, 7, 16, 33, 64, 256, 1000])
run = jax.jit(cpu.rms_norm, static_argnums=2)


def drawn(seed: int, rows: int, width: int, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, width)) * 10 ** rng.uniform(-3, 3)
    weight = rng.standard_normal(width)
    return jnp.asarray(x, dtype), jnp.asarray(weight, dtype)


@needs_native
@given(st.integers(0, 2**31 - 1), WIDTHS)
def test_float32_against_float64(seed: int, width: int):
    x, weight = drawn(seed, 5, width, jnp.float32)
    wide = np.asarray(x, np.float64)
    expected = np.asarray(weight, np.float64) * wide / np.sqrt(np.mean(wide**2, axis=1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(run(x, weight, 1e-6), expected, rtol=3e-6)


@needs_native
@given(st.integers(0, 2**31 - 1), WIDTHS)
def test_bfloat16_rounds_where_the_reference_does(seed: int, width: int):
    x, weight = drawn(seed, 5, width, jnp.bfloat16)
    got = run(x, weight, 1e-6)
    expected = reference.rms_norm(x, weight, 1e-6)
    assert got.dtype == jnp.bfloat16
    # Another order of the sum may tip one rounding; never more than to the next number.
    np.testing.assert_allclose(got.astype(jnp.float32), expected.astype(jnp.float32), rtol=2**-7)
    assert np.mean(np.asarray(got) != np.asarray(expected)) < 0.05


@needs_native
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@given(st.integers(0, 2**31 - 1), WIDTHS)
def test_a_row_gets_the_same_bits_whatever_the_number_of_rows(dtype: jnp.dtype, seed: int, width: int):
    x, weight = drawn(seed, 40, width, dtype)
    rows_of = np.asarray(x)
    whole = np.asarray(run(x, weight, 1e-5))
    for rows in (1, 3, 16):
        np.testing.assert_array_equal(run(rows_of[:rows], weight, 1e-5), whole[:rows])
        np.testing.assert_array_equal(run(rows_of[-rows:], weight, 1e-5), whole[-rows:])


@needs_native
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@given(st.integers(0, 2**31 - 1), st.sampled_from([1, 5, 150]), WIDTHS)
def test_training_norm_and_its_gradient(dtype: jnp.dtype, seed: int, rows: int, width: int):
    x, weight = drawn(seed, rows, width, jnp.float32)
    due = jnp.asarray(np.random.default_rng(seed).standard_normal((rows, width)), dtype)

    @jax.jit
    def both(x: jax.Array, weight: jax.Array, due: jax.Array) -> Any:
        y, back = jax.vjp(lambda x, weight: cpu.trained_norm(x, weight, 1e-6, dtype), x, weight)
        z, plain = jax.vjp(lambda x, weight: reference.rms_norm(x, weight, 1e-6), x, weight)
        return (y, *back(due)), (z, *plain(due.astype(jnp.float32)))

    found, expected = both(x, weight, due)
    np.testing.assert_allclose(found[0].astype(jnp.float32), expected[0], rtol=3e-6 if dtype == jnp.float32 else 2**-8)
    for one, other in zip(found[1:], expected[1:], strict=True):
        # Of numbers that all but cancel: what they are made of decides.
        made_of = max(float(jnp.abs(other).max()), float(np.abs(weight).max() / np.sqrt(np.mean(np.square(x)))))
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * made_of)


@needs_native
def test_the_bundle_decides_which_kernel_is_in_the_program():
    x, weight = drawn(0, 2, 32, jnp.float32)
    for ops, runs in ((select.operations("cpu"), True), (select.operations("cpu", kernels="xla"), False)):
        program = jax.jit(ops.rms_norm, static_argnums=2).lower(x, weight, 1e-6).as_text()
        assert ("tilewright_rms_norm" in program) is runs


@needs_native
def test_what_does_not_fit_is_refused():
    x, weight = drawn(0, 2, 32, jnp.float32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="tilewright_rms_norm"):
        jax.block_until_ready(run(x, weight.astype(jnp.bfloat16), 1e-6))
