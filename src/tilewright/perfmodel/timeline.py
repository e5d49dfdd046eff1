"""Timeline model of a scheduled TPU program: times of operations, and hidden and exposed communication.

- The core runs its operations one after another, each for the compiler's estimated cycles (`schedule.Node.cycles`).
- A transfer begins when the core has reached it and all of its links are free. It occupies the links as long as its bytes need
  (`hardware/links.py`). Transfers over one link run one after another, in the order in which the core began them. Transfers
  over different links, and in opposite directions of a wire, run in parallel.
- Copies to or from HBM also run one after another, each at full bandwidth. The cycles of fusions include their own reads.
- Where the core reaches the end of an unfinished transfer, it waits.

All devices are assumed to be in step, as in a program with equal data per device. In this model, removing an operation of the
core never reduces the waits for transfers.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from tilewright.hardware.links import Fabric, Link, LinkOccupancy
from tilewright.perfmodel.schedule import COPY, PERMUTE, ScheduledTransfer, ScheduleGraph
from tilewright.perfmodel.trace import Track, complete, named

Interval = tuple[float, float]
KindSpan = tuple[float, float, str]
"""Begin and end of a span, and its kind."""

HBM: Link = ((), ())
"""The path to a chip's memory, a link for copies."""


@dataclass(frozen=True)
class TimelineTotals:
    """Seconds of a program or of a part of it. `communication_s = hidden_s + exposed_s`.

    Attributes:
        compute_s: time of the core's operations.
        exposed_s: time in which the core waits for a collective.
        hidden_s: time in which a collective is in flight and the core does not wait for one.
        memory_wait_s: time in which the core waits for a copy to or from HBM.
        alone_s: sum of the times of the collectives without contention.
        sent_bytes: bytes that a device gives to collectives.
        transfers: number of collectives.
    """

    compute_s: float = 0.0
    exposed_s: float = 0.0
    hidden_s: float = 0.0
    memory_wait_s: float = 0.0
    alone_s: float = 0.0
    sent_bytes: float = 0.0
    transfers: float = 0

    @property
    def communication_s(self) -> float:
        """Time in which at least one collective is in flight."""
        return self.hidden_s + self.exposed_s

    @property
    def total_s(self) -> float:
        """Time from the first operation to the last."""
        return self.compute_s + self.exposed_s + self.memory_wait_s

    def plus(self, other: "TimelineTotals") -> "TimelineTotals":
        return TimelineTotals(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))

    def times(self, factor: float) -> "TimelineTotals":
        return TimelineTotals(*(getattr(self, one.name) * factor for one in fields(self)))


@dataclass(frozen=True)
class TimelineSpan:
    """Time span of an operation, a wait or a transfer.

    Attributes:
        node: node number in the graph; the start node for a transfer.
        track: `compute`, `exposed` (the core waits for a collective) or `memory wait`; `ici` or `hbm` for transfers.
        begin_s, end_s: seconds from the begin of the program.
        alone_s: seconds of a transfer without contention.
    """

    node: int
    track: str
    begin_s: float
    end_s: float
    alone_s: float = 0.0

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s


@dataclass(frozen=True)
class Timeline:
    """Modelled times of a program: spans of the core, one after another, and concurrent transfers."""

    graph: ScheduleGraph
    core: tuple[TimelineSpan, ...] = field(repr=False)
    transfers: tuple[TimelineSpan, ...] = field(repr=False)

    def layer(self, span: TimelineSpan) -> int | None:
        return self.graph.nodes[span.node].layer

    @property
    def layers(self) -> tuple[int | None, ...]:
        """Layers of the spans, ascending; None, for spans of no layer, comes first."""
        found = {self.layer(span) for span in (*self.core, *self.transfers)}
        return tuple(sorted(found, key=lambda layer: -1 if layer is None else layer))

    def sums(self) -> dict[int | None, TimelineTotals]:
        """Sums the spans of each layer.

        A moment of the core belongs to the layer of its operation, or of the transfer that it waits for. A moment of
        communication belongs to the layer of the earliest collective in flight.
        """
        found = dict.fromkeys(self.layers, TimelineTotals())
        for span in self.core:
            name = {"compute": "compute_s", "memory wait": "memory_wait_s"}.get(span.track)
            if name is not None:
                found[self.layer(span)] = found[self.layer(span)].plus(TimelineTotals(**{name: span.seconds}))
        waits = [(span.begin_s, span.end_s) for span in self.core if span.track == "exposed"]
        until = 0.0
        for span in sorted(
            (each for each in self.transfers if each.track == "ici"), key=lambda each: (each.begin_s, each.end_s)
        ):
            remaining = (max(until, span.begin_s), span.end_s)
            until = max(until, span.end_s)
            seconds = max(0.0, remaining[1] - remaining[0])
            exposed = min(seconds, overlap(remaining, waits))
            transfer = self.graph.nodes[span.node].transfer
            sent = 0 if transfer is None else transfer.bytes
            one = TimelineTotals(
                exposed_s=exposed, hidden_s=seconds - exposed, alone_s=span.alone_s, sent_bytes=sent, transfers=1
            )
            found[self.layer(span)] = found[self.layer(span)].plus(one)
        return found

    def whole(self) -> TimelineTotals:
        """Sums the spans of the whole program."""
        total = TimelineTotals()
        for one in self.sums().values():
            total = total.plus(one)
        return total

    def roofline_share(self, layers: Collection[int | None]) -> float:
        """Share of these layers' compute time in operations without a compiler estimate, which count by their roofline."""
        seconds = {True: 0.0, False: 0.0}
        for span in self.core:
            if span.track == "compute" and self.layer(span) in layers:
                seconds[self.graph.nodes[span.node].estimated] += span.seconds
        whole = sum(seconds.values())
        return seconds[False] / whole if whole else 0.0


def overlap(one: Interval, intervals: list[Interval]) -> float:
    """Length of the part of an interval inside other intervals, which are disjoint and in order."""
    found = 0.0
    for begin, end in intervals[max(0, bisect_right(intervals, (one[0], one[0])) - 1) :]:
        if begin >= one[1]:
            break
        found += max(0.0, min(end, one[1]) - max(begin, one[0]))
    return found


def occupancy_of(transfer: ScheduledTransfer, fabric: Fabric) -> LinkOccupancy:
    """Returns the link occupancy of a transfer, or the occupancy of the memory path of a copy.

    Raises:
        ValueError: the transfer names devices outside of the slice.
    """
    if transfer.kind == COPY:
        return LinkOccupancy({HBM: transfer.bytes / (1e9 * fabric.chip.hbm_gb_per_s)}, 0.0)
    devices = len(fabric.places)
    groups = transfer.groups or (tuple(range(devices)),)
    named = [device for each in (*transfer.groups, *transfer.pairs) for device in each]
    if named and max(named) >= devices:
        raise ValueError(f"expected devices below {devices}, the size of the slice, found {max(named)} in a {transfer.kind}")
    if transfer.kind == PERMUTE:
        return fabric.permute(transfer.pairs, transfer.bytes)
    # The bytes of an all-gather are those of a device before it.
    whole = transfer.bytes * (len(groups[0]) if transfer.kind == "all-gather" else 1)
    return fabric.collective(transfer.kind, groups, whole, transfer.directions, transfer.by_axis)


def simulate(graph: ScheduleGraph, fabric: Fabric) -> Timeline:
    """Simulates a scheduled program; returns the times of its operations and transfers.

    Raises:
        ValueError: a collective names devices outside of the slice.
    """
    occupancies: dict[ScheduledTransfer, LinkOccupancy] = {}
    free: dict[Link, float] = {}
    ends: dict[int, float] = {}
    core: list[TimelineSpan] = []
    moved: list[TimelineSpan] = []
    now = 0.0
    cycle_s = 1e-9 / fabric.chip.clock_ghz
    for number, node in enumerate(graph.nodes):
        began = number if node.start is None else node.start
        if node.transfer is not None:
            if node.transfer not in occupancies:
                occupancies[node.transfer] = occupancy_of(node.transfer, fabric)
            occupancy = occupancies[node.transfer]
            begin = max([now, *(free.get(link, 0.0) for link in occupancy.busy_s)])
            free.update((link, begin + busy) for link, busy in occupancy.busy_s.items())
            ends[number] = begin + occupancy.seconds
            moved.append(TimelineSpan(number, node.engine, begin, ends[number], occupancy.seconds))
        if node.role in ("done", "sync"):
            if ends[began] > now:
                waits_for_copy = graph.nodes[began].engine == "hbm"
                core.append(TimelineSpan(began, "memory wait" if waits_for_copy else "exposed", now, ends[began]))
                now = ends[began]
        elif node.role == "run" and node.cycles:
            core.append(TimelineSpan(number, "compute", now, now + node.cycles * cycle_s))
            now = core[-1].end_s
    return Timeline(graph, tuple(core), tuple(moved))


def trace(timelines: Iterable[tuple[str, Timeline]]) -> dict[str, Any]:
    """Converts timelines to a Chrome trace for Perfetto: a process per program, with tracks for core, links and HBM."""
    events: list[dict[str, Any]] = []
    tracks = {"core": 0, "ici": 1, "hbm": 2}
    for process, (name, timeline) in enumerate(timelines):
        events += named(process, name, tracks)
        for span in (*timeline.core, *timeline.transfers):
            node = timeline.graph.nodes[span.node]
            waits = span.track in ("exposed", "memory wait")
            about = {"layer": node.layer, "opcode": node.opcode, "op_name": node.op_name, "track": span.track}
            if node.transfer is not None:
                about |= {"kind": node.transfer.kind, "bytes": node.transfer.bytes}
            shown = f"wait for {node.name}" if waits else node.name
            track = Track(process, tracks.get(span.track, 0))
            events.append(complete(track, shown, span.track, span.begin_s, span.end_s, about))
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def lane_spans(timeline: Timeline) -> dict[str, list[KindSpan]]:
    """Spans of the `core` (compute, exposed, memory wait) and of the `links` (hidden, exposed) for a chart, in milliseconds."""
    core = timeline.core
    transfers = timeline.transfers
    in_flight = merged([(span.begin_s, span.end_s, "hidden") for span in transfers if span.track == "ici"])
    waits = [(span.begin_s, span.end_s, "exposed") for span in core if span.track == "exposed"]
    # Exposed spans are drawn over the spans in flight.
    shown = {"core": merged([(span.begin_s, span.end_s, span.track) for span in core]), "links": in_flight + merged(waits)}
    return {name: [(1e3 * begin, 1e3 * end, kind) for begin, end, kind in spans] for name, spans in shown.items()}


def merged(spans: Iterable[KindSpan]) -> list[KindSpan]:
    """Sorts spans and merges touching or overlapping spans of a kind."""
    found: list[KindSpan] = []
    for begin, end, kind in sorted(spans):
        if found and found[-1][2] == kind and begin <= found[-1][1] + 1e-12:
            found[-1] = (found[-1][0], max(end, found[-1][1]), kind)
        else:
            found.append((begin, end, kind))
    return found


def busiest_link_s(timeline: Timeline, fabric: Fabric, layer: int | None) -> float:
    """Seconds that a layer's transfers occupy the busiest link, a lower bound of any schedule."""
    return busiest_s(timeline, fabric, [span for span in timeline.transfers if timeline.layer(span) == layer])


def busiest_s(timeline: Timeline, fabric: Fabric, transfers: Iterable[TimelineSpan]) -> float:
    """Seconds that transfers occupy the busiest link; copies do not count."""
    busy: Counter[Link] = Counter()
    for span in transfers:
        transfer = timeline.graph.nodes[span.node].transfer
        if span.track == "ici" and transfer is not None:
            for link, seconds in occupancy_of(transfer, fabric).busy_s.items():
                busy[link] += seconds  # type: ignore[assignment]
    return max(busy.values(), default=0.0)
