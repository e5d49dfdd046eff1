"""Tables and page of `tilewright bench speculative`. Rows are figures of docs/metrics.md."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tilewright.metrics.metric import Metric, select_metrics
from tilewright.metrics.speculative import FIGURES, POSITIONS, TAU
from tilewright.metrics.tables import FigureTable, Row, grouped
from tilewright.report.charts import LineChart, Series, StackedBars
from tilewright.report.page import Block, Report, Section
from tilewright.report.tables import page_table
from tilewright.report.terminal import shares_text

PLAIN = "none"
"""Drafter of rows of plain decoding, which tables call "plain"."""
CAPTION = "τ: tokens over rounds; round: cost of a round in plain steps; same: responses equal to plain decoding"
TEXT = "τ is all tokens, including the target's own, over all rounds; speedup is over plain decoding of the same prompts."
PARTS = ("draft", "verify", "other")


def benchmark_tables(title: str, rows: Sequence[Row], averages: Sequence[Row] = ()) -> list[FigureTable]:
    """Returns the tables of a benchmark: speed and acceptance, round times, acceptance by position, chosen rounds.

    Args:
        rows: for each dataset and batch size, a row of plain decoding and a row of each drafter.
        averages: averages over the datasets, one for each drafter; shown for several datasets.
    """
    rows = shown(rows)
    timed = [row for row in rows if row["round_ms"] is not None]
    drafting = [row for row in rows if row["speculative_decoding"] and row["speculative_decoding"]["num_spec_steps"]]
    chose = [row for row in rows if row["chosen"]]
    tables = [speed_table(title, rows, averages)]
    if timed:
        metrics = select_metrics(FIGURES, "draft_ms verify_ms other_ms round_ms")
        tables.append(FigureTable("milliseconds of a drafting round", "drafter", grouped(timed, "data"), metrics))
    if drafting:
        tables.append(acceptance_table(drafting))
    if chose:
        share = Metric("chosen", head="share of rounds")
        tables.append(FigureTable("chosen rounds", "drafter", grouped(chose, "data"), [share]))
    return [*tables, *category_tables(rows)]


def shown(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Returns the rows with names and derived columns for tables.

    Comparisons of plain decoding with itself are removed. `data` is the dataset, with the batch size if there are several.
    """
    several = len({row["batch_size"] for row in rows}) > 1
    found: list[dict[str, Any]] = []
    for row in rows:
        flat = {**row, "name": row["drafter"], "chosen": shares_text(row["chosen"]) if row.get("chosen") else None}
        flat["data"] = f"{row['dataset']}, batch {row['batch_size']}" if several else row["dataset"]
        if row["drafter"] == PLAIN:
            flat |= {"name": "plain", **dict.fromkeys(("speedup", "tokens_per_round", "round_cost_steps", "identical"))}
        elif row.get("first_differences") is not None:
            flat["identical"] = f"{sum(offset is None for offset in row['first_differences'])}/{row['responses']}"
        found.append(flat)
    return found


def speed_table(title: str, rows: Sequence[Row], averages: Sequence[Row]) -> FigureTable:
    """Returns the table of speed and acceptance."""
    names = "tokens_per_s speedup tokens_per_round round_cost_steps distinct_4gram_ratio identical"
    if any(row["cost_per_million_tokens"] is not None for row in rows):
        names += " cost_per_million_tokens"
    metrics = select_metrics((*FIGURES, *TAU), names)
    groups: dict[str, list[Row]] = {**grouped(rows, "data")}
    if len({row["dataset"] for row in rows}) > 1:
        blank = dict.fromkeys(metric.name for metric in metrics)
        means = [{**blank, **row, "dataset": "mean"} for row in averages if row["drafter"] != PLAIN]
        groups |= grouped(shown(means), "data")
    return FigureTable(title, "drafter", groups, metrics, best=("speedup",), caption=CAPTION)


def acceptance_table(rows: Sequence[Row]) -> FigureTable:
    """Returns the table of acceptance by position in the block."""
    (rate,) = select_metrics(POSITIONS, "rate")
    places = shown_positions(max(len(row["acceptance_by_position"]) for row in rows))
    metrics = [replace(rate, name=str(place), head=str(place)) for place in places]
    blank: dict[str, Any] = dict.fromkeys(metric.name for metric in metrics)
    lines = [
        {**row, **blank, **{str(rates["position"]): rates["rate"] for rates in row["acceptance_by_position"]}} for row in rows
    ]
    return FigureTable("accepted drafts by position in the block", "drafter", grouped(lines, "data"), metrics)


def shown_positions(last: int) -> list[int]:
    """Returns the block positions that fit a table: the first ones, then with growing gaps, and the last."""
    return [place for place in (1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 256, 512) if place < last] + [last]


def category_tables(rows: Sequence[Row]) -> list[FigureTable]:
    """Returns a table of τ and number of prompts by category, for each dataset with several categories."""
    tables = []
    for data, group in grouped((row for row in rows if row["drafter"] != PLAIN and row["categories"]), "data").items():
        metrics = [replace(TAU[0], name=row["drafter"], head=row["drafter"]) for row in group]
        lines = [
            {"name": f"{parts[0]['category'] or '–'} ({parts[0]['responses']:,})"}
            | {row["drafter"]: part["tokens_per_round"] for row, part in zip(group, parts, strict=True)}
            for parts in zip(*(row["categories"] for row in group), strict=True)
        ]
        tables.append(FigureTable(f"{data}: τ by category", "category", {"": lines}, metrics))
    return tables


def write_benchmark(path: Path, report: Report, averages: Sequence[Row] = ()) -> None:
    """Writes the page: the tables, and charts of acceptance, τ and round time for each dataset.

    See `Report.write`, also for errors.
    """
    rows = [row for row in shown(report.records) if row["drafter"] != PLAIN]
    tables = benchmark_tables("Speed and acceptance", report.records, averages)
    sections = [
        Section("Speed and acceptance", [page_table(table) for table in tables], " ".join([TEXT, *report.notes])),
        Section(
            "Acceptance by position",
            grouped_charts(rows, "slot in the block", "rounds with an accepted draft", accepted, percent=True),
            "Share of rounds that accepted the draft at this position.",
            grid=True,
        ),
        Section(
            "τ along the text",
            grouped_charts(rows, "position in the generation", "τ", tau_curve),
            "Mean acceptance length of rounds that begin at this position.",
            grid=True,
        ),
        round_times([row for row in rows if row["round_ms"] is not None]),
    ]
    report.write(path, sections)


def accepted(row: Row) -> list[tuple[float, float]]:
    return [(each["position"], each["rate"]) for each in row["acceptance_by_position"] if each["rate"] is not None]


def tau_curve(row: Row) -> list[tuple[float, float]]:
    return [(each["from"], each["tau"]) for each in row["tau_by_position"]]


def grouped_charts(
    rows: Sequence[Row],
    x_label: str,
    y_label: str,
    points: Callable[[Row], Sequence[tuple[float, float]]],
    percent: bool = False,
) -> list[Block]:
    """Returns a chart for each dataset with a line for each drafter; a drafter has the same colour in every chart."""
    drafters = list(dict.fromkeys(row["drafter"] for row in rows))
    charts: list[Block] = []
    for data, group in grouped(rows, "data").items():
        lines = {row["drafter"]: points(row) for row in group}
        if any(lines.values()):
            series = [Series(drafter, lines.get(drafter, ())) for drafter in drafters]
            charts.append(LineChart(data, x_label, y_label, series, percent))
    return charts


def round_times(rows: Sequence[Row]) -> Section:
    """Returns bars of the parts of a round's time, if measured."""
    bars = [(f"{row['data']} · {row['drafter']}", [row[f"{part}_ms"] for part in PARTS]) for row in rows]
    charts = [StackedBars("Milliseconds a round", PARTS, bars, "ms")] if bars else []
    text = "One drafting round of each drafter. Parts are differences of times; parts below 0 are in the figures only."
    return Section("Time of a round by part", charts, text)
