"""`tilewright bench serving`: sends a workload's requests to a server when they are due, and keeps what came and when."""

import asyncio
import json
import resource
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from tilewright.bench.answer import Refused, StreamedAnswer, error_message
from tilewright.bench.http_client import Connections, Malformed, Response, ServerDisconnected, Unreachable
from tilewright.bench.sse import EventReader
from tilewright.bench.workload import Planned

AFTER_DONE_SECONDS = 0.1
"""Seconds that the end of a response may take once the stream has said that it is over; then its connection is given up."""


@dataclass(frozen=True)
class Peer:
    """The server, and how it is asked.

    Attributes:
        model: its name there.
        chat: `/chat/completions` in the place of `/completions`.
        temperature: of every request; where it is not 0, request n is seeded with `seed + n`.
        ignore_eos: whether to generate on behind an end of sequence (vLLM's extension); the field is sent only where it is set.
        continuous_usage: whether every chunk is to say how many tokens there are (vLLM's extension).
        timeout_s: for a request, from its connection to the end of its answer.
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

    def body(self, planned: Planned) -> dict[str, Any]:
        """JSON body that is posted for a request."""
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
    """Reason why a request has no answer, and what was said.

    It is one of `unreachable`, `disconnected`, `malformed`, `timeout`, `empty`, `error_event` and `http_<status>`.
    """

    kind: str
    message: str


@dataclass
class Outcome:
    """A request with its answer or failure. Times are seconds since the start of the run.

    Attributes:
        due_s: when it was to be sent.
        held_s: how long the limit of concurrent requests then held it back, in seconds.
        sent_s, end_s: when it was sent, and when its answer was complete or had failed.
        answer: what came, also before a failure; its times are on the same clock.
    """

    planned: Planned
    due_s: float
    held_s: float = 0.0
    sent_s: float = 0.0
    end_s: float = 0.0
    answer: StreamedAnswer = field(default_factory=StreamedAnswer)
    failure: Failure | None = None

    @property
    def slip_s(self) -> float:
        """Seconds by which this client sent it late, beyond what the limit of concurrent requests asks for."""
        return self.sent_s - self.due_s - self.held_s

    @property
    def ttft_s(self) -> float | None:
        first = self.answer.first_s
        return None if first is None else first - self.sent_s

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.sent_s

    @property
    def prompt_tokens(self) -> int | None:
        """By the usage, or of a prompt of token ids; otherwise nobody knows."""
        said = self.answer.prompt_tokens
        return len(self.planned.prompt) if said is None and not isinstance(self.planned.prompt, str) else said


async def replay(
    connections: Connections,
    peer: Peer,
    plan: Sequence[Planned],
    concurrency: int | None = None,
    on_change: Callable[[Outcome, bool], None] = lambda outcome, sent: None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Outcome]:
    """Sends every request when it is due, at most `concurrency` at a time, in the order of the plan.

    A failure is an outcome like another: it is kept, and nothing is sent twice.

    Args:
        on_change: called when a request is sent (True) and when it has ended (False).
        clock: in seconds.
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
            outcome.failure = await ask(connections, peer, outcome, now)
            outcome.end_s = outcome.end_s or now()
        on_change(outcome, False)

    async with asyncio.TaskGroup() as group:
        for outcome in outcomes:
            group.create_task(send(outcome))
    return outcomes


def allow_connections(wanted: int) -> None:
    """Raises the process's limit of open files as far as so many connections need and the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + 256  # what else is open
    if soft != resource.RLIM_INFINITY and soft < needed:
        limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))


async def ask(connections: Connections, peer: Peer, outcome: Outcome, now: Callable[[], float]) -> Failure | None:
    """Posts a request and reads its answer into `outcome`; why it has none, if so."""
    body = json.dumps(peer.body(outcome.planned)).encode()
    answer = outcome.answer
    try:
        async with asyncio.timeout(peer.timeout_s), connections.request("POST", peer.route, body) as response:
            await check_status(response)
            await read_events(response, answer, now)
            outcome.end_s = now()
            if answer.done:
                await finish(response)
    except TimeoutError:
        return Failure("timeout", f"no complete answer within {peer.timeout_s:g} s; {len(answer.chunks)} chunks came")
    except Refused as error:
        return Failure(error.kind, one_line(error))
    except Unreachable as error:
        return Failure("unreachable", one_line(error))
    except OSError as error:
        return Failure("disconnected", one_line(error))
    except ValueError as error:  # what is no HTTP, no stream of events, no completion
        return Failure("malformed", one_line(error))
    if not answer.ended:
        return Failure("disconnected", f"the stream ended without [DONE] after {len(answer.chunks)} chunks")
    return None if answer.tokens else Failure("empty", "the answer has no tokens")


def one_line(error: Exception) -> str:
    """An error's message in one line, fit for a terminal whatever a server put into it."""
    text = " ".join(str(error).split())[:300]
    return "".join(each if each.isprintable() else "�" for each in text) or "no message"


async def check_status(response: Response) -> None:
    """Raises `Refused` for what is no answer, with what the server says, and when it wants to be asked again."""
    if response.status == 200:
        return
    text = await response.text()
    try:
        said = error_message(json.loads(text))
    except (ValueError, RecursionError):
        said = text
    again = response.headers.get("retry-after")
    said = said.strip()[:240]
    raise Refused(f"http_{response.status}", said if again is None else f"{said} (Retry-After: {again[:40]})")


async def read_events(response: Response, answer: StreamedAnswer, now: Callable[[], float]) -> None:
    """Reads the stream up to its `[DONE]`, or to its end."""
    kind = response.headers.get("content-type", "none").partition(";")[0].strip().lower()
    if kind != "text/event-stream":
        raise Malformed(f"expected a stream of type text/event-stream, found {kind[:60]}")
    events = EventReader()
    while not answer.done and (data := await response.read()):
        came = now()
        for event in events.feed(data):
            answer.take(event, came)


async def finish(response: Response) -> None:
    """Reads what comes behind `[DONE]`, so that the connection can be used again."""
    try:
        async with asyncio.timeout(AFTER_DONE_SECONDS):
            while await response.read():
                continue
    except (TimeoutError, ServerDisconnected, Malformed):
        response.reusable = False


class NoModel(OSError):
    """The server does not say which model it has."""


async def first_model(connections: Connections, timeout_s: float) -> str:
    """The first model of `/models`.

    Raises:
        NoModel: there is none, or no server, with the reason.
    """
    where = f"{connections.address.url}/models"
    try:
        async with asyncio.timeout(timeout_s), connections.request("GET", "/models") as response:
            await check_status(response)
            listed = json.loads(await response.text(1 << 22))["data"]
            name = listed[0]["id"]
            if isinstance(name, str) and name.isprintable():
                return name
    except Refused as error:
        raise NoModel(f"no model from {where}: {error.kind.replace('_', ' ')}: {one_line(error)}") from None
    except TimeoutError:
        raise NoModel(f"no model from {where}: no answer within {timeout_s:g} s") from None
    except OSError as error:
        raise NoModel(f"no model from {where}: {error}") from None
    except (ValueError, LookupError, TypeError) as error:
        raise NoModel(f"no model from {where}: expected a list of models, found something else") from error
    raise NoModel(f"no model from {where}: expected a list of models, found something else")


async def characters_per_token(connections: Connections, peer: Peer, text: str) -> float | None:
    """Characters of a text for each token that the server counts; None where it does not say.

    Two requests, with all of the text and with half of it: what a chat's template adds to both is no part of the rate.
    """
    counted = list[int]()
    for part in (text, text[: len(text) // 2]):
        outcome = Outcome(Planned(0, 0.0, part, 1), 0.0)
        await ask(connections, peer, outcome, time.perf_counter)
        counted.append(outcome.answer.prompt_tokens or 0)
    whole, half = counted
    return (len(text) - len(text) // 2) / (whole - half) if whole > half > 0 else None


def failures(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Number of failed requests of each kind, most first, with the first message."""
    failed = [outcome.failure for outcome in outcomes if outcome.failure is not None]
    first = {failure.kind: failure.message for failure in reversed(failed)}
    counts = Counter(failure.kind for failure in failed)
    return [{"kind": kind, "requests": count, "first_message": first[kind]} for kind, count in counts.most_common()]
