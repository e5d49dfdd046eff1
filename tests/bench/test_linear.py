"""The benchmark of linear layers: sizes, alternation, what a program computes, the figures and the script's output."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bandwidth
import jax
import jax.numpy as jnp
import linear_layers as linear
import numpy as np
import pytest
from bandwidth import DotProducts, MemoryBuffers
from hypothesis import given
from hypothesis import strategies as st
from linear_layers import (
    CALLS,
    LinearOptions,
    Side,
    chain,
    copied,
    figures,
    jax_side,
    measure,
    ready,
    report,
    rotation,
    steps,
    summary,
)

from models.sizes import decoder_config
from tilewright.kernels import native
from tilewright.kernels.linear import xla
from tilewright.kernels.linear.cases import CASES, LAYERS, LinearCase, named
from tilewright.models.decoder import DecoderConfig, config_from_hf, declare
from tilewright.models.hub import PACKAGED

needs_native = pytest.mark.skipif(native.kernels().isa is None, reason=native.kernels().reason or "no kernels")
SMALL = LinearCase("demo", "q", 32, 16)


def fake_side(name: str, weight_bytes: int) -> Side:
    return Side(name, weight_bytes, 1, lambda rows: lambda programs: None)


def qwen3(hidden: int, inner: int, layers: int, heads: int) -> DecoderConfig:
    return decoder_config(
        "qwen3",
        151936,
        hidden,
        inner,
        layers,
        heads,
        8,
        128,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        tie_word_embeddings=True,
        max_position_embeddings=40960,
        eos_token_ids=(151645,),
    )


CONFIGS = {
    "demo": config_from_hf(json.loads((PACKAGED["demo"] / "config.json").read_text())),
    "qwen3-0.6b": qwen3(1024, 3072, 28, 16),
    "qwen3-1.7b": qwen3(2048, 6144, 28, 16),
    "qwen3-4b": qwen3(2560, 9728, 36, 32),
}


@pytest.mark.parametrize("model", CASES)
def test_cases_have_the_sizes_that_the_models_declare(model: str):
    declared = declare(CONFIGS[model])
    first = declared.layers[0]
    gate, up = first.gate_up.parts
    given = {**dict(zip("qkv", first.qkv.parts, strict=True)), "o": first.o, "gate": gate, "up": up, "down": first.down}
    for layer, spec in given.items():
        case = CASES[model]["gate_up" if layer in ("gate", "up") else layer]
        assert spec.shape == (case.inputs, case.outputs), layer
    head = CASES[model]["head"]
    assert declared.embed.shape == (head.outputs, head.inputs)
    assert all((case.model, case.layer) == (model, layer) for layer, case in CASES[model].items())
    assert CASES[model]["gate_up"].parameters == 2 * CASES[model]["down"].parameters


def test_cases_are_found_by_name():
    found = named(("qwen3-4b", "demo"), ("head", "q", "head"))
    assert [(case.model, case.layer) for case in found] == [
        ("qwen3-4b", "head"),
        ("qwen3-4b", "q"),
        ("demo", "head"),
        ("demo", "q"),
    ]
    with pytest.raises(ValueError, match=r"expected each model to be one of demo, .*, found 'gpt2'"):
        named(("demo", "gpt2"), LAYERS)
    with pytest.raises(ValueError, match=r"expected each layer to be one of q, k, .*, found none"):
        named(("demo",), ())


@given(st.integers(1, 10**9), st.floats(0.001, 1000))
def test_a_rotation_is_as_large_as_asked_and_hardly_larger(weight_bytes: int, megabytes: float):
    groups, calls = rotation(weight_bytes, megabytes)
    assert 1 <= calls <= CALLS
    assert groups * calls * weight_bytes >= megabytes * 1e6 * (1 - 1e-9)
    assert (groups * calls - groups) * weight_bytes <= megabytes * 1e6 or groups * calls == 1


def test_copies_lie_apart():
    w = jnp.ones((32, 16))
    group = copied(w.nbytes, 3 * w.nbytes / 1e6, lambda: jnp.copy(w))
    places = {copy.unsafe_buffer_pointer() for copy in group[0]}
    assert len(group) == 1
    assert len(places) == 3


@pytest.mark.parametrize("spoiled", range(4))
def test_every_weight_of_a_program_feeds_the_next_input(spoiled: int):
    """0 times NaN is NaN: if one result were dropped, the NaN of its weight would not arrive."""
    group = [jnp.ones((4, 3)) for _ in range(4)]
    x = jnp.arange(8.0).reshape(2, 4)
    np.testing.assert_array_equal(chain(xla.linear, x, group), x)
    group[spoiled] = jnp.full((4, 3), jnp.nan)
    assert np.isnan(chain(xla.linear, x, group)[0, 0])


@needs_native
@pytest.mark.parametrize("dtype, layer", [("float32", "q"), ("bfloat16", "gate_up"), ("q8_0", "gate_up"), ("q6_k", "gate_up")])
def test_a_program_has_a_kernel_call_for_each_weight(dtype: Any, layer: str, monkeypatch: pytest.MonkeyPatch):
    given = {}

    def jax_side(name: str, case: LinearCase, weights: Any, apply: Any, x_dtype: Any, weights_mb: float) -> Side:
        given.update(weights=weights, apply=apply, x_dtype=x_dtype)
        return fake_side(name, 1)

    monkeypatch.setattr(linear, "jax_side", jax_side)
    matrices = [np.ones((32, 16), np.float32)] * (2 if layer == "gate_up" else 1)
    assert linear.cpu_side(dtype, LinearCase("demo", layer, 32, 16), matrices, 1.0).name == f"cpu_{dtype}"
    x = jnp.ones((2, 32), given["x_dtype"])
    program = jax.jit(lambda x, group: chain(given["apply"], x, group)).lower(x, [given["weights"]] * 5).compile()
    text = program.as_text()
    assert text is not None
    assert text.count('custom_call_target="tilewright_linear"') == 5


def test_programs_go_round_the_copies(monkeypatch: pytest.MonkeyPatch):
    groups = [[jnp.full((32, 16), value)] for value in (1.0, 2.0, 3.0)]
    monkeypatch.setattr(linear, "copied", lambda *_: groups)
    seen: list[float] = []

    def apply(x: jax.Array, w: jax.Array) -> jax.Array:
        jax.debug.callback(lambda value: seen.append(float(value)), w[0, 0])
        return x @ w

    side = jax_side("xla_float32", SMALL, groups[0][0], apply, "float32", 1.0)
    assert (side.name, side.weight_bytes, side.calls) == ("xla_float32", 2048, 1)
    side.start(3)(4)
    jax.effects_barrier()
    assert seen == [1, 2, 3, 1]


@pytest.mark.parametrize("program_s, runs", [(0.01, [1, 1, 5]), (0.08, [1, 1])])
def test_a_run_has_as_many_programs_as_fit_its_time(program_s: float, runs: list[int], monkeypatch: pytest.MonkeyPatch):
    """A program to warm up, another to see how long it takes unless the first was long, then the run that counts."""
    now = [0.0]
    seen = []

    def run(programs: int) -> None:
        seen.append(programs)
        now[0] += programs * program_s

    monkeypatch.setattr(linear, "time", SimpleNamespace(perf_counter=lambda: now[0], sleep=lambda _: None))
    timed = ready(Side("fake", 1, 4, lambda rows: run), 1)
    assert timed() == pytest.approx(program_s / 4)
    assert seen == runs


def test_figures_of_a_record():
    sides = [fake_side("cpu_bfloat16", 10**6), fake_side("xla_float32", 2 * 10**6), fake_side("torch_bfloat16", 10**6)]
    times = {
        ("copy", 0): [40.0],
        ("read", 0): [50.0],
        ("dot", 0): [200.0],
        ("cpu_bfloat16", 1): [5e-5],
        ("cpu_bfloat16", 4): [1e-4, 3e-4, 5e-5],
        ("xla_float32", 4): [3e-4],
        ("torch_bfloat16", 4): [5e-5, 4e-5, 6e-5],
    }
    case = LinearCase("demo", "gate_up", 500, 1000)
    record = figures(case, sides, times, "bfloat16", 4)
    assert record == {
        "model": "demo",
        "layer": "gate_up",
        "inputs": 500,
        "outputs": 1000,
        "gated": True,
        "dtype": "bfloat16",
        "rows": 4,
        "side": "cpu_bfloat16",
        "median_ms": pytest.approx(0.1),
        "range_ms": pytest.approx((0.05, 0.3)),
        "over_one_row": pytest.approx(2),
        "weight_mb": 1.0,
        "weights_gb_per_s": pytest.approx(10),
        "copy_gb_per_s": 40.0,
        "share_of_copy_bandwidth": pytest.approx(0.25),
        "read_gb_per_s": 50.0,
        "share_of_read_bandwidth": pytest.approx(0.2),
        "gflop_per_s": pytest.approx(80),
        "dot_gflop_per_s": 200.0,
        "share_of_dot_products": None,
        "xla_float32_ms": pytest.approx(0.3),
        "torch_bfloat16_ms": pytest.approx(0.05),
        "ratio_to_xla_float32": pytest.approx(3),
        "ratio_to_torch_bfloat16": pytest.approx(0.5),
    }
    in_blocks = figures(case, [fake_side("cpu_q4_1", 10**6)], {**times, ("cpu_q4_1", 4): [1e-4]}, "q4_1", 4)
    assert in_blocks["share_of_dot_products"] == pytest.approx(0.4)
    del times["cpu_bfloat16", 1]
    assert figures(case, sides, times, "bfloat16", 4)["over_one_row"] is None


def record(layer: str, rows: int, over: float | None, share: float, torch: float | None = None) -> dict[str, Any]:
    ratio = {} if torch is None else {"ratio_to_torch_bfloat16": torch}
    return {"layer": layer, "rows": rows, "over_one_row": over, "share_of_copy_bandwidth": share, **ratio}


def test_a_summary_names_the_worst_layer():
    records = [
        record("q", 1, 1.0, 0.9, torch=1.5),
        record("q", 16, 1.2, 0.1, torch=1.1),
        record("q", 512, 9.0, 0.1, torch=0.9),
        record("head", 1, 1.0, 0.6, torch=1.2),
        record("head", 16, 1.1, 0.1, torch=1.4),
        record("head", 512, 9.0, 0.1, torch=0.7),
    ]
    summaries = {one["name"]: one for one in summary(records)}
    assert summaries["rows_16_over_rows_1"] == {
        "name": "rows_16_over_rows_1",
        "bound": 1.25,
        "at_most": True,
        "met": True,
        "worst": 1.2,
        "worst_layer": "q",
        "median": pytest.approx(1.15),
        "layers": {"q": 1.2, "head": 1.1},
    }
    share = summaries["share_of_copy_bandwidth_at_1_row"]
    assert (share["met"], share["worst"], share["worst_layer"]) == (False, 0.6, "head")
    few = summaries["ratio_to_torch_bfloat16_at_1_to_16_rows"]
    assert (few["met"], few["worst"], few["layers"]) == (True, 1.1, {"q": 1.1, "head": 1.2})
    many = summaries["ratio_to_torch_bfloat16_at_512_rows"]
    assert (many["met"], many["worst"], many["worst_layer"]) == (False, 0.7, "head")


def test_a_summary_goes_by_the_better_of_several_ways_of_running_torch():
    (_, torch) = summary([{**record("q", 1, 1.0, 0.9, torch=30.0), "ratio_to_torch_bfloat16_1thread": 0.9}])
    assert (torch["worst"], torch["met"]) == (0.9, False)


def test_a_summary_is_silent_about_what_was_not_measured():
    assert [one["name"] for one in summary([record("q", 1, 1.0, 0.9)])] == ["share_of_copy_bandwidth_at_1_row"]
    assert summary([record("q", 16, None, 0.9), record("q", 512, None, 0.9)]) == []


@pytest.mark.parametrize("kernels", [pytest.param(True, marks=needs_native), False])
def test_a_layer_is_measured_on_every_side(kernels: bool, monkeypatch: pytest.MonkeyPatch):
    if not kernels:
        monkeypatch.setattr(native, "kernels", lambda: native.Native(None, "said so"))
    monkeypatch.setattr(linear, "RUN_S", 0.001)
    loaded: list[float] = []

    def peer(case: LinearCase, matrices: Sequence[np.ndarray], weights_mb: float) -> Side:
        assert [w.shape for w in matrices] == [(32, 16)] * 2
        loaded.append(weights_mb)
        return fake_side("other", 1)

    done: list[int] = []
    case = LinearCase("demo", "gate_up", 32, 16)
    dots = DotProducts(1) if DotProducts.possible() else None
    records = measure(case, [1, 3], ["bfloat16"], MemoryBuffers(8000), dots, 0.01, 2, [peer], lambda: done.append(1))
    assert [record["rows"] for record in records] == [1, 3]
    assert {record["side"] for record in records} == {"cpu_bfloat16" if kernels else "xla_bfloat16"}
    assert loaded == [0.01]
    assert len(done) == steps(2, 1, 2, 1)
    for one in records:
        for other in ("xla_float32", "xla_bfloat16", "other"):
            assert one[f"ratio_to_{other}"] == pytest.approx(one[f"{other}_ms"] / one["median_ms"])
        if not kernels:
            assert one["ratio_to_xla_bfloat16"] == 1


def test_the_script_prints_a_table_and_writes_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(bandwidth, "BUFFER_BYTES", 2**16)
    monkeypatch.setattr(bandwidth, "DOT_PIECES", 1)
    monkeypatch.setattr(linear, "RUN_S", 0.001)
    monkeypatch.setenv("TILEWRIGHT_COMPILE_CACHE", "0")
    options = LinearOptions(model=("demo",), layers=("k", "q"), rows=(1, 16), weights_mb=0.1, repetitions=1)
    path = tmp_path / "figures.json"
    report(options, str(path))
    written = json.loads(path.read_text())
    assert written["isa"] == native.kernels().isa
    assert [(one["layer"], one["rows"]) for one in written["data"]] == [("k", 1), ("k", 16), ("q", 1), ("q", 16)]
    assert all(one["weight_mb"] == 2 * 128 * 64 / 1e6 for one in written["data"] if one["layer"] == "k")
    (verdict,) = written["summary"]
    assert [one["name"] for one in verdict["criteria"]] == ["rows_16_over_rows_1", "share_of_copy_bandwidth_at_1_row"]
    printed = capsys.readouterr().out
    for one in written["data"]:
        assert f"{one['ratio_to_xla_float32']:.2f}" in printed


def test_without_kernels_only_xla_dtypes_are_measured(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(native, "kernels", lambda: native.Native(None, "no compiler"))
    with pytest.raises(ValueError, match="q8_0 needs the CPU kernels, which cannot run here: no compiler"):
        LinearOptions(dtype=("q8_0",)).cases()
    with pytest.raises(ValueError, match="expected weights_mb above 0, found 0"):
        LinearOptions(weights_mb=0).cases()
