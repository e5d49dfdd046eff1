"""A server from its beginning to its end: listening while the engine warms up, serving, and stopping when told to."""

import asyncio
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from rich.console import Console

from tilewright.server.api import Api
from tilewright.server.app import make_app

FLUSH_S = 5
"""How long answers that are complete may take to reach their clients when the server ends."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Uvicorn(uvicorn.Server):
    """Uvicorn without its signal handlers, which would end the process by the signal and not with status 0."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


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
    return listening


def url_of(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class Server:
    """One run.

    Args:
        drain_s: how long running requests may take to end once the server is told to.
        say: told when the server is ready.
        console: where the progress of warming shows.
    """

    def __init__(self, api: Api, drain_s: float, say: Callable[[], None], console: Console | None = None):
        config = uvicorn.Config(
            make_app(api), log_config=None, access_log=False, lifespan="off", ws="none", proxy_headers=False,
            server_header=False, timeout_graceful_shutdown=FLUSH_S,
        )  # fmt: skip
        self.api, self.drain_s, self.say, self.console = api, drain_s, say, console
        self.http, self.failure = Uvicorn(config), list[BaseException]()

    def run(self, listening: socket.socket) -> None:
        """Serves until SIGTERM or SIGINT.

        The first one ends it as `drain_s` says, the second at once.

        Raises:
            BaseException: what warming up ended with, if it failed.
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
        """Makes the engine ready."""
        try:
            self.api.engine.warm(self.console)
            if not self.api.stopping:
                self.api.engine.start()
                self.say()
        except BaseException as error:  # goes on in the main thread
            self.failure.append(error)
            loop.call_soon_threadsafe(self.end)

    def told_to_stop(self) -> None:
        drain_s = 0.0 if self.api.stopping else self.drain_s
        self.api.stopping = True
        threading.Thread(target=self.drain, args=(asyncio.get_running_loop(), drain_s), name="draining", daemon=True).start()

    def drain(self, loop: asyncio.AbstractEventLoop, drain_s: float) -> None:
        """Lets the engine's requests end, and then the server."""
        self.api.engine.stop(drain_s)
        loop.call_soon_threadsafe(self.end)

    def end(self) -> None:
        self.http.should_exit = True
