"""An engine without a model, for what a real one does seldom: being slow, stuck, failing.

It says what it was asked: the tokens of the prompt, again and again, a fixed number of them to an update. Only the decoding is
    its
own, and when prompts move on; the queue, the slots, the thread, and what is sent and read are the real engine's.
"""

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from tilewright.models.decoder import config_from_hf
from tilewright.models.hub import PACKAGED
from tilewright.models.tokenizer import load_tokenizer
from tilewright.runtime.autoregressive import Autoregressive
from tilewright.runtime.decoding import Plan
from tilewright.runtime.engine import Engine
from tilewright.runtime.interfaces import Choice
from tilewright.runtime.model import Model
from tilewright.runtime.options import EngineOptions
from tilewright.runtime.pace import FixedRounds
from tilewright.runtime.pages import Pages
from tilewright.runtime.pooling import unit
from tilewright.runtime.programs import Programs
from tilewright.runtime.request import EndReason, EngineStats, GenerateRequest, RequestOutput, Round, Token, TokenLogprobs
from tilewright.runtime.runner import ModelRunner
from tilewright.runtime.scheduler import RunningSequence, Scheduler, TokenSequence
from tilewright.runtime.shapes import ShapeTable
from tilewright.runtime.state import Target
from tilewright.speculation.drafters.ngram import NGram

FOLDER = PACKAGED["demo"]
SLOTS = 8
PAGE = 64
CHUNK = 256
DIMENSIONS = 8


@cache
def model_without_weights() -> Model:
    """The demo's tokenizer and configuration, with an n-gram drafter of blocks of 4."""
    config = config_from_hf(json.loads((FOLDER / "config.json").read_text()), "config.json")
    made = object.__new__(Model)  # past the checks of annotations: it has no parameters
    vars(made).update(target=Target(config), models=None, dtype="float32", drafter=NGram(4), tokenizer=load_tokenizer(FOLDER))
    return made


class WidthsAlone(Programs):
    """Programs that only know the width of a round."""

    def __init__(self, block: int):
        self.target = model_without_weights().target
        self.drafter = None
        self.block = block

    def width(self, choice: Choice | None, masked: bool = False) -> int:
        return self.block


def logprobs(token: int, ask: GenerateRequest) -> TokenLogprobs:
    """The token itself is the likeliest, those after it follow."""
    vocab = model_without_weights().target.config.vocab_size
    top = tuple(((token + n) % vocab, -0.5 - n) for n in range(ask.logprobs or 0))
    return TokenLogprobs(-0.5, top)


def of_prompt(sequence: TokenSequence) -> tuple[TokenLogprobs, ...] | None:
    """Log-probabilities of a prompt, the first time."""
    ask = sequence.handle.request
    assert isinstance(ask, GenerateRequest)
    if sequence.prompt_logprobs is None:
        return None
    sequence.prompt_logprobs = None
    return tuple(logprobs(token, ask) for token in ask.prompt[1:])


class SentUpdates(NamedTuple):
    """A dispatch: an update for each of its rows."""

    batch: Sequence[RunningSequence]
    least: int
    most: int


class UpdatesReport(NamedTuple):
    """Results of a dispatch: as many tokens for each row."""

    committed: Sequence[int]
    drafter: str | None = None


class FakeRunner(ModelRunner):
    """A runner that always has an empty state."""

    def reset(self) -> None:
        self.state = ()


class FakeDecoding(Autoregressive):
    """A decoding whose device is a loop over the prompt.

    Attributes:
        per_update: tokens of an update; all but the last of them count as drafted.
        context: positions of a request.
        ends: what to end requests with instead, after so many updates.
    """

    def __init__(self, per_update: int, context: int, ends: tuple[EndReason, int] | None):
        self.per_update = per_update
        self.context = context
        self.ends = ends
        self.model = model_without_weights()
        self.options = EngineOptions()
        self.programs = WidthsAlone(per_update)
        capacity = -(-context // CHUNK) * CHUNK
        pages = Pages(SLOTS * capacity // PAGE, PAGE)
        self.scheduler = Scheduler(ShapeTable(batches=(SLOTS,), capacities=(capacity,)), pages, capacity, False)
        self.chooser = FixedRounds(1.0, 64)
        self.runner = FakeRunner(self.programs)
        self.runner.reset()
        self.advanced_dispatch = None

    def prepare_plan(self, flight: Any, batch: Any) -> tuple[bool, Any]:
        return False, ()

    def plan(self, batch: Sequence[RunningSequence], most: int | None = None) -> Plan:
        return Plan(None, 1, self.per_update)

    def send(self, batch: Sequence[RunningSequence], plan: Plan, reach: int) -> Any:
        return SentUpdates(batch, 1, plan.width)

    def read(self, sent: Any) -> Any:
        return UpdatesReport([self.per_update] * len(sent.batch))

    def collect(self, sent: Any, report: Any, row: int) -> RequestOutput | None:
        sequence = sent.batch[row].sequence
        if self.ends is not None and len(sequence.processor.acceptance_lengths) >= self.ends[1]:
            end = self.ends[0]
            return RequestOutput(end=end, error="the engine failed" if end == "error" else "")
        return self.said(sequence)

    def count(self, sent: Any, report: Any, counted: EngineStats) -> None:
        return None

    def observe(self, sent: Any, report: Any, began: float, ended: float) -> None:
        return None

    def said(self, sequence: TokenSequence) -> RequestOutput:
        """The next tokens of a sequence."""
        processor = sequence.processor
        ask = sequence.handle.request
        prompt_logprobs = of_prompt(sequence)
        assert isinstance(ask, GenerateRequest)
        at = len(processor.tokens) % len(ask.prompt)
        coming = list(islice([*ask.prompt[at:], *list(ask.prompt) * self.per_update], self.per_update))
        pieces = processor.add_round(coming, 3, self.per_update - 1, self.model.target.config.eos_token_ids)
        tokens = tuple(
            Token(one.token, one.text, one.drafted, None if ask.logprobs is None else logprobs(one.token, ask))
            for one in pieces
        )
        reason = processor.finish_reason
        assert reason != "interrupted"
        return RequestOutput(tokens, (Round(len(tokens), 3, self.per_update - 1, "ngram, 4"),), reason, prompt_logprobs)


class FakeEngine(Engine):
    """An engine whose device is a loop over the prompt.

    Attributes:
        pause_s: before each round of updates.
        step_age_s: what it says of its last step.
        go: while it is cleared, nothing moves on.
        received: what was admitted, in order.

    Args:
        per_update, context, ends: see `FakeDecoding`.
        room: how many requests may wait.
    """

    def __init__(
        self,
        per_update: int = 3,
        pause_s: float = 0.0,
        room: int = 256,
        context: int = 2048,
        ends: tuple[EndReason, int] | None = None,
        step_age_s: float = 0.0,
    ):
        super().__init__(FakeDecoding(per_update, context, ends), EngineOptions(queue_requests=room, guard="off"))
        self.pause_s = pause_s
        self.step_age_s = step_age_s
        self.counters = EngineStats(programs=5, programs_declared=5, warm_seconds=1.5, accepted_at=[0, 0, 0])
        self.go = threading.Event()
        self.received = list[GenerateRequest]()
        self.go.set()

    @property
    def cancelled(self) -> int:
        """Number of cancelled requests."""
        return self.counters.ended.get("cancelled", 0)

    def stats(self) -> EngineStats:
        return replace(super().stats(), step_age_s=self.step_age_s)

    def fill(self, everything: bool = False) -> int:
        while not self.go.wait(0.01) and not self.ending:
            continue
        if self.live_sequences:
            time.sleep(self.pause_s)
        self.admit()
        filled = 0
        while chunks := self.scheduler.next_chunks():
            for chunk in chunks:
                if not chunk.running.started:
                    ask = chunk.running.sequence.handle.request
                    assert isinstance(ask, GenerateRequest)
                    self.received.append(ask)
                    chunk.running.sequence.handle.cached_tokens = len(ask.prompt) // 2
                self.scheduler.on_prefilled(chunk)
                filled += chunk.size
                if chunk.running.sequence.pooling is not None and chunk.running.prefilled:
                    self.deliver(chunk.running.sequence, self.embedded(chunk.running.sequence))
        return filled

    def embedded(self, sequence: TokenSequence) -> RequestOutput:
        """Makes a unit-length embedding of counts of token ids modulo `DIMENSIONS`."""
        counts = np.bincount(np.asarray(sequence.handle.request.prompt) % DIMENSIONS, minlength=DIMENSIONS)
        return RequestOutput(end="length", embedding=unit(counts.astype(np.float64)), prompt_logprobs=of_prompt(sequence))
