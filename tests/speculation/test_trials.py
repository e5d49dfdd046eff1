"""Costs of rounds that an engine learns while it serves."""

import numpy as np
import pytest

from llm.support import prompts
from reference.dflash_numpy import as_folders, random_pair
from runtime.support import drive, expected
from tilewright.llm.language_model import LanguageModel, load
from tilewright.runtime.interfaces import PLAIN, Choice
from tilewright.runtime.options import EngineOptions
from tilewright.runtime.request import GenerateRequest
from tilewright.runtime.sampling import Sampling
from tilewright.runtime.shapes import ShapeTable
from tilewright.speculation.costs import Run
from tilewright.speculation.pacer import TRIALS, EnginePacer, Trials
from tilewright.speculation.policy import Cost

TABLE = ShapeTable(batches=(2,), capacities=(128,), chunks=(16,), widths=(2,))
PAIR = random_pair(0, vocab_size=16, target_layers=1, drafter_layers=1, taps=[0], block_size=4)
NARROW = Choice("ngram", 2)
WIDE = Choice("ngram", 4)

pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    target, drafter = as_folders(tmp_path_factory.mktemp("pair"), PAIR)
    return load(target, ["ngram", drafter], table=TABLE)


def observe(trials: Trials, choice: Choice, *runs: Run) -> None:
    for run in runs:
        trials.observe(choice, run, may_be_idle=choice != PLAIN)


def test_a_step_is_timed_first_and_the_first_dispatch_is_left_out():
    trials = Trials()
    assert trials.next([PLAIN, NARROW]) == PLAIN
    observe(trials, PLAIN, Run(9.0, 2), *[Run(4.0, 2)] * (TRIALS - 1))
    assert trials.next([PLAIN, NARROW]) == PLAIN
    observe(trials, PLAIN, Run(2.0, 2))
    assert trials.costs.rounds == {PLAIN: Cost(1.0)}


def test_choices_without_a_cost_have_every_other_dispatch():
    trials = Trials()
    trials.costs.rounds[PLAIN] = Cost(1.0)
    assert [trials.next([NARROW, WIDE]) for _ in range(4)] == [NARROW, None, NARROW, None]
    # Idle rounds cost a step; the others are what remains.
    observe(trials, NARROW, *[Run(5.0, 2, 1)] * (1 + TRIALS))
    assert trials.costs.rounds[NARROW] == Cost(2.0, 1.0)
    assert [trials.next([WIDE]), trials.next([])] == [WIDE, None]


def test_a_drafter_that_proposes_nothing_is_tried_more_and_more_seldom():
    trials = Trials()
    trials.costs.rounds[PLAIN] = Cost(1.0)
    tried = []
    for turn in range(1, 70):
        choice = trials.next([WIDE])
        if choice is not None:
            tried.append(turn)
            observe(trials, WIDE, Run(4.0, 0, 4))
    assert np.all(np.diff(tried, 2) >= 0)
    assert len(tried) < 7
    assert WIDE not in trials.costs.rounds


def test_an_engine_learns_the_costs_of_the_programs_that_exist(lm: LanguageModel):
    """Tokens stay those of plain decoding; rounds whose program is missing are never chosen."""
    asks = [GenerateRequest(tokens, Sampling(60, ignore_eos=True)) for tokens in prompts(0, [9, 12] * 8, vocab=16)]
    wanted = expected(lm, asks)
    engine = lm.engine(EngineOptions(table=TABLE, page_size=16, guard="off"))
    chooser = engine.decoding.chooser
    assert isinstance(chooser, EnginePacer)
    narrow = next(choice for choice in engine.decoding.programs.choices if choice is not None and choice.width == 2)
    rounds = [engine.decoding.programs.round_key(choice, 2, 128, engine.runner.sampling) for choice in (PLAIN, narrow)]
    engine.decoding.use([*engine.decoding.first_keys(), *rounds])
    engine.runner.reset()
    engine.accept_requests()
    listeners, _ = drive(engine, asks, np.random.default_rng(0))
    assert [each.tokens for each in listeners] == wanted
    assert set(engine.stats().widths) <= {str(PLAIN), str(narrow)}
    assert set(chooser.costs(2).rounds) <= {PLAIN, narrow}
    assert PLAIN in chooser.costs(2).rounds
    assert all(seen.earlier[2] > 0 for seen in chooser.history.counterfactual.values()), "requests began after others"
    engine.stop()
