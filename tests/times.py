"""Processor seconds of the tests: selects the slow tests, and orders the files.

`make test` leaves out the most expensive tests, so that the rest fits a budget: every run marks the tests of `slow.txt` as
slow. `make times` measures the others without stored programs and extends the list. Delete the list first to measure all
tests.
"""

import os
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

LISTED = Path(__file__).with_name("slow.txt")
BUDGET_S = 600 - 70.0
"""Processor seconds of the tests of `make test`: 600, minus the start of two workers.

The fixtures and programs of a left-out test move to the next test of its file, so the remaining tests take longer than this.
Measure again and extend the list."""
KEPT_S = 2.0
"""Seconds up to which the cheapest test of each file stays."""
PROPERTY = "processor_s"
QUICK_S = 0.2
SLOW_S = 2.0
"""Assumed seconds of an unmeasured test, without and with the mark slow."""


def listed() -> dict[str, float]:
    """Reads the processor seconds of the listed tests, by id."""
    lines = LISTED.read_text("utf-8").splitlines() if LISTED.exists() else []
    pairs = [line.split(maxsplit=1) for line in lines]
    return {test: float(seconds) for seconds, test in pairs}


def longest_first(items: list[pytest.Item]) -> None:
    """Orders files by the seconds of their tests, longest first, so that no worker ends with a long file."""
    seconds: dict[str, float] = defaultdict(float)
    for item in items:
        seconds[file_of(item)] += needed(item)
    items.sort(key=lambda item: -seconds[file_of(item)])


def needed(item: pytest.Item) -> float:
    """Returns the expected seconds of a test, 0 if it is left out."""
    if left_out(item):
        return 0.0
    mark = item.get_closest_marker("slow")
    return QUICK_S if mark is None else mark.kwargs.get("seconds", SLOW_S)


def left_out(item: pytest.Item) -> bool:
    """Returns True for a case that runs only with `--products`."""
    return item.get_closest_marker("product") is not None and not item.config.getoption("products")


def shard(text: str) -> tuple[int, int]:
    """Parses "2/3", the second of three parts."""
    part, parts = (int(number) for number in text.split("/"))
    if not 1 <= part <= parts:
        raise ValueError(f"expected K/N with 1 <= K <= N, found {text}")
    return part, parts


def in_other_shard(item: pytest.Item, part: int, parts: int) -> bool:
    """Returns True for a slow test of a file in another part. Files stay whole, because their tests share fixtures."""
    return item.get_closest_marker("slow") is not None and zlib.crc32(file_of(item).encode()) % parts != part - 1


def file_of(item: pytest.Item) -> str:
    return item.nodeid.split("::")[0]


def chosen(seconds: Mapping[str, float], budget_s: float = BUDGET_S, kept_s: float = KEPT_S) -> list[str]:
    """Returns the ids of the most expensive tests, in order, without which the others fit `budget_s`."""
    files: dict[str, list[str]] = defaultdict(list)
    for test in seconds:
        files[test.split("::")[0]].append(test)
    cheapest = {min(tests, key=lambda test: seconds[test]) for tests in files.values()}
    left = sum(seconds.values())
    found = []
    for test in sorted(seconds, key=lambda test: -seconds[test]):
        if left <= budget_s:
            break
        if test not in cheapest or seconds[test] > kept_s:
            found.append(test)
            left -= seconds[test]
    return found


def processor_s() -> float:
    """Returns the processor seconds of this process and its finished children."""
    children = os.times()
    return time.process_time() + children.children_user + children.children_system


class Times:
    """A plugin that measures tests in every worker and writes the list at the end of the run."""

    def __init__(self, writes: bool):
        self.writes = writes
        self.seconds: dict[str, Any] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        item.stash[BEGAN] = processor_s()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
        result = yield
        item.user_properties.append((PROPERTY, processor_s() - item.stash[BEGAN]))
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            self.seconds.update((report.nodeid, value) for name, value in report.user_properties if name == PROPERTY)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if self.writes and exitstatus == pytest.ExitCode.OK:
            seconds = listed() | self.seconds
            lines = [f"{seconds[test]:.1f} {test}" for test in sorted(chosen(seconds))]
            LISTED.write_text("".join(f"{line}\n" for line in lines), "utf-8")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        slow = set(chosen(listed() | self.seconds))
        left = sum(seconds for test, seconds in self.seconds.items() if test in slow)
        terminalreporter.write_line(f"{sum(self.seconds.values()):.0f} processor seconds, {left:.0f} in tests to leave out")


BEGAN = pytest.StashKey[float]()
