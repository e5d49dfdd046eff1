"""Anthropic's Messages API, over an engine that repeats the prompt's tokens."""

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from server.conftest import Client
from server.fake import FakeEngine
from server.test_chat import prompt_of
from tilewright.models.chat import ChatTemplate

HELLO: list[Any] = [{"role": "user", "content": "hello there"}]
ROUTE = "/v1/messages"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call>'
TOOLS = [{"name": "add", "description": "adds", "input_schema": {"type": "object"}}]
ROLES = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}!{{ c.function.name }}{% endfor %} {% endfor %}{{ '' if tools else '' }}"
)


def message(client: TestClient, **body: Any) -> dict[str, Any]:
    answer = client.post(ROUTE, json={"model": "demo", "messages": HELLO, "max_tokens": 4, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(client: TestClient, **body: Any) -> list[dict[str, Any]]:
    answer = client.post(ROUTE, json={"messages": HELLO, "max_tokens": 4, "stream": True, **body})
    assert answer.status_code == 200, answer.text
    found = []
    for each in answer.text.rstrip("\n").split("\n\n"):
        name, data = each.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def put_together(stream: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The content that events add up to."""
    content: list[dict[str, Any]] = []
    for each in stream:
        if each["type"] == "content_block_start":
            assert each["index"] == len(content)
            content.append(dict(each["content_block"]) | {"json": ""})
        elif each["type"] == "content_block_delta":
            delta = each["delta"]
            block = content[each["index"]]
            block["json" if delta["type"] == "input_json_delta" else "text"] += delta.get("text", delta.get("partial_json"))
    for block in content:
        pieces = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(pieces)
    return content


def without_ids(content: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in block.items() if name != "id"} for block in content]


def test_an_answer_is_a_message(client: Client):
    found = message(client())
    assert found["id"].startswith("msg_")
    assert (found["type"], found["role"], found["model"]) == ("message", "assistant", "demo")
    (block,) = found["content"]
    assert block == {"type": "text", "text": block["text"], "citations": None}
    assert "hello there\n".startswith(block["text"])
    assert (found["stop_reason"], found["stop_sequence"]) == ("max_tokens", None)
    usage = found["usage"]
    assert usage["output_tokens"] == 4
    assert usage["cache_read_input_tokens"] > 0, "the engine says that it found half of a prompt"
    body = {"model": "demo", "messages": HELLO}
    count = client().post(f"{ROUTE}/count_tokens", json=body).json()
    assert count == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    assert found["metrics"]["speculative_decoding"]["num_spec_tokens"] == 3


def test_a_stop_sequence_is_named(client: Client):
    found = message(client(), max_tokens=50, stop_sequences=["there"])
    assert (found["stop_reason"], found["stop_sequence"], found["content"][0]["text"]) == ("stop_sequence", "there", "hello ")


def test_a_conversation_becomes_a_chat(client: Client):
    engine = FakeEngine()
    said = [
        {"role": "user", "content": [{"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "two"}, {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}}],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "3"}], "is_error": False},
                {"type": "text", "text": "four"},
            ],
        },
    ]
    template = ChatTemplate.compiled(ROLES, "a test's")
    said.append({"role": "system", "content": "now"})
    message(client(engine, template=template), messages=said, system=[{"type": "text", "text": "be short"}])
    assert prompt_of(engine) == "system:be short user:one assistant:two!add tool:3 user:four system:now "


def test_an_answer_goes_on_with_the_assistants_last_words(client: Client):
    engine = FakeEngine()
    message(client(engine), messages=[*HELLO, {"role": "assistant", "content": "well"}])
    assert prompt_of(engine) == "hello there\nwell", "without the template's line break"


def test_calls_are_blocks_of_their_own(client: Client):
    engine = FakeEngine(per_update=5)
    served = client(
        engine, template=ChatTemplate.compiled("{{ messages[-1].content }}{# tools #}{{ '' if tools else '' }}<tool_call>", "x")
    )
    said = [{"role": "user", "content": f"well {CALL}"}]
    found = message(served, messages=said, tools=TOOLS, max_tokens=200, stop_sequences=["</tool_call>"])
    assert found["content"][0]["text"].startswith("well")
    call = found["content"][1]
    assert call["id"].startswith("toolu_")
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "add", {"a": 1, "b": [2]})
    stream = events(served, messages=said, tools=TOOLS, max_tokens=200, stop_sequences=["</tool_call>"])
    assert without_ids(put_together(stream)) == without_ids(found["content"])


def test_arguments_that_are_cut_off_or_no_json_lose_nothing(client: Client):
    source = "{# <tool_call> #}{{ '' if tools else '' }}{{ messages[-1].content }}"
    served = client(FakeEngine(per_update=5), template=ChatTemplate.compiled(source, "a test's"))
    for said, block in (
        ('<tool_call>\n{"name": "add", "arguments": {"a": [1, 2', {"type": "tool_use", "name": "add", "input": {"a": [1, 2]}}),
        (
            '<tool_call>\n{"name": "add", "arguments": {"a" 1}}\n</tool_call>',
            {"type": "text", "text": 'add {"a" 1}', "citations": None},
        ),
    ):
        tokens = len(FakeEngine().decoding.model.tokenizer.encode(said).ids)
        found = message(served, messages=[{"role": "user", "content": said}], tools=TOOLS, max_tokens=tokens)
        assert without_ids(found["content"][:1]) == [block]


def test_a_stream_has_the_events_of_the_api(client: Client):
    stream = events(client(), max_tokens=7)
    kinds = [each["type"] for each in stream]
    assert kinds[:3] == ["message_start", "content_block_start", "ping"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[3:-3]) == {"content_block_delta"}
    whole = message(client(), max_tokens=7)
    start = stream[0]["message"]
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert start["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    assert put_together(stream) == whole["content"]
    assert stream[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert stream[-2]["usage"] == whole["usage"]


def test_an_error_in_a_stream_is_an_event(client: Client):
    stream = events(client(FakeEngine(ends=("error", 1))), max_tokens=50)
    assert stream[-1]["type"] == "error"
    assert stream[-1]["error"]["type"] == "api_error"
    assert stream[-1]["error"]["message"] == "the engine failed"


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"max_tokens": None}, "max_tokens", "invalid_type"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "invalid_value"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]", "invalid_value"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]},
            "messages[0]",
            "invalid_value",
        ),
        ({"thinking": {"type": "sometimes"}}, "thinking.type", "invalid_value"),
        (
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            "context_management.edits",
            "unsupported_parameter",
        ),
        ({"tool_choice": {"type": "tool"}}, "tool_choice", "invalid_value"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "invalid_value"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type", "unsupported_parameter"),
        ({"tools": TOOLS, "tool_choice": {"type": "any"}}, "tools", "unsupported_parameter"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort", "invalid_value"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {}}}},
            "output_config.format",
            "unsupported_parameter",
        ),
        ({"stop_sequences": [""]}, "stop_sequences[0]", "invalid_value"),
        ({"messages": [{"role": "user", "content": "a b c " * 2048}]}, "messages", "context_length_exceeded"),
        ({"container": "x"}, "container", "unsupported_parameter"),
        ({"frobnicate": 1}, "frobnicate", "unknown_parameter"),
    ],
)
def test_a_bad_field_is_named(shared: TestClient, fields: dict[str, Any], param: str, code: str):
    answer = shared.post(ROUTE, json={"messages": HELLO, "max_tokens": 4, **fields})
    assert answer.status_code == 400, answer.text
    body = answer.json()
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert (body["error"]["param"], body["error"]["code"]) == (param, code)
    assert body["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]


def test_errors_have_the_words_of_the_api(client: Client):
    thread = client().post(ROUTE, json={"messages": HELLO, "max_tokens": 4, "thread": {"type": "create"}}).json()["error"]
    assert (thread["param"], thread["details"]["error_code"]) == ("thread", "thread_unsupported_request")
    locked = client(api_keys=("k",))
    fields = {"messages": HELLO, "max_tokens": 4}
    answer = locked.post(ROUTE, json=fields)
    assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
    key = {"x-api-key": "k"}
    assert locked.post(ROUTE, json=fields, headers=key).status_code == 200
    assert locked.post(ROUTE, json=fields, headers={"x-api-key": "kk"}).status_code == 401
    unknown = locked.post(ROUTE, json={**fields, "model": "other"}, headers=key)
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "not_found_error")
    assert locked.get(f"{ROUTE}/x", headers=key).json()["error"]["type"] == "not_found_error"


def test_the_load_is_told(client: Client):
    assert client().get("/load").json() == {"server_load": 0, "num_requests_running": 0, "num_requests_waiting": 0}
    locked = client(api_keys=("k",))
    assert [locked.request(method, "/ping").status_code for method in ("GET", "POST")] == [200, 200]
