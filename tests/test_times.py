"""Tests that are left to `make test-all`, and its shards."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import times

SECONDS = st.dictionaries(
    st.builds("{}::{}".format, st.sampled_from(["a.py", "b.py", "c.py"]), st.integers(0, 9)), st.floats(0.0, 9.0), max_size=20
)


@given(SECONDS, st.floats(0.0, 40.0))
def test_the_dearest_go_until_the_rest_fits_and_a_quick_one_of_each_file_stays(seconds: dict[str, float], budget_s: float):
    gone = times.chosen(seconds, budget_s, kept_s=2.0)
    stay = set(seconds) - set(gone)
    kept = {min((t for t in seconds if t.startswith(file)), key=lambda t: seconds[t]) for file in {t[:4] for t in seconds}}
    kept = {test for test in kept if seconds[test] <= 2.0}
    assert kept <= stay
    assert sum(seconds[test] for test in stay) <= budget_s + 1e-9 or stay == kept
    # One fewer would not have been enough, and none that stays but for its file is dearer than one that goes.
    assert not gone or sum(seconds[test] for test in [*stay, gone[-1]]) > budget_s - 1e-9
    assert max((seconds[test] for test in stay - kept), default=0.0) <= min((seconds[test] for test in gone), default=9.0)


def item(test: str, *marks: pytest.MarkDecorator) -> Any:
    found = {mark.name: mark.mark for mark in marks}
    return SimpleNamespace(nodeid=test, get_closest_marker=found.get, config=SimpleNamespace(getoption=lambda name: False))


def test_whole_files_come_first_that_need_longest():
    """A listed test needs what was measured, another slow one more than one that is not, and one that is left out nothing."""
    tests: list[Any] = [
        *(item(f"product.py::{n}", pytest.mark.slow, pytest.mark.product) for n in range(9)),
        *(item(f"many.py::{n}") for n in range(9)),
        item("slow.py::0", pytest.mark.slow),
        item("listed.py::0"),
        item("listed.py::1", pytest.mark.slow(seconds=30.0)),
        item("listed.py::2"),
    ]
    kept = [test.nodeid for test in tests]
    times.longest_first(tests)
    assert [test.nodeid for test in tests] == [*kept[-3:], kept[18], *kept[9:18], *kept[:9]]


def test_every_test_of_the_list_is_in_a_file_that_is_there():
    root = Path(__file__).parent.parent
    assert all((root / test.split("::")[0]).is_file() for test in times.listed())


def test_a_slow_test_is_in_one_shard_of_three_and_its_file_with_it():
    tests = [item(f"{file}.py::{n}", pytest.mark.slow) for file in "abcdefgh" for n in range(2)]
    shards = [[test for test in tests if not times.in_other_shard(test, *times.shard(f"{part}/3"))] for part in (1, 2, 3)]
    assert sorted(test.nodeid for shard in shards for test in shard) == [test.nodeid for test in tests]
    assert all(set(Counter(map(times.file_of, shard)).values()) <= {2} for shard in shards)
    assert not times.in_other_shard(item("a.py::0"), 1, 3)
    assert not times.in_other_shard(item("a.py::0"), 2, 3)


@pytest.mark.parametrize("text", ["0/3", "4/3", "1", "a/b"])
def test_a_shard_that_is_none_is_refused(text: str):
    with pytest.raises(ValueError, match=r"expected|invalid literal|unpack"):
        times.shard(text)
