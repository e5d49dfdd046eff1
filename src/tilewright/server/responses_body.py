"""OpenAI's Responses API: its body, and the chat that it stands for."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from tilewright.server.fields import (
    LONGEST_NAME,
    WHOLE,
    Body,
    Ignored,
    NothingAsked,
    NotOffered,
    OnlyFalse,
    OnlyZero,
    Unread,
    expect,
)
from tilewright.server.protocol import MOST_MESSAGES, Length, Reasoning, Seed, Temperature, TemplateValues, Verbosity
from tilewright.server.tools import MOST_TOOLS, Name
from tilewright.server.translate import ChatLike

Json = dict[str, Any]
Id = Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)]


class ItemPart(Body):
    """A text of an item; what else stands in it (`annotations`, `logprobs`) changes nothing here."""

    model_config = ConfigDict(extra="ignore")

    type: Annotated[
        Literal["input_text", "output_text"],
        expect("expected input_text or output_text; images, audio and files are not offered by this server"),
    ]
    text: str


Content = Annotated[
    str | Annotated[list[ItemPart], Field(max_length=MOST_MESSAGES)], expect("expected a text, or a list of parts of type text")
]


def chat_content(content: str | Sequence[ItemPart]) -> str | list[Json]:
    return content if isinstance(content, str) else [{"type": "text", "text": part.text} for part in content]


class Item(Body):
    """An item; what else stands in it (`id`, `status`, `phase`) changes nothing here."""

    model_config = ConfigDict(extra="ignore")


class MessageItem(Item):
    type: Literal["message"] = "message"
    role: Annotated[
        Literal["system", "developer", "user", "assistant"], expect("expected system, developer, user or assistant")
    ]
    content: Content


class CallItem(Item):
    """A call that an answer made, sent back."""

    type: Literal["function_call"]
    call_id: Id
    name: Annotated[str, Field(min_length=1)]
    arguments: str

    def chat(self) -> Json:
        return chat_call(self.call_id, self.name, self.arguments)


class ReasoningItem(Item):
    """A thought of an earlier answer, which templates leave out."""

    type: Literal["reasoning"]


class CallOutputItem(Item):
    """What a function returned."""

    type: Literal["function_call_output"]
    call_id: Id
    output: Content


def kind_of(item: Any) -> str | None:
    """The type of an item, which messages need not say."""
    return item.get("type", "message") if isinstance(item, dict) else None


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(
        kind_of,
        custom_error_type="expected",
        custom_error_message=(
            "expected an item of type message, reasoning, function_call or function_call_output; no others are offered"
        ),
    ),
]
Items = Annotated[list[InputItem], Field(min_length=1, max_length=MOST_MESSAGES)]


def as_items(said: Any) -> Any:
    """A text as the items of a conversation."""
    return [{"role": "user", "content": said}] if isinstance(said, str) else said


class ResponseTool(Body):
    """A function; `strict` changes nothing, for calls that are forced follow their schema always."""

    type: Annotated[
        Literal["function"], expect("is not offered by this server but as function: it runs no tools itself", "not_offered")
    ]
    name: Name
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None

    def chat(self) -> Json:
        return {"type": "function", "function": self.model_dump(exclude={"type", "strict"})}


class ForcedFunction(Body):
    type: Literal["function"]
    name: Name


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(max_length=LONGEST_NAME)] | None = None
    description: str | None = None
    schema_: Annotated[Json | None, Field(alias="schema")] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def check(self) -> "TextFormat":
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise PydanticCustomError("expected", "expected a schema with the type json_schema, and with no other")
        return self

    def shown(self) -> Json:
        return self.model_dump(by_alias=True, exclude_none=True)

    def chat(self) -> Json:
        schema = None if self.schema_ is None else {"name": self.name, "schema": self.schema_}
        return {"type": self.type, "json_schema": schema}


class ResponseTextOptions(Body):
    format: TextFormat | None = None
    verbosity: Verbosity = None


class ResponseStreamOptions(Body):
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
"""Parts of answers that ours do not have, whoever asks for them."""


class ResponsesBody(ChatLike):
    """`POST /v1/responses`; `top_k`, `seed` and `chat_template_kwargs` are this server's own."""

    places = (
        (r"tools\[(\d+)\]\.function", r"tools[\1]"),
        (r"response_format\.json_schema\.schema", "text.format.schema"),
        (r"response_format", "text.format"),
        (r"max_(completion_)?tokens", "max_output_tokens"),
        (r"messages\b.*", "input"),
    )

    input: Annotated[Items, BeforeValidator(as_items, json_schema_input_type=str | Items)]
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
        expect("expected at most 16 texts of up to 512 characters, under names of up to 64"),
    ] = None
    chat_template_kwargs: TemplateValues = None
    # What changes nothing here.
    stream_options: ResponseStreamOptions | None = None
    user: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    prompt_cache_options: Unread = None
    max_tool_calls: Unread = None
    include: Annotated[list[INCLUDED] | None, expect("is offered by this server only for what it never has", "not_offered")] = (
        None
    )
    # What would change the answer.
    background: OnlyFalse = None
    truncation: Annotated[
        Literal["disabled"] | None, expect("is not offered by this server but as disabled", "not_offered")
    ] = None
    service_tier: Annotated[
        Literal["auto", "default"] | None, expect("is not offered by this server but as auto or default", "not_offered")
    ] = None
    top_logprobs: OnlyZero = None
    conversation: NotOffered = None
    prompt: NotOffered = None
    reasoning: Reasoning | None = None
    moderation: NotOffered = None
    context_management: NothingAsked = None

    def system_messages(self) -> list[Json]:
        return [] if self.instructions is None else [{"role": "system", "content": self.instructions}]

    def messages_of_chat(self) -> list[Json]:
        found: list[Json] = []
        for item in self.input:
            if isinstance(item, MessageItem):
                found.append({"role": item.role, "content": chat_content(item.content)})
            elif isinstance(item, CallOutputItem):
                found.append({"role": "tool", "tool_call_id": item.call_id, "content": chat_content(item.output)})
            elif isinstance(item, CallItem):  # calls belong to what the assistant said before them
                if not found or found[-1]["role"] != "assistant":
                    found.append({"role": "assistant"})
                found[-1].setdefault("tool_calls", []).append(item.chat())
        return found

    def others(self) -> Json:
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
    """A call of a chat's message."""
    return {"id": call, "type": "function", "function": {"name": name, "arguments": arguments}}


def answered(text: str, calls: Sequence[tuple[str, str, str]]) -> Json:
    """An answer as a message of a chat that goes on; of each call its id, name and arguments."""
    return {"role": "assistant", "content": text, "tool_calls": [chat_call(*call) for call in calls] or None}


def gone_on(before: bytes, messages: Sequence[Json]) -> bytes:
    """A conversation, as JSON, with more messages."""
    more = json.dumps(list(messages), ensure_ascii=False).encode()
    return more if before == b"[]" else before[:-1] + b", " + more[1:]
