"""Responses of OpenAI's Responses API, whole and as server-sent events."""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tilewright.runtime.request import RequestOutput
from tilewright.server.answers import Answer, Metrics, PromptDetails
from tilewright.server.blocks import BlockDelta, BlockEvent, BlockStart, BlockStop, OutputBlock, OutputBlocks
from tilewright.server.errors import ApiError
from tilewright.server.render import Renderer, event, joined_text
from tilewright.server.responses_body import ResponsesBody, assistant_message

Status = Literal["in_progress", "completed", "incomplete", "failed"]
Json = dict[str, Any]


class OutputText(Answer):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class OutputMessage(Answer):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Status
    content: list[OutputText]


class OutputCall(Answer):
    id: str
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    status: Status


class InputDetails(PromptDetails):
    """Details of the input tokens.

    Attributes:
        cache_write_tokens: always 0.
    """

    cache_write_tokens: int


class OutputDetails(Answer):
    """Details of the output tokens.

    Attributes:
        reasoning_tokens: always 0; thinking is part of the text.
    """

    reasoning_tokens: int


class ResponsesUsage(Answer):
    """Token counts.

    Attributes:
        denoising_passes: number of passes that denoised the response; left out for models that decode token by token.
        tokens_per_pass: `output_tokens` over `denoising_passes`; left out likewise.
    """

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int
    denoising_passes: int | None = None
    tokens_per_pass: float | None = None


class ResponseFailure(Answer):
    code: str
    message: str


class IncompleteDetails(Answer):
    reason: Literal["max_output_tokens"]


class ResponseAnswer(Answer):
    """Response of `/v1/responses`: the request's options, and the output so far."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Status
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[OutputMessage | OutputCall]
    usage: ResponsesUsage | None
    metrics: Metrics | None
    background: Literal[False]
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, str | None]
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"]
    user: str | None


class DeletedResponse(Answer):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


StoreResponse = Callable[[ResponseAnswer, Json], None]
"""Stores an ended response and its output as a chat message."""


@dataclass
class ResponsesRenderer(Renderer):
    """Renders responses of `/v1/responses`, which have one choice.

    Attributes:
        body: request body.
        store: stores the response at its end; None to store nothing.
        blocks: content blocks of the output.
        event_count: number of events so far.
    """

    body: ResponsesBody = field(kw_only=True)
    store: StoreResponse | None = field(kw_only=True)
    blocks: OutputBlocks = field(init=False)
    event_count: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.blocks = OutputBlocks(self.parsed.tools)

    def render_full(self, updates: Sequence[RequestOutput]) -> ResponseAnswer:
        _, tokens = self.take(0, updates[0])
        for _ in self.blocks.push(joined_text(tokens), last=True):
            continue
        return self.ended()

    @property
    def cut_off(self) -> bool:
        """True if the output reached the largest number of tokens."""
        result = self.handles[0].result
        return result is not None and result.finish_reason == "length"

    def ended(self) -> ResponseAnswer:
        """Renders the ended response and stores it."""
        *before, last = self.blocks.found
        ended: Status = "incomplete" if self.cut_off else "completed"
        output = [*(self.item(block, "completed") for block in before), self.item(last, ended)]
        usage = self.usage()
        counts = ResponsesUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens, cache_write_tokens=0),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputDetails(reasoning_tokens=0),
            total_tokens=usage.total_tokens,
            **self.passes(),
        )
        found = self.response(ended, output=output, usage=counts, metrics=self.metrics())
        if self.store is not None:
            self.store(found, self.chat_message())
        return found

    def chat_message(self) -> Json:
        """Converts the output to a chat message."""
        texts = [block.text for block in self.blocks.found if block.name is None]
        calls = [(f"call_{block.id}", block.name, block.text) for block in self.blocks.found if block.name is not None]
        return assistant_message("".join(texts), calls)

    def response(self, status: Status, error: ResponseFailure | None = None, **more: Any) -> ResponseAnswer:
        details = IncompleteDetails(reason="max_output_tokens") if status == "incomplete" else None
        is_done = status in ("completed", "incomplete")
        fields = {
            "id": f"resp_{self.request_id}",
            "object": "response",
            "created_at": self.root["created"],
            "completed_at": int(time.time()) if is_done else None,
            "status": status,
            "error": error,
            "incomplete_details": details,
            "model": self.served.name,
            "output": [],
            "usage": None,
            "metrics": None,
        }
        return ResponseAnswer(**{**fields, **more, **self.request_fields()})

    def request_fields(self) -> Json:
        """Returns the request's options, with defaults for missing ones."""
        body = self.body
        sampling = self.parsed.requests[0].sampling
        form = {"type": "text"} if body.text is None or body.text.format is None else body.text.format.for_response()
        choice = body.tool_choice or "auto"
        return {
            "background": False,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning is not None else None, "summary": None},
            "service_tier": "default",
            "store": self.store is not None,
            "temperature": sampling.temperature,
            "text": {"format": form},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "user": body.user,
        }

    def item(self, block: OutputBlock, status: Status) -> OutputMessage | OutputCall:
        if block.name is None:
            content = [] if status == "in_progress" else [self.part(block.text)]
            return OutputMessage(id=f"msg_{block.id}", type="message", role="assistant", status=status, content=content)
        return OutputCall(
            id=f"fc_{block.id}",
            type="function_call",
            call_id=f"call_{block.id}",
            name=block.name,
            arguments=block.text,
            status=status,
        )

    def part(self, text: str) -> OutputText:
        return OutputText(type="output_text", text=text, annotations=[], logprobs=[])

    def event(self, kind: str, **fields: Any) -> bytes:
        """Formats the next event."""
        number = self.event_count
        self.event_count = number + 1
        dumped = {
            name: value.model_dump(exclude_unset=True) if isinstance(value, Answer) else value for name, value in fields.items()
        }
        return event(json.dumps({"type": kind, "sequence_number": number, **dumped}).encode(), kind)

    def beginning(self) -> Iterator[bytes]:
        for kind in ("response.created", "response.in_progress"):
            yield self.event(kind, response=self.response("in_progress"))

    def events(self, index: int, update: RequestOutput) -> Iterable[bytes]:
        if not update.tokens and update.end is None:
            return
        first, tokens = self.take(index, update)
        if first:
            yield from self.beginning()
        for change in self.blocks.push(joined_text(tokens), update.end is not None):
            yield from self.block_events(change)

    def block_events(self, change: BlockEvent) -> Iterator[bytes]:
        """Yields the events of a block's change."""
        block = change.block
        index = len(self.blocks.found) - 1
        item = self.item(block, "in_progress")
        place: Json = {"item_id": item.id, "output_index": index}
        kind = "response.function_call_arguments"
        if block.name is None:
            kind = "response.output_text"
            place = {**place, "content_index": 0}
        if isinstance(change, BlockStart):
            yield self.event("response.output_item.added", output_index=index, item=item)
            if block.name is None:
                yield self.event("response.content_part.added", **place, part=self.part(""))
        elif isinstance(change, BlockDelta):
            more = {"logprobs": []} if block.name is None else {}
            yield self.event(f"{kind}.delta", **place, delta=change.text, **more)
        elif block.name is None:
            yield self.event(f"{kind}.done", **place, text=block.text, logprobs=[])
            yield self.event("response.content_part.done", **place, part=self.part(block.text))
        else:
            yield self.event(f"{kind}.done", **place, name=block.name, arguments=block.text)
        if isinstance(change, BlockStop):
            ended: Status = "incomplete" if change.last and self.cut_off else "completed"
            yield self.event("response.output_item.done", output_index=index, item=self.item(block, ended))

    def last_events(self) -> Iterable[bytes]:
        found = self.ended()
        yield self.event(f"response.{found.status}", response=found)

    def failed(self, error: ApiError) -> Iterable[bytes]:
        if not self.event_count:
            yield from self.beginning()
        failure = ResponseFailure(code="server_error", message=error.message)
        yield self.event("response.failed", response=self.response("failed", failure))
