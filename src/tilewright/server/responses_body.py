"""Request body of OpenAI's Responses API, and its conversion to a chat body."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from tilewright.server.fields import (
    LONGEST_NAME,
    WHOLE,
    Body,
    IgnoredText,
    IgnoredValue,
    OnlyFalse,
    OnlyZero,
    Unsupported,
    UnsupportedValue,
    expect,
    unsupported,
)
from tilewright.server.protocol import MOST_MESSAGES, Length, Reasoning, Seed, Temperature, TemplateValues, Verbosity
from tilewright.server.tools import MOST_TOOLS, Name
from tilewright.server.translate import ChatConvertible

Json = dict[str, Any]
Id = Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)]


class ItemPart(Body):
    """Text part of an item. Other fields (`annotations`, `logprobs`) are ignored.

    Attributes:
        type: text of a request or of a response.
        text: text of the part.
    """

    model_config = ConfigDict(extra="ignore")

    type: Annotated[
        Literal["input_text", "output_text"],
        expect("expected input_text or output_text; images, audio and files are not supported by this server"),
    ]
    text: str


Content = Annotated[
    str | Annotated[list[ItemPart], Field(max_length=MOST_MESSAGES)], expect("expected a text, or a list of parts of type text")
]


def chat_content(content: str | Sequence[ItemPart]) -> str | list[Json]:
    return content if isinstance(content, str) else [{"type": "text", "text": part.text} for part in content]


class Item(Body):
    """Input item. Other fields (`id`, `status`, `phase`) are ignored."""

    model_config = ConfigDict(extra="ignore")


class MessageItem(Item):
    """Message of the conversation.

    Attributes:
        type: message, the default.
        role: author of the message; "developer" equals "system".
        content: text, or list of text parts.
    """

    type: Literal["message"] = "message"
    role: Annotated[
        Literal["system", "developer", "user", "assistant"], expect("expected system, developer, user or assistant")
    ]
    content: Content


class CallItem(Item):
    """Tool call of an earlier response.

    Attributes:
        type: tool call.
        call_id: id of the call, which its result names.
        name: name of the function.
        arguments: JSON text of the arguments.
    """

    type: Literal["function_call"]
    call_id: Id
    name: Annotated[str, Field(min_length=1)]
    arguments: str

    def chat(self) -> Json:
        return chat_call(self.call_id, self.name, self.arguments)


class ReasoningItem(Item):
    """Reasoning of an earlier response, which is ignored.

    Attributes:
        type: reasoning; ignored.
    """

    type: Literal["reasoning"]


class CallOutputItem(Item):
    """Result of a tool call.

    Attributes:
        type: result of a tool call.
        call_id: id of the call.
        output: result, as text or a list of text parts.
    """

    type: Literal["function_call_output"]
    call_id: Id
    output: Content


def item_type(item: Any) -> str | None:
    """Returns the type of an item, by default "message"."""
    return item.get("type", "message") if isinstance(item, dict) else None


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(
        item_type,
        custom_error_type="expected",
        custom_error_message=(
            "expected an item of type message, reasoning, function_call or function_call_output; others are not supported"
        ),
    ),
]
Items = Annotated[list[InputItem], Field(min_length=1, max_length=MOST_MESSAGES)]


def to_items(value: Any) -> Any:
    """Converts a text to a list of one user message."""
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class ResponseTool(Body):
    """Function that the model may call.

    Attributes:
        type: only functions are supported; the server runs no tools.
        name: name of the function.
        description: description for the model.
        parameters: JSON schema of the arguments; without it the function has none.
        strict: ignored; forced calls always follow their schema.
    """

    type: Annotated[Literal["function"], unsupported("function: the server runs no tools")]
    name: Name
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None

    def chat(self) -> Json:
        return {"type": "function", "function": self.model_dump(exclude={"type", "strict"})}


class ForcedFunction(Body):
    """Function that the model has to call.

    Attributes:
        type: only functions are supported.
        name: name of one of the tools.
    """

    type: Literal["function"]
    name: Name


class TextFormat(Body):
    """Format of the output.

    Attributes:
        type: any text, any JSON object, or JSON that follows `schema`.
        name: name of the schema, without effect on the output.
        description: description of the schema, without effect on the output.
        schema_: JSON schema, for the type "json_schema".
        strict: ignored; outputs always follow the schema.
    """

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(max_length=LONGEST_NAME)] | None = None
    description: str | None = None
    schema_: Annotated[Json | None, Field(alias="schema")] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def check(self) -> "TextFormat":
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise PydanticCustomError("expected", "expected a schema exactly for the type json_schema")
        return self

    def for_response(self) -> Json:
        return self.model_dump(by_alias=True, exclude_none=True)

    def chat(self) -> Json:
        schema = None if self.schema_ is None else {"name": self.name, "schema": self.schema_}
        return {"type": self.type, "json_schema": schema}


class ResponseTextOptions(Body):
    """Options of the text of a response.

    Attributes:
        format: format of the output.
        verbosity: only "medium" is supported.
    """

    format: TextFormat | None = None
    verbosity: Verbosity = None


class ResponseStreamOptions(Body):
    """Options of the stream of a response.

    Attributes:
        include_obfuscation: accepted and ignored.
    """

    include_obfuscation: bool | None = None


INCLUDED = Literal[
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "message.input_image.image_url",
]
"""Values of `include` for output items that this server never produces."""


class ResponsesBody(ChatConvertible):
    """Body of `POST /v1/responses`.

    Attributes:
        input: text, or list of items (messages, tool calls and their results).
        instructions: system prompt.
        max_output_tokens: largest number of new tokens.
        temperature: sampling temperature; 0 is greedy.
        top_p: nucleus sampling threshold.
        top_k: number of most likely tokens to sample from; 0 or -1 for all (extension).
        seed: seed of the sampling (extension).
        text: format of the output.
        tools: functions that the model may call.
        tool_choice: "auto" (default) leaves the choice to the model, "required" forces a call, "none" forbids calls, and an
            object forces a call of the named function.
        parallel_tool_calls: allow several tool calls (default true).
        previous_response_id: id of a stored response to continue.
        store: store the response (default true).
        stream: respond with server-sent events.
        metadata: returned with the response.
        chat_template_kwargs: values for the chat template (extension).
        reasoning: reasoning options, if the chat template supports them.
        stream_options: accepted and ignored.
        include: output items that this server never produces; accepted and ignored.
        truncation: only "disabled" is supported.
        service_tier: "auto" and "default" are accepted and ignored.
    """

    places = (
        (r"tools\[(\d+)\]\.function", r"tools[\1]"),
        (r"response_format\.json_schema\.schema", "text.format.schema"),
        (r"response_format", "text.format"),
        (r"max_(completion_)?tokens", "max_output_tokens"),
        (r"messages\b.*", "input"),
    )

    input: Annotated[Items, BeforeValidator(to_items, json_schema_input_type=str | Items)]
    instructions: str | None = None
    max_output_tokens: Length = None
    temperature: Temperature = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31), WHOLE] | None = None
    seed: Seed = None
    text: ResponseTextOptions | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | ForcedFunction | None,
        expect("expected none, auto, required, or an object of type function that names one"),
    ] = None
    parallel_tool_calls: bool | None = None
    previous_response_id: Id | None = None
    store: bool | None = None
    stream: bool | None = None
    metadata: Annotated[
        Annotated[dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)]
        | None,
        expect("expected at most 16 texts of at most 512 characters, with names of at most 64 characters"),
    ] = None
    chat_template_kwargs: TemplateValues = None
    # Ignored fields.
    stream_options: ResponseStreamOptions | None = None
    user: IgnoredText = None
    safety_identifier: IgnoredText = None
    prompt_cache_key: IgnoredText = None
    prompt_cache_retention: IgnoredText = None
    prompt_cache_options: IgnoredValue = None
    max_tool_calls: IgnoredValue = None
    include: Annotated[list[INCLUDED] | None, unsupported("output items that the server never produces")] = None
    # Unsupported fields.
    background: OnlyFalse = None
    truncation: Annotated[Literal["disabled"] | None, unsupported("disabled")] = None
    service_tier: Annotated[Literal["auto", "default"] | None, unsupported("auto and default")] = None
    top_logprobs: OnlyZero = None
    conversation: Unsupported = None
    prompt: Unsupported = None
    reasoning: Reasoning | None = None
    moderation: Unsupported = None
    context_management: UnsupportedValue = None

    def system_messages(self) -> list[Json]:
        return [] if self.instructions is None else [{"role": "system", "content": self.instructions}]

    def chat_messages(self) -> list[Json]:
        found: list[Json] = []
        for item in self.input:
            if isinstance(item, MessageItem):
                found.append({"role": item.role, "content": chat_content(item.content)})
            elif isinstance(item, CallOutputItem):
                found.append({"role": "tool", "tool_call_id": item.call_id, "content": chat_content(item.output)})
            elif isinstance(item, CallItem):  # calls belong to the assistant message before them
                if not found or found[-1]["role"] != "assistant":
                    found.append({"role": "assistant"})
                found[-1].setdefault("tool_calls", []).append(item.chat())
        return found

    def other_fields(self) -> Json:
        form = self.text.format if self.text is not None else None
        choice = self.tool_choice
        if isinstance(choice, ForcedFunction):
            choice = {"type": "function", "function": {"name": choice.name}}
        same = ("temperature", "top_p", "top_k", "seed", "stream", "parallel_tool_calls", "chat_template_kwargs")
        return {
            "max_completion_tokens": self.max_output_tokens,
            "tools": [tool.chat() for tool in self.tools or ()],
            "tool_choice": choice,
            "reasoning": None if self.reasoning is None else self.reasoning.model_dump(),
            "response_format": None if form is None else form.chat(),
            **{name: getattr(self, name) for name in same},
        }


def chat_call(call: str, name: str, arguments: str) -> Json:
    """Makes a tool call of a chat message."""
    return {"id": call, "type": "function", "function": {"name": name, "arguments": arguments}}


def assistant_message(text: str, calls: Sequence[tuple[str, str, str]]) -> Json:
    """Makes the chat message of a response, for the next request. `calls`: id, name and arguments of each tool call."""
    return {"role": "assistant", "content": text, "tool_calls": [chat_call(*call) for call in calls] or None}


def extended(before: bytes, messages: Sequence[Json]) -> bytes:
    """Appends messages to a conversation in JSON."""
    more = json.dumps(list(messages), ensure_ascii=False).encode()
    return more if before == b"[]" else before[:-1] + b", " + more[1:]
