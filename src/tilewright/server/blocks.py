"""Content blocks of a streamed response (texts and tool calls), for the Messages and Responses APIs."""

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from tilewright.server.tool_calls import Arguments, Called, CallParser, Content, Part
from tilewright.server.tools import ToolUse


@dataclass
class OutputBlock:
    """Text block or tool call.

    Attributes:
        name: name of the called function; None for a text block.
        id: random id.
        text: text, or arguments of the call, received so far.
    """

    name: str | None
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    text: str = ""


class BlockStart(NamedTuple):
    """Start of a block, which is the last one."""

    block: OutputBlock


class BlockDelta(NamedTuple):
    """Text added to the last block."""

    block: OutputBlock
    text: str


class BlockStop(NamedTuple):
    """End of the last block.

    Attributes:
        last: the response ends with this block.
    """

    block: OutputBlock
    last: bool


BlockEvent = BlockStart | BlockDelta | BlockStop


class OutputBlocks:
    """Splits the text of a response into blocks while it streams.

    Attributes:
        found: blocks so far. An ended response has at least one block, which may be an empty text.
    """

    def __init__(self, tools: ToolUse | None):
        self.parser = None if tools is None else CallParser(tools)
        self.found: list[OutputBlock] = []

    @property
    def calls(self) -> bool:
        """True if the response contains a tool call."""
        return any(block.name is not None for block in self.found)

    def push(self, text: str, last: bool) -> Iterator[BlockEvent]:
        """Adds text and yields the changes of blocks. `last`: the text ends the response."""
        parts: list[Part] = [Content(text)] if self.parser is None else self.parser.push(text, last)
        for part in parts:
            yield from self.changes(part)
        if last and not self.found:
            yield from self.start(None)
        if last:
            yield BlockStop(self.found[-1], True)

    def changes(self, part: Part) -> Iterator[BlockEvent]:
        if isinstance(part, Called):
            yield from self.start(part.name)
        elif isinstance(part, Content) and part.text and (not self.found or self.found[-1].name is not None):
            yield from self.start(None)
        if isinstance(part, Content | Arguments) and part.text:
            self.found[-1].text += part.text
            yield BlockDelta(self.found[-1], part.text)

    def start(self, name: str | None) -> Iterator[BlockEvent]:
        if self.found:
            yield BlockStop(self.found[-1], False)
        self.found.append(OutputBlock(name))
        yield BlockStart(self.found[-1])
