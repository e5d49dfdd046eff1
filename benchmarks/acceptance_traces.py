"""Traces of the drafts that each choice would have had accepted at every place of a text, to simulate policies on.

The text does not depend on the rounds, so that one recording tells what any sequence of them would have given.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tilewright.bench.replay import propose
from tilewright.llm.language_model import LanguageModel
from tilewright.runtime.interfaces import PLAIN, Choice
from tilewright.runtime.programs import STEPS_PER_DISPATCH
from tilewright.runtime.sampling import Sampling
from tilewright.speculation.costs import RoundCosts, parsed
from tilewright.speculation.drafters.ngram import NGram
from tilewright.speculation.policy import AcceptanceHistory, Corrections, Cost, Policy
from tilewright.speculation.team import Team

DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
IDLE = "."
"""In the place of a number of accepted drafts, where nothing was drafted."""
LOADED = 3.0
"""Spread of the load under which shapes are measured, in units of that of dispatches which follow each other."""
SHAPES = 2
"""Shapes among which texts take turns, each with costs that were measured for it."""


@dataclass(frozen=True)
class AcceptanceTrace:
    """One text.

    Attributes:
        dataset: what its prompt is from.
        accepted: for each choice but plain decoding a character for each token of the text: how many drafts the target would
            have accepted in a round that began before it, `IDLE` where the drafter had none.
    """

    dataset: str
    accepted: Mapping[Choice, str]

    @property
    def length(self) -> int:
        return len(next(iter(self.accepted.values())))

    def from_ngrams(self, choice: Choice, place: int) -> bool:
        """True if n-grams draft in the place of the choice's own drafter in a round that begins before this token."""
        if not choice.drafter.startswith(f"{NGram.name}+"):
            return False
        first = next(text for one, text in self.accepted.items() if one.drafter == NGram.name)
        return first[place] != IDLE


@dataclass(frozen=True)
class Recording:
    """Traces, and what rounds cost where they were recorded.

    Attributes:
        about: model, machine, settings.
        expected: the acceptance that a policy begins with, of some drafters (see `Variant.expected_acceptance`).
    """

    traces: Sequence[AcceptanceTrace]
    costs: RoundCosts
    about: Mapping[str, Any] = field(default_factory=dict)
    expected: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        rounds = [
            {"drafter": one.drafter, "width": one.width, "drafting_s": cost.drafting, "idle_s": cost.idle}
            for one, cost in sorted(self.costs.rounds.items())
        ]
        texts = [
            {"dataset": trace.dataset, **{f"{one.drafter} {one.width}": text for one, text in trace.accepted.items()}}
            for trace in self.traces
        ]
        begun = {"about": dict(self.about), "expected_acceptance": {name: list(own) for name, own in self.expected.items()}}
        whole = {**begun, "dispatch_s": self.costs.dispatch, "rounds": rounds, "texts": texts}
        path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: Path) -> "Recording":
        found = json.loads(path.read_text(encoding="utf-8"))
        traces = []
        for text in found["texts"]:
            named = {name.rpartition(" ")[::2]: accepted for name, accepted in text.items() if name != "dataset"}
            accepted = {Choice(drafter, int(width)): accepted for (drafter, width), accepted in named.items()}
            traces.append(AcceptanceTrace(text["dataset"], accepted))
        return Recording(traces, parsed(found), found["about"], found.get("expected_acceptance", {}))


def record(
    lm: LanguageModel, dataset: str, prompts: Sequence[Sequence[int]], sampling: Sampling, on_text: Callable[[], None]
) -> list[AcceptanceTrace]:
    """Decodes each prompt step by step and asks every choice for its drafts before each step."""
    team = lm.drafter
    assert isinstance(team, Team), "choices are those of a team"
    turns = {choice: partial(propose, team.turn(choice), lm.model.target) for choice in team.choices[1:]}
    traces = []
    for prompt in prompts:
        stream = lm.start([prompt], sampling)
        stream.prefill()
        drafts: dict[Choice, list[np.ndarray]] = {choice: [] for choice in turns}
        while not stream.finished:
            for choice, turn in turns.items():
                block, count = jax.device_get(stream.apply(turn)[:2])
                drafts[choice].append(block[0, 1 : 1 + int(count[0])])
            stream.advance(1, PLAIN)
        tokens = stream.results()[0].tokens
        traces.append(AcceptanceTrace(dataset, {choice: accepted_before(tokens, each) for choice, each in drafts.items()}))
        on_text()
    return traces


def accepted_before(tokens: Sequence[int], drafts: Sequence[np.ndarray]) -> str:
    """Number of drafts, of those made before each token, that are the tokens which follow; a character each."""
    counts = []
    for place, own in enumerate(drafts):
        same = own[: len(tokens) - place] == np.asarray(tokens[place : place + len(own)])
        counts.append(DIGITS[int(np.sum(np.cumprod(same)))] if len(own) else IDLE)
    return "".join(counts)


class Uneven:
    """A machine that is not as it was measured: it had more to do then, or less; some drafters cost more there than they were
    found to, some less, and of dispatches that are alike some take longer, for a while or once.

    Args:
        sigma: the standard deviation of a time's logarithm; of the load when it was measured it is `LOADED` times as large.
    """

    def __init__(self, sigma: float, seed: int = 0):
        self.sigma = sigma
        self.random = np.random.default_rng(seed)
        self.lasting = 0.0

    def measured(self, rounds: Mapping[Choice, Cost]) -> dict[Choice, Cost]:
        """Costs as a measurement with errors might have found them, those of a drafter mostly wrong together."""
        load = self.factor() ** LOADED
        own = {name: load * self.factor() for name in sorted({choice.drafter for choice in rounds})}
        return {choice: cost.times(own[choice.drafter] * self.factor() ** 0.5) for choice, cost in rounds.items()}

    def timed(self, seconds: float) -> float:
        """A time that a dispatch of so many seconds might take, with noise."""
        self.lasting = 0.8 * self.lasting + 0.6 * self.sigma * float(self.random.normal())
        return seconds * float(np.exp(self.lasting)) * self.factor()

    def factor(self) -> float:
        return float(np.exp(self.sigma * self.random.normal()))


def seconds_of(
    trace: AcceptanceTrace, costs: RoundCosts, chooser: Policy | Choice, uneven: Uneven | None = None
) -> tuple[float, dict[Choice, int]]:
    """Simulated seconds of a text under a policy, or under one choice alone, and the rounds of each choice.

    Args:
        uneven: tells the policy how long its dispatches took; without, it hears nothing of that.
    """
    place = 0
    seconds = 0.0
    rounds = dict[Choice, int]()
    followed = dict[Choice, int]()
    while place < trace.length:
        choice, most = (chooser, STEPS_PER_DISPATCH) if isinstance(chooser, Choice) else chooser.next(STEPS_PER_DISPATCH)[:2]
        drafted = []
        accepted = []
        from_ngrams = []
        cost = costs.rounds[choice]
        began = seconds
        while len(drafted) < most and place < trace.length:
            at = IDLE if choice == PLAIN else trace.accepted[choice][place]
            drafted.append(0 if at == IDLE else choice.width - 1)
            accepted.append(0 if at == IDLE else DIGITS.index(at))
            from_ngrams.append(trace.from_ngrams(choice, place))
            place += accepted[-1] + 1
            seconds += cost.drafting if cost.idle is None or not (at == IDLE or from_ngrams[-1]) else cost.idle
        seconds += costs.dispatch
        rounds[choice] = rounds.get(choice, 0) + len(drafted)
        if isinstance(chooser, Policy):
            counterfactual(trace, followed, min(place, trace.length), chooser)
            was, agreed = (np.asarray(each, np.int32)[:, None] for each in (drafted, accepted))
            taken = None if uneven is None else uneven.timed(seconds - began)
            chooser.observe(choice, was, agreed, np.ones(was.shape, bool), taken, np.asarray(from_ngrams)[:, None])
    return seconds, rounds


def counterfactual(trace: AcceptanceTrace, followed: dict[Choice, int], end: int, policy: Policy) -> None:
    """Tells a policy of the n-gram rounds that are plain from the text up to `end`.

    Args:
        followed: where the next round of each width begins; it is brought up to date.
    """
    rounds: dict[int, list[tuple[int, int]]] = {}
    for choice in (choice for choice in trace.accepted if choice.drafter == NGram.name):
        counts = trace.accepted[choice]
        begin = followed.get(choice, 0)
        own = rounds.setdefault(choice.width, [])
        while begin < end:
            agreed = 0 if counts[begin] == IDLE else DIGITS.index(counts[begin])
            if begin + agreed >= end:
                break
            own.append((int(counts[begin] != IDLE), agreed))
            begin += agreed + 1
        followed[choice] = begin
    if rounds:
        policy.observe_counterfactual(NGram.name, rounds)


def costs_of(records: Sequence[Mapping[str, Any]], drafter: str = "dflash") -> RoundCosts:
    """Costs of rounds at one context, from records of `bench round`: measured, or estimated for a chip that is not there.

    Estimates count cycles in the place of seconds, which changes no ratio, and dispatches as nothing.
    """
    figure = "round_ms" if "round_ms" in records[0] else "round_bound_cycles"
    step = figure.replace("round_", "step_")
    rounds = {Choice(drafter, one["block_size"]): Cost(float(one[figure])) for one in records}
    return RoundCosts(0.0, {PLAIN: Cost(float(records[0][step])), **rounds})


def simulate(recording: Recording, costs: RoundCosts | None = None, uneven: float = 0.0, seed: int = 0) -> list[dict[str, Any]]:
    """The policy over the texts of each dataset in order, beside each choice alone, in tokens a second.

    Args:
        costs: others than those recorded, such as estimates for a machine that is not there; of choices that were recorded.
        uneven: how wrong costs are that the policy begins with, and how uneven what it is told of dispatches (see `Uneven`).
        seed: of that.
    """
    costs = costs or recording.costs
    rows = []
    for dataset in dict.fromkeys(trace.dataset for trace in recording.traces):
        own = [trace for trace in recording.traces if trace.dataset == dataset]
        tokens = sum(trace.length for trace in own)
        choices = [PLAIN, *(choice for choice in own[0].accepted if choice in costs.rounds)]
        fixed = {choice: tokens / sum(seconds_of(trace, costs, choice)[0] for trace in own) for choice in choices}
        names = drafters(choices)
        history = AcceptanceHistory(
            {name: max(one.width for one in choices if one.drafter == name) for name in names},
            recording.expected,
            first_of(names),
        )
        total = 0.0
        rounds = dict[Choice, int]()
        machine = Uneven(uneven, seed) if uneven else None
        begun = [costs.rounds if machine is None else machine.measured(costs.rounds) for _ in range(SHAPES)]
        learnt = [Corrections(history.widest) for _ in range(SHAPES)]
        for place, trace in enumerate(own):
            policy = Policy(history, begun[place % SHAPES], choices, costs.dispatch, learnt[place % SHAPES])
            seconds, counts = seconds_of(trace, costs, policy, machine)
            total += seconds
            for choice, count in counts.items():
                rounds[choice] = rounds.get(choice, 0) + count
        best = max(fixed, key=lambda choice: fixed[choice])
        rows.append(
            {
                "dataset": dataset,
                "texts": len(own),
                "tokens": tokens,
                "policy_tokens_per_s": tokens / total,
                "plain_tokens_per_s": fixed[PLAIN],
                "best": str(best),
                "best_tokens_per_s": fixed[best],
                "of_best": tokens / total / fixed[best],
                "of_plain": tokens / total / fixed[PLAIN],
                "fixed_tokens_per_s": {str(choice): rate for choice, rate in fixed.items()},
                "rounds": {str(choice): count for choice, count in sorted(rounds.items())},
            }
        )
    return rows


def first_of(names: Sequence[str]) -> dict[str, str]:
    """Those in whose place n-grams draft where they find something (see `NGramsFirst`)."""
    return {name: NGram.name for name in names if name.startswith(f"{NGram.name}+")}


def drafters(choices: Sequence[Choice]) -> list[str]:
    """In the order in which they were recorded: a policy expects the first to be good."""
    return list(dict.fromkeys(choice.drafter for choice in choices if choice != PLAIN))
