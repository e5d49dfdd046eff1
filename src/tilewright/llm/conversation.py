"""Conversations: the model's chat template, and checks of messages."""

import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from tilewright.models.chat import ChatTemplate


def template_of(folder: Path | None, name: str | None) -> ChatTemplate:
    """Returns the chat template of the model in a folder. Raises a `ValueError` without a valid template."""
    template = None if folder is None else ChatTemplate.load(folder)
    if template is None:
        raise ValueError(f"expected a model with a chat template; {name or 'this model'} has none, so use `generate`")
    return template


def check_messages(messages: object) -> None:
    """Raises a `ValueError` for invalid messages."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        found = "a single message" if isinstance(messages, Mapping) else reprlib.repr(messages)
        raise ValueError(f'expected a list of messages, as [{{"role": "user", "content": "..."}}], found {found}')
    for number, message in enumerate(messages, 1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {number}: expected an object with a role, found {reprlib.repr(message)}")
        if "content" not in message and "tool_calls" not in message:
            raise ValueError(f"message {number}: expected content, or tool_calls, found {', '.join(map(repr, message))}")
