"""An engine without a model, for what a real one does seldom: being slow, stuck, failing.

It says what it was asked: the tokens of the prompt, again and again, a fixed number of them to an update. Only what plugs in is
its own, `fill`, `send` and `read`; the queue, the slots and the thread are the real engine's.
"""

import json
import threading
import time
from dataclasses import replace
from functools import cache
from itertools import islice
from typing import Any

import numpy as np

from tilewright.models.decoder import config_from_hf
from tilewright.models.hub import PACKAGED
from tilewright.models.tokenizer import load_tokenizer
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
from tilewright.runtime.scheduler import Scheduler, TokenSequence
from tilewright.runtime.service import Service
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
    """What the engine asks of its programs before it runs one."""

    def __init__(self, block: int):
        self.target = model_without_weights().target
        self.drafter = None
        self.block = block

    def width(self, choice: Choice | None, masked: bool = False) -> int:
        return self.block


class FakeEngine(Engine):
    """An engine whose device is a loop over the prompt.

    Attributes:
        per_update: tokens of an update; all but the last of them count as drafted.
        pause_s: before each round of updates.
        context: positions of a request.
        ends: what to end requests with instead, after so many updates.
        step_age_s: what it says of its last step.
        go: while it is cleared, nothing moves on.
        taken: what was admitted, in order.

    Args:
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
        Service.__init__(self, EngineOptions(queue_requests=room, guard="off"))
        self.per_update = per_update
        self.pause_s = pause_s
        self.context = context
        self.ends = ends
        self.step_age_s = step_age_s
        self.model = model_without_weights()
        self.programs = WidthsAlone(per_update)
        capacity = -(-context // CHUNK) * CHUNK
        self.pages = Pages(SLOTS * capacity // PAGE, PAGE)
        self.scheduler = Scheduler(ShapeTable(batches=(SLOTS,), capacities=(capacity,)), self.pages, capacity, False)
        self.chooser = FixedRounds(1.0, 64)
        self.runner = ModelRunner(self.programs)
        self.counted = EngineStats(programs=5, warm_seconds=1.5, accepted_at=[0, 0, 0])
        self.go = threading.Event()
        self.taken = list[GenerateRequest]()
        self.go.set()

    @property
    def prepared(self) -> bool:
        return True

    @property
    def cancelled(self) -> int:
        """How many requests ended so."""
        return self.counted.ended.get("cancelled", 0)

    def stats(self) -> EngineStats:
        return replace(super().stats(), step_age_s=self.step_age_s)

    def fill(self, everything: bool = False) -> int:
        while not self.go.wait(0.01) and not self.ending:
            continue
        if self.there:
            time.sleep(self.pause_s)
        self.admit()
        filled = 0
        while chunks := self.scheduler.next_chunks():
            for chunk in chunks:
                if not chunk.running.begun:
                    ask = chunk.running.sequence.handle.request
                    assert isinstance(ask, GenerateRequest)
                    self.taken.append(ask)
                    chunk.running.sequence.handle.cached_tokens = len(ask.prompt) // 2
                self.scheduler.on_prefilled(chunk)
                filled += chunk.size
                if chunk.running.sequence.pooling is not None and chunk.running.prefilled:
                    self.hand_out(chunk.running.sequence, self.embedded(chunk.running.sequence))
        return filled

    def embedded(self, sequence: TokenSequence) -> RequestOutput:
        """How often each of a few remainders of token ids is there, brought to length 1."""
        counts = np.bincount(np.asarray(sequence.handle.request.prompt) % DIMENSIONS, minlength=DIMENSIONS)
        return RequestOutput(end="length", embedding=unit(counts.astype(np.float64)), prompt_logprobs=self.of_prompt(sequence))

    def of_prompt(self, sequence: TokenSequence) -> tuple[TokenLogprobs, ...] | None:
        """Log-probabilities of a prompt, the first time."""
        ask = sequence.handle.request
        assert isinstance(ask, GenerateRequest)
        if sequence.prompt_logprobs is None:
            return None
        sequence.prompt_logprobs = None
        return tuple(self.logprobs(token, ask) for token in ask.prompt[1:])

    def send(self) -> bool:
        runnable = self.scheduler.runnable()
        batch, rounds = self.scheduler.make_room(runnable, 1, self.per_update) if runnable else ([], 0)
        if batch:
            self.scheduler.on_dispatched(batch, rounds, self.per_update)
            self.flight.append(batch)
        return bool(batch)

    def read(self, sent: Any) -> None:
        """Those that `send` put into the flight."""
        for running in sent:
            sequence = running.sequence
            if sequence.handle.result is not None:
                continue
            if self.ends is not None and len(sequence.processor.acceptance_lengths) >= self.ends[1]:
                end = self.ends[0]
                self.hand_out(sequence, RequestOutput(end=end, error="the engine failed" if end == "error" else ""))
                continue
            update = self.said(sequence)
            self.scheduler.on_completed(running, 1, self.per_update, len(update.tokens))
            self.hand_out(sequence, update)

    def said(self, sequence: TokenSequence) -> RequestOutput:
        """The next tokens of a sequence."""
        processor = sequence.processor
        ask = sequence.handle.request
        told = self.of_prompt(sequence)
        assert isinstance(ask, GenerateRequest)
        at = len(processor.tokens) % len(ask.prompt)
        coming = list(islice([*ask.prompt[at:], *list(ask.prompt) * self.per_update], self.per_update))
        pieces = processor.add_round(coming, 3, self.per_update - 1, self.model.target.config.eos_token_ids)
        tokens = tuple(
            Token(one.token, one.text, one.drafted, None if ask.logprobs is None else self.logprobs(one.token, ask))
            for one in pieces
        )
        reason = processor.finish_reason
        assert reason != "interrupted"
        return RequestOutput(tokens, (Round(len(tokens), 3, self.per_update - 1, "ngram, 4"),), reason, told)

    def logprobs(self, token: int, ask: GenerateRequest) -> TokenLogprobs:
        """The token itself is the likeliest, those after it follow."""
        vocab = self.model.target.config.vocab_size
        top = tuple(((token + n) % vocab, -0.5 - n) for n in range(ask.logprobs or 0))
        return TokenLogprobs(-0.5, top)
