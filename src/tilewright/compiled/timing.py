"""Alternating measurements: every timed comparison in the project uses them.

A shared machine's speed drifts, and each run affects the caches, clock and threads of the next. Therefore all sides of a
comparison run once before any side runs again, in reverse order every second time: each side runs equally often early and late,
and equally often after each of its neighbours.
"""

import math
import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

REPETITIONS = 5
"""Fewest repetitions behind a published median."""

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


def alternate(
    runs: Mapping[Key, Callable[[], Value]],
    repetitions: int = REPETITIONS,
    on_run: Callable[[], None] = lambda: None,
    warm: bool = False,
) -> dict[Key, list[Value]]:
    """Runs all functions alternately and returns their results.

    Args:
        on_run: called after each run.
        warm: run each once first, for compilation, and discard the result.

    Returns:
        The results of each function, by repetition.
    """
    results: dict[Key, list[Value]] = {key: [] for key in runs}
    for repetition in range(-1 if warm else 0, repetitions):
        for key in list(runs)[:: -1 if repetition % 2 else 1]:
            value = runs[key]()
            if repetition >= 0:
                results[key].append(value)
            on_run()
    return results


@dataclass(frozen=True)
class Spread:
    """Median, minimum and maximum of repeated measurements."""

    median: float
    least: float
    most: float

    @property
    def range(self) -> tuple[float, float]:
        return self.least, self.most


def spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))


def mean(values: Iterable[float]) -> float | None:
    """Returns the mean; None for no values."""
    listed = list(values)
    return math.fsum(listed) / len(listed) if listed else None


def medians(times: Mapping[Key, Sequence[float]]) -> dict[Key, float]:
    return {key: statistics.median(values) for key, values in times.items()}


def quotients(over: Sequence[float], under: Sequence[float]) -> Spread:
    """Returns the spread of the quotients of two figures per repetition, which cancel disturbances of a whole repetition."""
    return spread([a / b for a, b in zip(over, under, strict=True)])
