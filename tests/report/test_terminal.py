"""What the terminal shows: bars, tables and colours, from figures made by hand."""

import io
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from tilewright.report import terminal

FIGURES: dict[str, Any] = {
    "autoregressive_tokens_per_s": 1234.56,
    "speculative_tokens_per_s": 3086.4,
    "speedup": 2.5,
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


PLAIN: dict[str, Any] = {
    "dataset": "gsm8k", "drafter": "none", "tokens_per_s": 1234.56, "speedup": 1.0, "tokens_per_round": 1.0,
    "round_cost_steps": 1.0, "batch_size": 1, "responses": 2, "distinct_4gram_ratio": 0.87, "first_differences": None,
    "cost_per_million_tokens": None,
    "draft_ms": None, "verify_ms": None, "other_ms": None, "round_ms": None, "speculative_decoding": None, "chosen": None,
    "acceptance_by_position": [], "categories": [],
}  # fmt: skip
DRAFTED: dict[str, Any] = PLAIN | {
    "drafter": "a [long] name of 24 chars", "tokens_per_s": 3086.4, "speedup": 2.5, "tokens_per_round": 4.126,
    "round_cost_steps": 1.65, "first_differences": [None, 4], "draft_ms": 1.0, "verify_ms": 20.126,
    "other_ms": -0.01, "round_ms": 21.116,
    "speculative_decoding": {"num_spec_steps": 7},
    "acceptance_by_position": [{"position": n, "rate": 1 / n} for n in range(1, 16)],
    "categories": [{"category": name, "tokens_per_round": tau} for name, tau in (("[odd]", 3.0), ("", 5.0))],
}  # fmt: skip
IDLE: dict[str, Any] = DRAFTED | {"drafter": "ngram", "speculative_decoding": {"num_spec_steps": 0}, "round_ms": None}


def benchmark(*rows: dict[str, Any], averages: Sequence[dict[str, Any]] = (), width: int = 100) -> list[str]:
    return [shown(table, width) for table in terminal.benchmark_tables("temperature 0", rows, averages)]


def test_a_benchmark_has_a_line_for_each_way_of_decoding():
    speed, times, accepted, categories = benchmark(PLAIN, DRAFTED, IDLE)
    assert "temperature 0" in speed
    name = DRAFTED["drafter"]
    assert cells(speed) == [
        ["data", "drafter", "tok/s", "speedup", "τ", "round", "4-grams", "same"],
        ["gsm8k", "plain", "1,235", "–", "–", "–", "87%", "–"],
        ["", name, "3,086", "2.50", "4.13", "1.6", "87%", "1/2"],
        ["", "ngram", "3,086", "2.50", "4.13", "1.6", "87%", "1/2"],
    ]
    assert cells(times) == [
        ["data", "drafter", "draft", "verify", "other", "round"],
        ["gsm8k", name, "1.00", "20.13", "-0.01", "21.12"],
    ]
    assert cells(accepted) == [
        ["data", "drafter", "1", "2", "3", "4", "6", "8", "12", "15"],
        ["gsm8k", name, "100%", "50%", "33%", "25%", "17%", "12%", "8%", "7%"],
    ], "what drafted nothing is left out"
    assert "gsm8k: τ by category" in categories
    assert cells(categories) == [["category", name, "ngram"], ["[odd]", "3.00", "3.00"], ["–", "5.00", "5.00"]]


CHOSEN: dict[str, Any] = {
    "choices": [
        {"drafter": "none", "block_size": 1, "rounds": 20, "share_of_rounds": 0.2, "tokens_per_round": 1.0},
        {"drafter": "dflash", "block_size": 4, "rounds": 70, "share_of_rounds": 0.7, "tokens_per_round": 2.66},
        {"drafter": "ngram", "block_size": 16, "rounds": 6, "share_of_rounds": 0.06, "tokens_per_round": 4.0},
        {"drafter": "ngram", "block_size": 8, "rounds": 4, "share_of_rounds": 0.04, "tokens_per_round": 4.0},
    ],
    "costs": [{"rounds": [{"drafter": "dflash", "block_size": 4, "round_cost_steps": 1.64}]}],
}  # fmt: skip


def test_what_was_chosen_is_a_table_and_a_line():
    chosen = benchmark(PLAIN, DRAFTED | {"chosen": CHOSEN, "round_ms": None})[-2]
    assert cells(chosen) == [
        ["data", "drafter", "share of rounds"],
        ["gsm8k", DRAFTED["drafter"], "dflash 4 70%, plain 20%, ngram 16 6%, others 4%"],
    ]
    shares, why = terminal.chosen_line(CHOSEN).split("; ")
    assert shares == "rounds chosen: dflash 4 70%, plain 20%, ngram 16 6%, others 4%"
    assert why == "a round of dflash 4 costs 1.6 steps and gives 2.7 tokens"
    plain = {"choices": CHOSEN["choices"][:1], "costs": [{"rounds": [{"drafter": "none", "block_size": 1}]}]}
    assert terminal.chosen_line(plain) == "rounds chosen: plain 20%; no drafter promised more tokens a second"
    assert terminal.chosen_line({"choices": [], "costs": []}) == "no round was run"


def test_a_benchmark_of_plain_decoding_is_one_table():
    assert len(benchmark(PLAIN)) == 1


def test_several_datasets_end_with_the_means():
    rows = [PLAIN, DRAFTED, PLAIN | {"dataset": "[odd]"}, DRAFTED | {"dataset": "[odd]"}]
    averages = [
        {"batch_size": 1, "drafter": "none", "speedup": 1, "tokens_per_round": 1},
        {"batch_size": 1, "drafter": "x", "speedup": 1.5, "tokens_per_round": None},
    ]
    (speed, *_) = benchmark(*rows, averages=averages)
    assert [row[0] for row in cells(speed)] == ["data", "gsm8k", "", "[odd]", "", "mean"]
    assert cells(speed)[-1] == ["mean", "x", "", "1.50", "–", "", "", ""]
    (speed, *_) = benchmark(*rows[:2], averages=averages)
    assert "mean" not in speed


def test_several_batch_sizes_are_named():
    rows = [row | {"batch_size": size} for size in (1, 8) for row in (PLAIN, DRAFTED)]
    speed, times, accepted, *categories = benchmark(*rows)
    for table in (speed, times, accepted):
        assert [name for name, *_ in cells(table)[1:] if name] == ["gsm8k, batch 1", "gsm8k, batch 8"]
    assert [table.split(": τ")[0].strip() for table in categories] == ["gsm8k, batch 1", "gsm8k, batch 8"]


def test_a_price_adds_a_column():
    (speed, *_) = benchmark(PLAIN | {"cost_per_million_tokens": 1234.567}, DRAFTED)
    assert [row[-1] for row in cells(speed)] == ["cost/M", "1,234.57", "–"]


def test_figures_are_never_cut_names_fold():
    row = DRAFTED | {"dataset": "a-very-long-name-of-a-data-set", "tokens_per_s": 1234567.0}
    for width in (60, 80, 100):
        for text in benchmark(PLAIN, row, width=width):
            assert "…" not in text
            assert max(map(len, text.splitlines())) <= width
        assert "1,234,567" in benchmark(PLAIN, row, width=width)[0]


@given(st.integers(1, 1024))
def test_shown_positions_begin_at_1_and_end_with_the_last(last: int):
    places = terminal.shown_positions(last)
    assert (places[0], places[-1]) == (1, last)
    assert places == sorted(set(places))
    assert len(places) <= 14


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
