"""Comparison of a program's predicted and traced times: per operation, for waits on communication, and in total.

The prediction is the timeline of the compiled text (`timeline.py`); the trace is a profiler's (`xplane.py`). Instructions match
by the compiler's names; where the trace has an instruction's text, opcode and shapes must also agree. Times are per run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from tilewright.compiled.hlo import HloOp, read_module, read_op
from tilewright.perfmodel.timeline import Timeline
from tilewright.perfmodel.xplane import TracedOp, TracedProgram

UNKNOWN = "not in the program"
Part = Literal["compute", "exposed", "memory wait", "start", "control", "not in the program"]
"""Part of a run: operations of the core; waits for collectives, and for copies to or from HBM; starts of both, predicted as 0;
loops, calls and conditions, predicted as 0; operations with an unknown name."""

LEAST_MATCHED = 0.5
"""Minimum share of traced operations, and of their time, in the program; below this, the trace is of another program."""


@dataclass(frozen=True)
class OpTimes:
    """Predicted and traced times of an instruction.

    Attributes:
        name, opcode: name and opcode in the compiled text.
        op_name: place in the Python program.
        part: part of the run.
        calls: mean number of events per run; None if the trace lacks the instruction.
        predicted_calls: number of executions per run; None if the prediction lacks the instruction.
        predicted_us: predicted microseconds of all executions in a run, or of the core's waits for a `done`; None like
            `predicted_calls`.
        measured_us: traced microseconds in a run, without nested events, median of the runs; None like `calls`.
        estimated: True if the prediction is a compiler estimate, False for a roofline.
    """

    name: str
    opcode: str
    op_name: str
    part: Part
    calls: float | None
    predicted_calls: int | None
    predicted_us: float | None
    measured_us: float | None
    estimated: bool

    def record(self) -> dict[str, Any]:
        """Figures, named as in docs/metrics.md."""
        return {**asdict(self), "measured_over_predicted": quotient(self.measured_us, self.predicted_us)}


@dataclass(frozen=True)
class TraceComparison:
    """Comparison of a program's prediction and trace.

    Attributes:
        timeline: prediction.
        program: trace.
        ops: instructions of both, the longest first.
    """

    timeline: Timeline = field(repr=False)
    program: TracedProgram
    ops: tuple[OpTimes, ...] = field(repr=False)

    @property
    def traced(self) -> list[OpTimes]:
        return [op for op in self.ops if op.measured_us is not None]

    @property
    def untraced(self) -> list[OpTimes]:
        """Operations with predicted time that the trace lacks."""
        return [op for op in self.ops if op.measured_us is None and op.predicted_us]

    @property
    def matched(self) -> list[OpTimes]:
        """Traced operations of the program."""
        return [op for op in self.traced if op.part != UNKNOWN]

    @property
    def matched_share(self) -> float:
        """Share of the measured time in `matched`."""
        return share(self.matched, self.traced)

    @property
    def predicted_us(self) -> float:
        return 1e6 * self.timeline.whole().total_s

    @property
    def measured_us(self) -> float:
        return 1e6 * self.program.seconds

    def parts(self) -> list[dict[str, Any]]:
        """Returns metrics of each part of the run, of the time between operations, and of the whole run."""
        rows = []
        for part in get_args(Part):
            ops = [op for op in self.ops if op.part == part]
            measured = 1e6 * self.program.self_seconds({op.name for op in ops if op.measured_us is not None})
            if ops:
                rows.append((part, sum(op.predicted_us or 0.0 for op in ops), measured))
        rows.append(("between operations", 0.0, 1e6 * self.program.between_seconds))
        rows.append(("run", self.predicted_us, self.measured_us))
        return [
            {
                "name": part,
                "predicted_us": predicted,
                "measured_us": measured,
                "measured_over_predicted": quotient(measured, predicted),
                "measured_share": measured / self.measured_us,
            }
            for part, predicted, measured in rows
        ]

    def record(self) -> dict[str, Any]:
        """Figures, named as in docs/metrics.md."""
        seconds = [run.seconds for run in self.program.runs]
        rough = [op for op in self.traced if op.part == "compute" and not op.estimated]
        return {
            "program": self.program.name,
            "device_kind": self.program.device_kind,
            "devices": self.program.devices,
            "runs": len(seconds),
            "run_range_us": [1e6 * min(seconds), 1e6 * max(seconds)],
            "traced_operations": len(self.traced),
            "matched_operations": len(self.matched),
            "matched_share": self.matched_share,
            "untraced_operations": [op.name for op in self.untraced],
            "untraced_us": sum(op.predicted_us or 0.0 for op in self.untraced),
            "without_estimate": len(rough),
            "without_estimate_share": share(rough, self.traced),
            "parts": self.parts(),
            "operations": [op.record() for op in self.ops],
            "notes": list(self.timeline.graph.notes),
        }


def quotient(measured: float | None, predicted: float | None) -> float | None:
    """Returns measured over predicted; None if either is missing or the prediction is 0."""
    return None if measured is None or not predicted else measured / predicted


def share(some: Sequence[OpTimes], traced: Sequence[OpTimes]) -> float:
    """Returns the share of measured time of some operations; by number of operations if all times are 0."""
    whole = sum(op.measured_us or 0.0 for op in traced)
    return sum(op.measured_us or 0.0 for op in some) / whole if whole else len(some) / len(traced)


def module_name(hlo: str) -> str:
    """Reads the name of a program from the first line of its text.

    Raises:
        ValueError: the text is no compiled program.
    """
    words = hlo[: hlo.find("\n")].replace(",", " ").split()
    if len(words) < 2 or words[0] != "HloModule":
        raise ValueError(f"expected the HLO text of a compiled program, HloModule NAME first; found {hlo[:60]!r}")
    return words[1]


def program_in(programs: Mapping[str, TracedProgram], module: str, name: str = "") -> TracedProgram:
    """Finds the program of a trace by a module's name.

    Args:
        module: name of the module; see `module_name`.
        name: full name in the trace, for traces with several programs of one module name.

    Raises:
        ValueError: the trace has no such program, or several.
    """
    found = [one for one in programs.values() if (one.name == name if name else one.module == module)]
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(one.name for one in found)
        raise ValueError(f"expected one program {module} in the trace, found {names}: choose one with --program")
    raise ValueError(f"expected the program {name or module} in the trace, found {', '.join(programs)}")


def compare(timeline: Timeline, hlo: str, program: TracedProgram) -> TraceComparison:
    """Compares a prediction with a trace.

    Args:
        timeline: timeline of the program.
        hlo: compiled text of the timeline's program.
        program: traced program.

    Raises:
        ValueError: less than `LEAST_MATCHED` of the trace is in the program.
    """
    instructions = {op.name: op for computation in read_module(hlo).computations.values() for op in computation.ops}
    traced = {name: op for name, op in program.ops.items() if name in instructions and is_same(op, instructions[name])}
    predicted = predictions(timeline)
    ops = []
    for name in dict.fromkeys((*traced, *predicted)):
        one = predicted.get(name)
        if name in traced or (one is not None and (one.seconds or one.part != "compute")):
            ops.append(op_times(instructions[name], one, traced.get(name), program))
    for name, op in program.ops.items():
        if name not in traced:
            ops.append(OpTimes(name, "", "", UNKNOWN, op.calls, None, None, 1e6 * program.self_seconds([name]), False))
    ops.sort(key=lambda op: (-(op.measured_us or 0.0), -(op.predicted_us or 0.0)))
    found = TraceComparison(timeline, program, tuple(ops))
    if min(len(traced) / len(program.ops), found.matched_share) < LEAST_MATCHED:
        raise ValueError(
            f"expected a trace of the program, found {program.name}: {len(traced)} of {len(program.ops)} traced operations "
            f"match by name, opcode and shape, with {found.matched_share:.0%} of the time"
        )
    return found


def is_same(traced: TracedOp, op: HloOp) -> bool:
    """Returns False if the traced operation has another opcode or other shapes than `op`."""
    try:
        other = read_op(op.name, traced.text, op.is_root)
    except ValueError:  # the trace lacks the instruction's text or part of it
        return True
    shapes, other_shapes = ([(array.dtype, array.dims) for array in one.outputs] for one in (op, other))
    return (op.opcode, shapes) == (other.opcode, other_shapes)


@dataclass
class PredictedOp:
    """Predicted number of calls and seconds of an instruction per run."""

    part: Part
    estimated: bool
    calls: int = 0
    seconds: float = 0.0


def predictions(timeline: Timeline) -> dict[str, PredictedOp]:
    """Returns the prediction of each operation by name, for compute and for starts and ends of transfers."""
    nodes = timeline.graph.nodes
    ends = {node.start: number for number, node in reversed(list(enumerate(nodes))) if node.start is not None}
    seconds: dict[int, float] = {}
    for span in timeline.core:
        # A wait counts at the end of the transfer that began at the span's node.
        at = span.node if span.track == "compute" else ends.get(span.node, span.node)
        seconds[at] = seconds.get(at, 0.0) + span.seconds
    found: dict[str, PredictedOp] = {}
    for number, node in enumerate(nodes):
        if node.role == "input":
            continue
        part: Part = {"run": "compute", "start": "start"}.get(node.role, "exposed")  # type: ignore[assignment]
        if part == "exposed" and nodes[number if node.start is None else node.start].engine == "hbm":
            part = "memory wait"
        one = found.setdefault(node.name, PredictedOp(part, node.estimated))
        one.calls += 1
        one.seconds += seconds.get(number, 0.0)
    return found


def op_times(op: HloOp, predicted: PredictedOp | None, measured: TracedOp | None, program: TracedProgram) -> OpTimes:
    """Joins the prediction and the measurement of an instruction; at least one of them is given."""
    return OpTimes(
        op.name,
        op.opcode,
        op.op_name,
        "control" if predicted is None else predicted.part,
        None if measured is None else measured.calls,
        None if predicted is None else predicted.calls,
        None if predicted is None else 1e6 * predicted.seconds,
        None if measured is None else 1e6 * program.self_seconds([op.name]),
        predicted is not None and predicted.estimated,
    )
