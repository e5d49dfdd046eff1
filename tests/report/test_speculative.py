"""Tables and page of the speculative benchmark, and charts that show what they were given, one file."""

import io
import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from report.reading import Page, check_self_contained
from tilewright.metrics.tables import FigureTable, print_table
from tilewright.report.charts import LineChart, Series, StackedBars, compact, round_step, ticks, x_ticks
from tilewright.report.page import Cell, HtmlTable, Report, Section, write_sections
from tilewright.report.speculative import benchmark_tables, shown_positions, write_benchmark

PLAIN: dict[str, Any] = {
    "dataset": "gsm8k",
    "drafter": "none",
    "tokens_per_s": 1234.56,
    "speedup": 1.0,
    "tokens_per_round": 1.0,
    "round_cost_steps": 1.0,
    "batch_size": 1,
    "responses": 2,
    "distinct_4gram_ratio": 0.87,
    "first_differences": None,
    "cost_per_million_tokens": None,
    "tau_by_position": [],
    "draft_ms": None,
    "verify_ms": None,
    "other_ms": None,
    "round_ms": None,
    "speculative_decoding": None,
    "chosen": None,
    "acceptance_by_position": [],
    "categories": [],
}
DRAFTED: dict[str, Any] = PLAIN | {
    "drafter": "a [long] name of 24 chars",
    "tokens_per_s": 3086.4,
    "speedup": 2.5,
    "tokens_per_round": 4.126,
    "round_cost_steps": 1.65,
    "first_differences": [None, 4],
    "draft_ms": 1.0,
    "verify_ms": 20.126,
    "other_ms": -0.01,
    "round_ms": 21.116,
    "speculative_decoding": {"num_spec_steps": 7},
    "acceptance_by_position": [{"position": n, "rate": 1 / n} for n in range(1, 16)],
    "categories": [{"category": c, "tokens_per_round": tau, "responses": 4} for c, tau in (("[odd]", 3.0), ("", 5.0))],
}
IDLE: dict[str, Any] = DRAFTED | {"drafter": "ngram", "speculative_decoding": {"num_spec_steps": 0}, "round_ms": None}


CHOSEN: dict[str, Any] = {
    "choices": [
        {"drafter": "dflash", "block_size": 4, "rounds": 75, "share_of_rounds": 0.75},
        {"drafter": "none", "block_size": 1, "rounds": 25, "share_of_rounds": 0.25},
    ]
}


def lines(table: FigureTable, width: int = 100) -> list[str]:
    console = Console(record=True, width=width, file=io.StringIO())
    print_table(console, table)
    return console.export_text().splitlines()


def cells(table: FigureTable) -> list[list[str]]:
    """Head and figures of each line of a table, which stand far apart."""
    found = [re.split(r"  +", line.strip()) for line in lines(table)]
    return [line for line in found if len(line) > 1]


def test_a_benchmark_has_a_line_for_each_way_of_decoding():
    speed, times, accepted, categories = benchmark_tables("temperature 0", [PLAIN, DRAFTED, IDLE])
    assert "temperature 0" in lines(speed)[0]
    name = DRAFTED["drafter"]
    assert cells(speed) == [
        ["drafter", "tok/s", "speedup", "τ", "round", "4-grams", "same"],
        ["plain", "1,235", "–", "–", "–", "87%", "–"],
        [name, "3,086", "2.50", "4.13", "1.6", "87%", "1/2"],
        ["ngram", "3,086", "2.50", "4.13", "1.6", "87%", "1/2"],
    ]
    assert cells(times) == [["drafter", "draft", "verify", "other", "round"], [name, "1.00", "20.13", "-0.01", "21.12"]]
    assert cells(accepted) == [
        ["drafter", "1", "2", "3", "4", "6", "8", "12", "15"],
        [name, "100%", "50%", "33%", "25%", "17%", "12%", "8%", "7%"],
    ], "what drafted nothing is left out"
    assert categories.title == "gsm8k: τ by category"
    assert cells(categories) == [["category", name, "ngram"], ["[odd] (4)", "3.00", "3.00"], ["– (4)", "5.00", "5.00"]]


def test_what_was_chosen_is_a_table():
    rows = [PLAIN, DRAFTED | {"chosen": CHOSEN, "round_ms": None, "categories": []}]
    assert cells(benchmark_tables("t", rows)[-1])[1:] == [[DRAFTED["drafter"], "dflash 4 75%, plain 25%"]]


def test_a_benchmark_of_plain_decoding_is_one_table():
    assert len(benchmark_tables("t", [PLAIN])) == 1


AVERAGES: list[dict[str, Any]] = [
    {"batch_size": 1, "drafter": "none", "speedup": 1, "tokens_per_round": 1},
    {"batch_size": 1, "drafter": "x", "speedup": 1.5, "tokens_per_round": None},
]


def test_several_datasets_end_with_the_means():
    rows = [PLAIN, DRAFTED, PLAIN | {"dataset": "[odd]"}, DRAFTED | {"dataset": "[odd]"}]
    speed = benchmark_tables("t", rows, AVERAGES)[0]
    assert list(speed.groups) == ["gsm8k", "[odd]", "mean"]
    assert cells(speed)[-1] == ["x", "–", "1.50", "–", "–", "–", "–"]
    assert list(benchmark_tables("t", rows[:2], AVERAGES)[0].groups) == ["gsm8k"]


def test_several_batch_sizes_are_named():
    rows = [row | {"batch_size": size} for size in (1, 8) for row in (PLAIN, DRAFTED)]
    speed, times, accepted, *categories = benchmark_tables("t", rows)
    for table in (speed, times, accepted):
        assert list(table.groups) == ["gsm8k, batch 1", "gsm8k, batch 8"]
    assert [table.title for table in categories] == ["gsm8k, batch 1: τ by category", "gsm8k, batch 8: τ by category"]


def test_a_price_adds_a_column():
    speed = benchmark_tables("t", [PLAIN | {"cost_per_million_tokens": 1234.567}, DRAFTED])[0]
    assert [line[-1] for line in cells(speed)] == ["cost/M", "1,234.57", "–"]


def test_figures_are_never_cut_names_fold():
    row = DRAFTED | {"dataset": "a-very-long-name-of-a-data-set", "tokens_per_s": 1234567.0}
    for width in (64, 80, 100):
        for table in benchmark_tables("t", [PLAIN, row]):
            text = lines(table, width)
            assert "…" not in "".join(text)
            assert max(map(len, text)) <= width
        assert any("1,234,567" in line for line in lines(benchmark_tables("t", [PLAIN, row])[0], width))


@given(st.integers(1, 1024))
def test_shown_positions_begin_at_1_and_end_with_the_last(last: int):
    places = shown_positions(last)
    assert (places[0], places[-1]) == (1, last)
    assert places == sorted(set(places))
    assert len(places) <= 14


def sample(rows: Sequence[dict[str, Any]] = (PLAIN, DRAFTED, IDLE)) -> Report:
    curves = [row | {"tau_by_position": [{"from": 0, "tau": 2.5}, {"from": 64, "tau": 3.25}]} for row in rows[1:]]
    environment = {"chip": "a chip", "command": "tilewright bench speculative --data 'a & b'"}
    return Report("Speed & τ", "The demo pair.", [*rows[:1], *curves], environment, ["2 prompts were skipped."])


def written(folder: Path, report: Report) -> Page:
    write_benchmark(folder / "report.html", report, AVERAGES)
    return Page(folder / "report.html")


def test_the_page_is_one_file_with_all_its_data(tmp_path: Path):
    page = written(tmp_path, sample())
    check_self_contained(page)
    assert not page.scripts
    assert page.embedded is not None
    assert "//" not in page.source.replace(page.embedded, "")
    assert page.data() == json.loads(json.dumps(asdict(sample())))


def test_everything_is_on_the_page(tmp_path: Path):
    page = written(tmp_path, sample())
    for text in (
        "Speed & τ",
        "The demo pair.",
        "2 prompts were skipped.",
        "gsm8k, ngram",
        "gsm8k: τ by category",
        "2.50",
        "a chip",
        "--data 'a & b'",
        "Acceptance by position",
        "τ along the text",
        "Time of a round by part",
        "ngram, slot in the block 2: 50.0 %",
        "gsm8k · a [long] name of 24 chars",
    ):
        assert text in page.text, text
    assert len(page.named("h1")) == 1
    assert len(page.named("h2")) == 5
    assert all(attributes.get("scope") for attributes in page.named("th"))
    assert all("aria-hidden" in svg or svg.get("aria-label") for svg in page.named("svg"))


def test_sections_without_figures_are_left_out(tmp_path: Path):
    page = written(tmp_path, sample([PLAIN]))
    assert "Acceptance by position" not in page.text
    assert "Time of a round by part" not in page.text
    assert not page.named("figure")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"draft_ms": float("inf")}, "expected finite parts"),
        ({"tokens_per_s": float("nan")}, "Out of range float values are not JSON compliant"),
        ({"acceptance_by_position": [{"position": 1, "rate": 1.5}]}, "expected shares from 0 to 1, found 1.5"),
    ],
)
def test_a_figure_that_cannot_be_is_refused(tmp_path: Path, changes: dict[str, Any], problem: str):
    with pytest.raises(ValueError, match=problem):
        written(tmp_path, sample([PLAIN, DRAFTED | changes]))


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


@given(st.floats(0, 1e6), st.floats(0.01, 1e6), st.integers(2, 30))
def test_ticks_along_x_stay_inside(low: float, width: float, count: int):
    found = x_ticks([low + width * n / (count - 1) for n in range(count)], 300)
    assert found
    assert found == sorted(found)
    assert all(low - 1e-6 * (low + width) <= tick <= (low + width) * (1 + 1e-6) for tick in found)


def test_ticks_stand_where_the_data_are():
    assert x_ticks([2, 4, 8, 16, 24], 294) == [2, 4, 8, 16, 24]
    assert x_ticks([1, 2, 128, 1024], 294) == [1, 128, 1024], "where there is room for their numbers"
    assert x_ticks([3], 294) == [3]
    assert ticks(4745, least=3959) == [3800, 4000, 4200, 4400, 4600, 4800], "values far above 0 are told apart"
    assert ticks(4745, least=1000) == [0, 1000, 2000, 3000, 4000, 5000]


def test_axes_have_their_units():
    line = LineChart("t", "cores", "tokens/s", [Series("a", [(2, 100.0), (24, 300.0)])]).html()
    shown = re.findall(r"<text[^>]*>([^<]*)</text>", line)
    assert {"cores", "tokens/s", "2", "24", "0", "300"} <= {*shown}
    bars = StackedBars("t", ["p"], [("a", [3.2])], "ms").html()
    assert re.findall(r"<text[^>]*>([^<]*)</text>", bars) == ["0", "2"]
    assert bars.count("<span>ms</span>") == 1


def test_a_best_drafter_that_is_slower_than_plain_decoding_is_not_bold(tmp_path: Path):
    slow = [PLAIN, DRAFTED | {"speedup": 0.44}, DRAFTED | {"drafter": "other", "speedup": 0.94}]
    assert "<strong>" not in written(tmp_path, sample(slow)).source
    assert "<strong>2.50</strong>" in written(tmp_path, sample()).source


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
