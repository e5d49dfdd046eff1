"""Records the number of accepted drafts of each choice at every place of a text, and simulates policies on the record.

The text does not depend on the rounds. One recording is therefore enough to simulate any sequence of rounds.
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
from tilewright.speculation.policy import Cost, History, Policy
from tilewright.speculation.team import Team

DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
IDLE = "."
"""Marks places where the drafter had no draft."""
LOADED = 3.0
"""Spread of the load between measurements of shapes, in units of the spread between consecutive dispatches."""
SHAPES = 2
"""Number of shapes that texts alternate between. Each shape has its own measured costs."""


@dataclass(frozen=True)
class AcceptanceTrace:
    """Acceptance along one text.

    Attributes:
        dataset: name of the dataset of the prompt.
        accepted: for each choice except plain decoding, one character per token of the text: the number of drafts that the
            target would have accepted in a round that starts before this token, or `IDLE` if the drafter had no draft.
    """

    dataset: str
    accepted: Mapping[Choice, str]

    @property
    def length(self) -> int:
        return len(next(iter(self.accepted.values())))

    def from_ngrams(self, choice: Choice, place: int) -> bool:
        """Returns True if n-grams replace the drafter of the choice in a round that starts before the token at `place`."""
        if not choice.drafter.startswith(f"{NGram.name}+"):
            return False
        first = next(text for one, text in self.accepted.items() if one.drafter == NGram.name)
        return first[place] != IDLE


@dataclass(frozen=True)
class Recording:
    """Traces of texts, and the costs of rounds on the machine that recorded them.

    Attributes:
        about: model, machine and settings.
        expected: initial acceptance rates of a policy, for some drafters (see `Variant.expected_acceptance`).
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
        head = {"about": dict(self.about), "expected_acceptance": {name: list(rates) for name, rates in self.expected.items()}}
        whole = {**head, "dispatch_s": self.costs.dispatch, "rounds": rounds, "texts": texts}
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
    """Decodes each prompt step by step, and lets every choice draft before each step."""
    team = lm.drafter
    assert isinstance(team, Team), "expected a model with several drafters"
    variants = {choice: partial(propose, team.variant(choice), lm.model.target) for choice in team.choices[1:]}
    traces = []
    for prompt in prompts:
        stream = lm.start([prompt], sampling)
        stream.prefill()
        drafts: dict[Choice, list[np.ndarray]] = {choice: [] for choice in variants}
        while not stream.finished:
            for choice, variant in variants.items():
                block, count = jax.device_get(stream.apply(variant)[:2])
                drafts[choice].append(block[0, 1 : 1 + int(count[0])])
            stream.advance(1, PLAIN)
        tokens = stream.results()[0].tokens
        traces.append(AcceptanceTrace(dataset, {choice: accepted_before(tokens, each) for choice, each in drafts.items()}))
        on_text()
    return traces


def accepted_before(tokens: Sequence[int], drafts: Sequence[np.ndarray]) -> str:
    """Counts, for each token, the leading drafts made before it that equal the following tokens; one character per token."""
    counts = []
    for place, draft in enumerate(drafts):
        same = draft[: len(tokens) - place] == np.asarray(tokens[place : place + len(draft)])
        counts.append(DIGITS[int(np.sum(np.cumprod(same)))] if len(draft) else IDLE)
    return "".join(counts)


class Uneven:
    """A simulated machine whose times differ from its measurements.

    The load, the cost of each drafter and the time of each dispatch have random factors. Errors of dispatches are partly
    lasting and partly independent.

    Args:
        sigma: standard deviation of the logarithm of a time; the load during measurements has `LOADED` times this deviation.
    """

    def __init__(self, sigma: float, seed: int = 0):
        self.sigma = sigma
        self.random = np.random.default_rng(seed)
        self.lasting = 0.0

    def measured(self, rounds: Mapping[Choice, Cost]) -> dict[Choice, Cost]:
        """Returns costs with measurement errors, which are mostly common to all widths of a drafter."""
        load = self.factor() ** LOADED
        factors = {name: load * self.factor() for name in sorted({choice.drafter for choice in rounds})}
        return {choice: cost.times(factors[choice.drafter] * self.factor() ** 0.5) for choice, cost in rounds.items()}

    def timed(self, seconds: float) -> float:
        """Returns the time of a dispatch of `seconds`, with noise."""
        self.lasting = 0.8 * self.lasting + 0.6 * self.sigma * float(self.random.normal())
        return seconds * float(np.exp(self.lasting)) * self.factor()

    def factor(self) -> float:
        return float(np.exp(self.sigma * self.random.normal()))


def seconds_of(
    trace: AcceptanceTrace, costs: RoundCosts, chooser: Policy | Choice, uneven: Uneven | None = None
) -> tuple[float, dict[Choice, int]]:
    """Simulates a text under a policy or a single choice. Returns its seconds and the number of rounds of each choice.

    Args:
        uneven: machine that gives the policy the times of its dispatches; without a machine the policy gets no times.
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
            dispatch_s = None if uneven is None else uneven.timed(seconds - began)
            chooser.observe(choice, was, agreed, np.ones(was.shape, bool), dispatch_s, np.asarray(from_ngrams)[:, None])
    return seconds, rounds


def counterfactual(trace: AcceptanceTrace, followed: dict[Choice, int], end: int, policy: Policy) -> None:
    """Gives a policy the n-gram rounds that follow from the text up to `end`.

    Args:
        followed: start of the next round of each width; updated in place.
    """
    rounds: dict[int, list[tuple[int, int]]] = {}
    for choice in (choice for choice in trace.accepted if choice.drafter == NGram.name):
        counts = trace.accepted[choice]
        begin = followed.get(choice, 0)
        observed = rounds.setdefault(choice.width, [])
        while begin < end:
            agreed = 0 if counts[begin] == IDLE else DIGITS.index(counts[begin])
            if begin + agreed >= end:
                break
            observed.append((int(counts[begin] != IDLE), agreed))
            begin += agreed + 1
        followed[choice] = begin
    if rounds:
        policy.observe_counterfactual(NGram.name, rounds)


def costs_of(records: Sequence[Mapping[str, Any]], drafter: str = "dflash") -> RoundCosts:
    """Reads costs of rounds at one context from records of `round_parts.py`, measured or estimated for an absent chip.

    Estimates are in cycles instead of seconds, which changes no ratio. Dispatches then cost nothing.
    """
    figure = "round_ms" if "round_ms" in records[0] else "round_bound_cycles"
    step = figure.replace("round_", "step_")
    rounds = {Choice(drafter, one["block_size"]): Cost(float(one[figure])) for one in records}
    return RoundCosts(0.0, {PLAIN: Cost(float(records[0][step])), **rounds})


def simulate(recording: Recording, costs: RoundCosts | None = None, uneven: float = 0.0, seed: int = 0) -> list[dict[str, Any]]:
    """Simulates the policy over the texts of each dataset in order, and each choice alone, in tokens per second.

    Args:
        costs: costs of recorded choices that replace the recorded costs, such as estimates for an absent machine.
        uneven: error of the initial costs and of the times of dispatches (see `Uneven`).
        seed: seed of these errors.
    """
    costs = costs or recording.costs
    rows = []
    for dataset in dict.fromkeys(trace.dataset for trace in recording.traces):
        texts = [trace for trace in recording.traces if trace.dataset == dataset]
        tokens = sum(trace.length for trace in texts)
        choices = [PLAIN, *(choice for choice in texts[0].accepted if choice in costs.rounds)]
        fixed = {choice: tokens / sum(seconds_of(trace, costs, choice)[0] for trace in texts) for choice in choices}
        names = drafters(choices)
        history = History(
            {name: max(one.width for one in choices if one.drafter == name) for name in names},
            recording.expected,
            first_of(names),
        )
        total = 0.0
        rounds = dict[Choice, int]()
        machine = Uneven(uneven, seed) if uneven else None
        initial = [costs.rounds if machine is None else machine.measured(costs.rounds) for _ in range(SHAPES)]
        for place, trace in enumerate(texts):
            policy = Policy(history, initial[place % SHAPES], choices, costs.dispatch)
            seconds, counts = seconds_of(trace, costs, policy, machine)
            total += seconds
            for choice, count in counts.items():
                rounds[choice] = rounds.get(choice, 0) + count
        best = max(fixed, key=lambda choice: fixed[choice])
        rows.append(
            {
                "dataset": dataset,
                "texts": len(texts),
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
    """Returns the drafters that n-grams replace in rounds in which n-grams find a draft (see `NGramsFirst`)."""
    return {name: NGram.name for name in names if name.startswith(f"{NGram.name}+")}


def drafters(choices: Sequence[Choice]) -> list[str]:
    """Lists the drafters in the recorded order: a policy prefers the first one at the start."""
    return list(dict.fromkeys(choice.drafter for choice in choices if choice != PLAIN))
