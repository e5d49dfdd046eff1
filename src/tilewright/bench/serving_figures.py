"""The figures of `tilewright bench serving`, each computed in one place. `docs/metrics.md` defines them."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from tilewright.bench.answer import COUNTS
from tilewright.bench.serving import Outcome, failures
from tilewright.bench.speculative_figures import Row
from tilewright.compiled.timing import mean
from tilewright.report.charts import round_step

OBJECTIVES = ("ttft", "tpot", "e2e")
"""Latencies that goodput can bound, in milliseconds."""
SHORTEST_BIN_S = 0.001
"""The least length of a span in which tokens are counted."""
REJECTED = ("http_429", "http_503")
"""Failures by which a server says that it has too much to do."""


def serving_figures(
    outcomes: Sequence[Outcome], percentiles: Sequence[float] = (50, 90, 95, 99), goodput: Mapping[str, float] | None = None
) -> Row:
    """All figures of a run, under the field names of `--json`.

    Args:
        goodput: for some of `OBJECTIVES` the most that a request may take, in milliseconds.
    """
    whole = [outcome for outcome in outcomes if outcome.failure is None]
    failed = failures(outcomes)
    seconds = duration_s(outcomes)
    output = sum(outcome.answer.tokens for outcome in whole)
    prompt_tokens = sum_of([outcome.prompt_tokens for outcome in whole])
    met = None if not goodput else sum(meets(outcome, goodput) for outcome in whole)
    return {
        "requests": len(outcomes),
        "completed": len(whole),
        "failed": len(outcomes) - len(whole),
        "rejected": sum(row["requests"] for row in failed if row["kind"] in REJECTED),
        "failures": failed,
        "duration_s": seconds,
        "requests_per_s": per_second(len(whole), seconds),
        "goodput_requests_per_s": None if met is None else per_second(met, seconds),
        "requests_within_goodput": met,
        "prompt_tokens": prompt_tokens,
        "cached_prompt_tokens": sum_of([outcome.answer.cached_tokens for outcome in whole]),
        "output_tokens": output,
        "output_tokens_counted_by": counted_by(whole),
        "output_tokens_per_s": per_second(output, seconds),
        "total_tokens_per_s": None if prompt_tokens is None else per_second(output + prompt_tokens, seconds),
        "tokens_per_chunk": tokens_per_chunk(whole),
        "peak_concurrency": peak_concurrency(outcomes),
        "speculative_decoding": speculative_decoding(whole),
        **latency_figures(outcomes, percentiles),
    }


def duration_s(outcomes: Sequence[Outcome]) -> float:
    """From the first request sent to the last answer's end, failures included; 0 where there is no request."""
    if not outcomes:
        return 0.0
    return max(outcome.end_s for outcome in outcomes) - min(outcome.sent_s for outcome in outcomes)


def sum_of(counts: Sequence[int | None]) -> int | None:
    """The sum of counts; None where one of them is not known."""
    there = [count for count in counts if count is not None]
    return sum(there) if len(there) == len(counts) else None


def per_second(count: float, seconds: float) -> float | None:
    return count / seconds if seconds > 0 else None


def latencies(outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    """The values in seconds of each of `LATENCIES`: of all requests `held` and `slip`, the others of those that completed."""
    whole = [outcome for outcome in outcomes if outcome.failure is None]
    shares = [outcome.answer.token_gaps_s for outcome in whole]
    per_token = [gap for share in shares if share is not None for gap in share]
    return {
        "ttft": known([outcome.ttft_s for outcome in whole]),
        "tpot": known([outcome.answer.seconds_per_token for outcome in whole]),
        "itl": [gap for outcome in whole for gap in outcome.answer.gaps_s],
        "token_itl": [] if None in shares else per_token,
        "e2e": [outcome.e2e_s for outcome in whole],
        "held": [outcome.held_s for outcome in outcomes],
        "slip": [outcome.slip_s for outcome in outcomes],
    }


def known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def latency_figures(outcomes: Sequence[Outcome], percentiles: Sequence[float]) -> dict[str, float | None]:
    """Mean and percentiles in milliseconds, as `ttft_mean_ms` and `ttft_p99_ms`; None where there is no value."""
    figures: dict[str, float | None] = {}
    for name, values in latencies(outcomes).items():
        average = mean(values)
        figures[f"{name}_mean_ms"] = None if average is None else 1000 * average
        for percent in percentiles:
            figures[f"{name}_p{percent:g}_ms"] = 1000 * percentile(values, percent) if values else None
    return figures


def percentile(values: Sequence[float], percent: float) -> float:
    """On the line between the two nearest ranks (NumPy's default, as in vLLM's benchmark)."""
    return float(np.percentile(values, percent))


def meets(outcome: Outcome, goodput: Mapping[str, float]) -> bool:
    """True if an answer took no longer than was asked for. One that has no TPOT, for it came at once, meets any."""
    taken = {"ttft": outcome.ttft_s, "tpot": outcome.answer.seconds_per_token, "e2e": outcome.e2e_s}
    return all(1000 * (taken[name] or 0.0) <= most for name, most in goodput.items())


def counted_by(outcomes: Sequence[Outcome]) -> str | None:
    """Source of the numbers of generated tokens: "usage", "chunks" where the server gives none, or "both"."""
    ways = {"usage" if outcome.answer.counted_by_usage else "chunks" for outcome in outcomes}
    return None if not ways else ways.pop() if len(ways) == 1 else "both"


def tokens_per_chunk(outcomes: Sequence[Outcome]) -> float | None:
    """All tokens over all chunks that brought some; None where only the chunks were counted."""
    counted = [outcome.answer for outcome in outcomes if outcome.answer.counted_by_usage and outcome.answer.chunks]
    chunks = sum(len(answer.chunks) for answer in counted)
    return sum(answer.tokens for answer in counted) / chunks if chunks else None


def peak_concurrency(outcomes: Sequence[Outcome]) -> int:
    """The most requests that were under way at once; one that ends as another begins makes room for it."""
    steps = sorted(step for outcome in outcomes for step in ((outcome.sent_s, 1), (outcome.end_s, -1)))
    return int(np.cumsum([0, *(step for _, step in steps)]).max())


def speculative_decoding(outcomes: Sequence[Outcome]) -> Row | None:
    """The server's figures of drafts, over all rounds of all answers that give them; None where none does.

    The fields are vLLM's (`docs/features/speculative_decoding/acceptance_metrics.md`), summed; `requests` is how many answers
    they are of.
    """
    told = [outcome.answer.speculative for outcome in outcomes if outcome.answer.speculative is not None]
    if not told:
        return None
    counts = {name: sum(each[name] for each in told) for name in COUNTS}
    steps, accepted, drafted = counts.values()
    return {
        "mean_acceptance_length": 1 + accepted / steps if steps else 1.0,
        "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
        "acceptance_histogram": summed([each.get("acceptance_histogram") for each in told]),
        **counts,
        "requests": len(told),
    }


def summed(histograms: Sequence[Any]) -> list[int] | None:
    """Element by element, the shorter ones filled up with 0; None where one is no list of counts."""
    if not all(isinstance(each, list) and all(type(n) is int and n >= 0 for n in each) for each in histograms):
        return None
    return [sum(counts) for counts in zip_longest(*histograms, fillvalue=0)]


def request_rows(outcomes: Sequence[Outcome]) -> list[Row]:
    """A record for each request, for `--detailed` and for the page."""
    return [
        {
            "number": outcome.planned.number,
            "due_s": outcome.due_s,
            "held_s": outcome.held_s,
            "sent_s": outcome.sent_s,
            "first_s": outcome.answer.first_s,
            "end_s": outcome.end_s,
            "prompt_tokens": outcome.prompt_tokens,
            "output_tokens": outcome.answer.tokens,
            "chunks": len(outcome.answer.chunks),
            "tpot_ms": None if outcome.answer.seconds_per_token is None else 1000 * outcome.answer.seconds_per_token,
            "finish_reason": outcome.answer.finish_reason,
            "failure": outcome.failure and outcome.failure.kind,
            "message": outcome.failure and outcome.failure.message,
        }
        for outcome in outcomes
    ]


def tokens_over_time(outcomes: Sequence[Outcome], bins: int = 300) -> tuple[float, list[float]]:
    """Tokens that came in each of at most `bins` spans of equal length, and that length in seconds; failed requests included.

    Where chunks do not say how many tokens they bring, an answer's tokens are spread evenly over its chunks.
    """
    length = round_step(max(max((outcome.end_s for outcome in outcomes), default=0.0) / bins, SHORTEST_BIN_S))
    counts = [0.0] * (bins + 1)
    for outcome in outcomes:
        chunks = outcome.answer.chunks
        share = outcome.answer.tokens / len(chunks) if chunks else 0.0
        for chunk in chunks:
            counts[min(int(chunk.at_s / length), bins)] += share if chunk.tokens is None else chunk.tokens
    while len(counts) > 1 and not counts[-1]:
        counts.pop()
    return length, counts
