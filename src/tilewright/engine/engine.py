"""Continuous batching: requests come and go while rounds run, several to a dispatch, and nothing compiles meanwhile.

One thread steps. A step takes in what was asked, sends what there is to compute (requests into slots, pieces of prompts, rounds
for all that are ready), and then reads the rounds that the step *before* had sent: the device has the next ones by then. What
the host knows is thus one dispatch old, which costs nothing but care: a request that has ended meanwhile takes no part on the
device, and what was settled behind a stop string is dropped.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from rich.console import Console

from tilewright.compiled.ledger import CompileTrap
from tilewright.decode.language_model import LanguageModel
from tilewright.decode.layout import PagedLayout
from tilewright.decode.request import Request
from tilewright.decode.sampling import Warp
from tilewright.decode.shadow import NGramShadow
from tilewright.decode.team import Team
from tilewright.engine.costs import measured_costs
from tilewright.engine.counts import count_rounds, snapshot
from tilewright.engine.device import Device, Sent
from tilewright.engine.options import EngineOptions
from tilewright.engine.pacer import Pacer
from tilewright.engine.pages import Pages
from tilewright.engine.programs import EnginePrograms
from tilewright.engine.request import Ask, EndReason, Figures, Listener, Overloaded, Stopped, Ticket, Update
from tilewright.engine.scheduler import Job, Scheduler, Seat
from tilewright.engine.taken import take_rounds
from tilewright.models.tokenizer import StreamDecoder

log = logging.getLogger("tilewright.engine")

IDLE_S = 0.5
"""How long an engine without work sleeps between two looks."""
FAULTS = 2
"""Dispatches that may fail with a request aboard before it is given up."""
RETRY_AFTER_S = 1.0
NOT_COMPUTED = "the request could not be computed"
"""What a client is told of a failure; the log has the rest."""


class Engine:
    """Serves requests with one model, over slots and pages.

    `warm`, then `start`; from then on any thread may `submit` and `cancel`.

    Attributes:
        context: the most positions of a request, prompt and new tokens.
        ready: whether it takes requests.
    """

    def __init__(self, lm: LanguageModel, options: EngineOptions = EngineOptions()):
        """Raises a `ValueError` for options that do not go together, or with the model."""
        self.lm, self.options = lm, options
        table = options.shapes(lm.target.max_position_embeddings)
        if not table.device_loop:
            raise ValueError("expected a table with device_loop: the engine runs several rounds to a dispatch")
        self.context = min(table.capacities[-1], lm.target.max_position_embeddings)
        capacity, slots = table.capacities[-1], table.batches[-1]
        pages = slots * capacity // options.page_size if options.pages is None else options.pages
        layout = PagedLayout(slots, capacity, pages, options.page_size)
        programs, drafter = lm.programs, lm.drafter
        if isinstance(drafter, Team) and drafter.widths:
            drafter = replace(drafter, widths=table.widths)
        self.programs = EnginePrograms(programs.target, programs.read_models(drafter), programs.dtype, drafter, table, layout)
        self.prefix_cache = options.prefix_cache and self.programs.pages_hold_all
        members = drafter.members if isinstance(drafter, Team) else ()
        tapping = [member.name for member in members if member.tap_layers]
        self.pages = Pages(pages, options.page_size)
        self.scheduler = Scheduler(table, self.pages, capacity, self.prefix_cache, tapping)
        self.device = Device(self.programs)
        self.pacer = Pacer(self.programs, options.dispatch_s)
        self.counted = Figures()
        self.trap = CompileTrap(options.guard, "serving")
        self.flight: deque[Sent] = deque()
        self.wake = threading.Condition()
        self.asked: deque[Job] = deque()
        self.given_up: set[Ticket] = set()
        self.numbers = self.asked_tokens = 0
        self.ready = self.ending = False
        self.stepped = time.monotonic()
        self.thread: threading.Thread | None = None

    def warm(self, console: Console | None = None) -> None:
        """Compiles all programs, measures what rounds cost where these are chosen, and takes the device's memory."""
        began = time.perf_counter()
        self.programs.warm(self.programs.keys(), console)
        self.device.reset()
        if isinstance(self.programs.drafter, Team):
            costs = measured_costs(self.device, self.lm, console)
            self.pacer = Pacer(self.programs, self.options.dispatch_s, costs)
            self.device.reset()
        self.counted.programs = len(self.programs.compiled)
        self.counted.warm_seconds = time.perf_counter() - began

    def open(self) -> None:
        """Takes requests from now on, for a caller that steps by itself."""
        assert self.device.state is not None, "the engine was not warmed"
        assert not self.ready, "the engine has begun already"
        assert not self.ending, "an engine that has ended does not begin again"
        self.trap.open()
        self.ready, self.stepped = True, time.monotonic()

    def start(self) -> None:
        """Takes requests from now on, and steps on a thread of its own."""
        self.open()
        self.thread = threading.Thread(target=self.run, name="tilewright engine", daemon=True)
        self.thread.start()

    def check(self, ask: Ask) -> None:
        """Raises a `ValueError` if a request can never be served."""
        tokens = self.lm.encode(ask.prompt)
        end = len(tokens) + ask.sampling.max_new_tokens
        if end > self.context:
            room = f"leaves room for {max(0, self.context - len(tokens))}"
            raise ValueError(
                f"a prompt of {len(tokens)} tokens {room} in the context of {self.context}; "
                f"max_new_tokens is {ask.sampling.max_new_tokens}"
            )
        widest = max(self.programs.width(choice) for choice in self.programs.choices)
        needed = self.scheduler.pages_for(end + widest)
        if needed > self.pages.count:
            raise ValueError(f"expected a request of at most {self.pages.count} pages, found one of {needed}")

    def check_room(self, requests: int, tokens: int) -> None:
        """Raises `Overloaded` if the queue has no room for so many requests and tokens of prompts."""
        waiting = len(self.scheduler.waiting) + len(self.asked) + requests
        held = self.scheduler.waiting_tokens + self.asked_tokens + tokens
        for found, most, what in (
            (waiting, self.options.queue_requests, "requests"), (held, self.options.queue_tokens, "tokens of prompts"),
        ):  # fmt: skip
            if found > most:
                self.counted.rejected += 1
                raise Overloaded(f"the queue holds at most {most} {what}", RETRY_AFTER_S)

    def submit(self, ask: Ask, listener: Listener) -> Ticket:
        """Takes a request.

        Args:
            listener: told what comes of it, on the engine's thread.

        Raises:
            ValueError: it can never be served.
            Overloaded: not now.
            Stopped: the engine has not begun, or is ending.
        """
        self.check(ask)
        request = Request(0, list(ask.prompt), ask.sampling.seeded(), StreamDecoder(self.lm.tokenizer))
        shadow = None if self.pacer.ngram is None else NGramShadow(self.pacer.ngram, request.prompt)
        with self.wake:
            if not self.ready:
                raise Stopped("the engine takes no requests")
            self.check_room(1, len(request.prompt))
            ticket = Ticket(ask, self.numbers)
            ticket.times.asked = time.monotonic()
            self.numbers += 1
            self.asked.append(Job(ticket, listener, request, shadow, prompt_scores=[] if ask.prompt_logprobs else None))
            self.asked_tokens += len(request.prompt)
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
        return bool(self.asked or self.flight) or self.scheduler.busy

    def run(self) -> None:
        """Steps until the engine ends."""
        while not self.ending:
            if not self.step():
                with self.wake:
                    if not (self.asked or self.given_up or self.ending):
                        self.wake.wait(IDLE_S)
        self.end_all()

    def step(self) -> bool:
        """Takes in, sends, and reads what the step before had sent. Returns whether there was anything to do."""
        try:
            self.take_asked()
            self.expire()
            self.admit()
            filled = self.fill()
            sent = self.send()
            read = self.flight and (not sent or len(self.flight) > 1)
            while len(self.flight) > (1 if sent else 0):
                self.read(self.flight.popleft())
            worked = bool(filled or sent or read)
        except Exception:
            log.exception("a dispatch failed")
            self.recover()
            worked = True
        self.stepped = time.monotonic()
        return worked

    def take_asked(self) -> None:
        with self.wake:
            asked, self.asked, self.asked_tokens = self.asked, deque(), 0
        for job in asked:
            self.scheduler.wait(job)

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

    def jobs(self) -> list[tuple[Job, Callable[[], None]]]:
        """All jobs, each with what frees its place."""
        waiting = [(job, partial(self.scheduler.drop, job)) for job in self.scheduler.waiting]
        return [*waiting, *((seat.job, partial(self.scheduler.leave, seat)) for seat in self.scheduler.seated)]

    def admit(self) -> None:
        for seat in self.scheduler.admit():
            times = seat.job.ticket.times
            times.admitted = times.admitted or time.monotonic()
            if not seat.job.ticket.preemptions:
                self.counted.prompt_tokens += seat.prompt + 1

    def fill(self) -> int:
        """Sends pieces of prompts: a large one or several small ones, if there are rounds to run besides; else all.

        Returns:
            how many positions they compute.
        """
        sent, most = 0, self.programs.table.chunks[-1]
        while (chunk := self.scheduler.next_chunk()) is not None and (sent < most or not self.scheduler.runnable()):
            scores = self.device.prefill(chunk)
            if scores is not None and chunk.seat.job.prompt_scores is not None:
                chunk.seat.job.prompt_scores.append((scores, chunk.count))
            self.scheduler.filled(chunk)
            self.counted.prefill_tokens += chunk.count
            self.counted.prefill_padding += chunk.size - chunk.count
            sent += chunk.size
        return sent

    def send(self) -> bool:
        """Sends rounds for all that are ready for them."""
        seats = self.scheduler.runnable()
        if not seats:
            return False
        warp = self.warp(seats)
        choice, rounds = self.pacer.plan(self.programs.rows_for(len(seats), warp), warp, self.scheduler.hurried)
        width = self.programs.width(choice)
        seats, rounds = self.scheduler.make_room(seats, rounds, width)
        if not seats:
            return False
        reach = max(self.scheduler.reach(seat, rounds, width) for seat in seats)
        self.flight.append(self.device.rounds(seats, choice, warp, rounds, reach))
        self.scheduler.sent(seats, rounds, width)
        return True

    def warp(self, seats: list[Seat]) -> Warp:
        """The least program that serves all of them."""
        if any(seat.job.scored for seat in seats):
            return "scored"
        return "mixed" if any(seat.job.request.sampling.warp != "greedy" for seat in seats) else "greedy"

    def read(self, sent: Sent) -> None:
        """Hands out what came of rounds."""
        began = time.perf_counter()
        infos = self.device.read(sent)
        self.pacer.observe(sent, infos, began, time.perf_counter())
        count_rounds(self.counted, sent, infos)
        jobs = [seat.job for seat in sent.seats]
        heard = [len(job.request.tokens) for job in jobs]
        drafter = None if sent.choice is None else sent.choice.drafter
        for row, seat in enumerate(sent.seats):
            settled = int(infos.settled[:, row].sum())
            self.scheduler.read(seat, sent.rounds, sent.width, settled, drafter)
            if settled and seat.job.request.finish_reason is None and seat.job.ticket.result is None:
                try:
                    update = take_rounds(seat.job, infos, row, sent.choice, self.lm.target.eos_token_ids)
                except Exception:
                    log.exception("a request failed")
                    update = Update(end="error", error=NOT_COMPUTED)
                self.hand_out(seat, update)
        self.pacer.overhear(sent, jobs, heard)

    def hand_out(self, seat: Seat, update: Update) -> None:
        """Tells a job's listener what it got, and ends it if that was all."""
        job = seat.job
        times = job.ticket.times
        times.first_token = times.first_token or time.monotonic()
        self.counted.generated_tokens += len(update.tokens)
        if update.end is None:
            self.tell(job, update)
            return
        if self.scheduler.seats[seat.slot] is seat:
            self.scheduler.leave(seat)
        else:  # it had to give way since
            self.scheduler.drop(job)
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
        """After a failed dispatch: nothing of the device's state is left; all that ran is computed anew, or given up."""
        self.flight.clear()
        for job in self.scheduler.forget():
            job.faults += 1
            if job.faults >= FAULTS:
                self.scheduler.drop(job)
                self.end(job, "error", NOT_COMPUTED)
        self.device.reset()

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
        return snapshot(self.counted, self.scheduler, len(self.asked), self.asked_tokens, age)
