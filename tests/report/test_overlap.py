"""The page of `inspect overlap`: what is drawn is what was given."""

import re
from pathlib import Path

import pytest

from tilewright.report.overlap import OverlapReport, cropped, lane_chart, layer_bars, layer_lanes, report_verdict, write_overlap

TIMES = {
    "compute_ms": 2.0,
    "communication_ms": 1.0,
    "hidden_ms": 0.75,
    "exposed_ms": 0.25,
    "memory_wait_ms": 0.125,
    "total_ms": 2.375,
}
RECORD = {
    "chip": "v5e:4x2",
    "devices": 8,
    "phase": "decode",
    "batch_rows": 8,
    "positions": 64,
    "schedule": "<ring>",
    **TIMES,
    "exposed_share": 0.25,
    "exposed_share_of_sync": None,
    "extra_compute_share": None,
    "least_exposed_ms": 0.0,
    "steady": False,
    "bound_steady": True,
    "without_estimate": 536,
    "roofline_share": 0.375,
    "bound_compute_cycles": 1_900_000,
    "compute_cycles": 2_000_000,
    "model_total_ms": 76.0,
    "model_layers": 32,
    "bound_total_ms": 1.9,
    "total_over_bound": 1.25,
    "all_links_communication_ms": 0.5,
    "all_links_least_exposed_ms": 0.0,
    "layers_compiled": 3,
    "reported_layer": 1,
    "layers": [{"layer": n, **TIMES} for n in range(3)],
}
ROW = {
    "schedule": "<ring>",
    "core": [(0.0, 2.0, "compute"), (2.0, 2.25, "exposed"), (2.25, 2.5, "memory wait")],
    "links": [(1.25, 2.25, "hidden"), (2.0, 2.25, "exposed")],
    "layer_begins_ms": [0.0],
}


def test_bars_are_as_long_as_their_times():
    html = lane_chart("a program", [ROW]).html()
    found = re.findall(r'<rect class="s(\d)" x="([\d.]+)" y="(\d+)" width="([\d.]+)"', html)
    drawn = [(int(colour), float(x), int(y), float(width)) for colour, x, y, width in found]
    assert drawn == [(1, 0, 0, 800), (2, 800, 0, 100), (3, 900, 0, 100), (4, 500, 15, 400), (2, 800, 15, 100)]
    # The figures: what is exposed is no part of what is hidden.
    assert re.findall(r"<td>([\d.]+)</td>", html) == ["2.000", "0.250", "0.250", "0.750"]


def test_the_page_holds_the_figures_and_escapes_names(tmp_path: Path):
    path = tmp_path / "page.html"
    write_overlap(path, OverlapReport("A title", [RECORD], {"v5e:4x2 decode:8x64": [ROW]}, {"model": "a & b"}))
    page = path.read_text()
    words = ("One of 32 layers, the middle", "<td>1.90</td><td>1.00</td><td>60.8</td>", "2.38\nnot steady", "25.0%")
    words += ("starting a transfer costs nothing, and transfers use", "&lt;ring&gt; 536 (38% of a layer")
    words += ("Least time for a layer: &lt;ring&gt; on v5e:4x2 decode:8x64 (2.38 ms).", "Settings; nothing ran")
    for shown in (*words, "v5e:4x2 decode:8x64", "a &amp; b", "&lt;ring&gt;"):
        assert shown in page
    assert "Measured on" not in page
    assert "<ring>" not in page
    with pytest.raises(ValueError, match="expected figures of at least one schedule"):
        OverlapReport("A title", [], {})


def test_layers_that_are_alike_have_one_bar():
    longer = {**TIMES, "compute_ms": 2.5}
    layers = [{"layer": n, **times} for n, times in enumerate([longer, TIMES, {**TIMES, "exposed_ms": 0.26}, TIMES, longer])]
    bars = layer_bars([{"schedule": "ring", "layers": layers}], "schedule").bars
    assert [name for name, _ in bars] == ["ring, layer 0", "ring, layers 1 to 3", "ring, layer 4"]
    assert bars[1][1] == [2.0, 0.25, 0.125]
    passes = [{"pass": name, "layer": n, **TIMES} for name in ("forward", "backward") for n in range(2)]
    bars = layer_bars([{"program": "plain", "layers": passes}], "program").bars
    assert [name for name, _ in bars] == ["plain, forward, layers 0 to 1", "plain, backward, layers 0 to 1"]


def test_a_layer_like_its_neighbours_is_drawn_alone():
    row = {**ROW, "core": [(n, n + 0.5, "compute") for n in range(3)], "links": [(0.75, 1.25, "hidden")]}
    row = {**row, "layer_begins_ms": [0.0, 1.0, 2.0]}
    assert cropped(row, 1.0, 2.0) == {
        **row,
        "core": [(0.0, 0.5, "compute")],
        "links": [(0.0, 0.25, "hidden")],
        "layer_begins_ms": [],
    }
    assert (
        layer_lanes("x", [{**RECORD, "steady": True}], [row]).title == "Core and links in a layer, x: core above, links below"
    )
    assert layer_lanes("x", [RECORD], [row]).longest == 2.5, "all of them where it is not steady"


def test_the_verdict_names_the_fastest_at_each_place_and_how_sure_that_is():
    sync = {**RECORD, "schedule": "sync", "total_ms": 3.0}
    ranges = {"draws": 24, "predictions": {"<ring>": {"first": 20}, "sync": {"first": 4}}}
    report = OverlapReport("t", [sync, RECORD, {**sync, "phase": "prefill"}], {}, {}, {"decode": ranges})
    assert report_verdict(report, lambda one: one["phase"], "schedule") == (
        "Least time for a layer: <ring> on decode (2.38 ms, 21% less than sync; best in 20 of 24 draws of the constants), "
        "sync on prefill (3.00 ms)."
    )
