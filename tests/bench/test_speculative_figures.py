"""The definitions of the figures, on results made by hand."""

import csv
import io
import json
from dataclasses import replace
from typing import Any

import pytest

from llm.support import result
from tilewright.bench.speculative_figures import (
    DecodingRun,
    average_rows,
    benchmark_csv,
    benchmark_rows,
    cost_per_million_tokens,
    first_difference,
)


def test_first_difference():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([1, 2, 3], [1, 2]) == 2
    assert first_difference([], [4]) == 0
    assert first_difference([], []) is None


def test_cost_of_a_million_tokens():
    assert cost_per_million_tokens(3.6, 1000) == pytest.approx(1)
    assert cost_per_million_tokens(2.1, 500) == pytest.approx(2.1 * 1e6 / 500 / 3600)


def both_runs(**changes: Any) -> list[DecodingRun]:
    """Plain and drafted decoding of two responses of five tokens, three times each."""
    plain = DecodingRun("mt", "none", 0, [result(1, 1, 1, 1, 1, drafts=0)] * 2, [100.0, 90.0, 200.0], [0.01, 0.02, 0.005])
    drafted = DecodingRun("mt", "dflash", 3, [result(4, 1), result(1, 3, 1)], [250.0, 270.0, 240.0], [0.025, 0.01, 0.03])
    categories: Any = {"categories": ["writing", "math"]}
    return [replace(plain, **categories), replace(drafted, **categories, **changes)]


def test_rows_compare_each_run_with_the_plain_one():
    plain, drafted = benchmark_rows(both_runs(skipped=2), price_per_hour=3.6)
    shown = ["dataset", "drafter", "block_size", "responses", "skipped", "tokens", "rounds", "speedup"]
    assert [plain[name] for name in shown] == ["mt", "none", 1, 2, 0, 10, 10, 1]
    assert [drafted[name] for name in shown] == ["mt", "dflash", 4, 2, 2, 10, 5, 2.5]
    assert (drafted["tokens_per_s_range"], drafted["baseline_tokens_per_s_range"]) == ((240, 270), (90, 200))
    assert drafted["speedup_range"] == (1.2, 3), "of the quotients within one repetition"
    assert (drafted["mean_round_ms"], drafted["round_cost_steps"]) == (25, 2.5)
    means = (drafted["tokens_per_round"], drafted["tau_by_response"], drafted["tau_published"])
    assert means == (2, (5 / 2 + 5 / 3) / 2, (1 + 2) / 2)
    assert drafted["speculative_decoding"]["num_spec_steps"] == 5
    assert plain["speculative_decoding"] is None
    assert (drafted["cost_per_million_tokens"], plain["cost_per_million_tokens"]) == pytest.approx((4, 10))
    assert (drafted["identical"], drafted["first_differences"]) == (True, [None, None])
    assert (plain["identical"], plain["round_ms"], drafted["draft_ms"]) == (None, None, None)
    assert [(row["category"], row["responses"], row["tokens_per_round"]) for row in drafted["categories"]] == [
        ("writing", 1, 5 / 2),
        ("math", 1, 5 / 3),
    ]
    assert json.loads(json.dumps(drafted)) == {**drafted, **{k: list(v) for k, v in drafted.items() if k.endswith("_range")}}


def test_a_baseline_is_of_the_same_batch_size():
    plain, drafted = both_runs()
    wide = [replace(plain, batch_size=8, tokens_per_s=[500.0] * 3), replace(drafted, batch_size=8)]
    rows = benchmark_rows([plain, drafted, *wide])
    assert [(row["batch_size"], row["drafter"], row["speedup"]) for row in rows] == [
        (1, "none", 1),
        (1, "dflash", 2.5),
        (8, "none", 1),
        (8, "dflash", 0.5),
    ]
    averages = [(row["batch_size"], row["drafter"], row["speedup"]) for row in average_rows(rows)]
    assert averages == [(1, "none", 1), (1, "dflash", 2.5), (8, "none", 1), (8, "dflash", 0.5)]


def test_rows_say_where_an_answer_differs():
    other = [replace(r, tokens=[0, 1, 9, 9, 9]) for r in both_runs()[1].responses]
    row = benchmark_rows(both_runs(responses=other))[1]
    assert (row["identical"], row["first_differences"]) == (False, [2, 2])


def test_parts_of_a_round():
    """A difference of times may be below 0, and is told as it is."""
    seconds = {"draft": 0.002, "verify": 0.005, "other": -0.001}
    row = benchmark_rows(both_runs(part_seconds=seconds))[1]
    assert [row[f"{part}_ms"] for part in ("draft", "verify", "other", "round")] == pytest.approx([2, 5, -1, 6])


def test_without_a_plain_run_there_is_no_speedup():
    row = benchmark_rows(both_runs()[1:])[0]
    assert (row["speedup"], row["baseline_tokens_per_s"], row["identical"]) == (None, None, None)
    average = average_rows([row])[0]
    assert (average["drafter"], average["datasets"], average["speedup"], average["tokens_per_round"]) == ("dflash", 1, None, 2)


def test_one_category_is_the_dataset_itself():
    plain, drafted = both_runs()
    assert benchmark_rows([plain, replace(drafted, categories=["writing"] * 2)])[1]["categories"] == []


def test_runs_that_cannot_be_compared_are_refused():
    with pytest.raises(ValueError, match="one run for each dataset, batch size and drafter"):
        benchmark_rows(both_runs(drafter="none"))
    with pytest.raises(ValueError, match="mt: expected equal numbers of responses with and without dflash, found 2 and 1"):
        benchmark_rows(both_runs(responses=[result(4, 1)]))


def test_a_dataset_of_which_everything_was_skipped():
    row = benchmark_rows([DecodingRun("long", "dflash", 3, [], [1.0], [1.0], skipped=4)])[0]
    assert (row["responses"], row["skipped"], row["tokens_per_round"], row["distinct_4gram_ratio"]) == (0, 4, None, None)


def test_averages_weigh_datasets_alike():
    rows = benchmark_rows([*both_runs(), *(replace(run, dataset="other") for run in both_runs(tokens_per_s=[150.0] * 3))])
    plain, drafted = average_rows(rows)
    names = ("drafter", "datasets", "speedup", "tokens_per_round")
    assert [plain[name] for name in names] == ["none", 2, 1, 1]
    assert [drafted[name] for name in names] == ["dflash", 2, 2, 2]


def test_csv_has_a_line_for_each_row_and_category():
    lines = list(csv.DictReader(io.StringIO(benchmark_csv(benchmark_rows(both_runs(dataset='a "b", c')[1:])))))
    assert [(line["dataset"], line["category"], line["tokens_per_round"]) for line in lines] == [
        ('a "b", c', "", "2.0"),
        ('a "b", c', "writing", "2.5"),
        ('a "b", c', "math", str(5 / 3)),
    ]
    assert (lines[0]["num_spec_steps"], lines[0]["tokens_per_s"], lines[0]["speedup"]) == ("5", "250.0", "")
    assert (lines[1]["drafter"], lines[1]["tokens_per_s"]) == ("dflash", "")
