"""Server process: listens while the engine warms up, serves, and stops on a signal."""

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
"""TCP keepalive (seconds, and a number of probes), which detects vanished clients within a minute, where the OS supports it."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def listen(host: str, port: int) -> socket.socket:
    """Opens a listening socket. Port 0 takes any free port.

    Raises:
        ValueError: the port is out of range.
        OSError: the port is in use, or the address does not belong to this machine.
    """
    if not 0 <= port < 2**16:
        raise ValueError(f"expected a port from 0 to 65535, found {port}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family)
    except OSError as error:
        raise OSError(f"cannot listen at {host} port {port}: {error}") from error
    # Accepted sockets inherit the options. Without TCP_NODELAY, which asyncio does not set here, small responses would wait
    # 40 ms for an ACK.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        if hasattr(socket, name):
            listening.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return listening


def server_url(listening: socket.socket, tls: bool = False) -> str:
    host, port = listening.getsockname()[:2]
    return f"http{'s' if tls else ''}://{f'[{host}]' if ':' in host else host}:{port}"


class Server:
    """HTTP server with its engine.

    Args:
        drain_s: seconds that running requests may take to finish after a stop signal.
        on_ready: called when the server is ready.
        console: console for the progress of the warm-up.
        wait_for_programs: see `Engine.warm`.
    """

    def __init__(
        self,
        api: Api,
        drain_s: float,
        on_ready: Callable[[], None],
        console: Console | None = None,
        wait_for_programs: bool = False,
    ):
        self.api = api
        self.wait_for_programs = wait_for_programs
        self.drain_s = drain_s
        self.on_ready = on_ready
        self.console = console
        self.http = HttpServer(make_app(api), most_connections(), api.options.tls)
        self.failure = list[BaseException]()

    def run(self, listening: socket.socket) -> None:
        """Serves until SIGTERM or SIGINT. The first signal waits `drain_s` for running requests, the second stops at once.

        Raises:
            BaseException: the exception of a failed warm-up or engine.
        """
        asyncio.run(self.serve(listening))
        if self.failure:
            raise self.failure[0]
        if self.warming.is_alive() or self.api.engine.compiles:
            # Compilations cannot be interrupted, and a normal exit would wait for all queued ones.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

    async def serve(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self.on_stop_signal)
        self.warming = threading.Thread(target=self.warm, args=(loop,), name="warming", daemon=True)
        self.warming.start()
        await self.http.serve([listening])

    def warm(self, loop: asyncio.AbstractEventLoop) -> None:
        """Warms up and starts the engine."""
        try:
            self.api.engine.on_failure = partial(self.failed, loop)
            self.api.engine.warm(self.console, self.wait_for_programs)
            self.api.engine.start()
            self.on_ready()
            self.api.compile_ahead()  # after the warm-up, which measures rounds
        except Stopped:
            log.info("stopped before the server was ready")
        except BaseException as error:
            self.failed(loop, error)

    def failed(self, loop: asyncio.AbstractEventLoop, error: BaseException) -> None:
        """Ends the server with an error, which `run` raises."""
        self.api.stopping = True
        self.failure.append(error)
        loop.call_soon_threadsafe(self.end)

    def on_stop_signal(self) -> None:
        drain_s = 0.0 if self.api.stopping else self.drain_s
        self.api.stopping = True
        threading.Thread(target=self.drain, args=(asyncio.get_running_loop(), drain_s), name="draining", daemon=True).start()

    def drain(self, loop: asyncio.AbstractEventLoop, drain_s: float) -> None:
        """Stops the engine after its running requests, and then the server."""
        try:
            self.api.engine.stop(drain_s)
        finally:
            loop.call_soon_threadsafe(self.end)

    def end(self) -> None:
        self.http.should_exit = True
