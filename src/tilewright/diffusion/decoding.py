"""Masked denoising as a decoding: steps replace the masks of a response block by block, for rows in different phases.

Each row has its own mode, threshold and schedule. Finished blocks are delivered as they are read. A row's output depends only
on its seed, positions and steps, so a row in a batch gets the same output as alone, if a row's results do not depend on the
rows beside it (`kernels.operations.is_batch_invariant`).
"""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from rich.console import Console
from tokenizers import Tokenizer

from tilewright.diffusion.engine_options import DiffusionEngineOptions
from tilewright.diffusion.options import Denoising
from tilewright.diffusion.programs import DenoisingPrograms, DiffusionKey, DiffusionShape, DispatchInputs, DispatchOutputs
from tilewright.diffusion.request import DenoisingRequest, check_room, encoded
from tilewright.diffusion.state import SPANS
from tilewright.diffusion.steps import NO_STEP, NOT_FINITE, STEPS_PER_DISPATCH
from tilewright.models.tokenizer import StreamDecoder
from tilewright.runtime.automata import WORD
from tilewright.runtime.collect import NotFinite, token_logprobs
from tilewright.runtime.constraints import Drafted, fill_blocks
from tilewright.runtime.decoding import Plan, Prefilling
from tilewright.runtime.groups import PageGroup
from tilewright.runtime.output import OutputProcessor
from tilewright.runtime.pace import Pace
from tilewright.runtime.pages import Pages
from tilewright.runtime.request import EngineStats, Listener, RequestHandle, RequestOutput, Round, Token
from tilewright.runtime.runner import ProgramRunner
from tilewright.runtime.sampling import check_vocabulary
from tilewright.runtime.scheduler import Chunk, RunningSequence, Scheduler, TokenSequence
from tilewright.runtime.shapes import ShapeTable
from tilewright.runtime.stop_masks import without_stops


@dataclass
class DenoisingRow:
    """Denoising state of a sequence in a slot.

    Attributes:
        begun: whether a dispatch has initialised its slot.
        steps: steps since the last delivery.
    """

    begun: bool = False
    steps: int = 0


class SentSteps(NamedTuple):
    """Dispatch of steps in flight.

    Attributes:
        batch: sequences of its first rows.
        outputs: its outputs, computed asynchronously on the device.
        at: time of the dispatch, by `time.perf_counter()`.
        least, most: see `decoding.Sent`; 0, since a row has all its pages, and the number of committed tokens is unknown.
    """

    batch: Sequence[RunningSequence]
    shape: DiffusionShape
    outputs: DispatchOutputs
    at: float
    least: int = 0
    most: int = 0


class StepsReport(NamedTuple):
    """Results of a dispatch, on the host.

    Attributes:
        steps: reports of the steps that ran, `DenoisingStepInfo.packed`, `[steps, b, _]`.
        outputs: all outputs.
        committed: zeros, since tokens count as committed once their block is finished.
        drafter: None.
    """

    steps: np.ndarray
    outputs: DispatchOutputs
    committed: Sequence[int]
    drafter: None = None

    @property
    def ran(self) -> np.ndarray:
        """Mask of the steps that each row ran, `[steps, b]`."""
        return self.steps[:, :, 0] != NO_STEP


def denoising_of(running: RunningSequence) -> Denoising:
    """Returns the options of a request, with its seed."""
    request = running.sequence.handle.request
    assert isinstance(request, DenoisingRequest)
    return request.denoising


def is_constrained(batch: Sequence[RunningSequence]) -> bool:
    """True if a row has a constraint."""
    return any(running.sequence.constraint is not None for running in batch)


def next_repeated(running: RunningSequence) -> int | None:
    """Returns the next token of a row with a constraint that is computed again; None behind its last token, and for others."""
    sequence = running.sequence
    if sequence.constraint is None:
        return None
    place = sequence.handle.steps if running.row.begun else 0  # a step commits a token
    return sequence.processor.tokens[place] if place < len(sequence.processor.tokens) else None


class MaskedDenoising:
    """Decoding of one diffusion language model with bidirectional attention.

    Pages are not shared, since the results of a position depend on all other positions of its row.

    Attributes:
        pace: timer that sizes dispatches.
        denoising: default options of requests.
        advanced_dispatch: None; see `decoding.Decoding`.
    """

    advanced_dispatch = None
    blocks = None

    def __init__(self, programs: DenoisingPrograms, tokenizer: Tokenizer, options: DiffusionEngineOptions):
        self.programs = programs
        self.config = programs.config
        self.tokenizer = tokenizer
        self.options = options
        self.denoising = options.defaults
        self.context = programs.context
        layout = programs.layout
        table = ShapeTable(batches=(layout.batch,), capacities=(layout.capacity,), chunks=(layout.capacity,))
        groups = [PageGroup(Pages(each.pages, layout.page_size)) for each in layout.windows]
        pages = Pages(layout.pages, layout.page_size)
        self.scheduler = Scheduler(table, pages, layout.capacity, prefix_cache=False, windows=groups)
        self.runner = ProgramRunner(programs)
        self.pace = Pace(options.dispatch_s, STEPS_PER_DISPATCH)

    @property
    def vocab_size(self) -> int:
        return self.config.decoder.vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.config.eos_token_ids

    @property
    def num_spec_tokens(self) -> int:
        return 0

    @property
    def adapters(self) -> tuple[str, ...]:
        return ()

    @property
    def embeds(self) -> bool:
        return False

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        return encoded(self.config, self.tokenizer, prompt)

    def program_keys(self) -> Sequence[DiffusionKey]:
        return self.programs.keys

    def first_keys(self) -> Sequence[DiffusionKey]:
        return [self.programs.allocate_key, DiffusionKey("steps", self.programs.largest)]

    def use(self, keys: Collection[DiffusionKey]) -> None:
        self.runner.existing = frozenset(keys)

    def servable(self, sequence: TokenSequence) -> bool:
        return True

    def needed_keys(self, sequences: Sequence[TokenSequence]) -> Sequence[DiffusionKey]:
        slots = self.programs.layout.batch
        requests = [cast(DenoisingRequest, sequence.handle.request).denoising for sequence in sequences]
        lengths = [len(sequence.processor.prompt) for sequence in sequences]
        return [self.programs.allocate_key, DiffusionKey("steps", self.programs.shape(lengths[:slots], requests[:slots]))]

    def measure(self, console: Console | None) -> None:
        """Measures nothing, since the duration of dispatches is measured while serving."""

    def check(self, request: DenoisingRequest) -> None:
        denoising = request.denoising
        check_room(request.prompt, denoising, self.context)
        if denoising.mode not in self.options.modes:
            raise ValueError(f"expected a mode among {', '.join(self.options.modes)}, found {denoising.mode}")
        if denoising.guidance and not self.programs.kinds.guided:
            raise ValueError(f"expected no guidance, since this engine has no programs for it, found {denoising.guidance}")
        check_vocabulary(request.sampling, self.vocab_size)
        if request.constraint is not None and not self.eos_token_ids:
            raise ValueError("expected no constraint, since the model has no end-of-sequence token")
        if denoising.logits_eos_inf and not self.config.eos_token_ids:
            raise ValueError("expected no logits_eos_inf, since the model names no end-of-sequence token")
        if denoising.confidence_eos_eot_inf and self.config.eot_token_id is None:
            raise ValueError("expected no confidence_eos_eot_inf, since the model names no end-of-turn token")
        if denoising.first_alone and not self.config.shifted:
            raise ValueError("expected no first_alone, since the model's logits predict their own positions")
        self.programs.shape([len(request.prompt)], [denoising])
        if request.logprobs is not None and not self.programs.kinds.logprobs:
            raise ValueError("expected no logprobs, since the compiled steps report none")
        needed = self.scheduler.pages_for(len(request.prompt) + denoising.new_tokens)
        if needed > self.scheduler.pages.count:
            raise ValueError(f"expected a request of at most {self.scheduler.pages.count} pages, found one of {needed}")

    def sequence(self, request: DenoisingRequest, listener: Listener) -> TokenSequence:
        request = replace(request, denoising=request.denoising.seeded())
        sampling = request.sampling
        decoder = StreamDecoder(self.tokenizer, sampling.skip_special_tokens, request.prompt, request.constraint is not None)
        constraint = None
        if request.constraint is not None:  # the constraint ends the text itself
            constraint = without_stops(request.constraint.begin(), sampling.stop_token_ids, self.tokenizer, self.eos_token_ids)
            sampling = replace(sampling, stop=(), stop_token_ids=())
            request = replace(request, denoising=replace(request.denoising, left_to_right=True))
        processor = OutputProcessor(0, list(request.prompt), sampling, decoder)
        room = len(request.prompt) + request.denoising.new_tokens
        return TokenSequence(RequestHandle(request), listener, processor, constraint=constraint, room=room)

    def begin(self, sequence: TokenSequence) -> DenoisingRow:
        return DenoisingRow()

    def prefill(self, chunks: Sequence[Chunk]) -> Prefilling:
        raise AssertionError("denoising has no prefill")

    def prepare_plan(
        self, flight: Sequence[Any], batch: Sequence[RunningSequence]
    ) -> tuple[bool, Sequence[tuple[TokenSequence, str]]]:
        # Behind a step under a mask, the host has to know the token before it makes the next mask.
        return is_constrained(batch), ()

    def plan(self, batch: Sequence[RunningSequence], most: int | None = None) -> Plan:
        prompts = [len(running.sequence.processor.prompt) for running in batch]
        shape = self.programs.shape(prompts, [denoising_of(running) for running in batch])
        if self.runner.existing is not None:
            shape = self.runner.first_existing(DiffusionKey("steps", each) for each in self.programs.replacing(shape)).shape
        if is_constrained(batch):
            return Plan(shape, 1, 0, "host")
        steps = self.pace.most(self.pace.seconds.get(shape), bool(self.scheduler.waiting))
        return Plan(shape, steps if most is None else min(most, steps), 0)

    def send(self, batch: Sequence[RunningSequence], plan: Plan, reach: int) -> SentSteps:
        at = time.perf_counter()
        outputs = self.runner.run(DiffusionKey("steps", plan.kind), self.inputs(plan.kind, batch, plan.steps))
        self.runner.sent = []
        if not any(running.sequence.wants_logprobs for running in batch):
            outputs = outputs._replace(logprobs=None)  # no transfer to the host
        jax.tree.map(lambda each: each.copy_to_host_async(), outputs)
        for running in batch:
            if not running.row.begun:
                running.row.begun = True
                running.sequence.handle.steps = 0
        return SentSteps(batch, plan.kind, outputs, at)

    def inputs(self, shape: DiffusionShape, batch: Sequence[RunningSequence], steps: int) -> DispatchInputs:
        """Returns the inputs of a program for these rows."""
        prompts = [running.sequence.processor.prompt for running in batch]
        fresh = [not running.row.begun for running in batch]
        inputs = self.programs.inputs(shape, prompts, [denoising_of(running) for running in batch], fresh)
        size = self.programs.layout.page_size
        return inputs._replace(
            slots=self.runner.slots(batch, shape.batch),
            table=self.runner.table(batch, shape.batch, -(-shape.positions // size) * size),
            limit=np.int32(steps),
            wants_logprobs=np.pad([running.sequence.wants_logprobs for running in batch], (0, shape.batch - len(batch))),
            allowed=self.masks(batch, shape.batch) if is_constrained(batch) else inputs.allowed,
        )

    def masks(self, batch: Sequence[RunningSequence], rows: int) -> np.ndarray:
        """Returns the masks of the next token of each row, `[rows, W]`.

        A row that is computed again repeats the tokens that it has, since its constraint is behind them.

        Raises:
            ConstraintError: the constraint of a row cannot make its mask.
        """
        repeated = [next_repeated(running) for running in batch]
        states = [
            running.sequence.constraint if token is None else None for running, token in zip(batch, repeated, strict=True)
        ]
        masks = fill_blocks([Drafted(state, ()) for state in states], rows, 1, self.vocab_size).masks[:, 0]
        for row, token in enumerate(repeated):
            if token is not None:
                masks[row] = 0
                masks[row, token // WORD] = 1 << token % WORD
        return masks

    def read(self, sent: SentSteps) -> StepsReport:
        outputs = jax.tree.map(np.asarray, sent.outputs)
        steps = int(np.count_nonzero((outputs.reports[:, :, 0] != NO_STEP).any(axis=1)))
        return StepsReport(outputs.reports[:steps], outputs, [0] * len(sent.batch))

    def collect(self, sent: SentSteps, report: StepsReport, row: int) -> RequestOutput | None:
        """Collects the committed part of a response that was not delivered yet; None if there is nothing to deliver.

        Raises:
            NotFinite: the row's logits were not finite.
            RuntimeError: the sequence was computed again, and ended before the tokens that were delivered already.
        """
        running = sent.batch[row]
        processor = running.sequence.processor
        steps = int(np.count_nonzero(report.ran[:, row]))
        running.row.steps += steps
        running.sequence.handle.steps += steps
        if (report.steps[:, row, 0] == NOT_FINITE).any():
            raise NotFinite("the model's logits are not finite")
        done = steps > 0 and bool(report.steps[-1, row, 2])
        mask = self.config.mask_token_id
        first = len(processor.prompt)
        response = report.outputs.tokens[row, first : first + denoising_of(running).new_tokens].tolist()
        left_to_right = denoising_of(running).left_to_right
        committed = int(report.outputs.block_start[row]) - first
        until = (response.index(mask) if mask in response else len(response)) if done or left_to_right else committed
        delivered = len(processor.tokens)
        new = response[delivered:until]
        if not new:
            if done:
                raise RuntimeError(f"computed again, the response ended before the {delivered} delivered tokens")
            return None
        pieces = processor.add_round(new, 0, 0, self.eos_token_ids)
        logprobs: list[Any] = [None] * len(pieces)
        if running.sequence.wants_logprobs:
            found = jax.tree.map(lambda each: each[row : row + 1, first + delivered :], report.outputs.logprobs)
            logprobs = token_logprobs(found, (0,), len(pieces), running.sequence.alternatives)
        tokens = tuple(Token(one.token, one.text, one.drafted, each) for one, each in zip(pieces, logprobs, strict=True))
        steps = running.row.steps
        running.row.steps = 0
        reason = processor.finish_reason
        assert reason != "interrupted"
        assert reason is not None or not done, "a row is done only at the end of its response"
        if running.sequence.constraint is not None:
            running.sequence.handle.masks.add("host")
            if reason is None:
                running.sequence.constraint.advance(new)
        return RequestOutput(tokens, (Round(len(tokens), 0, 0, f"{steps} steps"),), reason)

    def count(self, sent: SentSteps, report: StepsReport, counted: EngineStats) -> None:
        ran = int(np.count_nonzero(report.ran))
        counted.dispatches += 1
        counted.rounds += len(report.steps)
        counted.row_rounds += ran
        counted.padding_rows += report.ran.size - ran
        for span in report.steps[:, 0, 1].tolist():
            counted.widths[SPANS[span]] = counted.widths.get(SPANS[span], 0) + 1

    def observe(self, sent: SentSteps, report: StepsReport, began: float, ended: float) -> None:
        self.pace.time(sent.shape, len(report.steps), sent.at, True, began, ended)
