"""Capacities and chunks against every other choice there is, and what holds of any of them."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.runtime.advice import (
    Buckets,
    best_boundaries,
    capacity_choice,
    capacity_choices,
    chunk_choice,
    chunk_choices,
    chunk_lengths,
    compile_seconds,
    programs_of,
    recommended,
    saved_shares,
)
from tilewright.runtime.shapes import ShapeTable
from tilewright.speculation.drafters.ngram import NGram
from tilewright.speculation.team import Team

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=30).map(lambda found: np.asarray(found, np.int64))


def held(capacities: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """`[choices, sizes] -> [choices]`: the positions of the smallest capacity that holds each request, where all fit."""
    capacities = capacities[capacities[:, -1] >= lengths.max()]
    fitting = np.searchsorted(np.sort(lengths), capacities, side="right")  # requests that each capacity holds
    return (np.diff(fitting, prepend=0) * capacities).sum(axis=1)


@settings(max_examples=200)
@given(LENGTHS, st.integers(1, 5), st.sampled_from([1, 3, 4, 16]))
def test_capacities_are_the_best_of_all(lengths: np.ndarray, most: int, multiple: int):
    choices = capacity_choices(lengths, most, multiple)
    allowed = range(multiple, 40 + multiple, multiple)
    for number, choice in enumerate(choices, 1):
        assert len(choice.sizes) == number
        every = held(np.array(list(combinations(allowed, number))), lengths)
        assert choice.computed == choice.work == held(np.array([choice.sizes]), lengths)[0] == every.min()
    assert len(choices) == min(most, len({-(-n // multiple) for n in lengths.tolist()}))


@settings(max_examples=100)
@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=400), st.integers(1, 128))
def test_what_holds_of_any_capacities(found: list[int], multiple: int):
    lengths = np.asarray(found, np.int64)
    choices = capacity_choices(lengths, 9, multiple)
    for choice in choices:
        assert list(choice.sizes) == sorted(set(choice.sizes))
        assert all(size % multiple == 0 for size in choice.sizes)
        table = ShapeTable((1,), choice.sizes, (multiple,))
        each = [table.shape(1, n).capacity for n in found]
        assert all(size >= n for size, n in zip(each, found, strict=True)), "every request fits"
        assert sum(each) == choice.computed
        assert choice.padding_share == pytest.approx(1 - sum(found) / sum(each))
    shares = [choice.padding_share for choice in choices]
    assert shares == sorted(shares, reverse=True)


def test_many_distinct_lengths_against_the_plain_recurrence():
    rng = np.random.default_rng(7)
    sizes = np.unique(rng.integers(1, 5000, 700))
    counts = rng.integers(1, 50, len(sizes))
    before = np.concatenate([[0], np.cumsum(counts)])
    ends = np.arange(1, len(sizes) + 1)
    cost = np.where(ends[:, None] > np.arange(len(sizes)), sizes[:, None] * (before[ends][:, None] - before[:-1]), 2**60)
    least = sizes * before[1:]
    for boundaries in best_boundaries(sizes, counts, 6):
        of = np.asarray(boundaries)[np.searchsorted(boundaries, sizes)]
        assert int((of * counts).sum()) == least[-1]
        least = (cost + np.concatenate([[0], least])[:-1]).min(axis=1)


TOKENS = st.lists(st.integers(0, 200), min_size=1, max_size=20).map(lambda found: np.asarray(found, np.int64))


@settings(max_examples=100)
@given(TOKENS, st.data())
def test_chunks_are_counted_as_they_are_planned(tokens: np.ndarray, data: st.DataObject):
    chunks = tuple(sorted(data.draw(st.sets(st.integers(1, 40), min_size=1, max_size=4))))
    overhead = data.draw(st.integers(0, 30))
    table = ShapeTable((1,), (chunks[-1],), chunks)
    plans = [[chunk for _, chunk in table.prefill_plan(n)] for n in tokens.tolist()]
    computed = sum(map(sum, plans))
    runs = sum(map(len, plans))
    expected = Buckets(chunks, int(tokens.sum()), computed, runs, computed + overhead * runs)
    assert chunk_choice(chunks, tokens, overhead) == expected
    assert 0 <= expected.padding_share < 1


@settings(max_examples=50)
@given(TOKENS, st.integers(1, 5), st.integers(0, 64))
def test_chunks_are_the_best_of_all_and_more_are_better(tokens: np.ndarray, most: int, overhead: int):
    candidates = chunk_lengths(4, 32)
    choices = chunk_choices(tokens, most, candidates, overhead)
    works = [choice.work for choice in choices]
    assert all(before > after for before, after in pairwise(works))
    for number in range(1, min(most, len(candidates)) + 1):
        best = min(chunk_choice(c, tokens, overhead).work for n in range(1, number + 1) for c in combinations(candidates, n))
        assert min(choice.work for choice in choices if len(choice.sizes) <= number) == best


def test_without_overhead_the_shortest_chunk_alone_is_best():
    (only,) = chunk_choices(np.asarray([3, 17, 100]), 4, (4, 8, 16, 32), 0)
    assert (only.sizes, only.computed, only.runs) == ((4,), 4 + 20 + 100, 1 + 5 + 25)


def test_lengths_of_chunks():
    assert chunk_lengths(16, 256) == [16, 32, 64, 128, 256]
    assert chunk_lengths(128, 128) == [128]
    for multiple, longest in ((16, 48), (16, 8), (16, 40), (0, 16), (-16, 256), (16, 0)):
        with pytest.raises(ValueError, match=f"that is {multiple} doubled any number of times, found {longest}"):
            chunk_lengths(multiple, longest)


def test_the_fewest_are_recommended_after_which_little_is_saved():
    choices = [Buckets((n,), 1, work, 1, work) for n, work in enumerate((1000, 500, 400, 390, 200), 1)]
    assert saved_shares(choices) == [None, *map(pytest.approx, (0.5, 0.2, 0.025, 1 - 200 / 390))]
    assert [recommended(choices, share) for share in (0.6, 0.3, 0.05, 0.0)] == [0, 1, 2, 4]
    assert recommended(choices[:1], 0.5) == 0


def test_programs_are_those_of_the_table():
    table = ShapeTable((1, 4), (32, 64, 128), (8, 16))
    programs = programs_of(table, 64, None)
    assert len(programs) == len(set(programs)) == 1 + 3 + 2 * 2, "two lengths of a chunk, and short ones together"
    assert {key.positions for key in programs if key.name == "rounds"} == {32, 64}
    each = {"allocate": 1.0, "prefill": 10.0, "rounds": 100.0}
    assert compile_seconds(programs, each) == 1 + 3 * 10 + 4 * 100
    team = Team((NGram(4),), (2,), False)
    assert len(programs_of(table, 32, team)) == 1 + 3 + 2 * len(team.choices)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: capacity_choices(np.zeros(0, np.int64), 2, 4), "expected positions of requests of at least 1, found none"),
        (lambda: capacity_choices(np.asarray([3, 0]), 2, 4), "expected positions of requests of at least 1, found one of 0"),
        (lambda: capacity_choices(np.asarray([3]), 0, 4), "expected buckets of at least 1, found 0"),
        (lambda: capacity_choices(np.asarray([3]), 2, 0), "expected a multiple of at least 1, found 0"),
        (lambda: chunk_choices(np.asarray([-1]), 2, (4,), 0), "expected tokens to prefill of at least 0, found one of -1"),
        (lambda: chunk_choices(np.asarray([3]), 0, (4,), 0), "expected chunk lengths of at least 1, found 0"),
        (lambda: chunk_choices(np.asarray([3]), 2, (4,), -1), "expected an overhead of at least 0, found -1"),
    ],
)
def test_errors(call, message: str):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_capacity_holds_what_is_as_long():
    assert capacity_choice((8, 16), np.asarray([1, 8, 9, 16])) == Buckets((8, 16), 34, 48, 4, 48)
