"""Figures that compare several ways of decoding. `docs/metrics.md` defines them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.compiled.timing import mean, quotients, spread
from tilewright.llm.acceptance import acceptance_by_position, acceptance_figures, generation_figures, tau_by_position
from tilewright.metrics.speculative import FIGURES, TAU, VLLM
from tilewright.metrics.tables import csv_text
from tilewright.runtime.output import Result

BASELINE = "none"
"""Drafter name of plain decoding, the baseline of all comparisons."""
Row = dict[str, Any]


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Returns the first position at which two token lists differ; None if they are equal."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def cost_per_million_tokens(price_per_hour: float, tokens_per_s: float) -> float:
    """Returns the cost in the price's currency, for generated tokens and decoding time only."""
    return price_per_hour / (3600 * tokens_per_s) * 1e6


@dataclass(frozen=True)
class DecodingRun:
    """One dataset, decoded in one way.

    Attributes:
        dataset: displayed name of the dataset.
        drafter: displayed name of the drafter; `BASELINE` is plain decoding.
        num_spec_tokens: maximum number of drafts per round, the block size minus one; 0 without a drafter.
        responses: one response per turn, in the same order in all runs of a dataset.
        tokens_per_s: generated tokens per second of decoding, for each repetition.
        seconds_per_round: decoding time per round of the batch (per step without a drafter), for each repetition.
        categories: category of each response; "" without one.
        batch_size: maximum number of rows decoded together.
        skipped: number of turns that do not fit the model's context.
        part_seconds: times of the parts of a drafting round ("draft", "verify", "other"), if measured.
        chosen: figures of adaptively chosen rounds; see `llm/chosen.py`.
    """

    dataset: str
    drafter: str
    num_spec_tokens: int
    responses: Sequence[Result]
    tokens_per_s: Sequence[float]
    seconds_per_round: Sequence[float]
    categories: Sequence[str] = ()
    batch_size: int = 1
    skipped: int = 0
    part_seconds: Mapping[str, float] | None = None
    chosen: Row | None = None


def category_figures(run: DecodingRun) -> list[Row]:
    """Returns `acceptance_figures` of each category, in order of first appearance; empty for a single category."""
    names = list(dict.fromkeys(run.categories))
    if len(names) < 2:
        return []
    grouped = {
        name: [r for r, category in zip(run.responses, run.categories, strict=True) if category == name] for name in names
    }
    return [{"category": name, **acceptance_figures(responses)} for name, responses in grouped.items()]


def benchmark_rows(runs: Sequence[DecodingRun], price_per_hour: float | None = None) -> list[Row]:
    """Returns a row of figures for each run, under the field names of `--json`. Ratios are to the `BASELINE` run of the same
    dataset and batch size.

    Raises:
        ValueError: Runs of one dataset have different numbers of responses, or two runs have the same dataset, batch size and
            drafter.
    """
    named = {(run.dataset, run.batch_size, run.drafter): run for run in runs}
    if len(named) < len(runs):
        raise ValueError("expected one run for each dataset, batch size and drafter, found more")
    return [benchmark_row(run, named.get((run.dataset, run.batch_size, BASELINE)), price_per_hour) for run in runs]


def benchmark_row(run: DecodingRun, baseline: DecodingRun | None, price_per_hour: float | None = None) -> Row:
    rate = spread(run.tokens_per_s)
    parts = run.part_seconds or {}
    return {
        "dataset": run.dataset,
        "batch_size": run.batch_size,
        "drafter": run.drafter,
        "skipped": run.skipped,
        "tokens_per_s": rate.median,
        "tokens_per_s_range": rate.range,
        **against(run, baseline),
        **generation_figures(run.responses, run.num_spec_tokens),
        "mean_round_ms": 1000 * spread(run.seconds_per_round).median,
        "round_ms": 1000 * sum(parts.values()) if parts else None,
        **{f"{part}_ms": 1000 * parts[part] if part in parts else None for part in ("draft", "verify", "other")},
        "cost_per_million_tokens": None if price_per_hour is None else cost_per_million_tokens(price_per_hour, rate.median),
        "acceptance_by_position": acceptance_by_position(run.responses, run.num_spec_tokens),
        "tau_by_position": tau_by_position(run.responses),
        "chosen": run.chosen,
        "categories": category_figures(run),
    }


AGAINST = (
    "baseline_tokens_per_s",
    "baseline_tokens_per_s_range",
    "speedup",
    "speedup_range",
    "round_cost_steps",
    "identical",
    "first_differences",
)
"""Fields that compare a row with the baseline; None without one. In the baseline's own row, fields that compare answers are
None."""


def against(run: DecodingRun, baseline: DecodingRun | None) -> Row:
    """Returns the fields that compare a run with plain decoding."""
    row: Row = dict.fromkeys(AGAINST)
    if baseline is None:
        return row
    plain = spread(baseline.tokens_per_s)
    rate = spread(run.tokens_per_s)
    row |= {
        "baseline_tokens_per_s": plain.median,
        "baseline_tokens_per_s_range": plain.range,
        "speedup": rate.median / plain.median,
        "speedup_range": quotients(run.tokens_per_s, baseline.tokens_per_s).range,
        "round_cost_steps": spread(run.seconds_per_round).median / spread(baseline.seconds_per_round).median,
    }
    if baseline is run:
        return row
    if len(baseline.responses) != len(run.responses):
        counts = f"{len(baseline.responses)} and {len(run.responses)}"
        raise ValueError(f"{run.dataset}: expected equal numbers of responses with and without {run.drafter}, found {counts}")
    pairs = zip(baseline.responses, run.responses, strict=True)
    differences = [first_difference(without.tokens, drafted.tokens) for without, drafted in pairs]
    return {**row, "identical": all(place is None for place in differences), "first_differences": differences}


AVERAGED = ("speedup", "tokens_per_round", "tau_by_response", "tau_published")


def average_rows(rows: Sequence[Row]) -> list[Row]:
    """Returns unweighted means over datasets for each batch size and drafter, as in the last column of the papers' tables."""
    averages = []
    for batch_size, drafter in dict.fromkeys((row["batch_size"], row["drafter"]) for row in rows):
        group = [row for row in rows if (row["batch_size"], row["drafter"]) == (batch_size, drafter)]
        means = {name: mean(row[name] for row in group if row[name] is not None) for name in AVERAGED}
        averages.append({"batch_size": batch_size, "drafter": drafter, "datasets": len(group), **means})
    return averages


CSV_FIELDS = ("category", *(metric.name for metric in (*FIGURES, *TAU, *VLLM) if metric.csv))


def benchmark_csv(rows: Sequence[Row]) -> str:
    """Returns the rows of `benchmark_rows` as CSV: all single-valued figures, with a further line for each category.

    Unknown figures are empty cells. Categories have no times.
    """
    lines = []
    for row in rows:
        lines.append({"category": "", **row, **(row["speculative_decoding"] or {})})
        shared = {name: row[name] for name in ("dataset", "batch_size", "drafter", "block_size")}
        lines += [{**shared, **category} for category in row["categories"]]
    return csv_text(CSV_FIELDS, lines)
