"""Terminal output: text with its drafted tokens highlighted, tables of figures, histograms."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

DRAFTED = "green"
FROM_NGRAMS = "cyan"
SCATTER = 1.3
"""Ratio of the largest to the least speedup above which a note says that runs scatter."""
DOUBTED = 1.1
"""Ratio of a speedup to the possible speedup of its rounds above which a note doubts the speedup."""


def piece_text(text: str, drafted: bool, from_ngrams: bool = False) -> Text:
    """Returns one token's text: accepted drafts in the colour of their source, other tokens plain.

    Args:
        from_ngrams: True if n-grams drafted the token in a team with another drafter.
    """
    return Text(text, style=(FROM_NGRAMS if from_ngrams else DRAFTED) if drafted else "")


def legend(drafter: str = "") -> Text:
    """Returns the legend of the colours.

    Args:
        drafter: the other drafter of a team with n-grams.
    """
    drafts = [("accepted draft tokens", DRAFTED)]
    if drafter:
        drafts = [("accepted drafts of n-grams", FROM_NGRAMS), ", ", (f"of {drafter}", DRAFTED)]
    return Text.assemble(*drafts, ", the target's own tokens")


def comparison_table(figures: Mapping[str, Any]) -> Table:
    """Returns the final table of `tilewright generate --compare`."""
    table = Table(title="autoregressive and speculative decoding", show_header=False, min_width=56)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("autoregressive", f"{figures['autoregressive_tokens_per_s']:,.1f} tokens/s")
    table.add_row("speculative", f"{figures['speculative_tokens_per_s']:,.1f} tokens/s")
    table.add_row("speedup", speedup_text(figures))
    table.add_row("τ (tokens per round)", f"{figures['tokens_per_round']:.2f} of {figures['block_size']}")
    table.add_row("a round costs", f"{figures['round_cost_steps']:.2f} steps")
    table.add_row("distinct 4-grams", f"{figures['distinct_4gram_ratio']:.0%}")
    table.add_row("outputs identical", identical_text(figures))
    return table


def speedup_text(figures: Mapping[str, Any]) -> str:
    """Formats a speedup with its range over the repetitions."""
    least, most = figures["speedup_range"]
    return f"{figures['speedup']:.2f}x ({least:.2f} to {most:.2f})"


def doubts(figures: Mapping[str, Any]) -> list[str]:
    """Returns sentences on why a speedup may be unreliable: its runs scatter, or it exceeds what rounds can give.

    A round does at least the work of a plain step, so a speedup above the tokens per round has another cause.
    """
    least, most = figures["speedup_range"]
    cost = max(1.0, figures["round_cost_steps"])
    speedup = figures["speedup"]
    allowed = figures["tokens_per_round"] / cost
    found = []
    if most > SCATTER * least:
        found.append(f"its runs scatter, from {least:.2f}x to {most:.2f}x")
    if speedup > DOUBTED * allowed:
        tokens = f"τ {figures['tokens_per_round']:.2f} and rounds of {cost:.2f} steps"
        found.append(f"{speedup:.2f}x is more than {tokens} allow, {allowed:.2f}x")
    return found


def choice_name(row: Mapping[str, Any]) -> str:
    return "plain" if row["drafter"] == "none" else f"{row['drafter']} {row['block_size']}"


def sort_by_rounds(chosen: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the choices that ran, most rounds first."""
    return sorted(chosen["choices"], key=lambda row: -row["rounds"])


def shares_text(chosen: Mapping[str, Any], most: int = 3) -> str:
    """Returns the shares of rounds of the most frequent choices."""
    rows = sort_by_rounds(chosen)
    others = sum(row["share_of_rounds"] for row in rows[most:])
    shares = [f"{choice_name(row)} {row['share_of_rounds']:.0%}" for row in rows[:most]]
    return ", ".join([*shares, *([f"others {others:.0%}"] if others else [])])


def answer_line(tokens: int, seconds: float, rounds: int, chosen: Mapping[str, Any]) -> str:
    """Returns a line with the figures of one response.

    Args:
        rounds: number of rounds; 0 without a drafter.
        chosen: `choices` of docs/metrics.md; empty if all rounds are alike.
    """
    parts = [f"{tokens:,} tokens in {seconds:.2f} s", f"{tokens / seconds:,.0f} tokens/s"]
    if rounds:
        parts.append(f"τ {tokens / rounds:.2f}")
    if chosen["choices"]:
        parts.append(shares_text(chosen))
    return " · ".join(parts)


def chosen_line(chosen: Mapping[str, Any]) -> str:
    """Returns a line on the chosen rounds, most frequent first, with the reason for the first."""
    rows = sort_by_rounds(chosen)
    if not rows:
        return "no round was run"
    text = f"rounds chosen: {shares_text(chosen)}"
    cost_rows = (each for costs in reversed(chosen["costs"]) for each in costs["rounds"])
    cost_row = next((row for row in cost_rows if choice_name(row) == choice_name(rows[0])), None)
    if cost_row is None or rows[0]["drafter"] == "none":
        return text + ("" if cost_row is None else "; no drafter promised more tokens a second")
    name = choice_name(rows[0])
    cost = cost_row["round_cost_steps"]
    return f"{text}; a round of {name} costs {cost:.1f} steps and gives {rows[0]['tokens_per_round']:.1f} tokens"


def identical_text(figures: Mapping[str, Any]) -> Text:
    if figures["identical"]:
        return Text("yes", style="green")
    differing = [(i, position) for i, position in enumerate(figures["first_differences"]) if position is not None]
    first, position = differing[0]
    summary = f"no: {len(differing)} prompt(s) differ; prompt {first + 1} first at token {position}"
    return Text(summary, style="red")


def percent(share: float | None) -> str:
    """Formats a share for a table; empty for None."""
    return "" if share is None else f"{share:.1%}"
