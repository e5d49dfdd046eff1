"""Calls in a model's text, found while it comes: content, the function that is called, and its arguments piece by piece."""

import json
import re
from typing import Any, NamedTuple

from tilewright.runtime.output import beginning_of_stop
from tilewright.server.tools import CallForm

OPENING = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
"""Of a call, up to its arguments, as models are told to write it."""
BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?$)|[{}\[\]]', re.DOTALL)
"""Of JSON, with strings, whole or cut off, so that those within them do not count."""
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


class Read(NamedTuple):
    """A text that begins with a call, as far as it has come.

    Attributes:
        name: None while it is not known, or where this is no call.
        arguments: as far as they have come.
        end: where the call ends, or what is none; None while it goes on.
    """

    name: str | None
    arguments: str = ""
    end: int | None = None


def object_end(text: str, start: int) -> int | None:
    """End of the JSON object that begins at a place; None if it goes on."""
    depth = 0
    for found in BRACKETS.finditer(text, start):
        depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(found[0], 0)
        if depth == 0:
            return found.end()
    return None


def read_call(text: str) -> Read:
    """Calls in a text that begins with one."""
    begin = len(text) - len(text.lstrip())
    if not text.startswith("{", begin):
        return Read(None, end=len(text) if begin < len(text) else None)
    end = object_end(text, begin)
    if (opening := OPENING.match(text)) is not None:
        return Read(json.loads(opening[1], strict=False), text[opening.end() : object_end(text, opening.end())], end)
    return Read(None) if end is None else reordered(text[begin:end], end)


def reordered(text: str, end: int) -> Read:
    """A call whose keys come in another order; else what is none."""
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError):
        return Read(None, end=end)
    name = found.get("name")
    arguments = found.get("arguments", found.get("parameters"))
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return Read(None, end=end)
    return Read(name, json.dumps(arguments, ensure_ascii=False), end)


class CallParser:
    """An answer's text as content and calls. Its parts, put together, do not depend on the pieces in which the text comes.

    Attributes:
        calls: how many began so far.
        text: what is not read yet.
        within: whether it begins with a call, of which `told` characters of arguments were given; -1 before its name was.
        told_content: whether something was no call.
        done: nothing more is read.
    """

    def __init__(self, form: CallForm, several: bool):
        """Args: `several`: without it, what comes behind the first call is dropped."""
        self.form, self.several, self.calls = form, several, 0
        self.text, self.within, self.told, self.done = "", False, -1, False
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
            self.text, self.within = bare, True
            return True
        if not last and not self.told_content and PYTHON_TAG.startswith(bare):
            return False
        self.told_content = True
        parts.append(Content(self.text))
        self.text = ""
        return False

    def call(self, parts: list[Part], last: bool) -> bool:
        """Gives what is known of the call that the text begins with. Returns whether there is more to read."""
        name, arguments, end = read_call(self.text)
        if name is None:
            if end is None and not last:
                return False
            parts.append(Content(f"{self.form.begin}{self.text[:end]}"))
            self.text, self.within, self.told_content = "" if end is None else self.text[end:], False, True
            return bool(self.text)
        if self.told < 0:
            parts.append(Called(name))
            self.calls, self.told = self.calls + 1, 0
        if len(arguments) > self.told:
            parts.append(Arguments(arguments[self.told :]))
            self.told = len(arguments)
        behind = "" if end is None else self.text[end:].lstrip()
        if end is None or (not last and len(behind) < len(self.form.end) and self.form.end.startswith(behind)):
            return False
        self.text, self.within, self.told = behind.removeprefix(self.form.end), False, -1
        self.done = not (self.several and self.form.repeats)
        return True
