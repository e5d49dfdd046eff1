"""Streaming parser of tool calls: splits a model's text into content, called functions and their arguments."""

from typing import NamedTuple

from tilewright.runtime.output import beginning_of_stop
from tilewright.server.tools import ToolUse

PYTHON_TAG = "<|python_tag|>"
"""Tag with which Llama 3 may begin a call."""


class Content(NamedTuple):
    """Text outside tool calls."""

    text: str


class Called(NamedTuple):
    """Start of a tool call."""

    name: str


class Arguments(NamedTuple):
    """Next piece of a call's arguments, which are JSON when joined."""

    text: str


Part = Content | Called | Arguments


class CallParser:
    """Splits a response's text into content and tool calls. The joined result does not depend on how the text is chunked.

    If the response may have only one call, text after the call is dropped.

    Attributes:
        calls: number of calls so far.
        text: unparsed text.
        in_call: the unparsed text begins inside a call.
        sent: number of characters of the call's arguments returned so far; -1 before the function name.
        has_content: some text was not part of a call.
        done: further text is dropped.
    """

    def __init__(self, use: ToolUse):
        self.form = use.form
        self.several = use.several
        self.calls = 0
        self.schemas = use.schemas
        self.text = ""
        self.in_call = False
        self.sent = -1
        self.done = False
        self.has_content = False

    def push(self, text: str, last: bool = False) -> list[Part]:
        """Parses the next text and returns its parts. `last`: the text ends the response."""
        self.text += text
        parts: list[Part] = []
        while not self.done and self.text and (self.call(parts, last) if self.in_call else self.content(parts, last)):
            continue
        return parts

    def content(self, parts: list[Part], last: bool) -> bool:
        """Parses content up to the next call. Returns True if there is more to parse."""
        begin = self.form.begin
        if not begin:
            return self.whole_answer(parts, last)
        start = self.text.find(begin)
        withheld = 0 if last or start >= 0 else beginning_of_stop(self.text, (begin,))
        end = start if start >= 0 else len(self.text) - withheld
        # Whitespace before a call is dropped.
        content = self.text[:end] if last and start < 0 and not self.calls else self.text[:end].rstrip()
        if content:
            parts.append(Content(content))
        self.text = self.text[start + len(begin) :] if start >= 0 else self.text[len(content) :]
        self.in_call = start >= 0
        return start >= 0

    def whole_answer(self, parts: list[Part], last: bool) -> bool:
        """Parses a format without tags: a text that does not begin with a call is content."""
        bare = self.text.lstrip().removeprefix(PYTHON_TAG).lstrip()
        if bare.startswith("{") and not self.has_content:
            self.text = bare
            self.in_call = True
            return True
        if not last and not self.has_content and PYTHON_TAG.startswith(bare):
            return False
        self.has_content = True
        parts.append(Content(self.text))
        self.text = ""
        return False

    def call(self, parts: list[Part], last: bool) -> bool:
        """Parses the call at the start of the text. Returns True if there is more to parse."""
        name, arguments, end = self.form.read(self.text, self.schemas)
        if name is None:
            if end is None and not last:
                return False
            parts.append(Content(f"{self.form.begin}{self.text[:end]}"))
            self.text = "" if end is None else self.text[end:]
            self.in_call = False
            self.has_content = True
            return bool(self.text)
        if self.sent < 0:
            parts.append(Called(name))
            self.calls = self.calls + 1
            self.sent = 0
        if len(arguments) > self.sent:
            parts.append(Arguments(arguments[self.sent :]))
            self.sent = len(arguments)
        rest = "" if end is None else self.text[end:].lstrip()
        if end is None or (not last and len(rest) < len(self.form.end) and self.form.end.startswith(rest)):
            return False
        self.text = rest.removeprefix(self.form.end)
        self.in_call = False
        self.sent = -1
        self.done = not self.several
        return True
