"""A profiler's trace: how long each operation of each program took, run by run, as `jax.profiler.trace` writes it for xprof.

A trace is a file for each host (`*.xplane.pb`), with planes for its devices and its threads, lines in a plane, and events on a
line. Two kinds of planes are read:

- a TPU's, `/device:TPU:N`: an event of its line `XLA Modules` is a run of a program, one of `XLA Ops` is an operation of the
  core, with the instruction's text for its name;
- where there is none, the threads of `/host:CPU`, on which operations say their instruction (`hlo_op`), program and run.

Loops and calls are events too, around those of what they contain. Time counts once: an event's own time is what no other event
of its line inside it takes.
"""

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from jax.profiler import ProfileData

TPU_PLANE = re.compile(r"/device:TPU:\d+")
CPU_PLANE = "/host:CPU"
CPU_KIND = "CPU"
RUNS_LINE = "XLA Modules"
OPS_LINE = "XLA Ops"
PYTHON_LINE = "python"
INSTRUCTION = re.compile(r"%(\S+) = (.*)", re.DOTALL)


@dataclass(frozen=True)
class TracedOp:
    """One instruction in a trace.

    Attributes:
        name: of the instruction.
        text: what stands behind its name and `=` in the program; empty where the trace does not say it.
        calls: how often a run has it, on average.
    """

    name: str
    text: str = field(repr=False)
    calls: float


class TracedTimes(NamedTuple):
    """Seconds of one run on one device: from its beginning to its end, and of each instruction, its own."""

    seconds: float
    own: Mapping[str, float]


@dataclass(frozen=True)
class TracedProgram:
    """Measured runs of one program.

    Attributes:
        name: with the number by which the trace tells it from others of its name: `jit_step(1734)`.
        device_kind: of the devices that ran it, as the trace has it: `TPU v6 Lite`, or `CPU`.
        devices: how many ran it.
        runs: on all devices.
        ops: its instructions, by name.
    """

    name: str
    device_kind: str
    devices: int
    runs: tuple[TracedTimes, ...] = field(repr=False)
    ops: Mapping[str, TracedOp] = field(repr=False)

    @property
    def module(self) -> str:
        """Name of the program without the trace's number."""
        return self.name.rpartition("(")[0]

    @property
    def seconds(self) -> float:
        """Median of the runs."""
        return median(run.seconds for run in self.runs)

    @property
    def between_seconds(self) -> float:
        """Time of a run in which no operation runs, median of the runs; below 0 where operations run side by side."""
        return median(run.seconds - sum(run.own.values()) for run in self.runs)

    def own_seconds(self, names: Collection[str]) -> float:
        """Own time of some instructions in a run, median of the runs."""
        return median(sum(run.own.get(name, 0.0) for name in names) for run in self.runs)


class TracedRun(NamedTuple):
    """A run of a program on one device, by numbers that no other run in the trace has."""

    device: Hashable
    number: Hashable


class OpEvent(NamedTuple):
    """An operation of a run, in nanoseconds."""

    program: str
    run: TracedRun
    name: str
    text: str
    begin: float
    end: float
    own: float


@dataclass
class ProgramRuns:
    """Events of one program's runs, added up as they are read.

    Attributes:
        ends: of each run, when it begins and ends, in nanoseconds.
        own: nanoseconds of each instruction in each run.
        calls: events of each instruction in all runs.
        texts: of instructions.
    """

    device_kind: str
    ends: dict[TracedRun, tuple[float, float]] = field(default_factory=dict)
    own: dict[TracedRun, dict[str, float]] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)
    texts: dict[str, str] = field(default_factory=dict)

    def add(self, event: OpEvent) -> None:
        begin, end = self.ends.get(event.run, (event.begin, event.end))
        self.ends[event.run] = min(begin, event.begin), max(end, event.end)
        own = self.own.setdefault(event.run, {})
        own[event.name] = own.get(event.name, 0.0) + event.own
        self.calls[event.name] += 1
        self.texts[event.name] = event.text

    def program(self, name: str) -> TracedProgram:
        ops = {op: TracedOp(op, text, self.calls[op] / len(self.own)) for op, text in self.texts.items()}
        runs = []
        for run, own in self.own.items():
            begin, end = self.ends[run]
            runs.append(TracedTimes(1e-9 * (end - begin), {op: 1e-9 * taken for op, taken in own.items()}))
        return TracedProgram(name, self.device_kind, len({run.device for run in self.own}), tuple(runs), ops)


def read_trace(path: Path) -> dict[str, TracedProgram]:
    """Programs of a trace whose operations it has, by name.

    Args:
        path: an `.xplane.pb`, or a folder in which `jax.profiler.trace` wrote; of several traces in it the newest is read.

    Raises:
        ValueError: there is no trace, the file is none, or no device's operations are in it.
    """
    found: dict[str, ProgramRuns] = {}
    planes: list[str] = []
    for file in files_of(path):
        try:
            data = ProfileData.from_file(str(file))
        except RuntimeError as error:
            raise ValueError(f"expected {file} to be a trace of jax.profiler (XSpace): {error}") from error
        named = [(plane.name, plane) for plane in data.planes]
        planes += [name for name, _ in named]
        tpus = [(name, plane) for name, plane in named if TPU_PLANE.fullmatch(name)]
        for name, plane in tpus:
            tpu_runs(f"{file} {name}", plane, found)
        for name, plane in named:
            if name == CPU_PLANE and not tpus:
                cpu_runs(str(file), plane, found)
    programs = {name: runs.program(name) for name, runs in found.items() if runs.own}
    if not programs:
        raise ValueError(
            f"expected operations of a TPU (/device:TPU:N) or of a CPU in {path}; found none in "
            f"{', '.join(dict.fromkeys(planes)) or 'a trace without planes'}"
        )
    return programs


def files_of(path: Path) -> list[Path]:
    """Files of a trace, one for each host; see `read_trace`."""
    if path.is_file():
        return [path]
    files = sorted(path.rglob("*.xplane.pb"))
    if not files:
        raise ValueError(
            f"expected an .xplane.pb, or a folder with some, as jax.profiler.trace writes them; found none in {path}"
        )
    newest = max(files, key=lambda file: (file.stat().st_mtime, file)).parent
    return [file for file in files if file.parent == newest]


def tpu_runs(device: str, plane: Any, found: dict[str, ProgramRuns]) -> None:
    """Adds the runs of a TPU's plane to those found; operations outside of any run are left out."""
    lines = {line.name: line for line in plane.lines}
    if RUNS_LINE not in lines or OPS_LINE not in lines:
        return
    kind = str(dict(plane.stats).get("device_type_string", "TPU"))
    runs = sorted((event.start_ns, end_of(event), event.name) for event in lines[RUNS_LINE].events)
    for number, (begin, end, program) in enumerate(runs):
        found.setdefault(program, ProgramRuns(kind)).ends[TracedRun(device, number)] = begin, end
    begins = [begin for begin, _, _ in runs]
    for event, own in own_times(lines[OPS_LINE].events):
        number = bisect_right(begins, event.start_ns) - 1
        if number < 0 or event.start_ns >= runs[number][1]:
            continue
        instruction = INSTRUCTION.fullmatch(event.name)
        name, text = (instruction[1], instruction[2]) if instruction else (event.name, "")
        program = runs[number][2]
        found[program].add(OpEvent(program, TracedRun(device, number), name, text, event.start_ns, end_of(event), own))


def cpu_runs(host: str, plane: Any, found: dict[str, ProgramRuns]) -> None:
    """Adds the runs on a host's threads to those found."""
    for line in plane.lines:
        if line.name == PYTHON_LINE:
            continue
        about = ((event, dict(event.stats)) for event in line.events)
        named = {id(event): (event, stats) for event, stats in about if "hlo_op" in stats and "run_id" in stats}
        for event, own in own_times(event for event, _ in named.values()):
            stats = named[id(event)][1]
            program = f"{stats['hlo_module']}({stats['program_id']})"
            run = TracedRun((host, stats.get("device_ordinal")), stats["run_id"])
            one = OpEvent(program, run, str(stats["hlo_op"]), "", event.start_ns, end_of(event), own)
            found.setdefault(program, ProgramRuns(CPU_KIND)).add(one)


def own_times(events: Iterable[Any]) -> Iterator[tuple[Any, float]]:
    """Each event of a line, in order, with the nanoseconds of it in which no event inside it runs."""
    ordered = sorted(events, key=lambda event: (event.start_ns, -event.duration_ns))
    inside = [0.0] * len(ordered)
    around: list[int] = []
    for at, event in enumerate(ordered):
        while around and end_of(ordered[around[-1]]) <= event.start_ns:
            around.pop()
        if around:
            inside[around[-1]] += min(end_of(event), end_of(ordered[around[-1]])) - event.start_ns
        around.append(at)
    for event, taken in zip(ordered, inside, strict=True):
        yield event, max(0.0, event.duration_ns - taken)


def end_of(event: Any) -> float:
    """Nanosecond at which an event ends."""
    return event.start_ns + event.duration_ns
