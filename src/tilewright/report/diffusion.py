"""Tables and page of `tilewright bench diffusion`. Rows are figures named as in docs/metrics.md, one for each way."""

from collections.abc import Sequence
from pathlib import Path

from tilewright.metrics.denoising import DENOISING
from tilewright.metrics.metric import chosen
from tilewright.metrics.tables import FigureTable, Row, grouped
from tilewright.report.charts import LineChart, Series, StackedBars
from tilewright.report.page import Report, Section
from tilewright.report.tables import page_table

FIGURES = chosen(
    DENOISING,
    "accuracy token_agreement argmax_agreement logit_kl_nats salient_share tokens_per_forward tokens_per_s seconds_per_step "
    "step_speedup speedup",
)
PROGRAMS = chosen(
    DENOISING,
    "compilations compile_seconds compilations_while_timed host_synchronisations_per_step peak_bytes spans",
)
CAPTION = (
    "same: places of responses that hold dense's token; argmax, KL: a step's logits against a dense pass over the same tokens; "
    "salient: positions recomputed, by layer and step; tok/fwd: tokens a step commits"
)
TEXT = (
    "Every way denoises the same prompts; times are medians of runs in turns. Speedup is the time of plain dense steps over "
    "a way's own, for the same prompts; step speedup the same of one step. Agreement with dense counts the places of responses "
    "that hold the same token."
)
STEPS = (
    "At each step of a way's own run its logits of the masked positions of the block are compared with those of a dense pass "
    "over the same tokens: so these figures tell what the caches cost, and not what an earlier difference grew into."
)


def figures_table(rows: Sequence[Row]) -> FigureTable:
    """Table of speed and accuracy, a line for each way."""
    return FigureTable("denoising side by side", "way", {"": rows}, FIGURES, ("accuracy", "speedup"), CAPTION)


def programs_table(rows: Sequence[Row]) -> FigureTable:
    """Table of the programs that each way compiled and held, and how often the host waited for the device."""
    told = [{**row, "spans": ", ".join(f"{span} {steps:,}" for span, steps in row["spans"].items())} for row in rows]
    return FigureTable("programs", "way", {"": told}, PROGRAMS)


def write_diffusion(path: Path, report: Report) -> None:
    """Writes the page, whose first record is what the others are compared with; see `Report.write`, also for errors."""
    rows = report.records
    times = [(row["name"], (1000 * row["seconds_per_step"],)) for row in rows]
    sections = [
        Section("Speed and accuracy", [page_table(figures_table(rows))], " ".join([TEXT, *report.notes])),
        Section("Time of a step", [StackedBars("A step, median", ("time",), times, "ms")]),
    ]
    compared = [row for row in rows if row["logit_kl_nats_by_step"]]
    kl = charts("KL", "nats", compared, "logit_kl_nats_by_step")
    same = charts("Most likely token", "same as dense", compared, "argmax_agreement_by_step", percent=True)
    sections.append(Section("Logits beside dense ones, step by step", [*kl, *same], STEPS, grid=True))
    caching = [row for row in rows if row["mode"] != "dense" or row["salient_share"] != 1]
    steps = charts("By step", "positions", caching, "salient_share_by_step", percent=True)
    layers = charts("By layer", "positions", caching, "salient_share_by_layer", "layer", percent=True)
    text = "The share of a sequence's positions whose MLP is computed: all of them in dense steps without a suffix window."
    sections.append(Section("Salient positions", [*steps, *layers], text, grid=True))
    parallel = [row for row in rows if row["threshold"] is not None]
    points = charts("", "tokens", parallel, "tokens_per_forward_by_step")
    sections.append(Section("Tokens that a step commits", points, grid=True))
    sections.append(Section("Programs", [page_table(programs_table(rows))]))
    report.write(path, sections)


def charts(
    title: str, y_label: str, rows: Sequence[Row], name: str, x_label: str = "step", percent: bool = False
) -> list[LineChart]:
    """A chart of the list of figures of this name for each way of committing, so that few lines meet in one."""
    found = []
    for threshold, own in grouped(rows, "threshold").items():
        told = "a quota a step" if threshold is None else f"commits from p {threshold:g}"
        series = [Series(row["name"], [(n, min(v, 1) if percent else v) for n, v in enumerate(row[name], 1)]) for row in own]
        found.append(LineChart(f"{title}, {told}".lstrip(", "), x_label, y_label, series, percent))
    return found
