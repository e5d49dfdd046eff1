"""The figures of a generation, each computed in one place. `docs/metrics.md` defines them."""

import csv
import io
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.decode.session import Result

BASELINE = "none"
"""The drafter of the run that the others are compared with: plain decoding."""
Row = dict[str, Any]


def mean_acceptance_length(results: Sequence[Result]) -> float | None:
    """tau: generated tokens for each round, over the rounds of all results; 1 where nothing drafts, None before any round."""
    rounds = sum(len(r.acceptance_lengths) for r in results)
    return sum(sum(r.acceptance_lengths) for r in results) / rounds if rounds else None


def acceptance_histogram(results: Sequence[Result], block_size: int) -> list[int]:
    """How many rounds accepted 0, 1, ... `block_size - 1` draft tokens."""
    counts = Counter(length - 1 for r in results for length in r.acceptance_lengths)
    return [counts[n] for n in range(block_size)]


def distinct_ngram_ratio(tokens: Sequence[int], n: int = 4) -> float:
    """Different n-grams over all n-grams: 1 where nothing repeats, near 0 in a loop. 1 for texts shorter than n."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first position at which two token lists differ, None if they are equal."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


@dataclass(frozen=True)
class Response:
    """One response and its rounds. Made by `respond`.

    Attributes:
        tokens: the generated tokens.
        added: how many of them each round added.
        drafted: how many draft tokens each round proposed; 0 is a plain step.
        accepted: how many of its drafts each round accepted, before an end cut it. One entry fewer than `drafted` where that is
            not known of the last round: no figure of acceptance counts this round.
        category: the benchmark's own, "" where it has none.
    """

    tokens: Sequence[int]
    added: Sequence[int]
    drafted: Sequence[int]
    accepted: Sequence[int]
    category: str = ""

    def __post_init__(self) -> None:
        counts = len(self.added), len(self.drafted), len(self.accepted)
        if counts[0] != counts[1] or counts[1] - counts[2] not in (0, 1):
            raise ValueError(f"expected as many rounds in added, drafted and accepted (or one fewer), found {counts}")
        if sum(self.added) != len(self.tokens):
            raise ValueError(f"expected rounds that add {len(self.tokens)} tokens, found {sum(self.added)}")
        for drafted, accepted in self.rounds:
            if not 0 <= accepted <= drafted:
                raise ValueError(f"expected from 0 to {drafted} accepted drafts, found {accepted}")

    @property
    def rounds(self) -> list[tuple[int, int]]:
        """(drafted, accepted) of every round of which both are known."""
        return list(zip(self.drafted, self.accepted, strict=False))


def respond(
    result: Result,
    num_spec_tokens: int,
    category: str = "",
    drafted: Sequence[int] | None = None,
    accepted: Sequence[int] | None = None,
) -> Response:
    """A result as the figures take it.

    Args:
        num_spec_tokens: the most drafts in a round, the block size less one; 0 without a drafter.
        drafted: of each round, where it varies; by default every round drafts `num_spec_tokens`.
        accepted: of each round, before an end cut the last one. By default it follows from what the rounds added, and the last
            round of a response that ended is left out: it may have accepted more than it could add. (To keep it where it added
            a whole block would favour long rounds.)
    """
    added = result.acceptance_lengths
    drafted = [num_spec_tokens] * len(added) if drafted is None else drafted
    if accepted is None:
        accepted = [n - 1 for n in added]
        if accepted and drafted[-1] > 0 and result.finish_reason != "interrupted":
            accepted = accepted[:-1]
    return Response(result.tokens, added, drafted, accepted, category)


def mean_distinct_ngram_ratio(results: Sequence[Result | Response], n: int = 4) -> float:
    """The mean over results: loops make tau look good, so the two are read together."""
    return sum(distinct_ngram_ratio(r.tokens, n) for r in results) / len(results)


def mean(values: Iterable[float]) -> float | None:
    """None of nothing."""
    listed = list(values)
    return math.fsum(listed) / len(listed) if listed else None


def tau(responses: Sequence[Response]) -> float | None:
    """Acceptance length as published (DFlash, arXiv 2602.06036): the mean over responses of each one's mean over its rounds."""
    per_response = (mean(accepted + 1 for accepted in r.accepted) for r in responses)
    return mean(value for value in per_response if value is not None)


def tau_pooled(responses: Sequence[Response]) -> float | None:
    """The mean acceptance length over all rounds of all responses: long responses weigh more than in `tau`."""
    return mean(accepted + 1 for r in responses for accepted in r.accepted)


def tokens_per_round(responses: Sequence[Response]) -> float | None:
    """Tokens kept for each round that ran, the last round of a response counted for what it added."""
    return mean(added for r in responses for added in r.added)


def speculative_decoding(responses: Sequence[Response], num_spec_tokens: int) -> Row | None:
    """The object that vLLM calls `metrics.speculative_decoding`, over all rounds that drafted; None where nothing drafts.

    Source: vLLM, `docs/features/speculative_decoding/acceptance_metrics.md`. There too, drafts count as accepted before an end
    cuts the round, and rounds that propose nothing do not count. With no round at all its acceptance length is 1, its rate 0.
    """
    if num_spec_tokens == 0:
        return None
    steps = drafting_rounds(responses)
    accepted, drafted = sum(a for _, a in steps), sum(d for d, _ in steps)
    counts = Counter(a for _, a in steps)
    return {
        "mean_acceptance_length": 1 + accepted / len(steps) if steps else 1.0,
        "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
        "acceptance_histogram": [counts[n] for n in range(num_spec_tokens + 1)],
        "num_spec_steps": len(steps),
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": num_spec_tokens,
    }


def drafting_rounds(responses: Sequence[Response]) -> list[tuple[int, int]]:
    """(drafted, accepted) of all rounds that proposed anything."""
    return [(drafted, accepted) for r in responses for drafted, accepted in r.rounds if drafted > 0]


def acceptance_by_position(responses: Sequence[Response], num_spec_tokens: int) -> list[Row]:
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


def tau_by_position(responses: Sequence[Response], edges: Sequence[int] = (0, 32, 64, 128, 256, 512, 1024, 2048)) -> list[Row]:
    """The pooled acceptance length against how many tokens the response had when the round began.

    Bins go from one edge up to the next, which is outside; the last is open (`to` is None). Bins without a round are left out.
    """
    lengths: list[list[int]] = [[] for _ in edges]
    for r in responses:
        position = 0
        for added, accepted in zip(r.added, r.accepted, strict=False):
            lengths[sum(edge <= position for edge in edges) - 1].append(accepted + 1)
            position += added
    tops = [*edges[1:], None]
    bins = zip(edges, tops, lengths, strict=True)
    return [{"from": low, "to": top, "rounds": len(own), "tau": mean(own)} for low, top, own in bins if own]


def cost_per_million_tokens(price_per_hour: float, tokens_per_s: float) -> float:
    """In the currency of the price, for generated tokens and time in decoding alone."""
    return price_per_hour / (3600 * tokens_per_s) * 1e6


@dataclass(frozen=True)
class Run:
    """One dataset, decoded one way.

    Attributes:
        dataset: the name it is shown under.
        drafter: the name it is shown under; `BASELINE` is plain decoding.
        num_spec_tokens: the most drafts in a round, the block size less one; 0 without a drafter.
        responses: one for each turn, in the same order in all runs of a dataset.
        tokens_per_s: generated tokens for each second of decoding; the median over the repetitions.
        skipped: turns left out because they don't fit the model's context.
        round_seconds: the parts of one round that drafts ("draft", "verify", "other"), where they were measured.
    """

    dataset: str
    drafter: str
    num_spec_tokens: int
    responses: Sequence[Response]
    tokens_per_s: float
    skipped: int = 0
    round_seconds: Mapping[str, float] | None = None


def acceptance_figures(responses: Sequence[Response]) -> Row:
    """The means that a table shows of a dataset and of each of its categories."""
    return {
        "responses": len(responses),
        "tokens": sum(len(r.tokens) for r in responses),
        "rounds": sum(len(r.added) for r in responses),
        "rounds_left_out": sum(len(r.added) - len(r.accepted) for r in responses),
        "tau": tau(responses),
        "tau_pooled": tau_pooled(responses),
        "tokens_per_round": tokens_per_round(responses),
    }


def category_figures(responses: Sequence[Response]) -> list[Row]:
    """`acceptance_figures` of each category, in the order of their first responses; empty where there is but one."""
    names = list(dict.fromkeys(r.category for r in responses))
    if len(names) < 2:
        return []
    return [{"category": name, **acceptance_figures([r for r in responses if r.category == name])} for name in names]


def benchmark_rows(runs: Sequence[Run], price_per_hour: float | None = None) -> list[Row]:
    """A row of figures for each run, under the field names of `--json`; ratios are to the same dataset's `BASELINE` run.

    Raises:
        ValueError: runs of one dataset answered different numbers of turns, or two have one drafter.
    """
    named = {(run.dataset, run.drafter): run for run in runs}
    if len(named) < len(runs):
        raise ValueError("expected one run for each dataset and drafter, found more")
    return [benchmark_row(run, named.get((run.dataset, BASELINE)), price_per_hour) for run in runs]


def benchmark_row(run: Run, baseline: Run | None, price_per_hour: float | None) -> Row:
    differences = None
    if baseline is not None and baseline is not run:
        if len(baseline.responses) != len(run.responses):
            counts = f"{len(baseline.responses)} and {len(run.responses)}"
            raise ValueError(f"{run.dataset}: expected as many responses with and without {run.drafter}, found {counts}")
        pairs = zip(baseline.responses, run.responses, strict=True)
        differences = [first_difference(plain.tokens, own.tokens) for plain, own in pairs]
    seconds = run.round_seconds or {}
    speedup = None if baseline is None else run.tokens_per_s / baseline.tokens_per_s
    return {
        "dataset": run.dataset,
        "drafter": run.drafter,
        "block_size": run.num_spec_tokens + 1,
        "skipped": run.skipped,
        "tokens_per_s": run.tokens_per_s,
        "baseline_tokens_per_s": None if baseline is None else baseline.tokens_per_s,
        "speedup": speedup,
        "round_cost_steps": None if speedup is None else (tokens_per_round(run.responses) or 0.0) / speedup,
        **acceptance_figures(run.responses),
        "round_ms": 1000 * sum(seconds.values()) if seconds else None,
        **{f"{part}_ms": 1000 * seconds[part] if part in seconds else None for part in ("draft", "verify", "other")},
        "cost_per_million_tokens": None
        if price_per_hour is None
        else cost_per_million_tokens(price_per_hour, run.tokens_per_s),
        "distinct_4gram_ratio": mean_distinct_ngram_ratio(run.responses) if run.responses else None,
        "identical": all(at is None for at in differences) if differences else None,
        "first_differences": differences,
        "speculative_decoding": speculative_decoding(run.responses, run.num_spec_tokens),
        "acceptance_by_position": acceptance_by_position(run.responses, run.num_spec_tokens),
        "tau_by_position": tau_by_position(run.responses),
        "categories": category_figures(run.responses),
    }


def average_rows(rows: Sequence[Row]) -> list[Row]:
    """For each drafter the unweighted means over datasets of speedup and tau, as the papers' last column has them."""
    drafters = dict.fromkeys(row["drafter"] for row in rows)
    averages = []
    for drafter in drafters:
        own = [row for row in rows if row["drafter"] == drafter]
        known = {name: [row[name] for row in own if row[name] is not None] for name in ("speedup", "tau")}
        averages.append({"drafter": drafter, "datasets": len(own), **{name: mean(values) for name, values in known.items()}})
    return averages


CSV_FIELDS = (
    "dataset category drafter block_size responses skipped tokens rounds rounds_left_out tokens_per_s baseline_tokens_per_s "
    "speedup round_cost_steps tau tau_pooled tokens_per_round mean_acceptance_length draft_acceptance_rate num_spec_steps "
    "num_accepted_draft_tokens num_draft_tokens num_spec_tokens round_ms draft_ms verify_ms other_ms cost_per_million_tokens "
    "distinct_4gram_ratio identical"
).split()


def csv_text(rows: Sequence[Row]) -> str:
    """The rows of `benchmark_rows` as CSV: those of their figures that are one number, a line more for each category.

    A figure that is not known is an empty cell; a category has no figures of time.
    """
    out = io.StringIO()
    writer: csv.DictWriter[str] = csv.DictWriter(out, CSV_FIELDS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({"category": "", **row, **(row["speculative_decoding"] or {})})
        shared = {name: row[name] for name in ("dataset", "drafter", "block_size")}
        writer.writerows({**shared, **category} for category in row["categories"])
    return out.getvalue()
