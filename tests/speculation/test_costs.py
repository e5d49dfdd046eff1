"""What rounds cost: measured here, kept in a file, and measured again where that file says nothing of this machine."""

import json
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from llm.support import prompts
from reference.dflash_numpy import as_folders, random_pair
from tilewright.llm.language_model import LanguageModel, load
from tilewright.runtime.interfaces import PLAIN, Choice
from tilewright.runtime.runner import ModelRunner
from tilewright.runtime.sampling import Sampling
from tilewright.runtime.shapes import Shape, ShapeTable
from tilewright.speculation import pacing
from tilewright.speculation.costs import (
    CostFiles,
    RoundCosts,
    RoundTimer,
    Run,
    configuration,
    measure,
    no_dearer_when_narrower,
    no_dearer_with_fewer_rows,
    with_idle_rounds,
)
from tilewright.speculation.drafters.ngrams_first import NGramsFirst
from tilewright.speculation.pacer import CallPacer
from tilewright.speculation.pacing import Pacing
from tilewright.speculation.policy import Cost
from tilewright.speculation.team import Team

TABLE = ShapeTable(batches=(1, 4), capacities=(64, 128), chunks=(8,), widths=(2,))
PAIR = random_pair(0, vocab_size=16, target_layers=1, drafter_layers=1, taps=[0], block_size=4)
NARROW = Choice("ngram+dflash", 2)
WIDE = Choice("ngram+dflash", 4)
ABOUT = {"target": "a", "shape": {"batch": 1}}
KEPT = RoundCosts(1e-4, {PLAIN: Cost(1e-3), WIDE: Cost(2e-3), Choice("ngram", 4): Cost(2e-3, 1.1e-3)})

pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    target, drafter = as_folders(tmp_path_factory.mktemp("pair"), PAIR)
    return load(target, ["ngram", drafter], table=TABLE)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def files(tmp_path: Path, said: list[str]) -> CostFiles:
    tmp_path.chmod(0o700)
    return CostFiles(tmp_path / "costs", ["linear-1.so"], said.append)


def team_of(lm: LanguageModel) -> Team:
    assert isinstance(lm.drafter, Team)
    return lm.drafter


def runner_of(lm: LanguageModel, rows: int, positions: int) -> ModelRunner:
    return ModelRunner(lm.programs_for(lm.drafter, Shape(rows, positions)), "greedy")


def timer_of(lm: LanguageModel, rows: int, positions: int) -> RoundTimer:
    return RoundTimer(runner_of(lm, rows, positions), rows)


def test_every_choice_is_measured(lm: LanguageModel):
    """For rounds in which its drafter runs, and for those in which it is idle."""
    costs = measure(timer_of(lm, 4, 64), team_of(lm).choices)
    assert set(costs.rounds) == {PLAIN, NARROW, WIDE, Choice("ngram", 2), Choice("ngram", 16)}
    assert 0 < costs.dispatch < 1
    for choice, cost in costs.rounds.items():
        assert 0 < cost.drafting < 1
        assert (cost.idle is None) == (choice == PLAIN)
        assert cost.idle is None or choice.drafter == "ngram" or cost.idle <= cost.drafting


@pytest.mark.parametrize("pages", [1, 3, 5])
def test_rows_share_pages_where_there_are_fewer(lm: LanguageModel, pages: int):
    programs = copy(lm.programs_for(lm.drafter, Shape(4, 64)))
    programs.layout = replace(programs.layout, pages=pages)
    programs.compiled = {}
    timer = RoundTimer(ModelRunner(programs, "greedy"), 4)
    assert timer.start[0] + 2 * team_of(lm).block_size <= timer.table.shape[-1] * programs.layout.page_size
    used = timer.table[:, :, : -(-(timer.start[0] + team_of(lm).block_size) // programs.layout.page_size)]
    assert ((used >= 0) & (used < pages)).all()
    assert timer.timed(WIDE, 1).seconds > 0


def test_rounds_of_ngrams_draft_while_they_are_measured(lm: LanguageModel):
    """Rounds that find nothing would tell what a step costs; and drafts that are right would run out of room."""
    for rows, positions in ((4, 128), (1, 64)):
        timer = timer_of(lm, rows, positions)
        assert timer.timed(Choice("ngram", 2), 8).idle > 0
        timer.write_texts()
        for choice in (Choice("ngram", 2), Choice("ngram", 16)):
            run = timer.timed(choice, 8)
            assert (run.drafting, run.idle) == (8, 0)
            assert timer.timed(choice, 8)[1:] == (8, 0), "it begins where it began before"


def test_a_drafter_behind_ngrams_is_measured_with_its_pass_and_without(tmp_path: Path):
    target, drafter = as_folders(
        tmp_path, random_pair(0, vocab_size=96, target_layers=1, drafter_layers=1, taps=[0], block_size=4)
    )
    timer = timer_of(load(target, ["ngram", drafter], table=TABLE), 1, 64)
    timer.write_texts()
    assert timer.timed(WIDE, 8)[1:] == (0, 8), "all that comes was said before"
    assert timer.timed(WIDE, 2, repeats=False)[1:] == (2, 0), "nothing was"

    class Scripted(RoundTimer):
        def timed(self, choice: Choice, rounds: int, repeats: bool = True) -> Run:
            ran = super().timed(choice, rounds, repeats)
            each = (5.0, 3.0) if choice == WIDE else (1.0, 1.0)
            return ran._replace(seconds=2.5e-3 + each[0] * ran.drafting + each[1] * ran.idle)

        def broadcast(self, seconds: float) -> float:
            return 100.0

    costs = measure(Scripted(timer.runner, 1), [PLAIN, WIDE]).rounds
    assert (costs[PLAIN].drafting, costs[PLAIN].idle) == (pytest.approx(1.0), None)
    assert (costs[WIDE].drafting, costs[WIDE].idle) == (pytest.approx(5.0), pytest.approx(3.0))


def test_rows_have_texts_of_their_own(lm: LanguageModel):
    """Those of one text would choose the same experts, and a batch seem to read as many as one row."""
    timer = timer_of(lm, 4, 64)
    assert len(np.unique(timer.repeated, axis=0)) == 4
    timer.write_texts()
    assert len(np.unique(timer.repeated, axis=0)) == 4
    assert len(np.unique(timer.varied[:, 0])) == 4


def test_rounds_that_find_nothing_are_measured_where_nothing_is_said_twice(lm: LanguageModel):
    """What such a round takes longer than a step there is told, of all widths alike; what drafted in between is not counted."""
    runs: list[tuple[Choice, int]] = []

    class Scripted(RoundTimer):
        def timed(self, choice: Choice, rounds: int, repeats: bool = True) -> Run:
            assert not repeats
            assert len(np.unique(self.varied)) == min(self.varied.shape[1], self.vocab_size)
            runs.append((choice, rounds))
            if choice == PLAIN:  # steps are three times as slow in that text as they were in another
                return Run(1e-3 + rounds * 3 * step, rounds)
            drafting = 1 if rounds > 2 else 0
            return Run(1e-3 + drafting * 4e-3 + (rounds - drafting) * idle, drafting, rounds - drafting)

        def broadcast(self, seconds: float) -> float:
            return 0.02 * len(runs) if step < 1 else 10.0

    def measured(step: float) -> dict[Choice, Cost]:
        costs = {PLAIN: Cost(step), NARROW: Cost(2 * step), **{Choice("ngram", w): Cost(4e-3, step) for w in (2, 16)}}
        found = with_idle_rounds(Scripted(runner_of(lm, 1, 64), 1), 1e-3, costs)
        assert {one: cost.drafting for one, cost in found.items()} == {one: cost.drafting for one, cost in costs.items()}
        return found

    for step, idle in ((1e-3, 6e-3), (1e-3, 2e-3), (2.0, 9.0)):
        runs.clear()
        expected = pytest.approx(max(step, idle / 3), rel=0.01)
        found = measured(step)
        assert {one: cost.idle for one, cost in found.items() if cost.idle is not None} == {
            Choice("ngram", width): expected for width in (2, 16)
        }
        assert set(runs) == {(choice, 8 if step < 1 else 2) for choice in (PLAIN, Choice("ngram", 2))}
        assert len(runs) == (2 * 5 if step < 1 else 2), "a large model's budget ends after one run of each"


def test_what_a_dispatch_takes_is_told_by_empty_ones(lm: LanguageModel):
    """However much others disturb what is longer, and no drafter's round costs less than a step then."""
    mostly = Choice("ngram", 16)

    class Scripted(RoundTimer):
        def timed(self, choice: Choice, rounds: int, repeats: bool = True) -> Run:
            ran = super().timed(choice, rounds, repeats)
            slow = {PLAIN: 9.0, mostly: 3.0}.get(choice, 4.0)
            return ran._replace(seconds=2.5e-3 + slow * rounds)

        def broadcast(self, seconds: float) -> float:
            return 100.0

    costs = measure(Scripted(runner_of(lm, 1, 64), 1), [PLAIN, NARROW, WIDE, mostly])
    assert costs.dispatch == 2.5e-3
    assert {choice: cost.drafting for choice, cost in costs.rounds.items()} == {
        PLAIN: pytest.approx(3.0),
        NARROW: pytest.approx(4.0),
        WIDE: pytest.approx(4.0),
        mostly: pytest.approx(3.0),
    }
    assert Run(10e-3, 5).beyond(2.5e-3).seconds == pytest.approx(7.5e-3)
    assert Run(10e-3, 5).beyond(9.9e-3).seconds == pytest.approx(2e-3)


def test_rounds_that_find_nothing_are_taken_to_cost_a_step():
    mixed = Run(6 * 2e-3 + 2 * 1e-3, 6, 2).cost(1e-3, may_be_idle=True)
    assert (mixed.drafting, mixed.idle) == (pytest.approx(2e-3), 1e-3)
    assert Run(8e-3, 4).cost(1e-3, may_be_idle=False) == Cost(2e-3)
    assert Run(3e-3, 4, 4).cost(1e-3, may_be_idle=True) == Cost(1e-3, 1e-3)
    assert Run(8e-3, 0, 8).cost(1e-3, may_be_idle=True) == Cost(1e-3, 1e-3)


def test_a_narrow_block_costs_no_more_than_a_wide_one():
    """What disturbed a run made it longer."""
    ngram = [Choice("ngram", width) for width in (2, 4, 8)]
    costs = {PLAIN: Cost(1.0), NARROW: Cost(9.0), WIDE: Cost(2.0), **dict(zip(ngram, map(Cost, (1.5, 4.0, 3.0)), strict=True))}
    best = no_dearer_when_narrower(costs)
    assert best == {**costs, NARROW: Cost(2.0), ngram[1]: Cost(3.0)}
    assert no_dearer_when_narrower({**costs, PLAIN: Cost(5.0)}) == {**best, PLAIN: Cost(1.5)}, "nor does a step"


def test_files_keep_costs(files: CostFiles, said: list[str]):
    assert files.read(ABOUT, list(KEPT.rounds)) is None
    files.write(ABOUT, KEPT)
    assert files.read(ABOUT, list(KEPT.rounds)) == KEPT
    assert files.read(ABOUT, [PLAIN]) == RoundCosts(KEPT.dispatch, {PLAIN: KEPT.rounds[PLAIN]})
    assert files.read({**ABOUT, "shape": {"batch": 2}}, list(KEPT.rounds)) is None
    (path,) = files.folder.iterdir()
    assert (files.folder.stat().st_mode & 0o777, path.stat().st_mode & 0o777) == (0o700, 0o600)
    assert said == []


def changed(key: str, value: Any) -> Callable[[dict[str, Any]], str]:
    def change(found: dict[str, Any]) -> str:
        return json.dumps({**found, key: value})

    return change


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda _: "{", "(Expecting property name"),
        (lambda _: "[]", "(list indices"),
        (changed("rounds", []), "(expected the cost of plain decoding, found none)"),
        (changed("rounds", [{"drafter": "none", "width": 1, "drafting_s": -1.0, "idle_s": None}]), "expected a time above 0"),
        (changed("rounds", [{"drafter": "none", "width": 1}]), "('drafting_s')"),
        (changed("dispatch_s", "x"), "expected a time above 0, found 'x'"),
        (changed("made_on", {"machine": "another"}), "was written with another machine and chip and jax"),
        (lambda found: json.dumps({**found, "made_on": {**found["made_on"], "jax": "0.1"}}), "was written with another jax"),
        (changed("made_on", 3), "cannot use"),
    ],
)
def test_what_does_not_fit_is_measured_again(files: CostFiles, said: list[str], change: Callable[[Any], str], line: str):
    files.write(ABOUT, KEPT)
    path = files.path(ABOUT)
    path.write_text(change(json.loads(path.read_text())))
    assert files.read(ABOUT, list(KEPT.rounds)) is None
    assert len(said) == 1
    assert said[0].startswith("measuring the cost of rounds: ")
    assert line in said[0]
    assert "\n" not in said[0]


def test_other_kernels_are_another_machine(files: CostFiles, said: list[str]):
    files.write(ABOUT, KEPT)
    assert CostFiles(files.folder, ["linear-2.so"], said.append).read(ABOUT, [PLAIN]) is None
    assert said[0].endswith("was written with another machine")


def test_a_folder_that_others_may_write_to_is_not_used(files: CostFiles, said: list[str]):
    files.write(ABOUT, KEPT)
    files.folder.chmod(0o777)
    assert files.read(ABOUT, [PLAIN]) is None
    files.write({"other": 1}, KEPT)
    assert [line.split(":")[0] for line in said] == ["measuring the cost of rounds", "the cost of rounds was not saved"]
    assert len(list(files.folder.iterdir())) == 1


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[list[Choice]]:
    """Every measurement: the choices. Nothing is timed."""
    made: list[list[Choice]] = []

    def noted(timer: RoundTimer, choices: list[Choice]) -> RoundCosts:
        made.append(list(choices))
        return RoundCosts(1e-4, {choice: Cost(2e-3 if choice == PLAIN else 1e-3) for choice in choices})

    monkeypatch.setattr(pacing, "measure", noted)
    return made


def test_a_later_process_measures_nothing(
    lm: LanguageModel, files: CostFiles, measured: list[list[Choice]], monkeypatch: pytest.MonkeyPatch
):
    inputs = prompts(0, [3], 16)
    programs = lm.start(inputs, Sampling(8)).engine.decoding.programs
    programs.warm(programs.declared("greedy"))
    for n in range(2):
        monkeypatch.setattr(lm, "pacing", Pacing(team_of(lm), "auto", files))
        lm.generate(inputs, Sampling(8))
        assert len(measured) == 1, n
    assert measured[0] == sorted(team_of(lm).choices)


def test_a_file_that_does_not_fit_is_told_of_once(
    lm: LanguageModel, files: CostFiles, said: list[str], measured: list[list[Choice]]
):
    programs = lm.start(prompts(0, [3], 16), Sampling(8)).engine.decoding.programs
    paces = Pacing(team_of(lm), "auto", files)
    about = configuration(programs, team_of(lm), 1, False, "auto")
    files.folder.mkdir(mode=0o700)
    files.path(about).write_text("{")
    for _ in range(2):
        CallPacer(team_of(lm), paces, ModelRunner(programs, "greedy"), drawn=False).policy(1)
    assert len(said) == 1
    assert measured
    assert files.read(about, [PLAIN]) is not None


def test_a_call_begins_with_two_programs_and_adds_what_pays(
    lm: LanguageModel, measured: list[list[Choice]], monkeypatch: pytest.MonkeyPatch
):
    """What is expected to save less than it takes to compile is left, unless somebody is patient."""
    programs = lm.start(prompts(0, [70], 16), Sampling(8)).engine.decoding.programs  # a shape that nobody used yet
    paces = Pacing(team_of(lm), "auto")
    runner = ModelRunner(programs, "greedy")
    pacer = CallPacer(team_of(lm), paces, runner, drawn=False)
    policy = pacer.policy(1)
    assert policy.ready == {PLAIN, Choice("ngram", 2)}
    assert measured == [sorted(policy.ready)]
    pacer.add_worthwhile(1, 8)
    assert len(policy.ready) == 2
    pacer.add_worthwhile(1, 10**9)
    assert len(policy.ready) == 3
    added = (policy.ready - {PLAIN, Choice("ngram", 2)}).pop()
    assert policy.costs[added].drafting == pytest.approx(1e-3)
    assert measured[-1] == sorted({PLAIN, added})
    paces.patient = True
    nothing = np.zeros((64, 1), int)
    for choice in policy.ready - {PLAIN}:
        policy.observe(choice, nothing, nothing, nothing == 0)  # so that the other drafter promises more
    pacer.add_worthwhile(1, 1)
    assert len(policy.ready) == 4
    assert CallPacer(team_of(lm), paces, runner, drawn=False).policy(1).ready == policy.ready


def test_a_call_begins_with_a_drafter_whose_acceptance_was_measured_too(lm: LanguageModel):
    ngram, silent = team_of(lm).members
    assert isinstance(silent, NGramsFirst)
    expecting = replace(silent.other.config, expected_acceptance=(0.9, 0.8, 0.7))
    measured_in_training = replace(silent, other=replace(silent.other, config=expecting))
    for member, firsts in ((silent, {Choice("ngram", 2)}), (measured_in_training, {Choice("ngram", 2), WIDE})):
        team = replace(team_of(lm), members=(ngram, member))
        pacer = CallPacer(team, Pacing(team_of(lm), "auto"), runner_of(lm, 1, 64), drawn=False)
        assert pacer.first_choices(1) == firsts


def test_the_configuration_names_what_costs_depend_on(lm: LanguageModel):
    team = team_of(lm)
    programs = lm.programs_for(lm.drafter, Shape(1, 64))
    about = configuration(programs, team, 1, False, "auto")
    assert json.loads(json.dumps(about)) == about
    assert "0x" not in json.dumps(about), "no address of a function"
    half = copy(programs)
    half.dtype = jnp.bfloat16
    for other in (
        configuration(programs, replace(team, masked=True), 1, False, "auto"),
        configuration(programs, replace(team, members=team.members[:1]), 1, False, "auto"),
        configuration(lm.programs_for(lm.drafter, Shape(4, 64)), team, 1, False, "auto"),
        configuration(programs, team, 4, False, "auto"),
        configuration(programs, team, 1, True, "auto"),
        configuration(half, team, 1, False, "auto"),
        configuration(programs, team, 1, False, "int8"),
    ):
        assert other != about


def test_fewer_rows_are_no_dearer_beside_a_step():
    """A disturbed measurement of one batch size is corrected by those of larger ones; steps and larger sizes stay."""
    block = Choice("ngram", 4)
    costs = {
        rows: RoundCosts(0.1, {PLAIN: Cost(step), block: Cost(drafting, idle)})
        for rows, step, drafting, idle in ((1, 1.0, 3.6, 1.4), (2, 2.0, 3.0, 2.0), (4, 5.0, 10.0, 5.5))
    }
    found = no_dearer_with_fewer_rows(costs)
    assert found[4] == costs[4]
    assert found[2] == costs[2]
    assert found[1] == RoundCosts(0.1, {PLAIN: Cost(1.0), block: Cost(1.5, 1.0)})
