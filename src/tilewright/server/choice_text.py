"""The text of a chat's choice as its message has it: content, and calls of tools where it may have some."""

import secrets
from dataclasses import dataclass, field

from tilewright.server.answers import AnswerMessage, CallPart, Delta, ToolCall, ToolCallDelta
from tilewright.server.tool_calls import Called, CallParser, Content
from tilewright.server.tools import ToolUse


@dataclass
class Added:
    """A text's addition to a message; `content` is None where that is no content."""

    content: str | None = None
    calls: list[ToolCallDelta] = field(default_factory=list)

    def put_into(self, delta: Delta) -> None:
        """Puts it into a chunk, which shows the fields that were set."""
        if self.content is not None:
            delta.content = self.content
        if self.calls:
            delta.tool_calls = self.calls

    def message(self) -> AnswerMessage:
        """All that a choice said, as a message."""
        whole: list[ToolCall] = []
        for delta in self.calls:
            if delta.id is not None:
                whole.append(ToolCall(id=delta.id, type="function", function=delta.function))
            else:
                whole[-1].function.arguments += delta.function.arguments
        message = AnswerMessage(role="assistant", content=self.content if self.content or not whole else None, refusal=None)
        if whole:
            message.tool_calls = whole
        return message


class ChoiceText:
    """Reads a choice's text as it comes.

    Attributes:
        calls: how many it made so far.
    """

    def __init__(self, tools: ToolUse | None):
        self.parser = None if tools is None else CallParser(tools)

    @property
    def calls(self) -> int:
        return 0 if self.parser is None else self.parser.calls

    def push(self, text: str, last: bool) -> Added:
        """Takes the next text, the `last` one or not."""
        if self.parser is None:
            return Added(text)
        added = Added()
        index = self.parser.calls - 1
        for part in self.parser.push(text, last):
            if isinstance(part, Content):
                added.content = (added.content or "") + part.text
            elif isinstance(part, Called):
                index += 1
                function = CallPart(name=part.name, arguments="")
                added.calls.append(
                    ToolCallDelta(index=index, id=f"call_{secrets.token_hex(12)}", type="function", function=function)
                )
            elif added.calls:  # one entry of a chunk for each call: some clients look at no second one
                added.calls[-1].function.arguments += part.text
            else:
                added.calls.append(ToolCallDelta(index=index, function=CallPart(arguments=part.text)))
        return added
