"""A prediction of a program beside a trace of it: the time of each operation, of waits for communication, of the whole.

The prediction is the timeline of the program's compiled text (`timeline.py`), the trace a profiler's (`xplane.py`). Both name
instructions as the compiler does, so that they are set against each other by name; where the trace has an instruction's text,
opcode and shapes must agree too. All times are of one run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from tilewright.compiled.hlo import HloOp, read_module, read_op
from tilewright.perfmodel.timeline import Timeline
from tilewright.perfmodel.xplane import TracedOp, TracedProgram

UNKNOWN = "not in the program"
Part = Literal["compute", "exposed", "memory wait", "start", "control", "not in the program"]
"""Part of a run that an operation belongs to: operations of the core; waits for collectives, and for copies to or from HBM;
beginnings of both, which the prediction has for nothing; loops, calls and conditions, likewise; operations of no known name."""

LEAST_MATCHED = 0.5
"""Least share of the traced operations, and of their time, that must be in the program: it is another one below that."""


@dataclass(frozen=True)
class OpTimes:
    """One instruction in the prediction and in the trace.

    Attributes:
        name, opcode, op_name: as the compiler calls it, and where it comes from in the Python program.
        part: of the run that it belongs to.
        calls: events of it in a run, on average; None where the trace has none.
        predicted_calls: how often the program runs it; None where the prediction does not have it.
        predicted_us: of all its calls in a run, or of the core's waits where it ends a transfer; None like `predicted_calls`.
        measured_us: of all its calls in a run, its own time, median of the runs; None like `calls`.
        estimated: whether the prediction has the compiler's estimate, and not a roofline.
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
    """A program's prediction beside its trace.

    Attributes:
        timeline: the prediction.
        program: the trace.
        ops: instructions of either, those that took longest first.
    """

    timeline: Timeline = field(repr=False)
    program: TracedProgram
    ops: tuple[OpTimes, ...] = field(repr=False)

    @property
    def traced(self) -> list[OpTimes]:
        return [op for op in self.ops if op.measured_us is not None]

    @property
    def untraced(self) -> list[OpTimes]:
        """Operations that the prediction has time for, and the trace does not have."""
        return [op for op in self.ops if op.measured_us is None and op.predicted_us]

    @property
    def matched(self) -> list[OpTimes]:
        """Operations of the trace that are in the program."""
        return [op for op in self.traced if op.part != UNKNOWN]

    @property
    def matched_share(self) -> float:
        """Part of the measured time that `matched` took."""
        return share(self.matched, self.traced)

    @property
    def predicted_us(self) -> float:
        return 1e6 * self.timeline.whole().total_s

    @property
    def measured_us(self) -> float:
        return 1e6 * self.program.seconds

    def parts(self) -> list[dict[str, Any]]:
        """Figures of each part of the run, and of the time of it in which no operation runs."""
        rows = []
        for part in get_args(Part):
            ops = [op for op in self.ops if op.part == part]
            measured = 1e6 * self.program.own_seconds({op.name for op in ops if op.measured_us is not None})
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
    """Measured over predicted; None where one is not there, or nothing was predicted."""
    return None if measured is None or not predicted else measured / predicted


def share(some: Sequence[OpTimes], traced: Sequence[OpTimes]) -> float:
    """Part of the measured time of operations that some of them took; of the number where they took no time."""
    whole = sum(op.measured_us or 0.0 for op in traced)
    return sum(op.measured_us or 0.0 for op in some) / whole if whole else len(some) / len(traced)


def module_name(hlo: str) -> str:
    """Name of a program, from the first line of its text.

    Raises:
        ValueError: that is none of a compiled program.
    """
    words = hlo[: hlo.find("\n")].replace(",", " ").split()
    if len(words) < 2 or words[0] != "HloModule":
        raise ValueError(f"expected the HLO text of a compiled program, HloModule NAME first; found {hlo[:60]!r}")
    return words[1]


def program_in(programs: Mapping[str, TracedProgram], module: str, name: str = "") -> TracedProgram:
    """The program of a trace that has a module's name.

    Args:
        module: see `module_name`.
        name: that the trace has for it, where the module's does not tell.

    Raises:
        ValueError: the trace has none of that name, or several.
    """
    found = [one for one in programs.values() if (one.name == name if name else one.module == module)]
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(one.name for one in found)
        raise ValueError(f"expected one program {module} in the trace, found {names}: name one with --program")
    raise ValueError(f"expected the program {name or module} in the trace, found {', '.join(programs)}")


def compare(timeline: Timeline, hlo: str, program: TracedProgram) -> TraceComparison:
    """Sets a prediction against a trace.

    Args:
        timeline: of the program.
        hlo: its text, which the timeline was read from.

    Raises:
        ValueError: less than `LEAST_MATCHED` of what was traced is in the program.
    """
    known = {op.name: op for computation in read_module(hlo).computations.values() for op in computation.ops}
    traced = {name: op for name, op in program.ops.items() if name in known and is_same(op, known[name])}
    predicted = predictions(timeline)
    ops = []
    for name in dict.fromkeys((*traced, *predicted)):
        one = predicted.get(name)
        if name in traced or (one is not None and (one.seconds or one.part != "compute")):
            ops.append(op_times(known[name], one, traced.get(name), program))
    for name, op in program.ops.items():
        if name not in traced:
            ops.append(OpTimes(name, "", "", UNKNOWN, op.calls, None, None, 1e6 * program.own_seconds([name]), False))
    ops.sort(key=lambda op: (-(op.measured_us or 0.0), -(op.predicted_us or 0.0)))
    found = TraceComparison(timeline, program, tuple(ops))
    if min(len(traced) / len(program.ops), found.matched_share) < LEAST_MATCHED:
        raise ValueError(
            f"expected a trace of this program; of {len(program.ops)} operations of {program.name} in the trace, "
            f"{len(traced)} are in it by name, opcode and shape, with {found.matched_share:.0%} of the time"
        )
    return found


def is_same(traced: TracedOp, op: HloOp) -> bool:
    """False if the trace says that an operation of this name has another opcode or another shape."""
    try:
        other = read_op(op.name, traced.text, op.is_root)
    except ValueError:  # the trace does not have its text, or not all of it
        return True
    shapes, others = ([(array.dtype, array.dims) for array in one.outputs] for one in (op, other))
    return (op.opcode, shapes) == (other.opcode, others)


@dataclass
class PredictedOp:
    """Prediction of one instruction: what all its calls in a run take."""

    part: Part
    estimated: bool
    calls: int = 0
    seconds: float = 0.0


def predictions(timeline: Timeline) -> dict[str, PredictedOp]:
    """Prediction of each operation, by name: of those that compute, and of those that begin or end transfers."""
    nodes = timeline.graph.nodes
    ends = {node.start: number for number, node in reversed(list(enumerate(nodes))) if node.start is not None}
    taken: dict[int, float] = {}
    for span in timeline.core:
        # The core waits for what began at the span's node, where that ends.
        at = span.node if span.track == "compute" else ends.get(span.node, span.node)
        taken[at] = taken.get(at, 0.0) + span.seconds
    found: dict[str, PredictedOp] = {}
    for number, node in enumerate(nodes):
        if node.role == "input":
            continue
        part: Part = {"run": "compute", "start": "start"}.get(node.role, "exposed")  # type: ignore[assignment]
        if part == "exposed" and nodes[number if node.start is None else node.start].engine == "hbm":
            part = "memory wait"
        one = found.setdefault(node.name, PredictedOp(part, node.estimated))
        one.calls += 1
        one.seconds += taken.get(number, 0.0)
    return found


def op_times(op: HloOp, predicted: PredictedOp | None, measured: TracedOp | None, program: TracedProgram) -> OpTimes:
    """Both sides of one instruction of the program, of which there is at least one."""
    return OpTimes(
        op.name,
        op.opcode,
        op.op_name,
        "control" if predicted is None else predicted.part,
        None if measured is None else measured.calls,
        None if predicted is None else predicted.calls,
        None if predicted is None else 1e6 * predicted.seconds,
        None if measured is None else 1e6 * program.own_seconds([op.name]),
        predicted is not None and predicted.estimated,
    )
