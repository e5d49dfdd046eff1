"""A server's stream of completion chunks, parsed, with the time at which each chunk came."""

import json
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from tilewright.bench.http_client import Malformed
from tilewright.bench.sse import Event
from tilewright.train.data import shortened

DONE = "[DONE]"
COUNTS = ("num_spec_steps", "num_accepted_draft_tokens", "num_draft_tokens")
"""The counts of vLLM's `metrics.speculative_decoding` that all its other figures follow from."""


class Refused(Exception):
    """The server answers that it does not do what it was asked for; `kind` is `http_<status>` or `error_event`."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class StreamedChunk:
    """A chunk that brought tokens.

    Attributes:
        at_s: when it came.
        tokens: how many it brought, by the usage that it says; None where it says none.
    """

    at_s: float
    tokens: int | None


@dataclass
class StreamedAnswer:
    """The answer to one request, as far as it came.

    Attributes:
        chunks: those with text or with new tokens. One that only gives the role, or the reason of the end, is none of them.
        first_choice_s: when the first chunk with `choices` came, tokens or not.
        prompt_tokens, usage_tokens: of the last usage; None where there was none.
        speculative: the last `metrics.speculative_decoding` with whole `COUNTS`.
        finish_reason, done: the end as a choice says it, and the stream.
        cached_tokens: those of the prompt that the server had in its prefix cache, by the last usage that says so.
    """

    chunks: list[StreamedChunk] = field(default_factory=list)
    first_choice_s: float | None = None
    prompt_tokens: int | None = None
    usage_tokens: int | None = None
    speculative: dict[str, Any] | None = None
    finish_reason: str | None = None
    done: bool = False
    cached_tokens: int | None = None

    def take(self, event: Event, now: float) -> None:
        """Takes an event that came at `now`, in seconds on any clock.

        Raises:
            Malformed: it holds something else than a completion chunk.
            Refused: it is an error.
        """
        if event.data == DONE:
            self.done = True
            return
        try:
            said = json.loads(event.data)
        except (ValueError, RecursionError):
            raise Malformed(f"expected JSON in the stream, found {shortened(event.data)}") from None
        if event.name == "error" or (isinstance(said, dict) and said.get("error")):
            raise Refused("error_event", error_message(said))
        if not isinstance(said, dict):
            raise Malformed(f"expected an object in the stream, found {shortened(said)}")
        new = self.take_usage(said.get("usage"))
        choices = said.get("choices") or []
        if choices:
            self.take_choice(choices, new, now)
        metrics = said.get("metrics")
        speculative = metrics.get("speculative_decoding") if isinstance(metrics, dict) else None
        if isinstance(speculative, dict) and all(is_count(speculative.get(name)) for name in COUNTS):
            self.speculative = speculative

    def take_usage(self, usage: Any) -> int | None:
        """Tokens that came since the usage before; None where there is none."""
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

    def take_choice(self, choices: Any, new: int | None, now: float) -> None:
        choice = choices[0] if isinstance(choices, list) else None
        if not isinstance(choice, dict):
            raise Malformed(f"expected a list of choices, found {shortened(choices)}")
        if self.first_choice_s is None:
            self.first_choice_s = now
        reason = choice.get("finish_reason")
        if isinstance(reason, str) and reason:
            self.finish_reason = reason
        if self.chunks and self.chunks[-1].tokens is None:
            new = None  # a usage that comes at the end alone says nothing of the chunk that it comes with
        # A token that is half a character has no text: of a completion any chunk before the end stands for tokens.
        silent = new is None and "text" in choice and not self.finish_reason
        if has_text(choice) or new or silent:
            self.chunks.append(StreamedChunk(now, new))

    @property
    def ended(self) -> bool:
        """True if the server said that this is all."""
        return self.done or self.finish_reason is not None

    @property
    def tokens(self) -> int:
        """Generated tokens: by the usage, otherwise one for each chunk."""
        return len(self.chunks) if self.usage_tokens is None else self.usage_tokens

    @property
    def counted_by_usage(self) -> bool:
        return self.usage_tokens is not None

    @property
    def first_s(self) -> float | None:
        """Time of the first token. Tokens that never showed in a chunk came at the earliest with the first choice."""
        if self.chunks:
            return self.chunks[0].at_s
        return self.first_choice_s if self.tokens else None

    @property
    def seconds_per_token(self) -> float | None:
        """TPOT: from the first chunk with tokens to the last, over all tokens but one; None where that is no time."""
        if len(self.chunks) < 2 or self.tokens < 2:
            return None
        return (self.chunks[-1].at_s - self.chunks[0].at_s) / (self.tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Between one chunk and the next."""
        return [after.at_s - before.at_s for before, after in pairwise(self.chunks)]

    @property
    def token_gaps_s(self) -> list[float] | None:
        """For each token behind the first chunk's its share of the gap that it came after; None where chunks do not say how
        many tokens they brought. Text that comes without a token does not end a gap."""
        if not all(chunk.tokens is not None for chunk in self.chunks):
            return None
        counted = [(chunk.at_s, chunk.tokens) for chunk in self.chunks if chunk.tokens]
        pairs = pairwise(counted)
        return [(at - before) / tokens for (before, _), (at, tokens) in pairs for _ in range(tokens)]


def is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def has_text(choice: dict[str, Any]) -> bool:
    """True if a choice of a chunk adds text: a completion's, an answer's, or that of thinking before it."""
    delta = choice.get("delta")
    parts = delta if isinstance(delta, dict) else {}
    return any(isinstance(text, str) and text for text in (choice.get("text"), *map(parts.get, TEXTS)))


TEXTS = ("content", "reasoning_content", "reasoning", "refusal")
"""Fields of a chat's delta that hold generated text; vLLM has named that of thinking in both ways."""


def error_message(said: Any) -> str:
    """The message in an error as OpenAI has it, or in one that looks otherwise."""
    inner = said.get("error", said) if isinstance(said, dict) else said
    if isinstance(inner, dict):
        inner = inner.get("message") or inner.get("detail") or inner
    return inner if isinstance(inner, str) else shortened(inner)
