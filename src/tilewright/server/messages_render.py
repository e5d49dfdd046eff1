"""Responses of Anthropic's Messages API, whole and as server-sent events."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic_core import from_json

from tilewright.runtime.request import RequestOutput
from tilewright.server.answers import Answer, Metrics
from tilewright.server.blocks import BlockDelta, BlockEvent, BlockStart, OutputBlock, OutputBlocks
from tilewright.server.errors import ApiError
from tilewright.server.render import Renderer, event, joined_text
from tilewright.server.tools import call_as_text

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class TextBlock(Answer):
    type: Literal["text"]
    text: str
    citations: None


class ToolUseOutput(Answer):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessagesUsage(Answer):
    """Token counts. `input_tokens` excludes the prompt tokens found in the prefix cache.

    Attributes:
        denoising_passes: number of passes that denoised the response; left out of the first event of a stream, and for models
            that decode token by token.
        tokens_per_pass: `output_tokens` over `denoising_passes`; left out likewise.
    """

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    denoising_passes: int | None = None
    tokens_per_pass: float | None = None


class MessageResponse(Answer):
    """Response of `/v1/messages`. The first event of a stream has no content and no stop reason."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ToolUseOutput]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessagesUsage
    metrics: Metrics | None = None


class TokenCount(Answer):
    input_tokens: int


def named_event(kind: str, **fields: Any) -> bytes:
    """Formats a server-sent event, whose data has the type of the event."""
    return event(json.dumps({"type": kind, **fields}).encode(), kind)


@dataclass
class MessagesRenderer(Renderer):
    """Renders responses of `/v1/messages`, which have one choice.

    Attributes:
        most: the body's `max_tokens`, which may exceed the rest of the context.
        blocks: content blocks of the response.
    """

    most: int
    blocks: OutputBlocks = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.blocks = OutputBlocks(self.parsed.tools)

    def render_full(self, updates: Sequence[RequestOutput]) -> MessageResponse:
        _, tokens = self.take(0, updates[0])
        for _ in self.blocks.push(joined_text(tokens), last=True):
            continue
        content = [self.shown(block) for block in self.blocks.found]
        called = any(isinstance(block, ToolUseOutput) for block in content)
        return self.message(content, **self.stop(called), metrics=self.metrics())

    def message(self, content: list[TextBlock | ToolUseOutput], **ended: Any) -> MessageResponse:
        return MessageResponse(
            id=f"msg_{self.request_id}",
            type="message",
            role="assistant",
            model=self.served.name,
            content=content,
            usage=self.message_usage(),
            **ended,
        )

    def shown(self, block: OutputBlock) -> TextBlock | ToolUseOutput:
        """Formats a block. Truncated arguments are completed to valid JSON; a call with invalid arguments becomes a text."""
        if block.name is None:
            return TextBlock(type="text", text=block.text, citations=None)
        try:
            arguments = from_json(block.text or "{}", allow_partial="trailing-strings")
        except ValueError:
            return TextBlock(type="text", text=call_as_text(block.name, block.text), citations=None)
        return ToolUseOutput(type="tool_use", id=f"toolu_{block.id}", name=block.name, input=arguments)

    def message_usage(self) -> MessagesUsage:
        usage = self.usage()
        cached = usage.prompt_tokens_details.cached_tokens
        return MessagesUsage(
            input_tokens=usage.prompt_tokens - cached,
            cache_creation_input_tokens=0,
            cache_read_input_tokens=cached,
            output_tokens=usage.completion_tokens,
            **self.passes(),
        )

    def stop(self, called: bool) -> dict[str, Any]:
        """Returns the fields of the stop reason. `called`: the response contains tool calls."""
        result = self.handles[0].result
        assert result is not None, "the request has not ended"
        if isinstance(result.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": result.stop_reason}
        if result.finish_reason == "length":
            reached_limit = len(result.tokens) >= self.most
            return {"stop_reason": "max_tokens" if reached_limit else "model_context_window_exceeded", "stop_sequence": None}
        return {"stop_reason": "tool_use" if called else "end_turn", "stop_sequence": None}

    def events(self, index: int, update: RequestOutput) -> Iterable[bytes]:
        if not update.tokens and update.end is None:
            return
        first, tokens = self.take(index, update)
        if first:
            message = self.message([], stop_reason=None, stop_sequence=None)
            yield named_event("message_start", message=message.model_dump(exclude_unset=True))
        for change in self.blocks.push(joined_text(tokens), update.end is not None):
            yield from self.block_events(change)

    def block_events(self, change: BlockEvent) -> Iterator[bytes]:
        """Yields the events of a block's change."""
        index = len(self.blocks.found) - 1
        block = change.block
        if isinstance(change, BlockStart):
            empty = self.shown(OutputBlock(block.name, block.id))
            yield named_event("content_block_start", index=index, content_block=empty.model_dump())
            if index == 0:
                yield named_event("ping")
        elif isinstance(change, BlockDelta) and block.name is None:
            yield named_event("content_block_delta", index=index, delta={"type": "text_delta", "text": change.text})
        elif isinstance(change, BlockDelta):
            yield named_event(
                "content_block_delta", index=index, delta={"type": "input_json_delta", "partial_json": change.text}
            )
        else:
            yield named_event("content_block_stop", index=index)

    def last_events(self) -> Iterable[bytes]:
        usage = self.message_usage().model_dump(exclude_unset=True)
        metrics = self.metrics().model_dump(exclude_unset=True)
        yield named_event("message_delta", delta=self.stop(self.blocks.calls), usage=usage, metrics=metrics)
        yield named_event("message_stop")

    def failed(self, error: ApiError) -> Iterable[bytes]:
        return (event(error.messages_body(self.request_id).model_dump_json().encode(), "error"),)
