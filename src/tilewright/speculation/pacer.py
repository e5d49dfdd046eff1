"""Who chooses a team's rounds: in an engine that serves, and in a call that compiles what pays as it goes."""

from collections.abc import Collection, Sequence
from typing import Any

import jax
from rich.console import Console
from rich.progress import track

from tilewright.parallel.mesh import agreed_seconds
from tilewright.runtime.interfaces import PLAIN, Choice
from tilewright.runtime.pace import Pace, kind_of
from tilewright.runtime.programs import STEPS_PER_DISPATCH
from tilewright.runtime.runner import ModelRunner, SentRounds
from tilewright.runtime.scheduler import TokenSequence
from tilewright.runtime.state import StepInfo
from tilewright.speculation.counterfactual import CounterfactualNGram, joined
from tilewright.speculation.drafters.ngram import NGram
from tilewright.speculation.pacing import Costed, Pacing, new_history
from tilewright.speculation.policy import AcceptanceHistory, Corrections, Policy
from tilewright.speculation.team import Team

FIRST_WIDTH = 4
"""Of the first drafted block on a CPU, where every row costs, while nothing is known; elsewhere it is the widest."""


class Pacer(Pace):
    """Chooses the rounds of an engine whose programs are all compiled, and whose costs are all measured.

    Args:
        team: as the programs have it.
        dispatch_s: how long a dispatch takes, about.
    """

    def __init__(self, team: Team, pacing: Pacing, runner: ModelRunner, dispatch_s: float, history: AcceptanceHistory):
        super().__init__(dispatch_s, STEPS_PER_DISPATCH)
        self.team = team
        self.pacing = pacing
        self.runner = runner
        self.history = history
        self.policies: dict[int, Policy] = {}
        self.ngram = next((member for member in team.members if isinstance(member, NGram)), None)

    def policy(self, rows: int) -> Policy:
        """Policy that chooses the rounds of so many rows."""
        if rows not in self.policies:
            self.policies[rows] = self.new_policy(rows)
        return self.policies[rows]

    def new_policy(self, rows: int) -> Policy:
        costs = self.pacing.measured(self.runner, rows, False, self.team.choices)
        return Policy(self.history, costs.rounds, self.team.choices, costs.dispatch)

    def follow(self, prompt: Sequence[int]) -> CounterfactualNGram | None:
        """Counterfactual of n-grams along a request's text, if they may draft."""
        return None if self.ngram is None else CounterfactualNGram(self.ngram, prompt, self.team.widths_of(self.ngram))

    def next(self, rows: int, most: int, hurried: bool, left: int) -> tuple[Choice | None, int]:
        policy = self.policy(rows)
        plan = policy.next(most)
        seconds = self.seconds.get((rows, plan.choice), policy.outlook([plan.choice])[plan.choice].seconds)
        return plan.choice, min(plan.rounds, self.most(seconds, hurried))

    def observe(
        self,
        sent: SentRounds,
        infos: StepInfo,
        sequences: Sequence[TokenSequence],
        heard: Sequence[int],
        began: float,
        ended: float,
    ) -> None:
        rounds = len(infos.committed)
        seconds = self.time(kind_of(sent), rounds, sent.at, sent.alone, began, ended)
        if sent.choice is not None and rounds and sent.masks == "none":
            self.take_in(sent.rows, sent.choice, infos, seconds)
        self.observe_ngrams(sent.rows, sequences, heard)

    def take_in(self, rows: int, choice: Choice, infos: StepInfo, seconds: float | None) -> None:
        """Tells the policy of so many rows what came of a dispatch, and how long it took."""
        self.policy(rows).observe(choice, infos.drafted, infos.accepted, infos.committed > 0, seconds, infos.from_ngrams)

    def observe_ngrams(self, rows: int, sequences: Sequence[TokenSequence], heard: Sequence[int]) -> None:
        """Tells the policy what n-gram drafting would have given behind the first `heard` tokens of each sequence."""
        if self.ngram is None:
            return
        own = (
            (sequence.followed, sequence.processor.tokens[before:]) for sequence, before in zip(sequences, heard, strict=True)
        )
        told = joined(each.push(tokens) for each, tokens in own if each is not None)
        self.policy(rows).observe_counterfactual(self.ngram.name, told)


def measured_pacer(pacing: Pacing, runner: ModelRunner, dispatch_s: float, console: Console | None = None) -> Pacer:
    """Pacer of an engine, with every choice measured for every number of rows."""
    team = runner.programs.drafter
    batches = runner.programs.table.batches
    assert isinstance(team, Team)
    for rows in track(batches, "measuring rounds", console=console, transient=True, disable=console is None):
        pacing.measured(runner, rows, False, team.choices)
    return Pacer(team, pacing, runner, dispatch_s, new_history(team))


class CallPacer(Pacer):
    """Chooses the rounds of a call.

    It begins with plain decoding and the choices of `firsts`. A further program is compiled between two dispatches, when
    the tokens still asked for are expected to gain more from it than it takes.

    Args:
        drawn: whether any of its rows draws.
    """

    def __init__(self, team: Team, pacing: Pacing, runner: ModelRunner, drawn: bool):
        super().__init__(team, pacing, runner, float("inf"), pacing.history)
        self.programs = runner.programs
        self.drawn = drawn

    def new_policy(self, rows: int) -> Policy:
        """A policy, after compiling and measuring what it needs first."""
        with self.pacing.lock:
            ready = self.compiled(rows)
            if PLAIN not in ready or len(ready) == 1:
                ready |= {PLAIN, *self.firsts(rows)}
                self.programs.warm(self.key(choice, rows) for choice in sorted(ready))
            costs = self.pacing.measured(self.runner, rows, self.drawn, ready)
            return Policy(self.history, costs.rounds, ready, costs.dispatch, self.corrections(rows))

    def key(self, choice: Choice, rows: int) -> Any:
        return self.programs.round_key(choice, rows, self.programs.layout.capacity, self.runner.sampling)

    def costed(self, rows: int) -> Costed:
        return Costed(self.programs.layout, rows, self.drawn)

    def corrections(self, rows: int) -> Corrections:
        return self.pacing.corrections_of(self.costed(rows))

    def compiled(self, rows: int) -> set[Choice]:
        return {choice for choice in self.team.choices if self.key(choice, rows) in self.programs.compiled}

    def firsts(self, rows: int) -> set[Choice]:
        """The choices to begin with, besides plain decoding.

        They are of the drafter that is named first, and of those whose training measured what they give: what these give is
        known before they run, and a call is seldom long enough to pay for a program that it was not begun with. Of each it is
        the most promising width, if costs are known. Then the most promising of all choices is among them, too.
        """
        drafted = self.team.choices[1:]
        names = {drafted[0].drafter} | {member.name for member in self.team.members if member.expected_acceptance}
        own = [[choice for choice in drafted if choice.drafter == name] for name in sorted(names)]
        known = self.pacing.known(self.programs, self.costed(rows))
        if known is None:
            narrow = jax.default_backend() == "cpu" and not self.team.masked
            return {
                max(choice for choice in each if not narrow or choice.width <= max(FIRST_WIDTH, each[0].width)) for each in own
            }
        policy = Policy(self.history, known.rounds, {PLAIN}, known.dispatch, self.corrections(rows))
        return {policy.best(policy.outlook(each)) for each in (drafted, *own)}

    def next(self, rows: int, most: int, hurried: bool, left: int) -> tuple[Choice | None, int]:
        self.add_wanted(rows, left)
        return super().next(rows, most, hurried, left)

    def add_wanted(self, rows: int, tokens: int) -> None:
        """Compiles and measures a choice that is not ready, if that pays for the `tokens` that a row has still to come."""
        policy = self.policy(rows)
        missing = set(self.team.choices) - policy.ready
        if not missing:
            return
        with self.pacing.lock:
            wanted = policy.wanted(missing, tokens)
            if wanted is None:
                return
            (choice, saved), compiled = wanted, self.compiled(rows)
            if choice not in compiled and saved < self.longest_compile(compiled, rows) and not self.pacing.patient:
                return
            self.programs.get(self.key(choice, rows))
            self.pacing.measured(self.runner, rows, self.drawn, {choice})
            policy.ready.add(choice)

    def longest_compile(self, compiled: Collection[Choice], rows: int) -> float:
        """Seconds that the slowest of the rounds' programs took."""
        seconds = max(self.programs.seconds.get(self.key(choice, rows), 0.0) for choice in compiled)
        return agreed_seconds(self.programs.target.mesh, seconds)

    def observe(
        self,
        sent: SentRounds,
        infos: StepInfo,
        sequences: Sequence[TokenSequence],
        heard: Sequence[int],
        began: float,
        ended: float,
    ) -> None:
        """Takes in a dispatch that was waited for as soon as it was sent."""
        if sent.choice is not None and len(infos.committed) and sent.masks == "none":
            seconds = agreed_seconds(self.programs.target.mesh, ended - sent.at)
            self.take_in(sent.rows, sent.choice, infos, seconds)
        self.observe_ngrams(sent.rows, sequences, heard)
