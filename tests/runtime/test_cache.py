"""The caches against a dictionary from positions to what was written there last, and rows that are left alone."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.kernels.select import PLAIN
from tilewright.parallel.rows import rows_of, with_rows
from tilewright.runtime import cache

ROWS = 2
HEADS = 2
SIZE = 5
DEPTH = 3
"""Two rows, and five entries in every write."""

LAYOUTS: dict[str, Callable[..., Any]] = {"contiguous": cache.Contiguous, "ring": cache.Ring}
append = jax.jit(lambda kept, k, v, start, count: kept.append(PLAIN, k, v, start, count))


def entries(step: int, start: np.ndarray) -> np.ndarray:
    """What step `step` writes at each position: no two are alike."""
    values = 1000 * step + start[:, None] + np.arange(SIZE)[None]
    tags = np.arange(HEADS * DEPTH).reshape(HEADS, 1, DEPTH) / 10
    return (values[:, None, :, None] + tags[None]).astype(np.float32)


def replay(layout: str, slots: int, moves: list[tuple[int, int]]) -> tuple[Any, np.ndarray, list[dict[int, np.ndarray]]]:
    """Offers five entries at a time, of which the first few (none to five) count. Returns cache, lengths and the model."""
    empty = jnp.zeros((ROWS, HEADS, slots, DEPTH))
    held = LAYOUTS[layout](empty, empty)
    model = [{} for _ in range(ROWS)]
    known = np.zeros(ROWS, np.int32)
    for step, counted in enumerate(moves, 1):
        new = entries(step, known)
        count = np.asarray(counted, np.int32)
        held = append(held, new, -new, known, count)
        for row in range(ROWS):
            model[row] |= {int(p): new[row, :, p - known[row]] for p in range(known[row], known[row] + count[row])}
        known = known + count
    np.testing.assert_array_equal(held.k, -held.v)
    return held, known, model


MOVES = st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)), max_size=11)


@given(MOVES)
def test_a_contiguous_cache_holds_position_p_in_slot_p_and_nothing_else(moves: list[tuple[int, int]]):
    held, known, model = replay("contiguous", 55, moves)
    assert held.visible(jnp.asarray(known)).tolist() == known.tolist()
    want = np.zeros((ROWS, HEADS, 55, DEPTH), np.float32)
    for row in range(ROWS):
        for position in range(known[row]):
            want[row, :, position] = model[row][position]
    np.testing.assert_array_equal(held.k, want)


@pytest.mark.parametrize("slots", [1, 3, 5, 8, 64])
@given(MOVES)
def test_a_ring_holds_the_last_positions(slots: int, moves: list[tuple[int, int]]):
    held, known, model = replay("ring", slots, moves)
    seen = np.asarray(held.visible(jnp.asarray(known)))
    for row in range(ROWS):
        last = range(max(0, known[row] - slots), known[row])
        assert list(range(seen[row])) == sorted(p % slots for p in last)
        for position in last:
            np.testing.assert_array_equal(held.k[row, :, position % slots], model[row][position])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("start", [0, 4, 7, 8])
def test_a_row_of_count_0_is_left_alone(layout: str, start: int):
    """Wherever it would begin, the cache's end included, while its neighbour is written."""
    before = np.random.default_rng(0).normal(size=(ROWS, HEADS, 8, DEPTH)).astype(np.float32)
    starts = np.asarray([start, 2], np.int32)
    new = entries(1, starts)
    after = append(LAYOUTS[layout](before, before), new, new, starts, np.asarray([0, 5], np.int32))
    np.testing.assert_array_equal(after.k[0], before[0])
    np.testing.assert_array_equal(after.k[1, :, 2:7], new[1])
    np.testing.assert_array_equal(after.k[1, :, [0, 1, 7]], before[1][:, [0, 1, 7]].transpose(1, 0, 2))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_taken_out_and_put_back(layout: str):
    before = np.random.default_rng(0).normal(size=(4, HEADS, 6, DEPTH)).astype(np.float32)
    held = LAYOUTS[layout](jnp.asarray(before), jnp.asarray(-before))
    some = rows_of(held, 1, 2)
    np.testing.assert_array_equal(some.k, before[1:3])
    other = jax.tree.map(lambda part: part + 1, some)
    after = with_rows({"cache": held, "length": jnp.arange(4)}, 2, {"cache": other, "length": jnp.array([7, 9])})
    np.testing.assert_array_equal(after["cache"].k, np.concatenate([before[:2], before[1:3] + 1]))
    np.testing.assert_array_equal(after["cache"].v, np.concatenate([-before[:2], 1 - before[1:3]]))
    assert after["length"].tolist() == [0, 1, 7, 9]


def test_allocate():
    made = cache.allocate(3, 2, 4, 16, 8, jnp.bfloat16)
    assert [type(one) for one in made] == [cache.Contiguous] * 3
    leaves = jax.tree.leaves(made)
    assert {(x.shape, x.dtype.name, bool(jnp.any(x))) for x in leaves} == {((2, 4, 16, 8), "bfloat16", False)}
    for window, slots in ((5, 5), (50, 16)):
        (ring,) = cache.allocate_rings(1, 2, 4, 16, 8, jnp.float32, window)
        assert isinstance(ring, cache.Ring)
        assert ring.k.shape[2] == slots
