"""Terminal output: text with its drafted tokens told apart, tables of figures, histograms."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

DRAFTED = "green"
FROM_NGRAMS = "cyan"
SCATTER = 1.3
"""Ratio of the largest speedup to the least above which runs scatter."""
DOUBTED = 1.1
"""Ratio of a speedup to what rounds can give above which it is doubted."""


def piece_text(text: str, drafted: bool, from_ngrams: bool = False) -> Text:
    """One token's text: accepted drafts in the colour of their source, all else plain.

    Args:
        from_ngrams: n-grams drafted it, where another drafter may, too.
    """
    return Text(text, style=(FROM_NGRAMS if from_ngrams else DRAFTED) if drafted else "")


def legend(drafter: str = "") -> Text:
    """Line that names the colours.

    Args:
        drafter: that n-grams take turns with, if they do.
    """
    drafts = [("accepted draft tokens", DRAFTED)]
    if drafter:
        drafts = [("accepted drafts of n-grams", FROM_NGRAMS), ", ", (f"of {drafter}", DRAFTED)]
    return Text.assemble(*drafts, ", the target's own tokens")


def histogram_lines(counts: Sequence[int], width: int = 40) -> list[str]:
    """A bar for each entry, scaled to the largest, with its share of the total."""
    total = sum(counts)
    most = max(counts, default=0)
    lines = []
    for n, count in enumerate(counts):
        bar = "█" * round(width * count / most) if most else ""
        if count and not bar:
            bar = "▏"
        lines.append(f"{n:>3}  {bar:<{width}}  {count:>5}  {count / total:>4.0%}" if total else f"{n:>3}")
    return lines


def comparison_table(figures: Mapping[str, Any]) -> Table:
    """The table that ends `tilewright generate --compare`."""
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
    """A speedup with its range over the repetitions."""
    least, most = figures["speedup_range"]
    return f"{figures['speedup']:.2f}x ({least:.2f} to {most:.2f})"


def doubts(figures: Mapping[str, Any]) -> list[str]:
    """Sentences on why a speedup is not to be trusted: its runs scatter, or it is more than rounds can give.

    A round does at least the work of a plain step, so that a speedup above the tokens of a round has another cause.
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


def by_rounds(chosen: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The choices that ran, those of most rounds first."""
    return sorted(chosen["choices"], key=lambda row: -row["rounds"])


def shares_text(chosen: Mapping[str, Any], most: int = 3) -> str:
    """The share of rounds that each of the most frequent choices had."""
    rows = by_rounds(chosen)
    others = sum(row["share_of_rounds"] for row in rows[most:])
    shares = [f"{choice_name(row)} {row['share_of_rounds']:.0%}" for row in rows[:most]]
    return ", ".join([*shares, *([f"others {others:.0%}"] if others else [])])


def answer_line(tokens: int, seconds: float, rounds: int, chosen: Mapping[str, Any]) -> str:
    """The figures of one answer.

    Args:
        rounds: 0 where nothing drafts.
        chosen: `choices`, as in docs/metrics.md; none where rounds are all alike.
    """
    parts = [f"{tokens:,} tokens in {seconds:.2f} s", f"{tokens / seconds:,.0f} tokens/s"]
    if rounds:
        parts.append(f"τ {tokens / rounds:.2f}")
    if chosen["choices"]:
        parts.append(shares_text(chosen))
    return " · ".join(parts)


def chosen_line(chosen: Mapping[str, Any]) -> str:
    """Line on the rounds that were chosen, most of them first, with the reason for the first of these."""
    rows = by_rounds(chosen)
    if not rows:
        return "no round was run"
    text = f"rounds chosen: {shares_text(chosen)}"
    known = (each for costs in reversed(chosen["costs"]) for each in costs["rounds"])
    why = next((row for row in known if choice_name(row) == choice_name(rows[0])), None)
    if why is None or rows[0]["drafter"] == "none":
        return text + ("" if why is None else "; no drafter promised more tokens a second")
    name = choice_name(rows[0])
    cost = why["round_cost_steps"]
    return f"{text}; a round of {name} costs {cost:.1f} steps and gives {rows[0]['tokens_per_round']:.1f} tokens"


def identical_text(figures: Mapping[str, Any]) -> Text:
    if figures["identical"]:
        return Text("yes", style="green")
    differing = [(i, at) for i, at in enumerate(figures["first_differences"]) if at is not None]
    first, at = differing[0]
    where = f"no: {len(differing)} prompt(s) differ; prompt {first + 1} first at token {at}"
    return Text(where, style="red")


def percent(share: float | None) -> str:
    """A share for a table, empty where there is none."""
    return "" if share is None else f"{share:.1%}"
