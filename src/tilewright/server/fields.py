"""Field types of request bodies, and descriptions of fields in the OpenAPI schema."""

import inspect
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, LiteralString, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WrapValidator
from pydantic_core import PydanticCustomError

LONGEST_NAME = 512
"""Largest number of characters of names and ids."""
ATTRIBUTE = re.compile(r"^ {4}(\w+): (.+(?:\n {8,}.+)*)", re.MULTILINE)
"""Matches an entry of the section `Attributes` of a docstring."""
UNSUPPORTED = "is not supported by this server"


def expect(text: str, kind: str = "expected") -> WrapValidator:
    """Replaces all validation errors of a value by one message, where each alternative of a union would report its own."""

    def check(value: Any, handler: Callable[[Any], Any]) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError(cast(LiteralString, kind), cast(LiteralString, text)) from None

    return WrapValidator(check)


def unsupported(except_for: str = "", reason: str = UNSUPPORTED) -> WrapValidator:
    """Reports invalid values as unsupported, for fields of other servers. `except_for`: values that are accepted."""
    return expect(f"{reason}, except {except_for}" if except_for else reason, "unsupported")


def integral(value: Any) -> Any:
    """Converts integral floats to int, because JSON has one number type."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def flag(value: Any) -> Any:
    """Rejects numbers for booleans: in Python, 0.0 equals False."""
    if value is not None and not isinstance(value, bool):
        raise PydanticCustomError("expected", "expected true or false")
    return value


WHOLE = BeforeValidator(integral)
FLAG = BeforeValidator(flag)

IGNORED = Field(description="Accepted and ignored.")
NOT_SUPPORTED = Field(description="Not supported by this server.")

IgnoredText = Annotated[Annotated[str, Field(max_length=LONGEST_NAME)] | None, IGNORED]
"""Text without effect."""
IgnoredValue = Annotated[Any, IGNORED]
"""Value of any type without effect."""
Unsupported = Annotated[None, NOT_SUPPORTED, unsupported()]
"""Unsupported field, which may be null."""
UnsupportedText = Annotated[Annotated[str, Field(max_length=0)] | None, NOT_SUPPORTED, unsupported("an empty text")]
UnsupportedValue = Annotated[
    Annotated[list[Any], Field(max_length=0)] | Annotated[dict[str, Any], Field(max_length=0)] | None,
    NOT_SUPPORTED,
    unsupported("null or an empty value"),
]
OnlyZero = Annotated[Annotated[float, Field(ge=0, le=0)] | None, NOT_SUPPORTED, unsupported("0")]
OnlyOne = Annotated[Annotated[float, Field(ge=1, le=1)] | None, NOT_SUPPORTED, unsupported("1")]
OnlyFalse = Annotated[Literal[False] | None, NOT_SUPPORTED, FLAG, unsupported("false")]
OnlyTrue = Annotated[Literal[True] | None, NOT_SUPPORTED, FLAG, unsupported("true")]


class Documented(BaseModel):
    """Model whose docstring's section `Attributes` describes the fields in the OpenAPI schema."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: Any) -> dict[str, Any]:
        schema = handler(core_schema)
        found = handler.resolve_ref_schema(schema)
        texts: dict[str, str] = {}
        for each in reversed(cls.__mro__):
            texts |= dict(ATTRIBUTE.findall(inspect.cleandoc(each.__doc__ or "").partition("\nAttributes:\n")[2]))
        for name, field in cls.model_fields.items():
            about = found.get("properties", {}).get(field.alias or name)
            if about is not None and name in texts:
                text = " ".join(texts[name].split())
                about["description"] = text[0].upper() + text[1:]
        if "description" in found:
            found["description"] = found["description"].partition("\n\nAttributes:\n")[0]
        return schema


class Body(Documented):
    """Request body, without type coercion and without unknown fields."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
