"""Terminal output: text with its drafted tokens told apart, tables of figures, histograms."""

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
    table.add_row("τ (tokens per round)", f"{figures['tokens_per_round']:.2f} of {figures['block_size']}")
    table.add_row("a round costs", f"{figures['round_cost_steps']:.2f} steps")
    table.add_row("distinct 4-grams", f"{figures['distinct_4gram_ratio']:.0%}")
    table.add_row("outputs identical", identical_text(figures))
    return table


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
    name, cost = choice_name(rows[0]), why["round_cost_steps"]
    return f"{text}; a round of {name} costs {cost:.1f} steps and gives {rows[0]['tokens_per_round']:.1f} tokens"


def number(value: float | None, form: str) -> str:
    """A figure, or a dash where it is not known."""
    return "–" if value is None else format(value, form)


Row = Mapping[str, Any]
"""A row of figures, named as in docs/metrics.md."""
Lines = Sequence[tuple[str, str, Sequence[str]]]
"""Of a table: name of the data, of the drafter, and the figures."""


def benchmark_tables(title: str, rows: Sequence[Row], averages: Sequence[Row] = ()) -> list[Table]:
    """The tables of `tilewright bench speculative`: speed and acceptance, the time of a round, which drafts are accepted.

    Args:
        rows: for each dataset and batch size one of plain decoding and one of each drafter, named "none" and by the drafter.
        averages: over the datasets, one for each of them; shown if there are several datasets.
    """
    rows = with_names(rows)
    timed = [row for row in rows if row["round_ms"] is not None]
    drafting = [row for row in rows if row["speculative_decoding"] and row["speculative_decoding"]["num_spec_steps"]]
    tables = [speed_table(title, rows, averages)]
    if timed:
        parts = ("draft", "verify", "other", "round")
        cells = [(row["data"], row["drafter"], [number(row[f"{part}_ms"], ".2f") for part in parts]) for row in timed]
        tables.append(lines_table("milliseconds of a round that drafts", "", parts, cells))
    if drafting:
        places = shown_positions(max(len(row["acceptance_by_position"]) for row in drafting))
        cells = [(row["data"], row["drafter"], rates_at(row, places)) for row in drafting]
        tables.append(lines_table("drafts accepted, by position in the block", "", [str(place) for place in places], cells))
    chosen = [(row["data"], row["drafter"], [shares_text(row["chosen"])]) for row in rows if row["chosen"]]
    if chosen:
        tables.append(lines_table("rounds that were chosen", "", ["share of rounds"], chosen))
    return [*tables, *category_tables(rows)]


def with_names(rows: Sequence[Row]) -> list[Row]:
    """The rows, each with what names its data: the dataset, and the batch size where there are several."""
    several = len({row["batch_size"] for row in rows}) > 1
    return [{**row, "data": f"{row['dataset']}, batch {row['batch_size']}" if several else row["dataset"]} for row in rows]


def speed_table(title: str, rows: Sequence[Row], averages: Sequence[Row]) -> Table:
    priced = any(row["cost_per_million_tokens"] is not None for row in rows)
    columns = ["tok/s", "speedup", "τ", "round", "4-grams", "same", *(["cost/M"] if priced else [])]
    lines = [(row["data"], "plain" if row["drafter"] == "none" else row["drafter"], speed_cells(row, priced)) for row in rows]
    if len({row["dataset"] for row in rows}) > 1:
        empty = [""] * (len(columns) - 3)
        for row in with_names([{**row, "dataset": "mean"} for row in averages if row["drafter"] != "none"]):
            means = [number(row[name], ".2f") for name in ("speedup", "tokens_per_round")]
            lines.append((row["data"], row["drafter"], ["", *means, *empty]))
    caption = "τ: all tokens over all rounds; round: its cost in plain steps; same: answers equal to plain decoding"
    return lines_table(title, caption, columns, lines)


def speed_cells(row: Row, priced: bool) -> list[str]:
    plain = row["drafter"] == "none"
    same = "–" if plain else f"{sum(at is None for at in row['first_differences'] or ())}/{row['responses']}"
    return [
        number(row["tokens_per_s"], ",.0f"),
        "–" if plain else number(row["speedup"], ".2f"),
        "–" if plain else number(row["tokens_per_round"], ".2f"),
        "–" if plain else number(row["round_cost_steps"], ".1f"),
        number(row["distinct_4gram_ratio"], ".0%"),
        same,
        *([number(row["cost_per_million_tokens"], ",.2f")] if priced else []),
    ]


def lines_table(title: str, caption: str, columns: Sequence[str], lines: Lines) -> Table:
    """Figures by data and drafter. Names may fold; a figure never does."""
    table = Table(title=Text(title), caption=caption)
    table.add_column("data", overflow="fold")
    table.add_column("drafter", overflow="fold")
    for column in columns:
        width = max([len(column), *(len(cells[len(table.columns) - 2]) for _, _, cells in lines)])
        table.add_column(Text(column), justify="right", no_wrap=True, min_width=width)
    for n, (dataset, drafter, cells) in enumerate(lines):
        first = n == 0 or lines[n - 1][0] != dataset
        if first and n:
            table.add_section()
        table.add_row(Text(dataset if first else ""), Text(drafter), *cells)
    return table


def shown_positions(last: int) -> list[int]:
    """The positions of a block that a table has room for: the first ones, then fewer and fewer, and the last."""
    return [place for place in (1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 256, 512) if place < last] + [last]


def rates_at(row: Row, places: Sequence[int]) -> list[str]:
    rates = {each["position"]: each["rate"] for each in row["acceptance_by_position"]}
    return [number(rates.get(place), ".0%") for place in places]


def category_tables(rows: Sequence[Row]) -> list[Table]:
    """τ of each category, a table for each dataset that has several."""
    tables = []
    for data in dict.fromkeys(row["data"] for row in rows):
        own = [row for row in rows if row["data"] == data and row["drafter"] != "none" and row["categories"]]
        if not own:
            continue
        table = Table(title=Text(f"{data}: τ by category"))
        table.add_column("category", overflow="fold")
        for row in own:
            table.add_column(Text(row["drafter"]), justify="right")
        for n, category in enumerate(own[0]["categories"]):
            cells = (number(row["categories"][n]["tokens_per_round"], ".2f") for row in own)
            table.add_row(Text(category["category"] or "–"), *cells)
        tables.append(table)
    return tables


def identical_text(figures: Mapping[str, Any]) -> Text:
    if figures["identical"]:
        return Text("yes", style="green")
    differing = [(i, at) for i, at in enumerate(figures["first_differences"]) if at is not None]
    first, at = differing[0]
    where = f"no: {len(differing)} prompt(s) differ; prompt {first + 1} first at token {at}"
    return Text(where, style="red")
