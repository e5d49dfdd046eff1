"""The figures of a generation, each computed in one place. `docs/metrics.md` defines them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.compiled.timing import quotients, spread
from tilewright.llm.acceptance import distinct_ngram_ratio, drafting_rounds, speculative_decoding
from tilewright.metrics.speculative import FIGURES, TAU, VLLM
from tilewright.metrics.tables import csv_text
from tilewright.runtime.output import Result

BASELINE = "none"
"""The drafter of the run that the others are compared with: plain decoding."""
Row = dict[str, Any]


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first position at which two token lists differ, None if they are equal."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def mean_distinct_ngram_ratio(results: Sequence[Result], n: int = 4) -> float | None:
    """The mean over results: loops make drafts look good, so the two are read together."""
    return mean(distinct_ngram_ratio(r.tokens, n) for r in results)


def mean(values: Iterable[float]) -> float | None:
    """None of nothing."""
    listed = list(values)
    return math.fsum(listed) / len(listed) if listed else None


def tokens_per_round(responses: Sequence[Result]) -> float | None:
    """τ: all tokens over all rounds, a last round counted for what it added; 1 where nothing drafts, None before any round."""
    return mean(added for r in responses for added in r.acceptance_lengths)


def tau_by_response(responses: Sequence[Result]) -> float | None:
    """The mean over responses of each one's mean over its rounds of accepted drafts + 1, an end that cuts a round left aside.

    It weighs a response alike however long it is, where `tokens_per_round` weighs rounds alike.
    """
    return over_responses(r.accepted for r in responses)


def tau_published(responses: Sequence[Result]) -> float | None:
    """`tau_by_response` without the first round of each: the count of DFlash's published code (z-lab/dflash, `benchmark.py`).

    Its first token comes from the prefill and belongs to no round; each of its rounds begins behind a generated token. Here the
    first round begins behind the prompt and commits that token. Both count what a last round accepted past the end.
    """
    return over_responses(r.accepted[1:] for r in responses)


def over_responses(accepted: Iterable[Sequence[int]]) -> float | None:
    """The mean over responses that have a round of the mean acceptance length of each."""
    each = (mean(n + 1 for n in rounds) for rounds in accepted)
    return mean(value for value in each if value is not None)


def acceptance_by_position(responses: Sequence[Result], num_spec_tokens: int) -> list[Row]:
    """For each draft position, from 1: how often its draft was accepted.

    `rate` is the share of all rounds that drafted (vLLM's per-position acceptance rate: accepted at the position over
    `num_spec_steps`); `conditional` is the share of the rounds that got there: a draft at the position, all before it accepted.
    """
    steps = drafting_rounds(responses)
    rows = []
    for position in range(1, num_spec_tokens + 1):
        reached = sum(drafted >= position and accepted >= position - 1 for drafted, accepted in steps)
        accepted_here = sum(accepted >= position for _, accepted in steps)
        rows.append(
            {
                "position": position,
                "reached": reached,
                "accepted": accepted_here,
                "rate": accepted_here / len(steps) if steps else None,
                "conditional": accepted_here / reached if reached else None,
            }
        )
    return rows


def tau_by_position(responses: Sequence[Result], edges: Sequence[int] = (0, 32, 64, 128, 256, 512, 1024, 2048)) -> list[Row]:
    """Accepted drafts + 1 of a round, in the mean, against how many tokens the response had when the round began.

    Bins go from one edge up to the next, which is outside; the last is open (`to` is None). Bins without a round are left out.
    """
    lengths: list[list[int]] = [[] for _ in edges]
    for r in responses:
        position = 0
        for added, accepted in zip(r.acceptance_lengths, r.accepted, strict=True):
            lengths[sum(edge <= position for edge in edges) - 1].append(accepted + 1)
            position += added
    tops = [*edges[1:], None]
    bins = zip(edges, tops, lengths, strict=True)
    return [{"from": low, "to": top, "rounds": len(own), "tau": mean(own)} for low, top, own in bins if own]


def cost_per_million_tokens(price_per_hour: float, tokens_per_s: float) -> float:
    """In the currency of the price, for generated tokens and time in decoding alone."""
    return price_per_hour / (3600 * tokens_per_s) * 1e6


@dataclass(frozen=True)
class DecodingRun:
    """One dataset, decoded one way.

    Attributes:
        dataset: the name it is shown under.
        drafter: the name it is shown under; `BASELINE` is plain decoding.
        num_spec_tokens: the most drafts in a round, the block size less one; 0 without a drafter.
        responses: one for each turn, in the same order in all runs of a dataset.
        tokens_per_s: generated tokens for each second of decoding, of each repetition.
        seconds_per_round: of decoding, for a round of the batch (a step, without a drafter), of each repetition.
        categories: the benchmark's own, of each response; "" where it has none.
        batch_size: the most rows decoded together.
        skipped: turns left out because they don't fit the model's context.
        part_seconds: the parts of one round that drafts ("draft", "verify", "other"), where they were measured.
        chosen: what rounds did, where that was chosen as decoding went; see `bench/chosen.py`.
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


def acceptance_figures(responses: Sequence[Result]) -> Row:
    """The means that a table shows of a dataset and of each of its categories."""
    return {
        "responses": len(responses),
        "tokens": sum(len(r.tokens) for r in responses),
        "rounds": sum(len(r.acceptance_lengths) for r in responses),
        "tokens_per_round": tokens_per_round(responses),
        "tau_by_response": tau_by_response(responses),
        "tau_published": tau_published(responses),
    }


def generation_figures(responses: Sequence[Result], num_spec_tokens: int) -> Row:
    """Figures of results by themselves, whatever they are compared with."""
    return {
        "block_size": num_spec_tokens + 1,
        **acceptance_figures(responses),
        "distinct_4gram_ratio": mean_distinct_ngram_ratio(responses),
        "speculative_decoding": speculative_decoding(responses, num_spec_tokens),
    }


def category_figures(run: DecodingRun) -> list[Row]:
    """`acceptance_figures` of each category, in the order of their first responses; empty where there is but one."""
    names = list(dict.fromkeys(run.categories))
    if len(names) < 2:
        return []
    own = {name: [r for r, category in zip(run.responses, run.categories, strict=True) if category == name] for name in names}
    return [{"category": name, **acceptance_figures(responses)} for name, responses in own.items()]


def benchmark_rows(runs: Sequence[DecodingRun], price_per_hour: float | None = None) -> list[Row]:
    """A row of figures for each run, under the field names of `--json`; ratios are to the `BASELINE` run of the same dataset
    and batch size.

    Raises:
        ValueError: runs of one dataset answered different numbers of turns, or two have one drafter.
    """
    named = {(run.dataset, run.batch_size, run.drafter): run for run in runs}
    if len(named) < len(runs):
        raise ValueError("expected one run for each dataset, batch size and drafter, found more")
    return [benchmark_row(run, named.get((run.dataset, run.batch_size, BASELINE)), price_per_hour) for run in runs]


def benchmark_row(run: DecodingRun, baseline: DecodingRun | None, price_per_hour: float | None = None) -> Row:
    rate, parts = spread(run.tokens_per_s), run.part_seconds or {}
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
"""Fields of a row that compare it with the baseline: None without one; in its own row those that compare answers are None."""


def against(run: DecodingRun, baseline: DecodingRun | None) -> Row:
    """Comparison of a run with plain decoding, as the fields of a row."""
    row: Row = dict.fromkeys(AGAINST)
    if baseline is None:
        return row
    plain, own = spread(baseline.tokens_per_s), spread(run.tokens_per_s)
    row |= {
        "baseline_tokens_per_s": plain.median,
        "baseline_tokens_per_s_range": plain.range,
        "speedup": own.median / plain.median,
        "speedup_range": quotients(run.tokens_per_s, baseline.tokens_per_s).range,
        "round_cost_steps": spread(run.seconds_per_round).median / spread(baseline.seconds_per_round).median,
    }
    if baseline is run:
        return row
    if len(baseline.responses) != len(run.responses):
        counts = f"{len(baseline.responses)} and {len(run.responses)}"
        raise ValueError(f"{run.dataset}: expected as many responses with and without {run.drafter}, found {counts}")
    pairs = zip(baseline.responses, run.responses, strict=True)
    differences = [first_difference(without.tokens, drafted.tokens) for without, drafted in pairs]
    return {**row, "identical": all(at is None for at in differences), "first_differences": differences}


AVERAGED = ("speedup", "tokens_per_round", "tau_by_response", "tau_published")


def average_rows(rows: Sequence[Row]) -> list[Row]:
    """For each batch size and drafter the unweighted means over datasets, as the papers' last column has them."""
    averages = []
    for batch_size, drafter in dict.fromkeys((row["batch_size"], row["drafter"]) for row in rows):
        own = [row for row in rows if (row["batch_size"], row["drafter"]) == (batch_size, drafter)]
        means = {name: mean(row[name] for row in own if row[name] is not None) for name in AVERAGED}
        averages.append({"batch_size": batch_size, "drafter": drafter, "datasets": len(own), **means})
    return averages


CSV_FIELDS = ("category", *(metric.name for metric in (*FIGURES, *TAU, *VLLM) if metric.csv))


def benchmark_csv(rows: Sequence[Row]) -> str:
    """The rows of `benchmark_rows` as CSV: those of their figures that are one number, a line more for each category.

    A figure that is not known is an empty cell; a category has no figures of time.
    """
    lines = []
    for row in rows:
        lines.append({"category": "", **row, **(row["speculative_decoding"] or {})})
        shared = {name: row[name] for name in ("dataset", "batch_size", "drafter", "block_size")}
        lines += [{**shared, **category} for category in row["categories"]]
    return csv_text(CSV_FIELDS, lines)
