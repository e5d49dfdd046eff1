"""Bodies of other APIs that stand for a chat: they are put into the words of `ChatBody`, and errors into theirs."""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

from pydantic import ValidationError

from tilewright.server.errors import ApiError, invalid_body
from tilewright.server.protocol import ChatBody, ModelBody

Places = Sequence[tuple[str, str]]
"""Places in the body of a chat as regular expressions, and what they are in another body; the first that matches counts."""
Json = dict[str, Any]
Chat = TypeVar("Chat", bound=ChatBody)


class ChatLike(ModelBody, ABC):
    """A body that stands for a chat."""

    places: ClassVar[Places] = ()

    @abstractmethod
    def system_messages(self) -> list[Json]:
        """Messages at the chat's beginning."""

    @abstractmethod
    def messages_of_chat(self) -> list[Json]:
        """Messages of the chat behind those, and behind what was said before."""

    @abstractmethod
    def others(self) -> Json:
        """Other fields of the chat's body."""

    def chat(self, kind: type[Chat], before: bytes = b"[]") -> Chat:
        """The chat.

        Args:
            before: messages that it goes on from, as JSON.

        Raises:
            ApiError: it is none that the served model can be asked for.
        """
        with in_words(self.places):
            try:
                messages = [*self.system_messages(), *json.loads(before), *self.messages_of_chat()]
                return kind.model_validate({"model": self.model, "messages": messages, **self.others()})
            except ValidationError as error:
                raise invalid_body(error) from None


@contextmanager
def in_words(places: Places) -> Iterator[None]:
    """Puts the place that an error names into the words of another body."""
    try:
        yield
    except ApiError as error:
        if error.param is None:
            raise
        for chat, own in places:
            place = re.sub(f"^{chat}", own, error.param)
            if place != error.param:
                message = error.message.replace(f"'{error.param}'", f"'{place}'")
                raise ApiError(error.status, message, error.code, place, error.headers) from error
        raise
