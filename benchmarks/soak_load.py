"""Load of a soak: valid and invalid requests, and checks of every answer."""

import asyncio
import json
import random
import re
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import httpx2

from tilewright.bench.answer import EventDecoder
from tilewright.bench.serving import http_client

PATIENCE_S = 90.0
"""Maximum seconds of an answer."""
THINK_S = 0.15
"""Mean seconds between two requests of a client."""
KEPT_PROBLEMS = 50
LOGPROB_TOLERANCE = 1e-3
COMPLETIONS = "/v1/completions"
CHATS = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
STOPS = ("\n\n", "return", "self", "):", "=")

Json = dict[str, Any]


class Wrong(Exception):
    """Raised for a wrong answer."""


def expect(holds: bool, what: str) -> None:
    if not holds:
        raise Wrong(what)


@dataclass(frozen=True)
class Limits:
    """Limits of the server: name of the model, positions of a request, waiting requests, bytes of a body."""

    model: str
    context: int
    queue_requests: int
    body_bytes: int


@dataclass(frozen=True)
class Text:
    """A prompt with its tokens from `/tokenize`; a conversation has `messages`."""

    text: str
    tokens: list[int]
    messages: list[Json] | None = None


@dataclass(frozen=True)
class Wanted:
    """A valid request, with the prompts that its answer is checked against."""

    route: str
    body: Json
    prompts: tuple[Text, ...]

    @property
    def stream(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def choices(self) -> int:
        return self.body.get("n", 1) * len(self.prompts)

    def streamed(self) -> "Wanted":
        options = {"include_usage": True, "continuous_usage_stats": True}
        return Wanted(self.route, self.body | {"stream": True, "stream_options": options}, self.prompts)


@dataclass
class Choice:
    """A choice of an answer, whole or joined from chunks."""

    text: str = ""
    finish: str | None = None
    logprobs: list[float | None] | None = None

    def take(self, choice: Json) -> None:
        """Adds a choice of a body or of a chunk."""
        message = choice.get("message") or choice.get("delta") or {}
        self.text += choice.get("text") or message.get("content") or ""
        if choice.get("finish_reason") is not None:
            expect(self.finish is None, "a choice ended twice")
            self.finish = choice["finish_reason"]
        found = choice.get("logprobs")
        if found is not None:
            values = found["token_logprobs"] if "token_logprobs" in found else [each["logprob"] for each in found["content"]]
            self.logprobs = [*(self.logprobs or ()), *values]


@dataclass
class Answer:
    """An answer with status 200.

    Attributes:
        arrivals: time of each chunk with text, and the number of tokens so far.
    """

    choices: dict[int, Choice] = field(default_factory=dict)
    usage: Json | None = None
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    done: bool = False

    def take(self, body: Json) -> None:
        expect("error" not in body, f"an error in the stream: {body.get('error')}")
        self.usage = body.get("usage") or self.usage
        for choice in body["choices"]:
            self.choices.setdefault(choice["index"], Choice()).take(choice)

    @property
    def facts(self) -> list[Any]:
        """Values that must be equal each time. Log-probabilities are not among them: they may differ by rounding."""
        ended = [(each.text, each.finish) for _, each in sorted(self.choices.items())]
        return [ended, (self.usage or {}).get("completion_tokens"), (self.usage or {}).get("prompt_tokens")]

    @property
    def logprobs(self) -> list[float]:
        return [value for _, each in sorted(self.choices.items()) for value in each.logprobs or () if value is not None]


def check_answer(wanted: Wanted, answer: Answer) -> None:
    """Raises `Wrong` if an answer does not fit its request."""
    body = wanted.body
    expect(sorted(answer.choices) == list(range(wanted.choices)), f"choices {sorted(answer.choices)}, not {wanted.choices}")
    expect(answer.done or not wanted.stream, "a stream without [DONE]")
    stops = body.get("stop", ())
    for index, choice in answer.choices.items():
        prompt = wanted.prompts[index // body.get("n", 1)]
        expect(choice.finish in ("stop", "length"), f"finish reason {choice.finish}")
        if body.get("echo"):
            expect(choice.text.startswith(prompt.text), "the echo is not the prompt")
        text = choice.text[len(prompt.text) if body.get("echo") else 0 :]
        expect(not any(stop in text for stop in stops), f"a stop string in {text[-40:]!r}")
        if body.get("ignore_eos") and not stops and "stop_token_ids" not in body:
            expect(choice.finish == "length", f"finish reason {choice.finish} without an end")
        if body["temperature"] == 0:
            expect(choice.text == answer.choices[index - index % body.get("n", 1)].text, "greedy choices differ")
    check_usage(wanted, answer)


def check_usage(wanted: Wanted, answer: Answer) -> None:
    """Checks the token counts of usage against prompts, limit and log-probabilities."""
    body = wanted.body
    usage = answer.usage
    if usage is None:
        raise Wrong("no usage")
    prompt = sum(len(each.tokens) for each in wanted.prompts)
    generated = usage["completion_tokens"]
    expect(usage["prompt_tokens"] == prompt, f"{usage['prompt_tokens']} prompt tokens, not {prompt}")
    expect(usage["total_tokens"] == prompt + generated, "the total is no sum")
    most = wanted.choices * body["max_tokens"]
    expect(0 < generated <= most, f"{generated} tokens of at most {most}")
    if all(choice.finish == "length" for choice in answer.choices.values()):
        expect(generated == most, f"{generated} tokens, ended by a length of {most}")
    logprobs = body.get("logprobs")
    if logprobs is not None and logprobs is not False:  # 0 requests log-probabilities without alternatives
        echoed = prompt * body.get("n", 1) if body.get("echo") else 0
        given = sum(len(choice.logprobs or ()) for choice in answer.choices.values())
        expect(given == generated + echoed, f"{given} log-probabilities for {generated + echoed} tokens")


@dataclass(frozen=True)
class Bad:
    """An invalid request, with the expected status and error code."""

    name: str
    method: str
    route: str
    body: bytes
    status: int
    code: str | None = None
    media: str = "application/json"


def bad_requests(limits: Limits) -> list[Bad]:
    """Returns requests with invalid JSON, invalid fields, oversized bodies and unknown routes."""

    def body(name: str, status: int, code: str | None, route: str = COMPLETIONS, **fields: Any) -> Bad:
        given = {"prompt": "x"} if route == COMPLETIONS else {"messages": [{"role": "user", "content": "x"}]}
        return Bad(name, "POST", route, json.dumps(given | fields).encode(), status, code)

    def raw(name: str, text: bytes, route: str = COMPLETIONS) -> Bad:
        return Bad(name, "POST", route, text, 400, "invalid_json")

    too_long = [7] * (limits.context + 1)
    return [
        raw("no JSON", b'{"prompt": "x", '),
        raw("half a string", b'{"prompt": "x'),
        raw("nothing", b""),
        raw("not UTF-8", b'{"prompt": "\xff\xfe\x80"}'),
        raw("bytes", bytes(range(256))),
        raw("deep lists", b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"),
        raw("deep objects", b'{"a":' * 20_000 + b"1" + b"}" * 20_000, CHATS),
        raw("half a surrogate", b'{"prompt": "\\ud800"}'),
        Bad("a list", "POST", COMPLETIONS, b"[1, 2]", 400),
        Bad("null", "POST", CHATS, b"null", 400),
        body("temperature below 0", 400, "invalid_value", temperature=-1),
        body("temperature text", 400, None, temperature="hot"),
        body("no tokens", 400, "invalid_value", max_tokens=0),
        body("n 0", 400, "invalid_value", n=0),
        body("n 17", 400, "invalid_value", n=17),
        body("unknown field", 400, "unknown_parameter", surprise=1),
        body("tools", 400, "missing_required_parameter", CHATS, tools=[{"type": "function"}]),
        body("empty prompt", 400, None, prompt=""),
        body("no such token", 400, None, prompt=[2**31 - 1]),
        body("negative token", 400, None, prompt=[-1]),
        body("role", 400, None, CHATS, messages=[{"role": "wizard", "content": "x"}]),
        body("no messages", 400, None, CHATS, messages=[]),
        body("stream options", 400, "unknown_parameter", stream_options={"surprise": 1}),
        body("bias", 400, "invalid_value", logit_bias={"5": 200}),
        body("no such bias", 400, "invalid_value", logit_bias={"99999999": 1}),
        body("more than all", 400, "invalid_value", min_tokens=9, max_tokens=8),
        body("logprobs 21", 400, "invalid_value", logprobs=21),
        body("seed", 400, None, seed=2**63),
        body("long stop", 400, None, stop=["x" * 129]),
        body("other model", 404, "model_not_found", model="other"),
        body("prompt too long", 400, "context_length_exceeded", prompt=too_long),
        body("context too small", 400, "context_length_exceeded", max_tokens=limits.context),
        body("far too many tokens", 400, "context_length_exceeded", max_tokens=2**31 - 1),  # a chat ends with the context
        body("too many choices", 400, "too_many_choices", prompt=["x"] * 16, n=16, max_tokens=1),
        Bad("unknown route", "POST", "/v1/images/generations", b"{}", 404),
        Bad("no route", "GET", "/../etc/passwd", b"", 404),
        Bad("odd route", "GET", "/%ff%00", b"", 404),
        Bad("no such model", "GET", "/v1/models/other", b"", 404, "model_not_found"),
        Bad("wrong method", "GET", COMPLETIONS, b"", 405),
        Bad("post to health", "POST", "/health", b"{}", 405),
        Bad("form", "POST", COMPLETIONS, b"prompt=x", 415, "unsupported_media_type", "application/x-www-form-urlencoded"),
        Bad("announced too large", "POST", COMPLETIONS, b" " * (limits.body_bytes + 1), 413, "body_too_large"),
    ]


class Drawer:
    """Draws valid requests."""

    def __init__(self, seed: int, texts: Sequence[Text], chats: Sequence[Text], limits: Limits):
        self.draws = random.Random(seed)
        self.texts = texts
        self.chats = chats
        self.limits = limits

    def sampling(self, chat: bool) -> Json:
        """Draws fields for sampling, stop conditions and log-probabilities."""
        pick = self.draws
        fields: Json = {"temperature": 0}
        if pick.random() < 0.5:
            fields = {"temperature": pick.choice((0.3, 0.8, 1.0, 1.5)), "seed": pick.randrange(2**32)}
            fields |= pick.choice(({}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}, {"top_p": 0.95, "top_k": 50}))
        if pick.random() < 0.2:
            fields |= pick.choice(({"repetition_penalty": 1.2}, {"presence_penalty": 0.5, "frequency_penalty": 0.5}))
        if pick.random() < 0.15:
            fields |= pick.choice(({"logit_bias": {"5": 4, "9": -100}}, {"stop_token_ids": [11, 12, 13]}))
        if pick.random() < 0.25:
            fields["stop"] = pick.sample(STOPS, pick.choice((1, 2)))
        if pick.random() < 0.3:
            fields["ignore_eos"] = True
        if pick.random() < 0.2:
            fields |= {"logprobs": True, "top_logprobs": pick.choice((0, 5))} if chat else {"logprobs": pick.choice((0, 5))}
        if not chat and pick.random() < 0.15:
            fields["echo"] = True
        if pick.random() < 0.15:
            fields["n"] = pick.choice((2, 3))
        return fields

    def wanted(self) -> Wanted:
        """Draws a request with one or two prompts, or with a conversation."""
        pick = self.draws
        chat = self.draws.random() < 0.35
        fields = self.sampling(chat)
        prompts = (pick.choice(self.chats if chat else self.texts),)
        if not chat and pick.random() < 0.1:
            prompts = (*prompts, pick.choice(self.texts))
        room = self.limits.context - max(len(each.tokens) for each in prompts)
        fields["max_tokens"] = min(room, pick.choice((1, 4, 16, 16, 32, 64, 128, 300)))
        if chat:
            body = {"messages": prompts[0].messages, **fields}
        elif pick.random() < 0.2 and "echo" not in fields:
            body = {"prompt": [each.tokens for each in prompts], **fields}
        else:
            body = {"prompt": prompts[0].text if len(prompts) == 1 else [each.text for each in prompts], **fields}
        if pick.random() < 0.3:
            body["model"] = self.limits.model
        made = Wanted(CHATS if chat else COMPLETIONS, body, prompts)
        return made.streamed() if pick.random() < 0.5 else made

    def small(self) -> Wanted:
        """Draws a request of a burst."""
        text = self.draws.choice(self.texts)
        fields = {"prompt": text.text, "temperature": 0, "max_tokens": self.draws.choice((4, 16, 40))}
        return Wanted(COMPLETIONS, fields, (text,))

    def long_stream(self, **fields: Any) -> Wanted:
        text = min(self.texts, key=lambda each: len(each.tokens))
        tokens = self.limits.context - len(text.tokens)
        body = {"prompt": text.text, "temperature": 0, "ignore_eos": True, "max_tokens": tokens, **fields}
        return Wanted(COMPLETIONS, body, (text,)).streamed()


def canaries(texts: Sequence[Text], chats: Sequence[Text]) -> list[tuple[str, Wanted]]:
    """Returns requests whose answers must not change. Streaming canaries are timed."""
    long = texts[0]
    short = texts[-1]
    chat = chats[0]

    def one(name: str, text: Text, **fields: Any) -> tuple[str, Wanted]:
        body = {"prompt": text.text, "temperature": 0, "max_tokens": 48, **fields}
        return name, Wanted(COMPLETIONS, body, (text,))

    drawn: Json = {"temperature": 0.9, "top_p": 0.95, "seed": 7}
    return [
        (name, wanted.streamed())
        for name, wanted in (
            one("greedy", long),
            one("sampled", long, **drawn),
            one("penalised", short, repetition_penalty=1.3),
            one("sampled and penalised", short, frequency_penalty=0.7, **drawn),
            one("log-probabilities", long, logprobs=3),
            one("stop string", short, stop=["return"], max_tokens=96),
            one("biased", long, logit_bias={"5": 3, "9": -100}, min_tokens=8, stop_token_ids=list(range(100)), **drawn),
            ("chat", Wanted(CHATS, {"messages": chat.messages, "temperature": 0, "max_tokens": 48}, (chat,))),
        )
    ] + [one("three choices", short, n=3, **drawn), one("echo", long, echo=True, logprobs=1, max_tokens=4)]


class Load:
    """Clients and their findings.

    Attributes:
        counts: number of requests by outcome; `refused` and `turned away` are correct outcomes.
        problems: the first `KEPT_PROBLEMS` problems, with their times.
        wrong: number of all problems.
        finished, abandoned: completed choices, and choices that were cancelled or rejected.
        ttft, tpot: time to first token and time per output token of canaries, in seconds, with the time of measurement.
        deviation: largest difference of a canary's log-probability from that of its first answer.
    """

    def __init__(self, url: str, limits: Limits, seed: int):
        self.url = httpx2.URL(url)
        self.limits = limits
        self.draws = random.Random(seed)
        self.http = http_client(url)
        self.counts: Counter[str] = Counter()
        self.problems: list[Json] = []
        self.wrong = self.finished = self.abandoned = self.bursts = 0
        self.burst_ended = 0.0
        self.first: dict[str, Answer] = {}
        self.ttft: list[tuple[float, float]] = []
        self.tpot: list[tuple[float, float]] = []
        self.deviation = 0.0
        self.began = time.monotonic()

    @property
    def now(self) -> float:
        return time.monotonic() - self.began

    async def texts(self, prompts: Sequence[str]) -> tuple[list[Text], list[Text]]:
        """Returns prompts with common prefixes, longest first, and conversations, with their tokens from `/tokenize`."""
        shared = prompts[0][:250] + prompts[1][:250]
        texts = list[Text]()
        chats = list[Text]()
        pieces = [shared + prompts[2][:400], *(shared + each[:200] for each in prompts[3:8]), *prompts[8:14]]
        for piece in (*pieces, *(each[-60:] for each in prompts[14:18]), "def main():"):
            texts.append(Text(piece, (await self.json("/tokenize", {"prompt": piece}))["tokens"]))
        texts.sort(key=lambda each: -len(each.tokens))
        for number, piece in enumerate(prompts[18:24]):
            messages: list[Json] = [{"role": "system", "content": shared}] if number % 2 else []
            messages += [{"role": "user", "content": [{"type": "text", "text": piece[:150]}]}]
            messages += [{"role": "assistant", "content": piece[150:200]}, {"role": "user", "content": piece[200:300]}]
            chats.append(Text("", (await self.json("/tokenize", {"messages": messages}))["tokens"], messages))
        return texts, chats

    async def json(self, route: str, body: Json) -> Json:
        status, _, raw = await self.exchange("POST", route, json.dumps(body).encode())
        expect(status == 200, f"{route}: status {status}: {raw[:200]!r}")
        return json.loads(raw)

    async def exchange(self, method: str, route: str, body: bytes = b"") -> tuple[int, dict[str, str], bytes]:
        """Sends a request. Returns status, headers and body of the answer."""
        async with asyncio.timeout(PATIENCE_S):
            response = await self.http.request(method, route, content=body, headers=JSON)
        return response.status_code, dict(response.headers), response.content

    async def attempt(self, kind: str, work: Awaitable[str]) -> None:
        """Awaits `work` and counts its outcome. Errors are problems of the run."""
        try:
            self.counts[await work] += 1
        except (Wrong, OSError, ValueError, LookupError, TypeError, httpx2.HTTPError) as error:
            what = "no answer in time" if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"
            self.wrong += 1
            if len(self.problems) < KEPT_PROBLEMS:
                self.problems.append({"at_s": round(self.now, 1), "kind": kind, "what": what[:500]})

    def stream(self, wanted: Wanted) -> AbstractAsyncContextManager[httpx2.Response]:
        return self.http.stream("POST", wanted.route, json=wanted.body)

    async def answered(self, wanted: Wanted) -> Answer | None:
        """Sends a valid request. Returns its checked answer, or None if the server was full during a burst."""
        began = self.now
        async with asyncio.timeout(PATIENCE_S), self.stream(wanted) as response:
            if response.status_code == 503:
                self.check_full(began, dict(response.headers), json.loads(await response.aread()))
                self.abandoned += wanted.choices
                return None
            if response.status_code != 200:
                raise Wrong(f"status {response.status_code}: {(await response.aread())[:200]!r} for {str(wanted.body)[:200]}")
            answer = Answer()
            if not wanted.stream:
                answer.take(json.loads(await response.aread()))
            else:
                async for event in events(response):
                    self.take_event(wanted, answer, event)
        check_answer(wanted, answer)
        self.finished += wanted.choices
        return answer

    def take_event(self, wanted: Wanted, answer: Answer, data: str) -> None:
        expect(not answer.done, "something behind [DONE]")
        if data == "[DONE]":
            answer.done = True
            return
        chunk = json.loads(data)
        begins = not answer.choices
        answer.take(chunk)
        if begins and wanted.route == CHATS:
            expect(chunk["choices"][0]["delta"].get("role") == "assistant", "the first chunk has no role")
        if chunk["choices"]:
            answer.arrivals.append((time.monotonic(), chunk["usage"]["completion_tokens"]))

    def check_full(self, began: float, headers: dict[str, str], body: Json) -> None:
        """Checks a 503: its code, its `Retry-After`, and that a burst was running."""
        expect(body["error"]["code"] == "server_overloaded", f"503 {body['error']['code']}")
        expect(int(headers.get("retry-after", "0")) >= 1, "a 503 without Retry-After")
        expect(self.bursts > 0 or self.burst_ended >= began, "a 503 without a burst")

    async def ask(self, wanted: Wanted) -> str:
        answer = await self.answered(wanted)
        return "turned away" if answer is None else "streamed" if wanted.stream else "whole"

    async def canary(self, name: str, wanted: Wanted) -> str:
        """Repeats a request and compares the answer with the first one."""
        began = time.monotonic()
        at = self.now
        answer = await self.answered(wanted)
        if answer is None:
            return "turned away"
        first = self.first.setdefault(name, answer)
        expect(answer.facts == first.facts, f"canary {name}: {answer.facts} after {first.facts}")
        differences = [abs(old - new) for old, new in zip(first.logprobs, answer.logprobs, strict=True)]
        self.deviation = max([self.deviation, *differences])
        expect(self.deviation <= LOGPROB_TOLERANCE, f"canary {name}: log-probabilities differ by {self.deviation}")
        if answer.arrivals:
            (first_s, first_tokens), (last_s, last_tokens) = answer.arrivals[0], answer.arrivals[-1]
            self.ttft.append((at, first_s - began))
            if last_tokens > first_tokens:
                self.tpot.append((at, (last_s - first_s) / (last_tokens - first_tokens)))
        return "canaries"

    async def refused(self, bad: Bad) -> str:
        """Sends an invalid request and checks the error. A full queue answers 503 before the server reads the prompt."""
        began = self.now
        try:
            async with asyncio.timeout(PATIENCE_S):
                response = await self.http.request(bad.method, bad.route, content=bad.body, headers={"Content-Type": bad.media})
        except httpx2.TransportError:
            # The server closes the connection without reading the whole body, so its answer may be lost.
            expect(bad.status == 413, f"{bad.name}: the connection broke")
            return "refused"
        status = response.status_code
        if status == 503:
            self.check_full(began, dict(response.headers), response.json())
            return "turned away"
        expect(status == bad.status, f"{bad.name}: status {status}, not {bad.status}: {response.content[:200]!r}")
        error = response.json()["error"]
        expect(set(error) == {"message", "type", "param", "code"}, f"{bad.name}: {sorted(error)}")
        expect(bool(error["message"]) and bad.code in (None, error["code"]), f"{bad.name}: {error}")
        return "refused"

    @asynccontextmanager
    async def unread(self, route: str, body: bytes, length: int | None = None) -> AsyncIterator[None]:
        """Posts a request on a new connection and aborts it without reading; `length` replaces the length of the body."""
        _, writer = await asyncio.open_connection(self.url.host, self.url.port)
        try:
            head = f"POST {route} HTTP/1.1\r\nHost: soak\r\nContent-Type: application/json\r\n"
            head += f"Content-Length: {len(body) if length is None else length}\r\n\r\n"
            writer.write(head.encode() + body)
            yield
        finally:
            writer.transport.abort()

    async def leave(self, wanted: Wanted, after_s: float) -> str:
        """Disconnects after `after_s` seconds without reading: before the first token, in the queue, or later."""
        self.abandoned += wanted.choices
        async with self.unread(wanted.route, json.dumps(wanted.body).encode()):
            await asyncio.sleep(after_s)
        return "gone early"

    async def leave_midway(self, wanted: Wanted, chunks: int) -> str:
        """Disconnects after some chunks of a stream."""
        self.abandoned += wanted.choices
        began = self.now
        async with asyncio.timeout(PATIENCE_S), self.stream(wanted) as response:
            if response.status_code == 503:
                self.check_full(began, dict(response.headers), json.loads(await response.aread()))
                return "turned away"
            expect(response.status_code == 200, f"status {response.status_code}")
            async for _ in events(response):
                chunks -= 1
                if chunks <= 0:
                    break
        return "gone midway"

    async def leave_in_body(self) -> str:
        async with self.unread(COMPLETIONS, b'{"prompt": "def ', length=1000):
            await asyncio.sleep(0.05)
        return "gone in the body"

    async def read_slowly(self, wanted: Wanted) -> str:
        """Reads a stream slowly through a small buffer. The server must wait and lose nothing."""
        began = self.now
        small = httpx2.AsyncHTTPTransport(socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)])
        async with (
            asyncio.timeout(2 * PATIENCE_S),
            http_client(self.url, transport=small) as client,
            client.stream("POST", wanted.route, json=wanted.body) as response,
        ):
            answer = Answer()
            if response.status_code == 503:
                self.abandoned += wanted.choices
                self.check_full(began, dict(response.headers), json.loads(await response.aread()))
                return "turned away"
            await asyncio.sleep(2.0)
            async for event in events(response):
                self.take_event(wanted, answer, event)
                await asyncio.sleep(0.01)
        check_answer(wanted, answer)
        self.finished += wanted.choices
        return "read slowly"

    async def round_trip(self, text: Text) -> str:
        """Tokenises and detokenises a text."""
        tokens = (await self.json("/tokenize", {"prompt": text.text}))["tokens"]
        expect(tokens == text.tokens, "other tokens than before")
        expect((await self.json("/detokenize", {"tokens": tokens}))["prompt"] == text.text, "tokens do not give the text back")
        return "tokenised"

    async def lookups(self) -> str:
        for route in ("/v1/models", f"/v1/models/{self.limits.model}", "/version", "/ready", "/", "/tokenizer_info"):
            status, _, _ = await self.exchange("GET", route)
            expect(status == 200, f"{route}: status {status}")
        return "looked up"

    async def client(self, drawer: Drawer, ended: asyncio.Event) -> None:
        """Runs a client that sends one request after another until the end."""
        pick = random.Random(self.draws.randrange(2**32))
        bad = bad_requests(self.limits)
        kinds: dict[str, tuple[int, Callable[[], Awaitable[str]]]] = {
            "answered": (50, lambda: self.ask(drawer.wanted())),
            "refused": (25, lambda: self.refused(pick.choice(bad))),
            "gone early": (7, lambda: self.leave(drawer.wanted(), pick.choice((0.0, 0.002, 0.02, 0.1)))),
            "gone midway": (7, lambda: self.leave_midway(drawer.long_stream(), pick.randrange(1, 12))),
            "gone in the body": (2, self.leave_in_body),
            "read slowly": (2, lambda: self.read_slowly(drawer.long_stream(logprobs=5))),
            "tokenised": (4, lambda: self.round_trip(pick.choice(drawer.texts))),
            "looked up": (3, self.lookups),
        }
        names = list(kinds)
        weights = [weight for weight, _ in kinds.values()]
        while not ended.is_set():
            (kind,) = pick.choices(names, weights)
            await self.attempt(kind, kinds[kind][1]())
            await asyncio.sleep(pick.expovariate(1 / THINK_S))

    async def bursts_of(self, drawer: Drawer, every_s: float, ended: asyncio.Event) -> None:
        """Sends bursts of more requests than the queue holds. Some clients disconnect while they wait."""
        while not await reached(ended, every_s):
            self.bursts += 1
            count = 2 * self.limits.queue_requests
            leaving = (self.leave(drawer.small(), self.draws.random() * 0.5) for _ in range(count // 4))
            asking = (self.ask(drawer.small()) for _ in range(count))
            await asyncio.gather(*(self.attempt("burst", each) for each in (*leaving, *asking)))
            self.bursts = self.bursts - 1
            self.burst_ended = self.now
            self.counts["bursts"] += 1

    async def canaries_of(self, each: Sequence[tuple[str, Wanted]], every_s: float, ended: asyncio.Event) -> None:
        for name, wanted in cycle(each):
            await self.attempt(f"canary {name}", self.canary(name, wanted))
            if await reached(ended, every_s):
                return


async def reached(ended: asyncio.Event, within_s: float) -> bool:
    """Waits for `within_s` seconds or the end. Returns True at the end."""
    try:
        await asyncio.wait_for(ended.wait(), within_s)
    except TimeoutError:
        return False
    return True


async def events(response: httpx2.Response) -> AsyncIterator[str]:
    """Yields the data of a stream's events."""
    decoder = EventDecoder()
    async for part in response.aiter_raw():
        for event in decoder.feed(part):
            yield event.data


def metrics_of(text: str) -> dict[str, float]:
    """Parses Prometheus' text. Returns values by name with labels, without the label of the model."""
    found = re.findall(r"^([a-zA-Z_:]+)\{([^}]*)\} ([^ ]+)$", text, re.MULTILINE)
    labelled = ((name, re.sub(r'model_name="[^"]*",?', "", labels).strip(","), float(value)) for name, labels, value in found)
    return {name + (f"{{{labels}}}" if labels else ""): value for name, labels, value in labelled}
