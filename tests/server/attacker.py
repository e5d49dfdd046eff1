"""Clients that mean no good, by hand over sockets."""

import json
import socket
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

HEAD = b"%s %s HTTP/1.1\r\nhost: x\r\n"


def address(url: str) -> tuple[str, int]:
    host, port = url.removeprefix("http://").split(":")
    return host, int(port)


@contextmanager
def connected(url: str, timeout: float = 20.0):
    with socket.create_connection(address(url), timeout=timeout) as connection:
        yield connection


def get(path: str, *headers: bytes) -> bytes:
    return b"\r\n".join([b"GET %s HTTP/1.1" % path.encode(), b"host: x", *headers, b"", b""])


def post(path: str, body: Any, *headers: bytes, version: bytes = b"1.1") -> bytes:
    raw = json.dumps(body).encode()
    lines = [b"POST %s HTTP/%s" % (path.encode(), version), b"host: x", b"content-type: application/json", *headers]
    return b"\r\n".join([*lines, b"content-length: %d" % len(raw), b"", raw])


def rest(connection: socket.socket) -> bytes:
    """Reads until the server ends the connection."""
    found = bytearray()
    try:
        while part := connection.recv(65536):
            found += part
    except ConnectionResetError:
        found += b"(reset)"
    return bytes(found)


def request_json(url: str, request: bytes) -> tuple[int, Any]:
    """Status and body of one request on a connection of its own, which is half-closed at once."""
    with connected(url) as connection:
        connection.sendall(request)
        head, _, body = rest(connection).partition(b"\r\n\r\n") if b"connection: close" in request else one(connection)
        return status_of(head), json.loads(body)


def one(connection: socket.socket) -> tuple[bytes, bytes, bytes]:
    """Head and body of one answer that says its length."""
    found = b""
    while b"\r\n\r\n" not in found:
        part = connection.recv(65536)
        assert part, f"the connection ended within a head: {found!r}"
        found += part
    head, gap, body = found.partition(b"\r\n\r\n")
    (length,) = (int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
    while len(body) < length:
        part = connection.recv(65536)
        assert part, "the connection ended within a body"
        body += part
    return head, gap, body


def status_of(head: bytes) -> int:
    return int(head.split(b" ")[1])


def until(holds: Callable[[], bool], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.005)
    return holds()
