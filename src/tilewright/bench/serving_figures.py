"""Computes the figures of `tilewright bench serving`. `docs/metrics.md` defines them."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from tilewright.bench.answer import COUNTS
from tilewright.bench.serving import Outcome, failures
from tilewright.bench.speculative_figures import Row
from tilewright.compiled.timing import mean

OBJECTIVES = ("ttft", "tpot", "e2e")
"""Latencies with possible goodput objectives, in milliseconds."""
REJECTED = ("http_429", "http_503")
"""Failures of an overloaded server."""


def serving_figures(
    outcomes: Sequence[Outcome], percentiles: Sequence[float] = (50, 90, 95, 99), goodput: Mapping[str, float] | None = None
) -> Row:
    """Returns all figures of a run, under the field names of `--json`.

    Args:
        goodput: limits in milliseconds for some of `OBJECTIVES`.
    """
    whole = [outcome for outcome in outcomes if outcome.failure is None]
    failed = failures(outcomes)
    seconds = duration_s(outcomes)
    output = sum(outcome.answer.tokens for outcome in whole)
    prompt_tokens = complete_sum([outcome.prompt_tokens for outcome in whole])
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
        "cached_prompt_tokens": complete_sum([outcome.answer.cached_tokens for outcome in whole]),
        "output_tokens": output,
        "output_tokens_counted_by": token_count_source(whole),
        "output_tokens_per_s": per_second(output, seconds),
        "total_tokens_per_s": None if prompt_tokens is None else per_second(output + prompt_tokens, seconds),
        "tokens_per_chunk": tokens_per_chunk(whole),
        "peak_concurrency": peak_concurrency(outcomes),
        "speculative_decoding": speculative_decoding(whole),
        **latency_figures(outcomes, percentiles),
    }


def duration_s(outcomes: Sequence[Outcome]) -> float:
    """Returns the time from sending the first request to the last response's end or failure; 0 without requests."""
    if not outcomes:
        return 0.0
    return max(outcome.end_s for outcome in outcomes) - min(outcome.sent_s for outcome in outcomes)


def complete_sum(counts: Sequence[int | None]) -> int | None:
    """Returns the sum of counts; None if one of them is None."""
    numbers = [count for count in counts if count is not None]
    return sum(numbers) if len(numbers) == len(counts) else None


def per_second(count: float, seconds: float) -> float | None:
    return count / seconds if seconds > 0 else None


def latencies(outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    """Returns the values of each latency in seconds: `held` and `slip` of all requests, the others of completed requests."""
    whole = [outcome for outcome in outcomes if outcome.failure is None]
    shares = [outcome.answer.token_gaps_s for outcome in whole]
    per_token = [gap for share in shares if share is not None for gap in share]
    return {
        "ttft": not_none([outcome.ttft_s for outcome in whole]),
        "tpot": not_none([outcome.answer.seconds_per_token for outcome in whole]),
        "itl": [gap for outcome in whole for gap in outcome.answer.gaps_s],
        "token_itl": [] if None in shares else per_token,
        "e2e": [outcome.e2e_s for outcome in whole],
        "held": [outcome.held_s for outcome in outcomes],
        "slip": [outcome.slip_s for outcome in outcomes],
    }


def not_none(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def latency_figures(outcomes: Sequence[Outcome], percentiles: Sequence[float]) -> dict[str, float | None]:
    """Returns mean and percentiles in milliseconds, such as `ttft_mean_ms` and `ttft_p99_ms`; None without values."""
    figures: dict[str, float | None] = {}
    for name, values in latencies(outcomes).items():
        average = mean(values)
        figures[f"{name}_mean_ms"] = None if average is None else 1000 * average
        for percent in percentiles:
            figures[f"{name}_p{percent:g}_ms"] = 1000 * percentile(values, percent) if values else None
    return figures


def percentile(values: Sequence[float], percent: float) -> float:
    """Returns the percentile with linear interpolation (NumPy's default, as in vLLM's benchmark)."""
    return float(np.percentile(values, percent))


def meets(outcome: Outcome, goodput: Mapping[str, float]) -> bool:
    """Returns True if a request meets all objectives. A response in a single chunk has no TPOT and meets any TPOT limit."""
    latency = {"ttft": outcome.ttft_s, "tpot": outcome.answer.seconds_per_token, "e2e": outcome.e2e_s}
    return all(1000 * (latency[name] or 0.0) <= most for name, most in goodput.items())


def token_count_source(outcomes: Sequence[Outcome]) -> str | None:
    """Returns the source of the output token counts: "usage", "chunks" (without usage), or "both"."""
    sources = {"usage" if outcome.answer.counted_by_usage else "chunks" for outcome in outcomes}
    return None if not sources else sources.pop() if len(sources) == 1 else "both"


def tokens_per_chunk(outcomes: Sequence[Outcome]) -> float | None:
    """Returns all tokens over all chunks with tokens, for responses with usage; None without any."""
    counted = [outcome.answer for outcome in outcomes if outcome.answer.counted_by_usage and outcome.answer.chunks]
    chunks = sum(len(answer.chunks) for answer in counted)
    return sum(answer.tokens for answer in counted) / chunks if chunks else None


def peak_concurrency(outcomes: Sequence[Outcome]) -> int:
    """Returns the maximum number of concurrent requests. A request that ends as another starts does not overlap with it."""
    steps = sorted(step for outcome in outcomes for step in ((outcome.sent_s, 1), (outcome.end_s, -1)))
    return int(np.cumsum([0, *(step for _, step in steps)]).max())


def speculative_decoding(outcomes: Sequence[Outcome]) -> Row | None:
    """Sums the server's acceptance figures over all rounds of all responses that have them; None without any.

    The fields are vLLM's (`docs/features/speculative_decoding/acceptance_metrics.md`). `requests` counts these responses.
    """
    records = [outcome.answer.speculative for outcome in outcomes if outcome.answer.speculative is not None]
    if not records:
        return None
    counts = {name: sum(each[name] for each in records) for name in COUNTS}
    steps, accepted, drafted = counts.values()
    return {
        "mean_acceptance_length": 1 + accepted / steps if steps else 1.0,
        "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
        "acceptance_histogram": summed([each.get("acceptance_histogram") for each in records]),
        **counts,
        "requests": len(records),
    }


def summed(histograms: Sequence[Any]) -> list[int] | None:
    """Sums histograms element by element, padding shorter ones with 0; None if one is no list of counts."""
    if not all(isinstance(each, list) and all(type(n) is int and n >= 0 for n in each) for each in histograms):
        return None
    return [sum(counts) for counts in zip_longest(*histograms, fillvalue=0)]


def request_rows(outcomes: Sequence[Outcome]) -> list[Row]:
    """Returns a record for each request, for `--detailed`."""
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
