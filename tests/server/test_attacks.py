"""Clients that take connections, time or memory from others, and those that do not speak HTTP: over real sockets."""

import errno
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from asyncio.selector_events import BaseSelectorEventLoop
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server import conftest
from server.attacker import address, connected, get, one, post, request_json, rest, status_of, until
from server.conftest import Real, on_a_port
from server.fake import FakeEngine, model_without_weights
from tilewright.models import tokenizer
from tilewright.server import api, connections, parse, routes, run

ASK = {"prompt": "a b c", "max_tokens": 5}
SHORT_S = 0.3


@contextmanager
def serving(engine: FakeEngine | None = None, most: int = 64, **options: Any) -> Iterator[Real]:
    engine = engine or FakeEngine()
    engine.start()
    try:
        with on_a_port(engine, most, **options) as server:
            yield server
    finally:
        engine.go.set()
        engine.stop()


@pytest.fixture(scope="module")
def real() -> Iterator[Real]:
    with serving() as server:
        yield server


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_S", SHORT_S)
    monkeypatch.setattr(connections, "UNREAD_S", SHORT_S)
    monkeypatch.setattr(connections, "PROBE_S", SHORT_S)


def load(engine: FakeEngine) -> int:
    stats = engine.stats()
    return stats.running + stats.waiting


def well(url: str) -> bool:
    return request_json(url, get("/health"))[0] == 200 and request_json(url, post("/v1/completions", ASK))[0] == 200


# How many.

SERVER = """
from server.fake import FakeEngine
from tilewright.server.api import Api, ServerOptions
from tilewright.server.run import Server, listen, server_url
class Warm(FakeEngine):
    def warm(self, console, wait_for_programs):
        return 0
with listen("127.0.0.1", 0) as listening:
    say = lambda: print(server_url(listening), flush=True)
    Server(Api(Warm(), ServerOptions("demo", "0")), 0.0, say).run(listening)
"""
LIMITED = "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (100, 200))\n"
"""What the server's process begins with; between fork and exec nothing may run in a process with threads."""


def test_more_idle_connections_than_descriptors_stop_nobody(tmp_path: Path):
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    log = tmp_path / "log"
    with log.open("w") as stderr, ExitStack() as idle:
        server = subprocess.Popen(
            [sys.executable, "-c", LIMITED + SERVER],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=os.environ | {"PYTHONPATH": paths},
        )
        try:
            assert server.stdout is not None
            url = server.stdout.readline().strip()
            for number in range(260):
                idle.enter_context(connected(url))
                if number % 50 == 0:
                    assert well(url)
            assert well(url)
            with open(f"/proc/{server.pid}/limits") if Path("/proc").is_dir() else open(os.devnull) as limits:
                assert [line.split()[3] for line in limits if line.startswith("Max open files")] in (["200"], [])
        finally:
            server.terminate()
            assert server.wait(20) == 0
            if server.stdout is not None:
                server.stdout.close()
    assert log.read_text() == ""


def test_a_connection_too_many_takes_the_place_of_the_one_that_waits_longest():
    with serving(most=8) as server, ExitStack() as others:
        idle = [others.enter_context(connected(server.url)) for _ in range(8)]
        half = [others.enter_context(connected(server.url)) for _ in range(8)]
        for connection in half:
            connection.sendall(post("/v1/completions", ASK)[:-5])
        assert [rest(connection) for connection in idle] == [b""] * 8
        for _ in range(8):
            assert well(server.url)


def test_where_all_are_being_answered_probes_get_through_and_others_are_told_to_come_back():
    engine = FakeEngine()
    engine.go.clear()
    with serving(engine, most=4) as server, ExitStack() as others:
        for _ in range(4):
            others.enter_context(connected(server.url)).sendall(post("/v1/completions", ASK | {"stream": True}))
        assert until(lambda: load(engine) == 4)
        assert request_json(server.url, get("/health"))[0] == 200
        status, body = request_json(server.url, post("/v1/completions", ASK, b"connection: close"))
        assert (status, body["error"]["code"]) == (503, "server_overloaded")
        assert load(engine) == 4
        engine.go.set()
        assert until(lambda: load(engine) == 0)
        assert well(server.url)


def test_an_accept_that_fails_is_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    loops = BaseSelectorEventLoop
    tries = []
    accept = loops.sock_accept

    async def failing(self: Any, listening: socket.socket) -> Any:
        tries.append(time.monotonic())
        if len(tries) < 5:
            raise OSError(errno.EMFILE, "Too many open files")
        return await accept(self, listening)

    monkeypatch.setattr(loops, "sock_accept", failing)
    with serving() as server:
        assert well(server.url)
    assert [record.getMessage().split(";")[0] for record in caplog.records] == [
        "cannot accept connections: [Errno 24] Too many open files"
    ]
    assert tries[4] - tries[0] > 3.9 * connections.RETRY_S, "it does not go round and round"


# How long.


def slowly(connection: socket.socket, data: bytes) -> None:
    """A byte at a time, as long as the server takes them."""
    for byte in data:
        try:
            connection.send(bytes([byte]))
        except OSError:
            return
        time.sleep(SHORT_S / 10)


@pytest.mark.usefixtures("hasty")
def test_a_head_must_come_in_time():
    began = time.monotonic()
    with serving() as server, connected(server.url) as idle, connected(server.url) as slow, connected(server.url) as again:
        again.sendall(get("/health"))
        assert status_of(one(again)[0]) == 200
        threads = [threading.Thread(target=slowly, args=(each, get("/health") * 3)) for each in (slow, again)]
        for thread in threads:
            thread.start()
        assert rest(idle) == b"", "one that says nothing is told nothing"
        for each in (slow, again):
            head, _, body = one(each)
            assert status_of(head) == 408
            assert json.loads(body)["error"]["code"] == "request_timeout"
            assert b"connection: close" in head
        for thread in threads:
            thread.join()
    assert time.monotonic() - began < 20


@pytest.mark.usefixtures("hasty")
def test_a_body_that_nobody_waits_for_must_come_in_time_too():
    with serving() as server, connected(server.url) as connection:
        connection.sendall(get("/health", b"content-length: 1000"))
        assert status_of(one(connection)[0]) == 200
        began = time.monotonic()
        slowly(connection, b"x" * 1000)
        assert time.monotonic() - began < 10


def test_only_so_many_long_bodies_are_read_at_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(api, "MOST_LONG_BODIES", 2)
    long = post("/v1/completions", ASK | {"user": "u" * 100_000})[:-10]
    with serving(body_s=60.0) as server, ExitStack() as others:
        for _ in range(2):
            others.enter_context(connected(server.url)).sendall(long)
        assert until(lambda: server.api.long_bodies == 2)
        with connected(server.url) as third:
            third.sendall(long)
            assert status_of(one(third)[0]) == 503
        assert well(server.url)
        others.close()
        assert until(lambda: server.api.long_bodies == 0)


CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("chunked", [False, True], ids=["announced", "chunked"])
def test_who_sends_too_long_a_body_to_its_end_reads_why_it_is_refused(chunked: bool):
    """Far more than the kernel's buffers hold, so that the answer is there long before the body's end."""
    asking = ASK | {"user": "u" * 32 * 2**20}
    body = json.dumps(asking).encode()
    sent = CHUNKED + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if chunked else post("/v1/completions", asking)
    with serving(max_body_bytes=2**20) as server, connected(server.url) as connection:
        connection.sendall(sent)
        head, _, answer = one(connection)
        assert status_of(head) == 413
        assert json.loads(answer)["error"]["code"] == "body_too_large"
        connection.sendall(post("/v1/completions", ASK))
        assert status_of(one(connection)[0]) == 200
        assert well(server.url)


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system keeps little of what clients do not read."""

    def listen(host: str, port: int) -> socket.socket:
        listening = run.listen(host, port)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return listening

    monkeypatch.setattr(conftest, "listen", listen)


@contextmanager
def reader(url: str) -> Iterator[socket.socket]:
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(20)
        connection.connect(address(url))
        yield connection


@pytest.mark.usefixtures("hasty", "small_buffers")
@pytest.mark.parametrize("stream", [True, False])
def test_who_does_not_read_is_given_up(stream: bool):
    engine = FakeEngine(context=20_000)
    many = {"prompt": "a b c " * 100, "max_tokens": 15_000, "stream": stream, "logprobs": 5}
    with serving(engine) as server, reader(server.url) as connection:
        if stream:
            connection.sendall(post("/v1/completions", many))
            assert until(lambda: engine.cancelled == 1)
        else:
            connection.sendall(get("/openapi.json") * 20)
            assert until(lambda: bool(server.http.server_state.connections))
            assert until(lambda: not server.http.server_state.connections)
        said = rest(connection)
        assert b"[DONE]" not in said
        assert said.count(b"200 OK") < 20
        assert well(server.url)


@pytest.mark.usefixtures("hasty", "small_buffers")
def test_who_reads_slowly_gets_all():
    with serving() as server, reader(server.url) as connection:
        connection.sendall(get("/openapi.json", b"connection: close"))
        found = bytearray()
        while part := connection.recv(2048):
            found += part
            time.sleep(0.02)
    assert json.loads(bytes(found).partition(b"\r\n\r\n")[2])["openapi"]


def test_many_requests_at_once_on_one_connection_are_answered_one_by_one(real: Real):
    with connected(real.url) as connection:
        connection.sendall((get("/health") + post("/v1/completions", ASK)) * 50 + get("/version", b"connection: close"))
        answers = rest(connection).split(b"HTTP/1.1 200 OK")[1:]
    assert len(answers) == 101
    assert [b"step_age_s" in each for each in answers[:100]] == [True, False] * 50
    assert b"version" in answers[100]


# What is no HTTP.


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"hello\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost : x\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip\r\n\r\n", 501),
        (b"GET /" + b"x" * 100_000, 431),
        (post("/v1/completions", ASK).replace(b"content-length", b"transfer-encoding: chunked\r\nx") + b"\r\n", 400),
    ],
)
def test_what_is_no_request_is_told_so_as_openai_does(real: Real, raw: bytes, status: int, caplog: pytest.LogCaptureFixture):
    with connected(real.url) as connection:
        connection.sendall(raw)
        head, _, body = one(connection)
        assert status_of(head) == status
        assert b"content-type: application/json" in head
        error = json.loads(body)["error"]
        assert (sorted(error), error["code"]) == (["code", "message", "param", "type"], "invalid_http")
        assert rest(connection) in (b"", b"(reset)")
    assert not caplog.records, "what clients do wrong fills no log"


@settings(max_examples=40, deadline=None)
@given(raw=st.binary(max_size=200), begun=st.sampled_from([b"", get("/health")[:-2], post("/tokenize", {})[:-20]]))
def test_any_bytes_get_an_answer_or_an_end(real: Real, raw: bytes, begun: bytes):
    with connected(real.url) as connection:
        connection.sendall(begun + raw + b"\r\n\r\n")
        connection.shutdown(socket.SHUT_WR)
        said = rest(connection)
    assert b"500 Internal" not in said
    assert request_json(real.url, get("/health"))[0] == 200


def test_a_body_with_two_lengths_ends_the_connection(real: Real):
    """The second request is that of whoever hides it in the first one's body."""
    chunked = b"transfer-encoding: chunked"
    with connected(real.url) as connection:
        connection.sendall(get("/health", b"content-length: 5", chunked) + b"0\r\n\r\n" + get("/version"))
        head, _, body = rest(connection).partition(b"\r\n\r\n")
    assert status_of(head) == 400
    assert json.loads(body)["error"]["code"] == "invalid_http"
    assert b"connection: close" in head


# Ends.


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("late", [False, True], ids=["at once", "later"])
def test_who_ends_its_side_after_the_body_gets_the_answer(stream: bool, late: bool, version: bytes):
    engine = FakeEngine()
    engine.go.clear()
    with serving(engine) as server, connected(server.url) as connection:
        connection.sendall(post("/v1/completions", ASK | {"stream": stream}, version=version))
        if late:
            assert until(lambda: load(engine) == 1)
        connection.shutdown(socket.SHUT_WR)
        time.sleep(0.05 if late else 1.5 * SHORT_S)
        assert load(engine) == 1
        engine.go.set()
        said = rest(connection).removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert said.startswith(b"HTTP/1.1 200 OK")
    assert said.count(b'"finish_reason":"length"') == 1
    assert (b"[DONE]" in said) == stream


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("stream", [False, True])
def test_who_ends_its_side_and_then_goes_ends_its_request(stream: bool):
    engine = FakeEngine()
    engine.go.clear()
    with serving(engine) as server:
        with connected(server.url) as connection:
            connection.sendall(post("/v1/completions", ASK | {"stream": stream, "max_tokens": 2000}))
            assert until(lambda: load(engine) == 1)
            if stream:
                assert connection.recv(4096).startswith(b"HTTP/1.1 200 OK")
            connection.shutdown(socket.SHUT_WR)
            time.sleep(0.05)
        assert until(lambda: not server.http.server_state.connections)
        engine.go.set()
        assert until(lambda: engine.cancelled == 1)


# What takes time to compute.


def test_others_run_while_a_long_text_is_tokenised():
    """A tokenizer that kept the interpreter's lock would stop them all."""
    text = "def f(x):\n    return x + 1  # hello\n" * 8_000
    ticks = 0
    done = threading.Event()
    thread = threading.Thread(target=lambda: (tokenizer.encode(model_without_weights().tokenizer, text), done.set()))
    thread.start()
    while not done.wait(0.001):
        ticks += 1
    thread.join()
    assert ticks > 20


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_long_texts_to_tokenise_keep_no_completion_waiting(path: str, monkeypatch: pytest.MonkeyPatch):
    tokenising = threading.Event()
    go = threading.Event()

    def slowly(self: Any) -> bytes:
        tokenising.set()
        assert go.wait(20)
        return b"{}"

    response_class = routes.Tokenized if path == "/tokenize" else routes.Detokenized
    monkeypatch.setattr(response_class, "json_bytes", property(slowly))
    engine = FakeEngine()
    engine.options = replace(engine.options, queue_tokens=20_000)
    body = {"prompt": "a b " * 50_000} if path == "/tokenize" else {"tokens": [7] * 50_000}
    with serving(engine) as server, ExitStack() as others:
        first = others.enter_context(connected(server.url))
        first.sendall(post(path, body))
        assert tokenising.wait(20)
        for _ in range(16):
            status, answer = request_json(server.url, post(path, body))
            assert (status, answer["error"]["code"]) == (503, "server_overloaded")
        for _ in range(4):
            assert well(server.url)
        go.set()
        assert status_of(one(first)[0]) == 200


@pytest.mark.parametrize("chat", [False, True])
def test_a_prompt_that_can_never_fit_is_a_400_and_not_tokenised(chat: bool, monkeypatch: pytest.MonkeyPatch):
    engine = FakeEngine(context=256)
    lengths = []
    engine.options = replace(engine.options, queue_tokens=1000)
    encode = parse.encode

    def counted(tokenizer: Any, text: str, add_special_tokens: bool = True) -> list[int]:
        lengths.append(len(text))
        return encode(tokenizer, text, add_special_tokens)

    monkeypatch.setattr(parse, "encode", counted)
    text = "some words " * 100_000
    body = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    with serving(engine) as server:
        status, answer = request_json(server.url, post("/v1/chat/completions" if chat else "/v1/completions", body))
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert max(lengths) < 10_000


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        ("completions", {"prompt": [[7] * 100] * 16}, "prompt"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a b " * 40}], "n": 16}, "messages"),
        ("embeddings", {"input": [[7] * 100] * 16}, "input"),
    ],
)
def test_more_than_the_queue_holds_is_a_400(route: str, body: dict[str, Any], param: str):
    engine = FakeEngine(context=256)
    engine.options = replace(engine.options, queue_tokens=1000)
    with serving(engine) as server:
        status, answer = request_json(server.url, post(f"/v1/{route}", body))
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "too_many_tokens", param)


# What is logged.


def test_the_access_log_has_a_line_for_each_request(real: Real, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "tilewright.access")
    request_json(real.url, get("/health"))
    request_json(real.url, post("/v1/completions", ASK))
    with connected(real.url) as connection:
        connection.sendall(get("/a%0Ab", b"connection: close"))
        rest(connection)
        with connected(real.url) as other:
            other.sendall(b"nonsense\r\n\r\n")
            rest(other)
    assert until(lambda: len(caplog.records) == 4)
    lines = [" ".join(part for part in record.getMessage().split() if part != "ms") for record in caplog.records]
    prompt = len(model_without_weights().encode("a b c"))
    fixed = [[word for n, word in enumerate(line.split()) if n != 3] for line in lines]
    assert fixed == [
        ["GET", "/health", "200"],
        ["POST", "/v1/completions", "200", f"{prompt}+5", "tokens"],
        ["GET", "/a%0Ab", "404"],
        ["-", "-", "400"],
    ]
