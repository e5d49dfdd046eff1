"""Looking up the end of a row in the row itself, against a search that tries everything."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.speculation.drafters.ngram import longest_suffix_match

jitted = jax.jit(longest_suffix_match, static_argnames=("min_n", "max_n", "k"))


def search(tokens: Sequence[int], min_n: int, max_n: int, k: int) -> list[int]:
    """What followed the earliest of the longest n-grams that end `tokens` and stand in it before."""
    for n in range(max_n, min_n - 1, -1):
        for start in range(len(tokens) - n):
            if tokens[start : start + n] == tokens[-n:]:
                return list(tokens[start + n : start + n + k])
    return []


def look_up(rows: Sequence[Sequence[int]], size: int, min_n: int, max_n: int, k: int, stale: int = 0) -> list[list[int]]:
    """`longest_suffix_match` of rows of different lengths; what lies beyond a row's end is `stale`."""
    tokens = np.full((len(rows), size), stale, np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    known = np.asarray([len(row) - 1 for row in rows], np.int32)
    drafts, count, length = jitted(tokens, known, min_n=min_n, max_n=max_n, k=k)
    assert drafts.shape == (len(rows), k)
    np.testing.assert_array_equal(count > 0, (length >= min_n) & (length <= max_n))
    for row, n in zip(np.asarray(drafts), count, strict=True):
        assert not row[n:].any()
    return [row[:n].tolist() for row, n in zip(np.asarray(drafts), count, strict=True)]


@settings(max_examples=200)
@given(
    st.integers(1, 4).flatmap(
        lambda letters: st.lists(st.lists(st.integers(0, letters - 1), min_size=1, max_size=24), min_size=3, max_size=3)
    ),
    st.sampled_from([(1, 1, 1), (1, 3, 4), (2, 3, 4), (3, 5, 2), (1, 40, 30)]),
    st.integers(0, 3),
)
def test_equals_trying_everything(rows: list[list[int]], setting: tuple[int, int, int], stale: int):
    """Rows of 1 to 24 tokens in a buffer of 24, so that one may fill it; n-grams longer than the buffer as well."""
    assert look_up(rows, 24, *setting, stale) == [search(row, *setting) for row in rows]


@pytest.mark.parametrize(
    ("tokens", "setting", "drafts"),
    [
        ([1, 2, 3, 9, 1, 2, 4, 9, 1, 2], (1, 3, 3), [4, 9, 1]),  # 9 1 2 is longer than 1 2
        ([1, 2, 3, 9, 1, 2, 4, 8, 1, 2], (1, 2, 3), [3, 9, 1]),  # both places end 1 2: the earliest
        ([5, 1, 2, 7, 1, 2], (2, 4, 9), [7, 1, 2]),  # no more than there is
        ([1, 2, 3, 4, 1], (2, 3, 3), []),  # only one token matches
        ([1, 1, 1, 1], (1, 3, 5), [1]),  # the n-gram and its match overlap
        ([6], (1, 3, 5), []),
        ([6, 6], (1, 3, 5), [6]),
    ],
)
def test_examples(tokens: list[int], setting: tuple[int, int, int], drafts: list[int]):
    assert look_up([tokens], 12, *setting) == [drafts]
    assert look_up([tokens], len(tokens), *setting) == [drafts]


def test_a_row_is_not_changed_by_others():
    rows = [[1, 2, 1], [2, 2, 2, 2, 2, 2], [3], [1, 2, 3, 1, 2]]
    together = look_up(rows, 8, 1, 3, 4)
    assert together == [look_up([row], 8, 1, 3, 4)[0] for row in rows]
    assert [len(drafts) for drafts in together] == [2, 3, 0, 3]


def test_no_loop_in_the_program():
    find = partial(longest_suffix_match, min_n=2, max_n=4, k=8)
    lowered = jax.jit(find).lower(jnp.zeros((2, 64), jnp.int32), jnp.zeros(2, jnp.int32)).as_text()
    assert "stablehlo.compare" in lowered
    for control in ("while", "case", "custom_call", "sort"):
        assert f"stablehlo.{control}" not in lowered


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ((0, 3, 4), "1 <= min_n <= max_n, found min_n 0 and max_n 3"),
        ((3, 2, 4), "1 <= min_n <= max_n, found min_n 3 and max_n 2"),
        ((1, 2, 0), "at least 1 token to propose, found 0"),
    ],
)
def test_errors(setting: tuple[int, int, int], message: str):
    with pytest.raises(ValueError, match=message):
        longest_suffix_match(jnp.zeros((1, 8), jnp.int32), jnp.zeros(1, jnp.int32), *setting)
