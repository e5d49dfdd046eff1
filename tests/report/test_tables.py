"""A table of figures on a page says what is best and what is not known, and folds what is looked at last."""

from dataclasses import replace

from metrics.test_tables import RATE, SHARE, TABLE
from tilewright.metrics.tables import FigureTable
from tilewright.report.page import Cell, HtmlTable
from tilewright.report.tables import first_text, page_table


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


def test_a_best_value_that_is_no_gain_is_not_strong():
    metric = replace(RATE, par=1.0)
    rows = [{"name": name, "rate": rate} for name, rate in (("x", 0.5), ("y", 0.75))]
    assert page_table(FigureTable("t", "way", {"": rows}, (metric,), best=("rate",))).rows[1][1] == Cell("0.750", False, 1.0)
    rows = [*rows, {"name": "z", "rate": 1.5}]
    assert page_table(FigureTable("t", "way", {"": rows}, (metric,), best=("rate",))).rows[2][1] == Cell("1.50", True, 1.0)


def test_columns_and_rows_that_are_not_first_fold_out():
    rows = [{"name": name, "rate": 1.0, "share": 0.5} for name in ("x", "y", "z")]
    table = FigureTable("t", "way", {"": rows}, (RATE, SHARE))
    page = page_table(table, first="rate", first_row=lambda row: row["name"] == "y")
    assert (list(page.folded_columns), list(page.folded_rows)) == ([2], [0, 2])
    html = page.html()
    assert '<label class="unfold"><input type="checkbox">all 3 columns and 3 rows</label>' in html
    assert html.count('<tr class="folded">') == 2
    assert html.count('<th scope="col" class="folded">share</th>') == 1
    assert html.count('<td class="folded">50%</td>') == 3
    assert "unfold" not in page_table(table).html()


def test_words_stand_at_the_left():
    html = HtmlTable("t", ["name", "what it does"], [["x", "a remark"]], words=(1,)).html()
    assert '<td class="words">a remark</td>' in html
    remark = replace(SHARE, words=True)
    assert page_table(FigureTable("t", "way", {"": [{"name": "x", "rate": 1.0, "share": "a"}]}, (RATE, remark))).words == [2]


def test_how_often_a_prediction_is_the_best():
    sweep = {"draws": 24, "predictions": {"ring": {"first": 3}, "sync": {"first": 21}}}
    assert first_text(sweep, "sync") == "best in 21 of 24 draws of the constants"
    assert first_text(sweep, "ring") == "best in 3 of 24 draws of the constants (sync: 21)"
    assert first_text(sweep, "other") == first_text(None, "ring") == ""
