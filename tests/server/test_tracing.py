"""Traces: spans of requests with GenAI's attributes, below the client's own, and over OTLP to a collector."""

import ast
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from server.conftest import Client
from server.fake import FakeEngine
from tilewright.server import tracing
from tilewright.server.tracing import Tracer

pytest.importorskip("opentelemetry.sdk", reason="needs the otel extra")

CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


@pytest.fixture
def spans() -> Any:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    return InMemorySpanExporter()


@pytest.fixture
def traced(client: Client, spans: Any) -> TestClient:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    return client(FakeEngine(context=64), tracer=Tracer(provider, "0.1"))


def test_a_span_says_what_a_request_was(traced: TestClient, spans: Any) -> None:
    body = {"model": "demo", "prompt": "def f(x):", "max_tokens": 5, "temperature": 0.5, "seed": 3, "n": 2}
    before = time.time_ns()
    answer = traced.post("/v1/completions", json=body, headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
    assert answer.status_code == 200
    found = spans.get_finished_spans()
    assert [span.name for span in found] == ["text_completion demo"] * 2
    for seed, span in enumerate(sorted(found, key=lambda span: span.attributes["gen_ai.request.seed"]), 3):
        usage = answer.json()["usage"]
        wanted = {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.request.model": "demo",
            "gen_ai.request.max_tokens": 5,
            "gen_ai.request.temperature": 0.5,
            "gen_ai.request.seed": seed,
            "gen_ai.usage.output_tokens": 5,
            "gen_ai.usage.input_tokens": usage["prompt_tokens"],
            "gen_ai.response.finish_reasons": ("length",),
            "gen_ai.request.id": answer.headers["x-request-id"],
        }
        assert wanted.items() <= dict(span.attributes).items()
        assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)
        assert before - 10**8 <= span.start_time <= span.end_time <= time.time_ns() + 10**8
        first, whole = (span.attributes[f"gen_ai.latency.{name}"] for name in ("time_to_first_token", "e2e"))
        assert 0 <= first <= whole == pytest.approx((span.end_time - span.start_time) / 1e9, abs=1e-3)


@pytest.mark.parametrize(
    ("route", "body", "name"),
    [
        ("/v1/chat/completions", CHAT, "chat demo"),
        ("/v1/chat/completions", {**CHAT, "stream": True}, "chat demo"),
        ("/v1/messages", CHAT, "chat demo"),
        ("/v1/embeddings", {"input": "a"}, "embeddings demo"),
    ],
)
def test_every_way_of_asking_has_a_span(traced: TestClient, spans: Any, route: str, body: dict[str, Any], name: str) -> None:
    assert traced.post(route, json=body).status_code == 200
    (span,) = spans.get_finished_spans()
    assert (span.name, span.parent) == (name, None)
    assert ("gen_ai.request.temperature" in span.attributes) == (name != "embeddings demo")


def test_what_fails_is_an_error(client: Client, traced: TestClient, spans: Any) -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    failing = client(FakeEngine(ends=("error", 1)), tracer=Tracer(provider, "0.1"))
    assert failing.post("/v1/completions", json={"prompt": "a", "max_tokens": 9}).status_code == 500
    (span,) = spans.get_finished_spans()
    assert span.attributes["error.type"] == "error"
    assert not span.status.is_ok
    spans.clear()
    assert traced.post("/v1/completions", json={"prompt": "a" * 4000, "max_tokens": 9}).status_code == 400
    assert not spans.get_finished_spans(), "the engine never had it"


@pytest.fixture
def collector() -> Iterator[tuple[str, list[bytes]]]:
    received: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(self.path.encode() + b"\n" + self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            return

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1/traces", received
    server.shutdown()
    thread.join(10)
    server.server_close()


def test_a_collector_gets_spans_over_otlp(
    client: Client, collector: tuple[str, list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_COMPRESSION", "none")
    url, received = collector
    tracer = Tracer.for_endpoint(url, "0.1")
    http = client(FakeEngine(), tracer=tracer)
    assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200
    tracer.close()
    ((path, _, raw),) = [each.partition(b"\n") for each in received]
    (resource,) = ExportTraceServiceRequest.FromString(raw).resource_spans
    assert path == b"/v1/traces"
    assert [span.name for scope in resource.scope_spans for span in scope.spans] == ["text_completion demo"]
    assert "tilewright" in {each.value.string_value for each in resource.resource.attributes if each.key == "service.name"}


def test_an_endpoint_is_a_url() -> None:
    with pytest.raises(ValueError, match="expected a URL of http or https, found 'localhost:4318'"):
        Tracer.for_endpoint("localhost:4318", "0.1")


def test_nothing_is_imported_without_an_endpoint() -> None:
    """OpenTelemetry stands inside functions alone."""
    for path in Path(tracing.__file__).parent.glob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.startswith("opentelemetry") for name in names), path
