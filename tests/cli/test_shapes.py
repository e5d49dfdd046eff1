"""`tilewright shapes suggest` on a small trace: the table, the figures, the file, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cli.conftest import Run
from tilewright.cli.shapes import duration
from tilewright.runtime.advice import programs_of
from tilewright.runtime.shape_file import read_table
from tilewright.runtime.shapes import ShapeTable

SMALL = ["--multiple", 4, "--longest-chunk", 16, "--max-buckets", 3]


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """200 requests, most of them short; the command runs in the folder."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(5)
    prompts = 4 + rng.geometric(0.03, 200)
    outputs = rng.integers(0, 20, 200)
    lines = [f"2023-11-16,{p},{o}" for p, o in zip(prompts, outputs, strict=True)]
    (tmp_path / "trace.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(lines) + "\n")
    return "trace.csv"


def check_cells(ran_out: str, name: str, figures: dict[str, Any]) -> None:
    """Each choice has a line in the table with its figures, in order."""
    for one in figures[name]:
        cells = ["*"] * one["recommended"] + [*map(str, one[name]), f"{one['padding_share']:.1%}"]
        if name == "chunks":
            cells.append(f"{one['runs'] / (figures['requests'] - figures['requests_beyond_context']):.2f}")
        cells.append("–" if one["saved_share"] is None else f"{one['saved_share']:.1%}")
        cells += [str(one["programs"]), *duration(one["compile_seconds"]).split()]
        assert cells in [line.split() for line in ran_out.splitlines()], cells


def test_table_json_and_file(run: Run, trace: str):
    ran = run(
        "shapes",
        "suggest",
        "--trace",
        trace,
        *SMALL,
        "--compile-seconds",
        30,
        "--batches",
        1,
        4,
        "--json",
        "figures.json",
        "--out",
        "shapes.json",
    )
    assert ran.status == 0, ran.err
    figures = json.loads(Path("figures.json").read_text())
    for name in ("chunks", "capacities"):
        check_cells(ran.out, name, figures)
        assert [len(one[name]) for one in figures[name]] == list(range(1, len(figures[name]) + 1))
        assert sum(one["recommended"] for one in figures[name]) == 1
    best = {name: next(one for one in figures[name] if one["recommended"]) for name in ("chunks", "capacities")}
    table = read_table(Path("shapes.json"))
    assert table == ShapeTable((1, 4), tuple(best["capacities"]["capacities"]), tuple(best["chunks"]["chunks"]))
    programs = programs_of(table, figures["longest_request_positions"], None)
    assert len(programs) == 1 + len(table.chunks) + (len(table.chunks) > 1) + 2 * len(table.capacities)
    for one in (figures["recommended"], *best.values()):
        assert (one["programs"], one["compile_seconds"]) == (len(programs), 30 * len(programs))
    assert figures["compile_seconds_source"] == "given"
    lengths = np.loadtxt(trace, int, delimiter=",", skiprows=1, usecols=(1, 2))
    assert figures["requests"] == len(lengths)
    assert figures["prompt_tokens"]["max"] == lengths[:, 0].max()
    assert figures["longest_request_positions"] == lengths.sum(1).max() <= table.capacities[-1]
    assert best["capacities"]["needed_positions"] == lengths.sum()
    assert best["chunks"]["needed_positions"] == (lengths[:, 0] - 1).sum(), "the last token of a prompt is not prefilled"
    held = sum(table.shape(1, n).capacity for n in lengths.sum(1).tolist())
    assert best["capacities"]["computed_positions"] == held
    plans = [list(table.prefill_plan(n)) for n in (lengths[:, 0] - 1).tolist()]
    assert best["chunks"]["computed_positions"] == sum(chunk for plan in plans for _, chunk in plan)
    assert best["chunks"]["runs"] == sum(map(len, plans))


def test_requests_beyond_the_context_are_told_of(run: Run, trace: str):
    ran = run("shapes", "suggest", "--trace", trace, *SMALL, "--context", 50, "--json", "-")
    assert ran.status == 0, ran.err
    lengths = np.loadtxt(trace, int, delimiter=",", skiprows=1, usecols=(1, 2)).sum(1)
    beyond = int((lengths > 50).sum())
    assert ran.json["requests_beyond_context"] == beyond > 0
    assert ran.json["longest_request_positions"] == lengths[lengths <= 50].max()
    assert f"{beyond} requests are longer than the context of 50 positions" in ran.err
    assert "have no shape in the recommended table" not in ran.err
    assert ran.json["compile_seconds_source"] is None
    assert ran.json["recommended"]["compile_seconds"] is None
    assert "compile times: unknown without --compile-seconds or --model" in ran.err


def test_compared_with_a_table_that_is_there(run: Run, trace: str):
    Path("shapes.json").write_text('{"batches": [1], "capacities": [32], "chunks": [8], "widths": [2]}')
    ran = run("shapes", "suggest", "--trace", trace, *SMALL, "--shapes", "shapes.json", "--json", "-")
    present = ran.json["present"]
    lengths = np.loadtxt(trace, int, delimiter=",", skiprows=1, usecols=(1, 2)).sum(1)
    fits = lengths[lengths <= 32]
    assert (present["table"], present["capacities"], present["programs"]) == ("shapes.json", [32], 3)
    assert present["requests_without_shape"] == len(lengths) - len(fits)
    share = 1 - fits.sum() / (32 * len(fits))
    assert present["capacity_figures"]["padding_share"] == pytest.approx(share)
    assert f"shapes.json: {share:.1%} of cache positions" in ran.err
    assert f"no shape for {len(lengths) - len(fits)} requests" in ran.err


def test_one_program_of_each_kind_is_compiled(run: Run, trace: str, pair: list[object]):
    ran = run("shapes", "suggest", "--trace", trace, *SMALL, *pair, "--batches", 1, "--json", "-")
    assert ran.status == 0, ran.err
    each = ran.json["compile_seconds_per_program"]
    assert set(each) == {"allocate", "prefill", "rounds"}
    assert ran.json["compile_seconds_source"] == "measured"
    assert ran.json["context_positions"] == 128
    best = ran.json["recommended"]
    rounds = best["programs"] - 1 - len(best["chunks"])
    assert rounds > len(best["capacities"]), "the drafter's widths, and plain decoding"
    seconds = each["allocate"] + len(best["chunks"]) * each["prefill"] + rounds * each["rounds"]
    assert best["compile_seconds"] == pytest.approx(seconds)
    refused = run("shapes", "suggest", "--trace", trace, *SMALL, *pair, "--context", 129)
    assert refused.status == 2
    assert "expected a context of at most 128, which the model has, found 129" in refused.err


def test_no_file_is_replaced_unasked(run: Run, trace: str):
    Path("shapes.json").write_text("mine")
    refused = run("shapes", "suggest", "--trace", trace, *SMALL, "--out", "shapes.json")
    assert refused.status == 2
    assert "--out shapes.json: it exists; --force replaces it" in refused.err
    assert Path("shapes.json").read_text() == "mine"
    assert run("shapes", "suggest", "--trace", trace, *SMALL, "--out", "shapes.json", "--force").status == 0
    assert read_table(Path("shapes.json")).chunks


def test_that_more_could_be_looked_at_is_said(run: Run, trace: str):
    said = "more than 2 capacities were not looked at"
    asked = ["shapes", "suggest", "--trace", trace, "--longest-chunk", 16, "--max-buckets", 2]
    assert said in run(*asked, "--least-saving", 0).out
    assert said not in run(*asked, "--least-saving", 0.9).out


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--trace", "absent.csv"], "absent.csv cannot be read: No such file or directory"),
        ([], "--trace"),
        (["--max-buckets", "0"], "expected max_buckets of at least 1, found 0"),
        (["--chunk-overhead", "-1"], "expected chunk_overhead of at least 0, found -1"),
        (["--context", "0"], "expected context of at least 1, found 0"),
        (["--context", "1"], "expected requests of at most 1 positions, the context; the shortest has"),
        (["--least-saving", "1"], "expected least_saving from 0 to below 1, found 1"),
        (["--least-saving", "nan"], "expected least_saving from 0 to below 1, found nan"),
        (["--compile-seconds", "0"], "expected compile_seconds above 0, found 0"),
        (["--compile-seconds", "inf"], "expected compile_seconds above 0, found inf"),
        (["--longest-chunk", "48"], "expected a longest chunk that is 16 doubled any number of times, found 48"),
        (["--batches", "4", "1"], "batches must be increasing positive numbers, found (4, 1)"),
        (["--drafter", "ngram"], "--drafter needs --model"),
        (["--shapes", "absent.json"], "absent.json cannot be read: No such file or directory"),
        (["--out", "absent/shapes.json"], "--out absent/shapes.json: its folder does not exist"),
        (["--out", "."], "--out .: expected a file, found a folder"),
        (["--json", "absent/figures.json"], "--json absent/figures.json: its folder does not exist"),
    ],
)
def test_bad_input(run: Run, trace: str, tmp_path: Path, arguments: list[str], problem: str):
    given = [] if not arguments or "--trace" in arguments else ["--trace", trace]
    ran = run("shapes", "suggest", *given, *arguments)
    assert ran.status == 2
    assert problem in ran.err
    assert ran.err.startswith("tilewright: ")
    assert ran.err.count("\n") == 1
    assert ran.out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["trace.csv"]
