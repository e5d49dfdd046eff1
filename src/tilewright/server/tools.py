"""Tools: what a chat says of functions, how the model is told of them, and the grammar of an answer that has to call one."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from tilewright.grammar.grammar import Grammar
from tilewright.grammar.keywords import plain
from tilewright.grammar.schema import closed
from tilewright.models.chat import ChatTemplate
from tilewright.server.call_forms import HERMES, LLAMA3, CallForm, decoded
from tilewright.server.errors import ApiError
from tilewright.server.fields import Body, Ignored, expect
from tilewright.server.xml_calls import FUNCTION, XML

MOST_TOOLS = 128

Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


class Function(Body):
    """A function; `strict` changes nothing, for calls that are forced follow their schema always."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: Name


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedTool | None,
    expect("expected none, auto, required, or an object of type function that names one"),
]


class CalledFunction(Body):
    """Function of a call, as an answer named it: models write any name, and arguments that are no JSON or were cut off."""

    name: Annotated[str, Field(min_length=1)]
    arguments: str


class Call(Body):
    """A call that an answer made, sent back; what else stands in it changes nothing."""

    model_config = ConfigDict(extra="ignore")

    id: Ignored = None
    type: Literal["function"] = "function"
    function: CalledFunction

    @property
    def shown(self) -> dict[str, Any] | str:
        """The call for chat templates, which write arguments as JSON themselves; a text where they are no JSON object."""
        name = self.function.name
        arguments = decoded(self.function.arguments.strip() or "{}")
        if not isinstance(arguments, dict):
            return call_as_text(name, self.function.arguments)
        return {"id": self.id, "type": self.type, "function": {"name": name, "arguments": arguments}}


def call_as_text(name: str, arguments: str) -> str:
    """A call whose arguments are no JSON object, as it is shown where only such can be."""
    return f"{name} {arguments}"


@dataclass(frozen=True)
class ToolUse:
    """The tools that an answer may call.

    Attributes:
        choice: "auto" leaves it to the model, "required" wants a call, the name of a function a call of it.
        parallel: whether there may be several calls.
    """

    tools: Sequence[Tool]
    choice: str
    parallel: bool
    form: CallForm

    @property
    def several(self) -> bool:
        return self.parallel and self.form.repeats and self.choice in ("auto", "required")

    @property
    def forced(self) -> bool:
        return self.choice != "auto"

    @property
    def callable(self) -> list[Tool]:
        """Those that may be called."""
        return [tool for tool in self.tools if self.choice in ("auto", "required", tool.function.name)]

    @property
    def described(self) -> list[dict[str, Any]]:
        """The tools for chat templates."""
        return [tool.model_dump(exclude_none=True) for tool in self.tools]

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """Of each function's arguments."""
        return {tool.function.name: arguments_schema(tool) for tool in self.tools}

    def grammar(self, other: Mapping[str, Any] | None = None) -> Grammar:
        """Of an answer that is nothing but calls.

        Args:
            other: schema of JSON that the answer may be instead.

        Raises:
            ValueError: the form has no way to write what a schema describes.
        """
        schemas = self.schemas
        functions = {tool.function.name: schemas[tool.function.name] for tool in self.callable}
        return self.form.grammar(functions, self.several, other)


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """Schema of a function's arguments, which are those that are described: without a schema there are none."""
    return closed(plain({"type": "object"} | (tool.function.parameters or {"properties": {}})))


def tool_use(
    tools: Sequence[Tool] | None,
    choice: Literal["none", "auto", "required"] | NamedTool | None,
    parallel: bool | None,
    template: ChatTemplate | None,
) -> ToolUse | None:
    """Tools that a chat may call; None for none.

    Raises:
        ApiError: a call is wanted and there is no such tool, two have one name, or the model's form of calls is not known.
    """
    if choice == "none" or not tools:
        if not tools and choice not in (None, "none", "auto"):
            raise ApiError(400, "'tool_choice': expected tools to choose from, found none", "invalid_value", "tool_choice")
        return None
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise ApiError(400, "'tools': expected functions of different names", "invalid_value", "tools")
    wanted = choice.function.name if isinstance(choice, NamedTool) else choice or "auto"
    if isinstance(choice, NamedTool) and wanted not in names:
        expected = f"'tool_choice': expected one of {', '.join(names)[:300]}, found {wanted!r}"
        raise ApiError(400, expected, "invalid_value", "tool_choice")
    form = None if template is None else form_of(template)
    if form is None:
        raise ApiError(400, "'tools': the form in which this model calls them is not known here", "invalid_value", "tools")
    return ToolUse(tools, wanted, parallel is not False, form)


def form_of(template: ChatTemplate) -> CallForm | None:
    """The form of calls that a template tells a model of; None for one that is not known here.

    It is Hermes's where a template tells of none, for then `told` does. Qwen3-Coder and Qwen3.5 write other calls between the
    same tags.
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


def told(messages: Sequence[dict[str, Any]], use: ToolUse | None) -> list[dict[str, Any]]:
    """A conversation for a template that knows no tools: what it would say of them is in its messages."""
    found = list[dict[str, Any]]()
    for before, message in zip([None, *messages], messages, strict=False):
        said = told_message(message)
        # Who reads turns that alternate takes what tools say, and what the user says beside it, for one of the user's.
        if before is not None and "tool" in (before["role"], message["role"]) and said["role"] == found[-1]["role"] == "user":
            found[-1] = {**found[-1], "content": f"{found[-1]['content']}\n{said['content']}"}
        else:
            found.append(said)
    if use is None:
        return found
    functions = "\n".join(json.dumps(each["function"], ensure_ascii=False) for each in use.described)
    form = HERMES.written("the function's name", {"an argument's name": "its value"})
    text = HOW_TO_CALL.format(form=form, functions=functions)
    if found and found[0]["role"] == "system":
        return [{**found[0], "content": f"{found[0]['content']}\n\n{text}"}, *found[1:]]
    return [{"role": "system", "content": text}, *found]


def told_message(message: dict[str, Any]) -> dict[str, Any]:
    """A message with its calls in its text; what a tool says is said by the user."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if "tool_calls" not in message:
        return message
    calls = [HERMES.written(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "content": "\n".join(filter(None, [message["content"], *calls]))}
