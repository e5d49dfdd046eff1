"""The definitions of the figures, on results made by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.bench.figures import (
    acceptance_histogram,
    distinct_ngram_ratio,
    first_difference,
    mean_acceptance_length,
    mean_distinct_ngram_ratio,
)
from tilewright.decode.session import Result


def result(*lengths: int, tokens: list[int] | None = None) -> Result:
    """A result whose rounds settled so many tokens each."""
    tokens = list(range(sum(lengths))) if tokens is None else tokens
    return Result("", tokens, list(lengths), "length", 1)


def test_tau_is_tokens_over_rounds_of_all_results():
    assert mean_acceptance_length([result(4, 1, 2)]) == 7 / 3
    assert mean_acceptance_length([result(4, 4), result(1, 1, 1, 1)]) == 12 / 6
    assert mean_acceptance_length([result(1, 1, 1)]) == 1
    assert mean_acceptance_length([result(), result(3)]) == 3


def test_tau_before_the_first_round_is_unknown():
    assert mean_acceptance_length([result(), result()]) is None


def test_histogram_counts_accepted_drafts():
    assert acceptance_histogram([result(4, 1, 2), result(1, 4)], 4) == [2, 1, 0, 2]
    assert acceptance_histogram([result()], 3) == [0, 0, 0]


@given(st.lists(st.lists(st.integers(1, 6), max_size=8), min_size=1, max_size=4), st.integers(6, 9))
def test_histogram_and_tau_agree(rounds: list[list[int]], block_size: int):
    results = [result(*lengths) for lengths in rounds]
    counts = acceptance_histogram(results, block_size)
    assert len(counts) == block_size
    assert sum(counts) == sum(len(lengths) for lengths in rounds)
    tau = mean_acceptance_length(results)
    if tau is not None:
        assert tau == pytest.approx(sum((n + 1) * count for n, count in enumerate(counts)) / sum(counts))


def test_distinct_ngrams_tell_a_loop_from_a_text():
    assert distinct_ngram_ratio(range(50)) == 1
    assert distinct_ngram_ratio([7] * 100) == pytest.approx(1 / 97)
    assert distinct_ngram_ratio([1, 2, 3] * 50) == pytest.approx(3 / 147)
    assert distinct_ngram_ratio([1, 2, 1, 2, 1], n=2) == 2 / 4
    assert distinct_ngram_ratio([1, 2, 3]) == 1, "shorter than one 4-gram"


def test_distinct_ngrams_are_averaged_over_results():
    results = [result(tokens=list(range(10))), result(tokens=[7] * 13)]
    assert mean_distinct_ngram_ratio(results) == pytest.approx((1 + 1 / 10) / 2)


def test_first_difference():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([1, 2, 3], [1, 2]) == 2
    assert first_difference([], [4]) == 0
    assert first_difference([], []) is None
