"""HTTP connections with limits on their number and with deadlines for slow clients, on top of uvicorn.

Uvicorn has no deadline before a connection's first response, and accepts connections until file descriptors run out.
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
"""Largest number of connections."""
HEAD_S = 10.0
"""Deadline in seconds for the headers of a request, from the start of the connection or the first byte of the headers."""
UNREAD_S = 60.0
"""Deadline in seconds for a client to read the next `LEAST_READ` bytes of a response."""
LEAST_READ = 1024
PROBE_S = 1.0
"""Interval in seconds of the checks whether a half-closed connection is still open."""
RETRY_S = 0.1
"""Pause in seconds after a failed `accept`."""
LINGER_S = 1.0
"""Seconds between an error response and the end of its connection, so that a client that still sends can read the response."""
LOG_INTERVAL_S = 60.0
"""Shortest interval in seconds of the log messages about failing `accept` calls."""
FLUSH_S = 5
"""Seconds to flush complete responses at the shutdown of the server."""

quiet = logging.getLogger("tilewright.server.protocol")
"""Uvicorn's logger of connections. Clients get errors in responses; logging them could fill a disk."""
quiet.setLevel(logging.ERROR)


def most_connections() -> int:
    """Raises this process's limit of open files to the hard limit, and returns the number of connections that fit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError) as error:  # macOS does not allow an infinite soft limit
        log.debug("cannot raise the limit of open files: %s", error)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_CONNECTIONS if soft == resource.RLIM_INFINITY else min(MOST_CONNECTIONS, soft * 3 // 4)


class Connection(H11Protocol):
    """Uvicorn connection with deadlines, a bound on unread response data, and errors in OpenAI's format.

    Attributes:
        since: time at which the connection began to wait for its client, or to respond.
        ended: the client has closed its sending side, and may still read.
        refused: further data of the client is discarded.
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
        """True while a response is being made or sent."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def waits(self) -> bool:
        """True while the connection waits for the client: the request is incomplete, or the connection is being closed."""
        closing = self.refused or self.transport.is_closing()
        return closing or not self.answering or self.conn.their_state is h11.SEND_BODY

    # Request headers.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Writing pauses as soon as one byte is unread, so that `send` waits for the client. TLS pauses at the limit, plain
        # sockets above it.
        transport.set_write_buffer_limits(high=1 if self.scheme == "https" else 0)
        self.head_timer = self.loop.call_later(HEAD_S, self.on_head_timeout)

    def data_received(self, data: bytes) -> None:
        if self.refused:
            return
        was_answering = self.answering
        super().data_received(data)
        if self.answering:
            self.since = self.since if was_answering else self.loop.time()
            self.head_timer = cancel_timer(self.head_timer)
        elif self.head_timer is None:  # the first byte of another request, or the rest of an unread body
            self.head_timer = self.loop.call_later(HEAD_S, self.on_head_timeout)

    def on_head_timeout(self) -> None:
        if self.conn.trailing_data[0]:
            self.refuse(ApiError(408, f"the request headers did not arrive within {HEAD_S:g} s", "request_timeout"))
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Sends an error response for data that is not a request; called by uvicorn."""
        error = sys.exc_info()[1]
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        self.refuse(ApiError(status, f"expected an HTTP/1.1 request: {str(error or msg)[:200]}", "invalid_http"))

    def refuse(self, error: ApiError) -> None:
        """Sends an error response and ends the connection."""
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
            if self.transport.can_write_eof():  # TLS cannot close one side only
                self.transport.write_eof()
            self.loop.call_later(LINGER_S, self.transport.close)
            access.info("- - %d", error.status)

    # Responses.

    def pause_writing(self) -> None:
        super().pause_writing()
        self.unread = self.transport.get_write_buffer_size()
        self.unread_timer = self.loop.call_later(UNREAD_S, self.check_reading)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.unread_timer = cancel_timer(self.unread_timer)

    def check_reading(self) -> None:
        """Aborts a connection whose client reads less than `LEAST_READ` bytes per `UNREAD_S` seconds, and so its request."""
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

    # End of the connection.

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keeps a half-closed connection open while its response is being made.

        A client that has gone looks the same until the next byte is sent to it, so the connection is probed.
        """
        if self.waits or self.scheme == "https":  # TLS connections cannot be half-closed
            return False
        if not self.ended:
            self.ended = True
            if not self.cycle.response_started and self.conn.their_http_version != b"1.0":
                # HTTP/1.1 clients have to accept any number of 100 responses.
                self.transport.write(self.conn.send(h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")))
            self.loop.call_later(PROBE_S, self.probe)
        return True

    def probe(self) -> None:
        """Aborts the connection if the client has gone. Asyncio stops reading after EOF, and would not notice."""
        if self.transport.is_closing() or not self.answering:
            return
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        if self.cycle.response_started:
            self.cycle.message_event.set()  # `receive` returns an empty body part, and a stream then sends a comment
        self.loop.call_later(PROBE_S, self.probe)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.head_timer = cancel_timer(self.head_timer)
        self.unread_timer = cancel_timer(self.unread_timer)


def cancel_timer(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


class HttpServer(uvicorn.Server):
    """Uvicorn server with at most `most` connections of class `Connection`.

    A new connection above the limit replaces the connection that has waited longest for its client. If all connections are
    being answered, the new connection is accepted, and its requests are refused (`CROWDED`) except for probes.

    The server has no signal handlers, because uvicorn's would end the process by the signal instead of status 0.

    Attributes:
        most: largest number of connections.
        tls: TLS context of all connections; None for plain HTTP.
        handshakes: tasks of TLS handshakes.
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
        """Starts accepting connections. Asyncio's servers log a traceback in a busy loop when file descriptors run out."""
        assert sockets, "expected listening sockets"
        self.servers = []
        self.accepting = [asyncio.create_task(self.accept(each)) for each in sockets]
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in (*self.accepting, *self.handshakes):
            task.cancel()
        await asyncio.wait((*self.accepting, *self.handshakes))
        await super().shutdown(sockets)

    async def accept(self, listening: socket.socket) -> None:
        """Accepts connections until it is cancelled."""
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
                    log.error("cannot accept connections: %s; retrying", error)
                    complaint = loop.time() + LOG_INTERVAL_S
                self.make_room()
                await asyncio.sleep(RETRY_S)

    def shake_hands(self, accepted: socket.socket) -> None:
        """Starts a TLS handshake in a task, because clients may be slow. Closes the socket if too many handshakes run."""
        if len(self.handshakes) >= self.most:
            accepted.close()
            return
        task = asyncio.create_task(self.admit_tls(accepted))
        self.handshakes.add(task)
        task.add_done_callback(self.handshakes.discard)

    async def admit_tls(self, accepted: socket.socket) -> None:
        """Admits a connection whose TLS handshake ends within `HEAD_S`. Logs failed handshakes at level debug."""
        try:
            await self.admit(accepted)
        except (OSError, EOFError) as error:  # `SSLError`, deadline, or client gone
            log.debug("TLS handshake failed: %s", error)
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
        """Aborts the connection that has waited longest for its client. Returns False if no connection waits."""
        connections = self.server_state.connections
        waiting = [each for each in connections if isinstance(each, Connection) and each.waits]
        if not waiting:
            return False
        longest = min(waiting, key=lambda each: each.since)
        longest.transport.abort()
        connections.discard(longest)
        return True
