"""A server's beginning and end, where they meet, and requests whose client goes while they are submitted."""

import asyncio
import logging
import os
import signal
import threading
import time
from typing import Any

import pytest

import tilewright as tw
from server.fake import FakeEngine
from tilewright.grammar.grammar import Grammar
from tilewright.grammar.matcher import Matcher
from tilewright.runtime.request import GenerateRequest, RequestHandle
from tilewright.server import run
from tilewright.server.api import Api, ServerOptions
from tilewright.server.errors import ApiError
from tilewright.server.protocol import CompletionBody
from tilewright.server.structured import Constrain


class Startled(FakeEngine):
    """Is told to stop after it has warmed and before it begins."""

    def start(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        until = time.monotonic() + 20
        while not self.ending and time.monotonic() < until:
            time.sleep(0.001)
        super().start()


def test_a_server_told_to_stop_as_its_engine_begins_ends_in_peace(monkeypatch: pytest.MonkeyPatch):
    engine = Startled()
    said = list[str]()
    api = Api(engine, ServerOptions("demo", tw.__version__))
    monkeypatch.setattr(engine, "warm", lambda console, wait_for_programs: None)
    monkeypatch.setattr(run.os, "_exit", lambda status: None)  # where the warming thread is not quite done
    with run.listen("127.0.0.1", 0) as listening:
        run.Server(api, 0.0, lambda: said.append("ready")).run(listening)
    assert said == []
    assert (engine.ready, engine.thread) == (False, None)


@pytest.mark.parametrize(
    ("error", "level"), [(ValueError("not with this tokenizer"), logging.DEBUG), (OSError("no room"), logging.WARNING)]
)
def test_json_objects_are_compiled_ahead_once_the_server_is_ready(
    error: Exception, level: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """By the thread of grammars; what goes wrong there is no harm to the server, and in its log unless requests are told."""
    caplog.set_level(logging.DEBUG, "tilewright.server")
    engine = FakeEngine()
    calls = list[object]()

    class Failing(Constrain):
        def __init__(self) -> None:
            """Without a model."""

        def __call__(self, grammar: Grammar) -> Matcher:
            calls.append(grammar)
            os.kill(os.getpid(), signal.SIGTERM)
            raise error

    api = Api(engine, ServerOptions("demo", tw.__version__, constrain=Failing()))
    monkeypatch.setattr(engine, "warm", lambda console, wait_for_programs: calls.append("warm"))
    monkeypatch.setattr(run.os, "_exit", lambda status: None)  # where the warming thread is not quite done
    with run.listen("127.0.0.1", 0) as listening:
        run.Server(api, 0.0, lambda: calls.append("ready")).run(listening)
    api.close()
    assert calls == ["warm", "ready", Grammar.json_object()]
    said = [(record.levelno, record.getMessage()) for record in caplog.records if "JSON objects" in record.getMessage()]
    assert [each for each, _ in said] == [level]
    assert said[0][1].endswith(str(error))


def test_a_new_grammar_delays_nobody_whose_grammar_is_cached():
    engine = FakeEngine()
    compiling = threading.Event()
    go_on = threading.Event()
    threads = list[str]()

    class Kept(Constrain):
        def __init__(self) -> None:
            """Without a model."""

        def is_cached(self, grammar: Grammar) -> bool:
            return grammar == Grammar.regex("kept")

        def __call__(self, grammar: Grammar) -> Matcher:
            threads.append(threading.current_thread().name.rpartition("_")[0])
            if not self.is_cached(grammar):
                compiling.set()
                assert go_on.wait(20)
            raise ValueError(f"not with {grammar.text}")

    api = Api(engine, ServerOptions("demo", tw.__version__, constrain=Kept()))

    async def start(regex: str, is_long: bool = False) -> None:
        body = {"prompt": "a b c", "structured_outputs": {"regex": regex}}
        with pytest.raises(ApiError, match=f"'structured_outputs.regex': not with {regex}"):
            await api.start(CompletionBody.model_validate(body), is_long)

    async def ask() -> None:
        new = asyncio.ensure_future(start("new", is_long=True))
        assert await asyncio.get_running_loop().run_in_executor(None, compiling.wait, 20)
        await start("kept")
        await start("kept", is_long=True)
        assert not new.done()
        go_on.set()
        await new

    engine.accept_requests()
    asyncio.run(ask())
    api.close()
    assert threads == ["grammars", "tokenise", "long-prompts"]


class Broken(FakeEngine):
    """Finds its device gone with the first request, and nothing to go on with."""

    def fill(self, everything: bool = False) -> int:
        if self.live_sequences:
            raise OSError("the device has gone")
        return super().fill(everything)

    def recover(self, error: Exception) -> None:
        raise error


def test_a_server_whose_engine_cannot_go_on_ends_and_says_why(monkeypatch: pytest.MonkeyPatch):
    engine = Broken()
    api = Api(engine, ServerOptions("demo", tw.__version__))
    monkeypatch.setattr(engine, "warm", lambda console, wait_for_programs: None)
    ended: list[str | None] = []

    def ready() -> None:
        engine.submit(GenerateRequest([1, 2]), lambda update: ended.append(update.end))

    with run.listen("127.0.0.1", 0) as listening, pytest.raises(OSError, match="the device has gone"):
        run.Server(api, 0.0, ready).run(listening)
    assert (ended, api.stopping, engine.closed) == (["cancelled"], True, True)


def test_what_is_submitted_after_the_client_has_gone_is_given_up(monkeypatch: pytest.MonkeyPatch):
    """A thread submits while the event loop cancels."""
    engine = FakeEngine()
    engine.accept_requests()
    api = Api(engine, ServerOptions("demo", tw.__version__))
    submitting = threading.Event()
    gone = threading.Event()
    handles = list[RequestHandle]()
    real = engine.submit

    def submit(*given: Any, **named: Any) -> RequestHandle:
        handles.append(real(*given, **named))
        submitting.set()
        assert gone.wait(20)
        return handles[-1]

    async def leave() -> None:
        body = CompletionBody(prompt="a b c", max_tokens=600, n=2)
        asking = asyncio.ensure_future(api.start(body))
        await asyncio.get_running_loop().run_in_executor(None, submitting.wait, 20)
        asking.cancel()
        await asyncio.wait([asking])
        gone.set()

    monkeypatch.setattr(engine, "submit", submit)
    asyncio.run(leave())
    api.threads.shutdown()
    assert [handle.cancelled for handle in handles] == [True, True]
    while engine.step():
        continue
    assert engine.stats().ended == {"cancelled": 2}
