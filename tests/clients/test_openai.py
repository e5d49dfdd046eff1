"""OpenAI's client against a published model: tools, `parse()`, the helpers for streams, and Responses."""

import json
from typing import Any

import openai
import pytest

from clients.conftest import NAME, QUESTION, City
from server.conftest import Real

MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]


@pytest.fixture
def client(server: Real) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_an_answer_is_parsed(client: openai.OpenAI):
    found = client.chat.completions.parse(model=NAME, messages=MESSAGES, response_format=City, max_tokens=120)
    assert isinstance(found.choices[0].message.parsed, City)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "City"}}])
def test_a_call_is_parsed(client: openai.OpenAI, choice: Any):
    tool = openai.pydantic_function_tool(City)
    # With a seed, since some texts of a random model do not end their strings.
    found = client.chat.completions.parse(
        model=NAME, messages=MESSAGES, tools=[tool], tool_choice=choice, max_tokens=300, seed=3
    )
    assert found.choices[0].message.tool_calls
    assert isinstance(found.choices[0].message.tool_calls[0].function.parsed_arguments, City)


def test_a_stream_helper_has_the_object_at_its_end(client: openai.OpenAI):
    with client.chat.completions.stream(model=NAME, messages=MESSAGES, response_format=City, max_tokens=120) as stream:
        for _ in stream:
            continue
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, City)


def test_responses_parse_and_stream(client: openai.OpenAI):
    found = client.responses.parse(model=NAME, input=QUESTION, text_format=City, max_output_tokens=120)
    assert isinstance(found.output_parsed, City)
    with client.responses.stream(model=NAME, input=QUESTION, text_format=City, max_output_tokens=120) as stream:
        kinds = [event.type for event in stream]
        assert isinstance(stream.get_final_response().output_parsed, City)
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")


def test_a_response_calls_and_is_gone_on_with(client: openai.OpenAI):
    tool: Any = openai.pydantic_function_tool(City)["function"] | {"type": "function"}
    first = client.responses.create(model=NAME, input=QUESTION, tools=[tool], tool_choice="required", max_output_tokens=300)
    call: Any = first.output[0]
    City.model_validate(json.loads(call.arguments))
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "noted"}
    arguments: Any = {"model": NAME, "input": [result], "tools": [tool], "max_output_tokens": 5}
    assert client.responses.create(previous_response_id=first.id, **arguments).output
