"""Calibration: constants that are found again, with their uncertainty, and files that are refused."""

import json
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perfmodel.models import LLAMA_8B, inferentia
from tilewright.hardware.neuron import instance_of
from tilewright.hardware.tpu import CHIPS
from tilewright.perfmodel.calibration import (
    MEMORY,
    PERMUTE,
    PRODUCT,
    Calibration,
    Measurement,
    MeasurementFile,
    calibrate,
    calibrate_tpu,
    read_measurements,
    tpu_times,
)
from tilewright.perfmodel.calibration_neuron import PUBLISHED, calibrate_neuron
from tilewright.perfmodel.estimate import estimate
from tilewright.perfmodel.inference import Work, inference_program
from tilewright.perfmodel.machine import HOP_US, machine_constants, with_machine_constants
from tilewright.perfmodel.plan_inference import InferencePlan, compare, sweeps, winner
from tilewright.perfmodel.uncertainty import sweep_constants

V5E = CHIPS["v5e"]
TRUE = {"start_us": 3.0, "hop_us": 2.0, "ici_gb_per_s": 40.0, "bf16_tflop_per_s": 150.0, "hbm_gb_per_s": 700.0}
TABLE = """nccom-test -r {ranks} --minbytes 1kb --maxbytes 1gb allr
       size(B)    count(elems)    type    time(us)    algbw(GB/s)    busbw(GB/s)
{rows}
    Avg bus bandwidth:      23.6671GB/s
"""


def drawn(noise: float, seed: int) -> MeasurementFile:
    """What a v5e with other constants than the published ones would measure, each time off by a factor."""
    cases = [
        Measurement(kind, 8, size, 1.0)
        for kind in ("all-reduce", "all-gather", "reduce-scatter", PERMUTE)
        for size in (2**16, 2**18, 2**20, 2**22, 2**24)
    ]
    cases += [
        Measurement(PRODUCT, 8, 2.0 * 4096 * (4096 + 2 * rows), 1.0, 2.0 * rows * 4096**2) for rows in (512, 1024, 2048, 4096)
    ]
    cases += [Measurement(MEMORY, 8, size, 1.0) for size in (2**20, 2**22, 2**24, 2**26)]
    rng = np.random.default_rng(seed)
    times = np.array(tpu_times(V5E)(TRUE, cases)) * np.exp(noise * rng.standard_normal(len(cases)))
    return MeasurementFile("drawn", "micro", tuple(one._replace(us=float(us)) for one, us in zip(cases, times, strict=True)))


def test_constants_are_found_again():
    found = calibrate_tpu(drawn(0.0, 0), V5E)
    assert {name: float(value) for name, value in found.constants.items()} == pytest.approx(TRUE, rel=1e-3)
    assert found.error == pytest.approx(0, abs=1e-3)


def test_ranges_hold_the_true_constants_and_widen_with_noise():
    """Two standard errors hold it 19 times in 20; with noise of 2 % they are narrower than with one of 10 %."""
    within = []
    widths = {}
    for noise in (0.02, 0.1):
        fits = [calibrate_tpu(drawn(noise, seed), V5E) for seed in range(5)]
        within += [one.constants[name].low < TRUE[name] < one.constants[name].high for one in fits for name in TRUE]
        widths[noise] = np.median([one.constants["hop_us"].high / one.constants["hop_us"].low for one in fits])
    assert sum(within) > 0.8 * len(within)
    assert 1 < widths[0.02] < widths[0.1]


def test_ranges_of_predictions_cover_what_was_not_fitted():
    """Most times of the true machine at sizes that no fit has seen are between the ends of what is predicted."""
    fit = calibrate_tpu(drawn(0.1, 1), V5E)
    sizes = {
        f"{kind} {size}": Measurement(kind, 8, size, 1.0) for kind in ("all-reduce", "all-gather") for size in (1e5, 3e6, 5e7)
    }

    def predict(changes: Any) -> dict[str, float]:
        return dict(zip(sizes, tpu_times(V5E)({**fit.constants, **changes}, list(sizes.values())), strict=True))

    ranges = sweep_constants(predict, {**fit.constants, "model_error": fit.model_error})
    true = dict(zip(sizes, tpu_times(V5E)(TRUE, list(sizes.values())), strict=True))
    held = [ranges.range(name)[0] < true[name] < ranges.range(name)[1] for name in sizes]
    assert sum(held) >= 5
    assert all(ranges.range(name)[1] < 2 * ranges.range(name)[0] for name in sizes)


def test_what_no_time_depends_on_stays():
    rows = [Measurement("all-reduce", 2, size, 10 + size / 1e4) for size in (1e4, 2e4, 4e4, 8e4, 1.6e5, 3.2e5, 6.4e5, 1.28e6)]

    def times(changes: Any, measured: Any) -> list[float]:
        return [changes["delay"] + one.whole_bytes / changes["rate"] for one in measured]

    found = calibrate("made up", rows, times, {"delay": 1.0, "rate": 1e3, "unused": 3.0})
    assert found.unconstrained == ("unused",)
    assert found.constants == {"delay": pytest.approx(10, rel=1e-3), "rate": pytest.approx(1e4, rel=1e-3)}
    with pytest.raises(ValueError, match="do not depend on them"):
        calibrate("made up", rows, lambda changes, measured: [1.0] * len(measured), {"delay": 1.0})
    with pytest.raises(ValueError, match="at least 4 points"):
        calibrate("made up", rows[:3], times, {"delay": 1.0})
    with pytest.raises(ValueError, match="more fitted points than the 3 constants, found 2"):
        calibrate("made up", rows[:4], times, {"delay": 1.0, "rate": 1e3, "unused": 3.0})


@cache
def published() -> Calibration:
    return calibrate_neuron()


def test_the_published_curve_predicts_its_held_out_half_and_is_an_end_of_the_ranges():
    fit = published()
    assert [one.whole_bytes for one, _ in fit.held_out] == [one.whole_bytes for one in PUBLISHED.measurements[1::2]]
    assert fit.error < 0.05
    rate = inferentia(2).instance.chip.core.dma_gb_per_s
    assert HOP_US.high == pytest.approx(fit.constants["hop_us"], rel=0.05)
    assert machine_constants(inferentia(2))["dma_gb_per_s"].low == pytest.approx(fit.constants["dma_gb_per_s"], rel=0.05)
    assert rate == 17, "what is used is what AWS's pages say"


def test_fitted_constants_move_every_headline_of_a_plan():
    """Times get longer, as the fitted machine is slower throughout; a plan with a fit says what it was calibrated against."""
    instance = instance_of("inf2.48xlarge")
    small = replace(LLAMA_8B, hidden_size=1024, intermediate_size=4096, num_layers=2, num_heads=16, vocab_size=4096)
    shape = ((4,), (2,), (128,), 16, ("sync",))
    plans = [InferencePlan("small", small, instance, *shape, calibration=fit) for fit in (None, published())]
    as_said, fitted = (compare(plan) for plan in plans)
    for one, other in zip(as_said, fitted, strict=True):
        assert other["ttft_ms"] > 1.2 * one["ttft_ms"]
        assert other["tpot_ms"] > 1.2 * one["tpot_ms"]
        assert other["tokens_per_s"] < one["tokens_per_s"]
    ranges = [sweeps(plan, records, winner(records), draws=4) for plan, records in zip(plans, (as_said, fitted), strict=True)]
    widths = [one["tpot_ms"].range("sync")[1] / one["tpot_ms"].range("sync")[0] for one in ranges]
    assert widths[1] < widths[0], "a fit leaves less open than pages and a fit do together"
    assert ranges[0]["tpot_ms"].basis.residual is None
    assert "AWS's published curve" in ranges[1]["tpot_ms"].basis.calibrated_against
    assert ranges[1]["tpot_ms"].basis.residual == published().error


def test_a_decoding_step_takes_many_times_as_long_by_the_fitted_curve_as_by_the_pages():
    """Of Llama 3 8B on 24 cores: some 8 ms, and some 95. That is why plans have the wide ranges that they have."""
    took = []
    for machine in (inferentia(24), with_machine_constants(inferentia(24), published().constants)):
        build = partial(inference_program, LLAMA_8B, machine, Work("decode", 8, 1280), "sync")
        took.append(estimate(32, (1, 3), build, machine).total_s)
    assert took[1] > 5 * took[0]


def nccom(ranks: int = 2) -> str:
    rows = "\n".join(f"{one.whole_bytes}  {one.whole_bytes // 4}  fp32  {one.us}  0.02  0.02" for one in PUBLISHED.measurements)
    return TABLE.format(ranks=ranks, rows=rows)


def micro_record(**changes: object) -> dict[str, object]:
    record = {
        "collective": "all-reduce",
        "program": "beside",
        "size_bytes": 65536,
        "collectives": 1,
        "collective_us": 20.0,
        "product_us": 100.0,
        "product_flops": 1e9,
        "product_bytes": 1e6,
        "memory_us": 5.0,
        "memory_bytes": 2e5,
    }
    return {**record, **changes}


def test_files_of_both_testers_are_read(tmp_path: Path):
    table = tmp_path / "nccom.txt"
    figures = tmp_path / "micro.json"
    table.write_text(nccom())
    assert read_measurements(table).measurements == PUBLISHED.measurements
    records = [
        micro_record(size_bytes=size, collective=kind) for kind in ("all-reduce", "all-gather") for size in (2**16, 2**20)
    ]
    figures.write_text(
        json.dumps({"devices": 8, "measured_on": "8 x TPU v5 lite", "measured": [*records, micro_record(collectives=2)]})
    )
    found = read_measurements(figures)
    kinds = [one.kind for one in found.measurements]
    assert (kinds.count(PRODUCT), kinds.count(MEMORY), len(kinds)) == (5, 5, 14), "two collectives at once are left out"
    gathers = [one.whole_bytes for one in found.measurements if one.kind == "all-gather"]
    assert gathers == [8 * 2**16, 8 * 2**20]
    assert found.name == "micro.json, 8 devices, 8 x TPU v5 lite"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("no table", "expected JSON of `bench overlap --micro` or a table of nccom-test, found neither"),
        ("{", "is not JSON"),
        ("[[1, 2]]", "with `devices` and `measured` records; found something else"),
        ('{"devices": 8, "measured": []}', "with `devices` and `measured` records; found something else"),
        ('{"devices": 8, "measured": [{"collective": "all-reduce"}]}', "expected a measured record of `bench overlap --micro`"),
        (json.dumps({"devices": 8, "measured": [micro_record()]}), "expected at least 4 measured collectives, found 1"),
        (json.dumps({"devices": 8, "measured": [micro_record(collective_us=0)]}), "expected bytes and microseconds above 0"),
        (json.dumps({"devices": 8, "measured": [micro_record(collective="gather")]}), "found 'gather'"),
        (nccom().partition("\n")[2], "expected the command line, nccom-test -r N allr, above its table"),
        (nccom().replace("-r 2", ""), "expected nccom-test -r N with one of allr"),
        (nccom().replace("allr", "bcast"), "expected nccom-test -r N with one of allr"),
        (nccom().replace("fp32  58  ", "fp32  failed  "), "expected a row of size(B)"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, problem: str):
    path = tmp_path / "measured"
    path.write_text(text)
    with pytest.raises(ValueError, match="measured") as caught:
        read_measurements(path)
    assert problem in str(caught.value)


def test_a_file_is_for_the_chip_that_its_tester_runs_on(tmp_path: Path):
    path = tmp_path / "nccom.txt"
    path.write_text(nccom())
    with pytest.raises(ValueError, match="JSON of `bench overlap --micro` for a TPU, found nccom"):
        calibrate_tpu(read_measurements(path), V5E)
    with pytest.raises(ValueError, match="the output of nccom-test for a Neuron chip, found drawn"):
        calibrate_neuron(drawn(0.0, 0))
    path.write_text(nccom(ranks=99))
    with pytest.raises(ValueError, match="at most the 24 cores"):
        calibrate_neuron(read_measurements(path))
