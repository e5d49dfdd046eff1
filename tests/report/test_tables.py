"""A table of figures on a page says what is best and what is not known."""

from metrics.test_tables import RATE, SHARE, TABLE
from tilewright.metrics.tables import FigureTable
from tilewright.report.page import Cell
from tilewright.report.tables import page_table


def test_a_page_has_bars_among_all_and_the_best_of_each_group_is_strong():
    page = page_table(TABLE)
    assert list(page.columns) == ["way", "tokens/s", "share"]
    assert [row[0] for row in page.rows] == ["a <set>, plain", "a <set>, [x]", "b, plain"]
    assert [row[1] for row in page.rows] == [Cell("100", False, 0.2), Cell("250", True, 0.501), Cell("500", True, 1.0)]
    assert [row[2] for row in page.rows] == [None, "50%", "3/4"]


def test_rows_without_a_group_and_values_without_a_bar():
    rows = [{"name": "plain", "rate": -1.0, "share": None}, {"name": "x", "rate": None, "share": None}]
    page = page_table(FigureTable("t", "way", {"": rows}, (RATE, SHARE), best=("rate",)))
    assert page.rows == [["plain", Cell("-1.00", True), None], ["x", None, None]]


def test_shares_have_a_bar_of_themselves():
    rows = [{"name": "x", "rate": 1.0, "share": 0.25}, {"name": "y", "rate": 2.0, "share": None}]
    page = page_table(FigureTable("title", "", {"": rows}, (RATE, SHARE), shares=("share",)), "note")
    assert page.rows == [["1.00", Cell("25%", share=0.25, colour=1)], ["2.00", None]]
    assert (page.title, page.note, list(page.columns)) == ("title", "note", ["tokens/s", "share"])
