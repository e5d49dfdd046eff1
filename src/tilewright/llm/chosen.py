"""Figures of rounds that were chosen during decoding, and their costs, for JSON, tables and pages."""

from collections.abc import Sequence

from tilewright.kernels.operations import is_batch_invariant
from tilewright.llm.acceptance import Row
from tilewright.llm.language_model import LanguageModel
from tilewright.runtime.interfaces import PLAIN, Choice, Drafter
from tilewright.runtime.output import OutputProcessor, Result
from tilewright.speculation.policy import Policy
from tilewright.speculation.team import Team


def chosen_figures(lm: LanguageModel, responses: Sequence[Result]) -> Row | None:
    """Returns the figures of docs/metrics.md under `chosen`; None if no rounds were chosen."""
    team = lm.drafter
    pacing = lm.pacing
    if not isinstance(team, Team) or pacing is None:
        return None
    rounds = [each for r in responses for each in zip(r.choices, r.acceptance_lengths, r.drafted, r.accepted, strict=True)]
    shapes = [
        {
            "batch_size": shape.rows,
            "capacity": shape.layout.capacity,
            "drawn": shape.drawn,
            "dispatch_ms": 1000 * costs.dispatch,
            "rounds": cost_rows(team, Policy(pacing.history, costs.rounds, costs.rounds)),
        }
        for shape, costs in pacing.costs.items()
    ]
    choices = []
    for choice in team.choices:
        of_choice = [each for each in rounds if each[0] == choice]
        if of_choice:
            tokens = sum(added for _, added, _, _ in of_choice)
            about = {**named(choice), "rounds": len(of_choice), "tokens": tokens}
            about["share_of_rounds"] = len(of_choice) / len(rounds)
            choices.append({**about, "tokens_per_round": tokens / len(of_choice)})
    return {"widths": exactness(lm), "choices": choices, "costs": shapes}


def named(choice: Choice) -> Row:
    """Returns the fields that name a kind of round."""
    return {"drafter": choice.drafter, "block_size": choice.width, "tree_nodes": choice.nodes}


def round_drafters(row: Result | OutputProcessor, drafter: Drafter | None) -> list[str]:
    """Returns the name of the drafter of each round, or "none"; n-grams in front of another drafter count by themselves."""
    names = [choice.drafter for choice in row.choices] or [PLAIN.drafter if drafter is None else drafter.name] * len(
        row.drafted
    )
    parts = (name.split("+") for name in names)
    return [part[0] if from_ngrams else part[-1] for part, from_ngrams in zip(parts, row.from_ngrams, strict=True)]


def exactness(lm: LanguageModel) -> str:
    """Returns why chosen widths keep the output ("alike": equal rounding, "masked": one width), or "inexact"."""
    assert isinstance(lm.drafter, Team)
    if lm.drafter.masked:
        return "masked"
    return "alike" if is_batch_invariant(lm.ops, lm.dtype, lm.kv_dtype, lm.target.needs_xla, lm.quantised) else "inexact"


def cost_rows(team: Team, policy: Policy) -> list[Row]:
    """Returns, for each choice, the cost of a round and the expected figures after all decoding so far."""
    outlook = policy.outlook(team.choices)
    plain = policy.cost(PLAIN).drafting
    rows = []
    for choice, expected in outlook.items():
        cost = policy.cost(choice)
        about = {**named(choice), "measured": choice in policy.costs}
        about |= {"round_ms": 1000 * cost.drafting, "idle_ms": None if cost.idle is None else 1000 * cost.idle}
        about |= {"round_cost_steps": expected.seconds / plain, "expected_tokens_per_round": expected.tokens}
        rows.append({**about, "expected_speedup": expected.rate * plain})
    return sorted(rows, key=lambda row: -row["expected_speedup"])
