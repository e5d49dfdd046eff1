"""From what the engine tells to what clients get: whole bodies and chunks of a stream, for both ways of generating."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from tilewright.llm.acceptance import speculative_decoding
from tilewright.runtime.request import EndReason, RequestHandle, RequestOutput, Token, TokenLogprobs
from tilewright.runtime.service import Service
from tilewright.server.answers import (
    Answer,
    Chat,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Delta,
    DenoisingSteps,
    FinishReason,
    Masks,
    Metrics,
    PromptDetails,
    ShownRound,
    ShownToken,
    SpeculativeDecoding,
    Usage,
)
from tilewright.server.choice_text import ChoiceText
from tilewright.server.errors import ApiError
from tilewright.server.logprobs import chat_logprobs, completion_logprobs, fewer, prompt_logprobs
from tilewright.server.parse import ParsedRequest
from tilewright.server.protocol import StreamOptions
from tilewright.server.tokens import Offsets, TokenTexts

DONE = b"data: [DONE]\n\n"
FINISHES: Mapping[EndReason, FinishReason] = {"eos": "stop", "stop": "stop", "length": "length"}
"""Finish reasons by the engine's ends; the other ends are errors."""


@dataclass(frozen=True)
class Served:
    """Engine, name and version that all answers need.

    Attributes:
        name: of the model, as clients know it.
        version: of this software.
        created: when the server began, in Unix seconds.
    """

    engine: Service
    name: str
    version: str
    created: int
    texts: TokenTexts


def joined(updates: Sequence[RequestOutput]) -> RequestOutput:
    """All that a request was told, as one."""
    tokens = tuple(token for update in updates for token in update.tokens)
    found = next((update.prompt_logprobs for update in updates if update.prompt_logprobs is not None), None)
    return RequestOutput(tokens=tokens, end=updates[-1].end, prompt_logprobs=found)


def text_of(tokens: Sequence[Token]) -> str:
    return "".join(token.text for token in tokens)


@dataclass
class Renderer(ABC):
    """Answers to one body's choices. Updates of each choice come in order.

    Attributes:
        handles: of all choices.
        generated: tokens of each choice so far.
        begun: choices of which something was shown.
    """

    served: Served
    request_id: str
    parsed: ParsedRequest
    handles: Sequence[RequestHandle]
    generated: list[int] = field(init=False)
    begun: set[int] = field(init=False, default_factory=set)
    root: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.generated = [0] * len(self.parsed.requests)
        self.root = {
            "created": int(time.time()),
            "model": self.served.name,
            "system_fingerprint": f"tilewright-{self.served.version}",
        }

    def begins(self, index: int) -> bool:
        """True if nothing of a choice has been shown yet."""
        return index not in self.begun

    def take(self, index: int, update: RequestOutput) -> tuple[bool, tuple[Token, ...]]:
        """Counts what is shown of an update. Returns whether it is the choice's first, and its tokens."""
        tokens = update.tokens if self.parsed.generates else ()
        first = self.begins(index)
        self.begun.add(index)
        self.generated[index] += len(tokens)
        return first, tokens

    def ends(self, index: int, update: RequestOutput, tokens: Sequence[Token]) -> dict[str, Any]:
        """Fields that every choice of an update has: its number, why it ended, and ids where they are asked for."""
        result = self.handles[index].result
        reason = None if update.end is None else self.finish(index, update.end)
        found: dict[str, Any] = {"index": index, "finish_reason": reason}
        if reason is not None and result is not None and result.stop_reason is not None:
            found["stop_reason"] = result.stop_reason
        if self.parsed.token_ids:
            found["token_ids"] = [token.token for token in tokens]
        return found

    def of_prompt(self, index: int, update: RequestOutput) -> dict[str, Any]:
        """Fields about a choice's prompt, told once: its ids and log-probabilities, where they are asked for."""
        found: dict[str, Any] = {}
        tokens = self.parsed.prompt_of(index).tokens
        if self.parsed.token_ids:
            found["prompt_token_ids"] = tokens
        if self.parsed.prompt_logprobs is not None and update.prompt_logprobs is not None:
            told = update.prompt_logprobs
            found["prompt_logprobs"] = prompt_logprobs(self.served.texts, tokens, told, self.parsed.prompt_logprobs)
        return found

    def with_logprobs(self, tokens: Sequence[Token]) -> list[tuple[int, TokenLogprobs]]:
        """Tokens with their log-probabilities and as many alternatives as are asked for."""
        most = self.parsed.logprobs or 0
        return [(token.token, fewer(token.logprobs, most)) for token in tokens if token.logprobs is not None]

    def tokens_shown(self) -> str:
        """For the access log."""
        prompt = sum(len(one.tokens) for one in self.parsed.prompts)
        return f" {prompt}+{sum(self.generated)} tokens"

    def usage(self) -> Usage:
        firsts = self.handles[:: self.parsed.choices]
        prompt = sum(len(one.tokens) for one in self.parsed.prompts)
        completion = sum(self.generated)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptDetails(cached_tokens=sum(handle.cached_tokens for handle in firsts)),
        )

    def metrics(self) -> Metrics:
        """Of a single choice that has ended; how masks came about whatever the choices."""
        found = self.speculation()
        if self.parsed.constrained:
            found.structured_outputs = masks_of(self.handles)
        return found

    def speculation(self) -> Metrics:
        """Of a single choice that has ended."""
        result = self.handles[0].result
        if len(self.handles) != 1 or result is None:
            return Metrics(speculative_decoding=None)
        if steps := self.handles[0].steps:
            told = DenoisingSteps(steps=steps, tokens_per_step=len(result.tokens) / steps)
            return Metrics(speculative_decoding=None, denoising=told)
        found = speculative_decoding([result], self.served.engine.num_spec_tokens)
        return Metrics(speculative_decoding=None if found is None else SpeculativeDecoding.model_validate(found))

    def finish(self, index: int, end: EndReason) -> FinishReason:
        """The API's name for the end of a choice."""
        return FINISHES[end]

    @abstractmethod
    def whole(self, updates: Sequence[RequestOutput]) -> Answer:
        """The body of an answer that is not streamed, of each choice's joined updates."""

    @abstractmethod
    def events(self, index: int, update: RequestOutput) -> Iterable[bytes]:
        """Events that an update adds to a stream."""

    @abstractmethod
    def last_events(self) -> Iterable[bytes]:
        """Events at the end of a stream."""

    @abstractmethod
    def failed(self, error: ApiError) -> Iterable[bytes]:
        """Events at the end of a stream that an error cut short."""


def event(data: bytes, name: str | None = None) -> bytes:
    """A server-sent event."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + data + b"\n\n"


@dataclass
class ChunkRenderer(Renderer):
    """Streams whose events are chunks of one form, and at last [DONE]: those of OpenAI's first two routes."""

    options: StreamOptions | None = None

    @abstractmethod
    def chunk(self, index: int, update: RequestOutput) -> Completion | ChatChunk | None:
        """Chunk that an update adds to the stream; None where that is nothing."""

    @abstractmethod
    def last_chunk(self) -> Completion | ChatChunk:
        """The chunk without choices that usage comes in."""

    def events(self, index: int, update: RequestOutput) -> Iterable[bytes]:
        """The chunk of an update with what the stream's options add to each: the usage so far, or null where it comes at the
        end; the rounds."""
        chunk = self.chunk(index, update)
        if chunk is None:
            return ()
        if self.options is not None and self.options.include_usage:
            chunk.usage = self.usage() if self.options.continuous_usage_stats else None
        if self.options is not None and self.options.include_rounds:
            chunk.rounds = list(rounds_of(update))
        return (event(chunk.json_bytes),)

    def last_events(self) -> Iterable[bytes]:
        if self.options is not None and self.options.include_usage:
            yield event(self.last_chunk().json_bytes)
        yield DONE

    def failed(self, error: ApiError) -> Iterable[bytes]:
        return event(error.body.model_dump_json().encode()), DONE


@dataclass
class CompletionRenderer(ChunkRenderer):
    """`/v1/completions`.

    Attributes:
        offsets: where the next token of each choice begins.
        of_prompts: log-probabilities of prompts, by choice, until they are shown.
    """

    offsets: list[Offsets] = field(init=False)
    of_prompts: dict[int, Sequence[TokenLogprobs]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.root |= {"id": f"cmpl-{self.request_id}", "object": "text_completion"}
        starts = [len(self.parsed.prompt_of(index).text) if self.parsed.echo else 0 for index in range(len(self.handles))]
        tokenizer = self.served.texts.tokenizer
        self.offsets = [
            Offsets(tokenizer, start, request.sampling.skip_special_tokens, request.prompt, self.parsed.constrained)
            for start, request in zip(starts, self.parsed.requests, strict=True)
        ]

    def whole(self, updates: Sequence[RequestOutput]) -> Completion:
        self.of_prompts = {n: update.prompt_logprobs for n, update in enumerate(updates) if update.prompt_logprobs is not None}
        choices = [self.choice(index, update) for index, update in enumerate(updates)]
        return Completion(**self.root, choices=choices, usage=self.usage(), metrics=self.metrics())

    def chunk(self, index: int, update: RequestOutput) -> Completion | None:
        if update.prompt_logprobs is not None:
            self.of_prompts[index] = update.prompt_logprobs
        if not update.tokens and update.end is None:
            return None
        return Completion(**self.root, choices=[self.choice(index, update)])

    def last_chunk(self) -> Completion:
        return Completion(**self.root, choices=[], usage=self.usage(), metrics=self.metrics())

    def choice(self, index: int, update: RequestOutput) -> CompletionChoice:
        first, tokens = self.take(index, update)
        text = (self.parsed.prompt_of(index).text if self.parsed.echo and first else "") + text_of(tokens)
        found = None if self.parsed.logprobs is None else self.logprobs(index, tokens, first)
        told = self.ends(index, update, tokens) | (self.of_prompt(index, update) if first else {})
        return CompletionChoice(text=text, logprobs=found, **told)

    def logprobs(self, index: int, new: Sequence[Token], first: bool) -> CompletionLogprobs:
        prompt = self.parsed.prompt_of(index)
        most = self.parsed.logprobs or 0
        tokens: list[tuple[int, TokenLogprobs | None]] = [*self.with_logprobs(new)]
        offsets = self.offsets[index].of([token for token, _ in tokens])
        if self.parsed.echo and first:
            before = (None, *(fewer(one, most) for one in self.of_prompts.pop(index, ())))
            tokens = [*zip(prompt.tokens, before, strict=True), *tokens]
            offsets = [*prompt.offsets, *offsets]
        return completion_logprobs(self.served.texts, tokens, offsets)


@dataclass
class ChatRenderer(ChunkRenderer):
    """`/v1/chat/completions`.

    Attributes:
        texts: of the choices.
    """

    texts: list[ChoiceText] = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.root |= {"id": f"chatcmpl-{self.request_id}"}
        self.texts = [ChoiceText(self.parsed.tools) for _ in self.handles]

    def whole(self, updates: Sequence[RequestOutput]) -> Chat:
        choices = []
        for index, update in enumerate(updates):
            _, tokens = self.take(index, update)
            message = self.texts[index].push(text_of(tokens), last=True).message()
            told = self.ends(index, update, tokens)
            choices.append(ChatChoice(message=message, logprobs=self.logprobs(tokens), **told))
        ended = {"usage": self.usage(), "metrics": self.metrics(), **self.of_prompt(0, updates[0])}
        return Chat(**self.root, object="chat.completion", choices=choices, **ended)

    def chunk(self, index: int, update: RequestOutput) -> ChatChunk | None:
        if not update.tokens and update.end is None:
            return None
        told = self.of_prompt(0, update) if not self.begun else {}
        first, tokens = self.take(index, update)
        delta = Delta(role="assistant") if first else Delta()
        if tokens or (update.end is not None and self.parsed.tools is not None):
            self.texts[index].push(text_of(tokens), update.end is not None).put_into(delta)
        choice = ChatChunkChoice(delta=delta, logprobs=self.logprobs(tokens), **self.ends(index, update, tokens))
        return ChatChunk(**self.root, object="chat.completion.chunk", choices=[choice], **told)

    def finish(self, index: int, end: EndReason) -> FinishReason:
        reason = super().finish(index, end)
        return "tool_calls" if reason == "stop" and self.texts[index].calls else reason

    def last_chunk(self) -> ChatChunk:
        ended = {"usage": self.usage(), "metrics": self.metrics()}
        return ChatChunk(**self.root, object="chat.completion.chunk", choices=[], **ended)

    def logprobs(self, tokens: Sequence[Token]) -> ChatLogprobs | None:
        return None if self.parsed.logprobs is None else chat_logprobs(self.served.texts, self.with_logprobs(tokens))


def masks_of(handles: Sequence[RequestHandle]) -> Masks:
    """Where the masks of answers' rounds came from."""
    found = sorted({each for handle in handles for each in handle.masks})
    return Masks.model_validate({"masks": "both" if len(found) > 1 else next(iter(found), "none")})


def rounds_of(update: RequestOutput) -> Iterator[ShownRound]:
    """The rounds of an update, each with its tokens."""
    tokens = iter(update.tokens)
    for each in update.rounds:
        own = [ShownToken(text=token.text, drafted=token.drafted) for token in islice(tokens, each.tokens)]
        yield ShownRound(tokens=own, drafted=each.drafted, accepted=each.accepted, choice=each.choice)
