"""Operations counted by hand, and the share of a peak that they make up."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import tilewright.train.flops
import tilewright.train.loop
from tilewright.models.delta import DeltaSizes
from tilewright.train.flops import token_flops
from tilewright.train.loop import TrainingPace, train
from tilewright.train.text import text_metrics
from train.support import HYBRID, TARGET, silent
from train.test_loop import regression


@pytest.mark.parametrize("tied", [True, False])
def test_operations_are_those_of_each_product(tied: bool):
    """The tiny target: width 32, 4 query heads and 2 key/value heads of 8, 48 wide inside, 24 tokens, 2 layers, length 10."""
    products = [(32, 4 * 8), (32, 2 * 8), (32, 2 * 8), (4 * 8, 32), (32, 48), (32, 48), (48, 32)]
    layer = sum(2 * inputs * outputs for inputs, outputs in products)
    scores = 4 * (2 * 8 * 10) + 4 * (2 * 10 * 8)  # a query against ten keys, and its sum of ten values
    head = 2 * 32 * 24
    scales = 2 * (2 * (2 * 32 + 2 * 8) + 32)  # of norms: a product for each channel, counted like the others
    config = replace(TARGET, tie_word_embeddings=tied)
    assert token_flops(config, 10) == 3 * (2 * (layer + scores) + head + scales)


def test_operations_of_a_layer_of_linear_attention():
    """Width 32, 2 heads of keys of 6 with 2 of values of 5 each, 3 taps; the layer behind it has gated attention."""
    config = replace(HYBRID, mixture=None, dense_layers=(), delta=DeltaSizes(2, 4, 6, 5, 3))
    mlp = 3 * 2 * 32 * 32
    inputs = [
        (32, 2 * 6 + 2 * 6 + 4 * 5),
        (32, 4 * 5),
        (32, 4),
        (32, 4),
    ]  # the convolution's, gates, what is written, what stays
    linear = sum(2 * rows * columns for rows, columns in [*inputs, (4 * 5, 32)])
    convolution = 2 * 3 * 44
    states = 4 * 3 * (2 * 6 * 5)  # of each head of values: read by the key, corrected, read by the query
    of_heads = 2 * (4 + 4 + 5)  # a bias and a rate of each head, and a norm that all share
    products = [(32, 4 * 8), (32, 4 * 8), (32, 2 * 8), (32, 2 * 8), (4 * 8, 32)]  # a gate is as wide as the queries
    attention = sum(2 * rows * columns for rows, columns in products) + 4 * (2 * 8 * 10) + 4 * (2 * 10 * 8) + 2 * (8 + 8)
    layers = linear + convolution + states + of_heads + attention + 2 * (mlp + 2 * (2 * 32))
    assert token_flops(config, 10) == 3 * (layers + 2 * 32 * 24 + 2 * 32)
    assert token_flops(config, 30) - token_flops(config, 10) == 3 * (2 * 2 * 32 * 20), "states grow with no length"


def test_a_longer_sequence_needs_more_attention_alone():
    assert token_flops(TARGET, 30) - token_flops(TARGET, 10) == 3 * 2 * (2 * 2 * 32 * 20)


class Clock:
    """Seconds that a test sets."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(tilewright.train.loop, "time", made)
    return made


def test_utilisation_begins_behind_the_first_step(clock: Clock, monkeypatch: pytest.MonkeyPatch):
    """Which takes 100 s to compile; then 4 steps of 3e12 operations in 8 s, on two devices of 5 TFLOP/s each."""
    monkeypatch.setattr(tilewright.train.loop, "peak_flop_per_s", lambda devices: devices * 5e12)
    pace = TrainingPace(replace(regression(), flops=3e12, devices=2), 7)
    assert pace.utilisation() is None
    clock.now = 100.0
    pace.note(8)
    assert pace.utilisation() is None
    for step in range(9, 13):
        clock.now += 2
        pace.note(step)
    assert pace.utilisation() == pytest.approx(4 * 3e12 / 8 / 1e13)
    assert pace.rate() == pytest.approx(5 * 8 / 108)
    assert pace.shown() == "0.4 rows/s  15.0% of peak"


def test_nothing_is_said_of_a_peak_that_is_not_known(monkeypatch: pytest.MonkeyPatch):
    """As of this CPU, or of operations that nobody counted."""
    task = replace(regression(steps=4), flops=1e6)
    assert tilewright.train.flops.peak_flop_per_s(1) is None
    result = train(task, silent())
    assert result.utilisation is None
    assert "model_flops_utilization" not in text_metrics(result)
    monkeypatch.setattr(tilewright.train.loop, "peak_flop_per_s", lambda devices: 1e15)
    known: Any = train(task, silent()).utilisation
    assert 0 < known < 1e-3
    assert train(replace(task, flops=0.0), silent()).utilisation is None
    assert text_metrics(replace(result, utilisation=np.float64(0.5)))["model_flops_utilization"] == 0.5
