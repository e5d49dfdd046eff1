"""What all routes share: the engine, the limits, reading a body, and the way into the engine's queue."""

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import Request
from prometheus_client import CollectorRegistry
from pydantic import ValidationError

from tilewright.engine.diffusion import DiffusionEngine
from tilewright.engine.request import Overloaded
from tilewright.engine.service import Service
from tilewright.models.chat import ChatTemplate
from tilewright.server.asks import Plan, plan_of, rough_size
from tilewright.server.denoising import DenoisingChatBody, DenoisingCompletionBody
from tilewright.server.errors import ApiError, invalid_body
from tilewright.server.forms import Served
from tilewright.server.generation import Running, overloaded, stopping
from tilewright.server.metrics import EngineCollector, Timings
from tilewright.server.schema import ChatBody, CompletionBody, GenerationBody, ModelBody
from tilewright.server.tokens import TokenTexts

Body = TypeVar("Body", bound=ModelBody)

PARSED_HERE = 65_536
"""Bytes of a body that are parsed at once; longer ones are parsed in a thread, for others wait meanwhile."""
TOKENISERS = 2
"""Threads that read long bodies and tokenise."""


@dataclass(frozen=True)
class ServerOptions:
    """How to serve.

    Attributes:
        name: of the model, as clients know it.
        version: of this software.
        template: the model's chat template; None where it has none.
        api_keys: one of which a request must bring; none for no check.
        origins: of web pages that browsers let read the answers (CORS); "*" for all.
        max_body_bytes: how long a body may be.
        body_s: how long it may take to come.
        deadline_s: how long a request may take in the engine; None for as long as it likes.
        stale_s: how long ago the engine's last step may be before it counts as stuck.
    """

    name: str
    version: str
    template: ChatTemplate | None = None
    api_keys: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    max_body_bytes: int = 4 * 2**20
    body_s: float = 30.0
    deadline_s: float | None = None
    stale_s: float = 30.0

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("expected a name for the model, found an empty one")
        if not all(key and key.isprintable() and key == key.strip() for key in self.api_keys):
            raise ValueError("expected API keys of printable characters without spaces around them")
        for name in ("max_body_bytes", "body_s", "deadline_s", "stale_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"expected {name} above 0, found {value}")


@dataclass
class Api:
    """The server's state.

    Attributes:
        stopping: no request is taken any more.
        pending_requests, pending_tokens: those that are being tokenised, about: the engine does not know of them yet.
    """

    engine: Service[Any]
    options: ServerOptions
    stopping: bool = False
    pending_requests: int = 0
    pending_tokens: int = 0
    served: Served = field(init=False)
    registry: CollectorRegistry = field(init=False)
    timings: Timings = field(init=False)
    threads: ThreadPoolExecutor = field(init=False)

    def __post_init__(self) -> None:
        self.served = Served(
            self.engine, self.options.name, self.options.version, int(time.time()), TokenTexts(self.engine.tokenizer)
        )
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(self.engine, self.options.name))
        self.timings = Timings(self.registry, self.options.name)
        self.threads = ThreadPoolExecutor(TOKENISERS, "tokenise")

    @property
    def completion_body(self) -> type[CompletionBody]:
        """What the model that is served takes; `chat_body` likewise."""
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
        try:
            if len(raw) <= PARSED_HERE:
                body = kind.model_validate_json(raw)
            else:
                body = await asyncio.get_running_loop().run_in_executor(self.threads, kind.model_validate_json, raw)
        except ValidationError as error:
            raise invalid_body(error) from None
        if body.model not in (None, self.options.name):
            self.model_unknown(str(body.model))
        return body

    async def read(self, request: Request) -> bytes:
        """The bytes of a body; it stops reading where they become too many, whatever length was announced."""
        most = self.options.max_body_bytes
        too_long = ApiError(413, f"expected a body of at most {most} bytes", "body_too_large", None, {"connection": "close"})
        announced = request.headers.get("content-length", "0")
        if announced.isdecimal() and int(announced[:20]) > most:
            raise too_long
        raw = bytearray()
        async for part in request.stream():
            raw += part
            if len(raw) > most:
                raise too_long
        return bytes(raw)

    def model_unknown(self, name: str) -> None:
        raise ApiError(
            404, f"this server has no model {name[:100]!r}; it has {self.options.name!r}", "model_not_found", "model"
        )

    def check_serving(self) -> None:
        """Raises an `ApiError` while nothing is generated."""
        if self.stopping:
            raise stopping()
        if not self.engine.ready:
            raise ApiError(503, "the model is not ready yet", "server_not_ready", None, {"retry-after": "5"})

    @contextmanager
    def room(self, requests: int, tokens: int) -> Iterator[None]:
        """Counts requests as waiting while they are tokenised, so that a burst is turned away before that work.

        Raises:
            ApiError: there is no room for them.
        """
        self.pending_requests += requests
        self.pending_tokens += tokens
        try:
            self.engine.check_room(self.pending_requests, self.pending_tokens)
            yield
        except Overloaded as error:
            raise overloaded(error) from error
        finally:
            self.pending_requests -= requests
            self.pending_tokens -= tokens

    async def start(self, body: GenerationBody) -> tuple[Plan, Running]:
        """Tokenises a body and submits its requests, where there is room for them."""
        self.check_serving()
        requests, tokens = rough_size(body)
        most = self.engine.options.queue_requests
        if requests > most:
            expected = f"at most {most} choices, those of all prompts together"
            raise ApiError(400, f"expected {expected}, found {requests}", "too_many_choices", "n")
        running = Running(self.engine, self.timings)
        with self.room(requests, tokens):
            plan = await asyncio.get_running_loop().run_in_executor(self.threads, self.submitted, body, running)
        return plan, running

    def submitted(self, body: GenerationBody, running: Running) -> Plan:
        """The part of `start` that takes time with long prompts; it runs in a thread."""
        plan = plan_of(body, self.engine, self.options.template, self.options.deadline_s)
        tokens, most = sum(len(ask.prompt) for ask in plan.asks), self.engine.options.queue_tokens
        if tokens > most:
            expected = f"at most {most} prompt tokens, those of all choices together"
            raise ApiError(400, f"expected {expected}, found {tokens}", "too_many_tokens", "prompt")
        running.submit(plan.asks)
        return plan
