"""Renderers of engine outputs as responses: whole bodies, and chunks of streams of completions and chats."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from tilewright.llm.acceptance import speculative_decoding
from tilewright.runtime.engine import Engine
from tilewright.runtime.request import EndReason, RequestHandle, RequestOutput, Token, TokenLogprobs
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
    DenoisingMetrics,
    FinishReason,
    Metrics,
    PromptDetails,
    RoundDetails,
    RoundToken,
    SpeculativeDecoding,
    StructuredOutputMetrics,
    Usage,
)
from tilewright.server.choice_text import ChoiceText
from tilewright.server.errors import ApiError
from tilewright.server.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs, truncated
from tilewright.server.parse import ParsedRequest
from tilewright.server.protocol import StreamOptions
from tilewright.server.tokens import Offsets, TokenTexts

DONE = b"data: [DONE]\n\n"
FINISHES: Mapping[EndReason, FinishReason] = {"eos": "stop", "stop": "stop", "length": "length"}
"""Finish reason by the engine's end reason; other end reasons are errors."""


@dataclass(frozen=True)
class Served:
    """Model information for all responses.

    Attributes:
        name: model name in the API.
        version: version of Tilewright.
        created: start time of the server in Unix seconds.
    """

    engine: Engine
    name: str
    version: str
    created: int
    texts: TokenTexts


def joined(updates: Sequence[RequestOutput]) -> RequestOutput:
    """Merges all outputs of a request into one."""
    tokens = tuple(token for update in updates for token in update.tokens)
    found = next((update.prompt_logprobs for update in updates if update.prompt_logprobs is not None), None)
    return RequestOutput(tokens=tokens, end=updates[-1].end, prompt_logprobs=found)


def joined_text(tokens: Sequence[Token]) -> str:
    return "".join(token.text for token in tokens)


@dataclass
class Renderer(ABC):
    """Renders the outputs of one body's requests as a response. The outputs of each choice arrive in order.

    Attributes:
        handles: request handles of all choices.
        generated: number of tokens of each choice so far.
        started, finished: choices of which an output, or the last output, was rendered.
        root: common fields of the response.
    """

    served: Served
    request_id: str
    parsed: ParsedRequest
    handles: Sequence[RequestHandle]
    generated: list[int] = field(init=False)
    started: set[int] = field(init=False, default_factory=set)
    finished: set[int] = field(init=False, default_factory=set)
    root: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.generated = [0] * len(self.parsed.requests)
        self.root = {
            "created": int(time.time()),
            "model": self.served.name,
            "system_fingerprint": f"tilewright-{self.served.version}",
        }

    def take(self, index: int, update: RequestOutput) -> tuple[bool, tuple[Token, ...]]:
        """Counts the tokens of an update. Returns whether the update is the choice's first one, and the tokens to render."""
        tokens = update.tokens if self.parsed.generates else ()
        first = index not in self.started
        self.started.add(index)
        if update.end is not None:
            self.finished.add(index)
        self.generated[index] += len(tokens)
        return first, tokens

    def choice_fields(self, index: int, update: RequestOutput, tokens: Sequence[Token]) -> dict[str, Any]:
        """Returns the common fields of choices: index, finish reason, stop reason, and token ids if requested."""
        result = self.handles[index].result
        reason = None if update.end is None else self.finish(index, update.end)
        found: dict[str, Any] = {"index": index, "finish_reason": reason}
        if reason is not None and result is not None and result.stop_reason is not None:
            found["stop_reason"] = result.stop_reason
        if self.parsed.token_ids:
            found["token_ids"] = [token.token for token in tokens]
        return found

    def prompt_fields(self, index: int, update: RequestOutput) -> dict[str, Any]:
        """Returns the fields of a choice's prompt: token ids and log-probabilities, if requested."""
        found: dict[str, Any] = {}
        tokens = self.parsed.prompt_for(index).tokens
        if self.parsed.token_ids:
            found["prompt_token_ids"] = tokens
        if self.parsed.prompt_logprobs is not None and update.prompt_logprobs is not None:
            scores = update.prompt_logprobs
            found["prompt_logprobs"] = prompt_logprobs(self.served.texts, tokens, scores, self.parsed.prompt_logprobs)
        return found

    def logprob_tokens(self, tokens: Sequence[Token]) -> list[tuple[int, TokenLogprobs]]:
        """Returns tokens with their log-probabilities and the requested number of alternatives."""
        most = self.parsed.logprobs or 0
        return [(token.token, truncated(token.logprobs, most)) for token in tokens if token.logprobs is not None]

    def token_counts(self) -> str:
        """Formats the numbers of tokens for the access log."""
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
            **self.passes(),
        )

    def passes(self) -> dict[str, Any]:
        """Returns the fields of denoising passes of a usage; none while a choice runs, and for other models."""
        passes = sum(handle.steps for handle in self.handles)
        if not passes or len(self.finished) < len(self.handles):
            return {}
        return {"denoising_passes": passes, "tokens_per_pass": sum(self.generated) / passes}

    def metrics(self) -> Metrics:
        """Returns the metrics of an ended response."""
        found = self.speculation()
        if self.parsed.constrained:
            found.structured_outputs = mask_metrics(self.handles)
        return found

    def speculation(self) -> Metrics:
        """Returns the speculation or denoising metrics; null for several choices."""
        result = self.handles[0].result
        if len(self.handles) != 1 or result is None:
            return Metrics(speculative_decoding=None)
        if steps := self.handles[0].steps:
            denoising = DenoisingMetrics(steps=steps, tokens_per_step=len(result.tokens) / steps)
            return Metrics(speculative_decoding=None, denoising=denoising)
        found = speculative_decoding([result], self.served.engine.decoding.num_spec_tokens)
        return Metrics(speculative_decoding=None if found is None else SpeculativeDecoding.model_validate(found))

    def finish(self, index: int, end: EndReason) -> FinishReason:
        """Returns the finish reason of a choice."""
        return FINISHES[end]

    @abstractmethod
    def render_full(self, updates: Sequence[RequestOutput]) -> Answer:
        """Renders a response that is not streamed, from the merged output of each choice."""

    @abstractmethod
    def events(self, index: int, update: RequestOutput) -> Iterable[bytes]:
        """Renders an output as events of a stream."""

    @abstractmethod
    def last_events(self) -> Iterable[bytes]:
        """Renders the last events of a stream."""

    @abstractmethod
    def failed(self, error: ApiError) -> Iterable[bytes]:
        """Renders the last events of a stream that ends with an error."""


def event(data: bytes, name: str | None = None) -> bytes:
    """Formats a server-sent event."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + data + b"\n\n"


@dataclass
class ChunkRenderer(Renderer):
    """Renders streams of chunks that end with [DONE], as completions and chats have."""

    options: StreamOptions | None = None

    @abstractmethod
    def chunk(self, index: int, update: RequestOutput) -> Completion | ChatChunk | None:
        """Renders an output as a chunk; None for an output without tokens and without an end."""

    @abstractmethod
    def last_chunk(self) -> Completion | ChatChunk:
        """Renders the last chunk, which has the usage and no choices."""

    def events(self, index: int, update: RequestOutput) -> Iterable[bytes]:
        """Renders an output as a chunk, with the usage and the rounds if the stream options request them."""
        chunk = self.chunk(index, update)
        if chunk is None:
            return ()
        if self.options is not None and self.options.include_usage:
            chunk.usage = self.usage() if self.options.continuous_usage_stats else None
        if self.options is not None and self.options.include_rounds:
            chunk.rounds = list(round_details(update))
        return (event(chunk.json_bytes),)

    def last_events(self) -> Iterable[bytes]:
        if self.options is not None and self.options.include_usage:
            yield event(self.last_chunk().json_bytes)
        yield DONE

    def failed(self, error: ApiError) -> Iterable[bytes]:
        return event(error.body.model_dump_json().encode()), DONE


@dataclass
class CompletionRenderer(ChunkRenderer):
    """Renders responses of `/v1/completions`.

    Attributes:
        offsets: character offsets of each choice's tokens.
        pending_prompt_logprobs: log-probabilities of prompts by choice, until they are rendered.
    """

    offsets: list[Offsets] = field(init=False)
    pending_prompt_logprobs: dict[int, Sequence[TokenLogprobs]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.root |= {"id": f"cmpl-{self.request_id}", "object": "text_completion"}
        starts = [len(self.parsed.prompt_for(index).text) if self.parsed.echo else 0 for index in range(len(self.handles))]
        tokenizer = self.served.texts.tokenizer
        self.offsets = [
            Offsets(tokenizer, start, request.sampling.skip_special_tokens, request.prompt, self.parsed.constrained)
            for start, request in zip(starts, self.parsed.requests, strict=True)
        ]

    def render_full(self, updates: Sequence[RequestOutput]) -> Completion:
        self.pending_prompt_logprobs = {
            n: update.prompt_logprobs for n, update in enumerate(updates) if update.prompt_logprobs is not None
        }
        choices = [self.choice(index, update) for index, update in enumerate(updates)]
        return Completion(**self.root, choices=choices, usage=self.usage(), metrics=self.metrics())

    def chunk(self, index: int, update: RequestOutput) -> Completion | None:
        if update.prompt_logprobs is not None:
            self.pending_prompt_logprobs[index] = update.prompt_logprobs
        if not update.tokens and update.end is None:
            return None
        return Completion(**self.root, choices=[self.choice(index, update)])

    def last_chunk(self) -> Completion:
        return Completion(**self.root, choices=[], usage=self.usage(), metrics=self.metrics())

    def choice(self, index: int, update: RequestOutput) -> CompletionChoice:
        first, tokens = self.take(index, update)
        text = (self.parsed.prompt_for(index).text if self.parsed.echo and first else "") + joined_text(tokens)
        found = None if self.parsed.logprobs is None else self.logprobs(index, tokens, first)
        fields = self.choice_fields(index, update, tokens) | (self.prompt_fields(index, update) if first else {})
        return CompletionChoice(text=text, logprobs=found, **fields)

    def logprobs(self, index: int, new: Sequence[Token], first: bool) -> CompletionLogprobs:
        prompt = self.parsed.prompt_for(index)
        most = self.parsed.logprobs or 0
        tokens: list[tuple[int, TokenLogprobs | None]] = [*self.logprob_tokens(new)]
        offsets = self.offsets[index].push([token for token, _ in tokens])
        if self.parsed.echo and first:
            before = (None, *(truncated(one, most) for one in self.pending_prompt_logprobs.pop(index, ())))
            tokens = [*zip(prompt.tokens, before, strict=True), *tokens]
            offsets = [*prompt.offsets, *offsets]
        return completion_logprobs(self.served.texts, tokens, offsets)


@dataclass
class ChatRenderer(ChunkRenderer):
    """Renders responses of `/v1/chat/completions`.

    Attributes:
        texts: parsers of the choices' texts.
    """

    texts: list[ChoiceText] = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.root |= {"id": f"chatcmpl-{self.request_id}"}
        self.texts = [ChoiceText(self.parsed.tools) for _ in self.handles]

    def render_full(self, updates: Sequence[RequestOutput]) -> Chat:
        choices = []
        for index, update in enumerate(updates):
            _, tokens = self.take(index, update)
            message = self.texts[index].push(joined_text(tokens), last=True).message()
            fields = self.choice_fields(index, update, tokens)
            choices.append(ChatChoice(message=message, logprobs=self.logprobs(tokens), **fields))
        rest = {"usage": self.usage(), "metrics": self.metrics(), **self.prompt_fields(0, updates[0])}
        return Chat(**self.root, object="chat.completion", choices=choices, **rest)

    def chunk(self, index: int, update: RequestOutput) -> ChatChunk | None:
        if not update.tokens and update.end is None:
            return None
        prompt = self.prompt_fields(0, update) if not self.started else {}
        first, tokens = self.take(index, update)
        delta = Delta(role="assistant") if first else Delta()
        if tokens or (update.end is not None and self.parsed.tools is not None):
            self.texts[index].push(joined_text(tokens), update.end is not None).apply_to(delta)
        choice = ChatChunkChoice(delta=delta, logprobs=self.logprobs(tokens), **self.choice_fields(index, update, tokens))
        return ChatChunk(**self.root, object="chat.completion.chunk", choices=[choice], **prompt)

    def finish(self, index: int, end: EndReason) -> FinishReason:
        reason = super().finish(index, end)
        return "tool_calls" if reason == "stop" and self.texts[index].calls else reason

    def last_chunk(self) -> ChatChunk:
        rest = {"usage": self.usage(), "metrics": self.metrics()}
        return ChatChunk(**self.root, object="chat.completion.chunk", choices=[], **rest)

    def logprobs(self, tokens: Sequence[Token]) -> ChatLogprobs | None:
        return None if self.parsed.logprobs is None else chat_logprobs(self.served.texts, self.logprob_tokens(tokens))


def mask_metrics(handles: Sequence[RequestHandle]) -> StructuredOutputMetrics:
    """Returns the source of the masks of all rounds."""
    found = sorted({each for handle in handles for each in handle.masks})
    return StructuredOutputMetrics.model_validate({"masks": "both" if len(found) > 1 else next(iter(found), "none")})


def round_details(update: RequestOutput) -> Iterator[RoundDetails]:
    """Yields the rounds of an output, each with its tokens."""
    remaining = iter(update.tokens)
    for each in update.rounds:
        tokens = [RoundToken(text=token.text, drafted=token.drafted) for token in islice(remaining, each.tokens)]
        yield RoundDetails(tokens=tokens, drafted=each.drafted, accepted=each.accepted, choice=each.choice)
