"""Rules that the samples of a soak must meet."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Any, NamedTuple

QUARTERS = 4


class Sample(NamedTuple):
    """A figure and its time, in seconds since the start of the load."""

    at_s: float
    value: float


@dataclass(frozen=True)
class Bounds:
    """Bounds on growth.

    Attributes:
        slope_mb_per_min: slope of resident memory over the second half. A slope below the scatter of the samples is allowed.
        memory_ratio: median memory of the last quarter over that of the second quarter.
        latency_ratio: median latency of the last quarter over that of the second; generous, because machines are shared.
        latency_slack_s: additional seconds, because ratios of milliseconds are noisy.
        step_age_s: maximum age of the engine's last step.
    """

    slope_mb_per_min: float = 0.5
    memory_ratio: float = 1.03
    latency_ratio: float = 2.0
    latency_slack_s: float = 0.01
    step_age_s: float = 5.0


@dataclass(frozen=True)
class Check:
    """Result of a rule, with the found and the expected value as text."""

    name: str
    held: bool
    found: str
    expected: str


def theil_sen(samples: Sequence[Sample]) -> float:
    """Returns the median slope of all pairs of samples, per second, which is robust to outliers; 0 without pairs."""
    slopes = [(b.value - a.value) / (b.at_s - a.at_s) for a, b in combinations(samples, 2) if b.at_s != a.at_s]
    return median(slopes) if slopes else 0.0


def scatter(samples: Sequence[Sample], slope: float) -> float:
    """Returns the median distance of the samples from a line with this slope."""
    if not samples:
        return 0.0
    rests = [each.value - slope * each.at_s for each in samples]
    middle = median(rests)
    return median(abs(rest - middle) for rest in rests)


def between(samples: Sequence[Sample], begin_s: float, end_s: float) -> list[Sample]:
    return [each for each in samples if begin_s <= each.at_s < end_s]


def quarter(samples: Sequence[Sample], number: int, length_s: float) -> list[Sample]:
    """Returns the samples of a quarter of the run, counted from 0."""
    return between(samples, number * length_s / QUARTERS, (number + 1) * length_s / QUARTERS)


def quarter_medians(samples: Sequence[Sample], length_s: float) -> list[float | None]:
    """Returns the median of each quarter, None for a quarter without samples."""
    quarters = (quarter(samples, number, length_s) for number in range(QUARTERS))
    return [median(each.value for each in found) if found else None for found in quarters]


def memory_checks(samples_mb: Sequence[Sample], length_s: float, bounds: Bounds) -> list[Check]:
    """Checks the slope of memory in the second half, and the last quarter against the second."""
    half = between(samples_mb, length_s / 2, length_s)
    per_s = theil_sen(half)
    noise = 2 * scatter(half, per_s) / max(length_s / 2, 1e-9)
    slope = per_s * 60
    allowed = max(bounds.slope_mb_per_min, noise * 60)
    _, second, _, last = quarter_medians(samples_mb, length_s)
    grown = None if not second or last is None else last / second
    return [
        Check("memory slope, second half", len(half) > 2 and slope <= allowed, f"{slope:+.3f} MB/min", f"≤ {allowed:.2f}"),
        ratio_check("memory, last quarter / second", grown, bounds.memory_ratio),
    ]


def latency_check(name: str, samples_s: Sequence[Sample], length_s: float, bounds: Bounds) -> Check:
    """Checks the median latency of the last quarter against that of the second."""
    _, second, _, last = quarter_medians(samples_s, length_s)
    if second is None or last is None:
        return Check(name, False, "no samples", "some in each quarter")
    most = second * bounds.latency_ratio + bounds.latency_slack_s
    return Check(name, last <= most, f"{last * 1e3:.1f} ms after {second * 1e3:.1f}", f"≤ {most * 1e3:.1f} ms")


def ratio_check(name: str, ratio: float | None, most: float) -> Check:
    return Check(name, ratio is not None and ratio <= most, "no samples" if ratio is None else f"{ratio:.4f}", f"≤ {most}")


def equal_check(name: str, found: Any, expected: Any) -> Check:
    return Check(name, found == expected, f"{found}", f"{expected}")


def positive_checks(counts: dict[str, float]) -> list[Check]:
    """Checks that the run covered its events: a soak without a preemption does not test preemption."""
    return [Check(f"covered: {name}", count > 0, f"{count:g}", "> 0") for name, count in counts.items()]


TRACES = ("Traceback", "Error", "Exception", "CRITICAL", "core dumped", "Segmentation")
"""Words in lines of standard error that indicate a failure."""


def suspicious(line: str, traces: Sequence[str] = TRACES) -> bool:
    return any(trace in line for trace in traces)


def lines_check(text: str, wrong: Callable[[str], bool] = suspicious) -> Check:
    """Checks that standard error has no line that looks like a traceback."""
    found = [line for line in text.splitlines() if wrong(line)]
    return Check("standard error", not found, found[0][:120] if found else "nothing wrong", "no traceback")
