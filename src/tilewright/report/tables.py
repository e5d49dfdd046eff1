"""Tables of figures, declared once: the same on the terminal, on a page and, where there is one, in a CSV file."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from tilewright.metrics.metric import Metric
from tilewright.report.page import Cell, HtmlTable

UNKNOWN = "–"
"""On the terminal, in the place of a figure that is not known; on a page the cell is empty."""

Row = Mapping[str, Any]
"""A row of figures under the names of its metrics. Where a value is a text already, it is shown as it is."""


@dataclass(frozen=True)
class FigureTable:
    """A table of figures with a line for each row.

    Attributes:
        title: above the table.
        head: of the column of names.
        groups: rows by what they belong to, each with its `name`; "" where they belong to nothing.
        metrics: the columns.
        best: of these, where the largest value of a group is the one to look at; on a page such a column has bars.
        caption: below the table on the terminal, where no text of a page explains it.
    """

    title: str
    head: str
    groups: Mapping[str, Sequence[Row]]
    metrics: Sequence[Metric]
    best: Sequence[str] = ()
    caption: str = ""

    def terminal(self) -> Table:
        """The table for `print_table`: a group's name stands above its rows."""
        table = Table(title=Text(self.title), caption=self.caption or None, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column(self.head)
        for metric in self.metrics:
            table.add_column(Text(metric.short or metric.head), justify="right")
        for group, rows in self.groups.items():
            if group:
                table.add_row(Text(group, style="bold"))
            for n, row in enumerate(rows, 1):
                name = Text(f"  {row['name']}" if group else row["name"])
                table.add_row(name, *(metric.of(row) or UNKNOWN for metric in self.metrics), end_section=n == len(rows))
        return table

    def page(self) -> HtmlTable:
        """The table for a page: a group's name stands before those of its rows."""
        every = [row for rows in self.groups.values() for row in rows]
        lines: list[Sequence[str | Cell | None]] = []
        for group, rows in self.groups.items():
            for row in rows:
                cells = [self.cell(metric, row, rows, every) for metric in self.metrics]
                lines.append([f"{group}, {row['name']}" if group else row["name"], *cells])
        return HtmlTable(self.title, [self.head, *(metric.head for metric in self.metrics)], lines)

    def cell(self, metric: Metric, row: Row, rows: Sequence[Row], every: Sequence[Row]) -> str | Cell | None:
        """A figure on a page, with its bar among all and strong where it is the best of its group."""
        text, value = metric.of(row), row[metric.name]
        if text is None or metric.name not in self.best:
            return text
        best, most = (largest(row[metric.name] for row in some) for some in (rows, every))
        return Cell(text, value == best, value / most if value >= 0 < most else None)


def largest(values: Iterable[float | None]) -> float:
    """The largest of the values that are known, of which there is at least one."""
    return max(value for value in values if value is not None)


def grouped(rows: Iterable[Row], name: str) -> dict[str, list[Row]]:
    """The rows by a field of theirs, in the order of its first appearances."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[name], []).append(row)
    return groups


def csv_text(fields: Sequence[str], rows: Iterable[Row]) -> str:
    """The fields of rows as CSV with a head; a figure that is not known is an empty cell."""
    out = io.StringIO()
    writer: csv.DictWriter[str] = csv.DictWriter(out, fields, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()
