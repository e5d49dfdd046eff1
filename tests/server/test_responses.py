"""OpenAI's Responses API, over an engine that repeats the prompt's tokens."""

import json
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from starlette.testclient import TestClient

from server.conftest import Client
from server.fake import FakeEngine
from server.test_chat import prompt_of
from server.test_messages import CALL, ROLES
from tilewright.models.chat import ChatTemplate
from tilewright.server.responses_store import ResponsesStore, Stored

ROUTE = "/v1/responses"
TOOLS = [{"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}]
CALLING = ChatTemplate.compiled("{{ messages[-1].content }}{# <tool_call> #}{{ '' if tools else '' }}<tool_call>", "a test's")
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def respond(client: TestClient, said: Any = "hello there", **body: Any) -> dict[str, Any]:
    answer = client.post(ROUTE, json={"model": "demo", "input": said, **body})
    assert answer.status_code == 200, answer.text
    Response.model_validate(answer.json())
    return answer.json()


def events(client: TestClient, said: Any = "hello there", **body: Any) -> list[dict[str, Any]]:
    answer = client.post(ROUTE, json={"input": said, "stream": True, **body})
    assert answer.status_code == 200, answer.text
    found = []
    for each in answer.text.rstrip("\n").split("\n\n"):
        name, data = each.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        EVENT.validate_python(found[-1])
        assert name == f"event: {found[-1]['type']}"
    assert [each["sequence_number"] for each in found] == list(range(len(found)))
    return found


def without_ids(found: Any) -> Any:
    """A value without what is random, or of a time."""
    if isinstance(found, list):
        return [without_ids(each) for each in found]
    if isinstance(found, dict):
        drawn = ("id", "call_id", "item_id", "created_at", "completed_at")
        return {name: without_ids(value) for name, value in found.items() if name not in drawn}
    return found


def test_an_answer_is_a_response(client: Client):
    found = respond(client(), max_output_tokens=4, metadata={"a": "b"}, temperature=0.5)
    assert found["id"].startswith("resp_")
    (item,) = found["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "incomplete")
    (part,) = item["content"]
    assert "hello there\n".startswith(part["text"])
    assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert found["usage"]["output_tokens"] == 4
    assert found["usage"]["input_tokens_details"]["cached_tokens"] > 0
    assert (found["metadata"], found["temperature"], found["top_p"], found["tool_choice"]) == ({"a": "b"}, 0.5, 1.0, "auto")
    assert found["metrics"]["speculative_decoding"]["num_spec_tokens"] == 3


def test_items_become_a_chat(client: Client):
    engine = FakeEngine()
    said = [
        {"role": "user", "content": [{"type": "input_text", "text": "one"}]},
        {
            "type": "message",
            "role": "assistant",
            "id": "m",
            "content": [{"type": "output_text", "text": "two", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}", "id": "f", "status": "completed"},
        {"type": "function_call_output", "call_id": "c", "output": "3"},
    ]
    template = ChatTemplate.compiled(ROLES, "a test's")
    respond(client(engine, template=template), said, instructions="be short", max_output_tokens=1)
    assert prompt_of(engine).strip() == "system:be short user:one assistant:two!add tool:3"


def test_a_response_is_gone_on_with(client: Client):
    engine = FakeEngine()
    served = client(engine, template=ChatTemplate.compiled(ROLES, "a test's"))
    first = respond(served, "one", instructions="be short", max_output_tokens=1)
    said = first["output"][0]["content"][0]["text"]
    second = respond(served, "two", previous_response_id=first["id"], max_output_tokens=1)
    assert prompt_of(engine) == f"user:one assistant:{said} user:two ", "instructions are not carried over"
    assert second["previous_response_id"] == first["id"]
    respond(served, "three", previous_response_id=second["id"], max_output_tokens=1)
    assert prompt_of(engine).startswith(f"user:one assistant:{said} user:two assistant:")


def test_a_response_is_kept_until_it_is_deleted(client: Client):
    served = client()
    found = respond(served, max_output_tokens=2)
    path = f"{ROUTE}/{found['id']}"
    assert served.get(path).json() == found
    assert served.get(path, params={"stream": "true"}).status_code == 400
    cancelled = served.post(f"{path}/cancel")
    assert (cancelled.status_code, "background" in cancelled.json()["error"]["message"]) == (400, True)
    assert served.delete(path).json() == {"id": found["id"], "object": "response", "deleted": True}
    for gone in (served.get(path), served.delete(path), served.post(f"{path}/cancel")):
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "response_not_found")
    forgotten = served.post(ROUTE, json={"input": "x", "previous_response_id": found["id"]})
    assert forgotten.json()["error"]["code"] == "previous_response_not_found"
    assert served.get(f"{ROUTE}/{respond(served, store=False)['id']}").status_code == 404
    stream = events(served, max_output_tokens=2)
    assert served.get(f"{ROUTE}/{stream[0]['response']['id']}").json() == stream[-1]["response"]


def test_a_response_belongs_to_a_key(client: Client):
    served = client(api_keys=("a", "b"))
    one, other = ({"authorization": f"Bearer {key}"} for key in "ab")
    made = served.post(ROUTE, json={"input": "x", "max_output_tokens": 1}, headers=one).json()
    path = f"{ROUTE}/{made['id']}"
    assert [served.get(path, headers=key).status_code for key in (one, other)] == [200, 404]
    assert served.delete(path, headers=other).status_code == 404
    body = {"input": "x", "previous_response_id": made["id"]}
    assert served.post(ROUTE, json=body, headers=other).status_code == 400


def test_the_store_is_bounded():
    store = ResponsesStore(3, 100)
    for n in range(5):
        store.add(0, str(n), Stored(b"x" * 10, b"y" * 10))
    assert [name for _, name in store.responses] == ["2", "3", "4"]
    store.add(0, "large", Stored(b"x" * 50, b"y" * 40))
    assert ([name for _, name in store.responses], store.size) == (["large"], 90)
    store.add(0, "too large", Stored(b"x" * 101, b""))
    assert (len(store.responses), store.size) == (0, 0)
    store.add(0, "a", Stored(b"x", b""))
    assert store.delete(0, "a")
    assert not store.delete(0, "a")
    assert store.size == 0


def test_calls_are_items_of_their_own(client: Client):
    engine = FakeEngine(per_update=5)
    served = client(engine, template=CALLING)
    fields: dict[str, Any] = {"tools": TOOLS, "max_output_tokens": 40}
    found = respond(served, f"well {CALL} ", **fields)
    text, call = found["output"][:2]
    assert text["content"][0]["text"].startswith("well")
    assert text["status"] == "completed"
    assert (call["type"], call["name"], json.loads(call["arguments"])) == ("function_call", "add", {"a": 1, "b": [2]})
    assert found["tools"][0]["name"] == "add"
    stream = events(served, f"well {CALL} ", **fields)
    assert without_ids(stream[-1]["response"]["output"]) == without_ids(found["output"])
    arguments = "".join(
        e["delta"] for e in stream if e["type"] == "response.function_call_arguments.delta" and e["output_index"] == 1
    )
    assert arguments == call["arguments"]
    done = [each["item"] for each in stream if each["type"] == "response.output_item.done"]
    assert done == stream[-1]["response"]["output"]
    again = [
        {"role": "user", "content": "x"},
        *found["output"][:2],
        {"type": "function_call_output", "call_id": call["call_id"], "output": "3"},
    ]
    respond(served, again, max_output_tokens=1)


@pytest.mark.parametrize(
    ("name", "arguments", "shown"),
    [
        ("add", '{"a": 1}', '!add={"a": 1}'),
        ("my tool", '{"a": 1}', '!my tool={"a": 1}'),
        ("add", '{"a": "\\ud83d"}', '!add={"a": "�"}'),
        ("add", '{"a": 1,}', 'add {"a": 1,}'),
        ("add", '{"a": "cut', 'add {"a": "cut'),
    ],
)
def test_calls_go_back_as_they_came(client: Client, name: str, arguments: str, shown: str):
    """Through each route's answer, and a response that is gone on with: what is no JSON object becomes a text."""
    template = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}!{{ c.function.name }}="
        "{{ c.function.arguments | tojson }}{% endfor %}|{% endfor %}{# <tool_call> #}{{ '' if tools else '' }}"
    )
    engine = FakeEngine(per_update=5)
    served = client(engine, template=ChatTemplate.compiled(template, "a test's"))
    said = f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}'
    said += "" if arguments.endswith("cut") else "}\n</tool_call>"
    length = len(engine.decoding.model.tokenizer.encode(said).ids)
    message = {"role": "user", "content": said}
    tools = [{"type": "function", "function": {"name": "add"}}]
    answer = served.post("/v1/chat/completions", json={"messages": [message], "tools": tools, "max_tokens": length}).json()
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert (call["function"]["name"], call["function"]["arguments"]) == (name, arguments)
    result = {"role": "tool", "tool_call_id": call["id"], "content": "3"}
    back = {"messages": [message, answer["choices"][0]["message"], result], "max_tokens": 1}
    assert served.post("/v1/chat/completions", json=back).status_code == 200
    want = f"{said}|{shown}|3|"
    assert prompt_of(engine) == want
    first = respond(served, said, tools=TOOLS, max_output_tokens=length)
    output = {"type": "function_call_output", "call_id": first["output"][0]["call_id"], "output": "3"}
    respond(served, [{"role": "user", "content": said}, *first["output"], output], max_output_tokens=1)
    assert prompt_of(engine) == want
    respond(served, [output], previous_response_id=first["id"], max_output_tokens=1)
    assert prompt_of(engine) == want


def test_a_stream_has_the_events_of_the_api(client: Client):
    stream = events(client(), max_output_tokens=7)
    kinds = [each["type"].removeprefix("response.") for each in stream]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    text = "".join(each["delta"] for each in stream if each["type"].endswith("output_text.delta"))
    assert text == stream[-4]["text"] == stream[-3]["part"]["text"]
    assert without_ids(stream[-1]["response"]) == without_ids(respond(client(), max_output_tokens=7))


def test_an_error_in_a_stream_is_an_event(client: Client):
    for after in (0, 1):
        stream = events(client(FakeEngine(ends=("error", after))), max_output_tokens=50)
        assert stream[0]["type"] == "response.created"
        assert stream[-1]["type"] == "response.failed"
        assert stream[-1]["response"]["error"] == {"code": "server_error", "message": "the engine failed"}


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"input": []}, "input", "invalid_value"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "invalid_value"),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "", "arguments": "{}"}]},
            "input[0].function_call.name",
            "invalid_value",
        ),
        ({"background": True}, "background", "unsupported_parameter"),
        ({"truncation": "auto"}, "truncation", "unsupported_parameter"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "invalid_value"),
        ({"include": ["message.output_text.logprobs"]}, "include", "unsupported_parameter"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "unsupported_parameter"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "add"}}, "tools", "unsupported_parameter"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format", "invalid_value"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format", "unsupported_parameter"),
        ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
        ({"input": "a b c " * 2048}, "input", "context_length_exceeded"),
        ({"previous_response_id": "resp_x"}, "previous_response_id", "previous_response_not_found"),
        ({"metadata": {"a": 1}}, "metadata", "invalid_value"),
        ({"frobnicate": 1}, "frobnicate", "unknown_parameter"),
    ],
)
def test_a_bad_field_is_named(shared: TestClient, fields: dict[str, Any], param: str, code: str):
    answer = shared.post(ROUTE, json={"input": "x", **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")
