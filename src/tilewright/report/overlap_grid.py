"""The page of `tilewright bench overlap`: times to the first token and for each further one, over the number of devices."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tilewright.report.charts import LineChart, Series
from tilewright.report.overlap import CAVEATS, unsteady, without_estimate
from tilewright.report.page import Block, Cell, HtmlTable, Section, write_sections
from tilewright.report.ranges import ranges_section

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


def write_grid(
    path: str | Path,
    predicted: Sequence[Mapping[str, Any]],
    measured: Sequence[Mapping[str, Any]],
    about: Mapping[str, Any],
    ranges: Mapping[str, Mapping[str, Any]],
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
    for kind in dict.fromkeys(one["chip"].partition(":")[0] for one in predicted):
        of = [one for one in predicted if one["chip"].partition(":")[0] == kind]
        sections.append(Section(f"Predicted for {kind}", charts(of), f"{PREDICTED} {grid_estimates(of)}", grid=True))
        sections.append(Section(f"Figures for {kind}", [predicted_table(of)]))
    if ranges:
        sections.append(ranges_section(ranges))
    if measured:
        text = CPUS if about.get("measured_platform") == "cpu" else RAN
        sections.append(Section("Run here", [measured_table(measured)], text))
    data = {
        "environment": dict(about),
        "predicted": [dict(one) for one in predicted],
        "measured": [dict(one) for one in measured],
        "ranges": dict(ranges),
    }
    write_sections(path, "Schedules over the number of devices", sections, facts=about, data=data)


def grid_estimates(records: Sequence[Mapping[str, Any]]) -> str:
    """Sentence on the operations of predicted programs for which the compiler has no estimate."""
    return without_estimate(
        (f"{one['schedule']} {phase}", one[f"{phase}_without_estimate"], one[f"{phase}_roofline_share"])
        for phase in ("prefill", "decode")
        for one in records
    )


def charts(records: Sequence[Mapping[str, Any]]) -> list[Block]:
    """For each figure and input a chart over the number of devices, with a line for each batch and schedule."""
    found: list[Block] = []
    for field, name, unit in FIGURES:
        for tokens in dict.fromkeys(one["input_tokens"] for one in records):
            of = [one for one in records if one["input_tokens"] == tokens]
            lines = dict.fromkeys((one["batch_rows"], one["schedule"]) for one in of)
            series = [
                Series(
                    f"batch {batch}, {schedule}",
                    sorted(
                        (one["devices"], one[field]) for one in of if (one["batch_rows"], one["schedule"]) == (batch, schedule)
                    ),
                )
                for batch, schedule in lines
            ]
            title = f"{name} ({unit}), {tokens:,} tokens in and {of[0]['output_tokens']:,} out"
            found.append(LineChart(title, "devices", unit, series))
    return found


def predicted_table(records: Sequence[Mapping[str, Any]]) -> HtmlTable:
    """Every record; of each time the share in which the core waits for a collective."""
    rows: list[list[str | Cell | None]] = []
    for one in records:
        shares = (one["prefill_exposed_ms"] / one["ttft_ms"], one["decode_exposed_ms"] / one["tpot_ms"])
        exposed = [Cell(f"{share:.0%}", share=min(1.0, share), colour=1) for share in shares]
        times = [
            f"{one[f'{name}_ms']:,.2f}" + unsteady(one[f"{phase}_steady"])
            for name, phase in (("ttft", "prefill"), ("tpot", "decode"))
        ]
        speed = f"{one['output_tokens_per_s']:,.0f}"
        needs = Cell(f"{one['device_gb']:.1f}" + ("" if one["fits"] else " (too much)"), strong=not one["fits"])
        computed = f"{one['prefill_compute_ms']:,.2f}"
        rows.append([row_name(one), times[0], computed, exposed[0], times[1], exposed[1], speed, needs])
    heads = ["batch × input, devices", "TTFT ms", "of it compute", "exposed", "TPOT ms", "exposed", "tokens/s", "GB a device"]
    return HtmlTable("Predictions", heads, rows)


def row_name(one: Mapping[str, Any]) -> str:
    schedule = f", {one['schedule']}" if one["schedule"] else ""
    return f"{one['batch_rows']} × {one['input_tokens']:,} on {one['devices']}{schedule}"


def measured_table(records: Sequence[Mapping[str, Any]]) -> HtmlTable:
    """Table of the cases that were measured."""
    rows: list[list[str | Cell | None]] = []
    for one in records:
        same = (
            None if one["same_tokens"] is None else Cell("yes" if one["same_tokens"] else "no", strong=not one["same_tokens"])
        )
        cells = [f"{one['ttft_ms']:,.1f}", f"{one['tpot_ms']:,.2f}", same]
        for name in ("prefill", "step"):
            kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(one[f"{name}_collectives"].items()))
            cells += [kinds or "none", f"{one[f'{name}_sent_bytes'] / 1024:,.0f}"]
        rows.append([row_name(one), *cells])
    heads = ["batch × input, devices", "TTFT ms", "TPOT ms", "same tokens", "in a prefill", "KiB", "in a step", "KiB"]
    return HtmlTable("Runs: tokens, collectives, and the bytes that a device gives to them", heads, rows)
