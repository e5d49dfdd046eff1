"""Recorded acceptance, and the policy simulated on it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from acceptance_traces import (
    IDLE,
    LOADED,
    AcceptanceTrace,
    Recording,
    Uneven,
    accepted_before,
    costs_of,
    record,
    seconds_of,
    simulate,
)

from llm.support import prompts
from reference.dflash_numpy import as_folders, random_pair
from tilewright.llm.language_model import load
from tilewright.runtime.interfaces import PLAIN, Choice
from tilewright.runtime.sampling import Sampling
from tilewright.runtime.shapes import ShapeTable
from tilewright.speculation.costs import RoundCosts
from tilewright.speculation.policy import Cost, History, Policy

TABLE = ShapeTable(batches=(1,), capacities=(64,), chunks=(8,), widths=(2,))
PAIR = random_pair(0, vocab_size=12, target_layers=1, drafter_layers=1, taps=[0], block_size=4)
NGRAM = Choice("ngram", 4)
WIDE = Choice("dflash", 16)
RECORDED = Path(__file__).parent / "round_traces.json"
"""The first pair that was shipped, on its held-out prompts, with what rounds cost where it was recorded."""
PUBLISHED = Path(__file__).parent / "smollm2_traces.json"
"""SmolLM2 with n-grams and its DFlash 2 drafter in blocks of 4, on four records of each of six files. Costs are in steps."""

pytestmark = pytest.mark.usefixtures("quick_compiles")


def test_what_is_recorded_is_what_rounds_accept(tmp_path: Path):
    """A session whose rounds all do the same accepts, round by round, what was recorded for the place it stands at."""
    target, drafter = as_folders(tmp_path, PAIR)
    lm = load(target, ["ngram", drafter], block_size=4, table=TABLE)
    inputs = prompts(0, [3, 9], 12)
    done: list[None] = []
    traces = record(lm, "made up", inputs, Sampling(30), lambda: done.append(None))
    assert len(done) == len(traces) == 2
    for prompt, trace in zip(inputs, traces, strict=True):
        assert trace.length == 30
        for choice, counts in trace.accepted.items():
            session = lm.start([prompt], Sampling(30))
            while not session.finished:
                session.advance(64, choice)
            (result,) = session.results()
            starts = np.cumsum([0, *result.acceptance_lengths])[:-1]
            for start, added, drafted in zip(starts, result.acceptance_lengths, result.drafted, strict=True):
                if drafted == 0:
                    assert counts[start] == "."
                else:
                    assert min(int(counts[start]) + 1, 30 - start) == added


def test_accepted_drafts_are_those_that_follow():
    drafts = [np.array(each) for each in ([1, 2, 9], [2, 3, 4], [], [7], [5, 5])]
    assert accepted_before([1, 2, 3, 4, 5], drafts) == "23.01"


def test_the_time_of_one_choice():
    costs = RoundCosts(0.5, {PLAIN: Cost(1.0), NGRAM: Cost(3.0, 1.25)})
    trace = AcceptanceTrace("made up", {NGRAM: "3...1.0."})
    assert seconds_of(trace, costs, PLAIN) == (8.5, {PLAIN: 8})
    # Four tokens, then two, then nothing drafted is met never: places 0, 4 and 6, 7.
    assert seconds_of(trace, costs, NGRAM) == (0.5 + 3 + 3 + 3 + 1.25, {NGRAM: 4})


def test_recordings_are_kept(tmp_path: Path):
    whole = Recording(
        [AcceptanceTrace("a", {NGRAM: "3..", WIDE: "f00"})],
        RoundCosts(1e-4, {PLAIN: Cost(1e-3), NGRAM: Cost(2e-3, 1e-3)}),
        {"x": 1},
        {"dflash": [0.6, 0.5]},
    )
    whole.save(tmp_path / "traces.json")
    assert Recording.load(tmp_path / "traces.json") == whole


def test_a_policy_on_a_text_that_is_always_drafted():
    costs = RoundCosts(1e-9, {PLAIN: Cost(1.0), WIDE: Cost(2.0)})
    trace = AcceptanceTrace("made up", {WIDE: "f" * 800})
    seconds, rounds = seconds_of(trace, costs, Policy(History({"dflash": 16}), dict(costs.rounds), costs.rounds))
    assert seconds < 1.1 * 100
    assert rounds[WIDE] >= 48


def row_costs(recording: Recording, row: float, drafter: str | None) -> Recording:
    """With one drafter or all, where a row more in a block costs `row` of a plain step."""
    step = 0.25e-3
    drafting = {
        "ngram": lambda width: 0.03,
        "dflash": lambda width: 0.6 + 0.3 * row * width,
        "eagle3": lambda width: 0.18 * (width - 1),
    }
    kept = [choice for choice in recording.traces[0].accepted if drafter in (None, choice.drafter)]
    rounds = {
        one: Cost(
            step * (1.05 + row * (one.width - 1) + drafting[one.drafter](one.width)),
            step * 1.05 if one.drafter == "ngram" else None,
        )
        for one in kept
    }
    traces = [AcceptanceTrace(each.dataset, {choice: each.accepted[choice] for choice in kept}) for each in recording.traces]
    return Recording(traces, RoundCosts(1.2e-4, {PLAIN: Cost(step), **rounds}))


@pytest.mark.parametrize("drafter", ["ngram", "dflash", "eagle3", None])
@pytest.mark.parametrize("row", [0.2, 0.4])
def test_the_policy_beside_the_best_choice_in_hindsight(row: float, drafter: str | None):
    """On what the shipped pair accepts in four texts of 128 tokens, of which the first has to be learnt from."""
    (found,) = simulate(row_costs(Recording.load(RECORDED), row, drafter))
    assert found["of_best"] > (0.82 if drafter is None else 0.88)
    assert found["of_plain"] > 0.95


def test_several_drafters_give_no_less_than_the_best_of_them():
    """Of n-grams and a learnt drafter, each of which is the better one somewhere, within one text and between texts."""
    rows = simulate(Recording.load(PUBLISHED))
    assert len({row["best"] for row in rows}) == 2
    assert {row["dataset"]: row["of_best"] for row in rows if row["of_best"] < 0.95} == {}


def joined(recording: Recording) -> Recording:
    """The same with n-grams in the place of the learnt drafter where they find something, as `NGramsFirst` drafts."""
    ngram, learnt = recording.traces[0].accepted
    both = Choice(f"{ngram.drafter}+{learnt.drafter}", learnt.width)
    costs = recording.costs
    traces = []
    for trace in recording.traces:
        first, other = (trace.accepted[one] for one in (ngram, learnt))
        accepted = "".join(drafted if found == IDLE else found for found, drafted in zip(first, other, strict=True))
        traces.append(AcceptanceTrace(trace.dataset, {ngram: first, both: accepted}))
    cost = Cost(costs.rounds[learnt].drafting, costs.rounds[ngram].drafting)
    rounds = {PLAIN: costs.rounds[PLAIN], ngram: costs.rounds[ngram], both: cost}
    return Recording(traces, RoundCosts(costs.dispatch, rounds), {}, {both.drafter: recording.expected[learnt.drafter]})


@pytest.mark.parametrize("dispatch", [0.02, 0.25])
def test_ngrams_in_the_place_of_a_drafter_give_more_than_either(dispatch: float):
    """Than the better of the two on each file, but for chance; by a tenth on the whole, chosen by whoever knows all texts."""
    recording = Recording.load(PUBLISHED)
    apart, together = (simulate(each, RoundCosts(dispatch, each.costs.rounds)) for each in (recording, joined(recording)))
    gain = [now["policy_tokens_per_s"] / before["best_tokens_per_s"] for now, before in zip(together, apart, strict=True)]
    assert min(gain) > 0.97
    assert np.mean(gain) > 1.05
    assert min(row["of_best"] for row in together) > 0.97


@pytest.mark.parametrize("broken", ["early looks", "apart"])
def test_a_policy_that_ignores_ngrams_first_gives_less(broken: str, monkeypatch: pytest.MonkeyPatch):
    """Shows that the test above can fail."""
    recording = joined(Recording.load(PUBLISHED))
    if broken == "early looks":
        monkeypatch.setattr("tilewright.speculation.policy.ROUNDS_PER_CHOICE", 4)
    else:
        monkeypatch.setattr("acceptance_traces.first_of", lambda names: {})
    assert min(row["of_best"] for row in simulate(recording)) < 0.96


@pytest.mark.parametrize("broken", ["late looks", "no expectation"])
def test_a_worse_policy_gives_less(broken: str, monkeypatch: pytest.MonkeyPatch):
    """Shows that the test above can fail."""
    recording = Recording.load(PUBLISHED)
    if broken == "late looks":
        monkeypatch.setattr("tilewright.speculation.policy.ROUNDS_PER_CHOICE", 64)
    else:
        recording = replace(recording, expected={})
    assert min(row["of_best"] for row in simulate(recording)) < 0.93


@pytest.mark.parametrize("row", [0.2, 0.4])
def test_the_policy_on_a_machine_that_is_uneven(row: float):
    """N-grams whose cost was found wrong by a tenth, or a quarter, and dispatches as uneven, on the same four texts."""
    recording = row_costs(Recording.load(RECORDED), row, "ngram")
    for uneven, least in ((0.1, 0.9), (0.25, 0.8)):
        shares = [simulate(recording, uneven=uneven, seed=seed)[0]["of_best"] for seed in range(8)]
        assert np.mean(shares) > least
        assert len(set(shares)) > 1


def test_an_uneven_machine_differs_from_what_was_measured():
    costs = {PLAIN: Cost(1.0), NGRAM: Cost(3.0, 1.25), Choice("ngram", 8): Cost(5.0, 1.25)}
    found = [Uneven(0.2, seed).measured(costs) for seed in range(400)]
    off = np.log([[each[choice].drafting / costs[choice].drafting for choice in costs] for each in found])
    assert np.std(off, axis=0) == pytest.approx([0.2 * np.sqrt(LOADED**2 + 1.25)] * 3, rel=0.15)
    beside = off[:, 1:] - off[:, :1]  # whatever the load was
    assert np.std(beside, axis=0) == pytest.approx([0.2 * np.sqrt(2.5)] * 2, rel=0.15)
    assert np.std(off[:, 1] - off[:, 2]) == pytest.approx(0.2 * np.sqrt(0.5), rel=0.15)
    machine = Uneven(0.2)
    assert np.std(np.log([machine.timed(2.0) / 2 for _ in range(2000)])) == pytest.approx(0.2 * np.sqrt(2), rel=0.15)
    assert Uneven(0.0).timed(2.0) == 2.0


def test_a_chips_estimates_stand_in_for_seconds():
    records = [{"block_size": size, "round_bound_cycles": 10.0 + size, "step_bound_cycles": 12.0} for size in (4, 16)]
    assert costs_of(records) == RoundCosts(0.0, {PLAIN: Cost(12.0), Choice("dflash", 4): Cost(14.0), WIDE: Cost(26.0)})
    measured = [{"block_size": 4, "round_ms": 3.0, "step_ms": 1.5}]
    assert costs_of(measured, "x") == RoundCosts(0.0, {PLAIN: Cost(1.5), Choice("x", 4): Cost(3.0)})
