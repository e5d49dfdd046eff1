"""What the terminal shows: bars, tables and colours, from figures made by hand."""

import io
from typing import Any

import pytest
from rich.console import Console, RenderableType
from rich.text import Text

from tilewright.report import terminal

FIGURES: dict[str, Any] = {
    "autoregressive_tokens_per_s": 1234.56,
    "speculative_tokens_per_s": 3086.4,
    "speedup": 2.5,
    "speedup_range": (2.4, 2.6),
    "round_cost_steps": 1.65,
    "tokens_per_round": 4.126,
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


def test_comparison_table_shows_the_figures():
    assert cells(shown(terminal.comparison_table(FIGURES))) == [
        ["autoregressive", "1,234.6 tokens/s"],
        ["speculative", "3,086.4 tokens/s"],
        ["speedup", "2.50x (2.40 to 2.60)"],
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


CHOSEN: dict[str, Any] = {
    "choices": [
        {"drafter": "none", "block_size": 1, "rounds": 20, "share_of_rounds": 0.2, "tokens_per_round": 1.0},
        {"drafter": "dflash", "block_size": 4, "rounds": 70, "share_of_rounds": 0.7, "tokens_per_round": 2.66},
        {"drafter": "ngram", "block_size": 16, "rounds": 6, "share_of_rounds": 0.06, "tokens_per_round": 4.0},
        {"drafter": "ngram", "block_size": 8, "rounds": 4, "share_of_rounds": 0.04, "tokens_per_round": 4.0},
    ],
    "costs": [{"rounds": [{"drafter": "dflash", "block_size": 4, "round_cost_steps": 1.64}]}],
}


def test_what_was_chosen_is_a_line():
    shares, why = terminal.chosen_line(CHOSEN).split("; ")
    assert shares == "rounds chosen: dflash 4 70%, plain 20%, ngram 16 6%, others 4%"
    assert why == "a round of dflash 4 costs 1.6 steps and gives 2.7 tokens"
    plain = {"choices": CHOSEN["choices"][:1], "costs": [{"rounds": [{"drafter": "none", "block_size": 1}]}]}
    assert terminal.chosen_line(plain) == "rounds chosen: plain 20%; no drafter promised more tokens a second"
    assert terminal.chosen_line({"choices": [], "costs": []}) == "no round was run"


def test_drafted_text_is_told_apart_and_printed_as_it_is():
    drafted = terminal.piece_text("[bold] :warning:", True)
    target_text = terminal.piece_text("x", False)
    assert drafted.style != target_text.style
    console = Console(record=True, width=80, file=io.StringIO(), force_terminal=True, color_system="standard")
    console.print(drafted, end="")
    console.print(target_text)
    assert console.export_text(clear=False) == "[bold] :warning:x\n"
    styled = console.export_text(styles=True)
    assert "\x1b[32m[bold]" in styled
    assert styled.endswith("\x1b[0mx\n"), "the target's own tokens are plain"


def test_legend_names_all_sources_in_their_colours():
    def styles(legend: Text) -> dict[str, object]:
        return {legend.plain[span.start : span.end]: span.style for span in legend.spans}

    assert styles(terminal.legend()) == {"accepted draft tokens": terminal.DRAFTED}
    both = {"accepted drafts of n-grams": terminal.FROM_NGRAMS, "of dflash2": terminal.DRAFTED}
    assert styles(terminal.legend("dflash2")) == both
    assert terminal.legend("dflash2").plain.endswith(", the target's own tokens")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, []),
        ({"speedup_range": (1.2, 2.6)}, ["its runs scatter, from 1.20x to 2.60x"]),
        (
            {"speedup": 4.06, "tokens_per_round": 2.21, "round_cost_steps": 0.54, "speedup_range": (4.0, 4.1)},
            ["4.06x is more than τ 2.21 and rounds of 1.00 steps allow, 2.21x"],
        ),
        ({"speedup": 4.0, "speedup_range": (3.9, 4.1)}, ["4.00x is more than τ 4.13 and rounds of 1.65 steps allow, 2.50x"]),
    ],
)
def test_a_speedup_that_cannot_be_is_doubted(changed: dict[str, Any], said: list[str]):
    assert terminal.doubts({**FIGURES, **changed}) == said
