"""Content and tool calls of a chat choice, from its streamed text."""

import secrets
from dataclasses import dataclass, field

from tilewright.server.answers import ChatMessage, Delta, FunctionCall, ToolCall, ToolCallDelta
from tilewright.server.tool_calls import Called, CallParser, Content
from tilewright.server.tools import ToolUse


@dataclass
class TextDelta:
    """Content and tool call deltas that a text adds to a message; `content` is None if the text adds none."""

    content: str | None = None
    calls: list[ToolCallDelta] = field(default_factory=list)

    def apply_to(self, delta: Delta) -> None:
        """Sets the non-empty fields of a chunk's delta."""
        if self.content is not None:
            delta.content = self.content
        if self.calls:
            delta.tool_calls = self.calls

    def message(self) -> ChatMessage:
        """Merges the deltas of a whole choice into a message."""
        calls: list[ToolCall] = []
        for delta in self.calls:
            if delta.id is not None:
                calls.append(ToolCall(id=delta.id, type="function", function=delta.function))
            else:
                calls[-1].function.arguments += delta.function.arguments
        message = ChatMessage(role="assistant", content=self.content if self.content or not calls else None, refusal=None)
        if calls:
            message.tool_calls = calls
        return message


class ChoiceText:
    """Splits a choice's streamed text into content and tool calls."""

    def __init__(self, tools: ToolUse | None):
        self.parser = None if tools is None else CallParser(tools)

    @property
    def calls(self) -> int:
        """Number of tool calls so far."""
        return 0 if self.parser is None else self.parser.calls

    def push(self, text: str, last: bool) -> TextDelta:
        """Adds text and returns its deltas. `last`: the text ends the choice."""
        if self.parser is None:
            return TextDelta(text)
        delta = TextDelta()
        index = self.parser.calls - 1
        for part in self.parser.push(text, last):
            if isinstance(part, Content):
                delta.content = (delta.content or "") + part.text
            elif isinstance(part, Called):
                index += 1
                function = FunctionCall(name=part.name, arguments="")
                delta.calls.append(
                    ToolCallDelta(index=index, id=f"call_{secrets.token_hex(12)}", type="function", function=function)
                )
            elif delta.calls:  # one entry per call and chunk, because some clients ignore a second one
                delta.calls[-1].function.arguments += part.text
            else:
                delta.calls.append(ToolCallDelta(index=index, function=FunctionCall(arguments=part.text)))
        return delta
