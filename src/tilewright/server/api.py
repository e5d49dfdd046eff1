"""State shared by all routes: engine, options, reading of request bodies, and submission to the engine's queue."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from ssl import SSLContext
from typing import NamedTuple, TypeVar

from fastapi import Request
from prometheus_client import CollectorRegistry
from pydantic import ValidationError

from tilewright.diffusion.canvas import CanvasDenoising
from tilewright.grammar.grammar import Grammar
from tilewright.models.chat import ChatTemplate
from tilewright.runtime.engine import RETRY_AFTER_S, Engine
from tilewright.runtime.pooling import Pooling
from tilewright.runtime.request import Overloaded
from tilewright.server.defaults import SamplingDefaults
from tilewright.server.denoising import (
    BlockChatBody,
    BlockCompletionBody,
    CanvasChatBody,
    CanvasCompletionBody,
    DenoisingChatBody,
    DenoisingCompletionBody,
)
from tilewright.server.embeddings import ParsedInputs, PooledBody, parse_inputs
from tilewright.server.embeddings import rough_size as rough_inputs
from tilewright.server.errors import ApiError, invalid_body, overloaded
from tilewright.server.parse import ParsedRequest, has_new_grammar, parse_request, rough_size
from tilewright.server.prometheus import EngineCollector, Timings
from tilewright.server.protocol import ChatBody, CompletionBody, GenerationBody, ModelBody
from tilewright.server.render import Served
from tilewright.server.responses_store import ResponsesStore
from tilewright.server.stream import RunningRequests, stopping
from tilewright.server.structured import Constrain
from tilewright.server.tokens import TokenTexts
from tilewright.server.tracing import OnEnd, Tracer
from tilewright.server.translate import ChatConvertible

log = logging.getLogger("tilewright.server")

Body = TypeVar("Body", bound=ModelBody)
T = TypeVar("T")
Parsed = TypeVar("Parsed", ParsedRequest, ParsedInputs)

PARSED_HERE = 65_536
"""Largest number of bytes of a body that is parsed in the event loop. Longer bodies are parsed in a thread."""
TOKENISERS = 2
"""Number of threads that parse long bodies and tokenise the prompts of short ones."""
MOST_LONG_BODIES = 64
"""Largest number of long bodies that are read at the same time, which bounds their memory."""


@dataclass(frozen=True)
class ServerOptions:
    """Options of a server.

    Attributes:
        name: model name in the API.
        version: version of Tilewright.
        template: chat template; None if the model has none.
        sampling: default sampling parameters.
        api_keys: accepted API keys; empty to accept all requests.
        origins: allowed CORS origins; "*" for all.
        max_body_bytes: largest size of a request body.
        body_s: seconds in which a request body has to arrive.
        deadline_s: seconds that a request may take in the engine; None for no limit.
        stale_s: age in seconds of the engine's last step at which `/health` fails.
        constrain: compiles grammars to constraints; None disables structured output.
        pooling: pooling of embeddings.
        embedding_dimensions: numbers of dimensions to which the model was trained to truncate embeddings (Matryoshka).
        tls: TLS context of all connections; None for plain HTTP.
        tracer: creates OpenTelemetry spans; None for no traces.
        stored_responses: largest number of stored responses (`/v1/responses`); 0 stores none.
        stored_bytes: largest total size of stored responses.

    Raises:
        ValueError: an option is out of range.
    """

    name: str
    version: str
    template: ChatTemplate | None = None
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    api_keys: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    max_body_bytes: int = 4 * 2**20
    body_s: float = 30.0
    deadline_s: float | None = None
    stale_s: float = 30.0
    constrain: Constrain | None = None
    pooling: Pooling = "last"
    embedding_dimensions: tuple[int, ...] = ()
    tls: SSLContext | None = None
    tracer: Tracer | None = None
    stored_responses: int = 1024
    stored_bytes: int = 64 * 2**20

    def __post_init__(self) -> None:
        for name in ("stored_responses", "stored_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"expected {name} of at least 0, found {getattr(self, name)}")
        if not self.name:
            raise ValueError("expected a model name, found an empty one")
        if not all(key and key.isprintable() and key == key.strip() for key in self.api_keys):
            raise ValueError("expected API keys of printable characters without leading or trailing spaces")
        for name in ("max_body_bytes", "body_s", "deadline_s", "stale_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"expected {name} above 0, found {value}")


def compile_json_object(constrain: Constrain) -> None:
    """Compiles the grammar of JSON objects. Logs failures at level debug for models without structured output."""
    try:
        constrain(Grammar.json_object())
    except ValueError as error:
        log.debug("cannot compile the grammar of JSON objects: %s", error)
    except Exception as error:
        log.warning("cannot compile the grammar of JSON objects: %s: %s", type(error).__name__, error)


async def in_thread(threads: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(threads, work)


class ErrorNames(NamedTuple):
    """Names for a body's requests in error messages.

    Attributes:
        noun: plural noun.
        many: field that determines the number of requests.
        long: field that contains the tokens.
    """

    noun: str
    many: str
    long: str


@dataclass
class PendingRequests:
    """Number of requests that are being tokenised, and their estimated number of tokens."""

    requests: int = 0
    tokens: int = 0

    @contextmanager
    def counting(self, requests: int, tokens: int, check: Callable[[int, int], None]) -> Iterator[None]:
        """Counts requests during tokenisation, so that a burst is refused before it is tokenised.

        Args:
            check: raises `Overloaded` if the queue has no room for the requests and tokens.

        Raises:
            ApiError: the queue has no room (503).
        """
        self.requests += requests
        self.tokens += tokens
        try:
            check(self.requests, self.tokens)
            yield
        except Overloaded as error:
            raise overloaded(error.retry_after_s) from error
        finally:
            self.requests -= requests
            self.tokens -= tokens


@dataclass
class Api:
    """State of the server.

    Attributes:
        stopping: the server refuses new requests.
        pending: requests that are being tokenised for the engine.
        texts: texts that are being tokenised or detokenised for `/tokenize`, `/detokenize` and `count_tokens`.
        long_bodies: number of long bodies that are being read.
    """

    engine: Engine
    options: ServerOptions
    stopping: bool = False
    pending: PendingRequests = field(default_factory=PendingRequests)
    texts: PendingRequests = field(default_factory=PendingRequests)
    long_bodies: int = 0
    served: Served = field(init=False)
    stored: ResponsesStore = field(init=False)
    registry: CollectorRegistry = field(init=False)
    timings: Timings = field(init=False)
    threads: ThreadPoolExecutor = field(init=False)
    long_prompts_thread: ThreadPoolExecutor = field(init=False)
    texts_thread: ThreadPoolExecutor = field(init=False)
    grammars_thread: ThreadPoolExecutor = field(init=False)

    def __post_init__(self) -> None:
        if self.options.name in self.engine.decoding.adapters:
            raise ValueError(f"expected adapter names other than the model's, found {self.options.name!r}")
        self.served = Served(
            self.engine, self.options.name, self.options.version, int(time.time()), TokenTexts(self.engine.tokenizer)
        )
        self.stored = ResponsesStore(self.options.stored_responses, self.options.stored_bytes)
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(self.engine, self.options.name))
        self.timings = Timings(self.registry, self.options.name)
        self.threads = ThreadPoolExecutor(TOKENISERS, "tokenise")
        # Long prompts, texts and new grammars may take seconds, and have threads of their own.
        self.long_prompts_thread = ThreadPoolExecutor(1, "long-prompts")
        self.texts_thread = ThreadPoolExecutor(1, "texts")
        self.grammars_thread = ThreadPoolExecutor(1, "grammars")

    def close(self) -> None:
        """Waits for the threads to finish their work, and exports the last traces."""
        for each in (self.threads, self.long_prompts_thread, self.texts_thread, self.grammars_thread):
            each.shutdown()
        if self.options.tracer is not None:
            self.options.tracer.close()

    def compile_ahead(self) -> None:
        """Compiles the grammar of JSON objects in a thread, before the first request needs it."""
        if (constrain := self.options.constrain) is not None:
            self.grammars_thread.submit(compile_json_object, constrain)

    @property
    def refines_canvases(self) -> bool:
        """True if the served model refines canvases, and has no sampling temperature."""
        return isinstance(self.engine.decoding.blocks, CanvasDenoising)

    @property
    def completion_body(self) -> type[CompletionBody]:
        """Body class of `/v1/completions` for the served model."""
        if self.engine.decoding.blocks is not None:
            return CanvasCompletionBody if self.refines_canvases else BlockCompletionBody
        return CompletionBody if self.engine.decoding.denoising is None else DenoisingCompletionBody

    @property
    def chat_body(self) -> type[ChatBody]:
        """Body class of `/v1/chat/completions` for the served model."""
        if self.engine.decoding.blocks is not None:
            return CanvasChatBody if self.refines_canvases else BlockChatBody
        return ChatBody if self.engine.decoding.denoising is None else DenoisingChatBody

    async def body(self, request: Request, kind: type[Body]) -> Body:
        """Reads and validates the body of a request.

        Raises:
            ApiError: the body has another content type than JSON (415), is too long (413), arrives too slowly (408), is invalid
                (400), or names an unknown model (404).
        """
        media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media != "application/json":
            # Browsers send other content types across origins without a CORS preflight.
            raise ApiError(415, f"expected content type application/json, found {media[:60]!r}", "unsupported_media_type")
        try:
            async with asyncio.timeout(self.options.body_s):
                raw = await self.read(request)
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {self.options.body_s:g} s", "request_timeout") from None
        request.state.long = len(raw) > PARSED_HERE
        try:
            parse = partial(kind.model_validate_json, raw)
            body = await in_thread(self.threads, parse) if request.state.long else parse()
        except ValidationError as error:
            raise invalid_body(error) from None
        if body.model not in (None, *self.models):
            self.model_unknown(str(body.model))
        return body

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the model and its adapters."""
        return (self.options.name, *self.engine.decoding.adapters)

    def served_info(self, name: str | None) -> Served:
        """Returns the model information for responses, with the model name of the request."""
        return self.served if name is None else replace(self.served, name=name)

    async def chat(self, request: Request, body: ChatConvertible, before: bytes = b"[]") -> ChatBody:
        """Converts a body of another API to a chat body.

        Args:
            before: previous messages, as JSON.

        Raises:
            ApiError: the chat body is invalid for the served model.
        """
        request.state.long |= len(before) > PARSED_HERE
        work = partial(body.chat, self.chat_body, before)
        return await in_thread(self.threads, work) if request.state.long else work()

    async def read(self, request: Request) -> bytes:
        """Reads the bytes of a body, up to `max_body_bytes`.

        Raises:
            ApiError: the body is too long (413), or too many long bodies are being read (503). The connection stays open and
                drops the rest of the body, because closing it would reset a client that is still sending before it reads the
                error.
        """
        most = self.options.max_body_bytes
        too_long = ApiError(413, f"expected a body of at most {most} bytes", "body_too_large")
        announced = request.headers.get("content-length", "0")
        if announced.isdecimal() and int(announced[:20]) > most:
            raise too_long
        raw = bytearray()
        is_long = False
        try:
            async for part in request.stream():
                raw += part
                if len(raw) > most:
                    raise too_long
                if len(raw) > PARSED_HERE and not is_long:
                    if self.long_bodies >= MOST_LONG_BODIES:
                        raise overloaded()
                    self.long_bodies = self.long_bodies + 1
                    is_long = True
        finally:
            self.long_bodies -= is_long
        return bytes(raw)

    def model_unknown(self, name: str) -> None:
        served = ", ".join(map(repr, self.models))
        raise ApiError(404, f"no model {name[:100]!r}; this server has {served}", "model_not_found", "model")

    def check_serving(self) -> None:
        """Raises an `ApiError` (503) while the engine warms up or stops."""
        if self.stopping or self.engine.closed:
            raise stopping()
        if not self.engine.ready:
            raise ApiError(503, "the model is warming up", "server_not_ready", None, {"retry-after": "5"})

    def check_texts(self, requests: int, tokens: int) -> None:
        """Raises `Overloaded` for more texts or tokens than the engine's queue may hold."""
        limits = self.engine.options
        if requests > limits.queue_requests or tokens > limits.queue_tokens:
            raise Overloaded("too many texts to tokenise", RETRY_AFTER_S)

    async def tokenised(self, tokens: int, work: Callable[[], T]) -> T:
        """Runs `work` on a text of about `tokens` tokens in the texts thread, and returns its result.

        Texts have a queue of their own with the limits of the engine's queue.

        Raises:
            ApiError: the queue has no room (503).
        """
        with self.texts.counting(1, min(tokens, self.engine.options.queue_tokens), self.check_texts):
            return await in_thread(self.texts_thread, work)

    async def start(
        self, body: GenerationBody, is_long: bool = False, on_end: OnEnd | None = None
    ) -> tuple[ParsedRequest, RunningRequests]:
        """Parses a body in a thread and submits its requests. Long prompts and new grammars use threads of their own."""
        options = self.options
        check = partial(has_new_grammar, body, options.template, options.constrain)
        compiles = await in_thread(self.threads, check) if is_long else check()
        threads = self.grammars_thread if compiles else self.long_prompts_thread if is_long else self.threads
        options_given = (options.template, options.deadline_s, options.sampling, options.constrain)
        running = RunningRequests(self.engine, self.timings, on_end)
        size = rough_size(body, self.engine.context)
        names = ErrorNames("choices", "n", "messages" if isinstance(body, ChatBody) else "prompt")
        return await self.submit_parsed(running, size, names, threads, lambda: parse_request(body, self.engine, *options_given))

    async def start_embeddings(
        self, body: PooledBody, inputs: Sequence[str | list[int]], params: Sequence[str], is_long: bool, on_end: OnEnd | None
    ) -> tuple[ParsedInputs, RunningRequests]:
        """Tokenises texts in a thread and submits requests for their embeddings.

        Args:
            params: field of each text, for error messages.
        """
        options, (most, _) = self.options, Counter(params).most_common(1)[0]
        parse = partial(parse_inputs, inputs, body, self.engine, options.pooling, options.deadline_s, params)
        threads = self.long_prompts_thread if is_long else self.threads
        running = RunningRequests(self.engine, self.timings, on_end)
        size = rough_inputs(inputs, self.engine.context)
        return await self.submit_parsed(running, size, ErrorNames("texts", most, most), threads, parse)

    def on_end(self, request: Request, model: str | None) -> OnEnd | None:
        """Returns a callback that makes a span for each ended request of a body; None without a tracer."""
        tracer = self.options.tracer
        name = self.served_info(model).name
        request_id = request.state.request_id
        return None if tracer is None else tracer.request(request.scope["path"], request.headers, name, request_id)

    async def submit_parsed(
        self,
        running: RunningRequests,
        size: tuple[int, int],
        names: ErrorNames,
        threads: ThreadPoolExecutor,
        parse: Callable[[], Parsed],
    ) -> tuple[Parsed, RunningRequests]:
        """Parses a body in a thread and submits its requests.

        Args:
            size: number of requests, and their estimated number of tokens.
            names: names for error messages.

        Raises:
            ApiError: the engine is not ready (503), the queue has no room (503), or the body is invalid (400).
        """
        self.check_serving()
        limits = self.engine.options
        requests, tokens = size
        if requests > limits.queue_requests:
            expected = f"at most {limits.queue_requests} {names.noun} in one request"
            raise ApiError(400, f"expected {expected}, found {requests}", f"too_many_{names.noun}", names.many)
        # `parse_and_submit` refuses requests that exceed the whole queue, once their number of tokens is known.
        with self.pending.counting(requests, min(tokens, limits.queue_tokens), self.engine.check_room):
            try:
                parsed = await in_thread(threads, partial(self.parse_and_submit, parse, running, names))
            except asyncio.CancelledError:  # the thread continues
                running.cancel()
                raise
        return parsed, running

    def parse_and_submit(self, parse: Callable[[], Parsed], running: RunningRequests, names: ErrorNames) -> Parsed:
        """Parses a body and submits its requests; runs in a thread."""
        parsed = parse()
        tokens = sum(len(request.prompt) for request in parsed.requests)
        most = self.engine.options.queue_tokens
        if tokens > most:
            expected = f"at most {most} prompt tokens in all {names.noun} together"
            raise ApiError(400, f"expected {expected}, found {tokens}", "too_many_tokens", names.long)
        running.submit(parsed.requests)
        return parsed
