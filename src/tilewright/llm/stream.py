"""Prompts on their way to results, on the caller's thread: an engine of just the size that they need, until it is idle."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tilewright.runtime.engine import Engine
from tilewright.runtime.interfaces import Choice
from tilewright.runtime.output import Generation, OutputProcessor, Piece, Result
from tilewright.runtime.programs import STEPS_PER_DISPATCH, ProgramKey
from tilewright.runtime.request import GenerateRequest, RequestOutput
from tilewright.runtime.scheduler import TokenSequence
from tilewright.runtime.state import DecodeState

SHOWN_STEPS = 4
"""Steps or rounds for each dispatch while text is being shown."""


class Stream:
    """Decodes prompts: iterate over the pieces, or `advance` until `finished`; then `results`, which may be taken earlier.

    More prompts than the engine has slots wait for one. Device memory is taken by the first `advance` (or `prefill`) and goes
    back when all have ended, or with `close`, which the end of a `with` block calls.

    Attributes:
        engine: which serves these prompts alone.
        rows: the requests, in order.
        prefill_seconds, decode_seconds: time spent in the programs, compilation excluded.
    """

    def __init__(self, engine: Engine, requests: Sequence[GenerateRequest]):
        self.engine = engine
        self.pieces: list[Piece] = []
        self.sequences = [self.entered(row, request) for row, request in enumerate(requests)]
        self.rows: list[OutputProcessor] = [sequence.processor for sequence in self.sequences]
        self.prefill_seconds = self.decode_seconds = 0.0
        self.begun = False
        self.closed = False
        self.failure = ""

    def __iter__(self) -> Iterator[Piece]:
        """Decodes to the end, and gives each piece of text as it comes."""
        while not self.finished:
            yield from self.advance(SHOWN_STEPS)

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *of: object) -> None:
        self.close()

    def entered(self, row: int, request: GenerateRequest) -> TokenSequence:
        """A sequence of the engine, which waits."""

        def listen(update: RequestOutput) -> None:
            self.failure = self.failure or update.error
            self.pieces += [Piece(row, one.text, one.token, one.drafted) for one in update.tokens]

        self.engine.check(request)
        sequence = self.engine.sequence(request, listen)
        self.engine.enter(sequence)
        self.engine.scheduler.wait(sequence)
        return sequence

    @property
    def keys(self) -> list[ProgramKey]:
        """The programs that these prompts are known to need, of rounds only those of which there is one kind."""
        programs = self.engine.programs
        scheduler = self.engine.scheduler
        lengths = [len(row.prompt) - 1 for row in self.rows]
        chunks = {chunk for length in lengths for _, chunk in programs.table.prefill_plan(max(1, length))}
        together = programs.table.together if scheduler.computed_together(lengths) else None
        rounds = programs.choices if len(programs.choices) == 1 else ()
        masked = {sequence.constraint is not None for sequence in self.sequences}

        def needed(key: ProgramKey) -> bool:
            if key.name == "prefill":
                return (key.rows, key.chunk) == together or (key.rows == 1 and key.chunk in chunks)
            # Of rounds under masks there is one kind.
            return key.name == "allocate" or (key.masked in masked and (key.masked or key.choice in rounds))

        return [key for key in programs.declared(self.engine.runner.sampling, constraints=True) if needed(key)]

    @property
    def finished(self) -> bool:
        return all(row.finish_reason is not None for row in self.rows)

    @property
    def rounds(self) -> int:
        """Rounds (steps, without a drafter) run so far, counted once for all rows."""
        return self.engine.counted.rounds

    def prefill(self) -> None:
        """Compiles what is missing and fills the caches with the prompts, if that was not done before."""
        if self.begun or self.finished:
            return
        self.begun = True
        engine = self.engine
        engine.programs.warm(self.keys)
        engine.choose_rounds()
        for sequence in self.sequences:
            sequence.followed = engine.chooser.follow(sequence.processor.prompt)
        self.fill()

    def fill(self) -> None:
        """Gives slots to prompts that wait, and computes them."""
        began = time.perf_counter()
        if self.engine.fill(everything=True):
            self.engine.runner.wait()
        self.prefill_seconds += time.perf_counter() - began

    def advance(self, steps: int = STEPS_PER_DISPATCH, choice: Choice | None = None) -> list[Piece]:
        """Runs up to `steps` steps or rounds on the device and returns what they added, row by row.

        Args:
            choice: what the rounds do, where they are of several kinds; by default the engine's chooser says so, and may look
                again after fewer rounds.

        Raises:
            ValueError: not 1 <= steps <= 64, or rounds of a kind that there is not.
            RuntimeError: a request failed, and the log says how; or the stream was closed before all had ended.
            ArithmeticError: the target's logits are not finite.
        """
        if not 1 <= steps <= STEPS_PER_DISPATCH:
            raise ValueError(f"expected from 1 to {STEPS_PER_DISPATCH} steps, found {steps}")
        if self.finished:
            return []
        if self.closed:
            raise RuntimeError("expected a stream that goes on, found one that was closed")
        self.prefill()
        engine = self.engine
        if engine.scheduler.waiting:
            self.fill()
        plan = engine.plan(steps) if choice is None else (choice, steps)
        began = time.perf_counter()
        if engine.send_rounds(*plan):
            sent = engine.flight.popleft()
            infos = engine.runner.read(sent)
            ended = time.perf_counter()
            self.decode_seconds += ended - began
            engine.take(sent, infos, began, ended)
        if self.failure:
            raise RuntimeError(f"a request failed: {self.failure}")
        if self.finished:
            self.close()
        pieces = self.pieces
        self.pieces = []
        return pieces

    def close(self) -> None:
        """Gives the device's memory back. Results stay as they are, and nothing is decoded any more."""
        self.closed = True
        self.engine.runner.free()

    def apply(self, program: Callable[..., tuple[DecodeState, Any]]) -> Any:
        """Runs `program(models, state, slots [n], tables [G, n, M]) -> (state, result)` over the rows that have slots, between
        two dispatches: for measurements. The rows have room for a block."""
        engine = self.engine
        drafter = self.engine.programs.drafter
        batch, _ = engine.scheduler.make_room(engine.scheduler.running, 1, 1 if drafter is None else drafter.block_size)
        slots = engine.runner.slots(batch, len(batch))
        table = engine.runner.table(batch, len(batch), engine.programs.layout.capacity)
        return engine.runner.apply(program, engine.model.models, slots, table)

    def results(self) -> list[Result]:
        """Results of all rows so far."""
        return [row.result() for row in self.rows]

    def generation(self) -> Generation:
        """Results of all rows so far, with the times that they took."""
        return Generation(self.results(), self.prefill_seconds, self.decode_seconds, self.rounds)
