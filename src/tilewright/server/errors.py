"""Errors in OpenAI's format (`{"error": {"message", "type", "param", "code"}}`) and in Anthropic's."""

import json
import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ValidationError
from starlette.responses import Response
from starlette.types import Scope

ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
"""Error `type` by HTTP status; "invalid_request_error" for other statuses below 500, "server_error" from 500."""
MESSAGES = "/v1/messages"
MESSAGES_ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 504: "timeout_error"}
"""Error `type` of Anthropic's API by HTTP status; "invalid_request_error" for others below 500, "api_error" from 500."""
NO_THREADS: dict[str, str | list[str]] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
LONGEST_VALUE = 60
"""Largest number of characters of an invalid value in an error message."""


class ErrorFields(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Body of an error response."""

    error: ErrorFields


class MessagesErrorFields(ErrorFields):
    """Fields of an error of Anthropic's API. Clients read `details` to continue without a thread."""

    details: dict[str, str | list[str]] | None


class MessagesErrorBody(BaseModel):
    """Body of an error response of Anthropic's API."""

    type: Literal["error"]
    error: MessagesErrorFields
    request_id: str


class ApiError(Exception):
    """Error response.

    Attributes:
        status: HTTP status.
        message: message for the client, without internals of the server.
        code: machine-readable error code.
        param: path of the invalid field, such as `messages[0].content`.
        headers: further response headers.
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
        kind = ERROR_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return ErrorBody(error=ErrorFields(message=self.message, type=kind, param=self.param, code=self.code))

    def messages_body(self, request_id: str) -> MessagesErrorBody:
        kind = MESSAGES_ERROR_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        if self.code == "server_overloaded":
            kind = "overloaded_error"
        details = NO_THREADS if self.param == "thread" else None
        found = MessagesErrorFields(message=self.message, type=kind, param=self.param, code=self.code, details=details)
        return MessagesErrorBody(type="error", error=found, request_id=request_id)

    def response(self, scope: Scope | None = None) -> Response:
        """Makes the response, in Anthropic's format for routes of Anthropic's API, else in OpenAI's."""
        body: BaseModel = self.body
        if scope is not None and is_messages(scope["path"]):
            body = self.messages_body(scope["state"]["request_id"])
        return Response(body.model_dump_json(), self.status, self.headers, "application/json")


def is_messages(path: str) -> bool:
    """True for paths of Anthropic's API."""
    return path == MESSAGES or path.startswith(f"{MESSAGES}/")


def overloaded(retry_after_s: float = 1.0) -> ApiError:
    retry = {"retry-after": str(max(1, round(retry_after_s)))}
    return ApiError(503, "the server's queue is full; try again later", "server_overloaded", None, retry)


def internal_error() -> ApiError:
    """Makes the error for unexpected exceptions, without internals of the server."""
    return ApiError(500, "internal server error", "internal_error")


def format_value(value: Any) -> str:
    """Formats an invalid value for an error message."""
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return "an object"
    text = json.dumps(value[: LONGEST_VALUE + 1] if isinstance(value, str) else value)
    return text if len(text) <= LONGEST_VALUE else text[:LONGEST_VALUE] + "..."


def field_path(location: tuple[int | str, ...]) -> str | None:
    """Formats the path of a field, such as `messages[0].content`; None for the body itself."""
    name = ""
    for part in location:
        name += f"[{part}]" if isinstance(part, int) else f".{part[:LONGEST_VALUE]}"
    return name.removeprefix(".") or None


def invalid_body(error: ValidationError) -> ApiError:
    """Makes the error response for the first validation error of a body."""
    first = error.errors(include_url=False)[0]
    kind = first["type"]
    param = field_path(first["loc"])
    if kind == "json_invalid":
        return ApiError(400, f"expected a JSON object: {first['msg'].removeprefix('Invalid JSON: ')}", "invalid_json")
    if kind == "missing":
        return ApiError(400, f"missing required parameter: '{param}'", "missing_required_parameter", param)
    if kind == "extra_forbidden":
        return ApiError(400, f"unknown parameter: '{param}'", "unknown_parameter", param)
    if kind == "unsupported":
        return ApiError(400, f"'{param}' {first['msg']}", "unsupported_parameter", param)
    message = first["msg"][:1].lower() + first["msg"][1:]
    message = re.sub("^input should be (?=greater|less)", "expected a value ", message)
    message = message.replace("input should be", "expected").replace("input should", "the value should")
    field = "the body" if param is None else f"'{param}'"
    code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    return ApiError(400, f"{field}: {message}, found {format_value(first['input'])}", code, param)
