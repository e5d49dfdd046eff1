"""Stream: decodes prompts on the caller's thread, with an engine of the size that they need."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console

from tilewright.runtime.engine import Engine
from tilewright.runtime.interfaces import Choice
from tilewright.runtime.output import Generation, OutputProcessor, Piece, Result
from tilewright.runtime.programs import STEPS_PER_DISPATCH
from tilewright.runtime.request import AnyRequest, RequestOutput
from tilewright.runtime.scheduler import TokenSequence
from tilewright.runtime.state import DecodeState

SHOWN_STEPS = 4
"""Steps or rounds of a dispatch while text is shown."""


class Stream:
    """Decodes prompts: iterate over the pieces, or call `advance` until `finished`; `results` may be read at any time.

    Prompts beyond the engine's slots wait. The first `advance` (or `prefill`) allocates the device memory. It is freed when all
    prompts have ended, or by `close`, which the end of a `with` block calls.

    Attributes:
        engine: engine that serves only these prompts.
        rows: output processors of the requests, in order.
        prefill_seconds, decode_seconds: time spent in programs, without compilation.
    """

    def __init__(self, engine: Engine, requests: Sequence[AnyRequest]):
        self.engine = engine
        self.pieces: list[Piece] = []
        self.sequences = [self.add(row, request) for row, request in enumerate(requests)]
        self.rows: list[OutputProcessor] = [sequence.processor for sequence in self.sequences]
        self.prefill_seconds = self.decode_seconds = 0.0
        self.started = False
        self.closed = False
        self.failure = ""

    def __iter__(self) -> Iterator[Piece]:
        """Decodes to the end, and yields each piece of text as it arrives."""
        while not self.finished:
            yield from self.advance(SHOWN_STEPS)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def add(self, row: int, request: AnyRequest) -> TokenSequence:
        """Queues a request in the engine."""

        def listen(update: RequestOutput) -> None:
            self.failure = self.failure or update.error
            self.pieces += [Piece(row, one.text, one.token, one.drafted) for one in update.tokens]

        return self.engine.add(request, listen)

    @property
    def keys(self) -> Sequence[Any]:
        """Keys of the programs that these prompts surely need; those of rounds only if all rounds are of one kind."""
        return self.engine.decoding.needed_keys(self.sequences)

    @property
    def finished(self) -> bool:
        return all(sequence.handle.result is not None for sequence in self.sequences)

    @property
    def rounds(self) -> int:
        """Rounds (steps, without a drafter) run so far, counted once for all rows."""
        return self.engine.counters.rounds

    def prefill(self, console: Console | None = None) -> None:
        """Compiles missing programs and fills the caches with the prompts, on the first call only."""
        if self.started or self.finished:
            return
        self.started = True
        decoding = self.engine.decoding
        self.engine.runner.programs.warm(self.keys, console)
        decoding.measure(None)
        self.engine.runner.reset()
        self.engine.observers.append(self.observe)
        self.fill()

    def observe(self, sent: Any, report: Any, began: float, ended: float) -> None:
        """Sums the durations of dispatches."""
        self.decode_seconds += ended - sent.at

    def fill(self) -> None:
        """Gives slots to waiting prompts, and prefills them."""
        began = time.perf_counter()
        if self.engine.fill(everything=True):
            self.engine.runner.wait()
        self.prefill_seconds += time.perf_counter() - began

    def advance(self, steps: int = STEPS_PER_DISPATCH, choice: Choice | None = None) -> list[Piece]:
        """Runs up to `steps` steps or rounds on the device, and returns the new pieces, row by row.

        Args:
            choice: kind of the rounds, if there are several; by default the engine's chooser decides, and may return after
                fewer rounds.

        Raises:
            ValueError: not 1 <= steps <= 64, or an unknown kind of rounds.
            RuntimeError: a request failed (the log has the cause), or the stream was closed before all requests had ended.
            ArithmeticError: the target's logits are not finite.
        """
        if not 1 <= steps <= STEPS_PER_DISPATCH:
            raise ValueError(f"expected from 1 to {STEPS_PER_DISPATCH} steps, found {steps}")
        if self.finished:
            return []
        if self.closed:
            raise RuntimeError("expected an open stream, found a closed one")
        self.prefill()
        if self.engine.scheduler.waiting:
            self.fill()
        self.engine.step(None if choice is None else self.engine.decoding.rounds(choice, steps), steps, wait=True)
        if self.failure:
            raise RuntimeError(f"a request failed: {self.failure}")
        if self.finished:
            self.close()
        pieces = self.pieces
        self.pieces = []
        return pieces

    def close(self) -> None:
        """Frees the device memory. Results stay readable; decoding cannot continue."""
        self.closed = True
        self.engine.runner.free()

    def apply(self, program: Callable[..., tuple[DecodeState, Any]]) -> Any:
        """Runs `program(models, state, slots [n], tables [G, n, M]) -> (state, result)` on the rows in slots, for measurements.

        Call it between two dispatches. The rows have pages for a block.
        """
        engine = self.engine
        drafter = engine.decoding.programs.drafter
        batch, _ = engine.scheduler.make_room(engine.scheduler.running, 1, 1 if drafter is None else drafter.block_size)
        slots = engine.runner.slots(batch, len(batch))
        table = engine.runner.table(batch, len(batch), engine.decoding.programs.layout.capacity)
        return engine.runner.apply(program, engine.decoding.model.models, slots, table)

    def results(self) -> Sequence[Result]:
        """Returns the results of all rows so far."""
        return [sequence.result() for sequence in self.sequences]

    def generation(self) -> Generation[Any]:
        """Returns the results of all rows so far, with their times."""
        return Generation(list(self.results()), self.prefill_seconds, self.decode_seconds, self.rounds)
