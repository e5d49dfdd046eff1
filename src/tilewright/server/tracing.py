"""OpenTelemetry traces: one span per engine request, with the attributes of the GenAI semantic conventions.

Latency attributes have vLLM's names. A span is made after its request has ended, from the engine's timestamps, which costs the
event loop some tens of microseconds and the engine nothing. OpenTelemetry is only imported if an endpoint is configured.
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
"""GenAI operation name of each route; "chat" for other routes."""

OnEnd = Callable[[RequestHandle, EndReason], None]
"""Callback for each ended request of a body."""


class Tracer:
    """Creates spans of requests with a tracer provider of OpenTelemetry's SDK."""

    def __init__(self, provider: Any, version: str):
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self.provider = provider
        self.context = TraceContextTextMapPropagator()
        self.tracer = provider.get_tracer("tilewright", version)

    @staticmethod
    def for_endpoint(endpoint: str, version: str) -> "Tracer":
        """Makes a tracer that exports spans in batches by OTLP over HTTP. The SDK's environment variables apply.

        Args:
            endpoint: URL of the collector, such as http://localhost:4318/v1/traces.

        Raises:
            ValueError: the URL is invalid, or the extra `otel` is not installed.
        """
        if not endpoint.startswith(("http://", "https://")):
            raise ValueError(f"--log traces: expected a URL of http or https, found {endpoint!r}")
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ValueError("--log traces needs OpenTelemetry's SDK: pip install 'tilewright[otel]'") from error
        attributes = {"service.name": os.environ.get("OTEL_SERVICE_NAME", "tilewright"), "service.version": version}
        provider = TracerProvider(resource=Resource.create(attributes))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        return Tracer(provider, version)

    def close(self) -> None:
        """Exports the remaining spans."""
        self.provider.shutdown()

    def request(self, path: str, headers: Mapping[str, str], model: str, request_id: str) -> OnEnd:
        """Returns a callback that makes spans of a body's requests, as children of the client's span (`traceparent`)."""
        parent = self.context.extract({name: headers[name] for name in ("traceparent", "tracestate") if name in headers})
        operation = OPERATIONS.get(path, "chat")

        def on_end(handle: RequestHandle, end: EndReason) -> None:
            from opentelemetry.trace import SpanKind, Status, StatusCode

            times = handle.times
            now = time.monotonic()
            epoch = time.time() - now  # Unix time of the zero of the engine's clock
            span = self.tracer.start_span(
                f"{operation} {model}",
                parent,
                SpanKind.SERVER,
                span_attributes(handle, end, now),
                start_time=int((epoch + (times.submitted_at or now)) * 1e9),
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

        return on_end


def span_attributes(handle: RequestHandle, end: EndReason, now: float) -> dict[str, Any]:
    """Returns the attributes of a request's span: sampling parameters, token counts and latencies."""
    request = handle.request
    times = handle.times
    result = handle.result
    sampling = request.sampling
    found: dict[str, Any] = {
        "gen_ai.usage.input_tokens": len(request.prompt),
        "gen_ai.usage.output_tokens": 0 if result is None else len(result.tokens),
        "gen_ai.usage.cache_read.input_tokens": handle.cached_tokens,
        "gen_ai.response.finish_reasons": (FINISHED[end],),
        "gen_ai.latency.e2e": (times.ended or now) - (times.submitted_at or now),
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
        ("time_in_queue", times.submitted_at, times.admitted),
        ("time_to_first_token", times.submitted_at, times.first_token),
        ("time_in_model_prefill", times.admitted, times.first_token),
        ("time_in_model_decode", times.first_token, times.ended),
    )
    return found | {f"gen_ai.latency.{name}": max(stop - start, 0.0) for name, start, stop in spans if start and stop}
