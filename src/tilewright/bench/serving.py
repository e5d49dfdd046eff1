"""Load generator of `tilewright bench serving`: sends a workload's requests on time and records when each chunk arrives."""

import asyncio
import json
import os
import re
import resource
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import httpx2

from tilewright.bench.answer import EventDecoder, Malformed, Refused, StreamedAnswer, error_message
from tilewright.bench.workload import PlannedRequest

AFTER_DONE_SECONDS = 0.1
"""Maximum time from `[DONE]` to the end of the response. After that the connection is closed and not reused."""
KEPT_SECONDS = 1.0
"""Seconds for which idle connections are reused. Servers close theirs after 2 s or more, perhaps as the next request is
sent."""
MAX_ERROR_BYTES = 1 << 16
"""Bytes of an error response that are read."""


@dataclass(frozen=True)
class RequestSettings:
    """Settings that all requests share.

    Attributes:
        model: name of the model on the server.
        chat: use `/chat/completions` instead of `/completions`.
        temperature: sampling temperature; above 0, request n has the seed `seed + n`.
        ignore_eos: generate past the end-of-sequence token (an extension of vLLM); sent only if True.
        continuous_usage: request token counts in every chunk (an extension of vLLM).
        timeout_s: time limit of a request, from connecting to the end of its response.
    """

    model: str
    chat: bool = False
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    continuous_usage: bool = True
    timeout_s: float = 600.0

    @property
    def route(self) -> str:
        return "/chat/completions" if self.chat else "/completions"

    def body(self, planned: PlannedRequest) -> dict[str, Any]:
        """Returns the JSON body of a request."""
        options: dict[str, Any] = {"include_usage": True}
        if self.continuous_usage:
            options["continuous_usage_stats"] = True
        body: dict[str, Any] = {"model": self.model, "temperature": self.temperature, "stream": True, "stream_options": options}
        if self.chat:
            body |= {"messages": planned.messages, "max_completion_tokens": planned.max_new_tokens}
        else:
            text = planned.prompt
            body |= {"prompt": text if isinstance(text, str) else text.tolist(), "max_tokens": planned.max_new_tokens}
        if self.temperature:
            body["seed"] = self.seed + planned.number
        if self.ignore_eos:
            body["ignore_eos"] = True
        return body


@dataclass(frozen=True)
class Failure:
    """Reason for a failed request.

    Attributes:
        kind: `unreachable`, `disconnected`, `malformed`, `timeout`, `empty`, `error_event` or `http_<status>`.
        message: text of the error.
    """

    kind: str
    message: str


@dataclass
class Outcome:
    """Result of a request. Times are seconds since the start of the run.

    Attributes:
        due_s: time at which the request was due.
        held_s: seconds for which the limit of concurrent requests delayed the request.
        sent_s, end_s: times of sending, and of the response's end or failure.
        answer: received part of the response, also of a failed request; its times are on the same clock.
    """

    planned: PlannedRequest
    due_s: float
    held_s: float = 0.0
    sent_s: float = 0.0
    end_s: float = 0.0
    answer: StreamedAnswer = field(default_factory=StreamedAnswer)
    failure: Failure | None = None

    @property
    def slip_s(self) -> float:
        """Seconds by which this client sent the request late, without `held_s`."""
        return self.sent_s - self.due_s - self.held_s

    @property
    def ttft_s(self) -> float | None:
        """Time to first token in seconds."""
        first = self.answer.first_s
        return None if first is None else first - self.sent_s

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.sent_s

    @property
    def prompt_tokens(self) -> int | None:
        """Number of prompt tokens, from the usage or from a prompt of token ids; otherwise None."""
        counted = self.answer.prompt_tokens
        return len(self.planned.prompt) if counted is None and not isinstance(self.planned.prompt, str) else counted


def api_url(url: str) -> httpx2.URL:
    """Returns the base URL of an API. A URL without a path means `/v1`.

    Raises:
        ValueError: The URL has no valid scheme or host, or has a user name, query or fragment.
    """
    expected = "expected a URL like http://127.0.0.1:8000 or https://example.org/v1"
    try:
        parsed = httpx2.URL(url)
        if not 0 < (parsed.port or 80) < 1 << 16:
            raise httpx2.InvalidURL("the port is out of range")
    except httpx2.InvalidURL as error:
        raise ValueError(f"{expected}, found {url!r} ({error})") from None
    if parsed.scheme not in ("http", "https") or not parsed.host or re.search(r"[^!-~]", url):
        raise ValueError(f"{expected}, found {url!r}")
    if parsed.userinfo or parsed.query or parsed.fragment:
        raise ValueError(f"{expected}, without user name, query or fragment")  # does not print a password
    return parsed.copy_with(path=parsed.path.rstrip("/") or "/v1")


def http_client(base_url: httpx2.URL | str, headers: Mapping[str, str] | None = None, **more: Any) -> httpx2.AsyncClient:
    """Returns a client without time limits, proxies, redirects, compression or a limit of connections."""
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEPT_SECONDS)
    headers = {"Accept-Encoding": "identity", **(headers or {})}
    more = {"limits": limits, "timeout": None, "trust_env": False, "verify": ssl.create_default_context(), **more}
    return httpx2.AsyncClient(base_url=base_url, headers=headers, **more)


async def replay(
    client: httpx2.AsyncClient,
    settings: RequestSettings,
    plan: Sequence[PlannedRequest],
    concurrency: int | None = None,
    on_change: Callable[[Outcome, bool], None] = lambda outcome, sent: None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Outcome]:
    """Sends every request when it is due, at most `concurrency` at a time, in the order of the plan.

    Failures are recorded in the outcomes; no request is sent twice.

    Args:
        on_change: called with True when a request is sent and with False when it has ended.
        clock: clock in seconds.
    """
    gate: AbstractAsyncContextManager[Any] = nullcontext() if concurrency is None else asyncio.Semaphore(concurrency)
    outcomes = [Outcome(planned, planned.due_s) for planned in plan]
    allow_connections(min(len(plan), concurrency or len(plan)))
    start = clock()

    def now() -> float:
        return clock() - start

    async def send(outcome: Outcome) -> None:
        await asyncio.sleep(outcome.due_s - now())
        awake = now()
        async with gate:
            outcome.held_s = now() - awake if concurrency else 0.0
            outcome.sent_s = now()
            on_change(outcome, True)
            outcome.failure = await post(client, settings, outcome, now)
            outcome.end_s = outcome.end_s or now()
        on_change(outcome, False)

    async with asyncio.TaskGroup() as group:
        for outcome in outcomes:
            group.create_task(send(outcome))
    return outcomes


def allow_connections(count: int) -> None:
    """Raises the process's limit of open files for this number of connections, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + 256  # other open files
    if soft != resource.RLIM_INFINITY and soft < needed:
        limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))


async def post(
    client: httpx2.AsyncClient, settings: RequestSettings, outcome: Outcome, now: Callable[[], float]
) -> Failure | None:
    """Posts a request and reads the response into `outcome`. Returns the failure, if any."""
    body = json.dumps(settings.body(outcome.planned)).encode()
    headers = {"Content-Type": "application/json"}
    answer = outcome.answer
    try:
        async with (
            asyncio.timeout(settings.timeout_s),
            client.stream("POST", settings.route, content=body, headers=headers) as response,
        ):
            await check_status(response)
            parts = response.aiter_raw()
            await read_events(response, parts, answer, now)
            outcome.end_s = now()
            if answer.done:
                await finish(parts)
    except TimeoutError:
        return Failure("timeout", f"no complete answer within {settings.timeout_s:g} s; {len(answer.chunks)} chunks received")
    except Refused as error:
        return Failure(error.kind, one_line(error))
    except httpx2.ConnectError as error:
        return Failure("unreachable", connection_error(client, error))
    except httpx2.RemoteProtocolError as error:
        broken = any(words in str(error).lower() for words in ("disconnected", "closed connection"))
        return Failure("disconnected" if broken else "malformed", one_line(error))
    except (httpx2.TransportError, OSError) as error:
        return Failure("disconnected", one_line(error))
    except ValueError as error:
        return Failure("malformed", one_line(error))
    if not answer.ended:
        return Failure("disconnected", f"the stream ended without [DONE] after {len(answer.chunks)} chunks")
    return None if answer.tokens else Failure("empty", "the answer has no tokens")


def connection_error(client: httpx2.AsyncClient, error: BaseException) -> str:
    """Returns a message with the system's own error, which the client hides behind "All connection attempts failed"."""
    while (earlier := error.__cause__ or error.__context__) is not None:
        error = earlier
    reason = getattr(error, "strerror", None) or str(error)
    if isinstance(error, ConnectionError) and error.errno:
        reason = os.strerror(error.errno)
    return f"no connection to {client.base_url.netloc.decode()}: {reason}"


def one_line(error: Exception) -> str:
    """Returns an error's message as one line of printable characters."""
    text = " ".join(str(error).split())[:300]
    return "".join(each if each.isprintable() else "�" for each in text) or "no message"


async def check_status(response: httpx2.Response) -> None:
    """Raises `Refused` for a status other than 200, with the server's message and its `Retry-After`."""
    if response.status_code == 200:
        return
    body = b""
    async for part in response.aiter_raw():
        body += part
        if len(body) >= MAX_ERROR_BYTES:
            break
    text = body.decode("utf-8", "replace")
    try:
        message = error_message(json.loads(text))
    except (ValueError, RecursionError):
        message = text
    retry_after = response.headers.get("retry-after")
    message = message.strip()[:240]
    message = message if retry_after is None else f"{message} (Retry-After: {retry_after[:40]})"
    raise Refused(f"http_{response.status_code}", message)


async def read_events(
    response: httpx2.Response, parts: AsyncIterator[bytes], answer: StreamedAnswer, now: Callable[[], float]
) -> None:
    """Reads the stream up to `[DONE]` or to its end. All events of one received part have its arrival time."""
    kind = response.headers.get("content-type", "none").partition(";")[0].strip().lower()
    if kind != "text/event-stream":
        raise Malformed(f"expected a stream of type text/event-stream, found {kind[:60]}")
    decoder = EventDecoder()
    async for part in parts:
        arrival = now()
        for event in decoder.feed(part):
            answer.add(event, arrival)
        if answer.done:
            return


async def finish(parts: AsyncIterator[bytes]) -> None:
    """Reads the rest of the response after `[DONE]`, so that the connection can be reused."""
    try:
        async with asyncio.timeout(AFTER_DONE_SECONDS):
            async for _ in parts:
                continue
    except (TimeoutError, httpx2.TransportError):
        return


class NoModel(OSError):
    """Raised if the server lists no model."""


async def first_model(client: httpx2.AsyncClient, timeout_s: float) -> str:
    """Returns the first model of `/models`.

    Raises:
        NoModel: The server is unreachable or lists no model.
    """
    failed = f"no model from {str(client.base_url).rstrip('/')}/models"
    unexpected = f"{failed}: expected a list of models, found something else"
    try:
        async with asyncio.timeout(timeout_s), client.stream("GET", "/models") as response:
            await check_status(response)
            name = json.loads(await response.aread())["data"][0]["id"]
    except Refused as error:
        raise NoModel(f"{failed}: {error.kind.replace('_', ' ')}: {one_line(error)}") from None
    except TimeoutError:
        raise NoModel(f"{failed}: no answer within {timeout_s:g} s") from None
    except httpx2.ConnectError as error:
        raise NoModel(f"{failed}: {connection_error(client, error)}") from None
    except (OSError, httpx2.HTTPError) as error:
        raise NoModel(f"{failed}: {one_line(error)}") from None
    except (ValueError, LookupError, TypeError) as error:
        raise NoModel(unexpected) from error
    if not isinstance(name, str) or not name.isprintable():
        raise NoModel(unexpected)
    return name


async def characters_per_token(client: httpx2.AsyncClient, settings: RequestSettings, text: str) -> float | None:
    """Returns the characters per token of a text by the server's own count; None if the server does not count.

    Compares the whole text with its first half: tokens that a chat template adds to both cancel out.
    """
    counts = list[int]()
    for part in (text, text[: len(text) // 2]):
        outcome = Outcome(PlannedRequest(0, 0.0, part, 1), 0.0)
        await post(client, settings, outcome, time.perf_counter)
        counts.append(outcome.answer.prompt_tokens or 0)
    whole, half = counts
    return (len(text) - len(text) // 2) / (whole - half) if whole > half > 0 else None


def failures(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Returns the number of failed requests of each kind, most frequent first, with the first message."""
    failed = [outcome.failure for outcome in outcomes if outcome.failure is not None]
    first = {failure.kind: failure.message for failure in reversed(failed)}
    counts = Counter(failure.kind for failure in failed)
    return [{"kind": kind, "requests": count, "first_message": first[kind]} for kind, count in counts.most_common()]
