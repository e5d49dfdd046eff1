"""The page of `tilewright bench overlap`: times to the first token and for each further one, over the number of devices."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tilewright.metrics.metric import Metric, chosen, significant
from tilewright.metrics.overlap import TIMES
from tilewright.metrics.tables import FigureTable, Row, grouped
from tilewright.report.charts import LineChart, lines
from tilewright.report.overlap import CAVEATS, total_text, without_estimate
from tilewright.report.page import Block, Section, write_sections
from tilewright.report.tables import page_table, ranges_section

PREDICTED = (
    "Predictions: compiler estimates and a model of links and memory; nothing ran. The time to the first token (TTFT) is all "
    "layers over the whole input and the head; the time for each further one (TPOT) is a step half-way through the output. The "
    "head counts as its roofline, and the embedding is left out. Tokens a second: of all rows, after the first token. "
    f"{CAVEATS}"
)
CPUS = (
    "A small model of random weights. Several devices of one CPU share its cores: what counts here is that tokens are the "
    "same, and how many collectives of how many bytes the programs hold. The times say nothing about a schedule."
)
RAN = "A small model of random weights, on the devices that are here."

FIGURES = (("output_tokens_per_s", "Throughput", "tokens/s"), ("ttft_ms", "TTFT", "ms"), ("tpot_ms", "TPOT", "ms"))


FIRST_COLUMNS = "input_tokens batch_rows devices schedule ttft_ms tpot_ms output_tokens_per_s fits"
CASE_COLUMNS = chosen(TIMES, "input_tokens output_tokens batch_rows devices schedule")
EXPOSED = (
    Metric("prefill_exposed_share", head="exposed of TTFT", short="of it\nexposed", form=".0%"),
    Metric("decode_exposed_share", head="exposed of TPOT", short="of it\nexposed", form=".0%"),
)
"""Shares of predicted times in which the core waits for a collective."""
PREDICTED_COLUMNS = chosen(
    (*TIMES, *EXPOSED),
    "ttft_ms prefill_exposed_share ttft_over_sync prefill_compute_over_sync tpot_ms decode_exposed_share tpot_over_sync "
    "output_tokens_per_s fits",
)
MEASURED_COLUMNS = chosen(
    TIMES,
    "ttft_ms tpot_ms output_tokens_per_s same_tokens prefill_collectives prefill_sent_bytes step_collectives step_sent_bytes",
)


def write_grid(
    path: str | Path,
    predicted: Sequence[Row],
    measured: Sequence[Row],
    about: Row,
    ranges: Mapping[str, Row],
) -> None:
    """Writes the page as one HTML file that works offline. The figures are in it as JSON too, in the element `data`.

    Args:
        predicted, measured: records as docs/metrics.md defines them; at least one.
        about: what they depend on.
        ranges: of the predictions, by their place.

    Raises:
        ValueError: there is no record.
    """
    if not predicted and not measured:
        raise ValueError("expected at least one record, found none")
    sections = []
    for kind, of in grouped(predicted, kind_of).items():
        sections.append(Section(f"Predicted for {kind}", charts(of), f"{PREDICTED} {grid_estimates(of)}", grid=True))
        table = predicted_table("Predictions", of, (*PREDICTED_COLUMNS, *chosen(TIMES, "device_gb")))
        sections.append(Section(f"Figures for {kind}", [page_table(table, first=FIRST_COLUMNS)]))
    sections.append(ranges_section(ranges))
    if measured:
        text = CPUS if about.get("measured_platform") == "cpu" else RAN
        sections.append(Section("Run here", [page_table(measured_table("Tokens and collectives", measured))], text))
    data = {"environment": about, "predicted": predicted, "measured": measured, "ranges": ranges}
    title = "Schedules over the number of devices"
    verdict = grid_verdict(predicted)
    write_sections(path, title, sections, verdict=verdict, facts=about, data=data, ran=bool(measured))


def grid_verdict(predicted: Sequence[Row]) -> str:
    """Sentence on what is predicted to give the most tokens a second on each kind of chip; nothing without predictions."""
    clauses = []
    for kind, of in grouped(predicted, kind_of).items():
        best = max(of, key=lambda one: one["output_tokens_per_s"])
        rate = significant(best["output_tokens_per_s"])
        clauses.append(f"{best['schedule']} over {best['devices']} of {kind}, batch {best['batch_rows']} ({rate} tokens/s)")
    return f"Most tokens a second, predicted: {', '.join(clauses)}." if clauses else ""


def kind_of(record: Row) -> str:
    """The kind of chip that a record is of."""
    return record["chip"].partition(":")[0]


def grid_estimates(records: Sequence[Row]) -> str:
    """Sentence on the operations of predicted programs for which the compiler has no estimate."""
    return without_estimate(
        (f"{one['schedule']} {phase}", one[f"{phase}_without_estimate"], one[f"{phase}_roofline_share"])
        for phase in ("prefill", "decode")
        for one in records
    )


def charts(records: Sequence[Row]) -> list[Block]:
    """For each figure and input a chart over the number of devices, with a line for each batch and schedule."""
    found: list[Block] = []
    for field, name, unit in FIGURES:
        for tokens, of in grouped(records, "input_tokens").items():
            series = lines(of, lambda one: f"batch {one['batch_rows']}, {one['schedule']}", "devices", field)
            title = f"{name} ({unit}), {tokens:,} tokens in and {of[0]['output_tokens']:,} out"
            found.append(LineChart(title, "devices", unit, series))
    return found


def predicted_table(title: str, records: Sequence[Row], metrics: Sequence[Metric] = PREDICTED_COLUMNS) -> FigureTable:
    """Table of the predictions for a kind of chip; of each time the share in which the core waits for a collective."""
    rows = []
    for one in records:
        row = {**one}
        for name, phase in (("ttft_ms", "prefill"), ("tpot_ms", "decode")):
            row[name] = total_text(one[name], one[f"{phase}_steady"])
            row[f"{phase}_exposed_share"] = one[f"{phase}_exposed_ms"] / one[name]
        rows.append(row)
    return case_table(title, rows, metrics)


def measured_table(title: str, records: Sequence[Row]) -> FigureTable:
    """Table of the cases that ran: tokens, collectives, and the bytes that a device gives to them."""

    def text(counts: Mapping[str, int]) -> str:
        return " + ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))

    rows = [{**one, **{name: text(one[name]) for name in ("prefill_collectives", "step_collectives")}} for one in records]
    return case_table(title, rows, MEASURED_COLUMNS)


def case_table(title: str, rows: Sequence[dict[str, Any]], metrics: Sequence[Metric]) -> FigureTable:
    """Table with a line for each row, in the order of the cases."""
    ordered = sorted(rows, key=lambda one: (one["input_tokens"], one["batch_rows"], one["devices"]))
    shares = [metric.name for metric in EXPOSED]
    return FigureTable(title, "", {"": ordered}, (*CASE_COLUMNS, *metrics), apart="batch_rows", shares=shares, unknown="")
