"""One batch of requests on its way from prompts to results: prefill, dispatches of the decode loop, stop strings, text."""

import time
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
import numpy as np
from tokenizers import Tokenizer

from tilewright.decode.drafters.base import Drafter
from tilewright.decode.programs import STEPS_PER_DISPATCH, ProgramKey, Programs
from tilewright.decode.sampling import Sampling, batch_warp, row_sampling
from tilewright.decode.shapes import Shape
from tilewright.decode.state import DecodeState, StepInfo
from tilewright.models.tokenizer import StreamDecoder

FinishReason = Literal["eos", "stop", "length", "interrupted"]


@dataclass(frozen=True)
class Piece:
    """The text that one token added to a row; `drafted` if the drafter had proposed it. A token may add no text yet."""

    row: int
    text: str
    token: int
    drafted: bool


@dataclass(frozen=True)
class Result:
    """What one request gave.

    Attributes:
        text: the generated text, without the stop string or the end-of-sequence token.
        tokens: the generated tokens, with the end-of-sequence token if one came; at a stop string they end with the token that
            completed it.
        acceptance_lengths: how many tokens each round (each step, without a drafter) added to `tokens`. A round's last token is
            the target's, those before it are accepted drafts; only the last round may be cut short, by an end.
        drafted, accepted: how many drafts each round ran and how many of them the target agreed with, in a round that was cut
            short also those behind the end. Zeros without a drafter.
        finish_reason: "eos", "stop", "length" or "interrupted".
        prompt_tokens: length of the prompt.
    """

    text: str
    tokens: list[int]
    acceptance_lengths: list[int]
    finish_reason: FinishReason
    prompt_tokens: int
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)


@dataclass
class Row:
    """A request's progress on the host."""

    index: int
    prompt: list[int]
    sampling: Sampling
    decoder: StreamDecoder
    tokens: list[int] = field(default_factory=list)
    acceptance_lengths: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    text: str = ""
    shown: int = 0
    finish_reason: FinishReason | None = None

    def add_round(self, tokens: Sequence[int], drafted: int, accepted: int, eos: Sequence[int]) -> list[Piece]:
        """Takes the tokens that a round settled, up to a stop string. Returns what they add to the text."""
        pieces = []
        self.drafted.append(drafted)
        self.accepted.append(accepted)
        taken = 0
        for slot, token in enumerate(tokens):
            self.tokens.append(token)
            taken += 1
            ended = token in eos and not self.sampling.ignore_eos
            self.text += "" if ended else self.decoder.push([token])
            if ended:
                self.finish_reason = "eos"
            elif len(self.prompt) + len(self.tokens) >= self.end:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                self.text += self.decoder.flush()
            stop = find_stop(self.text, self.sampling.stop)
            if stop is not None:
                self.text, self.finish_reason = self.text[:stop], "stop"
            pieces.append(Piece(self.index, self.newly_shown(), token, drafted=slot < accepted))
            if self.finish_reason is not None:
                break
        self.acceptance_lengths.append(taken)
        return pieces

    @property
    def end(self) -> int:
        return len(self.prompt) + self.sampling.max_new_tokens

    def newly_shown(self) -> str:
        """Text that can be shown now: all of it, less a tail that may turn out to begin a stop string."""
        hold = 0 if self.finish_reason else beginning_of_stop(self.text, self.sampling.stop)
        until = max(len(self.text) - hold, self.shown)
        text, self.shown = self.text[self.shown : until], until
        return text

    def result(self) -> Result:
        # A copy is flushed: decoding may go on after this.
        text = self.text if self.finish_reason else self.text + copy(self.decoder).flush()
        reason = self.finish_reason or "interrupted"
        rounds = (list(self.acceptance_lengths), reason, len(self.prompt), list(self.drafted), list(self.accepted))
        return Result(text, list(self.tokens), *rounds)


def find_stop(text: str, stops: Sequence[str]) -> int | None:
    """Where the earliest stop string begins, if one is there."""
    found = [at for at in (text.find(stop) for stop in stops) if at >= 0]
    return min(found, default=None)


def beginning_of_stop(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that is the beginning of a stop string."""
    lengths = (n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n]))
    return max(lengths, default=0)


class Session:
    """Decodes a batch: `advance` until `finished`, then `results`; `results` may also be taken earlier.

    Attributes:
        prefill_seconds, decode_seconds: time spent in the programs, compilation excluded.
        rounds: rounds (steps, without a drafter) run so far, counted once for the whole batch.
    """

    def __init__(
        self, programs: Programs, tokenizer: Tokenizer, prompts: Sequence[list[int]], sampling: Sequence[Sampling],
        drafter: Drafter | None,
    ):  # fmt: skip
        self.programs, self.drafter = programs, drafter
        self.rows = [Row(i, p, s, StreamDecoder(tokenizer)) for i, (p, s) in enumerate(zip(prompts, sampling, strict=True))]
        overrun = 1 if drafter is None else drafter.block_size
        positions = max(row.end for row in self.rows) + overrun
        self.shape: Shape = programs.table.shape(len(self.rows), positions, batch_warp(sampling))
        self.models = programs.read_models(drafter)
        self.prefill_seconds = self.decode_seconds = 0.0
        self.rounds = 0
        self.state: DecodeState | None = None

    def keys(self) -> list[ProgramKey]:
        """The programs that this session needs: allocation, the prefill chunks that its prompts use, the decode loop."""
        used = {chunk for _, chunk in self.plan()}
        return [k for k in self.programs.keys(self.shape, self.drafter) if k.name != "prefill" or k.chunk in used]

    def plan(self) -> list[tuple[int, int]]:
        longest = max(len(row.prompt) for row in self.rows)
        return list(self.programs.table.prefill_plan(longest - 1))

    def program(self, name: str, chunk: int = 0) -> Any:
        return self.programs.get(ProgramKey(name, self.shape, self.drafter, chunk))

    def prefill(self) -> None:
        """Fills the caches with every prompt but its last token, which is the first known token."""
        for key in self.keys():
            self.programs.get(key)
        began = time.perf_counter()
        state = self.initial_state(*self.program("allocate")())
        for start, chunk in self.plan():
            state = self.program("prefill", chunk)(self.models, state, np.int32(start))
        jax.block_until_ready(state)
        self.state = state
        self.prefill_seconds = time.perf_counter() - began

    def initial_state(self, target_cache: Any, draft_cache: Any) -> DecodeState:
        batch = self.shape.batch
        tokens = np.zeros((batch, self.shape.capacity), np.int32)
        known, end = np.zeros(batch, np.int32), np.ones(batch, np.int32)
        done, ignore_eos = np.ones(batch, bool), np.zeros(batch, bool)
        requests = [row.sampling for row in self.rows] + [Sampling()] * (batch - len(self.rows))
        for i, row in enumerate(self.rows):
            tokens[i, : len(row.prompt)] = row.prompt
            known[i], end[i], done[i], ignore_eos[i] = len(row.prompt) - 1, row.end, False, row.sampling.ignore_eos
        sampling = row_sampling(requests, known + 1)
        return DecodeState(tokens, known, end, done, ignore_eos, sampling, target_cache, draft_cache)

    @property
    def finished(self) -> bool:
        return all(row.finish_reason is not None for row in self.rows)

    def advance(self, steps: int = STEPS_PER_DISPATCH) -> list[Piece]:
        """Runs up to `steps` steps or rounds on the device and returns what they added to each row, in the order it came."""
        if self.state is None:
            self.prefill()
        assert self.state is not None
        began = time.perf_counter()
        limit = np.int32(min(steps, STEPS_PER_DISPATCH))
        state, infos, ran = self.program("decode")(self.models, self.state, limit)
        self.state = state
        infos, ran = jax.device_get((infos, ran))
        infos = jax.tree.map(lambda each: each[:ran], infos)
        self.decode_seconds += time.perf_counter() - began
        self.rounds += int(ran)
        return self.take(infos)

    def take(self, infos: StepInfo) -> list[Piece]:
        """Hands each row the tokens that each round settled for it."""
        pieces: list[Piece] = []
        stopped = False
        for tokens, settled, drafted, accepted in zip(*infos, strict=True):
            for i, row in enumerate(self.rows):
                if row.finish_reason is None and settled[i] > 0:
                    new = tokens[i, : settled[i]].tolist()
                    pieces += row.add_round(new, int(drafted[i]), int(accepted[i]), self.programs.target.eos_token_ids)
                    stopped = stopped or row.finish_reason == "stop"
        if stopped and self.state is not None:
            done = np.asarray(self.state.done).copy()
            done[: len(self.rows)] |= [row.finish_reason is not None for row in self.rows]
            self.state = replace(self.state, done=done)
        return pieces

    def results(self) -> list[Result]:
        """What every row has given so far."""
        return [row.result() for row in self.rows]
