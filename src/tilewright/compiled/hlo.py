"""Parser of optimised, scheduled HLO text, the output of `compiled.as_text()` on any platform.

It reads arrays (with TPU tiling and memory space), operations, computations and the execution order. The costs of operations
are left to the modules that use it.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod

DEVICE_MEMORY = 0
"""Memory space of arrays whose layout names none: HBM. On TPUs, VMEM is space 1 and scalar memory space 6."""

FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all opt-barrier optimization-barrier partition-id replica-id "
    "add-dependency domain".split()
)
"""Operations that move no data."""


NO_ESTIMATE = 2**63 - 1
"""Cycles of an operation that libtpu cannot estimate, such as some large fusions with a matmul."""


@dataclass(frozen=True)
class ArrayType:
    """An array of a program.

    Attributes:
        dtype: HLO's spelling: `bf16`, `f32`, `s4`, `pred`.
        dims: logical dimensions.
        space: number of the memory space; `DEVICE_MEMORY` is HBM.
        bytes: size in memory, including padding by the layout's tiles.
    """

    dtype: str
    dims: tuple[int, ...]
    space: int
    bytes: int

    @property
    def elements(self) -> int:
        """Number of elements without padding."""
        return prod(self.dims)

    @property
    def device_bytes(self) -> int:
        """Bytes in device memory; 0 for an array in on-chip memory."""
        return self.bytes if self.space == DEVICE_MEMORY else 0


@dataclass(frozen=True)
class HloOp:
    """An instruction. `outputs` has one entry per array, in order, if the result is a tuple."""

    name: str
    opcode: str
    outputs: tuple[ArrayType, ...]
    operands: tuple[str, ...]
    arguments: str
    attributes: str
    is_root: bool

    @property
    def op_name(self) -> str:
        """JAX's name stack of the Python code that the operation stems from, or an empty string."""
        found = re.search(r'metadata=\{[^}]*?op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return found[1] if found else ""

    @property
    def custom_call_target(self) -> str:
        """Name of the library or kernel that a custom call runs, or an empty string."""
        found = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return found[1] if found else ""

    def number(self, key: str) -> int | None:
        """Returns a number from the attributes, quoted or not: `index=3`, `"estimated_cycles":"9102"`, `"n":"8"`."""
        found = re.search(rf'(?<!\w)"?{key}"?[=:]"?(\d+)', self.attributes)
        return int(found[1]) if found else None

    @property
    def estimated_cycles(self) -> int | None:
        """The compiler's estimate of the operation's cycles; None without one."""
        found = self.number("estimated_cycles")
        return None if found == NO_ESTIMATE else found

    def callees(self, key: str) -> tuple[str, ...]:
        """Returns the computations that an attribute names: `calls=%f` or `branch_computations={%f, %g}`."""
        found = re.search(rf"(?<!\w){key}=(?:\{{([^}}]*)\}}|(%\S+?)(?:,|\s|$))", self.attributes)
        return tuple(NAME.findall(found[1] or found[2])) if found else ()


@dataclass(frozen=True)
class Computation:
    """A computation with its operations in scheduled order."""

    name: str
    ops: tuple[HloOp, ...]

    @cached_property
    def by_name(self) -> dict[str, HloOp]:
        return {op.name: op for op in self.ops}

    @cached_property
    def users(self) -> dict[str, list[tuple[HloOp, int]]]:
        """Users of each operation's result, with the position of the operand."""
        users: dict[str, list[tuple[HloOp, int]]] = {op.name: [] for op in self.ops}
        for op in self.ops:
            for position, operand in enumerate(op.operands):
                users[operand].append((op, position))
        return users

    @property
    def root(self) -> HloOp:
        """Operation that yields the computation's result."""
        return next(op for op in self.ops if op.is_root)

    def parameter(self, number: int) -> HloOp:
        """Returns the parameter with this number."""
        return next(op for op in self.ops if op.opcode == "parameter" and op.arguments == str(number))

    def behind(self, name: str) -> HloOp:
        """Returns the operation that produces this value, looking through bitcasts."""
        op = self.by_name[name]
        while op.opcode == "bitcast":
            op = self.by_name[op.operands[0]]
        return op


@dataclass(frozen=True)
class Module:
    """A compiled program."""

    entry: Computation
    computations: dict[str, Computation]


@dataclass(frozen=True)
class ExecutedOp:
    """An operation that the device executes, and how often."""

    op: HloOp
    computation: Computation
    times: int


@dataclass(frozen=True)
class Execution:
    """All executed operations in order, and the assumptions made to find them."""

    steps: tuple[ExecutedOp, ...]
    notes: tuple[str, ...]


ARRAY = re.compile(r"\b([a-z]\w*)\[([^\]]*)\](?:\{([^}]*)\})?")
NAME = re.compile(r"%([^\s,(){}=]+)")
HEADER = re.compile(r"^(ENTRY )?%?([^\s(]+) \(.*\{$")
LINE = re.compile(r"^\s+(ROOT )?%?(\S+) = (.*)$")
BROKEN = re.compile(r'\n(?=")|(?<=")\n(?=\}\})')
"""Line breaks within the metadata of a Pallas kernel."""
OPCODE = re.compile(r"([a-z][\w\-]*)\(")


def read_module(text: str) -> Module:
    """Parses the text of an optimised module.

    Raises:
        ValueError: text without an entry computation.
    """
    computations: dict[str, Computation] = {}
    entry = ""
    name = ""
    ops = []
    for line in BROKEN.sub("", text).splitlines():
        if header := HEADER.match(line):
            name = header[2]
            ops = []
            entry = name if header[1] else entry
        elif line == "}" or line.startswith("}, "):
            computations[name] = Computation(name, tuple(ops))
            name = ""
        elif name and (found := LINE.match(line)):
            ops.append(read_op(found[2], found[3], is_root=bool(found[1])))
    if entry not in computations:
        raise ValueError(f"expected the HLO text of a compiled program, with an ENTRY computation; found {text[:60]!r}")
    return Module(computations[entry], computations)


def read_op(name: str, text: str, is_root: bool) -> HloOp:
    """Parses an instruction from the text after its `=`: type, opcode, operands in parentheses, attributes."""
    end = closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
    opcode = OPCODE.match(text, end + 1)
    if opcode is None:
        raise ValueError(f"expected an opcode with its operands in {name}, found {text[end : end + 60]!r}")
    close = closing(text, opcode.end() - 1)
    arguments = text[opcode.end() : close]
    operands = () if opcode[1] in ("constant", "parameter") else tuple(NAME.findall(arguments))
    return HloOp(name, opcode[1], read_arrays(text[:end]), operands, arguments, text[close + 1 :], is_root)


def closing(text: str, start: int) -> int:
    """Returns the index of the parenthesis that closes the one at `start`."""
    depth = 0
    for found in re.compile(r"[()]").finditer(text, start):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.start()
    raise ValueError(f"expected a closing parenthesis in {text[start : start + 60]!r}")


def read_arrays(text: str) -> tuple[ArrayType, ...]:
    """Returns the arrays of a type, which may be a nested tuple."""
    return tuple(array_type(*found.groups()) for found in ARRAY.finditer(text))


def array_type(dtype: str, dims: str, layout: str | None) -> ArrayType:
    """Builds an array from its parts as HLO prints them: `bf16`, `16,2560`, `1,0:T(8,128)(2,1)S(1)`."""
    layout = layout or ""
    shape = tuple(int(size.strip().lstrip("<=")) for size in dims.split(",") if size.strip())
    order, _, rest = layout.partition(":")
    space = re.search(r"S\((\d+)\)", rest)
    tile = re.search(r"T\(([\d,]+)\)", rest)
    packed = re.search(r"E\((\d+)\)", rest)
    minor_to_major = [int(dim) for dim in order.split(",") if dim] or range(len(shape))[::-1]
    physical = [shape[dim] for dim in minor_to_major]
    if tile:  # only the outer tile pads; the inner tiles divide it
        for place, size in enumerate(reversed(tile[1].split(","))):
            if place == len(physical):
                physical.append(1)
            physical[place] = ceil(physical[place] / int(size)) * int(size)
    bits = int(packed[1]) if packed else dtype_bits(dtype)
    return ArrayType(dtype, shape, int(space[1]) if space else DEVICE_MEMORY, ceil(prod(physical) * bits / 8))


def dtype_bits(dtype: str) -> int:
    """Returns the bits per element. Sub-byte types occupy a byte each unless the layout marks them as packed."""
    if dtype in ("token", "opaque"):
        return 0
    width = re.match(r"[a-z]+(\d+)", dtype)
    return max(8, int(width[1])) if width else 8


def execution(module: Module, weigh: Callable[[HloOp, Computation], float]) -> Execution:
    """Lists executed operations and how often each runs.

    Loops multiply by their trip counts, calls are entered, and a fusion counts as one operation. A loop without a known trip
    count counts as one iteration, and a conditional as its heaviest branch by `weigh`; each of these adds a note.
    """
    notes: list[str] = []
    return Execution(tuple(_steps(module, module.entry, weigh, notes)), tuple(notes))


def _steps(
    module: Module, computation: Computation, weigh: Callable[[HloOp, Computation], float], notes: list[str], times: int = 1
) -> Iterator[ExecutedOp]:
    for op in computation.ops:
        if op.opcode == "while":
            trips = trip_count(module, computation, op)
            if trips is None:
                notes.append(f"{op.name}: trip count unknown, counted as one iteration")
            for name in op.callees("condition") + op.callees("body"):
                yield from _steps(module, module.computations[name], weigh, notes, times * (1 if trips is None else trips))
        elif op.opcode == "conditional":
            names = op.callees("branch_computations") or op.callees("true_computation") + op.callees("false_computation")
            branches = [list(_steps(module, module.computations[name], weigh, notes, times)) for name in names]
            notes.append(f"{op.name}: the heaviest of {len(branches)} branches counted")
            yield from max(branches, key=lambda steps: sum(weigh(step.op, step.computation) * step.times for step in steps))
        elif op.opcode == "call":
            yield from _steps(module, module.computations[op.callees("to_apply")[0]], weigh, notes, times)
        else:
            yield ExecutedOp(op, computation, times)


def trip_count(module: Module, computation: Computation, loop: HloOp) -> int | None:
    """Returns the trip count of a `while`: the compiler's annotation, or derived from a counter with constant bounds."""
    noted = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes)
    if noted:
        return int(noted[1])
    condition, body = (module.computations[loop.callees(key)[0]] for key in ("condition", "body"))
    initial = computation.behind(loop.operands[0])
    if initial.opcode != "tuple" or body.root.opcode != "tuple":
        return None

    def value(within: Computation, name: str) -> int | None:
        """Returns a constant, or an element of the loop's state that starts as a constant and never changes."""
        op = _source(within, name)
        if op.opcode == "constant" and re.fullmatch(r"-?\d+", op.arguments):
            return int(op.arguments)
        index = op.number("index")
        if within is computation or op.opcode != "get-tuple-element" or index is None:
            return None
        carried = _source(body, body.root.operands[index])
        same = carried.opcode == "get-tuple-element" and carried.number("index") == index
        return value(computation, initial.operands[index]) if same else None

    compare, operands = _unwrapped(module, condition.root)
    counter = _source(condition, operands[0]) if operands else None
    if compare.opcode != "compare" or "direction=LT" not in compare.attributes or counter is None:
        return None
    index = counter.number("index")
    if counter.opcode != "get-tuple-element" or index is None:
        return None
    step, added = _unwrapped(module, _source(body, body.root.operands[index]))
    counts = step.opcode == "add" and _source(body, added[0]).number("index") == index
    first = value(computation, initial.operands[index])
    last = value(condition, operands[1])
    by = value(body, added[1]) if counts else None
    if first is None or last is None or not by:
        return None
    return max(0, ceil((last - first) / by))


def _source(computation: Computation, name: str) -> HloOp:
    """Returns the operation that produces this value, looking through bitcasts and copies."""
    op = computation.behind(name)
    while op.opcode == "copy":
        op = computation.behind(op.operands[0])
    return op


def _unwrapped(module: Module, op: HloOp) -> tuple[HloOp, tuple[str, ...]]:
    """Returns an operation with its operands; for a fusion of a single operation, that operation with the fusion's operands."""
    if op.opcode != "fusion":
        return op, op.operands
    inner = module.computations[op.callees("calls")[0]]
    parameters = [inner.by_name[name] for name in inner.root.operands]
    if any(parameter.opcode != "parameter" for parameter in parameters):
        return op, ()
    return inner.root, tuple(op.operands[int(parameter.arguments)] for parameter in parameters)
