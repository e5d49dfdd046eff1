"""Puts programs together: products with the loads of their weights, element-wise work, collectives.

A product's weights come from device memory in tiles, each a transfer that holds its place in SBUF until all that multiply with
it are done; a tile's result is in PSUM until the vector engine has taken it away. Cycles are those of the engines'
instructions.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from tilewright.perfmodel.machine import Machine
from tilewright.perfmodel.program import CC, DMA, HBM, PSUM, SBUF, Collective, NeuronProgram, QueuedOp

LEAST_ISSUE_CYCLES = 64
"""Least cycles of an instruction of the vector and scalar engines, and of a product with few rows (NKI ISA)."""

TILE = 128
MOVING = 512
"""Rows and columns that the tensor engine holds, and most rows that pass it in an instruction."""

BF16 = 2
FP32 = 4

SBUF_SHARE = 0.75
"""Of SBUF that weights may take; the rest is for activations."""

TILE_BYTES = 2**21
"""Weights that are loaded at a time, unless that were more than `MOST_TILES` of a product."""

MOST_TILES = 8


def product_cycles(rows: int, inner: int, columns: int, fp32: bool = False) -> float:
    """Cycles of the tensor engine for (rows, inner) times (inner, columns): the cheaper way round.

    An instruction has a tile of 128 x 128 of one operand standing and passes up to 512 rows of the other, in
    `max(min(64, standing columns), moving rows)` cycles; float32 takes four times as long.
    """

    def cycles(standing: int, moving: int) -> int:
        blocks = ceil(inner / TILE) * ceil(standing / TILE)
        full, rest = divmod(moving, MOVING)
        least = min(LEAST_ISSUE_CYCLES, standing)
        return blocks * (full * MOVING + (max(least, rest) if rest else 0))

    return min(cycles(columns, rows), cycles(rows, columns)) * (4 if fp32 else 1)


def element_cycles(elements: float) -> float:
    """Cycles of the vector, scalar or GPSIMD engine for so many elements: 128 at a time."""
    return max(LEAST_ISSUE_CYCLES, elements / TILE)


@dataclass
class WeightTiles:
    """A matrix of a rank, whose tiles are loaded once and may serve several products.

    Attributes:
        loads: the operations that load its tiles, while they are in SBUF; none if each product loads them for itself.
    """

    name: str
    inner: int
    columns: int
    loads: list[int] = field(default_factory=list)

    @property
    def bytes(self) -> float:
        return BF16 * self.inner * self.columns


@dataclass
class Builder:
    """A program in the making.

    Attributes:
        machine: that it is for: tiles are cut to its memories.
        layer: to which what is added belongs.
    """

    machine: Machine
    ops: list[QueuedOp] = field(default_factory=list)
    layer: int | None = None
    tile_bytes: float = TILE_BYTES

    def add(self, name: str, engine: str, needs: Iterable[int] = (), **what: Any) -> int:
        """An operation; gives its number."""
        self.ops.append(QueuedOp(name, engine, tuple(dict.fromkeys(needs)), layer=self.layer, **what))
        return len(self.ops) - 1

    def elements(self, name: str, elements: float, needs: Iterable[int], engine: str = "vector") -> int:
        return self.add(name, engine, needs, cycles=element_cycles(elements))

    def move(self, name: str, size: float, needs: Iterable[int] = (), queue: int = 1, **what: Any) -> int:
        """A transfer of compute's to or from device memory."""
        return self.add(name, DMA, needs, bytes=size, queue=queue, **what)

    def collect(self, name: str, kind: str, size: float, needs: Iterable[int], **what: Any) -> int:
        held = {"holds": HBM, "holds_bytes": what.pop("holds_bytes")} if "holds_bytes" in what else {}
        return self.add(name, CC, needs, collective=Collective(kind, size, **what), **held)  # type: ignore[arg-type]

    def tiles(self, weights: WeightTiles) -> int:
        """In how many a matrix is loaded."""
        wanted = max(1, min(MOST_TILES, round(weights.bytes / self.tile_bytes)))
        return max(wanted, ceil(weights.bytes / (SBUF_SHARE * self.machine.sbuf_bytes / 4)))

    def stays(self, *matrices: WeightTiles) -> bool:
        """True if SBUF holds all of them at once."""
        return sum(each.bytes for each in matrices) <= SBUF_SHARE * self.machine.sbuf_bytes

    def load(self, weights: WeightTiles, gate: Iterable[int]) -> list[int]:
        """Loads the tiles of a matrix, once `gate` is done."""
        count = self.tiles(weights)
        return [
            self.move(f"load {weights.name}", weights.bytes / count, gate, 0, holds=SBUF, holds_bytes=weights.bytes / count)
            for _ in range(count)
        ]

    def product(
        self, weights: WeightTiles, rows: int, needs: Sequence[int], gate: Iterable[int] = (), keep: bool = False
    ) -> list[int]:
        """Rows times a matrix; gives the operations after which its result is there.

        Args:
            needs: after which the rows are there.
            gate: after which its weights may be loaded.
            keep: whether they stay in SBUF for the next product with them.
        """
        loads = weights.loads or self.load(weights, gate)
        weights.loads = loads if keep else []
        passes = self.passes(rows, weights)
        count = len(loads)
        columns = weights.columns / count
        cycles = product_cycles(rows, weights.inner, weights.columns) / count
        results = []
        for load in loads:
            needed = [*needs, load]
            if passes > 1:  # rows come from device memory, and weights again for each block of them
                size = ((passes - 1) * weights.bytes + BF16 * rows * weights.inner) / count
                needed.append(self.move(f"rows of {weights.name}", size, needed))
            psum = min(FP32 * rows * columns, self.machine.psum_bytes / 4)
            done = self.add(weights.name, "tensor", needed, cycles=cycles, holds=PSUM, holds_bytes=psum)
            results.append(self.elements(f"take {weights.name}", rows * columns, [done]))
            if passes > 1:
                results.append(self.move(f"spill {weights.name}", BF16 * rows * columns, results[-1:], 2))
        return results[-1:]

    def passes(self, rows: int, weights: WeightTiles) -> int:
        """Number of times that weights are read: once for each block of rows that, with its results, fits into half of SBUF."""
        return ceil(BF16 * rows * (weights.inner + weights.columns) / (0.5 * self.machine.sbuf_bytes))

    def program(self, name: str, resident_bytes: float = 0.0, notes: Sequence[str] = ()) -> NeuronProgram:
        return NeuronProgram(name, tuple(self.ops), resident_bytes, tuple(dict.fromkeys(notes)))
