"""A table of figures reads the same on the terminal and on a page, and says what is best and what is not known."""

import csv
import io

from rich.console import Console

from tilewright.metrics.metric import Metric
from tilewright.report.page import Cell
from tilewright.report.tables import FigureTable, csv_text, grouped

RATE, SHARE = Metric("rate", head="tokens/s", short="tok/s", digits=3), Metric("share", head="share", form=".0%")
ROWS = [
    {"data": "a <set>", "name": "plain", "rate": 100.0, "share": None},
    {"data": "a <set>", "name": "[x]", "rate": 250.5, "share": 0.5},
    {"data": "b", "name": "plain", "rate": 500.0, "share": "3/4"},
]
TABLE = FigureTable("Speed", "way", grouped(ROWS, "data"), (RATE, SHARE), best=("rate",), caption="a caption")


def test_the_terminal_has_a_line_for_each_row_below_its_group():
    console = Console(width=60, record=True, file=io.StringIO())
    console.print(TABLE.terminal())
    lines = [line.split() for line in console.export_text().splitlines() if line.strip(" ─")]
    assert lines == [
        ["Speed"], ["way", "tok/s", "share"], ["a", "<set>"], ["plain", "100", "–"], ["[x]", "250", "50%"], ["b"],
        ["plain", "500", "3/4"], ["a", "caption"],
    ]  # fmt: skip


def test_a_page_has_bars_among_all_and_the_best_of_each_group_is_strong():
    page = TABLE.page()
    assert list(page.columns) == ["way", "tokens/s", "share"]
    assert [row[0] for row in page.rows] == ["a <set>, plain", "a <set>, [x]", "b, plain"]
    assert [row[1] for row in page.rows] == [Cell("100", False, 0.2), Cell("250", True, 0.501), Cell("500", True, 1.0)]
    assert [row[2] for row in page.rows] == [None, "50%", "3/4"]


def test_rows_without_a_group_and_values_without_a_bar():
    rows = [{"name": "plain", "rate": -1.0, "share": None}, {"name": "x", "rate": None, "share": None}]
    page = FigureTable("t", "way", {"": rows}, (RATE, SHARE), best=("rate",)).page()
    assert page.rows == [["plain", Cell("-1.00", True), None], ["x", None, None]]


def test_csv_has_the_fields_asked_for():
    found = list(csv.DictReader(io.StringIO(csv_text(["name", "share"], ROWS))))
    assert found == [{"name": "plain", "share": ""}, {"name": "[x]", "share": "0.5"}, {"name": "plain", "share": "3/4"}]
