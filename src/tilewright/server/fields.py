"""What fields of bodies are made of: JSON's kinds of values, and fields that others offer and this server does not."""

from collections.abc import Callable
from typing import Annotated, Any, Literal, LiteralString, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WrapValidator
from pydantic_core import PydanticCustomError

LONGEST_NAME = 512
"""Of a model, a user, a key: texts that are compared or not read at all."""


def expect(text: str, kind: str = "expected") -> WrapValidator:
    """Says one thing of whatever is wrong with a value, where the alternatives of a union would each say their own."""

    def check(value: Any, handler: Callable[[Any], Any]) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError(cast(LiteralString, kind), cast(LiteralString, text)) from None

    return WrapValidator(check)


NotOffered = Annotated[None, expect("is not offered by this server", "not_offered")]
"""A field that others offer. It may be there as null, as some clients send it."""
NoText = Annotated[
    Annotated[str, Field(max_length=0)] | None, expect("is not offered by this server; it may be empty", "not_offered")
]
NothingAsked = Annotated[
    Annotated[list[Any], Field(max_length=0)] | Annotated[dict[str, Any], Field(max_length=0)] | None,
    expect("is not offered by this server; it may be null or empty", "not_offered"),
]
"""Field that is not offered, where clients also send it empty."""
Ignored = Annotated[str, Field(max_length=LONGEST_NAME)] | None
Unread = Any
"""Value that changes nothing here, whatever it is."""


def whole(value: Any) -> Any:
    """JSON knows one kind of number: 16.0 is 16."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


WHOLE = BeforeValidator(whole)

OnlyZero = Annotated[
    Annotated[float, Field(ge=0, le=0)] | None, expect("is not offered by this server; it may be 0", "not_offered")
]
OnlyOne = Annotated[
    Annotated[float, Field(ge=1, le=1)] | None, expect("is not offered by this server; it may be 1", "not_offered")
]


def flag(value: Any) -> Any:
    """JSON's true and false are no numbers: to Python 0.0 is False."""
    if value is not None and not isinstance(value, bool):
        raise PydanticCustomError("expected", "expected true or false")
    return value


FLAG = BeforeValidator(flag)
OnlyFalse = Annotated[Literal[False] | None, FLAG, expect("is not offered by this server; it may be false", "not_offered")]
OnlyTrue = Annotated[Literal[True] | None, FLAG, expect("is not offered by this server; it may be true", "not_offered")]


class Body(BaseModel):
    """JSON as it is: no text for a number, no field beyond those declared."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
