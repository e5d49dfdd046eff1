"""Continuous batching of a diffusion language model: requests in different phases share steps, several of them to a dispatch.

Each slot denoises its response block by block, with its own mode, threshold and schedule. The next dispatch is sent before what
the one before gave is read: a row that has ended meanwhile takes no part on the device. Finished blocks are handed out as they
are read. What a row gives depends on its seed, positions and steps alone, so it is what the model gives for it by itself,
wherever a row's results do not depend on the rows beside it (`kernels.operations.is_batch_invariant`).
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console
from tokenizers import Tokenizer

from tilewright.diffusion.engine_options import DiffusionEngineOptions
from tilewright.diffusion.model import DiffusionModel, check_room
from tilewright.diffusion.options import Denoising, RowOptions, row_options
from tilewright.diffusion.pool import Pool, PoolPrograms, Told, Turn
from tilewright.diffusion.programs import DiffusionKey, DiffusionShape
from tilewright.diffusion.request import DenoisingRequest
from tilewright.diffusion.state import SPANS
from tilewright.diffusion.steps import NO_STEP, NOT_FINITE, STEPS_PER_DISPATCH
from tilewright.models.tokenizer import StreamDecoder
from tilewright.runtime.collect import NotFinite
from tilewright.runtime.output import OutputProcessor
from tilewright.runtime.pace import Pace
from tilewright.runtime.request import Listener, RequestHandle, RequestOutput, Round, Token
from tilewright.runtime.service import NOT_COMPUTED, EngineSequence, Service

log = logging.getLogger("tilewright.engine")


@dataclass(eq=False)
class DenoisingSequence(EngineSequence):
    """A request on its way.

    Attributes:
        denoising: what it asks for, with the seed that it draws with.
        slot: where it runs; None while it waits.
        fresh: no dispatch has run it yet.
        steps: taken since something was handed out.
        rows: its options as arrays, by the longest block of a program.
    """

    denoising: Denoising = field(default_factory=Denoising)
    slot: int | None = None
    fresh: bool = True
    steps: int = 0
    rows: dict[int, RowOptions] = field(default_factory=dict)

    @property
    def prompt(self) -> list[int]:
        return self.processor.prompt

    def options(self, longest: int) -> RowOptions:
        if longest not in self.rows:
            self.rows[longest] = row_options([self.denoising], longest)
        return self.rows[longest]


class Sent(NamedTuple):
    """A dispatch: who was in its rows (None where a row only fills it), and what came of it, once the device is there."""

    rows: Sequence[DenoisingSequence | None]
    shape: DiffusionShape
    told: Told
    at: float


class DiffusionEngine(Service[DenoisingSequence]):
    """Serves requests with one diffusion language model, over slots.

    Attributes:
        slots: who runs in each.
        waiting: those without a slot, the oldest first.
        pool: the device's memory; None before `prepare`, and where a dispatch failed.
    """

    options: DiffusionEngineOptions

    def __init__(self, model: DiffusionModel, options: DiffusionEngineOptions = DiffusionEngineOptions()):
        """Raises a `ValueError` for options that do not go together, or with the model."""
        super().__init__(options)
        self.model = model
        longest = model.config.decoder.max_position_embeddings
        table = options.shapes(longest)
        self.context = min(longest, table.positions[-1])
        self.programs = PoolPrograms(model, table, options.modes, self.context)
        self.pool: Pool | None = None
        self.slots: list[DenoisingSequence | None] = [None] * table.batches[-1]
        self.waiting: list[DenoisingSequence] = []
        self.pace = Pace(options.dispatch_s, STEPS_PER_DISPATCH)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.model.tokenizer

    @property
    def vocab_size(self) -> int:
        return self.model.config.decoder.vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.model.config.eos_token_ids

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        return self.model.encode(prompt)

    @property
    def prepared(self) -> bool:
        return self.pool is not None

    def prepare(self, console: Console | None) -> int:
        self.programs.warm(self.programs.every, console)
        self.clear()
        return len(self.programs.compiled)

    def check(self, request: DenoisingRequest) -> None:
        tokens, denoising = request.prompt, request.denoising
        check_room(tokens, denoising, self.context)
        if denoising.mode not in self.options.modes:
            raise ValueError(f"expected a mode among {', '.join(self.options.modes)}, found {denoising.mode}")
        if denoising.guidance:
            raise ValueError(f"expected no guidance, which takes rows of its own, found {denoising.guidance}")
        self.programs.shape([len(tokens)], [denoising])

    def sequence(self, request: DenoisingRequest, handle: RequestHandle, listener: Listener) -> DenoisingSequence:
        denoising = request.denoising.seeded()
        sampling = replace(request.sampling, seed=denoising.seed)
        processor = OutputProcessor(0, list(request.prompt), sampling, StreamDecoder(self.tokenizer))
        return DenoisingSequence(handle, listener, processor, denoising=denoising)

    def wait(self, sequence: DenoisingSequence) -> None:
        self.waiting.append(sequence)

    def queued(self) -> tuple[int, int]:
        return len(self.waiting), sum(len(sequence.prompt) for sequence in self.waiting)

    @property
    def running(self) -> list[DenoisingSequence]:
        return [sequence for sequence in self.slots if sequence is not None]

    def leave(self, sequence: DenoisingSequence) -> None:
        if sequence.slot is None:
            self.waiting.remove(sequence)
        else:
            self.slots[sequence.slot] = None

    def forget(self) -> list[DenoisingSequence]:
        self.flight.clear()
        for sequence in self.running:
            sequence.fresh, sequence.steps, sequence.handle.steps = True, 0, 0
        return self.running

    def clear(self) -> None:
        self.pool = None  # before another one is there
        self.pool = self.programs.get(DiffusionKey("pool", self.programs.whole))()

    def fill(self) -> int:
        """Gives slots to those that wait, in order; their first dispatch puts them there."""
        admitted = 0
        while self.waiting and None in self.slots:
            sequence = self.waiting.pop(0)
            sequence.slot = self.slots.index(None)
            self.slots[sequence.slot] = sequence
            sequence.handle.times.admitted = time.monotonic()
            self.counted.prompt_tokens += len(sequence.prompt)
            admitted += 1
        return admitted

    def send(self) -> bool:
        sequences = self.running
        if not sequences:
            return False
        assert self.pool is not None, "the engine was not warmed"
        shape = self.programs.shape(
            [len(sequence.prompt) for sequence in sequences], [sequence.denoising for sequence in sequences]
        )
        rows = self.rows(sequences, shape.batch)
        steps = self.pace.most(self.pace.seconds.get(shape), bool(self.waiting))
        turn = self.turn_of(shape, rows, steps)
        pool, self.pool = self.pool, None  # lost, if this fails
        at = time.perf_counter()
        self.pool, told = self.programs.get(DiffusionKey("turn", shape))(self.programs.params, pool, turn)
        jax.tree.map(lambda each: each.copy_to_host_async(), told)
        for sequence in sequences:
            sequence.fresh = False
        self.flight.append(Sent([self.slots[slot] for slot in rows], shape, told, at))
        return True

    def rows(self, sequences: Sequence[DenoisingSequence], size: int) -> list[int]:
        """The slots of a dispatch: of the sequences, and others that fill it up; all of them in order."""
        own = [sequence.slot for sequence in sequences if sequence.slot is not None]
        others = [slot for slot in range(len(self.slots)) if slot not in own]
        return sorted([*own, *others[: size - len(own)]])

    def turn_of(self, shape: DiffusionShape, slots: Sequence[int], steps: int) -> Turn:
        """Arguments of the programs for these slots."""
        empty = self.programs.of_turn(shape)
        fill = row_options([Denoising(1)], shape.block)
        told = []
        for row, slot in enumerate(slots):
            sequence = self.slots[slot]
            told.append(fill if sequence is None else sequence.options(shape.block))
            if sequence is not None:
                empty.running[row], empty.fresh[row] = True, sequence.fresh
                empty.tokens[row, : len(sequence.prompt)] = sequence.prompt
                empty.start[row], empty.stop[row] = len(sequence.prompt), len(sequence.prompt) + sequence.denoising.new_tokens
        options = jax.tree.map(lambda *each: np.concatenate(each), *told)
        return empty._replace(slots=np.asarray(slots, np.int32), options=options, limit=np.int32(steps))

    def read(self, sent: Sent) -> None:
        """Hands out the blocks that a dispatch finished.

        Raises:
            NotFinite: the logits of a request were not finite, which has ended; see `runtime.engine.Engine.take`.
        """
        began = time.perf_counter()
        told = Told(*(np.asarray(each) for each in sent.told))
        ran, failure = told.reports[:, :, 0] != NO_STEP, None
        steps = int(np.count_nonzero(ran.any(axis=1)))
        self.pace.time(sent.shape, steps, sent.at, True, began, time.perf_counter())
        self.count(sent, told.reports[:steps])
        for row, sequence in enumerate(sent.rows):
            if sequence is None or sequence.handle.result is not None:
                continue
            own = int(np.count_nonzero(ran[:, row]))
            sequence.steps += own
            sequence.handle.steps += own
            try:
                if (told.reports[:, row, 0] == NOT_FINITE).any():
                    raise NotFinite("the model's logits are not finite")
                update = self.blocks(sequence, told, row, bool(own) and bool(told.reports[steps - 1, row, 2]))
            except Exception as error:
                log.exception("a request failed")
                failure = error if isinstance(error, NotFinite) else failure
                update = RequestOutput(end="error", error=NOT_COMPUTED)
            if update is not None:
                self.hand_out(sequence, update)
        if failure is not None:
            raise failure

    def blocks(self, sequence: DenoisingSequence, told: Told, row: int, done: bool) -> RequestOutput | None:
        """Committed part of a sequence's response that was not handed out yet; None where that is nothing."""
        first, mask = len(sequence.prompt), self.model.config.mask_token_id
        response = told.tokens[row, first : first + sequence.denoising.new_tokens].tolist()
        until = (response.index(mask) if mask in response else len(response)) if done else int(told.block_start[row]) - first
        new = response[len(sequence.processor.tokens) : until]
        if not new:
            return None
        pieces = sequence.processor.add_round(new, 0, 0, self.eos_token_ids)
        tokens = tuple(Token(one.token, one.text, one.drafted) for one in pieces)
        steps, sequence.steps = sequence.steps, 0
        reason = sequence.processor.finish_reason
        assert reason != "interrupted"
        assert reason is not None or not done, "a row that is done has ended"
        return RequestOutput(tokens, (Round(len(tokens), 0, 0, f"{steps} steps"),), reason)

    def count(self, sent: Sent, reports: np.ndarray) -> None:
        """Counts the steps of a dispatch."""
        ran, counted = int(np.count_nonzero(reports[:, :, 0] != NO_STEP)), self.counted
        counted.dispatches += 1
        counted.rounds += len(reports)
        counted.row_rounds += ran
        counted.padding_rows += reports.shape[0] * reports.shape[1] - ran
        for span in reports[:, 0, 1].tolist():
            counted.widths[SPANS[span]] = counted.widths.get(SPANS[span], 0) + 1

    def standing(self) -> dict[str, Any]:
        return {"running": len(self.running), "slots": len(self.slots)}
