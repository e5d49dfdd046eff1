"""Collects requests' tokens from the rounds of a dispatch, and counts rounds for the engine's statistics."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tilewright.runtime.interfaces import Choice
from tilewright.runtime.request import EngineStats, RequestOutput, Round, Token, TokenLogprobs
from tilewright.runtime.runner import SentRounds
from tilewright.runtime.scheduler import TokenSequence
from tilewright.runtime.state import NOT_FINITE, StepInfo


class NotFinite(ArithmeticError):
    """The target's logits are not finite, so the row's caches on the device are not finite either."""


def collect_rounds(
    sequence: TokenSequence, infos: StepInfo, row: int, choice: Choice | None, eos: Sequence[int]
) -> RequestOutput:
    """Gives a sequence the tokens that each round committed for its row; tokens behind its end are dropped.

    Raises:
        NotFinite: a token was drawn from logits that are not finite.
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
        tokens += [Token(piece.token, piece.text, piece.drafted, each) for piece, each in zip(pieces, logprobs, strict=True)]
        if sequence.processor.finish_reason is not None:
            break
    reason = sequence.processor.finish_reason
    return RequestOutput(tuple(tokens), tuple(rounds), None if reason == "interrupted" else reason, prompt_logprobs(sequence))


def token_logprobs(found: Any, at: tuple[int, ...], count: int, alternatives: int) -> list[TokenLogprobs]:
    """Returns the log-probabilities of the first `count` positions of a block.

    Args:
        found: a `logprobs.Logprobs` on the host.
        at: index of the block.
    """
    chosen, ids, logprobs = (np.asarray(each)[at] for each in found)
    tops = [zip(ids[slot].tolist(), logprobs[slot].tolist(), strict=True) for slot in range(count)]
    return [TokenLogprobs(float(chosen[slot]), tuple(top)[:alternatives]) for slot, top in enumerate(tops)]


def prompt_logprobs(sequence: TokenSequence) -> tuple[TokenLogprobs, ...] | None:
    """Returns the prompt's log-probabilities once; None later, or if the request wants none."""
    if sequence.prompt_logprobs is None:
        return None
    parts = sequence.prompt_logprobs
    sequence.prompt_logprobs = None
    found = [one for found, row, count in parts for one in token_logprobs(found, (row,), count, sequence.alternatives)]
    return tuple(found[: len(sequence.processor.prompt) - 1])  # prefill of a whole prompt also covers the token behind it


def count_rounds(counted: EngineStats, sent: SentRounds, infos: StepInfo) -> None:
    """Adds rounds that were read to the statistics."""
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
