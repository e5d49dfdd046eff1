"""Bad input gets a 4xx in OpenAI's format that names the field, for any bytes, and never a 5xx."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from starlette.testclient import TestClient

from server.conftest import Client
from server.fake import FakeEngine
from tilewright.server.protocol import ChatBody, CompletionBody

HELLO = [{"role": "user", "content": "hi"}]


def refused(client: TestClient, route: str, body: Any, status: int = 400) -> dict[str, Any]:
    answer = (
        client.post(route, json=body)
        if not isinstance(body, bytes)
        else client.post(route, content=body, headers={"content-type": "application/json"})
    )
    assert answer.status_code == status, answer.text
    (error,) = answer.json().values()
    assert sorted(error) == ["code", "message", "param", "type"]
    assert isinstance(error["message"], str)
    return error


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_tokens": "5"}, "max_tokens", "invalid_type"),
        ({"max_tokens": 5.5}, "max_tokens", "invalid_type"),
        ({"max_tokens": 10**30}, "max_tokens", "invalid_value"),
        ({"max_tokens": True}, "max_tokens", "invalid_type"),
        ({"temperature": -1}, "temperature", "invalid_value"),
        ({"temperature": 1e7}, "temperature", "invalid_value"),
        ({"top_p": -0.1}, "top_p", "invalid_value"),
        ({"top_p": 1.1}, "top_p", "invalid_value"),
        ({"top_k": -2}, "top_k", "invalid_value"),
        ({"min_p": 2}, "min_p", "invalid_value"),
        ({"n": 0}, "n", "invalid_value"),
        ({"n": 17}, "n", "invalid_value"),
        ({"seed": -(2**63) - 1}, "seed", "invalid_value"),
        ({"seed": 2**63}, "seed", "invalid_value"),
        ({"seed": 0.5}, "seed", "invalid_type"),
        ({"stop": ""}, "stop", "invalid_value"),
        ({"stop": ["x"] * 1025}, "stop", "invalid_value"),
        ({"stop": "x" * 129}, "stop", "invalid_value"),
        ({"presence_penalty": 2.5}, "presence_penalty", "invalid_value"),
        ({"repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
        ({"stream_options": {"x": 1}}, "stream_options.x", "unknown_parameter"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown_parameter"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"five": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {str(n): 1 for n in range(301)}}, "logit_bias", "invalid_value"),
        ({"min_tokens": -1}, "min_tokens", "invalid_value"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "invalid_value"),
        ({"stop_token_ids": [1] * 129}, "stop_token_ids", "invalid_value"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "invalid_value"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "invalid_value"),
        ({"repeat_penalty": 1.1}, "repeat_penalty", "unsupported_parameter"),
        ({"mirostat": 2}, "mirostat", "unsupported_parameter"),
        ({"grammar": "root ::= [0-9]"}, "grammar", "unsupported_parameter"),
        ({"n_predict": 5}, "n_predict", "unsupported_parameter"),
        ({"repeat_last_n": 64, "presence_penalty": 0.5}, "repeat_last_n", "invalid_value"),
        ({"repeat_last_n": 64, "repetition_penalty": 1.2}, "repeat_last_n", "invalid_value"),
        ({"allowed_token_ids": [5]}, "allowed_token_ids", "unsupported_parameter"),
        ({"bad_words": ["x"]}, "bad_words", "unsupported_parameter"),
        ({"return_tokens_as_token_ids": True}, "return_tokens_as_token_ids", "unsupported_parameter"),
        ({"guided_json": {}}, "guided_json", "unsupported_parameter"),
        ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
        ({"store": True}, "store", "unsupported_parameter"),
        ({"frobnicate": 1}, "frobnicate", "unknown_parameter"),
    ],
)
def test_a_bad_field_is_named_by_both_routes(shared: TestClient, fields: dict[str, Any], param: str, code: str):
    for route, needed in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": HELLO})):
        error = refused(shared, route, needed | fields)
        assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")
        assert "found" in error["message"] or code in ("unsupported_parameter", "unknown_parameter")


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"prompt": ""}, "prompt", "invalid_value"),
        ({"prompt": []}, "prompt", "invalid_value"),
        ({"prompt": [[]]}, "prompt", "invalid_value"),
        ({"prompt": ["a", 5]}, "prompt", "invalid_value"),
        ({"prompt": [4096]}, "prompt", "invalid_value"),
        ({"prompt": [-1]}, "prompt", "invalid_value"),
        ({"prompt": ["a"] * 129}, "prompt", "invalid_value"),
        ({"prompt": None}, "prompt", "invalid_value"),
        ({"logprobs": 21}, "logprobs", "invalid_value"),
        ({"logprobs": True}, "logprobs", "invalid_type"),
        ({"best_of": 2}, "best_of", "invalid_value"),
        ({"suffix": "x"}, "suffix", "unsupported_parameter"),
        ({"max_tokens": 2048}, "prompt", "context_length_exceeded"),
        ({"prompt": [7] * 2048}, "prompt", "context_length_exceeded"),
    ],
)
def test_a_bad_field_of_completions_is_named(shared: TestClient, fields: dict[str, Any], param: str, code: str):
    error = refused(shared, "/v1/completions", {"prompt": "a"} | fields)
    assert (error["param"], error["code"]) == (param, code)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role", "invalid_value"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "missing_required_parameter"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "invalid_value"),
        ({"messages": [*HELLO, {**HELLO[0], "x": 1}]}, "messages[1].x", "unknown_parameter"),
        ({"messages": [{**HELLO[0], "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function", "missing_required_parameter"),
        ({"top_logprobs": 3}, "top_logprobs", "invalid_value"),
        ({"logprobs": 3}, "logprobs", "invalid_type"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "invalid_value"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "missing_required_parameter"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"functions": [{}]}, "functions", "unsupported_parameter"),
        ({"modalities": ["text", "audio"]}, "modalities", "unsupported_parameter"),
        ({"audio": {}}, "audio", "unsupported_parameter"),
        ({"reasoning_effort": "huge"}, "reasoning_effort", "invalid_value"),
        ({"reasoning": {"exclude": True}}, "reasoning.exclude", "unsupported_parameter"),
        ({"reasoning": {"max_tokens": 5}}, "reasoning.max_tokens", "unsupported_parameter"),
        ({"verbosity": "low"}, "verbosity", "unsupported_parameter"),
        ({"chat_template": "{{ 1 }}"}, "chat_template", "unsupported_parameter"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs", "invalid_value"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "invalid_value"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs", "invalid_type"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt", "invalid_value"),
        ({"messages": [{"role": "user", "content": "a b c " * 2048}]}, "messages", "context_length_exceeded"),
    ],
)
def test_a_bad_field_of_chats_is_named(shared: TestClient, fields: dict[str, Any], param: str, code: str):
    error = refused(shared, "/v1/chat/completions", {"messages": HELLO} | fields)
    assert (error["param"], error["code"]) == (param, code)


IGNORED: dict[str, Any] = {
    "user": "me",
    "metadata": {"a": 1},
    "request_id": "r",
    "session_id": "s",
    "spaces_between_special_tokens": False,
    "length_penalty": 2.0,
    "early_stopping": True,
    "stream_interval": 4,
    "truncation_side": "left",
    "mm_processor_kwargs": {"a": 1},
    "cache_prompt": True,
    "id_slot": 3,
    "n_keep": 5,
    "mirostat_tau": 5,
    "mirostat_eta": 0.1,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_penalty_last_n": -1,
    "dry_sequence_breakers": ["x"],
    "dynatemp_exponent": 1,
    "xtc_threshold": 0.1,
    "repeat_last_n": 64,
    "repeat_penalty": 1.0,
    "mirostat": 0,
    "dry_multiplier": 0,
    "xtc_probability": 0.0,
    "dynatemp_range": 0,
    "typical_p": 1,
    "top_n_sigma": -1,
    "min_keep": 0,
    "n_probs": 0,
    "grammar": "",
    "samplers": [],
    "timings_per_token": False,
    "priority": 0,
    "bad_words": [],
    "use_beam_search": False,
    "include_reasoning": True,
    "return_tokens_as_token_ids": False,
    "kv_transfer_params": None,
    "stream_options": {"include_usage": True},
}
"""Fields of other servers, with values that change nothing here."""


def test_what_changes_nothing_is_taken(shared: TestClient):
    for route, needed in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": HELLO})):
        plain = shared.post(route, json={**needed, "max_tokens": 4}).json()
        answer = shared.post(route, json={**needed, "max_tokens": 4, **IGNORED})
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"] == plain["choices"]


def test_a_whole_number_may_be_written_as_a_fraction(shared: TestClient):
    answer = shared.post("/v1/completions", json={"prompt": [5.0, 6], "max_tokens": 3.0})
    assert answer.json()["usage"]["completion_tokens"] == 3


def test_every_parameter_of_openais_own_client_is_known():
    for params, body in ((completion_params, CompletionBody), (chat_params, ChatBody)):
        missing = set(params.CompletionCreateParamsBase.__annotations__) - set(body.model_fields)
        assert not missing, f"{body.__name__} does not know {missing}"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"null",
        b"[]",
        b"{",
        b'{"prompt": "a"',
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "top_p": Infinity}',
        b'{"prompt": "a", "n": 1e400}',
        b'{"prompt": "a", "seed": ' + b"9" * 10_000 + b"}",
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"metadata": ' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b', "prompt": "a"}',
        b'{"prompt": "a"} {}',
        b"\x00" * 100,
    ],
)
def test_what_is_no_body_is_a_400(shared: TestClient, raw: bytes):
    assert refused(shared, "/v1/completions", raw)["type"] == "invalid_request_error"


def test_a_body_of_another_type_is_not_read(client: Client):
    raw = json.dumps({"prompt": "a"}).encode()
    for media in ("text/plain", "application/x-www-form-urlencoded", ""):
        answer = client().post("/v1/completions", content=raw, headers={"content-type": media})
        assert answer.status_code == 415
        assert answer.json()["error"]["code"] == "unsupported_media_type"
    answer = client().post("/v1/completions", content=raw, headers={"content-type": "application/json; charset=utf-8"})
    assert answer.status_code == 200


def test_an_unknown_model_route_or_method_is_said_so(client: Client):
    error = refused(client(), "/v1/completions", {"prompt": "a", "model": "gpt-9"}, 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert client().get("/v1/models/gpt-9").json()["error"]["code"] == "model_not_found"
    assert refused(client(), "/v1/nothing", {}, 404)["message"] == "unknown route: /v1/nothing"
    answer = client().get("/v1/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert answer.json()["error"]["message"] == "/v1/completions does not support the method GET"


def test_a_body_above_the_limit_is_a_413_whatever_length_it_announces(client: Client):
    limited = client(max_body_bytes=1000)
    assert refused(limited, "/v1/completions", {"prompt": "a" * 1000}, 413)["code"] == "body_too_large"

    def parts():
        for _ in range(50):
            yield b"[" * 100

    answer = limited.post("/v1/completions", content=parts(), headers={"content-type": "application/json"})
    assert answer.status_code == 413
    small = limited.post("/v1/completions", json={"prompt": "a"})
    assert small.status_code == 200


def test_a_long_body_is_read_too(client: Client):
    engine = FakeEngine(context=200_000)
    answer = client(engine).post("/v1/completions", json={"prompt": [7] * 100_000, "max_tokens": 1})
    assert answer.status_code == 200
    assert answer.json()["usage"]["prompt_tokens"] == 100_000
    assert refused(client(engine), "/v1/completions", {"prompt": [7] * 50_000 + ["x"]})["param"] == "prompt"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(raw=st.binary(max_size=200))
def test_any_bytes_get_an_answer(shared: TestClient, raw: bytes):
    for route in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        answer = shared.post(route, content=raw, headers={"content-type": "application/json"})
        assert 400 <= answer.status_code < 500
        assert answer.json()["error"]["message"]


@given(name=st.sampled_from([*CompletionBody.model_fields, *ChatBody.model_fields]), value=JSON)
def test_any_value_of_any_field_gets_an_answer(shared: TestClient, name: str, value: Any):
    for route, needed in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": HELLO})):
        raw = json.dumps({**needed, "max_tokens": 1, name: value}).encode()
        answer = shared.post(route, content=raw, headers={"content-type": "application/json"})
        assert answer.status_code in (200, 400, 404), answer.text
