"""Execution of a body's requests in the engine, and responses: whole or as server-sent events."""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tilewright.diffusion.request import DenoisingRequest
from tilewright.runtime.engine import Engine
from tilewright.runtime.request import EndReason, GenerateRequest, Overloaded, RequestHandle, RequestOutput, Stopped
from tilewright.server.errors import ApiError, internal_error, overloaded
from tilewright.server.prometheus import Timings
from tilewright.server.render import FINISHES, Renderer, joined
from tilewright.server.tracing import OnEnd

log = logging.getLogger("tilewright.server")

T = TypeVar("T")

COMMENT = b":\n\n"
"""Empty server-sent event (a comment), which clients ignore."""


class Disconnected(Exception):
    """Raised when the client has disconnected."""


def stopping() -> ApiError:
    return ApiError(503, "the server is stopping", "server_stopping", None, {"retry-after": "5"})


def end_error(update: RequestOutput) -> ApiError:
    """Makes the error for a request that ended early."""
    if update.end == "deadline":
        # Without the header, OpenAI's clients retry.
        no_retry = {"x-should-retry": "false"}
        return ApiError(504, "the request exceeded the server's time limit", "deadline_exceeded", None, no_retry)
    if update.end == "cancelled":
        return stopping()
    return ApiError(500, update.error or "the engine failed on this request", "engine_error")


class RunningRequests:
    """Requests of one body in the engine, which are submitted, awaited and cancelled together.

    The constructor has to run in the event loop that awaits the updates.
    """

    def __init__(self, engine: Engine, timings: Timings, on_end: OnEnd | None = None):
        """Args: `on_end`: called once for each ended request."""
        self.engine = engine
        self.timings = timings
        self.on_end = on_end
        self.loop = asyncio.get_running_loop()
        self.queue = asyncio.Queue[tuple[int, RequestOutput]]()
        self.handles: list[RequestHandle] = []
        self.ended: set[int] = set()
        self.spans: frozenset[int] = frozenset()
        self.cancelled = False
        self.lock = threading.Lock()

    def submit(self, requests: Sequence[GenerateRequest] | Sequence[DenoisingRequest]) -> None:
        """Submits requests with encoded prompts; callable from any thread. Cancels them if `cancel` was called meanwhile.

        Raises:
            ApiError: the engine refuses a request; the others are cancelled.
        """
        try:
            for index, request in enumerate(requests):
                handle = self.engine.submit(request, partial(self.enqueue, index), encoded=True)
                with self.lock:
                    self.handles.append(handle)
                    cancelled = self.cancelled
                if cancelled:
                    self.engine.cancel(handle)
        except (ValueError, Overloaded, Stopped) as error:
            self.cancel()
            if isinstance(error, ValueError):
                raise ApiError(400, str(error), "invalid_value") from error
            raise (overloaded(error.retry_after_s) if isinstance(error, Overloaded) else stopping()) from error

    def enqueue(self, index: int, update: RequestOutput) -> None:
        """Queues an update; called on the engine's thread."""
        self.loop.call_soon_threadsafe(self.queue.put_nowait, (index, update))

    def cancel(self) -> None:
        """Cancels all requests that have not ended, and requests that are submitted later."""
        with self.lock:
            self.cancelled = True
            handles = list(self.handles)
        for index, handle in enumerate(handles):
            if index not in self.ended:
                self.engine.cancel(handle)
                self.trace(index, "cancelled")

    def trace(self, index: int, end: EndReason) -> None:
        """Makes the span of an ended request, once."""
        with self.lock:
            is_first = index not in self.spans
            self.spans = self.spans | {index}
        if is_first and self.on_end is not None:
            self.on_end(self.handles[index], end)

    async def updates(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """Yields each update with the index of its request, until all requests have ended.

        Raises:
            ApiError: a request ended early.
        """
        arrived: dict[int, float] = {}
        while len(self.ended) < len(self.handles):
            index, update = await self.queue.get()
            if update.tokens:
                now = time.monotonic()
                if index in arrived:
                    self.timings.gap(now - arrived[index])
                arrived[index] = now
            if update.end is not None:
                self.ended.add(index)
                self.timings.end(self.handles[index].times)
                self.trace(index, update.end)
            if update.end is not None and update.end not in FINISHES:
                raise end_error(update)
            yield index, update


async def collected(running: RunningRequests, renderer: Renderer) -> Response:
    """Waits for all outputs and renders them as one response."""
    outputs: list[list[RequestOutput]] = [[] for _ in running.handles]
    async for index, update in running.updates():
        outputs[index].append(update)
    return Response(renderer.render_full([joined(updates) for updates in outputs]).json_bytes, media_type="application/json")


async def embedded(running: RunningRequests) -> list[np.ndarray]:
    """Waits for the embeddings of all requests, in order."""
    found: dict[int, np.ndarray] = {}
    async for index, update in running.updates():
        assert update.embedding is not None, "embedding requests have one update"
        found[index] = update.embedding
    return [found[index] for index in range(len(running.handles))]


async def events(running: RunningRequests, renderer: Renderer) -> AsyncIterator[bytes]:
    """Yields the outputs as server-sent events. Errors become events."""
    try:
        async for index, update in running.updates():
            for event in renderer.events(index, update):
                yield event
        ending = renderer.last_events()
    except ApiError as error:
        ending = renderer.failed(error)
    except Exception:  # the status is already sent
        log.exception("request %s failed", renderer.request_id)
        ending = renderer.failed(internal_error())
    for event in ending:
        yield event


class EventStream(Response):
    """Streaming response of server-sent events. Cancels the requests when the client disconnects."""

    media_type = "text/event-stream"

    def __init__(self, source: AsyncIterator[bytes], running: RunningRequests):
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self.source = source
        self.running = running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self.send_all(send), lambda: self.send_part(send, COMMENT))
        except Disconnected:
            log.debug("the client disconnected")
        finally:
            self.running.cancel()

    async def send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for body in self.source:
            await self.send_part(send, body)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def send_part(self, send: Send, body: bytes) -> None:
        await send({"type": "http.response.body", "body": body, "more_body": True})


async def no_probe() -> None:
    """Sends nothing, for responses that are sent whole."""


async def disconnected(receive: Receive, probe: Callable[[], Awaitable[None]]) -> None:
    """Returns when the client has disconnected. An empty body part is a request of `Connection.probe` to send a probe."""
    while (await receive())["type"] != "http.disconnect":
        await probe()


async def until_disconnect(
    receive: Receive, work: Coroutine[Any, Any, T], probe: Callable[[], Awaitable[None]] = no_probe
) -> T:
    """Runs `work` and returns its result. Cancels `work` when the client disconnects.

    Args:
        probe: sends data without effect, so that a closed connection is detected.

    Raises:
        Disconnected: the client has disconnected.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(disconnected(receive, probe))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise Disconnected
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
