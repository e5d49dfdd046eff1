"""Anthropic's Messages API: its bodies, and the chats that they stand for.

What may be asked of a chat is `protocol.py`'s to say: here it is put into those words, and everything else is as there.
"""

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from tilewright.server.fields import LONGEST_NAME, WHOLE, Body, Ignored, NothingAsked, NotOffered, Unread, expect
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
from tilewright.server.translate import ChatLike

Json = dict[str, Any]
Id = Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)]


def as_part(content: Any) -> Any:
    """A text as a list of one part."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


Texts = Annotated[
    Annotated[list[TextPart], Field(max_length=MOST_MESSAGES)],
    BeforeValidator(as_part, json_schema_input_type=str | Annotated[list[TextPart], Field(max_length=MOST_MESSAGES)]),
]
"""A text, or a list of parts of type text."""


class MessageBlock(Body):
    """A part of a content; what else stands in it (`cache_control`, `citations`) changes nothing here."""

    model_config = ConfigDict(extra="ignore")


class ToolUseBlock(MessageBlock):
    """A call that an answer made, sent back."""

    type: Literal["tool_use"]
    id: Id
    name: Annotated[str, Field(min_length=1)]
    input: Json


class ToolResultBlock(MessageBlock):
    """What a function returned; that it is an error (`is_error`) its content has to say, for templates know no such thing."""

    type: Literal["tool_result"]
    tool_use_id: Id
    content: Texts | None = None


class ThinkingBlock(MessageBlock):
    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(MessageBlock):
    """A thought that nobody can read."""

    type: Literal["redacted_thinking"]


Thought = ThinkingBlock | RedactedThinkingBlock
ContentBlock = Annotated[TextPart | ToolUseBlock | ToolResultBlock | Thought, Field(discriminator="type")]
Blocks = Annotated[list[ContentBlock], Field(max_length=MOST_MESSAGES)]
OF_ROLE = {
    "system": (TextPart,),
    "user": (TextPart, ToolResultBlock),
    "assistant": (TextPart, ToolUseBlock, ThinkingBlock, RedactedThinkingBlock),
}


class SaidMessage(Body):
    """One message of a conversation."""

    role: Annotated[Literal["user", "assistant", "system"], expect("expected user, assistant or system")]
    content: Annotated[Blocks, BeforeValidator(as_part, json_schema_input_type=str | Blocks)]

    @model_validator(mode="after")
    def check(self) -> "SaidMessage":
        if not all(isinstance(block, OF_ROLE[self.role]) for block in self.content):
            kinds = {"user": "text and tool_result", "assistant": "text, tool_use and thinking"}.get(self.role, "text")
            raise PydanticCustomError("expected", "expected blocks of type {kinds} in such a message", {"kinds": kinds})
        return self

    def chat(self) -> Iterator[Json]:
        """The messages of a chat that it stands for: what tools returned are messages of their own."""
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
    """A function; what else stands beside it (`strict`, `cache_control`) changes nothing here."""

    type: Annotated[
        Literal["custom"] | None, expect("is not offered by this server but as custom: it runs no tools itself", "not_offered")
    ] = None
    name: Name
    description: str | None = None
    input_schema: Json

    def chat(self) -> Json:
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return {"type": "function", "function": function}


class MessagesToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def check(self) -> "MessagesToolChoice":
        if (self.type == "tool") != (self.name is not None):
            raise PydanticCustomError("expected", "expected a name with the type tool, and with no other")
        return self

    def chat(self) -> str | Json:
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: Annotated[Json, Field(alias="schema")]


class OutputConfig(Body):
    format: OutputFormat | None = None
    effort: Effort = None


class ContextEdit(Body):
    """An edit of the context that leaves it as it is."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class ContextManagement(Body):
    edits: Annotated[
        list[ContextEdit] | None,
        expect("is not offered by this server; it may be empty, or have clear_thinking_20251015 that keeps all", "not_offered"),
    ] = None


PLACES = (
    (r"tools\[(\d+)\]\.function\.parameters", r"tools[\1].input_schema"),
    (r"tools\[(\d+)\]\.function", r"tools[\1]"),
    (r"response_format\.json_schema\.schema", "output_config.format.schema"),
    (r"response_format", "output_config.format"),
    (r"max_completion_tokens", "max_tokens"),
    (r"stop\b", "stop_sequences"),
)


class CountBody(ChatLike):
    """`POST /v1/messages/count_tokens`: what the prompt is made of."""

    places = PLACES

    messages: Annotated[list[SaidMessage], Field(min_length=1, max_length=MOST_MESSAGES)]
    system: Texts | None = None
    tools: Annotated[list[MessagesTool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: MessagesToolChoice | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: TemplateValues = None
    # What changes nothing here.
    cache_control: Unread = None
    betas: Unread = None
    anthropic_beta: Unread = None
    anthropic_version: Unread = None
    speed: Annotated[Literal["standard"] | None, expect("is not offered by this server but as standard", "not_offered")] = None
    # What would change the answer.
    context_management: ContextManagement | None = None
    mcp_servers: NothingAsked = None

    def system_messages(self) -> list[Json]:
        return [{"role": "system", "content": [part.model_dump() for part in self.system]}] if self.system else []

    def messages_of_chat(self) -> list[Json]:
        return [each for message in self.messages for each in message.chat()]

    def others(self) -> Json:
        asked = self.output_format or (self.output_config and self.output_config.format)
        choice = self.tool_choice
        last = self.messages[-1]
        called = any(isinstance(block, ToolUseBlock) for block in last.content)
        return {
            "tools": [tool.chat() for tool in self.tools or ()],
            "tool_choice": None if choice is None else choice.chat(),
            "parallel_tool_calls": not choice.disable_parallel_tool_use if choice is not None else None,
            "response_format": {"type": "json_schema", "json_schema": {"schema": asked.schema_}} if asked else None,
            "chat_template_kwargs": self.chat_template_kwargs,
            "thinking": None if self.thinking is None else self.thinking.model_dump(),
            "reasoning_effort": self.output_config and self.output_config.effort,
            # A conversation that ends with the assistant's words goes on with them.
            "continue_final_message": (last.role == "assistant" and not called) or None,
        }


class MessagesBody(CountBody):
    """`POST /v1/messages`; `seed` and `chat_template_kwargs` are this server's own."""

    max_tokens: Annotated[int, Field(ge=1, lt=2**31), WHOLE]
    stop_sequences: Annotated[list[StopText], Field(max_length=MOST_STOPS)] | None = None
    stream: bool | None = None
    temperature: Temperature = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31), WHOLE] | None = None
    seed: Seed = None
    metadata: Annotated[Json, Field(max_length=16)] | None = None
    user_profile_id: Ignored = None
    workspace_id: Ignored = None
    billing_policy: Unread = None
    diagnostics: Unread = None
    inference_geo: Ignored = None
    service_tier: Annotated[
        Literal["auto", "standard_only"] | None,
        expect("is not offered by this server but as auto or standard_only", "not_offered"),
    ] = None
    container: NotOffered = None
    thread: NotOffered = None
    compaction: NotOffered = None
    fallbacks: NothingAsked = None
    fallback_credit_token: NotOffered = None

    def others(self) -> Json:
        same = ("max_tokens", "stream", "temperature", "top_p", "top_k", "seed")
        return {**super().others(), "stop": self.stop_sequences, **{name: getattr(self, name) for name in same}}
