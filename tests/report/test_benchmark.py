"""The benchmark page: the papers' table as it should read, charts that show what they were given, one file."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from report.reading import Page, check_self_contained
from tilewright.report.benchmark import (
    BenchmarkReport,
    CategoryTau,
    DrafterFigures,
    category_table,
    chosen_tables,
    figures_table,
    write_benchmark,
)
from tilewright.report.charts import LineChart, Series, StackedBars, compact, round_step, ticks, x_ticks
from tilewright.report.page import Cell, HtmlTable, Section, write_sections


def measured(dataset: str, drafter: str, speedup: float, tau: float, baseline: float = 100.0, **more: Any) -> DrafterFigures:
    return DrafterFigures(dataset, drafter, 20, baseline, baseline * speedup, speedup, tau, **more)


def sample() -> BenchmarkReport:
    curves: dict[str, Any] = {"acceptance_by_position": [0.75, 0.5, 0.125], "tau_by_position": [(0, 2.5), (64, 3.25)]}
    times: dict[str, Any] = {"draft_seconds": 0.001, "verify_seconds": 0.004, "other_seconds": 0.0005}
    rows = [
        measured("gsm8k", "dflash", 2.5, 3.2, **curves, **times),
        measured("gsm8k", "ngram", 1.25, 1.5, acceptance_by_position=[0.25, 0.1, 0.05]),
        measured("mt_bench", "dflash", 1.5, 2.1, baseline=2000.0),
        measured("mt_bench", "ngram", 1.75, 1.4, baseline=2000.0),
    ]
    categories = [CategoryTau("mt_bench", "writing <x>", "dflash", 4, 2.2), CategoryTau("mt_bench", "", "ngram", 3, 1.25)]
    environment = {"chip": "a chip", "command": "tilewright bench speculative --data 'a & b'"}
    return BenchmarkReport("Speed & τ", rows, categories, "The demo pair.", environment, ["2 prompts were skipped."])


def texts(table: HtmlTable) -> list[list[str | None]]:
    return [[cell.text if isinstance(cell, Cell) else cell for cell in row] for row in table.rows]


def written(path: Path, report: BenchmarkReport) -> Page:
    write_benchmark(path / "report.html", report)
    return Page(path / "report.html")


def test_the_page_is_one_file_that_fetches_nothing(tmp_path: Path):
    page = written(tmp_path, sample())
    check_self_contained(page)
    assert not page.scripts
    assert page.embedded is not None
    assert "//" not in page.source.replace(page.embedded, "")


def test_the_data_comes_out_as_it_went_in(tmp_path: Path):
    assert written(tmp_path, sample()).data() == json.loads(json.dumps(asdict(sample())))


def test_everything_is_on_the_page(tmp_path: Path):
    page = written(tmp_path, sample())
    for shown in (
        "Speed & τ", "The demo pair.", "2 prompts were skipped.", "mt_bench: writing <x>", "2.50×", "a chip", "--data 'a & b'",
        "Acceptance by position", "τ along the text", "Where a round's time goes", "ngram, slot in the block 2: 10.0 %",
        "gsm8k · dflash", "5.50 ms",
    ):  # fmt: skip
        assert shown in page.text
    assert len(page.named("h1")) == 1
    assert len(page.named("h2")) == 5
    assert all(attributes.get("scope") for attributes in page.named("th"))
    assert all("aria-hidden" in svg or svg.get("aria-label") for svg in page.named("svg"))


def test_the_table_reads_as_in_the_papers():
    table = figures_table("All", sample().measured)
    columns = ["data", "prompts", "plain tokens/s", *["tokens/s", "speedup", "τ"] * 2]
    assert list(table.columns) == columns
    assert list(table.groups) == [("", 3), ("dflash", 3), ("ngram", 3)]
    assert texts(table) == [
        ["gsm8k", "20", "100.0", "250.0", "2.50×", "3.20", "125.0", "1.25×", "1.50"],
        ["mt_bench", "20", "2,000", "3,000", "1.50×", "2.10", "3,500", "1.75×", "1.40"],
        ["mean", None, None, None, "2.00×", "2.65", None, "1.50×", "1.45"],
    ]
    assert table.total
    speedups = [cell for row in table.rows for cell in row if isinstance(cell, Cell)]
    assert [(cell.strong, cell.share) for cell in speedups] == [(True, 1.0), (False, 0.5), (False, 0.6), (True, 0.7)]


def test_categories_have_a_table_of_their_own():
    table = category_table(sample())
    assert list(table.columns) == ["category", "prompts", "dflash", "ngram"]
    assert texts(table) == [["mt_bench: writing <x>", "4", "2.20", None], ["mt_bench: –", "3", None, "1.25"]]


def test_what_rounds_were_chosen_has_a_table():
    rows = [
        measured("a", "auto", 2.0, 3.0, chosen=[("plain", 0.25), ("dflash 4", 0.75)]),
        measured("a", "x", 2.0, 3.0),
        measured("b", "auto", 4.0, 5.0, chosen=[("ngram 16", 1.0)]),
    ]
    (table,) = chosen_tables(rows)
    assert table.columns == ["data", "drafter", "plain", "dflash 4", "ngram 16"]
    assert texts(table) == [["a", "auto", "25%", "75%", None], ["b", "auto", None, None, "100%"]]
    assert chosen_tables(rows[1:2]) == []


def test_a_drafter_without_figures_leaves_its_cells_empty():
    rows = [measured("a", "x", 2.0, 3.0), measured("b", "x", 4.0, 5.0), measured("b", "y", 1.0, 1.0)]
    table = figures_table("All", rows)
    assert texts(table)[0] == ["a", "20", "100.0", "200.0", "2.00×", "3.00", None, None, None]
    assert texts(table)[2] == ["mean", None, None, None, "3.00×", "4.00", None, None, None]


def test_baselines_that_differ_and_prices_have_columns_of_their_own():
    rows = [measured("a", "x", 2.0, 3.0, cost_per_million_tokens=1.5), measured("a", "y", 1.0, 1.0, baseline=50.0)]
    table = figures_table("All", rows)
    assert list(table.columns) == ["data", "prompts", *["plain tokens/s", "tokens/s", "speedup", "τ", "cost/M tokens"] * 2]
    assert texts(table) == [
        ["a", "20", "100.0", "200.0", "2.00×", "3.00", "1.50", "50.0", "50.0", "1.00×", "1.00", None],
    ]


BAD = [
    ({"tokens_per_s": 0.0}, "expected tokens_per_s above 0, found 0.0"),
    ({"baseline_tokens_per_s": -1.0}, "expected baseline_tokens_per_s above 0, found -1.0"),
    ({"speedup": float("nan")}, "expected speedup above 0, found nan"),
    ({"tau": float("inf")}, "expected tau above 0, found inf"),
    ({"prompts": 0}, "expected prompts above 0, found 0"),
    ({"chosen": [("plain", 1.5)]}, "expected a share of rounds from 0 to 1, found 1.5 of plain"),
    ({"draft_seconds": float("inf")}, "expected finite draft_seconds, found inf"),
    ({"cost_per_million_tokens": float("nan")}, "expected cost_per_million_tokens of 0 or more, found nan"),
    ({"acceptance_by_position": [0.5, 1.5]}, "expected acceptance_by_position from 0 to 1, found 1.5"),
    ({"tau_by_position": [(0, 0.0)]}, "expected tau_by_position above 0 at positions of 0 or more, found 0.0 at 0"),
]


@pytest.mark.parametrize(("changes", "problem"), BAD)
def test_a_figure_that_cannot_be_is_named(changes: dict[str, Any], problem: str):
    report = sample()
    rows = [*report.measured[:3], replace(report.measured[3], **changes)]
    with pytest.raises(ValueError, match=f"mt_bench, ngram: {re.escape(problem)}"):
        replace(report, measured=rows)


def test_a_report_needs_datasets_once_each():
    report = sample()
    with pytest.raises(ValueError, match="at least one dataset"):
        replace(report, measured=report.measured[4:])
    with pytest.raises(ValueError, match="gsm8k, dflash: expected one set of figures, found a second"):
        replace(report, measured=[*report.measured, report.measured[0]])


def test_sections_without_figures_are_left_out(tmp_path: Path):
    page = written(tmp_path, BenchmarkReport("bare", [measured("a", "none", 1.0, 1.0)]))
    assert "Acceptance by position" not in page.text
    assert "Where a round's time goes" not in page.text
    assert not page.named("figure")


def test_a_line_chart_places_its_points():
    chart = LineChart("t", "x", "y", [Series("a", [(0, 0.0), (10, 0.5), (20, 1.0)])], percent=True)
    (points,) = re.findall(r'<polyline[^>]* points="([^"]*)"', chart.html())
    (x0, y0), (x1, y1), (x2, y2) = ([float(n) for n in point.split(",")] for point in points.split())
    assert x0 < x1 < x2
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y0 > y1 > y2
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.2)
    assert "50.0 %" in chart.html()


def test_bars_are_in_proportion():
    chart = StackedBars("t", ["p", "q"], [("a", [1.0, 3.0]), ("b", [2.0, 0.0])], "ms")
    widths = [float(width) for width in re.findall(r'<rect class="s\d" x="[\d.]+" width="([\d.]+)" height="1">', chart.html())]
    assert widths == [25.0, 75.0, 50.0], "what takes nothing has no bar"


def test_a_part_below_0_is_in_the_figures_and_not_drawn():
    chart = StackedBars("t", ["p", "q"], [("a", [-1.0, 3.0])], "ms")
    assert re.findall(r'<rect class="(s\d)" x="([\d.]+)" width="([\d.]+)" height="1">', chart.html()) == [
        ("s2", "0.00", "100.00")
    ]
    assert chart.table().rows == [["a", "-1", "3", "2"]]


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: LineChart("t", "x", "y", []), "at least one point"),
        (lambda: LineChart("t", "x", "y", [Series("a", [(0, 1.5)])], percent=True), "shares from 0 to 1, found 1.5 at 0"),
        (lambda: LineChart("t", "x", "y", [Series("a", [(0, float("nan"))])]), "found nan at 0"),
        (lambda: StackedBars("t", ["p"], [("a", [1.0, 2.0])], "ms"), "expected 1 parts of 'a', found 2"),
        (lambda: StackedBars("t", ["p"], [("a", [float("nan")])], "ms"), "expected finite parts of 'a'"),
        (lambda: StackedBars("t", ["p"], [("a", [0.0])], "ms"), "at least one bar above 0"),
        (lambda: HtmlTable("t", ["a", "b"], [["x"]]), "expected rows of 2 cells, found one of 1"),
        (lambda: HtmlTable("t", ["a", "b"], [], groups=[("g", 3)]), "expected groups over 2 columns, found 3"),
        (lambda: Cell("x", share=1.5), "found 1.5"),
    ],
)
def test_what_cannot_be_drawn_is_an_error(make: Any, problem: str):
    with pytest.raises(ValueError, match=problem):
        make()


def test_a_chart_of_zeros_can_be_drawn():
    assert "<polyline" in LineChart("t", "x", "y", [Series("a", [(1, 0.0)])]).html()


@given(st.floats(1e-6, 1e9))
def test_ticks_are_few_and_reach_the_top(top: float):
    found = ticks(top)
    assert found[0] == 0
    assert 2 <= len(found) <= 7
    assert found[-1] >= top * (1 - 1e-6)


@given(st.floats(0, 1e6), st.floats(0.01, 1e6))
def test_ticks_along_x_stay_inside(low: float, width: float):
    found = x_ticks(low, low + width)
    assert found
    assert found == sorted(found)
    assert all(low - 1e-6 * (low + width) <= tick <= (low + width) * (1 + 1e-6) for tick in found)


@given(st.floats(1e-9, 1e9))
def test_steps_are_round(least: float):
    step = round_step(least)
    assert least * (1 - 1e-6) <= step <= 10 * least
    assert f"{step:e}"[0] in "125"


def test_numbers_are_short():
    assert [compact(x) for x in (0, 3, 1234.5, 0.01234, 12.345, 2.0)] == ["0", "3", "1,234", "0.0123", "12.3", "2"]


def test_any_benchmark_can_write_tables_and_charts(tmp_path: Path):
    table = HtmlTable("<sizes>", ["block", "ms"], [["16", "1.0"], ["32", Cell("1.1", strong=True)]], note="a note & more")
    sections = [Section("Rounds <1>", [table], "some & text", grid=True)]
    write_sections(tmp_path / "page.html", "Rounds", sections, facts={"chip": "x", "unknown": None}, data={"a": [1]})
    page = Page(tmp_path / "page.html")
    check_self_contained(page)
    assert page.data() == {"a": [1]}
    for shown in ("<sizes>", "Rounds <1>", "some & text", "a note & more", "1.1"):
        assert shown in page.text
    assert "unknown" not in page.text
