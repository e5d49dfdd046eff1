"""Tables of figures for terminals and CSV files. `report/tables.py` writes the same tables as HTML."""

import csv
import io
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tilewright.metrics.metric import Metric

UNKNOWN = "–"
"""Text of an unknown figure on the terminal; on a page the cell is empty."""

NAME_WIDTH = 12
"""Minimum width to which a column of names folds."""

Row = Mapping[str, Any]
"""Row of figures by metric name. Text values are shown unchanged."""


@dataclass(frozen=True)
class FigureTable:
    """A table of figures with a line for each row.

    Attributes:
        title: title above the table.
        head: header of the column of names; "" if rows have no name.
        groups: rows by group, each row with its `name`; "" for rows without a group.
        metrics: the columns.
        best: metrics whose largest value in a group is highlighted; on a page these columns have bars.
        caption: text below the table on the terminal.
        section_by: field of rows; on the terminal an empty line separates rows with different values.
        shares: metrics from 0 to 1 that a page shows with a bar.
        unknown: text of an unknown figure on the terminal.
    """

    title: str
    head: str
    groups: Mapping[str, Sequence[Row]]
    metrics: Sequence[Metric]
    best: Sequence[str] = ()
    caption: str = ""
    section_by: str = ""
    shares: Sequence[str] = ()
    unknown: str = UNKNOWN

    def terminal(self) -> Table:
        """Returns the table for `print_table`, with each group's name above its rows."""
        table = Table(title=Text(self.title), caption=self.caption or None, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        if self.head:
            table.add_column(self.head)
        for metric in self.metrics:
            table.add_column(Text(metric.short or metric.head), justify="left" if metric.words else "right")
        for group, rows in self.groups.items():
            if group:
                table.add_row(Text(group, style="bold"))
            for row, after in zip_longest(rows, rows[1:]):
                names = [Text(f"  {row['name']}" if group else row["name"])] if self.head else []
                texts = (metric.row_text(row) for metric in self.metrics)
                cells = [Text(self.unknown if text is None else text) for text in texts]
                ends = after is None or (self.section_by != "" and after[self.section_by] != row[self.section_by])
                table.add_row(*names, *cells, end_section=ends)
        return table


def grouped(rows: Iterable[Row], name: str | Callable[[Row], Any]) -> dict[Any, list[Row]]:
    """Groups rows by a field or by a function of the row, in order of first appearance."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[name] if isinstance(name, str) else name(row), []).append(row)
    return groups


def uncut(table: Table, console: Console) -> Table:
    """Gives right-aligned columns the width of their figures; columns of names fold to make room.

    The table is wider than the terminal if the figures alone are.
    """
    for column in table.columns:
        texts = (str(text) for text in (column.header, *column.cells))
        width = max((cell_len(line) for text in texts for line in text.splitlines()), default=0)
        column.no_wrap = column.justify == "right"
        column.overflow = "fold"
        column.min_width = column.max_width = width if column.no_wrap else min(width, NAME_WIDTH)
    least = console.measure(table, options=console.options.update(width=sys.maxsize)).maximum
    for column in table.columns:
        column.max_width = None
    if least > console.width:
        table.width = least
    return table


def print_table(console: Console, table: Table | FigureTable) -> None:
    """Prints a table `uncut`; longer lines wrap."""
    console.print(uncut(table.terminal() if isinstance(table, FigureTable) else table, console), crop=False)


def csv_text(fields: Sequence[str], rows: Iterable[Row]) -> str:
    """Returns the fields of rows as CSV with a header; unknown figures are empty cells."""
    out = io.StringIO()
    writer: csv.DictWriter[str] = csv.DictWriter(out, fields, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()
