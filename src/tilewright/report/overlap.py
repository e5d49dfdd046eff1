"""The page of `tilewright inspect overlap`: for each phase its figures, the time of each layer, and what runs when."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from tilewright.report.charts import StackedBars, bar_key, figure
from tilewright.report.page import Cell, HtmlTable, Section, series_class, write_sections
from tilewright.report.ranges import ranges_section

KINDS = ("compute", "exposed", "memory wait", "hidden")
"""Kinds of spans in a chart, in the order of the colours."""

NAMES = ("compute", "exposed communication", "waiting for memory", "hidden communication")
WITHOUT = ("bound_total", "all_links_communication", "all_links_least_exposed")
"""Figures of a phase that are the same under every schedule."""

WIDTH, LANE, GAP = 1000, 12, 3
"""Of the picture, in its own units: its width, the height of a lane, and what is between them."""


@dataclass(frozen=True)
class OverlapReport:
    """All that the page shows: plain data.

    Attributes:
        title: of the page.
        records: the figures of each chip, phase and schedule, named as in docs/metrics.md.
        lanes: for each chip and phase, as `chip phase:BATCHxPOSITIONS`, one entry for each schedule: its name, `core` and
            `links` with (begin, end, kind) in milliseconds, kinds as in `KINDS`, and `layer_begins_ms`.
        environment: what the figures depend on, in the order shown.
        ranges: of predictions that are set against each other, by their place; see `ranges.ranges_section`.
    """

    title: str
    records: Sequence[Mapping[str, Any]]
    lanes: Mapping[str, Sequence[Mapping[str, Any]]]
    environment: Mapping[str, Any] = field(default_factory=dict)
    ranges: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def data(self) -> dict[str, Any]:
        """What the page holds as JSON."""
        return {
            "environment": dict(self.environment),
            "data": [dict(one) for one in self.records],
            "ranges": dict(self.ranges),
        }  # fmt: skip

    def __post_init__(self) -> None:
        if not self.records:
            raise ValueError("expected figures of at least one schedule, found none")


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


def layer_estimates(records: Iterable[Mapping[str, Any]], name: str) -> str:
    """Sentence on operations without an estimate, in records of one layer whose programs have this name."""
    return without_estimate((one[name], one["without_estimate"], one["roofline_share"]) for one in records)


def write_overlap(path: str | Path, report: OverlapReport) -> None:
    """Writes the page as one HTML file that works offline. The figures are in it as JSON too, in the element `data`.

    Raises:
        ValueError: the environment holds something that JSON cannot.
    """
    sections = []
    for name in dict.fromkeys(map(place, report.records)):
        records = [one for one in report.records if place(one) == name]
        first = records[0]
        bound, wires, beyond = (milliseconds(first[f"{key}_ms"]) for key in WITHOUT)
        text = (
            f"One of {first['model_layers']} layers, the middle of those that were compiled, on {first['devices']} chips. "
            f"Without communication it takes {bound} ms{unsteady(first['bound_steady'])}. If every chip used all its links, "
            f"two sums would take {wires} ms, and {beyond} ms of them would not fit under the compute. "
            f"{layer_estimates(records, 'schedule')}"
        )
        picture = LaneChart(f"What runs when, {name}", report.lanes[name])
        blocks = [figures_table(records), against_table(records), layer_bars(records), picture]
        sections.append(Section(name, blocks, text))
    if report.ranges:
        sections.append(ranges_section(report.ranges))
    write_sections(path, report.title, sections, lead=LEAD, facts=report.environment, data=report.data)


def place(record: Mapping[str, Any]) -> str:
    """The chip and the phase that figures are of."""
    return f"{record['chip']} {record['phase']}:{record['batch_rows']}x{record['positions']}"


def milliseconds(value: float) -> str:
    return f"{value:,.3f}"


def unsteady(steady: bool) -> str:
    """Remark beside a time if the layer may not stand for all."""
    return "" if steady else " (not steady)"


def percent(share: float | None) -> str | None:
    return None if share is None else f"{100 * share:.1f} %"


def figures_table(records: Sequence[Mapping[str, Any]]) -> HtmlTable:
    """The layer under each schedule."""
    rows = []
    for one in records:
        share = one["exposed_share"]
        times = [milliseconds(one[f"{name}_ms"]) for name in ("compute", "communication", "hidden", "exposed")]
        rows.append([one["schedule"], *times, Cell(percent(share) or "", share=min(1.0, share or 0.0), colour=1)])
    heads = ["schedule", "compute ms", "under way ms", "hidden ms", "exposed ms", "share exposed"]
    return HtmlTable("Communication of a layer", heads, rows)


def against_table(records: Sequence[Mapping[str, Any]]) -> HtmlTable:
    """The layer against that of plain sums, and against what cannot be less."""
    rows = []
    for one in records:
        of_sync = [percent(one["exposed_share_of_sync"]), percent(one["extra_compute_share"])]
        total = [milliseconds(one["total_ms"]) + unsteady(one["steady"]), f"{one['total_over_bound']:.2f}"]
        rows.append([one["schedule"], *of_sync, milliseconds(one["least_exposed_ms"]), *total])
    heads = ["schedule", "exposed of sync's", "compute over sync's", "least exposed ms", "total ms", "over bound"]
    note = (
        "Total: compute, exposed communication, and waiting for copies from memory; over bound: against the layer without "
        "communication; least exposed: what the busiest link takes beyond the compute. Not steady: the layer's neighbours "
        "differ from it, so that it may not stand for all."
    )
    return HtmlTable("Against plain sums and bounds", heads, rows, note=note)


def layer_bars(records: Sequence[Mapping[str, Any]]) -> StackedBars:
    """The time of each compiled layer under each schedule."""
    bars = [
        (f"{one['schedule']}, layer {layer['layer']}", [layer[f"{name}_ms"] for name in ("compute", "exposed", "memory_wait")])
        for one in records
        for layer in one["layers"]
    ]
    return StackedBars("Time of each layer", NAMES[:3], bars, "ms")


@dataclass(frozen=True)
class LaneChart:
    """For each schedule what its core does and, below it, what its links do, over the same axis of time.

    Attributes:
        rows: see `OverlapReport.lanes`.
    """

    title: str
    rows: Sequence[Mapping[str, Any]]

    def html(self) -> str:
        longest = max((span[1] for row in self.rows for span in (*row["core"], *row["links"])), default=0.0) or 1.0
        pictures = []
        for row in self.rows:
            parts = [self.lane(spans, n * (LANE + GAP), longest) for n, spans in enumerate((row["core"], row["links"]))]
            for begin in row["layer_begins_ms"]:
                x = WIDTH * begin / longest
                parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{2 * LANE + GAP}"/>')
            label = escape(f"{row['schedule']}: the core above, the links below, over {milliseconds(longest)} ms")
            box = f'viewBox="0 0 {WIDTH} {2 * LANE + GAP}" preserveAspectRatio="none" role="img" aria-label="{label}"'
            pictures.append(f"<div>{escape(row['schedule'])}</div><svg {box}>{''.join(parts)}</svg>")
        drawing = f'<div class="lanes">{"".join(pictures)}<p><span>0</span><span>{milliseconds(longest)} ms</span></p></div>'
        return figure(f"{self.title}: core above, links below", drawing, bar_key(NAMES), self.table())

    def lane(self, spans: Sequence[Sequence[Any]], y: float, longest: float) -> str:
        """Bars; those too short to see are left out."""
        scale = WIDTH / longest
        return "".join(
            f'<rect class="{series_class(KINDS.index(kind))}" x="{scale * begin:.2f}" y="{y}" '
            f'width="{scale * (end - begin):.2f}" height="{LANE}"/>'
            for begin, end, kind in spans
            if scale * (end - begin) >= 0.02
        )

    def table(self) -> HtmlTable:
        """Table of the time of each kind, on both lanes."""
        rows = []
        for row in self.rows:
            taken = dict.fromkeys(KINDS, 0.0)
            for begin, end, kind in row["core"]:
                taken[kind] += end - begin
            under_way = sum(end - begin for begin, end, kind in row["links"] if kind == "hidden")
            taken["hidden"] = max(0.0, under_way - taken["exposed"])
            rows.append([row["schedule"], *(milliseconds(taken[kind]) for kind in KINDS)])
        return HtmlTable(f"{self.title}, ms", ["", *NAMES], rows)


MICRO = (
    "Beside: a product and an independent collective; after: a collective of what a product gives; before: a product of what a "
    "collective gives; two: a product and two independent collectives of one kind."
)


def write_micro(
    path: str | Path,
    compiled: Sequence[Mapping[str, Any]],
    measured: Sequence[Mapping[str, Any]],
    environment: Mapping[str, Any],
) -> None:
    """Writes the page of `tilewright bench overlap --micro`: a table for each chip, and one of what ran.

    Args:
        compiled, measured: records, named as in docs/metrics.md.
        environment: what they depend on, in the order shown.
    """
    sections = []
    for chip in dict.fromkeys(one["chip"] for one in compiled):
        of = [one for one in compiled if one["chip"] == chip]
        tables = [micro_table(name, [one for one in of if one["collective"] == name]) for name in unique(of, "collective")]
        sections.append(Section(chip, tables, f"Compiler estimates; nothing ran. {MICRO}", grid=False))
    if measured:
        heads = ["collective", "program", "KiB", "product us", "collective us", "both us", "hidden"]
        rows = [
            [
                *(one["collective"], one["program"], f"{one['size_bytes'] // 1024:,}"),
                *(f"{one[f'{name}_us']:,.0f}" for name in ("product", "collective", "both")),
                f"{one['hidden_share']:.0%}",
            ]
            for one in measured
        ]
        sections.append(Section("Measured here", [HtmlTable("Medians of runs in turns", heads, rows)], MICRO))
    data = {"environment": dict(environment), "compiled": list(compiled), "measured": list(measured)}
    write_sections(path, "Collectives beside products", sections, facts=environment, data=data)


def unique(records: Sequence[Mapping[str, Any]], key: str) -> list[Any]:
    """The values of a figure, in the order in which they come."""
    return list(dict.fromkeys(one[key] for one in records))


def micro_table(collective: str, records: Sequence[Mapping[str, Any]]) -> HtmlTable:
    """Table of one collective: a line for each program and size."""
    rows = []
    for one in records:
        under_way = one["communication_us"]
        share = one["hidden_us"] / under_way if under_way else None
        times = [f"{one[f'{name}_us']:,.1f}" for name in ("compute", "communication", "exposed")]
        bar = None if share is None else Cell(f"{share:.0%}", share=min(1.0, share), colour=3)
        rows.append([f"{one['program']}, {one['size_bytes'] // 1024:,} KiB", one["made_of_it"], *times, bar])
    return HtmlTable(collective, ["program", "made of it", "compute us", "under way us", "exposed us", "hidden"], rows)
