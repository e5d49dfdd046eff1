"""Choice of rounds for an engine that serves, and for a single call that compiles programs as they pay off."""

from abc import abstractmethod
from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import track

from tilewright.parallel.mesh import broadcast_seconds
from tilewright.runtime.interfaces import PLAIN, Choice
from tilewright.runtime.pace import Pace, kind_of
from tilewright.runtime.programs import STEPS_PER_DISPATCH
from tilewright.runtime.runner import ModelRunner, SentRounds
from tilewright.runtime.scheduler import TokenSequence
from tilewright.runtime.state import StepInfo
from tilewright.speculation.costs import LEAST_DISPATCH_S, RoundCosts, Run, no_dearer_with_fewer_rows
from tilewright.speculation.counterfactual import CounterfactualNGram, joined
from tilewright.speculation.drafters.ngram import NGram
from tilewright.speculation.pacing import CostKey, Pacing, new_history
from tilewright.speculation.policy import History, Policy
from tilewright.speculation.team import Team

FIRST_WIDTH = 4
"""Block size before any acceptance was observed, on CPUs, where every row costs. Elsewhere it is the widest block."""

TRIALS = 2
"""Timed dispatches from which a choice's cost is learnt."""
FIRST_TRIAL_ROUNDS = 4
"""The most rounds of a choice's first dispatch."""


class Pacer(Pace):
    """Chooses the rounds of batches whose policies `new_policy` makes.

    Args:
        team: the drafter of the programs.
        dispatch_s: seconds that a dispatch should take.
    """

    def __init__(self, team: Team, pacing: Pacing, runner: ModelRunner, dispatch_s: float, history: History):
        super().__init__(dispatch_s, STEPS_PER_DISPATCH)
        self.team = team
        self.pacing = pacing
        self.runner = runner
        self.history = history
        self.policies: dict[int, Policy] = {}
        self.ngram = next((member for member in team.members if isinstance(member, NGram)), None)

    def policy(self, rows: int) -> Policy:
        """Returns the policy for batches of `rows` rows."""
        if rows not in self.policies:
            self.policies[rows] = self.new_policy(rows)
        return self.policies[rows]

    def has_policy(self, rows: int) -> bool:
        """True if `policy` has the costs that it needs."""
        return True

    @abstractmethod
    def new_policy(self, rows: int) -> Policy:
        """Returns a new policy for batches of `rows` rows."""

    def follow(self, prompt: Sequence[int]) -> CounterfactualNGram | None:
        """Returns the counterfactual n-gram acceptance of a request, or None without an n-gram drafter."""
        if self.ngram is None:
            return None
        return CounterfactualNGram(self.ngram, prompt, self.team.widths_of(self.ngram), self.pacing.corpus)

    def begin_request(self, rows: int) -> None:
        self.history.begin_request(rows)

    def next(self, rows: int, most: int, hurried: bool, left: int) -> tuple[Choice | None, int]:
        plan = self.policy(rows).next(most)
        seconds = self.seconds.get((rows, plan.choice), plan.seconds)
        return plan.choice, min(plan.rounds, self.most(seconds, hurried))

    def observe(
        self,
        sent: SentRounds,
        infos: StepInfo,
        sequences: Sequence[TokenSequence],
        tokens_before: Sequence[int],
        began: float,
        ended: float,
    ) -> None:
        rounds = len(infos.committed)
        seconds = self.time(kind_of(sent), rounds, sent.at, sent.alone, began, ended)
        if sent.choice is not None and rounds and sent.masks == "none":
            self.observe_rounds(sent.rows, sent.choice, infos, seconds)
        self.observe_ngrams(sent.rows, sequences, tokens_before)

    def observe_rounds(self, rows: int, choice: Choice, infos: StepInfo, seconds: float | None) -> None:
        """Passes a finished dispatch and its time to the policy."""
        self.policy(rows).observe(choice, infos.drafted, infos.accepted, infos.committed > 0, seconds, infos.from_ngrams)

    def observe_ngrams(self, rows: int, sequences: Sequence[TokenSequence], tokens_before: Sequence[int]) -> None:
        """Passes counterfactual n-gram rounds to the policy.

        Args:
            tokens_before: number of each sequence's tokens that were passed before.
        """
        if self.ngram is None:
            return
        rounds = []
        for sequence, before in zip(sequences, tokens_before, strict=True):
            if sequence.chooser_state is not None:
                rounds.append(sequence.chooser_state.push(sequence.processor.tokens[before:]))
        if self.has_policy(rows):
            self.policy(rows).observe_counterfactual(self.ngram.name, joined(rounds))


class Trials:
    """Costs of the rounds of one batch size, learnt from dispatches.

    Attributes:
        costs: costs so far. The fixed cost of a dispatch counts as part of its rounds: the next dispatch is queued meanwhile.
        runs: timed dispatches of choices without a cost.
        calls: number of calls of `next`.
        next_trial: call of `next` in which a choice whose drafter found nothing to propose is tried again.
    """

    def __init__(self) -> None:
        self.costs = RoundCosts(LEAST_DISPATCH_S, {})
        self.runs: dict[Choice, list[Run]] = {}
        self.calls = 0
        self.next_trial: dict[Choice, int] = {}

    def next(self, choices: Sequence[Choice]) -> Choice | None:
        """Returns the next of these choices without a cost to try; None in every other call, for the policy's choice."""
        if PLAIN not in self.costs.rounds:
            return PLAIN
        self.calls += 1
        missing = [choice for choice in choices if self.next_trial.get(choice, 0) <= self.calls]
        return missing[0] if missing and self.calls % 2 else None

    def observe(self, choice: Choice, run: Run, may_be_idle: bool) -> None:
        """Counts a timed dispatch. The first one of a choice may also complete a drafter's context, and is left out."""
        runs = self.runs.setdefault(choice, [])
        if run.drafting == 0:
            self.next_trial[choice] = self.calls + 2 ** (1 + len(runs))
        runs.append(run)
        drafting = [timed for timed in runs[1:] if timed.drafting]
        if len(drafting) >= TRIALS:
            step = self.costs.rounds[PLAIN].drafting if choice != PLAIN else 0.0
            self.costs.rounds[choice] = min(
                (timed.cost(step, may_be_idle) for timed in drafting), key=lambda cost: cost.drafting
            )


class EnginePacer(Pacer):
    """Chooses the rounds of an engine among the programs that exist.

    Costs are measured beforehand (`measure`), or were stored by an earlier process, or are learnt from dispatches. Until the
    cost of a step is known, rows decode plainly. Then a choice without a cost has every other dispatch until it was timed.
    """

    def __init__(self, team: Team, pacing: Pacing, runner: ModelRunner, dispatch_s: float):
        super().__init__(team, pacing, runner, dispatch_s, new_history(team))
        self.trials: dict[int, Trials] = {}

    def measure(self, console: Console | None) -> None:
        """Measures every choice at every batch size."""
        batches = self.runner.programs.table.batches
        measured = {}
        for rows in track(batches, "measuring rounds", console=console, transient=True, disable=console is None):
            measured[rows] = self.pacing.measured(self.runner, rows, False, self.team.choices)
        for rows, costs in no_dearer_with_fewer_rows(measured).items():
            self.trials[rows] = Trials()
            self.trials[rows].costs = costs

    def costs(self, rows: int) -> RoundCosts:
        """Returns the costs of a batch size so far."""
        if rows not in self.trials:
            self.trials[rows] = Trials()
            stored_costs = self.pacing.stored_costs(self.runner.programs, CostKey(self.runner.programs.layout, rows, False))
            if stored_costs is not None:
                self.trials[rows].costs = RoundCosts(stored_costs.dispatch, dict(stored_costs.rounds))
        return self.trials[rows].costs

    def new_policy(self, rows: int) -> Policy:
        costs = self.costs(rows)
        return Policy(self.history, costs.rounds, {PLAIN}, costs.dispatch)

    def next(self, rows: int, most: int, hurried: bool, left: int) -> tuple[Choice | None, int]:
        costs = self.costs(rows)
        ready = [choice for choice in self.runner.choices_for(rows) if choice is not None]
        choice = self.trials[rows].next([choice for choice in ready if choice not in costs.rounds])
        if choice is not None:
            return choice, min(most, self.most(self.seconds.get((rows, choice), self.dispatch_s / FIRST_TRIAL_ROUNDS), hurried))
        self.policy(rows).ready = {choice for choice in ready if choice in costs.rounds}
        return super().next(rows, most, hurried, left)

    def observe_rounds(self, rows: int, choice: Choice, infos: StepInfo, seconds: float | None) -> None:
        costs = self.costs(rows)
        if choice not in costs.rounds and seconds is not None:
            drafts = (infos.drafted > 0) & ~infos.from_ngrams
            drafting = len(infos.drafted) if choice == PLAIN else int(np.sum(np.any(drafts, axis=1)))
            run = Run(seconds, drafting, len(infos.drafted) - drafting)
            self.trials[rows].observe(choice, run, self.team.variant(choice).may_be_idle)
        if choice in costs.rounds:
            super().observe_rounds(rows, choice, infos, seconds)

    def has_policy(self, rows: int) -> bool:
        return PLAIN in self.costs(rows).rounds


class CallPacer(Pacer):
    """Chooses the rounds of a single call.

    The call begins with plain decoding and the choices of `first_choices`. Another program is compiled between two dispatches
    once the remaining tokens are expected to gain more time from it than its compilation takes.

    Args:
        drawn: True if any row samples its tokens.
    """

    def __init__(self, team: Team, pacing: Pacing, runner: ModelRunner, drawn: bool):
        super().__init__(team, pacing, runner, float("inf"), pacing.history)
        self.programs = runner.programs
        self.drawn = drawn

    def new_policy(self, rows: int) -> Policy:
        """Returns a policy after compiling and measuring its first choices."""
        with self.pacing.lock:
            ready = self.compiled(rows)
            if PLAIN not in ready or len(ready) == 1:
                ready |= {PLAIN, *self.first_choices(rows)}
                self.programs.warm(self.key(choice, rows) for choice in sorted(ready))
            costs = self.pacing.measured(self.runner, rows, self.drawn, ready)
            return Policy(self.history, costs.rounds, ready, costs.dispatch)

    def measure(self, console: Console | None) -> None:
        """Compiles and measures the first choices, before the timed generation."""
        self.policy(self.programs.layout.batch)

    def key(self, choice: Choice, rows: int) -> Any:
        return self.programs.round_key(choice, rows, self.programs.layout.capacity, self.runner.sampling)

    def cost_key(self, rows: int) -> CostKey:
        return CostKey(self.programs.layout, rows, self.drawn)

    def compiled(self, rows: int) -> set[Choice]:
        return {choice for choice in self.team.choices if self.key(choice, rows) in self.programs.compiled}

    def first_choices(self, rows: int) -> set[Choice]:
        """Returns the choices to begin with, besides plain decoding.

        They are one width of the first drafter and of every drafter whose acceptance training measured: a call is seldom long
        enough to pay for a program that it did not begin with. With known costs, the width is the one with the best outlook,
        and the best of all choices, trees included, is added.
        """
        drafted = self.team.choices[1:]
        names = {drafted[0].drafter} | {member.name for member in self.team.members if member.expected_acceptance}
        widths = [[choice for choice in drafted if choice.kind == name] for name in sorted(names)]
        stored_costs = self.pacing.stored_costs(self.programs, self.cost_key(rows))
        if stored_costs is None:
            narrow = jax.default_backend() == "cpu" and not self.team.masked
            return {
                max(choice for choice in choices if not narrow or choice.width <= max(FIRST_WIDTH, choices[0].width))
                for choices in widths
            }
        policy = Policy(self.history, stored_costs.rounds, {PLAIN}, stored_costs.dispatch)
        return {policy.best(policy.outlook(choices)) for choices in (drafted, *widths)}

    def next(self, rows: int, most: int, hurried: bool, left: int) -> tuple[Choice | None, int]:
        self.add_worthwhile(rows, left)
        return super().next(rows, most, hurried, left)

    def add_worthwhile(self, rows: int, tokens: int) -> None:
        """Compiles and measures one more choice if that pays off within the remaining `tokens` of a row."""
        policy = self.policy(rows)
        missing = set(self.team.choices) - policy.ready
        if not missing:
            return
        with self.pacing.lock:
            worthwhile = policy.worthwhile(missing, tokens)
            if worthwhile is None:
                return
            (choice, saved), compiled = worthwhile, self.compiled(rows)
            if choice not in compiled and saved < self.longest_compile(compiled, rows) and not self.pacing.patient:
                return
            self.programs.get(self.key(choice, rows))
            self.pacing.measured(self.runner, rows, self.drawn, {choice})
            policy.ready.add(choice)

    def longest_compile(self, compiled: Collection[Choice], rows: int) -> float:
        """Returns the compile time in seconds of the slowest program of a round."""
        seconds = max(self.programs.seconds.get(self.key(choice, rows), 0.0) for choice in compiled)
        return broadcast_seconds(self.programs.target.mesh, seconds)

    def observe(
        self,
        sent: SentRounds,
        infos: StepInfo,
        sequences: Sequence[TokenSequence],
        tokens_before: Sequence[int],
        began: float,
        ended: float,
    ) -> None:
        """Passes a dispatch to the policy. A call waits for every dispatch right after sending it."""
        if sent.choice is not None and len(infos.committed) and sent.masks == "none":
            seconds = broadcast_seconds(self.programs.target.mesh, ended - sent.at)
            self.observe_rounds(sent.rows, sent.choice, infos, seconds)
        self.observe_ngrams(sent.rows, sequences, tokens_before)
