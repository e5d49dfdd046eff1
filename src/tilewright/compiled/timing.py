"""Taking turns: the one way in which anything here is timed beside something else.

A shared machine is faster in one minute than in the next, and what ran just before leaves its mark on caches, clock
and threads. So all sides of a comparison run once before any runs again, every second time in reverse: each then comes as
early as late, and follows as often upon the one as upon the other of its neighbours.
"""

import math
import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

REPETITIONS = 5
"""The fewest that a quoted figure is the median of."""

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


def alternate(
    runs: Mapping[Key, Callable[[], Value]],
    repetitions: int = REPETITIONS,
    on_run: Callable[[], None] = lambda: None,
    warm: bool = False,
) -> dict[Key, list[Value]]:
    """Results of each of the runs, which are all run in turns.

    Args:
        on_run: called after each.
        warm: each runs once before, for its compilation; what it gives then is left out.

    Returns:
        for each run what it gave, repetition by repetition.
    """
    taken: dict[Key, list[Value]] = {key: [] for key in runs}
    for repetition in range(-1 if warm else 0, repetitions):
        for key in list(runs)[:: -1 if repetition % 2 else 1]:
            value = runs[key]()
            if repetition >= 0:
                taken[key].append(value)
            on_run()
    return taken


@dataclass(frozen=True)
class Spread:
    """A figure that was taken several times."""

    median: float
    least: float
    most: float

    @property
    def range(self) -> tuple[float, float]:
        return self.least, self.most


def spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))


def mean(values: Iterable[float]) -> float | None:
    """The mean, None of nothing."""
    listed = list(values)
    return math.fsum(listed) / len(listed) if listed else None


def medians(times: Mapping[Key, Sequence[float]]) -> dict[Key, float]:
    return {key: statistics.median(values) for key, values in times.items()}


def quotients(over: Sequence[float], under: Sequence[float]) -> Spread:
    """Of two figures from the same repetitions, which what disturbed a whole repetition does not touch."""
    return spread([a / b for a, b in zip(over, under, strict=True)])
