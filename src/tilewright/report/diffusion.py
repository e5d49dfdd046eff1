"""Tables and page of `tilewright bench diffusion`. Rows are figures named as in docs/metrics.md, one for each way."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table as TerminalTable
from rich.text import Text

from tilewright.report.charts import LineChart, Series, StackedBars
from tilewright.report.page import Block, Cell, HtmlTable, Section, write_sections
from tilewright.report.terminal import number

Row = Mapping[str, Any]
CAPTION = (
    "same: places of responses that hold dense's token; argmax, KL: a step's logits against a dense pass over the same tokens; "
    "salient: positions recomputed, by layer and step; tok/fwd: tokens a step commits"
)


def table(title: str, rows: Sequence[Row]) -> TerminalTable:
    """A line for each way."""
    shown = TerminalTable(title=Text(title), caption=CAPTION, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    shown.add_column("way")
    for column in HEADS:
        shown.add_column(column, justify="right")
    for row in rows:
        shown.add_row(Text(row["name"]), *(number(value, form) for value, form in cells(row)))
    return shown


HEADS = ("right", "same", "argmax", "KL\nnats", "salient", "tok/\nfwd", "tok/s", "ms/\nstep", "step\nspeedup", "speedup")


def cells(row: Row) -> list[tuple[float | None, str]]:
    """A way's figures in the order of `HEADS`, each with its format."""
    return [
        (row["accuracy"], ".1%"),
        (row["token_agreement"], ".1%"),
        (row["argmax_agreement"], ".1%"),
        (row["logit_kl_nats"], ".4f"),
        (row["salient_share"], ".0%"),
        (row["tokens_per_forward"], ".2f"),
        (row["tokens_per_s"], ",.0f"),
        (1000 * row["seconds_per_step"], ".2f"),
        (row["step_speedup"], ".2f"),
        (row["speedup"], ".2f"),
    ]


def programs_table(rows: Sequence[Row]) -> TerminalTable:
    """Table of the programs that each way compiled and held, and how often the host waited for the device."""
    shown = TerminalTable(title="programs", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    shown.add_column("way")
    spans = ("steps over\nall", "over\nresponse", "over\nblock")
    for column in ("compiled", "seconds", "while\ntimed", "host waits\na step", "peak\nMB", *spans):
        shown.add_column(column, justify="right")
    for row in rows:
        shown.add_row(Text(row["name"]), *program_cells(row))
    return shown


def program_cells(row: Row) -> list[str]:
    spans = (f"{row['spans'].get(span, 0):,}" for span in ("whole", "response", "block"))
    peak = row["peak_bytes"]
    return [
        str(row["compilations"]),
        f"{row['compile_seconds']:.1f}",
        str(row["compilations_while_timed"]),
        f"{row['host_synchronisations_per_step']:.3f}",
        "–" if peak is None else f"{peak / 1e6:,.1f}",
        *spans,
    ]


@dataclass(frozen=True)
class DiffusionReport:
    """All that the page shows. Plain data: `dataclasses.asdict` of it is JSON.

    Attributes:
        title: of the page.
        lead: a sentence under it: the model, the task, the lengths.
        rows: one for each way; the first is what the others are compared with.
        environment: what the figures depend on, in the order shown.
        notes: what a reader must know.

    Raises:
        ValueError: there are no rows.
    """

    title: str
    lead: str
    rows: Sequence[Row]
    environment: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not self.rows:
            raise ValueError("expected figures of at least one way, found none")


TEXT = (
    "Every way denoises the same prompts; times are medians of runs in turns. Speedup is the time of plain dense steps over "
    "a way's own, for the same prompts; step speedup the same of one step. Agreement with dense counts the places of responses "
    "that hold the same token."
)
STEPS = (
    "At each step of a way's own run its logits of the masked positions of the block are compared with those of a dense pass "
    "over the same tokens: so these figures tell what the caches cost, and not what an earlier difference grew into."
)


def write_diffusion(path: str | Path, report: DiffusionReport) -> None:
    """Writes the page as one HTML file that works offline. The figures are in it as JSON too, in the element `data`.

    Raises:
        ValueError: the environment holds something that JSON cannot.
    """
    rows = report.rows
    sections = [
        Section("Speed and accuracy", [figures_table(rows)], " ".join([TEXT, *report.notes])),
        Section("Time of a step", [step_bars(rows)]),
    ]
    compared = [row for row in rows if row["logit_kl_nats_by_step"]]
    if compared:
        kl = charts("KL", "nats", compared, lambda row: row["logit_kl_nats_by_step"])
        same = charts("Most likely token", "same as dense", compared, lambda row: row["argmax_agreement_by_step"], percent=True)
        sections.append(Section("Logits beside dense ones, step by step", [*kl, *same], STEPS, grid=True))
    caching = [row for row in rows if row["mode"] != "dense"]
    if caching:
        steps = charts("By step", "positions", caching, lambda row: row["salient_share_by_step"], percent=True)
        layers = charts("By layer", "positions", caching, lambda row: row["salient_share_by_layer"], "layer", percent=True)
        text = "The share of a sequence's positions whose MLP is computed: all of them in dense steps."
        sections.append(Section("Salient positions", [*steps, *layers], text, grid=True))
    parallel = [row for row in rows if row["threshold"] is not None]
    if parallel:
        points = charts("", "tokens", parallel, lambda row: row["tokens_per_forward_by_step"])
        sections.append(Section("Tokens that a step commits", points, grid=True))
    sections.append(Section("Programs", [page_programs(rows)]))
    write_sections(path, report.title, sections, lead=report.lead, facts=report.environment, data=asdict(report))


def figures_table(rows: Sequence[Row]) -> HtmlTable:
    """A line for each way; the best speedup and the best accuracy are strong."""
    most = max(row["speedup"] for row in rows)
    best = max((row["accuracy"] for row in rows if row["accuracy"]), default=None)
    lines: list[list[str | Cell | None]] = []
    for row in rows:
        texts: list[str | Cell | None] = [None if value is None else format(value, form) for value, form in cells(row)]
        if row["accuracy"] is not None:
            counts = f"{row['accuracy']:.1%} ({row['correct']}/{row['responses']})"
            texts[0] = Cell(counts, row["accuracy"] == best, row["accuracy"])
        texts[-1] = Cell(f"{row['speedup']:.2f}×", row["speedup"] == most, min(row["speedup"] / most, 1))
        lines.append([row["name"], *texts])
    heads = ["right", "agrees with dense", "same argmax", "KL, nats", "salient", "tokens per forward", "tokens/s", "ms a step"]
    return HtmlTable("Ways of denoising", ["way", *heads, "step speedup", "speedup"], lines)


def step_bars(rows: Sequence[Row]) -> StackedBars:
    return StackedBars("A step, median", ("time",), [(row["name"], (1000 * row["seconds_per_step"],)) for row in rows], "ms")


def page_programs(rows: Sequence[Row]) -> HtmlTable:
    heads = [
        "compiled",
        "seconds",
        "compiled while timed",
        "host waits a step",
        "peak MB",
        "steps over all",
        "over the response",
    ]
    return HtmlTable("Programs", ["way", *heads, "over the block"], [[row["name"], *program_cells(row)] for row in rows])


def charts(
    title: str,
    y_label: str,
    rows: Sequence[Row],
    values: Callable[[Row], Sequence[float]],
    x_label: str = "step",
    percent: bool = False,
) -> list[Block]:
    """A chart of a list of figures for each way of committing, so that few lines meet in one."""
    found: list[Block] = []
    for threshold in dict.fromkeys(row["threshold"] for row in rows):
        told = "a quota a step" if threshold is None else f"commits from p {threshold:g}"
        own = [row for row in rows if row["threshold"] == threshold]
        series = [Series(row["name"], [(n, min(v, 1) if percent else v) for n, v in enumerate(values(row), 1)]) for row in own]
        found.append(LineChart(f"{title}, {told}".lstrip(", "), x_label, y_label, series, percent))
    return found
