"""Anthropic's Messages API: its answers, whole and as events."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic_core import from_json

from tilewright.runtime.request import RequestOutput
from tilewright.server.answers import Answer, Metrics
from tilewright.server.blocks import AnswerBlock, AnswerBlocks, Change, Grown, Opened
from tilewright.server.errors import ApiError
from tilewright.server.render import Renderer, event, text_of
from tilewright.server.tools import call_as_text

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class TextBlock(Answer):
    type: Literal["text"]
    text: str
    citations: None


class AnswerToolUse(Answer):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessagesUsage(Answer):
    """Tokens; those of the prompt that were found in the prefix cache are not among `input_tokens`."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class AnsweredMessage(Answer):
    """Of `/v1/messages`; in a stream's first event without content, and without a reason to stop."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | AnswerToolUse]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessagesUsage
    metrics: Metrics | None = None


class TokenCount(Answer):
    input_tokens: int


def named(kind: str, **fields: Any) -> bytes:
    """An event of a kind, which its data has, too."""
    return event(json.dumps({"type": kind, **fields}).encode(), kind)


@dataclass
class MessagesRenderer(Renderer):
    """`/v1/messages`, of one choice.

    Attributes:
        most: tokens that were asked for, for which the context may have had no room.
        blocks: of the answer.
    """

    most: int
    blocks: AnswerBlocks = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.blocks = AnswerBlocks(self.parsed.tools)

    def whole(self, updates: Sequence[RequestOutput]) -> AnsweredMessage:
        _, tokens = self.take(0, updates[0])
        for _ in self.blocks.push(text_of(tokens), last=True):
            continue
        content = [self.shown(block) for block in self.blocks.found]
        called = any(isinstance(block, AnswerToolUse) for block in content)
        return self.message(content, **self.stop(called), metrics=self.metrics())

    def message(self, content: list[TextBlock | AnswerToolUse], **ended: Any) -> AnsweredMessage:
        return AnsweredMessage(
            id=f"msg_{self.request_id}",
            type="message",
            role="assistant",
            model=self.served.name,
            content=content,
            usage=self.message_usage(),
            **ended,
        )

    def shown(self, block: AnswerBlock) -> TextBlock | AnswerToolUse:
        """A block. Arguments that were cut off are shown as far as they came; what is no JSON is no call but a text."""
        if block.name is None:
            return TextBlock(type="text", text=block.text, citations=None)
        try:
            arguments = from_json(block.text or "{}", allow_partial="trailing-strings")
        except ValueError:
            return TextBlock(type="text", text=call_as_text(block.name, block.text), citations=None)
        return AnswerToolUse(type="tool_use", id=f"toolu_{block.id}", name=block.name, input=arguments)

    def message_usage(self) -> MessagesUsage:
        usage = self.usage()
        cached = usage.prompt_tokens_details.cached_tokens
        return MessagesUsage(
            input_tokens=usage.prompt_tokens - cached,
            cache_creation_input_tokens=0,
            cache_read_input_tokens=cached,
            output_tokens=usage.completion_tokens,
        )

    def stop(self, called: bool) -> dict[str, Any]:
        """Fields that say why it ended; `called` where there are calls."""
        result = self.handles[0].result
        assert result is not None, "it has ended"
        if isinstance(result.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": result.stop_reason}
        if result.finish_reason == "length":
            whole = len(result.tokens) >= self.most
            return {"stop_reason": "max_tokens" if whole else "model_context_window_exceeded", "stop_sequence": None}
        return {"stop_reason": "tool_use" if called else "end_turn", "stop_sequence": None}

    def events(self, index: int, update: RequestOutput) -> Iterable[bytes]:
        if not update.tokens and update.end is None:
            return
        first, tokens = self.take(index, update)
        if first:
            message = self.message([], stop_reason=None, stop_sequence=None)
            yield named("message_start", message=message.model_dump(exclude_unset=True))
        for change in self.blocks.push(text_of(tokens), update.end is not None):
            yield from self.changed(change)

    def changed(self, change: Change) -> Iterator[bytes]:
        """Events of a block's change."""
        index = len(self.blocks.found) - 1
        block = change.block
        if isinstance(change, Opened):
            empty = self.shown(AnswerBlock(block.name, block.id))
            yield named("content_block_start", index=index, content_block=empty.model_dump())
            if index == 0:
                yield named("ping")
        elif isinstance(change, Grown) and block.name is None:
            yield named("content_block_delta", index=index, delta={"type": "text_delta", "text": change.text})
        elif isinstance(change, Grown):
            yield named("content_block_delta", index=index, delta={"type": "input_json_delta", "partial_json": change.text})
        else:
            yield named("content_block_stop", index=index)

    def last_events(self) -> Iterable[bytes]:
        usage = self.message_usage().model_dump()
        metrics = self.metrics().model_dump(exclude_unset=True)
        yield named("message_delta", delta=self.stop(self.blocks.calls), usage=usage, metrics=metrics)
        yield named("message_stop")

    def failed(self, error: ApiError) -> Iterable[bytes]:
        return (event(error.messages_body(self.request_id).model_dump_json().encode(), "error"),)
