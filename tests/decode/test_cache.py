"""The caches against a dictionary from positions to what was written there last."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.decode import cache

ROWS, HEADS, SIZE, DEPTH = 2, 2, 5, 3
"""Two rows, and five entries in every write."""

write = jax.jit(cache.write)
write_ring = jax.jit(cache.write_ring)
visible = jax.jit(cache.visible_context, static_argnums=0)


def entries(step: int, start: np.ndarray) -> np.ndarray:
    """What step `step` writes at each position: no two are alike."""
    values = 1000 * step + start[:, None] + np.arange(SIZE)[None]
    tags = np.arange(HEADS * DEPTH).reshape(HEADS, 1, DEPTH) / 10
    return (values[:, None, :, None] + tags[None]).astype(np.float32)


def replay(
    store: Callable[[Any, Any, Any, Any], Any], slots: int, moves: list[tuple[int, int]]
) -> tuple[np.ndarray, np.ndarray, list[dict[int, np.ndarray]]]:
    """Writes five entries at a time, of which the first few (none to five) stay. Returns cache, lengths and the model."""
    held, model = jnp.zeros((ROWS, HEADS, slots, DEPTH)), [{} for _ in range(ROWS)]
    known = np.zeros(ROWS, np.int32)
    for step, kept in enumerate(moves, 1):
        new, stop = entries(step, known), known + np.asarray(kept, np.int32)
        held = store(held, new, known, stop)
        for row in range(ROWS):
            model[row] |= {int(p): new[row, :, p - known[row]] for p in range(known[row], stop[row])}
        known = stop
    return np.asarray(held), known, model


MOVES = st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)), max_size=11)


@given(MOVES)
def test_plain_cache_holds_position_p_in_slot_p(moves: list[tuple[int, int]]):
    held, known, model = replay(lambda held, new, start, stop: write(held, new, start), 64, moves)
    assert visible(64, known).tolist() == known.tolist()
    for row in range(ROWS):
        for position in range(known[row]):
            np.testing.assert_array_equal(held[row, :, position], model[row][position])


@pytest.mark.parametrize("slots", [1, 3, 5, 8, 64])
@given(MOVES)
def test_ring_holds_the_last_positions(slots: int, moves: list[tuple[int, int]]):
    held, known, model = replay(write_ring, slots, moves)
    seen = np.asarray(visible(slots, known))
    for row in range(ROWS):
        last = range(max(0, known[row] - slots), known[row])
        assert list(range(seen[row])) == sorted(p % slots for p in last)
        for position in last:
            np.testing.assert_array_equal(held[row, :, position % slots], model[row][position])


@pytest.mark.parametrize("slots", [3, 8])
def test_ring_is_left_alone_by_a_chunk_beyond_the_rows_end(slots: int):
    """In a prefill the rows share chunks: those that lie beyond a row's known token must not reach its ring."""
    known = np.asarray([4, 4], np.int32)
    before = write_ring(jnp.zeros((ROWS, HEADS, slots, DEPTH)), entries(1, np.zeros(2, np.int32)), np.zeros(2, np.int32), known)
    for start in (4, 5, 10, 15):
        at = np.full(2, start, np.int32)
        np.testing.assert_array_equal(write_ring(before, entries(2, at), at, known), before)


def test_write_leaves_the_other_slots_alone():
    before = np.random.default_rng(0).normal(size=(ROWS, HEADS, 16, DEPTH)).astype(np.float32)
    start = np.asarray([0, 11], np.int32)
    new = entries(1, start)
    want = before.copy()
    want[0, :, :5], want[1, :, 11:] = new[0], new[1]
    np.testing.assert_array_equal(write(before, new, start), want)


def test_positions_in_a_ring():
    got = np.asarray(cache.latest_positions(4, jnp.asarray([0, 3, 4, 9], jnp.int32)))
    assert got[1:].tolist() == [[0, 1, 2, -1], [0, 1, 2, 3], [8, 5, 6, 7]]
    assert (got[0] < 0).all()


def test_allocate():
    made = cache.allocate(3, 2, 4, 16, 8, jnp.bfloat16)
    assert len(made) == 3
    assert {(x.shape, x.dtype.name, bool(jnp.any(x))) for pair in made for x in pair} == {((2, 4, 16, 8), "bfloat16", False)}
