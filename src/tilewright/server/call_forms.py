"""Tool call formats of model families: streaming parsers, and grammars that force calls."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeGuard, runtime_checkable

from tilewright.grammar.grammar import Grammar, Tagged

Schemas = Mapping[str, Mapping[str, Any]]
"""Schema of the arguments of each function, by function name."""
OPENING = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
"""Matches a call up to its arguments, in the key order that prompts prescribe."""
BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?$)|[{}\[\]]', re.DOTALL)
"""Matches JSON brackets, and complete or truncated strings, so that brackets in strings are skipped."""


class ParsedCall(NamedTuple):
    """Result of parsing text that may begin with a tool call.

    Attributes:
        name: function name; None while it is unknown, and for text that is not a call.
        arguments: arguments received so far. Earlier results for the same call are a prefix.
        end: index after the call, or after text that is not a call; None while the call is incomplete.
    """

    name: str | None
    arguments: str = ""
    end: int | None = None


@runtime_checkable
class CallForm(Protocol):
    """Tool call format of a model family."""

    @property
    def begin(self) -> str:
        """Tag before a call; empty if a call is the whole response."""
        ...

    @property
    def end(self) -> str:
        """Tag after a call; empty if a call is the whole response."""
        ...

    @property
    def repeats(self) -> bool:
        """True if a response may contain several calls."""
        ...

    def read(self, text: str, schemas: Schemas) -> ParsedCall:
        """Parses the call at the start of the text after `begin`."""
        ...

    def parts(self, schema: Mapping[str, Any]) -> Iterator[Grammar]:
        """Yields grammars of the parts of a function's arguments, to find the schema that cannot be used.

        Raises:
            ValueError: the format cannot express the schema.
        """
        ...

    def grammar(self, functions: Schemas, several: bool, other: Mapping[str, Any] | None = None) -> Grammar:
        """Makes a grammar for responses that consist of calls only.

        Args:
            functions: functions that may be called.
            several: allow several calls.
            other: schema of JSON that the response may be instead.

        Raises:
            ValueError: the format cannot express a schema.
        """
        ...


@dataclass(frozen=True)
class JsonForm:
    """Calls as JSON objects with the function's name and its arguments.

    Attributes:
        begin: tag before a call.
        end: tag after a call.
        arguments: key of the arguments.
    """

    begin: str
    end: str
    arguments: str

    @property
    def repeats(self) -> bool:
        return bool(self.begin)

    def format_call(self, name: str, arguments: Any) -> str:
        """Formats a call as the model writes it."""
        body = json.dumps({"name": name, self.arguments: arguments}, ensure_ascii=False)
        return f"{self.begin}\n{body}\n{self.end}" if self.begin else body

    def read(self, text: str, schemas: Schemas) -> ParsedCall:
        begin = len(text) - len(text.lstrip())
        if not text.startswith("{", begin):
            return ParsedCall(None, end=begin if begin < len(text) else None)
        end = object_end(text, begin)
        opening = OPENING.match(text)
        if opening is not None and is_name(name := decoded(opening[1])):
            return ParsedCall(name, text[opening.end() : object_end(text, opening.end())], end)
        return ParsedCall(None) if end is None else parse_whole_call(text[begin:end], end, None if self.begin else schemas)

    def parts(self, schema: Mapping[str, Any]) -> Iterator[Grammar]:
        yield Grammar.json_schema(schema)

    def grammar(self, functions: Schemas, several: bool, other: Mapping[str, Any] | None = None) -> Grammar:
        before, after = (f"{self.begin}\n", f"\n{self.end}") if self.begin else ("", "")

        def tagged(name: str, schema: Mapping[str, Any]) -> Tagged:
            return Tagged(f'{before}{{"name": {json.dumps(name)}, "{self.arguments}": ', schema, f"}}{after}")

        return Grammar.tagged([tagged(*each) for each in functions.items()], several, other)


HERMES = JsonForm("<tool_call>", "</tool_call>", "arguments")
"""Format of Hermes, Qwen and many others."""
LLAMA3 = JsonForm("", "", "parameters")
"""Format of Llama 3."""


def object_end(text: str, start: int) -> int | None:
    """Returns the index after the JSON object at `start`; None if the object is incomplete."""
    depth = 0
    for found in BRACKETS.finditer(text, start):
        depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(found[0], 0)
        if depth == 0:
            return found.end()
    return None


def parse_whole_call(text: str, end: int, schemas: Schemas | None) -> ParsedCall:
    """Parses a complete JSON object as a call with keys in any order, arguments as text, or without arguments.

    Args:
        end: index after the object, for the result.
        schemas: functions that an object without arguments may name; None to accept any name, for formats with tags.
    """
    found = decoded(text)
    if not isinstance(found, dict):
        return ParsedCall(None, end=end)
    name = found.get("name")
    arguments = found.get("arguments", found.get("parameters"))
    if arguments is None and found.keys() <= {"name", "arguments", "parameters"} and (schemas is None or name in schemas):
        arguments = {}
    arguments = decoded(arguments) if isinstance(arguments, str) else arguments
    if not is_name(name) or not isinstance(arguments, dict):
        return ParsedCall(None, end=end)
    # ASCII, because the model may have written an unpaired surrogate, which is valid JSON but not encodable.
    return ParsedCall(name, json.dumps(arguments), end)


def decoded(text: str) -> Any:
    """Decodes JSON written by a model; None for invalid JSON."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None


def is_name(value: Any) -> TypeGuard[str]:
    """True for a non-empty text without unpaired surrogates."""
    try:
        return isinstance(value, str) and len(value.encode()) > 0
    except UnicodeEncodeError:
        return False
