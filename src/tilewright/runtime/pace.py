"""How long rounds, or steps, take on the device, and how many of them a dispatch gets."""

import math
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from tilewright.runtime.constraints import MaskSource
from tilewright.runtime.interfaces import Choice
from tilewright.runtime.runner import SentRounds
from tilewright.runtime.scheduler import TokenSequence
from tilewright.runtime.state import StepInfo

FIRST_ROUNDS = 8
"""Of a dispatch before any was timed."""
IN_HURRY = 4
"""Where somebody waits for a first token, or for a place, dispatches are so many times as short."""
WAITED_S = 1e-4
"""How long somebody must have waited for a dispatch to know when it ended."""
SLOWER = 1.05
"""How much slower than before a round may be taken to be after each dispatch. The fastest lately is what counts: dispatches of
few rounds, and those beside which a host was at work, tell little of what more rounds would take."""


def kind_of(sent: SentRounds) -> tuple[Hashable, ...]:
    """Key by which rounds are timed."""
    return rounds_kind(sent.rows, sent.choice, sent.masks)


def rounds_kind(rows: int, choice: Choice | None, masks: MaskSource = "none") -> tuple[Hashable, ...]:
    """Key by which rounds of so many rows are timed."""
    return (rows, choice) if masks == "none" else (rows, choice, masks)


class Pace:
    """Dispatches that take about as long as asked for.

    Args:
        dispatch_s: how long that is; infinity for as many rounds as there may be.
        longest: rounds that a dispatch can have.

    Attributes:
        seconds: of a round, by what it is.
    """

    def __init__(self, dispatch_s: float, longest: int):
        self.dispatch_s = dispatch_s
        self.longest = longest
        self.seconds: dict[Hashable, float] = {}
        self.read_at = 0.0
        self.waited = False

    def most(self, seconds: float | None, hurry: bool) -> int:
        """Number of rounds of so many seconds each that a dispatch may have.

        Args:
            hurry: whether somebody waits for its end.
        """
        if math.isinf(self.dispatch_s):
            return self.longest
        if seconds is None:
            return FIRST_ROUNDS
        wanted = self.dispatch_s / (IN_HURRY if hurry else 1)
        return int(np.clip(wanted / seconds, 1, self.longest))

    def under_masks(self, rows: int, choice: Choice | None, most: int, hurried: bool) -> int:
        """Number of rounds that a dispatch under masks of the device's runs; arguments as of `next`."""
        return min(most, self.most(self.seconds.get(rounds_kind(rows, choice, "device")), hurried))

    def time(self, kind: Hashable, rounds: int, sent: float, alone: bool, began: float, ended: float) -> float | None:
        """Takes in a dispatch of so many rounds that was read. Returns how long it took, if that is known.

        Args:
            sent: when; all times by `time.perf_counter()`.
            alone: nothing else was sent since the dispatch before.
            began, ended: when somebody began to wait for it and had it. If it was there before, it is not known when it ended,
                nor how long the next one took, if that had been sent already.
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
    """Chooses how many rounds dispatches run, where all rounds are of one kind."""

    def follow(self, prompt: Sequence[int]) -> Any:
        return None

    def next(self, rows: int, most: int, hurried: bool, left: int) -> tuple[Choice | None, int]:
        return None, min(most, self.most(self.seconds.get((rows, None)), hurried))

    def observe(
        self,
        sent: SentRounds,
        infos: StepInfo,
        sequences: Sequence[TokenSequence],
        heard: Sequence[int],
        began: float,
        ended: float,
    ) -> None:
        self.time(kind_of(sent), len(infos.committed), sent.at, sent.alone, began, ended)
