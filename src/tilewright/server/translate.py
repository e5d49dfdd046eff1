"""Conversion of the bodies of other APIs to chat bodies, and of field paths in errors back."""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

from pydantic import ValidationError

from tilewright.server.errors import ApiError, invalid_body
from tilewright.server.protocol import ChatBody, ModelBody

FieldPaths = Sequence[tuple[str, str]]
"""Pairs of a field path of the chat body (a regular expression) and its replacement; the first match applies."""
Json = dict[str, Any]
Chat = TypeVar("Chat", bound=ChatBody)


class ChatConvertible(ModelBody, ABC):
    """Body that converts to a chat body."""

    places: ClassVar[FieldPaths] = ()

    @abstractmethod
    def system_messages(self) -> list[Json]:
        """Returns the first messages of the chat."""

    @abstractmethod
    def chat_messages(self) -> list[Json]:
        """Returns the messages after the system messages and the previous conversation."""

    @abstractmethod
    def other_fields(self) -> Json:
        """Returns the other fields of the chat body."""

    def chat(self, kind: type[Chat], before: bytes = b"[]") -> Chat:
        """Converts to a chat body.

        Args:
            before: previous messages, as JSON.

        Raises:
            ApiError: the chat body is invalid for the served model (400).
        """
        with translated_errors(self.places):
            try:
                messages = [*self.system_messages(), *json.loads(before), *self.chat_messages()]
                return kind.model_validate({"model": self.model, "messages": messages, **self.other_fields()})
            except ValidationError as error:
                raise invalid_body(error) from None


@contextmanager
def translated_errors(places: FieldPaths) -> Iterator[None]:
    """Replaces the field path of an error by the path in the original body."""
    try:
        yield
    except ApiError as error:
        if error.param is None:
            raise
        for chat, original in places:
            param = re.sub(f"^{chat}", original, error.param)
            if param != error.param:
                message = error.message.replace(f"'{error.param}'", f"'{param}'")
                raise ApiError(error.status, message, error.code, param, error.headers) from error
        raise
