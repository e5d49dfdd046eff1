"""The definitions of the figures, on results made by hand."""

import csv
import io
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.bench.figures import (
    Response,
    Run,
    acceptance_by_position,
    acceptance_histogram,
    average_rows,
    benchmark_rows,
    cost_per_million_tokens,
    csv_text,
    distinct_ngram_ratio,
    first_difference,
    mean_acceptance_length,
    mean_distinct_ngram_ratio,
    respond,
    speculative_decoding,
    tau,
    tau_by_position,
    tau_pooled,
    tokens_per_round,
)
from tilewright.decode.session import Result


def result(*lengths: int, tokens: list[int] | None = None) -> Result:
    """A result whose rounds settled so many tokens each."""
    tokens = list(range(sum(lengths))) if tokens is None else tokens
    return Result("", tokens, list(lengths), "length", 1)


def test_tau_is_tokens_over_rounds_of_all_results():
    assert mean_acceptance_length([result(4, 1, 2)]) == 7 / 3
    assert mean_acceptance_length([result(4, 4), result(1, 1, 1, 1)]) == 12 / 6
    assert mean_acceptance_length([result(1, 1, 1)]) == 1
    assert mean_acceptance_length([result(), result(3)]) == 3


def test_tau_before_the_first_round_is_unknown():
    assert mean_acceptance_length([result(), result()]) is None


def test_histogram_counts_accepted_drafts():
    assert acceptance_histogram([result(4, 1, 2), result(1, 4)], 4) == [2, 1, 0, 2]
    assert acceptance_histogram([result()], 3) == [0, 0, 0]


@given(st.lists(st.lists(st.integers(1, 6), max_size=8), min_size=1, max_size=4), st.integers(6, 9))
def test_histogram_and_tau_agree(rounds: list[list[int]], block_size: int):
    results = [result(*lengths) for lengths in rounds]
    counts = acceptance_histogram(results, block_size)
    assert len(counts) == block_size
    assert sum(counts) == sum(len(lengths) for lengths in rounds)
    tau = mean_acceptance_length(results)
    if tau is not None:
        assert tau == pytest.approx(sum((n + 1) * count for n, count in enumerate(counts)) / sum(counts))


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


def response(added: list[int], drafts: int = 3, category: str = "", **known: list[int]) -> Response:
    """A response that ended: of its last round only what it added is known."""
    return respond(result(*added), drafts, category, **known)


def test_a_last_round_that_an_end_may_have_cut_is_left_out():
    whole = Result("", [0] * 7, [4, 1, 2], "interrupted", 1)
    for reason in ("eos", "stop", "length"):
        ended = respond(replace(whole, finish_reason=reason), 3)
        assert ended.rounds == [(3, 3), (3, 0)]
    assert respond(whole, 3).rounds == [(3, 3), (3, 0), (3, 1)]
    full = replace(whole, tokens=[0] * 8, acceptance_lengths=[4, 4], finish_reason="eos")
    assert respond(full, 3).rounds == [(3, 3)], "a full last round too: keeping it alone would favour long rounds"


def test_a_decoder_that_says_what_it_accepted_loses_no_round():
    ended = response([4, 1, 2], accepted=[3, 0, 3])
    assert ended.rounds == [(3, 3), (3, 0), (3, 3)]
    assert tau([ended]) == (4 + 1 + 4) / 3
    assert tokens_per_round([ended]) == 7 / 3


def test_plain_steps_are_never_cut():
    plain = respond(result(1, 1, 1), 0)
    assert plain.rounds == [(0, 0)] * 3
    assert tau([plain]) == tau_pooled([plain]) == tokens_per_round([plain]) == 1
    assert speculative_decoding([plain], 0) is None
    assert acceptance_by_position([plain], 0) == []


def test_published_tau_weighs_responses_and_pooled_tau_rounds():
    responses = [response([4, 4, 1]), response([1, 1, 2, 1, 1])]
    assert tau(responses) == ((4 + 4) / 2 + (1 + 1 + 2 + 1) / 4) / 2
    assert tau_pooled(responses) == (4 + 4 + 1 + 1 + 2 + 1) / 6
    assert tokens_per_round(responses) == (9 + 6) / 8
    one_round = response([2])
    assert tau([*responses, one_round]) == tau(responses), "nothing is known of its only round"
    assert tau([one_round]) is tau_pooled([one_round]) is None
    assert tokens_per_round([]) is None


def test_speculative_decoding_means_what_vllm_means():
    # vLLM's documentation gives these figures for 43 steps of 3 drafts.
    accepted = [0] * 39 + [1] + [3] * 3
    figures = speculative_decoding([response([n + 1 for n in accepted], accepted=accepted)], 3)
    assert figures == {
        "mean_acceptance_length": pytest.approx(1.2325581395348837),
        "draft_acceptance_rate": pytest.approx(0.07751937984496124),
        "acceptance_histogram": [39, 1, 0, 3],
        "num_spec_steps": 43,
        "num_accepted_draft_tokens": 10,
        "num_draft_tokens": 129,
        "num_spec_tokens": 3,
    }


def test_rounds_that_propose_nothing_are_steps_and_no_speculation():
    responses = [response([3, 1, 1, 1], drafted=[3, 0, 0, 2], accepted=[2, 0, 0, 0])]
    figures = speculative_decoding(responses, 3)
    assert figures is not None
    assert figures["acceptance_histogram"] == [1, 0, 1, 0]
    assert (figures["num_spec_steps"], figures["num_draft_tokens"], figures["mean_acceptance_length"]) == (2, 5, 2)
    assert tau(responses) == 6 / 4
    nothing = speculative_decoding([response([1, 1], drafted=[0, 0])], 3)
    assert nothing is not None
    assert (nothing["mean_acceptance_length"], nothing["draft_acceptance_rate"]) == (1, 0)
    assert nothing["acceptance_histogram"] == [0, 0, 0, 0]


def test_acceptance_by_position():
    responses = [response([4, 1, 2, 3, 1], drafted=[3, 3, 3, 2, 0], accepted=[3, 0, 1, 2, 0])]
    rows = acceptance_by_position(responses, 3)
    assert [row["position"] for row in rows] == [1, 2, 3]
    assert [row["accepted"] for row in rows] == [3, 2, 1]
    assert [row["rate"] for row in rows] == [3 / 4, 2 / 4, 1 / 4]
    assert [row["reached"] for row in rows] == [4, 3, 1], "the round of two drafts never reaches the third position"
    assert [row["conditional"] for row in rows] == [3 / 4, 2 / 3, 1]
    unreached = acceptance_by_position([response([1, 1, 1])], 3)[2]
    assert (unreached["rate"], unreached["conditional"]) == (0, None)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=20))
def test_histogram_positions_and_lengths_agree(accepted: list[int]):
    responses = [response([n + 1 for n in accepted], 4, accepted=accepted)]
    figures = speculative_decoding(responses, 4)
    assert figures is not None
    rates = [row["rate"] for row in acceptance_by_position(responses, 4)]
    assert figures["mean_acceptance_length"] == pytest.approx(1 + sum(rates)) == pytest.approx(tau(responses))
    assert rates == sorted(rates, reverse=True)
    survivors = 1.0
    for row in acceptance_by_position(responses, 4):
        survivors *= row["conditional"] or 0
        assert row["rate"] == pytest.approx(survivors)


def test_tau_against_the_position_of_the_round():
    # The rounds begin after 0, 4, 5, 9 tokens, and after 0, 2; the last of each is left out.
    responses = [response([4, 1, 4, 2]), response([2, 3])]
    assert tau_by_position(responses, (0, 4, 5)) == [
        {"from": 0, "to": 4, "rounds": 2, "tau": 3},
        {"from": 4, "to": 5, "rounds": 1, "tau": 1},
        {"from": 5, "to": None, "rounds": 1, "tau": 4},
    ]
    assert [row["from"] for row in tau_by_position(responses, (0, 3, 6, 9))] == [0, 3]


def test_cost_of_a_million_tokens():
    assert cost_per_million_tokens(3.6, 1000) == pytest.approx(1)
    assert cost_per_million_tokens(2.1, 500) == pytest.approx(2.1 * 1e6 / 500 / 3600)


@pytest.mark.parametrize(
    "added, drafted, accepted, said",
    [
        ([2, 1], [3], [1], "as many rounds"),
        ([2, 1], [3, 3], [1, 0, 0], "as many rounds"),
        ([2, 1], [3, 3], [], "as many rounds"),
        ([2, 2], [3, 3], [1, 0], "add 3 tokens, found 4"),
        ([2, 1], [3, 3], [4, 0], "from 0 to 3 accepted drafts, found 4"),
        ([2, 1], [3, 3], [-1, 0], "found -1"),
    ],
)
def test_rounds_that_contradict_each_other_are_refused(added: list[int], drafted: list[int], accepted: list[int], said: str):
    with pytest.raises(ValueError, match=said):
        Response([1, 2, 3], added, drafted, accepted)


def both_runs(**changes: Any) -> list[Run]:
    """Plain and drafted decoding of two responses of five tokens."""
    plain = Run("mt", "none", 0, [respond(result(1, 1, 1, 1, 1), 0, name) for name in ("writing", "math")], 100.0)
    drafted = Run("mt", "dflash", 3, [response([4, 1], category="writing"), response([1, 3, 1], category="math")], 250.0)
    return [plain, replace(drafted, **changes)]


def test_rows_compare_each_run_with_the_plain_one():
    plain, drafted = benchmark_rows(both_runs(skipped=2), price_per_hour=3.6)
    shown = ["dataset", "drafter", "block_size", "responses", "skipped", "tokens", "rounds", "rounds_left_out", "speedup"]
    assert [plain[name] for name in shown] == ["mt", "none", 1, 2, 0, 10, 10, 0, 1]
    assert [drafted[name] for name in shown] == ["mt", "dflash", 4, 2, 2, 10, 5, 2, 2.5]
    assert (drafted["tau"], drafted["tau_pooled"], drafted["tokens_per_round"]) == (3, 8 / 3, 2)
    assert drafted["speculative_decoding"]["num_spec_steps"] == 3
    assert plain["speculative_decoding"] is None
    assert (drafted["cost_per_million_tokens"], plain["cost_per_million_tokens"]) == pytest.approx((4, 10))
    assert (drafted["identical"], drafted["first_differences"]) == (True, [None, None])
    assert (plain["identical"], plain["round_ms"], drafted["draft_ms"]) == (None, None, None)
    assert [(row["category"], row["responses"], row["tau"]) for row in drafted["categories"]] == [
        ("writing", 1, 4),
        ("math", 1, 2),
    ]
    assert json.loads(json.dumps(drafted)) == drafted, "plain data"


def test_rows_say_where_an_answer_differs():
    other = [replace(r, tokens=[0, 1, 9, 9, 9]) for r in both_runs()[1].responses]
    row = benchmark_rows(both_runs(responses=other))[1]
    assert (row["identical"], row["first_differences"]) == (False, [2, 2])


def test_parts_of_a_round():
    seconds = {"draft": 0.002, "verify": 0.005, "other": 0.001}
    row = benchmark_rows(both_runs(round_seconds=seconds))[1]
    assert [row[f"{part}_ms"] for part in ("draft", "verify", "other", "round")] == pytest.approx([2, 5, 1, 8])


def test_without_a_plain_run_there_is_no_speedup():
    row = benchmark_rows(both_runs()[1:])[0]
    assert (row["speedup"], row["baseline_tokens_per_s"], row["identical"]) == (None, None, None)
    assert average_rows([row]) == [{"drafter": "dflash", "datasets": 1, "speedup": None, "tau": 3}]


def test_one_category_is_the_dataset_itself():
    alike = [response([4, 1], category="writing")] * 2
    assert benchmark_rows(both_runs(responses=alike))[1]["categories"] == []


def test_runs_that_cannot_be_compared_are_refused():
    with pytest.raises(ValueError, match="one run for each dataset and drafter"):
        benchmark_rows(both_runs(drafter="none"))
    with pytest.raises(ValueError, match="mt: expected as many responses with and without dflash, found 2 and 1"):
        benchmark_rows(both_runs(responses=[response([4, 1])]))


def test_a_dataset_of_which_everything_was_skipped():
    row = benchmark_rows([Run("long", "dflash", 3, [], 1.0, skipped=4)])[0]
    assert (row["responses"], row["skipped"], row["tau"], row["distinct_4gram_ratio"]) == (0, 4, None, None)


def test_averages_weigh_datasets_alike():
    rows = benchmark_rows([*both_runs(), *(replace(run, dataset="other") for run in both_runs(tokens_per_s=150.0))])
    plain, drafted = average_rows(rows)
    assert plain == {"drafter": "none", "datasets": 2, "speedup": 1, "tau": 1}
    assert drafted == {"drafter": "dflash", "datasets": 2, "speedup": 2, "tau": 3}


def test_csv_has_a_line_for_each_row_and_category():
    lines = list(csv.DictReader(io.StringIO(csv_text(benchmark_rows(both_runs(dataset='a "b", c')[1:])))))
    assert [(line["dataset"], line["category"], line["tau"]) for line in lines] == [
        ('a "b", c', "", "3.0"),
        ('a "b", c', "writing", "4.0"),
        ('a "b", c', "math", "2.0"),
    ]
    assert (lines[0]["num_spec_steps"], lines[0]["tokens_per_s"], lines[0]["speedup"]) == ("3", "250.0", "")
    assert (lines[1]["drafter"], lines[1]["tokens_per_s"]) == ("dflash", "")
