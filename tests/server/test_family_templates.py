"""Chat templates as families have them: thinking on and off, tools, and what an answer begins behind.

The templates are written for these tests, and do what those of the families do; docs/serving.md has what follows as a table.
"""

import json
from typing import Any

import pytest

from tilewright.models.chat import ChatTemplate
from tilewright.server.call_forms import HERMES, LLAMA3, CallForm
from tilewright.server.errors import ApiError
from tilewright.server.tool_calls import Arguments, Called, CallParser
from tilewright.server.tools import Tool, find_call_form, inline_tool_fields, tool_use
from tilewright.server.xml_calls import XML

CHATML = """
{%- for m in messages %}
{{- '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\\n' }}
{%- if m.reasoning_content and loop.last %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}
{{- m.content }}
{%- for call in m.tool_calls or [] %}CALL{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}BEGIN{% endif %}"""
TOOLS = "{%- if tools %}<|im_start|>system\nFORM{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
JSON_FORM = '<tool_call>{"name": NAME, "arguments": ARGUMENTS}</tool_call>'
XML_FORM = "<tool_call><function=NAME>"
JSON_CALL = "<tool_call>{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</tool_call>"
XML_CALL = """<tool_call>
<function={{ call.function.name }}>
{% for name, value in call.function.arguments | items %}
{{- '<parameter=' + name + '>\\n' }}
{{- value | tojson if value is mapping or (value is sequence and value is not string) else value | string }}
{{- '\\n</parameter>\\n' }}
{%- endfor %}
{{- '</function>\\n</tool_call>' }}"""
NOT_THINKING = "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
ALWAYS_OPEN = NOT_THINKING.replace("{% endif %}", "{% else %}{{ '<think>\\n' }}{% endif %}")


def chatml(begin: str = "", form: str = JSON_FORM, call: str = JSON_CALL) -> str:
    return TOOLS.replace("FORM", form) + CHATML.replace("CALL", call).replace("BEGIN", begin)


TEMPLATES = {
    "qwen3": chatml(NOT_THINKING),
    "qwen3-instruct": chatml(),
    "qwen3.5": chatml(ALWAYS_OPEN, XML_FORM, XML_CALL),
    "smollm3": """
{%- set quiet = (enable_thinking is defined and not enable_thinking) or '/no_think' in messages[0].content %}"""
    + chatml(NOT_THINKING).replace("enable_thinking is defined and not enable_thinking %}{{ '<think>", "quiet %}{{ '<think>"),
    "llama3": """
{%- if tools %}{{ bos_token }}Environment: ipython {{ strftime_now('%Y') }} {"name": NAME, "parameters": ARGUMENTS}
{%- for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}
{%- for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>

{{ m.content | trim }}<|eot_id|>{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}""",
    "gemma2": """
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else 'user') + '\\n' + m.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}""",
    "gemma3": """
{%- set first = messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' %}
{%- for m in (messages[1:] if messages[0].role == 'system' else messages) %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else 'user') + '\\n' + (first if loop.first else '') }}
{{- m.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}""",
    "mistral": """
{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% elif m.tool_calls %}
{{- '[TOOL_CALLS]' + (m.tool_calls | tojson) + eos_token }}
{%- elif m.role == 'assistant' %}{{ m.content + eos_token }}{% endif %}
{%- endfor %}""",
    "phi4": """
{%- for m in messages %}{{ '<|' + m.role + '|>' + m.content }}
{%- if m.role == 'system' and m.tools %}{{ '<|tool|>' + m.tools + '<|/tool|>' }}{% endif %}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}""",
    "gpt_oss": """
{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') + '<|end|>' }}
{%- if tools %}namespace functions { {% for tool in tools %}type {{ tool.function.name }}; {% endfor %}}{% endif %}
{%- for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}""",
}
ASK = [{"role": "user", "content": "What is the weather?"}]
OPEN = "<|im_start|>assistant\n<think>\n"
CLOSED = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
PLAIN = "<|im_start|>assistant\n"
ENDS: dict[str, tuple[str, ...]] = {
    "qwen3": (PLAIN, PLAIN, CLOSED),
    "qwen3-instruct": (PLAIN, PLAIN, PLAIN),
    "qwen3.5": (OPEN, OPEN, CLOSED),
    "smollm3": (PLAIN, PLAIN, CLOSED),
    "llama3": ("<|start_header_id|>assistant<|end_header_id|>\n\n",) * 3,
    "gemma2": ("<end_of_turn>\n<start_of_turn>model\n",) * 3,
    "gemma3": ("<end_of_turn>\n<start_of_turn>model\n",) * 3,
    "mistral": ("[/INST]",) * 3,
    "phi4": ("<|end|><|assistant|>",) * 3,
    "gpt_oss": ("<|end|><|start|>assistant",) * 3,
}
"""End of the prompt: by default, and with `enable_thinking` true and false."""
FORMS: dict[str, CallForm | None] = {
    "qwen3": HERMES,
    "qwen3-instruct": HERMES,
    "qwen3.5": XML,
    "smollm3": HERMES,
    "llama3": LLAMA3,
    "gemma2": HERMES,
    "gemma3": HERMES,
    "mistral": None,
    "phi4": HERMES,
    "gpt_oss": None,
}
"""The form of calls; None where it is not known here."""


def template(family: str) -> ChatTemplate:
    return ChatTemplate.compiled(TEMPLATES[family], family, {"bos_token": "<s>", "eos_token": "</s>"})


@pytest.mark.parametrize("family", TEMPLATES)
def test_an_answer_begins_behind_the_generation_prompt(family: str):
    by_default, on, off = (
        template(family).render(ASK, values=values) for values in ({}, {"enable_thinking": True}, {"enable_thinking": False})
    )
    for text, end in zip((by_default, on, off), ENDS[family], strict=True):
        assert text.endswith(end)
        assert "<think>" not in text.removesuffix(end), "nothing of thinking but there"
    without = template(family).render(ASK, add_generation_prompt=False)
    assert by_default.startswith(without)
    assert (without == by_default) is (family == "mistral"), "whose question ends with what begins the answer"


def test_other_switches_for_thinking():
    assert template("smollm3").render([{"role": "system", "content": "Be kind. /no_think"}, *ASK]).endswith(CLOSED)
    assert "Reasoning: high<" in template("gpt_oss").render(ASK, values={"reasoning_effort": "high"})
    assert "Reasoning: medium<" in template("gpt_oss").render(ASK)


def test_earlier_thoughts_are_the_templates_affair():
    answer = {"role": "assistant", "content": "Rain.", "reasoning_content": "Hm"}
    assert "Hm" not in template("qwen3").render([*ASK, answer, *ASK])
    assert "<think>Hm</think>Rain." in template("qwen3").render([*ASK, answer])


WEATHER = Tool.model_validate({"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}})


def with_tools(family: str, messages: list[dict[str, Any]]) -> str:
    """A prompt as the server makes it."""
    made = template(family)
    use = tool_use([WEATHER], "auto", None, made)
    assert use is not None
    return made.render(messages, tools=use.for_template) if made.takes_tools else made.render(inline_tool_fields(messages, use))


@pytest.mark.parametrize("family", [family for family, form in FORMS.items() if form is not None and family != "gemma2"])
def test_a_model_is_told_of_tools_and_what_it_called(family: str):
    assert find_call_form(template(family)) is FORMS[family]
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"place": "Rome"}}}
    called = [*ASK, {"role": "assistant", "content": "", "tool_calls": [call, call]}]
    results = [{"role": "tool", "content": "Sunny."}, {"role": "tool", "content": "Rain."}, {"role": "user", "content": "Why?"}]
    text = with_tools(family, [*called, *results])
    assert text.index('"name": "weather"') < text.index(ASK[0]["content"]) < text.index("Sunny.") < text.index("Rain.")
    assert text.index("Rain.") < text.index("Why?")
    if family == "gemma3":
        said = "<tool_response>\nSunny.\n</tool_response>\n<tool_response>\nRain.\n</tool_response>\nWhy?<end_of_turn>"
        assert f"<start_of_turn>user\n{said}" in text, "turns alternate"
    if FORMS[family] is HERMES:
        assert '{"name": "weather", "arguments": {"place": "Rome"}}' in text


@pytest.mark.parametrize("family", ["qwen3", "qwen3.5"])
def test_calls_that_a_template_wrote_are_read_as_they_were(family: str):
    values = {"place": "Rome", "days": 3, "exact": True, "from": None, "of": ["rain", {"snow": 1.5}], "note": ""}
    kinds = {"place": "string", "days": "integer", "exact": "boolean", "from": "null", "of": "array", "note": "string"}
    properties = {name: {"type": kind} for name, kind in kinds.items()}
    function = {"name": "weather", "parameters": {"type": "object", "properties": properties}}
    call = {"function": {"name": "weather", "arguments": values}}
    made = template(family)
    use = tool_use([Tool.model_validate({"type": "function", "function": function})], "auto", None, made)
    assert use is not None
    talk = [*ASK, {"role": "assistant", "content": "", "tool_calls": [call]}]
    said = made.render(talk, tools=use.for_template, add_generation_prompt=False).rpartition("<|im_start|>assistant\n")[2]
    called, *arguments = CallParser(use).push(said.removesuffix("<|im_end|>\n"), last=True)
    assert called == Called("weather")
    assert json.loads("".join(part.text for part in arguments if isinstance(part, Arguments))) == values


@pytest.mark.parametrize("family", [family for family, form in FORMS.items() if form is None])
def test_calls_in_a_form_that_is_not_known_are_refused(family: str):
    with pytest.raises(ApiError, match="the tool call format of this model's chat template is unknown"):
        tool_use([WEATHER], "auto", None, template(family))


def test_what_a_template_does_not_take_is_refused_in_its_words():
    with pytest.raises(ValueError, match="System role not supported"):
        with_tools("gemma2", ASK)
    for family in ("gemma2", "gemma3"):
        with pytest.raises(ValueError, match="Roles must alternate"):
            template(family).render(inline_tool_fields([*ASK, *ASK], None))


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_last_message_goes_on_where_it_ended(family: str):
    """Short contents stand in what a template writes behind them, too."""
    made = template(family)
    whole = made.render([*ASK, {"role": "assistant", "content": "Rome @ noon"}], add_generation_prompt=False)
    before = whole[: whole.rindex("Rome @ noon")]
    for content in ("<", "e", "end", "|", "s>", "m", "{", "The answer is <", "I am th", "end-of-the-last-message"):
        for said in (content, f"{content} "):
            text = made.render([*ASK, {"role": "assistant", "content": said}], False, True)
            assert text.rstrip(" ") == before + content
