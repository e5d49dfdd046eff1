"""The page of the serving benchmark: one file, all that was measured in it, and no request that cannot be."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from report.reading import Page, check_self_contained
from tilewright.report.charts import LineChart
from tilewright.report.page import asset, sentences
from tilewright.report.serving import ServingReport, distributions, latency_table, notes, summary, write_serving
from tilewright.report.tables import page_table

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


def request(number: int, **changes: Any) -> dict[str, Any]:
    made = {
        "number": number,
        "due_s": 0.5,
        "held_s": 0.1,
        "sent_s": 0.75,
        "first_s": 1.0,
        "end_s": 2.5,
        "prompt_tokens": 10,
        "output_tokens": 600,
        "chunks": 300,
        "tpot_ms": 2.5,
        "finish_reason": "length",
        "failure": None,
        "message": None,
    }
    return {**made, **changes}


REQUESTS = [request(0), request(1, held_s=0.0), request(2, first_s=None, end_s=0.75, failure="http_503", message="<full>")]


def report(**changes: Any) -> ServingReport:
    latencies = {name: [0.1, 0.2, 0.4] for name in NAMES} | {"tpot": [0.1, 0.2]}
    made = ServingReport(
        "Serving <it>", "3 requests", figures(), (50, 99.9), REQUESTS, 0.5, [0.0, 3.0, 1231.0], latencies, FACTS, ["one", "two"]
    )
    return replace(made, **changes)


def written(folder: Path, of: ServingReport) -> Page:
    write_serving(folder / "serving.html", of)
    return Page(folder / "serving.html")


def test_the_page_is_one_file_that_fetches_nothing(tmp_path: Path):
    page = written(tmp_path, report())
    check_self_contained(page)
    assert len(page.scripts) == 1
    assert len(page.named("canvas")) == 3


def test_the_data_comes_out_as_it_went_in(tmp_path: Path):
    data = written(tmp_path, report()).data()
    assert data["requests"] == REQUESTS
    assert (data["bin_s"], data["tokens_per_bin"]) == (0.5, [0.0, 3.0, 1231.0])
    assert data["figures"] == figures()
    assert data["environment"] == FACTS


def test_what_is_shown_without_scripts(tmp_path: Path):
    text = written(tmp_path, report()).text
    for shown in (
        "Serving <it>",
        "2 of 3",
        "TTFT, p50 1.23 ms",
        "TPOT, p50 12.3 ms",
        "493.6 tokens/s",
        "0.40 requests/s",
        "τ 3.25",
        "http 503",
        "</script> full (Retry-After: 2)",
        "One. Two.",
        "a <model>",
        "p99.9",
        "first token (TTFT)",
        "held by",
    ):
        assert shown in text, shown


def test_distributions_need_several_values(tmp_path: Path):
    text = written(tmp_path, report()).text
    assert "Time to first token" in text
    assert "Time per output token" not in text, "two values have no distribution"
    none = {name: [] for name in NAMES}
    assert "Distributions" not in written(tmp_path, report(latencies=none)).text


def test_without_failures_and_without_answers(tmp_path: Path):
    well = figures(failed=0, failures=[], completed=3, goodput=None, goodput_requests_per_s=None, speculative_decoding=None)
    text = written(tmp_path, report(figures=well)).text
    assert "What failed" not in text
    assert "Goodput" not in text
    absent = {f"{name}_{column}_ms": None for name in NAMES for column in ("mean", "p50", "p99.9")}
    nothing = {"completed": 0, "output_tokens_per_s": None, "output_tokens_counted_by": None, **absent}
    assert "0 of 3" in written(tmp_path, report(figures=figures(**nothing))).text


def test_the_script_finds_every_element_that_it_names(tmp_path: Path):
    page = written(tmp_path, report())
    named = set(re.findall(r'\$\("([\w-]+)"\)', asset("serving.js"))) | {"rows", "active", "rate"}
    present = {attributes.get("id") for _, attributes in page.elements}
    assert len(named) > 10
    assert named <= present


def test_the_script_reads_fields_that_are_there():
    """What it calls a request's, a request's record has."""
    read = set(re.findall(r"\br\.(\w+)", asset("serving.js")))
    assert len(read) > 8
    assert read <= set(request(0))


@pytest.mark.parametrize(
    "changes",
    [
        {"due_s": -1.0},
        {"sent_s": 0.4},
        {"first_s": 0.7},
        {"first_s": 3.0},
        {"end_s": 0.9},
        {"end_s": float("nan")},
        {"first_s": None, "end_s": 0.7},
    ],
)
def test_a_request_that_cannot_be_is_named(changes: dict[str, Any]):
    with pytest.raises(ValueError, match="request 7: expected due_s, sent_s, first_s and end_s one after the other"):
        report(requests=[REQUESTS[0], request(7, **changes)])


@pytest.mark.parametrize(("changes", "problem"), [({"requests": []}, "at least one request"), ({"bin_s": 0.0}, "above 0 s")])
def test_a_report_that_cannot_be_is_an_error(changes: dict[str, Any], problem: str):
    with pytest.raises(ValueError, match=problem):
        report(**changes)


def test_shares_of_values():
    for values, expected in (([1.0, 3.0, 4.0], [1, 2, 3, 3.5, 4]), ([5.0] * 3, [5] * 5)):
        (chart, *_) = distributions(report(latencies=dict.fromkeys(NAMES, values))).blocks
        assert isinstance(chart, LineChart)
        at = {share: milliseconds / 1000 for milliseconds, share in chart.series[0].points[1:]}
        assert [at[share] for share in (0, 0.25, 0.5, 0.75, 1)] == pytest.approx(expected)
    assert sentences(["one thing", "Another"]) == "One thing. Another."


def test_the_summary():
    assert summary(figures(), FACTS) == [
        "a <model> at http://x/v1: 3 requests of held-out code, as fast as possible, at most 2 at a time",
        "2 completed in 2.50 s, 1 failed (1 turned away as too many); at most 2 under way at once",
        "  1 × http 503: </script> full (Retry-After: 2)",
        "0.80 requests/s, 493.6 output tokens/s, 501.6 tokens/s with prompts",
        "goodput: 0.40 requests/s (1 of 3 requests within TTFT 200 ms)",
        "τ 3.25: 32% of drafts accepted, in 1,500 rounds that drafted",
    ]
    bare = figures(failed=0, rejected=0, failures=[], goodput_requests_per_s=None, total_tokens_per_s=None)
    assert summary({**bare, "speculative_decoding": None}, FACTS)[1:] == [
        "2 completed in 2.50 s; at most 2 under way at once",
        "0.80 requests/s, 493.6 output tokens/s",
    ]


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"concurrency": None}, "of held-out code, all at once"),
        ({"rate_per_s": 2.5, "arrivals": None}, "of held-out code, 2.5 a second at random, at most 2 at a time"),
        ({"trace": "t.csv", "arrivals": "real", "concurrency": None}, "of t.csv, in real time"),
        ({"trace": "t.csv", "prompt_file": "p.jsonl", "arrivals": "10"}, "of t.csv, 10 times as fast, at most 2 at a time"),
        ({"prompt_file": "p.jsonl"}, "of p.jsonl, as fast as possible, at most 2 at a time"),
    ],
)
def test_the_workload_in_words(facts: dict[str, Any], said: str):
    assert summary(figures(), {**FACTS, **facts})[0].endswith(said)


def test_latencies_without_values_have_no_line():
    (rows,) = latency_table(figures(), (50, 99.9)).groups.values()
    assert [row["name"] for row in rows][3:6] == ["between tokens", "end to end (E2E)", "held by --concurrency"]
    assert len(rows) == 7
    assert page_table(latency_table(figures(), (50,))).rows[0] == ["first token (TTFT)", "1.23", "1.23"]
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
        "lengths are the trace's times 0.0364: its longest request then fits 512 positions",
        "prompts are text cut at 3.22 characters a token (measured)",
    ]
    (again, warm, late) = notes(figures(warmup_failed=1), {**FACTS, "records": 2, "warmup": 4}, 7)
    assert again.startswith("the 2 records of the file were sent more than once")
    assert warm == "4 warm-up requests, of which 1 failed are in no figure"
    assert late.startswith("this client sent 7 requests more than 10 ms late")
    (cached,) = notes(figures(cached_prompt_tokens=15), FACTS, 0)
    assert cached == "75% of the prompts' tokens were in the server's prefix cache"
    (chunks,) = notes(figures(output_tokens_counted_by="chunks"), FACTS, 0)
    assert "each chunk counts as one token" in chunks
    (silent,) = notes(figures(token_itl_mean_ms=None), FACTS, 0)
    assert silent == "the server does not say how many tokens a chunk brings: there is no time between tokens"
