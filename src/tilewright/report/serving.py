"""The page of `tilewright bench serving`: every request on a line of time, what was under way, and how long things took."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from tilewright.metrics.metric import significant
from tilewright.report.charts import LineChart, Series
from tilewright.report.page import Block, HtmlTable, Section, asset, document, facts_html, sentences
from tilewright.report.serving_terminal import GOODPUT, OUTPUT, latency_table
from tilewright.report.tables import page_table

SHARES = (*range(0, 90, 5), *range(90, 101))
"""Percent of the values at which a distribution is drawn, closer together where its tail is."""
DRAWN = {"ttft": "Time to first token", "tpot": "Time per output token", "itl": "Between chunks", "e2e": "End to end"}


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
    figures: Mapping[str, Any]
    percentiles: Sequence[float]
    requests: Sequence[Mapping[str, Any]]
    bin_s: float
    tokens_per_bin: Sequence[float]
    latencies: Mapping[str, Sequence[float]]
    environment: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not self.requests:
            raise ValueError("expected at least one request, found none")
        if not 0 < self.bin_s < math.inf:
            raise ValueError(f"expected spans above 0 s, found {self.bin_s}")
        for row in self.requests:
            for problem in request_problems(row):
                raise ValueError(f"request {row['number']}: {problem}")


def request_problems(row: Mapping[str, Any]) -> Iterator[str]:
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
    sections = [
        Section(
            "How long things took", [page_table(latency_table(report.figures, report.percentiles))], sentences(report.notes)
        ),
        distributions(report),
    ]
    if report.figures["failures"]:
        sections.insert(0, Section("What failed", [failure_table(report.figures["failures"])]))
    body = Template(asset("serving.html")).substitute(
        title=escape(report.title),
        lead=escape(report.lead),
        figures=headline_html(report.figures),
        sections="".join(section.html() for section in sections if section.blocks),
        facts=facts_html(report.environment),
    )
    data = {
        "figures": dict(report.figures),
        "environment": dict(report.environment),
        "requests": [dict(row) for row in report.requests],
        "bin_s": report.bin_s,
        "tokens_per_bin": list(report.tokens_per_bin),
    }
    page = document(report.title, body, styles=("page.css", "scripted.css", "serving.css"), scripts=("serving.js",), data=data)
    Path(path).write_text(page, encoding="utf-8")


def headline_html(figures: Mapping[str, Any]) -> str:
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


def failure_table(failures: Sequence[Mapping[str, Any]]) -> HtmlTable:
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
