"""Page of `tilewright inspect training`: for each chip the figures of every program, its transfers, and charts over time."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tilewright.metrics.metric import select_metrics, significant
from tilewright.metrics.overlap import LAYER, TRAINING_STEP, TRANSFERS
from tilewright.metrics.tables import FigureTable, Row, grouped
from tilewright.report.overlap import OverlapReport, lane_chart, layer_bars, layer_estimates, report_verdict
from tilewright.report.page import Section
from tilewright.report.tables import page_table

PASSES = ("forward", "backward")
COMMUNICATION = "exposed_share exposed_share_of_plain", "compute_ms hidden_ms exposed_ms"
MEMORY = "total_ms compute_share peak_bytes temporary_bytes model_peak_bytes model_total_ms"
FIRST_COMMUNICATION = "exposed_share exposed_share_of_plain"
FIRST_MEMORY = "total_ms peak_bytes model_peak_bytes model_total_ms"
MEMORY_NOTE = (
    "All layers: extrapolated from the compiled layers; the time excludes the optimiser's update of "
    "layers that were not compiled."
)
TERMINAL = (
    "hidden_ms exposed_share exposed_share_of_plain total_ms compute_share peak_bytes model_peak_bytes model_total_ms",
    "compute_ms exposed_ms",
)
"""Names of metrics of both passes together, and of metrics of each pass."""


def write_training(path: str | Path, report: OverlapReport) -> None:
    """Writes the page; see `OverlapReport.write`, also for errors.

    Args:
        report: records of each chip and program, and lanes by `place`, one entry for each program.
    """
    sections = []
    for name, records in grouped(report.records, place).items():
        first = records[0]
        text = (
            f"Layer {first['reported_layer']} of {first['layers_compiled']} that were compiled; the model has "
            f"{first['model_layers']}. What is the layer's own in both passes, wherever it runs. "
            f"{layer_estimates(records, 'program')}"
        )
        picture = lane_chart(f"Core and links in the step of {first['layers_compiled']} layers", report.lanes[name])
        tables = [
            page_table(step_table("Communication of a layer", records, *COMMUNICATION), first=FIRST_COMMUNICATION),
            page_table(step_table("Time and memory", records, MEMORY, ""), MEMORY_NOTE, FIRST_MEMORY),
        ]
        blocks = [*tables, layer_bars(records, "program"), picture, *(page_table(transfers_table(one)) for one in records)]
        sections.append(Section(name, blocks, text))
    report.write(path, sections, report_verdict(report, place, "program"))


def place(record: Row) -> str:
    """Returns chip, mesh and batch of a record."""
    return f"{record['chip']} {record['mesh']} {record['batch_rows']}x{record['positions']}"


def step_table(title: str, records: Sequence[Row], names: str, parts: str) -> FigureTable:
    """Returns the table of the reported layer and of the whole step, with a line for each program.

    Args:
        names: metrics of both passes together.
        parts: metrics of each pass.
    """
    columns = [(each, metric) for each in PASSES for metric in select_metrics(LAYER, parts)]
    rows = [
        {**one, "name": one["program"], **{f"{each} {metric.name}": one[each][metric.name] for each, metric in columns}}
        for one in records
    ]
    heads = [
        replace(metric, name=f"{each} {metric.name}", head=f"{each} {metric.head}", short=f"{each}\n{metric.head}")
        for each, metric in columns
    ]
    metrics = (*heads, *select_metrics((*LAYER, *TRAINING_STEP), names))
    return FigureTable(title, "program", {"": rows}, metrics, shares=("exposed_share",), unknown="")


def transfers_table(record: Row) -> FigureTable:
    """Returns the table of the reported layer's transfers: begin, end, and the compute beside them."""
    rows = []
    for each in record["transfers_of_layer"]:
        beside = ", ".join(f"{name} {significant(ms)}" for name, ms in each["beside_ms"].items())
        kind = f"{each['transfers']} {each['kind']}, {each['asynchronous']} asynchronous"
        rows.append({**each, "kind": kind, "beside_ms": beside})
    title = f"{record['program']}: transfers of layer {record['reported_layer']}"
    return FigureTable(title, "", {"": rows}, [metric for metric in TRANSFERS if metric.head])
