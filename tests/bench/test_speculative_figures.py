"""The definitions of the figures, on results made by hand."""

import csv
import io
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.bench.speculative_figures import (
    DecodingRun,
    acceptance_by_position,
    average_rows,
    benchmark_csv,
    benchmark_rows,
    cost_per_million_tokens,
    distinct_ngram_ratio,
    first_difference,
    mean_distinct_ngram_ratio,
    speculative_decoding,
    tau_by_position,
    tau_by_response,
    tau_published,
    tokens_per_round,
)
from tilewright.runtime.output import Result


def result(*added: int, drafts: int = 3, tokens: list[int] | None = None, **known: list[int]) -> Result:
    """A result whose rounds added so many tokens each, and accepted one fewer unless `accepted` says more."""
    tokens = list(range(sum(added))) if tokens is None else tokens
    drafted, accepted = known.get("drafted", [drafts] * len(added)), known.get("accepted", [n - 1 for n in added])
    return Result("", tokens, list(added), "length", 1, drafted, accepted)


def test_distinct_ngrams_tell_a_loop_from_a_text():
    assert distinct_ngram_ratio(range(50)) == 1
    assert distinct_ngram_ratio([7] * 100) == pytest.approx(1 / 97)
    assert distinct_ngram_ratio([1, 2, 3] * 50) == pytest.approx(3 / 147)
    assert distinct_ngram_ratio([1, 2, 1, 2, 1], n=2) == 2 / 4
    assert distinct_ngram_ratio([1, 2, 3]) == 1, "shorter than one 4-gram"


def test_distinct_ngrams_are_averaged_over_results():
    results = [result(tokens=list(range(10))), result(tokens=[7] * 13)]
    assert mean_distinct_ngram_ratio(results) == pytest.approx((1 + 1 / 10) / 2)


def test_first_difference():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([1, 2, 3], [1, 2]) == 2
    assert first_difference([], [4]) == 0
    assert first_difference([], []) is None


def test_tokens_per_round_weighs_rounds_and_tau_by_response_responses():
    responses = [result(4, 4, 1), result(1, 1, 2, 1)]
    assert tokens_per_round(responses) == (9 + 5) / 7
    assert tau_by_response(responses) == (9 / 3 + 5 / 4) / 2


def test_an_end_cuts_a_round_in_tokens_per_round_alone():
    """Its last round accepted three drafts, of which two tokens were still wanted."""
    ended = result(4, 1, 2, accepted=[3, 0, 3])
    assert tokens_per_round([ended]) == 7 / 3
    assert tau_by_response([ended]) == (4 + 1 + 4) / 3


def test_the_published_count_leaves_out_the_round_that_gives_the_first_token():
    """The published code takes it from the prefill and counts no round for it, and it counts past the end."""
    short = result(1, 6, 4, accepted=[0, 5, 7], drafts=7)
    assert tau_published([short]) == (6 + 8) / 2
    assert tokens_per_round([short]) == 11 / 3
    other = result(2, 1)
    assert tau_published([short, other]) == (7 + 1) / 2, "a mean over responses"
    assert tau_published([short, result(4)]) == 7, "of one round nothing is left"
    assert tau_published([result(4)]) is None


def test_plain_steps_give_one_token_each():
    plain = result(1, 1, 1, drafts=0)
    assert tokens_per_round([plain]) == tau_by_response([plain]) == tau_published([plain]) == 1
    assert speculative_decoding([plain], 0) is None
    assert acceptance_by_position([plain], 0) == []


def test_before_the_first_round_nothing_is_known():
    assert tokens_per_round([]) is tau_by_response([]) is tau_published([result()]) is None


def test_speculative_decoding_means_what_vllm_means():
    # vLLM's documentation gives these figures for 43 steps of 3 drafts.
    accepted = [0] * 39 + [1] + [3] * 3
    figures = speculative_decoding([result(*(n + 1 for n in accepted))], 3)
    assert figures == {
        "mean_acceptance_length": pytest.approx(1.2325581395348837),
        "draft_acceptance_rate": pytest.approx(0.07751937984496124),
        "acceptance_histogram": [39, 1, 0, 3],
        "acceptance_histogram_by_draft_length": {"3": [39, 1, 0, 3]},
        "num_spec_steps": 43,
        "num_accepted_draft_tokens": 10,
        "num_draft_tokens": 129,
        "num_spec_tokens": 3,
    }


def test_rounds_that_propose_nothing_are_steps_and_no_speculation():
    responses = [result(3, 1, 1, 1, drafted=[3, 0, 0, 2])]
    figures = speculative_decoding(responses, 3)
    assert figures is not None
    assert figures["acceptance_histogram"] == [1, 0, 1, 0]
    assert figures["acceptance_histogram_by_draft_length"] == {"2": [1, 0, 0], "3": [0, 0, 1, 0]}
    assert (figures["num_spec_steps"], figures["num_draft_tokens"], figures["mean_acceptance_length"]) == (2, 5, 2)
    assert tokens_per_round(responses) == 6 / 4
    nothing = speculative_decoding([result(1, 1, drafts=0)], 3)
    assert nothing is not None
    assert (nothing["mean_acceptance_length"], nothing["draft_acceptance_rate"]) == (1, 0)
    assert nothing["acceptance_histogram"] == [0, 0, 0, 0]


def test_acceptance_by_position():
    responses = [result(4, 1, 2, 3, 1, drafted=[3, 3, 3, 2, 0])]
    rows = acceptance_by_position(responses, 3)
    assert [row["position"] for row in rows] == [1, 2, 3]
    assert [row["accepted"] for row in rows] == [3, 2, 1]
    assert [row["rate"] for row in rows] == [3 / 4, 2 / 4, 1 / 4]
    assert [row["reached"] for row in rows] == [4, 3, 1], "the round of two drafts never reaches the third position"
    assert [row["conditional"] for row in rows] == [3 / 4, 2 / 3, 1]
    unreached = acceptance_by_position([result(1, 1, 1)], 3)[2]
    assert (unreached["rate"], unreached["conditional"]) == (0, None)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=20))
def test_histogram_positions_and_lengths_agree(accepted: list[int]):
    responses = [result(*(n + 1 for n in accepted), drafts=4)]
    figures = speculative_decoding(responses, 4)
    assert figures is not None
    rates = [row["rate"] for row in acceptance_by_position(responses, 4)]
    assert figures["mean_acceptance_length"] == pytest.approx(1 + sum(rates)) == pytest.approx(tokens_per_round(responses))
    assert rates == sorted(rates, reverse=True)
    survivors = 1.0
    for row in acceptance_by_position(responses, 4):
        survivors *= row["conditional"] or 0
        assert row["rate"] == pytest.approx(survivors)


def test_tau_against_the_position_of_the_round():
    # The rounds begin after 0, 4, 5, 9 tokens, and after 0, 2.
    responses = [result(4, 1, 4, 2, accepted=[3, 0, 3, 3]), result(2, 3)]
    assert tau_by_position(responses, (0, 4, 5)) == [
        {"from": 0, "to": 4, "rounds": 3, "tau": 3},
        {"from": 4, "to": 5, "rounds": 1, "tau": 1},
        {"from": 5, "to": None, "rounds": 2, "tau": 4},
    ]
    assert [row["from"] for row in tau_by_position(responses, (0, 3, 6, 9))] == [0, 3, 9]


def test_cost_of_a_million_tokens():
    assert cost_per_million_tokens(3.6, 1000) == pytest.approx(1)
    assert cost_per_million_tokens(2.1, 500) == pytest.approx(2.1 * 1e6 / 500 / 3600)


def both_runs(**changes: Any) -> list[DecodingRun]:
    """Plain and drafted decoding of two responses of five tokens, three times each."""
    plain = DecodingRun("mt", "none", 0, [result(1, 1, 1, 1, 1, drafts=0)] * 2, [100.0, 90.0, 200.0], [0.01, 0.02, 0.005])
    drafted = DecodingRun("mt", "dflash", 3, [result(4, 1), result(1, 3, 1)], [250.0, 270.0, 240.0], [0.025, 0.01, 0.03])
    told: Any = {"categories": ["writing", "math"]}
    return [replace(plain, **told), replace(drafted, **told, **changes)]


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
        (1, "none", 1), (1, "dflash", 2.5), (8, "none", 1), (8, "dflash", 0.5),
    ]  # fmt: skip
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
    with pytest.raises(ValueError, match="mt: expected as many responses with and without dflash, found 2 and 1"):
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
