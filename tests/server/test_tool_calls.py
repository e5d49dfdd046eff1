"""Calls in a model's text: found in whatever pieces it comes."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.models.chat import ChatTemplate
from tilewright.server.errors import ApiError
from tilewright.server.tool_calls import Arguments, CallParser, Content, Part, object_end
from tilewright.server.tools import HERMES, LLAMA3, CallForm, NamedTool, Tool, ToolUse, form_of, told, tool_use

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "}<tool_call>\\"{", "b": [1, {"c": 2}]}}\n</tool_call>'
ARGUMENTS = '{"a": "}<tool_call>\\"{", "b": [1, {"c": 2}]}'
LLAMA = '{"name": "f", "parameters": {"a": 1}}'


def read(text: str, cuts: list[int], form: CallForm = HERMES, several: bool = True) -> list[tuple[str, str]]:
    """The parts of a text that comes in pieces, those of one kind put together."""
    parser, found = CallParser(form, several), list[tuple[str, str]]()
    ends = sorted({min(cut, len(text)) for cut in cuts} | {len(text)})
    parts: list[Part] = []
    for begin, end in zip([0, *ends], ends, strict=False):
        parts += parser.push(text[begin:end])
    for part in [*parts, *parser.push("", last=True)]:
        kind, own = type(part).__name__, part[0]
        if isinstance(part, Content | Arguments) and found and found[-1][0] == kind:
            found[-1] = kind, found[-1][1] + own
        else:
            found.append((kind, own))
    return found


TEXTS = {
    "hello world ": [("Content", "hello world ")],
    CALL: [("Called", "f"), ("Arguments", ARGUMENTS)],
    f"Let me see.\n\n{CALL}\n{CALL} ": [
        ("Content", "Let me see."), ("Called", "f"), ("Arguments", ARGUMENTS), ("Called", "f"), ("Arguments", ARGUMENTS),
    ],
    '<tool_call>{"arguments": {"a":1}, "name": "f"}</tool_call>': [("Called", "f"), ("Arguments", '{"a": 1}')],
    '<tool_call>{"name": "f", "arguments": {"a": "cut': [("Called", "f"), ("Arguments", '{"a": "cut')],
    '<tool_call>{"na': [("Content", '<tool_call>{"na')],
    "a <tool_": [("Content", "a <tool_")],
    '<tool_call>{"x": 1}</tool_call> z': [("Content", '<tool_call>{"x": 1}</tool_call> z')],
}  # fmt: skip
OF_LLAMA = {
    LLAMA: [("Called", "f"), ("Arguments", '{"a": 1}')],
    f" <|python_tag|>{LLAMA} more": [("Called", "f"), ("Arguments", '{"a": 1}')],
    'no {"name"': [("Content", 'no {"name"')],
    '{"a": 1} and': [("Content", '{"a": 1} and')],
    "<|py": [("Content", "<|py")],
}


@given(st.data())
@pytest.mark.parametrize("form", [HERMES, LLAMA3], ids=["hermes", "llama3"])
def test_parts_do_not_depend_on_pieces(form: CallForm, data: st.DataObject):
    texts = TEXTS if form is HERMES else OF_LLAMA
    text = data.draw(st.sampled_from(list(texts)))
    cuts = data.draw(st.lists(st.integers(1, len(text)), max_size=20))
    assert read(text, cuts, form) == texts[text]


@pytest.mark.parametrize("form", [HERMES, LLAMA3], ids=["hermes", "llama3"])
def test_parts_of_a_text_that_comes_character_by_character(form: CallForm):
    texts = TEXTS if form is HERMES else OF_LLAMA
    for text, want in texts.items():
        assert read(text, list(range(len(text))), form) == want


def test_a_second_call_is_dropped_where_one_is_wanted():
    assert read(f"{CALL}\n{CALL}", [], several=False) == TEXTS[CALL]


@given(st.recursive(st.none() | st.integers() | st.text(), lambda each: st.lists(each) | st.dictionaries(st.text(), each)))
def test_objects_end_where_json_says(value: object):
    text = json.dumps({"a": value})
    assert object_end(text + " }", 0) == len(text)
    assert object_end(text[:-1], 0) is None


def tool(name: str, **parameters: object) -> Tool:
    return Tool.model_validate({"type": "function", "function": {"name": name, "parameters": parameters or None}})


def template(source: str) -> ChatTemplate:
    return ChatTemplate.compiled(source, "a test's template")


def test_forms_are_known_by_templates():
    assert form_of(template("{{ messages[0].content }}")) is HERMES
    assert form_of(template("{{ tools }} <tool_call>")) is HERMES
    assert form_of(template('{{ tools }} "parameters" ipython')) is LLAMA3
    assert form_of(template("{{ tools }} [TOOL_CALLS]")) is None


def test_which_tools_may_be_called():
    tools, plain = [tool("f"), tool("g")], template("{{ messages[0].content }}")
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
    found = told(messages, use)
    assert [message["role"] for message in found] == ["system", "user", "assistant", "user"]
    assert '"name": "f"' in found[0]["content"]
    assert found[2] == {"role": "assistant", "content": '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'}
    assert found[3]["content"] == "<tool_response>\n42\n</tool_response>"
    system = told([{"role": "system", "content": "Be kind."}, *messages], use)
    assert len(system) == 4
    assert system[0]["content"].startswith("Be kind.\n\nYou can call")
