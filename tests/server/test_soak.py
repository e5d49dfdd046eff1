"""The soak: its rules on made-up samples, its checks of answers, and, at length, a short one of a real server."""

import importlib
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
soak: Any = importlib.import_module("soak")
soak_load: Any = importlib.import_module("soak_load")
rules: Any = importlib.import_module("soak_verdict")

Sample = rules.Sample
Bounds = rules.Bounds
LENGTH_S = 600.0
TIMES = [2.0 * n for n in range(300)]
FEW = st.lists(st.tuples(st.floats(0, LENGTH_S), st.floats(-1e6, 1e6)), max_size=40)


def broken(checks: list[Any]) -> set[str]:
    return {check.name for check in checks if not check.held}


def line(at: float, slope: float, times: list[float] = TIMES) -> list[Any]:
    return [Sample(t, at + slope * t) for t in times]


@given(st.floats(-100, 100), st.floats(-10, 10), st.lists(st.tuples(st.integers(0, 39), st.floats(-1e4, 1e4)), max_size=8))
def test_a_slope_is_found_whatever_a_fifth_of_the_samples_say(at: float, slope: float, off: list[tuple[int, float]]):
    samples = line(at, slope, TIMES[:40])
    assert rules.theil_sen(samples) == pytest.approx(slope, abs=1e-6)
    for place, value in off:
        samples[place] = Sample(samples[place].at_s, value)
    # 32 of 40 are left, and thus more than half of all pairs.
    assert rules.theil_sen(samples) == pytest.approx(slope, abs=1e-6)


@given(FEW)
def test_quarters_hold_each_sample_once(found: list[tuple[float, float]]):
    samples = [Sample(*each) for each in found if each[0] < LENGTH_S]
    quarters = [rules.quarter(samples, number, LENGTH_S) for number in range(rules.QUARTERS)]
    assert sorted(each for part in quarters for each in part) == sorted(samples)
    for part, middle in zip(quarters, rules.quarter_medians(samples, LENGTH_S), strict=True):
        values = [each.value for each in part]
        assert (middle is None) == (not values)
        assert middle is None or min(values) <= middle <= max(values)


@given(st.lists(st.floats(-1, 1), min_size=300, max_size=300), st.floats(100, 2000), st.floats(0, 300))
def test_memory_that_grows_at_first_and_then_only_scatters_is_flat(noise: list[float], at: float, warm: float):
    samples = [Sample(t, at + min(t, 140) / 140 * warm + 0.05 * off) for t, off in zip(TIMES, noise, strict=True)]
    assert not broken(rules.memory_checks(samples, LENGTH_S, Bounds()))


@given(st.lists(st.floats(-1, 1), min_size=300, max_size=300), st.floats(0.8, 50))
def test_memory_that_leaks_is_not_flat(noise: list[float], mb_per_min: float):
    samples = [Sample(t, 1000 + mb_per_min / 60 * t + 0.3 * off) for t, off in zip(TIMES, noise, strict=True)]
    assert "memory slope, second half" in broken(rules.memory_checks(samples, LENGTH_S, Bounds()))


def test_memory_that_jumps_between_quarters_is_not_flat():
    jumped = [Sample(t, 1000 + (100 if t >= 440 else 0)) for t in TIMES]
    assert "memory, last quarter / second" in broken(rules.memory_checks(jumped, LENGTH_S, Bounds()))
    assert broken(rules.memory_checks([], LENGTH_S, Bounds())) == {"memory slope, second half", "memory, last quarter / second"}


@given(st.floats(0.001, 1), st.floats(0.1, 10))
def test_latency_may_be_twice_what_it_was(second_s: float, ratio: float):
    samples = [Sample(t, second_s * (ratio if t >= 450 else 1)) for t in TIMES]
    bounds = replace(Bounds(), latency_slack_s=0.0)
    assert rules.latency_check("x", samples, LENGTH_S, bounds).held == (second_s * ratio <= second_s * bounds.latency_ratio)


def test_latency_without_samples_is_not_stable():
    assert not rules.latency_check("x", line(1, 0)[:200], LENGTH_S, Bounds()).held


def test_a_traceback_in_standard_error_is_seen():
    assert rules.lines_check("").held
    assert rules.lines_check("Invalid HTTP request received.\n").held
    check = rules.lines_check("fine\nTraceback (most recent call last):\n  File\nValueError: no\n")
    assert (check.held, check.found) == (False, "Traceback (most recent call last):")


METRICS = {
    "vllm:num_requests_running": 0.0,
    "vllm:num_requests_waiting": 0.0,
    "vllm:kv_cache_usage_perc": 0.0,
    "tilewright_waiting_tokens": 0.0,
    'tilewright_xla_compilations_total{phase="serving"}': 0.0,
    'vllm:request_success_total{finished_reason="stop"}': 7.0,
    'vllm:request_success_total{finished_reason="length"}': 5.0,
    'vllm:request_success_total{finished_reason="error"}': 0.0,
    'vllm:request_success_total{finished_reason="abort"}': 3.0,
    "vllm:num_preemptions_total": 1.0,
    "vllm:prefix_cache_hits_total": 16.0,
    "vllm:spec_decode_num_accepted_tokens_total": 9.0,
}


def judged(metrics: dict[str, float], change: Callable[[Any, Any], None] = lambda load, samples: None) -> set[str]:
    """The rules that a run breaks which is right but for these metrics, or this change."""
    load = soak_load.Load("http://127.0.0.1:1", soak_load.Limits("demo", 512, 32, 1000), 0)
    load.counts.update({"turned away": 1, "refused": 1})
    load.finished = 10
    load.abandoned = 4
    load.ttft = [(t, 0.1) for t in TIMES]
    load.tpot = [(t, 0.01) for t in TIMES]
    samples = soak.Samples([(t, 1000.0, 900.0, 20, 12, 0.01, 0.001, 1, 0, 0.5, 1.0) for t in TIMES], METRICS | metrics)
    change(load, samples)
    return broken(soak.verdict(load, samples, LENGTH_S, 0, "", Bounds()))


@pytest.mark.parametrize(
    ("metric", "value", "rule"),
    [
        ("vllm:kv_cache_usage_perc", 0.02, "pages used at the end"),
        ("vllm:num_requests_running", 1.0, "running and waiting at the end"),
        ("tilewright_waiting_tokens", 3.0, "prompt tokens waiting at the end"),
        ('tilewright_xla_compilations_total{phase="serving"}', 1.0, "compilations while serving"),
        ('vllm:request_success_total{finished_reason="error"}', 1.0, "requests that failed in the engine"),
        ('vllm:request_success_total{finished_reason="stop"}', 4.0, "requests that succeeded"),
        ('vllm:request_success_total{finished_reason="stop"}', 10.0, "requests that succeeded"),
        ("vllm:num_preemptions_total", 0.0, "covered: preemptions"),
    ],
)
def test_what_is_left_behind_breaks_its_rule(metric: str, value: float, rule: str):
    assert judged({}) == set()
    assert judged({metric: value}) == {rule}


def test_a_server_that_has_gone_breaks_all_rules_about_what_it_says():
    def gone(load: Any, samples: Any) -> None:
        samples.metrics.clear()

    assert len(judged({}, gone)) == 10


def test_what_clients_and_samples_found_breaks_its_rule():
    def wrong(load: Any, samples: Any) -> None:
        load.wrong = 1
        samples.unhealthy = 1
        samples.rows[7] = (*samples.rows[7][:5], 9.0, *samples.rows[7][6:])

    assert judged({}, wrong) == {"wrong answers", "health checks that failed", "oldest step"}


def test_metrics_are_read_by_name_and_label():
    text = '# HELP a b\na{model_name="d"} 2.0\nb_total{model_name="d",phase="warm"} 3.0\nc{phase="x",model_name="d"} 1e3\n'
    assert soak_load.metrics_of(text) == {"a": 2.0, 'b_total{phase="warm"}': 3.0, 'c{phase="x"}': 1000.0}


PROMPT = soak_load.Text("ab", [1, 2])
BODY = {"prompt": "ab", "temperature": 0, "max_tokens": 3, "n": 2, "logprobs": 0, "stop": ["#"]}


def answer(**changes: Any) -> dict[str, Any]:
    """A body that is right for `BODY` but for what is changed in its first choice, or in its usage."""
    usage = {"prompt_tokens": 2, "completion_tokens": 6, "total_tokens": 8} | changes.pop("usage", {})
    right = {"text": "xyz", "finish_reason": "length", "logprobs": {"token_logprobs": [-1.0, -2.0, -3.0]}}
    return {"choices": [{"index": 0, **right, **changes}, {"index": 1, **right}], "usage": usage}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"finish_reason": "abort"}, "finish reason abort"),
        ({"text": "x#z"}, "a stop string in"),
        ({"text": "xyw"}, "greedy choices differ"),
        ({"logprobs": {"token_logprobs": [-1.0]}}, "4 log-probabilities for 6 tokens"),
        ({"usage": {"prompt_tokens": 3}}, "3 prompt tokens, not 2"),
        ({"usage": {"total_tokens": 9}}, "no sum"),
        ({"usage": {"completion_tokens": 5, "total_tokens": 7}}, "5 tokens, ended by a length of 6"),
    ],
)
def test_a_wrong_answer_is_seen(changes: dict[str, Any], problem: str | None):
    wanted = soak_load.Wanted(soak_load.COMPLETIONS, BODY, (PROMPT,))
    found = soak_load.Answer()
    found.take(answer(**changes))
    if problem is None:
        soak_load.check_answer(wanted, found)
    else:
        with pytest.raises(soak_load.Wrong, match=problem):
            soak_load.check_answer(wanted, found)


def test_a_503_is_right_only_while_there_is_a_burst():
    load = soak_load.Load("http://127.0.0.1:1", soak_load.Limits("demo", 512, 32, 1000), 0)
    full = {"error": {"code": "server_overloaded"}}
    with pytest.raises(soak_load.Wrong, match="without a burst"):
        load.check_full(5.0, {"retry-after": "1"}, full)
    load.bursts = 1
    load.check_full(5.0, {"retry-after": "1"}, full)
    with pytest.raises(soak_load.Wrong, match="Retry-After"):
        load.check_full(5.0, {}, full)
    with pytest.raises(soak_load.Wrong, match="server_stopping"):
        load.check_full(5.0, {"retry-after": "1"}, {"error": {"code": "server_stopping"}})


@pytest.mark.slow(seconds=100)
def test_a_short_soak_of_a_real_server_holds(monkeypatch: pytest.MonkeyPatch):
    """Latencies of so short a time on a busy machine say nothing, and memory little; all else is checked in full."""
    monkeypatch.setenv("TILEWRIGHT_COMPILE_CACHE", "0")
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    bounds = Bounds(slope_mb_per_min=60, memory_ratio=1.1, step_age_s=20)
    settings = soak.Settings(minutes=0.75, clients=4, sample_s=0.5, canary_s=0.1, burst_s=15, bounds=bounds)
    figures = soak.run(settings, Console(quiet=True))
    assert figures["problems"] == []
    assert [check for check in figures["checks"] if not check["held"] and not check["name"].startswith("canaries' time")] == []
    # Nine of them had their first answers alone.
    assert figures["counts"]["canaries"] > 9
    assert {"whole", "streamed", "gone early", "gone midway", "bursts"} <= set(figures["counts"])
