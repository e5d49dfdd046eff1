"""The pages of simulated Neuron programs: what is drawn is what was given."""

import re
from pathlib import Path

from report.reading import Page
from tilewright.report.neuron import alike_layers, core_charts, engines_chart, inference_verdict, merged, write_simulation

LANES = [("tensor", [(0.0, 1.0, "compute"), (3.0, 4.0, "compute")]), ("cc0", [(1.0, 3.0, "tp"), (2.0, 3.5, "fsdp")])]
RECORD = {
    "program": "<a step>",
    "total_ms": 4.0,
    "compute_ms": 2.0,
    "loading_ms": 0.5,
    "exposed_ms": 1.0,
    "waiting_ms": 0.5,
    "busy_ms": {"tensor": 2.0, "cc0": 2.5},
    "idle_ms": {"tensor": 2.0, "cc0": 1.5},
    "exposed_layers_ms": {"0": 1.0},
    "dma_gb": {"compute": 1.0, "tp": 3.0},
    "dma_share": {"compute": 0.25, "tp": 0.75},
    "limit": "cc0",
    "memory_gib": 1.5,
    "notes": ["what was assumed"],
}


def test_spans_are_as_long_as_their_times():
    html = engines_chart("engines", LANES, 4.0).html()
    found = re.findall(r'<rect class="s(\d)" x="([\d.]+)" y="0" width="([\d.]+)"', html)
    assert [(int(colour), float(x), float(width)) for colour, x, width in found] == [
        (1, 0, 250),
        (1, 750, 250),
        (3, 250, 500),
        (4, 500, 375),
    ]
    # Time in which both are under way counts once.
    assert re.findall(r"<td>([\d.]+)</td>", html) == ["2.000", "2.500"]


def test_spans_too_near_to_tell_apart_are_one():
    spans = [(0.0, 1.0, "tp"), (1.05, 2.0, "tp"), (2.5, 3.0, "tp"), (3.0, 4.0, "dma")]
    assert merged(spans, 0.1) == [(0.0, 2.0, "tp"), (2.5, 3.0, "tp"), (3.0, 4.0, "dma")]


def test_a_chart_has_no_more_lines_than_colours():
    records = [
        {"schedule": name, "batch_rows": rows, "cores": cores, "ms": 1.0}
        for name in ("sync", "domino", "column", "ring")
        for rows in (4, 8)
        for cores in (2, 4)
    ]
    (first, second) = core_charts("t", "ms", "ms", records)
    assert [len(chart.series) for chart in (first, second)] == [4, 4]
    (together,) = core_charts("t", "ms", "ms", [one for one in records if one["batch_rows"] == 4])
    assert [series.name for series in together.series] == [f"{name}, batch 4" for name in ("sync", "domino", "column", "ring")]


def test_the_page_is_whole_and_asks_for_nothing(tmp_path: Path):
    path = tmp_path / "page.html"
    write_simulation(path, "A <step>", RECORD, engines_chart("engines", LANES, 4.0), {"instance": "inf2.48xlarge"})
    page = Page(path)
    assert "A <step>" in " ".join(page.words)
    assert "4.00 ms, 25% of it exposed communication; cc0 is busy longest" in " ".join(page.words)
    assert "Settings; nothing ran" in page.words
    assert "What was assumed." in " ".join(page.words)
    assert not [attributes for _, attributes in page.elements if attributes.get("src") or attributes.get("href")]


def test_layers_that_are_alike_have_one_line():
    times = {"none": 0.5, "0": 2.0, "1": 1.0, "2": 1.005, "3": 0.99, "4": 0.0}
    assert alike_layers(times) == [("none", 0.5), ("0", 2.0), ("1 to 3, each", 1.0), ("4", 0.0)]


def test_the_verdict_of_a_plan_says_how_sure_it_is():
    best = {
        "schedule": "ring",
        "cores": 8,
        "batch_rows": 4,
        "input_tokens": 1024,
        "tokens_per_s": 1234.5,
        "tokens_per_s_gain": 0.06,
    }
    best["tokens_per_s_gain"] = 0.06
    plan = {"winner": best, "ranges": {"tpot_ms": {"draws": 24, "predictions": {"ring": {"first": 3}, "sync": {"first": 21}}}}}
    assert inference_verdict(plan) == (
        "Most tokens a second: ring over 8 cores, batch 4, 1,024 tokens in: 1,234 tokens/s, +6% against sync there; "
        "its time per token is best in 3 of 24 draws of the constants (sync: 21)."
    )
