"""Figures for people: no exponents, and none cut where the terminal is narrow."""

import io

import pytest
from rich.console import Console
from rich.table import Table

from tilewright.compiled.figures import print_table, significant


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (0.0, 3, "0"),
        (0.01234, 3, "0.0123"),
        (1.284, 3, "1.28"),
        (-12.84, 3, "-12.8"),
        (128.4, 3, "128"),
        (1284.3, 3, "1,284"),
        (1284.3, 4, "1,284"),
        (1284.3, 5, "1,284.3"),
        (12843210.0, 4, "12,843,210"),
    ],
)
def test_significant_digits(value: float, digits: int, text: str):
    assert significant(value, digits) == text


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
