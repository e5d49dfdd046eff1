"""Figures of what became of drafts: those of vLLM's `metrics.speculative_decoding`, as it defines them, and τ."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from tilewright.compiled.timing import mean
from tilewright.llm.language_model import LanguageModel
from tilewright.runtime.output import Result

Row = dict[str, Any]


def num_spec_tokens(lm: LanguageModel) -> int:
    """The most drafts in a round; 0 without a drafter."""
    return 0 if lm.drafter is None else lm.drafter.block_size - 1


def drafting_rounds(responses: Sequence[Result]) -> list[tuple[int, int]]:
    """(drafted, accepted) of all rounds that proposed anything."""
    rounds = ((drafted, accepted) for r in responses for drafted, accepted in zip(r.drafted, r.accepted, strict=True))
    return [(drafted, accepted) for drafted, accepted in rounds if drafted > 0]


def speculative_decoding(responses: Sequence[Result], num_spec_tokens: int) -> Row | None:
    """The object that vLLM calls `metrics.speculative_decoding`, over all rounds that drafted; None where nothing drafts.

    Source: vLLM, `docs/features/speculative_decoding/acceptance_metrics.md`. There too, drafts count as accepted before an end
    cuts the round, and rounds that propose nothing do not count. With no round at all its acceptance length is 1, its rate 0.
    """
    if num_spec_tokens == 0:
        return None
    steps = drafting_rounds(responses)
    accepted = sum(a for _, a in steps)
    drafted = sum(d for d, _ in steps)
    counts = Counter(steps)
    lengths = sorted({d for d, _ in steps})
    return {
        "mean_acceptance_length": 1 + accepted / len(steps) if steps else 1.0,
        "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
        "acceptance_histogram": [sum(counts[d, n] for d in lengths) for n in range(num_spec_tokens + 1)],
        "acceptance_histogram_by_draft_length": {str(d): [counts[d, n] for n in range(d + 1)] for d in lengths},
        "num_spec_steps": len(steps),
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": num_spec_tokens,
    }


def distinct_ngram_ratio(tokens: Sequence[int], n: int = 4) -> float:
    """Different n-grams over all n-grams: 1 where nothing repeats, near 0 in a loop. 1 for texts shorter than n."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def mean_distinct_ngram_ratio(results: Sequence[Result], n: int = 4) -> float | None:
    """The mean over results: loops make drafts look good, so the two are read together."""
    return mean(distinct_ngram_ratio(r.tokens, n) for r in results)


def tokens_per_round(responses: Sequence[Result]) -> float | None:
    """τ: all tokens over all rounds, a last round counted for what it added; 1 where nothing drafts, None before any round."""
    return mean(added for r in responses for added in r.acceptance_lengths)


def tau_by_response(responses: Sequence[Result]) -> float | None:
    """The mean over responses of each one's mean over its rounds of accepted drafts + 1, an end that cuts a round left aside.

    It weighs a response alike however long it is, where `tokens_per_round` weighs rounds alike.
    """
    return over_responses(r.accepted for r in responses)


def tau_published(responses: Sequence[Result]) -> float | None:
    """`tau_by_response` without the first round of each: the count of DFlash's published code (z-lab/dflash, `benchmark.py`).

    Its first token comes from the prefill and belongs to no round; each of its rounds begins behind a generated token. Here the
    first round begins behind the prompt and commits that token. Both count what a last round accepted past the end.
    """
    return over_responses(r.accepted[1:] for r in responses)


def over_responses(accepted: Iterable[Sequence[int]]) -> float | None:
    """The mean over responses that have a round of the mean acceptance length of each."""
    each = (mean(n + 1 for n in rounds) for rounds in accepted)
    return mean(value for value in each if value is not None)


def acceptance_by_position(responses: Sequence[Result], num_spec_tokens: int) -> list[Row]:
    """For each draft position, from 1: how often its draft was accepted.

    `rate` is the share of all rounds that drafted (vLLM's per-position acceptance rate: accepted at the position over
    `num_spec_steps`); `conditional` is the share of the rounds that got there: a draft at the position, all before it accepted.
    """
    steps = drafting_rounds(responses)
    rows = []
    for position in range(1, num_spec_tokens + 1):
        reached = sum(drafted >= position and accepted >= position - 1 for drafted, accepted in steps)
        accepted_here = sum(accepted >= position for _, accepted in steps)
        rows.append(
            {
                "position": position,
                "reached": reached,
                "accepted": accepted_here,
                "rate": accepted_here / len(steps) if steps else None,
                "conditional": accepted_here / reached if reached else None,
            }
        )
    return rows


def tau_by_position(responses: Sequence[Result], edges: Sequence[int] = (0, 32, 64, 128, 256, 512, 1024, 2048)) -> list[Row]:
    """Accepted drafts + 1 of a round, in the mean, against how many tokens the response had when the round began.

    Bins go from one edge up to the next, which is outside; the last is open (`to` is None). Bins without a round are left out.
    """
    lengths: list[list[int]] = [[] for _ in edges]
    for r in responses:
        position = 0
        for added, accepted in zip(r.acceptance_lengths, r.accepted, strict=True):
            lengths[sum(edge <= position for edge in edges) - 1].append(accepted + 1)
            position += added
    tops = [*edges[1:], None]
    bins = zip(edges, tops, lengths, strict=True)
    return [{"from": low, "to": top, "rounds": len(own), "tau": mean(own)} for low, top, own in bins if own]


def acceptance_figures(responses: Sequence[Result]) -> Row:
    """The means that a table shows of a dataset and of each of its categories."""
    return {
        "responses": len(responses),
        "tokens": sum(len(r.tokens) for r in responses),
        "rounds": sum(len(r.acceptance_lengths) for r in responses),
        "tokens_per_round": tokens_per_round(responses),
        "tau_by_response": tau_by_response(responses),
        "tau_published": tau_published(responses),
    }


def generation_figures(responses: Sequence[Result], num_spec_tokens: int) -> Row:
    """Figures of results by themselves, whatever they are compared with."""
    return {
        "block_size": num_spec_tokens + 1,
        **acceptance_figures(responses),
        "distinct_4gram_ratio": mean_distinct_ngram_ratio(responses),
        "speculative_decoding": speculative_decoding(responses, num_spec_tokens),
    }
