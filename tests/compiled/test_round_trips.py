"""Round trips in programs with known arrays, from this machine's compiler and the TPU's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import Array

from tilewright.compiled.round_trips import round_trips

TEXTS = Path(__file__).parent / "hlo"
MIB = 2**20


def shaped(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def here(f: Callable[..., Any], *args: Any) -> list[tuple[tuple[int, ...], int, int]]:
    """Returns dimensions other than 1, bytes and times of each round trip, compiled for this machine."""
    compiled: Any = jax.jit(f).lower(*args).compile()
    trips = round_trips(compiled.as_text())
    return [(tuple(size for size in trip.dims if size > 1), trip.bytes, trip.times) for trip in trips]


SQUARE = shaped(64, 64)
ONCE = [((64, 64), 64 * 64 * 4, 1)]


def test_fused_values_make_no_round_trip():
    assert here(lambda x: jnp.sin(x) * 2 + 1, SQUARE) == []


def test_arguments_and_results_are_none_and_what_lies_between_is_one():
    assert here(lambda a, b: a @ b, SQUARE, SQUARE) == []
    assert here(lambda a, b, c: (a @ b) @ c, SQUARE, SQUARE, SQUARE) == ONCE


def test_a_result_that_is_read_again_is_one():
    assert here(lambda a, b, c: (a @ b, (a @ b) @ c), SQUARE, SQUARE, SQUARE) == ONCE


def test_what_is_changed_in_place_before_it_is_read_is_one():
    trips = here(lambda x, row: jnp.sin((x @ x).at[3].set(row)), SQUARE, shaped(64))
    assert ONCE[0] in trips


def test_gathered_rows_that_are_summed_later():
    (trip,) = here(lambda x, places: x[places].sum(axis=1), shaped(100, 32), shaped(50, 7, dtype=jnp.int32))
    assert trip[1:] == (50 * 7 * 32 * 4, 1)


def test_the_state_of_a_loop_counts_in_each_iteration():
    assert ((64, 64), 64 * 64 * 4, 5) in here(lambda x, b: jax.lax.fori_loop(0, 5, lambda i, t: t @ b, x), SQUARE, SQUARE)


def test_what_a_loop_only_writes_is_none_until_it_is_read():
    def doubled(xs: Array) -> Array:
        return jax.lax.scan(lambda c, x: (c, x * 2), jnp.float32(0), xs)[1]

    assert here(doubled, shaped(9, 64)) == []
    read = here(lambda xs: jnp.sort(doubled(xs), axis=0), shaped(9, 64))
    assert any(size * times == 9 * 64 * 4 and times == 9 for _, size, times in read)


@pytest.mark.parametrize("name", ["elementwise", "matmul", "reduce", "scan", "gather", "pallas", "mlp", "update_kept"])
def test_what_stays_on_a_tpu_chip_is_none(name: str):
    assert round_trips((TEXTS / f"{name}.txt").read_text(encoding="utf-8")) == ()


def test_what_a_loop_on_a_tpu_carries_through_memory():
    trips = round_trips((TEXTS / "while.txt").read_text(encoding="utf-8"))
    assert [(trip.dtype, trip.dims, trip.bytes) for trip in trips] == [("f32", (4096, 16384), 256 * MIB)] * 2


def test_text_that_is_no_program_is_refused():
    with pytest.raises(ValueError, match="expected the HLO text of a compiled program"):
        round_trips("nothing")
