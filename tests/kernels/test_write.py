"""Entries written into caches and rows taken from tables, in place and in every type: the kernels against plain NumPy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.kernels import native
from tilewright.kernels.gather_rows import cpu as gather_cpu
from tilewright.kernels.gather_rows import xla as gather_xla
from tilewright.kernels.operations import KeyValueRows
from tilewright.kernels.write import cpu as write_cpu
from tilewright.kernels.write import xla as write_xla

needs_native = pytest.mark.skipif(native.kernels().isa is None, reason=native.kernels().reason or "no kernels")
DTYPES = st.sampled_from([jnp.bfloat16, jnp.float32, jnp.int8])
SHAPES = st.sampled_from([(1, 1, 1, 1, 1), (3, 2, 9, 3, 4), (2, 1, 7, 5, 7)])
WRITES = [pytest.param(write_cpu.write, id="cpu", marks=needs_native), pytest.param(write_xla.write, id="xla")]
GATHERS = [pytest.param(gather_cpu.gather_rows, id="cpu", marks=needs_native), pytest.param(gather_xla.gather_rows, id="xla")]


@pytest.mark.parametrize("write", WRITES)
@given(st.data())
def test_only_the_counted_entries_are_written(write: Any, data: st.DataObject):
    dtype, (batch, heads, slots, size, new_entries) = data.draw(DTYPES), data.draw(SHAPES)
    counts = [data.draw(st.integers(0, new_entries)) for _ in range(batch)]
    starts = [data.draw(st.integers(0, slots - count)) for count in counts]
    cache = jnp.arange(batch * heads * slots * size).reshape(batch, heads, slots, size).astype(dtype)
    new = (-1 - jnp.arange(batch * heads * new_entries * size) % 100).reshape(batch, heads, new_entries, size).astype(dtype)
    expected = np.array(cache)
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        expected[row, :, start : start + count] = np.asarray(new)[row, :, :count]
    after = jax.jit(write)(KeyValueRows(cache, -cache), new, -new, jnp.asarray(starts), jnp.asarray(counts))
    for found, wanted in zip(after, (expected, -expected), strict=True):
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, wanted)


@needs_native
@pytest.mark.parametrize(
    ("start", "count", "said"), [(0, 4, "a count is out of range: 4"), (6, 3, "3 entries from 6 on do not fit")]
)
def test_entries_that_do_not_fit_are_refused(start: int, count: int, said: str):
    cache = jnp.zeros((1, 1, 8, 2))
    new = jnp.ones((1, 1, 3, 2))
    with pytest.raises(Exception, match=said):
        jax.block_until_ready(write_cpu.write(KeyValueRows(cache, cache), new, new, jnp.asarray([start]), jnp.asarray([count])))


@needs_native
def test_a_loop_writes_a_cache_where_it_is():
    cache = KeyValueRows(*(jnp.zeros((1, 2, 512, 64), jnp.bfloat16) for _ in range(2)))
    new = jnp.ones((1, 2, 4, 64), jnp.bfloat16)

    def filled(cache: KeyValueRows, new: jax.Array) -> KeyValueRows:
        one = jnp.ones(1, jnp.int32)
        return jax.lax.fori_loop(0, 8, lambda n, cache: write_cpu.write(cache, new, new, 4 * n * one, 4 * one), cache)

    compiled = jax.jit(filled, donate_argnums=0).lower(cache, new).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < cache.k.nbytes
    for part in compiled(cache, new):
        np.testing.assert_array_equal(jnp.sum(part, axis=2), np.full((1, 2, 64), 32))


@pytest.mark.parametrize("gather", GATHERS)
@given(st.integers(0, 2**31 - 1), st.sampled_from([1, 40]), st.sampled_from([1, 67]), DTYPES)
def test_rows_of_a_table(gather: Any, seed: int, rows: int, size: int, dtype: Any):
    rng = np.random.default_rng(seed)
    table = jnp.asarray(rng.integers(-100, 100, (rows, size)), dtype)
    index = rng.integers(0, rows, (2, 3))
    found = jax.jit(gather)(table, index)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, np.asarray(table)[index])


@needs_native
def test_places_outside_a_table_are_taken_as_xla_takes_them():
    table = jnp.arange(12.0).reshape(4, 3)
    index = jnp.asarray([4, 1000])
    np.testing.assert_array_equal(gather_cpu.gather_rows(table, index), gather_xla.gather_rows(table, index))
