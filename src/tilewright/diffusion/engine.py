"""Continuous batching of a diffusion language model: requests in different phases share steps, several of them to a dispatch.

Each slot denoises its response block by block, with its own mode, threshold and schedule. The next dispatch is sent before what
the one before gave is read: a row that has ended meanwhile takes no part on the device. Finished blocks are handed out as they
are read. What a row gives depends on its seed, positions and steps alone, so it is what the model gives for it by itself,
wherever a row's results do not depend on the rows beside it (`kernels.operations.is_batch_invariant`).
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import numpy as np
from rich.console import Console
from tokenizers import Tokenizer

from tilewright.diffusion.engine_options import DiffusionEngineOptions
from tilewright.diffusion.model import DiffusionModel, check_room
from tilewright.diffusion.options import Denoising, one_row
from tilewright.diffusion.pool import DispatchInputs, DispatchOutputs, Pool, PoolPrograms
from tilewright.diffusion.programs import DiffusionKey, DiffusionShape
from tilewright.diffusion.request import DenoisingRequest
from tilewright.diffusion.state import SPANS
from tilewright.diffusion.steps import NO_STEP, NOT_FINITE, STEPS_PER_DISPATCH
from tilewright.models.tokenizer import StreamDecoder
from tilewright.runtime.collect import NotFinite
from tilewright.runtime.output import OutputProcessor
from tilewright.runtime.pace import Pace
from tilewright.runtime.pages import Pages
from tilewright.runtime.request import Listener, RequestHandle, RequestOutput, Round, Token
from tilewright.runtime.scheduler import RunningSequence, Scheduler, TokenSequence
from tilewright.runtime.service import NOT_COMPUTED, Service
from tilewright.runtime.shapes import ShapeTable

log = logging.getLogger("tilewright.engine")


def denoising_of(running: RunningSequence) -> Denoising:
    """Options of a request, with the seed that it draws with."""
    request = running.sequence.handle.request
    assert isinstance(request, DenoisingRequest)
    return request.denoising


class SentSteps(NamedTuple):
    """A dispatch: who was in its rows (None where a row only fills it), and what came of it, once the device is there."""

    rows: Sequence[RunningSequence | None]
    shape: DiffusionShape
    outputs: DispatchOutputs
    at: float


class DiffusionEngine(Service):
    """Serves requests with one diffusion language model, over slots; each is one page of the whole context.

    Attributes:
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
        slots = table.batches[-1]
        whole = ShapeTable(batches=(slots,), capacities=(self.context,), chunks=(self.context,))
        self.scheduler = Scheduler(whole, Pages(slots, self.context), self.context, prefix_cache=False)
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
        tokens = request.prompt
        denoising = request.denoising
        check_room(tokens, denoising, self.context)
        if denoising.mode not in self.options.modes:
            raise ValueError(f"expected a mode among {', '.join(self.options.modes)}, found {denoising.mode}")
        if denoising.guidance:
            raise ValueError(f"expected no guidance, which takes rows of its own, found {denoising.guidance}")
        self.programs.shape([len(tokens)], [denoising])

    def sequence(self, request: DenoisingRequest, listener: Listener) -> TokenSequence:
        request = replace(request, denoising=request.denoising.seeded())
        decoder = StreamDecoder(self.tokenizer, prompt=request.prompt)
        processor = OutputProcessor(0, list(request.prompt), request.sampling, decoder)
        return TokenSequence(RequestHandle(request), listener, processor)

    def clear(self) -> None:
        self.pool = None  # before another one is there
        self.pool = self.programs.get(DiffusionKey("pool", self.programs.whole))()

    def fill(self) -> int:
        return self.admit()  # the first dispatch of a request puts it into its slot

    def send(self) -> bool:
        batch = self.scheduler.running
        if not batch:
            return False
        assert self.pool is not None, "the engine was not warmed"
        prompts = [len(running.sequence.processor.prompt) for running in batch]
        shape = self.programs.shape(prompts, [denoising_of(running) for running in batch])
        slots = self.slots_for(batch, shape.batch)
        rows = [self.scheduler.slots[slot] for slot in slots]
        steps = self.pace.most(self.pace.seconds.get(shape), bool(self.scheduler.waiting))
        inputs = self.inputs(shape, slots, rows, steps)
        # lost, if this fails
        pool = self.pool
        self.pool = None
        at = time.perf_counter()
        self.pool, outputs = self.programs.get(DiffusionKey("turn", shape))(self.programs.params, pool, inputs)
        jax.tree.map(lambda each: each.copy_to_host_async(), outputs)
        for running in batch:
            if not running.begun:
                running.begun = True
                running.sequence.handle.steps = 0
        self.flight.append(SentSteps(rows, shape, outputs, at))
        return True

    def slots_for(self, batch: Sequence[RunningSequence], size: int) -> list[int]:
        """The slots of a dispatch: of those that run, and others that fill it up; all of them in order."""
        own = [running.slot for running in batch]
        others = [slot for slot in range(len(self.scheduler.slots)) if slot not in own]
        return sorted([*own, *others[: size - len(own)]])

    def inputs(
        self, shape: DiffusionShape, slots: Sequence[int], rows: Sequence[RunningSequence | None], steps: int
    ) -> DispatchInputs:
        """Inputs of a program for these slots, and who is in them."""
        empty = self.programs.empty_inputs(shape)
        asked = []
        for row, running in enumerate(rows):
            denoising = Denoising(1) if running is None else denoising_of(running)
            asked.append(one_row(denoising, shape.block))
            if running is not None:
                prompt = running.sequence.processor.prompt
                empty.running[row] = True
                empty.fresh[row] = not running.begun
                empty.tokens[row, : len(prompt)] = prompt
                empty.start[row] = len(prompt)
                empty.stop[row] = len(prompt) + denoising.new_tokens
        options = jax.tree.map(lambda *each: np.concatenate(each), *asked)
        return empty._replace(slots=np.asarray(slots, np.int32), options=options, limit=np.int32(steps))

    def read(self, sent: SentSteps) -> None:
        """Hands out the blocks that a dispatch finished.

        Raises:
            NotFinite: the logits of a request were not finite, which has ended; see `runtime.engine.Engine.take`.
        """
        began = time.perf_counter()
        outputs = DispatchOutputs(*(np.asarray(each) for each in sent.outputs))
        ran = outputs.reports[:, :, 0] != NO_STEP
        failure = None
        steps = int(np.count_nonzero(ran.any(axis=1)))
        self.pace.time(sent.shape, steps, sent.at, True, began, time.perf_counter())
        self.count(sent, outputs.reports[:steps])
        for row, running in enumerate(sent.rows):
            if running is None or running.sequence.handle.result is not None:
                continue
            own = int(np.count_nonzero(ran[:, row]))
            running.steps += own
            running.sequence.handle.steps += own
            try:
                if (outputs.reports[:, row, 0] == NOT_FINITE).any():
                    raise NotFinite("the model's logits are not finite")
                update = self.blocks(running, outputs, row, bool(own) and bool(outputs.reports[steps - 1, row, 2]))
            except Exception as error:
                log.exception("a request failed")
                failure = error if isinstance(error, NotFinite) else failure
                update = RequestOutput(end="error", error=NOT_COMPUTED)
            if update is not None:
                self.hand_out(running.sequence, update)
        if failure is not None:
            raise failure

    def blocks(self, running: RunningSequence, outputs: DispatchOutputs, row: int, done: bool) -> RequestOutput | None:
        """Committed part of a sequence's response that was not handed out yet; None where that is nothing.

        Raises:
            RuntimeError: the sequence was computed anew, and is done before what was handed out already.
        """
        processor = running.sequence.processor
        mask = self.model.config.mask_token_id
        first = len(processor.prompt)
        response = outputs.tokens[row, first : first + denoising_of(running).new_tokens].tolist()
        committed = int(outputs.block_start[row]) - first
        until = (response.index(mask) if mask in response else len(response)) if done else committed
        new = response[len(processor.tokens) : until]
        if not new:
            if done:
                raise RuntimeError(f"computed anew, the response ended before the {len(processor.tokens)} tokens handed out")
            return None
        pieces = processor.add_round(new, 0, 0, self.eos_token_ids)
        tokens = tuple(Token(one.token, one.text, one.drafted) for one in pieces)
        steps = running.steps
        running.steps = 0
        reason = processor.finish_reason
        assert reason != "interrupted"
        assert reason is not None or not done, "a row that is done has ended"
        return RequestOutput(tokens, (Round(len(tokens), 0, 0, f"{steps} steps"),), reason)

    def count(self, sent: SentSteps, reports: np.ndarray) -> None:
        """Counts the steps of a dispatch."""
        ran = int(np.count_nonzero(reports[:, :, 0] != NO_STEP))
        counted = self.counted
        counted.dispatches += 1
        counted.rounds += len(reports)
        counted.row_rounds += ran
        counted.padding_rows += reports.shape[0] * reports.shape[1] - ran
        for span in reports[:, 0, 1].tolist():
            counted.widths[SPANS[span]] = counted.widths.get(SPANS[span], 0) + 1
