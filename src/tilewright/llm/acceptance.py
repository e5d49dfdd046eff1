"""What became of drafts, named and defined as vLLM does in `metrics.speculative_decoding`."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from tilewright.llm.language_model import LanguageModel
from tilewright.runtime.output import Result


def num_spec_tokens(lm: LanguageModel) -> int:
    """The most drafts in a round; 0 without a drafter."""
    return 0 if lm.drafter is None else lm.drafter.block_size - 1


def drafting_rounds(responses: Sequence[Result]) -> list[tuple[int, int]]:
    """(drafted, accepted) of all rounds that proposed anything."""
    rounds = ((drafted, accepted) for r in responses for drafted, accepted in zip(r.drafted, r.accepted, strict=True))
    return [(drafted, accepted) for drafted, accepted in rounds if drafted > 0]


def speculative_decoding(responses: Sequence[Result], num_spec_tokens: int) -> dict[str, Any] | None:
    """The object that vLLM calls `metrics.speculative_decoding`, over all rounds that drafted; None where nothing drafts.

    Source: vLLM, `docs/features/speculative_decoding/acceptance_metrics.md`. There too, drafts count as accepted before an end
    cuts the round, and rounds that propose nothing do not count. With no round at all its acceptance length is 1, its rate 0.
    """
    if num_spec_tokens == 0:
        return None
    steps = drafting_rounds(responses)
    accepted, drafted = sum(a for _, a in steps), sum(d for d, _ in steps)
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
