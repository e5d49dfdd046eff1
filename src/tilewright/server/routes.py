"""The routes, in groups: generating, tokens, the model, and the server's own state."""

from dataclasses import asdict
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from tilewright.diffusion.engine import DiffusionEngine
from tilewright.models.tokenizer import encode
from tilewright.server.api import Api
from tilewright.server.errors import ApiError
from tilewright.server.metrics import text_of
from tilewright.server.openapi import errors, takes
from tilewright.server.page import CSP, PAGE
from tilewright.server.parse import contents, rendered, rough_tokens
from tilewright.server.protocol import DetokenizeBody, GenerationBody, TokenizeBody
from tilewright.server.render import ChatRenderer, CompletionRenderer, Renderer
from tilewright.server.responses import (
    Answer,
    Chat,
    Completion,
    DefaultSamplingParams,
    Detokenized,
    Health,
    ModelCard,
    ModelList,
    Ready,
    Tokenized,
    TokenizerInfo,
    Version,
)
from tilewright.server.stream import EventStream, collected, events, unless_gone

READING = (400, 404, 408, 413, 415)
"""Statuses of what can be wrong with a body."""
TOKENISING = (*READING, 503)
GENERATING = (*TOKENISING, 500, 504)
EVENTS = {"text/event-stream": {"schema": {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}}}
"""A stream: each event's data is a chunk, as JSON; the last one's is [DONE]."""


def answer(body: Answer) -> Response:
    return Response(body.json_bytes, media_type="application/json")


async def generated(api: Api, request: Request, body: GenerationBody, make: type[Renderer]) -> Response:
    """Runs a body's requests and answers in a form."""
    parsed, running = await api.start(body, request.state.long)
    renderer = make(api.served, request.state.request_id, parsed, running.handles)
    request.state.tokens = renderer.tokens_shown
    if body.stream:
        return EventStream(events(running, renderer, body.stream_options), running)
    try:
        return await unless_gone(request.receive, collected(running, renderer))
    finally:
        running.cancel()


def generation_routes(api: Api) -> APIRouter:
    router = APIRouter(tags=["generation"])

    @router.post(
        "/v1/completions",
        openapi_extra=takes(api.completion_body),
        responses={200: {"model": Completion, "content": EVENTS}, **errors(*GENERATING)},
    )
    async def completions(request: Request) -> Response:
        """Continues one prompt or several."""
        return await generated(api, request, await api.body(request, api.completion_body), CompletionRenderer)

    @router.post(
        "/v1/chat/completions",
        openapi_extra=takes(api.chat_body),
        responses={200: {"model": Chat, "content": EVENTS}, **errors(*GENERATING)},
    )
    async def chats(request: Request) -> Response:
        """Answers a conversation, put into the model's chat template."""
        return await generated(api, request, await api.body(request, api.chat_body), ChatRenderer)

    return router


def token_routes(api: Api) -> APIRouter:
    router, engine = APIRouter(tags=["tokens"]), api.engine

    def tokenized(body: TokenizeBody) -> Response:
        special, text = body.add_special_tokens, body.prompt
        if text is None:
            special, text = bool(special), rendered(body.messages or (), body, api.options.template)
        tokens = encode(engine.tokenizer, text, special is not False)
        strings = [api.served.texts.text(token) for token in tokens] if body.return_token_strs else None
        return answer(Tokenized(count=len(tokens), max_model_len=engine.context, tokens=tokens, token_strs=strings))

    @router.post("/tokenize", openapi_extra=takes(TokenizeBody), responses={200: {"model": Tokenized}, **errors(*TOKENISING)})
    async def tokenize(request: Request) -> Response:
        """The tokens of a text, or of a conversation in the model's chat template."""
        body = await api.body(request, TokenizeBody)
        if (body.prompt is None) == (body.messages is None):
            found = "neither" if body.prompt is None else "both"
            raise ApiError(400, f"expected either prompt or messages, found {found}", "invalid_value", "prompt")
        text = contents(body.messages or ()) if body.prompt is None else body.prompt
        return await api.tokenised(rough_tokens(text), partial(tokenized, body))

    def detokenized(body: DetokenizeBody) -> Response:
        try:
            tokens = engine.encode(body.tokens) if body.tokens else []
        except ValueError as error:
            raise ApiError(400, f"'tokens': {error}", "invalid_value", "tokens") from error
        # `decode` would keep the interpreter's lock.
        (text,) = engine.tokenizer.decode_batch([tokens], skip_special_tokens=False)
        return answer(Detokenized(prompt=text))

    @router.post(
        "/detokenize", openapi_extra=takes(DetokenizeBody), responses={200: {"model": Detokenized}, **errors(*TOKENISING)}
    )
    async def detokenize(request: Request) -> Response:
        """The text of tokens, special ones included."""
        body = await api.body(request, DetokenizeBody)
        return await api.tokenised(len(body.tokens), partial(detokenized, body))

    @router.get("/tokenizer_info", responses={200: {"model": TokenizerInfo}})
    async def tokenizer_info() -> Response:
        """The special tokens that clients which tokenise here ask for."""
        ends = engine.eos_token_ids
        eos = engine.tokenizer.id_to_token(ends[0]) if ends else None
        named = api.options.template.special_tokens if api.options.template is not None else {}
        return answer(TokenizerInfo(bos_token=named.get("bos_token"), eos_token=eos, pad_token=named.get("pad_token")))

    return router


def page_routes() -> APIRouter:
    router = APIRouter()
    headers = {"content-security-policy": CSP, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}

    @router.head("/", include_in_schema=False)
    @router.get("/", include_in_schema=False)
    async def page() -> Response:
        """The page to chat with the server; it holds nothing that needs a key."""
        return Response(PAGE, media_type="text/html; charset=utf-8", headers=headers)

    return router


def model_routes(api: Api) -> APIRouter:
    router = APIRouter(tags=["models"])

    def model() -> ModelCard:
        about: dict[str, Any] = {"created": api.served.created, "owned_by": "tilewright", "max_model_len": api.engine.context}
        if not isinstance(api.engine, DiffusionEngine):
            about["sampling_defaults"] = DefaultSamplingParams.model_validate(asdict(api.options.sampling))
        return ModelCard(id=api.options.name, object="model", **about)

    @router.head("/v1/models", include_in_schema=False)
    @router.get("/v1/models", responses={200: {"model": ModelList}})
    async def models() -> Response:
        """The one model that is served."""
        return answer(ModelList(object="list", data=[model()]))

    @router.get("/v1/models/{name:path}", responses={200: {"model": ModelCard}, **errors(404)})
    async def named(name: str) -> Response:
        """The model of this name."""
        if name != api.options.name:
            api.model_unknown(name)
        return answer(model())

    return router


def state_routes(api: Api) -> APIRouter:
    router = APIRouter(tags=["state"])

    @router.head("/health", include_in_schema=False)
    @router.get("/health", responses={200: {"model": Health}, **errors(503)})
    async def health() -> Response:
        """Whether the engine is alive: warming up, or stepping."""
        if api.engine.ending and not api.stopping:
            raise ApiError(503, "the engine has ended; the log says why", "engine_stuck")
        if not api.engine.ready:
            return answer(Health(status="warming", step_age_s=None))
        age = api.engine.stats().step_age_s
        if age > api.options.stale_s and not api.stopping:
            raise ApiError(503, f"the engine's last step was {age:.0f} s ago", "engine_stuck")
        return answer(Health(status="ok", step_age_s=age))

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready", responses={200: {"model": Ready}, **errors(503)})
    async def ready() -> Response:
        """Whether requests are served: all programs are compiled, and the server is not stopping."""
        api.check_serving()
        return answer(Ready(status="ready"))

    @router.get("/metrics", responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}})
    async def metrics() -> Response:
        """Metrics for Prometheus."""
        return Response(text_of(api.registry), media_type=CONTENT_TYPE_LATEST)

    @router.get("/version", responses={200: {"model": Version}})
    async def version() -> Response:
        """The version of this software."""
        return answer(Version(version=api.options.version))

    return router
