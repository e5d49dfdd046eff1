"""Errors in the form that OpenAI's clients read: `{"error": {"message", "type", "param", "code"}}`."""

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ValidationError
from starlette.responses import Response
from starlette.types import Scope

KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
"""The error's `type`, by status; other statuses below 500 are "invalid_request_error", those from 500 on "server_error"."""
MESSAGES = "/v1/messages"
MESSAGES_KINDS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 504: "timeout_error"}
"""The same of Anthropic's API, whose others from 500 on are "api_error"."""
NO_THREADS: dict[str, str | list[str]] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
SHOWN = 60
"""Characters of a wrong value that come back."""


class ErrorFields(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every answer that is an error."""

    error: ErrorFields


class MessagesErrorFields(ErrorFields):
    """Fields of an error of Anthropic's API, with those of the others; its clients read `details` to go on without a thread."""

    details: dict[str, str | list[str]] | None


class MessagesErrorBody(BaseModel):
    """The body of an error of Anthropic's API."""

    type: Literal["error"]
    error: MessagesErrorFields
    request_id: str


class ApiError(Exception):
    """An answer that is an error.

    Attributes:
        status: of HTTP.
        message: for the client; it tells nothing of the server's inside.
        code: a word that programs can tell errors apart by.
        param: the field that is wrong, if one is: `messages[0].content`.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    @property
    def body(self) -> ErrorBody:
        kind = KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return ErrorBody(error=ErrorFields(message=self.message, type=kind, param=self.param, code=self.code))

    def messages_body(self, request_id: str) -> MessagesErrorBody:
        kind = MESSAGES_KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        if self.code == "server_overloaded":
            kind = "overloaded_error"
        details = NO_THREADS if self.param == "thread" else None
        found = MessagesErrorFields(message=self.message, type=kind, param=self.param, code=self.code, details=details)
        return MessagesErrorBody(type="error", error=found, request_id=request_id)

    def response(self, scope: Scope | None = None) -> Response:
        """The answer to a request, in the form of its API; to what is no request in OpenAI's."""
        body: BaseModel = self.body
        if scope is not None and is_messages(scope["path"]):
            body = self.messages_body(scope["state"]["request_id"])
        return Response(body.model_dump_json(), self.status, self.headers, "application/json")


def is_messages(path: str) -> bool:
    """Whether a path belongs to Anthropic's API."""
    return path == MESSAGES or path.startswith(f"{MESSAGES}/")


def overloaded(retry_after_s: float = 1.0) -> ApiError:
    retry = {"retry-after": str(max(1, round(retry_after_s)))}
    return ApiError(503, "the server has more requests than it can queue; try again later", "server_overloaded", None, retry)


def internal_error() -> ApiError:
    """All that a client is told of an error that is nobody's but the server's."""
    return ApiError(500, "the server failed on this request", "internal_error")


def shown(value: Any) -> str:
    """A wrong value, short."""
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return "an object"
    text = json.dumps(value[: SHOWN + 1] if isinstance(value, str) else value)
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


def field_name(place: tuple[int | str, ...]) -> str | None:
    """Name of a place in the body: `messages[0].content`; None for the body itself."""
    name = ""
    for part in place:
        name += f"[{part}]" if isinstance(part, int) else f".{part[:SHOWN]}"
    return name.removeprefix(".") or None


def invalid_body(error: ValidationError) -> ApiError:
    """Error of the first thing that is wrong in a body."""
    first = error.errors(include_url=False)[0]
    kind = first["type"]
    param = field_name(first["loc"])
    if kind == "json_invalid":
        return ApiError(400, f"expected a JSON object: {first['msg'].removeprefix('Invalid JSON: ')}", "invalid_json")
    if kind == "missing":
        return ApiError(400, f"missing required parameter: '{param}'", "missing_required_parameter", param)
    if kind == "extra_forbidden":
        return ApiError(400, f"unknown parameter: '{param}'", "unknown_parameter", param)
    if kind == "not_offered":
        return ApiError(400, f"'{param}' {first['msg']}", "unsupported_parameter", param)
    said = first["msg"][:1].lower() + first["msg"][1:]
    where = "the body" if param is None else f"'{param}'"
    code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    return ApiError(400, f"{where}: {said.replace('input should', 'it should')}, found {shown(first['input'])}", code, param)
