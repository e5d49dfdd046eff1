"""What is measured of a trained drafter: counted as a plain loop counts, of prompts that training did not see."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.runtime.output import Result
from tilewright.train.acceptance import acceptance_rates, held_out_prompts
from tilewright.train.records import Records
from train.support import counting_stream

EMPTY = Result("", [], [], "length", 1)
rounds = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)).map(lambda pair: (max(pair), min(pair))), max_size=9)


@given(st.lists(rounds, max_size=3))
def test_rates_are_those_of_a_plain_loop(made: list[list[tuple[int, int]]]):
    results = [replace(EMPTY, drafted=[d for d, _ in each], accepted=[a for _, a in each]) for each in made]
    expected = []
    before = 0.5
    for place in range(5):
        there = yes = 0
        for drafted, accepted in (pair for each in made for pair in each):
            if drafted > place and accepted >= place:
                there += 1
                yes += accepted > place
        before = (yes + 2 * before) / (there + 2)
        expected.append(before)
    assert acceptance_rates(results, 5) == pytest.approx(expected, abs=6e-4)


def test_prompts_are_held_out_ones():
    records = Records.from_pairs([([1, 2], [3]), ([1, 2], [4]), ([5], [6]), ([], [7]), ([8, 9], [1])])
    assert held_out_prompts(records, 2, 10) == [[1, 2], [5]]
    assert held_out_prompts(records, 9, 10) == [[1, 2], [5], [8, 9]]
    stretches = held_out_prompts(counting_stream(40), 5, 30)
    assert [len(stretch) for stretch in stretches] == [20] * 5
    assert all(set(np.diff(stretch)) <= {1, -6} for stretch in stretches)
