"""Options of engines."""

import math
from dataclasses import dataclass, field, replace
from typing import Literal

from tilewright.compiled.ledger import GUARD_MODES
from tilewright.runtime.cache import PAGE_MULTIPLE
from tilewright.runtime.shapes import ShapeTable

Guard = Literal["off", "warn", "fail"]

WIDTHS = (4, 16)
"""Block widths for choosers of rounds: fewer than `generate` has, since serving compiles all programs beforehand."""


@dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """Options of every engine.

    Attributes:
        queue_requests, queue_tokens: limits of the queue: requests, and tokens of their prompts.
        guard: reaction to a compilation once the engine is ready.
        dispatch_s: target duration of a dispatch, in seconds. Outputs, admissions and cancellations wait for its end.
    """

    queue_requests: int = 256
    queue_tokens: int = 262_144
    guard: Guard = "fail"
    dispatch_s: float = 0.03

    def __post_init__(self) -> None:
        for name in ("queue_requests", "queue_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} of at least 1, found {getattr(self, name)}")
        if self.guard not in GUARD_MODES:
            raise ValueError(f"expected the guard to be one of {', '.join(GUARD_MODES)}, found {self.guard!r}")
        if not self.dispatch_s > 0:
            raise ValueError(f"expected dispatch_s of more than 0 seconds, found {self.dispatch_s}")


@dataclass(frozen=True)
class EngineOptions(ServiceOptions):
    """Options of an engine: shapes, pages and memory.

    Attributes:
        table: declared shapes. Its batches are the numbers of rows of the rounds; the largest is the number of slots. Its
            capacities are the numbers of positions that rounds attend to; the largest bounds a request. None for up to 8 slots
            of the context.
        page_size: positions of a page, a multiple of 16.
        pages: size of the pool; None for as many pages as all slots can fill, or as `memory_fraction` allows.
        prefix_cache: keeps full pages for later requests with the same prefix. None enables the cache unless a drafter keeps a
            window of its last positions, which is not in pages, or layers have states without snapshots.
        state_snapshots: number of snapshots of linear-attention states, for the prefix cache; None for one a slot, and at
            least 4. A request can only continue a cached prefix that has a snapshot.
        slots: number of requests that run at once; None for the largest batch of the table.
        context: the most positions of a request; None for the model's context. A small page pool lowers it.
        memory_fraction: share of the memory that is free after loading the weights which pages and temporary buffers may take;
            None for no bound.
        constraints: compiles the programs for requests with a constraint.
    """

    table: ShapeTable | None = None
    page_size: int = 64
    pages: int | None = None
    prefix_cache: bool | None = None
    slots: int | None = field(default=None, kw_only=True)
    context: int | None = field(default=None, kw_only=True)
    memory_fraction: float | None = field(default=None, kw_only=True)
    constraints: bool = field(default=False, kw_only=True)
    state_snapshots: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("pages", "slots", "context"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"expected {name} of at least 1, found {value}")
        if self.state_snapshots is not None and self.state_snapshots < 0:
            raise ValueError(f"expected state_snapshots of at least 0, found {self.state_snapshots}")
        if self.memory_fraction is not None and not 0 < self.memory_fraction <= 1:
            raise ValueError(f"expected a memory fraction above 0 and at most 1, found {self.memory_fraction:g}")
        if self.page_size < 1 or self.page_size % PAGE_MULTIPLE:
            raise ValueError(f"expected a page size that is a multiple of {PAGE_MULTIPLE}, found {self.page_size}")

    @property
    def widths(self) -> tuple[int, ...]:
        """Block widths for choosers of rounds."""
        return WIDTHS if self.table is None else self.table.widths

    def shapes(self, context: int) -> ShapeTable:
        """Returns the table for a context of that many positions; capacities are multiples of a page.

        Raises:
            ValueError: a capacity of the given table is not a multiple of the page size.
        """
        if self.table is None:
            chunks = ShapeTable().chunks
            step = math.lcm(chunks[-1], self.page_size)
            table = ShapeTable(capacities=(-(-context // step) * step,), widths=WIDTHS)
            return replace(table, batches=batches_for(self.slots, table.batches))
        wrong = [capacity for capacity in self.table.capacities if capacity % self.page_size]
        if wrong:
            raise ValueError(f"expected capacities that are multiples of the page size {self.page_size}, found {wrong[0]}")
        return replace(self.table, batches=batches_for(self.slots, self.table.batches))


def batches_for(slots: int | None, declared: tuple[int, ...], factor: int = 2) -> tuple[int, ...]:
    """Returns the numbers of rows that programs are compiled for.

    Args:
        slots: the largest number; None for the declared numbers unchanged.
        declared: smaller numbers are kept. Behind the largest kept number, each is `factor` times the one before, so that no
            request pays for more than `factor` times the running rows.
    """
    if slots is None:
        return declared
    rows = [each for each in declared if each < slots]
    while rows and factor * rows[-1] < slots:
        rows.append(factor * rows[-1])
    return (*rows, slots)
