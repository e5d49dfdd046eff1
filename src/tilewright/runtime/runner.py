"""The device as the engine sees it: programs are sent one behind the other, and little is read of what they gave."""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from tilewright.kernels.operations import UNMAPPED
from tilewright.runtime.automaton_table import AutomatonRows, AutomatonTable, AutomatonTables
from tilewright.runtime.constraints import Blocks, Drafted, MaskSource, fill_blocks, open_blocks
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
    request_rows,
)
from tilewright.runtime.rounds import RowMasks
from tilewright.runtime.sampling import SamplingMode
from tilewright.runtime.scheduler import Chunk, RunningSequence
from tilewright.runtime.state import DecodeState, Models, Reports, StepInfo


class SentRounds(NamedTuple):
    """Rounds that were sent.

    Attributes:
        batch: in the order of the program's rows.
        rows: that the program runs.
        rounds: at most.
        width: tokens in a block.
        reports: what came of them, once the device is there.
        at: when they were sent, by `time.perf_counter()`.
        alone: nothing but rounds was sent since the rounds before.
        masks: where those of the rounds came from; of the host's it is one round.
    """

    batch: Sequence[RunningSequence]
    rows: int
    choice: Choice | None
    rounds: int
    width: int
    reports: Reports
    at: float
    alone: bool
    masks: MaskSource = "none"

    @property
    def wants_logprobs(self) -> bool:
        """True if any of them asks for log-probabilities."""
        return any(running.sequence.wants_logprobs for running in self.batch)


class ModelRunner:
    """Sends programs one behind the other. What is handed to one is never changed afterwards: it may be read in place.

    Attributes:
        sampling: what rows may ask for.
        state: the slots and the pool; None before `reset`.
        sent: what was sent since the last rounds.
        automata: of rows with a constraint; None before there was one.
        open_blocks: by how many rows, on the device, for rounds under its own masks.
        lockstep: tells the other processes of each program; None where there are none, or all decide alike.
    """

    def __init__(self, programs: Programs, sampling: SamplingMode = "logprobs"):
        self.programs = programs
        self.sampling: SamplingMode = sampling
        self.state: DecodeState | None = None
        self.sent: list[str] = []
        self.automata: AutomatonTables | None = None
        self.open_blocks: dict[int, Blocks] = {}
        self.called: dict[ProgramKey, tuple[Callable[..., Any], Models]] = {}
        self.lockstep: Lockstep | None = None

    @property
    def reports_logprobs(self) -> bool:
        """True if rounds report log-probabilities to rows that ask for them."""
        return self.programs.target.loops and self.sampling == "logprobs"

    def reset(self) -> None:
        """Empty slots, whatever was there."""
        self.state = None
        key = ProgramKey("allocate")
        if self.lockstep is not None:
            self.lockstep.tell(key, ())
        self.state = self.programs.empty_state(*self.programs.get(key)())

    def free(self) -> None:
        """Gives the device's memory back."""
        self.state = None
        self.automata = None
        self.open_blocks = {}

    def run(self, key: ProgramKey, *inputs: Any) -> Any:
        if key not in self.called:
            self.called[key] = self.programs.get(key), self.programs.params_for(key)
        program, models = self.called[key]
        self.sent.append(key.name)
        if self.lockstep is not None:
            self.lockstep.tell(key, inputs)
        return self.apply(program, models, *inputs)

    def apply(self, program: Callable[..., tuple[DecodeState, Any]], models: Models, *inputs: Any) -> Any:
        """Gives the state to `program(models, state, *inputs) -> (state, result)`, and goes on from the one that it returns."""
        assert self.state is not None, "the runner was not reset"
        # lost, if this fails
        state = self.state
        self.state = None
        self.state, result = program(models, state, *inputs)
        return result

    def table(self, batch: Sequence[RunningSequence], rows: int, positions: int) -> np.ndarray:
        """The pages of running sequences, int32 `[groups, rows, M]`."""
        layout = self.programs.layout
        table = np.full((layout.groups, rows, positions // layout.page_size), UNMAPPED, np.int32)
        for row, running in enumerate(batch):
            for own, held in zip(table[:, row], running.groups, strict=True):
                pages = held.columns[: len(own)]
                own[: len(pages)] = pages
        return table

    def prefill(self, chunks: Sequence[Chunk]) -> Prefilled:
        """Computes pieces of prompts, all of one size, a sequence's first one with its admission.

        Returns:
            what came of them, on the device, in the order of the pieces; log-probabilities are of sequences that want some.
        """
        key = self.prefill_key(chunks)
        batch = [chunk.running for chunk in chunks]
        fill = key.rows - len(chunks)
        given = [self.row(running) for running in batch]
        given += given[:1] * fill
        start = np.asarray([*(chunk.start for chunk in chunks), *[-1] * fill], np.int32)
        count = np.asarray([*(chunk.count for chunk in chunks), *[0] * fill], np.int32)
        wanted = np.asarray([*(running.sequence.wants_prompt_logprobs for running in batch), *[False] * fill])
        table = self.table(batch, key.rows, self.programs.layout.capacity)
        asked = request_rows(given, self.programs.target.config.eos_token_ids)
        copied = (self.snapshot_rows(chunks, key.rows),) if self.programs.layout.snapshots else ()
        return self.run(key, self.slots(batch, key.rows), asked, table, start, count, wanted, *copied)

    def snapshot_rows(self, chunks: Sequence[Chunk], rows: int) -> SnapshotRows:
        """Rows of states that snapshots of these chunks lie in."""
        both = np.full((2, rows), UNMAPPED, np.int32)
        both[:, : len(chunks)] = np.transpose([(chunk.restored, chunk.kept) for chunk in chunks])
        return SnapshotRows(*np.where(both == UNMAPPED, UNMAPPED, both + self.programs.layout.batch))

    def prefill_key(self, chunks: Sequence[Chunk]) -> ProgramKey:
        """The program for pieces of prompts that are computed together."""
        rows, size = (1, chunks[0].size) if len(chunks) == 1 else self.programs.table.together
        return prefill_key(rows, size, self.sampling)

    def row(self, running: RunningSequence) -> RowRequest:
        """State that a sequence's slot begins with."""
        sequence = running.sequence
        own = running.sequence.processor
        tokens = np.zeros(self.programs.layout.capacity, np.int32)
        tokens[: sequence.length] = sequence.tokens
        asked = (own.sampling, len(own.prompt), sequence.wants_logprobs, sequence.adapter)
        return RowRequest(tokens, running.known, own.end, *asked)

    def slots(self, batch: Sequence[RunningSequence], rows: int) -> np.ndarray:
        """The slots of running sequences, and others that fill a program's rows, int32 `[rows]`."""
        own = [running.slot for running in batch]
        others = [slot for slot in range(self.programs.layout.batch) if slot not in own]
        return np.asarray([*own, *others[: rows - len(own)]], np.int32)

    def rounds(
        self, batch: Sequence[RunningSequence], choice: Choice | None, rounds: int, positions: int, source: MaskSource = "none"
    ) -> SentRounds:
        """Runs up to so many rounds; under masks of the host a single one, and all that was sent before must have been read.

        Args:
            positions: that rounds look at, at most.
            source: of their masks. The device makes them if every constraint among the rows has an automaton.

        Raises:
            ConstraintError: a row's constraint cannot say what may come.
        """
        programs = self.programs
        rows = self.programs.rows_for(len(batch))
        key = programs.round_key(choice, rows, positions, self.sampling, masked=source != "none")
        masks = None if source == "none" else self.masks(batch, key, source)
        at = time.perf_counter()
        rounds = 1 if source == "host" else rounds
        return self.sending(batch, key, rounds, self.run_rounds(key, *self.round_inputs(batch, key), rounds, masks), at, source)

    def masks(self, batch: Sequence[RunningSequence], key: ProgramKey, source: MaskSource) -> RowMasks:
        """Masks for rounds of these: the host's, made here, or where each stands in its automaton. Raises as `rounds` does."""
        target = self.programs.target
        rows = key.rows
        width = self.programs.width(key.choice, masked=True)
        vocab = target.config.vocab_size
        put = on_devices(target.mesh)
        if source == "host":
            drafted = [Drafted(running.sequence.constraint, running.drafts) for running in batch]
            blocks = fill_blocks(drafted, rows, width, vocab)
        elif (blocks := self.open_blocks.get(rows)) is None:
            blocks = self.open_blocks[rows] = Blocks(*map(put, open_blocks(rows, width, vocab)))
        if not makes_masks(target):
            return RowMasks(blocks)
        if self.automata is None:
            self.automata = AutomatonTables(self.programs.layout.batch, vocab, put)
        return RowMasks(blocks, self.automata_of(self.automata, batch, rows, by_host=source == "host"))

    @staticmethod
    def automata_of(
        tables: AutomatonTables, batch: Sequence[RunningSequence], rows: int, by_host: bool
    ) -> tuple[AutomatonTable, AutomatonRows]:
        """The table on the device, and where each of a program's rows stands: nowhere, where the host makes all masks."""
        given = AutomatonRows(*(np.zeros(rows, dtype) for dtype in (np.int32, np.int32, bool)))
        constraints = [None if by_host else running.sequence.constraint for running in batch]
        stands = [None if each is None else each.automaton for each in constraints]
        table, given.place[: len(batch)] = tables.placed([None if each is None else each.automaton for each in stands])
        for row, (running, each) in enumerate(zip(batch, stands, strict=True)):
            given.state[row] = 0 if each is None else each.state
            given.known[row] = by_host or not running.automaton_sent
            running.automaton_sent = not by_host
        return table, given

    def round_inputs(self, batch: Sequence[RunningSequence], key: ProgramKey) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The first arguments of the programs of rounds: slots, their pages, and which of them are running."""
        rows = key.rows
        return self.slots(batch, rows), self.table(batch, rows, key.positions), np.arange(rows) < len(batch)

    def sending(
        self, batch: Sequence[RunningSequence], key: ProgramKey, rounds: int, reports: Reports, at: float, source: MaskSource
    ) -> SentRounds:
        """Rounds that were sent at a time. What the host reads of their reports begins to come."""
        alone = self.sent == ["rounds"]
        self.sent = []
        width = self.programs.width(key.choice, key.masked)
        sent = SentRounds(batch, key.rows, key.choice, rounds, width, reports, at, alone, source)
        for each in jax.tree.leaves(reports if sent.wants_logprobs else reports._replace(logprobs=None)):
            if isinstance(each, jax.Array):
                each.copy_to_host_async()
        return sent

    def run_rounds(
        self,
        key: ProgramKey,
        slots: np.ndarray,
        table: np.ndarray,
        running: np.ndarray,
        rounds: int,
        masks: RowMasks | None = None,
    ) -> Reports:
        """Runs up to so many rounds of these slots; without loops on the device, one program after another."""
        if self.programs.target.loops or masks is not None:
            limit = np.int32(rounds) if self.programs.target.loops else None
            return self.run(key, slots, table, running, limit, masks)
        taken: list[np.ndarray] = []
        while len(taken) < rounds and (not taken or taken[-1][..., 0].any()):
            taken.append(np.asarray(self.run(key, slots, table, running, None, None).packed))
        self.sent = self.sent[: len(self.sent) - len(taken) + 1]
        return Reports(np.concatenate(taken), None)

    def read(self, sent: SentRounds) -> StepInfo:
        """Report of rounds; waits for the device."""
        return StepInfo.unpacked(sent.reports, sent.wants_logprobs)

    @staticmethod
    def proposed(sent: SentRounds) -> list[list[int]]:
        """The drafts of each row for its next round, as far as rounds told them."""
        if sent.reports.proposed is None:
            return [[] for _ in sent.batch]
        return [own[: own.pop(0)] for own in np.asarray(sent.reports.proposed)[: len(sent.batch)].tolist()]

    def wait(self) -> None:
        """Until all that was sent has run."""
        jax.block_until_ready(self.state)
