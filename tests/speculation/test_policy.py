"""Which round runs next: what is expected of each choice, what is tried, and what that may cost. No device, no model."""

import math
from collections.abc import Mapping, Sequence
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.runtime.interfaces import PLAIN, Choice
from tilewright.speculation.policy import (
    PRIOR_WEIGHT,
    ROUNDS_PER_CHOICE,
    TRIAL_ROUNDS,
    Acceptance,
    Cost,
    History,
    Policy,
    estimated,
)

WIDTHS = (2, 4, 8, 16)
WIDE = [Choice("dflash", width) for width in WIDTHS]
STEEP = {PLAIN: Cost(1.0), **{choice: Cost(0.8 + 0.35 * choice.width) for choice in WIDE}}
"""Rounds whose rows cost: a block of 16 takes as long as six and a half steps."""
FLAT = {PLAIN: Cost(1.0), **{choice: Cost(1.4) for choice in WIDE}}
"""Rounds whose rows cost nothing, as where weights come from memory."""


def run(policy: Policy, rates: Mapping[str, float], tokens: int, seed: int = 0) -> dict[Choice, int]:
    """Rounds of each choice while a row gets `tokens` tokens; each draft of a drafter is accepted with its own probability."""
    rng = np.random.default_rng(seed)
    counts = dict[Choice, int]()
    left = tokens
    while left > 0:
        choice, rounds, *_ = policy.next(min(64, -(-left // 8)))
        drafts = choice.width - 1
        agreed = rng.random((rounds, 1, drafts)) < rates.get(str(choice), rates.get(choice.drafter, 0.0))
        accepted = np.cumprod(agreed, axis=2).sum(axis=2)
        policy.observe(choice, np.full((rounds, 1), drafts), accepted, np.ones((rounds, 1), bool))
        counts[choice] = counts.get(choice, 0) + rounds
        left -= int(accepted.sum()) + rounds
    return counts


def seconds(counts: Mapping[Choice, int], costs: Mapping[Choice, Cost]) -> float:
    return sum(count * costs[choice].drafting for choice, count in counts.items())


def mostly(counts: Mapping[Choice, int]) -> Choice:
    return max(counts, key=lambda choice: counts[choice])


def expected_tokens(rate: float, width: int) -> float:
    return sum(rate**n for n in range(width))


@pytest.mark.parametrize("costs", [STEEP, FLAT], ids=["steep", "flat"])
@pytest.mark.parametrize("rate", [0.2, 0.5, 0.8, 0.95])
def test_the_fastest_width_is_found(costs: dict[Choice, Cost], rate: float):
    policy = Policy(History({"dflash": 16}), costs, costs)
    counts = run(policy, {"dflash": rate}, 4000)
    rates = {choice: expected_tokens(rate, choice.width) / cost.drafting for choice, cost in costs.items()}
    best = max(rates.values())
    assert rates[mostly(counts)] > 0.93 * best
    assert 4000 / seconds(counts, costs) > 0.9 * best


def test_a_drafter_that_is_never_right_costs_a_few_percent():
    policy = Policy(History({"dflash": 16}), STEEP, STEEP)
    counts = run(policy, {}, 4000)
    assert mostly(counts) == PLAIN
    assert 4000 / seconds(counts, STEEP) > 0.97


def test_what_one_batch_has_seen_the_next_begins_with():
    history = History({"dflash": 16})
    run(Policy(history, STEEP, STEEP), {}, 500)
    history.budget = 0.0
    assert Policy(history, STEEP, STEEP).next(64).choice == PLAIN
    run(Policy(history, STEEP, STEEP), {"dflash": 1.0}, 4000)
    history.budget = 0.0
    assert Policy(history, STEEP, STEEP).next(64).choice.width > 2


def test_a_drafter_begins_with_what_its_training_found():
    """Whatever its place among the others; positions beyond those that were measured expect what the last of them does."""
    costs = {PLAIN: Cost(1.0), Choice("ngram", 8): Cost(1.6, 1.0), Choice("dflash", 8): Cost(1.6)}
    sizes = {"ngram": 8, "dflash": 8}
    silent = History(sizes)
    good, poor = (History(sizes, {"dflash": rates, "ngram": ()}) for rates in ((0.9, 0.8, 0.7), (0.2, 0.1)))
    assert good.drafter_acceptance["dflash"].rates() == pytest.approx([0.9, 0.8, *[0.7] * 5])
    assert good.drafter_acceptance["ngram"].rates() == silent.drafter_acceptance["ngram"].rates()
    outlooks = [
        Policy(history, dict(costs), costs).outlook(costs)[Choice("dflash", 8)].tokens for history in (good, silent, poor)
    ]
    assert outlooks == sorted(outlooks, reverse=True)
    assert outlooks[0] == pytest.approx(1 + 0.9 + 0.72 * (1 - 0.7**6) / 0.3)
    assert Policy(good, dict(costs), costs).next(64).choice == Choice("dflash", 8)
    assert Policy(poor, dict(costs), costs).next(64).choice == Choice("ngram", 8)
    assert mostly(run(Policy(good, dict(costs), costs), {}, 2000)) == PLAIN  # what is seen outweighs it


def test_a_drafter_that_becomes_right_is_found():
    policy = Policy(History({"dflash": 16}), STEEP, STEEP)
    run(policy, {}, 1000)
    counts = run(policy, {"dflash": 0.95}, 6000, seed=1)
    assert mostly(counts).width >= 8
    assert 6000 / seconds(counts, STEEP) > 1.25


def test_of_several_drafters_the_better_one_drafts():
    costs = {PLAIN: Cost(1.0), Choice("a", 8): Cost(1.6), Choice("b", 8): Cost(1.6)}
    for rates in ({"a": 0.9, "b": 0.3}, {"a": 0.3, "b": 0.9}):
        counts = run(Policy(History({"a": 8, "b": 8}), costs, costs), rates, 3000)
        assert mostly(counts).drafter == max(rates, key=lambda name: rates[name])
        assert 3000 / seconds(counts, costs) > 0.85 * expected_tokens(0.9, 8) / 1.6


def test_rounds_between_two_looks():
    """An expensive dispatch runs more rounds, and no dispatch more than the caller asks for."""
    for dispatch, rounds in ((0.0, ROUNDS_PER_CHOICE), (1.0, 40)):
        policy = Policy(History({"dflash": 16}), STEEP, STEEP, dispatch)
        policy.history.drafter_acceptance["dflash"].observe(16, np.full(200, 15), np.zeros(200, int))
        assert policy.next(64)[:3] == (PLAIN, rounds, False)
        assert policy.next(3)[:3] == (PLAIN, 3, False)


def test_a_drafter_that_is_off_is_tried_within_the_budget():
    """The one that was off for longest comes first, in its best width, and its expected loss is paid from the budget."""
    costs = {PLAIN: Cost(1.0), Choice("a", 4): Cost(2.0), Choice("a", 8): Cost(4.0), Choice("b", 4): Cost(2.0)}
    history = History({"a": 8, "b": 4})
    policy = Policy(history, costs, costs)
    nothing = np.zeros((40, 1), int)
    for choice in (Choice("a", 4), Choice("b", 4)):
        policy.observe(choice, nothing + 3, nothing, nothing == 0)
    assert not policy.next(64).is_trial
    history.budget = 100.0
    assert policy.next(64)[:3] == (Choice("a", 4), TRIAL_ROUNDS, True)
    outlook = policy.outlook(costs)
    lost = TRIAL_ROUNDS * (outlook[Choice("a", 4)].seconds - outlook[Choice("a", 4)].tokens / outlook[PLAIN].rate)
    assert history.budget == pytest.approx(100.0 - lost)
    assert policy.next(64)[:3] == (Choice("b", 4), TRIAL_ROUNDS, True)


JOINED = Choice("ngram+dflash", 8)
"""A drafter in whose place n-grams draft where they find something."""


def joined(costs: Mapping[Choice, Cost], dispatch: float = 0.0) -> Policy:
    history = History({"ngram": 8, "ngram+dflash": 8}, first={"ngram+dflash": "ngram"})
    return Policy(history, costs, costs, dispatch)


def test_ngrams_in_the_place_of_a_drafter():
    """Tokens and seconds of a round are those of two kinds, which come as often as they did; of each its own figures count."""
    ngram = Choice("ngram", 8)
    policy = joined({PLAIN: Cost(1.0), ngram: Cost(1.5, 1.0), JOINED: Cost(2.0, 1.5)})
    policy.observe_counterfactual("ngram", {8: [(0, 0), (0, 0), (0, 0), (7, 3)] * 100})
    expected = policy.outlook([JOINED])[JOINED]
    assert expected.seconds == pytest.approx(0.25 * 1.5 + 0.75 * 2.0, rel=0.05), "before a round of it ran"
    # N-grams drafted in every other round, and all of those drafts were accepted; of the model's own drafts, none were.
    from_ngrams = np.arange(400)[:, None] % 2 == 0
    policy.observe(JOINED, np.full((400, 1), 7), np.where(from_ngrams, 7, 0), np.ones((400, 1), bool), None, from_ngrams)
    policy.observe_counterfactual("ngram", {8: [(0, 0), (0, 0), (0, 0), (7, 3)] * 100})
    found = policy.outlook([JOINED])[JOINED]
    assert found.seconds == pytest.approx(0.5 * 1.5 + 0.5 * 2.0, rel=0.05)
    assert found.tokens == pytest.approx(1 + 0.5 * 3, rel=0.1), "what n-grams give is the text's to say"
    assert policy.best(policy.outlook([PLAIN, ngram, JOINED])) == ngram, "its own pass gives nothing"


def test_a_batch_needs_a_pass_unless_all_of_its_rows_are_looked_up():
    policy = joined({PLAIN: Cost(1.0), JOINED: Cost(2.0, 1.0)})
    from_ngrams = np.array([[True, True], [True, False], [False, False], [True, True]] * 50)
    policy.observe(JOINED, np.full((200, 2), 7), np.zeros((200, 2), int), np.ones((200, 2), bool), None, from_ngrams)
    share = float(np.mean(from_ngrams))
    assert policy.outlook([JOINED])[JOINED].seconds == pytest.approx(2.0 - share**2, rel=0.1)


def test_only_what_is_ready_runs():
    policy = Policy(History({"dflash": 16}), FLAT, [PLAIN, WIDE[1]])
    assert set(run(policy, {"dflash": 1.0}, 400)) <= {PLAIN, WIDE[1]}
    found = policy.worthwhile(set(WIDE) - policy.ready, 1000)
    assert found is not None
    choice, saved = found
    assert choice == WIDE[3]
    assert 0 < saved < 1000 / 4 * 1.4, "at most all the time that it takes now"
    assert policy.worthwhile(set(WIDE) - policy.ready, 2000) == (choice, pytest.approx(2 * saved))
    policy.ready.add(choice)
    assert policy.worthwhile(set(WIDE) - policy.ready, 1000) is None
    with pytest.raises(ValueError, match="expected plain decoding among the choices that are ready and have a cost"):
        Policy(History({"dflash": 16}), dict(FLAT), WIDE)


def test_what_finds_nothing_costs_what_finding_nothing_costs():
    """A drafter that is idle in nine of ten rounds, whose idle rounds cost a step and whose drafts are all accepted, pays."""
    ngram = Choice("ngram", 16)
    costs = {PLAIN: Cost(1.0), ngram: Cost(6.0, 1.01)}
    policy = Policy(History({"ngram": 16}), costs, costs)
    for _ in range(100):
        drafted = np.where(np.arange(20)[:, None] % 10 == 5, 15, 0)
        policy.observe(ngram, drafted, drafted, np.ones((20, 1), bool))
    outlook = policy.outlook({ngram, PLAIN})
    assert outlook[ngram].seconds == pytest.approx(0.1 * 6 + 0.9 * 1.01, rel=0.3)
    assert outlook[ngram].tokens == pytest.approx(1 + 0.1 * 15, rel=0.35)
    assert policy.best(outlook) == ngram


def test_what_is_told_from_the_text_counts_whatever_runs():
    """A drafter whose rounds are known without running takes over as they say; a batch is idle if all of its rows are."""
    ngram = Choice("ngram", 8)
    costs = {PLAIN: Cost(1.0), ngram: Cost(3.0, 1.05)}
    policy = Policy(History({"ngram": 8}), costs, costs)
    policy.observe_counterfactual("ngram", {8: [(0, 0)] * 40})
    assert policy.next(64).choice == PLAIN
    policy.observe_counterfactual("ngram", {8: [(7, 7)] * 8})
    assert policy.next(64).choice == ngram
    nothing = np.zeros((8, 2), int)
    before = policy.outlook([ngram])[ngram].tokens
    policy.observe(ngram, nothing, nothing, nothing == 0)
    assert policy.outlook([ngram])[ngram].tokens == before, "its own rounds say nothing more"
    policy.observe_counterfactual("ngram", {8: [(0, 0)] * 8})
    alone, together = [policy.outlook([ngram])[ngram].seconds for policy.rows in (1, 8)]
    assert alone < together


def test_what_is_told_from_the_text_of_one_width_says_nothing_of_another():
    """A stretch that is repeated for long is many narrow rounds and few wide ones, by which narrow blocks would look poor."""
    narrow = Choice("ngram", 4)
    wide = Choice("ngram", 16)
    costs = {PLAIN: Cost(1.0), narrow: Cost(1.6, 1.0), wide: Cost(4.0, 1.0)}
    policy = Policy(History({"ngram": 16}), costs, costs)
    # Again and again: two drafts that are wrong at once, then 32 tokens that were said before.
    policy.observe_counterfactual("ngram", {4: ([(3, 0)] * 2 + [(3, 3)] * 8) * 20, 16: ([(15, 0)] * 2 + [(15, 15)] * 2) * 20})
    outlook = policy.outlook(costs)
    assert outlook[narrow].tokens == pytest.approx(34 / 10, rel=0.05)
    assert outlook[wide].tokens == pytest.approx(34 / 4, rel=0.05)
    later = Policy(policy.history, dict(costs), costs)
    assert later.outlook(costs)[narrow].tokens == pytest.approx(34 / 10, rel=0.1), "the next batch begins with that"


def test_what_is_found_is_told_apart_from_whether_something_is():
    """Rounds in which nothing is found do not make the drafts of the others look poor, of which a batch has seen few."""
    wide = Choice("ngram", 8)
    costs = {PLAIN: Cost(1.0), wide: Cost(2.0, 1.0)}
    history = History({"ngram": 8})
    for _ in range(10):
        Policy(history, dict(costs), costs).observe_counterfactual("ngram", {8: [*[(0, 0)] * 6, *[(7, 7)] * 4]})
    fresh = Policy(history, dict(costs), costs)
    fresh.observe_counterfactual("ngram", {8: [*[(0, 0)] * 6, (7, 7)]})
    assert fresh.outlook(costs)[wide].tokens > 1 + (1 / 7) * 7 * 0.95


def test_a_dispatch_corrects_all_widths_of_its_drafter():
    """What they cost beside each other was measured in turns; how single dispatches came out does not change it."""
    other = Choice("ngram", 8)
    policy = Policy(History({"dflash": 16, "ngram": 8}), {**STEEP, other: Cost(2.0, 1.0)}, STEEP)
    nothing = np.zeros((8, 1), int)
    for _ in range(8):
        policy.observe(PLAIN, nothing, nothing, nothing == 0, 8.0)
    policy.observe(WIDE[1], nothing, nothing, nothing == 0, 1.5 * 8 * STEEP[WIDE[1]].drafting)
    factors = [policy.cost(choice).drafting / STEEP[choice].drafting for choice in WIDE]
    assert factors == pytest.approx([factors[0]] * len(WIDE))
    plain = policy.cost(PLAIN).drafting
    assert 1.1 < factors[0] / plain < 1.3, "a part of it, and plain decoding may be what differs from what was measured"
    assert policy.cost(other) == Cost(2.0, 1.0)
    assert policy.costs == {**STEEP, other: Cost(2.0, 1.0)}, "what was measured stays"
    for _ in range(300):
        policy.observe(WIDE[1], nothing, nothing, nothing == 0, 1.5 * 8 * STEEP[WIDE[1]].drafting)
        policy.observe(PLAIN, nothing, nothing, nothing == 0, 8.0)
    found = policy.cost(WIDE[1]).drafting / policy.cost(PLAIN).drafting
    assert found == pytest.approx(1.5 * STEEP[WIDE[1]].drafting, rel=0.02), "all of it, if it goes on"


def test_rows_that_have_ended_say_nothing():
    policies = [Policy(History({"dflash": 4}), STEEP, [PLAIN, *WIDE[:2]]) for _ in range(2)]
    accepted = np.asarray([[2, 0], [3, 0], [1, 0]])
    policies[0].observe(WIDE[1], np.full((3, 2), 3), accepted, np.asarray([[True, False]] * 3))
    policies[1].observe(WIDE[1], np.full((3, 1), 3), accepted[:, :1], np.ones((3, 1), bool))
    assert policies[0].outlook(WIDE[:2]) == policies[1].outlook(WIDE[:2])


@given(st.lists(st.tuples(st.sampled_from(WIDTHS), st.lists(st.integers(-1, 15), min_size=1, max_size=6)), max_size=8))
def test_acceptance_counts_positions(rounds: Sequence[tuple[int, list[int]]]):
    """-1 stands for a round that found nothing."""
    seen = Acceptance(15)
    every = []
    idle = 0
    for width, counts in rounds:
        cut = np.asarray([min(count, width - 1) for count in counts])
        with patch("tilewright.speculation.policy.MEMORY", math.inf):
            seen.observe(width, np.where(cut < 0, 0, width - 1), np.maximum(cut, 0))
        every += [(width, count) for count in cut if count >= 0]
        idle += int(np.sum(cut < 0))
    for place in range(1, 16):
        reached = [count for width, count in every if width > place and count >= place - 1]
        assert seen.reached[place - 1] == len(reached)
        assert seen.accepted[place - 1] == sum(count >= place for count in reached)
    assert (seen.rounds, seen.idle) == (len(every) + idle, idle)


def test_positions_that_were_not_observed_are_as_expected():
    """Good first positions raise the expectation of later ones."""
    expected = (0.6, 0.9, 0.8, 0.95)
    assert Acceptance(4, expected).rates() == pytest.approx(expected)
    good = Acceptance(4, expected)
    good.observe(2, np.ones(6, int), np.ones(6, int))
    rates = good.rates()
    assert rates[0] == pytest.approx((6 + PRIOR_WEIGHT * 0.6) / (6 + PRIOR_WEIGHT))
    assert rates[1] == 1.0
    assert 0.8 < rates[2] < 0.9


def test_a_request_begins_with_the_acceptance_of_earlier_requests():
    """A drafter that was useless for the last of several requests is not off for the next one; a row counts as a share."""
    seen = Acceptance(3)
    for accepted in (3, 3, 3, 0):
        seen.begin_request(1)
        seen.observe(4, np.full(30, 3), np.full(30, accepted))
    assert seen.rates()[0] < 0.15
    seen.begin_request(4)
    assert seen.rates()[0] < 0.2, "three of four rows go on"
    seen.begin_request(1)
    assert seen.rates()[0] == pytest.approx(0.75, abs=0.1)
    seen.observe(4, np.full(30, 3), np.zeros(30, int))
    assert seen.rates()[0] < 0.15, "its own rounds count most"


def test_a_drafter_that_was_useless_for_the_last_request_drafts_for_the_next():
    costs = {PLAIN: Cost(1.0), Choice("a", 8): Cost(1.6)}
    counts = []
    for begins in (True, False):
        policy = Policy(History({"a": 8}), costs, costs)
        total = 0
        for rate in (0.9, 0.0, 0.9, 0.0, 0.9):
            if begins:
                policy.history.begin_request(1)
            total += run(policy, {"a": rate}, 96).get(Choice("a", 8), 0) * (rate > 0)
        counts.append(total)
    assert counts[0] > 1.5 * counts[1]


def test_drafters_that_never_pay_cost_next_to_nothing_in_wide_batches():
    """A trial of many rows has few rounds, and the budget is smaller."""
    costs = {PLAIN: Cost(1.0), Choice("a", 4): Cost(4.0)}
    policy = Policy(History({"a": 4}), costs, costs)
    spent = [0, 0]
    for turn in range(4000):
        choice, rounds, is_trial, _ = policy.next(4)
        policy.observe(choice, np.zeros((rounds, 8), int), np.zeros((rounds, 8), int), np.ones((rounds, 8), bool))
        if turn > 20:
            assert not is_trial or rounds == 1
            spent[choice != PLAIN] += rounds
    assert 0 < spent[1] < 0.001 * spent[0]


def test_acceptance_is_forgotten():
    seen = Acceptance(3)
    seen.observe(4, np.full(60, 3), np.full(60, 3))
    seen.observe(4, np.full(240, 3), np.zeros(240, int))
    assert seen.rates()[0] < 0.05
    seen.observe(4, np.zeros(240, int), np.zeros(240, int))
    assert seen.idle_share() > 0.8


def test_what_was_not_measured_lies_on_a_line():
    some = {PLAIN: Cost(1.0), WIDE[1]: Cost(2.5), WIDE[2]: Cost(3.5)}
    assert estimated(some, WIDE[1]) == Cost(2.5)
    assert estimated(some, WIDE[0]) == Cost(1.5)
    assert estimated(some, WIDE[3]) == Cost(5.5)
    assert estimated(some, Choice("ngram", 8)) == Cost(3.5)
    assert estimated({PLAIN: Cost(1.0)}, WIDE[0]) == Cost(1.0)
    falling = {PLAIN: Cost(3.0), WIDE[1]: Cost(1.0)}
    assert estimated(falling, WIDE[3]) == Cost(1.0), "wider is never cheaper than what was measured"
    idle = {PLAIN: Cost(1.0), Choice("ngram", 4): Cost(2.0, 1.1)}
    assert estimated(idle, Choice("ngram", 8)).idle == 1.1


def test_costs_follow_what_dispatches_take():
    """A choice that was measured as cheap and is not is left; one bad dispatch says little."""
    rng = np.random.default_rng(0)
    policy = Policy(History({"dflash": 4}), {PLAIN: Cost(1.0), WIDE[1]: Cost(0.9)}, [PLAIN, WIDE[1]])
    truth = {PLAIN: 1.0, WIDE[1]: 1.8}
    chosen = []
    for _ in range(60):
        choice, rounds, *_ = policy.next(64)
        accepted = np.zeros((rounds, 1), int)
        policy.observe(choice, accepted, accepted, accepted == 0, rounds * truth[choice] * rng.uniform(0.9, 1.1))
        chosen.append(choice)
    assert chosen[0] == WIDE[1]
    assert chosen[-30:].count(PLAIN) >= 25
    assert policy.cost(WIDE[1]).drafting > 1
    before = policy.cost(PLAIN).drafting
    policy.observe(PLAIN, np.zeros((1, 1), int), np.zeros((1, 1), int), np.ones((1, 1), bool), 1000.0)
    assert policy.cost(PLAIN).drafting < 1.25 * before


@given(st.floats(0.05, 20.0), st.integers(0, 99))
def test_the_load_under_which_costs_were_measured_changes_no_choice(pace: float, seed: int):
    """A shape is measured when the machine has more to do, or less, than later on. What its batches choose is the same, and so
    are the costs beside each other."""
    truth = {PLAIN: Cost(1.0), WIDE[1]: Cost(1.5), Choice("ngram", 4): Cost(1.3, 1.0)}

    def chosen(pace: float) -> list[tuple[Choice, int, bool]]:
        history = History({"ngram": 4, "dflash": 4})
        rng = np.random.default_rng(seed)
        plans = []
        policy = Policy(history, {one: cost.times(pace) for one, cost in truth.items()}, truth, 0.02 * pace)
        for _ in range(8):
            plan = policy.next(64)
            plans.append(plan[:3])
            found = rng.integers(0, 2, (plan.rounds, 1)) if plan.choice.drafter == "ngram" else np.ones((plan.rounds, 1), int)
            drafted = found * (plan.choice.width - 1)
            idle = 1 - found.mean() if plan.choice.drafter == "ngram" else 0.0
            seconds = 0.02 + plan.rounds * truth[plan.choice].expected(idle)
            policy.observe(plan.choice, drafted, rng.integers(0, drafted + 1), found >= 0, seconds)
        ratios = {one: policy.cost(one).drafting / policy.cost(PLAIN).drafting for one in truth}
        assert ratios == pytest.approx({one: cost.drafting for one, cost in truth.items()}, rel=0.01)
        return plans

    assert chosen(pace) == chosen(1.0)


def test_a_machine_that_slows_down_changes_no_choice_for_long():
    """Five times as slow for good, which is believed of no single dispatch."""
    truth = {PLAIN: 1.0, WIDE[1]: 1.5}
    policy = Policy(History({"dflash": 4}), {one: Cost(cost) for one, cost in truth.items()}, truth)
    chosen: list[Choice] = []
    for turn in range(200):
        choice, rounds, *_ = policy.next(4)
        drafted = np.full((rounds, 1), choice.width - 1)
        accepted = np.minimum(drafted, 1)  # two tokens in the time of a step and a half
        policy.observe(choice, drafted, accepted, drafted >= 0, rounds * (1 if turn < 50 else 5) * truth[choice])
        chosen.append(choice)
    assert chosen[-100:].count(WIDE[1]) >= 90
    assert policy.cost(WIDE[1]).drafting / policy.cost(PLAIN).drafting == pytest.approx(1.5, rel=0.25)


def test_uneven_dispatches_do_not_add_up():
    """Costs relative to plain decoding stay near the truth over hundreds of calls, however uneven single dispatches are."""
    truth = {PLAIN: Cost(1.0), WIDE[1]: Cost(1.5)}
    nothing = np.zeros((4, 1), int)
    errors = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        history = History({"dflash": 4})
        policy = Policy(history, truth, truth)
        for _ in range(200):
            policy = Policy(history, truth, truth)
            for choice in (PLAIN, WIDE[1]) * 4:
                policy.observe(choice, nothing, nothing, nothing == 0, 4 * truth[choice].drafting * rng.lognormal(0, 0.2))
        errors.append(math.log(policy.cost(WIDE[1]).drafting / policy.cost(PLAIN).drafting / 1.5))
    assert math.sqrt(np.mean(np.square(errors))) < 0.2
    assert abs(np.mean(errors)) < 0.1


def test_choices_are_named():
    assert [str(choice) for choice in (PLAIN, WIDE[1])] == ["plain", "dflash, block 4"]


def test_a_trial_that_took_longer_than_expected_delays_the_next():
    """What a context needs to catch up is part of a trial's price."""

    def steps_between(factor: float) -> int:
        policy = Policy(History({"dflash": 16}), STEEP, STEEP)
        nothing = np.zeros((4, 1), int)
        run(policy, {}, 300)
        for _ in range(8):  # the pace is known
            policy.observe(PLAIN, nothing, nothing, nothing == 0, 4.0)
        policy.history.budget = 1000.0
        tried = policy.next(64)
        assert tried.is_trial
        policy.history.budget = 0.0
        seconds = tried.rounds * STEEP[tried.choice].drafting * factor
        policy.observe(tried.choice, nothing, nothing, nothing == 0, seconds)
        for steps in range(0, 20_000, 64):
            if policy.next(64).is_trial:
                return steps
            one = np.zeros((64, 1), int)
            policy.observe(PLAIN, one, one, one == 0)
        raise AssertionError("the drafter was never tried again")

    assert 0 < 1.2 * steps_between(1.0) < steps_between(2.0)


TREES = [Choice("dflash", 8, 8), Choice("dflash", 16, 16), Choice("dflash", 16, 32)]


def grown(costs: Mapping[Choice, Cost]) -> Policy:
    return Policy(History({"dflash": 16}, trees=TREES), costs, costs)


@pytest.mark.parametrize(("rates", "best"), [((0.5, 0.52, 0.54), 0), ((0.5, 0.68, 0.7), 1), ((0.5, 0.6, 0.8), 2)])
def test_the_fastest_tree_is_found(rates: Sequence[float], best: int):
    costs = {**FLAT, **dict(zip(TREES, map(Cost, (1.45, 1.6, 1.9)), strict=True))}
    accepted = {"dflash": 0.4, **dict(zip(map(str, TREES), rates, strict=True))}
    counts = run(grown(costs), accepted, 6000)
    fastest = max(TREES, key=lambda tree: expected_tokens(accepted[str(tree)], tree.width) / costs[tree].drafting)
    assert fastest == TREES[best]
    assert mostly(counts) == fastest


def test_trees_that_accept_no_more_cost_a_few_percent():
    """A tree costs more than the chain, and every tree is tried now and then."""
    costs = {**FLAT, **dict(zip(TREES, map(Cost, (1.6, 2.0, 3.0)), strict=True))}
    policy = grown(costs)
    counts = run(policy, {"dflash": 0.6}, 6000)
    assert mostly(counts) in WIDE
    rounds = sum(counts.values())
    chain = max(expected_tokens(0.6, choice.width) for choice in WIDE) / 1.4
    assert seconds(counts, costs) < 1.06 * 6000 / chain
    assert 0 < sum(counts.get(tree, 0) for tree in TREES) < 0.1 * rounds


def test_a_larger_tree_is_expected_to_hold_a_smaller_one():
    """Before it ran; the first tree is expected to accept more than the chain."""
    costs = {**FLAT, **dict(zip(TREES, map(Cost, (1.6, 2.0, 3.0)), strict=True))}
    policy = grown(costs)
    policy.observe(WIDE[-1], np.full((40, 1), 15), np.full((40, 1), 2), np.ones((40, 1), bool))
    chain, *trees = (policy.outlook([choice])[choice].tokens for choice in (WIDE[-2], *TREES))
    assert chain < trees[0] < trees[1] < trees[2] < 2 * chain
    policy.observe(TREES[0], np.full((40, 1), 7), np.full((40, 1), 4), np.ones((40, 1), bool))
    observed = [policy.outlook([choice])[choice].tokens for choice in TREES]
    assert observed[0] == pytest.approx(5, abs=0.3)
    assert observed[0] < observed[1] < observed[2]
    # The cost of a tree that was not measured follows from the numbers of nodes.
    assert estimated({PLAIN: Cost(1.0), TREES[0]: Cost(2.0)}, TREES[2]).drafting == pytest.approx(1 + 31 / 7)
