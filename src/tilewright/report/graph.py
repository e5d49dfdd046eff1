"""Tables and page of `tilewright bench graph`: a table for each place, and bars of times and bytes."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tilewright.metrics.metric import select_metrics
from tilewright.metrics.programs import ESTIMATED, GRAPH, MEASURED, PROGRAMS
from tilewright.metrics.tables import FigureTable, Row, grouped
from tilewright.report.charts import StackedBars
from tilewright.report.page import Report, Section
from tilewright.report.tables import page_table

Records = Sequence[Row]

CAPTION = (
    "speedup: over the first line of each experiment; bandwidth: share of the memory bandwidth, above 100 % where caches help; "
    "round trips: arrays written to memory and read back; DMAs: descriptors of these kernels"
)
ESTIMATES = (
    "Compiler estimates; nothing ran. Kilocycles exclude the operations left out (gathers and Pallas kernels); of memory: the "
    "minimum for these bytes. Each operand of a kernel counts once; the JSON has the traffic of its DMAs"
)
TEXT = (
    "A round trip is an array that a program writes to device memory and reads back. The baseline gathers the neighbours' "
    "features, multiplies with a mask and sums. All programs of an experiment compute the same function."
)
MEASURED_TEXT = "Medians of alternating runs; speedup over the first program of each experiment."


def graph_table(title: str, records: Iterable[Row], names: str, caption: str = "") -> FigureTable:
    """Returns a table of some metrics with a line for each program, grouped by experiment."""
    metrics = select_metrics((*PROGRAMS, *GRAPH), names)
    return FigureTable(title, "program", grouped(records, "experiment"), metrics, best=("speedup",), caption=caption)


def terminal_tables(records: Records) -> list[FigureTable]:
    """Returns a table for each device on which programs ran or for which they were compiled."""
    counts = "read_bytes written_bytes round_trips tpu_dma_descriptors nki_dma_descriptors"
    return [
        graph_table(place, group, f"{MEASURED} {counts}", CAPTION)
        if group[0]["measured"]
        else graph_table(place, group, f"{ESTIMATED} {counts}", ESTIMATES)
        for place, group in grouped(records, "place").items()
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
        text = "Bytes moved by the fused kernels' DMAs, counted from the kernels; other parts of a model are excluded."
        tables = [kernels_table(counted, chip, key) for chip, key in (("TPU", "tpu"), ("Trainium", "nki"))]
        sections.append(Section("DMAs of the accelerators' kernels", [page_table(table) for table in tables], text))
    report.write(path, sections, ran=any(one["measured"] for one in report.records))


def times_table(place: str, records: Records) -> FigureTable:
    """Returns the page's table of times; programs loaded from the disk cache are marked."""
    rows = [{**one, "compile_s": f"{one['compile_s']:.2f}{' loaded' if one['loaded'] else ''}"} for one in records]
    if records[0]["measured"]:
        return graph_table(f"Measured, {place}", rows, f"{MEASURED} largest_difference compile_s")
    return graph_table(f"Estimated, {place}", rows, f"{ESTIMATED} compile_s")


def memory_table(place: str, records: Records) -> FigureTable:
    """Returns the table of bytes that compiled programs move and hold."""
    return graph_table(f"Memory, {place}", records, "read_bytes written_bytes round_trips round_trip_bytes peak_bytes")


def kernels_table(records: Records, chip: str, key: str) -> FigureTable:
    """Returns the table of a chip's kernel transfers, for counted kernels."""
    counted = [one for one in records if one[f"{key}_dma_descriptors"] is not None]
    return graph_table(chip, counted, f"{key}_dma_descriptors {key}_read_bytes {key}_written_bytes")


def bars(records: Records, parts: Mapping[str, str], unit: str, factor: float = 1) -> list[StackedBars]:
    """Returns a stacked bar chart for each experiment, with a bar for each program."""
    return [
        StackedBars(
            name, tuple(parts), [(one["name"], [factor * one[field] for field in parts.values()]) for one in group], unit
        )
        for name, group in grouped(records, "experiment").items()
    ]
