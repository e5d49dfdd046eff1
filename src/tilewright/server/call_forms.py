"""Forms in which families of models write calls of functions: reading them while they come, and grammars that force them."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeGuard, runtime_checkable

from tilewright.grammar.grammar import Grammar, Tagged

Schemas = Mapping[str, Mapping[str, Any]]
"""The schema of each function's arguments, by its name."""
OPENING = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
"""Of a call, up to its arguments, as models are told to write it."""
BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?$)|[{}\[\]]', re.DOTALL)
"""Of JSON, with strings, whole or cut off, so that those within them do not count."""


class Read(NamedTuple):
    """A text that begins with a call, as far as it has come.

    Attributes:
        name: None while it is not known, or where this is no call.
        arguments: as far as they have come; of a text that goes on, what was told stays its beginning.
        end: where the call ends, or what is none; None while it goes on.
    """

    name: str | None
    arguments: str = ""
    end: int | None = None


@runtime_checkable
class CallForm(Protocol):
    """What an answer's calls look like.

    Attributes:
        begin, end: what stands around a call; nothing where a call is a whole answer.
    """

    @property
    def begin(self) -> str: ...
    @property
    def end(self) -> str: ...

    @property
    def repeats(self) -> bool:
        """True if an answer may have several calls."""
        ...

    def read(self, text: str, schemas: Schemas) -> Read:
        """The call that a text behind `begin` begins with."""
        ...

    def parts(self, schema: Mapping[str, Any]) -> Iterator[Grammar]:
        """Grammars of what a function's arguments consist of, by which it is seen whether their schema can be used.

        Raises:
            ValueError: the form has no way to write what the schema describes.
        """
        ...

    def grammar(self, functions: Schemas, several: bool, other: Mapping[str, Any] | None = None) -> Grammar:
        """Grammar of an answer that is only calls, of one of these functions or of several; raises as `parts` does.

        Args:
            other: schema of JSON that the answer may be instead.
        """
        ...


@dataclass(frozen=True)
class JsonForm:
    """A JSON object with the function's name and its arguments.

    Attributes:
        arguments: the key of the arguments.
    """

    begin: str
    end: str
    arguments: str

    @property
    def repeats(self) -> bool:
        return bool(self.begin)

    def written(self, name: str, arguments: Any) -> str:
        """A call as the model writes it."""
        body = json.dumps({"name": name, self.arguments: arguments}, ensure_ascii=False)
        return f"{self.begin}\n{body}\n{self.end}" if self.begin else body

    def read(self, text: str, schemas: Schemas) -> Read:
        begin = len(text) - len(text.lstrip())
        if not text.startswith("{", begin):
            return Read(None, end=begin if begin < len(text) else None)
        end = object_end(text, begin)
        opening = OPENING.match(text)
        if opening is not None and is_name(name := decoded(opening[1])):
            return Read(name, text[opening.end() : object_end(text, opening.end())], end)
        return Read(None) if end is None else reordered(text[begin:end], end, None if self.begin else schemas)

    def parts(self, schema: Mapping[str, Any]) -> Iterator[Grammar]:
        yield Grammar.json_schema(schema)

    def grammar(self, functions: Schemas, several: bool, other: Mapping[str, Any] | None = None) -> Grammar:
        before, after = (f"{self.begin}\n", f"\n{self.end}") if self.begin else ("", "")

        def tagged(name: str, schema: Mapping[str, Any]) -> Tagged:
            return Tagged(f'{before}{{"name": {json.dumps(name)}, "{self.arguments}": ', schema, f"}}{after}")

        return Grammar.tagged([tagged(*each) for each in functions.items()], several, other)


HERMES = JsonForm("<tool_call>", "</tool_call>", "arguments")
"""Of Hermes, Qwen and many others."""
LLAMA3 = JsonForm("", "", "parameters")
"""Of Llama 3."""


def object_end(text: str, start: int) -> int | None:
    """End of the JSON object that begins at a place; None if it goes on."""
    depth = 0
    for found in BRACKETS.finditer(text, start):
        depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(found[0], 0)
        if depth == 0:
            return found.end()
    return None


def reordered(text: str, end: int, schemas: Schemas | None) -> Read:
    """A call whose keys come in another order, whose arguments are text, or that has none; else what is no call.

    Args:
        schemas: of the functions of which one without arguments has to be, where nothing else marks a call.
    """
    found = decoded(text)
    if not isinstance(found, dict):
        return Read(None, end=end)
    name = found.get("name")
    arguments = found.get("arguments", found.get("parameters"))
    if arguments is None and found.keys() <= {"name", "arguments", "parameters"} and (schemas is None or name in schemas):
        arguments = {}
    arguments = decoded(arguments) if isinstance(arguments, str) else arguments
    if not is_name(name) or not isinstance(arguments, dict):
        return Read(None, end=end)
    # In ASCII, for the model may have written half of a surrogate pair, which is JSON and no text.
    return Read(name, json.dumps(arguments), end)


def decoded(text: str) -> Any:
    """The value of a text that a model wrote as JSON; None for what is none."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None


def is_name(value: Any) -> TypeGuard[str]:
    """True for what may be a function's name: a text, which half of a surrogate pair is not."""
    try:
        return isinstance(value, str) and len(value.encode()) > 0
    except UnicodeEncodeError:
        return False
