"""The page of `tilewright bench speculative`: the papers' table, and what explains it."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tilewright.report.charts import LineChart, Series, StackedBars
from tilewright.report.page import Block, Cell, HtmlTable, Section, write_sections


@dataclass(frozen=True)
class DrafterFigures:
    """Figures of one drafter on one dataset.

    Attributes:
        dataset, drafter: names; they make the table's rows and columns in the order in which they first come.
        prompts: how many were decoded.
        baseline_tokens_per_s, tokens_per_s: without the drafter, and with it.
        speedup: as the benchmark defines it.
        tau: tokens a round, all tokens over all rounds.
        cost_per_million_tokens: at a price that the caller knows; None where none was given.
        acceptance_by_position: for each slot after the known token, the share of rounds whose draft there was accepted.
        tau_by_position: points (position in the generation, tau there).
        chosen: the share of rounds of each choice, where rounds were chosen as decoding went.
        draft_seconds, verify_seconds, other_seconds: of a round; None where they were not told apart. As differences of times
            they may be below 0.
    """

    dataset: str
    drafter: str
    prompts: int
    baseline_tokens_per_s: float
    tokens_per_s: float
    speedup: float
    tau: float
    cost_per_million_tokens: float | None = None
    acceptance_by_position: Sequence[float] = ()
    tau_by_position: Sequence[tuple[float, float]] = ()
    draft_seconds: float | None = None
    verify_seconds: float | None = None
    other_seconds: float | None = None
    chosen: Sequence[tuple[str, float]] = ()


@dataclass(frozen=True)
class CategoryTau:
    """One drafter's acceptance length on a category of a dataset's records; it has no times of its own."""

    dataset: str
    category: str
    drafter: str
    prompts: int
    tau: float


@dataclass(frozen=True)
class BenchmarkReport:
    """All that the page shows. Plain data: `dataclasses.asdict` of it is JSON.

    Attributes:
        title: of the page.
        lead: a sentence under it: the model, the drafters, the sampling.
        measured: one for each dataset and drafter.
        categories: one for each category of a dataset and each drafter, of datasets that have several.
        environment: what the figures depend on, in the order shown: chip, versions, dtype, kernels, command, date.
        notes: what a reader must know, such as prompts that were skipped.

    Raises:
        ValueError: a figure cannot be, with the dataset and the drafter that it belongs to.
    """

    title: str
    measured: Sequence[DrafterFigures]
    categories: Sequence[CategoryTau] = ()
    lead: str = ""
    environment: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not self.measured:
            raise ValueError("expected figures of at least one dataset, found none")
        seen = set()
        for row in (*self.measured, *self.categories):
            key = (row.dataset, row.category, row.drafter) if isinstance(row, CategoryTau) else (row.dataset, row.drafter)
            where = ", ".join(key)
            for problem in measured_problems(row):
                raise ValueError(f"{where}: {problem}")
            if key in seen:
                raise ValueError(f"{where}: expected one set of figures, found a second")
            seen.add(key)


def measured_problems(row: DrafterFigures | CategoryTau) -> Iterator[str]:
    """Errors in a set of figures, each in words."""
    speeds = () if isinstance(row, CategoryTau) else ("baseline_tokens_per_s", "tokens_per_s", "speedup")
    for name in ("prompts", "tau", *speeds):
        value = getattr(row, name)
        if not 0 < value < math.inf:
            yield f"expected {name} above 0, found {value}"
    if isinstance(row, CategoryTau):
        return
    cost = row.cost_per_million_tokens
    if cost is not None and not 0 <= cost < math.inf:
        yield f"expected cost_per_million_tokens of 0 or more, found {cost}"
    for name in ("draft_seconds", "verify_seconds", "other_seconds"):
        value = getattr(row, name)
        if value is not None and not math.isfinite(value):
            yield f"expected finite {name}, found {value}"
    for name, share in row.chosen:
        if not 0 <= share <= 1:
            yield f"expected a share of rounds from 0 to 1, found {share} of {name}"
    for share in row.acceptance_by_position:
        if not 0 <= share <= 1:
            yield f"expected acceptance_by_position from 0 to 1, found {share}"
    for position, tau in row.tau_by_position:
        if position < 0 or not 0 < tau < math.inf:
            yield f"expected tau_by_position above 0 at positions of 0 or more, found {tau} at {position}"


def write_benchmark(path: str | Path, report: BenchmarkReport) -> None:
    """Writes the page as one HTML file that works offline. The figures are in it as JSON too, in the element `data`.

    Raises:
        ValueError: the environment holds something that JSON cannot.
    """
    whole = report.measured
    tables = [figures_table("Whole datasets", whole), *([category_table(report)] if report.categories else [])]
    tables += chosen_tables(whole)
    text = "τ is all tokens over all rounds, the target's own included; speedup is against plain decoding of the same prompts."
    sections = [Section("Speed and acceptance", tables, " ".join([text, *report.notes]))]
    sections += [section for section in (acceptance(whole), tau_curves(whole), round_times(whole)) if section.blocks]
    write_sections(path, report.title, sections, lead=report.lead, facts=report.environment, data=asdict(report))


def distinct(names: Sequence[str]) -> list[str]:
    """Each name once, in the order of first appearance."""
    return list(dict.fromkeys(names))


def figures_table(title: str, measured: Sequence[DrafterFigures]) -> HtmlTable:
    """Datasets against drafters. The best speedup of a row is strong."""
    drafters = distinct([row.drafter for row in measured])
    found = {(row.dataset, row.drafter): row for row in measured}
    datasets = distinct([row.dataset for row in measured])
    per_line = [[found.get((dataset, drafter)) for drafter in drafters] for dataset in datasets]
    # One baseline serves all drafters where they were measured in one run.
    shared = all(len({row.baseline_tokens_per_s for row in each if row}) == 1 for each in per_line)
    priced = any(row.cost_per_million_tokens is not None for row in measured)
    fields = ["tokens/s", "speedup", "τ", *(["cost/M tokens"] if priced else [])]
    fields = fields if shared else ["plain tokens/s", *fields]
    most = max(row.speedup for row in measured)
    rows: list[Sequence[str | Cell | None]] = []
    for dataset, each in zip(datasets, per_line, strict=True):
        there = [row for row in each if row]
        begin = [dataset, f"{there[0].prompts:,}", *([rate(there[0].baseline_tokens_per_s)] if shared else [])]
        best = max(row.speedup for row in there)
        cells = (drafter_cells(row, n, best, most, shared, priced) for n, row in enumerate(each))
        rows.append([*begin, *(cell for group in cells for cell in group)])
    if len(datasets) > 1:
        rows.append(mean_row(per_line, shared, priced))
    begin = ["data", "prompts", *(["plain tokens/s"] if shared else [])]
    return HtmlTable(
        title,
        [*begin, *fields * len(drafters)],
        rows,
        groups=[("", len(begin)), *((drafter, len(fields)) for drafter in drafters)],
        total=len(rows) > len(datasets),
    )


def category_table(report: BenchmarkReport) -> HtmlTable:
    """τ of each category against drafters, these in the order of the table of datasets."""
    drafters = distinct([row.drafter for row in (*report.measured, *report.categories)])
    found = {(row.dataset, row.category, row.drafter): row for row in report.categories}
    rows: list[Sequence[str | Cell | None]] = []
    for dataset, category in dict.fromkeys((row.dataset, row.category) for row in report.categories):
        each = [found.get((dataset, category, drafter)) for drafter in drafters]
        prompts = next(row.prompts for row in each if row)
        rows.append([f"{dataset}: {category or '–'}", f"{prompts:,}", *(f"{row.tau:.2f}" if row else None for row in each)])
    return HtmlTable("τ by category", ["category", "prompts", *drafters], rows)


def chosen_tables(measured: Sequence[DrafterFigures]) -> list[HtmlTable]:
    """Tables of rounds that were chosen as decoding went, a column for each choice."""
    own = [row for row in measured if row.chosen]
    if not own:
        return []
    names = distinct([name for row in own for name, _ in row.chosen])
    shares = [(row, dict(row.chosen)) for row in own]
    rows = [[row.dataset, row.drafter, *(f"{has[name]:.0%}" if name in has else None for name in names)] for row, has in shares]
    return [HtmlTable("Rounds that were chosen", ["data", "drafter", *names], rows)]


def rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s:,.1f}" if tokens_per_s < 1000 else f"{tokens_per_s:,.0f}"


def drafter_cells(
    row: DrafterFigures | None, colour: int, best: float, most: float, shared: bool, priced: bool
) -> list[str | Cell | None]:
    """One drafter's cells in a row of the table; `best` is the row's best speedup, `most` the table's."""
    if row is None:
        return [None] * (3 + (not shared) + priced)
    cells: list[str | Cell | None] = [] if shared else [rate(row.baseline_tokens_per_s)]
    speedup = Cell(f"{row.speedup:.2f}×", row.speedup == best, row.speedup / most, colour)
    cells += [rate(row.tokens_per_s), speedup, f"{row.tau:.2f}"]
    if priced:
        cost = row.cost_per_million_tokens
        cells.append(None if cost is None else f"{cost:,.2f}")
    return cells


def mean_row(per_line: Sequence[Sequence[DrafterFigures | None]], shared: bool, priced: bool) -> list[str | Cell | None]:
    """Means over the datasets, of the drafters that were measured on all of them."""
    row: list[str | Cell | None] = ["mean", None, *([None] if shared else [])]
    for column in zip(*per_line, strict=True):
        there = [measured for measured in column if measured]
        means: list[str | Cell | None] = [None, None]
        if len(there) == len(column):
            means = [f"{sum(m.speedup for m in there) / len(there):.2f}×", f"{sum(m.tau for m in there) / len(there):.2f}"]
        row += [*([] if shared else [None]), None, *means, *([None] if priced else [])]
    return row


def charts_of(
    measured: Sequence[DrafterFigures],
    x_label: str,
    y_label: str,
    points: Mapping[int, Sequence[tuple[float, float]]],
    percent: bool = False,
) -> list[Block]:
    """A chart for each dataset with a line for each drafter; `points` has the line of each of `measured`, by its place there.

    A drafter has the same colour in every chart and in the table.
    """
    drafters = distinct([row.drafter for row in measured])
    charts: list[Block] = []
    for dataset in distinct([row.dataset for row in measured]):
        lines = {row.drafter: points[n] for n, row in enumerate(measured) if row.dataset == dataset and points[n]}
        if lines:
            series = [Series(drafter, lines.get(drafter, ())) for drafter in drafters]
            charts.append(LineChart(dataset, x_label, y_label, series, percent))
    return charts


def acceptance(measured: Sequence[DrafterFigures]) -> Section:
    points = {n: list(enumerate(row.acceptance_by_position, 1)) for n, row in enumerate(measured)}
    charts = charts_of(measured, "slot in the block", "rounds whose draft is accepted", points, percent=True)
    return Section(
        "Acceptance by position", charts, "The share of rounds in which the draft in a slot was accepted.", grid=True
    )


def tau_curves(measured: Sequence[DrafterFigures]) -> Section:
    points = {n: row.tau_by_position for n, row in enumerate(measured)}
    charts = charts_of(measured, "position in the generation", "τ", points)
    return Section("τ along the text", charts, "The mean acceptance length of rounds that begin at a position.", grid=True)


def round_times(measured: Sequence[DrafterFigures]) -> Section:
    """Table of where a round's time goes, where it is known."""
    bars = []
    for row in measured:
        parts = (row.draft_seconds, row.verify_seconds, row.other_seconds)
        if any(part is not None for part in parts):
            bars.append((f"{row.dataset} · {row.drafter}", [1000 * (part or 0.0) for part in parts]))
    charts = [StackedBars("Milliseconds a round", ("draft", "verify", "other"), bars, "ms")] if bars else []
    text = "One round that drafts, of each drafter. Parts are differences of times; one below 0 is in the figures alone."
    return Section("Where a round's time goes", charts, text)
