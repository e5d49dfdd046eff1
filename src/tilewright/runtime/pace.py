"""Timing of rounds and steps on the device, and the resulting number of rounds of a dispatch."""

import math
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from rich.console import Console

from tilewright.runtime.constraints import MaskSource
from tilewright.runtime.interfaces import Choice
from tilewright.runtime.runner import SentRounds
from tilewright.runtime.scheduler import TokenSequence
from tilewright.runtime.state import StepInfo

FIRST_ROUNDS = 8
"""Rounds of a dispatch before any dispatch was timed."""
IN_HURRY = 4
"""Factor by which dispatches are shorter while a request waits for a slot or for its first token."""
WAITED_S = 1e-4
"""Least wait for a dispatch, in seconds, after which its end time is known."""
SLOWER = 1.05
"""Largest factor by which the recorded time of a round may grow with each dispatch.

The smallest recent time counts: dispatches of few rounds, or beside a busy host, say little about the time of further rounds.
"""


def kind_of(sent: SentRounds) -> tuple[Hashable, ...]:
    """Returns the key under which rounds are timed."""
    return rounds_kind(sent.rows, sent.choice, sent.masks)


def rounds_kind(rows: int, choice: Choice | None, masks: MaskSource = "none") -> tuple[Hashable, ...]:
    """Returns the key under which rounds of that many rows are timed."""
    return (rows, choice) if masks == "none" else (rows, choice, masks)


class Pace:
    """Timer that sizes dispatches for a target duration.

    Args:
        dispatch_s: target duration of a dispatch, in seconds; infinity for the most rounds.
        longest: the most rounds of a dispatch.

    Attributes:
        seconds: recorded time of a round, by kind.
        read_at: time at which the last dispatch was read.
        waited: whether the host waited for the last dispatch, so that its end time is known.
    """

    def __init__(self, dispatch_s: float, longest: int):
        self.dispatch_s = dispatch_s
        self.longest = longest
        self.seconds: dict[Hashable, float] = {}
        self.read_at = 0.0
        self.waited = False

    def most(self, seconds: float | None, hurry: bool) -> int:
        """Returns the number of rounds of that many seconds that a dispatch may run.

        Args:
            hurry: whether a request waits for the end of the dispatch.
        """
        if math.isinf(self.dispatch_s):
            return self.longest
        if seconds is None:
            return FIRST_ROUNDS
        wanted = self.dispatch_s / (IN_HURRY if hurry else 1)
        return int(np.clip(wanted / seconds, 1, self.longest))

    def under_masks(self, rows: int, choice: Choice | None, most: int, hurried: bool) -> int:
        """Returns the number of rounds of a dispatch under the device's masks; arguments as for `next`."""
        return min(most, self.most(self.seconds.get(rounds_kind(rows, choice, "device")), hurried))

    def time(self, kind: Hashable, rounds: int, sent: float, alone: bool, began: float, ended: float) -> float | None:
        """Records a dispatch of that many rounds that was read. Returns its duration, if known.

        Args:
            sent: time of the dispatch; all times are by `time.perf_counter()`.
            alone: whether nothing else was dispatched since the dispatch before.
            began, ended: when the host began to wait for the dispatch, and received it. If the host did not wait, the end time
                of the dispatch is unknown, and so is the duration of a dispatch that was already queued behind it.
        """
        waited = ended - began > WAITED_S
        follows = self.waited or sent >= self.read_at
        seconds = ended - max(sent, self.read_at) if alone and rounds > 0 and waited and follows else None
        self.read_at = ended
        self.waited = waited
        if seconds is not None:
            self.seconds[kind] = min(seconds / rounds, SLOWER * self.seconds.get(kind, math.inf))
        return seconds


class FixedRounds(Pace):
    """Chooses the number of rounds of a dispatch, for drafters whose rounds are all of one kind."""

    def follow(self, prompt: Sequence[int]) -> Any:
        return None

    def begin_request(self, rows: int) -> None:
        """Changes nothing: all rounds are of one kind."""

    def measure(self, console: Console | None) -> None:
        """Measures nothing: all rounds are of one kind."""

    def next(self, rows: int, most: int, hurried: bool, left: int) -> tuple[Choice | None, int]:
        return None, min(most, self.most(self.seconds.get((rows, None)), hurried))

    def observe(
        self,
        sent: SentRounds,
        infos: StepInfo,
        sequences: Sequence[TokenSequence],
        tokens_before: Sequence[int],
        began: float,
        ended: float,
    ) -> None:
        self.time(kind_of(sent), len(infos.committed), sent.at, sent.alone, began, ended)
