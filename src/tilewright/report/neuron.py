"""The pages of simulated Neuron programs and of plans: what engines do when, and figures by cores, batch and schedule."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tilewright.metrics.metric import Metric, chosen, significant
from tilewright.metrics.neuron import NEURON
from tilewright.metrics.tables import FigureTable, Row, grouped
from tilewright.report.charts import LaneChart, LaneRow, LineChart, StackedBars, lines
from tilewright.report.page import Block, HtmlTable, Section, sentences, write_sections
from tilewright.report.tables import first_text, page_table, ranges_section

MOMENTS = {"compute": "compute", "loading": "loading alone", "exposed": "exposed communication", "waiting": "waiting"}
"""Kinds of moments that all of the time is divided into, as records name them, and what charts call them."""

KINDS = {
    "compute": "compute",
    "dma": "compute's transfers",
    "tp": "tensor-parallel",
    "fsdp": "fully sharded",
    "other": "other collectives",
}
"""Kinds of spans in a chart and what it calls them, in the order of the colours."""

LEAD = "A discrete-event model; nothing ran on a chip. docs/neuron.md says what is modelled and where its figures come from."


PLACES = (
    "schedule cores batch_rows tokens_per_s tokens_per_s_gain tokens_per_s_gain_over_sequence ttft_ms ttft_gain "
    "ttft_gain_over_sequence tpot_ms tpot_gain tpot_gain_over_sequence memory_gib limit"
)
FIRST_PLACES = "schedule cores batch_rows tokens_per_s tokens_per_s_gain ttft_ms tpot_ms memory_gib"
AT_BEST = "Schedules against sync and sequence, each at its best"
SETTINGS = chosen(
    NEURON, "packets streams early_layers late_layers step_ms gain tokens_per_s exposed_ms tp_delay_ms memory_gib limit"
)
FIRST_SETTINGS = "packets streams early_layers late_layers step_ms gain memory_gib"
FIRST_RANKS = 8
"""Settings that the page of a training plan shows at once, beside the compiler's order."""
LIKE = 0.01
"""Share of the largest exposed time by which layers behind one another may differ to count as alike."""
BUSY = Metric("busy_share", head="busy", form=".1%")


def engines_chart(title: str, lanes: Sequence[tuple[str, Sequence[tuple[float, float, str]]]], total_ms: float) -> LaneChart:
    """Chart of what each engine does, with a table of the time in which it has something under way.

    Args:
        lanes: for each engine its name and (begin ms, end ms, kind), kinds as in `KINDS`.
        total_ms: how long all of it takes.
    """
    figures = []
    for name, spans in lanes:
        busy = sum(end - begin for begin, end, _ in merged([(begin, end, "dma") for begin, end, _ in spans], 0.0))
        figures.append([name, f"{busy:,.3f}", f"{busy / (total_ms or 1.0):.1%}"])
    table = HtmlTable(f"{title}: busy", ["engine", "ms", "share"], figures)
    rows = [LaneRow(name, [merged(spans, total_ms / 5000)]) for name, spans in lanes]
    return LaneChart(title, rows, KINDS, total_ms, table)


def merged(spans: Sequence[tuple[float, float, str]], gap: float) -> list[tuple[float, float, str]]:
    """Spans of one kind that are no farther apart than `gap`, as one: there are many thousand, and a picture shows no less."""
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
        record: figures, named as in docs/metrics.md.
        environment: what they depend on.
    """
    sent = [{"name": name, "dma_gb": size, "dma_share": record["dma_share"][name]} for name, size in record["dma_gb"].items()]
    layers = [{"name": name, "exposed_ms": ms} for name, ms in alike_layers(record["exposed_layers_ms"])]
    exposed = FigureTable("Exposed communication of each layer", "layer", {"": layers}, chosen(NEURON, "exposed_ms"))
    blocks: list[Block] = [
        moment_bars("What the time goes to", "program", [record]),
        page_table(engines_table("Engines", record)),
        page_table(FigureTable("DMA engines by sender", "sender", {"": sent}, chosen(NEURON, "dma_gb dma_share"))),
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
    """Layers with their exposed time; those behind one another that are alike as one, under the numbers of both ends."""
    found: list[tuple[str, str, float]] = []
    least = LIKE * max(exposed_ms.values(), default=0.0)
    for name, ms in exposed_ms.items():
        if found and name.isdecimal() and found[-1][1].isdecimal() and abs(found[-1][2] - ms) <= least:
            found[-1] = (found[-1][0], name, found[-1][2])
        else:
            found.append((name, name, ms))
    return [(first if first == last else f"{first} to {last}, each", ms) for first, last, ms in found]


def moment_bars(title: str, name: str, records: Sequence[Row]) -> StackedBars:
    """Bars of what the time of records goes to; `name` is the field that they are told apart by."""
    bars = [(one[name], [one[f"{moment}_ms"] for moment in MOMENTS]) for one in records]
    return StackedBars(title, tuple(MOMENTS.values()), bars, "ms")


def engines_table(title: str, record: Row) -> FigureTable:
    """Table of how long each engine of a simulated program is busy."""
    total = record["total_ms"] or 1.0
    rows = [
        {"name": name, "busy_ms": ms, "idle_ms": record["idle_ms"][name], BUSY.name: ms / total}
        for name, ms in record["busy_ms"].items()
    ]
    return FigureTable(title, "engine", {"": rows}, (*chosen(NEURON, "busy_ms idle_ms"), BUSY), shares=(BUSY.name,))


def write_inference_plan(path: str | Path, title: str, plan: Row) -> None:
    """Writes the page of `tilewright plan inference`: for each input the three figures by cores, and the tables behind them.

    Args:
        plan: what `--json` holds: `data`, `winner`, `ranges` and the environment.
    """
    records = plan["data"]
    sections = []
    for tokens, of in grouped(records, "input_tokens").items():
        blocks: list[Block] = [
            *by_cores(f"Output throughput, input of {tokens:,}", "tokens/s", "tokens_per_s", of),
            *by_cores(f"Time to the first token, input of {tokens:,}", "ms", "ttft_ms", of),
            *by_cores(f"Time per output token, input of {tokens:,}", "ms", "tpot_ms", of),
        ]
        sections.append(Section(f"Input of {tokens:,} tokens", blocks, grid=True))
        notes = sentences(note for one in of for note in one["notes"])
        best = {
            place_of(max(some, key=lambda one: one["tokens_per_s"]))
            for some in grouped(of, lambda one: (one["schedule"], one["batch_rows"])).values()
        }
        table = page_table(
            inference_table(AT_BEST, of), first=FIRST_PLACES, first_row=lambda row, best=best: place_of(row) in best
        )
        sections.append(Section(f"Figures, input of {tokens:,}", [table], f"{BEST_CORES} {notes}".rstrip()))
    sections.append(ranges_section(plan["ranges"]))
    verdict = inference_verdict(plan)
    write_sections(path, title, sections, verdict=verdict, lead=LEAD, facts=settings(plan), data=plan, ran=False)


BEST_CORES = "For each schedule and batch the number of cores with the most tokens a second; all of them fold out."


def place_of(record: Row) -> tuple[str, int, int]:
    return record["schedule"], record["cores"], record["batch_rows"]


def inference_verdict(plan: Row) -> str:
    """Sentence on the place with the most tokens a second, and on how sure its lead is."""
    best = plan["winner"]
    gain = "" if best["tokens_per_s_gain"] is None else f", {best['tokens_per_s_gain']:+.0%} against sync there"
    sure = first_text(plan["ranges"].get("tpot_ms"), best["schedule"])
    return (
        f"Most tokens a second: {best['schedule']} over {best['cores']} cores, batch {best['batch_rows']}, "
        f"{best['input_tokens']:,} tokens in: {significant(best['tokens_per_s'])} tokens/s{gain}"
        f"{f'; its time per token is {sure}' if sure else ''}."
    )


MOST_LINES = 6
"""Of a chart: there are as many colours."""


def by_cores(title: str, unit: str, name: str, records: Sequence[Row]) -> list[LineChart]:
    """A line for each schedule and batch; where they are too many for one chart, one for each batch."""
    drawn = {
        rows: lines(of, lambda one: f"{one['schedule']}, batch {one['batch_rows']}", "cores", name)
        for rows, of in grouped(records, "batch_rows").items()
    }
    together = [series for of in drawn.values() for series in of]
    if len(together) <= MOST_LINES:
        return [LineChart(title, "cores", unit, together)]
    return [LineChart(f"{title}, batch {rows}", "cores", unit, of) for rows, of in drawn.items()]


def inference_table(title: str, records: Sequence[Row], names: str = PLACES) -> FigureTable:
    """Table of schedules at each place: throughput and times, with the gains over `sync` and over `sequence`."""
    rows = [told({**one, **{name: one["decode"][name] for name in ("limit", "limit_share")}}) for one in records]
    *others, limit = chosen(NEURON, names)
    return FigureTable(title, "", {"": rows}, (*others, replace(limit, head="decode limit", short="decode\nlimit")), unknown="")


def told(one: Row) -> dict[str, Any]:
    """A record with its limit and its memory as tables show them: "!" where that is too much."""
    memory = significant(one["memory_gib"]) + ("" if one["fits"] else " !")
    return {**one, "memory_gib": memory, "limit": f"{one['limit']} {one['limit_share']:.0%}"}


def write_training_plan(path: str | Path, title: str, plan: Row) -> None:
    """Writes the page of `tilewright plan training`: the ranking, what steps are made of, and the winner's environment."""
    records = plan["data"]
    shown = [[one["name"], one["value"], one["does"]] for one in plan["winner_environment"]]

    def name(one: Row) -> str:
        return f"{one['streams']} stream{'s' * (one['streams'] > 1)}, prefetch {one['early_layers']:g}, {one['packets']}"

    first = {one["setting"] for one in [*records[:FIRST_RANKS], *(one for one in records if not one["threaded"])]}
    table = training_table("Settings, the fastest first", records)
    ranking = page_table(table, first=FIRST_SETTINGS, first_row=lambda row: row["setting"] in first)
    sure = first_text(plan["ranges"].get("step_ms"), plan["winner"]["setting"])
    gain = f", {plan['winner']['gain']:.0%} less than in the compiler's order" if plan["winner"]["gain"] is not None else ""
    step = f"{plan['winner']['setting']}, {significant(plan['winner']['step_ms'])} ms a step"
    verdict = f"Fastest: {step}{gain}{f'; {sure}' if sure else ''}."
    threaded = grouped((one for one in records if one["threaded"]), "packets")
    drawn = {packets: lines(of, name, "late_layers", "step_ms") for packets, of in threaded.items()}
    charts = [LineChart(f"{packets} packets", "scatter delay, layers", "ms a step", of) for packets, of in drawn.items()]
    sections = [
        Section("Ranking", [ranking], f"{plan['winner_text']}."),
        Section("What steps are made of", [moment_bars("The fastest settings", "setting", records[:FIRST_RANKS])]),
        Section("Steps by scatter delay", charts, grid=True),
        Section("Environment of the winner", [HtmlTable("Variables", ["name", "value", "what it does"], shown, words=(2,))]),
        ranges_section(plan["ranges"]),
    ]
    write_sections(path, title, sections, verdict=verdict, lead=LEAD, facts=settings(plan), data=plan, ran=False)


def training_table(title: str, records: Sequence[Row]) -> FigureTable:
    """Table of settings, as they are ranked."""
    own = {"early_layers": "compiler's", "late_layers": "order"}
    rows = [told(one if one["threaded"] else {**one, **own}) for one in records]
    return FigureTable(title, "", {"": rows}, SETTINGS, unknown="")


def settings(plan: Row) -> dict[str, Any]:
    """Settings that a plan's figures depend on, as a page shows them: lists as words."""
    told = ("data", "ranges", "winner", "winner_environment", "winner_text", "measured")
    return {
        name: ", ".join(map(str, value)) if isinstance(value, list | tuple) else value
        for name, value in plan.items()
        if name not in told
    }
