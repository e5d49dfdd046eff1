"""Grammars for structured output: JSON schemas (optionally between tags), regular expressions, choices and Lark grammars."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from tilewright.grammar.keywords import simplify_schema

LONGEST = 2**18
"""Largest number of characters of a grammar (of the JSON, for a schema). The matcher limits its own size, not its input."""
MOST_CHOICES = 4096
"""Largest number of texts to choose from."""

Schema = Mapping[str, Any] | str
"""JSON schema, as an object or as JSON text."""


class Tagged(NamedTuple):
    """JSON of a schema between a begin tag and an end tag, as models write tool calls."""

    begin: str
    schema: Mapping[str, Any]
    end: str


@dataclass(frozen=True)
class Grammar:
    """Grammar that a generated text must follow, made by one of the static methods below.

    Attributes:
        kind: format of `text`.
        text: a JSON schema ("json_schema"), a regular expression in Rust's syntax without look-around and back-references
            ("regex"), a JSON list of texts ("choice"), a JSON object with the arguments of `tagged` ("tagged"), or a grammar in
            llguidance's variant of Lark ("lark").

    Raises:
        ValueError: the text is empty, longer than `LONGEST` characters, or not encodable as UTF-8.
    """

    kind: Literal["json_schema", "regex", "choice", "tagged", "lark"]
    text: str

    def __post_init__(self) -> None:
        if not 0 < len(self.text) <= LONGEST:
            raise ValueError(f"expected a grammar of 1 to {LONGEST} characters, found {len(self.text)}")
        try:
            self.text.encode()
        except UnicodeEncodeError:
            raise ValueError("expected a grammar that is valid UTF-8, found an unpaired surrogate") from None

    @staticmethod
    def json_schema(schema: Schema) -> "Grammar":
        """Makes a grammar for JSON of a schema, on one line, with properties in the schema's order.

        Raises:
            ValueError: the schema is not a JSON object.
        """
        try:
            found = json.loads(schema) if isinstance(schema, str) else schema
            text = json.dumps(
                simplify_schema(found) if isinstance(found, Mapping) else found, ensure_ascii=False, allow_nan=False
            )
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"expected a schema that is JSON, found: {error}") from None
        if not isinstance(found, Mapping):
            raise ValueError(f"expected a schema that is an object, found {type(found).__name__}")
        return Grammar("json_schema", text)

    @staticmethod
    def json_object() -> "Grammar":
        """Makes a grammar for any JSON object, on one line."""
        return Grammar.json_schema({"type": "object"})

    @staticmethod
    def regex(pattern: str) -> "Grammar":
        """Makes a grammar for texts that a regular expression matches in full."""
        return Grammar("regex", pattern)

    @staticmethod
    def choice(texts: Sequence[str]) -> "Grammar":
        """Makes a grammar for one of 1 to `MOST_CHOICES` non-empty texts. Raises a `ValueError` for any other number."""
        if isinstance(texts, str) or not 0 < len(texts) <= MOST_CHOICES or not all(texts):
            raise ValueError(f"expected 1 to {MOST_CHOICES} texts to choose from, none of them empty, found {texts!r:.100}")
        return Grammar("choice", json.dumps(list(texts), ensure_ascii=False))

    @staticmethod
    def tagged(options: Sequence[Tagged], repeats: bool = False, other: Schema | None = None) -> "Grammar":
        """Makes a grammar for one of several tagged JSON texts.

        Args:
            repeats: allow any number of tagged texts, each on a line of its own.
            other: schema of JSON without tags, as an alternative to the tagged texts.
        """
        if not options:
            raise ValueError("expected tagged texts to choose from, found none")
        closed_options = [option._replace(schema=json.loads(Grammar.json_schema(option.schema).text)) for option in options]
        found: dict[str, Any] = {"options": closed_options, "repeats": repeats}
        if other is not None:
            found["other"] = json.loads(Grammar.json_schema(other).text)
        return Grammar("tagged", json.dumps(found, ensure_ascii=False))

    @staticmethod
    def lark(text: str) -> "Grammar":
        """Makes a grammar from a Lark grammar, whose start rule is `start`."""
        return Grammar("lark", text)
