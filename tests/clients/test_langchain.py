"""LangChain's ChatOpenAI against a server: structured output in its three ways, tools, streams."""

from typing import Any

import pytest

from clients.conftest import NAME, QUESTION, City
from server.conftest import Real

langchain_openai: Any = pytest.importorskip("langchain_openai")


def chat(server: Real, **more: Any) -> Any:
    arguments = {"model": NAME, "base_url": f"{server.url}/v1", "api_key": "none", "temperature": 0, "max_tokens": 120}
    return langchain_openai.ChatOpenAI(**arguments, max_retries=0, **more)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_an_answer_is_what_its_schema_says(server: Real, method: str):
    found = chat(server).with_structured_output(City, method=method).invoke(QUESTION)
    assert isinstance(found, City)


def test_an_answer_is_json_where_no_schema_is_sent(server: Real):
    """In this mode LangChain leaves the form to the prompt: any object is what the server was asked for."""
    found = chat(server, seed=1).with_structured_output(None, method="json_mode").invoke(f"{QUESTION} Answer in JSON.")
    assert isinstance(found, dict)


def test_a_schema_of_plain_json_is_followed_in_a_stream(server: Real):
    schema = {"title": "city", **City.model_json_schema()}
    *_, last = chat(server).with_structured_output(schema, method="json_schema", strict=True).stream(QUESTION)
    City.model_validate(last)


@pytest.mark.parametrize("choice", ["City", "required", True])
def test_bound_tools_are_called(server: Real, choice: Any):
    bound = chat(server).bind_tools([City], tool_choice=choice)
    (call,) = bound.invoke(QUESTION).tool_calls[:1]
    assert call["name"] == "City"
    City.model_validate(call["args"])


def test_a_conversation_goes_on_behind_a_call(server: Real):
    bound = chat(server).bind_tools([City], tool_choice="City")
    said = bound.invoke(QUESTION)
    result = {"role": "tool", "content": "noted", "tool_call_id": said.tool_calls[0]["id"]}
    assert chat(server).bind_tools([City]).invoke([("user", QUESTION), said, result]).content is not None


def test_calls_are_streamed(server: Real):
    bound = chat(server).bind_tools([City], tool_choice="City")
    whole = None
    for part in bound.stream(QUESTION):
        whole = part if whole is None else whole + part
    assert whole is not None
    City.model_validate(whole.tool_calls[0]["args"])


def test_text_is_streamed_with_usage(server: Real):
    parts = list(chat(server, stream_usage=True).stream(QUESTION))
    assert "".join(part.content for part in parts) == chat(server).invoke(QUESTION).content
    assert any(part.usage_metadata for part in parts)


def test_the_responses_api(server: Real):
    assert chat(server, use_responses_api=True).invoke(QUESTION).text
    assert isinstance(chat(server, use_responses_api=True).with_structured_output(City).invoke(QUESTION), City)
