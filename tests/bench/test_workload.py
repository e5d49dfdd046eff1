"""What is sent and when: lengths, times, prompts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.bench.datasets import Example
from tilewright.bench.lengths import RequestTrace
from tilewright.bench.workload import (
    at_once,
    context_scale,
    file_plan,
    joined,
    poisson_times,
    scaled,
    split_warmup,
    text_prompts,
    token_prompts,
    trace_plan,
    trace_times,
)

TRACE = RequestTrace(np.asarray([100, 40, 6]), np.asarray([20, 0, 2]), np.asarray([0.0, 1.5, 9.0]))
EXAMPLES = [Example("prompt", "", (f"{word} text",), n) for n, word in enumerate(["one", "two", "three"], 1)]


def test_the_requests_of_a_trace():
    made = trace_plan(TRACE, trace_times(TRACE, 3, 2.0), token_prompts(50, 1))
    assert [(each.number, each.due_s, len(each.prompt), each.max_new_tokens) for each in made] == [
        (0, 0.0, 100, 20),
        (1, 0.75, 40, 1),
        (2, 4.5, 6, 2),
    ]
    fewer = trace_plan(TRACE, at_once(2), token_prompts(50, 1), scale=0.1, max_new_tokens=1)
    assert [(each.due_s, len(each.prompt), each.max_new_tokens) for each in fewer] == [(0, 10, 1), (0, 4, 1)]


def test_times_without_a_trace_that_has_any():
    bare = RequestTrace(TRACE.prompts, TRACE.outputs, None)
    with pytest.raises(ValueError, match="expected arrival times in the trace"):
        trace_times(bare, 3, 1.0)


LENGTHS = st.lists(st.tuples(st.integers(1, 20_000), st.integers(0, 5_000)), min_size=1, max_size=30)


@given(LENGTHS, st.integers(2, 30_000))
def test_scaled_lengths_fit_the_context(lengths: list[tuple[int, int]], context: int):
    prompts, outputs = np.asarray(lengths).T
    trace = RequestTrace(prompts, outputs, None)
    scale = context_scale(trace, context)
    assert 0 < scale <= 1
    fitted = [(scaled(prompt, scale), scaled(output, scale)) for prompt, output in lengths]
    assert all(min(each) >= 1 for each in fitted)
    assert max(map(sum, fitted)) <= context
    assert (scale == 1) == (max(prompt + max(output, 1) for prompt, output in lengths) <= context)
    assert context_scale(trace, None) == 1


def test_token_prompts_are_a_function_of_number_and_seed():
    make = token_prompts(50, 1)
    first = make(1000, 0)
    assert not isinstance(first, str)
    assert (first.min(), first.max()) == (0, 49)
    for same, made in ((True, make(1000, 0)), (False, make(1000, 1)), (False, token_prompts(50, 2)(1000, 0))):
        assert np.array_equal(first, np.asarray(made)) is same


@given(st.integers(1, 500), st.floats(0.1, 10), st.integers(0, 9))
def test_text_prompts_are_pieces_of_the_text(tokens: int, characters: float, number: int):
    text = "the quick brown fox"
    made = text_prompts(text, characters, 3)(tokens, number)
    assert isinstance(made, str)
    assert len(made) == max(round(tokens * characters), 1)
    assert made in text * (2 + len(made) // len(text))
    assert made == text_prompts(text, characters, 3)(tokens, number)


def test_text_prompts_begin_in_different_places():
    make = text_prompts("".join(chr(i) for i in range(0x4E00, 0x5E00)), 1.0, 0)
    assert len({str(make(1, number)) for number in range(20)}) > 15


def test_the_prompts_of_a_file():
    made = file_plan(EXAMPLES, at_once(5), 7)
    assert [each.prompt for each in made] == ["one text", "two text", "three text", "one text", "two text"]
    assert {each.max_new_tokens for each in made} == {7}
    assert made[1].messages == [{"role": "user", "content": "two text"}]
    assert joined(EXAMPLES) == "one text\n\ntwo text\n\nthree text"


def test_poisson_times():
    times = poisson_times(20_001, 4.0, 5)
    assert times[0] == 0
    gaps = np.diff(times)
    assert gaps.min() >= 0
    # Mean and deviation of an exponential distribution are alike; 20,000 gaps know them to about 1 %.
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() == pytest.approx(0.25, rel=0.05)
    np.testing.assert_array_equal(times, poisson_times(20_001, 4.0, 5))
    assert poisson_times(1, 4.0, 5).tolist() == [0]
    assert poisson_times(0, 4.0, 5).tolist() == []


def test_warm_up_comes_first_and_at_once():
    made = trace_plan(TRACE, trace_times(TRACE, 3, 1.0), token_prompts(50, 1))
    first, rest = split_warmup(made, 1)
    assert [(each.number, each.due_s) for each in first] == [(0, 0.0)]
    assert [(each.number, each.due_s) for each in rest] == [(1, 0.0), (2, 7.5)]
    assert split_warmup(made, 0)[0] == []
    assert split_warmup([], 0) == ([], [])
