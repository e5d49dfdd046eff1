"""Finite table of the shapes that generation runs in.

A call has three sizes, each from a short list: rows of the batch, positions of the caches, and tokens of a prefill chunk.
    Prompts,
lengths and sampling options are data. Nothing else about a request reaches the compiler.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product, starmap


@dataclass(frozen=True)
class Shape:
    """Shape of a batch: its rows, and the positions of its caches."""

    batch: int
    capacity: int


@dataclass(frozen=True)
class ShapeTable:
    """Declared shapes.

    Attributes:
        batches: numbers of rows; more prompts than the largest run as several batches.
        capacities: numbers of cache positions.
        chunks: lengths of a prefill chunk.
        widths: block widths for choosers of rounds. A drafter adds its own block size as the widest; plain decoding has width
            1.
    """

    batches: tuple[int, ...] = (1, 2, 4, 8)
    capacities: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
    chunks: tuple[int, ...] = (16, 64, 256)
    widths: tuple[int, ...] = (2, 4, 8, 16)

    def __post_init__(self) -> None:
        for name in ("batches", "capacities", "chunks"):
            values = getattr(self, name)
            if not values or sorted(set(values)) != list(values) or values[0] < 1:
                raise ValueError(f"expected {name} that are increasing positive numbers, found {values}")
        if sorted(set(self.widths)) != list(self.widths) or min(self.widths, default=2) < 2:
            raise ValueError(f"expected widths that are increasing numbers from 2 on, found {self.widths}")
        if wrong := [capacity for capacity in self.capacities if capacity % self.chunks[-1]]:
            raise ValueError(f"expected capacities that are multiples of the largest chunk {self.chunks[-1]}, found {wrong[0]}")

    def reaching(self, positions: int) -> "ShapeTable":
        """Returns the table with its largest capacity doubled until it holds that many positions."""
        capacities = list(self.capacities)
        while capacities[-1] < positions:
            capacities.append(2 * capacities[-1])
        return replace(self, capacities=tuple(capacities))

    def shape(self, rows: int, positions: int) -> Shape:
        """Returns the smallest declared shape that holds `rows` rows of `positions` positions.

        Raises:
            ValueError: no declared shape is large enough.
        """
        batch = next((b for b in self.batches if b >= rows), None)
        capacity = next((c for c in self.capacities if c >= positions), None)
        if batch is None or capacity is None:
            largest = f"{self.batches[-1]} rows of {self.capacities[-1]} positions"
            raise ValueError(f"expected at most {largest}, as declared, found {rows} rows of {positions} positions")
        return Shape(batch, capacity)

    def prefill_plan(self, tokens: int) -> Iterator[tuple[int, int]]:
        """Covers `tokens` tokens with chunks: pairs of (first position, chunk length).

        A chunk is at most half padding, except for the smallest chunk.
        """
        return prefill_plan(tokens, self.chunks)

    @property
    def together(self) -> tuple[int, int]:
        """Rows and chunk length of the program that prefills several short prompts, at most the tokens of the longest chunk.

        The number of rows is 1 if there is no such program.
        """
        size = self.chunks[-2:][0]
        return min(self.batches[-1], self.chunks[-1] // size), size

    def needed(self, positions: int) -> tuple[int, ...]:
        """Returns the capacities that requests of up to `positions` positions may run in."""
        return tuple(size for n, size in enumerate(self.capacities) if n == 0 or self.capacities[n - 1] < positions)

    def shapes(self, positions: int) -> Iterator[Shape]:
        """Returns all shapes that requests of up to `positions` positions may run in."""
        return starmap(Shape, product(self.batches, self.needed(positions)))


def prefill_plan(tokens: int, chunks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Covers `tokens` tokens with chunks of some lengths, in ascending order; see `ShapeTable.prefill_plan`."""
    start = 0
    while start < tokens:
        fitting = [chunk for chunk in chunks if chunk <= 2 * (tokens - start)]
        chunk = fitting[-1] if fitting else chunks[0]
        yield start, chunk
        start += chunk
