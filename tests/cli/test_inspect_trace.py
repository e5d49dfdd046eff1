"""`tilewright inspect trace`: what it prints and writes of a made-up trace, and what it refuses."""

import json
from pathlib import Path

import pytest

from cli.conftest import Run
from perfmodel.test_calibration import TRUE, drawn
from perfmodel.test_traced import HIDING, runs
from perfmodel.traces import write_trace

pytestmark = pytest.mark.filterwarnings("ignore:builtin type .* has no __module__ attribute")


@pytest.fixture
def given(tmp_path: Path) -> list[object]:
    """A trace and the program's text."""
    ops = ("s", 0, 2), ("c", 2, 300), ("d", 310, 900)
    text = tmp_path / "program.txt"
    text.write_text(HIDING)
    return ["inspect", "trace", write_trace(tmp_path, runs(HIDING, (100, 5000), 1220, *ops)), text]


def test_a_trace_beside_its_prediction(run: Run, given: list[object], tmp_path: Path):
    ran = run(*given, "--chip", "v5e:2x2", "--hop-us", 0, "--draws", 4, "--top", 2, "--json", tmp_path / "trace.json")
    assert ran.status == 0, ran.err
    assert "m(7): predicted for v5e:2x2; measured on 1 x TPU v5 lite, 2 runs of 1,220 to 1,220 us" in ran.out
    assert "The longest 2 of 3 operations" in ran.out
    (exposed,) = (line.split() for line in ran.out.splitlines() if line.split()[:1] == ["exposed"])
    assert exposed == ["exposed", "750", "900", "1.20", "73.8%"]
    assert "3 of 3 operations of the trace are in the program, with 100.0% of the measured time." in ran.out
    assert "run 1,000 (1,000 to" in ran.out
    assert "The measured run, 1,220 us, is inside the range." in ran.out
    written = json.loads((tmp_path / "trace.json").read_text())
    assert [op["name"] for op in written["data"]["operations"]] == ["d", "c", "s"]
    assert written["ranges"]["predictions"]["run"]["value"] == pytest.approx(1000, rel=1e-4)


def test_fitted_constants_keep_the_compiler_s_clock(
    run: Run, given: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The latency that was fitted is stated; the rate of products that was makes no estimated operation longer."""
    monkeypatch.setattr("tilewright.cli.calibrate.read_measurements", lambda _: drawn(0.0, 0))
    ran = run(*given, "--chip", "v5e:2x2", "--calibrate", tmp_path / "micro.json", "--draws", 2, "--json", "-")
    assert ran.status == 0, ran.err
    assert ran.json["hop_us"] == pytest.approx(TRUE["hop_us"], rel=1e-3)
    (compute,) = [op["predicted_us"] for op in ran.json["data"]["operations"] if op["name"] == "c"]
    assert compute == pytest.approx(250, rel=1e-4)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--chip", "v6e:2x2"), "expected a trace of v6e, found one of v5e (TPU v5 lite)"),
        (("--chip", "v5e:4"), "expected a topology as v5e:AxB, found 'v5e:4'"),
        (("--chip", "v5e:2x2", "--program", "m(8)"), "expected the program m(8) in the trace, found m(7)"),
        (("--chip", "v5e:2x2", "--top", "0"), "expected --top from 1, found 0"),
        (("--chip", "v5e:2x2", "--draws", "1"), "expected --draws from 2, found 1"),
    ],
)
def test_what_does_not_fit_is_refused(run: Run, given: list[object], options: tuple[str, ...], problem: str):
    ran = run(*given, *options)
    assert (ran.status, ran.out) == (2, "")
    assert problem in ran.err
