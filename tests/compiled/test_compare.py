"""Comparison of two functions: checks, counts and errors. No test depends on measured times."""

import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import tilewright as tw
from tilewright.compiled import compare as compare_module
from tilewright.compiled.compare import compare_all, differences, steps
from tilewright.metrics.metric import significant

NODES = 64
SLOTS = 6
FEATURES = 32
MESSAGES = NODES * SLOTS * FEATURES * 4
SHAPES = (
    jax.ShapeDtypeStruct((NODES, FEATURES), jnp.float32),
    jax.ShapeDtypeStruct((NODES, SLOTS), jnp.int32),
)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_module, "COPY_BYTES", 2**16)
    monkeypatch.setattr(compare_module, "RUN_S", 0.001)


@pytest.fixture
def inputs() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.standard_normal((NODES, FEATURES), np.float32), rng.integers(0, NODES, (NODES, SLOTS)).astype(np.int32)


def gathered(x: Array, places: Array) -> Array:
    return x[places].sum(axis=1)


def unrolled(x: Array, places: Array) -> Array:
    total = jnp.zeros_like(x)
    for slot in range(SLOTS):
        total = total + x[places[:, slot]]
    return total


def test_the_same_results_and_fewer_bytes(inputs: tuple[np.ndarray, np.ndarray]):
    found = tw.compare(gathered, unrolled, *inputs, repetitions=2)
    baseline, fused = found.programs
    assert [baseline.name, fused.name] == ["baseline", "fused"]
    assert found.agrees
    assert fused.largest_difference is not None
    assert fused.largest_difference < 1e-5
    assert (baseline.round_trips, baseline.round_trip_bytes) == (1, MESSAGES)
    assert (fused.round_trips, fused.round_trip_bytes) == (0, 0)
    assert baseline.written_bytes == MESSAGES + NODES * FEATURES * 4
    assert fused.written_bytes == NODES * FEATURES * 4
    assert baseline.peak_bytes - fused.peak_bytes >= MESSAGES - NODES * FEATURES * 4
    assert baseline.measured
    assert (baseline.speedup, baseline.estimated_cycles) == (1, None)


def test_the_record_is_json_and_the_table_shows_it(inputs: tuple[np.ndarray, np.ndarray]):
    found = tw.compare(gathered, unrolled, *inputs, names=("plain", "by slot"), repetitions=1, tolerance=1e-3)
    record = json.loads(json.dumps(found.record(), allow_nan=False))
    assert (record["tolerance"], record["repetitions"], record["agrees"]) == (1e-3, 1, True)
    plain, by_slot = record["programs"]
    assert plain["round_trip_bytes"] == MESSAGES
    assert plain["median_ms"] > 0
    share = (by_slot["read_bytes"] + by_slot["written_bytes"]) / 1e9 / record["bandwidth_gb_per_s"] / by_slot["median_ms"] * 1e3
    assert by_slot["share_of_bandwidth"] == pytest.approx(share)
    assert by_slot["speedup"] == pytest.approx(plain["median_ms"] / by_slot["median_ms"])
    text = str(found)
    assert significant(plain["median_ms"], 4) in text
    assert "by slot" in text
    assert "tolerance 0.001 times the largest element" in text


def test_a_difference_is_shown_and_not_hidden(inputs: tuple[np.ndarray, np.ndarray]):
    found = tw.compare(gathered, lambda x, places: unrolled(x, places) + 0.5, *inputs, repetitions=1)
    assert found.agrees is False
    assert found.programs[1].largest_difference == pytest.approx(0.5, abs=1e-5)
    assert "fused DIFFERS from baseline by 0.5" in str(found)


@pytest.mark.parametrize(
    ("a", "b", "difference", "agrees"),
    [
        ([1.0, np.nan], [1.0, np.nan], 0.0, True),
        ([1.0, 2.0], [1.0, np.nan], np.inf, False),
        ([1.0, np.inf], [1.0, np.inf], 0.0, True),
        ([1.0, np.inf], [1.0, -np.inf], np.inf, False),
        ([1000.0, 1.0], [1000.0, 1.2], 0.2, True),
        ([0.0, 0.0], [0.0, 1e-9], 1e-9, False),
        ([], [], 0.0, True),
    ],
)
def test_what_counts_as_different(a: list[float], b: list[float], difference: float, agrees: bool):
    largest, same = differences(np.asarray(a, np.float32), np.asarray(b, np.float32), None)
    assert largest == pytest.approx(difference, rel=1e-3)
    assert same is agrees


def test_integers_have_to_be_equal_and_the_coarser_dtype_decides():
    one, two, three = (np.array([value], np.int32) for value in (1, 2, 3))
    assert differences(two, three, 0.5) == (1.0, False)
    assert differences(np.ones(1, np.float32), jnp.asarray([1.0625], jnp.bfloat16), None) == (0.0625, True)
    assert differences({"a": one, "b": two}, {"a": one, "b": three}, 1.0) == (1.0, False)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda x, places: x[:3], r"baseline returns float32\[64, 32\], fused float32\[3, 32\]"),
        (lambda x, places: (x, places), r"baseline returns float32\[64, 32\], fused \('float32\[64, 32\]', 'int32\[64, 6\]'\)"),
    ],
)
def test_other_shapes_are_refused_with_both(inputs: tuple[np.ndarray, np.ndarray], other: Callable[..., Any], message: str):
    with pytest.raises(ValueError, match=message):
        tw.compare(gathered, other, *inputs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repetitions": 0}, "repetitions of at least 1, found 0"),
        ({"tolerance": -1.0}, "tolerance of at least 0, found -1"),
        ({"names": ("a", "a")}, r"two different names, found \('a', 'a'\)"),
        ({"chip": "v9:1x1"}, "expected a TPU as .*found 'v9:1x1'"),
    ],
)
def test_a_mistake_is_refused(inputs: tuple[np.ndarray, np.ndarray], options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        tw.compare(gathered, unrolled, *inputs, **options)


def test_shapes_alone_need_a_chip():
    with pytest.raises(ValueError, match="found shapes alone"):
        tw.compare(gathered, unrolled, *SHAPES)


def test_a_function_that_donates_can_be_called_again_and_again(inputs: tuple[np.ndarray, np.ndarray]):
    donating = jax.jit(unrolled, donate_argnums=0)
    assert tw.compare(gathered, donating, *map(jnp.asarray, inputs), repetitions=2).agrees


def test_any_number_of_functions_and_every_step_announced(inputs: tuple[np.ndarray, np.ndarray]):
    done: list[int] = []
    functions = {"a": gathered, "b": unrolled, "c": gathered}
    found = compare_all(functions, inputs, repetitions=2, on_run=lambda: done.append(1))
    assert [one.name for one in found.programs] == ["a", "b", "c"]
    assert len(done) == steps(3, 2, 0)


@pytest.mark.tpu
def test_estimates_for_an_absent_chip():
    found = tw.compare(gathered, unrolled, *SHAPES, chip="v5e:1x1")
    assert found.agrees is None
    assert [(one.place, one.measured, one.median_ms) for one in found.programs] == [("v5e:1x1", False, None)] * 2
    assert all(one.written_bytes >= NODES * FEATURES * 4 for one in found.programs)
    baseline = found.programs[0]
    moved = baseline.read_bytes + baseline.written_bytes
    assert baseline.memory_cycles == round(moved / 819e9 * 1e9 * 197e3 / (2 * 4 * 128 * 128))
    assert baseline.without_estimate > 0
    assert "kilo-" in str(found)
    assert json.dumps(found.record(), allow_nan=False)
