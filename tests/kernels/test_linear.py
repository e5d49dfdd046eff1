"""The linear layer: every implementation against NumPy in float64, and the CPU kernel's promise that rows are independent."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.kernels import native, select
from tilewright.kernels.linear import cpu, reference, xla

seeds = st.integers(0, 2**31 - 1)
needs_native = pytest.mark.skipif(native.kernels().isa is None, reason=native.kernels().reason or "no kernels")
SIZES = st.sampled_from([(1, 1), (64, 16), (33, 100), (7, 250), (130, 48)])
"""Inputs and outputs: also such that fill neither a panel of 16 outputs nor a pair of inputs."""


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def packed_linear(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.jit(cpu.linear)(x, cpu.pack(w))


IMPLEMENTATIONS = [
    pytest.param(reference.linear, id="reference"),
    pytest.param(xla.linear, id="xla"),
    pytest.param(packed_linear, id="cpu", marks=needs_native),
]


def rounding(d_in: int, unit: float) -> float:
    """Bound on the error of a sum of `d_in` products of standard normal numbers: the root of their number, with a margin."""
    return 8 * unit * math.sqrt(d_in) + 4 * unit


@pytest.mark.parametrize("run", IMPLEMENTATIONS)
@given(seeds, st.sampled_from([1, 4, 16, 23]), SIZES)
def test_linear_float32(run, seed: int, rows: int, sizes: tuple[int, int]):
    rng = np.random.default_rng(seed)
    x, w = normal(rng, rows, sizes[0]), normal(rng, *sizes)
    expected = x.astype(np.float64) @ w.astype(np.float64)
    actual = np.asarray(run(jnp.asarray(x), jnp.asarray(w)))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=rounding(sizes[0], 2**-22))


@pytest.mark.parametrize("run", IMPLEMENTATIONS)
@given(seeds, st.sampled_from([1, 16]), SIZES)
def test_linear_bfloat16(run, seed: int, rows: int, sizes: tuple[int, int]):
    """Inputs are bfloat16 numbers, so that only sums and the result's own rounding differ."""
    rng = np.random.default_rng(seed)
    x, w = jnp.asarray(normal(rng, rows, sizes[0]), jnp.bfloat16), jnp.asarray(normal(rng, *sizes), jnp.bfloat16)
    expected = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    actual = np.asarray(run(x, w), np.float64)
    bound = rounding(sizes[0], 2**-20) + 2**-8 * np.abs(expected)
    assert (np.abs(actual - expected) <= bound).all()


@needs_native
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@given(seeds, SIZES)
def test_a_row_gets_the_same_bits_whatever_the_number_of_rows(dtype, seed: int, sizes: tuple[int, int]):
    rng = np.random.default_rng(seed)
    x, w = jnp.asarray(normal(rng, 37, sizes[0]), dtype), cpu.pack(jnp.asarray(normal(rng, *sizes), dtype))
    run = jax.jit(lambda x, w: cpu.linear(x, w, jnp.float32))
    whole = np.asarray(run(x, w))
    for rows in (1, 2, 3, 8, 16, 21):
        np.testing.assert_array_equal(run(x[:rows], w), whole[:rows])
        np.testing.assert_array_equal(run(x[-rows:], w), whole[-rows:])


@needs_native
@given(seeds, st.sampled_from([1, 16]), st.sampled_from([(64, 48), (33, 100)]))
def test_gated_linear(seed: int, rows: int, sizes: tuple[int, int]):
    rng = np.random.default_rng(seed)
    x, gate, up = (jnp.asarray(normal(rng, *shape)) for shape in ((rows, sizes[0]), sizes, sizes))
    gate = gate / 4
    wide = [np.asarray(a, np.float64) for a in (x, gate, up)]
    g = wide[0] @ wide[1]
    expected = g / (1 + np.exp(-g)) * (wide[0] @ wide[2])
    for actual in (
        jax.jit(cpu.linear)(x, cpu.pack_gated(gate, up)),
        select.gated_linear(x, gate, up),
        reference.gated_linear(x, gate, up),
    ):
        np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=rounding(sizes[0], 2**-19))


def test_gates_far_from_zero_saturate():
    """exp is clamped inside the kernel: silu must still be 0 on the far left and the identity on the far right."""
    if native.kernels().isa is None:
        pytest.skip(native.kernels().reason)
    x = jnp.asarray([[-1e4], [1e4], [0.0]], jnp.float32)
    one = jnp.ones((1, 1), jnp.float32)
    actual = np.asarray(jax.jit(cpu.linear)(x, cpu.pack_gated(one, one)))[:, 0]
    np.testing.assert_allclose(actual, [0.0, 1e8, 0.0], atol=1e-25, rtol=1e-6)


def test_float32_products_ask_for_full_precision():
    """TPU and GPU would round the inputs otherwise; bfloat16 leaves the choice to the chip."""
    x, bf16 = jnp.ones((2, 4)), jnp.ones((2, 4), jnp.bfloat16)
    assert "HIGHEST" in str(jax.make_jaxpr(xla.linear)(x, x.T))
    assert "HIGHEST" not in str(jax.make_jaxpr(xla.linear)(bf16, bf16.T))


@needs_native
def test_the_weights_decide_which_kernel_is_in_the_program():
    x, w = jnp.ones((2, 32)), jnp.ones((32, 16))
    assert "tilewright_linear" in jax.jit(select.linear).lower(x, cpu.pack(w)).as_text()
    assert "tilewright_linear" not in jax.jit(select.linear).lower(x, w).as_text()


@needs_native
def test_weights_that_do_not_fit_are_refused():
    w = cpu.pack(jnp.ones((32, 16)))
    with pytest.raises(jax.errors.JaxRuntimeError, match="do not fit"):
        jax.block_until_ready(jax.jit(cpu.linear)(jnp.ones((2, 30)), w))
