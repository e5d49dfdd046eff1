"""Tables and page of `tilewright bench speculative`. Rows are figures named as in docs/metrics.md."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tilewright.metrics.metric import Metric, chosen
from tilewright.metrics.speculative import FIGURES, POSITIONS, TAU
from tilewright.metrics.tables import FigureTable, Row, grouped
from tilewright.report.charts import LineChart, Series, StackedBars
from tilewright.report.page import Block, Report, Section
from tilewright.report.tables import page_table
from tilewright.report.terminal import shares_text

PLAIN = "none"
"""The drafter of rows of plain decoding, which tables call "plain"."""
CAPTION = "τ: all tokens over all rounds; round: its cost in plain steps; same: answers equal to plain decoding"
TEXT = "τ is all tokens over all rounds, the target's own included; speedup is against plain decoding of the same prompts."
PARTS = ("draft", "verify", "other")


def benchmark_tables(title: str, rows: Sequence[Row], averages: Sequence[Row] = ()) -> list[FigureTable]:
    """The tables of a benchmark: speed and acceptance, the time of a round, which drafts are accepted, what was chosen.

    Args:
        rows: for each dataset and batch size one of plain decoding and one of each drafter.
        averages: over the datasets, one for each drafter; shown if there are several datasets.
    """
    rows = shown(rows)
    timed = [row for row in rows if row["round_ms"] is not None]
    drafting = [row for row in rows if row["speculative_decoding"] and row["speculative_decoding"]["num_spec_steps"]]
    chose = [row for row in rows if row["chosen"]]
    tables = [speed_table(title, rows, averages)]
    if timed:
        metrics = chosen(FIGURES, "draft_ms verify_ms other_ms round_ms")
        tables.append(FigureTable("milliseconds of a round that drafts", "drafter", grouped(timed, "data"), metrics))
    if drafting:
        tables.append(acceptance_table(drafting))
    if chose:
        share = Metric("chosen", head="share of rounds")
        tables.append(FigureTable("rounds that were chosen", "drafter", grouped(chose, "data"), [share]))
    return [*tables, *category_tables(rows)]


def shown(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows as tables have them: named, with the counts and shares that stand for several figures.

    Plain decoding is not compared with itself. `data` is the dataset, with the batch size where there are several.
    """
    several = len({row["batch_size"] for row in rows}) > 1
    found: list[dict[str, Any]] = []
    for row in rows:
        made = {**row, "name": row["drafter"], "chosen": shares_text(row["chosen"]) if row.get("chosen") else None}
        made["data"] = f"{row['dataset']}, batch {row['batch_size']}" if several else row["dataset"]
        if row["drafter"] == PLAIN:
            made |= {"name": "plain", **dict.fromkeys(("speedup", "tokens_per_round", "round_cost_steps", "identical"))}
        elif row.get("first_differences") is not None:
            made["identical"] = f"{sum(at is None for at in row['first_differences'])}/{row['responses']}"
        found.append(made)
    return found


def speed_table(title: str, rows: Sequence[Row], averages: Sequence[Row]) -> FigureTable:
    """The table of speed and acceptance."""
    names = "tokens_per_s speedup tokens_per_round round_cost_steps distinct_4gram_ratio identical"
    if any(row["cost_per_million_tokens"] is not None for row in rows):
        names += " cost_per_million_tokens"
    metrics = chosen((*FIGURES, *TAU), names)
    groups: dict[str, list[Row]] = {**grouped(rows, "data")}
    if len({row["dataset"] for row in rows}) > 1:
        blank = dict.fromkeys(metric.name for metric in metrics)
        means = [{**blank, **row, "dataset": "mean"} for row in averages if row["drafter"] != PLAIN]
        groups |= grouped(shown(means), "data")
    return FigureTable(title, "drafter", groups, metrics, best=("speedup",), caption=CAPTION)


def acceptance_table(rows: Sequence[Row]) -> FigureTable:
    """Table of which drafts are accepted, by their position in the block."""
    (rate,) = chosen(POSITIONS, "rate")
    places = shown_positions(max(len(row["acceptance_by_position"]) for row in rows))
    metrics = [replace(rate, name=str(place), head=str(place)) for place in places]
    blank: dict[str, Any] = dict.fromkeys(metric.name for metric in metrics)
    lines = [{**row, **blank, **{str(at["position"]): at["rate"] for at in row["acceptance_by_position"]}} for row in rows]
    return FigureTable("drafts accepted, by position in the block", "drafter", grouped(lines, "data"), metrics)


def shown_positions(last: int) -> list[int]:
    """The positions of a block that a table has room for: the first ones, then fewer and fewer, and the last."""
    return [place for place in (1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 256, 512) if place < last] + [last]


def category_tables(rows: Sequence[Row]) -> list[FigureTable]:
    """τ of each category, with the number of its prompts; a table for each dataset that has several."""
    tables = []
    for data, own in grouped((row for row in rows if row["drafter"] != PLAIN and row["categories"]), "data").items():
        metrics = [replace(TAU[0], name=row["drafter"], head=row["drafter"]) for row in own]
        lines = [
            {"name": f"{parts[0]['category'] or '–'} ({parts[0]['responses']:,})"}
            | {row["drafter"]: part["tokens_per_round"] for row, part in zip(own, parts, strict=True)}
            for parts in zip(*(row["categories"] for row in own), strict=True)
        ]
        tables.append(FigureTable(f"{data}: τ by category", "category", {"": lines}, metrics))
    return tables


def write_benchmark(path: Path, report: Report, averages: Sequence[Row] = ()) -> None:
    """Writes the page: the tables, and for each dataset charts of acceptance, of τ and of a round's time.

    See `Report.write`, also for errors.
    """
    rows = [row for row in shown(report.records) if row["drafter"] != PLAIN]
    tables = benchmark_tables("Speed and acceptance", report.records, averages)
    sections = [
        Section("Speed and acceptance", [page_table(table) for table in tables], " ".join([TEXT, *report.notes])),
        Section(
            "Acceptance by position",
            charts_of(rows, "slot in the block", "rounds whose draft is accepted", accepted, percent=True),
            "The share of rounds in which the draft in a slot was accepted.",
            grid=True,
        ),
        Section(
            "τ along the text",
            charts_of(rows, "position in the generation", "τ", tau_curve),
            "The mean acceptance length of rounds that begin at a position.",
            grid=True,
        ),
        round_times([row for row in rows if row["round_ms"] is not None]),
    ]
    report.write(path, sections)


def accepted(row: Row) -> list[tuple[float, float]]:
    return [(each["position"], each["rate"]) for each in row["acceptance_by_position"] if each["rate"] is not None]


def tau_curve(row: Row) -> list[tuple[float, float]]:
    return [(each["from"], each["tau"]) for each in row["tau_by_position"]]


def charts_of(
    rows: Sequence[Row],
    x_label: str,
    y_label: str,
    points: Callable[[Row], Sequence[tuple[float, float]]],
    percent: bool = False,
) -> list[Block]:
    """A chart for each dataset with a line for each drafter, which has the same colour in every chart."""
    drafters = list(dict.fromkeys(row["drafter"] for row in rows))
    charts: list[Block] = []
    for data, own in grouped(rows, "data").items():
        lines = {row["drafter"]: points(row) for row in own}
        if any(lines.values()):
            series = [Series(drafter, lines.get(drafter, ())) for drafter in drafters]
            charts.append(LineChart(data, x_label, y_label, series, percent))
    return charts


def round_times(rows: Sequence[Row]) -> Section:
    """Bars of where a round's time goes, where it is known."""
    bars = [(f"{row['data']} · {row['drafter']}", [row[f"{part}_ms"] for part in PARTS]) for row in rows]
    charts = [StackedBars("Milliseconds a round", PARTS, bars, "ms")] if bars else []
    text = "One round that drafts, of each drafter. Parts are differences of times; one below 0 is in the figures alone."
    return Section("Where a round's time goes", charts, text)
