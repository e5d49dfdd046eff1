"""Continuous batching: requests come and go while rounds run, several to a dispatch, and nothing compiles meanwhile.

One thread steps. A step takes in what was asked, sends what there is to compute (requests into slots, pieces of prompts, rounds
for all that are ready), and then reads the rounds that the step *before* had sent: the device has the next ones by then. What
the host knows is thus one dispatch old, which costs nothing but care: a request that has ended meanwhile takes no part on the
device, and what was settled behind a stop string is dropped.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rich.console import Console
from tokenizers import Tokenizer

from tilewright.decode.acceptance import num_spec_tokens
from tilewright.decode.language_model import LanguageModel
from tilewright.decode.layout import PagedLayout
from tilewright.decode.programs import read_models
from tilewright.decode.request import Request
from tilewright.decode.sampling import Warp
from tilewright.decode.team import Team
from tilewright.engine.costs import measured_costs
from tilewright.engine.counts import count_rounds, standing
from tilewright.engine.device import Device, Sent
from tilewright.engine.options import EngineOptions
from tilewright.engine.pacer import Pacer
from tilewright.engine.pages import Pages
from tilewright.engine.programs import EnginePrograms
from tilewright.engine.request import Ask, Listener, Ticket, Update
from tilewright.engine.scheduler import Job, Scheduler, Seat
from tilewright.engine.service import NOT_COMPUTED, Service
from tilewright.engine.taken import take_rounds
from tilewright.models.tokenizer import StreamDecoder

log = logging.getLogger("tilewright.engine")


class Engine(Service[Job]):
    """Serves requests with one autoregressive model, over slots and pages."""

    options: EngineOptions

    def __init__(self, lm: LanguageModel, options: EngineOptions = EngineOptions()):
        """Raises a `ValueError` for options that do not go together, or with the model."""
        super().__init__(options)
        self.lm = lm
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
        self.programs = EnginePrograms(
            programs.target, read_models(programs.models, drafter), programs.dtype, drafter, table, layout
        )
        self.prefix_cache = options.prefix_cache and self.programs.pages_hold_all
        members = drafter.members if isinstance(drafter, Team) else ()
        tapping = [member.name for member in members if member.tap_layers]
        self.pages = Pages(pages, options.page_size)
        self.scheduler = Scheduler(table, self.pages, capacity, self.prefix_cache, tapping)
        self.device = Device(self.programs)
        self.pacer = Pacer(self.programs, options.dispatch_s)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.lm.tokenizer

    @property
    def vocab_size(self) -> int:
        return self.lm.target.vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.lm.target.eos_token_ids

    @property
    def num_spec_tokens(self) -> int:
        return num_spec_tokens(self.lm)

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        return self.lm.encode(prompt)

    @property
    def prepared(self) -> bool:
        return self.device.state is not None

    def prepare(self, console: Console | None) -> int:
        """Compiles, and measures what rounds cost where these are chosen."""
        self.programs.warm(self.programs.keys(), console)
        self.device.reset()
        if isinstance(self.programs.drafter, Team):
            costs = measured_costs(self.device, self.lm, console)
            self.pacer = Pacer(self.programs, self.options.dispatch_s, costs)
            self.device.reset()
        return len(self.programs.compiled)

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

    def job(self, ask: Ask, ticket: Ticket, listener: Listener) -> Job:
        request = Request(0, list(ask.prompt), ask.sampling.seeded(), StreamDecoder(self.tokenizer))
        shadow = self.pacer.shadow(request.prompt)
        return Job(ticket, listener, request, shadow=shadow, prompt_scores=[] if ask.prompt_logprobs else None)

    def wait(self, job: Job) -> None:
        self.scheduler.wait(job)

    def queued(self) -> tuple[int, int]:
        return len(self.scheduler.waiting), self.scheduler.waiting_tokens

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
        """Gives places, and sends pieces of prompts: a large one or several small ones, if rounds are to run besides; else all.

        Returns:
            how many positions they compute.
        """
        self.admit()
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
                self.hand_out(seat.job, update)
        self.pacer.overhear(sent, jobs, heard)

    def leave(self, job: Job) -> None:
        seat = next((seat for seat in self.scheduler.seated if seat.job is job), None)
        if seat is None:  # it waits, perhaps since it had to give way
            self.scheduler.drop(job)
        else:
            self.scheduler.leave(seat)

    def forget(self) -> list[Job]:
        self.flight.clear()
        return self.scheduler.forget()

    def clear(self) -> None:
        self.device.reset()

    def standing(self) -> dict[str, Any]:
        return standing(self.scheduler)
