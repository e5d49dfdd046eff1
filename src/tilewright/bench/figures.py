"""The figures of a generation, each computed in one place."""

from collections import Counter
from collections.abc import Sequence

from tilewright.decode.session import Result


def mean_acceptance_length(results: Sequence[Result]) -> float | None:
    """tau: generated tokens for each round, over the rounds of all results; 1 where nothing drafts, None before any round."""
    rounds = sum(len(r.acceptance_lengths) for r in results)
    return sum(sum(r.acceptance_lengths) for r in results) / rounds if rounds else None


def acceptance_histogram(results: Sequence[Result], block_size: int) -> list[int]:
    """How many rounds accepted 0, 1, ... `block_size - 1` draft tokens."""
    counts = Counter(length - 1 for r in results for length in r.acceptance_lengths)
    return [counts[n] for n in range(block_size)]


def distinct_ngram_ratio(tokens: Sequence[int], n: int = 4) -> float:
    """Different n-grams over all n-grams: 1 where nothing repeats, near 0 in a loop. 1 for texts shorter than n."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def mean_distinct_ngram_ratio(results: Sequence[Result], n: int = 4) -> float:
    """The mean over results: loops make tau look good, so the two are read together."""
    return sum(distinct_ngram_ratio(r.tokens, n) for r in results) / len(results)


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first position at which two token lists differ, None if they are equal."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))
