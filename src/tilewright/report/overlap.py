"""Page of `tilewright inspect overlap`: figures of each phase, times of each layer, and charts of core and links."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilewright.metrics.metric import Metric, select_metrics, significant
from tilewright.metrics.overlap import LAYER, MICRO
from tilewright.metrics.tables import FigureTable, Row, grouped
from tilewright.report.charts import LaneChart, LaneRow, StackedBars
from tilewright.report.page import HtmlTable, Section, write_sections
from tilewright.report.tables import first_text, page_table, ranges_section

KINDS = {
    "compute": "compute",
    "exposed": "exposed communication",
    "memory wait": "waiting for memory",
    "hidden": "hidden communication",
}
"""Kinds of spans with their names in a chart, in the order of the colours."""

COLUMNS = select_metrics(
    LAYER,
    "layers_compiled compute_cycles compute_ms communication_ms hidden_ms exposed_ms exposed_share exposed_share_of_sync "
    "extra_compute_share least_exposed_ms total_ms total_over_bound model_total_ms",
)
FIRST_COLUMNS = "exposed_ms exposed_share total_ms total_over_bound model_total_ms"
AGAINST = (
    "Total: compute, exposed communication and waiting for memory copies; × bound: relative to the "
    "layer without communication; "
    "least exposed: time of the busiest link beyond the compute. Not steady: the neighbouring "
    "layers differ, so that the layer may "
    "not represent all."
)
HIDDEN = Metric("hidden_share_of_communication", head="hidden", form=".0%")
MICRO_COLUMNS = (*select_metrics(MICRO, "made_of_it compute_us communication_us exposed_us"), HIDDEN)
MEASURED_COLUMNS = select_metrics(MICRO, "collective program size_bytes product_us collective_us both_us hidden_share")


@dataclass(frozen=True)
class OverlapReport:
    """Data of the page.

    Attributes:
        title: title of the page.
        records: figures of each chip, phase and schedule (docs/metrics.md).
        lanes: for each chip and phase (`chip phase:BATCHxPOSITIONS`) an entry for each schedule: its name, `core` and `links`
            with (begin, end, kind) in milliseconds, kinds as in `KINDS`, and `layer_begins_ms`.
        environment: settings of the figures, in display order.
        ranges: ranges of predictions by place; see `tables.ranges_section`.
    """

    title: str
    records: Sequence[Row]
    lanes: Mapping[str, Sequence[Row]]
    environment: Row = field(default_factory=dict)
    ranges: Mapping[str, Row] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.records:
            raise ValueError("expected figures of at least one schedule, found none")

    def write(self, path: str | Path, sections: Sequence[Section], verdict: str) -> None:
        """Writes a page of these sections and the ranges as one HTML file that works offline.

        The element `data` contains the figures as JSON.

        Args:
            verdict: sentence at the top of the page.

        Raises:
            ValueError: The environment holds values that JSON cannot represent.
        """
        data = {"environment": self.environment, "data": self.records, "ranges": self.ranges}
        shown = [*sections, ranges_section(self.ranges)]
        facts = self.environment
        write_sections(path, self.title, shown, verdict=verdict, lead=LEAD, facts=facts, data=data, ran=False)


CAVEATS = (
    "The model favours schedules with many transfers: starting a transfer costs nothing, and "
    "transfers use no memory bandwidth. "
    "Operations without a compiler estimate count with their full roofline. A schedule may save compute as well as hide "
    "communication: compare with sequence, which also shards norms and additions."
)
"""Caveat for every time that `perfmodel/timeline.py` predicts."""

LEAD = (
    "Compiler estimates and a model of links and memory; nothing ran. Exposed is communication that the core waits for, hidden "
    f"what passes beside its compute. {CAVEATS}"
)


def without_estimate(programs: Iterable[tuple[str, int, float]]) -> str:
    """Returns a sentence on operations without a compiler estimate; for several programs of one name, on the worst.

    Args:
        programs: name, number of operations without an estimate, and their share of the reported layer's compute.
    """
    most: dict[str, tuple[int, float]] = {}
    for name, count, share in programs:
        before = most.get(name, (0, 0.0))
        most[name] = max(count, before[0]), max(share, before[1])
    texts = (f"{name} {count:,} ({share:.0%} of a layer's compute)" for name, (count, share) in most.items())
    return f"Operations without an estimate, at the full roofline: {', '.join(texts)}."


def layer_estimates(records: Iterable[Row], name: str) -> str:
    """Returns a sentence on operations without an estimate, for records of one layer grouped by the field `name`."""
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
        picture = layer_lanes(name, records, report.lanes[name])
        table = page_table(layer_table("Communication of a layer", records), AGAINST, FIRST_COLUMNS)
        blocks = [table, layer_bars(records, "schedule"), picture]
        sections.append(Section(name, blocks, text))
    report.write(path, sections, report_verdict(report, place, "schedule"))


def report_verdict(report: OverlapReport, place: Callable[[Row], str], name: str) -> str:
    """Returns a sentence on the program with the least time per layer at each place, compared with the first reference.

    Args:
        name: field of a record that names the program.
    """
    clauses = []
    for group, records in grouped(report.records, place).items():
        best = min(records, key=lambda one: one["total_ms"])
        first = records[0]
        others = "" if best is first else f", {1 - best['total_ms'] / first['total_ms']:.0%} less than {first[name]}"
        ranges = report.ranges.get(group) or report.ranges.get(str(first["chip"]))
        clause = f"{best[name]} on {group} ({significant(best['total_ms'])} ms{others}"
        clauses.append(f"{clause}; {sure})" if (sure := first_text(ranges, best[name])) else f"{clause})")
    return f"Least time for a layer: {', '.join(clauses)}."


def layer_lanes(name: str, records: Sequence[Row], rows: Sequence[Row]) -> LaneChart:
    """Returns a chart of core and links over time: of the reported layer if its neighbours are similar, else of all compiled
    layers."""
    number = records[0]["reported_layer"]
    is_repeated = all(one["steady"] for one in records) and all(len(row["layer_begins_ms"]) > number + 1 for row in rows)
    if not is_repeated:
        return lane_chart(f"What runs when, {name}", rows)
    layer_rows = [cropped(row, *row["layer_begins_ms"][number : number + 2]) for row in rows]
    return lane_chart(f"Core and links in a layer, {name}", layer_rows)


def cropped(row: Row, begin: float, end: float) -> dict[str, Any]:
    """Returns the lanes between two times, in milliseconds from the first."""
    cut = {
        lane: [
            (max(start, begin) - begin, min(stop, end) - begin, kind)
            for start, stop, kind in row[lane]
            if start < end and stop > begin
        ]
        for lane in ("core", "links")
    }
    return {**row, **cut, "layer_begins_ms": []}


def place(record: Row) -> str:
    """Returns chip and phase of a record."""
    return f"{record['chip']} {record['phase']}:{record['batch_rows']}x{record['positions']}"


def milliseconds(value: float) -> str:
    return f"{value:,.3f}"


def layer_table(title: str, records: Sequence[Row]) -> FigureTable:
    """Returns the table of one phase: the layer under each schedule, compared with `sync` and with lower bounds."""
    first = records[0]
    bound = dict.fromkeys(metric.name for metric in COLUMNS)
    total = first["bound_total_ms"]
    bound |= {"compute_cycles": first["bound_compute_cycles"], "total_over_bound": 1.0}
    bound |= {"total_ms": total_text(total, first["bound_steady"]), "model_total_ms": total * first["model_layers"]}
    rows = [{**one, "name": one["schedule"], "total_ms": total_text(one["total_ms"], one["steady"])} for one in records]
    rows.append({"name": "no communication", **bound})
    return FigureTable(title, "schedule", {"": rows}, COLUMNS, shares=("exposed_share",), unknown="")


def total_text(total_ms: float, steady: bool) -> str:
    """Formats a time; layers that are not steady get a remark."""
    return significant(total_ms) + ("" if steady else "\nnot steady")


def layer_bars(records: Sequence[Row], name: str) -> StackedBars:
    """Returns the time of each compiled layer (in each pass, if there are two) for the programs that field `name` names.

    Adjacent similar layers share one bar.
    """
    bars = []
    for one in records:
        for layers in runs_of_like(one["layers"]):
            first = layers[0]
            last = layers[-1]
            kind = f"{first['pass']}, layer" if "pass" in first else "layer"
            numbers = f" {first['layer']}" if first is last else f"s {first['layer']} to {last['layer']}"
            bars.append((f"{one[name]}, {kind}{numbers}", [first[part] for part in PARTS]))
    return StackedBars("Time of each layer", [*KINDS.values()][:3], bars, "ms")


PARTS = ("compute_ms", "exposed_ms", "memory_wait_ms")
LIKE = 0.01
"""Maximum difference of each part, as a share of the layer's time, between layers that are shown as one."""


def runs_of_like(layers: Sequence[Row]) -> list[list[Row]]:
    """Groups adjacent layers of one pass that differ little from the first of their group."""
    found: list[list[Row]] = []
    for layer in layers:
        first = found[-1][0] if found else None
        total = sum(layer[part] for part in PARTS)
        same_pass = first is not None and layer.get("pass") == first.get("pass")
        if first is not None and same_pass and all(abs(layer[part] - first[part]) <= LIKE * total for part in PARTS):
            found[-1].append(layer)
        else:
            found.append([layer])
    return found


def lane_chart(title: str, rows: Sequence[Row]) -> LaneChart:
    """Returns a chart of core and links under each schedule, with a table of the time of each kind.

    Args:
        rows: rows of `OverlapReport.lanes`.
    """
    figures = []
    for row in rows:
        times = dict.fromkeys(KINDS, 0.0)
        for begin, end, kind in row["core"]:
            times[kind] += end - begin
        under_way = sum(end - begin for begin, end, kind in row["links"] if kind == "hidden")
        times["hidden"] = max(0.0, under_way - times["exposed"])
        figures.append([row["schedule"], *(milliseconds(times[kind]) for kind in KINDS)])
    table = HtmlTable(f"{title}, ms", ["", *KINDS.values()], figures)
    longest = max((span[1] for row in rows for span in (*row["core"], *row["links"])), default=0.0)
    lanes = [LaneRow(row["schedule"], [row["core"], row["links"]], row["layer_begins_ms"]) for row in rows]
    return LaneChart(f"{title}: core above, links below", lanes, KINDS, longest, table)


ABOUT_MICRO = (
    "Beside: a matmul and an independent collective; after: a collective of a matmul's result; before: a matmul of a "
    "collective's result; two: a matmul and two independent collectives of one kind."
)


def size_name(size_bytes: int) -> str:
    return f"{size_bytes // 1024:,} KiB" if size_bytes % 2**20 else f"{size_bytes // 2**20:,} MiB"


def micro_table(title: str, records: Sequence[Row]) -> FigureTable:
    """Returns the table of programs compiled for one chip: a line for each collective, program and size."""
    rows = []
    for one in records:
        under_way = one["communication_us"]
        share = one["hidden_us"] / under_way if under_way else None
        name = f"{one['program']}, {size_name(one['size_bytes'])}"
        rows.append({**one, "name": name, HIDDEN.name: share})
    return FigureTable(title, "program", grouped(rows, "collective"), MICRO_COLUMNS, shares=(HIDDEN.name,))


def measured_micro_table(title: str, records: Sequence[Row], caption: str = "") -> FigureTable:
    """Returns the table of measurements on present devices."""
    rows = [{**one, "size_bytes": size_name(one["size_bytes"])} for one in records]
    return FigureTable(title, "", {"": rows}, MEASURED_COLUMNS, caption=caption)


def write_micro(
    path: str | Path,
    compiled: Sequence[Row],
    measured: Sequence[Row],
    environment: Row,
) -> None:
    """Writes the page of `tilewright bench overlap --micro`: a table for each chip, and one of measurements.

    Args:
        compiled, measured: records of docs/metrics.md.
        environment: settings of the figures, in display order.
    """
    sections = [
        Section(chip, [page_table(micro_table("Programs", group))], f"Compiler estimates; nothing ran. {ABOUT_MICRO}")
        for chip, group in grouped(compiled, "chip").items()
    ]
    ran = [page_table(measured_micro_table("Medians of alternating runs", measured))] if measured else []
    sections.append(Section("Measured here", ran, ABOUT_MICRO))
    data = {"environment": environment, "compiled": compiled, "measured": measured}
    write_sections(path, "Collectives beside products", sections, facts=environment, data=data, ran=bool(measured))
