"""Builds simulated programs from matmuls with weight loads, element-wise operations, and collectives.

A matmul loads its weights from device memory in tiles. A tile occupies SBUF until all matmuls with it have ended; its result
occupies PSUM until the vector engine has read it. Cycles are those of the engines' instructions.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from tilewright.perfmodel.machine import Machine
from tilewright.perfmodel.program import CC, DMA, HBM, PSUM, SBUF, Collective, NeuronProgram, QueuedOp

LEAST_ISSUE_CYCLES = 64
"""Minimum cycles of an instruction of the vector and scalar engines, and of a matmul with few rows (NKI ISA)."""

TILE = 128
MOVING = 512
"""Rows and columns of the tensor engine's stationary operand, and maximum moving rows of an instruction."""

BF16 = 2
FP32 = 4

SBUF_SHARE = 0.75
"""Share of SBUF for weights; activations use the rest."""

TILE_BYTES = 2**21
"""Bytes of a weight tile, unless a matrix would have more than `MOST_TILES` tiles."""

MOST_TILES = 8


def product_cycles(rows: int, inner: int, columns: int, fp32: bool = False) -> float:
    """Cycles of the tensor engine for (rows, inner) times (inner, columns), with the cheaper operand stationary.

    An instruction keeps a 128 x 128 tile of one operand stationary and moves up to 512 rows of the other through it, in
    `max(min(64, stationary columns), moving rows)` cycles; float32 takes four times as many.
    """

    def cycles(stationary: int, moving: int) -> int:
        blocks = ceil(inner / TILE) * ceil(stationary / TILE)
        full, rest = divmod(moving, MOVING)
        least = min(LEAST_ISSUE_CYCLES, stationary)
        return blocks * (full * MOVING + (max(least, rest) if rest else 0))

    return min(cycles(columns, rows), cycles(rows, columns)) * (4 if fp32 else 1)


def element_cycles(elements: float) -> float:
    """Cycles of the vector, scalar or GPSIMD engine for a number of elements, 128 per cycle."""
    return max(LEAST_ISSUE_CYCLES, elements / TILE)


@dataclass
class WeightTiles:
    """A matrix of a rank, with tiles that one or several matmuls use.

    Attributes:
        loads: operations that loaded the tiles, while these are in SBUF; empty if the next matmul loads the tiles again.
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
    """Builder of a simulated program.

    Attributes:
        machine: machine of the program; its memories limit tiles.
        ops: operations so far.
        layer: layer of the operations that are added next.
        tile_bytes: bytes of a weight tile; see `TILE_BYTES`.
    """

    machine: Machine
    ops: list[QueuedOp] = field(default_factory=list)
    layer: int | None = None
    tile_bytes: float = TILE_BYTES

    def add(self, name: str, engine: str, needs: Iterable[int] = (), **fields: Any) -> int:
        """Adds an operation and returns its number."""
        self.ops.append(QueuedOp(name, engine, tuple(dict.fromkeys(needs)), layer=self.layer, **fields))
        return len(self.ops) - 1

    def elements(self, name: str, elements: float, needs: Iterable[int], engine: str = "vector") -> int:
        """Adds an element-wise operation."""
        return self.add(name, engine, needs, cycles=element_cycles(elements))

    def move(self, name: str, size: float, needs: Iterable[int] = (), queue: int = 1, **fields: Any) -> int:
        """Adds a DMA transfer of compute to or from device memory."""
        return self.add(name, DMA, needs, bytes=size, queue=queue, **fields)

    def collect(self, name: str, kind: str, size: float, needs: Iterable[int], **fields: Any) -> int:
        """Adds a collective; see `Collective` for its options."""
        held = {"holds": HBM, "holds_bytes": fields.pop("holds_bytes")} if "holds_bytes" in fields else {}
        return self.add(name, CC, needs, collective=Collective(kind, size, **fields), **held)  # type: ignore[arg-type]

    def tiles(self, weights: WeightTiles) -> int:
        """Number of tiles of a matrix."""
        wanted = max(1, min(MOST_TILES, round(weights.bytes / self.tile_bytes)))
        return max(wanted, ceil(weights.bytes / (SBUF_SHARE * self.machine.sbuf_bytes / 4)))

    def stays(self, *matrices: WeightTiles) -> bool:
        """Returns True if SBUF holds all matrices at once."""
        return sum(each.bytes for each in matrices) <= SBUF_SHARE * self.machine.sbuf_bytes

    def load(self, weights: WeightTiles, gate: Iterable[int]) -> list[int]:
        """Adds the loads of a matrix's tiles, which begin after `gate`."""
        count = self.tiles(weights)
        return [
            self.move(f"load {weights.name}", weights.bytes / count, gate, 0, holds=SBUF, holds_bytes=weights.bytes / count)
            for _ in range(count)
        ]

    def product(
        self, weights: WeightTiles, rows: int, needs: Sequence[int], gate: Iterable[int] = (), keep: bool = False
    ) -> list[int]:
        """Adds a matmul of rows with a matrix; returns the operations that produce its result.

        Args:
            needs: operations that produce the rows.
            gate: operations after which the weights may be loaded.
            keep: keep the weights in SBUF for their next matmul.
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
            if passes > 1:  # rows are read from device memory, and weights again for each block of rows
                size = ((passes - 1) * weights.bytes + BF16 * rows * weights.inner) / count
                needed.append(self.move(f"rows of {weights.name}", size, needed))
            psum = min(FP32 * rows * columns, self.machine.psum_bytes / 4)
            done = self.add(weights.name, "tensor", needed, cycles=cycles, holds=PSUM, holds_bytes=psum)
            results.append(self.elements(f"take {weights.name}", rows * columns, [done]))
            if passes > 1:
                results.append(self.move(f"spill {weights.name}", BF16 * rows * columns, results[-1:], 2))
        return results[-1:]

    def passes(self, rows: int, weights: WeightTiles) -> int:
        """Number of reads of the weights: one per block of rows that fits, with its results, into half of SBUF."""
        return ceil(BF16 * rows * (weights.inner + weights.columns) / (0.5 * self.machine.sbuf_bytes))

    def program(self, name: str, resident_bytes: float = 0.0, notes: Sequence[str] = ()) -> NeuronProgram:
        return NeuronProgram(name, tuple(self.ops), resident_bytes, tuple(dict.fromkeys(notes)))
