"""`tilewright bench graph` on a small graph, for an absent chip, and what it refuses."""

import json
from pathlib import Path

import pytest

from cli.conftest import Run
from tilewright.bench import graph as bench
from tilewright.cli import bench_graph
from tilewright.compiled import compare
from tilewright.metrics.metric import significant

SMALL = ["bench", "graph", "--data", "uniform:30:4", "--features", 8, "--repetitions", 1]


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "COPY_BYTES", 2**16)
    monkeypatch.setattr(compare, "RUN_S", 0.001)


def test_table_json_and_page(run: Run, tmp_path: Path):
    page = tmp_path / "page.html"
    ran = run(*SMALL, "--experiment", "scatter-add,gcn", "--layout", "bucketed", "--json", "-", "--html", page)
    assert ran.status == 0, ran.err
    expected = [("scatter-add", "baseline"), ("scatter-add", "fused")]
    expected += [("gcn", "baseline"), ("gcn", "segment_sum"), ("gcn", "bucketed")]
    assert [(one["experiment"], one["name"]) for one in ran.json["data"]] == expected
    assert all(one["agrees"] for one in ran.json["data"])
    facts = [ran.json[name] for name in ("graph", "nodes", "max_degree", "features", "dtype", "repetitions", "measured")]
    assert facts == ["uniform:30:4", 30, 4, 8, "float32", 1, True]
    for one in ran.json["data"]:
        shown = {
            one["name"],
            significant(one["median_ms"], 4),
            f"{one['speedup']:.2f}",
            f"{one['written_bytes'] / 1e6:,.2f}",
        }
        assert any(shown <= set(line.split()) for line in ran.err.splitlines()), shown
    text = page.read_text(encoding="utf-8")
    assert "30 nodes" in text
    assert "gcn, bucketed" in text


def test_figures_are_written_before_they_are_shown(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_graph, "print_table", stopped)
    ran = run(*SMALL, "--experiment", "gather-scatter", "--json", tmp_path / "figures.json")
    assert ran.status != 0
    assert json.loads((tmp_path / "figures.json").read_text())["nodes"] == 30


def test_the_table_fits_118_columns(run: Run):
    ran = run(*SMALL, "--experiment", "gather-scatter")
    assert max(len(line.rstrip()) for line in ran.out.splitlines() if "gather-scatter" in line or "─" in line) <= 118


def test_what_does_not_fit_is_said(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench, "LARGEST_MESSAGES", 100)
    ran = run(*SMALL, "--experiment", "scatter-add", "gather-scatter", "--json", "-")
    assert ran.status == 0, ran.err
    assert ran.json["data"][0]["name"] == "segment_sum"
    assert len(ran.json["notes"]) == 2
    assert "scatter-add left out" in ran.err
    assert "against segment_sum" in ran.err


@pytest.mark.tpu
def test_estimates_for_an_absent_chip(run: Run):
    ran = run(*SMALL, "--experiment", "gather-scatter", "--chip", "v5e:1x1", "--json", "-")
    assert ran.status == 0, ran.err
    assert ran.json["measured"] is False
    assert {one["place"] for one in ran.json["data"]} == {"v5e:1x1"}
    assert ran.json["data"][2]["name"] == "bucketed"
    assert ran.json["data"][2]["tpu_dma_descriptors"] > 30
    assert "Compiler estimates" in ran.err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (
            ["--experiment", "gcn,gnc"],
            "expected experiment among scatter-add, gather-scatter, graphsage, gcn, gin, gat, found gnc",
        ),
        (["--layout", "wide"], "expected layout among auto, padded, bucketed, csr, found wide"),
        (["--data", "uniform:1"], "expected uniform:NODES:MAXDEGREE"),
        (["--data", "nowhere"], "found no such file"),
        (["--features", 0], "expected features of at least 1, found 0"),
        (["--repetitions", 0], "expected repetitions of at least 1, found 0"),
        (["--chip", "v9:1x1"], "found 'v9:1x1'"),
        (["--json", "/nowhere/x.json"], "its folder does not exist"),
        (["--html", "/nowhere/x.html"], "its folder does not exist"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(run: Run, arguments: list[object], problem: str):
    ran = run("bench", "graph", *arguments)
    assert ran.status == 2
    assert problem in ran.err
    assert len(ran.err.strip().splitlines()) == 1
