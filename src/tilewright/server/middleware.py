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

from tilewright.server.errors import ApiError, internal_error, is_messages, overloaded

log = logging.getLogger("tilewright.server")
access = logging.getLogger("tilewright.access")
"""A line for each request, at level INFO."""
access.setLevel(logging.WARNING)

CLIENT_GONE = 499
"""The status that nobody reads: the client has gone."""
BEARER = re.compile(rb"(?i:bearer) +(.*)", re.DOTALL)
CROWDED = "crowded"
"""Key in the state of a connection where too many are being answered."""
OPEN_PATHS = frozenset({"/", "/health", "/ready", "/ping"})
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
        request_id = uuid.uuid4().hex
        status = 0
        began = time.monotonic()
        scope.setdefault("state", {})["request_id"] = request_id

        async def sent(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                names = [b"x-request-id"]
                if is_messages(scope["path"]):  # whose clients know it by another name
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
            await refused.response(scope)(scope, receive, send)

    def refused(self, scope: Scope) -> ApiError | None:
        names = {name for name, _ in scope["headers"]}
        if {b"content-length", b"transfer-encoding"} <= names:
            return ApiError(400, "expected either Content-Length or Transfer-Encoding, found both", "invalid_http")
        if scope["state"].get(CROWDED) and scope["path"] not in OPEN_PATHS:
            return overloaded()
        return None


class Keys:
    """Lets nothing pass without one of the keys, but `OPEN_PATHS`; which it was is in `scope["state"]["key"]`.

    Args:
        keys: at least one.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str]):
        self.app = app
        self.keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (key := self.known(scope)) is not None:
            scope["state"]["key"] = key
        elif scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            expected = "Authorization: Bearer KEY, or x-api-key: KEY"
            refused = ApiError(401, f"a valid API key is required: {expected}", "invalid_api_key")
            refused.headers["www-authenticate"] = "Bearer"
            await refused.response(scope)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def known(self, scope: Scope) -> int | None:
        """Number of the key that the request brings in its only Authorization header, or its only x-api-key (Anthropic's).

        It takes as long for one key as for another.
        """
        offered = [match[1] for value in only(scope, b"authorization") if (match := BEARER.fullmatch(value)) is not None]
        offered += only(scope, b"x-api-key")
        matches = [any([hmac.compare_digest(one, key) for one in offered]) for key in self.keys]  # noqa: C419
        return matches.index(True) if True in matches else None


def only(scope: Scope, header: bytes) -> list[bytes]:
    """The value of a header that is there once."""
    found = [value for name, value in scope["headers"] if name == header]
    return found if len(found) == 1 else []
