"""Structured output: what a body asks an answer to be, in OpenAI's form and in vLLM's, as a grammar."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from tilewright.grammar.grammar import LONGEST, MOST_CHOICES, Grammar
from tilewright.grammar.matcher import Matcher
from tilewright.llm.language_model import LanguageModel
from tilewright.server.errors import ApiError
from tilewright.server.fields import LONGEST_NAME, Body, NotOffered, Unread, expect


@dataclass(frozen=True)
class Constrain:
    """Maker of constraints over a model's tokens, of grammars that come with requests.

    Attributes:
        seconds: of a processor that compiling one may take.
    """

    lm: LanguageModel
    seconds: float

    def __call__(self, grammar: Grammar) -> Matcher:
        """A grammar as a constraint, which may have to be compiled. Raises what `LanguageModel.constrain` raises."""
        return self.lm.constrain(grammar, self.seconds)

    def is_kept(self, grammar: Grammar) -> bool:
        """True if a grammar is compiled already."""
        return self.lm.compiler is not None and self.lm.compiler.is_kept(grammar)


class JsonSchema(Body):
    """A schema; `strict` changes nothing, for answers follow their schema always."""

    name: Annotated[str, Field(max_length=LONGEST_NAME)] | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Body):
    """OpenAI's form."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def check(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise PydanticCustomError("expected", "expected json_schema with the type json_schema, and with no other")
        return self


class StructuredOutputs(Body):
    """vLLM's form: one of these."""

    json_: Annotated[
        dict[str, Any] | str | None, Field(alias="json"), expect("expected a JSON schema, as an object or as text")
    ] = None
    regex: Annotated[str, Field(min_length=1, max_length=LONGEST)] | None = None
    choice: (
        Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MOST_CHOICES, fail_fast=True)]
        | None
    ) = None
    grammar: Annotated[str, Field(min_length=1, max_length=LONGEST)] | None = None
    json_object: bool | None = None
    disable_any_whitespace: Unread = None
    disable_fallback: Unread = None
    disable_additional_properties: NotOffered = None
    whitespace_pattern: NotOffered = None
    structural_tag: NotOffered = None


class Asked(NamedTuple):
    """A grammar, and the field that asks for it."""

    grammar: Grammar
    param: str


def grammar_of(response_format: ResponseFormat | None, outputs: StructuredOutputs | None) -> Asked | None:
    """Grammar that a body asks its answer to follow; None for any text.

    Raises:
        ApiError: it asks for several things at once, or for what is no grammar.
    """
    found: dict[str, Any] = {}
    if response_format is not None and response_format.type == "json_object":
        found["response_format"] = Grammar.json_object
    elif response_format is not None and response_format.json_schema is not None:
        schema = response_format.json_schema.schema_
        found["response_format.json_schema.schema"] = lambda: Grammar.json_schema(schema)
    if outputs is not None:
        makers = {"json_": Grammar.json_schema, "regex": Grammar.regex, "choice": Grammar.choice, "grammar": Grammar.lark}
        for name, make in makers.items():
            if (value := getattr(outputs, name)) is not None:
                found[f"structured_outputs.{name.rstrip('_')}"] = lambda make=make, value=value: make(value)
        if outputs.json_object:
            found["structured_outputs.json_object"] = Grammar.json_object
        if not any(name.startswith("structured_outputs") for name in found):
            raise ApiError(
                400,
                "'structured_outputs': expected json, regex, choice, grammar or json_object, found none of them",
                "invalid_value",
                "structured_outputs",
            )
    if len(found) > 1:
        first, second, *_ = found
        raise ApiError(400, f"'{second}': expected nothing beside {first}", "invalid_value", second)
    for param, make in found.items():
        try:
            return Asked(make(), param)
        except ValueError as error:
            raise refused(param, error) from error
    return None


def refused(param: str, error: ValueError) -> ApiError:
    """The error for a grammar that cannot be used."""
    return ApiError(400, f"'{param}': {error}", "invalid_value", param)
