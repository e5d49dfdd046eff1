"""Problems written out in steps: every step is right, answers are checked, and what is held out never comes up."""

import re
from itertools import islice, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.train.arithmetic import HELD_OUT, NAMES, PLACES, Problem, draw, is_right, problems

numbers = st.integers(0, 10 ** len(PLACES) - 1)
# Numbers rather than problems: the annotation checks draw random numbers, which no strategy may do.
sums = st.tuples(st.lists(numbers, min_size=2, max_size=4), st.just(False))
products = st.tuples(st.tuples(numbers, st.integers(0, 9)), st.just(True))


@given(st.one_of(sums, products))
def test_every_step_is_right(drawn: Any):
    """As a reader checks it: each equation, what goes from one line to the next, and the answer, read off the lines."""
    problem = Problem(tuple(drawn[0]), *drawn[1:])
    *lines, last = problem.response.split("\n")
    carry = 0
    digits = ""
    for place, line in enumerate(lines):
        match = re.fullmatch(r"([a-z]+):([a-d\d+*=]+),write:(\d),carry:(\d)", line)
        assert match
        name, named, digit, after = match.groups()
        assert re.findall("[a-d]", named) == list(NAMES[: len(problem.numbers)])
        steps = re.sub("[a-d]", "", named)
        assert name == PLACES[place]
        terms = steps.split("=")
        assert all(len(result) == 2 for result in re.findall(r"=(\d+)", steps))
        column = [number // 10**place % 10 for number in problem.numbers]
        if problem.product:
            assert terms[0] == f"{column[0]}*{problem.numbers[1]}"
            assert int(terms[1][:2]) == column[0] * problem.numbers[1]
            assert int(terms[2]) == int(terms[1][:2]) + carry
        else:
            assert int(terms[0][0]) == carry
            assert [int(term[-1]) for term in terms[:-1]] == column
            for term, result in pairwise(terms):
                begin, plus, digit_added = term.partition("+")
                assert plus
                assert int(begin) + int(digit_added) == int(result.partition("+")[0])
        assert int(terms[-1]) == 10 * int(after) + int(digit)
        carry = int(after)
        digits = digit + digits
    assert last == f"answer:{carry}{digits}"
    expected = problem.numbers[0] * problem.numbers[1] if problem.product else sum(problem.numbers)
    assert (int(last.removeprefix("answer:")), problem.answer) == (expected, expected)


@given(st.one_of(sums, products), st.integers(0, 10**7))
def test_an_answer_is_right_or_wrong(drawn: Any, other: int):
    problem = Problem(tuple(drawn[0]), *drawn[1:])
    assert is_right(problem, problem.response)
    assert is_right(problem, f"  anything\nanswer:{problem.answer}\n")
    assert is_right(problem, f"answer:00{problem.answer}")
    assert is_right(problem, f"answer:{other}") is (other == problem.answer)
    for wrong in (
        "",
        "answer:",
        f"answer:{problem.answer}1",
        f"{problem.answer}",
        f"answer:{problem.answer}\nmore",
        "answer:²",
        f"0answer:{problem.answer}",
    ):
        assert not is_right(problem, wrong)


def test_a_problem_reads_well():
    problem = Problem((907, 88))
    assert problem.prompt == "a=907 b=88 a+b\n"
    assert problem.response == (
        "ones:0+a7=07+b8=15,write:5,carry:1\ntens:1+a0=01+b8=09,write:9,carry:0\n"
        "hundreds:0+a9=09+b0=09,write:9,carry:0\nanswer:0995"
    )
    product = Problem((38, 7), product=True)
    assert (product.prompt, product.answer) == ("a=38 b=7 a*b\n", 266)
    assert product.response == "ones:a8*b7=56+0=56,write:6,carry:5\ntens:a3*b7=21+5=26,write:6,carry:2\nanswer:266"


@pytest.mark.parametrize("held_out", [False, True])
def test_held_out_problems_stay_apart(held_out: bool):
    first, again = (list(islice(problems(np.random.default_rng(3), held_out), 200)) for _ in range(2))
    assert first == again
    assert first != list(islice(problems(np.random.default_rng(4), held_out), 200))
    assert {problem.held_out for problem in first} == {held_out}


def test_what_is_drawn():
    """Both kinds, every size, and the declared share held out."""
    rng = np.random.default_rng(0)
    drawn = [draw(rng) for _ in range(4000)]
    assert np.mean([problem.held_out for problem in drawn]) == pytest.approx(1 / HELD_OUT, abs=0.015)
    added = [problem for problem in drawn if not problem.product]
    assert {len(problem.numbers) for problem in added} == {2, 3, 4}
    sizes = [{len(str(number)) for number in problem.numbers} for problem in added]
    assert (max(map(len, sizes)), set.union(*sizes)) == (1, {2, 3, 4})
    assert {len(str(problem.numbers[0])) for problem in drawn if problem.product} == {2, 3, 4}
    assert {problem.numbers[1] for problem in drawn if problem.product} == set(range(2, 10))
