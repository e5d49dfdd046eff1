"""An engine without a model, for what a real one does seldom: being full, slow, stuck, failing.

It says what it was asked: the tokens of the prompt, again and again, a fixed number of them to an update. Stop strings, ends
and text are those of the real one (`decode/request.py`).
"""

import json
import threading
import time
from dataclasses import dataclass, field
from functools import cache
from itertools import islice

from rich.console import Console

from tilewright.decode.drafters.ngram import NGram
from tilewright.decode.language_model import LanguageModel
from tilewright.decode.request import Request
from tilewright.engine.engine import Engine
from tilewright.engine.options import EngineOptions
from tilewright.engine.request import (
    Ask,
    EndReason,
    Figures,
    Listener,
    Overloaded,
    Round,
    Stopped,
    Ticket,
    Token,
    TokenLogprobs,
    Update,
)
from tilewright.models.decoder import config_from_hf
from tilewright.models.hub import PACKAGED
from tilewright.models.tokenizer import StreamDecoder, load_tokenizer

FOLDER = PACKAGED["demo"]


@cache
def model_without_weights() -> LanguageModel:
    """The demo's tokenizer and configuration, with an n-gram drafter of blocks of 4."""
    lm = object.__new__(LanguageModel)
    lm.tokenizer = load_tokenizer(FOLDER)
    lm.target = config_from_hf(json.loads((FOLDER / "config.json").read_text()), "config.json")
    lm.drafter = NGram(4)
    return lm


@dataclass(eq=False)
class Job:
    ticket: Ticket
    listener: Listener
    request: Request
    begun: bool = False
    cancelled: bool = False


@dataclass
class FakeEngine(Engine):
    """The engine's interface; nothing of its inside.

    Attributes:
        per_update: tokens of an update; all but the last of them count as drafted.
        pause_s: before each round of updates.
        room: how many requests may be there at once.
        ends: what to end requests with instead, after so many updates.
        held: while set, nothing moves on.
    """

    per_update: int = 3
    pause_s: float = 0.0
    room: int = 256
    context: int = 2048
    ends: tuple[EndReason, int] | None = None
    ready: bool = True
    options: EngineOptions = field(default_factory=EngineOptions)
    step_age_s: float = 0.0
    lm: LanguageModel = field(default_factory=model_without_weights)

    def __post_init__(self) -> None:
        self.there: list[Job] = []
        self.taken: list[Ask] = []
        self.cancelled = 0
        self.counted = Figures(slots=8, pages=256, programs=5, warm_seconds=1.5, accepted_at=[0, 0, 0])
        self.lock, self.work, self.ending = threading.Lock(), threading.Event(), False
        self.go = threading.Event()
        self.go.set()
        self.thread: threading.Thread | None = None

    def warm(self, console: Console | None = None) -> None:
        self.ready = True

    def start(self) -> None:
        self.thread = threading.Thread(target=self.run, name="fake engine", daemon=True)
        self.thread.start()

    def check(self, ask: Ask) -> None:
        if len(ask.prompt) + ask.sampling.max_new_tokens > self.context:
            raise ValueError("the request is too long")

    def check_room(self, requests: int, tokens: int) -> None:
        if len(self.there) + requests > self.room:
            self.counted.rejected += 1
            raise Overloaded("full", 2.4)

    def submit(self, ask: Ask, listener: Listener) -> Ticket:
        self.check(ask)
        self.check_room(1, len(ask.prompt))
        with self.lock:
            if self.ending or self.thread is None:
                raise Stopped("no more")
            self.taken.append(ask)
            ticket = Ticket(ask, len(self.taken) - 1)
            ticket.times.asked = time.monotonic()
            decoder = StreamDecoder(self.lm.tokenizer)
            self.there.append(Job(ticket, listener, Request(0, list(ask.prompt), ask.sampling, decoder)))
        self.work.set()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        with self.lock:
            for job in self.there:
                job.cancelled |= job.ticket is ticket

    def figures(self) -> Figures:
        self.counted.running, self.counted.step_age_s = len(self.there), self.step_age_s
        return self.counted

    def stop(self, drain_s: float = 0.0) -> bool:
        self.ending = True
        end = time.monotonic() + drain_s
        while self.there and time.monotonic() < end:
            time.sleep(0.005)
        with self.lock:
            drained = not self.there
            for job in self.there:
                job.cancelled = True
        self.go.set()
        self.work.set()
        if self.thread is not None:
            self.thread.join(10)
        return drained

    def run(self) -> None:
        while not (self.ending and not self.there):
            self.work.wait(0.05)
            self.go.wait(10)
            time.sleep(self.pause_s)
            for job in list(self.there):
                try:
                    self.advance(job)
                except Exception:  # nobody waits for ever
                    job.listener(Update(end="error"))
                    raise
            if not self.there:
                self.work.clear()

    def advance(self, job: Job) -> None:
        request, ticket, ask = job.request, job.ticket, job.ticket.ask
        assert isinstance(ask, Ask)
        rounds = len(request.acceptance_lengths)
        told = None
        if not job.begun:
            job.begun = True
            ticket.times.admitted = ticket.times.first_token = time.monotonic()
            ticket.cached_tokens = len(ask.prompt) // 2
            self.counted.prompt_tokens += len(ask.prompt)
            if ask.prompt_logprobs:
                told = tuple(self.logprobs(token, ask) for token in ask.prompt[1:])
        end: EndReason | None = None
        if job.cancelled:
            end = "cancelled"
            self.cancelled += 1
        elif self.ends is not None and rounds >= self.ends[1]:
            end = self.ends[0]
        elif ask.deadline_s is not None and time.monotonic() - ticket.times.asked > ask.deadline_s:
            end = "deadline"
        tokens: tuple[Token, ...] = ()
        rounds_told: tuple[Round, ...] = ()
        if end is None:
            at = len(request.tokens) % len(ask.prompt)
            coming = list(islice([*ask.prompt[at:], *list(ask.prompt) * self.per_update], self.per_update))
            pieces = request.add_round(coming, 3, self.per_update - 1, self.lm.target.eos_token_ids)
            tokens = tuple(
                Token(one.token, one.text, one.drafted, None if ask.logprobs is None else self.logprobs(one.token, ask))
                for one in pieces
            )
            rounds_told = (Round(len(tokens), 3, self.per_update - 1, "ngram, 4"),)
            self.counted.generated_tokens += len(tokens)
            reason = request.finish_reason
            assert reason != "interrupted"
            end = reason
        if end is not None:
            ticket.times.ended = time.monotonic()
            ticket.result = request.result()
            self.counted.ended[end] = self.counted.ended.get(end, 0) + 1
            with self.lock:
                self.there.remove(job)
        error = "the engine failed" if end == "error" else ""
        try:
            job.listener(Update(tokens, rounds_told, end, told, error))
        except RuntimeError:  # of a loop that is gone, as the real one takes it
            job.cancelled = True

    def logprobs(self, token: int, ask: Ask) -> TokenLogprobs:
        """The token itself is the likeliest, those after it follow."""
        vocab = self.lm.target.vocab_size
        top = tuple(((token + n) % vocab, -0.5 - n) for n in range(ask.logprobs or 0))
        return TokenLogprobs(-0.5, top)
