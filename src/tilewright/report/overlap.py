"""The page of `tilewright inspect overlap`: for each phase its figures, the time of each layer, and what runs when."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tilewright.metrics.metric import Metric, chosen, significant
from tilewright.metrics.overlap import LAYER, MICRO
from tilewright.metrics.tables import FigureTable, Row, grouped
from tilewright.report.charts import LaneChart, LaneRow, StackedBars
from tilewright.report.page import HtmlTable, Section, write_sections
from tilewright.report.tables import page_table, ranges_section

KINDS = {
    "compute": "compute", "exposed": "exposed communication", "memory wait": "waiting for memory",
    "hidden": "hidden communication",
}  # fmt: skip
"""Kinds of spans in a chart and what it calls them, in the order of the colours."""

COLUMNS = chosen(
    LAYER,
    "layers_compiled compute_cycles compute_ms communication_ms hidden_ms exposed_ms exposed_share exposed_share_of_sync "
    "extra_compute_share least_exposed_ms total_ms total_over_bound model_total_ms",
)
AGAINST = (
    "Total: compute, exposed communication, and waiting for copies from memory; × bound: against the layer without "
    "communication; least exposed: what the busiest link takes beyond the compute. Not steady: the layer's neighbours "
    "differ from it, so that it may not stand for all."
)
HIDDEN = Metric("hidden_share_of_communication", head="hidden", form=".0%")
MICRO_COLUMNS = (*chosen(MICRO, "made_of_it compute_us communication_us exposed_us"), HIDDEN)
MEASURED_COLUMNS = chosen(MICRO, "collective program size_bytes product_us collective_us both_us hidden_share")


@dataclass(frozen=True)
class OverlapReport:
    """All that the page shows: plain data.

    Attributes:
        title: of the page.
        records: the figures of each chip, phase and schedule, named as in docs/metrics.md.
        lanes: for each chip and phase, as `chip phase:BATCHxPOSITIONS`, one entry for each schedule: its name, `core` and
            `links` with (begin, end, kind) in milliseconds, kinds as in `KINDS`, and `layer_begins_ms`.
        environment: what the figures depend on, in the order shown.
        ranges: of predictions that are set against each other, by their place; see `tables.ranges_section`.
    """

    title: str
    records: Sequence[Row]
    lanes: Mapping[str, Sequence[Row]]
    environment: Row = field(default_factory=dict)
    ranges: Mapping[str, Row] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.records:
            raise ValueError("expected figures of at least one schedule, found none")

    def write(self, path: str | Path, sections: Sequence[Section]) -> None:
        """Writes a page of these sections and the ranges as one HTML file that works offline.

        The figures are in it as JSON too, in the element `data`.

        Raises:
            ValueError: the environment holds something that JSON cannot.
        """
        data = {"environment": self.environment, "data": self.records, "ranges": self.ranges}
        write_sections(path, self.title, [*sections, ranges_section(self.ranges)], lead=LEAD, facts=self.environment, data=data)


CAVEATS = (
    "The model flatters schedules with many transfers: starting one costs nothing, and links take nothing from the bandwidth "
    "of memory. Operations without an estimate by the compiler count at the chip's full roofline. Part of what a schedule "
    "saves may be less compute and no hidden communication: compare with sequence, which divides norms and additions as well."
)
"""Beside every time that `perfmodel/timeline.py` predicts."""

LEAD = (
    "Compiler estimates and a model of links and memory; nothing ran. Exposed is communication that the core waits for, hidden "
    f"what passes beside its compute. {CAVEATS}"
)


def without_estimate(programs: Iterable[tuple[str, int, float]]) -> str:
    """Sentence on the operations for which the compiler has no estimate; of programs of one name those of the worst.

    Args:
        programs: names, operations without an estimate, and the part of the reported layer's compute that these are.
    """
    most: dict[str, tuple[int, float]] = {}
    for name, count, share in programs:
        before = most.get(name, (0, 0.0))
        most[name] = max(count, before[0]), max(share, before[1])
    said = (f"{name} {count:,} ({share:.0%} of a layer's compute)" for name, (count, share) in most.items())
    return f"Operations without an estimate, at the full roofline: {', '.join(said)}."


def layer_estimates(records: Iterable[Row], name: str) -> str:
    """Sentence on operations without an estimate, in records of one layer whose programs have this name."""
    return without_estimate((one[name], one["without_estimate"], one["roofline_share"]) for one in records)


def write_overlap(path: str | Path, report: OverlapReport) -> None:
    """Writes the page; see `OverlapReport.write`, also for errors."""
    sections = []
    for name, records in grouped(report.records, place).items():
        first = records[0]
        wires, beyond = (milliseconds(first[f"all_links_{key}_ms"]) for key in ("communication", "least_exposed"))
        text = (
            f"One of {first['model_layers']} layers, the middle of those that were compiled, on {first['devices']} chips. "
            f"If every chip used all its links, two sums would take {wires} ms, and {beyond} ms of them would not fit under "
            f"the compute. {layer_estimates(records, 'schedule')}"
        )
        picture = lane_chart(f"What runs when, {name}", report.lanes[name])
        table = page_table(layer_table("Communication of a layer", records), note=AGAINST)
        blocks = [table, layer_bars(records, "schedule"), picture]
        sections.append(Section(name, blocks, text))
    report.write(path, sections)


def place(record: Row) -> str:
    """The chip and the phase that figures are of."""
    return f"{record['chip']} {record['phase']}:{record['batch_rows']}x{record['positions']}"


def milliseconds(value: float) -> str:
    return f"{value:,.3f}"


def layer_table(title: str, records: Sequence[Row]) -> FigureTable:
    """Table of the layer of one phase under each schedule, against that of plain sums and against what cannot be less."""
    first, bound = records[0], dict.fromkeys(metric.name for metric in COLUMNS)
    total = first["bound_total_ms"]
    bound |= {"compute_cycles": first["bound_compute_cycles"], "total_over_bound": 1.0}
    bound |= {"total_ms": total_text(total, first["bound_steady"]), "model_total_ms": total * first["model_layers"]}
    rows = [{**one, "name": one["schedule"], "total_ms": total_text(one["total_ms"], one["steady"])} for one in records]
    rows.append({"name": "no communication", **bound})
    return FigureTable(title, "schedule", {"": rows}, COLUMNS, shares=("exposed_share",), unknown="")


def total_text(total_ms: float, steady: bool) -> str:
    """A time, with a remark if the layer may not stand for all."""
    return significant(total_ms) + ("" if steady else "\nnot steady")


def layer_bars(records: Sequence[Row], name: str) -> StackedBars:
    """The time of each compiled layer, in each pass if there are two, of the programs that this field of records names."""
    bars = [
        (
            f"{one[name]}, {layer.get('pass', 'layer')} {layer['layer']}",
            [layer[f"{part}_ms"] for part in ("compute", "exposed", "memory_wait")],
        )
        for one in records
        for layer in one["layers"]
    ]
    return StackedBars("Time of each layer", [*KINDS.values()][:3], bars, "ms")


def lane_chart(title: str, rows: Sequence[Row]) -> LaneChart:
    """Chart of what the core does under each schedule and, below it, its links, with a table of the time of each kind.

    Args:
        rows: see `OverlapReport.lanes`.
    """
    figures = []
    for row in rows:
        taken = dict.fromkeys(KINDS, 0.0)
        for begin, end, kind in row["core"]:
            taken[kind] += end - begin
        under_way = sum(end - begin for begin, end, kind in row["links"] if kind == "hidden")
        taken["hidden"] = max(0.0, under_way - taken["exposed"])
        figures.append([row["schedule"], *(milliseconds(taken[kind]) for kind in KINDS)])
    table = HtmlTable(f"{title}, ms", ["", *KINDS.values()], figures)
    longest = max((span[1] for row in rows for span in (*row["core"], *row["links"])), default=0.0)
    lanes = [LaneRow(row["schedule"], [row["core"], row["links"]], row["layer_begins_ms"]) for row in rows]
    return LaneChart(f"{title}: core above, links below", lanes, KINDS, longest, table)


ABOUT_MICRO = (
    "Beside: a product and an independent collective; after: a collective of what a product gives; before: a product of what a "
    "collective gives; two: a product and two independent collectives of one kind."
)


def size_name(size_bytes: int) -> str:
    return f"{size_bytes // 1024:,} KiB" if size_bytes % 2**20 else f"{size_bytes // 2**20:,} MiB"


def micro_table(title: str, records: Sequence[Row]) -> FigureTable:
    """Table of what was compiled for one chip: a line for each collective, program and size."""
    rows = []
    for one in records:
        under_way = one["communication_us"]
        share = one["hidden_us"] / under_way if under_way else None
        name = f"{one['program']}, {size_name(one['size_bytes'])}"
        rows.append({**one, "name": name, HIDDEN.name: share})
    return FigureTable(title, "program", grouped(rows, "collective"), MICRO_COLUMNS, shares=(HIDDEN.name,))


def measured_micro_table(title: str, records: Sequence[Row], caption: str = "") -> FigureTable:
    """Table of what ran here."""
    rows = [{**one, "size_bytes": size_name(one["size_bytes"])} for one in records]
    return FigureTable(title, "", {"": rows}, MEASURED_COLUMNS, caption=caption)


def write_micro(
    path: str | Path,
    compiled: Sequence[Row],
    measured: Sequence[Row],
    environment: Row,
) -> None:
    """Writes the page of `tilewright bench overlap --micro`: a table for each chip, and one of what ran.

    Args:
        compiled, measured: records, named as in docs/metrics.md.
        environment: what they depend on, in the order shown.
    """
    sections = [
        Section(chip, [page_table(micro_table("Programs", of))], f"Compiler estimates; nothing ran. {ABOUT_MICRO}")
        for chip, of in grouped(compiled, "chip").items()
    ]
    ran = [page_table(measured_micro_table("Medians of runs in turns", measured))] if measured else []
    sections.append(Section("Measured here", ran, ABOUT_MICRO))
    data = {"environment": environment, "compiled": compiled, "measured": measured}
    write_sections(path, "Collectives beside products", sections, facts=environment, data=data)
