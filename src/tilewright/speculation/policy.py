"""Choice of the next round: which drafter drafts how many tokens, or plain decoding.

The policy runs on the host and needs no device. It compares expected tokens per second. Seconds are measured costs of rounds
(`costs.py`), corrected by timed dispatches. Tokens follow from acceptance, counted by draft position, so that a wide block
also measures every narrower one. The acceptance of n-grams follows from the text alone (`counterfactual.py`) and is counted for
each block width. A drafter that is off is tried again within an exploration budget, a fixed share of the time.
"""

import math
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from tilewright.runtime.interfaces import PLAIN, Choice

MEMORY = 64.0
"""Tokens of a row after which an observation's weight in a request has decayed to 1/e."""
REQUESTS = 16.0
"""Requests after which the weight of a request's acceptance in the expectation of new ones has decayed to 1/e."""
PRIOR_WEIGHT = 2.0
"""Weight of the expected acceptance, in observed rounds of a row."""
OPTIMISM = 0.7
"""Expected acceptance of the first drafter's drafts before any was observed. Acceptance measured in training replaces it."""
CAUTION = 0.3
"""Expected acceptance of the other drafters: trying each of several drafters costs more than most texts give back."""
EARLIER_WEIGHT = 4.0
"""Weight of the acceptance of earlier requests, in observed rounds of a row."""
EXPLORATION = 0.005
"""Share of the time that may be lost by trying drafters that are off, for one row. A trial of more rows needs fewer rounds."""
ROUNDS_PER_CHOICE = 16
"""Rounds between two choices; more where a dispatch is expensive (see `DISPATCHING`)."""
TRIAL_ROUNDS = 4
"""Rounds of a trial, summed over the rows."""
DISPATCHING = 0.025
"""Largest share of the time that the fixed cost of dispatches may take."""
PACE_GAIN = 0.5
"""Learning rate of the machine's pace, which changes with the load."""
BRANCHING = 0.85
MORE_BRANCHES = 0.94
"""Share of a chain's rejections that remains in a tree of `FEWEST_NODES` nodes, and at each doubling of the nodes, before any
tree was observed. Found with SmolLM2-135M-Instruct and its DFlash 2 drafter."""
FEWEST_NODES = 8
COST_GAIN = 0.3
"""Learning rate of a drafter's cost relative to the pace, which changes slowly."""
MOST_CORRECTION = 2.0
"""Largest ratio of a dispatch's time to its expected time that is learnt from. A larger one is an interruption."""
WORTHWHILE = 1.02
"""Expected speed-up from which another program is worth compiling."""


@dataclass(frozen=True)
class Cost:
    """Seconds of one round of the whole batch.

    Attributes:
        drafting: a round in which the drafter runs; a decode step for plain decoding.
        idle: a round in which the drafter does not run, since it has nothing to propose or n-grams draft in its place; None for
            a drafter that runs in every round.
    """

    drafting: float
    idle: float | None = None

    def expected(self, idle_share: float) -> float:
        return self.drafting if self.idle is None else idle_share * self.idle + (1 - idle_share) * self.drafting

    def times(self, factor: float) -> "Cost":
        return Cost(self.drafting * factor, None if self.idle is None else self.idle * factor)


def estimated(costs: Mapping[Choice, Cost], choice: Choice) -> Cost:
    """Returns a choice's measured cost, or a linear interpolation over the measured widths of its drafter, chains or trees.

    The width of a tree is its number of nodes. Plain decoding counts as width 1. Beyond the widest measured block, the last
    segment is extended. For a drafter without a measurement, the other drafters' costs are used.
    """
    if choice in costs:
        return costs[choice]
    measured = {other.verified: cost for other, cost in costs.items() if other.differs_in_width(choice)}
    idles = [cost.idle for cost in measured.values() if cost.idle is not None]
    measured = measured or {other.verified: cost for other, cost in costs.items() if other != PLAIN}
    if not measured:
        return costs[PLAIN]
    points = sorted({PLAIN.width: costs[PLAIN].drafting, **{width: cost.drafting for width, cost in measured.items()}}.items())
    widths, seconds = (np.asarray(each, float) for each in zip(*points, strict=True))
    slope = max(0.0, (seconds[-1] - seconds[-2]) / (widths[-1] - widths[-2]))
    beyond = max(0.0, choice.verified - widths[-1])
    return Cost(float(np.interp(choice.verified, widths, seconds) + slope * beyond), min(idles, default=None))


class Acceptance:
    """Acceptance of one drafter's drafts by position, with exponential forgetting.

    A new request is expected to accept what earlier requests did, until it has rounds of its own: a drafter that was useless
    for the last request may suit this one.

    Attributes:
        reached: rounds of a row that drafted the position and accepted all drafts before it, `[positions]`.
        accepted: those of `reached` that accepted the position, too.
        rounds, idle: all rounds of a row, and those in which the drafter was idle (see `Cost`).
        earlier: the four counts of earlier requests: `[positions]`, `[positions]`, and numbers.
        earlier_rates: acceptance of earlier requests by position; None before there is any.
    """

    def __init__(self, positions: int, expected: float | tuple[float, ...] = OPTIMISM):
        """Args:
        expected: acceptance before any observation, by position. A number is the first position's, and each later position
            expects the estimate of the one before.
        """
        self.reached = np.zeros(positions)
        self.accepted = np.zeros(positions)
        self.rounds = 0.0
        self.idle = 0.0
        self.earlier = (np.zeros(positions), np.zeros(positions), 0.0, 0.0)
        self.prior = expected
        self.earlier_rates: list[float] | None = None

    def observe(
        self, width: int, drafted: np.ndarray, accepted: np.ndarray, rows: float = 1.0, from_ngrams: np.ndarray | None = None
    ) -> None:
        """Counts rounds of one width.

        Args:
            drafted, accepted: number of drafts and of accepted drafts, for each round of each running row, `[N]`.
            rows: average number of rows that the rounds belong to.
            from_ngrams: rounds in which n-grams drafted in the drafter's place, bool `[N]`; None for none.
        """
        found = accepted[drafted > 0] if from_ngrams is None else accepted[(drafted > 0) & ~from_ngrams]
        at_least = np.cumsum(np.bincount(found, minlength=width)[::-1])[::-1][:width]
        decay = math.exp(-float(np.sum(accepted) + len(accepted)) / rows / MEMORY)
        self.reached *= decay
        self.accepted *= decay
        self.reached[: width - 1] += at_least[:-1]
        self.accepted[: width - 1] += at_least[1:]
        self.rounds = decay * self.rounds + len(accepted) / rows
        self.idle = decay * self.idle + (len(accepted) - len(found)) / rows

    def begin_request(self, rows: int) -> None:
        """Moves a request's share of the counts to `earlier`: that of one of `rows` rows, which a new request replaces."""
        share = 1 / rows
        decay = math.exp(-share / REQUESTS)
        reached, accepted, rounds, idle = self.earlier
        self.earlier = (
            decay * reached + share * self.reached,
            decay * accepted + share * self.accepted,
            decay * rounds + share * self.rounds,
            decay * idle + share * self.idle,
        )
        reached, accepted, _, _ = self.earlier
        self.earlier_rates = drawn_rates(reached, accepted, self.prior, PRIOR_WEIGHT) if reached.any() else None
        self.reached *= 1 - share
        self.accepted *= 1 - share
        self.rounds *= 1 - share
        self.idle *= 1 - share

    def rates(self) -> list[float]:
        """Returns each position's acceptance, given that all drafts before it were accepted."""
        if self.earlier_rates is None:
            return drawn_rates(self.reached, self.accepted, self.prior, PRIOR_WEIGHT)
        return drawn_rates(self.reached, self.accepted, self.earlier_rates, EARLIER_WEIGHT)

    def accepted_drafts(self) -> list[float]:
        """Returns the expected number of accepted drafts in blocks of 1, 2, ... tokens."""
        return list(accumulate(accumulate(self.rates(), operator.mul), initial=0.0))

    def idle_share(self, expected: float = 0.0) -> float:
        _, _, rounds, idle = self.earlier
        weight = PRIOR_WEIGHT
        if rounds:
            expected = (idle + PRIOR_WEIGHT * expected) / (rounds + PRIOR_WEIGHT)
            weight = EARLIER_WEIGHT
        return (self.idle + weight * expected) / (self.rounds + weight)


def drawn_rates(reached: np.ndarray, accepted: np.ndarray, prior: float | Sequence[float], weight: float) -> list[float]:
    """Returns each position's acceptance, given that all drafts before it were accepted.

    A position with few observations is drawn to its expected acceptance, plus half of the position before's deviation.

    Args:
        reached, accepted: counts; see `Acceptance`.
        prior: expected acceptance; see `Acceptance`.
        weight: weight of the expected acceptance, in rounds.
    """
    rates = []
    expected = prior if isinstance(prior, Sequence) else None
    before = prior[0] if isinstance(prior, Sequence) else prior
    for place, (count, agreed) in enumerate(zip(reached.tolist(), accepted.tolist(), strict=True)):
        mean = before
        if expected is not None:
            mean = min(max(expected[place] + (before - expected[max(place - 1, 0)]) / 2, 0.0), 1.0)
        before = (agreed + weight * mean) / (count + weight)
        rates.append(before)
    return rates


class History:
    """Observations that all batches of a model share: acceptance, relative costs and the exploration budget.

    Args:
        drafters: name of each drafter and the tokens in its widest block, in order of preference.
        expected: acceptance by position that training measured (see `Variant.expected_acceptance`), for some drafters.
        first: for some drafters, the drafter that drafts in their place when it finds something (see `NGramsFirst`).
        trees: choices with trees.

    Attributes:
        drafter_acceptance: acceptance of each drafter's chains.
        tree_acceptance: acceptance of trees, by depth.
        counterfactual: acceptance of n-gram rounds of one width, computed from the text.
        factors: correction of the measured costs of each kind of rounds (`Choice.kind`).
        budget: seconds that trials may still lose.
        off: seconds since each kind of rounds ran last.
    """

    def __init__(
        self,
        drafters: Mapping[str, int],
        expected: Mapping[str, Sequence[float]] | None = None,
        first: Mapping[str, str] | None = None,
        trees: Collection[Choice] = (),
    ):
        self.first = dict(first or {})
        self.drafter_acceptance: dict[str, Acceptance] = {}
        for place, (name, width) in enumerate(drafters.items()):
            rates = tuple((expected or {}).get(name, ()))
            rates = (*rates, *rates[-1:] * (width - 1 - len(rates)))[: width - 1]
            self.drafter_acceptance[name] = Acceptance(width - 1, rates or (CAUTION if place else OPTIMISM))
        self.counterfactual: dict[Choice, Acceptance] = {}
        self.tree_acceptance = {choice: Acceptance(choice.width - 1) for choice in sorted(trees, key=lambda each: each.nodes)}
        names = [PLAIN.drafter, *drafters, *(choice.kind for choice in trees)]
        self.factors = dict.fromkeys(names, 1.0)
        self.off = dict.fromkeys(names, 0.0)
        self.budget = 0.0

    def begin_request(self, rows: int) -> None:
        """Prepares for a new request among `rows` running ones."""
        for acceptance in (*self.drafter_acceptance.values(), *self.counterfactual.values(), *self.tree_acceptance.values()):
            acceptance.begin_request(rows)

    def acceptance(self, choice: Choice) -> Acceptance:
        if choice.nodes:
            return self.tree_acceptance[choice]
        return self.counterfactual.get(choice, self.drafter_acceptance[choice.drafter])

    def expect_trees(self) -> None:
        """Derives the expected acceptance of each tree from the next smaller tree that ran, or from the drafter's chains."""
        for choice, acceptance in self.tree_acceptance.items():
            smaller = [
                other for other in self.tree_acceptance if other.drafter == choice.drafter and other.nodes < choice.nodes
            ]
            ran = [other for other in smaller if self.tree_acceptance[other].rounds >= PRIOR_WEIGHT]
            source = self.tree_acceptance[ran[-1]] if ran else self.drafter_acceptance[choice.drafter]
            remaining = MORE_BRANCHES ** math.log2(choice.nodes / (ran[-1].nodes if ran else FEWEST_NODES))
            rates = source.rates()[: choice.width - 1]
            rates += rates[-1:] * (choice.width - 1 - len(rates))
            acceptance.prior = tuple(1 - (1 - rate) * min(1.0, remaining if ran else BRANCHING * remaining) for rate in rates)


class RoundPlan(NamedTuple):
    """The next rounds.

    Attributes:
        choice: their kind.
        rounds: their number until the next look.
        is_trial: True for a trial of a drafter that is off.
        seconds: expected seconds of one of them.
    """

    choice: Choice
    rounds: int
    is_trial: bool
    seconds: float


class Outlook(NamedTuple):
    """Expectation of a choice: tokens that a round adds to each row, and the round's seconds."""

    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens of a row per second."""
        return self.tokens / self.seconds


class Policy:
    """Chooses the rounds of batches of one shape.

    Attributes:
        costs: measured costs of some choices; plain decoding is one of them.
        ready: choices whose programs are compiled.
        pace: ratio of the time that dispatches take now to their expected time; None before the first timed dispatch.
        rows: rows that were running after the last dispatch.
    """

    def __init__(self, history: History, costs: Mapping[Choice, Cost], ready: Iterable[Choice], dispatch: float = 0.0):
        """Args:
        dispatch: fixed cost of a dispatch in seconds.

        Raises:
            ValueError: plain decoding has no cost or is not ready.
        """
        self.history = history
        self.costs = costs
        self.ready = set(ready)
        self.dispatch = dispatch
        self.pace: float | None = None
        self.rows = 1
        if PLAIN not in self.costs or PLAIN not in self.ready:
            raise ValueError(f"expected plain decoding among the choices that are ready and have a cost, found {self.ready}")

    def cost(self, choice: Choice) -> Cost:
        """Returns the measured or interpolated cost of a choice, corrected by timed dispatches."""
        return estimated(self.costs, choice).times(self.history.factors[choice.kind])

    def outlook(self, choices: Collection[Choice]) -> dict[Choice, Outlook]:
        """Returns the expectation of each choice."""
        history = self.history
        history.expect_trees()
        drafts: dict[Acceptance, list[float]] = {}

        def accepted(choice: Choice) -> float:
            source = history.acceptance(choice)
            if source not in drafts:
                drafts[source] = source.accepted_drafts()
            return drafts[source][choice.width - 1]

        found = {}
        for choice in choices:
            if choice == PLAIN:
                found[PLAIN] = Outlook(1.0, self.cost(PLAIN).drafting)
                continue
            if choice.drafter in history.first:
                first = Choice(history.first[choice.drafter], choice.width)
                idle = history.acceptance(choice).idle_share(1 - history.acceptance(first).idle_share())
                tokens = 1 + (1 - idle) * accepted(choice) + idle * accepted(first)
            else:
                idle = history.acceptance(choice).idle_share()
                tokens = 1 + (1 - idle) * accepted(choice)
            # A batch skips the drafter's pass only if all of its rows do.
            found[choice] = Outlook(tokens, self.cost(choice).expected(idle**self.rows))
        return found

    def best(self, outlook: Mapping[Choice, Outlook]) -> Choice:
        """Returns the choice with the most expected tokens per second; the narrowest of equals."""
        return max(outlook, key=lambda choice: (outlook[choice].rate, -choice.verified, choice.kind))

    def next(self, most: int) -> RoundPlan:
        """Returns the plan of the next dispatch, `most` rounds at most."""
        outlook = self.outlook(self.ready)
        best = self.best(outlook)
        off = {choice.kind for choice in outlook} - {best.kind}
        if off:
            name = max(off, key=lambda kind: (self.history.off[kind], kind))
            tried = self.best({choice: each for choice, each in outlook.items() if choice.kind == name})
            rounds = math.ceil(TRIAL_ROUNDS / self.rows)
            lost = rounds * (outlook[tried].seconds - outlook[tried].tokens / outlook[best].rate) + self.dispatch
            if lost <= self.history.budget:
                self.history.budget -= lost
                self.history.off[name] = 0.0
                return RoundPlan(tried, min(rounds, most), True, outlook[tried].seconds)
        least = math.ceil(self.dispatch / (DISPATCHING * outlook[best].seconds))
        return RoundPlan(best, min(max(ROUNDS_PER_CHOICE, least), most), False, outlook[best].seconds)

    def observe(
        self,
        choice: Choice,
        drafted: np.ndarray,
        accepted: np.ndarray,
        running: np.ndarray,
        seconds: float | None = None,
        from_ngrams: np.ndarray | None = None,
    ) -> None:
        """Counts the rounds of a finished dispatch.

        Args:
            drafted, accepted: drafts, and drafts that the target accepted, for each round and row, int `[rounds, rows]`.
            running: rows that were still running, bool `[rounds, rows]`.
            seconds: time of the dispatch; None if unknown. It includes the catch-up of the drafter's context, which is part of
                the cost of switching drafters.
            from_ngrams: rounds in which n-grams drafted in the drafter's place, bool `[rounds, rows]`; None for none.
        """
        history = self.history
        rounds = len(drafted)
        from_ngrams = np.zeros(running.shape, bool) if from_ngrams is None else from_ngrams
        idle = 0
        if choice != PLAIN:
            idle = int(np.sum(~np.any(running & (drafted > 0) & ~from_ngrams, axis=1)))
        if choice != PLAIN and choice not in history.counterfactual:
            rows = max(1.0, float(np.sum(running)) / max(1, rounds))
            acceptance = history.acceptance(choice)
            acceptance.observe(choice.width, drafted[running], accepted[running], rows, from_ngrams[running])
        self.rows = max(1, int(np.sum(running[-1:])))
        spent = self.dispatch + rounds * self.cost(choice).expected(idle / max(rounds, 1))
        history.budget += EXPLORATION / self.rows * spent
        for name in history.off:
            history.off[name] = 0.0 if name == choice.kind else history.off[name] + spent
        if seconds is not None and rounds:
            self.correct(choice.kind, seconds / spent)

    def correct(self, kind: str, slower: float) -> None:
        """Learns from a dispatch that took `slower` times its expected time: the pace, and the cost of rounds of this kind."""
        if self.pace is None:
            self.pace = slower
            return
        ratio = min(max(slower / self.pace, 1 / MOST_CORRECTION), MOST_CORRECTION)
        self.pace *= ratio**PACE_GAIN
        self.history.factors[kind] *= ratio**COST_GAIN

    def observe_counterfactual(self, drafter: str, rounds: Mapping[int, Sequence[tuple[int, int]]]) -> None:
        """Counts rounds that did not run, but whose result follows from the text.

        From the first call on, real rounds of these widths are no longer counted.

        Args:
            rounds: for each block width, (drafts, accepted drafts) of a row's consecutive rounds.
        """
        for width, pairs in rounds.items():
            choice = Choice(drafter, width)
            if choice not in self.history.counterfactual:
                self.history.counterfactual[choice] = Acceptance(width - 1, self.history.drafter_acceptance[drafter].prior)
            if pairs:
                self.history.counterfactual[choice].observe(width, *np.asarray(pairs).T, rows=self.rows)

    def worthwhile(self, choices: Collection[Choice], tokens: int) -> tuple[Choice, float] | None:
        """Returns the fastest of `choices`, which are not compiled yet, if it beats every choice that is ready.

        Args:
            tokens: tokens that a row still has to produce.

        Returns:
            The choice and the seconds that it is expected to save, or None.
        """
        outlook = self.outlook({*choices, *self.ready})
        best = self.best(outlook)
        current = self.best({choice: outlook[choice] for choice in self.ready})
        if best in self.ready or outlook[best].rate < WORTHWHILE * outlook[current].rate:
            return None
        return best, tokens / outlook[current].rate - tokens / outlook[best].rate
