"""LiteLLM against a server: chats, streams, tools, schemas, and what it makes of errors."""

import json
from typing import Any

import pytest

from clients.conftest import NAME, QUESTION, City
from server.conftest import Real

litellm: Any = pytest.importorskip("litellm")

TOOL = {"type": "function", "function": {"name": "note_city", "parameters": City.model_json_schema()}}


def complete(server: Real, **more: Any) -> Any:
    messages = [{"role": "user", "content": QUESTION}]
    arguments = {"model": f"openai/{NAME}", "api_base": f"{server.url}/v1", "api_key": "none", "messages": messages}
    return litellm.completion(**{**arguments, "max_tokens": 120, "temperature": 0, "num_retries": 0, **more})


def test_it_chats(server: Real):
    found = complete(server, max_tokens=5)
    assert found.choices[0].message.content
    assert (found.choices[0].finish_reason, found.usage.completion_tokens) == ("length", 5)


def test_it_streams_what_it_chats(server: Real):
    parts = list(complete(server, max_tokens=12, stream=True, stream_options={"include_usage": True}))
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text == complete(server, max_tokens=12).choices[0].message.content


def test_a_forced_call_has_valid_arguments(server: Real):
    choice = {"type": "function", "function": {"name": "note_city"}}
    message = complete(server, tools=[TOOL], tool_choice=choice).choices[0].message
    (call,) = message.tool_calls
    assert call.function.name == "note_city"
    City.model_validate_json(call.function.arguments)
    again = [
        {"role": "user", "content": QUESTION},
        message.model_dump(),
        {"role": "tool", "tool_call_id": call.id, "content": "noted"},
    ]
    assert complete(server, messages=again, tools=[TOOL], max_tokens=5).choices[0].message


@pytest.mark.parametrize("form", [City, {"type": "json_object"}])
def test_an_answer_has_the_form_that_is_asked(server: Real, form: Any):
    text = complete(server, response_format=form, max_tokens=300).choices[0].message.content
    assert isinstance(json.loads(text), dict)
    if form is City:
        City.model_validate_json(text)


def test_responses(server: Real):
    arguments = {"model": f"openai/{NAME}", "api_base": f"{server.url}/v1", "api_key": "none", "input": QUESTION}
    found = litellm.responses(**arguments, max_output_tokens=8)
    assert found.output[0].content[0].text


def test_anthropics_messages(server: Real):
    arguments = {"model": f"anthropic/{NAME}", "api_base": server.url, "api_key": "none", "max_tokens": 8}
    found = litellm.completion(**arguments, messages=[{"role": "user", "content": QUESTION}])
    assert found.choices[0].message.content


def test_what_is_wrong_is_raised(server: Real):
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        complete(server, temperature=-1)
    with pytest.raises(litellm.NotFoundError, match="no model 'other'"):
        complete(server, model="openai/other")
