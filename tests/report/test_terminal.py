"""What the terminal shows: bars, tables and colours, from figures made by hand."""

import io
from typing import Any

from rich.console import Console, RenderableType

from tilewright.report import terminal

FIGURES: dict[str, Any] = {
    "autoregressive_tokens_per_s": 1234.56,
    "speculative_tokens_per_s": 3086.4,
    "speedup": 2.5,
    "round_cost_steps": 1.65,
    "mean_acceptance_length": 4.126,
    "block_size": 16,
    "distinct_4gram_ratio": 0.87,
    "identical": True,
    "first_differences": [None, None],
    "prompts": 2,
}


def shown(what: RenderableType, width: int = 160) -> str:
    console = Console(record=True, width=width, file=io.StringIO())
    console.print(what)
    return console.export_text()


def cells(text: str) -> list[list[str]]:
    """The rows of a table that was printed, without its frame."""
    rows = [line.replace("┃", "│").split("│") for line in text.splitlines() if "│" in line or "┃" in line]
    return [[cell.strip() for cell in row[1:-1]] for row in rows]


def test_bars_are_scaled_to_the_largest_and_shares_add_up():
    lines = terminal.histogram_lines([5, 0, 10, 1, 984], width=40)
    assert [line.split()[0] for line in lines] == ["0", "1", "2", "3", "4"]
    assert lines[4].count("█") == 40
    assert lines[2].count("█") == 0
    assert "▏" in lines[2], "a few are not none"
    assert "▏" not in lines[1]
    assert [line.split()[-2:] for line in lines] == [["5", "0%"], ["0", "0%"], ["10", "1%"], ["1", "0%"], ["984", "98%"]]
    assert len({len(line) for line in lines}) == 1, "the columns stand below each other"
    assert terminal.histogram_lines([30, 10], width=9)[1].count("█") == 3


def test_a_histogram_of_nothing_has_no_bars():
    assert terminal.histogram_lines([0, 0, 0]) == ["  0", "  1", "  2"]
    assert terminal.histogram_lines([]) == []


def test_comparison_table_shows_the_figures():
    assert cells(shown(terminal.comparison_table(FIGURES))) == [
        ["autoregressive", "1,234.6 tokens/s"],
        ["speculative", "3,086.4 tokens/s"],
        ["speedup", "2.50x"],
        ["τ (tokens per round)", "4.13 of 16"],
        ["a round costs", "1.65 steps"],
        ["distinct 4-grams", "87%"],
        ["outputs identical", "yes"],
    ]


def test_a_difference_is_named():
    differing = FIGURES | {"identical": False, "first_differences": [None, 17, 3]}
    text = terminal.identical_text(differing)
    assert text.plain == "no: 2 prompt(s) differ; prompt 2 first at token 17"
    assert text.style == "red"
    assert "token 17" in shown(terminal.comparison_table(differing))


def test_benchmark_table_has_a_row_for_each_set():
    rows = {"gsm8k": FIGURES, "[odd] name": FIGURES | {"first_differences": [None, 4], "speedup": 0.5}}
    text = shown(terminal.benchmark_table("temperature 0", rows))
    assert "temperature 0" in text
    head, first, second = cells(text)
    assert tuple(head) == terminal.BENCHMARK_COLUMNS
    assert first == ["gsm8k", "2", "1,235", "3,086", "2.50x", "4.13", "87%", "2/2"]
    assert second == ["[odd] name", "2", "1,235", "3,086", "0.50x", "4.13", "87%", "1/2"]


def test_drafted_text_is_told_apart_and_printed_as_it_is():
    drafted, own = terminal.piece_text("[bold] :warning:", True), terminal.piece_text("x", False)
    assert drafted.style != own.style
    console = Console(record=True, width=80, file=io.StringIO(), force_terminal=True, color_system="standard")
    console.print(drafted, end="")
    console.print(own)
    assert console.export_text(clear=False) == "[bold] :warning:x\n"
    styled = console.export_text(styles=True)
    assert "\x1b[32m[bold]" in styled
    assert "\x1b[1;33mx" in styled


def test_legend_names_both_sources_in_their_colours():
    legend = terminal.legend()
    styles = {legend.plain[span.start : span.end]: span.style for span in legend.spans}
    assert styles == {"accepted draft tokens": terminal.DRAFTED, "tokens from the target": terminal.TARGET}
