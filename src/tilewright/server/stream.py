"""Running a body's requests in the engine, and answering: whole, or as server-sent events."""

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
from tilewright.runtime.request import EndReason, GenerateRequest, Overloaded, RequestHandle, RequestOutput, Stopped
from tilewright.runtime.service import Service
from tilewright.server.errors import ApiError, internal_error, overloaded
from tilewright.server.prometheus import Timings
from tilewright.server.render import FINISHES, Renderer, joined
from tilewright.server.tracing import Ended

log = logging.getLogger("tilewright.server")

T = TypeVar("T")

COMMENT = b":\n\n"
"""An event of nothing, which clients pass over."""


class Disconnected(Exception):
    """The client has gone."""


def stopping() -> ApiError:
    return ApiError(503, "the server is stopping", "server_stopping", None, {"retry-after": "5"})


def ended_badly(update: RequestOutput) -> ApiError:
    """Error that a client is told of a request that did not come to its end."""
    if update.end == "deadline":
        # Clients of OpenAI's would ask again, and take as long.
        no_retry = {"x-should-retry": "false"}
        return ApiError(504, "the request took longer than this server allows", "deadline_exceeded", None, no_retry)
    if update.end == "cancelled":
        return stopping()
    return ApiError(500, update.error or "the engine failed on this request", "engine_error")


class Running:
    """Requests in the engine that belong to one body: submitted together, listened to together, cancelled together.

    It is made in the event loop that listens.
    """

    def __init__(self, engine: Service, timings: Timings, traced: Ended | None = None):
        """Args: `traced`: told of each request that has ended, once."""
        self.engine = engine
        self.timings = timings
        self.traced = traced
        self.loop = asyncio.get_running_loop()
        self.told = asyncio.Queue[tuple[int, RequestOutput]]()
        self.handles: list[RequestHandle] = []
        self.ended: set[int] = set()
        self.spans: frozenset[int] = frozenset()
        self.given_up = False
        self.lock = threading.Lock()

    def submit(self, requests: Sequence[GenerateRequest] | Sequence[DenoisingRequest]) -> None:
        """Submits requests whose prompts the engine has encoded, on any thread; what is given up meanwhile is cancelled.

        Raises:
            ApiError: the engine does not take one of them; then it keeps none.
        """
        try:
            for index, request in enumerate(requests):
                handle = self.engine.submit(request, partial(self.tell, index), encoded=True)
                with self.lock:
                    self.handles.append(handle)
                    given_up = self.given_up
                if given_up:
                    self.engine.cancel(handle)
        except (ValueError, Overloaded, Stopped) as error:
            self.cancel()
            if isinstance(error, ValueError):
                raise ApiError(400, str(error), "invalid_value") from error
            raise (overloaded(error.retry_after_s) if isinstance(error, Overloaded) else stopping()) from error

    def tell(self, index: int, update: RequestOutput) -> None:
        """Called on the engine's thread."""
        self.loop.call_soon_threadsafe(self.told.put_nowait, (index, update))

    def cancel(self) -> None:
        """Gives up those that have not ended, and those that are submitted later."""
        with self.lock:
            self.given_up = True
            handles = list(self.handles)
        for index, handle in enumerate(handles):
            if index not in self.ended:
                self.engine.cancel(handle)
                self.trace(index, "cancelled")

    def trace(self, index: int, end: EndReason) -> None:
        """Has a span made of a request, the first time that it is told of its end."""
        with self.lock:
            is_first = index not in self.spans
            self.spans = self.spans | {index}
        if is_first and self.traced is not None:
            self.traced(self.handles[index], end)

    async def updates(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """Each update with the number of its request, until all have ended.

        Raises:
            ApiError: one ended without an answer.
        """
        arrived: dict[int, float] = {}
        while len(self.ended) < len(self.handles):
            index, update = await self.told.get()
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
                raise ended_badly(update)
            yield index, update


async def collected(running: Running, renderer: Renderer) -> Response:
    """The answer as a whole."""
    told: list[list[RequestOutput]] = [[] for _ in running.handles]
    async for index, update in running.updates():
        told[index].append(update)
    return Response(renderer.whole([joined(updates) for updates in told]).json_bytes, media_type="application/json")


async def embedded(running: Running) -> list[np.ndarray]:
    """The embeddings that requests asked for, in order."""
    found: dict[int, np.ndarray] = {}
    async for index, update in running.updates():
        assert update.embedding is not None, "a request for an embedding is told one thing, or fails"
        found[index] = update.embedding
    return [found[index] for index in range(len(running.handles))]


async def events(running: Running, renderer: Renderer) -> AsyncIterator[bytes]:
    """The answer as events. An error after the first of them is an event too."""
    try:
        async for index, update in running.updates():
            for event in renderer.events(index, update):
                yield event
        ending = renderer.last_events()
    except ApiError as error:
        ending = renderer.failed(error)
    except Exception:  # the status is out; the client gets a fixed message in the stream
        log.exception("request %s failed", renderer.request_id)
        ending = renderer.failed(internal_error())
    for event in ending:
        yield event


class EventStream(Response):
    """Server-sent events, which end when the client goes."""

    media_type = "text/event-stream"

    def __init__(self, source: AsyncIterator[bytes], running: Running):
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self.source = source
        self.running = running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self.sent(send), lambda: self.part(send, COMMENT))
        except Disconnected:
            log.debug("a client has gone")
        finally:
            self.running.cancel()

    async def sent(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for body in self.source:
            await self.part(send, body)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def part(self, send: Send, body: bytes) -> None:
        await send({"type": "http.response.body", "body": body, "more_body": True})


async def nothing() -> None:
    """Sends nothing to a client that is asked whether it is there, and must get its answer as a whole."""


async def gone(receive: Receive, ask: Callable[[], Awaitable[None]]) -> None:
    """Returns when the client has gone. The body was read before: what seems more of it is the connection's wish to `ask`."""
    while (await receive())["type"] != "http.disconnect":
        await ask()


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T], ask: Callable[[], Awaitable[None]] = nothing) -> T:
    """Returns what `work` gives, which is cancelled when the client goes.

    Args:
        ask: sends something that changes nothing, by which a client that has gone is known.

    Raises:
        Disconnected: the client has gone.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(gone(receive, ask))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise Disconnected
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
