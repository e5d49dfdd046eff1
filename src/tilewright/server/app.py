"""FastAPI application: routes, error handlers and middleware."""

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp

from tilewright.server.api import Api
from tilewright.server.errors import ApiError, internal_error
from tilewright.server.middleware import CLIENT_GONE, ApiKeys, RequestChecks, RequestIds
from tilewright.server.openapi import describe
from tilewright.server.routes import (
    embedding_routes,
    generation_routes,
    messages_routes,
    model_routes,
    page_routes,
    responses_routes,
    state_routes,
    stored_routes,
    token_routes,
)
from tilewright.server.stream import Disconnected


def make_app(api: Api) -> ASGIApp:
    """Builds the application: routes, error handlers, and middleware for API keys, CORS, request ids and the access log."""
    # FastAPI's documentation pages are disabled because they load scripts from other hosts.
    routes = FastAPI(
        title="Tilewright",
        version=api.options.version,
        description="OpenAI's and Anthropic's APIs for one model, with the extensions of vLLM's server.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    for group in (
        generation_routes,
        messages_routes,
        responses_routes,
        stored_routes,
        token_routes,
        model_routes,
        state_routes,
    ):
        routes.include_router(group(api))
    if api.engine.decoding.embeds:
        routes.include_router(embedding_routes(api))
    routes.include_router(page_routes())
    routes.add_exception_handler(ApiError, api_error)
    routes.add_exception_handler(HTTPException, http_error)
    routes.add_exception_handler(Disconnected, client_gone)
    routes.add_exception_handler(ClientDisconnect, client_gone)
    routes.add_exception_handler(Exception, failure)
    routes.openapi = describe(routes, (api.completion_body, api.chat_body), api.models, api.engine.vocab_size)
    app: ASGIApp = routes
    if api.options.api_keys:
        app = ApiKeys(app, api.options.api_keys)
    if api.options.origins:
        # OpenAI's JavaScript client sends headers that differ between versions and have no effect here.
        app = CORSMiddleware(
            app, api.options.origins, ("GET", "HEAD", "POST", "DELETE"), ("*",), expose_headers=("x-request-id",)
        )
    return RequestIds(RequestChecks(app))


async def api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response(request.scope)


async def http_error(request: Request, error: Exception) -> Response:
    """Handles unknown routes and methods."""
    assert isinstance(error, HTTPException)
    path = request.scope["path"][:100]
    messages = {404: f"unknown route: {path}", 405: f"{path} does not support the method {request.method[:20]}"}
    message = messages.get(error.status_code, str(error.detail))
    return ApiError(error.status_code, message, None, None, error.headers).response(request.scope)


async def failure(request: Request, error: Exception) -> Response:
    """Handles unexpected exceptions. Starlette re-raises them to `RequestIds`, which logs them."""
    return internal_error().response(request.scope)


async def client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)
