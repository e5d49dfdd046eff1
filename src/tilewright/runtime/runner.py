"""Runner: dispatches compiled programs on the device, one behind the other, without waiting for their results."""

import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from tilewright.kernels.operations import UNMAPPED
from tilewright.runtime.automaton_table import AutomatonRows, AutomatonTable, AutomatonTables
from tilewright.runtime.constraints import Blocks, Drafted, MaskSource, fill_blocks, unconstrained_blocks
from tilewright.runtime.interfaces import Choice
from tilewright.runtime.lockstep import Lockstep
from tilewright.runtime.placement import on_devices
from tilewright.runtime.prefill import Prefilled
from tilewright.runtime.programs import (
    ProgramKey,
    Programs,
    RowRequest,
    SnapshotRows,
    makes_masks,
    prefill_key,
)
from tilewright.runtime.rounds import RowMasks
from tilewright.runtime.sampling import SamplingMode
from tilewright.runtime.scheduler import Chunk, RunningSequence
from tilewright.runtime.state import Reports, StepInfo


@dataclass
class DraftedRow:
    """Decoding state of a sequence in a slot.

    Attributes:
        drafts: drafts behind its last committed token, if the host knows them: after rounds under masks.
        automaton_sent: whether the device has the state of its constraint's automaton; otherwise the host sends the state.
    """

    drafts: Sequence[int] = ()
    automaton_sent: bool = False


class SentRounds(NamedTuple):
    """Rounds in flight.

    Attributes:
        batch: sequences in the order of the program's rows.
        rows: number of rows that the program runs.
        steps: the most rounds.
        width: number of tokens in a block.
        reports: reports of the rounds, computed asynchronously on the device.
        at: time of the dispatch, by `time.perf_counter()`.
        alone: whether nothing but rounds was dispatched since the rounds before.
        masks: source of the masks of the rounds; with masks of the host it is a single round.
        least, most: bounds of each row's new tokens, unless the row ends.
    """

    batch: Sequence[RunningSequence]
    rows: int
    choice: Choice | None
    steps: int
    width: int
    reports: Reports
    at: float
    alone: bool
    masks: MaskSource = "none"
    least: int = 0
    most: int = 0

    @property
    def wants_logprobs(self) -> bool:
        """True if any sequence wants log-probabilities."""
        return any(running.sequence.wants_logprobs for running in self.batch)


class ProgramRunner:
    """Dispatches programs one behind the other. Inputs are never changed afterwards, since the device may read them in place.

    Attributes:
        programs: programs of a decoding (`programs.Programs` or `diffusion.programs.DenoisingPrograms`).
        state: the slots and the pool; None before `reset`.
        sent: names of the programs dispatched since the last rounds.
        called: compiled programs and their parameters, by key.
        lockstep: sends each program to the other processes; None if there are none, or if all processes decide alike.
        existing: programs that may run now, while the others are compiled in the background; None if every program may run,
            and is compiled on its first use.
        missed: declared programs that would have run if they existed, the latest last.
    """

    def __init__(self, programs: Any):
        self.programs = programs
        self.state: Any = None
        self.sent: list[str] = []
        self.called: dict[Hashable, tuple[Callable[..., Any], Any]] = {}
        self.lockstep: Lockstep | None = None
        self.existing: frozenset[Any] | None = None
        self.missed: dict[Hashable, None] = {}

    def exists(self, key: Any) -> bool:
        """True if a program may run now."""
        return self.existing is None or key in self.existing

    def first_existing(self, keys: Iterable[Any]) -> Any:
        """Returns the first of these keys whose program may run now; None if there is none. Records the first key if missed."""
        keys = list(keys)
        found = next(filter(self.exists, keys), None)
        if keys and found != keys[0]:
            self.missed[keys[0]] = None
        return found

    def reset(self) -> None:
        """Replaces the state with empty slots."""
        self.state = None
        key = self.programs.allocate_key
        if self.lockstep is not None:
            self.lockstep.send(key, ())
        self.state = self.programs.empty_state(*self.programs.get(key)())

    def free(self) -> None:
        """Frees the device memory of the state."""
        self.state = None

    def run(self, key: Any, *inputs: Any) -> Any:
        if key not in self.called:
            self.called[key] = self.programs.get(key), self.programs.params_for(key)
        program, params = self.called[key]
        self.sent.append(key.name)
        if self.lockstep is not None:
            self.lockstep.send(key, inputs)
        return self.apply(program, params, *inputs)

    def apply(self, program: Callable[..., tuple[Any, Any]], params: Any, *inputs: Any) -> Any:
        """Runs `program(params, state, *inputs) -> (state, result)`, which donates the state, and keeps the new state."""
        assert self.state is not None, "the runner was not reset"
        # The state is lost if the program fails.
        state = self.state
        self.state = None
        self.state, result = program(params, state, *inputs)
        return result

    def table(self, batch: Sequence[RunningSequence], rows: int, positions: int) -> np.ndarray:
        """Returns the block table of running sequences, int32 `[groups, rows, M]`."""
        layout = self.programs.layout
        table = np.full((layout.groups, rows, positions // layout.page_size), UNMAPPED, np.int32)
        for row, running in enumerate(batch):
            for columns, group in zip(table[:, row], running.groups, strict=True):
                pages = group.columns[: len(columns)]
                columns[: len(pages)] = pages
        return table

    def slots(self, batch: Sequence[RunningSequence], rows: int) -> np.ndarray:
        """Returns the slots of running sequences, and further slots as padding, int32 `[rows]`."""
        running = [each.slot for each in batch]
        padding = [slot for slot in range(self.programs.layout.batch) if slot not in running]
        return np.asarray([*running, *padding[: rows - len(running)]], np.int32)

    def wait(self) -> None:
        """Waits until all dispatched programs have run."""
        jax.block_until_ready(self.state)


class ModelRunner(ProgramRunner):
    """Runs prefills and rounds of a target.

    Attributes:
        sampling: the most general sampling that rows may request.
        automata: automata of rows with a constraint; None before the first constraint.
        unconstrained_blocks: blocks without constraints by number of rows, on the device, for rounds under the device's masks.
    """

    def __init__(self, programs: Programs, sampling: SamplingMode = "logprobs"):
        super().__init__(programs)
        self.programs: Programs = programs
        self.sampling: SamplingMode = sampling
        self.automata: AutomatonTables | None = None
        self.unconstrained_blocks: dict[int, Blocks] = {}

    @property
    def reports_logprobs(self) -> bool:
        """True if rounds report log-probabilities to rows that want them."""
        return self.programs.target.loops and self.sampling == "logprobs"

    def free(self) -> None:
        super().free()
        self.automata = None
        self.unconstrained_blocks = {}

    def prefill(self, chunks: Sequence[Chunk]) -> Prefilled:
        """Runs prefill chunks of one size. The first chunk of a sequence also initialises its slot.

        Returns:
            the results on the device, in the order of the chunks, with log-probabilities for sequences that want them.
        """
        key = self.prefill_key(chunks)
        batch = [chunk.running for chunk in chunks]
        fill = key.rows - len(chunks)
        rows = [self.row(running) for running in batch]
        rows += rows[:1] * fill
        start = np.asarray([*(chunk.start for chunk in chunks), *[-1] * fill], np.int32)
        count = np.asarray([*(chunk.count for chunk in chunks), *[0] * fill], np.int32)
        wanted = np.asarray([*(running.sequence.wants_prompt_logprobs for running in batch), *[False] * fill])
        table = self.table(batch, key.rows, self.programs.layout.capacity)
        requests = self.programs.request_rows(rows, self.programs.target.config.eos_token_ids)
        copied = (self.snapshot_rows(chunks, key.rows),) if self.programs.layout.snapshots else ()
        return self.run(key, self.slots(batch, key.rows), requests, table, start, count, wanted, *copied)

    def snapshot_rows(self, chunks: Sequence[Chunk], rows: int) -> SnapshotRows:
        """Returns the rows of the snapshots that these chunks restore and keep."""
        both = np.full((2, rows), UNMAPPED, np.int32)
        both[:, : len(chunks)] = np.transpose([(chunk.restored, chunk.saved) for chunk in chunks])
        return SnapshotRows(*np.where(both == UNMAPPED, UNMAPPED, both + self.programs.layout.batch))

    def prefill_key(self, chunks: Sequence[Chunk]) -> ProgramKey:
        """Returns the key of the program for chunks that are computed together."""
        rows, size = (1, chunks[0].size) if len(chunks) == 1 else self.programs.table.together
        return prefill_key(rows, size, self.sampling)

    def round_key(self, choice: Choice | None, running: int, positions: int, masked: bool = False) -> ProgramKey | None:
        """Returns the key of the smallest program of rounds for that many sequences and positions; None if none exists."""
        table = self.programs.table
        sizes = ((rows, most) for rows in table.batches if rows >= running for most in table.capacities if most >= positions)
        return self.first_existing(self.programs.round_key(choice, *size, self.sampling, masked) for size in sizes)

    def rows_for(self, choice: Choice | None, running: int, masked: bool = False) -> int | None:
        """Returns the number of rows of the program of rounds for that many sequences; None if none exists."""
        key = self.round_key(choice, running, self.programs.table.capacities[-1], masked)
        return None if key is None else key.rows

    def choices_for(self, rows: int) -> tuple[Choice | None, ...]:
        """Returns the kinds of rounds that may run now, at any position, with that many rows."""
        programs = self.programs
        key = partial(programs.round_key, rows=rows, positions=programs.table.capacities[-1], sampling=self.sampling)
        return tuple(choice for choice in programs.choices if self.exists(key(choice)))

    def row(self, running: RunningSequence) -> RowRequest:
        """Returns the initial state of a sequence's slot."""
        sequence = running.sequence
        processor = sequence.processor
        tokens = np.zeros(self.programs.layout.capacity, np.int32)
        tokens[: sequence.length] = sequence.tokens
        options = (processor.sampling, len(processor.prompt), sequence.wants_logprobs, sequence.adapter)
        return RowRequest(tokens, running.last_position, processor.end, *options, sequence.denoising)

    def rounds(
        self, batch: Sequence[RunningSequence], choice: Choice | None, rounds: int, positions: int, source: MaskSource = "none"
    ) -> SentRounds:
        """Dispatches up to `rounds` rounds; under masks of the host a single round, behind dispatches that were all read.

        Args:
            positions: the most positions that the rounds attend to.
            source: source of their masks. The device can make them if every constraint of the rows has an automaton.

        Raises:
            ConstraintError: the constraint of a row cannot make its mask.
        """
        key = self.round_key(choice, len(batch), positions, masked=source != "none")
        assert key is not None, "the chooser chooses among programs that exist"
        masks = None if source == "none" else self.masks(batch, key, source)
        at = time.perf_counter()
        rounds = 1 if source == "host" else rounds
        return self.sending(batch, key, rounds, self.run_rounds(key, *self.round_inputs(batch, key), rounds, masks), at, source)

    def masks(self, batch: Sequence[RunningSequence], key: ProgramKey, source: MaskSource) -> RowMasks:
        """Returns masks for rounds of these: the host's masks, or the states of automata. Raises the errors of `rounds`."""
        target = self.programs.target
        rows = key.rows
        width = self.programs.mask_width(key.choice)
        vocab = target.config.vocab_size
        upload = on_devices(target.mesh)
        if source == "host":
            drafted = [Drafted(running.sequence.constraint, running.row.drafts) for running in batch]
            blocks = fill_blocks(drafted, rows, width, vocab)
        elif (blocks := self.unconstrained_blocks.get(rows)) is None:
            blocks = self.unconstrained_blocks[rows] = Blocks(*map(upload, unconstrained_blocks(rows, width, vocab)))
        if not makes_masks(target):
            return RowMasks(blocks)
        if self.automata is None:
            self.automata = AutomatonTables(self.programs.layout.batch, vocab, upload)
        return RowMasks(blocks, self.automata_of(self.automata, batch, rows, by_host=source == "host"))

    @staticmethod
    def automata_of(
        tables: AutomatonTables, batch: Sequence[RunningSequence], rows: int, by_host: bool
    ) -> tuple[AutomatonTable, AutomatonRows]:
        """Returns the table on the device, and each row's automaton and state: none of them where the host makes all masks."""
        states = AutomatonRows(*(np.zeros(rows, dtype) for dtype in (np.int32, np.int32, bool)))
        constraints = [None if by_host else running.sequence.constraint for running in batch]
        automata = [None if each is None else each.automaton for each in constraints]
        table, states.place[: len(batch)] = tables.placed([None if each is None else each.automaton for each in automata])
        for row, (running, each) in enumerate(zip(batch, automata, strict=True)):
            states.state[row] = 0 if each is None else each.state
            states.known[row] = by_host or not running.row.automaton_sent
            running.row.automaton_sent = not by_host
        return table, states

    def round_inputs(self, batch: Sequence[RunningSequence], key: ProgramKey) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the first inputs of the programs of rounds: slots, their block table, and flags of running slots."""
        rows = key.rows
        return self.slots(batch, rows), self.table(batch, rows, key.positions), np.arange(rows) < len(batch)

    def sending(
        self, batch: Sequence[RunningSequence], key: ProgramKey, rounds: int, reports: Reports, at: float, source: MaskSource
    ) -> SentRounds:
        """Returns the rounds that were dispatched, and starts the transfer of their reports to the host."""
        alone = self.sent == ["rounds"]
        self.sent = []
        width = self.programs.width(key.choice, key.masked)
        bounds = self.bounds(rounds, width)
        sent = SentRounds(batch, key.rows, key.choice, rounds, width, reports, at, alone, source, *bounds)
        for each in jax.tree.leaves(reports if sent.wants_logprobs else reports._replace(logprobs=None)):
            if isinstance(each, jax.Array):
                each.copy_to_host_async()
        return sent

    def bounds(self, rounds: int, width: int) -> tuple[int, int]:
        """Returns the fewest and the most tokens that rounds of this width commit for a row that does not end."""
        return rounds, rounds * width

    def run_rounds(
        self,
        key: ProgramKey,
        slots: np.ndarray,
        table: np.ndarray,
        running: np.ndarray,
        rounds: int,
        masks: RowMasks | None = None,
    ) -> Reports:
        """Runs up to `rounds` rounds of these slots; without loops on the device, one program after another."""
        if self.programs.target.loops or masks is not None:
            limit = np.int32(rounds) if self.programs.target.loops else None
            return self.run(key, slots, table, running, limit, masks)
        reports: list[np.ndarray] = []
        while len(reports) < rounds and (not reports or reports[-1][..., 0].any()):
            reports.append(np.asarray(self.run(key, slots, table, running, None, None).packed))
        self.sent = self.sent[: len(self.sent) - len(reports) + 1]
        return Reports(np.concatenate(reports), None)

    def read(self, sent: SentRounds) -> StepInfo:
        """Returns the report of rounds; waits for the device."""
        return StepInfo.unpacked(sent.reports, sent.wants_logprobs)

    @staticmethod
    def proposed(sent: SentRounds) -> list[list[int]]:
        """Returns each row's drafts for its next round, if the rounds report them; otherwise no drafts."""
        if sent.reports.proposed is None:
            return [[] for _ in sent.batch]
        return [drafts[: drafts.pop(0)] for drafts in np.asarray(sent.reports.proposed)[: len(sent.batch)].tolist()]
