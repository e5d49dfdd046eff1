"""Anthropic's own client against a real server."""

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from server.conftest import Real, on_a_port
from server.fake import FakeEngine
from server.test_messages import CALL, TOOLS
from server.test_responses import CALLING

HELLO: list[Any] = [{"role": "user", "content": "hello there"}]


@pytest.fixture(scope="module")
def real() -> Iterator[Real]:
    engine = FakeEngine()
    engine.start()
    with on_a_port(engine, api_keys=("k",), template=CALLING) as server:
        yield server
    engine.stop()


@pytest.fixture
def client(real: Real) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=real.url, api_key="k", max_retries=0, timeout=20) as made:
        yield made


def test_anthropic_asks(client: anthropic.Anthropic):
    found = client.messages.create(model="demo", max_tokens=3, messages=HELLO, stop_sequences=["x y z"])
    (block,) = found.content
    assert block.type == "text"
    assert "hello there".startswith(block.text)
    assert found.stop_reason == "max_tokens"
    assert found._request_id is not None
    assert found.id == f"msg_{found._request_id}"
    counted = client.messages.count_tokens(model="demo", messages=HELLO)
    assert counted.input_tokens == found.usage.input_tokens + (found.usage.cache_read_input_tokens or 0)


def test_anthropic_streams_text_and_calls(client: anthropic.Anthropic):
    said: Any = [{"role": "user", "content": f"well {CALL} "}]
    tools: Any = TOOLS
    with client.messages.stream(model="demo", max_tokens=40, messages=said, tools=tools) as stream:
        text = "".join(stream.text_stream)
        whole = stream.get_final_message()
    first, call = whole.content[:2]
    assert first.type == "text"
    assert text.startswith(first.text)
    assert call.type == "tool_use"
    assert (call.name, call.input) == ("add", {"a": 1, "b": [2]})
    assert whole.usage.output_tokens == 40
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "3"}]}
    again: Any = [*said, {"role": "assistant", "content": [first.model_dump(), call.model_dump()]}, result]
    assert client.messages.create(model="demo", max_tokens=1, messages=again, tools=tools).content


def test_anthropic_raises_what_went_wrong(client: anthropic.Anthropic, real: Real):
    with pytest.raises(anthropic.NotFoundError, match="no model 'other'"):
        client.messages.create(model="other", max_tokens=1, messages=HELLO)
    with pytest.raises(anthropic.BadRequestError, match=r"container.* is not supported") as bad:
        client.messages.create(model="demo", max_tokens=1, messages=HELLO, container="x")
    assert bad.value.request_id
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    engine: FakeEngine = real.engine
    engine.decoding.ends = ("error", 1)
    try:
        with (
            pytest.raises(anthropic.APIStatusError, match="the engine failed"),
            client.messages.stream(model="demo", max_tokens=50, messages=HELLO) as stream,
        ):
            stream.until_done()
    finally:
        engine.decoding.ends = None
