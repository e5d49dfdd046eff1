"""The client against a server that follows a script: what it sends, what it measures, and every way to fail."""

import asyncio
import json
import resource
import shutil
import ssl
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.sse_server import (
    CLOSE,
    END,
    STALL,
    STREAM,
    Script,
    Scripted,
    Step,
    answered,
    completion_chunks,
    event,
    framed,
    scripted,
    streamed,
)
from tilewright.bench import serving
from tilewright.bench.datasets import Example
from tilewright.bench.serving import (
    NoModel,
    Outcome,
    RequestSettings,
    allow_connections,
    api_url,
    characters_per_token,
    first_model,
    http_client,
    replay,
)
from tilewright.bench.serving_figures import peak_concurrency, serving_figures
from tilewright.bench.workload import PlannedRequest

WELL = streamed(completion_chunks([3, 1, 4], 7))


def plan(count: int = 1, gap: float = 0.0) -> list[PlannedRequest]:
    return [PlannedRequest(n, gap * n, f"prompt {n}", 8) for n in range(count)]


def run(
    url: str, planned: Sequence[PlannedRequest], peer: RequestSettings = RequestSettings("m"), **more: Any
) -> list[Outcome]:
    async def main() -> list[Outcome]:
        async with http_client(api_url(url), {"X-Test": "yes"}) as client:
            return await replay(client, peer, planned, **more)

    return asyncio.run(main())


def one(script: Script, peer: RequestSettings = RequestSettings("m")) -> Outcome:
    with scripted(script) as server:
        (outcome,) = run(server.url, plan(), peer)
    return outcome


def always(steps: Sequence[Step]) -> Script:
    return lambda body, number: steps


def test_a_whole_answer():
    outcome = one(always(WELL))
    assert outcome.failure is None
    assert [chunk.tokens for chunk in outcome.answer.chunks] == [3, 1, 4]
    assert (outcome.answer.tokens, outcome.answer.prompt_tokens, outcome.answer.done) == (8, 7, True)
    times = [0, outcome.due_s, outcome.sent_s, outcome.answer.first_s, outcome.answer.chunks[-1].at_s, outcome.end_s]
    assert times == sorted(times, key=lambda at: at or 0)


def test_pauses_are_measured():
    """20 ms before the first chunk, 10 before each other; nothing can bring a chunk sooner, though any may come late."""
    outcome = one(always(streamed(completion_chunks([1] * 4, 7), [0.02, 0.01, 0.01, 0.01])))
    assert outcome.ttft_s is not None
    assert outcome.ttft_s >= 0.02
    assert len(outcome.answer.gaps_s) == 3
    assert outcome.ttft_s + sum(outcome.answer.gaps_s) >= 0.05
    assert outcome.e2e_s >= 0.05


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_however_the_answer_is_cut(size: int):
    """HTTP's chunks and those of TCP have nothing to do with events."""
    whole = b"".join(step for step in WELL if isinstance(step, bytes)).removeprefix(STREAM)
    body = b"".join(event(chunk) for chunk in completion_chunks([3, 1, 4], 7)) + event("[DONE]")
    cut = [STREAM, *framed([body[i : i + size] for i in range(0, len(body), size)]), END]
    tiny = [STREAM, *(whole[i : i + size] for i in range(0, len(whole), size))]
    for steps in (cut, [*tiny, CLOSE]):
        outcome = one(always(steps))
        assert outcome.failure is None
        assert outcome.answer.tokens == 8


@pytest.mark.parametrize(
    "head",
    [
        "HTTP/1.1 200 OK\r\ncontent-type:text/event-stream\r\nContent-Length: {}\r\n\r\n",
        "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200\r\nContent-Type: text/event-stream\r\nContent-Length: {}\r\n\r\n",
        "HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n",
    ],
)
def test_bodies_of_other_framings(head: str):
    body = b"".join(event(chunk) for chunk in completion_chunks([2, 2], 7)) + event("[DONE]")
    outcome = one(always([head.format(len(body)).encode() + body]))
    assert outcome.failure is None
    assert outcome.answer.tokens == 4


def test_trailers_comments_and_late_text_do_no_harm():
    steps = [STREAM, *framed([b": ping\n\n", *map(event, completion_chunks([2], 7)), event("[DONE]"), b": bye\n\n"])]
    with scripted(always([*steps, b"0;last\r\nX-Trailer: 1\r\n\r\n"])) as server:
        assert [outcome.failure for outcome in run(server.url, plan(3), concurrency=1)] == [None] * 3


def test_a_finish_reason_is_an_end_too():
    outcome = one(always([STREAM, *framed([event(chunk) for chunk in completion_chunks([2], 7)]), END]))
    assert (outcome.failure, outcome.answer.done) == (None, False)


def test_a_stream_that_stays_open_behind_its_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(serving, "AFTER_DONE_SECONDS", 0.001)
    with scripted(always([*WELL[:-1], STALL])) as server:
        first, second = run(server.url, plan(2), concurrency=1)
    assert (first.failure, second.failure) == (None, None)
    assert server.connections == 2


@pytest.mark.parametrize(
    ("steps", "kind", "message"),
    [
        (answered(400, {"error": {"message": "max_tokens is too large", "type": "x"}}), "http_400", "max_tokens is too large"),
        (answered(401, {"error": {"message": "no key"}}), "http_401", "no key"),
        (answered(404, {"detail": "Not Found"}), "http_404", "Not Found"),
        (answered(500, "a  trace\nof it\x1b[2J"), "http_500", "a trace of it�[2J"),
        (answered(500, {"error": {"message": "é" * 1000}}), "http_500", "é" * 240),
        (answered(500, ""), "http_500", "no message"),
        (answered(429, {"error": {"message": "slow down"}}), "http_429", "slow down"),
        (answered(503, {"error": {"message": "full"}}, "Retry-After: 2\r\n"), "http_503", "full (Retry-After: 2)"),
        (answered(302, "", "Location: /x\r\n"), "http_302", "no message"),
        (answered(200, {"choices": [{"text": "x"}]}), "malformed", "text/event-stream, found application/json"),
        ([b"HTTP/1.1 204 None\r\nContent-Length: 0\r\n\r\n"], "http_204", "no message"),
        ([b"SSH-2.0-OpenSSH\r\n\r\n"], "malformed", "illegal status line"),
        ([b"\x00\x01\x02"], "malformed", "illegal"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n"], "malformed", "bad Content-Length"),
        ([b"HTTP/1.1 200 OK\r\nX: " + b"x" * 200_000], "malformed", "too long"),
        ([STREAM, b"zz\r\n"], "malformed", "illegal chunk header"),
        ([STREAM, b"1\r\nxyz\r\n"], "malformed", "malformed chunk footer"),
        ([STREAM, b"x" * 200_000], "malformed", "too long"),
        ([STREAM, *framed([b"data: {oops\n\n"]), END], "malformed", "expected JSON in the stream"),
        ([STREAM, *framed([b"data: \xff\xff\n\n"]), END], "malformed", "not UTF-8"),
        ([STREAM, *framed([event({"error": {"message": "it broke"}})]), END], "error_event", "it broke"),
        ([STREAM, *framed([event(each) for each in completion_chunks([2, 2], 7)[:2]]), END], "disconnected", "[DONE] after 2"),
        (WELL[:4], "disconnected", "peer closed connection"),
        ([STREAM], "disconnected", "peer closed connection"),
        (
            [STREAM.replace(b"Transfer-Encoding: chunked", b"Content-Length: 99"), CLOSE],
            "disconnected",
            "received 0 bytes, expected 99",
        ),
        ([b"HTTP/1.1 200"], "disconnected", "Server disconnected"),
        ([], "disconnected", "Server disconnected"),
        (streamed([]), "empty", "no tokens"),
        (streamed(completion_chunks([], 7)), "empty", "no tokens"),
    ],
)
def test_every_failure_is_named(steps: Sequence[Step], kind: str, message: str):
    outcome = one(always(steps))
    assert outcome.failure is not None
    assert outcome.failure.kind == kind
    assert message in outcome.failure.message
    assert 0 <= outcome.sent_s <= outcome.end_s


@pytest.mark.parametrize("steps", [[STALL], [*WELL[:3], STALL]])
def test_a_server_that_stalls(steps: Sequence[Step]):
    outcome = one(always(steps), RequestSettings("m", timeout_s=0.5))
    assert outcome.failure is not None
    chunks = len(steps) // 2
    assert (outcome.failure.kind, outcome.failure.message) == (
        "timeout",
        f"no complete answer within 0.5 s; {chunks} chunks received",
    )
    assert outcome.e2e_s >= 0.5


def test_a_server_that_is_not_there():
    with scripted(always(WELL)) as server:
        url = server.url
    outcomes = run(url, plan(3))
    assert [outcome.failure and outcome.failure.kind for outcome in outcomes] == ["unreachable"] * 3
    assert outcomes[0].failure is not None
    assert outcomes[0].failure.message == f"no connection to 127.0.0.1:{server.port}: Connection refused"
    (unnamed,) = run("http://nothing.invalid", plan())
    assert unnamed.failure is not None
    assert unnamed.failure.kind == "unreachable"


def test_failures_leave_the_others_alone():
    kinds = [WELL, answered(503, {"error": {"message": "full"}}), WELL[:4], WELL]
    with scripted(lambda body, number: kinds[int(body["prompt"].split()[1]) % 4]) as server:
        figures = serving_figures(run(server.url, plan(20), concurrency=3))
    assert (figures["completed"], figures["failed"], figures["rejected"]) == (10, 10, 5)
    assert {row["kind"]: row["requests"] for row in figures["failures"]} == {"http_503": 5, "disconnected": 5}
    assert figures["output_tokens"] == 80


def test_no_more_at_once_than_allowed():
    with scripted(always(streamed(completion_chunks([1, 1], 7), [0.01]))) as server:
        outcomes = run(server.url, plan(12), concurrency=3)
        assert server.most_under_way == peak_concurrency(outcomes) == 3
        assert [outcome.held_s > 0.005 for outcome in outcomes] == [False] * 3 + [True] * 9
        assert server.connections == 3, "connections are kept"
    with scripted(always(streamed(completion_chunks([1, 1], 7), [0.05]))) as server:
        assert peak_concurrency(run(server.url, plan(12))) == server.most_under_way == 12


def test_requests_go_out_when_they_are_due():
    with scripted(always(WELL)) as server:
        outcomes = run(server.url, plan(4, gap=0.02))
    assert [outcome.due_s for outcome in outcomes] == [0.0, 0.02, 0.04, 0.06]
    for outcome in outcomes:
        assert outcome.sent_s >= outcome.due_s
        assert outcome.held_s == 0
        assert outcome.slip_s == outcome.sent_s - outcome.due_s


def test_a_clock_is_all_that_times_depend_on():
    """One that moves by a second when a request is sent and when it has ended: the second one wakes late, and is then held."""
    time = 0.0

    def moved(outcome: Outcome, sent: bool) -> None:
        nonlocal time
        time += 1.0

    with scripted(always(WELL)) as server:
        first, second = run(server.url, plan(2), concurrency=1, on_change=moved, clock=lambda: 10 + time)
    assert (first.sent_s, first.held_s, first.slip_s, first.answer.first_s, first.end_s) == (0, 0, 0, 1, 1)
    assert (second.due_s, second.held_s, second.sent_s, second.slip_s, second.ttft_s) == (0, 1, 2, 1, 1)


def test_a_late_client_shows():
    time = 0.0

    def moved(outcome: Outcome, sent: bool) -> None:
        nonlocal time
        time += 0.5

    with scripted(always(WELL)) as server:
        first, second = run(server.url, plan(2), on_change=moved, clock=lambda: time)
    assert (first.slip_s, second.slip_s, second.held_s) == (0, 0.5, 0)


BODIES: list[tuple[RequestSettings, PlannedRequest, str, dict[str, Any]]] = [
    (
        RequestSettings("m"),
        PlannedRequest(3, 0.0, "text", 5),
        "/v1/completions",
        {"prompt": "text", "max_tokens": 5, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    (
        RequestSettings("m", temperature=0.5, seed=4, ignore_eos=True, continuous_usage=False),
        PlannedRequest(3, 0.0, np.arange(3), 5),
        "/v1/completions",
        {"prompt": [0, 1, 2], "max_tokens": 5, "seed": 7, "ignore_eos": True, "stream_options": {"include_usage": True}},
    ),
    (
        RequestSettings("m", chat=True),
        PlannedRequest(0, 0.0, "text", 5),
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "text"}], "max_completion_tokens": 5},
    ),
    (
        RequestSettings("m", chat=True),
        PlannedRequest(0, 0.0, "1 + 1", 5, Example("gsm8k", "", ("1 + 1",), 1, (("system", "Be brief."),))),
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "1 + 1\nPlease reason step by step, and put your final answer within \\boxed{}."},
            ]
        },
    ),
]


@pytest.mark.parametrize(("peer", "planned", "route", "fields"), BODIES)
def test_what_is_sent(peer: RequestSettings, planned: PlannedRequest, route: str, fields: dict[str, Any]):
    with scripted(always(WELL)) as server:
        (outcome,) = run(server.url, [planned], peer)
    assert outcome.failure is None
    ((sent_to, body),) = server.bodies
    assert sent_to == route
    every = {"model": "m", "stream": True, "temperature": peer.temperature}
    assert {name: body[name] for name in {**every, **fields}} == {**every, **fields}
    optional = {"prompt", "max_tokens", "seed", "ignore_eos", "messages", "max_completion_tokens"}
    if not peer.chat:
        assert set(body) & optional == set(fields) & optional
    assert (server.headers[0]["x-test"], server.headers[0]["host"]) == ("yes", f"127.0.0.1:{server.port}")


def test_token_ids_are_no_conversation():
    with scripted(always(WELL)) as server, pytest.raises(ExceptionGroup) as caught:
        run(server.url, [PlannedRequest(0, 0.0, np.arange(3), 1)], RequestSettings("m", chat=True))
    assert "expected a text prompt for a chat model" in str(caught.value.exceptions[0])


def ask_model(models: list[Step] | None, timeout: float = 5.0) -> str:
    async def main(server: Scripted) -> str:
        async with http_client(api_url(server.url)) as client:
            return await first_model(client, timeout)

    with scripted(always([]), models) as server:
        return asyncio.run(main(server))


def test_the_first_model_is_taken():
    assert ask_model(None) == "scripted"


@pytest.mark.parametrize(
    ("models", "problem"),
    [
        (answered(401, {"error": {"message": "no key"}}), "http 401: no key"),
        (answered(200, {"data": []}), "expected a list of models, found something else"),
        (answered(200, {"data": [{"id": 3}]}), "expected a list of models"),
        (answered(200, {"data": [{"id": "\x1b[2J"}]}), "expected a list of models"),
        (answered(200, [1]), "expected a list of models"),
        (answered(200, "<html>"), "expected a list of models"),
        ([], "Server disconnected"),
        ([STALL], "no answer within 0.05 s"),
    ],
)
def test_servers_without_a_model(models: list[Step], problem: str):
    with pytest.raises(NoModel, match=r"no model from http://127.0.0.1:\d+/v1/models: ") as caught:
        ask_model(models, timeout=0.05 if STALL in models else 5.0)
    assert problem in str(caught.value)


@pytest.mark.parametrize("around", [0, 30])
def test_how_a_server_counts(around: int):
    """What a template puts around a text is no part of it."""

    def counted(body: Any, number: int) -> list[Step]:
        return streamed(completion_chunks([1], around + len(body["prompt"]) // 4))

    found, bodies = characters_counted(counted)
    assert found == 4.0
    assert [(len(body["prompt"]), body["max_tokens"]) for body in bodies] == [(24, 1), (12, 1)]


@pytest.mark.parametrize("steps", [answered(503, ""), streamed(completion_chunks([1], 5))])
def test_a_server_that_does_not_say_how_it_counts(steps: list[Step]):
    assert characters_counted(always(steps))[0] is None


def characters_counted(script: Script) -> tuple[float | None, list[dict[str, Any]]]:
    async def main(server: Scripted) -> float | None:
        async with http_client(api_url(server.url)) as client:
            return await characters_per_token(client, RequestSettings("m"), "x" * 24)

    with scripted(script) as server:
        return asyncio.run(main(server)), [body for _, body in server.bodies]


def test_an_idle_connection_is_not_reused_for_long(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(serving, "KEPT_SECONDS", 0.01)
    with scripted(always(WELL)) as server:
        outcomes = run(server.url, plan(3, gap=0.1))
        assert [outcome.failure for outcome in outcomes] == [None] * 3
        assert server.connections == 3


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000/v1"),
        ("http://example.org/", "http://example.org/v1"),
        ("https://example.org/api/v3/", "https://example.org/api/v3"),
        ("https://[::1]:8443/v1", "https://[::1]:8443/v1"),
        ("http://example.org:80/v1", "http://example.org/v1"),
    ],
)
def test_addresses(url: str, shown: str):
    assert str(api_url(url)) == shown


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:8000",
        "ftp://x",
        "http://",
        "http://x:99999",
        "http://x:y",
        "http://x/v1?key=1",
        "http://x#a",
        "http://me:secret@x",
        "http://x/a b",
        "http://x/\r\nHost: y",
        "http://[::1",
        "http://é",
    ],
)
def test_what_is_no_address(url: str):
    with pytest.raises(ValueError, match="expected a URL like") as caught:
        api_url(url)
    assert "secret" not in str(caught.value)


def test_the_limit_of_open_files_is_raised_as_far_as_it_goes(monkeypatch: pytest.MonkeyPatch):
    limits = {"soft": 300, "hard": 1000}
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limits["soft"], limits["hard"]))
    monkeypatch.setattr(resource, "setrlimit", lambda which, both: limits.update(soft=both[0], hard=both[1]))
    allow_connections(10)
    assert limits == {"soft": 300, "hard": 1000}
    allow_connections(100)
    assert limits == {"soft": 356, "hard": 1000}
    allow_connections(5000)
    assert limits == {"soft": 1000, "hard": 1000}


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_https(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    key = tmp_path / "key.pem"
    certificate = tmp_path / "certificate.pem"
    subject = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    made = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
        *subject,
    ]
    subprocess.run([*made, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with scripted(always(WELL), tls=context) as server:
        url = server.url.replace("http:", "https:")
        (distrusted,) = run(url, plan())
        assert distrusted.failure is not None
        assert distrusted.failure.kind == "unreachable"
        assert "certificate verify failed" in distrusted.failure.message.replace("_", " ").lower()
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        trusted = run(url, plan(3), concurrency=1)
    assert [outcome.failure for outcome in trusted] == [None] * 3


def test_a_body_that_is_refused_before_it_was_read():
    """The server answers 413 and closes while a large body is still on its way."""

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"".join(step for step in answered(413, {"error": {"message": "too large"}}) if isinstance(step, bytes)))
        await writer.drain()
        writer.close()

    async def main() -> Outcome:
        server = await asyncio.start_server(refuse, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with http_client(f"http://127.0.0.1:{port}") as client:
            (outcome,) = await replay(client, RequestSettings("m"), [PlannedRequest(0, 0.0, "x" * 5_000_000, 1)])
        server.close()
        await server.wait_closed()
        return outcome

    outcome = asyncio.run(main())
    assert outcome.failure is not None
    assert outcome.failure.kind in ("http_413", "disconnected"), (
        "the answer may be lost where the system drops it with the rest"
    )


def test_the_scripted_server_speaks_json():
    """What tests compare with is what is on the wire."""
    steps = streamed([{"choices": []}])
    assert steps[1] == b'17\r\ndata: {"choices": []}\n\n\r\n'
    assert json.loads(event({"a": 1})[6:]) == {"a": 1}
