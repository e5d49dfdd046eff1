"""Request bodies of Anthropic's Messages API, and their conversion to chat bodies.

The chat body (`protocol.py`) validates the converted fields.
"""

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from tilewright.server.fields import (
    LONGEST_NAME,
    WHOLE,
    Body,
    IgnoredText,
    IgnoredValue,
    Unsupported,
    UnsupportedValue,
    expect,
    unsupported,
)
from tilewright.server.protocol import (
    MOST_MESSAGES,
    MOST_STOPS,
    Effort,
    Seed,
    StopText,
    Temperature,
    TemplateValues,
    TextPart,
    Thinking,
)
from tilewright.server.tools import MOST_TOOLS, Name
from tilewright.server.translate import ChatConvertible

Json = dict[str, Any]
Id = Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)]


def to_parts(content: Any) -> Any:
    """Converts a text to a list of one text part."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


Texts = Annotated[
    Annotated[list[TextPart], Field(max_length=MOST_MESSAGES)],
    BeforeValidator(to_parts, json_schema_input_type=str | Annotated[list[TextPart], Field(max_length=MOST_MESSAGES)]),
]
"""Text, or list of text parts."""


class MessageBlock(Body):
    """Content block. Other fields (`cache_control`, `citations`) are ignored."""

    model_config = ConfigDict(extra="ignore")


class ToolUseBlock(MessageBlock):
    """Tool call of an earlier response.

    Attributes:
        type: tool call.
        id: id of the call, which its result names.
        name: name of the function.
        input: arguments.
    """

    type: Literal["tool_use"]
    id: Id
    name: Annotated[str, Field(min_length=1)]
    input: Json


class ToolResultBlock(MessageBlock):
    """Result of a tool call. `is_error` is ignored, because chat templates do not support it.

    Attributes:
        type: result of a tool call.
        tool_use_id: id of the call.
        content: result, as text or a list of text parts.
    """

    type: Literal["tool_result"]
    tool_use_id: Id
    content: Texts | None = None


class ThinkingBlock(MessageBlock):
    """Thinking of an earlier response, for the chat template.

    Attributes:
        type: thinking.
        thinking: text of the thinking.
    """

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(MessageBlock):
    """Redacted thinking block, which is ignored.

    Attributes:
        type: redacted thinking.
    """

    type: Literal["redacted_thinking"]


Thought = ThinkingBlock | RedactedThinkingBlock
ContentBlock = Annotated[TextPart | ToolUseBlock | ToolResultBlock | Thought, Field(discriminator="type")]
Blocks = Annotated[list[ContentBlock], Field(max_length=MOST_MESSAGES)]
OF_ROLE = {
    "system": (TextPart,),
    "user": (TextPart, ToolResultBlock),
    "assistant": (TextPart, ToolUseBlock, ThinkingBlock, RedactedThinkingBlock),
}


class MessageParam(Body):
    """Message of a conversation.

    Attributes:
        role: author of the message.
        content: text, or list of blocks; a final assistant message is continued.
    """

    role: Annotated[Literal["user", "assistant", "system"], expect("expected user, assistant or system")]
    content: Annotated[Blocks, BeforeValidator(to_parts, json_schema_input_type=str | Blocks)]

    @model_validator(mode="after")
    def check(self) -> "MessageParam":
        if not all(isinstance(block, OF_ROLE[self.role]) for block in self.content):
            kinds = {"user": "text and tool_result", "assistant": "text, tool_use and thinking"}.get(self.role, "text")
            raise PydanticCustomError("expected", "expected only blocks of type {kinds}", {"kinds": kinds})
        return self

    def chat(self) -> Iterator[Json]:
        """Yields the chat messages. Tool results become messages of their own."""
        if self.role == "assistant":
            yield self.assistant()
            return
        texts: list[Json] = []
        for block in self.content:
            if isinstance(block, TextPart):
                texts.append(block.model_dump())
            elif isinstance(block, ToolResultBlock):
                if texts:
                    yield {"role": self.role, "content": texts}
                texts = []
                content = [part.model_dump() for part in block.content or ()]
                yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
        if texts or not self.content:
            yield {"role": self.role, "content": texts}

    def assistant(self) -> Json:
        thoughts = [block.thinking for block in self.content if isinstance(block, ThinkingBlock)]
        calls = [
            {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": json.dumps(block.input)}}
            for block in self.content
            if isinstance(block, ToolUseBlock)
        ]
        return {
            "role": "assistant",
            "content": [block.model_dump() for block in self.content if isinstance(block, TextPart)],
            "tool_calls": calls or None,
            "reasoning_content": "\n".join(thoughts) or None,
        }


class MessagesTool(MessageBlock):
    """Function that the model may call. Other fields (`strict`, `cache_control`) are ignored.

    Attributes:
        type: only "custom" is supported; the server runs no tools.
        name: name of the function.
        description: description for the model.
        input_schema: JSON schema of the arguments.
    """

    type: Annotated[Literal["custom"] | None, unsupported("custom: the server runs no tools")] = None
    name: Name
    description: str | None = None
    input_schema: Json

    def chat(self) -> Json:
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return {"type": "function", "function": function}


class MessagesToolChoice(Body):
    """Choice of tools.

    Attributes:
        type: "auto" leaves the choice to the model, "any" forces a call, "tool" a call of `name`, "none" forbids calls.
        name: name of the function, for the type "tool".
        disable_parallel_tool_use: allow at most one call.
    """

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def check(self) -> "MessagesToolChoice":
        if (self.type == "tool") != (self.name is not None):
            raise PydanticCustomError("expected", "expected a name exactly for the type tool")
        return self

    def chat(self) -> str | Json:
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class OutputFormat(Body):
    """Format of the output.

    Attributes:
        type: JSON that follows a schema.
        schema_: JSON schema.
    """

    type: Literal["json_schema"]
    schema_: Annotated[Json, Field(alias="schema")]


class OutputConfig(Body):
    """Options of the output.

    Attributes:
        format: format of the output.
        effort: reasoning effort, if the chat template supports it; "none" disables thinking.
    """

    format: OutputFormat | None = None
    effort: Effort = None


class ContextEdit(Body):
    """Context edit without effect.

    Attributes:
        type: edit that keeps all thinking.
        keep: only "all" is supported.
    """

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class ContextManagement(Body):
    """Edits of the context.

    Attributes:
        edits: an empty list, or `clear_thinking_20251015` that keeps all.
    """

    edits: Annotated[
        list[ContextEdit] | None, unsupported("an empty list, or clear_thinking_20251015 with keep set to all")
    ] = None


PLACES = (
    (r"tools\[(\d+)\]\.function\.parameters", r"tools[\1].input_schema"),
    (r"tools\[(\d+)\]\.function", r"tools[\1]"),
    (r"response_format\.json_schema\.schema", "output_config.format.schema"),
    (r"response_format", "output_config.format"),
    (r"max_completion_tokens", "max_tokens"),
    (r"stop\b", "stop_sequences"),
)


class CountBody(ChatConvertible):
    """Body of `POST /v1/messages/count_tokens`.

    Attributes:
        messages: messages of the conversation.
        system: system prompt.
        tools: functions that the model may call.
        tool_choice: whether the model may, must or must not call a tool.
        output_config: output format (a JSON schema) and reasoning effort.
        output_format: output format, as in `output_config.format`.
        thinking: enables or disables thinking, if the chat template supports it.
        chat_template_kwargs: values for the chat template (extension).
        speed: only "standard" is supported.
        context_management: only edits without effect are supported.
    """

    places = PLACES

    messages: Annotated[list[MessageParam], Field(min_length=1, max_length=MOST_MESSAGES)]
    system: Texts | None = None
    tools: Annotated[list[MessagesTool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: MessagesToolChoice | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: TemplateValues = None
    # Ignored fields.
    cache_control: IgnoredValue = None
    betas: IgnoredValue = None
    anthropic_beta: IgnoredValue = None
    anthropic_version: IgnoredValue = None
    speed: Annotated[Literal["standard"] | None, unsupported("standard")] = None
    # Unsupported fields.
    context_management: ContextManagement | None = None
    mcp_servers: UnsupportedValue = None

    def system_messages(self) -> list[Json]:
        return [{"role": "system", "content": [part.model_dump() for part in self.system]}] if self.system else []

    def chat_messages(self) -> list[Json]:
        return [each for message in self.messages for each in message.chat()]

    def other_fields(self) -> Json:
        form = self.output_format or (self.output_config and self.output_config.format)
        choice = self.tool_choice
        last = self.messages[-1]
        called = any(isinstance(block, ToolUseBlock) for block in last.content)
        return {
            "tools": [tool.chat() for tool in self.tools or ()],
            "tool_choice": None if choice is None else choice.chat(),
            "parallel_tool_calls": not choice.disable_parallel_tool_use if choice is not None else None,
            "response_format": {"type": "json_schema", "json_schema": {"schema": form.schema_}} if form else None,
            "chat_template_kwargs": self.chat_template_kwargs,
            "thinking": None if self.thinking is None else self.thinking.model_dump(),
            "reasoning_effort": self.output_config and self.output_config.effort,
            # The response continues a final assistant message.
            "continue_final_message": (last.role == "assistant" and not called) or None,
        }


class MessagesBody(CountBody):
    """Body of `POST /v1/messages`.

    Attributes:
        max_tokens: largest number of generated tokens.
        stop_sequences: texts that end the response.
        stream: respond with server-sent events.
        temperature: sampling temperature; 0 is greedy.
        top_p: nucleus sampling threshold.
        top_k: number of most likely tokens to sample from; 0 or -1 for all.
        seed: seed of the sampling (extension).
        metadata: accepted and ignored.
        service_tier: "auto" and "standard_only" are accepted and ignored.
    """

    max_tokens: Annotated[int, Field(ge=1, lt=2**31), WHOLE]
    stop_sequences: Annotated[list[StopText], Field(max_length=MOST_STOPS)] | None = None
    stream: bool | None = None
    temperature: Temperature = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31), WHOLE] | None = None
    seed: Seed = None
    metadata: Annotated[Json, Field(max_length=16)] | None = None
    user_profile_id: IgnoredText = None
    workspace_id: IgnoredText = None
    billing_policy: IgnoredValue = None
    diagnostics: IgnoredValue = None
    inference_geo: IgnoredText = None
    service_tier: Annotated[Literal["auto", "standard_only"] | None, unsupported("auto and standard_only")] = None
    container: Unsupported = None
    thread: Unsupported = None
    compaction: Unsupported = None
    fallbacks: UnsupportedValue = None
    fallback_credit_token: Unsupported = None

    def other_fields(self) -> Json:
        same = ("max_tokens", "stream", "temperature", "top_p", "top_k", "seed")
        return {**super().other_fields(), "stop": self.stop_sequences, **{name: getattr(self, name) for name in same}}
