"""Reader of scheduled programs: a graph of the core's operations, in order, and of concurrent transfers.

The text of a scheduled program is in the order of execution on the core. An asynchronous collective or copy starts at one place
and is waited for at another. The reader handles all spellings of libtpu:

- `X-start` and `X-done`: permutes, copies between HBM and VMEM, and on some platforms all-gathers and all-reduces;
- `async-start`, `async-update`, `async-done` with the operation in a separate computation, and `call-start` for an operation on
a
  SparseCore;
- fusions around `AsyncCollectiveStart` and `AsyncCollectiveDone` (v5e). Fusions between the two pass the transfer on while they
  compute; they count as compute, and the collective inside them is the one already started.

All other collectives are synchronous, also inside a fusion: the core waits for them. Loops are unrolled by their trip counts,
    called computations are entered, and of a conditional the heaviest branch is taken. The graph has cycles of the core but no
    times; `timeline.py` models these.
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
from tilewright.perfmodel.kernel_cost import kernel_cost

PERMUTE = "collective-permute"
COPY = "copy"
COLLECTIVE = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", PERMUTE)
"""Kinds of collectives, by their HLO names."""

UNMODELLED = frozenset({"collective-broadcast", "ragged-all-to-all", "send", "recv"})
"""Transfers between devices without a model of their time: counted as 0, with a note."""

COPIES = frozenset({COPY, "slice", "dynamic-slice", "dynamic-update-slice"})
"""Opcodes of copies between memories of a chip, where asynchronous."""

MOST_NODES = 2_000_000
"""Maximum operations of a graph with unrolled loops; reading more would take minutes."""

Role = Literal["input", "run", "start", "done", "sync"]
Value = Any
"""Result of an operation while a graph is read: a node number, or a tuple of values."""


@dataclass(frozen=True)
class ScheduledTransfer:
    """A transfer between devices, or between memories of a device, concurrent to the core.

    Attributes:
        kind: one of `COLLECTIVE`, or `COPY`.
        bytes: input bytes of each device; for a copy, the bytes to or from HBM.
        groups: groups of devices that exchange data, by number; empty for one group of all devices.
        pairs: source and target devices of a permute.
        directions: directions of the ring in use: 2, unless the compiler chose one.
        by_axis: True if the transfer follows the axes of the slice instead of one ring.
    """

    kind: str
    bytes: int
    groups: tuple[tuple[int, ...], ...] = ()
    pairs: tuple[tuple[int, int], ...] = ()
    directions: int = 2
    by_axis: bool = False


@dataclass(frozen=True)
class Node:
    """An operation of the graph.

    Attributes:
        name, opcode: name and opcode in the compiled text.
        op_name: place in the Python program.
        role: `input` of the program; `run` on the core; `start` or `done` of a transfer; `sync` for both at once.
        cycles: cycles on the core.
        estimated: True if `cycles` is a compiler estimate, or the operation is negligible. Otherwise `cycles` is a roofline: of
            a kernel's declared cost, else of the HBM traffic.
        transfer: transfer of a `start` or `sync`.
        start: for a `done`, the node that started the transfer.
        needs: nodes with results that the operation reads.
        layer: last layer with inputs that the operation depends on; None for no layer.
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
        """Resource of the operation: the `core`, the links between chips (`ici`), or the path to memory (`hbm`)."""
        if self.transfer is None:
            return "core"
        return "hbm" if self.transfer.kind == COPY else "ici"


@dataclass(frozen=True)
class ScheduleGraph:
    """Nodes of a program in the order of the core, with notes on assumptions of the reader."""

    nodes: tuple[Node, ...] = field(repr=False)
    notes: tuple[str, ...]

    def record(self) -> dict[str, Any]:
        """Returns plain data for a simulator: nodes in order, each with engine, cycles, transfer and dependencies."""
        return {"nodes": [{**asdict(node), "engine": node.engine} for node in self.nodes], "notes": list(self.notes)}

    @property
    def without_estimate(self) -> tuple[str, ...]:
        """Operations without a compiler estimate, without duplicates."""
        return tuple(dict.fromkeys(f"{node.name} ({node.opcode})" for node in self.nodes if not node.estimated))


def read_schedule(hlo: str, chip: TpuChip, layer_of: Callable[[str], int | None] = lambda _: None) -> ScheduleGraph:
    """Reads the graph of a program.

    Args:
        hlo: optimised, scheduled HLO text.
        chip: chip of the program; its rooflines replace missing estimates.
        layer_of: layer of an input, by the input's name in the Python program (`params[3].qkv`).

    Raises:
        ValueError: the text is no scheduled program, waits for a transfer that was not started, or has more operations than
            `MOST_NODES`.
    """
    module = read_module(hlo)
    if "is_scheduled=true" not in hlo[: hlo.find("\n")]:
        raise ValueError(
            "expected a scheduled program (is_scheduled=true in its first line), found HLO without an order of execution"
        )
    reader = Reader(module, chip, layer_of)
    reader.computation(module.entry, None)
    return ScheduleGraph(tuple(reader.nodes), tuple(dict.fromkeys(reader.notes)))


class Reader:
    """Collects the nodes of a program in order of execution."""

    def __init__(self, module: Module, chip: TpuChip, layer_of: Callable[[str], int | None]):
        self.module = module
        self.chip = chip
        self.layer_of = layer_of
        self.nodes: list[Node] = []
        self.notes: list[str] = []
        self.passed_on: dict[int, int] = {}  # compute node that passes a transfer on -> node of the transfer
        self.cycles: dict[str, tuple[float, bool]] = {}  # by operation: loops repeat operations

    def computation(self, computation: Computation, arguments: Sequence[Value] | None) -> Value:
        """Adds the operations of a computation; returns the value of its root.

        Without arguments, the computation is the entry, and its parameters are inputs.
        """
        values: dict[str, Value] = {}
        for op in computation.ops:
            if op.opcode == "parameter" and arguments is not None:
                values[op.name] = arguments[int(op.arguments)]
            else:
                values[op.name] = self.value(computation, op, [values[name] for name in op.operands])
        return values[computation.root.name]

    def value(self, computation: Computation, op: HloOp, operands: list[Value]) -> Value:
        """Adds an operation; returns its value."""
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
        """Adds all iterations of a loop; returns its final state."""
        trips = trip_count(self.module, computation, op)
        if trips is None:
            self.notes.append(f"{op.name}: trip count unknown, counted as one iteration")
        body = self.module.computations[op.callees("body")[0]]
        for _ in range(1 if trips is None else trips):
            state = self.computation(body, [state])
        return state

    def add(self, computation: Computation, op: HloOp, needs: tuple[int, ...]) -> int:
        """Adds a node for an operation that is neither an alias nor a call."""
        if len(self.nodes) >= MOST_NODES:
            raise ValueError(f"expected a program of at most {MOST_NODES:,} operations with its loops unrolled, found more")
        layer = max((one for need in needs if (one := self.nodes[need].layer) is not None), default=None)
        if op.opcode == "parameter":
            layer = self.layer_of(op.op_name)
        node = Node(op.name, op.opcode, op.op_name, "run", needs=needs, layer=layer)
        number = len(self.nodes)
        if op.opcode == "parameter":
            node = replace(node, role="input")
        elif op.opcode in FREE or op.custom_call_target in FREE_CALLS:
            pass
        elif (unmodelled := op.opcode.removesuffix("-start")) in UNMODELLED:
            self.notes.append(f"{op.name}: the time of a {unmodelled} is not modelled and counts as 0")
        elif (started := self.waits_for(op, needs)) is not None:
            node = replace(node, role="done", start=started)
        elif (found := self.transfer(computation, op)) is not None:
            role, transfer = found
            node = replace(node, role=role, transfer=transfer, op_name=op.op_name or self.inner_name(computation, op))
        elif not op.opcode.endswith(("-start", "-done")):
            hands_on = [need for need in needs if self.started(need) is not None]
            if hands_on and is_continuation(self.module, op):
                self.passed_on[number] = hands_on[-1]
            cycles, estimated = self.cost(computation, op)
            node = replace(node, cycles=cycles, estimated=estimated)
        self.nodes.append(node)
        return number

    def started(self, number: int) -> int | None:
        """Returns the start of the transfer that a node begins or passes on."""
        while number in self.passed_on:
            number = self.passed_on[number]
        return number if self.nodes[number].role == "start" else None

    def waits_for(self, op: HloOp, needs: Sequence[int]) -> int | None:
        """Returns the start of the transfer that an operation waits for; None if it waits for none.

        Raises:
            ValueError: the transfer was not started.
        """
        if not op.opcode.endswith("-done") and calls(self.module, op) != "AsyncCollectiveDone":
            return None
        found = [start for need in needs if (start := self.started(need)) is not None]
        if found:
            return found[-1]
        if needs and all(self.nodes[need].opcode.removesuffix("-start") in UNMODELLED | COPIES for need in needs):
            return None  # not modelled, or a copy for the next run of the program
        raise ValueError(f"expected {op.name} to wait for a transfer that was started before it, found none")

    def transfer(self, computation: Computation, op: HloOp) -> tuple[Role, ScheduledTransfer] | None:
        """Returns the role and transfer of an operation that starts or synchronously runs one; None for other operations."""
        begins = op.opcode.endswith("-start") or calls(self.module, op) == "AsyncCollectiveStart"
        role: Role = "start" if begins else "sync"
        inner, within = self.inner_collective(computation, op)
        if inner is not None:
            return role, collective(inner, within)
        if not begins:
            return None
        base = op.opcode.removesuffix("-start")
        if base == COPY and fetches_for_next_run(computation, op):
            return None
        if base in COPIES:
            return role, ScheduledTransfer(COPY, copied_bytes(computation, op))
        read, _ = op_bytes(self.module, computation, op)
        self.notes.append(f"{op.name}: modelled as a copy of the bytes that it reads from HBM")
        return role, ScheduledTransfer(COPY, read)

    def inner_name(self, computation: Computation, op: HloOp) -> str:
        """Returns the place in the Python program of an operation's collective, or an empty string.

        Only the additions of a sum may have the place.
        """
        inner, _ = self.inner_collective(computation, op)
        if inner is None:
            return ""
        sums = [self.module.computations[name].root.op_name for name in inner.callees("to_apply")]
        return next((name for name in (inner.op_name, *sums) if name), "")

    def inner_collective(self, computation: Computation, op: HloOp) -> tuple[HloOp | None, Computation]:
        """Returns the collective that an operation is or contains, except a passed-on one, and the collective's computation."""
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
        """Returns the cycles of an operation on the core, and True if the compiler estimates them."""
        key = f"{computation.name} {op.name}"
        if key not in self.cycles:
            noted = op.estimated_cycles
            self.cycles[key] = (float(noted), True) if noted is not None else self.roofline(computation, op)
        return self.cycles[key]

    def roofline(self, computation: Computation, op: HloOp) -> tuple[float, bool]:
        """Returns the roofline cycles of an operation without an estimate, and True for scalar operations, which cost 0."""
        cost = kernel_cost(self.module, computation, op) if op.opcode == "custom-call" else None
        if cost is not None:
            return self.chip.roofline_cycles(*cost), False
        read = [array for name in op.operands for array in computation.by_name[name].outputs]
        single = all(prod(array.dims) <= 1 for array in (*op.outputs, *read))
        return (0.0 if single else self.chip.roofline_cycles(sum(op_bytes(self.module, computation, op)), 0)), single


def leaves(value: Value) -> list[int]:
    """Returns the nodes of a value."""
    return [node for part in value for node in leaves(part)] if isinstance(value, tuple) else [value]


def weight(module: Module, branch: Computation) -> int:
    """Returns the compiler's estimated cycles of a computation."""
    run = execution(Module(branch, module.computations), lambda op, _: op.estimated_cycles or 0)
    return sum((step.op.estimated_cycles or 0) * step.times for step in run.steps)


def calls(module: Module, op: HloOp) -> str:
    """Returns the target of the custom call at the root of a fusion, or an empty string."""
    names = op.callees("calls") if op.opcode == "fusion" else ()
    return module.computations[names[0]].root.custom_call_target if names else ""


def is_continuation(module: Module, op: HloOp) -> bool:
    """Returns True if a fusion computes while it passes on a collective that was started before."""
    if op.opcode != "fusion" or calls(module, op) in ("AsyncCollectiveStart", "AsyncCollectiveDone"):
        return False
    inner = [each for name in op.callees("calls") for each in module.computations[name].ops]
    return any("async_collective_fusion_config" in each.attributes for each in inner if each.opcode in COLLECTIVE)


def collective(op: HloOp, computation: Computation) -> ScheduledTransfer:
    """Reads the transfer of a collective: kind, bytes, devices, and the strategy of the compiler."""
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
    """Reads the replica groups of a collective.

    The spellings are lists of devices (`{{0,1},{2,3}}`), an array of devices (`[2,2]<=[2,2]T(1,0)`), and axes of a mesh
    (`mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}`).

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
    """Reads replica groups that name axes of a mesh; `'a':(2)4` is the part of size 4 after a leading part of size 2.

    Raises:
        ValueError: another spelling.
    """
    match = re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((?:\[([\d,]+)\](?:T\(([\d,]+)\))?)\))? \{([^}]*)\}", op.attributes
    )
    named = re.findall(r"'([^']+)'=(\d+)", match[1]) if match else []
    wanted = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", match[4]) if match else []
    if match is None or len(named) != match[1].count("=") or len(wanted) != match[4].count("'") // 2:
        raise ValueError(f"expected replica groups by the axes of a mesh in {op.name}, found another spelling")
    sizes = {name: int(size) for name, size in named}
    devices = np.arange(prod(sizes.values()))
    if match[2]:
        devices = devices.reshape([int(n) for n in match[2].split(",")])
        devices = devices.transpose([int(n) for n in match[3].split(",")]) if match[3] else devices
    # Split each axis in three: before the wanted part, the part, and after the part.
    parts = {name: (int(before or 1), int(size or sizes[name])) for name, before, size in wanted}
    cut = [(*parts.get(name, (size, 1)), size // prod(parts.get(name, (size, 1)))) for name, size in sizes.items()]
    devices = devices.reshape([n for each in cut for n in each])
    inner = [3 * list(sizes).index(name) + 1 for name, _, _ in wanted]
    outer = [at for at in range(devices.ndim) if at not in inner]
    groups = devices.transpose(outer + inner).reshape(-1, prod(devices.shape[at] for at in inner))
    return tuple(tuple(map(int, group)) for group in groups)


def copied_bytes(computation: Computation, start: HloOp) -> int:
    """Returns the bytes that an asynchronous copy moves to or from HBM."""
    sources = [array for name in start.operands for array in computation.by_name[name].outputs]
    base = start.opcode.removesuffix("-start")
    # Outputs of a copy are (target, source, ...), of a slice ((source), target, ...); an update writes its second operand.
    target = sources[1] if base == "dynamic-update-slice" else start.outputs[0 if base == COPY else 1]
    touches_hbm = target.space == DEVICE_MEMORY or any(array.space == DEVICE_MEMORY for array in sources[:1])
    return target.bytes if touches_hbm else 0
