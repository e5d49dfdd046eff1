"""Finds intermediate arrays that a compiled program writes to device memory and reads back, which fusion should avoid.

A round trip is an array that one operation writes and a later operation of the same program reads. Arguments do not count, as
the program does not write them; results count only if the program reads them again. Views, single numbers, values inside a
fusion or kernel, and on TPUs arrays in VMEM or scalar memory do not count. An array that a loop recreates in each iteration
counts once per iteration.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from tilewright.compiled.hlo import DEVICE_MEMORY, FREE, Computation, HloOp, Module, execution, read_module
from tilewright.compiled.traffic import FREE_CALLS, op_bytes, share_read, shares_written

CALLERS = {
    "while": ("condition", "body"),
    "call": ("to_apply",),
    "conditional": ("branch_computations", "true_computation", "false_computation"),
}
"""Operations that run other computations, and the attributes that name these computations."""


@dataclass(frozen=True)
class RoundTrip:
    """An array that is written to device memory and read back.

    Attributes:
        name: operation that writes it.
        op_name: origin of that operation in the Python program; empty if the compiler added it.
        dtype, dims: HLO's dtype and dimensions.
        bytes: bytes written in one run of the operation.
        times: how often the operation runs.
    """

    name: str
    op_name: str
    dtype: str
    dims: tuple[int, ...]
    bytes: int
    times: int


def round_trips(text: str) -> tuple[RoundTrip, ...]:
    """Finds the round trips of a compiled program, in the order of their writes.

    Args:
        text: optimised HLO, see `traffic.memory_traffic`.

    Raises:
        ValueError: text without an entry computation.
    """
    module = read_module(text)
    run = execution(module, lambda op, computation: sum(op_bytes(module, computation, op)))
    reads = Reads(module)
    found = []
    for step in run.steps:
        op = step.op
        if op.opcode in FREE or op.opcode.endswith(("-start", "-update")) or op.custom_call_target in FREE_CALLS:
            continue
        for index, (array, share) in enumerate(zip(op.outputs, shares_written(module, step.computation, op), strict=True)):
            if array.space != DEVICE_MEMORY or array.elements <= 1 or not share:
                continue
            if reads.any(step.computation, op.name, index if len(op.outputs) > 1 else None):
                size = round(array.device_bytes * share)
                found.append(RoundTrip(op.name, op.op_name, array.dtype, array.dims, size, step.times))
    return tuple(found)


class Reads:
    """Readers of each value of a program, through views, tuples, loops and calls."""

    def __init__(self, module: Module):
        self.module = module
        self.sites: dict[str, list[tuple[Computation, HloOp, str]]] = {}
        for computation in module.computations.values():
            for op in computation.ops:
                for attribute in CALLERS.get(op.opcode, ()):
                    for name in op.callees(attribute):
                        self.sites.setdefault(name, []).append((computation, op, attribute))

    def any(self, computation: Computation, name: str, index: int | None) -> bool:
        """Returns True if an operation reads the value.

        Args:
            index: element of the tuple `name`; None if it is no tuple, or for all elements.
        """
        visited: set[tuple[str, str, int | None]] = set()
        waiting = [(computation, name, index)]
        while waiting:
            where, name, index = waiting.pop()
            if (where.name, name, index) in visited:
                continue
            visited.add((where.name, name, index))
            for user, position in where.users[name]:
                if self.reads(where, user, position):
                    return True
                waiting += self.forwarded(where, user, position, index)
            if where.root.name == name:
                waiting += self.returned(where, index)
        return False

    def reads(self, where: Computation, user: HloOp, position: int) -> bool:
        """Returns True if a user reads this operand from memory instead of forwarding it."""
        if user.opcode in FREE or user.opcode in CALLERS or user.custom_call_target in FREE_CALLS:
            return False
        return not user.opcode.endswith(("-done", "-update")) and share_read(self.module, where, user, position) > 0

    def forwarded(
        self, where: Computation, user: HloOp, position: int, index: int | None
    ) -> Iterator[tuple[Computation, str, int | None]]:
        """Yields the values under which a user forwards an operand that it does not read."""
        if user.opcode in CALLERS:
            for attribute in CALLERS[user.opcode]:
                for name in user.callees(attribute):
                    inner = self.module.computations[name]
                    number = position if user.opcode == "call" else position - 1 if user.opcode == "conditional" else 0
                    if number >= 0:
                        yield inner, inner.parameter(number).name, index
            if user.opcode == "while":  # the loop may run no iteration
                yield where, user.name, index
        elif user.opcode == "tuple":
            yield where, user.name, position
        elif user.opcode == "get-tuple-element":
            if index is None or user.number("index") == index:
                yield where, user.name, None
        elif user.opcode in FREE or user.custom_call_target in FREE_CALLS:
            yield where, user.name, index
        else:  # an update in place keeps the rest of its operand
            yield where, user.name, None

    def returned(self, where: Computation, index: int | None) -> Iterator[tuple[Computation, str, int | None]]:
        """Yields the values under which the callers of a computation see its result; none for the entry computation."""
        for outer, op, attribute in self.sites.get(where.name, ()):
            if attribute == "body":  # the next iteration
                for name in op.callees("condition") + op.callees("body"):
                    inner = self.module.computations[name]
                    yield inner, inner.parameter(0).name, index
            if attribute != "condition":
                yield outer, op.name, index
