"""Instructor against a server: each of its modes that asks for a grammar, over OpenAI's and Anthropic's clients."""

from typing import Any

import anthropic
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from clients.conftest import NAME, QUESTION, City
from server.conftest import Real

instructor: Any = pytest.importorskip("instructor")
exceptions: Any = pytest.importorskip("instructor.core.exceptions")
FAILED = (exceptions.InstructorRetryException, exceptions.IncompleteOutputException)

MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
FORCED = ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS")


def of_openai(server: Real, mode: str) -> Any:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    return instructor.from_openai(client, mode=getattr(instructor.Mode, mode))


def of_anthropic(server: Real, mode: str) -> Any:
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    return instructor.from_anthropic(client, mode=getattr(instructor.Mode, mode))


def tried(create: Any) -> Any:
    """What one try gives: the object, or what was wrong."""
    try:
        return create(model=NAME, messages=MESSAGES, response_model=City, max_retries=0, max_tokens=200)
    except FAILED as error:
        return error


@pytest.mark.parametrize("mode", FORCED)
def test_a_mode_with_a_grammar_needs_no_second_try(server: Real, mode: str):
    length = {"max_output_tokens" if mode == "RESPONSES_TOOLS" else "max_tokens": 120}
    found = of_openai(server, mode).chat.completions.create(
        model=NAME, messages=MESSAGES, response_model=City, max_retries=0, temperature=0, **length
    )
    assert isinstance(found, City)


def test_several_objects_come_one_by_one(server: Real):
    found = of_openai(server, "TOOLS").chat.completions.create_iterable(
        model=NAME, messages=MESSAGES, response_model=City, max_retries=0, temperature=0, max_tokens=300
    )
    cities = list(found)
    assert cities
    assert all(isinstance(each, City) for each in cities)


class Town(BaseModel):
    """A town, and whether it is a capital."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=12)
    capital: bool


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_an_object_comes_piece_by_piece(server: Real, mode: str):
    pieces = list(
        of_openai(server, mode).chat.completions.create_partial(
            model=NAME, messages=MESSAGES, response_model=Town, max_retries=0, temperature=0, max_tokens=60
        )
    )
    whole = Town.model_validate(pieces[-1].model_dump())
    names = [each.name or "" for each in pieces]
    assert all(whole.name.startswith(name) for name in names)
    assert len({*names}) > 1, "the name grew"
    assert pieces[0].capital is None


def test_anthropics_tools(server: Real):
    found = of_anthropic(server, "ANTHROPIC_TOOLS").messages.create(
        model=NAME, messages=MESSAGES, response_model=City, max_retries=0, max_tokens=120
    )
    assert isinstance(found, City)


@pytest.mark.parametrize("mode", ["JSON", "MD_JSON"])
def test_a_mode_without_a_schema_asks_what_the_server_takes(server: Real, mode: str):
    """The form stands in the prompt alone, and so small a model may not keep to it; but what is asked is taken."""
    found = tried(of_openai(server, mode).chat.completions.create)
    assert isinstance(found, City) or "Error code" not in str(found), "the server refused what was asked"


def test_anthropics_json(server: Real):
    found = tried(of_anthropic(server, "ANTHROPIC_JSON").messages.create)
    assert isinstance(found, City) or "Error code" not in str(found), "the server refused what was asked"
