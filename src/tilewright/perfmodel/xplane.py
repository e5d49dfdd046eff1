"""Reader of profiler traces: times of each operation of each program, per run, as written by `jax.profiler.trace`.

A trace has a file per host (`*.xplane.pb`), with planes for devices and threads, lines in a plane, and events on a line. The
reader takes three kinds of planes:

- TPUs, `/device:TPU:N`: an event of the line `XLA Modules` is a run of a program; an event of `XLA Ops` is an operation of the
  core, with the instruction's text as its name;
- GPUs, `/device:GPU:N`: an event of a `Stream` is a kernel or a copy that names its instruction (`hlo_op`) and program. Events
  name no run, so all runs of a program on a GPU count as one;
- without either, the threads of `/host:CPU`, with operations that name their instruction, program and run. Small programs run
  on Python's thread.

Loops and calls are events around the events of their bodies. Time counts once: the self time of an event excludes the events
nested in it on its line.
"""

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from jax.profiler import ProfileData

TPU_PLANE = re.compile(r"/device:TPU:\d+")
GPU_PLANE = re.compile(r"/device:GPU:\d+")
CPU_PLANE = "/host:CPU"
CPU_KIND = "CPU"
GPU_KIND = "GPU"
RUNS_LINE = "XLA Modules"
OPS_LINE = "XLA Ops"
STREAM_LINE = "Stream "
"""Prefix of the names of a GPU's lines that have kernels; other lines repeat their times."""
INSTRUCTION = re.compile(r"%(\S+) = (.*)", re.DOTALL)


@dataclass(frozen=True)
class TracedOp:
    """An instruction of a trace.

    Attributes:
        name: name of the instruction.
        text: text after the name and `=` in the program; empty if the trace lacks it.
        calls: mean number of calls per run.
    """

    name: str
    text: str = field(repr=False)
    calls: float


class TracedTimes(NamedTuple):
    """Seconds of a run on one device: of the whole run, and the self time of each instruction."""

    seconds: float
    self_s: Mapping[str, float]


@dataclass(frozen=True)
class TracedProgram:
    """Measured runs of one program.

    Attributes:
        name: name with the trace's number of the program: `jit_step(1734)`.
        device_kind: kind of the devices in the trace: `TPU v6 Lite`, `GPU` or `CPU`.
        devices: number of devices.
        runs: runs on all devices.
        ops: instructions by name.
    """

    name: str
    device_kind: str
    devices: int
    runs: tuple[TracedTimes, ...] = field(repr=False)
    ops: Mapping[str, TracedOp] = field(repr=False)

    @property
    def module(self) -> str:
        """Name of the program without the number."""
        return self.name.rpartition("(")[0]

    @property
    def seconds(self) -> float:
        """Median seconds of the runs."""
        return median(run.seconds for run in self.runs)

    @property
    def between_seconds(self) -> float:
        """Median seconds per run without an operation; negative where operations run in parallel."""
        return median(run.seconds - sum(run.self_s.values()) for run in self.runs)

    def self_seconds(self, names: Collection[str]) -> float:
        """Median self time of some instructions per run, in seconds."""
        return median(sum(run.self_s.get(name, 0.0) for name in names) for run in self.runs)


class TracedRun(NamedTuple):
    """Unique key of a program's run on one device."""

    device: Hashable
    number: Hashable


class OpEvent(NamedTuple):
    """An operation of a run, with times in nanoseconds."""

    program: str
    run: TracedRun
    name: str
    text: str
    begin: float
    end: float
    self_ns: float


@dataclass
class ProgramRuns:
    """Accumulated events of a program's runs.

    Attributes:
        device_kind: kind of the devices.
        ends: begin and end of each run, in nanoseconds.
        self_ns: self time of each instruction in each run, in nanoseconds.
        calls: number of events of each instruction in all runs.
        texts: text of each instruction.
    """

    device_kind: str
    ends: dict[TracedRun, tuple[float, float]] = field(default_factory=dict)
    self_ns: dict[TracedRun, dict[str, float]] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)
    texts: dict[str, str] = field(default_factory=dict)

    def add(self, event: OpEvent) -> None:
        begin, end = self.ends.get(event.run, (event.begin, event.end))
        self.ends[event.run] = min(begin, event.begin), max(end, event.end)
        times = self.self_ns.setdefault(event.run, {})
        times[event.name] = times.get(event.name, 0.0) + event.self_ns
        self.calls[event.name] += 1
        self.texts[event.name] = event.text

    def program(self, name: str) -> TracedProgram:
        ops = {op: TracedOp(op, text, self.calls[op] / len(self.self_ns)) for op, text in self.texts.items()}
        runs = []
        for run, times in self.self_ns.items():
            begin, end = self.ends[run]
            runs.append(TracedTimes(1e-9 * (end - begin), {op: 1e-9 * duration for op, duration in times.items()}))
        return TracedProgram(name, self.device_kind, len({run.device for run in self.self_ns}), tuple(runs), ops)


def read_trace(path: Path) -> dict[str, TracedProgram]:
    """Reads the programs of a trace, by name.

    Args:
        path: an `.xplane.pb`, or an output folder of `jax.profiler.trace`; of several traces the newest is read.

    Raises:
        ValueError: no trace exists, the file is no trace, or it has no operations of a device.
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
        gpus = [(name, plane) for name, plane in named if GPU_PLANE.fullmatch(name)]
        for name, plane in tpus:
            tpu_runs(f"{file} {name}", plane, found)
        for name, plane in gpus:
            gpu_runs(f"{file} {name}", plane, found)
        for name, plane in named:
            if name == CPU_PLANE and not tpus and not gpus:
                cpu_runs(str(file), plane, found)
    programs = {name: runs.program(name) for name, runs in found.items() if runs.self_ns}
    if not programs:
        raise ValueError(
            f"expected operations of a TPU (/device:TPU:N), a GPU (/device:GPU:N) or a CPU in {path}; found none in "
            f"{', '.join(dict.fromkeys(planes)) or 'a trace without planes'}"
        )
    return programs


def files_of(path: Path) -> list[Path]:
    """Returns the files of a trace, one per host; see `read_trace`."""
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
    """Adds the runs of a TPU's plane to `found`; operations outside of runs are left out."""
    lines = {line.name: line for line in plane.lines}
    if RUNS_LINE not in lines or OPS_LINE not in lines:
        return
    kind = str(dict(plane.stats).get("device_type_string", "TPU"))
    runs = sorted((event.start_ns, end_of(event), event.name) for event in lines[RUNS_LINE].events)
    for number, (begin, end, program) in enumerate(runs):
        found.setdefault(program, ProgramRuns(kind)).ends[TracedRun(device, number)] = begin, end
    begins = [begin for begin, _, _ in runs]
    for event, self_ns in self_times(lines[OPS_LINE].events):
        number = bisect_right(begins, event.start_ns) - 1
        if number < 0 or event.start_ns >= runs[number][1]:
            continue
        instruction = INSTRUCTION.fullmatch(event.name)
        name, text = (instruction[1], instruction[2]) if instruction else (event.name, "")
        program = runs[number][2]
        found[program].add(OpEvent(program, TracedRun(device, number), name, text, event.start_ns, end_of(event), self_ns))


def gpu_runs(device: str, plane: Any, found: dict[str, ProgramRuns]) -> None:
    """Adds the kernels on a GPU's streams to `found`, as one run of each program."""
    streams = (line for line in plane.lines if line.name.startswith(STREAM_LINE))
    named_runs(streams, GPU_KIND, lambda stats: TracedRun(device, 0), found)


def cpu_runs(host: str, plane: Any, found: dict[str, ProgramRuns]) -> None:
    """Adds the runs on a host's threads to `found`."""
    named_runs(
        plane.lines,
        CPU_KIND,
        lambda stats: TracedRun((host, stats.get("device_ordinal")), stats["run_id"]) if "run_id" in stats else None,
        found,
    )


def named_runs(
    lines: Iterable[Any],
    kind: str,
    run_of: Callable[[Mapping[str, Any]], TracedRun | None],
    found: dict[str, ProgramRuns],
) -> None:
    """Adds the events of some lines that name their instruction and program to `found`.

    Args:
        kind: kind of the devices.
        run_of: returns the run of an event, given its stats; None for an event that belongs to no run.
    """
    for line in lines:
        about = ((event, dict(event.stats)) for event in line.events)
        named = {
            id(event): (event, stats, run)
            for event, stats in about
            if {"hlo_op", "hlo_module"} <= stats.keys() and (run := run_of(stats)) is not None
        }
        for event, self_ns in self_times(event for event, _, _ in named.values()):
            _, stats, run = named[id(event)]
            program = f"{stats['hlo_module']}({stats.get('program_id', '')})"
            one = OpEvent(program, run, str(stats["hlo_op"]), "", event.start_ns, end_of(event), self_ns)
            found.setdefault(program, ProgramRuns(kind)).add(one)


def self_times(events: Iterable[Any]) -> Iterator[tuple[Any, float]]:
    """Yields each event of a line, in order, with its nanoseconds outside of nested events."""
    ordered = sorted(events, key=lambda event: (event.start_ns, -event.duration_ns))
    nested = [0.0] * len(ordered)
    around: list[int] = []
    for at, event in enumerate(ordered):
        while around and end_of(ordered[around[-1]]) <= event.start_ns:
            around.pop()
        if around:
            nested[around[-1]] += min(end_of(event), end_of(ordered[around[-1]])) - event.start_ns
        around.append(at)
    for event, duration in zip(ordered, nested, strict=True):
        yield event, max(0.0, event.duration_ns - duration)


def end_of(event: Any) -> float:
    """End of an event in nanoseconds."""
    return event.start_ns + event.duration_ns
