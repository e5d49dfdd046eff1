"""Terminal display of a response during denoising, and its figures in one line."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.text import Text

MASK = "▒"
MASKED = "dim"
FRESH = "not dim bold black on green"
Piece = tuple[str | None, bool]
"""Text that a token adds (None for a mask), and whether it is new since the last frame."""


def unmasking_text(prompt: str, pieces: Sequence[Piece]) -> Text:
    """Returns the prompt and the response so far; each mask is one glyph."""
    text = Text(prompt, style="dim")
    for piece, fresh in pieces:
        text.append(MASK if piece is None else piece, MASKED if piece is None else FRESH if fresh else "not dim")
    return text


def frame(console: Console, prompt: str, pieces: Sequence[Piece], status: str) -> RenderableType:
    """Returns the part of a response that fits the terminal, with new tokens in view, and a status line below."""
    lines = list(unmasking_text(prompt, pieces).wrap(console, console.width))
    room = max(console.height - 3, 1)
    newest = max((n for n, line in enumerate(lines) if any(span.style == FRESH for span in line.spans)), default=0)
    first = min(max(newest - room // 2, 0), max(len(lines) - room, 0))
    return Group(*lines[first : first + room], Text(status, style="dim", no_wrap=True, overflow="ellipsis"))


def figures_line(figures: Mapping[str, Any]) -> str:
    """Returns a line with the figures of a denoising (docs/metrics.md)."""
    parts = [f"{figures['tokens']:,} tokens in {figures['seconds']:.2f} s"] if figures["seconds"] else []
    if figures["seconds"]:
        parts.append(f"{figures['tokens_per_s']:,.0f} tokens/s")
    parts.append(f"{figures['steps']:,} steps")
    if figures["tokens_per_forward"] is not None:
        parts.append(f"{figures['tokens_per_forward']:.2f} tokens per forward")
    if figures["salient_share"] is not None:
        parts.append(f"salient {figures['salient_share']:.0%}")
    return " · ".join(parts)
