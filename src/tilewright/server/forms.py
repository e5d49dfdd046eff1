"""From what the engine tells to what clients get: whole bodies and chunks of a stream, for both ways of generating."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from tilewright.decode.acceptance import speculative_decoding
from tilewright.engine.request import EndReason, Ticket, Token, TokenLogprobs, Update
from tilewright.engine.service import Service
from tilewright.server.asks import Plan
from tilewright.server.logprobs import chat_logprobs, completion_logprobs
from tilewright.server.responses import (
    AnswerMessage,
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
    Metrics,
    PromptDetails,
    ShownRound,
    ShownToken,
    SpeculativeDecoding,
    Usage,
)
from tilewright.server.schema import StreamOptions
from tilewright.server.tokens import Offsets, TokenTexts

FINISHES: Mapping[EndReason, FinishReason] = {"eos": "stop", "stop": "stop", "length": "length"}
"""What ends are called; the other ends are errors."""


@dataclass(frozen=True)
class Served:
    """What all answers need.

    Attributes:
        name: of the model, as clients know it.
        version: of this software.
        created: when the server began, in Unix seconds.
    """

    engine: Service[Any]
    name: str
    version: str
    created: int
    texts: TokenTexts


def joined(updates: Sequence[Update]) -> Update:
    """All that a request was told, as one."""
    tokens = tuple(token for update in updates for token in update.tokens)
    found = next((update.prompt_logprobs for update in updates if update.prompt_logprobs is not None), None)
    return Update(tokens=tokens, end=updates[-1].end, prompt_logprobs=found)


def text_of(tokens: Sequence[Token]) -> str:
    return "".join(token.text for token in tokens)


@dataclass
class Form(ABC):
    """How one body's choices are answered. Updates of each choice come in order.

    Attributes:
        tickets: of all choices.
        generated: tokens of each choice so far.
    """

    served: Served
    request_id: str
    plan: Plan
    tickets: Sequence[Ticket]
    generated: list[int] = field(init=False)
    root: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.generated = [0] * len(self.plan.asks)
        self.root = {
            "created": int(time.time()),
            "model": self.served.name,
            "system_fingerprint": f"tilewright-{self.served.version}",
        }

    def begins(self, index: int) -> bool:
        """Whether nothing of a choice has been shown yet."""
        return self.generated[index] == 0

    def usage(self) -> Usage:
        firsts = self.tickets[:: self.plan.choices]
        prompt, completion = sum(len(one.tokens) for one in self.plan.prompts), sum(self.generated)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptDetails(cached_tokens=sum(ticket.cached_tokens for ticket in firsts)),
        )

    def metrics(self) -> Metrics:
        """Of a single choice that has ended."""
        result = self.tickets[0].result
        if len(self.tickets) != 1 or result is None:
            return Metrics(speculative_decoding=None)
        if steps := self.tickets[0].steps:
            told = DenoisingSteps(steps=steps, tokens_per_step=len(result.tokens) / steps)
            return Metrics(speculative_decoding=None, denoising=told)
        found = speculative_decoding([result], self.served.engine.num_spec_tokens)
        return Metrics(speculative_decoding=None if found is None else SpeculativeDecoding.model_validate(found))

    def finish(self, update: Update) -> FinishReason | None:
        return None if update.end is None else FINISHES[update.end]

    @abstractmethod
    def whole(self, updates: Sequence[Update]) -> Completion | Chat:
        """The body of an answer that is not streamed, of each choice's joined updates."""

    @abstractmethod
    def chunk(self, index: int, update: Update) -> Completion | ChatChunk | None:
        """What an update adds to the stream; None where that is nothing."""

    @abstractmethod
    def last_chunk(self) -> Completion | ChatChunk:
        """The chunk without choices that usage comes in."""


@dataclass
class CompletionForm(Form):
    """`/v1/completions`.

    Attributes:
        echo: the prompt comes before what was generated.
        offsets: where the next token of each choice begins.
        of_prompts: log-probabilities of prompts, by choice, until they are shown.
    """

    echo: bool = False
    offsets: list[Offsets] = field(init=False)
    of_prompts: dict[int, Sequence[TokenLogprobs]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.root |= {"id": f"cmpl-{self.request_id}", "object": "text_completion"}
        starts = [len(self.plan.prompt_of(index).text) if self.echo else 0 for index in range(len(self.tickets))]
        self.offsets = [Offsets(self.served.texts.tokenizer, start) for start in starts]

    def whole(self, updates: Sequence[Update]) -> Completion:
        self.of_prompts = {n: update.prompt_logprobs for n, update in enumerate(updates) if update.prompt_logprobs is not None}
        choices = [self.choice(index, update) for index, update in enumerate(updates)]
        return Completion(**self.root, choices=choices, usage=self.usage(), metrics=self.metrics())

    def chunk(self, index: int, update: Update) -> Completion | None:
        if update.prompt_logprobs is not None:
            self.of_prompts[index] = update.prompt_logprobs
        if not update.tokens and update.end is None:
            return None
        return Completion(**self.root, choices=[self.choice(index, update)])

    def last_chunk(self) -> Completion:
        return Completion(**self.root, choices=[], usage=self.usage(), metrics=self.metrics())

    def choice(self, index: int, update: Update) -> CompletionChoice:
        first = self.begins(index)
        self.generated[index] += len(update.tokens)
        text = (self.plan.prompt_of(index).text if self.echo and first else "") + text_of(update.tokens)
        found = None if self.plan.asks[index].logprobs is None else self.logprobs(index, update, first)
        return CompletionChoice(index=index, text=text, logprobs=found, finish_reason=self.finish(update))

    def logprobs(self, index: int, update: Update, first: bool) -> CompletionLogprobs:
        prompt = self.plan.prompt_of(index)
        tokens: list[tuple[int, TokenLogprobs | None]] = [(token.token, token.logprobs) for token in update.tokens]
        offsets = self.offsets[index].of([token for token, _ in tokens])
        if self.echo and first:
            tokens = [*zip(prompt.tokens, (None, *self.of_prompts.pop(index, ())), strict=True), *tokens]
            offsets = [*prompt.offsets, *offsets]
        return completion_logprobs(self.served.texts, tokens, offsets)


@dataclass
class ChatForm(Form):
    """`/v1/chat/completions`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.root |= {"id": f"chatcmpl-{self.request_id}"}

    def whole(self, updates: Sequence[Update]) -> Chat:
        choices = []
        for index, update in enumerate(updates):
            self.generated[index] += len(update.tokens)
            message = AnswerMessage(role="assistant", content=text_of(update.tokens), refusal=None)
            reason = self.finish(update)
            assert reason is not None, "a whole answer has ended"
            found = self.logprobs(index, update)
            choices.append(ChatChoice(index=index, message=message, logprobs=found, finish_reason=reason))
        ended = {"usage": self.usage(), "metrics": self.metrics()}
        return Chat(**self.root, object="chat.completion", choices=choices, **ended)

    def chunk(self, index: int, update: Update) -> ChatChunk | None:
        if not update.tokens and update.end is None:
            return None
        first = self.begins(index)
        self.generated[index] += len(update.tokens)
        delta = Delta(role="assistant") if first else Delta()
        if update.tokens:
            delta.content = text_of(update.tokens)
        found, reason = self.logprobs(index, update), self.finish(update)
        choice = ChatChunkChoice(index=index, delta=delta, logprobs=found, finish_reason=reason)
        return ChatChunk(**self.root, object="chat.completion.chunk", choices=[choice])

    def last_chunk(self) -> ChatChunk:
        ended = {"usage": self.usage(), "metrics": self.metrics()}
        return ChatChunk(**self.root, object="chat.completion.chunk", choices=[], **ended)

    def logprobs(self, index: int, update: Update) -> ChatLogprobs | None:
        if self.plan.asks[index].logprobs is None:
            return None
        found = [(token.token, token.logprobs) for token in update.tokens]
        return chat_logprobs(self.served.texts, [(token, one) for token, one in found if one is not None])


def completed(chunk: Completion | ChatChunk, update: Update, form: Form, options: StreamOptions | None) -> bytes:
    """A chunk with what the stream's options add to each: the usage so far, or null where it comes at the end; the rounds."""
    if options is not None and options.include_usage:
        chunk.usage = form.usage() if options.continuous_usage_stats else None
    if options is not None and options.include_rounds:
        chunk.rounds = list(rounds_of(update))
    return chunk.json_bytes


def rounds_of(update: Update) -> Iterator[ShownRound]:
    """The rounds of an update, each with its tokens."""
    tokens = iter(update.tokens)
    for each in update.rounds:
        own = [ShownToken(text=token.text, drafted=token.drafted) for token in islice(tokens, each.tokens)]
        yield ShownRound(tokens=own, drafted=each.drafted, accepted=each.accepted, choice=each.choice)
