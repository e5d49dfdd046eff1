"""Programs of simulated cores: operations in the order of their queues, with what they occupy and what they wait for.

Every core of a group runs the same program, as SPMD programs do. An engine takes its operations in the program's order and
waits for what each one needs; so does each DMA queue, and each stream of collectives. Nothing else orders them.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from tilewright.hardware.ranged import refuse_name

COMPUTE = ("tensor", "vector", "scalar", "gpsimd")
"""Engines that compute."""
DMA = "dma"
CC = "cc"
ENGINES = (*COMPUTE, DMA, CC)
"""All engines: those, the DMA engines, and the collective cores."""

CollectiveKind = Literal["all-gather", "reduce-scatter", "all-reduce", "permute"]
KINDS = ("all-gather", "reduce-scatter", "all-reduce", "permute")
Algorithm = Literal["auto", "ring", "bidirectional", "mesh", "rdh", "kangaring"]
ALGORITHMS = ("ring", "bidirectional", "mesh", "rdh", "kangaring")

SBUF = "sbuf"
PSUM = "psum"
HBM = "hbm"
"""Memories in which an operation's result is held."""


@dataclass(frozen=True)
class Collective:
    """A collective that the collective cores run.

    Attributes:
        kind: one of `KINDS`.
        bytes: of the whole array: a rank's before a reduce-scatter or an all-reduce, after an all-gather; of a permute, what
            each rank sends.
        axis: of the mesh, over which ranks exchange.
        stream: which queue of collectives it is in.
        algorithm: one of `ALGORITHMS`, or the one that suits its size.
        purpose: for the results, such as `tp` or `fsdp`.
        directions: of a permute, 2 if half of its bytes go the other way.
        reduces: of a permute, whether what arrives is added to something.

    One that needs nothing goes on where the one before it in its stream ended, without a start: what a rank got is passed on.
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
    """An operation.

    Attributes:
        engine: one of `ENGINES`.
        needs: operations, by number, that must be done before it begins.
        cycles: of the clock of its engine, for those that compute.
        bytes: that a DMA moves.
        queue: of a DMA, which ring of the DMA engines it is in.
        engines: of a DMA, how many of the engines it is spread over.
        packet_bytes: of a DMA; None for the setting of the machine.
        descriptor_bytes: of a DMA, contiguous bytes of each descriptor; 0 where they are as large as packets.
        priority: class in strict arbitration, 0 first.
        collective: of `cc`, what it does.
        holds: the memory in which its result is, from its begin to the end of the last operation that needs it.
        holds_bytes: how large that is.
        layer: to which it belongs; None for none.
    """

    name: str
    engine: str
    needs: tuple[int, ...] = ()
    cycles: float = 0.0
    bytes: float = 0.0
    queue: int = 0
    engines: int = 16
    packet_bytes: int | None = None
    descriptor_bytes: float = 0.0
    priority: int = 0
    collective: Collective | None = None
    holds: str = ""
    holds_bytes: float = 0.0
    layer: int | None = None

    @property
    def line(self) -> tuple[str, int]:
        """The queue that it waits in."""
        if self.engine == DMA:
            return DMA, self.queue
        return self.engine, self.collective.stream if self.collective is not None else 0


@dataclass(frozen=True)
class NeuronProgram:
    """Operations in their order.

    Attributes:
        resident_bytes: of device memory, held all the time: weights, caches, optimizer state.
        notes: what had to be assumed to build it.
    """

    name: str
    ops: tuple[QueuedOp, ...] = field(repr=False)
    resident_bytes: float = 0.0
    notes: tuple[str, ...] = ()

    def check(self) -> None:
        """Refuses what cannot run.

        Raises:
            ValueError: an engine that does not exist, a number of no operation, a negative size, or a cycle, by name.
        """
        for number, op in enumerate(self.ops):
            what = f"operation {number} ({op.name})"
            if op.engine not in ENGINES:
                refuse_name(f"an engine for {what}", op.engine, ENGINES)
            if (op.engine == CC) != (op.collective is not None):
                raise ValueError(f"expected a collective on the engine cc and nowhere else, found {what} on {op.engine}")
            wrong = [need for need in op.needs if not 0 <= need < len(self.ops)]
            if wrong:
                raise ValueError(f"expected {what} to need operations below {len(self.ops)}, found {wrong[0]}")
            if min(op.cycles, op.bytes, op.holds_bytes, op.collective.bytes if op.collective else 0) < 0:
                raise ValueError(f"expected cycles and bytes of 0 or more, found less in {what}")
            if op.holds not in ("", SBUF, PSUM, HBM):
                refuse_name(f"a memory for {what}", op.holds, (SBUF, PSUM, HBM))
            if op.engine == DMA and not 1 <= op.engines <= 16:
                raise ValueError(f"expected {what} on 1 to 16 DMA engines, found {op.engines}")
            if op.collective is not None and op.collective.kind not in KINDS:
                refuse_name(f"a collective for {what}", op.collective.kind, KINDS)
        cycle = find_cycle(self.ops)
        if cycle:
            names = " -> ".join(self.ops[number].name for number in cycle)
            raise ValueError(f"expected operations that can run in the order of their queues, found a cycle: {names}")


def find_cycle(ops: Sequence[QueuedOp]) -> list[int]:
    """Operations each of which waits for the next and the last for the first, by need or by the order of a queue; or none."""
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
    while left not in path:  # each of them waits for another one that is left
        path.append(left)
        left = next(need for need in waits[left] if waiting[need])
    return [*path[path.index(left) :], left]
