"""The routes, in three groups: generating, tokens, and the server's own state."""

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from tilewright.server.api import Api
from tilewright.server.asks import rendered
from tilewright.server.errors import ApiError
from tilewright.server.forms import ChatForm, CompletionForm, Form
from tilewright.server.generation import EventStream, collected, events, unless_gone
from tilewright.server.metrics import text_of
from tilewright.server.openapi import errors, takes
from tilewright.server.page import CSP, PAGE
from tilewright.server.responses import (
    Answer,
    Chat,
    Completion,
    Detokenized,
    Health,
    Model,
    ModelList,
    Ready,
    Tokenized,
    TokenizerInfo,
    Version,
)
from tilewright.server.schema import DetokenizeBody, GenerationBody, TokenizeBody

READING = (400, 404, 408, 413, 415)
"""What can be wrong with a body."""
GENERATING = (*READING, 500, 503, 504)
EVENTS = {"text/event-stream": {"schema": {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}}}
"""A stream: each event's data is a chunk, as JSON; the last one's is [DONE]."""


def answer(body: Answer) -> Response:
    return Response(body.json_bytes, media_type="application/json")


async def generated(api: Api, request: Request, body: GenerationBody, make: Any) -> Response:
    """Runs a body's requests and answers; `make` is the form's class with what only it takes."""
    plan, running = await api.start(body)
    form: Form = make(api.served, request.state.request_id, plan, running.tickets)
    if body.stream:
        return EventStream(events(running, form, body.stream_options), running)
    try:
        return await unless_gone(request.receive, collected(running, form))
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
        body = await api.body(request, api.completion_body)
        return await generated(api, request, body, lambda *of: CompletionForm(*of, echo=bool(body.echo)))

    @router.post(
        "/v1/chat/completions",
        openapi_extra=takes(api.chat_body),
        responses={200: {"model": Chat, "content": EVENTS}, **errors(*GENERATING)},
    )
    async def chats(request: Request) -> Response:
        """Answers a conversation, put into the model's chat template."""
        return await generated(api, request, await api.body(request, api.chat_body), ChatForm)

    return router


def token_routes(api: Api) -> APIRouter:
    router, engine = APIRouter(tags=["tokens"]), api.engine

    def encoded(body: TokenizeBody) -> list[int]:
        if (body.prompt is None) == (body.messages is None):
            found = "neither" if body.prompt is None else "both"
            raise ApiError(400, f"expected either prompt or messages, found {found}", "invalid_value", "prompt")
        special, text = body.add_special_tokens, body.prompt
        if text is None:
            begin = body.add_generation_prompt is not False
            special, text = bool(special), rendered(body.messages or (), api.options.template, begin)
        return engine.tokenizer.encode(text, add_special_tokens=special is not False).ids

    @router.post("/tokenize", openapi_extra=takes(TokenizeBody), responses={200: {"model": Tokenized}, **errors(*READING)})
    async def tokenize(request: Request) -> Response:
        """The tokens of a text, or of a conversation in the model's chat template."""
        body = await api.body(request, TokenizeBody)
        tokens = await asyncio.get_running_loop().run_in_executor(api.threads, encoded, body)
        strings = [api.served.texts.text(token) for token in tokens] if body.return_token_strs else None
        context = api.engine.context
        return answer(Tokenized(count=len(tokens), max_model_len=context, tokens=tokens, token_strs=strings))

    def decoded(body: DetokenizeBody) -> str:
        try:
            tokens = engine.encode(body.tokens) if body.tokens else []
        except ValueError as error:
            raise ApiError(400, f"'tokens': {error}", "invalid_value", "tokens") from error
        return engine.tokenizer.decode(tokens, skip_special_tokens=False)

    @router.post(
        "/detokenize", openapi_extra=takes(DetokenizeBody), responses={200: {"model": Detokenized}, **errors(*READING)}
    )
    async def detokenize(request: Request) -> Response:
        """The text of tokens, special ones included."""
        body = await api.body(request, DetokenizeBody)
        text = await asyncio.get_running_loop().run_in_executor(api.threads, decoded, body)
        return answer(Detokenized(prompt=text))

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

    @router.get("/", include_in_schema=False)
    async def page() -> Response:
        """The page to chat with the server; it holds nothing that needs a key."""
        return Response(PAGE, media_type="text/html; charset=utf-8", headers=headers)

    return router


def state_routes(api: Api) -> APIRouter:
    router = APIRouter(tags=["state"])

    def model() -> Model:
        about = {"created": api.served.created, "owned_by": "tilewright", "max_model_len": api.engine.context}
        return Model(id=api.options.name, object="model", **about)

    @router.get("/v1/models", responses={200: {"model": ModelList}})
    async def models() -> Response:
        """The one model that is served."""
        return answer(ModelList(object="list", data=[model()]))

    @router.get("/v1/models/{name:path}", responses={200: {"model": Model}, **errors(404)})
    async def named(name: str) -> Response:
        """The model of this name."""
        if name != api.options.name:
            api.model_unknown(name)
        return answer(model())

    @router.get("/health", responses={200: {"model": Health}, **errors(503)})
    async def health() -> Response:
        """Whether the engine is alive: warming up, or stepping."""
        if api.engine.ending and not api.stopping:
            raise ApiError(503, "the engine has ended; the log says why", "engine_stuck")
        if not api.engine.ready:
            return answer(Health(status="warming", step_age_s=None))
        age = api.engine.figures().step_age_s
        if age > api.options.stale_s and not api.stopping:
            raise ApiError(503, f"the engine's last step was {age:.0f} s ago", "engine_stuck")
        return answer(Health(status="ok", step_age_s=age))

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
