"""Figures of speculative decoding: those of vLLM's `metrics.speculative_decoding`, as defined there, and τ."""

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
    """Returns (drafted, accepted) of all rounds with a draft."""
    rounds = ((drafted, accepted) for r in responses for drafted, accepted in zip(r.drafted, r.accepted, strict=True))
    return [(drafted, accepted) for drafted, accepted in rounds if drafted > 0]


def speculative_decoding(responses: Sequence[Result], num_spec_tokens: int) -> Row | None:
    """Returns the object that vLLM calls `metrics.speculative_decoding`, over all rounds with a draft; None without a drafter.

    Source: vLLM, `docs/features/speculative_decoding/acceptance_metrics.md`. As there, drafts count as accepted even behind an
    end that cuts the round, and rounds without drafts do not count. With no round the acceptance length is 1, and the rate 0.
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
    """Returns the share of different n-grams among all: 1 without repetition, near 0 in a loop, 1 for texts shorter than n."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def mean_distinct_ngram_ratio(results: Sequence[Result], n: int = 4) -> float | None:
    """Returns the mean over results. Loops raise acceptance, so read the two figures together."""
    return mean(distinct_ngram_ratio(r.tokens, n) for r in results)


def tokens_per_round(responses: Sequence[Result]) -> float | None:
    """Returns τ: tokens per round, where a last round counts what it added; 1 without a drafter, None without a round."""
    return mean(added for r in responses for added in r.acceptance_lengths)


def tau_by_response(responses: Sequence[Result]) -> float | None:
    """Returns the mean over responses of the mean of accepted drafts + 1 over rounds, as if no end had cut a round.

    Each response has the same weight, whereas `tokens_per_round` gives each round the same weight.
    """
    return over_responses(r.accepted for r in responses)


def tau_published(responses: Sequence[Result]) -> float | None:
    """Returns `tau_by_response` without each response's first round, as DFlash's code (z-lab/dflash, `benchmark.py`).

    There, the first token comes from the prefill and belongs to no round, and each round begins behind a generated token. Here,
    the first round begins behind the prompt and commits that token. Both count accepted drafts of a last round past the end.
    """
    return over_responses(r.accepted[1:] for r in responses)


def over_responses(accepted: Iterable[Sequence[int]]) -> float | None:
    """Returns the mean of the responses' mean acceptance lengths, over responses with a round."""
    each = (mean(n + 1 for n in rounds) for rounds in accepted)
    return mean(value for value in each if value is not None)


def acceptance_by_position(responses: Sequence[Result], num_spec_tokens: int) -> list[Row]:
    """Returns acceptance figures of each draft position, from 1.

    `rate` is the share of all rounds with drafts (vLLM's per-position acceptance rate: accepted at the position over
    `num_spec_steps`); `conditional` is the share of the rounds that reach the position: a draft there, all before it accepted.
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
    """Returns the mean of accepted drafts + 1 of a round, by the response's number of tokens when the round began.

    Bins go from one edge up to the next, which is excluded; the last is open (`to` is None). Bins without a round are left out.
    """
    lengths: list[list[int]] = [[] for _ in edges]
    for r in responses:
        position = 0
        for added, accepted in zip(r.acceptance_lengths, r.accepted, strict=True):
            lengths[sum(edge <= position for edge in edges) - 1].append(accepted + 1)
            position += added
    tops = [*edges[1:], None]
    bins = zip(edges, tops, lengths, strict=True)
    return [{"from": low, "to": top, "rounds": len(rounds), "tau": mean(rounds)} for low, top, rounds in bins if rounds]


def acceptance_figures(responses: Sequence[Result]) -> Row:
    """Returns the means that a table shows for a dataset and for each of its categories."""
    return {
        "responses": len(responses),
        "tokens": sum(len(r.tokens) for r in responses),
        "rounds": sum(len(r.acceptance_lengths) for r in responses),
        "tokens_per_round": tokens_per_round(responses),
        "tau_by_response": tau_by_response(responses),
        "tau_published": tau_published(responses),
    }


def generation_figures(responses: Sequence[Result], num_spec_tokens: int) -> Row:
    """Returns figures of results that need no comparison."""
    return {
        "block_size": num_spec_tokens + 1,
        **acceptance_figures(responses),
        "distinct_4gram_ratio": mean_distinct_ngram_ratio(responses),
        "speculative_decoding": speculative_decoding(responses, num_spec_tokens),
    }
