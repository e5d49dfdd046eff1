"""The device as the engine sees it: programs are sent one behind the other, and little is read of what they gave."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from tilewright.decode.policy import Choice
from tilewright.decode.sampling import Warp
from tilewright.decode.scores import alternatives
from tilewright.decode.state import DecodeState, StepInfo
from tilewright.engine.programs import EngineKey, EnginePrograms, request_row
from tilewright.engine.scheduler import Chunk, Seat
from tilewright.kernels.operations import UNMAPPED


class Sent(NamedTuple):
    """Rounds that were sent.

    Attributes:
        seats: in the order of the program's rows.
        rows: that the program runs.
        rounds: at most.
        width: tokens in a block.
        infos: what came of them, once the device is there.
        at: when they were sent, by `time.perf_counter()`.
        alone: nothing but rounds was sent since the rounds before.
    """

    seats: Sequence[Seat]
    rows: int
    choice: Choice | None
    warp: Warp
    rounds: int
    width: int
    infos: Any
    at: float
    alone: bool


class Device:
    """Sends programs one behind the other. What is handed to one is never changed afterwards: it may be read in place.

    Attributes:
        state: the slots and the pool; None before `reset`.
        sent: what was sent since the last rounds.
    """

    def __init__(self, programs: EnginePrograms):
        self.programs = programs
        self.state: DecodeState | None = None
        self.sent: list[str] = []

    def reset(self) -> None:
        """Empty slots, whatever was there."""
        self.state = None
        self.state = self.programs.empty_state(self.programs.get(EngineKey("allocate"))())

    def run(self, key: EngineKey, *inputs: Any) -> Any:
        assert self.state is not None, "the device was not reset"
        state, self.state = self.state, None  # lost, if this fails
        self.sent.append(key.name)
        self.state, result = self.programs.get(key)(self.programs.read(key), state, *inputs)
        return result

    def no_pages(self, rows: int, positions: int) -> np.ndarray:
        """A table, int32 `[rows, M]`, in which no row has a page."""
        return np.full((rows, positions // self.programs.layout.page_size), UNMAPPED, np.int32)

    def table(self, seats: Sequence[Seat], rows: int, positions: int) -> np.ndarray:
        """The pages of some seats, int32 `[rows, M]`."""
        table = self.no_pages(rows, positions)
        for row, seat in zip(table, seats, strict=False):
            pages = seat.pages[: len(row)]
            row[: len(pages)] = pages
        return table

    def prefill(self, chunk: Chunk) -> Any:
        """Computes a piece of a prompt, the first one with the job's admission; its scores, where the job asks for them."""
        name = "scored_prefill" if chunk.seat.job.scoring else "prefill"
        table = self.table([chunk.seat], 1, self.programs.layout.capacity)
        slot, start, count = (np.asarray([each], np.int32) for each in (chunk.seat.slot, chunk.start, chunk.count))
        return self.run(EngineKey(name, chunk=chunk.size), slot, self.row(chunk.seat), table, start, count)

    def row(self, seat: Seat) -> dict[str, Any]:
        """What a job's slot begins with."""
        job, request = seat.job, seat.job.request
        tokens = np.zeros((1, self.programs.layout.capacity), np.int32)
        tokens[0, : job.length] = job.tokens
        return request_row(tokens, seat.known, request.end, request.sampling, len(request.prompt), job.scored)

    def rounds(self, seats: Sequence[Seat], choice: Choice | None, warp: Warp, rounds: int, positions: int) -> Sent:
        """Runs up to so many rounds.

        Args:
            positions: that rounds look at, at most.
        """
        rows = self.programs.rows_for(len(seats), warp)
        key = EngineKey("rounds", rows, self.positions_for(positions), choice=choice, warp=warp)
        own = [seat.slot for seat in seats]
        others = [slot for slot in range(self.programs.layout.batch) if slot not in own]
        slots = np.asarray([*own, *others[: rows - len(own)]], np.int32)
        running = np.arange(rows) < len(own)
        at = time.perf_counter()
        infos = self.run(key, slots, self.table(seats, rows, key.positions), running, np.int32(rounds))
        infos.copy_to_host_async()
        alone, self.sent = self.sent == ["rounds"], []
        return Sent(seats, rows, choice, warp, rounds, self.programs.width(choice), infos, at, alone)

    def positions_for(self, positions: int) -> int:
        return next(each for each in self.programs.table.capacities if each >= positions)

    def read(self, sent: Sent) -> StepInfo:
        """What came of rounds; waits for the device."""
        scored = alternatives(sent.warp, self.programs.target.config.vocab_size)
        return StepInfo.unpacked(np.asarray(sent.infos), scored)

    def wait(self) -> None:
        """Until all that was sent has run."""
        jax.block_until_ready(self.state)
