"""Connections: how many there may be, how long clients may take, and what those are told who do not speak HTTP.

Uvicorn gives a connection no deadline before its first answer, and accepts as many as there are descriptors.
"""

import asyncio
import http
import logging
import resource
import socket
import ssl
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from tilewright.server.errors import ApiError
from tilewright.server.middleware import CROWDED, access

log = logging.getLogger("tilewright.server")

MOST_CONNECTIONS = 4096
HEAD_S = 10.0
"""Seconds that a request's head may take, from the connection's beginning or the head's first byte on."""
UNREAD_S = 60.0
"""Seconds that a client may take to read another `LEAST_READ` bytes of an answer."""
LEAST_READ = 1024
PROBE_S = 1.0
"""Seconds from one question to the next whether a client that has ended its side is still there."""
RETRY_S = 0.1
"""Seconds that accepting rests after it failed."""
LINGER_S = 1.0
"""Seconds that a client may go on to send after it was refused. If the connection ended at once, it might not read why."""
COMPLAINT_S = 60.0
"""A failing `accept` is logged once in this time."""
FLUSH_S = 5
"""Seconds that answers that are complete may take to reach their clients when the server ends."""

quiet = logging.getLogger("tilewright.server.protocol")
"""Where uvicorn writes of single connections. What clients do wrong is told to them; a line for each could fill a disk."""
quiet.setLevel(logging.ERROR)


def most_connections() -> int:
    """Raises this process's limit of open files as far as it goes, and returns how many connections that has room for."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError) as error:  # macOS: where the hard limit is infinite, the soft one cannot be
        log.debug("the limit of open files stays: %s", error)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_CONNECTIONS if soft == resource.RLIM_INFINITY else min(MOST_CONNECTIONS, soft * 3 // 4)


class Connection(H11Protocol):
    """One connection: uvicorn's, with deadlines, without unread answers piling up, and with errors in OpenAI's form.

    Attributes:
        since: when it began to wait for its client, or to answer.
        ended: the client has ended its side, and may still read.
        refused: what it sends is not read any more.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.logger = quiet
        self.since = self.loop.time()
        self.ended = self.refused = False
        self.unread = 0
        self.head_timer: asyncio.TimerHandle | None = None
        self.unread_timer: asyncio.TimerHandle | None = None

    @property
    def answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def waits(self) -> bool:
        """True if it is the client's turn: its request is not complete, or the connection is only being closed."""
        closing = self.refused or self.transport.is_closing()
        return closing or not self.answering or self.conn.their_state is h11.SEND_BODY

    # Heads.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # A client that does not read is known by this at its first byte, and `send` waits for it. TLS pauses at the limit
        # itself, plain sockets above it.
        transport.set_write_buffer_limits(high=1 if self.scheme == "https" else 0)
        self.head_timer = self.loop.call_later(HEAD_S, self.head_late)

    def data_received(self, data: bytes) -> None:
        if self.refused:
            return
        began = self.answering
        super().data_received(data)
        if self.answering:
            self.since = self.since if began else self.loop.time()
            self.head_timer = cancelled(self.head_timer)
        elif self.head_timer is None:  # the first byte of another request, or more of a body that nobody waits for
            self.head_timer = self.loop.call_later(HEAD_S, self.head_late)

    def head_late(self) -> None:
        if self.conn.trailing_data[0]:
            self.refuse(ApiError(408, f"the head of the request did not come within {HEAD_S:g} s", "request_timeout"))
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Uvicorn calls it where h11 finds that what came is no request."""
        error = sys.exc_info()[1]
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        self.refuse(ApiError(status, f"expected a request of HTTP/1.1: {str(error or msg)[:200]}", "invalid_http"))

    def refuse(self, error: ApiError) -> None:
        """Answers what is no request, and ends the connection."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE) or self.transport.is_closing():
            self.transport.close()
        else:
            self.refused = True
            if self.answering:
                self.cycle.disconnected = True
                self.cycle.message_event.set()
            answer = error.response()
            headers = [*self.server_state.default_headers, *answer.raw_headers, (b"connection", b"close")]
            reason = http.HTTPStatus(error.status).phrase.encode()
            head = h11.Response(status_code=error.status, headers=headers, reason=reason)
            for event in (head, h11.Data(data=bytes(answer.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
            if self.transport.can_write_eof():  # TLS ends both sides at once
                self.transport.write_eof()
            self.loop.call_later(LINGER_S, self.transport.close)
            access.info("- - %d", error.status)

    # Answers.

    def pause_writing(self) -> None:
        super().pause_writing()
        self.unread = self.transport.get_write_buffer_size()
        self.unread_timer = self.loop.call_later(UNREAD_S, self.check_reading)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.unread_timer = cancelled(self.unread_timer)

    def check_reading(self) -> None:
        """Ends a connection whose client hardly reads; its request ends with it."""
        unread = self.transport.get_write_buffer_size()
        if unread > self.unread - LEAST_READ:
            self.transport.abort()
        else:
            self.unread = unread
            self.unread_timer = self.loop.call_later(UNREAD_S, self.check_reading)

    def on_response_complete(self) -> None:
        self.since = self.loop.time()
        super().on_response_complete()
        if self.ended and not self.answering:
            self.transport.close()

    # Ends.

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keeps the connection for a client that has sent all and waits for its answer.

        One that has gone looks alike, until the next byte that it is sent comes back.
        """
        if self.waits or self.scheme == "https":  # under TLS no side stays open behind the other's end
            return False
        if not self.ended:
            self.ended = True
            if not self.cycle.response_started and self.conn.their_http_version != b"1.0":
                # To be passed over by every client of HTTP/1.1, as often as it comes.
                self.transport.write(self.conn.send(h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")))
            self.loop.call_later(PROBE_S, self.probe)
        return True

    def probe(self) -> None:
        """Looks whether the client has gone. Asyncio reads no more after the end, and so would not see it."""
        if self.transport.is_closing() or not self.answering:
            return
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        if self.cycle.response_started:
            self.cycle.message_event.set()  # as a part of the body, empty; a stream then sends a comment
        self.loop.call_later(PROBE_S, self.probe)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.head_timer = cancelled(self.head_timer)
        self.unread_timer = cancelled(self.unread_timer)


def cancelled(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


class HttpServer(uvicorn.Server):
    """Uvicorn with connections as above, and never more than `most` of them.

    One more takes the place of that which has waited longest for its client. Where all are being answered it is let in, too,
    and what it asks is refused (`CROWDED`), but for the probes.

    It has no signal handlers, which would end the process by the signal and not with status 0.

    Attributes:
        tls: of all connections; None for none.
        handshakes: connections that TLS is being agreed on with.
    """

    def __init__(self, app: ASGIApp, most: int = MOST_CONNECTIONS, tls: ssl.SSLContext | None = None):
        config = uvicorn.Config(
            app,
            http=Connection,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=FLUSH_S,
        )
        super().__init__(config)
        self.most = most
        self.tls = tls
        self.handshakes = set[asyncio.Task[None]]()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Asyncio's own way of accepting goes round and round where descriptors run out, with a traceback for each round."""
        assert sockets, "it listens already"
        self.servers = []
        self.accepting = [asyncio.create_task(self.accept(each)) for each in sockets]
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in (*self.accepting, *self.handshakes):
            task.cancel()
        await asyncio.wait((*self.accepting, *self.handshakes))
        await super().shutdown(sockets)

    async def accept(self, listening: socket.socket) -> None:
        """Takes connections for ever."""
        loop = asyncio.get_running_loop()
        complaint = 0.0
        listening.setblocking(False)
        while True:
            try:
                accepted, _ = await loop.sock_accept(listening)
                if self.tls is None:
                    await self.admit(accepted)
                else:
                    self.shake_hands(accepted)
            except ConnectionAbortedError:
                continue
            except OSError as error:
                if loop.time() >= complaint:
                    log.error("no connection can be accepted: %s; trying again", error)
                    complaint = loop.time() + COMPLAINT_S
                self.make_room()
                await asyncio.sleep(RETRY_S)

    def shake_hands(self, accepted: socket.socket) -> None:
        """Agrees on TLS aside, for a client may take its time; one more than there may be connections is turned away."""
        if len(self.handshakes) >= self.most:
            accepted.close()
            return
        task = asyncio.create_task(self.admit_tls(accepted))
        self.handshakes.add(task)
        task.add_done_callback(self.handshakes.discard)

    async def admit_tls(self, accepted: socket.socket) -> None:
        """Admits a connection that comes to TLS within `HEAD_S`; of the others nothing is said but at the level debug."""
        try:
            await self.admit(accepted)
        except (OSError, EOFError) as error:  # `SSLError`, a deadline that has passed, a client that has gone
            log.debug("no TLS with a client: %s", error)
            accepted.close()

    async def admit(self, accepted: socket.socket) -> None:
        crowded = len(self.server_state.connections) >= self.most and not self.make_room()
        state = {CROWDED: True} if crowded else {}
        protocol = Connection(self.config, self.server_state, state)
        deadline = None if self.tls is None else HEAD_S
        await asyncio.get_running_loop().connect_accepted_socket(
            lambda: protocol, accepted, ssl=self.tls, ssl_handshake_timeout=deadline
        )

    def make_room(self) -> bool:
        """Ends the connection that has waited longest for its client. Returns whether there was one."""
        connections = self.server_state.connections
        waiting = [each for each in connections if isinstance(each, Connection) and each.waits]
        if not waiting:
            return False
        longest = min(waiting, key=lambda each: each.since)
        longest.transport.abort()
        connections.discard(longest)
        return True
