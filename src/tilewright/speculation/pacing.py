"""Measured costs and observed acceptance of a team's rounds, shared by all runs of a model."""

import threading
from collections.abc import Collection
from typing import NamedTuple

from tilewright.runtime.interfaces import PLAIN, Choice
from tilewright.runtime.layout import Layout
from tilewright.runtime.programs import Programs
from tilewright.runtime.runner import ModelRunner
from tilewright.speculation.costs import CostFiles, RoundCosts, RoundTimer, configuration, measure
from tilewright.speculation.drafters.ngrams_first import NGramsFirst
from tilewright.speculation.policy import History
from tilewright.speculation.suffix_index import HostIndex, SuffixIndex
from tilewright.speculation.team import Team


class CostKey(NamedTuple):
    """Key of a cost table.

    Attributes:
        rows: rows of the batch.
        drawn: True if tokens are sampled, False for greedy decoding.
    """

    layout: Layout
    rows: int
    drawn: bool


class Pacing:
    """Costs and history of a team's rounds. Safe to use from several threads.

    Attributes:
        history: observations of all calls.
        costs: cost tables that were measured or read from a file.
        files: files of cost tables; None measures in every process.
        corpus: index of the corpus that the team searches, for the host; None for none.
        files_tried: keys whose file was tried.
        patient: True compiles every choice that promises to be faster, however long it takes. Benchmarks set it.
        lock: held while programs are compiled or measured.
    """

    def __init__(self, team: Team, weights: str, files: CostFiles | None = None, corpus: SuffixIndex | None = None):
        self.team = team
        self.corpus = None if corpus is None else HostIndex(corpus)
        self.weights = weights
        self.files = files
        self.history = new_history(team)
        self.costs: dict[CostKey, RoundCosts] = {}
        self.files_tried: set[CostKey] = set()
        self.patient = False
        self.lock = threading.RLock()

    def stored_costs(self, programs: Programs, key: CostKey) -> RoundCosts | None:
        """Returns the costs that were measured so far, by this process or an earlier one."""
        if key not in self.costs and self.files is not None and key not in self.files_tried:
            self.files_tried.add(key)
            found = self.files.read(configuration(programs, self.team, key.rows, key.drawn, self.weights), self.team.choices)
            if found is not None:
                self.costs[key] = found
        return self.costs.get(key)

    def measured(self, runner: ModelRunner, rows: int, drawn: bool, choices: Collection[Choice]) -> RoundCosts:
        """Returns the costs of rounds and measures missing `choices`, side by side with plain decoding.

        Args:
            runner: runner of the rounds. A second runner with the same programs and its own memory runs the measurement.
        """
        programs = runner.programs
        with self.lock:
            key = CostKey(programs.layout, rows, drawn)
            stored_costs = self.stored_costs(programs, key)
            missing = sorted(choice for choice in choices if stored_costs is None or choice not in stored_costs.rounds)
            if stored_costs is not None and not missing:
                return stored_costs
            found = measure(RoundTimer(ModelRunner(programs, runner.sampling), rows, drawn), sorted({PLAIN, *missing}))
            if stored_costs is not None:  # the machine's load may have changed since; a step tells by how much
                speed_ratio = stored_costs.rounds[PLAIN].drafting / found.rounds[PLAIN].drafting
                stored_costs.rounds.update({choice: found.rounds[choice].times(speed_ratio) for choice in missing})
                found = stored_costs
            self.costs[key] = found
            if self.files is not None:
                self.files.write(configuration(programs, self.team, rows, drawn, self.weights), found)
            return found


def new_history(team: Team) -> History:
    """Returns a history without observations."""
    members = team.members
    return History(
        {member.name: member.block_size for member in members},
        {member.name: member.expected_acceptance for member in members},
        {member.name: member.ngram.name for member in members if isinstance(member, NGramsFirst)},
        [choice for choice in team.choices if choice.nodes],
    )
