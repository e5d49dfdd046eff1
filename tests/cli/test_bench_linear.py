"""`tilewright bench linear` on the demo's smallest layers, and what it refuses."""

import json
from pathlib import Path

import pytest

from cli.conftest import Run
from tilewright.bench import bandwidth, linear
from tilewright.kernels import native
from tilewright.metrics.metric import significant

SMALL = ["--model", "demo", "--layers", "k", "q", "--rows", 1, 16, "--repetitions", 1, "--weights-mb", 0.1]


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "BUFFER_BYTES", 2**16)
    monkeypatch.setattr(bandwidth, "DOT_PIECES", 1)
    monkeypatch.setattr(linear, "RUN_S", 0.001)


def test_table_and_json(run: Run, tmp_path: Path):
    path = tmp_path / "figures.json"
    dtypes = ["float32", "bfloat16"] if native.kernels().isa is None else ["float32", "bfloat16", "q8_0"]
    ran = run("bench", "linear", *SMALL, "--dtype", *dtypes, "--json", path)
    assert ran.status == 0, ran.err
    written = json.loads(path.read_text())
    assert written["isa"] == native.kernels().isa
    assert written["kernels"] == (f"cpu {written['isa']}" if written["isa"] else "xla")
    assert (written["dtype"], written["weights_mb"], written["repetitions"]) == (dtypes, 0.1, 1)
    assert written["chip"]
    expected = [(layer, dtype, rows) for layer in ("k", "q") for dtype in dtypes for rows in (1, 16)]
    assert [(one["layer"], one["dtype"], one["rows"]) for one in written["data"]] == expected
    sizes = {"float32": 4 * 128 * 64, "bfloat16": 2 * 128 * 64, "q8_0": 128 * 64 // 32 * 34}
    assert all(one["weight_mb"] == sizes[one["dtype"]] / 1e6 for one in written["data"] if one["layer"] == "k")
    for one in written["data"]:
        shown = [str(one["rows"]), significant(one["median_ms"], 4), f"{one['ratio_to_xla_float32']:.2f}"]
        assert any(set(shown) <= set(line.split()) for line in ran.out.splitlines()), shown
    for told in written["summary"]:
        names = [criterion["name"] for criterion in told["criteria"]]
        assert names == ["rows_16_over_rows_1", "share_of_copy_bandwidth_at_1_row"]
        over = told["criteria"][0]
        for layer, value in over["layers"].items():
            (sixteen,) = [
                one["over_one_row"]
                for one in written["data"]
                if (one["layer"], one["dtype"], one["rows"]) == (layer, told["dtype"], 16)
            ]
            assert value == sixteen
        assert f"worst {over['worst']:.2f} ({over['worst_layer']})" in ran.out


def test_the_table_fits_100_columns(run: Run):
    ran = run("bench", "linear", *SMALL[:2], "--layers", "head", "--rows", 1, "--repetitions", 1)
    table = ran.out.splitlines()
    assert any("128→4096" in line for line in table)
    assert max(len(line.rstrip()) for line in table if "→" in line or "─" in line or "bf16" in line) <= 100


def test_figures_on_standard_output_leave_the_table_to_standard_error(run: Run):
    ran = run("bench", "linear", *SMALL, "--json", "-")
    assert len(ran.json["data"]) == 4
    assert "CPU kernels" in ran.err or "XLA" in ran.err


def test_without_kernels_it_says_why_and_measures_xla(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(native, "kernels", lambda: native.Native(None, "there is no C++ compiler"))
    ran = run("bench", "linear", *SMALL, "--json", "-")
    assert ran.status == 0
    assert "without CPU kernels (there is no C++ compiler)" in ran.err
    assert (ran.json["isa"], ran.json["kernels"], ran.json["kernels_reason"]) == (None, "xla", "there is no C++ compiler")
    assert {one["side"] for one in ran.json["data"]} == {"xla_bfloat16"}
    assert all(one["ratio_to_xla_bfloat16"] == 1 for one in ran.json["data"])
    refused = run("bench", "linear", *SMALL, "--dtype", "q8_0")
    assert refused.status == 2
    assert "q8_0 needs the CPU kernels, which cannot be used here: there is no C++ compiler" in refused.err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--model", "gpt2"], "expected each model to be one of demo, qwen3-0.6b, qwen3-1.7b, qwen3-4b, found 'gpt2'"),
        (["--layers", "q", "gate"], "expected each layer to be one of q, k, v, o, gate_up, down, head, found 'gate'"),
        (["--rows", "4", "0"], "expected rows of at least 1, found 4, 0"),
        (["--rows", "many"], "many"),
        (["--dtype", "float16"], "float16"),
        (["--dtype", "int8"], "int8"),
        (["--repetitions", "0"], "expected repetitions of at least 1, found 0"),
        (["--weights-mb", "0"], "expected weights_mb above 0, found 0"),
        (["--weights-mb", "nan"], "expected weights_mb above 0, found nan"),
        (["--json", "absent/figures.json"], "--json absent/figures.json: its folder does not exist"),
    ],
)
def test_bad_input(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], problem: str):
    monkeypatch.chdir(tmp_path)
    json_file = [] if "--json" in arguments else ["--json", "figures.json"]
    ran = run("bench", "linear", *arguments, *json_file)
    assert ran.status == 2
    assert problem in ran.err
    assert ran.err.startswith("tilewright: ")
    assert ran.err.count("\n") == 1
    assert ran.out == ""
    assert not list(tmp_path.iterdir())
