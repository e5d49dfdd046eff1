"""Tables and page of `tilewright bench diffusion`. Rows are figures of docs/metrics.md, one row for each variant."""

from collections.abc import Sequence
from pathlib import Path

from tilewright.metrics.denoising import DENOISING
from tilewright.metrics.metric import select_metrics
from tilewright.metrics.tables import FigureTable, Row, grouped
from tilewright.report.charts import LineChart, Series, StackedBars
from tilewright.report.page import Report, Section
from tilewright.report.tables import page_table

FIGURES = select_metrics(
    DENOISING,
    "accuracy token_agreement argmax_agreement logit_kl_nats salient_share tokens_per_forward tokens_per_s seconds_per_step "
    "step_speedup speedup",
)
PROGRAMS = select_metrics(
    DENOISING,
    "compilations compile_seconds compilations_while_timed host_synchronisations_per_step peak_bytes spans",
)
CAPTION = (
    "same: response positions with dense's token; argmax, KL: logits compared with a dense pass over the same tokens; "
    "salient: share of recomputed positions; tok/fwd: committed tokens per step"
)
TEXT = (
    "All variants denoise the same prompts; times are medians of alternating runs. Speedup is the time of plain dense steps "
    "over that of the variant, for the same prompts; step speedup is the same for one step. "
    "Agreement with dense is the share of "
    "response positions with the same token."
)
STEPS = (
    "At each step, the logits at the masked positions of the block are compared with a dense pass over the same tokens. These "
    "figures show the error of the caches in one step, without accumulated differences."
)


def figures_table(rows: Sequence[Row]) -> FigureTable:
    """Returns the table of speed and accuracy, a line for each variant."""
    return FigureTable("denoising side by side", "way", {"": rows}, FIGURES, ("accuracy", "speedup"), CAPTION)


def programs_table(rows: Sequence[Row]) -> FigureTable:
    """Returns the table of compiled programs, memory and host synchronisations of each variant."""
    table_rows = [{**row, "spans": ", ".join(f"{span} {steps:,}" for span, steps in row["spans"].items())} for row in rows]
    return FigureTable("programs", "way", {"": table_rows}, PROGRAMS)


def write_diffusion(path: Path, report: Report) -> None:
    """Writes the page. The first record is the baseline; see `Report.write`, also for errors."""
    rows = report.records
    times = [(row["name"], (1000 * row["seconds_per_step"],)) for row in rows]
    sections = [
        Section("Speed and accuracy", [page_table(figures_table(rows))], " ".join([TEXT, *report.notes])),
        Section("Time of a step", [StackedBars("A step, median", ("time",), times, "ms")]),
    ]
    compared = [row for row in rows if row["logit_kl_nats_by_step"]]
    kl = charts("KL", "nats", compared, "logit_kl_nats_by_step")
    agreement = charts("Most likely token", "same as dense", compared, "argmax_agreement_by_step", percent=True)
    sections.append(Section("Logits compared with dense steps", [*kl, *agreement], STEPS, grid=True))
    caching = [row for row in rows if row["mode"] != "dense" or row["salient_share"] != 1]
    steps = charts("By step", "positions", caching, "salient_share_by_step", percent=True)
    layers = charts("By layer", "positions", caching, "salient_share_by_layer", "layer", percent=True)
    text = "Share of a sequence's positions with a computed MLP; dense steps without a suffix window compute all."
    sections.append(Section("Salient positions", [*steps, *layers], text, grid=True))
    parallel = [row for row in rows if row["threshold"] is not None]
    points = charts("", "tokens", parallel, "tokens_per_forward_by_step")
    sections.append(Section("Tokens committed per step", points, grid=True))
    sections.append(Section("Programs", [page_table(programs_table(rows))]))
    report.write(path, sections)


def charts(
    title: str, y_label: str, rows: Sequence[Row], name: str, x_label: str = "step", percent: bool = False
) -> list[LineChart]:
    """Returns a chart of this list of figures for each way of committing, to keep the number of lines small."""
    found = []
    for threshold, group in grouped(rows, "threshold").items():
        commit_rule = "a quota a step" if threshold is None else f"commits from p {threshold:g}"
        series = [Series(row["name"], [(n, min(v, 1) if percent else v) for n, v in enumerate(row[name], 1)]) for row in group]
        found.append(LineChart(f"{title}, {commit_rule}".lstrip(", "), x_label, y_label, series, percent))
    return found
