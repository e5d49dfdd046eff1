"""How an engine is set up."""

from dataclasses import dataclass
from typing import Literal

from tilewright.compiled.ledger import GUARD_MODES
from tilewright.decode.cache import PAGE_MULTIPLE
from tilewright.decode.shapes import ShapeTable

Guard = Literal["off", "warn", "fail"]

WIDTHS = (4, 16)
"""Of blocks, where these are chosen round by round: fewer than `generate` has, for all programs are compiled before serving."""


@dataclass(frozen=True)
class EngineOptions:
    """What an engine may use.

    Attributes:
        table: the declared shapes: its batches are the numbers of rows that rounds run with, the largest of them is the number
            of slots; its capacities are the positions that rounds look at, the largest of them bounds a request. None for up to
            8 slots of the model's whole context.
        page_size: positions of a page, a multiple of 16.
        pages: in the pool; None for as many as all slots can fill.
        queue_requests, queue_tokens: how many requests, and how many of their prompts' tokens, may wait.
        prefix_cache: keep full pages for later requests that begin alike.
        guard: what a compile does once the engine is ready.
        dispatch_s: about how long a dispatch of rounds takes: what is shown, admitted or cancelled waits as long.
    """

    table: ShapeTable | None = None
    page_size: int = 64
    pages: int | None = None
    queue_requests: int = 256
    queue_tokens: int = 262_144
    prefix_cache: bool = True
    guard: Guard = "fail"
    dispatch_s: float = 0.03

    def __post_init__(self) -> None:
        for name in ("pages", "queue_requests", "queue_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"expected {name} of at least 1, found {value}")
        if self.page_size < 1 or self.page_size % PAGE_MULTIPLE:
            raise ValueError(f"expected a page size that is a multiple of {PAGE_MULTIPLE}, found {self.page_size}")
        if self.guard not in GUARD_MODES:
            raise ValueError(f"expected the guard to be one of {', '.join(GUARD_MODES)}, found {self.guard!r}")
        if not self.dispatch_s > 0:
            raise ValueError(f"expected a dispatch of more than 0 seconds, found {self.dispatch_s}")

    def shapes(self, context: int) -> ShapeTable:
        """The table, for a model of this context; capacities are multiples of a page.

        Raises:
            ValueError: a capacity of the given table is no multiple of a page.
        """
        if self.table is None:
            chunks = ShapeTable().chunks
            step = max(chunks[-1], self.page_size)
            return ShapeTable(capacities=(-(-context // step) * step,), widths=WIDTHS)
        wrong = [capacity for capacity in self.table.capacities if capacity % self.page_size]
        if wrong:
            raise ValueError(f"expected capacities that are multiples of the page size {self.page_size}, found {wrong[0]}")
        return self.table
