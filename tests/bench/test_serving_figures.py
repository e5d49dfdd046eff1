"""The figures of a run, by hand and against plain definitions."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.bench.answer import StreamedAnswer, StreamedChunk
from tilewright.bench.serving import Failure, Outcome
from tilewright.bench.serving_figures import (
    latencies,
    meets,
    peak_concurrency,
    percentile,
    request_rows,
    serving_figures,
    speculative_decoding,
    summed,
)
from tilewright.bench.workload import PlannedRequest
from tilewright.metrics.serving import LATENCIES

NAMES = [latency.name for latency in LATENCIES]


def outcome(
    sent: float,
    chunks: list[tuple[float, int | None]],
    end: float,
    *,
    due: float | None = None,
    held: float = 0.0,
    usage: int | None = None,
    prompt: int | None = None,
    failure: str | None = None,
    drafts: dict[str, Any] | None = None,
) -> Outcome:
    made = [StreamedChunk(*chunk) for chunk in chunks]
    answer = StreamedAnswer(made, made[0].at_s if made else None, prompt, usage, drafts)
    failed = None if failure is None else Failure(failure, f"{failure} happened")
    return Outcome(PlannedRequest(0, sent, "a prompt", 9), sent if due is None else due, held, sent, end, answer, failed)


RUN = [
    outcome(1.0, [(1.5, 2), (2.0, 2), (2.5, 4)], 3.0, due=0.25, held=0.5, usage=8, prompt=10),
    outcome(2.0, [(4.0, 1), (5.0, 2)], 5.0, usage=3, prompt=20),
    outcome(2.5, [(2.75, 1)], 2.75, failure="http_503"),
    outcome(4.0, [], 4.0, failure="timeout"),
    outcome(4.5, [], 4.75, failure="http_503"),
]


def test_all_figures_of_a_run():
    figures = serving_figures(RUN, (0, 50, 100), {"ttft": 500, "tpot": 200})
    expected = {
        "requests": 5,
        "completed": 2,
        "failed": 3,
        "rejected": 2,
        "failures": [
            {"kind": "http_503", "requests": 2, "first_message": "http_503 happened"},
            {"kind": "timeout", "requests": 1, "first_message": "timeout happened"},
        ],
        "duration_s": 4.0,
        "requests_per_s": 0.5,
        "goodput_requests_per_s": 0.25,
        "requests_within_goodput": 1,
        "prompt_tokens": 30,
        "cached_prompt_tokens": None,
        "output_tokens": 11,
        "output_tokens_counted_by": "usage",
        "output_tokens_per_s": 2.75,
        "total_tokens_per_s": 10.25,
        "tokens_per_chunk": 11 / 5,
        "peak_concurrency": 3,
        "speculative_decoding": None,
    }
    assert {name: figures[name] for name in expected} == expected
    middle = {name: figures[f"{name}_p50_ms"] for name in NAMES}
    tpot = (1000 / 7 + 500) / 2
    assert middle == pytest.approx(
        {"ttft": 1250, "tpot": tpot, "itl": 500, "token_itl": 187.5, "e2e": 2500, "held": 0, "slip": 0}
    )
    assert figures["itl_mean_ms"] == pytest.approx(2000 / 3)
    assert figures["token_itl_mean_ms"] == pytest.approx((2 * 250 + 4 * 125 + 2 * 500) / 8)
    assert (figures["held_p100_ms"], figures["slip_p100_ms"], figures["e2e_p0_ms"]) == (500, 250, 2000)
    assert set(figures) == {
        *expected,
        *(f"{name}_{column}_ms" for name in NAMES for column in ("mean", "p0", "p50", "p100")),
    }


def test_prompts_in_the_prefix_cache():
    cached = [
        replace(each, answer=replace(each.answer, cached_tokens=tokens)) for each, tokens in zip(RUN[:2], (6, 0), strict=True)
    ]
    assert serving_figures(cached)["cached_prompt_tokens"] == 6
    assert serving_figures([cached[0], RUN[1]])["cached_prompt_tokens"] is None


def test_nothing_completed():
    figures = serving_figures(RUN[2:], (99.9,), {"e2e": 1})
    assert (figures["completed"], figures["requests_per_s"], figures["goodput_requests_per_s"]) == (0, 0, 0)
    assert figures["ttft_p99.9_ms"] is figures["tokens_per_chunk"] is figures["output_tokens_counted_by"] is None
    assert figures["slip_p99.9_ms"] == 0


def test_no_time_passed():
    figures = serving_figures([outcome(1.0, [(1.0, 1)], 1.0, usage=1, prompt=1)])
    assert (figures["completed"], figures["duration_s"]) == (1, 0)
    assert figures["requests_per_s"] is figures["output_tokens_per_s"] is figures["goodput_requests_per_s"] is None


def test_what_the_server_does_not_say_is_not_made_up():
    quiet = outcome(0.0, [(1.0, None), (2.0, None)], 2.0)
    figures = serving_figures([*RUN[:2], quiet])
    assert figures["prompt_tokens"] is figures["total_tokens_per_s"] is figures["token_itl_p50_ms"] is None
    assert (figures["output_tokens"], figures["output_tokens_counted_by"]) == (13, "both")
    assert figures["tokens_per_chunk"] == 11 / 5
    assert serving_figures([quiet])["output_tokens_counted_by"] == "chunks"


def test_the_length_of_a_prompt_of_ids_is_known():
    ids = Outcome(PlannedRequest(0, 0.0, np.arange(5), 1), 0.0)
    assert ids.prompt_tokens == 5
    ids.answer.prompt_tokens = 6
    assert ids.prompt_tokens == 6


VALUES = st.lists(st.floats(0, 1e6), min_size=1, max_size=40)


@given(VALUES, st.floats(0, 100))
def test_percentiles(values: list[float], percent: float):
    """It stays between the two nearest ranks."""
    found = percentile(values, percent)
    ordered = sorted(values)
    place = percent / 100 * (len(values) - 1)
    low = ordered[int(np.floor(place + 1e-9))]
    high = ordered[int(np.ceil(place - 1e-9))]
    assert min(low, high) - 1e-6 <= found <= max(low, high) + 1e-6
    assert percentile(values, 0) == ordered[0]
    assert percentile(values, 100) == ordered[-1]
    assert percentile([7.0], percent) == 7


TIMES = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), st.integers(0, 20), st.integers(1, 9)), max_size=12)


@given(TIMES, st.integers(0, 60_000), st.integers(0, 60_000))
def test_goodput_counts_what_is_fast_enough(times: list[tuple[int, int, int, int]], ttft: int, e2e: int):
    run = [outcome(a, [(a + b, n)], a + b + c, usage=n) for a, b, c, n in times]
    figures = serving_figures(run, (50,), {"ttft": ttft, "e2e": e2e})
    expected = sum(1000 * b <= ttft and 1000 * (b + c) <= e2e for _, b, c, _ in times)
    assert figures["requests_within_goodput"] == expected
    if figures["duration_s"]:
        assert figures["goodput_requests_per_s"] == expected / figures["duration_s"]


@given(TIMES)
def test_peak_concurrency(times: list[tuple[int, int, int, int]]):
    run = [outcome(a, [], a + b, failure="timeout") for a, b, _, _ in times]
    most = max((sum(each.sent_s <= at < each.end_s for each in run) for at in range(101)), default=0)
    assert peak_concurrency(run) == most


def test_one_that_came_at_once_meets_any_tpot():
    assert meets(outcome(0.0, [(1.0, 5)], 1.0, usage=5), {"tpot": 0})
    assert not meets(RUN[0], {"tpot": 142})
    assert meets(RUN[0], {"tpot": 143, "ttft": 500, "e2e": 2000})


def test_drafts_of_all_answers():
    def drafts(steps: int, accepted: int, drafted: int, histogram: Any) -> dict[str, Any]:
        counts = {"num_spec_steps": steps, "num_accepted_draft_tokens": accepted, "num_draft_tokens": drafted}
        return {**counts, "acceptance_histogram": histogram}

    drafts_of_answers = [drafts(4, 6, 12, [1, 1, 1, 1]), drafts(1, 0, 2, [1, 0, 0]), None]
    run = [outcome(0.0, [(1.0, 1)], 1.0, drafts=each) for each in drafts_of_answers]
    assert (
        serving_figures(run)["speculative_decoding"]
        == speculative_decoding(run)
        == {
            "mean_acceptance_length": 1 + 6 / 5,
            "draft_acceptance_rate": 6 / 14,
            "acceptance_histogram": [2, 1, 1, 1],
            "num_spec_steps": 5,
            "num_accepted_draft_tokens": 6,
            "num_draft_tokens": 14,
            "requests": 2,
        }
    )
    nothing = speculative_decoding([outcome(0.0, [(1.0, 1)], 1.0, drafts=drafts(0, 0, 0, None))])
    assert nothing is not None
    assert (nothing["mean_acceptance_length"], nothing["draft_acceptance_rate"]) == (1.0, 0.0)
    assert nothing["acceptance_histogram"] is None


@pytest.mark.parametrize("histograms", [[[1], None], [[1, -1]], [[1.5]], [{"0": 1}]])
def test_what_is_no_histogram_is_not_summed(histograms: list[Any]):
    assert summed(histograms) is None


def test_a_record_for_each_request():
    rows = request_rows(RUN)
    assert [row["failure"] for row in rows] == [None, None, "http_503", "timeout", "http_503"]
    first = dict(rows[0])
    assert first.pop("tpot_ms") == pytest.approx(1000 / 7)
    assert first == {
        "number": 0,
        "due_s": 0.25,
        "held_s": 0.5,
        "sent_s": 1.0,
        "first_s": 1.5,
        "end_s": 3.0,
        "prompt_tokens": 10,
        "output_tokens": 8,
        "chunks": 3,
        "finish_reason": None,
        "failure": None,
        "message": None,
    }
    assert (rows[3]["first_s"], rows[3]["message"]) == (None, "timeout happened")


def test_latencies_of_failures_are_left_out():
    found = latencies(RUN[2:])
    assert {name for name, values in found.items() if values} == {"held", "slip"}
