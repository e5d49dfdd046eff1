"""Real clients against a real server: OpenAI's own package, clients that go away, and lm-eval."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest

from server.conftest import Real, on_a_port
from server.fake import FakeEngine, model_without_weights
from tilewright.runtime.request import GenerateRequest
from tilewright.runtime.sampling import Sampling

HELLO: list[Any] = [{"role": "user", "content": "hello there"}]


@pytest.fixture(scope="module")
def real() -> Iterator[Real]:
    engine = FakeEngine()
    engine.start()
    with on_a_port(engine, api_keys=("k",)) as server:
        yield server
    engine.stop()


@pytest.fixture
def client(real: Real) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{real.url}/v1", api_key="k", max_retries=0, timeout=20) as made:
        yield made


def until(holds: Callable[[], bool], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.005)
    return holds()


def test_openai_lists_models(client: openai.OpenAI):
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id).id == "demo"


def test_openai_completes(client: openai.OpenAI):
    found = client.completions.create(model="demo", prompt="one two three", max_tokens=3, logprobs=2, seed=1, n=2)
    assert [choice.index for choice in found.choices] == [0, 1]
    assert found.choices[0].finish_reason == "length"
    assert found.choices[0].logprobs is not None
    assert len(found.choices[0].logprobs.tokens or ()) == 3
    assert found.usage is not None
    assert found.usage.completion_tokens == 6
    assert found._request_id is not None
    assert found.id == f"cmpl-{found._request_id}"


def test_openai_chats(client: openai.OpenAI):
    found = client.chat.completions.create(model="demo", messages=HELLO, max_completion_tokens=3, logprobs=True, top_logprobs=1)
    choice = found.choices[0]
    assert choice.message.role == "assistant"
    assert "hello there".startswith(choice.message.content or "-")
    assert choice.logprobs is not None
    assert [len(one.top_logprobs) for one in choice.logprobs.content or ()] == [1, 1, 1]
    again: Any = [*HELLO, choice.message.model_dump(), *HELLO]
    assert client.chat.completions.create(model="demo", messages=again, max_tokens=1).choices


def test_openai_streams(client: openai.OpenAI):
    stream = client.chat.completions.create(
        model="demo", messages=HELLO, max_tokens=7, stream=True, stream_options={"include_usage": True}
    )
    *parts, last = list(stream)
    assert parts[0].choices[0].delta.role == "assistant"
    assert [part.choices[0].finish_reason for part in parts] == [None, None, "length"]
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 7
    assert last.model_extra is not None
    assert last.model_extra["metrics"]["speculative_decoding"]["num_spec_tokens"] == 3
    texts = [one.choices[0].text for one in client.completions.create(model="demo", prompt="a b", max_tokens=5, stream=True)]
    assert len(texts) == 2
    with client.chat.completions.stream(model="demo", messages=HELLO, stop="here") as helper:
        whole = helper.get_final_completion().choices[0]
    assert (whole.message.content, whole.finish_reason) == ("hello t", "stop")


def test_openai_raises_what_went_wrong(client: openai.OpenAI, real: Real):
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="demo", prompt="a", temperature=-1)
    assert (bad.value.param, bad.value.code, bad.value.type) == ("temperature", "invalid_value", "invalid_request_error")
    assert bad.value.request_id
    with pytest.raises(openai.NotFoundError, match="no model 'other'"):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.BadRequestError, match="'verbosity' is not supported"):
        client.chat.completions.create(model="demo", messages=HELLO, verbosity="low")


def test_openai_sees_an_error_in_a_stream(client: openai.OpenAI, real: Real):
    engine: FakeEngine = real.engine
    engine.decoding.ends = ("error", 1)
    try:
        stream = client.completions.create(model="demo", prompt="a b c d", max_tokens=50, stream=True)
        with pytest.raises(openai.APIError, match="the engine failed"):
            list(stream)
    finally:
        engine.decoding.ends = None


def test_openai_comes_back_to_a_full_server_when_it_is_told_to(
    client: openai.OpenAI, real: Real, monkeypatch: pytest.MonkeyPatch
):
    engine: FakeEngine = real.engine
    monkeypatch.setattr("tilewright.runtime.engine.RETRY_AFTER_S", 2.0)
    monkeypatch.setattr(engine, "options", replace(engine.options, queue_requests=1))
    engine.go.clear()
    try:
        engine.submit(GenerateRequest([1, 2], Sampling(4)), lambda update: None)
        began = time.monotonic()
        with pytest.raises(openai.InternalServerError) as full:
            client.with_options(max_retries=1).completions.create(model="demo", prompt="a")
        assert full.value.code == "server_overloaded"
        assert time.monotonic() - began > 1.5, "the client waits as long as it is told to"
    finally:
        engine.go.set()
        assert until(lambda: not engine.live_sequences)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("generated", [False, True], ids=["waiting", "running"])
def test_a_client_that_goes_away_ends_its_requests(real: Real, stream: bool, generated: bool):
    """Both before its first token, when nothing is sent to it, and later."""
    engine: FakeEngine = real.engine
    engine.pause_s = 0.002
    (engine.go.set if generated else engine.go.clear)()
    before = engine.cancelled
    body = b'{"prompt": "a b c", "max_tokens": 2000, "n": 2, "stream": %s}' % str(stream).lower().encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer k\r\ncontent-type: application/json\r\n"
    host, port = real.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        assert until(lambda: len(engine.live_sequences) == 2)
        if generated:
            assert until(lambda: all(len(sequence.processor.tokens) > 3 for sequence in list(engine.live_sequences)))
    assert until(lambda: all(sequence.handle.cancelled for sequence in list(engine.live_sequences)))
    engine.go.set()
    assert until(lambda: not engine.live_sequences)
    assert engine.cancelled == before + 2
    engine.pause_s = 0.0


def test_a_body_that_does_not_come_is_not_waited_for(caplog: pytest.LogCaptureFixture):
    engine = FakeEngine()
    engine.start()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{"
    with on_a_port(engine, body_s=0.2) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(head)
            assert b"408 Request Timeout" in connection.recv(4096)
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(head)
    engine.stop()
    assert not caplog.records, "a client that goes away is no error"


def test_many_clients_at_once_get_their_own(real: Real):
    answers: dict[int, str] = {}

    def ask(n: int) -> None:
        with openai.OpenAI(base_url=f"{real.url}/v1", api_key="k", max_retries=0, timeout=30) as client:
            stream = client.completions.create(model="demo", prompt=[n + 40] * 3, max_tokens=30, stream=True)
            answers[n] = "".join(part.choices[0].text for part in stream)

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    decode = model_without_weights().tokenizer.decode
    assert answers == {n: decode([n + 40] * 30) for n in range(12)}


def test_openai_gets_responses(client: openai.OpenAI):
    found = client.responses.create(model="demo", input="hello there", max_output_tokens=3)
    assert "hello there".startswith(found.output_text or "-")
    assert client.responses.retrieve(found.id).output_text == found.output_text
    more = client.responses.create(model="demo", input="x", previous_response_id=found.id, max_output_tokens=1)
    assert more.previous_response_id == found.id
    client.responses.delete(found.id)
    with pytest.raises(openai.NotFoundError, match="no response"):
        client.responses.retrieve(found.id)
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(more.id)
    stream = client.responses.create(model="demo", input="hello there", max_output_tokens=7, stream=True)
    events = list(stream)
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == "".join(e.delta for e in events if e.type == "response.output_text.delta")
