"""Figures for people: without exponents, in tables that never cut one."""

import sys
from math import floor, log10

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

NAME_WIDTH = 12
"""A column of names folds, but not below this."""


def significant(value: float, digits: int = 3) -> str:
    """A number with so many significant digits, or with all before the point if these are more: 0.0123, 1.23, 12.3, 1,230."""
    places = digits - 1 - floor(log10(abs(value))) if value else 0
    return f"{value:,.{max(places, 0)}f}"


def percent(share: float | None) -> str:
    """A share for a table, empty where there is none."""
    return "" if share is None else f"{share:.1%}"


def uncut(table: Table, console: Console) -> Table:
    """The table with its columns of figures, those on the right, as wide as their figures; names fold to make room.

    Where the figures alone are wider than the terminal, so is the table.
    """
    for column in table.columns:
        texts = (str(text) for text in (column.header, *column.cells))
        width = max((cell_len(line) for text in texts for line in text.splitlines()), default=0)
        column.no_wrap, column.overflow = column.justify == "right", "fold"
        column.min_width = column.max_width = width if column.no_wrap else min(width, NAME_WIDTH)
    least = console.measure(table, options=console.options.update(width=sys.maxsize)).maximum
    for column in table.columns:
        column.max_width = None
    if least > console.width:
        table.width = least
    return table


def print_table(console: Console, table: Table) -> None:
    """Prints a table `uncut`; lines that are longer than the terminal's go on in its next."""
    console.print(uncut(table, console), crop=False)
