"""The parts of a round: programs, figures, the script's output, and the estimates for absent chips."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import bandwidth
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import round_compiled
import round_parts as rounds
from round_compiled import over_layers, whole
from round_parts import RoundOptions, RoundSetup, load, main, programs, with_ratios

from tilewright.models import decoder, dflash, params
from tilewright.models.experts import Mixture
from tilewright.models.published_configs import DFLASH_B16, MODELS
from tilewright.perfmodel.compiler_estimate import CompilerEstimate
from tilewright.runtime.memory import step_bytes

QWEN3_4B = MODELS["qwen3-4b"]
TARGET = replace(
    QWEN3_4B, vocab_size=96, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16
)
DRAFTER = replace(
    DFLASH_B16,
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    mask_token_id=95,
    target_layer_ids=(0, 1),
    num_target_layers=2,
)
SETUP = RoundSetup(TARGET, DRAFTER, 4, 100, "float32")


pytestmark = pytest.mark.usefixtures("quick_compiles")


def test_the_built_in_pair_fits_and_has_the_published_sizes():
    dflash.check_fits(DFLASH_B16, QWEN3_4B)
    assert round(params.count(decoder.declare(QWEN3_4B)) / 1e9, 2) == 4.02
    assert round(params.count(dflash.declare(DFLASH_B16)) / 1e6) == 537


@pytest.mark.parametrize(("context", "block", "capacity"), [(100, 28, 128), (100, 29, 256), (1, 2, 128), (1024, 128, 1152)])
def test_a_cache_holds_context_and_block(context: int, block: int, capacity: int):
    assert replace(SETUP, context=context, block_size=block).capacity == capacity


def test_the_parts_are_those_of_the_round():
    """Draft, verify and the two heads by themselves, in this order, are what the round's own code does."""
    models = load(SETUP)
    state = SETUP.state()
    parts = programs(SETUP)
    assert tuple(parts) == (*rounds.PARTS, "step")
    run = {name: jax.jit(program.run) for name, program in parts.items()}
    state, block = run["draft"](models, state)
    assert block.shape == (1, 4)
    state, (tokens, taps) = run["verify"](models, state, block)
    assert (tokens.shape, len(taps)) == ((1, 4), 2)
    state, _ = run["extend"](models, state, taps)
    cached = np.asarray(state.draft_cache[0].k)
    assert np.abs(cached[:, :, 100]).min() > 0
    assert not cached[:, :, 101:].any()
    after, info = run["round"](models, SETUP.state())
    assert int(info.committed[0]) >= 1
    assert int(after.last_position[0]) == 100  # every run does the same
    hidden = jax.random.normal(jax.random.key(1), (1, 4, 32))
    for name in ("draft_head", "verify_head"):
        _, best = run[name](models, state, hidden)
        np.testing.assert_array_equal(best, jnp.argmax(hidden @ models.target.embed.T, axis=-1))
    _, (best, _) = run["draft_top_k"](models, state, hidden)
    np.testing.assert_array_equal(best, jax.lax.top_k(hidden @ models.target.embed.T, SETUP.top_k)[1])


def test_every_input_is_the_size_of_the_block():
    for name, program in programs(SETUP).items():
        rows = {leaf.shape[1] for leaf in jax.tree.leaves(program.inputs)}
        expected = {"draft_head": {3}, "draft_top_k": {3}, "verify": {4}, "verify_head": {4}, "extend": {4}}
        assert rows == expected.get(name, set())


def test_a_step_reads_a_tied_embedding_and_not_another():
    models = load(SETUP)
    tied = step_bytes(models.target)
    assert tied == 4 * params.count(decoder.declare(TARGET))
    untied = load(replace(SETUP, target=replace(TARGET, tie_word_embeddings=False)))
    assert step_bytes(untied.target) == tied  # the head has the embedding's size


def test_a_block_reads_more_experts_than_a_step(monkeypatch: pytest.MonkeyPatch):
    """By the slots of each block, whose tokens differ; of one with an MLP both read the same."""
    monkeypatch.setattr(rounds, "timer", lambda *_: lambda: 1.0)
    monkeypatch.setattr(rounds, "memory_rate", lambda: lambda: 1.0)
    sparse = replace(TARGET, family="qwen3_moe", mixture=Mixture(8, 2, 16))
    for target, block in ((TARGET, 4), (sparse, 4), (sparse, 8)):
        setup = replace(SETUP, target=target, block_size=block)
        models = load(setup)
        (record,) = rounds.measure(models, [setup], 3)
        assert record["verify_weight_gb"] == step_bytes(models.target, block) / 1e9
        assert (record["verify_weight_gb"] > record["weight_gb"]) == (target is sparse)
    assert rounds.concrete(jax.ShapeDtypeStruct((1, 5), jnp.int32)).tolist() == [[0, 1, 2, 3, 4]]


def test_measured_records(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rounds, "RUN_S", 1e-4)
    monkeypatch.setattr(rounds, "memory_rate", lambda: iter((1.0, 2.0, 9.0)).__next__)
    setups = [SETUP, replace(SETUP, block_size=16)]
    models = load(SETUP)
    ticks: list[None] = []
    records = rounds.measure(models, setups, 3, lambda: ticks.append(None))
    assert len(ticks) == rounds.runs(2, 3)
    assert [one["block_size"] for one in records] == [4, 16]
    for one in records:
        assert one["base_block_size"] == 16
        for least, most, median in ((*one[f"{part}_range_ms"], one[f"{part}_ms"]) for part in (*rounds.PARTS, "step")):
            assert 0 < least <= median <= most
        assert one["bandwidth_gb_per_s"] == 2.0, "the median of what was read in the same turns"
        assert one["verify_ms_ratio"] == one["verify_ms"] / records[1]["verify_ms"]
        share = step_bytes(models.target) / 1e9 / (one["step_ms"] / 1e3) / 2.0
        assert one["step_share_of_bandwidth"] == pytest.approx(share)


def test_ratios_are_to_block_16_or_else_the_smallest():
    records = [{"block_size": size, "a": float(size)} for size in (32, 16, 8)]
    assert [one["a_ratio"] for one in with_ratios(records, ["a"])] == [2, 1, 0.5]
    without = with_ratios([records[0], records[2]], ["a"])
    assert [(one["a_ratio"], one["base_block_size"]) for one in without] == [(4, 8), (1, 8)]


def estimate_of(value: float) -> CompilerEstimate:
    return CompilerEstimate(value, 0, 2 * value, 3 * value, value, 10 * value)


def test_layers_beyond_the_compiled_ones_are_extrapolated():
    compiled: list[int] = []

    def compile_with(layers: int) -> CompilerEstimate:
        compiled.append(layers)
        return estimate_of(5 + 3 * layers)

    few, more = round_compiled.LAYERS_COMPILED
    assert over_layers(compile_with, 36) == estimate_of(5 + 3 * 36)
    assert compiled == [few, more]
    assert over_layers(compile_with, more - 1) == estimate_of(5 + 3 * (more - 1))
    assert compiled == [few, more, more - 1]


def test_what_both_share_is_in_the_peak_once():
    both = whole(estimate_of(7), estimate_of(2), 15)
    assert (both.cycles, both.memory_cycles, both.peak_bytes) == (9, 18, 75)
    assert both.bound_cycles == 18
    assert both.record()["bound_cycles"] == 18


TARGET_CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
DRAFTER_CONFIG = {
    **TARGET_CONFIG,
    "num_hidden_layers": 1,
    "block_size": 4,
    "num_target_layers": 3,
    "dflash_config": {"mask_token_id": 255, "target_layer_ids": [0, 2]},
}


@pytest.fixture
def configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The options that name both configurations."""
    paths = {"model_config": TARGET_CONFIG, "draft_config": DRAFTER_CONFIG}
    for name, fields in paths.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(fields))
    monkeypatch.setenv("TILEWRIGHT_COMPILE_CACHE", "0")
    return {name: str(tmp_path / f"{name}.json") for name in paths}


def test_the_script_prints_a_table_and_writes_json(
    configs: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(bandwidth, "BUFFER_BYTES", 2**16)
    monkeypatch.setattr(rounds, "RUN_S", 0.001)
    path = tmp_path / "figures.json"
    main(options=RoundOptions(**configs, block_size=(4, 8), context=(64,), repetitions=1), json_file=str(path))
    written = json.loads(path.read_text())
    assert (written["measured"], written["dtype"], written["repetitions"]) == (True, "bfloat16", 1)
    assert [(one["context"], one["block_size"]) for one in written["data"]] == [(64, 4), (64, 8)]
    printed = capsys.readouterr().out
    for one in written["data"]:
        assert f"({one['verify_ms_ratio']:.2f})" in printed


@pytest.mark.tpu
def test_estimates_for_an_absent_chip(configs: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(round_compiled, "LAYERS_COMPILED", (1, 2))
    path = tmp_path / "figures.json"
    main(options=RoundOptions(**configs, block_size=(4,), context=(100,), chip=("v5e:1x1",)), json_file=str(path))
    written = json.loads(path.read_text())
    (one,) = written["data"]
    assert (one["chip"], one["block_size"], one["extrapolated"], one["layers_compiled"]) == ("v5e:1x1", 4, True, [1, 2])
    layer_bytes = 2 * (2 * 128 * 256 + 2 * 128 * 128 + 3 * 128 * 128)
    assert one["verify_read_bytes"] > 3 * layer_bytes + 2 * 256 * 128
    assert one["verify_head_kernel_cycles"] > 0
    assert one["verify_head_xla_kernel_cycles"] == 0
    assert one["verify_cycles_ratio"] == 1
    assert one["verify_tree_read_bytes"] > 3 * layer_bytes + 2 * 256 * 128
    assert one["verify_tree_bound_cycles_ratio"] == 1


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"block_size": (1,)}, "expected block_size of at least 2, found 1"),
        ({"context": (40960,)}, "within the model's 40960 positions, found 41088"),
        ({"chip": ("v9:2x2",)}, "expected a TPU of v5e, v5p, v6e, found 'v9:2x2'"),
        ({"model_config": "demo"}, "expected --model-config and --draft-config together"),
        ({"model_config": "nowhere", "draft_config": "demo-drafter"}, "expected a config.json or 'demo', found 'nowhere'"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], problem: str):
    with pytest.raises(ValueError, match=problem):
        RoundOptions(**options).setups()
