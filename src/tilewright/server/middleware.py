"""ASGI middleware: request ids, access log, API keys, and handling of unexpected exceptions."""

import hmac
import logging
import re
import time
import uuid
from collections.abc import Iterable
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tilewright.server.errors import ApiError, internal_error, is_messages, overloaded

log = logging.getLogger("tilewright.server")
access = logging.getLogger("tilewright.access")
"""Access log: one line per request, at level INFO."""
access.setLevel(logging.WARNING)

CLIENT_GONE = 499
"""Status in the access log for clients that disconnected before the response."""
BEARER = re.compile(rb"(?i:bearer) +(.*)", re.DOTALL)
CROWDED = "crowded"
"""Key in the state of connections above the limit, whose requests are refused."""
OPEN_PATHS = frozenset({"/", "/health", "/ready", "/ping"})
"""Paths that need no API key: probes, and the chat page, in which users enter the key."""


class RequestIds:
    """Assigns request ids, logs unhandled exceptions, and writes the access log.

    The id is in `scope["state"]["request_id"]` and in the response header `x-request-id`.
    """

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = uuid.uuid4().hex
        status = 0
        started_at = time.monotonic()
        scope.setdefault("state", {})["request_id"] = request_id

        async def sent(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                names = [b"x-request-id"]
                if is_messages(scope["path"]):  # the header name of Anthropic's clients
                    names.append(b"request-id")
                message["headers"] = [*message.get("headers", ()), *((name, request_id.encode()) for name in names)]
            await send(message)

        try:
            await self.app(scope, receive, sent)
        except Exception:
            log.exception("request %s failed", request_id)
            if not status:
                await internal_error().response(scope)(scope, receive, sent)
        finally:
            if access.isEnabledFor(logging.INFO):
                ms = 1000 * (time.monotonic() - started_at)
                tokens = scope["state"].get("tokens", lambda: "")
                access.info("%s %s %d %.0f ms%s", scope["method"], quote(scope["path"]), status or CLIENT_GONE, ms, tokens())


class RequestChecks:
    """Refuses requests with two body lengths, and all requests except probes on connections above the limit.

    With two body lengths, proxies and servers may disagree about the start of the next request (request smuggling).
    """

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = None if scope["type"] != "http" else self.error(scope)
        if refused is None:
            await self.app(scope, receive, send)
        else:
            refused.headers["connection"] = "close"
            await refused.response(scope)(scope, receive, send)

    def error(self, scope: Scope) -> ApiError | None:
        names = {name for name, _ in scope["headers"]}
        if {b"content-length", b"transfer-encoding"} <= names:
            return ApiError(400, "expected either Content-Length or Transfer-Encoding, found both", "invalid_http")
        if scope["state"].get(CROWDED) and scope["path"] not in OPEN_PATHS:
            return overloaded()
        return None


class ApiKeys:
    """Refuses requests without a valid API key, except for `OPEN_PATHS`. `scope["state"]["key"]` is the index of the key.

    Args:
        keys: at least one key.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str]):
        self.app = app
        self.keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (key := self.key_index(scope)) is not None:
            scope["state"]["key"] = key
        elif scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            expected = "Authorization: Bearer KEY, or x-api-key: KEY"
            refused = ApiError(401, f"expected a valid API key: {expected}", "invalid_api_key")
            refused.headers["www-authenticate"] = "Bearer"
            await refused.response(scope)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def key_index(self, scope: Scope) -> int | None:
        """Returns the index of the request's API key; None without a valid key.

        The key is in the only Authorization header or the only x-api-key header (Anthropic's).

        The comparison takes constant time.
        """
        offered = [
            match[1] for value in single_header(scope, b"authorization") if (match := BEARER.fullmatch(value)) is not None
        ]
        offered += single_header(scope, b"x-api-key")
        matches = [any([hmac.compare_digest(one, key) for one in offered]) for key in self.keys]  # noqa: C419
        return matches.index(True) if True in matches else None


def single_header(scope: Scope, header: bytes) -> list[bytes]:
    """Returns the value of a header that occurs exactly once, as a list; an empty list otherwise."""
    found = [value for name, value in scope["headers"] if name == header]
    return found if len(found) == 1 else []
