"""Tables and page of `tilewright bench graph`, from its records: a table for each place, and bars of times and bytes."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tilewright.metrics.metric import chosen
from tilewright.metrics.programs import ESTIMATED, GRAPH, MEASURED, PROGRAMS
from tilewright.metrics.tables import FigureTable, Row, grouped
from tilewright.report.charts import StackedBars
from tilewright.report.page import Report, Section
from tilewright.report.tables import page_table

Records = Sequence[Row]

CAPTION = (
    "speedup: against the first line of each experiment; bandwidth: the least time for these bytes over the time taken, "
    "above 100 % where caches help; round trips: arrays written to memory and read back; DMAs: descriptors of these kernels"
)
ESTIMATES = (
    "Compiler estimates; nothing ran. Kilocycles leave out the operations counted beside them, gathers and Pallas kernels; of "
    "memory: the least for these bytes. Each operand of a kernel counts once: what its DMAs read is in the JSON"
)
TEXT = (
    "A round trip is an array that a program writes to device memory and reads back. The baseline gathers the neighbours' "
    "features, multiplies them by a mask and sums; all programs of an experiment compute the same."
)
MEASURED_TEXT = "Medians of runs in turns; speedup against the first program of each experiment."


def graph_table(title: str, records: Iterable[Row], names: str, caption: str = "") -> FigureTable:
    """A table of some metrics with a line for each program, by experiment."""
    metrics = chosen((*PROGRAMS, *GRAPH), names)
    return FigureTable(title, "program", grouped(records, "experiment"), metrics, best=("speedup",), caption=caption)


def terminal_tables(records: Records) -> list[FigureTable]:
    """A table for each place that programs ran on, or were compiled for."""
    counts = "read_bytes written_bytes round_trips tpu_dma_descriptors nki_dma_descriptors"
    return [
        graph_table(place, own, f"{MEASURED} {counts}", CAPTION)
        if own[0]["measured"]
        else graph_table(place, own, f"{ESTIMATED} {counts}", ESTIMATES)
        for place, own in grouped(records, "place").items()
    ]


def write_graph(path: Path, report: Report) -> None:
    """Writes the page; see `Report.write`, also for errors."""
    sections: list[Section] = []
    for place, records in grouped(report.records, "place").items():
        measured = records[0]["measured"]
        text = MEASURED_TEXT if measured else f"{ESTIMATES}."
        if not sections:
            text = " ".join([TEXT, text, *report.notes])
        tables = [times_table(place, records), memory_table(place, records)]
        sections.append(Section(place, [page_table(table) for table in tables], text))
        if measured:
            sections.append(Section("Time of a call", bars(records, {"time": "median_ms"}, "ms"), grid=True))
        moved = bars(records, {"read": "read_bytes", "written": "written_bytes"}, "MB", 1e-6)
        sections.append(Section(f"Bytes to and from memory, {place}", moved, grid=True))
    counted = list({(one["experiment"], one["name"]): one for one in report.records if one["nki_dma_descriptors"]}.values())
    if counted:
        text = "What the fused kernels' DMAs move, counted from the kernels; a model's other parts are not in it."
        tables = [kernels_table(counted, chip, key) for chip, key in (("TPU", "tpu"), ("Trainium", "nki"))]
        sections.append(Section("DMAs of the accelerators' kernels", [page_table(table) for table in tables], text))
    report.write(path, sections, ran=any(one["measured"] for one in report.records))


def times_table(place: str, records: Records) -> FigureTable:
    """What a page says of programs' times; of those that were read from the cache on disk it says so."""
    rows = [{**one, "compile_s": f"{one['compile_s']:.2f}{' loaded' if one['loaded'] else ''}"} for one in records]
    if records[0]["measured"]:
        return graph_table(f"Measured, {place}", rows, f"{MEASURED} largest_difference compile_s")
    return graph_table(f"Estimated, {place}", rows, f"{ESTIMATED} compile_s")


def memory_table(place: str, records: Records) -> FigureTable:
    """Table of the bytes that compiled programs move and hold."""
    return graph_table(f"Memory, {place}", records, "read_bytes written_bytes round_trips round_trip_bytes peak_bytes")


def kernels_table(records: Records, chip: str, key: str) -> FigureTable:
    """Table of what the kernels for a chip move, where that was counted."""
    counted = [one for one in records if one[f"{key}_dma_descriptors"] is not None]
    return graph_table(chip, counted, f"{key}_dma_descriptors {key}_read_bytes {key}_written_bytes")


def bars(records: Records, parts: Mapping[str, str], unit: str, factor: float = 1) -> list[StackedBars]:
    """A chart for each experiment with a bar for each program: the metrics of the parts, stacked."""
    return [
        StackedBars(name, tuple(parts), [(one["name"], [factor * one[field] for field in parts.values()]) for one in own], unit)
        for name, own in grouped(records, "experiment").items()
    ]
