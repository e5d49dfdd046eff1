"""What every engine is: a queue that any thread may fill, one thread that steps, and listeners who are told what came of it.

An engine says what is sent and read, and where its jobs are; taking requests, ending them and the thread are here.

A step takes in what was asked, sends what there is to compute, and then reads what the step *before* had sent: the device has
the next dispatch by then. What the host knows is thus one dispatch old, which costs nothing but care.
"""

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from rich.console import Console
from tokenizers import Tokenizer

from tilewright.compiled.ledger import CompileTrap
from tilewright.decode.request import Request
from tilewright.engine.options import ServiceOptions
from tilewright.engine.request import EndReason, Figures, Listener, Overloaded, Stopped, Ticket, Update

log = logging.getLogger("tilewright.engine")

IDLE_S = 0.5
"""How long an engine without work sleeps between two looks."""
FAULTS = 2
"""Dispatches that may fail with a request aboard before it is given up."""
RETRY_AFTER_S = 1.0
NOT_COMPUTED = "the request could not be computed"
"""What a client is told of a failure; the log has the rest."""


@dataclass(eq=False)
class Taken:
    """A request that an engine has taken.

    Attributes:
        request: its text so far.
        faults: how many dispatches failed with it aboard.
    """

    ticket: Ticket
    listener: Listener
    request: Request
    faults: int = 0

    @property
    def number(self) -> int:
        return self.ticket.number


Job = TypeVar("Job", bound=Taken)


class Service(ABC, Generic[Job]):
    """An engine as its users see it: `warm`, then `start`; from then on any thread may `submit` and `cancel`.

    Attributes:
        context: the most positions of a request, prompt and new tokens.
        ready: whether it takes requests.
        flight: dispatches that were sent and not read yet.
    """

    context: int

    def __init__(self, options: ServiceOptions):
        self.options = options
        self.counted = Figures()
        self.trap = CompileTrap(options.guard, "serving")
        self.wake = threading.Condition()
        self.asked: deque[Job] = deque()
        self.given_up: set[Ticket] = set()
        self.flight = deque[Any]()
        self.numbers = self.asked_tokens = 0
        self.ready = self.ending = False
        self.stepped = time.monotonic()
        self.thread: threading.Thread | None = None

    # What an engine is asked about its model.

    @property
    @abstractmethod
    def tokenizer(self) -> Tokenizer: ...

    @property
    @abstractmethod
    def vocab_size(self) -> int: ...

    @property
    @abstractmethod
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def num_spec_tokens(self) -> int:
        """The most drafts in a round; 0 without a drafter."""
        return 0

    @abstractmethod
    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """The tokens of a prompt, which may be tokens already. Raises a `ValueError` for what cannot be one."""

    # What an engine does.

    @abstractmethod
    def prepare(self, console: Console | None) -> int:
        """Compiles all programs and takes the device's memory. Returns how many programs there are."""

    @property
    @abstractmethod
    def prepared(self) -> bool:
        """Whether the device's memory is taken."""

    @abstractmethod
    def check(self, ask: Any) -> None:
        """Raises a `ValueError` if a request can never be served."""

    @abstractmethod
    def job(self, ask: Any, ticket: Ticket, listener: Listener) -> Job:
        """A request that was checked, on its way."""

    @abstractmethod
    def wait(self, job: Job) -> None:
        """Puts a job into the queue."""

    @abstractmethod
    def queued(self) -> tuple[int, int]:
        """How many jobs wait, and how many tokens their prompts have."""

    @abstractmethod
    def jobs(self) -> list[tuple[Job, Callable[[], None]]]:
        """All jobs, each with what frees its place."""

    @abstractmethod
    def fill(self) -> int:
        """Gives places to those that wait, and sends what comes before rounds. Returns 0 if that was nothing."""

    @abstractmethod
    def send(self) -> bool:
        """Sends rounds, whose place is at the end of `flight`. Returns whether there were any."""

    @abstractmethod
    def read(self, sent: Any) -> None:
        """Waits for what was sent, and hands out what came of it."""

    @abstractmethod
    def forget(self) -> list[Job]:
        """After a failed dispatch, with which the device's state is lost. Returns the jobs that had a part in it; they wait."""

    @abstractmethod
    def clear(self) -> None:
        """Makes the device's state anew."""

    @abstractmethod
    def leave(self, job: Job) -> None:
        """Frees the place of a job, wherever it is."""

    @abstractmethod
    def standing(self) -> dict[str, Any]:
        """The figures that are read off, not counted."""

    # The rest is common.

    def warm(self, console: Console | None = None) -> None:
        """Compiles all programs, measures what must be measured, and takes the device's memory."""
        began = time.perf_counter()
        self.counted.programs = self.prepare(console)
        self.counted.warm_seconds = time.perf_counter() - began

    def open(self) -> None:
        """Takes requests from now on, for a caller that steps by itself."""
        assert self.prepared, "the engine was not warmed"
        assert not self.ready, "the engine has begun already"
        assert not self.ending, "an engine that has ended does not begin again"
        self.trap.open()
        self.ready, self.stepped = True, time.monotonic()

    def start(self) -> None:
        """Takes requests from now on, and steps on a thread of its own."""
        self.open()
        self.thread = threading.Thread(target=self.run, name="tilewright engine", daemon=True)
        self.thread.start()

    def check_room(self, requests: int, tokens: int) -> None:
        """Raises `Overloaded` if the queue has no room for so many requests and tokens of prompts."""
        waiting, waiting_tokens = self.queued()
        for found, most, what in (
            (waiting + len(self.asked) + requests, self.options.queue_requests, "requests"),
            (waiting_tokens + self.asked_tokens + tokens, self.options.queue_tokens, "tokens of prompts"),
        ):
            if found > most:
                self.counted.rejected += 1
                raise Overloaded(f"the queue holds at most {most} {what}", RETRY_AFTER_S)

    def submit(self, ask: Any, listener: Listener) -> Ticket:
        """Takes a request.

        Args:
            listener: told what comes of it, on the engine's thread.

        Raises:
            ValueError: it can never be served.
            Overloaded: not now.
            Stopped: the engine has not begun, or is ending.
        """
        self.check(ask)
        ticket = Ticket(ask, 0)
        job = self.job(ask, ticket, listener)
        with self.wake:
            if not self.ready:
                raise Stopped("the engine takes no requests")
            self.check_room(1, len(job.request.prompt))
            ticket.number, ticket.times.asked = self.numbers, time.monotonic()
            self.numbers += 1
            self.asked.append(job)
            self.asked_tokens += len(job.request.prompt)
            self.wake.notify()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Ends a request, if it has not ended, before the next dispatch."""
        with self.wake:
            self.given_up.add(ticket)
            self.wake.notify()

    def stop(self, drain_s: float = 0.0) -> bool:
        """Takes no more requests, lets those that it has end for so long, cancels what is left, and ends the thread.

        Returns:
            whether all ended by themselves.
        """
        until = time.monotonic() + drain_s
        with self.wake:
            self.ready = False
        while self.busy and time.monotonic() < until:
            time.sleep(0.01)
        with self.wake:
            drained, self.ending = not self.busy, True
            self.wake.notify()
        if self.thread is None:
            self.end_all()
        else:
            self.thread.join()
        self.trap.close()
        return drained

    @property
    def busy(self) -> bool:
        return bool(self.asked or self.flight or self.jobs())

    def run(self) -> None:
        """Steps until the engine ends: when it is told to, or where not even an empty state can be made any more."""
        try:
            while not self.ending:
                if not self.step():
                    with self.wake:
                        if not (self.asked or self.given_up or self.ending):
                            self.wake.wait(IDLE_S)
        except Exception:
            log.exception("the engine cannot go on")
            with self.wake:
                self.ready, self.ending = False, True
        self.end_all()

    def step(self) -> bool:
        """Takes in what was asked, sends, and reads. Returns whether there was anything to do."""
        try:
            self.take_asked()
            self.expire()
            worked = self.turn()
        except Exception:
            log.exception("a dispatch failed")
            self.recover()
            worked = True
        self.stepped = time.monotonic()
        return worked

    def turn(self) -> bool:
        """Sends, and reads what the step before had sent."""
        filled, sent = self.fill(), self.send()
        read = self.flight and (not sent or len(self.flight) > 1)
        while len(self.flight) > (1 if sent else 0):
            self.read(self.flight.popleft())
        return bool(filled or sent or read)

    def take_asked(self) -> None:
        with self.wake:
            asked, self.asked, self.asked_tokens = self.asked, deque(), 0
        for job in asked:
            self.wait(job)

    def expire(self) -> None:
        """Ends those that were given up, and those whose time is up."""
        with self.wake:
            given_up, self.given_up = self.given_up, set()
        now = time.monotonic()
        for job, leave in self.jobs():
            deadline = job.ticket.ask.deadline_s
            if job.ticket in given_up:
                leave()
                self.end(job, "cancelled")
            elif deadline is not None and now > job.ticket.times.asked + deadline:
                leave()
                self.end(job, "deadline", f"the request was not done within {deadline:g} s")

    def hand_out(self, job: Job, update: Update) -> None:
        """Tells a job's listener what it got, and ends it if that was all."""
        times = job.ticket.times
        times.first_token = times.first_token or time.monotonic()
        self.counted.generated_tokens += len(update.tokens)
        if update.end is None:
            self.tell(job, update)
            return
        self.leave(job)
        self.end(job, update.end, update=update)

    def end(self, job: Job, reason: EndReason, error: str = "", update: Update | None = None) -> None:
        """Ends a job that has no place any more."""
        job.ticket.times.ended = time.monotonic()
        job.ticket.result = job.request.result()
        self.counted.ended[reason] = self.counted.ended.get(reason, 0) + 1
        self.tell(job, update or Update(end=reason, error=error))

    def tell(self, job: Job, update: Update) -> None:
        try:
            job.listener(update)
        except Exception:
            log.exception("a listener failed")
            with self.wake:
                self.given_up.add(job.ticket)

    def recover(self) -> None:
        """After a failed dispatch: all that ran is computed anew, or given up."""
        for job in self.forget():
            job.faults += 1
            if job.faults >= FAULTS:
                self.leave(job)
                self.end(job, "error", NOT_COMPUTED)
        self.clear()

    def end_all(self) -> None:
        """Cancels whatever is left."""
        self.take_asked()
        self.flight.clear()
        for job, leave in self.jobs():
            leave()
            self.end(job, "cancelled", "the engine has stopped")

    def figures(self) -> Figures:
        """What was counted so far, and how things stand."""
        age = time.monotonic() - self.stepped
        self.counted.compilations = self.trap.ledger.compilations
        waiting, tokens = self.queued()
        return replace(
            self.counted,
            waiting=waiting + len(self.asked),
            waiting_tokens=tokens + self.asked_tokens,
            accepted_at=list(self.counted.accepted_at),
            widths=dict(self.counted.widths),
            ended=dict(self.counted.ended),
            step_age_s=age,
            **self.standing(),
        )
