"""HTTP/1.1 to one server over asyncio's streams: connections that are kept, and bodies as they come.

The standard library alone: no client that the base install is sure to have streams asynchronously, and a client that does
little puts little of its own time into what it measures. No redirects, proxies or compression.
"""

import asyncio
import os
import re
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

READ = 1 << 16
"""Bytes read at once, and the most that the head of a response may have."""
KEPT_SECONDS = 1.0
"""A connection that was idle for longer is not used again: servers close theirs after 2 s or more, and may just be doing so."""


class Unreachable(OSError):
    """There was no connection."""


class ServerDisconnected(OSError):
    """The connection ended before the response did."""


class Malformed(ValueError):
    """Raised for a response that breaks the protocol."""


@dataclass(frozen=True)
class Address:
    """Address of a server's API; `path` comes before that of a route and has no slash at its end."""

    secure: bool
    host: str
    port: int
    path: str

    @classmethod
    def from_url(cls, url: str) -> "Address":
        """Of a URL with the API's path; one without any path means `/v1`.

        Raises:
            ValueError: it is no URL of a server, or has parts that are no address.
        """
        expected = "expected a URL like http://127.0.0.1:8000 or https://example.org/v1"
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ValueError(f"{expected}, found {url!r} ({error})") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or re.search(r"[^!-~]", url):
            raise ValueError(f"{expected}, found {url!r}")
        if parts.username is not None or parts.query or parts.fragment:
            raise ValueError(f"{expected}, without user name, query or fragment")  # and without showing a password
        secure = parts.scheme == "https"
        return cls(secure, parts.hostname, port or (443 if secure else 80), parts.path.rstrip("/") or "/v1")

    @property
    def authority(self) -> str:
        """Value of the header `Host`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.secure else 80) else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        return f"http{'s' if self.secure else ''}://{self.authority}{self.path}"


class ClientConnection:
    """An open connection; `idle_since` is when its last response ended."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader = reader
        self.writer = writer
        self.idle_since = 0.0

    @property
    def usable(self) -> bool:
        fresh = time.monotonic() - self.idle_since < KEPT_SECONDS
        return fresh and not self.reader.at_eof() and not self.writer.is_closing()

    async def close(self) -> None:
        self.writer.transport.abort()
        with suppress(OSError):  # how it ended is no news to who closes it
            await self.writer.wait_closed()


class Response:
    """A response whose head is there and whose body comes.

    Attributes:
        status: 200 and so on.
        headers: by lower-case name.
        complete: whether the body was read to its end.
    """

    def __init__(self, reader: asyncio.StreamReader, status: int, headers: Mapping[str, str], reusable: bool):
        self.reader = reader
        self.status = status
        self.headers = headers
        self.chunked = headers.get("transfer-encoding", "").lower() == "chunked"
        self.left = 0 if self.chunked else body_length(headers)
        self.begun = False
        self.complete = status in (204, 304) or (not self.chunked and self.left == 0)
        self.reusable = reusable and headers.get("connection", "").lower() != "close" and self.left is not None

    async def read(self) -> bytes:
        """The next bytes of the body as soon as there are any; none at its end.

        Raises:
            Disconnected, Malformed: the body stops before its end; its chunks are none.
        """
        if self.chunked and not self.left and not self.complete:
            await self.next_chunk()
        if self.complete:
            return b""
        data = await self.reader.read(READ if self.left is None else min(self.left, READ))
        if self.left is None:
            self.complete = not data
        elif not data:
            raise ServerDisconnected("the connection was closed within the response")
        else:
            self.left -= len(data)
            self.complete = self.left == 0 and not self.chunked
        return data

    async def next_chunk(self) -> None:
        """Reads the line break behind the last chunk and the size of the next one; the last is empty, and has trailers."""
        if self.begun and await self.line() != b"":
            raise Malformed("a chunk of the response is longer than its size says")
        self.begun = True
        size, _, _ = (await self.line()).partition(b";")
        if not re.fullmatch(rb"[0-9a-fA-F]{1,15}\s*", size):
            raise Malformed(f"expected the size of a chunk, found {size[:40]!r}")
        self.left = int(size, 16)
        if not self.left:
            while await self.line():
                continue  # trailers
            self.complete = True

    async def line(self) -> bytes:
        try:
            return (await self.reader.readuntil(b"\r\n"))[:-2]
        except asyncio.IncompleteReadError:
            raise ServerDisconnected("the connection was closed within the response") from None
        except asyncio.LimitOverrunError:
            raise Malformed("a line between the chunks of the response does not end") from None

    async def text(self, most: int = READ) -> str:
        """The body as text, of which not much more than `most` bytes are read."""
        data = b""
        while len(data) < most and (part := await self.read()):
            data += part
        return data.decode("utf-8", "replace")


def body_length(headers: Mapping[str, str]) -> int | None:
    """Bytes of the body; None where it ends with the connection."""
    length = headers.get("content-length")
    if length is None:
        return None
    if not re.fullmatch(r"[0-9]{1,15}", length):
        raise Malformed(f"expected a content length, found {length[:40]!r}")
    return int(length)


class Connections:
    """Connections to a server, each used for one request at a time.

    Args:
        headers: that go with every request.
    """

    def __init__(self, address: Address, headers: Mapping[str, str]):
        self.address = address
        self.headers = dict(headers)
        self.context = ssl.create_default_context() if address.secure else None
        self.idle: list[ClientConnection] = []

    @asynccontextmanager
    async def request(self, method: str, route: str, body: bytes = b"") -> AsyncIterator[Response]:
        """Sends a request, and gives its response once the head is there. `route` is that below the API's path.

        Raises:
            Unreachable, Disconnected, Malformed: no connection, no whole head, no HTTP.
        """
        connection = await self.connection()
        response = None
        try:
            connection.writer.write(self.head(method, route, body) + body)
            with suppress(ConnectionError):  # a server may refuse a request, and say why, before it has read it all
                await connection.writer.drain()
            response = await read_head(connection.reader)
            yield response
        except ConnectionError as error:
            raise ServerDisconnected(f"the connection broke: {error.strerror or error}") from error
        finally:
            if response is not None and response.complete and response.reusable:
                connection.idle_since = time.monotonic()
                self.idle.append(connection)
            else:
                await connection.close()

    def head(self, method: str, route: str, body: bytes) -> bytes:
        fields = {"Host": self.address.authority, **self.headers}
        if body:
            fields |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
        lines = [f"{method} {self.address.path}{route} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
        return "".join(f"{line}\r\n" for line in [*lines, ""]).encode("latin-1")

    async def connection(self) -> ClientConnection:
        """The one that was idle for the shortest time, or a new one."""
        while self.idle:
            kept = self.idle.pop()
            if kept.usable:
                return kept
            await kept.close()
        try:
            streams = await asyncio.open_connection(self.address.host, self.address.port, ssl=self.context, limit=READ)
        except (OSError, UnicodeError) as error:  # the latter: no name that a host can have
            raise Unreachable(f"no connection to {self.address.authority}: {reason(error)}") from error
        return ClientConnection(*streams)

    async def close(self) -> None:
        while self.idle:
            await self.idle.pop().close()


def reason(error: OSError | UnicodeError) -> str:
    """Reason why there is no connection. asyncio puts a text of its own, with the address again, instead of the system's."""
    if isinstance(error, ConnectionError) and error.errno:
        return os.strerror(error.errno)
    return str(getattr(error, "strerror", None) or error)


async def read_head(reader: asyncio.StreamReader) -> Response:
    """Status and headers; interim responses (100 and such) are passed over."""
    while True:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError as error:
            if error.partial and not error.partial.startswith(b"HTTP/"):
                raise Malformed(f"expected HTTP, found {error.partial[:40]!r}") from None
            raise ServerDisconnected("the connection was closed before the response") from None
        except asyncio.LimitOverrunError:
            raise Malformed(f"expected the head of a response, found {READ} bytes without its end") from None
        first, *lines = head[:-4].decode("latin-1").split("\r\n")
        status = re.fullmatch(r"HTTP/1\.([01]) ([1-5][0-9][0-9])(?: .*)?", first)
        if status is None:
            raise Malformed(f"expected HTTP/1.1, found {first[:40]!r}")
        if not status[2].startswith("1"):
            fields = (line.partition(":") for line in lines)
            headers = {name.strip().lower(): value.strip() for name, _, value in fields}
            return Response(reader, int(status[2]), headers, reusable=status[1] == "1")
