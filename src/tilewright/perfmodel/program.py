"""Programs of simulated cores: operations in queues, with their dependencies and resources.

All cores of a group run the same program (SPMD). Each engine, DMA queue and stream of collectives runs its operations in
program order, and each operation waits for its dependencies. Nothing else orders operations.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from tilewright.hardware.ranged import refuse_name

COMPUTE = ("tensor", "vector", "scalar", "gpsimd")
"""Compute engines."""
DMA = "dma"
CC = "cc"
ENGINES = (*COMPUTE, DMA, CC)
"""All engines: compute engines, the DMA engines, and the collective cores."""

CollectiveKind = Literal["all-gather", "reduce-scatter", "all-reduce", "permute"]
KINDS = ("all-gather", "reduce-scatter", "all-reduce", "permute")
Algorithm = Literal["auto", "ring", "bidirectional", "mesh", "rdh", "kangaring"]
ALGORITHMS = ("ring", "bidirectional", "mesh", "rdh", "kangaring")

SBUF = "sbuf"
PSUM = "psum"
HBM = "hbm"
"""Memories for results of operations."""


@dataclass(frozen=True)
class Collective:
    """A collective on the collective cores.

    A collective without dependencies continues the one before it in its stream, without a start cost: received data is passed
        on.

    Attributes:
        kind: one of `KINDS`.
        bytes: bytes of the whole array: a rank's input of a reduce-scatter or an all-reduce, its output of an all-gather; the
            bytes that each rank sends in a permute.
        axis: mesh axis of the exchange.
        stream: queue of the collective.
        algorithm: one of `ALGORITHMS`, or `auto` to choose by size.
        purpose: label in the results, such as `tp` or `fsdp`.
        directions: for a permute, 2 if half of the bytes go in the other direction.
        reduces: for a permute, True if received data is added.
    """

    kind: CollectiveKind
    bytes: float
    axis: str = "tp"
    stream: int = 0
    algorithm: Algorithm = "auto"
    purpose: str = "tp"
    directions: int = 1
    reduces: bool = False


@dataclass(frozen=True)
class QueuedOp:
    """An operation of a program.

    Attributes:
        name: name in results and messages.
        engine: one of `ENGINES`.
        needs: dependencies, by operation number.
        cycles: cycles of a compute engine.
        bytes: bytes of a DMA.
        queue: ring of a DMA.
        descriptor_bytes: contiguous bytes per descriptor of a DMA; 0 for descriptors as large as packets.
        collective: collective of `cc`.
        holds: memory of the result, occupied from the operation's begin to the end of its last user.
        holds_bytes: bytes of the result.
        layer: layer of the operation, or None.
    """

    name: str
    engine: str
    needs: tuple[int, ...] = ()
    cycles: float = 0.0
    bytes: float = 0.0
    queue: int = 0
    descriptor_bytes: float = 0.0
    collective: Collective | None = None
    holds: str = ""
    holds_bytes: float = 0.0
    layer: int | None = None

    @property
    def line(self) -> tuple[str, int]:
        """Queue of the operation."""
        if self.engine == DMA:
            return DMA, self.queue
        return self.engine, self.collective.stream if self.collective is not None else 0


@dataclass(frozen=True)
class NeuronProgram:
    """Operations in program order.

    Attributes:
        name: name of the program.
        ops: operations.
        resident_bytes: device memory in use all the time: weights, caches, optimizer state.
        notes: assumptions of the program.
    """

    name: str
    ops: tuple[QueuedOp, ...] = field(repr=False)
    resident_bytes: float = 0.0
    notes: tuple[str, ...] = ()

    def check(self) -> None:
        """Checks that the program can run.

        Raises:
            ValueError: an unknown engine, memory or collective; an invalid dependency; a negative size; or a cycle, with names.
        """
        for number, op in enumerate(self.ops):
            label = f"operation {number} ({op.name})"
            if op.engine not in ENGINES:
                refuse_name(f"an engine for {label}", op.engine, ENGINES)
            if (op.engine == CC) != (op.collective is not None):
                raise ValueError(f"expected a collective on the engine cc and nowhere else, found {label} on {op.engine}")
            wrong = [need for need in op.needs if not 0 <= need < len(self.ops)]
            if wrong:
                raise ValueError(f"expected {label} to need operations below {len(self.ops)}, found {wrong[0]}")
            if min(op.cycles, op.bytes, op.holds_bytes, op.collective.bytes if op.collective else 0) < 0:
                raise ValueError(f"expected cycles and bytes of 0 or more, found less in {label}")
            if op.holds not in ("", SBUF, PSUM, HBM):
                refuse_name(f"a memory for {label}", op.holds, (SBUF, PSUM, HBM))
            if op.collective is not None and op.collective.kind not in KINDS:
                refuse_name(f"a collective for {label}", op.collective.kind, KINDS)
        cycle = find_cycle(self.ops)
        if cycle:
            names = " -> ".join(self.ops[number].name for number in cycle)
            raise ValueError(f"expected operations that can run in the order of their queues, found a cycle: {names}")


def find_cycle(ops: Sequence[QueuedOp]) -> list[int]:
    """Returns operations that wait for each other in a cycle, by dependency or queue order; empty if there is no cycle."""
    waits: list[list[int]] = [list(op.needs) for op in ops]
    last: dict[tuple[str, int], int] = {}
    for number, op in enumerate(ops):
        if op.line in last:
            waits[number].append(last[op.line])
        last[op.line] = number
    waiting = [len(each) for each in waits]
    behind: list[list[int]] = [[] for _ in ops]
    for number, each in enumerate(waits):
        for need in each:
            behind[need].append(number)
    ready = deque(number for number, count in enumerate(waiting) if count == 0)
    while ready:
        for number in behind[ready.popleft()]:
            waiting[number] -= 1
            if waiting[number] == 0:
                ready.append(number)
    left = next((number for number, count in enumerate(waiting) if count), None)
    if left is None:
        return []
    path: list[int] = []
    while left not in path:  # each remaining operation waits for a remaining one
        path.append(left)
        left = next(need for need in waits[left] if waiting[need])
    return [*path[path.index(left) :], left]
