"""Tokens that requests take from the rounds of a dispatch, and what the engine counts of them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tilewright.runtime.interfaces import Choice
from tilewright.runtime.request import EngineStats, RequestOutput, Round, Token, TokenLogprobs
from tilewright.runtime.runner import SentRounds
from tilewright.runtime.scheduler import TokenSequence
from tilewright.runtime.state import NOT_FINITE, StepInfo


class NotFinite(ArithmeticError):
    """The target's logits are not finite, and what the device holds of a row is not either."""


def collect_rounds(
    sequence: TokenSequence, infos: StepInfo, row: int, choice: Choice | None, eos: Sequence[int]
) -> RequestOutput:
    """Hands a sequence the tokens that each round committed for its row; what comes behind its end is dropped.

    Raises:
        NotFinite: one of them was to be drawn from logits that are not.
    """
    tokens: list[Token] = []
    rounds: list[Round] = []
    for n in np.flatnonzero(infos.committed[:, row]).tolist():
        new = infos.tokens[n, row, : infos.committed[n, row]].tolist()
        if NOT_FINITE in new:
            raise NotFinite("the target's logits are not finite")
        drafted = int(infos.drafted[n, row])
        accepted = int(infos.accepted[n, row])
        from_ngrams = infos.from_ngrams is not None and bool(infos.from_ngrams[n, row])
        pieces = sequence.processor.add_round(new, drafted, accepted, eos, choice, from_ngrams)
        rounds.append(Round(len(pieces), drafted, accepted, "" if choice is None else str(choice)))
        logprobs = (
            [None] * len(pieces)
            if not sequence.wants_logprobs
            else token_logprobs(infos.logprobs, (n, row), len(pieces), sequence.alternatives)
        )
        tokens += [Token(one.token, one.text, one.drafted, own) for one, own in zip(pieces, logprobs, strict=True)]
        if sequence.processor.finish_reason is not None:
            break
    reason = sequence.processor.finish_reason
    return RequestOutput(tuple(tokens), tuple(rounds), None if reason == "interrupted" else reason, prompt_logprobs(sequence))


def token_logprobs(found: Any, at: tuple[int, ...], count: int, alternatives: int) -> list[TokenLogprobs]:
    """The log-probabilities of the first `count` positions of a block.

    Args:
        found: what `logprobs.Logprobs` holds, on the host.
        at: which block of it.
    """
    chosen, ids, logprobs = (np.asarray(each)[at] for each in found)
    tops = [zip(ids[slot].tolist(), logprobs[slot].tolist(), strict=True) for slot in range(count)]
    return [TokenLogprobs(float(chosen[slot]), tuple(top)[:alternatives]) for slot, top in enumerate(tops)]


def prompt_logprobs(sequence: TokenSequence) -> tuple[TokenLogprobs, ...] | None:
    """Those of the prompt, the first time that somebody asks; None without."""
    if sequence.prompt_logprobs is None:
        return None
    parts = sequence.prompt_logprobs
    sequence.prompt_logprobs = None
    found = [one for found, row, count in parts for one in token_logprobs(found, (row,), count, sequence.alternatives)]
    return tuple(found[: len(sequence.processor.prompt) - 1])  # of what follows the prompt, where all of it was computed, none


def count_rounds(counted: EngineStats, sent: SentRounds, infos: StepInfo) -> None:
    """Counts rounds that were read."""
    rounds = len(infos.committed)
    ran = infos.committed > 0
    drafted = infos.drafted > 0
    counted.dispatches += 1
    counted.rounds += rounds
    counted.constrained_rounds += rounds if sent.masks == "host" else 0
    counted.automaton_rounds += rounds if sent.masks == "device" else 0
    counted.row_rounds += int(ran.sum())
    counted.padding_rows += rounds * sent.rows - int(ran.sum())
    counted.drafts += int(drafted.sum())
    counted.drafted += int(infos.drafted.sum())
    counted.accepted += int(infos.accepted.sum())
    most = infos.tokens.shape[2] - 1
    at_least = np.cumsum(np.bincount(infos.accepted[drafted], minlength=most + 1)[::-1])[::-1][1:]
    counted.accepted_at += [0] * (most - len(counted.accepted_at))
    for place, count in enumerate(at_least.tolist()):
        counted.accepted_at[place] += count
    name = "fixed" if sent.choice is None else str(sent.choice)
    counted.widths[name] = counted.widths.get(name, 0) + rounds
