"""Table and page of training runs."""

from pathlib import Path
from typing import Any

import pytest

from report.reading import Page, check_self_contained
from tilewright.report.training import POINTS, run_table, thinned, write_runs

RUNS: dict[str, Any] = {
    "first": [
        {"step": 10, "time": 1.0, "loss": 3.0, "tokens_per_s": 10.0},
        {"step": 20, "time": 2.0, "loss": 2.0, "tokens_per_s": 90.0},
        {"step": 20, "time": 2.0, "held_out_loss": 2.5, "own_metric": 7.0},
        {"step": 30, "time": 3.0, "loss": 1.0, "tokens_per_s": 30.0},
    ],
    "second": [{"step": 5, "time": 1.0, "loss": 4.0}],
}


def test_a_table_has_last_values_and_medians_of_speeds():
    table = run_table(RUNS)
    first, second = table.groups[""]
    assert first == {"name": "first", "step": 30, "loss": 1.0, "held_out_loss": 2.5, "tokens_per_s": 30.0, "own_metric": 7.0}
    assert (second["loss"], second["held_out_loss"], second["tokens_per_s"]) == (4.0, None, None)
    assert [metric.head for metric in table.metrics] == ["steps", "loss", "held-out loss", "tokens/s", "own metric"]


def test_long_curves_are_means_of_neighbours():
    points = [(float(step), float(step % 2)) for step in range(1, 10 * POINTS + 1)]
    found = thinned(points)
    assert len(found) == POINTS
    assert found[0] == (10.0, 0.5)
    assert found[-1] == (10.0 * POINTS, 0.5)
    assert thinned(points[:7]) == points[:7]


def test_a_page_has_a_curve_of_each_metric(tmp_path: Path):
    write_runs(tmp_path / "page.html", RUNS)
    page = Page(tmp_path / "page.html")
    check_self_contained(page)
    assert len(page.named("figure")) == 4
    for title in ("loss", "held-out loss", "tokens/s", "own metric"):
        assert f"<figcaption>{title}</figcaption>" in page.source
    assert page.data() == RUNS


def test_a_page_of_metrics_below_0_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="expected values of 0 or more, found -1"):
        write_runs(tmp_path / "page.html", {"run": [{"step": 1, "loss": -1.0}]})
