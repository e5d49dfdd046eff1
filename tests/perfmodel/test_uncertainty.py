"""Sweeps: that draws fill their ranges, and what is said of predictions."""

from collections.abc import Mapping
from math import log

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.hardware.ranged import Ranged, ranged
from tilewright.hardware.tpu import CHIPS
from tilewright.perfmodel.uncertainty import MODEL_ERROR, Basis, latin_hypercube, rank_correlation, sweep_constants

RATE = Ranged(10.0, 5.0, 20.0)
DELAY = Ranged(1.0, 4.0)


def two_ways(changes: Mapping[str, float]) -> dict[str, float]:
    """One way goes by the rate alone, and one by the delay alone."""
    return {"by rate": 30 / changes.get("rate", RATE), "by delay": 2 * changes.get("delay", DELAY)}


@given(st.integers(2, 40), st.integers(0, 5), st.integers(0, 2**32 - 1))
def test_each_part_of_each_range_has_one_draw(draws: int, dimensions: int, seed: int):
    points = latin_hypercube(draws, dimensions, seed)
    assert points.shape == (draws, dimensions)
    np.testing.assert_array_equal(np.sort(np.floor(draws * points), axis=0), np.arange(draws)[:, None].repeat(dimensions, 1))


def test_a_sweep_says_how_far_what_is_first_and_what_decides():
    found = sweep_constants(two_ways, {"rate": RATE, "delay": DELAY}, draws=200, basis=Basis("a curve", 0.04, 0.25))
    assert found.predicted == {"by rate": 3, "by delay": 2}
    # Even in the logarithm: the tenth and ninetieth percentile of 5 to 20 are 5.74 and 17.4.
    low, high = found.range("by rate")
    assert (low, high) == (pytest.approx(30 / 17.4, rel=0.02), pytest.approx(30 / 5.74, rel=0.02))
    assert found.range("by delay")[0] == 2, "the figure itself is in its range"
    assert found.decides("by rate") == ("rate", pytest.approx(-1))
    assert found.decides("by delay") == ("delay", pytest.approx(1))
    # 2 delay < 30 / rate, by logarithms: half of the square but for what both share.
    assert found.first["by delay"] + found.first["by rate"] == 200
    assert 60 < found.first["by delay"] < 140
    text = " ".join(found.text)
    assert f"by delay first in {found.first['by delay']} of 200" in text
    assert "calibrated against a curve; error on held-out times 4.0%; up to 25% of the compute time" in text
    record = found.record()
    assert record["constants"]["rate"] == [5, 10, 20]
    assert record["predictions"]["by rate"]["range"] == [low, high]


def test_the_same_seed_draws_the_same_and_another_one_others():
    one, same, other = (sweep_constants(two_ways, {"rate": RATE}, draws=9, seed=seed) for seed in (3, 3, 4))
    np.testing.assert_array_equal(one.drawn, same.drawn)
    assert not np.array_equal(one.drawn, other.drawn)


def test_without_ranges_a_prediction_is_its_range():
    found = sweep_constants(two_ways, {}, draws=5)
    assert found.range("by rate") == (3, 3)
    assert (found.decides("by rate"), found.first) == (None, {"by delay": 5, "by rate": 0})
    with pytest.raises(ValueError, match="at least 2 draws, found 1"):
        sweep_constants(two_ways, {}, draws=1)


def test_the_error_of_a_fit_widens_all_predictions_alike():
    found = sweep_constants(two_ways, {MODEL_ERROR: Ranged(1.0, 0.5, 2.0)}, draws=100)
    assert found.decides("by rate") == (MODEL_ERROR, pytest.approx(1))
    ratios = found.outcomes["by rate"] / found.outcomes["by delay"]
    np.testing.assert_allclose(ratios, 1.5)
    assert found.range("by delay")[1] == pytest.approx(2 * 2**0.8, rel=0.02)


@given(st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=20, unique=True))
def test_correlation_is_of_ranks(values: list[float]):
    one = np.array(values)
    assert rank_correlation(one, np.argsort(np.argsort(one)) ** 3.0) == pytest.approx(1)
    assert rank_correlation(one, -one) == pytest.approx(-1)
    assert rank_correlation(one, np.ones(len(one))) == 0


def test_a_ranged_constant_is_a_number_with_ends():
    assert (RATE + 1, RATE.low, RATE.high, repr(RATE)) == (11, 5, 20, "10 (5 to 20)")
    assert set(ranged(CHIPS["v5e"])) == {"hbm_gb_per_s", "ici_gb_per_s"}
    assert log(Ranged(2.0).high) == log(2)
    for wrong in (0.0, -1.0, float("inf")):
        with pytest.raises(ValueError, match="expected a constant and its range above 0 and finite"):
            Ranged(1.0, wrong)
