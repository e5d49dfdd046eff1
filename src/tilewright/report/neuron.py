"""The pages of simulated Neuron programs and of plans: what engines do when, and figures by cores, batch and schedule."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from tilewright.report.charts import LineChart, Series, StackedBars, bar_key, figure
from tilewright.report.page import Block, Cell, HtmlTable, Section, series_class, write_sections
from tilewright.report.ranges import ranges_section, sentences

MOMENTS = ("compute", "loading", "exposed", "waiting")
"""Kinds of moments that all of the time is divided into, as records name them."""

MOMENT_NAMES = ("compute", "loading alone", "exposed communication", "waiting")

KINDS = ("compute", "dma", "tp", "fsdp", "other")
"""Kinds of spans in a chart, in the order of the colours."""

KIND_NAMES = ("compute", "compute's transfers", "tensor-parallel", "fully sharded", "other collectives")

WIDTH, LANE, GAP = 1000, 10, 3
"""Of the picture, in its own units."""

LEAD = "A discrete-event model; nothing ran on a chip. docs/neuron.md says what is modelled and where its figures come from."


@dataclass(frozen=True)
class Engines:
    """Chart of what each engine does, all over the same axis of time.

    Attributes:
        lanes: for each engine its name and (begin ms, end ms, kind), kinds as in `KINDS`.
        total_ms: how long all of it takes.
    """

    title: str
    lanes: Sequence[tuple[str, Sequence[tuple[float, float, str]]]]
    total_ms: float

    def html(self) -> str:
        scale = WIDTH / (self.total_ms or 1.0)
        pictures = []
        for name, spans in self.lanes:
            rects = "".join(
                f'<rect class="{series_class(KINDS.index(kind))}" x="{scale * begin:.2f}" y="0" '
                f'width="{scale * (end - begin):.2f}" height="{LANE}"/>'
                for begin, end, kind in merged(spans, 0.2 / scale)
            )
            label = escape(f"{self.title}: {name} over {self.total_ms:,.3f} ms")
            box = f'viewBox="0 0 {WIDTH} {LANE + GAP}" preserveAspectRatio="none" role="img" aria-label="{label}"'
            pictures.append(f"<div>{escape(name)}</div><svg {box}>{rects}</svg>")
        ends = f"<p><span>0</span><span>{self.total_ms:,.3f} ms</span></p>"
        return figure(self.title, f'<div class="lanes">{"".join(pictures)}{ends}</div>', bar_key(KIND_NAMES), self.table())

    def table(self) -> HtmlTable:
        """Table of the time in which each lane has something under way."""
        rows = []
        for name, spans in self.lanes:
            busy = sum(end - begin for begin, end, _ in merged([(begin, end, "dma") for begin, end, _ in spans], 0.0))
            rows.append([name, f"{busy:,.3f}", f"{busy / (self.total_ms or 1.0):.1%}"])
        return HtmlTable(f"{self.title}: busy", ["engine", "ms", "share"], rows)


def merged(spans: Sequence[tuple[float, float, str]], gap: float) -> list[tuple[float, float, str]]:
    """Spans of one kind that are no farther apart than `gap`, as one: there are many thousand, and a picture shows no less."""
    found: list[tuple[float, float, str]] = []
    for begin, end, kind in sorted(spans):
        if found and found[-1][2] == kind and begin <= found[-1][1] + gap:
            found[-1] = (found[-1][0], max(found[-1][1], end), kind)
        else:
            found.append((begin, end, kind))
    return found


def write_simulation(
    path: str | Path, title: str, record: Mapping[str, Any], engines: Engines, environment: Mapping[str, Any]
) -> None:
    """Writes the page of one simulated program, with its figures as JSON in the element `data`.

    Args:
        record: figures, named as in docs/metrics.md.
        environment: what they depend on.
    """
    shares = {name: min(1.0, ms / (record["total_ms"] or 1.0)) for name, ms in record["busy_ms"].items()}
    busy = [
        [name, f"{ms:,.3f}", f"{record['idle_ms'][name]:,.3f}", Cell(f"{shares[name]:.1%}", share=shares[name])]
        for name, ms in record["busy_ms"].items()
    ]
    layers = record["exposed_layers_ms"]
    blocks: list[Block] = [
        StackedBars("What the time goes to", MOMENT_NAMES, [(record["program"], [record[f"{n}_ms"] for n in MOMENTS])], "ms"),
        HtmlTable("Engines", ["engine", "busy ms", "idle ms", "busy"], busy),
        HtmlTable(
            "DMA engines by sender",
            ["sender", "GB", "share"],
            [[name, f"{size:,.3f}", f"{record['dma_share'][name]:.1%}"] for name, size in record["dma_gb"].items()],
        ),
        HtmlTable(
            "Exposed communication of each layer", ["layer", "ms"], [[name, f"{ms:,.3f}"] for name, ms in layers.items()]
        ),
    ]
    text = f"{record['total_ms']:,.3f} ms; {record['limit']} is busy longest; {record['memory_gib']:,.2f} GiB of device memory."
    text = " ".join([text, *sentences(record["notes"])])
    sections = [Section("What runs when", [engines], text), Section("Figures", blocks, grid=True)]
    data = {"environment": dict(environment), "data": dict(record)}
    write_sections(path, title, sections, lead=LEAD, facts=environment, data=data)


def write_inference_plan(path: str | Path, title: str, plan: Mapping[str, Any]) -> None:
    """Writes the page of `tilewright plan inference`: for each input the three figures by cores, and the tables behind them.

    Args:
        plan: what `--json` holds: `data`, `winner`, `ranges` and the environment.
    """
    records, sections = plan["data"], []
    for tokens in dict.fromkeys(one["input_tokens"] for one in records):
        of = [one for one in records if one["input_tokens"] == tokens]
        blocks: list[Block] = [
            *by_cores(f"Output throughput, input of {tokens:,}", "tokens/s", "tokens_per_s", of),
            *by_cores(f"Time to the first token, input of {tokens:,}", "ms", "ttft_ms", of),
            *by_cores(f"Time per output token, input of {tokens:,}", "ms", "tpot_ms", of),
        ]
        sections.append(Section(f"Input of {tokens:,} tokens", blocks, grid=True))
        notes = " ".join(sentences(note for one in of for note in one["notes"]))
        sections.append(Section(f"Figures, input of {tokens:,}", [inference_table(of)], notes))
    sections.append(ranges_section(plan["ranges"]))
    environment = {name: value for name, value in plan.items() if name not in ("data", "ranges", "winner")}
    write_sections(path, title, sections, lead=LEAD, facts=plain(environment), data=plan)


MOST_LINES = 6
"""Of a chart: there are as many colours."""


def by_cores(title: str, unit: str, name: str, records: Sequence[Mapping[str, Any]]) -> list[LineChart]:
    """A line for each schedule and batch; where they are too many for one chart, one for each batch."""
    lines: dict[int, dict[str, list[tuple[float, float]]]] = {}
    for one in records:
        rows, key = one["batch_rows"], f"{one['schedule']}, batch {one['batch_rows']}"
        lines.setdefault(rows, {}).setdefault(key, []).append((one["cores"], one[name]))
    drawn = {rows: [Series(key, sorted(points)) for key, points in of.items()] for rows, of in lines.items()}
    together = [series for of in drawn.values() for series in of]
    if len(together) <= MOST_LINES:
        return [LineChart(title, "cores", unit, together)]
    return [LineChart(f"{title}, batch {rows}", "cores", unit, of) for rows, of in drawn.items()]


def inference_table(records: Sequence[Mapping[str, Any]]) -> HtmlTable:
    gains = ("gain over sync", "over sequence")
    heads = ["schedule", "cores", "batch", "tokens/s", *gains, "TTFT ms", *gains, "TPOT ms", *gains, "decode limit", "GiB"]
    rows = []
    for one in records:
        figures = []
        for name, gain in (("tokens_per_s", "tokens_per_s_gain"), ("ttft_ms", "ttft_gain"), ("tpot_ms", "tpot_gain")):
            both = (one[gain], one[f"{gain}_over_sequence"])
            figures += [f"{one[name]:,.2f}", *(None if each is None else f"{each:+.1%}" for each in both)]
        limit = f"{one['decode']['limit']} {one['decode']['limit_share']:.0%}"
        memory = f"{one['memory_gib']:,.1f}" + ("" if one["fits"] else " (does not fit)")
        rows.append([one["schedule"], str(one["cores"]), str(one["batch_rows"]), *figures, limit, memory])
    return HtmlTable("Schedules against sync and sequence, each at its best", heads, rows)


def write_training_plan(path: str | Path, title: str, plan: Mapping[str, Any]) -> None:
    """Writes the page of `tilewright plan training`: the ranking, what steps are made of, and the winner's environment."""
    records = plan["data"]
    bars = [(one["setting"], [one[f"{name}_ms"] for name in MOMENTS]) for one in records[:12]]
    shown = [[one["name"], one["value"], one["does"]] for one in plan["winner_environment"]]
    lines: dict[str, list[tuple[float, float]]] = {}
    for one in records:
        if one["threaded"]:
            key = f"{one['streams']} stream{'s' * (one['streams'] > 1)}, prefetch {one['early_layers']:g}, {one['packets']}"
            lines.setdefault(key, []).append((one["late_layers"], one["step_ms"]))
    charts = [
        LineChart(f"Step by scatter delay, {packets} packets", "scatter delay, layers", "ms", series)
        for packets in dict.fromkeys(one["packets"] for one in records if one["threaded"])
        if (series := [Series(key, sorted(points)) for key, points in lines.items() if key.endswith(packets)])
    ]
    sections = [
        Section("Ranking", [training_table(records)], plan["winner_text"]),
        Section("What steps are made of", [StackedBars("The fastest settings", MOMENT_NAMES, bars, "ms"), *charts], grid=True),
        Section("Environment of the winner", [HtmlTable("Variables", ["name", "value", "what it does"], shown)]),
        ranges_section(plan["ranges"]),
    ]
    hidden = ("data", "ranges", "winner", "winner_environment", "winner_text")
    environment = {name: value for name, value in plan.items() if name not in hidden}
    write_sections(path, title, sections, lead=LEAD, facts=plain(environment), data=plan)


def training_table(records: Sequence[Mapping[str, Any]]) -> HtmlTable:
    heads = ["setting", "step ms", "gain", "exposed ms", "TP delay ms", "limit", "GiB"]
    rows = []
    for one in records:
        share = max(0.0, min(1.0, one["exposed_ms"] / one["step_ms"]))
        times = [f"{one['step_ms']:,.1f}", f"{one['gain']:+.1%}", Cell(f"{one['exposed_ms']:,.1f}", share=share, colour=2)]
        memory = f"{one['memory_gib']:,.1f}" + ("" if one["fits"] else " (does not fit)")
        limit = f"{one['limit']} {one['limit_share']:.0%}"
        rows.append([one["setting"], *times, f"{one['tp_delay_ms']:,.1f}", limit, memory])
    return HtmlTable("Settings, the fastest first", heads, rows)


def plain(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Facts as a page shows them: lists as words."""
    return {
        name: ", ".join(map(str, value)) if isinstance(value, list | tuple) else value for name, value in environment.items()
    }
