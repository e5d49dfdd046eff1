"""Results of a simulation: times of operations, busy engines, and exposed communication.

Each moment has one of four kinds. *Compute*: a compute engine is busy. *Loading*: no compute engine is busy, but a transfer of
compute is in flight. *Exposed*: only collectives are in flight. *Waiting*: only signals and latencies are pending.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tilewright.perfmodel.collectives import steps_of
from tilewright.perfmodel.machine import Machine, engine_names
from tilewright.perfmodel.program import COMPUTE, DMA, NeuronProgram
from tilewright.perfmodel.trace import Track, complete, named

COMPUTING = "compute"
LOADING = "loading"
EXPOSED = "exposed"
WAITING = "waiting"
MOMENTS = (COMPUTING, LOADING, EXPOSED, WAITING)


@dataclass(frozen=True, slots=True)
class OpSpan:
    """Time span of an operation, in seconds from the begin of the program.

    Attributes:
        op: operation number.
        engine: engine of the operation; `cc` and the stream number for a collective.
        ready_s: end of the last dependency.
        begin_s, end_s: begin and end of the operation.
    """

    op: int
    engine: str
    ready_s: float
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class SimulationResult:
    """Result of a simulation, for one rank.

    Attributes:
        program: simulated program.
        machine: simulated machine.
        spans: time spans of the operations.
        total_s: seconds from the first operation to the last.
        peak_bytes: peak use of each memory by results of operations.
    """

    program: NeuronProgram = field(repr=False)
    machine: Machine = field(repr=False)
    spans: tuple[OpSpan, ...] = field(repr=False)
    total_s: float
    peak_bytes: Mapping[str, float]

    @property
    def memory_bytes(self) -> float:
        """Peak device memory: resident bytes plus results of operations."""
        return self.program.resident_bytes + self.peak_bytes["hbm"]

    @cached_property
    def busy_s(self) -> dict[str, float]:
        """Busy seconds of each engine, the DMA engines and each stream."""
        found = {}
        for engine in engine_names(self.machine):
            spans = ((span.begin_s, span.end_s) for span in self.spans if span.engine == engine)
            found[engine] = sum(end - begin for begin, end in union(spans))
        return found

    @cached_property
    def dma_bytes(self) -> dict[str, float]:
        """Bytes through the DMA engines, of `compute` and of each purpose of collectives."""
        found = {"compute": 0.0}
        sizes: dict[Any, float] = {}
        for op in self.program.ops:
            if op.engine == DMA:
                found["compute"] += op.bytes
            elif op.collective is not None:
                if op.collective not in sizes:
                    sizes[op.collective] = sum(step.bytes for step in steps_of(self.machine.mesh, op.collective))
                name = op.collective.purpose
                found[name] = found.get(name, 0.0) + sizes[op.collective]
        return found

    @cached_property
    def moments(self) -> list[tuple[float, float, str, int | None]]:
        """Intervals of the whole time, in order: begin, end, one of `MOMENTS`, and the layer of the operation in progress."""
        events: list[tuple[float, int, int]] = []
        for number, span in enumerate(self.spans):
            if span.end_s > span.begin_s:
                events += [(span.begin_s, 1, number), (span.end_s, 0, number)]
        events.sort()
        in_flight: dict[str, dict[int, None]] = {COMPUTING: {}, LOADING: {}, EXPOSED: {}}
        found: list[tuple[float, float, str, int | None]] = []
        now = 0.0
        for at, begins, number in [*events, (self.total_s, 0, -1)]:
            if at > now:
                kind = next((name for name in (COMPUTING, LOADING, EXPOSED) if in_flight[name]), WAITING)
                first = next(iter(in_flight[kind])) if kind != WAITING else None
                layer = self.program.ops[self.spans[first].op].layer if first is not None else None
                found.append((now, at, kind, layer))
                now = at
            if number >= 0:
                among = in_flight[kind_of(self.spans[number].engine)]
                if begins:
                    among[number] = None
                else:
                    among.pop(number)
        return found

    @cached_property
    def moments_s(self) -> dict[str, float]:
        """Total seconds of each kind of moment."""
        found: dict[str, float] = dict.fromkeys(MOMENTS, 0.0)
        for begin, end, kind, _ in self.moments:
            found[kind] += end - begin
        return found

    @cached_property
    def exposed_s(self) -> dict[int | None, float]:
        """Exposed communication of each layer, attributed to the earliest collective in flight."""
        found: dict[int | None, float] = {op.layer: 0.0 for op in self.program.ops}
        for begin, end, kind, layer in self.moments:
            if kind == EXPOSED:
                found[layer] += end - begin
        return found

    def delay_s(self, purpose: str) -> float:
        """Total seconds that ready collectives of a purpose queued behind others."""
        delay = 0.0
        begin_s = self.machine.settings.costs.begin_s
        for span in self.spans:
            op = self.program.ops[span.op]
            if op.collective is not None and op.collective.purpose == purpose and op.needs:
                delay += max(0.0, span.begin_s - span.ready_s - begin_s)
        return delay

    @property
    def limit(self) -> str:
        """Name of the busiest resource: an engine, `dma`, or a stream of collectives."""
        return max(self.busy_s, key=lambda name: self.busy_s[name])

    def record(self) -> dict[str, Any]:
        """Returns metrics, named as in docs/metrics.md."""
        moved = self.dma_bytes
        total = sum(self.dma_bytes.values()) or 1.0
        return {
            "program": self.program.name,
            "instance": self.machine.instance.name,
            "mesh": dict(self.machine.mesh.axes),
            "total_ms": 1e3 * self.total_s,
            **{f"{name}_ms": 1e3 * seconds for name, seconds in self.moments_s.items()},
            "busy_ms": {name: 1e3 * seconds for name, seconds in self.busy_s.items()},
            "idle_ms": {name: 1e3 * (self.total_s - seconds) for name, seconds in self.busy_s.items()},
            "exposed_layers_ms": {"none" if name is None else str(name): 1e3 * s for name, s in self.exposed_s.items()},
            "dma_gb": {name: size / 1e9 for name, size in moved.items()},
            "dma_share": {name: size / total for name, size in moved.items()},
            "memory_gib": self.memory_bytes / 2**30,
            "memory_limit_gib": self.machine.hbm_bytes / 2**30,
            "sbuf_peak_mib": self.peak_bytes["sbuf"] / 2**20,
            "psum_peak_mib": self.peak_bytes["psum"] / 2**20,
            "limit": self.limit,
            "notes": list(self.program.notes),
        }


def kind_of(engine: str) -> str:
    """Kind of moment of an engine's operations."""
    return COMPUTING if engine in COMPUTE else LOADING if engine == DMA else EXPOSED


def union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Merges overlapping intervals; returns disjoint ones in order."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def trace(results: Iterable[tuple[str, SimulationResult]]) -> dict[str, Any]:
    """Converts results to a Chrome trace for Perfetto: a process per program, and a track per queue of each engine."""
    events: list[dict[str, Any]] = []
    for process, (name, result) in enumerate(results):
        lines = {op.line: None for op in result.program.ops}
        labels = {line: f"{line[0]}{line[1]}" if line[0] in ("dma", "cc") else line[0] for line in lines}
        threads = {line: number for number, line in enumerate(sorted(lines))}
        events += named(process, name, {labels[line]: thread for line, thread in threads.items()})
        for span in result.spans:
            op = result.program.ops[span.op]
            about: dict[str, Any] = {"layer": op.layer, "ready_us": 1e6 * span.ready_s}
            if op.collective is not None:
                one = op.collective
                about |= {"kind": one.kind, "bytes": one.bytes, "axis": one.axis, "stream": one.stream, "purpose": one.purpose}
            elif op.engine == DMA:
                about |= {"bytes": op.bytes}
            events.append(complete(Track(process, threads[op.line]), op.name, span.engine, span.begin_s, span.end_s, about))
    return {"traceEvents": events, "displayTimeUnit": "ns"}
