"""The finite table of shapes that generation runs in.

A call is described by four things, each from a short list: rows in the batch, positions in the caches, tokens in a prefill
chunk, and what sampling must be able to do. Prompts and lengths are data; nothing else about a request reaches the compiler.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product, starmap

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
        widths: of blocks, where these are chosen round by round; a drafter adds its own block size, which is its widest, and
            plain decoding has a width of 1.
        device_loop: a dispatch runs many steps, in a loop on the device. Without it, it is a single step, whose program has no
            loop that depends on data: some compilers take none.
    """

    batches: tuple[int, ...] = (1, 2, 4, 8)
    capacities: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
    chunks: tuple[int, ...] = (16, 64, 256)
    widths: tuple[int, ...] = (2, 4, 8, 16)
    device_loop: bool = True

    def __post_init__(self) -> None:
        for name in ("batches", "capacities", "chunks"):
            values = getattr(self, name)
            if not values or sorted(set(values)) != list(values) or values[0] < 1:
                raise ValueError(f"{name} must be increasing positive numbers, found {values}")
        if sorted(set(self.widths)) != list(self.widths) or min(self.widths, default=2) < 2:
            raise ValueError(f"widths must be increasing numbers from 2 on, found {self.widths}")
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
        return Shape(batch, capacity, self.warp(warp))

    def warp(self, asked: Warp) -> Warp:
        """The kind of sampling that programs are compiled for: where loops may depend on data, one serves all but greedy rows.

        Of a block it draws no more than is settled, where the others draw all of it.
        """
        return "mixed" if self.device_loop and asked not in ("greedy", "scored") else asked

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

    def programs(self) -> list[tuple[str, int]]:
        """The programs that serve a shape, as pairs of (name, chunk length).

        They are: allocation, one prefill for each chunk length, and the decode loop or the single step, of which there is one
        for each choice where rounds are chosen as decoding goes (`team.Team.choices`).
        """
        return [("allocate", 0), *(("prefill", chunk) for chunk in self.chunks), ("decode" if self.device_loop else "step", 0)]

    def shapes(self, warps: Iterable[Warp], positions: int) -> Iterator[Shape]:
        """All shapes that requests of up to `positions` positions may run in, with these kinds of sampling."""
        needed = [capacity for n, capacity in enumerate(self.capacities) if n == 0 or self.capacities[n - 1] < positions]
        return starmap(Shape, product(self.batches, needed, dict.fromkeys(map(self.warp, warps))))
