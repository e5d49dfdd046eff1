"""A table of figures on the terminal, and as CSV: nothing is cut, and what is not known is told apart."""

import csv
import io

import pytest
from rich.console import Console
from rich.table import Table

from tilewright.metrics.metric import Metric
from tilewright.metrics.tables import FigureTable, csv_text, grouped, print_table

RATE = Metric("rate", head="tokens/s", short="tok/s", digits=3)
SHARE = Metric("share", head="share", form=".0%")
ROWS = [
    {"data": "a <set>", "name": "plain", "rate": 100.0, "share": None},
    {"data": "a <set>", "name": "[x]", "rate": 250.5, "share": 0.5},
    {"data": "b", "name": "plain", "rate": 500.0, "share": "3/4"},
]
TABLE = FigureTable("Speed", "way", grouped(ROWS, "data"), (RATE, SHARE), best=("rate",), caption="a caption")


def lines_of(table: FigureTable) -> list[str]:
    console = Console(width=60, record=True, file=io.StringIO())
    print_table(console, table)
    return console.export_text().splitlines()


def test_the_terminal_has_a_line_for_each_row_below_its_group():
    lines = [line.split() for line in lines_of(TABLE) if line.strip(" ─")]
    assert lines == [
        ["Speed"],
        ["way", "tok/s", "share"],
        ["a", "<set>"],
        ["plain", "100", "–"],
        ["[x]", "250", "50%"],
        ["b"],
        ["plain", "500", "3/4"],
        ["a", "caption"],
    ]


def test_words_stand_on_the_left_and_an_empty_line_where_a_field_changes():
    data = Metric("data", head="data", words=True)
    way = Metric("name", head="way", words=True)
    table = FigureTable("Speed", "", {"": ROWS}, (data, way, SHARE), section_by="data", unknown="none")
    assert [line.strip(" ─") for line in lines_of(table)][2:] == [
        "data     way    share",
        "",
        "a <set>  plain   none",
        "a <set>  [x]      50%",
        "",
        "b        plain    3/4",
        "",
    ]
    assert list(grouped(ROWS, lambda row: row["name"][:1])) == ["p", "["]


def test_csv_has_the_fields_asked_for():
    found = list(csv.DictReader(io.StringIO(csv_text(["name", "share"], ROWS))))
    assert found == [{"name": "plain", "share": ""}, {"name": "[x]", "share": "0.5"}, {"name": "plain", "share": "3/4"}]


def printed(width: int) -> str:
    table = Table(title="what takes how long")
    table.add_column("program")
    for name in ("seconds of\nwork", "bytes", "of them"):
        table.add_column(name, justify="right")
    table.add_row("a program with a name of many words", "1,284.33 ± 0.25", "123,456,789.01", "100%")
    console = Console(file=io.StringIO(), width=width)
    print_table(console, table)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [30, 40, 60, 80, 200])
def test_no_figure_is_cut(width: int):
    text = printed(width)
    assert "…" not in text
    for figure in ("1,284.33 ± 0.25", "123,456,789.01", "100%", "seconds of", "of them"):
        assert figure in text


@pytest.mark.parametrize("width", [64, 80])
def test_names_fold_to_make_room(width: int):
    assert max(map(len, printed(width).splitlines())) <= width
    assert "a program with a name of many words" in printed(200)
