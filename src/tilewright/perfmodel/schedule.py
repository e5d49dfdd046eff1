"""A scheduled program as a graph: what its core executes, in order, and what is under way beside it.

The text of a scheduled program is in the order in which the core runs it. A collective or a copy that is asynchronous is begun
at one place and waited for at another; all spellings that libtpu has for that are read:

- `X-start` and `X-done`: permutes, copies between HBM and VMEM, and on some platforms all-gathers and all-reduces;
- `async-start`, `async-update`, `async-done`, with the operation in a computation of its own, and `call-start` of one that runs
  on a SparseCore;
- fusions around `AsyncCollectiveStart` and `AsyncCollectiveDone` (v5e), between which other fusions hand the transfer on while
  they compute: these are compute, and the collective inside them is the one that was begun.

A collective without any of this is synchronous, also where a fusion has taken it in: the core waits for it. Loops are unrolled
by their trip counts, called computations are entered, of a conditional the heaviest branch is taken. The graph says nothing of
time but for the cycles that the core needs: `timeline.py` has a model of that, and a simulator may have another.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import prod
from typing import Any, Literal

import numpy as np

from tilewright.compiled.hlo import (
    DEVICE_MEMORY,
    FREE,
    Computation,
    HloOp,
    Module,
    dtype_bits,
    execution,
    read_module,
    trip_count,
)
from tilewright.compiled.traffic import FREE_CALLS, fetches_for_next_run, op_bytes
from tilewright.hardware.tpu import TpuChip

PERMUTE = "collective-permute"
COPY = "copy"
COLLECTIVE = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", PERMUTE)
"""Kinds of collectives, as HLO calls them."""

UNMODELLED = frozenset({"collective-broadcast", "ragged-all-to-all", "send", "recv"})
"""Transfers between devices whose time is not known here: counted as nothing, with a note."""

COPIES = frozenset({COPY, "slice", "dynamic-slice", "dynamic-update-slice"})
"""Opcodes that copy between memories of the chip where they are asynchronous."""

MOST_NODES = 2_000_000
"""Operations of a graph, loops unrolled; beyond it, reading would take minutes."""

Role = Literal["input", "run", "start", "done", "sync"]
Value = Any
"""Result of an operation, while a graph is read: the number of a node, or a tuple of values."""


@dataclass(frozen=True)
class ScheduledTransfer:
    """A transfer beside the core, between devices or between the memories of one.

    Attributes:
        kind: one of `COLLECTIVE`, or `COPY`.
        bytes: that each device has when it begins; of a copy, those that pass to or from HBM.
        groups: devices that exchange with one another, by number; none stands for all of them.
        pairs: of a permute, each source and its target.
        directions: in which a ring is used: both, unless the compiler says that it chose one.
        by_axis: whether it goes along the axes of the slice, and not round one ring.
    """

    kind: str
    bytes: int
    groups: tuple[tuple[int, ...], ...] = ()
    pairs: tuple[tuple[int, int], ...] = ()
    directions: int = 2
    by_axis: bool = False


@dataclass(frozen=True)
class Node:
    """An operation.

    Attributes:
        name, opcode, op_name: as the compiler calls it, and where it comes from in the Python program.
        role: `input` of the program; `run` by the core; `start` and `done` of a transfer; `sync`, both at once.
        cycles: that the core needs for it.
        estimated: whether it has an estimate by the compiler, or moves and computes nothing that counts. Other cycles are a
            roofline: of what a kernel declares, else of the bytes to and from HBM.
        transfer: of a `start` or a `sync`.
        start: of a `done`, the node that began what it waits for.
        needs: nodes whose results it reads.
        layer: the last layer whose inputs it depends on, by number; None for what depends on none.
    """

    name: str
    opcode: str
    op_name: str
    role: Role
    cycles: float = 0.0
    estimated: bool = True
    transfer: ScheduledTransfer | None = None
    start: int | None = None
    needs: tuple[int, ...] = ()
    layer: int | None = None

    @property
    def engine(self) -> str:
        """Resource that it occupies: the `core`, the links between chips (`ici`), or the way to memory (`hbm`)."""
        if self.transfer is None:
            return "core"
        return "hbm" if self.transfer.kind == COPY else "ici"


@dataclass(frozen=True)
class ScheduleGraph:
    """A program's nodes, in the order of its core, and what had to be assumed to read them."""

    nodes: tuple[Node, ...] = field(repr=False)
    notes: tuple[str, ...]

    def record(self) -> dict[str, Any]:
        """Plain data for a simulator: nodes by number, each with its engine, cycles, transfer and the nodes that it needs."""
        return {"nodes": [{**asdict(node), "engine": node.engine} for node in self.nodes], "notes": list(self.notes)}

    @property
    def without_estimate(self) -> tuple[str, ...]:
        """Operations that the compiler has no cycles for, each once."""
        return tuple(dict.fromkeys(f"{node.name} ({node.opcode})" for node in self.nodes if not node.estimated))


def read_schedule(hlo: str, chip: TpuChip, layer_of: Callable[[str], int | None] = lambda _: None) -> ScheduleGraph:
    """The graph of a program.

    Args:
        hlo: its optimised, scheduled HLO text.
        chip: what it was compiled for; rooflines stand in where there is no estimate.
        layer_of: the layer that an input belongs to, by its name in the Python program (`params[3].qkv`).

    Raises:
        ValueError: no text of a scheduled program, one that waits for what nothing began, or one with more than `MOST_NODES`.
    """
    module = read_module(hlo)
    if "is_scheduled=true" not in hlo[: hlo.find("\n")]:
        raise ValueError(
            "expected a scheduled program (is_scheduled=true in its first line), for only its order says what overlaps"
        )
    reader = Reader(module, chip, layer_of)
    reader.computation(module.entry, None)
    return ScheduleGraph(tuple(reader.nodes), tuple(dict.fromkeys(reader.notes)))


class Reader:
    """Walks through a program in the order of its execution, and collects its nodes."""

    def __init__(self, module: Module, chip: TpuChip, layer_of: Callable[[str], int | None]):
        self.module = module
        self.chip = chip
        self.layer_of = layer_of
        self.nodes: list[Node] = []
        self.notes: list[str] = []
        self.handed_on: dict[int, int] = {}  # a node that computes while it hands on a transfer, and the start of this
        self.cycles: dict[str, tuple[float, bool]] = {}  # by operation: loops come to the same ones many times

    def computation(self, computation: Computation, arguments: Sequence[Value] | None) -> Value:
        """Adds what runs; gives the value of its root. Without arguments it is the entry, whose parameters are inputs."""
        values: dict[str, Value] = {}
        for op in computation.ops:
            if op.opcode == "parameter" and arguments is not None:
                values[op.name] = arguments[int(op.arguments)]
            else:
                values[op.name] = self.value(computation, op, [values[name] for name in op.operands])
        return values[computation.root.name]

    def value(self, computation: Computation, op: HloOp, operands: list[Value]) -> Value:
        if op.opcode == "tuple":
            return tuple(operands)
        if op.opcode == "get-tuple-element" and isinstance(operands[0], tuple):
            return operands[0][op.number("index") or 0]
        if op.opcode in ("get-tuple-element", "bitcast", "add-dependency") or op.opcode.endswith("-update"):
            return operands[0]
        if op.opcode in ("opt-barrier", "optimization-barrier"):
            return operands[0] if len(operands) == 1 else tuple(operands)
        if op.opcode == "while":
            return self.loop(computation, op, operands[0])
        if op.opcode == "conditional":
            names = op.callees("branch_computations") or op.callees("true_computation") + op.callees("false_computation")
            branches = [self.module.computations[name] for name in names]
            heaviest = max(range(len(branches)), key=lambda n: weight(self.module, branches[n]))
            self.notes.append(f"{op.name}: the heaviest of {len(branches)} branches counted")
            return self.computation(branches[heaviest], [operands[1 + heaviest]])
        if op.opcode == "call":
            return self.computation(self.module.computations[op.callees("to_apply")[0]], operands)
        return self.add(computation, op, tuple(sorted({node for value in operands for node in leaves(value)})))

    def loop(self, computation: Computation, op: HloOp, state: Value) -> Value:
        trips = trip_count(self.module, computation, op)
        if trips is None:
            self.notes.append(f"{op.name}: trip count unknown, counted as one iteration")
        body = self.module.computations[op.callees("body")[0]]
        for _ in range(1 if trips is None else trips):
            state = self.computation(body, [state])
        return state

    def add(self, computation: Computation, op: HloOp, needs: tuple[int, ...]) -> int:
        """Adds an operation that is neither a name for something nor a way into another computation."""
        if len(self.nodes) >= MOST_NODES:
            raise ValueError(f"expected a program of at most {MOST_NODES:,} operations with its loops unrolled, found more")
        layer = max((of for need in needs if (of := self.nodes[need].layer) is not None), default=None)
        if op.opcode == "parameter":
            layer = self.layer_of(op.op_name)
        node = Node(op.name, op.opcode, op.op_name, "run", needs=needs, layer=layer)
        number = len(self.nodes)
        if op.opcode == "parameter":
            node = replace(node, role="input")
        elif op.opcode in FREE or op.custom_call_target in FREE_CALLS:
            pass
        elif (unmodelled := op.opcode.removesuffix("-start")) in UNMODELLED:
            self.notes.append(f"{op.name}: the time of a {unmodelled} is not modelled, and counted as none")
        elif (started := self.waits_for(op, needs)) is not None:
            node = replace(node, role="done", start=started)
        elif (found := self.transfer(computation, op)) is not None:
            role, transfer = found
            node = replace(node, role=role, transfer=transfer, op_name=op.op_name or self.inner_name(computation, op))
        elif not op.opcode.endswith(("-start", "-done")):
            hands_on = [need for need in needs if self.started(need) is not None]
            if hands_on and is_continuation(self.module, op):
                self.handed_on[number] = hands_on[-1]
            cycles, estimated = self.cost(computation, op)
            node = replace(node, cycles=cycles, estimated=estimated)
        self.nodes.append(node)
        return number

    def started(self, number: int) -> int | None:
        """The start of the transfer that a node begins or hands on."""
        while number in self.handed_on:
            number = self.handed_on[number]
        return number if self.nodes[number].role == "start" else None

    def waits_for(self, op: HloOp, needs: Sequence[int]) -> int | None:
        """The start of the transfer that an operation waits for, if it does.

        Raises:
            ValueError: it waits for what nothing began.
        """
        if not op.opcode.endswith("-done") and calls(self.module, op) != "AsyncCollectiveDone":
            return None
        found = [start for need in needs if (start := self.started(need)) is not None]
        if found:
            return found[-1]
        if needs and all(self.nodes[need].opcode.removesuffix("-start") in UNMODELLED | COPIES for need in needs):
            return None  # not modelled, or a copy for the program's next run
        raise ValueError(f"expected {op.name} to wait for a transfer that was started before it, found none")

    def transfer(self, computation: Computation, op: HloOp) -> tuple[Role, ScheduledTransfer] | None:
        """Transfer that an operation begins, or does while the core waits; None if it transfers nothing."""
        begins = op.opcode.endswith("-start") or calls(self.module, op) == "AsyncCollectiveStart"
        role: Role = "start" if begins else "sync"
        of, within = self.inner_collective(computation, op)
        if of is not None:
            return role, collective(of, within)
        if not begins:
            return None
        base = op.opcode.removesuffix("-start")
        if base == COPY and fetches_for_next_run(computation, op):
            return None
        if base in COPIES:
            return role, ScheduledTransfer(COPY, copied_bytes(computation, op))
        read, _ = op_bytes(self.module, computation, op)
        self.notes.append(f"{op.name}: taken for a copy of the bytes that it reads from HBM")
        return role, ScheduledTransfer(COPY, read)

    def inner_name(self, computation: Computation, op: HloOp) -> str:
        """Origin of the collective in an operation, if it says so: a sum may say it of its additions alone."""
        of, _ = self.inner_collective(computation, op)
        if of is None:
            return ""
        sums = [self.module.computations[name].root.op_name for name in of.callees("to_apply")]
        return next((name for name in (of.op_name, *sums) if name), "")

    def inner_collective(self, computation: Computation, op: HloOp) -> tuple[HloOp | None, Computation]:
        """The collective that an operation is, or has inside; not one that others began and it hands on."""
        if op.opcode.removesuffix("-start") in COLLECTIVE:
            return op, computation
        if op.opcode not in ("fusion", "async-start") and not (op.opcode.endswith("-start") and op.callees("calls")):
            return None, computation
        if is_continuation(self.module, op):
            return None, computation
        for name in op.callees("calls"):
            inner = self.module.computations[name]
            for one in inner.ops:
                found, within = self.inner_collective(inner, one)
                if found is not None:
                    return found, within
        return None, computation

    def cost(self, computation: Computation, op: HloOp) -> tuple[float, bool]:
        """Cycles of an operation on the core, and whether the compiler estimates them."""
        key = f"{computation.name} {op.name}"
        if key not in self.cycles:
            noted = op.number("estimated_cycles")
            self.cycles[key] = (float(noted), True) if noted is not None else self.roofline(computation, op)
        return self.cycles[key]

    def roofline(self, computation: Computation, op: HloOp) -> tuple[float, bool]:
        """Roofline cycles of an operation without an estimate, and whether it only computes single numbers, for nothing."""
        moved = op.number("bytes_accessed")
        flops = op.number("flops")
        if op.opcode == "custom-call" and moved is not None and flops is not None:
            return self.chip.roofline_cycles(moved, flops), False
        read = [array for name in op.operands for array in computation.by_name[name].outputs]
        single = all(prod(array.dims) <= 1 for array in (*op.outputs, *read))
        return (0.0 if single else self.chip.roofline_cycles(sum(op_bytes(self.module, computation, op)), 0)), single


def leaves(value: Value) -> list[int]:
    """The nodes that a value is made of."""
    return [node for part in value for node in leaves(part)] if isinstance(value, tuple) else [value]


def weight(module: Module, branch: Computation) -> int:
    """Cycles that the compiler estimates for a computation."""
    run = execution(Module(branch, module.computations), lambda op, _: op.number("estimated_cycles") or 0)
    return sum((step.op.number("estimated_cycles") or 0) * step.times for step in run.steps)


def calls(module: Module, op: HloOp) -> str:
    """The custom call at the root of a fusion, or an empty string."""
    names = op.callees("calls") if op.opcode == "fusion" else ()
    return module.computations[names[0]].root.custom_call_target if names else ""


def is_continuation(module: Module, op: HloOp) -> bool:
    """True if a fusion computes and hands on a collective that was begun before it."""
    if op.opcode != "fusion" or calls(module, op) in ("AsyncCollectiveStart", "AsyncCollectiveDone"):
        return False
    inner = [each for name in op.callees("calls") for each in module.computations[name].ops]
    return any("async_collective_fusion_config" in each.attributes for each in inner if each.opcode in COLLECTIVE)


def collective(op: HloOp, computation: Computation) -> ScheduledTransfer:
    """Transfer of a collective, by its attributes: kind, bytes, devices, and the strategy that the compiler chose."""
    kind = op.opcode.removesuffix("-start")
    arrays = [array for name in op.operands for array in computation.by_name[name].outputs]
    size = sum(array.elements * dtype_bits(array.dtype) // 8 for array in arrays)
    pairs = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", op.attributes)
    found = [(int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)\}", pairs[1])] if pairs else []
    strategy = re.search(r"colors:(\d+) phases:(\d+)", op.attributes)
    colours, phases = (int(strategy[1]), int(strategy[2])) if strategy else (None, 1)
    axes = re.search(r'"emitter":"(\d)D', op.attributes)
    directions = 2 if colours is None else min(2, max(1, colours // phases))
    return ScheduledTransfer(
        kind, size, device_groups(op), tuple(found), directions, phases > 1 or bool(axes and int(axes[1]) > 1)
    )


def device_groups(op: HloOp) -> tuple[tuple[int, ...], ...]:
    """The groups of a collective, as lists of devices (`{{0,1},{2,3}}`), as an array of them (`[2,2]<=[2,2]T(1,0)`), or as axes
    of a mesh (`mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}`).

    Raises:
        ValueError: another spelling.
    """
    if "replica_groups=mesh[" in op.attributes:
        return mesh_groups(op)
    text = re.search(r"replica_groups=(\{(?:\{[\d,]*\},?)*\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)", op.attributes)
    if text is None:
        if "replica_groups=" in op.attributes:
            raise ValueError(f"expected replica groups as lists or as an array of devices in {op.name}, found another spelling")
        return ()
    if text[1].startswith("{"):
        lists = re.findall(r"\{([\d,]+)\}", text[1])
        return tuple(tuple(map(int, group.split(","))) for group in lists)
    shape, dims, *order = ([int(n) for n in part.split(",")] for part in re.findall(r"[\[(]([\d,]+)[\])]", text[1]))
    axes = order[0] if order else list(range(len(dims)))
    strides = [prod(dims[at + 1 :]) for at in range(len(dims))]
    numbers = [0]
    for axis in axes:
        numbers = [number + at * strides[axis] for number in numbers for at in range(dims[axis])]
    size = shape[-1]
    return tuple(tuple(numbers[first : first + size]) for first in range(0, len(numbers), size))


def mesh_groups(op: HloOp) -> tuple[tuple[int, ...], ...]:
    """Replica groups that name axes of a mesh; part of an axis is `'a':(2)4`, four in sequence behind a part of two.

    Raises:
        ValueError: another spelling.
    """
    of = re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((?:\[([\d,]+)\](?:T\(([\d,]+)\))?)\))? \{([^}]*)\}", op.attributes
    )
    named = re.findall(r"'([^']+)'=(\d+)", of[1]) if of else []
    wanted = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", of[4]) if of else []
    if of is None or len(named) != of[1].count("=") or len(wanted) != of[4].count("'") // 2:
        raise ValueError(f"expected replica groups by the axes of a mesh in {op.name}, found another spelling")
    sizes = {name: int(size) for name, size in named}
    devices = np.arange(prod(sizes.values()))
    if of[2]:
        devices = devices.reshape([int(n) for n in of[2].split(",")])
        devices = devices.transpose([int(n) for n in of[3].split(",")]) if of[3] else devices
    # Each axis in three: what lies before the wanted part of it, the part, and what lies behind.
    parts = {name: (int(before or 1), int(size or sizes[name])) for name, before, size in wanted}
    cut = [(*parts.get(name, (size, 1)), size // prod(parts.get(name, (size, 1)))) for name, size in sizes.items()]
    devices = devices.reshape([n for each in cut for n in each])
    inner = [3 * list(sizes).index(name) + 1 for name, _, _ in wanted]
    outer = [at for at in range(devices.ndim) if at not in inner]
    groups = devices.transpose(outer + inner).reshape(-1, prod(devices.shape[at] for at in inner))
    return tuple(tuple(map(int, group)) for group in groups)


def copied_bytes(computation: Computation, start: HloOp) -> int:
    """Bytes that an asynchronous copy moves to or from HBM."""
    sources = [array for name in start.operands for array in computation.by_name[name].outputs]
    base = start.opcode.removesuffix("-start")
    # A copy gives (target, source, …), a slice ((source), target, …); an update writes what it is given.
    target = sources[1] if base == "dynamic-update-slice" else start.outputs[0 if base == COPY else 1]
    touches_hbm = target.space == DEVICE_MEMORY or any(array.space == DEVICE_MEMORY for array in sources[:1])
    return target.bytes if touches_hbm else 0
