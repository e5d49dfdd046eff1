"""How an engine is set up."""

from dataclasses import dataclass, field
from typing import Literal

from tilewright.compiled.ledger import GUARD_MODES
from tilewright.decode.cache import PAGE_MULTIPLE
from tilewright.decode.diffusion.options import MODES, Denoising, Mode
from tilewright.decode.diffusion.programs import DiffusionTable
from tilewright.decode.shapes import ShapeTable

Guard = Literal["off", "warn", "fail"]

WIDTHS = (4, 16)
"""Of blocks, where these are chosen round by round: fewer than `generate` has, for all programs are compiled before serving."""


@dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """What every engine is told.

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
    """What an engine may use.

    Attributes:
        table: the declared shapes: its batches are the numbers of rows that rounds run with, the largest of them is the number
            of slots; its capacities are the positions that rounds look at, the largest of them bounds a request. None for up to
            8 slots of the model's whole context.
        page_size: positions of a page, a multiple of 16.
        pages: in the pool; None for as many as all slots can fill.
        prefix_cache: keep full pages for later requests that begin alike.
    """

    table: ShapeTable | None = None
    page_size: int = 64
    pages: int | None = None
    prefix_cache: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pages is not None and self.pages < 1:
            raise ValueError(f"expected pages of at least 1, found {self.pages}")
        if self.page_size < 1 or self.page_size % PAGE_MULTIPLE:
            raise ValueError(f"expected a page size that is a multiple of {PAGE_MULTIPLE}, found {self.page_size}")

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


ROWS, POSITIONS, RESPONSES, BLOCKS = (1, 4), (256, 1024, 4096), (128, 512, 1024), (32,)
"""Of the table of a diffusion language model, as far as its context goes: fewer than `generate` has, for all programs are
compiled before serving."""


DENOISING = Denoising(block_length=32)


@dataclass(frozen=True)
class DiffusionEngineOptions(ServiceOptions):
    """What an engine of a diffusion language model may use.

    Attributes:
        table: the declared shapes: the largest of its batches is the number of slots. None for 4 slots of the model's context,
            and blocks of up to 32 tokens.
        modes: those that requests may ask for; fewer of them make smaller programs.
        defaults: what a request asks for that says nothing else.
    """

    table: DiffusionTable | None = None
    modes: tuple[Mode, ...] = MODES
    defaults: Denoising = DENOISING
    dispatch_s: float = field(default=0.1, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.modes or set(self.modes) - set(MODES):
            raise ValueError(f"expected modes among {', '.join(MODES)}, found {', '.join(self.modes) or 'none'}")
        if self.defaults.mode not in self.modes:
            raise ValueError(f"expected a default mode among {', '.join(self.modes)}, found {self.defaults.mode}")

    def shapes(self, context: int) -> DiffusionTable:
        """The table, for a model of this context."""
        if self.table is not None:
            return self.table
        most = min(context, POSITIONS[-1])
        positions = (*(size for size in POSITIONS if size < most), most)
        responses = tuple(sorted({min(size, most - 1) for size in RESPONSES}))
        return DiffusionTable(ROWS, positions, responses, tuple(min(size, responses[-1]) for size in BLOCKS))
