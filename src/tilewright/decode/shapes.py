"""The finite table of shapes that generation runs in.

A call is described by four things, each from a short list: rows in the batch, positions in the caches, tokens in a prefill
chunk, and what sampling must be able to do. Prompts and lengths are data; nothing else about a request reaches the compiler.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from tilewright.decode.sampling import Warp


@dataclass(frozen=True)
class Shape:
    """The shape of one batch: its rows, the positions in its caches, and the kind of its sampling."""

    batch: int
    capacity: int
    warp: Warp


@dataclass(frozen=True)
class ShapeTable:
    """The declared shapes.

    Attributes:
        batches: numbers of rows; more prompts than the largest run as several batches.
        capacities: numbers of cache positions.
        chunks: lengths of a prefill chunk.
    """

    batches: tuple[int, ...] = (1, 2, 4, 8)
    capacities: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
    chunks: tuple[int, ...] = (16, 64, 256)

    def __post_init__(self) -> None:
        for name, values in vars(self).items():
            if not values or sorted(set(values)) != list(values) or values[0] < 1:
                raise ValueError(f"{name} must be increasing positive numbers, found {values}")
        if any(capacity % self.chunks[-1] for capacity in self.capacities):
            raise ValueError(f"every capacity must be a multiple of the largest chunk, {self.chunks[-1]}")

    def shape(self, rows: int, positions: int, warp: Warp) -> Shape:
        """The smallest declared shape that holds `rows` rows of `positions` positions.

        Raises:
            ValueError: none does.
        """
        batch = next((b for b in self.batches if b >= rows), None)
        capacity = next((c for c in self.capacities if c >= positions), None)
        if batch is None or capacity is None:
            largest = f"{self.batches[-1]} rows of {self.capacities[-1]} positions"
            raise ValueError(f"no declared shape holds {rows} rows of {positions} positions; the largest has {largest}")
        return Shape(batch, capacity, warp)

    def prefill_plan(self, tokens: int) -> Iterator[tuple[int, int]]:
        """Covers `tokens` tokens with chunks: pairs of (first position, chunk length).

        A chunk is at most half padding, except that the smallest one takes whatever is left.
        """
        start = 0
        while start < tokens:
            fitting = [c for c in self.chunks if c <= 2 * (tokens - start)]
            chunk = fitting[-1] if fitting else self.chunks[0]
            yield start, chunk
            start += chunk

    def programs(self, shape: Shape) -> int:
        """How many programs serve a shape: allocation, one prefill for each chunk length, and the decode loop."""
        return 2 + len(self.chunks)
