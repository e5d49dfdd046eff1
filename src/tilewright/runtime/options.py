"""How an engine is set up."""

import math
from dataclasses import dataclass, field, replace
from typing import Literal

from tilewright.compiled.ledger import GUARD_MODES
from tilewright.runtime.cache import PAGE_MULTIPLE
from tilewright.runtime.shapes import ShapeTable

Guard = Literal["off", "warn", "fail"]

WIDTHS = (4, 16)
"""Of blocks, where these are chosen round by round: fewer than `generate` has, for all programs are compiled before serving."""


@dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """Options of every engine.

    Attributes:
        queue_requests, queue_tokens: how many requests, and how many of their prompts' tokens, may wait.
        guard: what a compile does once the engine is ready.
        dispatch_s: about how long a dispatch takes: what is shown, admitted or cancelled waits as long.
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
            raise ValueError(f"expected a dispatch of more than 0 seconds, found {self.dispatch_s}")


@dataclass(frozen=True)
class EngineOptions(ServiceOptions):
    """Options of an engine: shapes, pages and memory.

    Attributes:
        table: the declared shapes: its batches are the numbers of rows that rounds run with, the largest of them is the number
            of slots; its capacities are the positions that rounds look at, the largest of them bounds a request. None for up to
            8 slots of the context.
        page_size: positions of a page, a multiple of 16.
        pages: in the pool; None for as many as all slots can fill, or as `memory_fraction` lets.
        prefix_cache: keep full pages for later requests that begin alike; None for wherever a drafter keeps no window of
            its last positions, which is not in pages, and layers with states have snapshots of them.
        state_snapshots: of the states of layers with linear attention, for the prefix cache; None for as many as there are
            slots, and 4 at least. A request can go on behind a prefix where there is one.
        slots: how many requests run at once; None for the largest batch of the table.
        context: the most positions of a request; None for the model's context. Fewer if the pages hold fewer.
        memory_fraction: the share of the memory that is free, once the weights are loaded, that the pages and what programs
            compute with may take; None for no bound.
        constraints: whether requests may have one, for which there are further programs.
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
        """Of blocks, where these are chosen round by round."""
        return WIDTHS if self.table is None else self.table.widths

    def shapes(self, context: int) -> ShapeTable:
        """The table, for a context of so many positions; capacities are multiples of a page.

        Raises:
            ValueError: a capacity of the given table is no multiple of a page.
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
    """The numbers of rows that programs are compiled for.

    Args:
        slots: the largest; None for the declared ones as they are.
        declared: those that are kept as far as they are smaller; from the largest of them on each is `factor` times the one
            before, so that no request pays for more than so many times the rows that are running.
    """
    if slots is None:
        return declared
    rows = [each for each in declared if each < slots]
    while rows and factor * rows[-1] < slots:
        rows.append(factor * rows[-1])
    return (*rows, slots)
