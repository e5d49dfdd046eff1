"""Continuous batching: requests come and go while rounds run, several to a dispatch, and nothing compiles meanwhile.

One thread steps. A step takes in what was asked, sends what there is to compute (requests into slots, pieces of prompts, rounds
for all that are ready), and then reads the rounds that the step *before* had sent: the device has the next ones by then. What
the host knows is thus one dispatch old, which costs nothing but care: a request that has ended meanwhile takes no part on the
device, and what was committed behind a stop string is dropped.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from tokenizers import Tokenizer

from tilewright.models.tokenizer import StreamDecoder
from tilewright.parallel.host_broadcast import HostBroadcast, ProcessLost
from tilewright.runtime.automaton_table import places
from tilewright.runtime.collect import NotFinite, collect_rounds, count_rounds, prompt_logprobs
from tilewright.runtime.constraints import ConstraintError, MaskSource
from tilewright.runtime.groups import PageGroup
from tilewright.runtime.interfaces import Choice, RoundChooser
from tilewright.runtime.lockstep import Lockstep
from tilewright.runtime.model import Model
from tilewright.runtime.options import EngineOptions
from tilewright.runtime.output import OutputProcessor
from tilewright.runtime.pace import FixedRounds
from tilewright.runtime.pages import Pages
from tilewright.runtime.pooling import PooledChunk, embedding
from tilewright.runtime.prefill import Prefilled
from tilewright.runtime.programs import STEPS_PER_DISPATCH, Programs, held_dtype, makes_masks
from tilewright.runtime.request import GenerateRequest, Listener, RequestHandle, RequestOutput
from tilewright.runtime.runner import ModelRunner, SentRounds
from tilewright.runtime.sampling import SamplingMode, check_vocabulary
from tilewright.runtime.scheduler import Chunk, RunningSequence, Scheduler, TokenSequence
from tilewright.runtime.service import NOT_COMPUTED, Service
from tilewright.runtime.sizes import engine_sizes, sizes_line
from tilewright.runtime.snapshots import Snapshots
from tilewright.runtime.state import NOT_FINITE, StepInfo
from tilewright.runtime.stop_masks import without_stops

log = logging.getLogger("tilewright.engine")

Chooses = Callable[[ModelRunner, float, Console | None], RoundChooser]
"""Makes what chooses rounds, given the runner, how long a dispatch takes, and where progress is shown."""


def fixed_rounds(runner: ModelRunner, dispatch_s: float, console: Console | None = None) -> RoundChooser:
    """For drafters whose rounds are all of one kind."""
    return FixedRounds(dispatch_s, STEPS_PER_DISPATCH)


class SentEmbedding(NamedTuple):
    """Embedding that is on its way: the request, and the chunks of its prompt."""

    sequence: TokenSequence
    chunks: Sequence[PooledChunk]


class SentPrefill(NamedTuple):
    """Pieces of prompts that are on their way, where no rounds run besides.

    Attributes:
        end: of the last of them, see `Prefilled.end`.
    """

    end: Any


class Engine(Service):
    """Serves requests with one autoregressive model, over slots and pages.

    Attributes:
        prefix_cache: whether full pages are kept for later requests that begin alike.
        last_masks: where those of the rounds came from that were sent last.
        heard: the round in flight whose tokens the constraints have taken in, and nobody else yet.
    """

    options: EngineOptions
    last_masks: MaskSource = "none"
    heard: SentRounds | None = None

    def __init__(
        self,
        model: Model,
        options: EngineOptions = EngineOptions(),
        chooses: Chooses = fixed_rounds,
        programs: Programs | None = None,
        sampling: SamplingMode = "logprobs",
    ):
        """Args:
            chooses: who says what rounds do.
            programs: with the sizes that they have; by default the sizes follow from the options.
            sampling: what requests may ask for; less of it makes smaller programs.

        Raises:
            ValueError: options do not go together, or with the model.
        """
        super().__init__(options)
        self.model = model
        self.chooses = chooses
        if programs is None:
            sizes = engine_sizes(model.target, model.drafter, model.dtype, options)
            programs = Programs(model.target, model.models, model.dtype, model.drafter, sizes.table, sizes.layout)
            self.sizes = sizes
            self.context = sizes.context
        else:
            self.sizes = None
            self.context = programs.layout.capacity
        self.programs = programs
        table = programs.table
        layout = programs.layout
        outside = programs.outside_pages
        if options.prefix_cache and outside:
            raise ValueError(f"expected no prefix cache: {outside}")
        self.prefix_cache = options.prefix_cache is not False and not outside
        contexts = () if model.drafter is None else model.drafter.contexts
        self.pages = Pages(layout.pages, layout.page_size)
        windows = [PageGroup(Pages(each.pages, layout.page_size), each.window) for each in layout.windows]
        snapshots = Snapshots(layout.snapshots, self.pages) if layout.snapshots and self.prefix_cache else None
        self.scheduler = Scheduler(table, self.pages, layout.capacity, self.prefix_cache, contexts, windows, snapshots)
        self.runner = ModelRunner(self.programs, sampling)
        self.chooser = fixed_rounds(self.runner, options.dispatch_s)

    @property
    def sizes_line(self) -> str:
        """Memory that it takes, and what would change that."""
        model = self.model
        assert self.sizes is not None, "its sizes were given"
        own = model.target.config.max_position_embeddings
        held = held_dtype(model.target, model.dtype).name
        return sizes_line(self.sizes, model.models, model.target, jnp.dtype(model.dtype).name, held, own)

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

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        return self.model.encode(prompt)

    @property
    def prepared(self) -> bool:
        return self.runner.state is not None

    def prepare(self, console: Console | None) -> int:
        """Compiles, and has rounds measured where they are chosen."""
        self.programs.warm(self.programs.declared(self.runner.sampling, self.options.constraints), console)
        self.choose_rounds(console)
        return len(self.programs.compiled)

    @property
    def several(self) -> bool:
        """True if several processes have parts of the model."""
        mesh = self.model.target.mesh
        return mesh is not None and mesh.is_multi_process

    def lockstep(self) -> Lockstep:
        declared = self.programs.declared(self.runner.sampling, self.options.constraints)
        return Lockstep(self.programs, declared, HostBroadcast())

    def open(self) -> None:
        """As `Service.open`. Of several processes the first one opens it, and the others `follow`."""
        if self.several and not self.closed:
            self.runner.lockstep = self.lockstep()
        super().open()

    def follow(self) -> None:
        """Runs what the first process's engine runs, after `warm`, until that one is stopped.

        Raises:
            ProcessLost: the first process has gone.
        """
        assert self.prepared, "the engine was not warmed"
        self.trap.open()
        try:
            for key, inputs in self.lockstep().heard():
                if key.name == "allocate":
                    self.runner.reset()
                else:
                    self.runner.run(key, *inputs)
        finally:
            self.trap.close()

    def stop(self, drain_s: float = 0.0) -> bool:
        drained = super().stop(drain_s)
        if self.runner.lockstep is not None and self.failure is None:
            self.runner.lockstep.end()
        return drained

    def recover(self, error: Exception) -> None:
        """As `Service.recover`. What another process's devices hold is not known after a failure, unless all have run."""
        if self.runner.lockstep is not None and not isinstance(error, NotFinite):
            raise ProcessLost("a dispatch failed that several processes share") from error
        if self.flight and self.flight[0] is self.heard:  # its tokens are here, and constraints have them
            self.read(self.flight.popleft())
        super().recover(error)

    def choose_rounds(self, console: Console | None = None) -> None:
        """Makes what chooses rounds, which may run some in memory of its own, and then takes the slots' memory."""
        self.chooser = self.chooses(self.runner, self.options.dispatch_s, console)
        self.runner.reset()

    def check(self, request: GenerateRequest) -> None:
        length = len(request.prompt)
        check_vocabulary(request.sampling, self.vocab_size)
        self.model.adapter_number(request.lora)
        if request.logprobs is not None and not self.runner.reports_logprobs:
            raise ValueError("expected no logprobs: the rounds that run here report none")
        if request.constraint is not None and not self.options.constraints:
            raise ValueError("expected no constraint: this engine has no programs for one (constraints=True has)")
        if request.constraint is not None and not self.eos_token_ids:
            raise ValueError("expected no constraint: the model names no token that ends a text")
        if request.pooling is not None and not self.embeds:
            raise ValueError("expected no pooling: the programs that run here give no embeddings")
        if request.pooling is not None and length > self.context:
            raise ValueError(f"expected a prompt of at most {self.context} tokens, as the context has, found {length}")
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
        if needed > self.pages.count:
            raise ValueError(f"expected a request of at most {self.pages.count} pages, found one of {needed}")

    def sequence(self, request: GenerateRequest, listener: Listener) -> TokenSequence:
        skip = request.sampling.skip_special_tokens
        verbatim = request.constraint is not None
        decoder = StreamDecoder(self.tokenizer, skip, request.prompt, verbatim)
        sampling = request.sampling.seeded()
        constraint = None
        if request.constraint is not None:  # which ends the text by itself
            constraint = without_stops(request.constraint.begin(), sampling.stop_token_ids, self.tokenizer, self.eos_token_ids)
            sampling = replace(sampling, stop=(), stop_token_ids=())
        processor = OutputProcessor(0, list(request.prompt), sampling, decoder)
        followed = self.chooser.follow(request.prompt)
        return TokenSequence(
            RequestHandle(request),
            listener,
            processor,
            followed=followed,
            prompt_logprobs=[] if request.prompt_logprobs else None,
            constraint=constraint,
            adapter=self.model.adapter_number(request.lora),
            pooling=request.pooling,
        )

    def fill(self, everything: bool = False) -> int:
        """Gives places, and sends pieces of prompts: a large one or several small ones.

        A step sends no more than that even where nothing else runs: the next one ends those that were given up meanwhile, and
        takes in those that came. It waits for the pieces of the step before, so that the device has these ones by then.

        Args:
            everything: all of them, for a caller that waits for them itself.

        Returns:
            how many positions they compute.
        """
        self.admit()
        sent = 0
        most = math.inf if everything else self.programs.table.chunks[-1]
        result = None
        while sent < most and (chunks := self.scheduler.next_chunks()):
            result = self.runner.prefill(chunks)
            for row, chunk in enumerate(chunks):
                self.on_prefilled(chunk, result, row)
            key = self.runner.prefill_key(chunks)
            computed = key.rows * key.chunk
            wanted = sum(chunk.count for chunk in chunks)
            self.counted.prefill_tokens += wanted
            self.counted.prefill_padding += computed - wanted
            sent += computed
        if result is not None and not everything and not self.scheduler.runnable():
            self.flight.append(SentPrefill(result.end))
        return sent

    def on_prefilled(self, chunk: Chunk, result: Prefilled, row: int) -> None:
        """Takes in that a chunk was sent, whose result is a row of a program's; an embedding comes with its prompt's last."""
        sequence = chunk.running.sequence
        if sequence.prompt_logprobs is not None and sequence.wants_prompt_logprobs:
            assert result.logprobs is not None, "log-probabilities were offered"
            sequence.prompt_logprobs.append((result.logprobs, row, chunk.count))
        self.scheduler.on_prefilled(chunk)
        if sequence.pooling is not None:
            assert result.pooled is not None, "embeddings were offered"
            sequence.pooled.append(PooledChunk(result.pooled, row, chunk.count))
            if chunk.running.prefilled:
                self.flight.append(SentEmbedding(sequence, sequence.pooled))

    @property
    def embeds(self) -> bool:
        return self.runner.reports_logprobs

    def settle(self) -> bool:
        # Behind a round of the host's masks, the host alone knows where a row stands.
        masks = self.masks_of(self.scheduler.runnable())
        if "host" not in (self.last_masks, masks) or (masks == "host" and self.hear()):
            return False
        return self.read_all_but(0)

    def hear(self) -> bool:
        """Has constraints take in what the round in flight committed, so that the next one is sent before that is handed out.

        Returns:
            False, and nothing is done, where it is no round of the host's masks, or a row ends: then it is read first.
        """
        sent = self.flight[0] if len(self.flight) == 1 else None
        if not isinstance(sent, SentRounds) or sent.masks != "host":
            return False
        infos = self.runner.read(sent)
        proposed = self.runner.proposed(sent)
        if not len(infos.committed):
            return False
        committed = [infos.tokens[0, row, : infos.committed[0, row]].tolist() for row in range(len(sent.batch))]
        if any(self.may_end(running.sequence, tokens) for running, tokens in zip(sent.batch, committed, strict=True)):
            return False
        self.heard = sent
        for running, tokens, drafts in zip(sent.batch, committed, proposed, strict=True):
            running.drafts = drafts
            sequence = running.sequence
            if sequence.constraint is not None and sequence.handle.result is None:
                try:
                    sequence.constraint.advance(tokens)
                except ConstraintError as error:
                    self.scheduler.remove(sequence)
                    self.end(sequence, "error", str(error))
        return True

    def may_end(self, sequence: TokenSequence, tokens: Sequence[int]) -> bool:
        """True if a sequence ends with the tokens that a round committed, but for what only its text says."""
        ends = not {*self.eos_token_ids, *sequence.processor.sampling.stop_token_ids, NOT_FINITE}.isdisjoint(tokens)
        return not tokens or ends or sequence.length + len(tokens) >= sequence.processor.end

    def masks_of(self, batch: Sequence[RunningSequence]) -> MaskSource:
        """Where the masks of rounds of a batch come from: from the device if every constraint has an automaton there."""
        constraints = [constraint for running in batch if (constraint := running.sequence.constraint) is not None]
        if not constraints:
            return "none"
        automata = {None if each is None else each.automaton for each in (one.automaton for one in constraints)}
        few = len(automata) <= places(self.programs.layout.batch)
        return "device" if None not in automata and few and makes_masks(self.programs.target) else "host"

    def send(self) -> bool:
        """Sends rounds for all that are ready for them."""
        return bool(self.scheduler.runnable()) and self.send_rounds(*self.plan())

    def plan(self, most: int = STEPS_PER_DISPATCH) -> tuple[Choice | None, int]:
        """The kind of the next rounds, and how many of them, for those that are ready."""
        batch = self.scheduler.runnable()
        masks = self.masks_of(batch)
        choice = self.programs.constrained_choice
        if masks == "host":
            return choice, 1
        if masks == "device":
            return choice, self.chooser.under_masks(self.programs.rows_for(len(batch)), choice, most, self.scheduler.hurried)
        left = max(running.sequence.processor.end - running.sequence.length for running in batch)
        return self.chooser.next(self.programs.rows_for(len(batch)), most, self.scheduler.hurried, left)

    def send_rounds(self, choice: Choice | None, rounds: int) -> bool:
        """Sends up to so many rounds of a kind for all that are ready. Returns False if nobody is."""
        batch = self.scheduler.runnable()
        width = self.programs.width(choice, masked=self.masks_of(batch) != "none")
        batch, rounds = self.scheduler.make_room(batch, rounds, width)
        if not batch:
            return False
        reach = max(self.scheduler.reach(running, rounds, width) for running in batch)
        try:
            sent = self.runner.rounds(batch, choice, rounds, reach, self.masks_of(batch))
        except ConstraintError as error:
            sequence = batch[error.row].sequence
            self.scheduler.remove(sequence)
            self.end(sequence, "error", str(error))
            return self.send_rounds(choice, rounds)
        self.flight.append(sent)
        self.last_masks = sent.masks
        self.scheduler.on_dispatched(batch, sent.rounds, sent.width)
        return True

    def read(self, sent: SentRounds | SentEmbedding | SentPrefill) -> None:
        """Waits for what was sent, and hands out what came of rounds, or of an embedding."""
        if isinstance(sent, SentPrefill):
            jax.block_until_ready(sent.end)
            return
        if isinstance(sent, SentEmbedding):
            self.read_embedding(sent)
            return
        began = time.perf_counter()
        infos = self.runner.read(sent)
        self.take(sent, infos, began, time.perf_counter())

    def read_embedding(self, sent: SentEmbedding) -> None:
        """Hands out an embedding. Raises `NotFinite` as `take` does."""
        sequence = sent.sequence
        if sequence.handle.result is not None:  # it was given up
            return
        assert sequence.pooling is not None
        found = embedding(sent.chunks, sequence.pooling)
        if not np.isfinite(found).all():
            self.hand_out(sequence, RequestOutput(end="error", error=NOT_COMPUTED))
            raise NotFinite("the target's hidden states are not finite")
        self.hand_out(sequence, RequestOutput(end="length", embedding=found, prompt_logprobs=prompt_logprobs(sequence)))

    def take(self, sent: SentRounds, infos: StepInfo, began: float, ended: float) -> None:
        """Hands out what came of rounds.

        Args:
            began, ended: when somebody began to wait for it, and had it, by `time.perf_counter()`.

        Raises:
            NotFinite: those of a request were not finite, which has ended. What the device holds is to be made anew: a page
                may come to another request, and what is masked there is multiplied by zero, which not all numbers survive.
        """
        count_rounds(self.counted, sent, infos)
        sequences = [running.sequence for running in sent.batch]
        heard = [len(sequence.processor.tokens) for sequence in sequences]
        drafter = None if sent.choice is None else sent.choice.drafter
        failure = None
        was_heard = sent is self.heard
        self.heard = None
        proposed = self.runner.proposed(sent)
        for row, running in enumerate(sent.batch):
            running.drafts = running.drafts if was_heard else proposed[row]
            committed = int(infos.committed[:, row].sum())
            self.scheduler.on_completed(running, sent.rounds, sent.width, committed, drafter)
            if running.sequence.constraint is not None:
                running.sequence.handle.masks.add(sent.masks)
            if committed and running.sequence.processor.finish_reason is None and running.sequence.handle.result is None:
                try:
                    update = collect_rounds(running.sequence, infos, row, sent.choice, self.eos_token_ids)
                    if update.end is None and running.sequence.constraint is not None and not was_heard:
                        running.sequence.constraint.advance([token.token for token in update.tokens])
                except ConstraintError as error:
                    update = RequestOutput(end="error", error=str(error))
                except Exception as error:
                    log.exception("a request failed")
                    failure = error if isinstance(error, NotFinite) else failure
                    update = RequestOutput(end="error", error=NOT_COMPUTED)
                self.hand_out(running.sequence, update)
        self.chooser.observe(sent, infos, sequences, heard, began, ended)
        if failure is not None:
            raise failure

    def clear(self) -> None:
        self.runner.reset()
