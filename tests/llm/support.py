"""Small models, prompts and comparisons for tests of decoding."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from reference.dflash_numpy import Pair, as_folders
from tilewright.llm.language_model import LanguageModel, load
from tilewright.llm.stream import Stream
from tilewright.runtime.interfaces import Drafter
from tilewright.runtime.layout import rows_of
from tilewright.runtime.output import Piece, Result
from tilewright.runtime.programs import Programs
from tilewright.runtime.sampling import Sampling
from tilewright.runtime.shapes import Shape, ShapeTable
from tilewright.runtime.state import DecodeState, Models, StepInfo, Target, commit, last_token, verify

TABLE = ShapeTable(batches=(1, 4, 8), capacities=(64, 128), chunks=(8, 32))


def build(folder: Path, pair: Pair, **settings: Any) -> LanguageModel:
    """Saves the pair to `folder` and loads it as a language model with `settings`. Blocks have the drafter's size."""
    target, drafter = as_folders(folder, pair)
    return load(target, drafter, **{"table": TABLE, "block_size": pair.drafter_config["block_size"], **settings})


def prompts(seed: int, lengths: Sequence[int], vocab: int = 40) -> list[list[int]]:
    """Returns prompts of random tokens."""
    rng = np.random.default_rng(seed)
    return [[int(token) for token in rng.integers(0, vocab, length)] for length in lengths]


def run(session: Stream, steps: int = 64) -> list[Piece]:
    """Decodes to the end, `steps` steps a dispatch; returns all pieces."""
    pieces = []
    while not session.finished:
        pieces += session.advance(steps)
    return pieces


def state_of(stream: Stream) -> tuple[DecodeState, list[int]]:
    """Returns the state of the running rows, as rounds get it, and their numbers."""
    states: list[DecodeState] = []

    def look(models: Models, state: DecodeState, slots: Any, table: Any) -> tuple[DecodeState, None]:
        states.append(rows_of(state, jnp.asarray(slots), jnp.asarray(table)))
        return state, None

    stream.apply(look)
    return states[0], [running.sequence.number for running in stream.engine.scheduler.running]


def plain_step(target: Target, models: Models, state: DecodeState) -> tuple[DecodeState, StepInfo]:
    """Runs a step of plain decoding, independent of patches of the package's functions."""
    verified = verify(target, models.target, state, last_token(state), ())
    none = jnp.zeros_like(state.last_position)
    state, committed = commit(target, verified.state, verified.tokens, none)
    return state, StepInfo(verified.tokens, committed, none, none, verified.logprobs)


def share_programs(lm: LanguageModel, other: LanguageModel) -> None:
    """Shares compiled programs between models of equal configurations."""
    original = lm.programs_for

    def programs_for(drafter: Drafter | None, shape: Shape) -> Programs:
        programs = original(drafter, shape)
        programs.compiled = other.programs_for(None if drafter is None else other.drafter, shape).compiled
        return programs

    lm.programs_for = programs_for  # type: ignore[method-assign]


def tokens_of(lm: LanguageModel, inputs: Sequence[Any], sampling: Any, speculative: bool, batch: int = 8) -> list[list[int]]:
    """Returns the tokens of each prompt, decoded `batch` prompts at a time."""
    each = lm.each_sampling(inputs, sampling)
    groups = [slice(i, i + batch) for i in range(0, len(inputs), batch)]
    return [result.tokens for g in groups for result in lm.generate(inputs[g], each[g], speculative)]


def check_same_as_autoregressive(
    lm: LanguageModel, inputs: Sequence[Any], sampling: Sampling | Sequence[Sampling], batch: int, want: list[list[int]]
) -> list[int]:
    """Checks that speculative decoding gives the tokens `want` of autoregressive decoding. Returns all acceptance lengths."""
    each = lm.each_sampling(inputs, sampling)
    lengths: list[int] = []
    for i in range(0, len(inputs), batch):
        for n, result in enumerate(lm.generate(inputs[i : i + batch], each[i : i + batch], speculative=True), i):
            assert result.tokens == want[n], f"prompt {n} of {result.prompt_tokens} tokens"
            assert sum(result.acceptance_lengths) == len(result.tokens)
            rounds = list(zip(result.acceptance_lengths, result.drafted, result.accepted, strict=True))
            assert all(added == accepted + 1 for added, _, accepted in rounds[:-1]), "only an end cuts a round"
            assert all(added - 1 <= accepted <= drafted for added, drafted, accepted in rounds)
            lengths += result.acceptance_lengths
    return lengths


def result(*added: int, drafts: int = 3, tokens: list[int] | None = None, **known: list[int]) -> Result:
    """Returns a result whose rounds added these numbers of tokens, and by default accepted one fewer."""
    tokens = list(range(sum(added))) if tokens is None else tokens
    drafted = known.get("drafted", [drafts] * len(added))
    accepted = known.get("accepted", [n - 1 for n in added])
    return Result("", tokens, list(added), "length", 1, drafted, accepted)
