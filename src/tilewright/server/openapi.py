"""OpenAPI schema of the server, with the bounds of the served model."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from tilewright.server.embeddings import EmbeddingsBody, ScoreBody
from tilewright.server.errors import ErrorBody
from tilewright.server.messages_body import CountBody, MessagesBody
from tilewright.server.protocol import TOKEN_ID, DetokenizeBody, TokenizeBody
from tilewright.server.responses_body import ResponsesBody

BODIES: tuple[type[BaseModel], ...] = (
    DetokenizeBody,
    TokenizeBody,
    MessagesBody,
    CountBody,
    ResponsesBody,
    EmbeddingsBody,
    ScoreBody,
)
REFERENCE = "#/components/schemas/{model}"

Json = dict[str, Any]


def request_body(body: type[BaseModel]) -> Json:
    """Returns the OpenAPI description of a request body, for routes that read the body themselves."""
    content = {"application/json": {"schema": {"$ref": REFERENCE.format(model=body.__name__)}}}
    return {"requestBody": {"required": True, "content": content}}


def error_responses(*statuses: int, body: type[BaseModel] = ErrorBody) -> dict[int | str, Json]:
    """Returns the OpenAPI description of a route's error statuses."""
    return {status: {"model": body} for status in statuses}


def describe(app: FastAPI, generating: Sequence[type[BaseModel]], models: Sequence[str], vocab: int) -> Callable[[], Json]:
    """Returns a function that builds the app's OpenAPI schema on first use.

    Args:
        generating: body classes of completions and chats.
        models: valid model names.
        vocab: vocabulary size, the bound of token ids.
    """

    def described() -> Json:
        if app.openapi_schema is None:
            found = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            _, bodies = models_json_schema([(body, "validation") for body in (*generating, *BODIES)], ref_template=REFERENCE)
            for schema in bodies["$defs"].values():
                narrow(schema, models, vocab)
            found["components"]["schemas"] |= bodies["$defs"]
            app.openapi_schema = found
        return app.openapi_schema

    return described


def narrow(schema: Any, models: Sequence[str], vocab: int) -> None:
    """Sets the valid model names and the bound of token ids in a schema."""
    if isinstance(schema, list):
        for each in schema:
            narrow(each, models, vocab)
    elif isinstance(schema, Mapping):
        properties = schema.get("properties", {})
        if isinstance(properties.get("model"), dict):
            properties["model"] |= {"anyOf": [{"type": "string", "enum": list(models)}, {"type": "null"}]}
            properties["model"].pop("default", None)
        if schema.get("title") == TOKEN_ID:
            del schema["exclusiveMaximum"]  # type: ignore[attr-defined]
            schema["maximum"] = vocab - 1  # type: ignore[index]
        for each in schema.values():
            narrow(each, models, vocab)
