"""Tables of figures on the terminal, and in CSV files. `report/tables.py` puts the same tables on pages."""

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
"""On the terminal, in the place of a figure that is not known; on a page the cell is empty."""

NAME_WIDTH = 12
"""A column of names folds, but not below this."""

Row = Mapping[str, Any]
"""A row of figures under the names of its metrics. Where a value is a text already, it is shown as it is."""


@dataclass(frozen=True)
class FigureTable:
    """A table of figures with a line for each row.

    Attributes:
        title: above the table.
        head: of the column of names; "" where rows have none, and metrics with `words` say what they are of.
        groups: rows by what they belong to, each with its `name`; "" where they belong to nothing.
        metrics: the columns.
        best: of these, where the largest value of a group is the one to look at; on a page such a column has bars.
        caption: below the table on the terminal, where no text of a page explains it.
        apart: a field of rows; on the terminal an empty line stands where it changes.
        shares: of the metrics, those from 0 to 1 that a page shows with a bar.
        unknown: on the terminal in the place of a figure that is not known, or not meant.
    """

    title: str
    head: str
    groups: Mapping[str, Sequence[Row]]
    metrics: Sequence[Metric]
    best: Sequence[str] = ()
    caption: str = ""
    apart: str = ""
    shares: Sequence[str] = ()
    unknown: str = UNKNOWN

    def terminal(self) -> Table:
        """The table for `print_table`: a group's name stands above its rows."""
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
                texts = (metric.of(row) for metric in self.metrics)
                cells = [Text(self.unknown if text is None else text) for text in texts]
                ends = after is None or (self.apart != "" and after[self.apart] != row[self.apart])
                table.add_row(*names, *cells, end_section=ends)
        return table


def grouped(rows: Iterable[Row], name: str | Callable[[Row], Any]) -> dict[Any, list[Row]]:
    """The rows by a field of theirs, or by what a function says of them, in the order of its first appearances."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[name] if isinstance(name, str) else name(row), []).append(row)
    return groups


def uncut(table: Table, console: Console) -> Table:
    """The table with its columns of figures, those on the right, as wide as their figures; names fold to make room.

    Where the figures alone are wider than the terminal, so is the table.
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
    """Prints a table `uncut`; lines that are longer than the terminal's go on in its next."""
    console.print(uncut(table.terminal() if isinstance(table, FigureTable) else table, console), crop=False)


def csv_text(fields: Sequence[str], rows: Iterable[Row]) -> str:
    """The fields of rows as CSV with a head; a figure that is not known is an empty cell."""
    out = io.StringIO()
    writer: csv.DictWriter[str] = csv.DictWriter(out, fields, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()
