"""The routes, in groups: generating, tokens, the model, and the server's own state."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from tilewright.diffusion.engine import DiffusionEngine
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
    embeddings_of,
    scores_of,
)
from tilewright.server.errors import MESSAGES, ApiError, MessagesErrorBody
from tilewright.server.messages_body import CountBody, MessagesBody
from tilewright.server.messages_render import AnsweredMessage, MessagesRenderer, TokenCount
from tilewright.server.openapi import errors, takes
from tilewright.server.page import CSP, PAGE
from tilewright.server.parse import ParsedRequest, contents, conversation_tokens, listed, rendered, rough_tokens, tools_of
from tilewright.server.prometheus import text_of
from tilewright.server.protocol import ChatBody, DetokenizeBody, GenerationBody, TokenizeBody
from tilewright.server.render import ChatRenderer, CompletionRenderer, Renderer, Served
from tilewright.server.responses_body import ResponsesBody, gone_on
from tilewright.server.responses_render import ResponsesRenderer
from tilewright.server.responses_store import Stored
from tilewright.server.stream import EventStream, collected, embedded, events, unless_gone
from tilewright.server.translate import Places, in_words

READING = (400, 404, 408, 413, 415)
"""Statuses of what can be wrong with a body."""
TOKENISING = (*READING, 503)
GENERATING = (*TOKENISING, 500, 504)
EVENTS = {"text/event-stream": {"schema": {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}}}
"""A stream: each event's data is JSON, except for the last one's of OpenAI's first two routes, which is [DONE]."""


def answer(body: Answer) -> Response:
    return Response(body.json_bytes, media_type="application/json")


Make = Callable[[Served, str, ParsedRequest, Sequence[RequestHandle]], Renderer]
"""Makes what gives the answers of a parsed body's requests a form."""


async def generated(api: Api, request: Request, body: GenerationBody, make: Make, places: Places = ()) -> Response:
    """Runs a body's requests and answers in a form; `places` are those of a body that stood for this one."""
    with in_words(places):
        parsed, running = await api.start(body, request.state.long, api.traced(request, body.model))
    renderer = make(api.served_as(body.model), request.state.request_id, parsed, running.handles)
    request.state.tokens = renderer.tokens_shown
    if body.stream:
        return EventStream(events(running, renderer), running)
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
        body = await api.body(request, api.completion_body)
        return await generated(api, request, body, partial(CompletionRenderer, options=body.stream_options))

    @router.post(
        "/v1/chat/completions",
        openapi_extra=takes(api.chat_body),
        responses={200: {"model": Chat, "content": EVENTS}, **errors(*GENERATING)},
    )
    async def chats(request: Request) -> Response:
        """Answers a conversation, put into the model's chat template."""
        body = await api.body(request, api.chat_body)
        return await generated(api, request, body, partial(ChatRenderer, options=body.stream_options))

    return router


async def embeddings_of_texts(
    api: Api, request: Request, body: PooledBody, inputs: Sequence[str | list[int]], params: Sequence[str]
) -> tuple[ParsedInputs, list[np.ndarray]]:
    """The embeddings of texts, in order; `params` are the fields that have them, one for each."""
    traced = api.traced(request, body.model)
    parsed, running = await api.embedded(body, inputs, params, request.state.long, traced)
    request.state.tokens = lambda: f" {parsed.usage.prompt_tokens}+0 tokens"
    try:
        return parsed, await unless_gone(request.receive, embedded(running))
    finally:
        running.cancel()


def embedding_routes(api: Api) -> APIRouter:
    router = APIRouter(tags=["embeddings"])
    declared = api.options.embedding_dimensions

    @router.post(
        "/v1/embeddings",
        openapi_extra=takes(EmbeddingsBody),
        responses={200: {"model": EmbeddingsAnswer}, **errors(*GENERATING)},
    )
    async def embeddings(request: Request) -> Response:
        """Vectors of length 1 of texts."""
        body = await api.body(request, EmbeddingsBody)
        texts = listed(body.input)
        parsed, vectors = await embeddings_of_texts(api, request, body, texts, ["input"] * len(texts))
        return answer(embeddings_of(body, parsed, vectors, api.served_as(body.model).name, declared))

    @router.post("/score", include_in_schema=False)
    @router.post("/v1/score", openapi_extra=takes(ScoreBody), responses={200: {"model": ScoresAnswer}, **errors(*GENERATING)})
    async def score(request: Request) -> Response:
        """How alike texts are: the cosine of their embeddings."""
        body = await api.body(request, ScoreBody)
        pairs = body.pairs()
        fields = {text: "text_1" for text, _ in pairs}
        fields |= {text: "text_2" for _, text in pairs if text not in fields}
        parsed, vectors = await embeddings_of_texts(api, request, body, list(fields), list(fields.values()))
        parsed = replace(parsed, times=[body.texts.count(text) for text in fields])
        of_text = dict(zip(fields, vectors, strict=True))
        return answer(scores_of(pairs, parsed, of_text, api.served_as(body.model).name, request.state.request_id))

    return router


def messages_routes(api: Api) -> APIRouter:
    router = APIRouter(tags=["messages"])

    @router.post(
        MESSAGES,
        openapi_extra=takes(MessagesBody),
        responses={200: {"model": AnsweredMessage, "content": EVENTS}, **errors(*GENERATING, body=MessagesErrorBody)},
    )
    async def messages(request: Request) -> Response:
        """Answers a conversation, in Anthropic's form."""
        body = await api.body(request, MessagesBody)
        chat = await api.chat(request, body)
        return await generated(api, request, chat, partial(MessagesRenderer, most=body.max_tokens), MessagesBody.places)

    def counted(chat: ChatBody) -> Response:
        template = api.options.template
        with in_words(CountBody.places):
            text = rendered(chat.messages, chat, template, tools_of(chat, template))
            tokens = conversation_tokens(text, api.engine)
        return answer(TokenCount(input_tokens=len(tokens)))

    @router.post(
        f"{MESSAGES}/count_tokens",
        openapi_extra=takes(CountBody),
        responses={200: {"model": TokenCount}, **errors(*TOKENISING, body=MessagesErrorBody)},
    )
    async def count_tokens(request: Request) -> Response:
        """The number of a conversation's tokens, as it goes into the model."""
        chat = await api.chat(request, await api.body(request, CountBody))
        return await api.tokenised(rough_tokens(contents(chat.messages)), partial(counted, chat))

    return router


def owner(request: Request) -> int:
    """Number of the key that a request came with: nobody comes to what another key asked for."""
    return request.scope["state"].get("key", 0)


def response_unknown(name: str) -> ApiError:
    return ApiError(404, f"there is no response {name[:100]!r}, or it is kept no longer", "response_not_found")


def responses_routes(api: Api) -> APIRouter:
    router = APIRouter(tags=["responses"])
    stored = api.stored

    @router.post(
        "/v1/responses",
        openapi_extra=takes(ResponsesBody),
        responses={200: {"model": responses_render.ResponseAnswer, "content": EVENTS}, **errors(*GENERATING)},
    )
    async def responses(request: Request) -> Response:
        """Answers a conversation, in the form of OpenAI's Responses API."""
        body = await api.body(request, ResponsesBody)
        before = b"[]"
        asker = owner(request)
        if (name := body.previous_response_id) is not None:
            previous = stored.get(asker, name)
            if previous is None:
                message = f"'previous_response_id': {response_unknown(name).message}"
                raise ApiError(400, message, "previous_response_not_found", "previous_response_id")
            before = previous.conversation
        chat = await api.chat(request, body, before)

        def keep(response: responses_render.ResponseAnswer, said: dict[str, Any]) -> None:
            conversation = gone_on(before, [*body.messages_of_chat(), said])
            stored.put(asker, response.id, Stored(response.json_bytes, conversation))

        make = partial(ResponsesRenderer, body=body, keep=keep if stored.most and body.store is not False else None)
        return await generated(api, request, chat, make, body.places)

    return router


def stored_routes(api: Api) -> APIRouter:
    router = APIRouter(tags=["responses"])
    stored = api.stored

    @router.get("/v1/responses/{name}", responses={200: {"model": responses_render.ResponseAnswer}, **errors(400, 404)})
    async def response(request: Request, name: str) -> Response:
        """A response that was stored."""
        if (found := stored.get(owner(request), name)) is None:
            raise response_unknown(name)
        if request.query_params.get("stream", "false") != "false":
            raise ApiError(
                400, "'stream' is not offered by this server for a response that has ended", "unsupported_parameter", "stream"
            )
        return Response(found.answer, media_type="application/json")

    @router.delete("/v1/responses/{name}", responses={200: {"model": responses_render.Deleted}, **errors(404)})
    async def delete(request: Request, name: str) -> Response:
        """Forgets a response that was stored."""
        if not stored.delete(owner(request), name):
            raise response_unknown(name)
        return answer(responses_render.Deleted(id=name, object="response", deleted=True))

    @router.post("/v1/responses/{name}/cancel", responses={200: {"model": responses_render.ResponseAnswer}, **errors(400, 404)})
    async def cancel(request: Request, name: str) -> Response:
        """Refuses: there are no responses in the background. One that is under way ends when its client goes."""
        if stored.get(owner(request), name) is None:
            raise response_unknown(name)
        raise ApiError(
            400, "only responses in the background can be cancelled, which this server does not offer", "invalid_value"
        )

    return router


def token_routes(api: Api) -> APIRouter:
    router = APIRouter(tags=["tokens"])
    engine = api.engine

    def tokenized(body: TokenizeBody) -> Response:
        if body.prompt is not None:
            tokens = encode(engine.tokenizer, body.prompt, body.add_special_tokens is not False)
        else:
            tokens = conversation_tokens(rendered(body.messages or (), body, api.options.template), engine)
            begin = encode(engine.tokenizer, "", bool(body.add_special_tokens))
            tokens = tokens if tokens[: len(begin)] == begin else [*begin, *tokens]
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

    def model(name: str) -> ModelCard:
        about: dict[str, Any] = {"created": api.served.created, "owned_by": "tilewright", "max_model_len": api.engine.context}
        if not isinstance(api.engine, DiffusionEngine):
            about["sampling_defaults"] = DefaultSamplingParams.model_validate(asdict(api.options.sampling))
        if name != api.options.name:
            about["parent"] = api.options.name
        return ModelCard(id=name, object="model", **about)

    @router.head("/v1/models", include_in_schema=False)
    @router.get("/v1/models", responses={200: {"model": ModelList}})
    async def models() -> Response:
        """The model that is served, and its low-rank adapters, each with the model as its `parent`."""
        return answer(ModelList(object="list", data=[model(name) for name in api.models]))

    @router.get("/v1/models/{name:path}", responses={200: {"model": ModelCard}, **errors(404)})
    async def named(name: str) -> Response:
        """The model of this name."""
        if name not in api.models:
            api.model_unknown(name)
        return answer(model(name))

    return router


def state_routes(api: Api) -> APIRouter:
    router = APIRouter(tags=["state"])

    @router.head("/health", include_in_schema=False)
    @router.get("/health", responses={200: {"model": Health}, **errors(503)})
    async def health() -> Response:
        """Says that the engine is alive: it has its programs, and steps."""
        if api.engine.ending and not api.stopping:
            raise ApiError(503, "the engine has ended; the log says why", "engine_stuck")
        if not api.stopping:
            api.check_serving()
        age = api.engine.stats().step_age_s
        if age > api.options.stale_s and not api.stopping:
            raise ApiError(503, f"the engine's last step was {age:.0f} s ago", "engine_stuck")
        return answer(Health(status="ok", step_age_s=age))

    @router.get("/ping", responses={200: {"model": Health}, **errors(503)})
    @router.post("/ping", responses={200: {"model": Health}, **errors(503)})
    async def ping() -> Response:
        """As `/health`, for those that expect it here."""
        return await health()

    @router.get("/load", responses={200: {"model": Load}})
    async def load() -> Response:
        """Requests in the engine, for those that spread them over servers."""
        stats = api.engine.stats()
        running = stats.running
        waiting = stats.waiting
        return answer(Load(server_load=running + waiting, num_requests_running=running, num_requests_waiting=waiting))

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
