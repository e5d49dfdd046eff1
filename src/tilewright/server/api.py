"""Parts that all routes share: the engine, the limits, reading a body, and the way into the engine's queue."""

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

from tilewright.diffusion.engine import DiffusionEngine
from tilewright.grammar.grammar import Grammar
from tilewright.models.chat import ChatTemplate
from tilewright.runtime.pooling import Pooling
from tilewright.runtime.request import Overloaded
from tilewright.runtime.service import RETRY_AFTER_S, Service
from tilewright.server.defaults import SamplingDefaults
from tilewright.server.denoising import DenoisingChatBody, DenoisingCompletionBody
from tilewright.server.embeddings import ParsedInputs, PooledBody, parse_inputs
from tilewright.server.embeddings import rough_size as rough_inputs
from tilewright.server.errors import ApiError, invalid_body, overloaded
from tilewright.server.parse import ParsedRequest, has_new_grammar, parse_request, rough_size
from tilewright.server.prometheus import EngineCollector, Timings
from tilewright.server.protocol import ChatBody, CompletionBody, GenerationBody, ModelBody
from tilewright.server.render import Served
from tilewright.server.responses_store import ResponsesStore
from tilewright.server.stream import Running, stopping
from tilewright.server.structured import Constrain
from tilewright.server.tokens import TokenTexts
from tilewright.server.tracing import Ended, Tracer
from tilewright.server.translate import ChatLike

log = logging.getLogger("tilewright.server")

Body = TypeVar("Body", bound=ModelBody)
T = TypeVar("T")
Parsed = TypeVar("Parsed", ParsedRequest, ParsedInputs)

PARSED_HERE = 65_536
"""Bytes of a body that are parsed at once; longer ones are parsed in a thread, for others wait meanwhile."""
TOKENISERS = 2
"""Threads that read longer bodies, and tokenise prompts of those up to this length."""
MOST_LONG_BODIES = 64
"""Most of the longer bodies that may be read at once, for their memory."""


@dataclass(frozen=True)
class ServerOptions:
    """Options of a server.

    Attributes:
        name: of the model, as clients know it.
        version: of this software.
        template: the model's chat template; None where it has none.
        sampling: how requests draw that do not say.
        api_keys: one of which a request must bring; none for no check.
        origins: of web pages that browsers let read the answers (CORS); "*" for all.
        max_body_bytes: how long a body may be.
        body_s: how long it may take to come.
        deadline_s: how long a request may take in the engine; None for as long as it likes.
        stale_s: how long ago the engine's last step may be before it counts as stuck.
        constrain: makes a constraint of a grammar, for an engine that takes them; None where structured output is not offered.
        pooling: what embeddings are made of.
        embedding_dimensions: numbers of dimensions that embeddings may be cut to, as the model was trained (Matryoshka).
        tls: of all connections; None for none.
        tracer: makes traces of requests; None for none.
        stored_responses, stored_bytes: how many responses, and how many bytes of them, are kept for clients to come back to.
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
            raise ValueError("expected a name for the model, found an empty one")
        if not all(key and key.isprintable() and key == key.strip() for key in self.api_keys):
            raise ValueError("expected API keys of printable characters without spaces around them")
        for name in ("max_body_bytes", "body_s", "deadline_s", "stale_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"expected {name} above 0, found {value}")


def compiled_ahead(constrain: Constrain) -> None:
    """Compiles the grammar of JSON objects. A model that takes no grammars is no fault: who asks for one is told why."""
    try:
        constrain(Grammar.json_object())
    except ValueError as error:
        log.debug("no grammar of JSON objects: %s", error)
    except Exception as error:
        log.warning("no grammar of JSON objects: %s: %s", type(error).__name__, error)


async def in_thread(threads: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(threads, work)


class Named(NamedTuple):
    """Words by which errors name the requests that a body makes.

    Attributes:
        noun: in the plural.
        many: the field that makes too many of them.
        long: the field that has their tokens.
    """

    noun: str
    many: str
    long: str


@dataclass
class Pending:
    """Requests that are being tokenised, and their tokens, about: nobody else knows of them yet."""

    requests: int = 0
    tokens: int = 0

    @contextmanager
    def counting(self, requests: int, tokens: int, check: Callable[[int, int], None]) -> Iterator[None]:
        """Counts requests while they are tokenised, so that a burst is turned away before that work.

        Args:
            check: raises `Overloaded` if there is no room for so many requests and tokens.

        Raises:
            ApiError: there is none.
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
    """The server's state.

    Attributes:
        stopping: no request is taken any more.
        pending: requests on their way to the engine.
        texts: those that are only tokenised, or decoded.
        long_bodies: how many are being read.
    """

    engine: Service
    options: ServerOptions
    stopping: bool = False
    pending: Pending = field(default_factory=Pending)
    texts: Pending = field(default_factory=Pending)
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
        if self.options.name in self.engine.adapters:
            raise ValueError(f"expected adapters of other names than the model's, found {self.options.name!r}")
        self.served = Served(
            self.engine, self.options.name, self.options.version, int(time.time()), TokenTexts(self.engine.tokenizer)
        )
        self.stored = ResponsesStore(self.options.stored_responses, self.options.stored_bytes)
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(self.engine, self.options.name))
        self.timings = Timings(self.registry, self.options.name)
        self.threads = ThreadPoolExecutor(TOKENISERS, "tokenise")
        # A thread each, for what may take seconds: longer prompts and new grammars keep no others waiting, texts no prompts.
        self.long_prompts_thread = ThreadPoolExecutor(1, "long-prompts")
        self.texts_thread = ThreadPoolExecutor(1, "texts")
        self.grammars_thread = ThreadPoolExecutor(1, "grammars")

    def close(self) -> None:
        """Ends the threads, once they have done what they were given, and sends the last traces."""
        for each in (self.threads, self.long_prompts_thread, self.texts_thread, self.grammars_thread):
            each.shutdown()
        if self.options.tracer is not None:
            self.options.tracer.close()

    def compile_ahead(self) -> None:
        """Has the grammar of JSON objects compiled aside, so that the first request that asks for it need not wait."""
        if (constrain := self.options.constrain) is not None:
            self.grammars_thread.submit(compiled_ahead, constrain)

    @property
    def completion_body(self) -> type[CompletionBody]:
        """Type of the bodies that the served model takes; `chat_body` likewise."""
        return DenoisingCompletionBody if isinstance(self.engine, DiffusionEngine) else CompletionBody

    @property
    def chat_body(self) -> type[ChatBody]:
        return DenoisingChatBody if isinstance(self.engine, DiffusionEngine) else ChatBody

    async def body(self, request: Request, kind: type[Body]) -> Body:
        """The body of a request.

        Raises:
            ApiError: it is not JSON (415), too long (413), too slow (408), not what the route takes (400), or for another
                model (404).
        """
        media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media != "application/json":
            # A web page of anybody's may send other types here without being asked who it is.
            raise ApiError(415, f"expected a body of type application/json, found {media[:60]!r}", "unsupported_media_type")
        try:
            async with asyncio.timeout(self.options.body_s):
                raw = await self.read(request)
        except TimeoutError:
            raise ApiError(408, f"the body did not come within {self.options.body_s:g} s", "request_timeout") from None
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
        """Names by which clients may ask: the model's, and those of its adapters."""
        return (self.options.name, *self.engine.adapters)

    def served_as(self, name: str | None) -> Served:
        """What answers say of the model that a body names."""
        return self.served if name is None else replace(self.served, name=name)

    async def chat(self, request: Request, body: ChatLike, before: bytes = b"[]") -> ChatBody:
        """The chat that a body of another API stands for, behind the messages before it.

        Raises:
            ApiError: the served model cannot be asked for it.
        """
        request.state.long |= len(before) > PARSED_HERE
        work = partial(body.chat, self.chat_body, before)
        return await in_thread(self.threads, work) if request.state.long else work()

    async def read(self, request: Request) -> bytes:
        """The bytes of a body; it stops where they become too many, whatever length was announced.

        The connection stays: it drops what else the client sends, so that this one comes to read the answer. A connection that
        ended at once would be reset under a client that is still sending.
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
        has = ", ".join(map(repr, self.models))
        raise ApiError(404, f"this server has no model {name[:100]!r}; it has {has}", "model_not_found", "model")

    def check_serving(self) -> None:
        """Raises an `ApiError` while nothing is generated."""
        if self.stopping or self.engine.closed:
            raise stopping()
        if not self.engine.ready:
            raise ApiError(503, "the model is not ready yet", "server_not_ready", None, {"retry-after": "5"})

    def check_texts(self, requests: int, tokens: int) -> None:
        """Raises `Overloaded` where more is to be tokenised, or decoded, than the engine's queue may hold."""
        limits = self.engine.options
        if requests > limits.queue_requests or tokens > limits.queue_tokens:
            raise Overloaded("too much is to be tokenised", RETRY_AFTER_S)

    async def tokenised(self, tokens: int, work: Callable[[], T]) -> T:
        """Returns what `work` gives, done in a thread, where there is room for a text of about so many tokens.

        Texts have a queue of their own, as long as the engine's, and keep no request from that one.
        """
        with self.texts.counting(1, min(tokens, self.engine.options.queue_tokens), self.check_texts):
            return await in_thread(self.texts_thread, work)

    async def start(
        self, body: GenerationBody, is_long: bool = False, traced: Ended | None = None
    ) -> tuple[ParsedRequest, Running]:
        """Tokenises a body, aside if it is long or its grammar new, and submits its requests, where there is room for them."""
        options = self.options
        asks = partial(has_new_grammar, body, options.template, options.constrain)
        compiles = await in_thread(self.threads, asks) if is_long else asks()
        threads = self.grammars_thread if compiles else self.long_prompts_thread if is_long else self.threads
        given = (options.template, options.deadline_s, options.sampling, options.constrain)
        running = Running(self.engine, self.timings, traced)
        size = rough_size(body, self.engine.context)
        named = Named("choices", "n", "messages" if isinstance(body, ChatBody) else "prompt")
        return await self.started(running, size, named, threads, lambda: parse_request(body, self.engine, *given))

    async def embedded(
        self, body: PooledBody, inputs: Sequence[str | list[int]], params: Sequence[str], is_long: bool, traced: Ended | None
    ) -> tuple[ParsedInputs, Running]:
        """Tokenises and submits texts whose embeddings are asked for; `params` are the fields that have them, one for each."""
        options, (most, _) = self.options, Counter(params).most_common(1)[0]
        parse = partial(parse_inputs, inputs, body, self.engine, options.pooling, options.deadline_s, params)
        threads = self.long_prompts_thread if is_long else self.threads
        running = Running(self.engine, self.timings, traced)
        size = rough_inputs(inputs, self.engine.context)
        return await self.started(running, size, Named("texts", most, most), threads, parse)

    def traced(self, request: Request, model: str | None) -> Ended | None:
        """What makes spans of a body's requests; None for no traces."""
        tracer = self.options.tracer
        name = self.served_as(model).name
        own = request.state.request_id
        return None if tracer is None else tracer.request(request.scope["path"], request.headers, name, own)

    async def started(
        self, running: Running, size: tuple[int, int], named: Named, threads: ThreadPoolExecutor, parse: Callable[[], Parsed]
    ) -> tuple[Parsed, Running]:
        """Parses in a thread, and submits the requests that come of it, where there is room for them.

        Args:
            size: how many they are, and about how many tokens they have.
            named: how errors name them.
        """
        self.check_serving()
        limits = self.engine.options
        requests, tokens = size
        if requests > limits.queue_requests:
            expected = f"at most {limits.queue_requests} {named.noun} in one request"
            raise ApiError(400, f"expected {expected}, found {requests}", f"too_many_{named.noun}", named.many)
        # More than the queue holds is too much for ever, which is said once it is certain: when it is tokenised.
        with self.pending.counting(requests, min(tokens, limits.queue_tokens), self.engine.check_room):
            try:
                parsed = await in_thread(threads, partial(self.submitted, parse, running, named))
            except asyncio.CancelledError:  # the thread goes on
                running.cancel()
                raise
        return parsed, running

    def submitted(self, parse: Callable[[], Parsed], running: Running, named: Named) -> Parsed:
        """The part of `started` that takes time with long prompts; it runs in a thread."""
        parsed = parse()
        tokens = sum(len(request.prompt) for request in parsed.requests)
        most = self.engine.options.queue_tokens
        if tokens > most:
            expected = f"at most {most} prompt tokens, those of all {named.noun} together"
            raise ApiError(400, f"expected {expected}, found {tokens}", "too_many_tokens", named.long)
        running.submit(parsed.requests)
        return parsed
