"""A chat's answer as a list of blocks, texts and calls, as they come: for APIs whose answers are such lists."""

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from tilewright.server.tool_calls import Arguments, Called, CallParser, Content, Part
from tilewright.server.tools import ToolUse


@dataclass
class AnswerBlock:
    """A text, or a call.

    Attributes:
        id: of the block; random.
        name: of the function that is called; None for a text.
        text: what came so far, of a call its arguments.
    """

    name: str | None
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    text: str = ""


class Opened(NamedTuple):
    """A block begins, the last of the list."""

    block: AnswerBlock


class Grown(NamedTuple):
    """A text was added to the last block."""

    block: AnswerBlock
    text: str


class Closed(NamedTuple):
    """The last block is whole; `last` at the end of the answer."""

    block: AnswerBlock
    last: bool


Change = Opened | Grown | Closed


class AnswerBlocks:
    """Reads an answer's text as it comes.

    Attributes:
        found: the blocks so far. At the end there is at least one, which may be an empty text.
    """

    def __init__(self, tools: ToolUse | None):
        self.parser = None if tools is None else CallParser(tools)
        self.found: list[AnswerBlock] = []

    @property
    def calls(self) -> bool:
        """Whether a function was called."""
        return any(block.name is not None for block in self.found)

    def push(self, text: str, last: bool) -> Iterator[Change]:
        """Takes the next text, the `last` one or not, and gives what it changes."""
        parts: list[Part] = [Content(text)] if self.parser is None else self.parser.push(text, last)
        for part in parts:
            yield from self.changes(part)
        if last and not self.found:
            yield from self.open(None)
        if last:
            yield Closed(self.found[-1], True)

    def changes(self, part: Part) -> Iterator[Change]:
        if isinstance(part, Called):
            yield from self.open(part.name)
        elif isinstance(part, Content) and part.text and (not self.found or self.found[-1].name is not None):
            yield from self.open(None)
        if isinstance(part, Content | Arguments) and part.text:
            self.found[-1].text += part.text
            yield Grown(self.found[-1], part.text)

    def open(self, name: str | None) -> Iterator[Change]:
        if self.found:
            yield Closed(self.found[-1], False)
        self.found.append(AnswerBlock(name))
        yield Opened(self.found[-1])
