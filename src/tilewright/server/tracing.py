"""Traces for OpenTelemetry: a span for each request of the engine, with the attributes that its conventions have for GenAI.

The names of what a request took are vLLM's. A span is made once its request has ended, from the times that the engine noted: it
costs the engine nothing, and the event loop some tens of microseconds. OpenTelemetry is imported where an endpoint is named.
"""

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from tilewright.runtime.request import EndReason, GenerateRequest, RequestHandle
from tilewright.server.prometheus import FINISHED

OPERATIONS = {
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/v1/score": "embeddings",
    "/score": "embeddings",
}
"""What the conventions call routes' operations; all others are chats."""

Ended = Callable[[RequestHandle, EndReason], None]
"""Told of each request of a body that has ended, and how."""


class Tracer:
    """Spans of requests, given to a provider of OpenTelemetry's SDK."""

    def __init__(self, provider: Any, version: str):
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self.provider = provider
        self.context = TraceContextTextMapPropagator()
        self.tracer = provider.get_tracer("tilewright", version)

    @staticmethod
    def to(endpoint: str, version: str) -> "Tracer":
        """One that sends spans in batches to a collector, by OTLP over HTTP; the SDK's environment variables hold.

        Args:
            endpoint: the whole URL, such as http://localhost:4318/v1/traces.

        Raises:
            ValueError: it is none, or the extra `otel` is not installed.
        """
        if not endpoint.startswith(("http://", "https://")):
            raise ValueError(f"--otlp-traces-endpoint: expected a URL of http or https, found {endpoint!r}")
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ValueError("--otlp-traces-endpoint needs OpenTelemetry's SDK: pip install 'tilewright[otel]'") from error
        named = {"service.name": os.environ.get("OTEL_SERVICE_NAME", "tilewright"), "service.version": version}
        provider = TracerProvider(resource=Resource.create(named))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        return Tracer(provider, version)

    def close(self) -> None:
        """Sends what was not sent yet."""
        self.provider.shutdown()

    def request(self, path: str, headers: Mapping[str, str], model: str, request_id: str) -> Ended:
        """What makes spans of a body's requests, below the client's own span where its `traceparent` names one."""
        parent = self.context.extract({name: headers[name] for name in ("traceparent", "tracestate") if name in headers})
        operation = OPERATIONS.get(path, "chat")

        def ended(handle: RequestHandle, end: EndReason) -> None:
            from opentelemetry.trace import SpanKind, Status, StatusCode

            times = handle.times
            now = time.monotonic()
            epoch = time.time() - now  # of the engine's clock
            span = self.tracer.start_span(
                f"{operation} {model}",
                parent,
                SpanKind.SERVER,
                attributes_of(handle, end, now),
                start_time=int((epoch + (times.asked or now)) * 1e9),
            )
            span.set_attributes(
                {
                    "gen_ai.operation.name": operation,
                    "gen_ai.provider.name": "tilewright",
                    "gen_ai.request.model": model,
                    "gen_ai.response.model": model,
                    "gen_ai.request.id": request_id,
                }
            )
            if end in ("error", "deadline", "cancelled"):
                span.set_attribute("error.type", end)
                span.set_status(Status(StatusCode.ERROR, end))
            span.end(int((epoch + (times.ended or now)) * 1e9))

        return ended


def attributes_of(handle: RequestHandle, end: EndReason, now: float) -> dict[str, Any]:
    """What a span says of a request: what it asked for, tokens, and seconds."""
    request = handle.request
    times = handle.times
    result = handle.result
    sampling = request.sampling
    found: dict[str, Any] = {
        "gen_ai.usage.input_tokens": len(request.prompt),
        "gen_ai.usage.output_tokens": 0 if result is None else len(result.tokens),
        "gen_ai.usage.cache_read.input_tokens": handle.cached_tokens,
        "gen_ai.response.finish_reasons": (FINISHED[end],),
        "gen_ai.latency.e2e": (times.ended or now) - (times.asked or now),
    }
    if not (isinstance(request, GenerateRequest) and request.pooling is not None):
        found |= {
            "gen_ai.request.max_tokens": sampling.max_new_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.top_k": sampling.top_k,
        }
        if sampling.seed is not None:
            found["gen_ai.request.seed"] = sampling.seed
    spans = (
        ("time_in_queue", times.asked, times.admitted),
        ("time_to_first_token", times.asked, times.first_token),
        ("time_in_model_prefill", times.admitted, times.first_token),
        ("time_in_model_decode", times.first_token, times.ended),
    )
    return found | {f"gen_ai.latency.{name}": max(stop - start, 0.0) for name, start, stop in spans if start and stop}
