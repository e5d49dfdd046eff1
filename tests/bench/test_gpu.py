"""`benchmarks/gpu.py`: its time budget, kinds of operations, and a small measurement on this machine."""

import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gpu
import pytest

from bench.test_smollm2_drafter import records  # noqa: F401 (a fixture)
from cli.conftest import folders  # noqa: F401 (a fixture)
from tilewright.compiled.hlo import read_module
from tilewright.models.decoder import declare
from tilewright.models.params import count

HLO = """HloModule jit_run_rounds, is_scheduled=true

%product (a: f32[4,4]) -> f32[4,4] {
  %a = f32[4,4]{1,0} parameter(0)
  ROOT %dot.1 = f32[4,4]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%sum (b: f32[4,4]) -> f32[4,4] {
  %b = f32[4,4]{1,0} parameter(0)
  ROOT %add.1 = f32[4,4]{1,0} add(%b, %b)
}

ENTRY %main (x: f32[4,4]) -> f32[4,4] {
  %x = f32[4,4]{1,0} parameter(0)
  %gemm_fusion = f32[4,4]{1,0} fusion(%x), kind=kCustom, calls=%product
  %loop_add_fusion = f32[4,4]{1,0} fusion(%gemm_fusion), kind=kLoop, calls=%sum
  %cublas = f32[4,4]{1,0} custom-call(%loop_add_fusion), custom_call_target="__cublas$gemm"
  %sort = f32[4,4]{1,0} custom-call(%cublas), custom_call_target="__cub$DeviceRadixSort"
  %pallas = f32[4,4]{1,0} custom-call(%sort), custom_call_target="__gpu$xla.gpu.triton"
  ROOT %ffi_call = f32[4,4]{1,0} custom-call(%pallas), custom_call_target="tilewright_linear"
}
"""


def test_operations_are_products_kernels_or_other():
    module = read_module(HLO)
    kinds = {op.name: gpu.kind_of(module, op) for op in module.computations["main"].ops}
    expected = {"x": "other", "gemm_fusion": "matmul", "loop_add_fusion": "other", "cublas": "matmul", "sort": "other"}
    assert kinds == {**expected, "pallas": "kernel", "ffi_call": "kernel"}


def test_parts_are_skipped_interrupted_or_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Results are written after each part, whose time is the estimate of the next one."""
    monkeypatch.setattr(gpu, "BEGAN", time.perf_counter())
    file = tmp_path / "gpu.json"
    measurement = gpu.Measurement(quick=True, minutes=41 / 60, json_file=str(file))

    def fail() -> None:
        raise ValueError("expected memory, found none")

    def written() -> Any:
        return json.loads(file.read_text())

    measurement.run("SmolLM2", "first", fail)
    assert "expected memory, found none" in written()["failed"]["first"]
    measurement.run("SmolLM2", "second", lambda: time.sleep(0.02))
    assert 0.02 <= measurement.expected["SmolLM2"] < 10
    measurement.end = time.perf_counter() + 0.2
    measurement.run("training", "training", fail)
    assert "40 s expected, 0 s left" in written()["skipped"]["training"]
    measurement.run("SmolLM2", "third", lambda: time.sleep(30))
    assert written()["skipped"]["third"] == "interrupted at the end of the budget"
    assert list(written()["failed"]) == ["first"]


@pytest.mark.slow
def test_a_random_model_is_measured_in_every_decoding(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    measurement = gpu.Measurement(quick=True, minutes=9, json_file=str(tmp_path / "gpu.json"))
    sizes = measurement.sizes = replace(gpu.QUICK, batches=(2,), rounds=3)
    measurement.end = time.perf_counter() + 500
    measurement.record["bandwidth_gb_per_s"] = 10.0
    gpu.measure_model(measurement, sizes.shape, "bfloat16", partial(gpu.random_model, sizes, "auto"), lambda *_: None)
    record = json.loads((tmp_path / "gpu.json").read_text())
    assert (record["failed"], record["skipped"]) == ({}, {})
    rows = {row["name"]: row for row in record["data"]}
    assert list(rows) == ["plain", "ngram", "dflash2"]
    target, _ = sizes.configs()
    for name, row in rows.items():
        assert (row["tau"], row["tokens_per_s"] is None) == ((1, False) if name == "plain" else (None, True))
        assert row["matmul_share"] + row["other_share"] + row["kernel_share"] == pytest.approx(1)
        assert min(row["round_ms"], row["dispatch_ms"], row["device_ms"]) > 0
        assert row["of_limit"] == pytest.approx(row["limit_ms"] / row["round_ms"])
        assert row["limit_ms"] == pytest.approx(row["round_bytes"] / 1e7)
    assert rows["plain"]["round_bytes"] > 2 * count(declare(target))
    assert rows["dflash2"]["round_bytes"] > rows["ngram"]["round_bytes"] >= rows["plain"]["round_bytes"]
    measurement.show()
    assert "10 GB/s" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "steps"), [(500, 9), (0, 2)])
def test_training_takes_as_many_steps_as_fit(
    seconds: float,
    steps: int,
    records: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
):
    """A probe of two steps, then all steps of the recipe if there is time."""
    monkeypatch.setattr(gpu.smollm2_drafter, "RECORDS", records)
    monkeypatch.setenv("TILEWRIGHT_COMPILE_CACHE", "0")
    measurement = gpu.Measurement(quick=True, minutes=9, json_file=None)
    measurement.sizes = replace(gpu.QUICK, recipe={}, probe_steps=2)
    measurement.end = time.perf_counter() + seconds
    gpu.training_part(measurement)
    assert measurement.record["training"]["steps"] == steps
    assert list(measurement.record["skipped"]) == ([] if seconds else ["more training"])


def test_a_cpu_needs_the_small_sizes():
    with pytest.raises(ValueError, match="expected a GPU or --quick, found a CPU"):
        gpu.main()
    with pytest.raises(ValueError, match="expected --minutes above 0, found 0"):
        gpu.main(minutes=0, quick=True)
