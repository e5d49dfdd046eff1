"""Structured output: formats of OpenAI (`response_format`) and vLLM (`structured_outputs`), and their grammars."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from tilewright.grammar.grammar import LONGEST, MOST_CHOICES, Grammar
from tilewright.grammar.matcher import Matcher
from tilewright.llm.diffusion_model import DiffusionModel
from tilewright.llm.language_model import LanguageModel
from tilewright.server.errors import ApiError
from tilewright.server.fields import LONGEST_NAME, Body, IgnoredValue, Unsupported, expect


@dataclass(frozen=True)
class Constrain:
    """Compiles the grammars of requests for a model's tokens.

    Attributes:
        seconds: limit on the CPU seconds of a compilation.
    """

    lm: LanguageModel | DiffusionModel
    seconds: float

    def __call__(self, grammar: Grammar) -> Matcher:
        """Compiles a grammar, or returns it from the cache. Raises the errors of `LanguageModel.constrain`."""
        return self.lm.constrain(grammar, self.seconds)

    def is_cached(self, grammar: Grammar) -> bool:
        """True if a grammar is compiled already."""
        return self.lm.compiler is not None and self.lm.compiler.is_cached(grammar)


class JsonSchema(Body):
    """JSON schema of the output.

    Attributes:
        name: name of the schema, without effect on the output.
        description: description of the schema, without effect on the output.
        schema_: JSON schema.
        strict: ignored; outputs always follow the schema.
    """

    name: Annotated[str, Field(max_length=LONGEST_NAME)] | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Body):
    """Format of the output, as in OpenAI's API.

    Attributes:
        type: any text, any JSON object, or JSON that follows `json_schema`.
        json_schema: schema, for the type "json_schema".
    """

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def check(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise PydanticCustomError("expected", "expected json_schema exactly for the type json_schema")
        return self


class StructuredOutputs(Body):
    """Grammar of the output, as in vLLM's API. Exactly one of `json`, `regex`, `choice`, `grammar` and `json_object` is set.

    Attributes:
        json_: JSON schema, as an object or as text.
        regex: regular expression that the whole output matches.
        choice: texts to choose from.
        grammar: grammar in llguidance's variant of Lark.
        json_object: any JSON object.
    """

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
    disable_any_whitespace: IgnoredValue = None
    disable_fallback: IgnoredValue = None
    disable_additional_properties: Unsupported = None
    whitespace_pattern: Unsupported = None
    structural_tag: Unsupported = None


class RequestedGrammar(NamedTuple):
    """Requested grammar, and the field that contains it."""

    grammar: Grammar
    param: str


def format_grammar(response_format: ResponseFormat | None, outputs: StructuredOutputs | None) -> RequestedGrammar | None:
    """Returns the grammar of a body's format; None for any text.

    Raises:
        ApiError: several formats are set, or a grammar is invalid (400).
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
        raise ApiError(400, f"'{second}': expected only one grammar, found {first}, too", "invalid_value", second)
    for param, make in found.items():
        try:
            return RequestedGrammar(make(), param)
        except ValueError as error:
            raise refused(param, error) from error
    return None


def refused(param: str, error: ValueError) -> ApiError:
    """Makes the error response for a grammar that cannot be used."""
    return ApiError(400, f"'{param}': {error}", "invalid_value", param)
