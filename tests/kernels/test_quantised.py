"""Keys and values in 8 bits: how they are made, each implementation against NumPy, and what compiled programs read."""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels import linear_checks, quantised_checks
from kernels.attention_checks import over_pages
from kernels.quantised_checks import attended
from kernels.test_attention import needs_native, seeds
from kernels.test_select import sizes
from tilewright.compiled.aot import compile_for
from tilewright.kernels import select
from tilewright.kernels.attention import xla as attention_xla
from tilewright.kernels.bundles.tpu import TPU
from tilewright.kernels.operations import KeyValuePages, Quantised
from tilewright.kernels.paged import xla
from tilewright.kernels.paged.quantise import dequantise, quantise

CASES = [
    *linear_checks.APPENDED[:2],
    linear_checks.Appended(jnp.bfloat16, 17, False, (17, 9), head_dim=64),
    linear_checks.Appended(jnp.float32, 3, True, (2, 3), head_dim=144),
]
CUT = list(zip(CASES, (16, 48, 16, 32), strict=True))
"""Cases with the number of entries per page."""


@given(seeds, st.sampled_from([1e-20, 1.0, 1e20]), st.sampled_from([jnp.float32, jnp.bfloat16]))
def test_a_number_is_at_most_half_a_step_off(seed: int, size: float, dtype: Any):
    """Of a vector whose largest number may lie far from the others; the largest itself is kept."""
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.standard_normal((5, 3, 32)) * size * 10.0 ** rng.uniform(-3, 3, (5, 3, 1)), dtype)
    held = quantise(x)
    exact = np.asarray(x.astype(jnp.float32), np.float64)
    assert (held.values.dtype, held.scale.dtype, held.scale.shape) == (jnp.int8, jnp.float32, (5, 3))
    largest = np.max(np.abs(exact), axis=-1, keepdims=True)
    np.testing.assert_allclose(np.asarray(held.scale, np.float64)[..., None], largest / 127, rtol=2**-22)
    assert (np.max(np.abs(np.asarray(held.values, np.int32)), axis=-1) == 127).all()
    error = np.abs(np.asarray(dequantise(held, jnp.float32), np.float64) - exact)
    assert (error <= largest / 254 * (1 + 254 * 4 * 2.0**-24)).all()


def test_vectors_of_zeros_and_vectors_that_are_not_finite():
    held = quantise(jnp.asarray([[0.0, 0.0], [1e-35, -1e-38], [jnp.nan, 1.0], [-jnp.inf, 0.0]]))
    assert (held.values == 0).all()
    np.testing.assert_array_equal(held.scale, [0, 0, np.nan, np.nan])


@pytest.mark.parametrize(("case", "entries"), CUT, ids=str)
def test_xla_attends_to_what_is_held(case: linear_checks.Appended, entries: int):
    quantised_checks.check(quantised_checks.by_xla, replace(case, capacity=96).draw(0), entries, 0)


@needs_native
@pytest.mark.parametrize(("case", "entries"), CUT, ids=str)
def test_the_cpu_kernel_attends_to_what_is_held(case: linear_checks.Appended, entries: int):
    """A row gets the same bits for any other rows and any split of its positions into calls."""
    quantised_checks.check_cpu(replace(case, capacity=96).draw(1), entries, 1)


@needs_native
@given(seeds)
def test_both_write_the_same(seed: int):
    """Numbers in the middle between two steps are excepted."""
    case = replace(CASES[1], capacity=96).draw(seed)
    pool, table = quantised_checks.drawn_pool(case, 16, seed)
    cpu, by_xla = (run(case, pool, table)[1] for run in (quantised_checks.by_cpu, quantised_checks.by_xla))
    for one, other in zip(cpu, by_xla, strict=True):
        np.testing.assert_allclose(one.scale, other.scale, rtol=2**-7)  # norm and rotation may round otherwise
        assert np.max(np.abs(np.asarray(one.values, np.int32) - np.asarray(other.values, np.int32))) <= 2


@given(seeds)
def test_what_8_bits_cost_an_output(seed: int):
    """A score is off by at most e = |q| |k|max / 254 / sqrt(D), summed over the query's numbers; so weights by e^(2e)."""
    rng = np.random.default_rng(seed)
    q = rng.standard_normal(64)
    k = rng.standard_normal((40, 64))
    v = rng.standard_normal((40, 64))
    keys, values = (np.asarray(dequantise(quantise(jnp.asarray(x)), jnp.float32), np.float64) for x in (k, v))
    e = np.abs(q).sum() * np.abs(k).max() / 254 / math.sqrt(64)
    bound = np.expm1(2 * e) * np.abs(v).max() + np.abs(v).max() / 254
    assert np.abs(attended(q, keys, values, 40) - attended(q, k, v, 40)).max() <= bound * (1 + 1e-5)


def test_xla_gives_a_row_the_same_bits_beside_longer_ones():
    """Tests page tables of several blocks."""
    rng = np.random.default_rng(0)
    table = jnp.asarray(np.random.default_rng(1).permutation(40)[:40].reshape(2, 20), jnp.int32)

    def held() -> Quantised:
        return quantise(jnp.asarray(rng.standard_normal((40, 2, 64, 32)), jnp.float32))

    pool = KeyValuePages(held(), held())
    q = jnp.asarray(rng.standard_normal((2, 3, 4, 32)), jnp.float32)
    attend = jax.jit(over_pages(attention_xla.attend))
    lengths = [np.asarray([[90, 91, 92], [other] * 3], np.int32) for other in (1, 600, 1280)]
    found = [np.asarray(attend(q, pool, table, each))[0] for each in lengths]
    assert (found[0] == found[1]).all()
    assert (found[0] == found[2]).all()


@needs_native
def test_pools_are_written_in_place():
    case = replace(CASES[1], capacity=96).draw(0)
    pool, table = quantised_checks.drawn_pool(case, 16, 0)
    run = jax.jit(lambda case, pool: quantised_checks.by_cpu(case, pool, jnp.asarray(table)), donate_argnums=1)
    compiled = run.lower(case, pool).compile()
    before = [part.unsafe_buffer_pointer() for part in jax.tree.leaves(pool)]
    assert [part.unsafe_buffer_pointer() for part in jax.tree.leaves(compiled(case, pool)[1])] == before


@needs_native
def test_pages_of_other_scales_are_refused():
    case = replace(CASES[1], capacity=96).draw(0)
    pool, table = quantised_checks.drawn_pool(case, 16, 0)
    wrong = pool._replace(k=pool.k._replace(scale=pool.k.scale[:-1]))
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="expected a scale for each vector"):
        jax.block_until_ready(quantised_checks.by_cpu(case, wrong, table)[0])


def test_on_a_tpu_xla_computes_over_8_bits():
    """The ragged kernel has one scale for all keys; its refusal has the reason."""
    made = jax.eval_shape(lambda: TPU.pages(4, 8, 16, 128, jnp.int8))
    assert isinstance(made, KeyValuePages)
    assert made.k.values.dtype == jnp.int8
    assert made.k.scale.shape == (4, 8, 16)
    (choice,) = select.implementations(sizes(128), jnp.bfloat16, "tpu", operations=("paged attention",), kv_dtype="int8")
    assert choice.runs == "XLA"
    assert "one scale for all keys" in choice.unavailable


@pytest.mark.parametrize("case", CASES[1:3], ids=str)
def test_xlas_way_is_lowered_for_gpus(case: linear_checks.Appended):
    """Lowers for CUDA and ROCm without a GPU: 8-bit pools are operands, and all operations are XLA's."""
    drawn = replace(case, capacity=96).draw(0)
    pool, table = quantised_checks.drawn_pool(drawn, 16, 0)
    text = quantised_checks.by_xla.trace(drawn, pool, table).lower(lowering_platforms=("cuda", "rocm")).as_text()
    main = next(line for line in text.splitlines() if "func.func public @main" in line)
    assert main.count(f"tensor<{'x'.join(map(str, pool.k.values.shape))}xi8>") >= 2
    assert "custom_call" not in text


@pytest.mark.tpu
def test_a_tpu_copies_8_bits_out_of_the_pool():
    """A block of 512 entries at a time, converted there: nothing of the pool's size is in bfloat16 or float32."""
    pages = 256
    heads = 8
    size = 128
    shapes = ((2, 1, 32, size), jnp.bfloat16), ((2, 64), jnp.int32), ((2, 1), jnp.int32)
    q, table, lengths = (jax.ShapeDtypeStruct(*each) for each in shapes)
    pool = jax.eval_shape(lambda: xla.pages(pages, heads, 64, size, jnp.int8))
    compiled = compile_for("v5e:1x1", over_pages(attention_xla.attend), q, pool, table, lengths)
    whole = f"[{pages},{heads},64,{size}]"
    block = f"[2,8,{heads},64,{size}]"
    assert f"s8{whole}" in compiled.hlo
    assert [line for line in compiled.hlo.splitlines() if f"= s8{block}" in line and " gather(" in line]
    assert not [kind for kind in ("bf16", "f32") if f"{kind}{whole}" in compiled.hlo]
    assert compiled.temp_bytes < pages * heads * 64 * size
