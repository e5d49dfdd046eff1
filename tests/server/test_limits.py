"""API keys, limits, and errors while the engine is full, slow, failing or ending."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from server.conftest import Client
from server.fake import FakeEngine
from tilewright.runtime.request import GenerateRequest, RequestHandle
from tilewright.runtime.sampling import Sampling
from tilewright.server.api import ServerOptions

ASK = {"prompt": "a b c", "max_tokens": 5}
OPEN = ("/", "/health", "/ready", "/ping")
CLOSED = (
    "/v1/models",
    "/metrics",
    "/version",
    "/openapi.json",
    "/tokenizer_info",
    "/nothing",
    "http://testserver//health",
    "/health/",
)


def test_without_keys_nobody_needs_one(client: Client):
    assert client().get("/v1/models").status_code == 200


def test_with_keys_everything_but_the_probes_and_the_page_needs_one(client: Client):
    locked = client(api_keys=("first", "sécret"))
    assert [locked.get(path).status_code for path in OPEN] == [200] * 4
    for path in CLOSED:
        answer = locked.get(path)
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["x-request-id"]
    assert locked.post("/v1/completions", json=ASK).status_code == 401
    assert locked.post("/v1/completions", content=b"[" * 100).status_code == 401


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (b"Bearer first", 200),
        (b"bearer first", 200),
        ("Bearer sécret".encode(), 200),
        (b"Bearer  first", 200),
        (b"Bearer first ", 401),
        (b"Bearer firs", 401),
        (b"Bearer firstt", 401),
        (b"Bearer ", 401),
        (b"Bearer", 401),
        (b"Basic first", 401),
        (b"first", 401),
        (b"Bearer \xff\xfe", 401),
    ],
)
def test_a_key_is_the_whole_key(client: Client, header: bytes, status: int):
    locked = client(api_keys=("first", "sécret"))
    assert locked.get("/v1/models", headers=[(b"authorization", header)]).status_code == status


def test_two_keys_at_once_are_none(client: Client):
    locked = client(api_keys=("first",))
    both = [(b"authorization", b"Bearer first"), (b"authorization", b"Bearer wrong")]
    assert locked.get("/v1/models", headers=both).status_code == 401


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"api_keys": ("",)}, "printable"),
        ({"api_keys": ("a\n",)}, "printable"),
        ({"name": ""}, "a model name"),
        ({"max_body_bytes": 0}, "max_body_bytes above 0, found 0"),
        ({"deadline_s": -1.0}, "deadline_s above 0"),
        ({"stale_s": float("nan")}, "stale_s above 0"),
    ],
)
def test_options_out_of_range_are_refused(fields: dict[str, object], said: str):
    with pytest.raises(ValueError, match=said):
        ServerOptions(**{"name": "demo", "version": "0.1", **fields})  # type: ignore[arg-type]


def test_browsers_read_answers_only_from_origins_that_are_allowed(client: Client):
    asking = {"origin": "https://a.example", "access-control-request-method": "POST"}
    asking["access-control-request-headers"] = "content-type,authorization"
    off = client()
    assert off.options("/v1/completions", headers=asking).status_code == 405
    assert "access-control-allow-origin" not in off.post("/v1/completions", json=ASK, headers=asking).headers
    on = client(origins=("https://a.example",), api_keys=("k",))
    answer = on.options("/v1/completions", headers=asking)
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "https://a.example")
    for name in ("x-stainless-lang", "x-stainless-retry-count", "openai-organization"):
        answer = on.options("/v1/completions", headers=asking | {"access-control-request-headers": f"authorization,{name}"})
        assert (answer.status_code, name in answer.headers["access-control-allow-headers"]) == (200, True)
    other = on.options("/v1/completions", headers=asking | {"origin": "https://b.example"})
    assert "access-control-allow-origin" not in other.headers


def test_request_ids_are_the_servers_own(client: Client):
    app = client()
    answer = app.post("/v1/completions", json=ASK, headers={"x-request-id": "mine"})
    assert answer.headers["x-request-id"] != "mine"
    assert answer.json()["id"] == f"cmpl-{answer.headers['x-request-id']}"
    assert app.get("/nothing").headers["x-request-id"] != answer.headers["x-request-id"]


def test_a_full_queue_is_a_503_that_says_when_to_come_back(client: Client):
    engine = FakeEngine(room=1)
    app = client(engine)
    engine.go.clear()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(app.post, "/v1/completions", json=ASK)
        while not engine.live_sequences:
            time.sleep(0.001)
        answer = app.post("/v1/completions", json=ASK)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["error"]["code"] == "server_overloaded"
        engine.go.set()
        assert first.result().status_code == 200
    assert len(engine.received) == 1
    assert app.post("/v1/completions", json=ASK).status_code == 200


def test_a_burst_is_turned_away_before_it_is_tokenised(client: Client, monkeypatch: pytest.MonkeyPatch):
    """Requests that are being tokenised count before the engine knows them."""
    engine = FakeEngine(room=3)
    tokenised = []
    go = threading.Event()
    real = engine.decoding.model.encode

    def slowly(prompt: object) -> list[int]:
        tokenised.append(prompt)
        assert go.wait(20)
        return real(prompt)  # type: ignore[arg-type]

    app = client(engine)
    monkeypatch.setattr(engine, "encode", slowly)
    with app, ThreadPoolExecutor(8) as pool:
        burst = [pool.submit(app.post, "/v1/completions", json=ASK) for _ in range(8)]
        end = time.monotonic() + 20
        while sum(one.done() for one in burst) < 5 and time.monotonic() < end:
            time.sleep(0.01)
        assert sum(one.done() for one in burst) == 5
        assert len(tokenised) <= 2  # threads that tokenise
        go.set()
        statuses = sorted(one.result().status_code for one in burst)
    assert statuses == [200] * 3 + [503] * 5


@pytest.mark.parametrize(
    ("route", "body", "prompts"),
    [
        ("/v1/completions", {"prompt": [5, 6, 7], "n": 4}, 1),
        ("/v1/completions", {"prompt": ["a b", "c"], "n": 2, "echo": True, "logprobs": 1}, 2),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello there"}], "n": 3}, 1),
    ],
)
def test_a_prompts_tokens_are_looked_at_once(
    client: Client, monkeypatch: pytest.MonkeyPatch, route: str, body: dict[str, object], prompts: int
):
    engine = FakeEngine()
    looks = list[object]()
    app = client(engine)
    real = engine.decoding.model.encode

    def counted(prompt: Any) -> list[int]:
        looks.append(prompt)
        return real(prompt)

    monkeypatch.setattr(engine, "encode", counted)
    assert app.post(route, json=body | {"max_tokens": 2}).status_code == 200
    assert len(looks) == prompts
    with pytest.raises(ValueError, match="below the vocabulary size"):
        engine.submit(GenerateRequest([1, 10**6], Sampling(2)), lambda update: None)


def test_more_than_the_queue_can_ever_hold_is_a_400(client: Client):
    engine = FakeEngine()
    answer = client(engine).post("/v1/completions", json=ASK | {"prompt": ["a"] * 17, "n": 16})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "too_many_choices")


def test_what_was_submitted_is_given_up_when_the_rest_is_refused(client: Client, monkeypatch: pytest.MonkeyPatch):
    engine = FakeEngine(room=3)
    app = client(engine)
    engine.go.clear()
    real = engine.submit

    def submit(*given: Any, **named: Any) -> RequestHandle:
        handle = real(*given, **named)
        if len(engine.live_sequences) == 2:  # somebody else comes in between
            real(GenerateRequest([1, 2], Sampling(4)), lambda update: None)
        return handle

    monkeypatch.setattr(engine, "submit", submit)
    answer = app.post("/v1/completions", json=ASK | {"n": 3})
    assert answer.status_code == 503
    engine.go.set()
    assert engine.stop(20.0)
    assert engine.stats().ended == {"cancelled": 2, "length": 1}


def test_a_deadline_is_a_504_that_nobody_should_repeat(client: Client):
    answer = client(FakeEngine(ends=("deadline", 1))).post("/v1/completions", json=ASK)
    assert (answer.status_code, answer.headers["x-should-retry"]) == (504, "false")
    assert answer.json()["error"]["code"] == "deadline_exceeded"


@pytest.mark.parametrize(("end", "status", "code"), [("error", 500, "engine_error"), ("cancelled", 503, "server_stopping")])
def test_a_request_that_fails_says_so_whole_and_streamed(client: Client, end: str, status: int, code: str):
    engine = FakeEngine(ends=(end, 1))  # type: ignore[arg-type]
    app = client(engine)
    answer = app.post("/v1/completions", json=ASK | {"max_tokens": 50})
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    streamed = app.post("/v1/completions", json=ASK | {"max_tokens": 50, "stream": True})
    assert streamed.status_code == 200
    first, last, done, rest = streamed.text.split("\n\n")
    assert '"choices"' in first
    assert f'"code":"{code}"' in last
    assert (done, rest) == ("data: [DONE]", "")


def test_an_error_of_the_servers_own_is_logged_and_not_told(
    client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    engine = FakeEngine()
    app = client(engine)

    def broken(*_: object) -> None:
        raise RuntimeError("a secret of the server")

    monkeypatch.setattr(engine, "check_room", broken)
    answer = app.post("/v1/completions", json=ASK)
    assert answer.status_code == 500
    assert answer.json()["error"] == {
        "message": "internal server error",
        "type": "server_error",
        "param": None,
        "code": "internal_error",
    }
    request_id = answer.headers["x-request-id"]
    assert f"request {request_id} failed" in caplog.text
    assert "a secret of the server" in caplog.text


def test_while_warming_or_stopping_nothing_is_generated(client: Client):
    engine = FakeEngine()
    app = client(engine, started=False)
    for path in ("/v1/completions", "/ready", "/health", "/ping"):
        answer = app.post(path, json=ASK) if path.startswith("/v1") else app.get(path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "server_not_ready")
        assert answer.headers["retry-after"]
    assert app.post("/tokenize", json={"prompt": "a"}).status_code == 200
    engine.start()
    assert app.get("/ready").json() == {"status": "ready"}
    assert app.get("/health").json() == {"status": "ok", "step_age_s": 0.0, "programs_ready": 5, "programs_declared": 5}
    engine.stop()
    answer = app.post("/v1/completions", json=ASK)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "server_stopping")


def test_health_is_bad_when_the_engine_is_stuck(client: Client):
    engine = FakeEngine(step_age_s=0.5)
    app = client(engine, stale_s=10.0)
    assert app.get("/health").json() == {"status": "ok", "step_age_s": 0.5, "programs_ready": 5, "programs_declared": 5}
    engine.step_age_s = 11.0
    answer = app.get("/health")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_stuck")


def test_health_is_bad_when_the_engine_has_ended_by_itself(client: Client):
    engine = FakeEngine()
    app = client(engine)
    engine.ready = False
    engine.ending = True
    answer = app.get("/health")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_stuck")
    assert "has ended" in answer.json()["error"]["message"]
