"""Terminal output and page of `tilewright bench serving`; on the page every request has a line of time."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from string import Template

import numpy as np

from tilewright.metrics.metric import Metric, chosen, significant
from tilewright.metrics.serving import LATENCIES, SERVING
from tilewright.metrics.tables import UNKNOWN, FigureTable, Row
from tilewright.report.charts import LineChart, Series
from tilewright.report.page import Block, HtmlTable, Section, asset, document, facts_html, sentences
from tilewright.report.tables import page_table

SHARES = (*range(0, 90, 5), *range(90, 101))
"""Percent of the values at which a distribution is drawn, closer together where its tail is."""
REQUESTS, OUTPUT, TOTAL, GOODPUT = chosen(
    SERVING, "requests_per_s output_tokens_per_s total_tokens_per_s goodput_requests_per_s"
)

DRAWN = {"ttft": "Time to first token", "tpot": "Time per output token", "itl": "Between chunks", "e2e": "End to end"}


def summary(figures: Row, facts: Row) -> list[str]:
    """The figures that are one number, in sentences; the first says what was asked for."""
    lines = [f"{facts['model']} at {facts['url']}: {workload_text(figures, facts)}"]
    done = f"{figures['completed']:,} completed in {figures['duration_s']:,.2f} s"
    if figures["failed"]:
        done += f", {figures['failed']:,} failed"
        done += f" ({figures['rejected']:,} turned away as too many)" if figures["rejected"] else ""
    lines.append(f"{done}; at most {figures['peak_concurrency']:,} under way at once")
    for row in figures["failures"]:
        lines.append(f"  {row['requests']:,} × {row['kind'].replace('_', ' ')}: {row['first_message']}")
    if figures["completed"]:
        rates = [f"{REQUESTS.of(figures) or UNKNOWN} requests/s", f"{OUTPUT.of(figures) or UNKNOWN} output tokens/s"]
        if figures["total_tokens_per_s"] is not None:
            rates.append(f"{TOTAL.of(figures)} tokens/s with prompts")
        lines.append(", ".join(rates))
    if figures["goodput_requests_per_s"] is not None:
        asked = ", ".join(f"{name.upper()} {most:g} ms" for name, most in figures["goodput"].items())
        met = f"{figures['requests_within_goodput']:,} of {figures['requests']:,} requests"
        lines.append(f"goodput: {GOODPUT.of(figures)} requests/s ({met} within {asked})")
    drafts = figures["speculative_decoding"]
    if drafts is not None:
        tau = drafts["mean_acceptance_length"]
        rate = drafts["draft_acceptance_rate"]
        lines.append(f"τ {tau:.2f}: {rate:.0%} of drafts accepted, in {drafts['num_spec_steps']:,} rounds that drafted")
    return lines


def workload_text(figures: Row, facts: Row) -> str:
    count = f"{figures['requests']:,} request{'s' if figures['requests'] > 1 else ''}"
    source = facts["trace"] or facts["prompt_file"] or "held-out code"
    if facts["rate_per_s"] is not None:
        when = f"{facts['rate_per_s']:g} a second at random"
    elif facts["arrivals"] == "burst":
        when = "all at once" if facts["concurrency"] is None else "as fast as possible"
    else:
        when = "in real time" if facts["arrivals"] == "real" else f"{facts['arrivals']} times as fast"
    limit = "" if facts["concurrency"] is None else f", at most {facts['concurrency']:,} at a time"
    return f"{count} of {source}, {when}{limit}"


def latency_table(figures: Row, percentiles: Sequence[float]) -> FigureTable:
    """A line for each latency that there are values of; what held nothing back has none."""
    columns = ["mean", *(f"p{each:g}" for each in percentiles)]
    rows = []
    for latency in LATENCIES:
        values = {column: figures[f"{latency.name}_{column}_ms"] for column in columns}
        if values["mean"] is not None and (latency.name != "held" or any(values.values())):
            rows.append({"name": latency.head, **values})
    return FigureTable("milliseconds", "latency", {"": rows}, [Metric(name, "ms", head=name, digits=3) for name in columns])


def notes(figures: Row, facts: Row, late: int) -> list[str]:
    """Notes that a reader needs with the figures; `late` counts requests that this client sent more than 10 ms too late."""
    said = []
    scale = facts["length_scale"]
    source = facts["characters_per_token_source"]
    if scale is not None and scale < 1:
        said.append(f"lengths are the trace's times {scale:.3g}: its longest request then fits {facts['context']:,} positions")
    if source is not None:
        said.append(f"prompts are text cut at {facts['characters_per_token']:.3g} characters a token ({source})")
    if facts["records"] is not None and figures["requests"] + facts["warmup"] > facts["records"]:
        said.append(f"the {facts['records']:,} records of the file were sent more than once; a server may remember them")
    if facts["warmup"]:
        failed = f", of which {figures['warmup_failed']} failed" if figures["warmup_failed"] else ""
        said.append(f"{facts['warmup']:,} warm-up requests{failed} are in no figure")
    if figures["cached_prompt_tokens"] and figures["prompt_tokens"]:
        share = figures["cached_prompt_tokens"] / figures["prompt_tokens"]
        said.append(f"{share:.0%} of the prompts' tokens were in the server's prefix cache")
    if figures["output_tokens_counted_by"] in ("chunks", "both"):
        said.append("the server gives no usage: each chunk counts as one token, which is too few where it brings several")
    elif figures["completed"] and figures["token_itl_mean_ms"] is None and figures["itl_mean_ms"] is not None:
        said.append("the server does not say how many tokens a chunk brings: there is no time between tokens")
    if late:
        said.append(f"this client sent {late:,} requests more than 10 ms late: it was itself too slow for their times")
    return said


@dataclass(frozen=True)
class ServingReport:
    """All that the page shows.

    Attributes:
        title: of the page.
        lead: a sentence under it.
        figures: those of `--json`.
        percentiles: that the figures have.
        requests: a record for each, in the order of the plan: `number`, times in seconds since the start of the run (`due_s`,
            `held_s`, `sent_s`, `first_s` or None, `end_s`), `prompt_tokens` or None, `output_tokens`, `chunks`, `tpot_ms` or
            None, `failure` and `message`, None where it completed.
        bin_s, tokens_per_bin: tokens that came in spans of this many seconds.
        latencies: values in seconds, ascending.
        environment: what the figures depend on, in the order shown.
        notes: what a reader must know.

    Raises:
        ValueError: there is no request, or one's times cannot be.
    """

    title: str
    lead: str
    figures: Row
    percentiles: Sequence[float]
    requests: Sequence[Row]
    bin_s: float
    tokens_per_bin: Sequence[float]
    latencies: Mapping[str, Sequence[float]]
    environment: Row = field(default_factory=dict)
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not self.requests:
            raise ValueError("expected at least one request, found none")
        if not 0 < self.bin_s < math.inf:
            raise ValueError(f"expected spans above 0 s, found {self.bin_s}")
        for row in self.requests:
            for problem in request_problems(row):
                raise ValueError(f"request {row['number']}: {problem}")


def request_problems(row: Row) -> Iterator[str]:
    """Errors in a request's record, each in words."""
    first = row["sent_s"] if row["first_s"] is None else row["first_s"]
    times = [0.0, row["due_s"], row["sent_s"], first, row["end_s"]]
    if not all(map(math.isfinite, times)) or times != sorted(times):
        yield f"expected due_s, sent_s, first_s and end_s one after the other, found {times[1:]}"


def write_serving(path: str | Path, report: ServingReport) -> None:
    """Writes the page as one HTML file that works offline. Figures and requests are in it as JSON too, in the element `data`.

    A link may name a span of seconds: `FILE.html#from=8&to=10`.

    Raises:
        ValueError: figures or environment hold something that JSON cannot.
    """
    failures = report.figures["failures"]
    taken = page_table(latency_table(report.figures, report.percentiles))
    sections = [
        Section("What failed", [failure_table(failures)] if failures else []),
        Section("How long things took", [taken], sentences(report.notes)),
        distributions(report),
    ]
    body = Template(asset("serving.html")).substitute(
        title=escape(report.title),
        lead=escape(report.lead),
        figures=headline_html(report.figures),
        sections="".join(section.html() for section in sections if section.blocks),
        facts=facts_html(report.environment),
    )
    data = {name: getattr(report, name) for name in ("figures", "environment", "requests", "bin_s", "tokens_per_bin")}
    page = document(report.title, body, styles=("page.css", "scripted.css", "serving.css"), scripts=("serving.js",), data=data)
    Path(path).write_text(page, encoding="utf-8")


def headline_html(figures: Row) -> str:
    """The figures to look at first."""
    middle = next((key for key in figures if key.startswith("ttft_p")), "ttft_mean_ms")
    at = middle.removeprefix("ttft_").removesuffix("_ms")
    shown = [("Completed", f"{figures['completed']:,}", f"of {figures['requests']:,}")]
    for name in ("ttft", "tpot"):
        value = figures[f"{name}_{at}_ms"]
        if value is not None:
            shown.append((f"{name.upper()}, {at}", significant(value), "ms"))
    if figures["output_tokens_per_s"] is not None:
        shown.append((OUTPUT.head, str(OUTPUT.of(figures)), OUTPUT.unit))
    if figures["goodput_requests_per_s"] is not None:
        shown.append((GOODPUT.head, str(GOODPUT.of(figures)), "requests/s"))
    if figures["speculative_decoding"] is not None:
        shown.append(("Tokens per round, τ", f"{figures['speculative_decoding']['mean_acceptance_length']:.2f}", ""))
    return "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(unit)}</small></dd></div>"
        for name, value, unit in shown
    )


def failure_table(failures: Sequence[Row]) -> HtmlTable:
    rows = [[row["kind"].replace("_", " "), f"{row['requests']:,}", row["first_message"]] for row in failures]
    return HtmlTable("Requests without an answer", ["", "requests", "what was said first"], rows)


def distributions(report: ServingReport) -> Section:
    """For each latency the share of values up to each time; of few values the table says it all."""
    charts: list[Block] = []
    for name, title in DRAWN.items():
        values = report.latencies[name]
        if len(values) >= 3:
            at = np.percentile(values, SHARES).tolist()
            points = [(0.0, 0.0), *((1000 * seconds, share / 100) for seconds, share in zip(at, SHARES, strict=True))]
            charts.append(LineChart(title, "milliseconds", "share of values", [Series(title, points)], percent=True))
    return Section("Distributions", charts, "The share of all values that are at most so long.", grid=True)
