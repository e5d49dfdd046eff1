"""A server that says what a test lets it say, and keeps what it was asked."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tilewright.server.page import CSP, PAGE

DEFAULTS = {"temperature": 0.2, "top_p": 0.9, "top_k": 0, "max_new_tokens": 512}
"""Sampling defaults of the server's model."""


@dataclass
class RecordedRequest:
    path: str
    headers: Mapping[str, str]
    body: Any


@dataclass
class Script:
    """Behaviour of the server.

    Attributes:
        answers: of the routes that generate, one after another; each writes its own.
        key: which requests must bring, if any.
        requests: those requests, as they came.
        gone: set when a client went before its answer ended.
        counts: numbers of tokens that `/tokenize` gives, one after another.
        counted: bodies that it was sent.
    """

    answers: list[Callable[["Handler"], None]] = field(default_factory=list)
    key: str | None = None
    ready: bool = True
    requests: list[RecordedRequest] = field(default_factory=list)
    gone: threading.Event = field(default_factory=threading.Event)
    counts: list[int] = field(default_factory=list)
    counted: list[Any] = field(default_factory=list)


class Handler(BaseHTTPRequestHandler):
    script: Script

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the output is the tests'."""

    def send(self, status: int, kind: str, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, **{key.replace("_", "-"): value for key, value in headers.items()}}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def send_json(self, status: int, body: Any) -> None:
        self.send(status, "application/json", json.dumps(body).encode())

    def error(self, status: int, message: str, code: str | None = None) -> None:
        self.send_json(status, {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}})

    def event(self, data: Any) -> None:
        self.wfile.write(b"data: " + (data if isinstance(data, bytes) else json.dumps(data).encode()) + b"\n\n")

    def refused(self) -> bool:
        if self.script.key is None or self.headers.get("Authorization") == f"Bearer {self.script.key}":
            return False
        self.error(401, "a valid API key is required", "invalid_api_key")
        return True

    def do_GET(self) -> None:
        if self.path == "/":
            self.send(200, "text/html; charset=utf-8", PAGE, Content_Security_Policy=CSP)
        elif self.path == "/ready" and not self.script.ready:
            self.error(503, "the server is warming up", "server_warming")
        elif self.path == "/ready":
            self.send_json(200, {"status": "ready"})
        elif self.path == "/v1/models":
            if not self.refused():
                card = {"id": "small", "object": "model", "max_model_len": 2048, "sampling_defaults": DEFAULTS}
                self.send_json(200, {"object": "list", "data": [card]})
        else:
            self.error(404, f"there is no {self.path}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            self.script.counted.append(body)
            self.send_json(200, {"count": self.script.counts.pop(0), "max_model_len": 2048})
            return
        self.script.requests.append(RecordedRequest(self.path, dict(self.headers), body))
        if not self.refused():
            self.script.answers.pop(0)(self)


Rounds = Sequence[tuple[Sequence[tuple[str, bool]], int, str]]
"""Rounds of a response: tokens, number of drafts, and choice."""


def chunk(path: str, text: str, **more: Any) -> dict[str, Any]:
    choice = {"delta": {"content": text}} if "chat" in path else {"text": text}
    return {"choices": [{"index": 0, **choice, "finish_reason": None}], **more}


def stream(
    rounds: Rounds, *, end: Callable[[Handler], None] | None = None, reason: str = "stop", prompt_tokens: int = 3
) -> Callable[[Handler], None]:
    """An answer in events, a round each; `end` takes the place of the last events."""

    def answer(handler: Handler) -> None:
        handler.send(200, "text/event-stream")
        for tokens, drafted, choice in rounds:
            shown = [{"text": text, "drafted": was_drafted} for text, was_drafted in tokens]
            accepted = sum(was_drafted for _, was_drafted in tokens)
            details = {"tokens": shown, "drafted": drafted, "accepted": accepted, "choice": choice}
            handler.event(chunk(handler.path, "".join(text for text, _ in tokens), rounds=[details]))
            handler.wfile.flush()
        if end is not None:
            end(handler)
            return
        count = sum(len(tokens) for tokens, _, _ in rounds)
        handler.event({"choices": [{"index": 0, "delta": {}, "text": "", "finish_reason": reason}]})
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": count, "total_tokens": prompt_tokens + count}
        handler.event({"choices": [], "usage": usage})
        handler.event(b"[DONE]")

    return answer


def until_gone(handler: Handler) -> None:
    """Goes on, with events that say nothing, until the client has gone."""
    try:
        while not handler.script.gone.wait(0.02):
            handler.wfile.write(b": still here\n\n")
    except OSError:
        handler.script.gone.set()


def serving(script: Script) -> Iterator[str]:
    """The address of a server that follows the script, while it runs."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Scripted", (Handler,), {"script": script}))
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()
