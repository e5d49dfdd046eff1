"""Pages of simulated Neuron programs and of plans: engine activity over time, and figures by cores, batch and schedule."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tilewright.metrics.metric import Metric, select_metrics, significant
from tilewright.metrics.neuron import NEURON
from tilewright.metrics.tables import FigureTable, Row, grouped
from tilewright.report.charts import LaneChart, LaneRow, LineChart, StackedBars, lines
from tilewright.report.page import Block, HtmlTable, Section, sentences, write_sections
from tilewright.report.tables import first_text, page_table, ranges_section

MOMENTS = {"compute": "compute", "loading": "loading alone", "exposed": "exposed communication", "waiting": "waiting"}
"""Kinds of moments, which partition the time, with their names in charts."""

KINDS = {
    "compute": "compute",
    "dma": "compute's transfers",
    "tp": "tensor-parallel",
    "fsdp": "fully sharded",
    "other": "other collectives",
}
"""Kinds of spans with their names in a chart, in the order of the colours."""

LEAD = "A discrete-event simulation; nothing ran on a chip. docs/neuron.md describes the model and its sources."


PLACES = (
    "schedule cores batch_rows tokens_per_s tokens_per_s_gain tokens_per_s_gain_over_sequence ttft_ms ttft_gain "
    "ttft_gain_over_sequence tpot_ms tpot_gain tpot_gain_over_sequence memory_gib limit"
)
FIRST_PLACES = "schedule cores batch_rows tokens_per_s tokens_per_s_gain ttft_ms tpot_ms memory_gib"
AT_BEST = "Schedules compared with sync and sequence, each at its best"
SETTINGS = select_metrics(
    NEURON, "packets streams early_layers late_layers step_ms gain tokens_per_s exposed_ms tp_delay_ms memory_gib limit"
)
FIRST_SETTINGS = "packets streams early_layers late_layers step_ms gain memory_gib"
FIRST_RANKS = 8
"""Number of settings that the page of a training plan shows unfolded, besides the compiler's order."""
LIKE = 0.01
"""Maximum relative difference of exposed time, as a share of the largest, between layers that are shown as one."""
BUSY = Metric("busy_share", head="busy", form=".1%")


def engines_chart(title: str, lanes: Sequence[tuple[str, Sequence[tuple[float, float, str]]]], total_ms: float) -> LaneChart:
    """Returns a chart of each engine's activity, with a table of busy times.

    Args:
        lanes: name of each engine and its spans (begin ms, end ms, kind), with kinds of `KINDS`.
        total_ms: total time in milliseconds.
    """
    figures = []
    for name, spans in lanes:
        busy = sum(end - begin for begin, end, _ in merged([(begin, end, "dma") for begin, end, _ in spans], 0.0))
        figures.append([name, f"{busy:,.3f}", f"{busy / (total_ms or 1.0):.1%}"])
    table = HtmlTable(f"{title}: busy", ["engine", "ms", "share"], figures)
    rows = [LaneRow(name, [merged(spans, total_ms / 5000)]) for name, spans in lanes]
    return LaneChart(title, rows, KINDS, total_ms, table)


def merged(spans: Sequence[tuple[float, float, str]], gap: float) -> list[tuple[float, float, str]]:
    """Merges spans of one kind that are at most `gap` apart; the chart would not show the gaps of thousands of spans."""
    found: list[tuple[float, float, str]] = []
    for begin, end, kind in sorted(spans):
        if found and found[-1][2] == kind and begin <= found[-1][1] + gap:
            found[-1] = (found[-1][0], max(found[-1][1], end), kind)
        else:
            found.append((begin, end, kind))
    return found


def write_simulation(path: str | Path, title: str, record: Row, engines: LaneChart, environment: Row) -> None:
    """Writes the page of one simulated program, with its figures as JSON in the element `data`.

    Args:
        record: figures of docs/metrics.md.
        environment: settings of the simulation.
    """
    sent = [{"name": name, "dma_gb": size, "dma_share": record["dma_share"][name]} for name, size in record["dma_gb"].items()]
    layers = [{"name": name, "exposed_ms": ms} for name, ms in alike_layers(record["exposed_layers_ms"])]
    exposed = FigureTable("Exposed communication of each layer", "layer", {"": layers}, select_metrics(NEURON, "exposed_ms"))
    blocks: list[Block] = [
        moment_bars("What the time goes to", "program", [record]),
        page_table(engines_table("Engines", record)),
        page_table(FigureTable("DMA engines by sender", "sender", {"": sent}, select_metrics(NEURON, "dma_gb dma_share"))),
        page_table(exposed),
    ]
    verdict = (
        f"{significant(record['total_ms'])} ms, {record['exposed_ms'] / (record['total_ms'] or 1.0):.0%} of it exposed "
        f"communication; {record['limit']} is busy longest; {record['memory_gib']:,.2f} GiB of device memory."
    )
    sections = [Section("What runs when", [engines], sentences(record["notes"])), Section("Figures", blocks, grid=True)]
    data = {"environment": environment, "data": record}
    write_sections(path, title, sections, verdict=verdict, lead=LEAD, facts=environment, data=data, ran=False)


def alike_layers(exposed_ms: Mapping[str, float]) -> list[tuple[str, float]]:
    """Returns layers with their exposed time; adjacent similar layers are merged under the numbers of the first and last."""
    found: list[tuple[str, str, float]] = []
    least = LIKE * max(exposed_ms.values(), default=0.0)
    for name, ms in exposed_ms.items():
        if found and name.isdecimal() and found[-1][1].isdecimal() and abs(found[-1][2] - ms) <= least:
            found[-1] = (found[-1][0], name, found[-1][2])
        else:
            found.append((name, name, ms))
    return [(first if first == last else f"{first} to {last}, each", ms) for first, last, ms in found]


def moment_bars(title: str, name: str, records: Sequence[Row]) -> StackedBars:
    """Returns bars of the kinds of moments of each record, labelled with field `name`."""
    bars = [(one[name], [one[f"{moment}_ms"] for moment in MOMENTS]) for one in records]
    return StackedBars(title, tuple(MOMENTS.values()), bars, "ms")


def engines_table(title: str, record: Row) -> FigureTable:
    """Returns the table of each engine's busy time in a simulated program."""
    total = record["total_ms"] or 1.0
    rows = [
        {"name": name, "busy_ms": ms, "idle_ms": record["idle_ms"][name], BUSY.name: ms / total}
        for name, ms in record["busy_ms"].items()
    ]
    return FigureTable(title, "engine", {"": rows}, (*select_metrics(NEURON, "busy_ms idle_ms"), BUSY), shares=(BUSY.name,))


def write_inference_plan(path: str | Path, title: str, plan: Row) -> None:
    """Writes the page of `tilewright neuron plan`: three charts by cores for each input, and tables.

    Args:
        plan: JSON of the plan: `data`, `winner`, `ranges` and the environment.
    """
    records = plan["data"]
    sections = []
    for tokens, group in grouped(records, "input_tokens").items():
        blocks: list[Block] = [
            *core_charts(f"Output throughput, input of {tokens:,}", "tokens/s", "tokens_per_s", group),
            *core_charts(f"Time to the first token, input of {tokens:,}", "ms", "ttft_ms", group),
            *core_charts(f"Time per output token, input of {tokens:,}", "ms", "tpot_ms", group),
        ]
        sections.append(Section(f"Input of {tokens:,} tokens", blocks, grid=True))
        notes = sentences(note for one in group for note in one["notes"])
        best = {
            place_key(max(some, key=lambda one: one["tokens_per_s"]))
            for some in grouped(group, lambda one: (one["schedule"], one["batch_rows"])).values()
        }
        table = page_table(
            inference_table(AT_BEST, group), first=FIRST_PLACES, first_row=lambda row, best=best: place_key(row) in best
        )
        sections.append(Section(f"Figures, input of {tokens:,}", [table], f"{BEST_CORES} {notes}".rstrip()))
    sections.append(ranges_section(plan["ranges"]))
    verdict = inference_verdict(plan)
    write_sections(path, title, sections, verdict=verdict, lead=LEAD, facts=settings(plan), data=plan, ran=False)


BEST_CORES = "For each schedule and batch, the number of cores with the most tokens per second; other rows are folded."


def place_key(record: Row) -> tuple[str, int, int]:
    return record["schedule"], record["cores"], record["batch_rows"]


def inference_verdict(plan: Row) -> str:
    """Returns a sentence on the setting with the most tokens per second and how certain its lead is."""
    best = plan["winner"]
    gain = "" if best["tokens_per_s_gain"] is None else f", {best['tokens_per_s_gain']:+.0%} against sync there"
    sure = first_text(plan["ranges"].get("tpot_ms"), best["schedule"])
    return (
        f"Most tokens a second: {best['schedule']} over {best['cores']} cores, batch {best['batch_rows']}, "
        f"{best['input_tokens']:,} tokens in: {significant(best['tokens_per_s'])} tokens/s{gain}"
        f"{f'; its time per token is {sure}' if sure else ''}."
    )


MOST_LINES = 6
"""Maximum number of lines in a chart, limited by the number of colours."""


def core_charts(title: str, unit: str, name: str, records: Sequence[Row]) -> list[LineChart]:
    """Returns a chart with a line for each schedule and batch; if there are too many lines, a chart for each batch."""
    drawn = {
        rows: lines(group, lambda one: f"{one['schedule']}, batch {one['batch_rows']}", "cores", name)
        for rows, group in grouped(records, "batch_rows").items()
    }
    together = [series for group in drawn.values() for series in group]
    if len(together) <= MOST_LINES:
        return [LineChart(title, "cores", unit, together)]
    return [LineChart(f"{title}, batch {rows}", "cores", unit, group) for rows, group in drawn.items()]


def inference_table(title: str, records: Sequence[Row], names: str = PLACES) -> FigureTable:
    """Returns the table of schedules at each place: throughput and times, with gains over `sync` and `sequence`."""
    rows = [formatted_record({**one, **{name: one["decode"][name] for name in ("limit", "limit_share")}}) for one in records]
    *others, limit = select_metrics(NEURON, names)
    return FigureTable(title, "", {"": rows}, (*others, replace(limit, head="decode limit", short="decode\nlimit")), unknown="")


def formatted_record(one: Row) -> dict[str, Any]:
    """Returns a record with its limit and memory formatted for tables; "!" marks exceeded memory."""
    memory = significant(one["memory_gib"]) + ("" if one["fits"] else " !")
    return {**one, "memory_gib": memory, "limit": f"{one['limit']} {one['limit_share']:.0%}"}


def write_training_plan(path: str | Path, title: str, plan: Row) -> None:
    """Writes the page of `tilewright neuron plan --training`: the ranking, the parts of steps, and the winner's environment."""
    records = plan["data"]
    shown = [[one["name"], one["value"], one["does"]] for one in plan["winner_environment"]]

    def name(one: Row) -> str:
        return f"{one['streams']} stream{'s' * (one['streams'] > 1)}, prefetch {one['early_layers']:g}, {one['packets']}"

    first = {one["setting"] for one in [*records[:FIRST_RANKS], *(one for one in records if not one["threaded"])]}
    table = training_table("Settings, fastest first", records)
    ranking = page_table(table, first=FIRST_SETTINGS, first_row=lambda row: row["setting"] in first)
    sure = first_text(plan["ranges"].get("step_ms"), plan["winner"]["setting"])
    gain = f", {plan['winner']['gain']:.0%} less than in the compiler's order" if plan["winner"]["gain"] is not None else ""
    step = f"{plan['winner']['setting']}, {significant(plan['winner']['step_ms'])} ms a step"
    verdict = f"Fastest: {step}{gain}{f'; {sure}' if sure else ''}."
    threaded = grouped((one for one in records if one["threaded"]), "packets")
    drawn = {packets: lines(group, name, "late_layers", "step_ms") for packets, group in threaded.items()}
    charts = [LineChart(f"{packets} packets", "scatter delay, layers", "ms a step", group) for packets, group in drawn.items()]
    sections = [
        Section("Ranking", [ranking], f"{plan['winner_text']}."),
        Section("What steps are made of", [moment_bars("The fastest settings", "setting", records[:FIRST_RANKS])]),
        Section("Steps by scatter delay", charts, grid=True),
        Section("Environment of the winner", [HtmlTable("Variables", ["name", "value", "what it does"], shown, words=(2,))]),
        ranges_section(plan["ranges"]),
    ]
    write_sections(path, title, sections, verdict=verdict, lead=LEAD, facts=settings(plan), data=plan, ran=False)


def training_table(title: str, records: Sequence[Row]) -> FigureTable:
    """Returns the table of ranked settings."""
    compiler_order = {"early_layers": "compiler's", "late_layers": "order"}
    rows = [formatted_record(one if one["threaded"] else {**one, **compiler_order}) for one in records]
    return FigureTable(title, "", {"": rows}, SETTINGS, unknown="")


def settings(plan: Row) -> dict[str, Any]:
    """Returns the settings of a plan for display, with lists as words."""
    described = ("data", "ranges", "winner", "winner_environment", "winner_text", "measured")
    return {
        name: ", ".join(map(str, value)) if isinstance(value, list | tuple) else value
        for name, value in plan.items()
        if name not in described
    }
