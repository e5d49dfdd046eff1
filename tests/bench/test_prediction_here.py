"""Predictions set against what ran here, from the recorded measurements: nothing is timed."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tilewright.perfmodel.calibration import calibrate_tpu, read_measurements

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "2026-11-26-prediction-here.json"
spec = importlib.util.spec_from_file_location("prediction_here", ROOT / "benchmarks" / "prediction_here.py")
assert spec is not None
assert spec.loader is not None
prediction_here: Any = importlib.util.module_from_spec(spec)
sys.modules["prediction_here"] = prediction_here
spec.loader.exec_module(prediction_here)


def test_ranges_cover_the_layers_that_ran_here():
    """Constants are fitted anew to single collectives; layers at sizes that these had not are within their ranges."""
    recorded = json.loads(RESULT.read_text(encoding="utf-8"))
    fit = calibrate_tpu(read_measurements(RESULT), prediction_here.START)
    found = prediction_here.compared(fit, recorded["layers"])
    assert len(found["layers"]) == 9
    assert {one["rows"] * 2 * prediction_here.CONFIG.hidden_size for one in found["layers"]}.isdisjoint(
        {one["size_bytes"] for one in recorded["measured"]}
    )
    assert found["coverage"] == pytest.approx(recorded["coverage"], abs=0.25)
    assert found["coverage"] > 0.6, "of ranges from the 10th to the 90th percentile, four in five are to be expected"
    assert found["error"] < 1, "a factor of two, geometric mean"
    widths = [high / low for low, high in (one["predicted_range_ms"] for one in found["layers"])]
    assert max(widths) < 10, "ranges say something"


def test_without_the_devices_nothing_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["prediction_here.py", "--json", str(tmp_path / "found.json")])
    with pytest.raises(SystemExit, match="expected 2 devices, with XLA_FLAGS as above; found 8"):
        prediction_here.main()
