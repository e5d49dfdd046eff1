"""What a soak's samples must show: the rules, apart from the server and the load that they come from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Any, NamedTuple

QUARTERS = 4


class Sample(NamedTuple):
    """A figure, and when it was taken, in seconds since the load began."""

    at_s: float
    value: float


@dataclass(frozen=True)
class Bounds:
    """What still counts as flat.

    Attributes:
        slope_mb_per_min: of resident memory over the second half. Where the samples scatter by more than that makes over the
            half, their scatter counts instead: it would hide the slope.
        memory_ratio: the median of memory in the last quarter, over that in the second one.
        latency_ratio: the same of a latency; generous, for machines are shared.
        latency_slack_s: and so much more: a ratio of milliseconds says little.
        step_age_s: how old the engine's last step may ever be.
    """

    slope_mb_per_min: float = 0.5
    memory_ratio: float = 1.03
    latency_ratio: float = 2.0
    latency_slack_s: float = 0.01
    step_age_s: float = 5.0


@dataclass(frozen=True)
class Check:
    """One rule: whether it held, and what was found and expected, in words."""

    name: str
    held: bool
    found: str
    expected: str


def theil_sen(samples: Sequence[Sample]) -> float:
    """The slope, per second: the median of those of all pairs, which a few samples far off do not move; 0 without pairs."""
    slopes = [(b.value - a.value) / (b.at_s - a.at_s) for a, b in combinations(samples, 2) if b.at_s != a.at_s]
    return median(slopes) if slopes else 0.0


def scatter(samples: Sequence[Sample], slope: float) -> float:
    """How far samples lie from the line of this slope: the median distance."""
    if not samples:
        return 0.0
    rests = [each.value - slope * each.at_s for each in samples]
    middle = median(rests)
    return median(abs(rest - middle) for rest in rests)


def between(samples: Sequence[Sample], begin_s: float, end_s: float) -> list[Sample]:
    return [each for each in samples if begin_s <= each.at_s < end_s]


def quarter(samples: Sequence[Sample], number: int, length_s: float) -> list[Sample]:
    """Those of a quarter of the run, from 0 on."""
    return between(samples, number * length_s / QUARTERS, (number + 1) * length_s / QUARTERS)


def quarter_medians(samples: Sequence[Sample], length_s: float) -> list[float | None]:
    """The median of each quarter; None of one without samples."""
    quarters = (quarter(samples, number, length_s) for number in range(QUARTERS))
    return [median(each.value for each in found) if found else None for found in quarters]


def memory_checks(samples_mb: Sequence[Sample], length_s: float, bounds: Bounds) -> list[Check]:
    """Resident memory in its second half, and in the last quarter against the second."""
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
    """A latency's median in the last quarter against that in the second."""
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
    """That a run met what it is for: a soak without a preemption says nothing of preemption."""
    return [Check(f"met: {name}", count > 0, f"{count:g}", "> 0") for name, count in counts.items()]


TRACES = ("Traceback", "Error", "Exception", "CRITICAL", "core dumped", "Segmentation")
"""What a line of standard error has where something went wrong."""


def suspicious(line: str, traces: Sequence[str] = TRACES) -> bool:
    return any(trace in line for trace in traces)


def lines_check(text: str, wrong: Callable[[str], bool] = suspicious) -> Check:
    """Standard error without anything that looks like a traceback."""
    found = [line for line in text.splitlines() if wrong(line)]
    return Check("standard error", not found, found[0][:120] if found else "nothing wrong", "no traceback")
