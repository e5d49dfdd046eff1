"""Grammars for texts: JSON by a schema, alone or between tags, a regular expression, one of several texts, a Lark grammar."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from tilewright.grammar.keywords import plain

LONGEST = 2**18
"""Characters of a grammar; a schema's are those of its JSON. A matcher bounds what it makes of them, not how much it reads."""
MOST_CHOICES = 4096

Schema = Mapping[str, Any] | str
"""A JSON schema, or its JSON."""


class Tagged(NamedTuple):
    """JSON that a schema describes, between a text before and one behind; as models write calls of tools."""

    begin: str
    schema: Mapping[str, Any]
    end: str


@dataclass(frozen=True)
class Grammar:
    """Grammar that a text must follow. Made by the functions below, which say what is wrong with what they are given.

    Attributes:
        kind: what `text` is: a JSON schema, a regular expression of Rust's (without look-around and back-references), a
            list of texts in JSON to choose from, an object in JSON of what `tagged` is given, or a grammar in llguidance's
            kind of Lark.
    """

    kind: Literal["json_schema", "regex", "choice", "tagged", "lark"]
    text: str

    def __post_init__(self) -> None:
        if not 0 < len(self.text) <= LONGEST:
            raise ValueError(f"expected a grammar of 1 to {LONGEST} characters, found {len(self.text)}")
        try:
            self.text.encode()
        except UnicodeEncodeError:
            raise ValueError("expected a grammar that is text, found half of a surrogate pair in it") from None

    @staticmethod
    def json_schema(schema: Schema) -> "Grammar":
        """JSON on one line that a schema describes, with its properties in the schema's order."""
        try:
            found = json.loads(schema) if isinstance(schema, str) else schema
            text = json.dumps(plain(found) if isinstance(found, Mapping) else found, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"expected a schema that is JSON, found one that is not: {error}") from None
        if not isinstance(found, Mapping):
            raise ValueError(f"expected a schema that is an object, found {type(found).__name__}")
        return Grammar("json_schema", text)

    @staticmethod
    def json_object() -> "Grammar":
        """Any JSON object, on one line."""
        return Grammar.json_schema({"type": "object"})

    @staticmethod
    def regex(pattern: str) -> "Grammar":
        """A text that the expression matches from its first to its last character."""
        return Grammar("regex", pattern)

    @staticmethod
    def choice(texts: Sequence[str]) -> "Grammar":
        """One of several texts."""
        if isinstance(texts, str) or not 0 < len(texts) <= MOST_CHOICES or not all(texts):
            raise ValueError(f"expected 1 to {MOST_CHOICES} texts to choose from, none of them empty, found {texts!r:.100}")
        return Grammar("choice", json.dumps(list(texts), ensure_ascii=False))

    @staticmethod
    def tagged(options: Sequence[Tagged], repeats: bool = False, other: Schema | None = None) -> "Grammar":
        """One of several tagged JSON texts, or with `repeats` any number of them, each on a new line.

        Args:
            other: JSON that may stand instead of them, without tags.
        """
        if not options:
            raise ValueError("expected tagged texts to choose from, found none")
        made = [option._replace(schema=json.loads(Grammar.json_schema(option.schema).text)) for option in options]
        found: dict[str, Any] = {"options": made, "repeats": repeats}
        if other is not None:
            found["other"] = json.loads(Grammar.json_schema(other).text)
        return Grammar("tagged", json.dumps(found, ensure_ascii=False))

    @staticmethod
    def lark(text: str) -> "Grammar":
        """A text that a Lark grammar derives from its rule `start`."""
        return Grammar("lark", text)
