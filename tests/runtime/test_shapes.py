"""The table of shapes, and how it covers a prompt."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.runtime.shapes import Shape, ShapeTable


def any_table(data: st.DataObject) -> ShapeTable:
    """With any chunks, also such as do not divide one another."""
    chunks = sorted(data.draw(st.sets(st.integers(1, 40), min_size=1, max_size=4)))
    multiples = sorted(data.draw(st.sets(st.integers(1, 12), min_size=1, max_size=4)))
    return ShapeTable((1,), tuple(chunks[-1] * n for n in multiples), tuple(chunks))


@settings(max_examples=300)
@given(st.booleans(), st.data())
def test_plan_covers_a_prompt_once_and_in_order(default: bool, data: st.DataObject):
    """For every prompt that fits: a session needs two positions beyond its prefill, or more."""
    table = ShapeTable() if default else any_table(data)
    capacity = data.draw(st.sampled_from(table.capacities))
    tokens = data.draw(st.integers(0, max(capacity - 2, 0)))
    plan = list(table.prefill_plan(tokens))
    assert [start for start, _ in plan] == [sum(chunk for _, chunk in plan[:i]) for i in range(len(plan))]
    assert all(chunk in table.chunks for _, chunk in plan)
    covered = sum(chunk for _, chunk in plan)
    assert tokens <= covered <= capacity
    for i, (start, chunk) in enumerate(plan):
        inside = min(tokens - start, chunk)
        assert inside > 0
        assert inside == chunk or i == len(plan) - 1
        assert 2 * inside >= chunk or chunk == table.chunks[0]


def test_plans_of_the_default_table():
    plan = ShapeTable().prefill_plan
    assert list(plan(0)) == []
    assert list(plan(1)) == [(0, 16)]
    assert list(plan(31)) == [(0, 16), (16, 16)]
    assert list(plan(32)) == [(0, 64)]
    assert list(plan(127)) == [(0, 64), (64, 64)]
    assert list(plan(128)) == [(0, 256)]
    assert list(plan(256 + 64 + 3)) == [(0, 256), (256, 64), (320, 16)]


def test_shape_is_the_smallest_that_holds():
    table = ShapeTable((1, 4), (32, 64), (16,))
    assert table.shape(1, 1) == table.shape(1, 32) == Shape(1, 32)
    assert table.shape(2, 33) == table.shape(4, 64) == Shape(4, 64)


@pytest.mark.parametrize(
    ("positions", "capacities"), [(1, [32]), (32, [32]), (33, [32, 64]), (64, [32, 64]), (999, [32, 64, 96])]
)
def test_shapes_that_requests_may_run_in(positions: int, capacities: list[int]):
    table = ShapeTable((1, 4), (32, 64, 96), (16,))
    listed = list(table.shapes(positions))
    assert len(listed) == len(set(listed))
    assert set(listed) == {Shape(b, c) for b in (1, 4) for c in capacities}
    assert all(table.shape(n, min(positions, 96)) in listed for n in range(1, 5))


@pytest.mark.parametrize(("rows", "positions"), [(5, 10), (1, 65)])
def test_a_call_that_no_shape_holds(rows: int, positions: int):
    message = f"expected at most 4 rows of 64 positions, as declared, found {rows} rows of {positions} positions"
    with pytest.raises(ValueError, match=message):
        ShapeTable((1, 4), (32, 64), (16,)).shape(rows, positions)


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        (((), (32,), (16,)), "expected batches that are increasing positive numbers, found ()"),
        (((2, 1), (32,), (16,)), "expected batches that are increasing positive numbers, found (2, 1)"),
        (((1,), (32, 32), (16,)), "expected capacities that are increasing positive numbers, found (32, 32)"),
        (((1,), (32,), (0, 16)), "expected chunks that are increasing positive numbers, found (0, 16)"),
        (((1,), (32, 40), (8, 16)), "expected capacities that are multiples of the largest chunk 16, found 40"),
    ],
)
def test_errors(lists: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]], message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        ShapeTable(*lists)


@given(positions=st.integers(1, 3_000_000))
def test_capacities_go_on_as_far_as_a_context(positions: int):
    table = ShapeTable().reaching(positions)
    assert table.capacities[: len(ShapeTable().capacities)] == ShapeTable().capacities
    assert table.shape(1, positions).capacity < 2 * max(positions, 256)
    assert table.capacities[-1] < 2 * max(positions, ShapeTable().capacities[-1])
