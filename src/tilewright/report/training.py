"""Table and page of `tilewright inspect run`: the last metrics of training runs, and their curves."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from statistics import fmean, median
from typing import Any

from tilewright.metrics.metric import Metric
from tilewright.metrics.tables import FigureTable, Row
from tilewright.metrics.training import LOG
from tilewright.report.charts import LineChart, Series
from tilewright.report.page import Section, write_sections
from tilewright.report.tables import page_table

Runs = Mapping[str, Sequence[Row]]
"""Rows of each run, in order of steps."""

SPEEDS = ("step_seconds", "tokens_per_s", "epochs_per_s", "model_flops_utilization", "data_wait_share")
"""Metrics of which a table has the median, and not the last value."""
POINTS = 120
"""Most points of a line; a point is the mean of neighbouring rows."""
LEAD = "The table has last values, and medians of speeds, which leave out first steps, evaluations and checkpoints."


def shown_metrics(runs: Runs) -> list[Metric]:
    """Returns the metrics of the runs that tables and charts show; a metric that no table declares has its own name."""
    found = {name for rows in runs.values() for row in rows for name in row} - {"step", "time"}
    declared = [metric for metric in LOG if metric.name in found]
    others = sorted(found - {metric.name for metric in LOG})
    return [*declared, *(Metric(name, head=name.replace("_", " "), digits=4) for name in others)]


def run_table(runs: Runs) -> FigureTable:
    """Returns a table with a line for each run."""

    def value(name: str, rows: Sequence[Row]) -> Any:
        values = [row[name] for row in rows if name in row]
        return None if not values else median(values) if name in SPEEDS else values[-1]

    metrics = shown_metrics(runs)
    lines = [
        {"name": name, "step": max((row["step"] for row in rows), default=0)}
        | {metric.name: value(metric.name, rows) for metric in metrics}
        for name, rows in runs.items()
    ]
    return FigureTable("Training runs", "run", {"": lines}, [LOG[0], *metrics])


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns means of neighbouring points, of at most `POINTS` groups with equal numbers; the last step of each counts."""
    size = max(1, -(-len(points) // POINTS))
    groups = (list(group) for _, group in groupby(enumerate(points), lambda each: each[0] // size))
    return [(group[-1][1][0], fmean(y for _, (_, y) in group)) for group in groups]


def chart(metric: Metric, runs: Runs) -> LineChart:
    """Returns the curve of a metric over the steps, with a line for each run that has it."""
    lines = {name: [(row["step"], row[metric.name]) for row in rows if metric.name in row] for name, rows in runs.items()}
    series = [Series(name, thinned(points)) for name, points in lines.items() if points]
    return LineChart(metric.head, "step", metric.unit or metric.head, series)


def write_runs(path: Path, runs: Runs) -> None:
    """Writes the page. Raises a `ValueError` for runs without rows, and for metrics below 0."""
    metrics = shown_metrics(runs)
    speeds = [metric for metric in metrics if metric.name in SPEEDS]
    learned = [metric for metric in metrics if metric.name not in SPEEDS]
    sections = [
        Section("Last metrics", [page_table(replace(run_table(runs), title="Runs"))]),
        Section("Learning", [chart(metric, runs) for metric in learned], grid=True),
        Section("Speed", [chart(metric, runs) for metric in speeds], grid=True),
    ]
    write_sections(path, "Training runs", sections, lead=LEAD, data={name: list(rows) for name, rows in runs.items()})
