"""Which round runs next: whose drafts, and how many, or plain decoding, by what a round costs and what it is expected to give.

Plain host code without a device: it is told costs and what came of past rounds, and says what to run. Acceptance is kept for
each drafter by position, so that a wide block tells of all narrower ones, and forgotten slowly, since texts change. What
n-grams would have given is plain from the text, and kept for each width by itself. What is not running is tried now and then,
within an allowance: a share of the time that passes.
"""

import math
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, cast

import numpy as np

from tilewright.runtime.interfaces import PLAIN, Choice

ALLOWANCE = 0.005
"""The share of the time that may be lost to trying drafters that are off."""
CURIOSITY = 0.02
"""The same for those of which next to nothing was seen yet."""
PROBE = 4
"""Rounds in which a drafter that is off is tried."""
FIRST_LOOK = 4
"""Rounds after which a new choice is looked at; each further look comes after twice as many. One that may be idle sees by
itself where it has nothing, and begins with as many rounds as there may be between two looks. Of several drafters
the better one changes within a text, and a long run of the wrong one costs more than looks: there each comes after so few."""
JOINED_LOOK = 16
"""Rounds after which a new choice is looked at where n-grams draft in the place of another drafter: with it or by themselves,
rounds differ less, and most of what a look sees in a few of them is chance."""
REFRESHED = 64
"""Rounds after which drafters that are off are thought of anew."""
DISPATCHING = 0.025
"""The share of the time that dispatches may take by themselves: where they cost much beside a round, looks are rarer."""
MEMORY = 12.0
"""Tokens of a row after which what a batch has seen counts a third."""
LONG_MEMORY = 256.0
"""The same of what all batches together have seen: about two answers, for the next may be of another kind."""
WEIGHT = 2.0
"""How many rows' rounds an expectation counts for against what is seen."""
OPTIMISM = 0.7
"""The expected acceptance of a draft of which nothing was seen yet, of the drafter that is named first. One whose training
measured what it gives on held-out text expects that."""
CAUTION = 0.3
"""The same of the others: to try each of several costs more than most texts give back, and the allowance tries them too."""
UNEVEN = 0.2
"""Standard deviation of the logarithm of a dispatch's time where nothing changes. With the next it is from a machine that a
dozen processes shared, where what dispatches took, by their costs, differed from one to the next by 0.3."""
DRIFT = 0.1
"""Standard deviation of the logarithm by which the machine's pace changes from one dispatch to the next. What a drafter
costs beside others changes a tenth as much, since texts grow: else a server would not take it in any more after a while."""
MISMEASURED = 0.15
"""Standard deviation of the logarithm of the error in a drafter's measured costs beside others'. What its widths cost beside
each other was measured in turns; single dispatches are too uneven to tell them apart."""
ANY_PACE = 10.0
"""Standard deviation of the logarithm of the pace that a batch begins with: as good as nothing is known. A shape may have
been measured when the machine had several times as much to do as now, the next one when it was idle, which says nothing
of choices beside each other."""
MOST_CORRECTION = 2.0
"""The largest quotient that is believed of a dispatch beside those before it: it may have been interrupted."""
WORTHWHILE = 1.02
"""How much faster a choice must be expected to be for a program to be compiled."""


@dataclass(frozen=True)
class Cost:
    """Seconds of a round of the whole batch.

    Attributes:
        drafting: of one that drafts (of a step, for plain decoding).
        idle: of one in which the drafter is idle: it found nothing to propose, or n-grams did in its place; None of a drafter
            that drafts in every round.
    """

    drafting: float
    idle: float | None = None

    def expected(self, idle_share: float) -> float:
        return self.drafting if self.idle is None else idle_share * self.idle + (1 - idle_share) * self.drafting

    def times(self, factor: float) -> "Cost":
        return Cost(self.drafting * factor, None if self.idle is None else self.idle * factor)


def estimated(costs: Mapping[Choice, Cost], choice: Choice) -> Cost:
    """Cost of a choice: as measured, or else between, or beyond, the measured widths of its drafter on a straight line.

    Plain decoding counts as a width of 1. A drafter of which nothing was measured is taken to cost what the others do.
    """
    if choice in costs:
        return costs[choice]
    own = {one.width: cost for one, cost in costs.items() if one.drafter == choice.drafter}
    idles = [cost.idle for cost in own.values() if cost.idle is not None]
    own = own or {one.width: cost for one, cost in costs.items() if one != PLAIN}
    if not own:
        return costs[PLAIN]
    points = sorted({PLAIN.width: costs[PLAIN].drafting, **{width: cost.drafting for width, cost in own.items()}}.items())
    widths, seconds = (np.asarray(each, float) for each in zip(*points, strict=True))
    slope = max(0.0, (seconds[-1] - seconds[-2]) / (widths[-1] - widths[-2]))
    beyond = max(0.0, choice.width - widths[-1])
    return Cost(float(np.interp(choice.width, widths, seconds) + slope * beyond), min(idles, default=None))


class Acceptance:
    """Acceptance of one drafter's drafts, by position, counted with a memory that fades.

    Attributes:
        reached: rounds (of a row) that drafted, whose block had the position and that accepted all before it, `[positions]`.
        accepted: of these, those that accepted it too. A position for which nothing was proposed counts as not accepted.
        rounds, idle: of a row: all, and those in which the drafter was idle (see `Cost`).
    """

    def __init__(self, positions: int, memory: float, expected: float | tuple[float, ...] = OPTIMISM):
        """Args:
        expected: the acceptance of a draft as long as nothing was seen; a number is that of the first, on which those behind
            it go by.
        """
        self.reached = np.zeros(positions)
        self.accepted = np.zeros(positions)
        self.rounds = self.idle = 0.0
        self.memory = memory
        self.prior = expected

    def observe(
        self, width: int, drafted: np.ndarray, accepted: np.ndarray, rows: float = 1.0, from_ngrams: np.ndarray | None = None
    ) -> None:
        """Counts rounds of a width.

        Args:
            drafted, accepted: of each row that was still running, in each round, `[N]`.
            rows: how many these are of, on average.
            from_ngrams: where n-grams drafted in the drafter's place, bool `[N]`; None for nowhere.
        """
        found = accepted[drafted > 0] if from_ngrams is None else accepted[(drafted > 0) & ~from_ngrams]
        at_least = np.cumsum(np.bincount(found, minlength=width)[::-1])[::-1][:width]
        self.fade(float(np.sum(accepted) + len(accepted)) / rows)
        self.reached[: width - 1] += at_least[:-1]
        self.accepted[: width - 1] += at_least[1:]
        self.rounds += len(accepted) / rows
        self.idle += (len(accepted) - len(found)) / rows

    def fade(self, tokens: float) -> None:
        """Forgets as much as so many tokens of a row, whoever drafted them, let it forget."""
        kept = math.exp(-tokens / self.memory)
        self.reached *= kept
        self.accepted *= kept
        self.rounds = self.rounds * kept
        self.idle = self.idle * kept

    def rates(self, expected: Sequence[float] | None = None) -> list[float]:
        """The acceptance of each position, given that all before it were accepted.

        Args:
            expected: what to expect where little was seen, and half of how far the position before was off that; by default
                what was expected at first, and where that is a number, what the position before has.
        """
        rates = []
        first = self.prior
        if expected is None and isinstance(first, tuple):
            expected = first
        before = expected[0] if expected is not None else cast(float, first)
        for place, (reached, accepted) in enumerate(zip(self.reached.tolist(), self.accepted.tolist(), strict=True)):
            prior = before
            if expected is not None:
                prior = min(max(expected[place] + (before - expected[max(place - 1, 0)]) / 2, 0.0), 1.0)
            before = (accepted + WEIGHT * prior) / (reached + WEIGHT)
            rates.append(before)
        return rates

    def idle_share(self, expected: float = 0.0) -> float:
        return (self.idle + WEIGHT * expected) / (self.rounds + WEIGHT)


class AcceptanceHistory:
    """Acceptance that all batches of a model have seen so far: what a new batch expects.

    Args:
        drafters: the names of those that may draft, each with the most tokens in its block; the first is expected to be good.
        expected: the acceptance of some of them by position (see `Variant.expected_acceptance`), at least one number for each.
        first: of some of them another one, which drafts in their place where it has something (see `NGramsFirst`).
    """

    def __init__(
        self,
        drafters: Mapping[str, int],
        expected: Mapping[str, Sequence[float]] | None = None,
        first: Mapping[str, str] | None = None,
    ):
        self.widest = dict(drafters)
        self.first = dict(first or {})
        self.seen: dict[str, Acceptance] = {}
        for place, (name, width) in enumerate(drafters.items()):
            told = tuple((expected or {}).get(name, ()))
            beyond = told[-1:] * (width - 1 - len(told))
            hope = (*told, *beyond)[: width - 1] if told else CAUTION if place else OPTIMISM
            self.seen[name] = Acceptance(width - 1, LONG_MEMORY, hope)
        self.counterfactual: dict[Choice, Acceptance] = {}
        self.allowance = dict.fromkeys([PLAIN.drafter, *drafters], 0.0)

    def of(self, choice: Choice) -> Acceptance:
        """Acceptance seen of a choice, or told from the text, if it was."""
        return self.counterfactual.get(choice, self.seen[choice.drafter])


class RoundPlan(NamedTuple):
    """The next rounds: what they do, how many at most before the next look, and whether they only try a drafter."""

    choice: Choice
    rounds: int
    tries: bool = False


class Outlook(NamedTuple):
    """Expectation of a choice: tokens that a round adds to each row, its seconds, and tokens of a row for each second."""

    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Corrections:
    """Corrections of measured costs by timed dispatches: the machine's pace, and a factor for each drafter beside the others.

    A Kalman filter of logarithms: of what a dispatch is slower than the one before, a new drafter has a large share, the same
    one a small one. Batches come and go and the pace with them, but what was learnt of drafters stays, and how sure it is: a
    filter that began anew with each batch would believe every one's disturbances as much as the first's.

    Attributes:
        factors: by which each drafter's measured costs are multiplied, those of all its widths alike.
        pace: seconds that pass now for each one that corrected costs say, whatever runs.
        uncertain: covariance of the logarithms of the pace and of the factors, in their order.
    """

    def __init__(self, drafters: Iterable[str]):
        self.factors = dict.fromkeys([PLAIN.drafter, *drafters], 1.0)
        self.uncertain = np.diag([0.0, *[MISMEASURED**2] * len(self.factors)])
        self.begin()

    def begin(self) -> None:
        """Forgets the pace."""
        self.pace = 1.0
        self.timed = False
        self.uncertain[0] = 0.0
        self.uncertain[:, 0] = 0.0
        self.uncertain[0, 0] = ANY_PACE**2

    def observe(self, drafter: str, slower: float) -> None:
        """Takes in that a dispatch of a drafter took so many times as long as its corrected costs say."""
        of = np.asarray([True, *(name == drafter for name in self.factors)], float)
        slower /= self.pace
        if self.timed:
            slower = min(max(slower, 1 / MOST_CORRECTION), MOST_CORRECTION)
        shared = self.uncertain @ of
        gain = shared / (of @ shared + UNEVEN**2)
        self.uncertain = self.uncertain - np.outer(gain, shared)
        self.uncertain += np.diag([DRIFT**2, *[(DRIFT / 10) ** 2] * len(self.factors)])
        shares = slower**gain
        self.timed = True
        self.pace *= float(shares[0])
        of_names = zip(self.factors.items(), shares[1:].tolist(), strict=True)
        self.factors = {name: factor * share for (name, factor), share in of_names}


class Policy:
    """Chooses the rounds of one batch.

    Attributes:
        costs: measured, of some choices, plain decoding among them.
        corrections: what dispatches say beside these.
        ready: the choices that may run.
        counterfactual: what this batch's text tells of rounds whether they run or not, of each choice by itself; see
            `observe_counterfactual`.
    """

    def __init__(
        self,
        history: AcceptanceHistory,
        costs: Mapping[Choice, Cost],
        ready: Iterable[Choice],
        dispatch: float = 0.0,
        corrections: Corrections | None = None,
    ):
        """Args:
        dispatch: seconds that a dispatch costs, whatever it runs.
        corrections: of batches before, which it goes on with.

        Raises:
            ValueError: plain decoding has no cost or is not ready.
        """
        self.history = history
        self.costs = costs
        self.ready = set(ready)
        self.dispatch = dispatch
        self.corrections = corrections or Corrections(history.widest)
        self.corrections.begin()
        if PLAIN not in self.costs or PLAIN not in self.ready:
            raise ValueError(f"expected plain decoding among the choices that are ready and have a cost, found {self.ready}")
        self.seen = {name: Acceptance(width - 1, MEMORY) for name, width in history.widest.items()}
        self.last: Choice | None = None
        self.stretch = FIRST_LOOK
        self.known: dict[Choice | str, tuple[list[float], float]] = {}
        self.faded = 0
        self.trying: Choice | None = None
        self.counterfactual: dict[Choice, Acceptance] = {}
        self.rows = 1

    def cost(self, choice: Choice) -> Cost:
        """The cost of a choice, measured or estimated, and corrected."""
        return estimated(self.costs, choice).times(self.corrections.factors[choice.drafter])

    def outlook(self, choices: Collection[Choice]) -> dict[Choice, Outlook]:
        """Expectations of these choices."""
        found = {}
        for choice in choices:
            if choice == PLAIN:
                found[PLAIN] = Outlook(1.0, self.cost(PLAIN).drafting)
                continue
            accepted, idle = self.expected(choice)
            tokens = 1 + (1 - idle) * accepted[choice.width - 1]
            if choice.drafter in self.history.first:
                tokens += idle * self.expected(self.first(choice))[0][choice.width - 1]
            # A batch is idle where all of its rows are.
            found[choice] = Outlook(tokens, self.cost(choice).expected(idle**self.rows))
        return found

    def first(self, choice: Choice) -> Choice:
        """The choice that drafts in the place of another where it has something."""
        return Choice(self.history.first[choice.drafter], choice.width)

    def expected(self, choice: Choice) -> tuple[list[float], float]:
        """The drafts that are expected to be accepted of blocks of each width, from 1 on, where the choice's drafter is not
        idle, and the share of a row's rounds in which it is."""
        source = choice if choice in self.history.counterfactual else choice.drafter
        if source not in self.known:
            before = self.history.of(choice)
            own = self.own(choice)
            accepted = list(accumulate(accumulate(own.rates(before.rates()), operator.mul), initial=0.0))
            # Where another one drafts first, the text tells how often that has something.
            idle = 1 - self.expected(self.first(choice))[1] if choice.drafter in self.history.first else 0.0
            self.known[source] = accepted, own.idle_share(before.idle_share(idle))
        return self.known[source]

    def own(self, choice: Choice) -> Acceptance:
        """Acceptance that this batch has seen of a choice, or told from the text, if it may be."""
        if choice not in self.history.counterfactual:
            return self.seen[choice.drafter]
        if choice not in self.counterfactual:
            self.counterfactual[choice] = Acceptance(choice.width - 1, MEMORY)
        return self.counterfactual[choice]

    def next(self, most: int) -> RoundPlan:
        """Plan of the next dispatch, `most` rounds at most."""
        outlook = self.outlook(self.ready)
        best = self.best(outlook)
        tried = self.tried(outlook, best)
        if tried is not None:
            self.trying = tried  # until it is observed, which may be after further plans
            return RoundPlan(tried, min(PROBE, most), tries=True)
        drafters = {choice.drafter for choice in outlook} - {PLAIN.drafter}
        first = min(most, JOINED_LOOK) if drafters & self.history.first.keys() else FIRST_LOOK
        if len(drafters) == 1 and self.watches(best):
            first = most
        self.stretch = min(2 * self.stretch, most) if best == self.last else first
        if len(drafters - {*self.history.first.values()}) > 1:
            self.stretch = min(self.stretch, FIRST_LOOK)
        self.last = best
        if best != PLAIN and not self.watches(best):  # a few good rounds may be luck
            most = min(most, max(first, int(self.history.of(best).rounds)))
        worth_it = math.ceil(self.dispatch / (DISPATCHING * outlook[best].seconds))
        return RoundPlan(best, min(max(self.stretch, worth_it), most))

    def best(self, outlook: Mapping[Choice, Outlook]) -> Choice:
        """The choice with the most expected tokens a second; of equals the narrower."""
        return max(outlook, key=lambda choice: (outlook[choice].rate, -choice.width, choice.drafter))

    def watches(self, choice: Choice) -> bool:
        """True if a choice's rounds see by themselves that there is nothing to propose."""
        return choice in self.costs and self.costs[choice].idle is not None and choice.drafter not in self.history.first

    def tried(self, outlook: Mapping[Choice, Outlook], best: Choice) -> Choice | None:
        """A choice of a drafter that is off, if what trying it is expected to lose is within the allowance."""
        drafters = {choice.drafter for choice in outlook} - {best.drafter}
        for drafter in sorted(drafters, key=lambda name: (-self.history.allowance[name], name)):
            choice = self.best({one: each for one, each in outlook.items() if one.drafter == drafter})
            lost = PROBE * (outlook[choice].seconds - outlook[choice].tokens / outlook[best].rate) + self.dispatch
            if lost <= self.history.allowance[drafter]:
                return choice
        return None

    def observe(
        self,
        choice: Choice,
        drafted: np.ndarray,
        accepted: np.ndarray,
        running: np.ndarray,
        seconds: float | None = None,
        from_ngrams: np.ndarray | None = None,
    ) -> None:
        """Takes in what came of the rounds of a dispatch.

        Args:
            drafted, accepted: drafts of each round and row, and how many the target agreed with, int `[rounds, rows]`.
            running: whether the row was still running, bool `[rounds, rows]`.
            seconds: that the dispatch took; they correct what its choice is taken to cost, a little at a time. What its context
                needed to catch up counts: it is part of what the drafter costs in turns as they are. And most dispatches of
                one that is seldom on begin so: else a cost that was found too high would stay.
            from_ngrams: where n-grams drafted in the drafter's place, bool `[rounds, rows]`; None for nowhere.
        """
        rounds = len(drafted)
        idle = 0
        from_ngrams = np.zeros(running.shape, bool) if from_ngrams is None else from_ngrams
        if choice != PLAIN:
            idle = int(np.sum(~np.any(running & (drafted > 0) & ~from_ngrams, axis=1)))
        if choice != PLAIN and choice not in self.history.counterfactual:
            rows = max(1.0, float(np.sum(running)) / max(1, rounds))
            for seen in (self.seen[choice.drafter], self.history.seen[choice.drafter]):
                seen.observe(choice.width, drafted[running], accepted[running], rows, from_ngrams[running])
        for name, seen in self.seen.items():
            if name != choice.drafter:
                seen.fade(float(np.sum(accepted[running]) + np.sum(running)) / max(1, running.shape[1]))
        self.rows = max(1, int(np.sum(running[-1:])))
        self.forget([choice.drafter], rounds)
        spent = self.dispatch + rounds * self.cost(choice).expected(idle / max(rounds, 1))
        if seconds is not None and rounds:
            self.corrections.observe(choice.drafter, seconds / spent)
        # A trial also takes what its context needs to catch up, and its program to be fetched into caches: all of it counts.
        late = 0.0
        if choice == self.trying:
            late = min(max((seconds or 0.0) / self.corrections.pace - spent, 0.0), MOST_CORRECTION * spent)
            self.trying = None
        allowance = self.history.allowance
        allowance[choice.drafter] = -late
        for name in allowance:
            if name != choice.drafter:
                unknown = name != PLAIN.drafter and self.history.seen[name].rounds < PROBE
                allowance[name] += (CURIOSITY if unknown else ALLOWANCE) * spent / (len(allowance) - 1)

    def observe_counterfactual(self, drafter: str, rounds: Mapping[int, Sequence[tuple[int, int]]]) -> None:
        """Takes in rounds of a drafter that did not run: what they would have given is plain from the text.

        From the first time on, rounds of these widths that run tell nothing more.

        Args:
            rounds: of each width (drafted, accepted) of those of a row, one after the other: drafts, and how many of them the
                target would have agreed with.
        """
        for width, own in rounds.items():
            choice = Choice(drafter, width)
            if choice not in self.history.counterfactual:
                self.history.counterfactual[choice] = Acceptance(width - 1, LONG_MEMORY, self.history.seen[drafter].prior)
            if own:
                for acceptance in (self.own(choice), self.history.counterfactual[choice]):
                    acceptance.observe(width, *np.asarray(own).T, rows=self.rows)
        self.forget([Choice(drafter, width) for width in rounds], 0)

    def forget(self, sources: Iterable[Choice | str], rounds: int) -> None:
        """Drops what is to be worked out again: all of which more was seen, and now and then what fades."""
        self.faded += rounds
        if self.faded >= REFRESHED:
            self.known = {}
            self.faded = 0
        for source in sources:
            self.known.pop(source, None)

    def wanted(self, choices: Collection[Choice], tokens: int) -> tuple[Choice, float] | None:
        """Of choices that are not ready, the one that is expected to be the fastest, if it is faster than those that are.

        Args:
            tokens: still to be produced for a row.

        Returns:
            it, and the seconds that it is expected to save.
        """
        outlook = self.outlook({*choices, *self.ready})
        best = self.best(outlook)
        now = self.best({choice: outlook[choice] for choice in self.ready})
        if best in self.ready or outlook[best].rate < WORTHWHILE * outlook[now].rate:
            return None
        return best, tokens / outlook[now].rate - tokens / outlook[best].rate
