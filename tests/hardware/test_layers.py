"""Cost model of strategies: its parts by hand, and its choices against the compiled layers."""

import json
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.hardware.layers import ESTIMATES, LEAST_GAIN, LayerShapes, MatmulShape, StrategyCosts, choose, sharded_layer
from tilewright.hardware.links import Fabric, ring_of, torus_of
from tilewright.hardware.tpu import CHIPS

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
NAMES = ("2026-11-23-overlap", "2026-11-24-domino", "2026-11-24-hiding", "2026-11-24-hops")
COMPILED = [RESULTS / f"{name}.json" for name in NAMES]
"""Results; later files replace figures of earlier ones."""


def costs(chip: str, sizes: tuple[int, ...], hop_us: float = 1.0) -> StrategyCosts:
    """Devices in a ring of neighbours."""
    places = tuple(ring_of(product(*map(range, sizes))))
    return StrategyCosts(Fabric(CHIPS[chip], torus_of(CHIPS[chip], sizes), places, hop_us))


def llama(devices: int) -> LayerShapes:
    return sharded_layer(4096, 32, 8, head_dim=128, mlp=14336, devices=devices)


def test_a_device_has_its_share_of_a_layer():
    assert llama(8).sublayers == (
        (MatmulShape(4096, 6 * 128), MatmulShape(4 * 128, 4096)),
        (MatmulShape(4096, 2 * 1792), MatmulShape(1792, 4096)),
    )
    assert llama(16).sublayers[0][0] == MatmulShape(4096, 4 * 128), "two devices hold the same key/value head"


def test_a_product_takes_the_longer_of_operations_and_bytes():
    model = costs("v5e", (4, 2))
    assert model.product_s(8192, MatmulShape(4096, 4096)) == pytest.approx(2 * 8192 * 4096**2 / 197e12)
    assert model.product_s(1, MatmulShape(4096, 4096)) == pytest.approx(2 * (4096**2 + 8192) / 819e9)


def test_sync_exposes_its_collectives():
    model = costs("v5e", (4, 2))
    rows = 4096
    sent = 2 * 7 / 8 * rows * 4096 * 2 / 2 / 50e9 + 8e-6  # half in each direction, eight hops of a microsecond
    assert ESTIMATES["sync"](model, rows, llama(8)).exposed_s == pytest.approx(2 * sent)
    assert model.hop_s(rows, llama(8)) == pytest.approx(rows / 8 * 4096 * 2 / 50e9 + 1e-6)


@given(st.sampled_from(sorted(CHIPS)), st.sampled_from([(2, 1), (2, 2), (4, 2), (4, 4)]), st.integers(1, 64))
def test_estimates_are_sound(chip: str, sizes: tuple[int, int], rows: int):
    """No strategy computes faster than the peak, and the chosen strategy is estimated to beat `sync`."""
    model = costs(chip, (*sizes, 1)[: CHIPS[chip].ici_axes])
    rows = 32 * rows
    layer = llama(model.devices)
    least = (
        sum(2.0 * rows * p.inputs * p.columns for half in layer.sublayers for p in half) / 1e12 / CHIPS[chip].bf16_tflop_per_s
    )
    found = choose(model, rows, layer, micro_batches=True)
    assert set(found.estimates) == set(ESTIMATES)
    assert all(each.compute_s >= least and each.exposed_s >= 0 for each in found.estimates.values())
    best = found.estimates[found.name]
    plain = found.estimates["sync"]
    assert found.name == "sync" or best.total_s < (1 - LEAST_GAIN) * plain.total_s
    assert f"{found.name} for {rows:,} rows on {model.devices} {chip}" in found.why


def test_rows_that_cannot_be_divided_are_summed():
    assert set(choose(costs("v5e", (4, 2)), 12, llama(8), micro_batches=True).estimates) == {"sync"}
    assert "domino" not in choose(costs("v5e", (4, 2)), 4096, llama(8), micro_batches=False).estimates


def test_what_is_chosen_is_not_slower_than_sums_where_it_was_compiled():
    """Checks each chip and phase in the committed results."""
    compiled: dict[tuple[str, ...], dict[str, float]] = {}
    for one in (one for file in COMPILED for one in json.loads(file.read_text())["data"]):
        rows = one["batch_rows"] * (one["positions"] if one["phase"] == "prefill" else 1)
        key = (one["chip"], one["phase"], str(rows))
        compiled.setdefault(key, {})[one["schedule"]] = one["total_ms"]
    assert len(compiled) >= 10
    for (chip, phase, rows), totals in compiled.items():
        kind, _, sizes = chip.partition(":")
        model = costs(kind, tuple(map(int, sizes.split("x"))))
        found = choose(model, int(rows), llama(model.devices), micro_batches=True)
        assert totals[found.name] <= totals["sync"], (chip, phase, found.why)
