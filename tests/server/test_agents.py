"""Requests as agents send them: what needs no change of the answer is accepted, what templates can do is done."""

import json
from typing import Any

import anthropic
import pytest
from starlette.testclient import TestClient

from server.conftest import Client, on_a_port
from server.fake import FakeEngine
from server.test_chat import chat, prompt_of
from server.test_messages import TOOLS
from server.test_responses import CALLING
from tilewright.models.chat import ChatTemplate
from tilewright.server.parse import requested_grammar
from tilewright.server.protocol import ChatBody
from tilewright.server.tools import tool_use

HELLO: Any = [{"role": "user", "content": "hello there"}]
THINKS = ChatTemplate.compiled(
    "{{ enable_thinking }} {{ reasoning_effort }}|{% for m in messages %}{{ m.reasoning_content }}{{ m.content }}{% endfor %}",
    "a test's",
)
READ: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "read",
        "description": "Read a file.",
        "parameters": {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "properties": {
                "filePath": {"description": "The path", "type": "string"},
                "limit": {"type": "integer", "exclusiveMinimum": 0, "maximum": 9007199254740991},
            },
            "required": ["filePath"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.parametrize(
    ("fields", "effort"),
    [
        ({}, " "),
        ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, "True "),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "medium"}, "False medium"),
        ({"thinking": {"type": "adaptive", "display": "summarized"}}, " "),
        ({"enable_thinking": False, "thinking": {"type": "enabled"}}, "False "),
        ({"reasoning_effort": "none"}, "False "),
        ({"reasoning_effort": "xhigh"}, " high"),
        ({"reasoning_effort": "minimal"}, " low"),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, " low"),
        ({"reasoning": {"enabled": True, "exclude": False}, "verbosity": "medium"}, "True "),
        ({"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": True, "reasoning_effort": "x"}}, "True x"),
    ],
)
def test_templates_are_told_how_much_to_think(client: Client, fields: dict[str, Any], effort: str):
    engine = FakeEngine()
    chat(client(engine, template=THINKS), messages=HELLO, **fields)
    assert prompt_of(engine) == f"{effort}|hello there"


@pytest.mark.parametrize(
    ("route", "fields", "effort"),
    [
        ("/v1/messages", {"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}, " high"),
        ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 1024}, "betas": ["interleaved-thinking"]}, "True "),
        (
            "/v1/responses",
            {"input": [{"type": "reasoning", "id": "rs_1", "summary": []}, {"role": "user", "content": HELLO[0]["content"]}]},
            " ",
        ),
        ("/v1/responses", {"reasoning": {"effort": "medium", "summary": "auto"}, "text": {"verbosity": "medium"}}, " medium"),
    ],
)
def test_other_apis_tell_them_too(client: Client, route: str, fields: dict[str, Any], effort: str):
    engine = FakeEngine()
    body = {"messages": HELLO, "max_tokens": 2} if route == "/v1/messages" else {"input": "hello there", "max_output_tokens": 2}
    answer = client(engine, template=THINKS).post(route, json={"model": "demo", **body, **fields})
    assert answer.status_code == 200, answer.text
    assert prompt_of(engine) == f"{effort}|hello there"


def test_thoughts_of_earlier_messages_are_shown(client: Client):
    engine = FakeEngine()
    app = client(engine, template=THINKS)
    answered = {"role": "assistant", "content": "b"}
    more = {
        "reasoning_details": [{"type": "reasoning.text", "text": "why"}],
        "cache_control": {"type": "ephemeral"},
        "thinking_blocks": [],
        "provider_specific_fields": {"refusal": None},
        "extra_content": {},
    }
    for fields, shown in (
        ({"reasoning": "why "}, "why b"),
        ({"reasoning": "why ", "reasoning_content": "so "}, "so b"),
        ({}, "b"),
    ):
        chat(app, messages=[*HELLO, {**answered, **more, **fields}, *HELLO])
        assert prompt_of(engine) == f" |hello there{shown}hello there"


def test_opencodes_requests(client: Client):
    """Requests of the second turn of OpenCode 1.18, shortened; its requests for titles have no tools."""
    call = {"id": "call_1", "type": "function", "function": {"name": "read", "arguments": '{"filePath":"a.py"}'}}
    said = [
        {"role": "system", "content": "You are a coding agent."},
        {"role": "user", "content": "Read a.py."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "<content>1: x</content>"},
        {"role": "assistant", "content": "It is x."},
        {"role": "user", "content": "Thanks."},
    ]
    fields: dict[str, Any] = {"model": "demo", "max_tokens": 8, "stream": True, "stream_options": {"include_usage": True}}
    app = client(FakeEngine(), template=CALLING)
    for body in ({"messages": said, "tools": [READ], "tool_choice": "auto"}, {"messages": said[:2]}):
        answer = app.post("/v1/chat/completions", json={**fields, **body})
        assert answer.status_code == 200, answer.text
        assert '"usage":{' in answer.text
        assert answer.text.rstrip().endswith("data: [DONE]")


AGENT: dict[str, Any] = {
    "model": "demo",
    "max_tokens": 32000,
    "system": [{"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "medium"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "metadata": {"user_id": "user_1_account__session_2"},
    "tools": [{**TOOLS[0], "cache_control": {"type": "ephemeral"}, "eager_input_streaming": True}],
}
"""Fields of an agent that speaks Anthropic's API."""


def test_an_agent_of_anthropics_api_takes_three_turns(client: Client):
    thought = [{"type": "thinking", "thinking": "I add.", "signature": "abc"}, {"type": "redacted_thinking", "data": "xyz"}]
    call = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1, "b": [2]}, "caller": {"type": "direct"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "3"}], "is_error": False}
    turns = [
        [{"role": "user", "content": [{"type": "text", "text": "add", "cache_control": {"type": "ephemeral"}}]}],
        [
            {"role": "assistant", "content": [*thought, {"type": "text", "text": "So:"}, call]},
            {"role": "user", "content": [result]},
        ],
        [{"role": "assistant", "content": "3"}, {"role": "user", "content": "thanks"}],
    ]
    engine = FakeEngine(context=300)
    said = list[Any]()
    app = client(engine, template=CALLING)
    for turn in turns:
        said += turn
        for fields in ({}, {"context_management": {"edits": []}}, {"context_management": {}}):
            answer = app.post("/v1/messages?beta=true", json={**AGENT, "messages": said, **fields})
            assert answer.status_code == 200, answer.text
            found = answer.json()
            # The context ends the answer, and the answer says so.
            assert found["stop_reason"] == "model_context_window_exceeded"
            used = found["usage"]
            assert used["input_tokens"] + used["cache_read_input_tokens"] + used["output_tokens"] == engine.context
        counted = {name: value for name, value in AGENT.items() if name not in ("max_tokens", "metadata")}
        answer = app.post("/v1/messages/count_tokens", json={**counted, "messages": said})
        assert answer.status_code == 200, answer.text


def test_anthropics_client_sends_such_fields():
    engine = FakeEngine()
    engine.start()
    with (
        on_a_port(engine, template=CALLING) as server,
        anthropic.Anthropic(base_url=server.url, api_key="made-up", max_retries=0, timeout=20) as client,
    ):
        found = client.beta.messages.create(
            **{**AGENT, "max_tokens": 2, "messages": HELLO}, betas=["context-management-2025-06-27", "effort-2025-11-24"]
        )
        assert found.stop_reason == "max_tokens"
    engine.stop()


SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def test_an_answer_is_calls_or_has_its_form():
    """Tools beside a response format."""
    llguidance = pytest.importorskip("llguidance")
    from tilewright.grammar.worker import compile_matcher

    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    body = ChatBody.model_validate({"messages": HELLO, "tools": [READ], "response_format": form})
    requested = requested_grammar(body, tool_use(body.tools, body.tool_choice, None, CALLING))
    assert requested is not None
    assert requested.param == "response_format.json_schema.schema"
    call = '<tool_call>\n{"name": "read", "arguments": {"filePath": "a"}}\n</tool_call>'
    for text, right in (
        ('{"city": "Oslo"}', True),
        (call, True),
        (f"{call}\n{call}", True),
        ('{"city": "Bonn"}', False),
        ("Hello", False),
        (f'{call}\n{{"city": "Oslo"}}', False),
        ('{"city": "Oslo"}\n{"city": "Oslo"}', False),
    ):
        matcher, why = compile_matcher(llguidance.LLTokenizer("byte"), requested.grammar.kind, requested.grammar.text)
        assert not why
        accepted = all(not matcher.is_stopped() and matcher.try_consume_tokens([byte]) for byte in text.encode())
        assert (accepted and matcher.is_accepting()) == right, text


def test_only_json_stands_beside_tools(client: Client):
    app: TestClient = client(FakeEngine(), template=CALLING)
    body = {"model": "demo", "messages": HELLO, "tools": [READ], "structured_outputs": {"regex": "a"}}
    answer = app.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "structured_outputs")
    assert "expected a JSON format together with tools" in json.dumps(answer.json())
