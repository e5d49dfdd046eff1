"""Costs and acceptance of a team's rounds, shared by all runs of a model."""

import threading
from collections.abc import Collection
from typing import NamedTuple

from tilewright.runtime.interfaces import PLAIN, Choice
from tilewright.runtime.layout import Layout
from tilewright.runtime.programs import Programs
from tilewright.runtime.runner import ModelRunner
from tilewright.speculation.costs import CostFiles, RoundCosts, RoundTimer, configuration, measure
from tilewright.speculation.drafters.ngrams_first import NGramsFirst
from tilewright.speculation.policy import AcceptanceHistory, Corrections
from tilewright.speculation.team import Team


class Costed(NamedTuple):
    """Rounds that have costs of their own.

    Attributes:
        rows: that rounds run with.
        drawn: whether they draw.
    """

    layout: Layout
    rows: int
    drawn: bool


class Pacing:
    """Costs and acceptance of a team's rounds; safe to use from several threads.

    Attributes:
        history: what all calls have seen.
        costs: those that were measured, or read.
        corrections: what calls learnt beside them, while this process runs.
        files: where costs are kept; None measures them in every process.
        looked: whose file was read, or found not to fit.
        patient: compile whatever promises to be faster, however long it takes: for measurements.
        lock: for who compiles and measures.
    """

    def __init__(self, team: Team, weights: str, files: CostFiles | None = None):
        self.team = team
        self.weights = weights
        self.files = files
        self.history = new_history(team)
        self.costs: dict[Costed, RoundCosts] = {}
        self.corrections: dict[Costed, Corrections] = {}
        self.looked: set[Costed] = set()
        self.patient = False
        self.lock = threading.RLock()

    def corrections_of(self, of: Costed) -> Corrections:
        """Corrections of these rounds' costs, which calls go on with one after another."""
        return self.corrections.setdefault(of, Corrections(self.history.widest))

    def known(self, programs: Programs, of: Costed) -> RoundCosts | None:
        """Costs as far as they were measured, now or by an earlier process."""
        if of not in self.costs and self.files is not None and of not in self.looked:
            self.looked.add(of)
            found = self.files.read(configuration(programs, self.team, of.rows, of.drawn, self.weights), self.team.choices)
            if found is not None:
                self.costs[of] = found
        return self.costs.get(of)

    def measured(self, runner: ModelRunner, rows: int, drawn: bool, choices: Collection[Choice]) -> RoundCosts:
        """The costs of rounds, those of `choices` among them; what is missing is measured beside plain decoding.

        Args:
            runner: whose rounds they are; another one of its kind runs them, in memory of its own.
        """
        programs = runner.programs
        with self.lock:
            of = Costed(programs.layout, rows, drawn)
            known = self.known(programs, of)
            missing = sorted(choice for choice in choices if known is None or choice not in known.rounds)
            if known is not None and not missing:
                return known
            found = measure(RoundTimer(ModelRunner(programs, runner.sampling), rows, drawn), sorted({PLAIN, *missing}))
            if known is not None:  # a machine that is slower now than it was then is slower for all choices
                now = known.rounds[PLAIN].drafting / found.rounds[PLAIN].drafting
                known.rounds.update({choice: found.rounds[choice].times(now) for choice in missing})
                found = known
            self.costs[of] = found
            if self.files is not None:
                self.files.write(configuration(programs, self.team, rows, drawn, self.weights), found)
            return found


def new_history(team: Team) -> AcceptanceHistory:
    """A history of which nothing was seen yet."""
    members = team.members
    return AcceptanceHistory(
        {one.name: one.block_size for one in members},
        {one.name: one.expected_acceptance for one in members},
        {one.name: one.ngram.name for one in members if isinstance(one, NGramsFirst)},
    )
