"""Counts the bytes that a compiled program moves to and from device memory, per operation and in total, from its HLO text.

Every executed operation reads its operands from memory once and writes its results once. The count is lower where the text
shows
it: a slice or gather reads only the selected elements, an update in place writes only the changed ones, a fusion keeps its
intermediate values, and arrays in a TPU's VMEM or scalar memory move only when they are copied in or out.

The count is no measurement: it ignores caches that serve repeated reads, and memory accesses of a Pallas kernel beyond one read
per operand and one write per result.
"""

from dataclasses import dataclass, field
from itertools import combinations
from math import prod

from tilewright.compiled.hlo import FREE, ArrayType, Computation, HloOp, Module, execution, read_module

FREE_CALLS = frozenset({"AllocateBuffer", "AssumeGatherIndicesInBound", "ConcatBitcast", "Sharding", "SliceBitcast"})
"""Custom calls by which XLA only names a buffer."""

SELECTING = frozenset({"dynamic-slice", "slice", "gather", "slice-start", "dynamic-slice-start"})
"""Operations that read only as much of their first operand as they return."""

UPDATING = {"dynamic-update-slice": 1, "scatter": 2, "dynamic-update-slice-start": 1}
"""Operations that update a part of their first operand in place, and the position of the operand that holds the part."""

ELEMENTWISE = frozenset({"bitcast", "reshape", "convert", "copy", "transpose"})
"""Operations that a fusion computes only for the elements of their result that are used."""


@dataclass(frozen=True)
class OpTraffic:
    """Memory traffic of one operation over all its runs.

    Attributes:
        name, opcode: the compiler's name and opcode.
        op_name: origin in the Python program; empty if the compiler added the operation.
        read, written: bytes of device memory.
        times: number of runs, in loops.
    """

    name: str
    opcode: str
    op_name: str
    read: int
    written: int
    times: int


@dataclass(frozen=True)
class Traffic:
    """Memory traffic of a program.

    Attributes:
        ops: operations that move data, in scheduled order.
        arrays: all arrays that exist while the program runs, in any memory of the device, views included. Values inside a
            fusion are never stored as a whole and are left out.
        notes: assumptions: unknown trip counts, branches, opaque kernels.
    """

    ops: tuple[OpTraffic, ...]
    arrays: frozenset[ArrayType] = field(repr=False)
    notes: tuple[str, ...]

    @property
    def read(self) -> int:
        """Total bytes read."""
        return sum(op.read for op in self.ops)

    @property
    def written(self) -> int:
        """Total bytes written."""
        return sum(op.written for op in self.ops)

    @property
    def total(self) -> int:
        """Total bytes moved."""
        return self.read + self.written

    def contains_shape(self, dims: tuple[int, ...]) -> bool:
        """Returns True if an array of these dimensions exists, in any order and with any dimensions merged.

        The compiler may store `[nodes, degree, features]` as `[features, nodes * degree]`; both are found. An unrelated array
        whose dimensions are such products matches too, so use sizes that are unique to the array.
        """
        wanted = tuple(size for size in dims if size != 1)
        sizes = {tuple(sorted(size for size in array.dims if size != 1)) for array in self.arrays}
        return any(prod(size) == prod(wanted) and _merges(wanted, size) for size in sizes)


def memory_traffic(text: str) -> Traffic:
    """Counts the memory traffic of a compiled program.

    Args:
        text: optimised HLO, from `jax.jit(f).lower(...).compile().as_text()` or `aot.compile_for(...).hlo`.

    Raises:
        ValueError: text without an entry computation.
    """
    module = read_module(text)
    run = execution(module, lambda op, computation: sum(op_bytes(module, computation, op)))
    rows = []
    notes = list(run.notes)
    for step in run.steps:
        read, written = op_bytes(module, step.computation, step.op)
        if read or written:
            op = step.op
            rows.append(OpTraffic(op.name, op.opcode, op.op_name, read * step.times, written * step.times, step.times))
        if step.op.opcode == "custom-call" and step.op.custom_call_target not in FREE_CALLS:
            notes.append(f"{step.op.name}: a {step.op.custom_call_target} kernel, each operand and result counted once")
    arrays = frozenset(array for step in run.steps for array in step.op.outputs)
    return Traffic(tuple(rows), arrays, tuple(notes))


def op_bytes(module: Module, computation: Computation, op: HloOp) -> tuple[int, int]:
    """Returns the bytes of device memory that one run of an operation reads and writes.

    In an asynchronous pair the start reads and the done writes.
    """
    if op.opcode in FREE or op.custom_call_target in FREE_CALLS or op.opcode.endswith("-update"):
        return 0, 0
    if op.opcode == "copy-start" and fetches_for_next_run(computation, op):
        return 0, 0
    read = 0
    if not op.opcode.endswith("-done"):
        for position, name in enumerate(op.operands):
            size = sum(array.device_bytes for array in computation.by_name[name].outputs)
            read += round(size * share_read(module, computation, op, position))
    written = 0
    if not op.opcode.endswith("-start"):
        shares = shares_written(module, computation, op)
        written = sum(round(array.device_bytes * share) for array, share in zip(op.outputs, shares, strict=True))
    return read, written


def fetches_for_next_run(computation: Computation, start: HloOp) -> bool:
    """Returns True if a copy has no reader: a TPU program may end by prefetching the source of its own first copy.

    One of the two copies moves nothing in each run; the first is counted.
    """
    dones = [user for user, _ in computation.users[start.name]]
    return all(not done.is_root and not computation.users[done.name] for done in dones)


def share_read(module: Module, computation: Computation, op: HloOp, position: int) -> float:
    """Returns the fraction of an operand that an operation reads."""
    operand = computation.by_name[op.operands[position]]
    inner = fused(module, op)
    if inner is not None:
        return share_of_parameter(module, inner, position)
    if position == 0 and op.opcode in SELECTING:
        result = op.outputs[1 if op.opcode.endswith("-start") else 0]
        return min(1.0, result.elements / max(1, operand.outputs[0].elements))
    if position == 0 and op.opcode in UPDATING:  # a scatter combines with existing values; an update only overwrites
        return share_updated(computation, op) if op.opcode == "scatter" else 0.0
    return 1.0


def share_of_parameter(module: Module, inner: Computation, number: int) -> float:
    """Returns the fraction of a parameter that a fused computation reads."""
    parameter = inner.parameter(number)
    return 1.0 if parameter.is_root else share_of_value(module, inner, updates_in_place(inner), parameter.name)


def share_of_value(module: Module, inner: Computation, in_place: set[str], name: str) -> float:
    """Returns the fraction of a value that its users read together; `in_place` names updates that overwrite their operand."""
    total = 0.0
    for user, position in inner.users[name]:
        if user.opcode in UPDATING and position == 0 and user.name not in in_place:
            total += 1.0
        elif user.opcode in ELEMENTWISE and not user.is_root:
            total += share_of_value(module, inner, in_place, user.name)
        else:
            total += share_read(module, inner, user, position)
    return min(1.0, total)


def shares_written(module: Module, computation: Computation, op: HloOp) -> list[float]:
    """Returns the fraction of each of its results that an operation writes."""
    if op.opcode.endswith("-done"):
        start = computation.by_name[op.operands[0]]
        while start.opcode.endswith("-update"):
            start = computation.by_name[start.operands[0]]
        if start.opcode.removesuffix("-start") in UPDATING:
            return [share_updated(computation, start)] * len(op.outputs)
        inner = fused(module, start)
    elif op.opcode in UPDATING:
        return [share_updated(computation, op)] * len(op.outputs)
    else:
        inner = fused(module, op)
    if inner is None:
        return [1.0] * len(op.outputs)
    in_place = updates_in_place(inner)
    shares = []
    for name in results(inner):
        root = inner.behind(name)
        whole = root.opcode != "fusion" and root.name not in in_place
        shares += [1.0] * len(inner.by_name[name].outputs) if whole else shares_written(module, inner, root)
    return shares


def share_updated(computation: Computation, op: HloOp) -> float:
    """Returns the fraction of its first operand that an update in place changes."""
    whole, part = (computation.by_name[op.operands[position]] for position in (0, UPDATING[op.opcode.removesuffix("-start")]))
    return min(1.0, part.outputs[0].elements / max(1, whole.outputs[0].elements))


def updates_in_place(inner: Computation) -> set[str]:
    """Returns the updates that a fused computation returns and whose base is one of its parameters.

    XLA runs these in the parameter's own buffer; if the parameter must be preserved, a copy precedes the fusion.
    """
    found = set()
    for name in results(inner):
        op = inner.behind(name)
        if op.opcode in UPDATING and inner.behind(op.operands[0]).opcode == "parameter":
            found.add(op.name)
    return found


def results(inner: Computation) -> tuple[str, ...]:
    """Returns the names of the values that a fused computation returns."""
    return inner.root.operands if inner.root.opcode == "tuple" else (inner.root.name,)


def fused(module: Module, op: HloOp) -> Computation | None:
    """Returns the computation inside a fusion or an asynchronous wrapper; None for any other operation."""
    if op.opcode not in ("fusion", "async-start"):
        return None
    return module.computations[op.callees("calls")[0]]


def _merges(dims: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    """Returns True if `sizes` are the products of groups into which `dims` can be partitioned."""
    if not sizes:
        return not dims
    for count in range(1, len(dims) + 1):
        for group in combinations(range(len(dims)), count):
            if prod(dims[place] for place in group) == sizes[0]:
                rest = tuple(size for place, size in enumerate(dims) if place not in group)
                if _merges(rest, sizes[1:]):
                    return True
    return False
