"""Errors in the form that OpenAI's clients read: `{"error": {"message", "type", "param", "code"}}`."""

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from starlette.responses import Response

KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
"""The error's `type`, by status; other statuses below 500 are "invalid_request_error", those from 500 on "server_error"."""
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


class ApiError(Exception):
    """An answer that is an error.

    Attributes:
        status: of HTTP.
        message: for the client; it tells nothing of the server's inside.
        code: a word that programs can tell errors apart by.
        param: the field that is wrong, if one is: `messages[0].content`.
    """

    def __init__(
        self, status: int, message: str, code: str | None = None, param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):  # fmt: skip
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers = dict(headers or {})

    @property
    def body(self) -> ErrorBody:
        kind = KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return ErrorBody(error=ErrorFields(message=self.message, type=kind, param=self.param, code=self.code))

    def response(self) -> Response:
        return Response(self.body.model_dump_json(), self.status, self.headers, "application/json")


def overloaded(retry_after_s: float = 1.0) -> ApiError:
    retry = {"retry-after": str(max(1, round(retry_after_s)))}
    return ApiError(503, "the server has more requests than it can queue; try again later", "server_overloaded", None, retry)


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
    kind, param = first["type"], field_name(first["loc"])
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
