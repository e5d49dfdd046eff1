"""Calls in a model's text: found in whatever pieces it comes."""

import json

import llguidance
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.grammar.worker import make_matcher
from tilewright.models.chat import ChatTemplate
from tilewright.server.call_forms import HERMES, LLAMA3, CallForm, object_end
from tilewright.server.choice_text import ChoiceText
from tilewright.server.errors import ApiError
from tilewright.server.tool_calls import Arguments, CallParser, Content, Part
from tilewright.server.tools import NamedTool, Tool, ToolUse, find_call_form, inline_tool_fields, tool_use
from tilewright.server.xml_calls import XML

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "}<tool_call>\\"{", "b": [1, {"c": 2}]}}\n</tool_call>'
ARGUMENTS = '{"a": "}<tool_call>\\"{", "b": [1, {"c": 2}]}'
LLAMA = '{"name": "f", "parameters": {"a": 1}}'


def tool(name: str, **parameters: object) -> Tool:
    return Tool.model_validate({"type": "function", "function": {"name": name, "parameters": parameters or None}})


SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer", "minimum": 3},
        "flag": {"type": "boolean"},
        "list": {"type": "array", "items": {"$ref": "#/$defs/number"}},
        "maybe": {"anyOf": [{"$ref": "#/$defs/short"}, {"type": "null"}]},
        "color": {"enum": ["red", "green"]},
        "any": {},
    },
    "required": ["text", "count"],
    "$defs": {"short": {"type": "string", "minLength": 2, "maxLength": 4}, "number": {"type": "integer"}},
}
TOOLS = [tool("f", **SCHEMA), tool("g", type="object", properties={}, additionalProperties=False), tool("h", type="object")]


def read(text: str, cuts: list[int], form: CallForm = HERMES, several: bool = True) -> list[tuple[str, str]]:
    """The parts of a text that comes in pieces, those of one kind put together."""
    parser = CallParser(ToolUse(TOOLS, "auto", several, form))
    found = list[tuple[str, str]]()
    ends = sorted({min(cut, len(text)) for cut in cuts} | {len(text)})
    parts: list[Part] = []
    for begin, end in zip([0, *ends], ends, strict=False):
        parts += parser.push(text[begin:end])
    for part in [*parts, *parser.push("", last=True)]:
        kind = type(part).__name__
        piece = part[0]
        if isinstance(part, Content | Arguments) and found and found[-1][0] == kind:
            found[-1] = kind, found[-1][1] + piece
        else:
            found.append((kind, piece))
    return found


TEXTS = {
    "hello world ": [("Content", "hello world ")],
    CALL: [("Called", "f"), ("Arguments", ARGUMENTS)],
    f"Let me see.\n\n{CALL}\n{CALL} ": [
        ("Content", "Let me see."),
        ("Called", "f"),
        ("Arguments", ARGUMENTS),
        ("Called", "f"),
        ("Arguments", ARGUMENTS),
    ],
    '<tool_call>{"arguments": {"a":1}, "name": "f"}</tool_call>': [("Called", "f"), ("Arguments", '{"a": 1}')],
    '<tool_call>{"name": "f", "arguments": {"a": "cut': [("Called", "f"), ("Arguments", '{"a": "cut')],
    '<tool_call>{"na': [("Content", '<tool_call>{"na')],
    "a <tool_": [("Content", "a <tool_")],
    '<tool_call>{"x": 1}</tool_call> z': [("Content", '<tool_call>{"x": 1}</tool_call> z')],
    f"<tool_call>no {CALL}": [("Content", "<tool_call>no"), ("Called", "f"), ("Arguments", ARGUMENTS)],
    **{
        f'<tool_call>{{"name": "{name}", "arguments": {{"a": 1}}}}</tool_call>': [
            ("Content", f'<tool_call>{{"name": "{name}", "arguments": {{"a": 1}}}}</tool_call>')
        ]
        for name in ("get\\_weather", "f\\ud800", "")
    },
    '<tool_call>{"name": "get_time"}</tool_call>': [("Called", "get_time"), ("Arguments", "{}")],
    '<tool_call>{"name": "f", "arguments": null}</tool_call>': [("Called", "f"), ("Arguments", "{}")],
    '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>': [("Called", "f"), ("Arguments", '{"a": 1}')],
    '<tool_call>{"name": "f", "a": 1}</tool_call>': [("Content", '<tool_call>{"name": "f", "a": 1}</tool_call>')],
    '<tool_call>{"arguments": {"a": "\\ud83d"}, "name": "f"}</tool_call>': [
        ("Called", "f"),
        ("Arguments", '{"a": "\\ud83d"}'),
    ],
    '<tool_call>{"arguments": {"a": 1}, "name": "\\ud83d"}</tool_call>': [
        ("Content", '<tool_call>{"arguments": {"a": 1}, "name": "\\ud83d"}</tool_call>'),
    ],
}
OF_LLAMA = {
    LLAMA: [("Called", "f"), ("Arguments", '{"a": 1}')],
    f" <|python_tag|>{LLAMA} more": [("Called", "f"), ("Arguments", '{"a": 1}')],
    'no {"name"': [("Content", 'no {"name"')],
    '{"a": 1} and': [("Content", '{"a": 1} and')],
    '{"name": "h"}': [("Called", "h"), ("Arguments", "{}")],
    '{"name": "Ada"}': [("Content", '{"name": "Ada"}')],
    "<|py": [("Content", "<|py")],
}


def xml(name: str, **values: str) -> str:
    """A call as published templates write it."""
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def arguments(**values: object) -> list[tuple[str, str]]:
    return [("Called", "f"), ("Arguments", json.dumps(values, ensure_ascii=False))]


ODD = ' "é"\n\n</function></par\n<parameter=b>'
OF_XML = {
    "hello <world ": [("Content", "hello <world ")],
    xml("g"): [("Called", "g"), ("Arguments", "{}")],
    f"Let me see.\n\n{xml('f', text='a')}\n{xml('g')}\n": [
        ("Content", "Let me see."),
        *arguments(text="a"),
        ("Called", "g"),
        ("Arguments", "{}"),
    ],
    xml("f", text=ODD, count="3"): arguments(text=ODD, count=3),
    xml("f", text="", count="None", flag="True", list=" [1, 2]"): arguments(text="", count=None, flag=True, list=[1, 2]),
    xml("f", text="3", maybe="null", count="NaN", flag="maybe"): arguments(text="3", maybe=None, count="NaN", flag="maybe"),
    xml("f", maybe="nu", any="{'a': 1}"): arguments(maybe="nu", any="{'a': 1}"),
    xml("f", any='{"a": [1]}', other="12"): arguments(any={"a": [1]}, other="12"),
    "<tool_call><function=f><parameter=text>a b</parameter></function></tool_call>": arguments(text="a b"),
    "<tool_call><function=f>\n<parameter=text>\ncut\n</par": [("Called", "f"), ("Arguments", '{"text": "cut')],
    "<tool_call>\n<function=f><parameter=count>\n12": [("Called", "f"), ("Arguments", '{"count": ')],
    "<tool_call>\n<function=f": [("Content", "<tool_call>\n<function=f")],
    f"<tool_call>no {xml('g')}": [("Content", "<tool_call>no"), ("Called", "g"), ("Arguments", "{}")],
}
FORMS = {"hermes": (HERMES, TEXTS), "llama3": (LLAMA3, OF_LLAMA), "xml": (XML, OF_XML)}


@given(st.data())
@pytest.mark.parametrize("family", FORMS)
def test_parts_do_not_depend_on_pieces(family: str, data: st.DataObject):
    form, texts = FORMS[family]
    text = data.draw(st.sampled_from(list(texts)))
    cuts = data.draw(st.lists(st.integers(1, len(text)), max_size=20))
    assert read(text, cuts, form) == texts[text]


@pytest.mark.parametrize("family", FORMS)
def test_parts_of_a_text_that_comes_character_by_character(family: str):
    form, texts = FORMS[family]
    for text, want in texts.items():
        assert read(text, list(range(len(text))), form) == want


def test_a_chunk_has_one_entry_for_a_call():
    """Some clients read only the first entry."""
    (call,) = ChoiceText(ToolUse(TOOLS, "auto", True, HERMES)).push(CALL, last=True).calls
    assert (call.function.name, call.function.arguments) == ("f", ARGUMENTS)


def test_a_second_call_is_dropped_where_one_is_wanted():
    assert read(f"{CALL}\n{CALL}", [], several=False) == TEXTS[CALL]


@given(st.text().filter(lambda text: "</parameter>" not in text), st.lists(st.integers(1, 200), max_size=8))
def test_any_text_without_its_end_is_a_value(text: str, cuts: list[int]):
    assert read(xml("f", text=text), cuts, XML) == arguments(text=text)


def accepts(use: ToolUse, text: str) -> bool:
    """Returns True if a forced response may be this text, and end after it."""
    matcher = make_matcher(llguidance.LLTokenizer("byte"), "lark", use.grammar().text)
    assert not matcher.is_error(), matcher.get_error()
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


FORCED = {
    xml("f", text="", count="3"): True,
    xml("f", text="a\n\n</param\n<b>", count="42", flag="true", list="[1, 2]", maybe="null", color="red", any="x{"): True,
    xml("f", text="a", count="3", maybe="abcd"): True,
    xml("g"): True,
    xml("h", one="1", two=""): True,
    f"{xml('g')}\n{xml('g')}": True,
    xml("f", text="a"): False,
    xml("f", count="3", text="a"): False,
    xml("f", text="a", count="2"): False,
    xml("f", text="a", count="3", list="[1.5]"): False,
    xml("f", text="a", count="3", maybe="abcde"): False,
    xml("f", text="a", count="3", color="blue"): False,
    xml("f", text="a", count="3", any="{x"): False,
    xml("f", text="a</parameter>", count="3"): False,
    xml("g", one="1"): False,
    xml("no"): False,
}


def test_forced_calls_follow_their_schemas_and_are_read_as_such():
    use = ToolUse(TOOLS, "required", True, XML)
    for text, allowed in FORCED.items():
        assert accepts(use, text) is allowed, text
        if allowed:
            assert "Content" not in [kind for kind, _ in read(text, [], XML)]
    assert not accepts(ToolUse(TOOLS, "g", True, XML), xml("h"))
    assert not accepts(ToolUse(TOOLS, "required", False, XML), f"{xml('g')}\n{xml('g')}")


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"anyOf": [{"required": ["a"]}]}, "anyOf"),
        ({"properties": {"a": {"type": "string", "pattern": "b+"}}}, "a: .*pattern"),
        ({"properties": {"a": {"enum": ["</parameter>"]}}}, "a: expected texts without </parameter>"),
        ({"properties": {"a": {"type": "string", "minLength": "1}/"}}}, "a: expected minLength and maxLength"),
        ({"properties": {"a b": {"type": "string"}}}, "'a b'"),
        ({"additionalProperties": {"type": "integer"}}, "additionalProperties"),
    ],
)
def test_schemas_that_tags_cannot_be_held_to_are_refused(schema: dict[str, object], named: str):
    with pytest.raises(ValueError, match=named):
        list(XML.parts(schema))
    with pytest.raises(ValueError, match=named):
        XML.grammar({"f": schema}, several=False)


@given(st.recursive(st.none() | st.integers() | st.text(), lambda each: st.lists(each) | st.dictionaries(st.text(), each)))
def test_objects_end_where_json_says(value: object):
    text = json.dumps({"a": value})
    assert object_end(text + " }", 0) == len(text)
    assert object_end(text[:-1], 0) is None


def template(source: str) -> ChatTemplate:
    return ChatTemplate.compiled(source, "a test's template")


def test_forms_are_known_by_templates():
    assert find_call_form(template("{{ messages[0].content }}")) is HERMES
    assert find_call_form(template("{{ tools }} <tool_call>")) is HERMES
    assert find_call_form(template('{{ tools }} "parameters" ipython')) is LLAMA3
    assert find_call_form(template("{{ tools }} <tool_call><function=")) is XML
    assert find_call_form(template("{{ tools }} [TOOL_CALLS]")) is None


def test_which_tools_may_be_called():
    tools = [tool("f"), tool("g")]
    plain = template("{{ messages[0].content }}")
    assert tool_use(tools, "none", None, plain) is None
    assert tool_use(None, "auto", None, plain) is None
    use = tool_use(tools, None, None, plain)
    assert use is not None
    assert (use.choice, use.several, use.forced) == ("auto", True, False)
    named = NamedTool.model_validate({"type": "function", "function": {"name": "g"}})
    one = tool_use(tools, named, None, plain)
    assert one is not None
    assert (one.choice, one.several, [each.function.name for each in one.callable]) == ("g", False, ["g"])
    for given_tools, choice, parameter in ((None, "required", "tool_choice"), ([*tools, tool("f")], "auto", "tools")):
        with pytest.raises(ApiError) as caught:
            tool_use(given_tools, choice, None, plain)  # type: ignore[arg-type]
        assert caught.value.param == parameter


def test_a_template_without_tools_is_told_of_them_in_messages():
    use = ToolUse([tool("f", type="object")], "auto", True, HERMES)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
    ]
    found = inline_tool_fields(messages, use)
    assert [message["role"] for message in found] == ["system", "user", "assistant", "user"]
    assert '"name": "f"' in found[0]["content"]
    assert found[2] == {"role": "assistant", "content": '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'}
    assert found[3]["content"] == "<tool_response>\n42\n</tool_response>"
    system = inline_tool_fields([{"role": "system", "content": "Be kind."}, *messages], use)
    assert len(system) == 4
    assert system[0]["content"].startswith("Be kind.\n\nYou can call")
