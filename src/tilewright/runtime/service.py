"""What every engine is: a queue that any thread may fill, one thread that steps, and listeners who are told what came of it.

An engine says what is sent and read, and which sequences have places; taking requests, ending them and the thread are here.
A sequence is one of `there` from the moment it is submitted until it has ended, wherever it stands meanwhile; what any thread
may change is changed under one lock, `wake`, and a step takes all of it in at once.

A step takes in what was asked, sends what there is to compute, and then reads what the step *before* had sent: the device has
the next dispatch by then. What the host knows is thus one dispatch old, which costs nothing but care.
"""

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from tokenizers import Tokenizer

from tilewright.compiled.ledger import CompileTrap
from tilewright.runtime.collect import NotFinite
from tilewright.runtime.options import ServiceOptions
from tilewright.runtime.request import EndReason, EngineStats, Listener, Overloaded, RequestHandle, RequestOutput, Stopped
from tilewright.runtime.scheduler import Scheduler, TokenSequence

log = logging.getLogger("tilewright.engine")

IDLE_S = 0.5
"""How long an engine without work sleeps between two looks."""
FAULTS = 2
"""Dispatches that may fail with a request aboard before it is given up."""
RETRY_AFTER_S = 1.0
NOT_COMPUTED = "the request could not be computed"
"""What a client is told of a failure; the log has the rest."""


class Service(ABC):
    """An engine as its users see it: `warm`, then `start`; from then on any thread may `submit` and `cancel`.

    Attributes:
        context: the most positions of a request, prompt and new tokens.
        scheduler: who waits, and who runs in which slot.
        ready: whether it takes requests.
        there: all sequences that have not ended, in the order of their numbers.
        asked: those of them that no step has taken in yet.
        woken: whether there is something for the next step to take in.
        closed: whether it was told to stop, or has ended by itself; it does not begin again.
        ending: whether the thread is to end.
        failure: why it has ended by itself.
        on_failure: told of that, on the engine's thread, once all requests have ended.
        flight: dispatches that were sent and not read yet.
    """

    context: int
    scheduler: Scheduler

    def __init__(self, options: ServiceOptions):
        self.options = options
        self.counted = EngineStats()
        self.trap = CompileTrap(options.guard, "serving")
        self.wake = threading.Condition()
        self.there: dict[TokenSequence, None] = {}
        self.asked: list[TokenSequence] = []
        self.flight = deque[Any]()
        self.numbers = self.asked_tokens = 0
        self.ready = self.ending = self.woken = self.closed = False
        self.stepped = time.monotonic()
        self.thread: threading.Thread | None = None
        self.failure: Exception | None = None
        self.on_failure: Callable[[Exception], None] | None = None

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

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the low-rank adapters that requests may run with."""
        return ()

    @property
    def embeds(self) -> bool:
        """True if requests may ask for embeddings of prompts."""
        return False

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
        """True once the device's memory is taken."""

    @abstractmethod
    def check(self, request: Any) -> None:
        """Raises a `ValueError` if a request, whose tokens are the model's, can never be served. It takes no time."""

    @abstractmethod
    def sequence(self, request: Any, listener: Listener) -> TokenSequence:
        """A request that was checked, on its way."""

    @abstractmethod
    def fill(self) -> int:
        """Gives places to those that wait, and sends what comes before rounds, for about as long as a dispatch of these takes.

        Returns:
            0 if that was nothing.
        """

    @abstractmethod
    def send(self) -> bool:
        """Sends rounds, whose place is at the end of `flight`. Returns whether there were any."""

    @abstractmethod
    def read(self, sent: Any) -> None:
        """Waits for what was sent, and hands out what came of it."""

    @abstractmethod
    def clear(self) -> None:
        """Makes the device's state anew."""

    # The rest is common.

    def warm(self, console: Console | None = None) -> None:
        """Compiles all programs, measures what must be measured, and takes the device's memory."""
        began = time.perf_counter()
        self.counted.programs = self.prepare(console)
        self.counted.warm_seconds = time.perf_counter() - began

    def open(self) -> None:
        """Takes requests from now on, for a caller that steps by itself.

        Raises:
            Stopped: it was told to stop meanwhile.
        """
        assert self.prepared, "the engine was not warmed"
        with self.wake:
            assert not self.ready, "the engine has begun already"
            if self.closed:
                raise Stopped("the engine was stopped before it began")
            self.trap.open()
            self.ready = True
            self.stepped = time.monotonic()

    def start(self) -> None:
        """Takes requests from now on, and steps on a thread of its own. Raises what `open` raises."""
        with self.wake:
            self.open()
            self.thread = threading.Thread(target=self.run, name="tilewright engine", daemon=True)
            self.thread.start()

    def check_room(self, requests: int, tokens: int) -> None:
        """Raises `Overloaded` if the queue has no room for so many requests and tokens of prompts."""
        with self.wake:
            waiting, waiting_tokens = self.waiting_now()
            for found, most, what in (
                (waiting + requests, self.options.queue_requests, "requests"),
                (waiting_tokens + tokens, self.options.queue_tokens, "tokens of prompts"),
            ):
                if found > most:
                    self.counted.rejected += 1
                    raise Overloaded(f"the queue holds at most {most} {what}", RETRY_AFTER_S)

    def waiting_now(self) -> tuple[int, int]:
        """Number of waiting requests, and of the tokens of their prompts. Call it with the lock."""
        return len(self.scheduler.waiting) + len(self.asked), self.scheduler.waiting_tokens + self.asked_tokens

    def submit(self, request: Any, listener: Listener, encoded: bool = False) -> RequestHandle:
        """Takes a request.

        Args:
            listener: told what comes of it, on the engine's thread.
            encoded: its prompt came from `encode`, which looks at every token; it is not looked at again.

        Raises:
            ValueError: it can never be served.
            Overloaded: not now.
            Stopped: the engine has not begun, or is ending.
        """
        if not encoded:
            self.encode(request.prompt)
        self.check(request)
        sequence = self.sequence(request, listener)
        with self.wake:
            if not self.ready:
                raise Stopped("the engine takes no requests")
            self.check_room(1, len(sequence.processor.prompt))
            self.enter(sequence)
            self.asked.append(sequence)
            self.asked_tokens += len(sequence.processor.prompt)
            self.rouse()
        return sequence.handle

    def enter(self, sequence: TokenSequence) -> None:
        """Counts a sequence among those that are there. Call it with the lock, where there are other threads."""
        sequence.handle.number = self.numbers
        sequence.handle.times.asked = time.monotonic()
        self.numbers += 1
        self.there[sequence] = None

    def cancel(self, handle: RequestHandle) -> None:
        """Ends a request, if it has not ended, before the next dispatch."""
        with self.wake:
            handle.given_up = True
            self.rouse()

    def rouse(self) -> None:
        """Has the thread step, which may be asleep. Call it with the lock."""
        self.woken = True
        self.wake.notify_all()

    def stop(self, drain_s: float = 0.0) -> bool:
        """Takes no more requests, lets those that it has end for so long, cancels what is left, and ends the thread.

        Returns:
            whether all ended by themselves.
        """
        until = time.monotonic() + drain_s
        with self.wake:
            # from here on nobody begins it
            self.ready = False
            self.closed = True
        while self.busy and time.monotonic() < until:
            time.sleep(0.01)
        with self.wake:
            drained = not self.busy
            self.ending = True
            self.rouse()
        if self.thread is None:
            self.end_all()
        else:
            self.thread.join()
        self.trap.close()
        return drained

    @property
    def busy(self) -> bool:
        """True while a request has not ended, or a dispatch was not read yet."""
        return bool(self.there or self.flight)

    def run(self) -> None:
        """Steps until the engine ends: when it is told to, or where not even an empty state can be made any more."""
        try:
            while not self.ending:
                if not self.step():
                    with self.wake:
                        self.wake.wait_for(lambda: self.woken, IDLE_S)
        except Exception as error:
            log.exception("the engine cannot go on")
            with self.wake:
                self.ready = False
                self.closed = True
                self.ending = True
                self.failure = error
        self.end_all()
        if self.failure is not None and self.on_failure is not None:
            self.on_failure(self.failure)

    def step(self) -> bool:
        """Takes in what was asked, sends, and reads. Returns whether there was anything to do."""
        try:
            self.expire(self.take_in())
            worked = self.turn()
        except Exception as error:
            log.exception("a dispatch failed")
            self.recover(error)
            worked = True
        self.stepped = time.monotonic()
        return worked

    def turn(self) -> bool:
        """Sends, and reads what the step before had sent."""
        before = len(self.flight)
        filled = self.fill()
        read = self.settle()
        sent = self.send()
        if not read:
            read = self.read_all_but(len(self.flight) - before)
        return bool(filled or sent or read)

    def settle(self) -> bool:
        """Takes in what the next dispatch depends on: reads all that is in flight, or nothing. Returns whether it did."""
        return False

    def read_all_but(self, last: int) -> bool:
        """Reads dispatches until only so many are in flight. Returns whether there were more."""
        more = len(self.flight) > last
        while len(self.flight) > last:
            self.read(self.flight.popleft())
        return more

    def take_in(self) -> list[TokenSequence]:
        """Puts those that were asked into the queue. Returns all sequences that are there, each of which has its place now."""
        with self.wake:
            self.woken = False
            for sequence in self.asked:
                self.scheduler.wait(sequence)
            self.asked = []
            self.asked_tokens = 0
            return list(self.there)

    def admit(self) -> int:
        """Gives places to those that wait, in order. Returns how many got one."""
        admitted = self.scheduler.admit()
        for running in admitted:
            times = running.sequence.handle.times
            times.admitted = times.admitted or time.monotonic()
            if not running.sequence.handle.preemptions:
                self.counted.prompt_tokens += running.known + 1
        return len(admitted)

    def expire(self, sequences: Sequence[TokenSequence]) -> None:
        """Ends those that were given up, and those whose time is up."""
        now = time.monotonic()
        for sequence in sequences:
            deadline = sequence.handle.request.deadline_s
            if sequence.handle.given_up:
                self.scheduler.remove(sequence)
                self.end(sequence, "cancelled")
            elif deadline is not None and now > sequence.handle.times.asked + deadline:
                self.scheduler.remove(sequence)
                self.end(sequence, "deadline", f"the request was not done within {deadline:g} s")

    def hand_out(self, sequence: TokenSequence, update: RequestOutput) -> None:
        """Tells a sequence's listener what it got, and ends it if that was all."""
        times = sequence.handle.times
        times.first_token = times.first_token or time.monotonic()
        self.counted.generated_tokens += len(update.tokens)
        if update.end is None:
            self.tell(sequence, update)
            return
        self.scheduler.remove(sequence)
        self.end(sequence, update.end, update=update)

    def end(self, sequence: TokenSequence, reason: EndReason, error: str = "", update: RequestOutput | None = None) -> None:
        """Ends a sequence that has no place any more."""
        with self.wake:
            del self.there[sequence]
        sequence.handle.times.ended = time.monotonic()
        sequence.handle.result = sequence.processor.result()
        self.counted.ended[reason] = self.counted.ended.get(reason, 0) + 1
        self.tell(sequence, update or RequestOutput(end=reason, error=error))

    def tell(self, sequence: TokenSequence, update: RequestOutput) -> None:
        try:
            sequence.listener(update)
        except Exception:
            log.exception("a listener failed")
            self.cancel(sequence.handle)

    def recover(self, error: Exception) -> None:
        """After a failed dispatch: all that ran is computed anew, or given up. Raises what leaves nothing to go on with."""
        self.flight.clear()
        for sequence in self.scheduler.forget():
            sequence.faults += not isinstance(error, NotFinite)  # the request at fault has ended by itself
            if sequence.faults >= FAULTS:
                self.scheduler.remove(sequence)
                self.end(sequence, "error", NOT_COMPUTED)
        self.clear()

    def end_all(self) -> None:
        """Cancels whatever is left."""
        self.flight.clear()
        for sequence in self.take_in():
            self.scheduler.remove(sequence)
            self.end(sequence, "cancelled", "the engine has stopped")

    def stats(self) -> EngineStats:
        """Counts so far, and the present state."""
        age = time.monotonic() - self.stepped
        with self.wake:
            self.counted.compilations = self.trap.ledger.compilations
            waiting, tokens = self.waiting_now()
        return replace(
            self.counted,
            waiting=waiting,
            waiting_tokens=tokens,
            accepted_at=list(self.counted.accepted_at),
            widths=dict(self.counted.widths),
            ended=dict(self.counted.ended),
            step_age_s=age,
            **self.scheduler.stats(),
        )
