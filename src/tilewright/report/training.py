"""The page of `tilewright inspect training`: for each chip the figures of every program, its transfers, and what runs when."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tilewright.report.charts import StackedBars
from tilewright.report.overlap import LEAD, NAMES, LaneChart, OverlapReport, layer_estimates, milliseconds, percent
from tilewright.report.page import Cell, HtmlTable, Section, write_sections
from tilewright.report.ranges import ranges_section

PASSES = ("forward", "backward")


def write_training(path: str | Path, report: OverlapReport) -> None:
    """Writes the page as one HTML file that works offline. The figures are in it as JSON too, in the element `data`.

    Args:
        report: records of each chip and program, and lanes by `place`, one entry for each program.

    Raises:
        ValueError: the environment holds something that JSON cannot.
    """
    sections = []
    for name in dict.fromkeys(map(place, report.records)):
        records = [one for one in report.records if place(one) == name]
        first = records[0]
        text = (
            f"Layer {first['reported_layer']} of {first['layers_compiled']} that were compiled; the model has "
            f"{first['model_layers']}. What is the layer's own in both passes, wherever it runs. "
            f"{layer_estimates(records, 'program')}"
        )
        picture = LaneChart(f"What runs when in the step of {first['layers_compiled']} layers", report.lanes[name])
        blocks = [layer_table(records), memory_table(records), layer_bars(records), picture, *map(transfers_table, records)]
        sections.append(Section(name, blocks, text))
    if report.ranges:
        sections.append(ranges_section(report.ranges))
    write_sections(path, report.title, sections, lead=LEAD, facts=report.environment, data=report.data)


def place(record: Mapping[str, Any]) -> str:
    """The chip, mesh and batch that figures are of."""
    return f"{record['chip']} {record['mesh']} {record['batch_rows']}x{record['positions']}"


def layer_table(records: Sequence[Mapping[str, Any]]) -> HtmlTable:
    """The layer in both passes, in each program."""
    rows = []
    for one in records:
        times = [milliseconds(one[part][f"{what}_ms"]) for part in PASSES for what in ("compute", "hidden", "exposed")]
        share = one["exposed_share"]
        bar = Cell(percent(share) or "", share=min(1.0, share or 0.0), colour=1)
        rows.append([one["program"], *times, bar, percent(one["exposed_share_of_plain"])])
    heads = ["program", *(["compute ms", "hidden ms", "exposed ms"] * 2), "share exposed", "exposed of plain's"]
    groups = [("", 1), ("forward", 3), ("backward", 3), ("both", 2)]
    return HtmlTable("Communication of a layer", heads, rows, groups)


def memory_table(records: Sequence[Mapping[str, Any]]) -> HtmlTable:
    """Time and device memory, of what was compiled and of all layers."""
    rows = []
    for one in records:
        times = [milliseconds(one["total_ms"]), percent(one["compute_share"])]
        memory = [f"{one[name] / 2**30:.2f}" for name in ("peak_bytes", "temporary_bytes", "model_peak_bytes")]
        rows.append([one["program"], *times, *memory, milliseconds(one["model_total_ms"])])
    heads = ["program", "layer ms", "compute", "peak GiB", "temporary GiB", "all layers GiB", "all layers ms"]
    note = "All layers: reckoned from the compiled ones; the update of those that were not compiled is not in the time."
    return HtmlTable("Time and memory", heads, rows, note=note)


def layer_bars(records: Sequence[Mapping[str, Any]]) -> StackedBars:
    """The time of each compiled layer in each program."""
    bars = [
        (
            f"{one['program']}, {layer['pass']} {layer['layer']}",
            [layer[f"{name}_ms"] for name in ("compute", "exposed", "memory_wait")],
        )
        for one in records
        for layer in one["layers"]
    ]
    return StackedBars("Time of each layer", NAMES[:3], bars, "ms")


def transfers_table(record: Mapping[str, Any]) -> HtmlTable:
    """Table of when the transfers of the reported layer begin and end, and what is computed meanwhile."""
    rows = []
    for each in record["transfers_of_layer"]:
        beside = ", ".join(f"{name} {milliseconds(taken)}" for name, taken in each["beside_ms"].items())
        times = [milliseconds(each[f"{what}_ms"]) for what in ("begin", "end", "alone", "exposed")]
        kind = f"{each['transfers']} {each['kind']}, {each['asynchronous']} asynchronous"
        rows.append([f"{each['pass']}: {each['name']}", kind, *times, beside])
    heads = ["for", "kind", "begin ms", "end ms", "alone ms", "exposed ms", "compute meanwhile, ms"]
    return HtmlTable(f"Transfers of layer {record['reported_layer']}, {record['program']}", heads, rows)
