"""Rounds chosen as decoding goes: what all batches of a model share, the costs of rounds and what came of them so far."""

import threading
from collections.abc import Collection
from typing import Any

import jax

from tilewright.decode.batch import Batch
from tilewright.decode.costs import BatchBench, CostFiles, Costs, configuration, measure
from tilewright.decode.policy import PLAIN, Choice, History, Policy
from tilewright.decode.programs import Programs
from tilewright.decode.shapes import Shape
from tilewright.decode.team import Team
from tilewright.parallel.mesh import agreed_seconds

FIRST_WIDTH = 4
"""Of the first drafted block on a CPU, where every row costs, while nothing is known; elsewhere it is the widest."""


class Pacing:
    """Makes the policies of a model's batches; safe to use from several threads.

    A batch begins with plain decoding and the choice that promises most. A further program is compiled between two dispatches,
    when the tokens still asked for are expected to gain more from it than it takes. `LanguageModel.warm` compiles all.

    Attributes:
        history: what all batches have seen.
        costs: of the shapes that were used.
        files: where costs are kept; None measures them in every process.
        looked: the shapes whose file was read, or found not to fit.
        patient: compiles whatever promises to be faster, however long it takes: for measurements.
    """

    def __init__(self, team: Team, programs: Programs, dtype: str, weights: str, files: CostFiles | None = None):
        self.team, self.programs, self.dtype, self.weights, self.files = team, programs, dtype, weights, files
        self.history = History({member.name: member.block_size for member in team.members})
        self.costs: dict[Shape, Costs] = {}
        self.looked: set[Shape] = set()
        self.patient = False
        self.lock = threading.Lock()

    def policy(self, batch: Batch) -> Policy:
        """A policy for a batch that is about to begin, after compiling and measuring what it needs first."""
        with self.lock:
            ready = self.compiled(batch)
            known = self.known(batch.shape)
            if PLAIN not in ready or len(ready) == 1:
                ready |= {PLAIN, self.first(known)}
                self.programs.warm(batch.round_key(choice) for choice in sorted(ready))
            costs = self.measured(batch, ready)
            return Policy(self.history, costs.rounds, ready, costs.dispatch)

    def compiled(self, batch: Batch) -> set[Choice]:
        return {choice for choice in self.team.choices if batch.round_key(choice) in self.programs.compiled}

    def first(self, known: Costs | None) -> Choice:
        """What promises most of all choices but plain decoding."""
        drafted = self.team.choices[1:]
        if known is None:
            of_first = [choice for choice in drafted if choice.drafter == drafted[0].drafter]
            narrow = jax.default_backend() == "cpu" and not self.team.masked
            return max(choice for choice in of_first if not narrow or choice.width <= max(FIRST_WIDTH, of_first[0].width))
        policy = Policy(self.history, known.rounds, {PLAIN}, known.dispatch)
        return policy.best(policy.outlook(drafted))

    def known(self, shape: Shape) -> Costs | None:
        """The costs of a shape as far as they were measured, now or by an earlier process."""
        if shape not in self.costs and self.files is not None and shape not in self.looked:
            self.looked.add(shape)
            found = self.files.read(self.about(shape), self.team.choices)
            if found is not None:
                self.costs[shape] = found
        return self.costs.get(shape)

    def about(self, shape: Shape) -> dict[str, Any]:
        return configuration(self.team, self.programs, shape, self.dtype, self.weights)

    def measured(self, batch: Batch, choices: Collection[Choice]) -> Costs:
        """The costs of a shape, those of `choices` among them; what is missing is measured beside plain decoding."""
        known = self.known(batch.shape)
        missing = sorted(choice for choice in choices if known is None or choice not in known.rounds)
        if known is not None and not missing:
            return known
        bench = BatchBench(self.programs, batch.shape, self.team)
        found = measure(bench, sorted({PLAIN, *missing}))
        bench.batch.free()
        if known is not None:  # a machine that is slower now than it was then is slower for all choices
            now = known.rounds[PLAIN].drafting / found.rounds[PLAIN].drafting
            known.rounds.update({choice: found.rounds[choice].times(now) for choice in missing})
            found = known
        self.costs[batch.shape] = found
        if self.files is not None:
            self.files.write(self.about(batch.shape), found)
        return found

    def add_wanted(self, policy: Policy, batch: Batch, tokens: int) -> None:
        """Compiles and measures a choice that a batch lacks, if that pays for the `tokens` that a row has still to come."""
        missing = set(self.team.choices) - policy.ready
        if not missing:
            return
        with self.lock:
            wanted = policy.wanted(missing, tokens)
            if wanted is None:
                return
            (choice, saved), compiled = wanted, self.compiled(batch)
            seconds = max(self.programs.seconds.get(batch.round_key(each), 0.0) for each in compiled)
            longest = agreed_seconds(self.programs.target.mesh, seconds)
            if choice not in compiled and saved < longest and not self.patient:
                return
            self.programs.get(batch.round_key(choice))
            self.measured(batch, {choice})
            policy.ready.add(choice)
