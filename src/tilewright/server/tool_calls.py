"""Calls in a model's text, found while it comes: content, the function that is called, and its arguments piece by piece."""

from typing import NamedTuple

from tilewright.runtime.output import beginning_of_stop
from tilewright.server.tools import ToolUse

PYTHON_TAG = "<|python_tag|>"
"""What Llama 3 may begin a call with."""


class Content(NamedTuple):
    """Text that is no call."""

    text: str


class Called(NamedTuple):
    """A call begins."""

    name: str


class Arguments(NamedTuple):
    """More of a call's arguments, which are JSON together."""

    text: str


Part = Content | Called | Arguments


class CallParser:
    """An answer's text as content and calls. Its parts, put together, do not depend on the pieces in which the text comes.

    Attributes:
        calls: how many began so far.
        text: what is not read yet.
        within: whether it begins with a call, of which `told` characters of arguments were given; -1 before its name was.
        told_content: whether something was no call.
        done: nothing more is read.
    """

    def __init__(self, use: ToolUse):
        """Args: `use`: where one call is wanted, what comes behind the first is dropped."""
        self.form = use.form
        self.several = use.several
        self.calls = 0
        self.schemas = use.schemas
        self.text = ""
        self.within = False
        self.told = -1
        self.done = False
        self.told_content = False

    def push(self, text: str, last: bool = False) -> list[Part]:
        """Takes the next text, the `last` one or not, and gives what it adds."""
        self.text += text
        parts: list[Part] = []
        while not self.done and self.text and (self.call(parts, last) if self.within else self.content(parts, last)):
            continue
        return parts

    def content(self, parts: list[Part], last: bool) -> bool:
        """Gives content up to the next call. Returns whether there is more to read."""
        begin = self.form.begin
        if not begin:
            return self.whole_answer(parts, last)
        at = self.text.find(begin)
        held = 0 if last or at >= 0 else beginning_of_stop(self.text, (begin,))
        until = at if at >= 0 else len(self.text) - held
        # Spaces may stand before a call, where they mean nothing.
        shown = self.text[:until] if last and at < 0 and not self.calls else self.text[:until].rstrip()
        if shown:
            parts.append(Content(shown))
        self.text = self.text[at + len(begin) :] if at >= 0 else self.text[len(shown) :]
        self.within = at >= 0
        return at >= 0

    def whole_answer(self, parts: list[Part], last: bool) -> bool:
        """Calls where one is a whole answer: a text that does not begin with a call is content."""
        bare = self.text.lstrip().removeprefix(PYTHON_TAG).lstrip()
        if bare.startswith("{") and not self.told_content:
            self.text = bare
            self.within = True
            return True
        if not last and not self.told_content and PYTHON_TAG.startswith(bare):
            return False
        self.told_content = True
        parts.append(Content(self.text))
        self.text = ""
        return False

    def call(self, parts: list[Part], last: bool) -> bool:
        """Gives what is known of the call that the text begins with. Returns whether there is more to read."""
        name, arguments, end = self.form.read(self.text, self.schemas)
        if name is None:
            if end is None and not last:
                return False
            parts.append(Content(f"{self.form.begin}{self.text[:end]}"))
            self.text = "" if end is None else self.text[end:]
            self.within = False
            self.told_content = True
            return bool(self.text)
        if self.told < 0:
            parts.append(Called(name))
            self.calls = self.calls + 1
            self.told = 0
        if len(arguments) > self.told:
            parts.append(Arguments(arguments[self.told :]))
            self.told = len(arguments)
        behind = "" if end is None else self.text[end:].lstrip()
        if end is None or (not last and len(behind) < len(self.form.end) and self.form.end.startswith(behind)):
            return False
        self.text = behind.removeprefix(self.form.end)
        self.within = False
        self.told = -1
        self.done = not self.several
        return True
