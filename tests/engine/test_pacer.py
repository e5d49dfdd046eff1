"""How long dispatches are taken to be, by what was seen of them."""

import numpy as np
import pytest

from tilewright.decode.state import StepInfo
from tilewright.engine.device import Sent
from tilewright.engine.pace import FIRST_ROUNDS
from tilewright.engine.pacer import Pacer
from tilewright.engine.programs import EnginePrograms


class PlainPrograms(EnginePrograms):
    """As much of an engine's programs as a pacer reads where nothing drafts."""

    def __init__(self) -> None:
        self.drafter = None


def observe(pacer: Pacer, sent: float, began: float, ended: float, rounds: int = 10) -> None:
    """A dispatch of one row was sent, waited for and read at these times, in seconds."""
    counts = np.ones((rounds, 1), np.int32)
    infos = StepInfo(counts[..., None], counts, 0 * counts, 0 * counts)
    pacer.observe(Sent((), 1, None, "greedy", rounds, 1, None, sent, alone=True), infos, began, ended)


def test_a_round_takes_what_a_dispatch_took_that_was_waited_for():
    pacer = Pacer(PlainPrograms(), dispatch_s=0.03)
    assert pacer.plan(1, "greedy", hurry=False) == (None, FIRST_ROUNDS)
    observe(pacer, sent=0.0, began=0.001, ended=0.02)
    assert pacer.plan(1, "greedy", hurry=False) == (None, 15)
    observe(pacer, sent=0.001, began=0.02, ended=0.03)  # it began when the one before ended
    assert pacer.plan(1, "greedy", hurry=False) == (None, 30)
    assert pacer.plan(1, "greedy", hurry=True) == (None, 7)


def test_behind_a_dispatch_that_was_read_late_no_time_is_known():
    """It had begun when that one ended, which nobody saw: the little that was left of it is not how long it took."""
    pacer = Pacer(PlainPrograms(), dispatch_s=0.03)
    observe(pacer, sent=0.0, began=0.019, ended=0.019)
    observe(pacer, sent=0.001, began=0.019, ended=0.020)
    assert pacer.plan(1, "greedy", hurry=False) == (None, FIRST_ROUNDS)
    observe(pacer, sent=0.002, began=0.020, ended=0.030)
    assert pacer.seconds[1, "greedy", None] == pytest.approx(0.001)


def test_one_sent_when_nothing_ran_is_timed_from_then():
    pacer = Pacer(PlainPrograms(), dispatch_s=0.03)
    observe(pacer, sent=0.0, began=0.019, ended=0.019)
    observe(pacer, sent=0.1, began=0.101, ended=0.12)
    assert pacer.seconds[1, "greedy", None] == pytest.approx(0.002)
