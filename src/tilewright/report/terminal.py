"""What a person sees in the terminal: text with its drafted tokens told apart, tables of figures, histograms."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

DRAFTED = "green"
TARGET = "bold yellow"


def piece_text(text: str, drafted: bool) -> Text:
    """One token's text in the colour of its source."""
    return Text(text, style=DRAFTED if drafted else TARGET)


def legend() -> Text:
    return Text.assemble(("accepted draft tokens", DRAFTED), ", ", ("tokens from the target", TARGET))


def histogram_lines(counts: Sequence[int], width: int = 40) -> list[str]:
    """A bar for each entry, scaled to the largest, with its share of the total."""
    total, most = sum(counts), max(counts, default=0)
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
    table.add_row("speedup", f"{figures['speedup']:.2f}x")
    table.add_row("τ (tokens per round)", f"{figures['mean_acceptance_length']:.2f} of {figures['block_size']}")
    table.add_row("a round costs", f"{figures['round_cost_steps']:.2f} steps")
    table.add_row("distinct 4-grams", f"{figures['distinct_4gram_ratio']:.0%}")
    table.add_row("outputs identical", identical_text(figures))
    return table


BENCHMARK_COLUMNS = (
    "data", "prompts", "plain tok/s", "drafted tok/s", "speedup", "τ", "distinct 4-grams", "same",
)  # fmt: skip


def benchmark_table(title: str, rows: Mapping[str, Mapping[str, Any]]) -> Table:
    """The table of `tilewright bench speculative`: a row of figures for each set of prompts."""
    table = Table(title=title)
    for column in BENCHMARK_COLUMNS:
        table.add_column(column, justify="left" if column == "data" else "right")
    for name, figures in rows.items():
        same = sum(at is None for at in figures["first_differences"])
        table.add_row(
            Text(name),
            str(figures["prompts"]),
            f"{figures['autoregressive_tokens_per_s']:,.0f}",
            f"{figures['speculative_tokens_per_s']:,.0f}",
            f"{figures['speedup']:.2f}x",
            f"{figures['mean_acceptance_length']:.2f}",
            f"{figures['distinct_4gram_ratio']:.0%}",
            f"{same}/{figures['prompts']}",
        )
    return table


def identical_text(figures: Mapping[str, Any]) -> Text:
    if figures["identical"]:
        return Text("yes", style="green")
    differing = [(i, at) for i, at in enumerate(figures["first_differences"]) if at is not None]
    first, at = differing[0]
    where = f"no: {len(differing)} prompt(s) differ; prompt {first + 1} first at token {at}"
    return Text(where, style="red")
