"""The OpenAPI description: bodies as `protocol.py` declares them, narrowed to the model that is served."""

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


def takes(body: type[BaseModel]) -> Json:
    """The part of a route's description that says what it takes; the route reads the body by itself."""
    content = {"application/json": {"schema": {"$ref": REFERENCE.format(model=body.__name__)}}}
    return {"requestBody": {"required": True, "content": content}}


def errors(*statuses: int, body: type[BaseModel] = ErrorBody) -> dict[int | str, Json]:
    """The part that says which statuses a route may answer with besides 200."""
    return {status: {"model": body} for status in statuses}


def describe(app: FastAPI, generating: Sequence[type[BaseModel]], models: Sequence[str], vocab: int) -> Callable[[], Json]:
    """Function that gives the app's OpenAPI description.

    Args:
        generating: the bodies of the routes that generate.
        models: names that bodies may have as their model's.
        vocab: token ids are below it.
    """

    def described() -> Json:
        if app.openapi_schema is None:
            made = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            _, bodies = models_json_schema([(body, "validation") for body in (*generating, *BODIES)], ref_template=REFERENCE)
            for schema in bodies["$defs"].values():
                narrow(schema, models, vocab)
            made["components"]["schemas"] |= bodies["$defs"]
            app.openapi_schema = made
        return app.openapi_schema

    return described


def narrow(schema: Any, models: Sequence[str], vocab: int) -> None:
    """Says of the model's name and of token ids what holds here."""
    if isinstance(schema, list):
        for each in schema:
            narrow(each, models, vocab)
    elif isinstance(schema, Mapping):
        properties = schema.get("properties", {})
        if isinstance(properties.get("model"), dict):
            properties["model"] = {"anyOf": [{"type": "string", "enum": list(models)}, {"type": "null"}]}
        if schema.get("title") == TOKEN_ID:
            del schema["exclusiveMaximum"]  # type: ignore[attr-defined]
            schema["maximum"] = vocab - 1  # type: ignore[index]
        for each in schema.values():
            narrow(each, models, vocab)
