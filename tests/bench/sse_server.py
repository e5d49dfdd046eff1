"""A server that says what a script tells it to, over real sockets: the peer of tests of the serving benchmark."""

import asyncio
import json
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

STALL = 60.0
"""Seconds; longer than any test waits."""
Step = bytes | float
"""What to send, or how long to wait before the next."""
Script = Callable[[dict[str, Any], int], Sequence[Step]]
"""What is answered to the body of a POST, and its number among them.

Behind `CLOSE`, and behind an answer that does not say where it ends, the connection is closed.
"""
CLOSE = b""


def event(said: dict[str, Any] | str) -> bytes:
    return f"data: {said if isinstance(said, str) else json.dumps(said)}\n\n".encode()


def framed(parts: Sequence[bytes]) -> list[bytes]:
    """Parts of a body as HTTP's chunks, without the last one."""
    return [f"{len(part):x}\r\n".encode() + part + b"\r\n" for part in parts]


STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def answered(status: int, said: Any, headers: str = "") -> list[Step]:
    """A whole answer with a JSON body, or a text."""
    body = said.encode() if isinstance(said, str) else json.dumps(said).encode()
    head = f"HTTP/1.1 {status} Said\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
    return [head.encode() + body]


def completion_chunks(
    counts: Sequence[int],
    prompt_tokens: int,
    *,
    chat: bool = False,
    continuous: bool = True,
    metrics: dict[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """The chunks of an answer that brings so many tokens in each, as vLLM sends them."""
    chunks: list[dict[str, Any]] = []
    total = 0

    def add(text: str, reason: str | None) -> None:
        choice = {"index": 0, "finish_reason": reason} | ({"delta": {"content": text}} if chat else {"text": text})
        usage = {"usage": {"prompt_tokens": prompt_tokens, "completion_tokens": total}} if continuous else {}
        chunks.append({"choices": [choice], **usage})

    if chat:
        add("", None)
    for count in counts:
        total += count
        add("x" * count, None)
    add("", "length")
    said = {"choices": [], "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": total}}
    return [*chunks, said if metrics is None else {**said, "metrics": {"speculative_decoding": metrics}}]


def streamed(chunks: Sequence[dict[str, Any]], pauses: Sequence[float] = ()) -> list[Step]:
    """Chunks as a stream that ends well, with pauses before the first of them."""
    steps: list[Step] = [STREAM]
    for n, chunk in enumerate(chunks):
        if n < len(pauses):
            steps.append(pauses[n])
        steps += framed([event(chunk)])
    return [*steps, *framed([event("[DONE]")]), END]


@dataclass
class Scripted:
    """A running server.

    Attributes:
        bodies: of the POSTs, with their routes, in the order in which they came.
        headers: of every request, by lower-case name.
        connections: how many were opened.
    """

    port: int = 0
    bodies: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    connections: int = 0
    under_way: int = 0
    most_under_way: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def keeps(steps: Sequence[Step]) -> bool:
    """Whether an answer says itself where it ends: by its length, or by HTTP's last chunk."""
    first, last = (steps[0], steps[-1]) if steps else (CLOSE, CLOSE)
    sized = isinstance(first, bytes) and b"Content-Length" in first
    return last != CLOSE and (sized or (isinstance(last, bytes) and last.startswith(b"0")))


async def say(server: Scripted, steps: Sequence[Step], writer: asyncio.StreamWriter) -> None:
    server.under_way += 1
    server.most_under_way = max(server.most_under_way, server.under_way)
    try:
        for step in steps:
            if isinstance(step, bytes):
                writer.write(step)
                await writer.drain()
            else:
                await asyncio.sleep(step)
    finally:
        server.under_way -= 1


async def serve(
    server: Scripted, script: Script, models: list[Step], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
):
    """One connection, request after request."""
    server.connections += 1
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
            server.headers.append(fields)
            method, route, _ = head[0].split(" ")
            body = json.loads(await reader.readexactly(int(fields.get("content-length", 0))) or "{}")
            steps = models
            if method == "POST":
                server.bodies.append((route, body))
                steps = script(body, len(server.bodies) - 1)
            await say(server, steps, writer)
            if not keeps(steps):
                return
    except (asyncio.IncompleteReadError, ConnectionError):
        return  # the client has left
    finally:
        writer.transport.abort()


@contextmanager
def scripted(script: Script, models: list[Step] | None = None, tls: ssl.SSLContext | None = None) -> Iterator[Scripted]:
    """Runs a server in a thread of its own. `models` answers every GET."""
    server = Scripted()
    listed = answered(200, {"object": "list", "data": [{"id": "scripted"}, {"id": "other"}]}) if models is None else models
    ready = threading.Event()
    loop = asyncio.new_event_loop()
    ended = asyncio.Event()

    async def main() -> None:
        tasks: set[asyncio.Task[None]] = set()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            tasks.add(task)
            await serve(server, script, listed, reader, writer)
            tasks.discard(task)

        listening = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=tls)
        server.port = listening.sockets[0].getsockname()[1]
        ready.set()
        await ended.wait()
        listening.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0.01)  # aborted transports say goodbye

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(main())

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(10)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
