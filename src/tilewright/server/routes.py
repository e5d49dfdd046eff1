"""Routes of the server, in groups."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from tilewright.models.tokenizer import encode
from tilewright.runtime.request import RequestHandle
from tilewright.server import responses_render
from tilewright.server.answers import (
    Answer,
    Chat,
    Completion,
    DefaultSamplingParams,
    Detokenized,
    Health,
    Load,
    ModelCard,
    ModelList,
    Ready,
    Tokenized,
    TokenizerInfo,
    Version,
)
from tilewright.server.api import Api
from tilewright.server.embeddings import (
    EmbeddingsAnswer,
    EmbeddingsBody,
    ParsedInputs,
    PooledBody,
    ScoreBody,
    ScoresAnswer,
    embeddings_response,
    scores_response,
)
from tilewright.server.errors import MESSAGES, ApiError, MessagesErrorBody
from tilewright.server.messages_body import CountBody, MessagesBody
from tilewright.server.messages_render import MessageResponse, MessagesRenderer, TokenCount
from tilewright.server.openapi import error_responses, request_body
from tilewright.server.page import CSP, PAGE
from tilewright.server.parse import (
    ParsedRequest,
    as_list,
    conversation_tokens,
    message_text,
    render_chat,
    requested_tools,
    rough_tokens,
)
from tilewright.server.prometheus import render_metrics
from tilewright.server.protocol import ChatBody, DetokenizeBody, GenerationBody, TokenizeBody
from tilewright.server.render import ChatRenderer, CompletionRenderer, Renderer, Served
from tilewright.server.responses_body import ResponsesBody, extended
from tilewright.server.responses_render import ResponsesRenderer
from tilewright.server.responses_store import Stored
from tilewright.server.stream import EventStream, collected, embedded, events, until_disconnect
from tilewright.server.translate import FieldPaths, translated_errors

READING = (400, 404, 408, 413, 415)
"""Error statuses of reading a body."""
TOKENISING = (*READING, 503)
GENERATING = (*TOKENISING, 500, 504)
EVENTS = {"text/event-stream": {"schema": {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}}}
"""OpenAPI description of a stream. The data of events is JSON, except for the last event [DONE] of completions and chats."""


def answer(body: Answer) -> Response:
    return Response(body.json_bytes, media_type="application/json")


Make = Callable[[Served, str, ParsedRequest, Sequence[RequestHandle]], Renderer]
"""Makes the renderer of a response."""


async def generated(api: Api, request: Request, body: GenerationBody, make: Make, places: FieldPaths = ()) -> Response:
    """Runs a body's requests and responds. `places`: field paths of the original body, for a converted chat body."""
    with translated_errors(places):
        parsed, running = await api.start(body, request.state.long, api.on_end(request, body.model))
    renderer = make(api.served_info(body.model), request.state.request_id, parsed, running.handles)
    request.state.tokens = renderer.token_counts
    if body.stream:
        return EventStream(events(running, renderer), running)
    try:
        return await until_disconnect(request.receive, collected(running, renderer))
    finally:
        running.cancel()


def generation_routes(api: Api) -> APIRouter:
    router = APIRouter(tags=["generation"])

    @router.post(
        "/v1/completions",
        openapi_extra=request_body(api.completion_body),
        responses={200: {"model": Completion, "content": EVENTS}, **error_responses(*GENERATING)},
    )
    async def completions(request: Request) -> Response:
        """Completes one or several prompts."""
        body = await api.body(request, api.completion_body)
        return await generated(api, request, body, partial(CompletionRenderer, options=body.stream_options))

    @router.post(
        "/v1/chat/completions",
        openapi_extra=request_body(api.chat_body),
        responses={200: {"model": Chat, "content": EVENTS}, **error_responses(*GENERATING)},
    )
    async def chats(request: Request) -> Response:
        """Responds to a conversation, rendered with the model's chat template."""
        body = await api.body(request, api.chat_body)
        return await generated(api, request, body, partial(ChatRenderer, options=body.stream_options))

    return router


async def embeddings_of_texts(
    api: Api, request: Request, body: PooledBody, inputs: Sequence[str | list[int]], params: Sequence[str]
) -> tuple[ParsedInputs, list[np.ndarray]]:
    """Computes the embeddings of texts, in order. `params`: field of each text, for error messages."""
    on_end = api.on_end(request, body.model)
    parsed, running = await api.start_embeddings(body, inputs, params, request.state.long, on_end)
    request.state.tokens = lambda: f" {parsed.usage.prompt_tokens}+0 tokens"
    try:
        return parsed, await until_disconnect(request.receive, embedded(running))
    finally:
        running.cancel()


def embedding_routes(api: Api) -> APIRouter:
    router = APIRouter(tags=["embeddings"])
    declared = api.options.embedding_dimensions

    @router.post(
        "/v1/embeddings",
        openapi_extra=request_body(EmbeddingsBody),
        responses={200: {"model": EmbeddingsAnswer}, **error_responses(*GENERATING)},
    )
    async def embeddings(request: Request) -> Response:
        """Returns unit-length embeddings of texts."""
        body = await api.body(request, EmbeddingsBody)
        texts = as_list(body.input)
        parsed, vectors = await embeddings_of_texts(api, request, body, texts, ["input"] * len(texts))
        return answer(embeddings_response(body, parsed, vectors, api.served_info(body.model).name, declared))

    @router.post("/score", include_in_schema=False)
    @router.post(
        "/v1/score",
        openapi_extra=request_body(ScoreBody),
        responses={200: {"model": ScoresAnswer}, **error_responses(*GENERATING)},
    )
    async def score(request: Request) -> Response:
        """Returns the similarity of texts: the cosine of their embeddings."""
        body = await api.body(request, ScoreBody)
        pairs = body.pairs()
        fields = {text: "text_1" for text, _ in pairs}
        fields |= {text: "text_2" for _, text in pairs if text not in fields}
        parsed, vectors = await embeddings_of_texts(api, request, body, list(fields), list(fields.values()))
        parsed = replace(parsed, times=[body.texts.count(text) for text in fields])
        by_text = dict(zip(fields, vectors, strict=True))
        return answer(scores_response(pairs, parsed, by_text, api.served_info(body.model).name, request.state.request_id))

    return router


def messages_routes(api: Api) -> APIRouter:
    router = APIRouter(tags=["messages"])

    @router.post(
        MESSAGES,
        openapi_extra=request_body(MessagesBody),
        responses={200: {"model": MessageResponse, "content": EVENTS}, **error_responses(*GENERATING, body=MessagesErrorBody)},
    )
    async def messages(request: Request) -> Response:
        """Responds to a conversation (Anthropic's Messages API)."""
        body = await api.body(request, MessagesBody)
        chat = await api.chat(request, body)
        return await generated(api, request, chat, partial(MessagesRenderer, most=body.max_tokens), MessagesBody.places)

    def counted(chat: ChatBody) -> Response:
        template = api.options.template
        with translated_errors(CountBody.places):
            text = render_chat(chat.messages, chat, template, requested_tools(chat, template))
            tokens = conversation_tokens(text, api.engine)
        return answer(TokenCount(input_tokens=len(tokens)))

    @router.post(
        f"{MESSAGES}/count_tokens",
        openapi_extra=request_body(CountBody),
        responses={200: {"model": TokenCount}, **error_responses(*TOKENISING, body=MessagesErrorBody)},
    )
    async def count_tokens(request: Request) -> Response:
        """Returns the number of prompt tokens of a conversation."""
        chat = await api.chat(request, await api.body(request, CountBody))
        return await api.tokenised(rough_tokens(message_text(chat.messages)), partial(counted, chat))

    return router


def owner(request: Request) -> int:
    """Returns the index of the request's API key. Stored responses are visible to their key only."""
    return request.scope["state"].get("key", 0)


def response_unknown(name: str) -> ApiError:
    return ApiError(404, f"no response {name[:100]!r}; it may have been deleted or evicted", "response_not_found")


def responses_routes(api: Api) -> APIRouter:
    router = APIRouter(tags=["responses"])
    stored = api.stored

    @router.post(
        "/v1/responses",
        openapi_extra=request_body(ResponsesBody),
        responses={200: {"model": responses_render.ResponseAnswer, "content": EVENTS}, **error_responses(*GENERATING)},
    )
    async def responses(request: Request) -> Response:
        """Responds to a conversation (OpenAI's Responses API)."""
        body = await api.body(request, ResponsesBody)
        before = b"[]"
        key = owner(request)
        if (name := body.previous_response_id) is not None:
            previous = stored.get(key, name)
            if previous is None:
                message = f"'previous_response_id': {response_unknown(name).message}"
                raise ApiError(400, message, "previous_response_not_found", "previous_response_id")
            before = previous.conversation
        chat = await api.chat(request, body, before)

        def store(response: responses_render.ResponseAnswer, message: dict[str, Any]) -> None:
            conversation = extended(before, [*body.chat_messages(), message])
            stored.add(key, response.id, Stored(response.json_bytes, conversation))

        make = partial(ResponsesRenderer, body=body, store=store if stored.most and body.store is not False else None)
        return await generated(api, request, chat, make, body.places)

    return router


def stored_routes(api: Api) -> APIRouter:
    router = APIRouter(tags=["responses"])
    stored = api.stored

    @router.get(
        "/v1/responses/{name}", responses={200: {"model": responses_render.ResponseAnswer}, **error_responses(400, 404)}
    )
    async def response(request: Request, name: str) -> Response:
        """Returns a stored response."""
        if (found := stored.get(owner(request), name)) is None:
            raise response_unknown(name)
        if request.query_params.get("stream", "false") != "false":
            raise ApiError(400, "'stream' is not supported for stored responses", "unsupported_parameter", "stream")
        return Response(found.answer, media_type="application/json")

    @router.delete("/v1/responses/{name}", responses={200: {"model": responses_render.DeletedResponse}, **error_responses(404)})
    async def delete(request: Request, name: str) -> Response:
        """Deletes a stored response."""
        if not stored.delete(owner(request), name):
            raise response_unknown(name)
        return answer(responses_render.DeletedResponse(id=name, object="response", deleted=True))

    @router.post(
        "/v1/responses/{name}/cancel", responses={200: {"model": responses_render.ResponseAnswer}, **error_responses(400, 404)}
    )
    async def cancel(request: Request, name: str) -> Response:
        """Always refuses, because background responses are not supported. To cancel a response, close its connection."""
        if stored.get(owner(request), name) is None:
            raise response_unknown(name)
        raise ApiError(400, "only background responses can be cancelled, which this server does not support", "invalid_value")

    return router


def token_routes(api: Api) -> APIRouter:
    router = APIRouter(tags=["tokens"])
    engine = api.engine

    def tokenized(body: TokenizeBody) -> Response:
        if body.prompt is not None:
            tokens = encode(engine.tokenizer, body.prompt, body.add_special_tokens is not False)
        else:
            tokens = conversation_tokens(render_chat(body.messages or (), body, api.options.template), engine)
            begin = encode(engine.tokenizer, "", bool(body.add_special_tokens))
            tokens = tokens if tokens[: len(begin)] == begin else [*begin, *tokens]
        strings = [api.served.texts.text(token) for token in tokens] if body.return_token_strs else None
        return answer(Tokenized(count=len(tokens), max_model_len=engine.context, tokens=tokens, token_strs=strings))

    @router.post(
        "/tokenize",
        openapi_extra=request_body(TokenizeBody),
        responses={200: {"model": Tokenized}, **error_responses(*TOKENISING)},
    )
    async def tokenize(request: Request) -> Response:
        """Tokenises a text, or a conversation rendered with the model's chat template."""
        body = await api.body(request, TokenizeBody)
        if (body.prompt is None) == (body.messages is None):
            found = "neither" if body.prompt is None else "both"
            raise ApiError(400, f"expected either prompt or messages, found {found}", "invalid_value", "prompt")
        text = message_text(body.messages or ()) if body.prompt is None else body.prompt
        return await api.tokenised(rough_tokens(text), partial(tokenized, body))

    def detokenized(body: DetokenizeBody) -> Response:
        try:
            tokens = engine.encode(body.tokens) if body.tokens else []
        except ValueError as error:
            raise ApiError(400, f"'tokens': {error}", "invalid_value", "tokens") from error
        # `decode_batch` releases the GIL, and `decode` does not.
        (text,) = engine.tokenizer.decode_batch([tokens], skip_special_tokens=False)
        return answer(Detokenized(prompt=text))

    @router.post(
        "/detokenize",
        openapi_extra=request_body(DetokenizeBody),
        responses={200: {"model": Detokenized}, **error_responses(*TOKENISING)},
    )
    async def detokenize(request: Request) -> Response:
        """Decodes tokens to text, including special tokens."""
        body = await api.body(request, DetokenizeBody)
        return await api.tokenised(len(body.tokens), partial(detokenized, body))

    @router.get("/tokenizer_info", responses={200: {"model": TokenizerInfo}})
    async def tokenizer_info() -> Response:
        """Returns the special tokens, for clients that tokenise with this server."""
        ends = engine.decoding.eos_token_ids
        eos = engine.tokenizer.id_to_token(ends[0]) if ends else None
        special = api.options.template.special_tokens if api.options.template is not None else {}
        return answer(TokenizerInfo(bos_token=special.get("bos_token"), eos_token=eos, pad_token=special.get("pad_token")))

    return router


def page_routes() -> APIRouter:
    router = APIRouter()
    headers = {"content-security-policy": CSP, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}

    @router.head("/", include_in_schema=False)
    @router.get("/", include_in_schema=False)
    async def page() -> Response:
        """Returns the chat page, which needs no API key."""
        return Response(PAGE, media_type="text/html; charset=utf-8", headers=headers)

    return router


def model_routes(api: Api) -> APIRouter:
    router = APIRouter(tags=["models"])

    def model(name: str) -> ModelCard:
        fields: dict[str, Any] = {"created": api.served.created, "owned_by": "tilewright", "max_model_len": api.engine.context}
        if api.engine.decoding.denoising is None and not api.refines_canvases:
            fields["sampling_defaults"] = DefaultSamplingParams.model_validate(asdict(api.options.sampling))
        if name != api.options.name:
            fields["parent"] = api.options.name
        return ModelCard(id=name, object="model", **fields)

    @router.head("/v1/models", include_in_schema=False)
    @router.get("/v1/models", responses={200: {"model": ModelList}})
    async def models() -> Response:
        """Lists the model and its low-rank adapters, whose `parent` is the model."""
        return answer(ModelList(object="list", data=[model(name) for name in api.models]))

    @router.get("/v1/models/{name:path}", responses={200: {"model": ModelCard}, **error_responses(404)})
    async def named(name: str) -> Response:
        """Returns a model or an adapter, with `max_model_len` and `sampling_defaults`."""
        if name not in api.models:
            api.model_unknown(name)
        return answer(model(name))

    return router


def state_routes(api: Api) -> APIRouter:
    router = APIRouter(tags=["state"])

    @router.head("/health", include_in_schema=False)
    @router.get("/health", responses={200: {"model": Health}, **error_responses(503)})
    async def health() -> Response:
        """Liveness probe: fails (503) if the engine warms up, has failed, or has made no step for 30 s."""
        if api.engine.ending and not api.stopping:
            raise ApiError(503, "the engine has ended; see the server's log", "engine_stuck")
        if not api.stopping:
            api.check_serving()
        stats = api.engine.stats()
        age = stats.step_age_s
        if age > api.options.stale_s and not api.stopping:
            raise ApiError(503, f"the engine's last step was {age:.0f} s ago", "engine_stuck")
        programs = {"programs_ready": stats.programs, "programs_declared": stats.programs_declared}
        return answer(Health(status="ok", step_age_s=age, **programs))

    @router.get("/ping", responses={200: {"model": Health}, **error_responses(503)})
    @router.post("/ping", responses={200: {"model": Health}, **error_responses(503)})
    async def ping() -> Response:
        """Alias of `/health`."""
        return await health()

    @router.get("/load", responses={200: {"model": Load}})
    async def load() -> Response:
        """Returns the number of requests in the engine, for load balancers."""
        stats = api.engine.stats()
        running = stats.running
        waiting = stats.waiting
        return answer(Load(server_load=running + waiting, num_requests_running=running, num_requests_waiting=waiting))

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready", responses={200: {"model": Ready}, **error_responses(503)})
    async def ready() -> Response:
        """Readiness probe: fails (503) until requests can be served, and while the server stops."""
        api.check_serving()
        return answer(Ready(status="ready"))

    @router.get("/metrics", responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}})
    async def metrics() -> Response:
        """Returns the Prometheus metrics."""
        return Response(render_metrics(api.registry), media_type=CONTENT_TYPE_LATEST)

    @router.get("/version", responses={200: {"model": Version}})
    async def version() -> Response:
        """Returns the version of Tilewright."""
        return answer(Version(version=api.options.version))

    return router
