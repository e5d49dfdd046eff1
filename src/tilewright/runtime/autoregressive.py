"""Autoregressive decoding of one target, with a drafter or without: rounds over slots and pages.

All kinds of requests run together. The device masks the tokens of constraints with an automaton. For other constraints the host
makes the masks, and dispatches one round at a time.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp
from rich.console import Console
from tokenizers import Tokenizer

from tilewright.models.tokenizer import StreamDecoder
from tilewright.runtime.automaton_table import places
from tilewright.runtime.collect import collect_rounds, count_rounds
from tilewright.runtime.constraints import ConstraintError, MaskSource
from tilewright.runtime.decoding import Plan, Prefilling
from tilewright.runtime.groups import PageGroup
from tilewright.runtime.interfaces import RoundChooser
from tilewright.runtime.model import Model
from tilewright.runtime.options import EngineOptions
from tilewright.runtime.output import OutputProcessor
from tilewright.runtime.pace import FixedRounds
from tilewright.runtime.pages import Pages
from tilewright.runtime.programs import STEPS_PER_DISPATCH, ProgramKey, Programs, held_dtype, makes_masks, prefill_key
from tilewright.runtime.request import EngineStats, GenerateRequest, Listener, RequestHandle, RequestOutput
from tilewright.runtime.runner import DraftedRow, ModelRunner, SentRounds
from tilewright.runtime.sampling import SamplingMode, check_vocabulary
from tilewright.runtime.scheduler import Chunk, RunningSequence, Scheduler, TokenSequence
from tilewright.runtime.sizes import engine_sizes, sizes_line
from tilewright.runtime.snapshots import Snapshots
from tilewright.runtime.state import NOT_FINITE, StepInfo
from tilewright.runtime.stop_masks import without_stops

ChooserFactory = Callable[[ModelRunner, float], RoundChooser]
"""Factory of a chooser of rounds. Arguments: the runner, and the target duration of a dispatch."""


def fixed_rounds(runner: ModelRunner, dispatch_s: float) -> RoundChooser:
    """Returns a chooser for drafters whose rounds are all of one kind."""
    return FixedRounds(dispatch_s, STEPS_PER_DISPATCH)


class RoundsReport(NamedTuple):
    """Results of rounds, on the host.

    Attributes:
        infos: report of each round.
        committed: number of new tokens of each row.
        before: number of tokens of each row before the rounds.
        proposed: drafts of each row for its next round.
        drafter: name of the drafter whose context the rounds extended; None if there is none.
    """

    infos: StepInfo
    committed: Sequence[int]
    before: Sequence[int]
    proposed: Sequence[Sequence[int]]
    drafter: str | None


class Autoregressive:
    """Autoregressive decoding of one target.

    Attributes:
        programs: programs of the target and its drafter.
        programs_type, runner_type: classes of its programs and its runner.
        sizes: memory sizes that follow from the options; None for given programs.
        prefix_cache: whether full pages are kept for later requests with the same prefix.
        chooser: chooser of rounds.
        last_masks: source of the masks of the last dispatched rounds.
        advanced_dispatch: see `decoding.Decoding`.
    """

    denoising = None
    blocks: Any = None
    programs_type: type[Programs] = Programs
    runner_type: type[ModelRunner] = ModelRunner

    def __init__(
        self,
        model: Model,
        options: EngineOptions = EngineOptions(),
        make_chooser: ChooserFactory = fixed_rounds,
        programs: Programs | None = None,
        sampling: SamplingMode = "logprobs",
    ):
        """Args:
            make_chooser: factory of the chooser.
            programs: programs whose sizes are used; by default the sizes follow from the options.
            sampling: the most general sampling of requests; a simpler one makes smaller programs.

        Raises:
            ValueError: the options conflict with each other or with the model.
        """
        self.model = model
        self.options = options
        if programs is None:
            self.sizes = engine_sizes(model.target, model.drafter, model.dtype, options)
            programs = self.programs_type(
                model.target, model.models, model.dtype, model.drafter, self.sizes.table, self.sizes.layout
            )
            self.context = self.sizes.context
        else:
            self.sizes = None
            self.context = programs.layout.capacity
        self.programs = programs
        layout = programs.layout
        outside = programs.outside_pages
        if options.prefix_cache and outside:
            raise ValueError(f"expected no prefix cache: {outside}")
        self.prefix_cache = options.prefix_cache is not False and not outside
        contexts = () if model.drafter is None else model.drafter.contexts
        pages = Pages(layout.pages, layout.page_size)
        beyond = 0 if model.drafter is None else model.drafter.beyond_windows
        windows = [PageGroup(Pages(each.pages, layout.page_size), each.window + beyond) for each in layout.windows]
        snapshots = Snapshots(layout.snapshots, pages) if layout.snapshots and self.prefix_cache else None
        sizes = (programs.table, pages, layout.capacity, self.prefix_cache)
        self.scheduler = Scheduler(*sizes, contexts, windows, snapshots, model.target.blocks or model.target.canvas)
        self.runner = self.runner_type(programs, sampling)
        self.chooser = make_chooser(self.runner, options.dispatch_s)
        self.last_masks: MaskSource = "none"
        self.advanced_dispatch: SentRounds | None = None

    @property
    def sizes_line(self) -> str:
        """Description of its memory, and of the options that change it, in one line."""
        model = self.model
        assert self.sizes is not None, "the decoding was made with given programs"
        context = model.target.config.max_position_embeddings
        kv_dtype = held_dtype(model.target, model.dtype).name
        return sizes_line(self.sizes, model.models, model.target, jnp.dtype(model.dtype).name, kv_dtype, context)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.model.tokenizer

    @property
    def vocab_size(self) -> int:
        return self.model.target.config.vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.model.target.config.eos_token_ids

    @property
    def num_spec_tokens(self) -> int:
        return 0 if self.model.drafter is None else self.model.drafter.block_size - 1

    @property
    def adapters(self) -> tuple[str, ...]:
        return self.model.adapters

    @property
    def embeds(self) -> bool:
        return self.runner.reports_logprobs

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        return self.model.encode(prompt)

    def program_keys(self) -> Sequence[ProgramKey]:
        return list(self.programs.declared(self.runner.sampling, self.options.constraints))

    def needed_keys(self, sequences: Sequence[TokenSequence]) -> Sequence[ProgramKey]:
        programs = self.programs
        lengths = [self.scheduler.prefilled_positions(len(sequence.processor.prompt)) for sequence in sequences]
        chunks = {chunk for length in lengths for _, chunk in programs.table.prefill_plan(max(1, length))}
        together = programs.table.together if self.scheduler.computed_together(lengths) else None
        # Of several kinds of rounds, the chooser compiles those that it runs.
        rounds = programs.choices if len(programs.choices) == 1 else ()
        masked = {sequence.constraint is not None for sequence in sequences}

        def needed(key: ProgramKey) -> bool:
            if key.name == "prefill":
                return (key.rows, key.chunk) == together or (key.rows == 1 and key.chunk in chunks)
            # Masked rounds are of one kind.
            return key.name == "allocate" or (key.masked in masked and (key.masked or key.choice in rounds))

        return [key for key in programs.declared(self.runner.sampling, constraints=True) if needed(key)]

    def first_keys(self) -> Sequence[ProgramKey]:
        return self.programs.first_keys(self.runner.sampling)

    def use(self, keys: Collection[ProgramKey]) -> None:
        self.runner.existing = frozenset(keys)
        table = self.programs.table
        rows, size = table.together

        def exists(rows: int, chunk: int) -> bool:
            return self.runner.exists(prefill_key(rows, chunk, self.runner.sampling))

        self.scheduler.chunks = tuple(chunk for chunk in table.chunks if exists(1, chunk))
        self.scheduler.together = (rows if exists(rows, size) else 1, size)

    def servable(self, sequence: TokenSequence) -> bool:
        if sequence.constraint is None or self.runner.existing is None:
            return True
        # Rounds under masks may soon have rows for all slots.
        choice = self.programs.constrained_choice
        return self.runner.rows_for(choice, self.programs.table.batches[-1], masked=True) is not None

    def measure(self, console: Console | None) -> None:
        """Measures the costs of rounds, on a state of their own."""
        self.chooser.measure(console)

    def check(self, request: GenerateRequest) -> None:
        length = len(request.prompt)
        check_vocabulary(request.sampling, self.vocab_size)
        self.model.adapter_number(request.lora)
        if request.denoising is not None and self.model.target.block_length is None:
            other = "; load it with decoding='blocks'" if self.model.target.config.masked_blocks is not None else ""
            raise ValueError(f"expected no denoising options, since the model decodes token by token{other}")
        if request.logprobs is not None and not self.runner.reports_logprobs:
            raise ValueError("expected no logprobs, since the compiled rounds report none")
        if request.constraint is not None and not self.options.constraints:
            raise ValueError("expected no constraint, since this engine has no programs for one (set constraints=True)")
        if request.constraint is not None and not self.eos_token_ids:
            raise ValueError("expected no constraint, since the model has no end-of-sequence token")
        if request.pooling is not None and not self.embeds:
            raise ValueError("expected no pooling, since the compiled prefills report no embeddings")
        if request.pooling is not None and length > self.context:
            raise ValueError(f"expected a prompt of at most {self.context} tokens, the context, found {length}")
        end = length + (request.sampling.max_new_tokens if request.pooling is None else 0)
        if end > self.context:
            room = f"leaves room for {max(0, self.context - length)}"
            raise ValueError(
                f"a prompt of {length} tokens {room} in the context of {self.context}; "
                f"max_new_tokens is {request.sampling.max_new_tokens}"
            )
        widest = max(self.programs.width(choice) for choice in self.programs.choices)
        if request.constraint is not None:
            widest = max(widest, self.programs.width(self.programs.constrained_choice, masked=True))
        needed = self.scheduler.pages_for(end + widest)
        if needed > self.scheduler.pages.count:
            raise ValueError(f"expected a request of at most {self.scheduler.pages.count} pages, found one of {needed}")

    def sequence(self, request: GenerateRequest, listener: Listener) -> TokenSequence:
        skip = request.sampling.skip_special_tokens
        verbatim = request.constraint is not None
        decoder = StreamDecoder(self.tokenizer, skip, request.prompt, verbatim)
        sampling = request.sampling.seeded()
        constraint = None
        if request.constraint is not None:  # the constraint ends the text itself
            constraint = without_stops(request.constraint.begin(), sampling.stop_token_ids, self.tokenizer, self.eos_token_ids)
            sampling = replace(sampling, stop=(), stop_token_ids=())
        processor = OutputProcessor(0, list(request.prompt), sampling, decoder)
        return TokenSequence(
            RequestHandle(request),
            listener,
            processor,
            chooser_state=self.chooser.follow(request.prompt),
            prompt_logprobs=[] if request.prompt_logprobs else None,
            constraint=constraint,
            adapter=self.model.adapter_number(request.lora),
            pooling=request.pooling,
        )

    def begin(self, sequence: TokenSequence) -> DraftedRow:
        if not sequence.handle.preemptions:
            self.chooser.begin_request(1 + sum(running.row is not None for running in self.scheduler.running))
        return DraftedRow()

    def prefill(self, chunks: Sequence[Chunk]) -> Prefilling:
        key = self.runner.prefill_key(chunks)
        result = self.runner.prefill(chunks)
        return Prefilling(result.end, key.rows * key.chunk, result.logprobs, result.pooled)

    def prepare_plan(
        self, flight: Sequence[Any], batch: Sequence[RunningSequence]
    ) -> tuple[bool, Sequence[tuple[TokenSequence, str]]]:
        # Behind a round under the host's masks, only the host knows a row's constraint state.
        masks = self.masks_of(batch)
        if "host" not in (self.last_masks, masks):
            return False, ()
        failed = self.advance_constraints(flight) if masks == "host" else None
        return (True, ()) if failed is None else (False, failed)

    def advance_constraints(self, flight: Sequence[Any]) -> list[tuple[TokenSequence, str]] | None:
        """Advances constraints by the round in flight, so that the next round is dispatched before that one is delivered.

        Returns:
            sequences whose constraint failed, with an error. None, without any effect, if the dispatch in flight is not a round
            under the host's masks, or if a row ends: then the round must be read first.
        """
        sent = flight[0] if len(flight) == 1 else None
        if not isinstance(sent, SentRounds) or sent.masks != "host":
            return None
        infos = self.runner.read(sent)
        if not len(infos.committed):
            return None
        committed = [infos.tokens[0, row, : infos.committed[0, row]].tolist() for row in range(len(sent.batch))]
        if any(self.may_end(running.sequence, tokens) for running, tokens in zip(sent.batch, committed, strict=True)):
            return None
        self.advanced_dispatch = sent
        failed = []
        for running, tokens, drafts in zip(sent.batch, committed, self.runner.proposed(sent), strict=True):
            running.row.drafts = drafts
            sequence = running.sequence
            if sequence.constraint is not None and sequence.handle.result is None:
                try:
                    sequence.constraint.advance(tokens)
                except ConstraintError as error:
                    failed.append((sequence, str(error)))
        return failed

    def may_end(self, sequence: TokenSequence, tokens: Sequence[int]) -> bool:
        """True if a sequence ends with the tokens of a round, apart from stop strings."""
        ends = not {*self.eos_token_ids, *sequence.processor.sampling.stop_token_ids, NOT_FINITE}.isdisjoint(tokens)
        return not tokens or ends or sequence.length + len(tokens) >= sequence.processor.end

    def masks_of(self, batch: Sequence[RunningSequence]) -> MaskSource:
        """Source of the masks of a batch's rounds: the device, if every constraint has an automaton there."""
        constraints = [constraint for running in batch if (constraint := running.sequence.constraint) is not None]
        if not constraints:
            return "none"
        automata = {None if each is None else each.automaton for each in (one.automaton for one in constraints)}
        few = len(automata) <= places(self.programs.layout.batch)
        return "device" if None not in automata and few and makes_masks(self.programs.target) else "host"

    def plan(self, batch: Sequence[RunningSequence], most: int | None = None) -> Plan:
        most = STEPS_PER_DISPATCH if most is None else most
        masks = self.masks_of(batch)
        hurried = self.scheduler.hurried
        choice = self.programs.choices[0] if masks == "none" else self.programs.constrained_choice
        rows = self.runner.rows_for(choice, len(batch), masked=masks != "none")
        assert rows is not None, "no program exists for a sequence in a slot"
        if masks == "none":
            left = max(running.sequence.processor.end - running.sequence.length for running in batch)
            choice, rounds = self.chooser.next(rows, most, hurried, left)
        else:
            rounds = 1 if masks == "host" else self.chooser.under_masks(rows, choice, most, hurried)
        return Plan(choice, rounds, self.programs.width(choice, masked=masks != "none"), masks)

    def rounds(self, choice: Any, rounds: int) -> Plan:
        """Returns a plan of that many rounds of a kind for all ready sequences. Raises a `ValueError` for an unknown kind."""
        masks = self.masks_of(self.scheduler.runnable())
        return Plan(choice, rounds, self.programs.width(choice, masked=masks != "none"), masks)

    def send(self, batch: Sequence[RunningSequence], plan: Plan, reach: int) -> SentRounds:
        sent = self.runner.rounds(batch, plan.kind, plan.steps, reach, plan.masks)
        self.last_masks = sent.masks
        return sent

    def read(self, sent: SentRounds) -> RoundsReport:
        infos = self.runner.read(sent)
        before = [len(running.sequence.processor.tokens) for running in sent.batch]
        committed = infos.committed.sum(axis=0)[: len(sent.batch)].tolist()
        drafter = None if sent.choice is None else sent.choice.drafter
        return RoundsReport(infos, committed, before, self.runner.proposed(sent), drafter)

    def collect(self, sent: SentRounds, report: RoundsReport, row: int) -> RequestOutput | None:
        running = sent.batch[row]
        sequence = running.sequence
        advanced = sent is self.advanced_dispatch
        if not advanced:
            running.row.drafts = report.proposed[row]
        if sequence.constraint is not None:
            sequence.handle.masks.add(sent.masks)
        ended = sequence.processor.finish_reason is not None or sequence.handle.result is not None
        if ended or not report.committed[row]:
            return None
        update = collect_rounds(sequence, report.infos, row, sent.choice, self.eos_token_ids)
        if update.end is None and sequence.constraint is not None and not advanced:
            sequence.constraint.advance([token.token for token in update.tokens])
        return update

    def count(self, sent: SentRounds, report: RoundsReport, counted: EngineStats) -> None:
        count_rounds(counted, sent, report.infos)

    def observe(self, sent: SentRounds, report: RoundsReport, began: float, ended: float) -> None:
        if sent is self.advanced_dispatch:
            self.advanced_dispatch = None
        sequences = [running.sequence for running in sent.batch]
        self.chooser.observe(sent, report.infos, sequences, report.before, began, ended)
