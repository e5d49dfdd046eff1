"""Tools of chats: request fields, description of tools in prompts, and grammars of forced calls."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from tilewright.grammar.grammar import Grammar
from tilewright.grammar.keywords import simplify_schema
from tilewright.grammar.schema import close_objects
from tilewright.models.chat import ChatTemplate
from tilewright.server.call_forms import HERMES, LLAMA3, CallForm, decoded
from tilewright.server.errors import ApiError
from tilewright.server.fields import Body, IgnoredText, expect
from tilewright.server.xml_calls import FUNCTION, XML

MOST_TOOLS = 128
"""Largest number of tools of a request."""

Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


class Function(Body):
    """Function that the model may call.

    Attributes:
        name: name of the function.
        description: description for the model.
        parameters: JSON schema of the arguments; without it the function has none.
        strict: ignored; forced calls always follow the schema.
    """

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """Tool of a chat.

    Attributes:
        type: only functions are supported.
        function: function that the model may call.
    """

    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    """Name of a function.

    Attributes:
        name: name of one of the tools.
    """

    name: Name


class NamedTool(Body):
    """Tool that the model has to call.

    Attributes:
        type: only functions are supported.
        function: function to call.
    """

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedTool | None,
    expect("expected none, auto, required, or an object of type function that names one"),
]


class CalledFunction(Body):
    """Function of a tool call of an earlier response, with any name, and possibly with invalid or truncated arguments.

    Attributes:
        name: name of the function.
        arguments: JSON text of the arguments.
    """

    name: Annotated[str, Field(min_length=1)]
    arguments: str


class Call(Body):
    """Tool call of an earlier response. Other fields are ignored.

    Attributes:
        type: only functions are supported.
        function: called function.
    """

    model_config = ConfigDict(extra="ignore")

    id: IgnoredText = None
    type: Literal["function"] = "function"
    function: CalledFunction

    @property
    def for_template(self) -> dict[str, Any] | str:
        """Tool call for chat templates, with decoded arguments; a text if the arguments are not a JSON object."""
        name = self.function.name
        arguments = decoded(self.function.arguments.strip() or "{}")
        if not isinstance(arguments, dict):
            return call_as_text(name, self.function.arguments)
        return {"id": self.id, "type": self.type, "function": {"name": name, "arguments": arguments}}


def call_as_text(name: str, arguments: str) -> str:
    """Formats a call whose arguments are not a JSON object."""
    return f"{name} {arguments}"


@dataclass(frozen=True)
class ToolUse:
    """Tools that a response may call.

    Attributes:
        choice: "auto", "required", or the name of the function that has to be called.
        parallel: allow several calls.
        form: tool call format of the model.
    """

    tools: Sequence[Tool]
    choice: str
    parallel: bool
    form: CallForm

    @property
    def several(self) -> bool:
        """True if the response may contain several calls."""
        return self.parallel and self.form.repeats and self.choice in ("auto", "required")

    @property
    def forced(self) -> bool:
        """True if the response has to be a call."""
        return self.choice != "auto"

    @property
    def callable(self) -> list[Tool]:
        """Tools that the choice allows."""
        return [tool for tool in self.tools if self.choice in ("auto", "required", tool.function.name)]

    @property
    def for_template(self) -> list[dict[str, Any]]:
        """Tools for chat templates."""
        return [tool.model_dump(exclude_none=True) for tool in self.tools]

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """Schema of the arguments of each function, by name."""
        return {tool.function.name: arguments_schema(tool) for tool in self.tools}

    def grammar(self, other: Mapping[str, Any] | None = None) -> Grammar:
        """Makes the grammar of responses that consist of calls only.

        Args:
            other: schema of JSON that the response may be instead.

        Raises:
            ValueError: the format cannot express a schema.
        """
        schemas = self.schemas
        functions = {tool.function.name: schemas[tool.function.name] for tool in self.callable}
        return self.form.grammar(functions, self.several, other)


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """Returns the schema of a function's arguments, without undeclared properties; no arguments for a missing schema."""
    return close_objects(simplify_schema({"type": "object"} | (tool.function.parameters or {"properties": {}})))


def tool_use(
    tools: Sequence[Tool] | None,
    choice: Literal["none", "auto", "required"] | NamedTool | None,
    parallel: bool | None,
    template: ChatTemplate | None,
) -> ToolUse | None:
    """Returns the tools that the response of a chat may call; None for none.

    Raises:
        ApiError: the chosen tool is missing, two tools have the same name, or the model's tool call format is unknown (400).
    """
    if choice == "none" or not tools:
        if not tools and choice not in (None, "none", "auto"):
            raise ApiError(400, "'tool_choice': expected tools to choose from, found none", "invalid_value", "tool_choice")
        return None
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise ApiError(400, "'tools': expected functions of different names", "invalid_value", "tools")
    chosen = choice.function.name if isinstance(choice, NamedTool) else choice or "auto"
    if isinstance(choice, NamedTool) and chosen not in names:
        expected = f"'tool_choice': expected one of {', '.join(names)[:300]}, found {chosen!r}"
        raise ApiError(400, expected, "invalid_value", "tool_choice")
    form = None if template is None else find_call_form(template)
    if form is None:
        raise ApiError(400, "'tools': the tool call format of this model's chat template is unknown", "invalid_value", "tools")
    return ToolUse(tools, chosen, parallel is not False, form)


def find_call_form(template: ChatTemplate) -> CallForm | None:
    """Returns the tool call format of a chat template; None for an unknown format.

    A template without tools gets the Hermes format, which `inline_tool_fields` describes in the system message. Qwen3-Coder
    and Qwen3.5 use the tags of Hermes with another format inside.
    """
    if not template.takes_tools:
        return HERMES
    if HERMES.begin in template.source:
        return XML if FUNCTION in template.source else HERMES
    return LLAMA3 if '"parameters"' in template.source and "ipython" in template.source else None


HOW_TO_CALL = """You can call functions. To call one, answer with its name and its arguments, in this form:
{form}
These are the functions:
{functions}"""


def inline_tool_fields(messages: Sequence[dict[str, Any]], use: ToolUse | None) -> list[dict[str, Any]]:
    """Rewrites a conversation for a template without tools: moves tools, calls and results into the texts of messages."""
    found = list[dict[str, Any]]()
    for before, message in zip([None, *messages], messages, strict=False):
        plain = inline_tool_field(message)
        # Tool results and adjacent user messages become one user message, because templates may need alternating roles.
        if before is not None and "tool" in (before["role"], message["role"]) and plain["role"] == found[-1]["role"] == "user":
            found[-1] = {**found[-1], "content": f"{found[-1]['content']}\n{plain['content']}"}
        else:
            found.append(plain)
    if use is None:
        return found
    functions = "\n".join(json.dumps(each["function"], ensure_ascii=False) for each in use.for_template)
    form = HERMES.format_call("the function's name", {"an argument's name": "its value"})
    text = HOW_TO_CALL.format(form=form, functions=functions)
    if found and found[0]["role"] == "system":
        return [{**found[0], "content": f"{found[0]['content']}\n\n{text}"}, *found[1:]]
    return [{"role": "system", "content": text}, *found]


def inline_tool_field(message: dict[str, Any]) -> dict[str, Any]:
    """Moves a message's calls into its text. A tool result becomes a user message."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if "tool_calls" not in message:
        return message
    calls = [HERMES.format_call(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "content": "\n".join(filter(None, [message["content"], *calls]))}
