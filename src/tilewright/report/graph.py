"""The page of `tilewright bench graph`: tables of all figures, and bars of times and bytes."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tilewright.report.charts import StackedBars
from tilewright.report.page import Cell, HtmlTable, Section, write_sections


@dataclass(frozen=True)
class GraphReport:
    """All that the page shows. Plain data: `dataclasses.asdict` of it is JSON.

    Attributes:
        title: of the page.
        lead: a sentence under it: the graph and the features.
        records: one for each program, named as in docs/metrics.md.
        environment: what the figures depend on, in the order shown.
        notes: what is missing, and why.

    Raises:
        ValueError: there are no records.
    """

    title: str
    lead: str
    records: Sequence[Mapping[str, Any]]
    environment: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not self.records:
            raise ValueError("expected figures of at least one program, found none")


TEXT = (
    "A round trip is an array that a program writes to device memory and reads back. The baseline gathers the neighbours' "
    "features, multiplies them by a mask and sums; all programs of an experiment compute the same."
)
MEASURED = "Medians of runs in turns; speedup against the first program of each experiment."
ESTIMATED = (
    "Compiler estimates; nothing ran. Kilocycles leave out gathers and Pallas kernels, which carry no estimate. Of a Pallas "
    "kernel, each operand and result counts once; what its DMAs move has a table of its own."
)


def write_graph(path: str | Path, report: GraphReport) -> None:
    """Writes the page as one HTML file that works offline. The figures are in it as JSON too, in the element `data`.

    Raises:
        ValueError: the environment holds something that JSON cannot.
    """
    sections = []
    for place in dict.fromkeys(record["place"] for record in report.records):
        records = [record for record in report.records if record["place"] == place]
        measured = records[0]["measured"]
        text = MEASURED if measured else ESTIMATED
        if not sections:
            text = " ".join([TEXT, text, *report.notes])
        sections.append(Section(place, [times_table(place, records), memory_table(place, records)], text))
        if measured:
            sections.append(Section("Time of a call", time_bars(records), grid=True))
        sections.append(Section(f"Bytes to and from memory, {place}", byte_bars(records), grid=True))
    counted = list({(one["experiment"], one["name"]): one for one in report.records if one["nki_dma_descriptors"]}.values())
    if counted:
        text = "What the fused kernels' DMAs move, counted from the kernels; a model's other parts are not in it."
        tables = [kernels_table(counted, chip, key) for chip, key in (("TPU", "tpu"), ("Trainium", "nki"))]
        sections.append(Section("DMAs of the accelerators' kernels", tables, text))
    write_sections(path, report.title, sections, lead=report.lead, facts=report.environment, data=asdict(report))


def experiments(records: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """The records of each experiment."""
    return {name: [one for one in records if one["experiment"] == name] for name in {one["experiment"]: 0 for one in records}}


def program(record: Mapping[str, Any]) -> str:
    """Name of a record's program, as tables have it."""
    return f"{record['experiment']}, {record['name']}"


def times_table(place: str, records: Sequence[Mapping[str, Any]]) -> HtmlTable:
    """A line for each program. The best speedup of an experiment is strong."""
    measured = records[0]["measured"]
    times = ["ms", "speedup", "of bandwidth", "differs by"] if measured else ["kilocycles", "left out", "of memory"]
    most = max((one["speedup"] or 0 for one in records), default=0)
    rows: list[Sequence[str | Cell | None]] = []
    for group in experiments(records).values():
        best = max(one["speedup"] or 0 for one in group)
        for one in group:
            cells: list[str | Cell | None] = [program(one)]
            if measured:
                speedup = Cell(f"{one['speedup']:.2f}×", one["speedup"] == best, one["speedup"] / most)
                cells += [f"{one['median_ms']:.4g}", speedup, f"{one['share_of_bandwidth']:.0%}"]
                cells.append(f"{float(one['largest_difference']):.2g}")
            else:
                bound = one["memory_cycles"]
                cells += [f"{one['estimated_cycles'] / 1e3:,.1f}", f"{one['without_estimate']:,}"]
                cells.append(None if bound is None else f"{bound / 1e3:,.1f}")
            rows.append([*cells, f"{one['compile_s']:.2f}{' loaded' if one['loaded'] else ''}"])
    return HtmlTable(f"{'Measured' if measured else 'Estimated'}, {place}", ["program", *times, "compile s"], rows)


def memory_table(place: str, records: Sequence[Mapping[str, Any]]) -> HtmlTable:
    """Table of the bytes that compiled programs move and hold."""
    rows = [
        [
            program(one),
            *(megabytes(one[f"{what}_bytes"]) for what in ("read", "written")),
            f"{one['round_trips']:,}",
            *(megabytes(one[f"{what}_bytes"]) for what in ("round_trip", "peak")),
        ]
        for one in records
    ]
    return HtmlTable(f"Memory, {place}", ["program", "MB read", "MB written", "round trips", "MB in them", "peak MB"], rows)


def kernels_table(records: Sequence[Mapping[str, Any]], chip: str, key: str) -> HtmlTable:
    """Table of what the kernels for a chip move, where that was counted."""
    rows = [
        [program(one), f"{count:,}", *(megabytes(one[f"{key}_{way}_bytes"]) for way in ("read", "written"))]
        for one in records
        if (count := one[f"{key}_dma_descriptors"]) is not None
    ]
    return HtmlTable(chip, ["program", "descriptors", "MB read", "MB written"], rows)


def megabytes(size: int | None) -> str | None:
    """Bytes in 1e6, or nothing where they are not known."""
    return None if size is None else f"{size / 1e6:,.{2 if size < 1e8 else 1 if size < 1e9 else 0}f}"


def time_bars(records: Sequence[Mapping[str, Any]]) -> list[StackedBars]:
    """A chart for each experiment with a bar for each program."""
    return [
        StackedBars(name, ("time",), [(one["name"], (one["median_ms"],)) for one in group], "ms")
        for name, group in experiments(records).items()
    ]


def byte_bars(records: Sequence[Mapping[str, Any]]) -> list[StackedBars]:
    """Likewise, bytes read and bytes written, by the account of the compiled program."""
    return [
        StackedBars(
            name,
            ("read", "written"),
            [(one["name"], (one["read_bytes"] / 1e6, one["written_bytes"] / 1e6)) for one in group],
            "MB",
        )
        for name, group in experiments(records).items()
    ]
