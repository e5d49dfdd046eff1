"""Terminal output of the serving benchmark."""

from typing import Any

import pytest

from tilewright.report.serving import latency_table, notes, summary

FACTS: dict[str, Any] = {
    "model": "a <model>",
    "url": "http://x/v1",
    "trace": None,
    "prompt_file": None,
    "records": None,
    "rate_per_s": None,
    "arrivals": "burst",
    "concurrency": 2,
    "warmup": 0,
    "context": None,
    "length_scale": None,
    "characters_per_token": None,
    "characters_per_token_source": None,
}
NAMES = ("ttft", "tpot", "itl", "token_itl", "e2e", "held", "slip")


def figures(**changes: Any) -> dict[str, Any]:
    """Those of three requests, one of which failed."""
    made: dict[str, Any] = {
        "requests": 3,
        "completed": 2,
        "failed": 1,
        "rejected": 1,
        "duration_s": 2.5,
        "requests_per_s": 0.8,
        "failures": [{"kind": "http_503", "requests": 1, "first_message": "</script> full (Retry-After: 2)"}],
        "goodput": {"ttft": 200.0},
        "goodput_requests_per_s": 0.4,
        "requests_within_goodput": 1,
        "prompt_tokens": 20,
        "cached_prompt_tokens": 0,
        "output_tokens": 1234,
        "output_tokens_counted_by": "usage",
        "output_tokens_per_s": 493.6,
        "total_tokens_per_s": 501.6,
        "tokens_per_chunk": 2.0,
        "peak_concurrency": 2,
        "warmup_failed": 0,
        "speculative_decoding": {"mean_acceptance_length": 3.25, "draft_acceptance_rate": 0.321, "num_spec_steps": 1500},
    }
    for n, name in enumerate(NAMES):
        made |= {f"{name}_{column}_ms": 1.234 * 10**n for column in ("mean", "p50", "p99.9")}
    return {**made, **changes}


def test_the_summary():
    assert summary(figures(), FACTS) == [
        "a <model> at http://x/v1: 3 requests of held-out code, sent as slots become free, at most 2 concurrent",
        "2 completed in 2.50 s, 1 failed (1 rejected by an overloaded server); peak concurrency 2",
        "  1 × http 503: </script> full (Retry-After: 2)",
        "0.80 requests/s, 493.6 output tokens/s, 501.6 tokens/s including prompts",
        "goodput: 0.40 requests/s (1 of 3 requests within TTFT 200 ms)",
        "τ 3.25: 32% of drafts accepted, in 1,500 rounds with drafts",
    ]
    bare = figures(failed=0, rejected=0, failures=[], goodput_requests_per_s=None, total_tokens_per_s=None)
    assert summary({**bare, "speculative_decoding": None}, FACTS)[1:] == [
        "2 completed in 2.50 s; peak concurrency 2",
        "0.80 requests/s, 493.6 output tokens/s",
    ]


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"concurrency": None}, "of held-out code, all at once"),
        ({"rate_per_s": 2.5, "arrivals": None}, "of held-out code, 2.5 per second (Poisson), at most 2 concurrent"),
        ({"trace": "t.csv", "arrivals": "real", "concurrency": None}, "of t.csv, at the trace's times"),
        (
            {"trace": "t.csv", "prompt_file": "p.jsonl", "arrivals": "10"},
            "of t.csv, 10 times as fast as the trace, at most 2 concurrent",
        ),
        ({"prompt_file": "p.jsonl"}, "of p.jsonl, sent as slots become free, at most 2 concurrent"),
    ],
)
def test_the_workload_in_words(facts: dict[str, Any], said: str):
    assert summary(figures(), {**FACTS, **facts})[0].endswith(said)


def test_latencies_without_values_have_no_line():
    (rows,) = latency_table(figures(), (50, 99.9)).groups.values()
    assert [row["name"] for row in rows][3:6] == ["between tokens", "end to end (E2E)", "held by --concurrency"]
    assert len(rows) == 7
    absent = {f"{name}_{column}_ms": None for name in NAMES for column in ("mean", "p50")}
    still = {f"held_{column}_ms": 0.0 for column in ("mean", "p50")}
    assert latency_table({**absent, **still}, (50,)).terminal().row_count == 0


def test_notes():
    assert notes(figures(), FACTS, 0) == []
    facts = {
        **FACTS,
        "length_scale": 0.0364,
        "context": 512,
        "characters_per_token": 3.217,
        "characters_per_token_source": "measured",
    }
    assert notes(figures(), facts, 0) == [
        "the trace's lengths are scaled by 0.0364, so that all requests fit 512 positions",
        "prompts are text cut at 3.22 characters per token (measured)",
    ]
    (again, warm, late) = notes(figures(warmup_failed=1), {**FACTS, "records": 2, "warmup": 4}, 7)
    assert again.startswith("the file's 2 records were sent more than once")
    assert warm == "the figures exclude 4 warm-up requests (1 failed)"
    assert late.startswith("this client sent 7 requests over 10 ms late")
    (cached,) = notes(figures(cached_prompt_tokens=15), FACTS, 0)
    assert cached == "75% of the prompt tokens were in the server's prefix cache"
    (chunks,) = notes(figures(output_tokens_counted_by="chunks"), FACTS, 0)
    assert "each chunk counts as one token" in chunks
    (silent,) = notes(figures(token_itl_mean_ms=None), FACTS, 0)
    assert silent == "the server sends no token counts per chunk: no time between tokens"
