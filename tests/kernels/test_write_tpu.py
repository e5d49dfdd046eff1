"""The TPU kernel that writes into caches: interpreted against plain NumPy, and compiled for TPUs that are not there."""

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.compiled.aot import compile_for
from tilewright.kernels.operations import KeyValueRows
from tilewright.kernels.write import pallas_tpu

SHAPES = [(1, 1, 32, 1), (3, 2, 48, 5), (4, 1, 64, 16), (2, 3, 48, 17)]
"""Rows, heads, entries of the cache, new entries."""


@cache
def interpreted(part_rows: int) -> Callable[..., tuple[jax.Array, ...]]:
    """The kernel with so many rows in a part, compiled once for each shape."""

    def write(*given: Any) -> tuple[jax.Array, ...]:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(pallas_tpu, "PART_ROWS", part_rows)
            return pallas_tpu.write(*given, interpret=True)

    return jax.jit(write)


@pytest.mark.parametrize("part_rows", [pallas_tpu.PART_ROWS, 1])
@given(st.data())
def test_only_the_counted_entries_are_written(part_rows: int, data: st.DataObject):
    """Of two caches, wherever rows begin, at the end of a cache too; all rows in one part, or each in its own."""
    (batch, heads, slots, fresh), dtype = (
        data.draw(st.sampled_from(SHAPES)),
        data.draw(st.sampled_from([jnp.float32, jnp.bfloat16])),
    )
    counts = [data.draw(st.integers(0, fresh)) for _ in range(batch)]
    starts = [data.draw(st.integers(0, slots - count) | st.just(slots - count)) for count in counts]
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    caches = [jnp.asarray(rng.standard_normal((batch, heads, slots, 128)), dtype) for _ in range(2)]
    new = [jnp.asarray(rng.standard_normal((batch, heads, fresh, 128)), dtype) for _ in range(2)]
    expected = [np.array(cache) for cache in caches]
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        for whole, entries in zip(expected, new, strict=True):
            whole[row, :, start : start + count] = np.asarray(entries)[row, :, :count]
    found = interpreted(part_rows)(KeyValueRows(*caches), *new, jnp.asarray(starts), jnp.asarray(counts))
    for one, whole in zip(found, expected, strict=True):
        assert one.dtype == dtype
        np.testing.assert_array_equal(one, whole)


def test_a_row_that_writes_nothing_may_begin_anywhere():
    before = jnp.ones((2, 1, 32, 128))
    new = jnp.full((2, 1, 3, 128), 2.0)
    found, _ = interpreted(1)(KeyValueRows(before, before), new, new, jnp.asarray([1000, 30]), jnp.asarray([0, 2]))
    expected = np.ones((2, 1, 32, 128), np.float32)
    expected[1, :, 30:] = 2
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("cache", "new", "takes"),
    [
        ((8, 1, 4096, 128), (8, 1, 1, 128), True),
        ((2, 8, 128, 128), (2, 8, 1, 128), True),
        ((2, 4, 128, 128), (2, 4, 16, 128), True),
        ((2, 8, 128, 128), (2, 8, 16, 128), False),  # XLA's updates are as fast, of many entries, and of one row
        ((1, 1, 4096, 128), (1, 1, 1, 128), False),
        ((8, 1, 4096, 64), (8, 1, 1, 64), False),  # entries of half the lanes
        ((8, 1, 4095, 128), (8, 1, 1, 128), False),  # a tile that is not whole
        ((8, 1, 16, 128), (8, 1, 2, 128), False),  # no two tiles
        ((8, 1, 4096, 128), (8, 1, 1024, 128), False),  # a prompt
    ],
)
def test_what_it_takes(cache: tuple[int, ...], new: tuple[int, ...], takes: bool):
    def refused(dtype: Any) -> str:
        held = jnp.zeros(cache, dtype)
        return pallas_tpu.refuses(KeyValueRows(held, held), jnp.zeros(new, dtype))

    assert bool(refused(jnp.bfloat16)) != takes
    assert refused(jnp.int8)


@pytest.mark.tpu
@pytest.mark.parametrize("chip", ["v5e:1x1", "v5p:1x1x1", "v6e:1x1"])
@pytest.mark.parametrize("shape", [(8, 1, 4096, 1), (64, 8, 1024, 1), (4, 2, 512, 16), (2, 1, 1024, 64), (3, 4, 4096, 5)])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_compiled_it_writes_caches_where_they_are(chip: str, shape: tuple[int, ...], dtype: jnp.dtype):
    batch, heads, slots, fresh = shape
    cache, new = (jax.ShapeDtypeStruct((batch, heads, size, 128), dtype) for size in (slots, fresh))
    at = jax.ShapeDtypeStruct((batch,), jnp.int32)

    def write(cache: KeyValueRows, k: jax.Array, v: jax.Array, start: jax.Array, count: jax.Array):
        assert not pallas_tpu.refuses(cache, k)
        return pallas_tpu.write(cache, k, v, start, count)

    made = compile_for(chip, write, KeyValueRows(cache, cache), new, new, at, at, donate=0)
    bytes_of_a_cache = batch * heads * slots * 128 * cache.dtype.itemsize
    assert made.alias_bytes >= 2 * bytes_of_a_cache
    assert made.temp_bytes < bytes_of_a_cache
    assert not re.search(rf"\[{batch},{heads},{slots},128\]\S* copy\(", made.hlo)
