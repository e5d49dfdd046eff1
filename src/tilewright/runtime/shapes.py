"""The finite table of shapes that generation runs in.

A call is described by three things, each from a short list: rows in the batch, positions in the caches, and tokens in a prefill
chunk. Prompts, lengths and how a request samples are data; nothing else about a request reaches the compiler.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product, starmap


@dataclass(frozen=True)
class Shape:
    """The shape of one batch: its rows, and the positions in its caches."""

    batch: int
    capacity: int


@dataclass(frozen=True)
class ShapeTable:
    """The declared shapes.

    Attributes:
        batches: numbers of rows; more prompts than the largest run as several batches.
        capacities: numbers of cache positions.
        chunks: lengths of a prefill chunk.
        widths: of blocks, where these are chosen round by round; a drafter adds its own block size, which is its widest, and
            plain decoding has a width of 1.
    """

    batches: tuple[int, ...] = (1, 2, 4, 8)
    capacities: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
    chunks: tuple[int, ...] = (16, 64, 256)
    widths: tuple[int, ...] = (2, 4, 8, 16)

    def __post_init__(self) -> None:
        for name in ("batches", "capacities", "chunks"):
            values = getattr(self, name)
            if not values or sorted(set(values)) != list(values) or values[0] < 1:
                raise ValueError(f"{name} must be increasing positive numbers, found {values}")
        if sorted(set(self.widths)) != list(self.widths) or min(self.widths, default=2) < 2:
            raise ValueError(f"widths must be increasing numbers from 2 on, found {self.widths}")
        if any(capacity % self.chunks[-1] for capacity in self.capacities):
            raise ValueError(f"every capacity must be a multiple of the largest chunk, {self.chunks[-1]}")

    def reaching(self, positions: int) -> "ShapeTable":
        """The table whose largest capacity is doubled until it holds so many positions."""
        capacities = list(self.capacities)
        while capacities[-1] < positions:
            capacities.append(2 * capacities[-1])
        return replace(self, capacities=tuple(capacities))

    def shape(self, rows: int, positions: int) -> Shape:
        """The smallest declared shape that holds `rows` rows of `positions` positions.

        Raises:
            ValueError: none does.
        """
        batch = next((b for b in self.batches if b >= rows), None)
        capacity = next((c for c in self.capacities if c >= positions), None)
        if batch is None or capacity is None:
            largest = f"{self.batches[-1]} rows of {self.capacities[-1]} positions"
            raise ValueError(f"no declared shape holds {rows} rows of {positions} positions; the largest has {largest}")
        return Shape(batch, capacity)

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

    @property
    def together(self) -> tuple[int, int]:
        """Rows and chunk length of the program that prefills several short prompts: no more tokens than in the longest chunk.

        A single row where there is no such program.
        """
        size = self.chunks[-2:][0]
        return min(self.batches[-1], self.chunks[-1] // size), size

    def needed(self, positions: int) -> tuple[int, ...]:
        """The capacities that requests of up to `positions` positions may run in."""
        return tuple(size for n, size in enumerate(self.capacities) if n == 0 or self.capacities[n - 1] < positions)

    def shapes(self, positions: int) -> Iterator[Shape]:
        """All shapes that requests of up to `positions` positions may run in."""
        return starmap(Shape, product(self.batches, self.needed(positions)))
