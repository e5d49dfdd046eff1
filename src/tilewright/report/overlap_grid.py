"""Page of `tilewright bench overlap`: time to first token and time per output token over the number of devices."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tilewright.metrics.metric import Metric, select_metrics, significant
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
    "A small model with random weights. Simulated devices share the CPU's cores: only equal tokens and the number and bytes of "
    "collectives are meaningful, not the times."
)
RAN = "A small model with random weights, on this machine's devices."

FIGURES = (("output_tokens_per_s", "Throughput", "tokens/s"), ("ttft_ms", "TTFT", "ms"), ("tpot_ms", "TPOT", "ms"))


FIRST_COLUMNS = "input_tokens batch_rows devices schedule ttft_ms tpot_ms output_tokens_per_s fits"
CASE_COLUMNS = select_metrics(TIMES, "input_tokens output_tokens batch_rows devices schedule")
EXPOSED = (
    Metric("prefill_exposed_share", head="exposed of TTFT", short="of it\nexposed", form=".0%"),
    Metric("decode_exposed_share", head="exposed of TPOT", short="of it\nexposed", form=".0%"),
)
"""Shares of predicted times in which the core waits for a collective."""
PREDICTED_COLUMNS = select_metrics(
    (*TIMES, *EXPOSED),
    "ttft_ms prefill_exposed_share ttft_over_sync prefill_compute_over_sync tpot_ms decode_exposed_share tpot_over_sync "
    "output_tokens_per_s fits",
)
MEASURED_COLUMNS = select_metrics(
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
    """Writes the page as one HTML file that works offline. The element `data` contains the figures as JSON.

    Args:
        predicted, measured: records of docs/metrics.md; at least one.
        about: settings of the figures.
        ranges: ranges of the predictions, by place.

    Raises:
        ValueError: There is no record.
    """
    if not predicted and not measured:
        raise ValueError("expected at least one record, found none")
    sections = []
    for kind, group in grouped(predicted, device_kind).items():
        sections.append(Section(f"Predicted for {kind}", charts(group), f"{PREDICTED} {grid_estimates(group)}", grid=True))
        table = predicted_table("Predictions", group, (*PREDICTED_COLUMNS, *select_metrics(TIMES, "device_gb")))
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
    """Returns a sentence on the fastest prediction for each kind of chip; empty without predictions."""
    clauses = []
    for kind, group in grouped(predicted, device_kind).items():
        best = max(group, key=lambda one: one["output_tokens_per_s"])
        rate = significant(best["output_tokens_per_s"])
        clauses.append(f"{best['schedule']} over {best['devices']} of {kind}, batch {best['batch_rows']} ({rate} tokens/s)")
    return f"Most tokens a second, predicted: {', '.join(clauses)}." if clauses else ""


def device_kind(record: Row) -> str:
    """Returns the kind of chip of a record."""
    return record["chip"].partition(":")[0]


def grid_estimates(records: Sequence[Row]) -> str:
    """Returns a sentence on the operations of predicted programs without a compiler estimate."""
    return without_estimate(
        (f"{one['schedule']} {phase}", one[f"{phase}_without_estimate"], one[f"{phase}_roofline_share"])
        for phase in ("prefill", "decode")
        for one in records
    )


def charts(records: Sequence[Row]) -> list[Block]:
    """Returns a chart over the number of devices for each figure and input, with a line for each batch and schedule."""
    found: list[Block] = []
    for field, name, unit in FIGURES:
        for tokens, group in grouped(records, "input_tokens").items():
            series = lines(group, lambda one: f"batch {one['batch_rows']}, {one['schedule']}", "devices", field)
            title = f"{name} ({unit}), {tokens:,} tokens in and {group[0]['output_tokens']:,} out"
            found.append(LineChart(title, "devices", unit, series))
    return found


def predicted_table(title: str, records: Sequence[Row], metrics: Sequence[Metric] = PREDICTED_COLUMNS) -> FigureTable:
    """Returns the table of a chip kind's predictions, with the share of each time in which the core waits for collectives."""
    rows = []
    for one in records:
        row = {**one}
        for name, phase in (("ttft_ms", "prefill"), ("tpot_ms", "decode")):
            row[name] = total_text(one[name], one[f"{phase}_steady"])
            row[f"{phase}_exposed_share"] = one[f"{phase}_exposed_ms"] / one[name]
        rows.append(row)
    return case_table(title, rows, metrics)


def measured_table(title: str, records: Sequence[Row]) -> FigureTable:
    """Returns the table of measured cases: tokens, collectives, and the bytes that a device sends."""

    def text(counts: Mapping[str, int]) -> str:
        return " + ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))

    rows = [{**one, **{name: text(one[name]) for name in ("prefill_collectives", "step_collectives")}} for one in records]
    return case_table(title, rows, MEASURED_COLUMNS)


def case_table(title: str, rows: Sequence[dict[str, Any]], metrics: Sequence[Metric]) -> FigureTable:
    """Returns a table with a line for each row, in the order of the cases."""
    ordered = sorted(rows, key=lambda one: (one["input_tokens"], one["batch_rows"], one["devices"]))
    shares = [metric.name for metric in EXPOSED]
    return FigureTable(title, "", {"": ordered}, (*CASE_COLUMNS, *metrics), section_by="batch_rows", shares=shares, unknown="")
