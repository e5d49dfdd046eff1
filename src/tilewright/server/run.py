"""A server from its beginning to its end: listening while the engine warms up, serving, and stopping when told to."""

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from functools import partial

from rich.console import Console

from tilewright.runtime.request import Stopped
from tilewright.server.api import Api
from tilewright.server.app import make_app
from tilewright.server.connections import HttpServer, most_connections

log = logging.getLogger("tilewright.server")

KEEP_ALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""A client that vanished without a word is known after a minute; in seconds and probes, on systems that have these options."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 takes any that is free.

    Raises:
        ValueError: there is no such port.
        OSError: it is taken, or not this machine's.
    """
    if not 0 <= port < 2**16:
        raise ValueError(f"expected a port from 0 to 65535, found {port}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family)
    except OSError as error:
        raise OSError(f"cannot listen at {host} port {port}: {error}") from error
    # Inherited by what is accepted. Asyncio leaves it out for such sockets, and small answers would wait 40 ms for an ACK.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        if hasattr(socket, name):
            listening.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return listening


def url_of(listening: socket.socket, tls: bool = False) -> str:
    host, port = listening.getsockname()[:2]
    return f"http{'s' if tls else ''}://{f'[{host}]' if ':' in host else host}:{port}"


class Server:
    """One run.

    Args:
        drain_s: how long running requests may take to end once the server is told to.
        say: told when the server is ready.
        console: where the progress of warming shows.
    """

    def __init__(self, api: Api, drain_s: float, say: Callable[[], None], console: Console | None = None):
        self.api = api
        self.drain_s = drain_s
        self.say = say
        self.console = console
        self.http = HttpServer(make_app(api), most_connections(), api.options.tls)
        self.failure = list[BaseException]()

    def run(self, listening: socket.socket) -> None:
        """Serves until SIGTERM or SIGINT.

        The first one ends it as `drain_s` says, the second at once.

        Raises:
            BaseException: what warming up, or the engine, ended with, if it failed.
        """
        asyncio.run(self.serve(listening))
        if self.failure:
            raise self.failure[0]
        if self.warming.is_alive():
            # Nothing interrupts a compiler, and an interpreter that ends would wait for all that are queued.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

    async def serve(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self.told_to_stop)
        self.warming = threading.Thread(target=self.warm, args=(loop,), name="warming", daemon=True)
        self.warming.start()
        await self.http.serve([listening])

    def warm(self, loop: asyncio.AbstractEventLoop) -> None:
        """Makes the engine ready, unless it is told to stop before."""
        try:
            self.api.engine.on_failure = partial(self.failed, loop)
            self.api.engine.warm(self.console)
            self.api.engine.start()
            self.say()
            self.api.compile_ahead()  # not before: rounds are measured while the engine warms
        except Stopped:
            log.info("the server was told to stop before it was ready")
        except BaseException as error:
            self.failed(loop, error)

    def failed(self, loop: asyncio.AbstractEventLoop, error: BaseException) -> None:
        """Ends the server with an error, which goes on in the main thread."""
        self.api.stopping = True
        self.failure.append(error)
        loop.call_soon_threadsafe(self.end)

    def told_to_stop(self) -> None:
        drain_s = 0.0 if self.api.stopping else self.drain_s
        self.api.stopping = True
        threading.Thread(target=self.drain, args=(asyncio.get_running_loop(), drain_s), name="draining", daemon=True).start()

    def drain(self, loop: asyncio.AbstractEventLoop, drain_s: float) -> None:
        """Lets the engine's requests end, and then the server."""
        try:
            self.api.engine.stop(drain_s)
        finally:
            loop.call_soon_threadsafe(self.end)

    def end(self) -> None:
        self.http.should_exit = True
