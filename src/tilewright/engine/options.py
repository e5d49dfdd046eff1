"""How an engine is set up."""

from dataclasses import dataclass
from typing import Literal

from tilewright.decode.shapes import ShapeTable

Guard = Literal["off", "warn", "fail"]


@dataclass(frozen=True)
class EngineOptions:
    """What an engine may use.

    Attributes:
        table: the declared shapes. Its largest batch is the number of slots, its batches are the numbers of rows that rounds run
            with, its largest capacity that the model has is the most positions of a request.
        page_size: positions of a page, a multiple of 16.
        pages: in the pool; None for as many as all slots can fill.
        queue_requests, queue_tokens: how many requests, and how many of their prompts' tokens, may wait.
        prefix_cache: keep full pages for later requests that begin alike.
        guard: what a compile does once the engine is ready.
        dispatch_s: how long a dispatch of rounds should take, about: what is shown, admitted or cancelled waits as long.
    """

    table: ShapeTable = ShapeTable(widths=(4, 16))
    page_size: int = 64
    pages: int | None = None
    queue_requests: int = 256
    queue_tokens: int = 262_144
    prefix_cache: bool = True
    guard: Guard = "fail"
    dispatch_s: float = 0.02

    def __post_init__(self) -> None:
        for name, least in (("pages", 1), ("queue_requests", 1), ("queue_tokens", 1), ("page_size", 16)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"expected {name} of at least {least}, found {value}")
        if self.page_size % 16:
            raise ValueError(f"expected a page size that is a multiple of 16, found {self.page_size}")
        if self.guard not in ("off", "warn", "fail"):
            raise ValueError(f"expected the guard to be off, warn or fail, found {self.guard!r}")
        if not self.dispatch_s > 0:
            raise ValueError(f"expected a dispatch of more than 0 seconds, found {self.dispatch_s}")
