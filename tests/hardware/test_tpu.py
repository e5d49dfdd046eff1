"""Chips and their roofline."""

from dataclasses import replace

import pytest

from tilewright.hardware.tpu import CHIPS, chip_of


@pytest.mark.parametrize(("kind", "ghz"), [("v5e", 1.5), ("v5p", 1.75), ("v6e", 1.75)])
def test_the_implied_clock_is_a_plausible_one(kind: str, ghz: float):
    assert CHIPS[kind].clock_ghz == pytest.approx(ghz, rel=0.01)
    fitted = replace(CHIPS[kind], bf16_tflop_per_s=100.0)
    assert fitted.clock_ghz == CHIPS[kind].clock_ghz, "a fitted peak keeps the clock"


def test_a_roofline_is_the_slower_of_memory_and_compute():
    chip = chip_of("v5e:2x2")
    assert chip.roofline_seconds(819e9, 0) == pytest.approx(1)
    assert chip.roofline_seconds(819e9, 2 * 197e12) == pytest.approx(2)
    assert chip.roofline_cycles(0, 2 * 4 * 128 * 128 * 10) == pytest.approx(10)


def test_loading_weights_takes_each_core_as_long_as_its_matrix_units_have_rows():
    assert {kind: chip.loading_rows for kind, chip in CHIPS.items()} == {"v5e": 128, "v5p": 256, "v6e": 256}


def test_operations_while_a_byte_passes_are_the_ratio_of_the_peaks():
    assert CHIPS["v5e"].operations_per_memory_byte == pytest.approx(197e12 / 819e9)
    assert CHIPS["v5e"].operations_per_link_byte == pytest.approx(197e12 / (1e9 * CHIPS["v5e"].ici_gb_per_s))


def test_an_unknown_chip_is_refused():
    with pytest.raises(ValueError, match="expected a TPU of v5e, v5p, v6e, found 'v9:2x2'"):
        chip_of("v9:2x2")
