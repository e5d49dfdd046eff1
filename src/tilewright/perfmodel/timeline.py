"""When the operations of a scheduled program would run, and how much of its communication the compute hides: a model.

- The core runs its operations one after another, each for the cycles that the compiler estimates (`schedule.Node.cycles`).
- A transfer begins when the core has come to it and all links that it needs are free, and takes them for as long as its bytes
  need (`hardware/links.py`): transfers over the same link take turns, in the order in which the core began them, so that
  concurrent ones share its bandwidth; those over other links, and in the other direction of the same wire, run beside them.
- Copies to or from HBM take turns likewise, each with all its bandwidth; what fusions read themselves is in their cycles.
- Where the core comes to the end of a transfer that is not done, it waits.

All devices are taken to be in step, as they are in a program that each of them runs on as much data. In this model, taking an
operation of the core away never makes a program wait less for its transfers.
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
"""Begin, end and kind."""

HBM: Link = ((), ())
"""The way to a chip's memory, which copies take as collectives take links."""


@dataclass(frozen=True)
class Sums:
    """Seconds of a program or of a part of it. `communication_s = hidden_s + exposed_s`.

    Attributes:
        compute_s: of the core's operations.
        exposed_s: in which the core waits for a collective.
        hidden_s: in which a collective is under way and the core does not wait for one.
        memory_wait_s: in which the core waits for a copy to or from HBM.
        alone_s: the sum of what each collective would take alone, one after another.
        sent_bytes: that a device gives to collectives.
        transfers: how many collectives.
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
        """Time in which at least one collective is under way."""
        return self.hidden_s + self.exposed_s

    @property
    def total_s(self) -> float:
        """From the first operation to the last."""
        return self.compute_s + self.exposed_s + self.memory_wait_s

    def plus(self, other: "Sums") -> "Sums":
        return Sums(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))

    def times(self, factor: float) -> "Sums":
        return Sums(*(getattr(self, one.name) * factor for one in fields(self)))


@dataclass(frozen=True)
class TimelineSpan:
    """Something that takes time.

    Attributes:
        node: its number in the graph; of a transfer, that of its start.
        track: `compute`, `exposed` (the core waits for a collective), `memory wait`; of transfers, `ici` or `hbm`.
        begin_s, end_s: when, from the program's beginning.
        alone_s: of a transfer, what it would take alone.
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
    """Modelled time of a program: what the core does, one thing after another, and the transfers beside it."""

    graph: ScheduleGraph
    core: tuple[TimelineSpan, ...] = field(repr=False)
    transfers: tuple[TimelineSpan, ...] = field(repr=False)

    def layer(self, span: TimelineSpan) -> int | None:
        return self.graph.nodes[span.node].layer

    @property
    def layers(self) -> tuple[int | None, ...]:
        """The layers that there are, those of no layer as None, first."""
        found = {self.layer(span) for span in (*self.core, *self.transfers)}
        return tuple(sorted(found, key=lambda layer: -1 if layer is None else layer))

    def sums(self) -> dict[int | None, Sums]:
        """For each layer. Every moment belongs to one: of the core's time to that of its operation, or of what it waits for;
        of the collectives' time to that of the one that began first among those under way."""
        found = dict.fromkeys(self.layers, Sums())
        for span in self.core:
            name = {"compute": "compute_s", "memory wait": "memory_wait_s"}.get(span.track)
            if name is not None:
                found[self.layer(span)] = found[self.layer(span)].plus(Sums(**{name: span.seconds}))
        waits = [(span.begin_s, span.end_s) for span in self.core if span.track == "exposed"]
        until = 0.0
        for span in sorted(
            (each for each in self.transfers if each.track == "ici"), key=lambda each: (each.begin_s, each.end_s)
        ):
            own = (max(until, span.begin_s), span.end_s)
            until = max(until, span.end_s)
            seconds = max(0.0, own[1] - own[0])
            exposed = min(seconds, overlap(own, waits))
            transfer = self.graph.nodes[span.node].transfer
            sent = 0 if transfer is None else transfer.bytes
            one = Sums(exposed_s=exposed, hidden_s=seconds - exposed, alone_s=span.alone_s, sent_bytes=sent, transfers=1)
            found[self.layer(span)] = found[self.layer(span)].plus(one)
        return found

    def whole(self) -> Sums:
        """Of the whole program."""
        total = Sums()
        for one in self.sums().values():
            total = total.plus(one)
        return total

    def roofline_share(self, layers: Collection[int | None]) -> float:
        """Part of these layers' compute in operations without a compiler's estimate, which count at the full roofline; or 0."""
        taken = {True: 0.0, False: 0.0}
        for span in self.core:
            if span.track == "compute" and self.layer(span) in layers:
                taken[self.graph.nodes[span.node].estimated] += span.seconds
        whole = sum(taken.values())
        return taken[False] / whole if whole else 0.0


def overlap(one: Interval, others: list[Interval]) -> float:
    """Length of an interval that lies in others, which are apart and in order."""
    found = 0.0
    for begin, end in others[max(0, bisect_right(others, (one[0], one[0])) - 1) :]:
        if begin >= one[1]:
            break
        found += max(0.0, min(end, one[1]) - max(begin, one[0]))
    return found


def occupancy_of(transfer: ScheduledTransfer, fabric: Fabric) -> LinkOccupancy:
    """Occupancy of the links by a transfer, or of the way to memory by a copy.

    Raises:
        ValueError: it names devices that the slice has not.
    """
    if transfer.kind == COPY:
        return LinkOccupancy({HBM: transfer.bytes / (1e9 * fabric.chip.hbm_gb_per_s)}, 0.0)
    devices = len(fabric.places)
    groups = transfer.groups or (tuple(range(devices)),)
    named = [device for each in (*transfer.groups, *transfer.pairs) for device in each]
    if named and max(named) >= devices:
        raise ValueError(f"expected devices below {devices}, as many as the slice has, found {max(named)} in a {transfer.kind}")
    if transfer.kind == PERMUTE:
        return fabric.permute(transfer.pairs, transfer.bytes)
    # An all-gather is told by what a device has before it.
    whole = transfer.bytes * (len(groups[0]) if transfer.kind == "all-gather" else 1)
    return fabric.collective(transfer.kind, groups, whole, transfer.directions, transfer.by_axis)


def simulate(graph: ScheduleGraph, fabric: Fabric) -> Timeline:
    """Places a program's operations in time.

    Raises:
        ValueError: a collective names devices that the slice has not.
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
            free.update((link, begin + taken) for link, taken in occupancy.busy_s.items())
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
    """Programs as a Chrome trace, which Perfetto opens: a process for each, a track for its core, for links and for HBM."""
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
    under_way = merged([(span.begin_s, span.end_s, "hidden") for span in transfers if span.track == "ici"])
    waits = [(span.begin_s, span.end_s, "exposed") for span in core if span.track == "exposed"]
    # What is exposed is drawn over what is under way.
    shown = {"core": merged([(span.begin_s, span.end_s, span.track) for span in core]), "links": under_way + merged(waits)}
    return {name: [(1e3 * begin, 1e3 * end, kind) for begin, end, kind in spans] for name, spans in shown.items()}


def merged(spans: Iterable[KindSpan]) -> list[KindSpan]:
    """The spans in order; those of a kind that touch or overlap are one."""
    found: list[KindSpan] = []
    for begin, end, kind in sorted(spans):
        if found and found[-1][2] == kind and begin <= found[-1][1] + 1e-12:
            found[-1] = (found[-1][0], max(end, found[-1][1]), kind)
        else:
            found.append((begin, end, kind))
    return found


def busiest_link_s(timeline: Timeline, fabric: Fabric, layer: int | None) -> float:
    """Seconds for which a layer's transfers occupy the busiest link: no schedule of them takes less."""
    return busiest_s(timeline, fabric, [span for span in timeline.transfers if timeline.layer(span) == layer])


def busiest_s(timeline: Timeline, fabric: Fabric, transfers: Iterable[TimelineSpan]) -> float:
    """Seconds for which these transfers occupy the busiest link; copies don't count."""
    taken: Counter[Link] = Counter()
    for span in transfers:
        transfer = timeline.graph.nodes[span.node].transfer
        if span.track == "ici" and transfer is not None:
            for link, seconds in occupancy_of(transfer, fabric).busy_s.items():
                taken[link] += seconds  # type: ignore[assignment]
    return max(taken.values(), default=0.0)
