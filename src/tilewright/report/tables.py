"""Tables of figures on a page, and ranges of predictions for absent chips."""

from collections.abc import Callable, Mapping, Sequence

from tilewright.metrics.metric import Metric, significant
from tilewright.metrics.tables import FigureTable, Row
from tilewright.report.page import Block, Cell, HtmlTable, Section, sentences


def page_table(
    table: FigureTable, note: str = "", first: str = "", first_row: Callable[[Row], bool] | None = None
) -> HtmlTable:
    """Returns the table for a page. Row names have their group's name as a prefix.

    Args:
        note: text below the table.
        first: names of the visible metrics, separated by spaces; the others are folded. All are visible by default.
        first_row: returns True for visible rows; the others are folded.
    """
    all_rows = [row for rows in table.groups.values() for row in rows]
    lines: list[Sequence[str | Cell | None]] = []
    for group, rows in table.groups.items():
        for row in rows:
            names = [f"{group}, {row['name']}" if group else row["name"]] if table.head else []
            lines.append([*names, *(cell(table, metric, row, rows, all_rows) for metric in table.metrics)])
    heads = [*([table.head] if table.head else []), *(metric.head for metric in table.metrics)]
    others = [n for n, metric in enumerate(table.metrics, len(heads) - len(table.metrics)) if metric.name not in first.split()]
    words = [n for n, metric in enumerate(table.metrics, len(heads) - len(table.metrics)) if metric.words]
    folded = [n for n, row in enumerate(all_rows) if first_row is not None and not first_row(row)]
    return HtmlTable(table.title, heads, lines, note, others if first else (), folded, words)


def cell(table: FigureTable, metric: Metric, row: Row, rows: Sequence[Row], all_rows: Sequence[Row]) -> str | Cell | None:
    """Formats a figure, with a bar relative to all rows or a bar of a share. The best of a group is strong, unless it is no
    gain."""
    text = metric.row_text(row)
    value = row[metric.name]
    if text is None or metric.name not in (*table.best, *table.shares):
        return text
    if metric.name in table.shares:
        return Cell(text, share=min(1.0, max(0.0, value)), colour=1)
    best, most = (max(row[metric.name] for row in some if row[metric.name] is not None) for some in (rows, all_rows))
    strong = value == best and (metric.par is None or value > metric.par)
    return Cell(text, strong, value / most if value >= 0 < most else None)


def first_text(sweep: Row | None, label: str) -> str:
    """Returns a clause on how often a prediction ranks first over draws of the constants; empty without draws."""
    if sweep is None or label not in sweep["predictions"]:
        return ""
    counts = {name: one["first"] for name, one in sweep["predictions"].items()}
    often = max(counts, key=lambda name: counts[name])
    other = "" if counts[often] <= counts[label] else f" ({often}: {counts[often]})"
    return f"best in {counts[label]} of {sweep['draws']} draws of the constants{other}"


def ranges_section(sweeps: Mapping[str, Row]) -> Section:
    """Returns a section of compared predictions with their ranges; `sweeps` has records of `perfmodel/uncertainty.py` by
    name."""
    tables: list[Block] = []
    for name, sweep in sweeps.items():
        rows = []
        for label, one in sweep["predictions"].items():
            decides = None if one["decides"] is None else f"{one['decides'][0]} ({one['decides'][1]:+.2f})"
            ends = " to ".join(significant(end) for end in one["range"])
            rows.append([label, significant(one["value"]), ends, f"{one['first']} of {sweep['draws']}", decides])
        heads = ["", sweep["unit"], "range", "first in", "decides (rank correlation)"]
        tables.append(HtmlTable(f"{name}, with the {sweep['range']}", heads, rows))
    text = sentences(line for sweep in sweeps.values() for line in sweep["text"][1:])
    return Section("Ranges", tables, text)
