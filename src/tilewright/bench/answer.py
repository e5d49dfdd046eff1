"""Parses a server's event stream of completion chunks and records the arrival time of each chunk."""

import json
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from tilewright.models.records import shortened

DONE = "[DONE]"
COUNTS = ("num_spec_steps", "num_accepted_draft_tokens", "num_draft_tokens")
"""Counts of vLLM's `metrics.speculative_decoding`, from which all its other figures follow."""


class Malformed(ValueError):
    """Raised for a response that is no event stream of completion chunks."""


class Refused(Exception):
    """Raised for an error response; `kind` is `http_<status>` or `error_event`."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Event:
    """A server-sent event: its name ("message" by default) and its data."""

    name: str
    data: str


class EventDecoder:
    """Splits a byte stream into server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html).

    Lines end with LF or CRLF. Comments, `id` and `retry` are ignored, and so is an event without data.
    """

    def __init__(self) -> None:
        self.rest = b""
        self.name = ""
        self.data: list[str] = []

    def feed(self, data: bytes) -> list[Event]:
        """Returns the events that end within `data`.

        Raises:
            Malformed: A line is not UTF-8.
        """
        *lines, self.rest = (self.rest + data).split(b"\n")
        events = []
        for line in lines:
            try:
                text = line.removesuffix(b"\r").decode("utf-8")
            except UnicodeDecodeError:
                raise Malformed(f"a line of the event stream is not UTF-8: {line[:40]!r}") from None
            name, _, value = text.partition(":")
            if name == "data":
                self.data.append(value.removeprefix(" "))
            elif name == "event":
                self.name = value.removeprefix(" ")
            elif not text:
                if self.data:
                    events.append(Event(self.name or "message", "\n".join(self.data)))
                self.name, self.data = "", []
        return events


@dataclass(frozen=True)
class StreamedChunk:
    """A chunk with new tokens.

    Attributes:
        at_s: arrival time in seconds.
        tokens: number of new tokens, from the chunk's usage; None without usage.
    """

    at_s: float
    tokens: int | None


@dataclass
class StreamedAnswer:
    """Received part of the response to one request.

    Attributes:
        chunks: chunks with text or with new tokens. Chunks with only a role or a finish reason are left out.
        first_choice_s: arrival time of the first chunk with `choices`, with or without tokens.
        prompt_tokens, usage_tokens: prompt and completion tokens of the last usage; None without usage.
        speculative: last `metrics.speculative_decoding` with valid `COUNTS`.
        finish_reason: finish reason of the choice.
        done: True after `[DONE]`.
        cached_tokens: prompt tokens found in the server's prefix cache, from the last usage with this field.
    """

    chunks: list[StreamedChunk] = field(default_factory=list)
    first_choice_s: float | None = None
    prompt_tokens: int | None = None
    usage_tokens: int | None = None
    speculative: dict[str, Any] | None = None
    finish_reason: str | None = None
    done: bool = False
    cached_tokens: int | None = None

    def add(self, event: Event, now: float) -> None:
        """Adds an event that arrived at `now`, in seconds on any clock.

        Raises:
            Malformed: The event holds no completion chunk.
            Refused: The event is an error.
        """
        if event.data == DONE:
            self.done = True
            return
        try:
            chunk = json.loads(event.data)
        except (ValueError, RecursionError):
            raise Malformed(f"expected JSON in the stream, found {shortened(event.data)}") from None
        if event.name == "error" or (isinstance(chunk, dict) and chunk.get("error")):
            raise Refused("error_event", error_message(chunk))
        if not isinstance(chunk, dict):
            raise Malformed(f"expected an object in the stream, found {shortened(chunk)}")
        new = self.add_usage(chunk.get("usage"))
        choices = chunk.get("choices") or []
        if choices:
            self.add_choice(choices, new, now)
        metrics = chunk.get("metrics")
        speculative = metrics.get("speculative_decoding") if isinstance(metrics, dict) else None
        if isinstance(speculative, dict) and all(is_count(speculative.get(name)) for name in COUNTS):
            self.speculative = speculative

    def add_usage(self, usage: Any) -> int | None:
        """Returns the number of tokens since the last usage; None without usage."""
        if usage is None:
            return None
        if not isinstance(usage, dict) or not is_count(usage.get("completion_tokens")):
            raise Malformed(f"expected completion_tokens in the usage, found {shortened(usage)}")
        before = self.usage_tokens or 0
        now = usage["completion_tokens"]
        if is_count(usage.get("prompt_tokens")):
            self.prompt_tokens = usage["prompt_tokens"]
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict) and is_count(details.get("cached_tokens")):
            self.cached_tokens = details["cached_tokens"]
        if now < before:
            raise Malformed(f"expected completion_tokens of at least {before}, found {now}")
        self.usage_tokens = now
        return now - before

    def add_choice(self, choices: Any, new: int | None, now: float) -> None:
        choice = choices[0] if isinstance(choices, list) else None
        if not isinstance(choice, dict):
            raise Malformed(f"expected a list of choices, found {shortened(choices)}")
        if self.first_choice_s is None:
            self.first_choice_s = now
        reason = choice.get("finish_reason")
        if isinstance(reason, str) and reason:
            self.finish_reason = reason
        if self.chunks and self.chunks[-1].tokens is None:
            new = None  # a usage in the last chunk alone does not count that chunk's tokens
        # A token that is part of a character has no text: a completion chunk without text before the end still has tokens.
        textless = new is None and "text" in choice and not self.finish_reason
        if has_text(choice) or new or textless:
            self.chunks.append(StreamedChunk(now, new))

    @property
    def ended(self) -> bool:
        """True if the server ended the response."""
        return self.done or self.finish_reason is not None

    @property
    def tokens(self) -> int:
        """Number of generated tokens, from the usage; without usage, the number of chunks."""
        return len(self.chunks) if self.usage_tokens is None else self.usage_tokens

    @property
    def counted_by_usage(self) -> bool:
        return self.usage_tokens is not None

    @property
    def first_s(self) -> float | None:
        """Arrival time of the first token; of the first choice if no chunk had tokens."""
        if self.chunks:
            return self.chunks[0].at_s
        return self.first_choice_s if self.tokens else None

    @property
    def seconds_per_token(self) -> float | None:
        """TPOT: time from the first to the last chunk with tokens, divided by all tokens but one. None for a single chunk."""
        if len(self.chunks) < 2 or self.tokens < 2:
            return None
        return (self.chunks[-1].at_s - self.chunks[0].at_s) / (self.tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Times between successive chunks."""
        return [after.at_s - before.at_s for before, after in pairwise(self.chunks)]

    @property
    def token_gaps_s(self) -> list[float] | None:
        """Time per token: each gap between chunks, divided evenly over the tokens of the later chunk, once per token.

        None if chunks have no token counts. Chunks with text but without tokens do not end a gap.
        """
        if not all(chunk.tokens is not None for chunk in self.chunks):
            return None
        counted = [(chunk.at_s, chunk.tokens) for chunk in self.chunks if chunk.tokens]
        pairs = pairwise(counted)
        return [(arrived - before) / tokens for (before, _), (arrived, tokens) in pairs for _ in range(tokens)]


def is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def has_text(choice: dict[str, Any]) -> bool:
    """Returns True if a chunk's choice adds text to a completion, to a message, or to its reasoning."""
    delta = choice.get("delta")
    parts = delta if isinstance(delta, dict) else {}
    return any(isinstance(text, str) and text for text in (choice.get("text"), *map(parts.get, TEXTS)))


TEXTS = ("content", "reasoning_content", "reasoning", "refusal")
"""Fields of a chat delta with generated text. vLLM has used both names for reasoning."""


def error_message(body: Any) -> str:
    """Returns the message of an error in OpenAI's format or another."""
    inner = body.get("error", body) if isinstance(body, dict) else body
    if isinstance(inner, dict):
        inner = inner.get("message") or inner.get("detail") or inner
    return inner if isinstance(inner, str) else shortened(inner)
