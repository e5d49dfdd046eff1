"""How many rounds, or steps, a dispatch gets, by how long the last ones took."""

import numpy as np
import pytest

from tilewright.runtime.pace import FIRST_ROUNDS, IN_HURRY, SLOWER, FixedRounds, Pace
from tilewright.runtime.runner import SentRounds
from tilewright.runtime.state import Reports, StepInfo


@pytest.fixture
def pace() -> Pace:
    return Pace(dispatch_s=0.1, longest=64)


def test_a_dispatch_is_as_long_as_asked_for_within_what_it_can_have(pace: Pace):
    assert pace.most(None, hurry=False) == pace.most(None, hurry=True) == FIRST_ROUNDS
    assert (pace.most(0.01, hurry=False), pace.most(0.01, hurry=True)) == (10, 10 // IN_HURRY)
    assert (pace.most(1e-6, hurry=False), pace.most(5.0, hurry=False)) == (64, 1)


def test_times_are_kept_for_each_kind(pace: Pace):
    assert pace.time("wide", 10, sent=0.0, alone=True, began=0.01, ended=0.2) == pytest.approx(0.2)
    assert pace.time("narrow", 10, sent=0.1, alone=True, began=0.2, ended=0.25) == pytest.approx(
        0.05
    )  # from when it could begin
    assert pace.seconds == {"wide": pytest.approx(0.02), "narrow": pytest.approx(0.005)}


@pytest.mark.parametrize(
    ("rounds", "alone", "began"),
    [(0, True, 0.0), (10, False, 0.0), (10, True, 0.1)],
    ids=["nothing ran", "something else ran too", "it was there before"],
)
def test_what_says_little_is_not_timed(pace: Pace, rounds: int, alone: bool, began: float):
    assert pace.time("any", rounds, 0.0, alone, began, ended=0.1) is None
    assert pace.seconds == {}


def test_one_slow_dispatch_counts_for_little(pace: Pace):
    pace.time("any", 10, sent=0.0, alone=True, began=0.0, ended=0.1)
    pace.time("any", 10, sent=0.2, alone=True, began=0.2, ended=5.2)
    assert pace.seconds["any"] == pytest.approx(0.01 * SLOWER)
    pace.time("any", 10, sent=6.0, alone=True, began=6.0, ended=6.05)
    assert pace.seconds["any"] == pytest.approx(0.005)


def observe(pacer: FixedRounds, sent: float, began: float, ended: float, rounds: int = 10) -> None:
    """A dispatch of one row was sent, waited for and read at these times, in seconds."""
    counts = np.ones((rounds, 1), np.int32)
    infos = StepInfo(counts[..., None], counts, 0 * counts, 0 * counts)
    pacer.observe(SentRounds((), 1, None, rounds, 1, Reports(None, None), sent, alone=True), infos, (), (), began, ended)


def test_a_round_takes_what_a_dispatch_took_that_was_waited_for():
    pacer = FixedRounds(0.03, 64)
    assert pacer.next(1, 64, False, 9) == (None, FIRST_ROUNDS)
    observe(pacer, sent=0.0, began=0.001, ended=0.02)
    assert pacer.next(1, 64, False, 9) == (None, 15)
    observe(pacer, sent=0.001, began=0.02, ended=0.03)  # it began when the one before ended
    assert pacer.next(1, 64, False, 9) == (None, 30)
    assert pacer.next(1, 64, True, 9) == (None, 7)


def test_behind_a_dispatch_that_was_read_late_no_time_is_known():
    """It had begun when that one ended, which nobody saw: the little that was left of it is not how long it took."""
    pacer = FixedRounds(0.03, 64)
    observe(pacer, sent=0.0, began=0.019, ended=0.019)
    observe(pacer, sent=0.001, began=0.019, ended=0.020)
    assert pacer.next(1, 64, False, 9) == (None, FIRST_ROUNDS)
    observe(pacer, sent=0.002, began=0.020, ended=0.030)
    assert pacer.seconds[1, None] == pytest.approx(0.001)


def test_one_sent_when_nothing_ran_is_timed_from_then():
    pacer = FixedRounds(0.03, 64)
    observe(pacer, sent=0.0, began=0.019, ended=0.019)
    observe(pacer, sent=0.1, began=0.101, ended=0.12)
    assert pacer.seconds[1, None] == pytest.approx(0.002)
