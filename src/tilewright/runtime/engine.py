"""Engine: a request queue that any thread may fill, and one thread that steps.

A sequence is in `there` from its submission until its end. One lock, `wake`, protects the state that any thread may change. A
step takes in all changes at once.

A step takes in submissions and cancellations, dispatches work (prefill chunks, and rounds for all sequences that are ready),
and reads the dispatch of the step *before*, so that the device always has the next dispatch queued. The host's view is then one
dispatch old: a sequence that has ended meanwhile is done on the device, and tokens committed behind a stop string are dropped.
Nothing compiles while the engine serves.

The decoding (`runtime/decoding.py`) defines tokens and dispatches.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import numpy as np
from rich.console import Console
from tokenizers import Tokenizer

from tilewright.compiled.background import BackgroundCompile, working_threads
from tilewright.compiled.ledger import CompileTrap
from tilewright.parallel.host_broadcast import HostBroadcast, ProcessLost
from tilewright.runtime.collect import NotFinite, prompt_logprobs
from tilewright.runtime.constraints import ConstraintError
from tilewright.runtime.decoding import Decoding, Plan, Prefilling, Report, Sent
from tilewright.runtime.lockstep import Lockstep
from tilewright.runtime.options import ServiceOptions
from tilewright.runtime.pooling import PooledChunk, embedding
from tilewright.runtime.request import EndReason, EngineStats, Listener, Overloaded, RequestHandle, RequestOutput, Stopped
from tilewright.runtime.scheduler import Chunk, TokenSequence

log = logging.getLogger("tilewright.engine")

IDLE_S = 0.5
"""Seconds that an idle engine sleeps between two steps."""
FAULTS = 2
"""Failed dispatches after which a request that was in all of them is ended."""
RETRY_AFTER_S = 1.0
NOT_COMPUTED = "the request could not be computed"
"""Error message of a request that failed; the log has the cause."""


AnyDecoding = TypeVar("AnyDecoding", bound=Decoding)


class SentEmbedding(NamedTuple):
    """Embedding in flight: its sequence, and the chunks of its prompt."""

    sequence: TokenSequence
    chunks: Sequence[PooledChunk]


class SentPrefill(NamedTuple):
    """Prefill chunks in flight, dispatched without rounds behind them.

    Attributes:
        end: see `decoding.Prefilling`; that of the last chunk.
    """

    end: Any


Observer = Callable[[Sent, Report, float, float], None]
"""Callback on the engine's thread for each dispatch, once its tokens are delivered.

Arguments: the dispatch, its report, and when the engine began to wait for it and received it, by `time.perf_counter()`.
"""


class Engine(Generic[AnyDecoding]):
    """Serves requests with one decoding, over slots and pages.

    Call `warm`, then `start`. From then on any thread may `submit` and `cancel`.

    Attributes:
        decoding: decoding of the model.
        scheduler: queue, slots and pages.
        runner: the device.
        observers: callbacks for each dispatch.
        ready: whether it accepts requests.
        there: all sequences that have not ended, in the order of their numbers.
        submitted: submitted sequences that no step has taken in yet.
        woken: whether the next step has something to take in.
        closed: whether it was stopped, or has failed; it cannot start again.
        ending: whether the thread is to end.
        failure: the exception that ended the engine.
        on_failure: called with `failure` on the engine's thread, once all requests have ended.
        flight: dispatches that were sent and not read yet.
        compiling: compilation of the programs that are still missing; None if there are none.
    """

    def __init__(self, decoding: AnyDecoding, options: ServiceOptions, recovers: bool = True):
        """Args:
        recovers: computes the requests of a failed dispatch again; if false, `step` raises the exception to its caller.
        """
        self.decoding = decoding
        self.recovers = recovers
        self.options = options
        self.scheduler = decoding.scheduler
        self.runner: Any = decoding.runner
        self.observers: list[Observer] = []
        self.counters = EngineStats()
        self.trap = CompileTrap(options.guard, "serving")
        self.wake = threading.Condition()
        self.live_sequences: dict[TokenSequence, None] = {}
        self.submitted: list[TokenSequence] = []
        self.flight = deque[Any]()
        self.compiling: BackgroundCompile[Any] | None = None
        self.next_number = 0
        self.submitted_tokens = 0
        self.ready = False
        self.ending = False
        self.woken = False
        self.closed = False
        self.last_step = time.monotonic()
        self.thread: threading.Thread | None = None
        self.failure: Exception | None = None
        self.on_failure: Callable[[Exception], None] | None = None

    # The model.

    @property
    def context(self) -> int:
        """The most positions of a request, prompt and new tokens."""
        return self.decoding.context

    @property
    def tokenizer(self) -> Tokenizer:
        return self.decoding.tokenizer

    @property
    def vocab_size(self) -> int:
        return self.decoding.vocab_size

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Returns the tokens of a prompt, which may be token ids already. Raises a `ValueError` for an invalid prompt."""
        return self.decoding.encode(prompt)

    def check(self, request: Any) -> None:
        """Raises a `ValueError` if a request with valid tokens can never be served. It is fast."""
        self.decoding.check(request)

    # From loading to the first request.

    @property
    def prepared(self) -> bool:
        """True once the device memory is allocated."""
        return self.runner.state is not None

    def warm(self, console: Console | None = None, wait_for_programs: bool = True) -> None:
        """Compiles programs and allocates the device memory.

        Args:
            wait_for_programs: compiles all programs, and measures their costs where the decoding needs them. If false, it
                compiles only the programs that can serve every request; the others are compiled in the background once the
                engine accepts requests, and their costs are learnt from dispatches. Several processes always wait.
        """
        began = time.perf_counter()
        programs = self.runner.programs
        keys = self.decoding.program_keys()
        if wait_for_programs or programs.over_processes:
            programs.warm(keys, console)
            self.decoding.measure(console)
        else:
            first = self.decoding.first_keys()
            jax.block_until_ready(programs.params_for(first[-1]))  # so that only the compiler works
            with working_threads() as compilers:
                programs.warm(first, console)
            # Another engine may have compiled some of the others.
            ready = [key for key in keys if key in programs.compiled]
            self.decoding.use(ready)
            missing = [key for key in keys if key not in ready]
            self.compiling = BackgroundCompile(programs, missing, lambda: self.busy, compilers)
        self.runner.reset()
        self.counters.programs = sum(key in programs.compiled for key in keys)
        self.counters.programs_declared = len(keys)
        self.counters.warm_seconds = time.perf_counter() - began

    @property
    def compiles(self) -> bool:
        """True while programs are compiled in the background, even after `stop`, which waits for none."""
        return self.compiling is not None and self.compiling.running

    def take_programs(self) -> None:
        """Takes in programs that were compiled in the background. Raises the exception of one that did not compile."""
        if self.compiling is None:
            return
        finished = self.compiling.collect()
        if finished:
            self.decoding.use({*self.runner.existing, *finished})
            self.counters.programs += len(finished)
        if self.counters.programs == self.counters.programs_declared:
            self.compiling = None
        elif self.runner.missed:
            self.compiling.prefer(self.runner.missed)
            self.runner.missed = {}

    def lockstep(self) -> Lockstep:
        """Returns the channel between the first process and the others."""
        return Lockstep(self.runner.programs, self.decoding.program_keys(), HostBroadcast())

    def accept_requests(self) -> None:
        """Accepts requests from now on, for a caller that calls `step` itself.

        If several processes share the model, the first process opens the engine, and the others `follow`.

        Raises:
            Stopped: the engine was stopped before.
        """
        assert self.prepared, "call warm before open"
        with self.wake:
            assert not self.ready, "the engine is open already"
            if self.closed:
                raise Stopped("the engine was stopped before it started")
            if self.runner.programs.over_processes:
                self.runner.lockstep = self.lockstep()
            self.trap.arm()
            if self.compiling is not None:
                self.compiling.start()
            self.ready = True
            self.last_step = time.monotonic()

    def follow(self) -> None:
        """Runs the programs of the first process's engine, after `warm`, until that engine is stopped.

        Raises:
            ProcessLost: the first process has gone.
        """
        assert self.prepared, "call warm before follow"
        self.trap.arm()
        try:
            for key, inputs in self.lockstep().received():
                if key.name == "allocate":
                    self.runner.reset()
                else:
                    self.runner.run(key, *inputs)
        finally:
            self.trap.disarm()

    def start(self) -> None:
        """Accepts requests from now on, and steps on a thread of its own. Raises the errors of `open`."""
        with self.wake:
            self.accept_requests()
            self.thread = threading.Thread(target=self.run, name="tilewright engine", daemon=True)
            self.thread.start()

    def check_room(self, requests: int, tokens: int) -> None:
        """Raises `Overloaded` if the queue has no room for that many more requests and prompt tokens."""
        with self.wake:
            waiting, waiting_tokens = self.waiting_now()
            for found, most, unit in (
                (waiting + requests, self.options.queue_requests, "requests"),
                (waiting_tokens + tokens, self.options.queue_tokens, "tokens of prompts"),
            ):
                if found > most:
                    self.counters.rejected += 1
                    raise Overloaded(f"the queue holds at most {most} {unit}", RETRY_AFTER_S)

    def waiting_now(self) -> tuple[int, int]:
        """Returns the number of waiting requests, and of their prompt tokens. The caller holds the lock."""
        return len(self.scheduler.waiting) + len(self.submitted), self.scheduler.waiting_tokens + self.submitted_tokens

    def submit(self, request: Any, listener: Listener, encoded: bool = False) -> RequestHandle:
        """Queues a request.

        Args:
            listener: called with each output, on the engine's thread.
            encoded: whether the prompt is a result of `encode`, whose tokens need no further check.

        Raises:
            ValueError: the request can never be served.
            Overloaded: the queue is full.
            Stopped: the engine has not started, or is stopping.
        """
        if not encoded:
            self.encode(request.prompt)
        self.decoding.check(request)
        sequence = self.decoding.sequence(request, listener)
        with self.wake:
            if not self.ready:
                raise Stopped("the engine accepts no requests")
            self.check_room(1, len(sequence.processor.prompt))
            self.register(sequence)
            self.submitted.append(sequence)
            self.submitted_tokens += len(sequence.processor.prompt)
            self.wake_thread()
        return sequence.handle

    def add(self, request: Any, listener: Listener) -> TokenSequence:
        """Queues a request of a caller that calls `step` itself, whether the engine is open or not.

        Raises the `ValueError` of `check`.
        """
        self.decoding.check(request)
        sequence = self.decoding.sequence(request, listener)
        self.register(sequence)
        self.scheduler.wait(sequence)
        return sequence

    def register(self, sequence: TokenSequence) -> None:
        """Registers a sequence. With other threads, the caller holds the lock."""
        sequence.handle.number = self.next_number
        sequence.handle.times.submitted_at = time.monotonic()
        self.next_number += 1
        self.live_sequences[sequence] = None

    def cancel(self, handle: RequestHandle) -> None:
        """Ends a request before the next dispatch, unless it has ended."""
        with self.wake:
            handle.cancelled = True
            self.wake_thread()

    def wake_thread(self) -> None:
        """Wakes the engine's thread. The caller holds the lock."""
        self.woken = True
        self.wake.notify_all()

    def stop(self, drain_s: float = 0.0) -> bool:
        """Refuses new requests, lets running ones end for `drain_s` seconds, cancels the rest, and ends the thread.

        Returns:
            True if no request was cancelled.
        """
        until = time.monotonic() + drain_s
        with self.wake:
            # From here on no thread can start the engine.
            self.ready = False
            self.closed = True
        while self.busy and time.monotonic() < until:
            time.sleep(0.01)
        with self.wake:
            drained = not self.busy
            self.ending = True
            self.wake_thread()
        if self.thread is None:
            self.end_all()
        else:
            self.thread.join()
        if self.compiling is not None:
            self.compiling.stop()
        self.trap.disarm()
        if self.runner.lockstep is not None and self.failure is None:
            self.runner.lockstep.end()
        return drained

    @property
    def busy(self) -> bool:
        """True while a request has not ended, or a dispatch is in flight."""
        return bool(self.live_sequences or self.flight)

    def run(self) -> None:
        """Steps until the engine is stopped, or until a failure that recovery cannot handle."""
        try:
            while not self.ending:
                if not self.step():
                    with self.wake:
                        self.wake.wait_for(lambda: self.woken, IDLE_S)
        except Exception as error:
            log.exception("the engine failed and cannot recover")
            with self.wake:
                self.ready = False
                self.closed = True
                self.ending = True
                self.failure = error
        self.end_all()
        if self.failure is not None and self.on_failure is not None:
            self.on_failure(self.failure)

    def step(self, plan: Plan | None = None, most: int | None = None, wait: bool = False) -> bool:
        """Takes in submissions, dispatches, and reads the dispatch of the step before. Returns whether there was any work.

        Args:
            plan: plan of the dispatch; by default the decoding's.
            most: the most steps of the decoding's plan.
            wait: dispatches all prefill chunks, and also reads the results of this step.
        """
        self.take_programs()
        try:
            self.expire(self.take_submissions())
            before = len(self.flight)
            worked = self.fill(everything=wait) > 0
            read = self.prepare()
            worked |= self.send(plan, most) or read
            if wait or not read:
                worked |= self.read_all_but(0 if wait else len(self.flight) - before)
        except Exception as error:
            if not self.recovers:
                raise
            log.exception("a dispatch failed")
            self.recover(error)
            worked = True
        self.last_step = time.monotonic()
        return worked

    def fill(self, everything: bool = False) -> int:
        """Admits sequences, and dispatches prefill chunks: a large chunk or several small ones.

        The number of chunks in a step is limited even if nothing else runs, so that the next step can take in cancellations and
        submissions. A step waits for the chunks of the step before, so the device always has the next ones queued.

        Args:
            everything: dispatches all chunks, for a caller that waits for them itself.

        Returns:
            the sum of admitted sequences and computed positions.
        """
        admitted = self.admit()
        sent = 0
        most = math.inf if everything else self.scheduler.table.chunks[-1]
        result = None
        while sent < most and (chunks := self.scheduler.next_chunks()):
            result = self.decoding.prefill(chunks)
            for row, chunk in enumerate(chunks):
                self.on_prefilled(chunk, result, row)
            wanted = sum(chunk.count for chunk in chunks)
            self.counters.prefill_tokens += wanted
            self.counters.prefill_padding += result.positions - wanted
            sent += result.positions
        if result is not None and not everything and not self.scheduler.runnable():
            self.flight.append(SentPrefill(result.end))
        return admitted + sent

    def on_prefilled(self, chunk: Chunk, result: Prefilling, row: int) -> None:
        """Records a dispatched chunk and its row of the program's result; the last chunk completes an embedding."""
        sequence = chunk.running.sequence
        if sequence.prompt_logprobs is not None and sequence.wants_prompt_logprobs:
            assert result.logprobs is not None, "the program reports no log-probabilities"
            sequence.prompt_logprobs.append((result.logprobs, row, chunk.count))
        self.scheduler.on_prefilled(chunk)
        if sequence.pooling is not None:
            assert result.pooled is not None, "the program reports no pooled states"
            sequence.pooled.append(PooledChunk(result.pooled, row, chunk.count))
            if chunk.running.prefilled:
                self.flight.append(SentEmbedding(sequence, sequence.pooled))

    def prepare(self) -> bool:
        """Updates what the next plan depends on. Reads all dispatches in flight if necessary, and returns whether it did."""
        first_read, failed = self.decoding.prepare_plan(self.flight, self.scheduler.runnable())
        for sequence, error in failed:
            self.scheduler.remove(sequence)
            self.end(sequence, "error", error)
        return first_read and self.read_all_but(0)

    def send(self, plan: Plan | None = None, most: int | None = None) -> bool:
        """Dispatches a plan for all sequences that are ready, at the end of `flight`. Returns whether there were any.

        Args:
            plan: by default the decoding's plan.
            most: the most steps of the decoding's plan.
        """
        batch = self.scheduler.runnable()
        if not batch:
            return False
        chosen = self.decoding.plan(batch, most) if plan is None else plan
        batch, steps = self.scheduler.make_room(batch, chosen.steps, chosen.width)
        if not batch:
            return False
        reach = max(self.scheduler.reach(running, steps, chosen.width) for running in batch)
        try:
            sent = self.decoding.send(batch, chosen._replace(steps=steps), reach)
        except ConstraintError as error:
            sequence = batch[error.row].sequence
            self.scheduler.remove(sequence)
            self.end(sequence, "error", str(error))
            return self.send(plan, most)
        self.flight.append(sent)
        self.scheduler.on_dispatched(batch, sent.least, sent.most)
        return True

    def read_all_but(self, last: int) -> bool:
        """Reads dispatches until only the `last` ones are in flight. Returns whether it read any."""
        more = len(self.flight) > last
        while len(self.flight) > last:
            self.read(self.flight.popleft())
        return more

    def read(self, sent: Sent | SentEmbedding | SentPrefill) -> None:
        """Waits for a dispatch, and delivers its results."""
        if isinstance(sent, SentPrefill):
            jax.block_until_ready(sent.end)
            return
        if isinstance(sent, SentEmbedding):
            self.read_embedding(sent)
            return
        began = time.perf_counter()
        report = self.decoding.read(sent)
        self.deliver_dispatch(sent, report, began, time.perf_counter())

    def read_embedding(self, sent: SentEmbedding) -> None:
        """Delivers an embedding. Raises `NotFinite` like `deliver_dispatch`."""
        sequence = sent.sequence
        if sequence.handle.result is not None:  # it was cancelled
            return
        assert sequence.pooling is not None
        found = embedding(sent.chunks, sequence.pooling)
        if not np.isfinite(found).all():
            self.deliver(sequence, RequestOutput(end="error", error=NOT_COMPUTED))
            raise NotFinite("the target's hidden states are not finite")
        self.deliver(sequence, RequestOutput(end="length", embedding=found, prompt_logprobs=prompt_logprobs(sequence)))

    def deliver_dispatch(self, sent: Sent, report: Report, began: float, ended: float) -> None:
        """Delivers the tokens of a dispatch.

        Args:
            began, ended: when the engine began to wait for the dispatch, and received it, by `time.perf_counter()`.

        Raises:
            NotFinite: a request had logits that are not finite; it has ended. The device's state must be reset, since another
                request may get the same page: masked entries are multiplied by zero, and NaN or infinity times zero is NaN.
        """
        failure = None
        self.decoding.count(sent, report, self.counters)
        for row, running in enumerate(sent.batch):
            sequence = running.sequence
            self.scheduler.on_completed(running, sent.least, sent.most, report.committed[row], report.drafter)
            if sequence.handle.result is not None:
                continue
            try:
                update = self.decoding.collect(sent, report, row)
            except ConstraintError as error:
                update = RequestOutput(end="error", error=str(error))
            except Exception as error:
                log.exception("a request failed")
                failure = error if isinstance(error, NotFinite) else failure
                update = RequestOutput(end="error", error=NOT_COMPUTED)
            if update is not None:
                self.deliver(sequence, update)
        self.decoding.observe(sent, report, began, ended)
        for observer in self.observers:
            observer(sent, report, began, ended)
        if failure is not None:
            raise failure

    def take_submissions(self) -> list[TokenSequence]:
        """Moves submitted sequences into the queue. Returns all sequences that have not ended."""
        with self.wake:
            self.woken = False
            for sequence in self.submitted:
                self.scheduler.wait(sequence)
            self.submitted = []
            self.submitted_tokens = 0
            return list(self.live_sequences)

    def admit(self) -> int:
        """Gives slots to waiting sequences, in order. Returns how many got one."""
        admitted = self.scheduler.admit(self.decoding.servable)
        for running in admitted:
            times = running.sequence.handle.times
            times.admitted = times.admitted or time.monotonic()
            running.row = self.decoding.begin(running.sequence)
            if not running.sequence.handle.preemptions:
                self.counters.prompt_tokens += running.last_position + 1
        return len(admitted)

    def expire(self, sequences: Sequence[TokenSequence]) -> None:
        """Ends cancelled sequences, and sequences past their deadline."""
        now = time.monotonic()
        for sequence in sequences:
            deadline = sequence.handle.request.deadline_s
            if sequence.handle.cancelled:
                self.scheduler.remove(sequence)
                self.end(sequence, "cancelled")
            elif deadline is not None and now > sequence.handle.times.submitted_at + deadline:
                self.scheduler.remove(sequence)
                self.end(sequence, "deadline", f"the request did not finish within {deadline:g} s")

    def deliver(self, sequence: TokenSequence, update: RequestOutput) -> None:
        """Delivers an update to a sequence's listener, and ends the sequence with its last update."""
        times = sequence.handle.times
        times.first_token = times.first_token or time.monotonic()
        self.counters.generated_tokens += len(update.tokens)
        if update.end is None:
            self.notify(sequence, update)
            return
        self.scheduler.remove(sequence)
        self.end(sequence, update.end, update=update)

    def end(self, sequence: TokenSequence, reason: EndReason, error: str = "", update: RequestOutput | None = None) -> None:
        """Ends a sequence that is neither in a slot nor in the queue."""
        with self.wake:
            del self.live_sequences[sequence]
        sequence.handle.times.ended = time.monotonic()
        sequence.handle.result = sequence.result()
        self.counters.ended[reason] = self.counters.ended.get(reason, 0) + 1
        self.notify(sequence, update or RequestOutput(end=reason, error=error))

    def notify(self, sequence: TokenSequence, update: RequestOutput) -> None:
        try:
            sequence.listener(update)
        except Exception:
            log.exception("a listener failed")
            self.cancel(sequence.handle)

    def recover(self, error: Exception) -> None:
        """Requeues the running sequences after a failed dispatch, or ends them. Raises an error if the engine cannot go on."""
        if self.runner.lockstep is not None and not isinstance(error, NotFinite):
            # After a failure the state of another process's devices is unknown, unless all processes ran the program.
            raise ProcessLost("a dispatch failed in one of several processes") from error
        if self.flight and self.flight[0] is self.decoding.advanced_dispatch:  # its constraints have advanced already
            self.read(self.flight.popleft())
        self.flight.clear()
        for sequence in self.scheduler.forget():
            sequence.faults += not isinstance(error, NotFinite)  # the request with the bad logits has ended already
            if sequence.faults >= FAULTS:
                self.scheduler.remove(sequence)
                self.end(sequence, "error", NOT_COMPUTED)
        self.runner.reset()

    def end_all(self) -> None:
        """Cancels all remaining sequences."""
        self.flight.clear()
        for sequence in self.take_submissions():
            self.scheduler.remove(sequence)
            self.end(sequence, "cancelled", "the engine was stopped")

    def stats(self) -> EngineStats:
        """Returns the counters so far, and the present state."""
        age = time.monotonic() - self.last_step
        with self.wake:
            self.counters.compilations = self.trap.ledger.compilations
            waiting, tokens = self.waiting_now()
        return replace(
            self.counters,
            waiting=waiting,
            waiting_tokens=tokens,
            accepted_at=list(self.counters.accepted_at),
            widths=dict(self.counters.widths),
            ended=dict(self.counters.ended),
            step_age_s=age,
            **self.scheduler.stats(),
        )
