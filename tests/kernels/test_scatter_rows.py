"""Rows written into a table, in place and in every type, against plain NumPy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.kernels import native
from tilewright.kernels.scatter_rows import cpu, xla

needs_native = pytest.mark.skipif(native.kernels().isa is None, reason=native.kernels().reason or "no kernels")
SCATTERS = pytest.mark.parametrize(
    "scatter", [pytest.param(cpu.scatter_rows, id="cpu", marks=needs_native), pytest.param(xla.scatter_rows, id="xla")]
)
DTYPES = st.sampled_from([jnp.bfloat16, jnp.float32, jnp.int8])


@SCATTERS
@given(st.integers(0, 2**31 - 1), DTYPES, st.sampled_from([(1, 1, 1), (7, 5, 3), (40, 9, 67), (4, 9, 16)]))
def test_rows_go_to_their_places_and_those_that_have_none_nowhere(
    scatter: Any, seed: int, dtype: Any, sizes: tuple[int, int, int]
):
    places, rows, width = sizes
    rng = np.random.default_rng(seed)
    index = rng.permutation(np.arange(-rows, places + rows))[:rows].astype(np.int32)
    table, new = (jnp.asarray(rng.integers(-100, 100, (n, width)), dtype) for n in (places, rows))
    expected = np.array(table)
    for row, at in enumerate(index):
        if 0 <= at < places:
            expected[at] = np.asarray(new)[row]
    found = jax.jit(scatter)(table, index, new)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, expected)


@SCATTERS
@pytest.mark.parametrize("far", [-1, -(2**31), 5, 2**31 - 1])
def test_an_index_outside_is_no_place_however_far(scatter: Any, far: int):
    table = jnp.arange(10.0).reshape(5, 2)
    new = -jnp.ones((2, 2))
    found = jax.jit(scatter)(table, jnp.asarray([far, 3]), new)
    np.testing.assert_array_equal(found, np.array(table.at[3].set(-1)))


@SCATTERS
def test_many_rows_may_go_nowhere(scatter: Any):
    table = jnp.arange(6.0).reshape(3, 2)
    np.testing.assert_array_equal(jax.jit(scatter)(table, jnp.full(4, -1), jnp.ones((4, 2))), table)
    np.testing.assert_array_equal(jax.jit(scatter)(table, jnp.zeros(0, jnp.int32), jnp.ones((0, 2))), table)


@SCATTERS
def test_rows_become_the_tables_type(scatter: Any):
    found = jax.jit(scatter)(jnp.zeros((3, 2), jnp.bfloat16), jnp.asarray([2]), jnp.full((1, 2), 1.001))
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(found, np.float32)[2], np.asarray(jnp.bfloat16(1.001), np.float32))


@SCATTERS
def test_a_table_that_is_read_afterwards_keeps_its_rows(scatter: Any):
    table = jnp.arange(6.0).reshape(3, 2)
    new = jnp.full((1, 2), -1.0)

    @jax.jit
    def both(table: jax.Array) -> tuple[jax.Array, jax.Array]:
        return scatter(table, jnp.asarray([1]), new), table * 2

    written, doubled = both(table)
    np.testing.assert_array_equal(written, [[0, 1], [-1, -1], [4, 5]])
    np.testing.assert_array_equal(doubled, 2 * np.arange(6.0).reshape(3, 2))
    np.testing.assert_array_equal(table, np.arange(6.0).reshape(3, 2))


@SCATTERS
def test_a_table_of_more_dims_is_one_of_rows(scatter: Any):
    table = jnp.arange(48.0).reshape(2, 3, 4, 2)
    index = jnp.asarray([5, -1, 0, 6])
    new = -jnp.ones((4, 8))
    found = jax.jit(scatter)(table, index, new)
    np.testing.assert_array_equal(found, jax.jit(scatter)(table.reshape(6, 8), index, new).reshape(table.shape))


@needs_native
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", [(512, 64), (2, 256, 4, 16)])
def test_a_loop_writes_a_donated_table_where_it_is(dtype: Any, shape: tuple[int, ...]):
    """No instruction copies it, and the buffer stays what it was."""
    table = jnp.zeros(shape, dtype)
    rows = jnp.ones((4, 64), dtype)

    def filled(table: jax.Array, rows: jax.Array) -> jax.Array:
        index = jnp.arange(4, dtype=jnp.int32)
        return jax.lax.fori_loop(0, 128, lambda n, table: cpu.scatter_rows(table, index + 4 * n, rows), table)

    compiled = jax.jit(filled, donate_argnums=0).lower(table, rows).compile()
    text = compiled.as_text() or ""
    assert "tilewright_scatter_rows" in text
    sizes = (f"[{','.join(map(str, each))}]" for each in (shape, (512, 64)))
    assert not [line for size in sizes for line in text.splitlines() if "copy(" in line and size in line]
    before = table.unsafe_buffer_pointer()
    after = compiled(table, rows)
    assert after.unsafe_buffer_pointer() == before
    assert (np.asarray(after, np.float32) == 1).all()


@needs_native
@pytest.mark.parametrize(
    ("table", "index", "rows"),
    [((3, 2), (2,), (3, 2)), ((3, 2), (2,), (2, 4)), ((3, 2), (1,), (0, 2)), ((3, 2), (2,), (2, 0))],
)
def test_what_does_not_fit_is_refused(table: tuple[int, ...], index: tuple[int, ...], rows: tuple[int, ...]):
    call = jax.ffi.ffi_call("tilewright_scatter_rows", jax.ShapeDtypeStruct(table, jnp.float32))
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="shapes or types do not fit"):
        jax.block_until_ready(jax.jit(call)(jnp.zeros(table), jnp.zeros(index, jnp.int32), jnp.zeros(rows)))


@pytest.mark.parametrize(
    "swap", [pytest.param(cpu.swap_rows, id="cpu", marks=needs_native), pytest.param(xla.swap_rows, id="xla")]
)
@given(st.integers(0, 2**31 - 1), DTYPES)
def test_a_swap_gives_what_stood_there(swap: Any, seed: int, dtype: Any):
    rng = np.random.default_rng(seed)
    index = rng.permutation(np.arange(-3, 10))[:6].astype(np.int32)
    table = jnp.asarray(rng.integers(-100, 100, (2, 4, 3)), dtype)
    new = jnp.asarray(rng.integers(-100, 100, (6, 3)), dtype)
    after, old = jax.jit(swap)(table, index, new)
    np.testing.assert_array_equal(after, jax.jit(xla.scatter_rows)(table, index, new))
    flat = np.asarray(table).reshape(8, 3)
    for row, at in zip(np.asarray(old), index, strict=True):
        np.testing.assert_array_equal(row, flat[at] if 0 <= at < 8 else np.zeros(3, flat.dtype))
