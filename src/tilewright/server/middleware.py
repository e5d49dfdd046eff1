"""Middleware of every request: its id, its line in the log, its key, the last resort for errors.

Plain ASGI, on the path as it came.
"""

import hmac
import logging
import re
import time
import uuid
from collections.abc import Iterable
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tilewright.server.errors import ApiError, overloaded

log = logging.getLogger("tilewright.server")
access = logging.getLogger("tilewright.access")
"""A line for each request, at level INFO."""
access.setLevel(logging.WARNING)

CLIENT_GONE = 499
"""The status that nobody reads: the client has gone."""
CROWDED = "crowded"
"""Key in the state of a connection where too many are being answered."""
OPEN_PATHS = frozenset({"/", "/health", "/ready"})
"""Paths that need no key: probes and browsers have none, and learn no more than a status, and the page that asks for one."""


class RequestIds:
    """Gives each request an id of the server's own, in `scope["state"]["request_id"]` and the answer's `x-request-id`.

    An exception that nothing else handled ends here: in the log, under that id. So does every request, in the access log.
    """

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id, status, began = uuid.uuid4().hex, 0, time.monotonic()
        scope.setdefault("state", {})["request_id"] = request_id

        async def sent(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self.app(scope, receive, sent)
        except Exception:
            log.exception("request %s failed", request_id)
            if not status:
                await internal_error().response()(scope, receive, sent)
        finally:
            if access.isEnabledFor(logging.INFO):
                ms = 1000 * (time.monotonic() - began)
                tokens = scope["state"].get("tokens", lambda: "")
                access.info("%s %s %d %.0f ms%s", scope["method"], quote(scope["path"]), status or CLIENT_GONE, ms, tokens())


class Checks:
    """Refuses what no route should see.

    A body with two lengths makes proxies and servers disagree where the next request begins. Connections that are too many are
    there for probes alone.
    """

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = None if scope["type"] != "http" else self.refused(scope)
        if refused is None:
            await self.app(scope, receive, send)
        else:
            refused.headers["connection"] = "close"
            await refused.response()(scope, receive, send)

    def refused(self, scope: Scope) -> ApiError | None:
        names = {name for name, _ in scope["headers"]}
        if {b"content-length", b"transfer-encoding"} <= names:
            return ApiError(400, "expected either Content-Length or Transfer-Encoding, found both", "invalid_http")
        if scope["state"].get(CROWDED) and scope["path"] not in OPEN_PATHS:
            return overloaded()
        return None


def internal_error() -> ApiError:
    """All that a client is told of an error that is nobody's but the server's."""
    return ApiError(500, "the server failed on this request", "internal_error")


class Keys:
    """Lets nothing pass without one of the keys, but `OPEN_PATHS`.

    Args:
        keys: at least one.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str]):
        self.app, self.keys = app, [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and not self.known(scope):
            refused = ApiError(401, "a valid API key is required: Authorization: Bearer KEY", "invalid_api_key")
            refused.headers["www-authenticate"] = "Bearer"
            await refused.response()(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def known(self, scope: Scope) -> bool:
        """True if the request has exactly one Authorization header, with a key. It takes as long for one key as for another."""
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        match = re.fullmatch(rb"(?i:bearer) +(.*)", given[0], re.DOTALL) if len(given) == 1 else None
        offered = b"" if match is None else match[1]
        matches = [hmac.compare_digest(offered, key) for key in self.keys]
        return match is not None and any(matches)
