"""The page of the graph benchmark: the figures that it was given, one file."""

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from report.reading import Page, check_self_contained
from tilewright.report.graph import bars, kernels_table, memory_table, terminal_tables, times_table, write_graph
from tilewright.report.page import Cell, HtmlTable, Report, asset
from tilewright.report.tables import page_table


def record(experiment: str, name: str, place: str = "a machine", ms: float | None = 2.0, **more: Any) -> dict[str, Any]:
    fields = {
        "experiment": experiment,
        "name": name,
        "place": place,
        "measured": ms is not None,
        "median_ms": ms,
        "speedup": None if ms is None else 10 / ms,
        "share_of_bandwidth": None if ms is None else 0.25,
        "largest_difference": None if ms is None else 1e-6,
        "estimated_cycles": 41_000 if ms is None else None,
        "without_estimate": 3,
        "memory_cycles": 1500 if ms is None else None,
        "read_bytes": 3_000_000,
        "written_bytes": 1_000_000,
        "round_trips": 2,
        "round_trip_bytes": 500_000,
        "peak_bytes": 7_000_000,
        "compile_s": 0.5,
        "loaded": False,
        "tpu_dma_descriptors": None,
        "nki_dma_descriptors": None,
    }
    sizes = {f"{kind}_{way}_bytes": None for kind in ("tpu", "nki") for way in ("read", "written")}
    return {**fields, **sizes, **more}


COUNTED: dict[str, Any] = {
    "tpu_dma_descriptors": 68_126,
    "tpu_read_bytes": 35_400_000,
    "tpu_written_bytes": 1_050_000,
    "nki_dma_descriptors": 93_705,
    "nki_read_bytes": 40_000_000,
    "nki_written_bytes": 1_060_000,
}


def sample() -> Report:
    measured = [record("gather-scatter", "baseline", ms=10.0), record("gather-scatter", "bucketed", ms=2.0, **COUNTED)]
    measured.append(record("gcn <x>", "baseline", ms=10.0))
    estimated = [record("gather-scatter", "bucketed", "v5e:1x1", ms=None, **COUNTED)]
    return Report("Graphs & bytes", "10 nodes.", measured + estimated, {"graph": "seed"}, ["no baseline: too large"])


def texts(table: HtmlTable) -> list[list[str | None]]:
    return [[cell.text if isinstance(cell, Cell) else cell for cell in row] for row in table.rows]


def test_the_page_is_one_file_with_all_its_data(tmp_path: Path):
    write_graph(tmp_path / "page.html", sample())
    page = Page(tmp_path / "page.html")
    check_self_contained(page)
    assert page.data() == json.loads(json.dumps(asdict(sample())))
    words = " ".join(page.words)
    for shown in ("10 nodes.", "no baseline: too large", "gcn <x>, baseline", "5.00", "Compiler estimates", "68,126"):
        assert shown in words


def test_the_tables_have_the_figures_and_the_best_speedup_is_strong():
    records = sample().records
    table = page_table(times_table("a machine", records[:3]))
    assert texts(table)[1] == ["gather-scatter, bucketed", "2.000", "5.00", "25%", "1e-06", "0.50"]
    assert texts(page_table(memory_table("a machine", records[:3])))[1][1:] == ["3.00", "1.00", "2", "0.50", "7.00"]
    assert [isinstance(row[2], Cell) and row[2].strong for row in table.rows] == [False, True, False], "1 is no gain"
    estimates = page_table(times_table("v5e:1x1", records[3:]))
    assert texts(estimates)[0][1:4] == ["41.0", "3", "1.5"]
    chips = (("TPU", "tpu"), ("Trainium", "nki"))
    counted = [row[1:] for chip in chips for row in texts(page_table(kernels_table(records[1:2], *chip)))]
    assert counted == [["68,126", "35.40", "1.05"], ["93,705", "40.00", "1.06"]]
    loaded = page_table(times_table("a machine", [record("gcn", "baseline", loaded=True)]))
    assert texts(loaded)[0][-1] == "0.50 loaded"


def test_the_terminal_has_a_table_for_each_place():
    measured, estimated = terminal_tables(sample().records)
    assert (measured.title, estimated.title) == ("a machine", "v5e:1x1")
    assert [metric.head for metric in measured.metrics[:3]] == ["ms", "speedup", "of bandwidth"]
    assert [metric.row_text(sample().records[1]) for metric in measured.metrics][-2:] == ["68,126", "93,705"]


def test_tables_fit_a_narrow_page(tmp_path: Path):
    """Six columns of short numbers fit 400 pixels, seen in a browser, where names and headers may break."""
    write_graph(tmp_path / "page.html", sample())
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    heads = re.findall(r"<thead>(.*?)</thead>", text)
    assert heads
    assert max(head.count("<th ") for head in heads) <= 6
    breaking = re.search(r"([^{}]*)\{\s*white-space: normal;", asset("page.css"))
    assert breaking
    assert "thead th" in breaking[1]
    assert "tbody th" in breaking[1]


def test_a_chart_for_each_experiment():
    charts = bars(sample().records[:3], {"read": "read_bytes", "written": "written_bytes"}, "MB", 1e-6)
    assert [(chart.title, len(chart.bars)) for chart in charts] == [("gather-scatter", 2), ("gcn <x>", 1)]
    name, parts = charts[0].bars[0]
    assert name == "baseline"
    assert parts == pytest.approx([3.0, 1.0])


def test_no_figures_are_refused():
    with pytest.raises(ValueError, match="Graphs: expected at least one row of figures, found none"):
        Report("Graphs", "", [])
