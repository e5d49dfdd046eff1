"""What surrounds every request: its id, its key, and the last resort for errors. Plain ASGI, on the path as it came."""

import hmac
import logging
import re
import uuid
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tilewright.server.errors import ApiError

log = logging.getLogger("tilewright.server")

OPEN_PATHS = frozenset({"/", "/health", "/ready"})
"""What needs no key: probes and browsers have none, and learn no more than a status, and the page that asks for one."""


class RequestIds:
    """Gives each request an id of the server's own, in `scope["state"]["request_id"]` and the answer's `x-request-id`.

    An exception that nothing else handled ends here: in the log, under that id.
    """

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id, begun = uuid.uuid4().hex, False
        scope.setdefault("state", {})["request_id"] = request_id

        async def sent(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self.app(scope, receive, sent)
        except Exception:
            log.exception("request %s failed", request_id)
            if not begun:
                await internal_error().response()(scope, receive, sent)


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
        """Whether the request has exactly one Authorization header, with a key. It takes as long for one key as for another."""
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        match = re.fullmatch(rb"(?i:bearer) +(.*)", given[0], re.DOTALL) if len(given) == 1 else None
        offered = b"" if match is None else match[1]
        matches = [hmac.compare_digest(offered, key) for key in self.keys]
        return match is not None and any(matches)
