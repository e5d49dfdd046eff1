"""The application: routes, the form of errors, and what surrounds them."""

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp

from tilewright.server.api import Api
from tilewright.server.errors import ApiError, internal_error
from tilewright.server.middleware import CLIENT_GONE, Checks, Keys, RequestIds
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
    """All routes, behind keys if there are any; the outermost layer gives every request its id."""
    # The pages that FastAPI offers for its description load scripts from elsewhere.
    routes = FastAPI(
        title="Tilewright",
        version=api.options.version,
        description="For OpenAI's clients.",
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
    if api.engine.embeds:
        routes.include_router(embedding_routes(api))
    routes.include_router(page_routes())
    routes.add_exception_handler(ApiError, api_error)
    routes.add_exception_handler(HTTPException, http_error)
    routes.add_exception_handler(Disconnected, nobody)
    routes.add_exception_handler(ClientDisconnect, nobody)
    routes.add_exception_handler(Exception, failure)
    routes.openapi = describe(routes, (api.completion_body, api.chat_body), api.models, api.engine.vocab_size)
    app: ASGIApp = routes
    if api.options.api_keys:
        app = Keys(app, api.options.api_keys)
    if api.options.origins:
        # OpenAI's client for JavaScript sends more headers with each version. None of them means anything here.
        app = CORSMiddleware(
            app, api.options.origins, ("GET", "HEAD", "POST", "DELETE"), ("*",), expose_headers=("x-request-id",)
        )
    return RequestIds(Checks(app))


async def api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response(request.scope)


async def http_error(request: Request, error: Exception) -> Response:
    """No such route, or no such method there."""
    assert isinstance(error, HTTPException)
    said = {404: f"there is no {request.scope['path'][:100]}", 405: f"{request.method[:20]} is not a method of this route"}
    message = said.get(error.status_code, str(error.detail))
    return ApiError(error.status_code, message, None, None, error.headers).response(request.scope)


async def failure(request: Request, error: Exception) -> Response:
    """The exception itself goes on to the outermost layer, which logs it."""
    return internal_error().response(request.scope)


async def nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)
