"""The definitions of figures of drafts and rounds, on results made by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm.support import result
from tilewright.llm.acceptance import (
    acceptance_by_position,
    distinct_ngram_ratio,
    mean_distinct_ngram_ratio,
    speculative_decoding,
    tau_by_position,
    tau_by_response,
    tau_published,
    tokens_per_round,
)


def test_distinct_ngrams_tell_a_loop_from_a_text():
    assert distinct_ngram_ratio(range(50)) == 1
    assert distinct_ngram_ratio([7] * 100) == pytest.approx(1 / 97)
    assert distinct_ngram_ratio([1, 2, 3] * 50) == pytest.approx(3 / 147)
    assert distinct_ngram_ratio([1, 2, 1, 2, 1], n=2) == 2 / 4
    assert distinct_ngram_ratio([1, 2, 3]) == 1, "shorter than one 4-gram"


def test_distinct_ngrams_are_averaged_over_results():
    results = [result(tokens=list(range(10))), result(tokens=[7] * 13)]
    assert mean_distinct_ngram_ratio(results) == pytest.approx((1 + 1 / 10) / 2)


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
