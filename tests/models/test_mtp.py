"""An MTP head's maths against the NumPy reference, its configuration, and its checkpoints."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from safetensors.numpy import load_file, save_file

from reference.dflash_numpy import Target, as_folders, random_pair
from reference.mtp_numpy import Head, add_head, as_folder, random_head
from tilewright.kernels import native
from tilewright.kernels.operations import Operations
from tilewright.kernels.select import PLAIN, operations
from tilewright.models import decoder, mtp
from tilewright.models.kinds import kind_of
from tilewright.models.mtp import MtpConfig, MtpParams
from tilewright.models.params import from_tensors, initialise

PAIR = random_pair(5)
TARGET = decoder.config_from_hf(PAIR.target_config)
TOKENS = np.random.default_rng(1).integers(0, 40, (2, 9)).astype(np.int32)
HYBRID = {
    **PAIR.target_config,
    "model_type": "qwen3_5_text",
    "architectures": ["Qwen3_5ForCausalLM"],
    "attn_output_gate": True,
    "partial_rotary_factor": 0.5,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
"""Layers of Qwen3.5: gated attention, a part of each head is rotated, and stored norms lack one."""
CASES: dict[str, tuple[dict[str, Any], float]] = {"qwen3": (PAIR.target_config, 0.0), "qwen3.5": (HYBRID, 1.0)}


def head_of(name: str, seed: int = 0) -> tuple[MtpConfig, MtpParams, Head]:
    fields, offset = CASES[name]
    tensors = random_head(seed, fields)
    target = decoder.config_from_hf(fields)
    config = MtpConfig(layer=mtp.layer_config(target), num_target_layers=target.num_layers)
    params = from_tensors(
        mtp.declare(config), lambda name, bounds: tensors[name][tuple(slice(*b) for b in bounds)], jnp.float32
    )
    return config, params, Head(fields, tensors, Target(PAIR.target_config, PAIR.target_tensors), offset)


def causal(projection: Any, heads: Any) -> Array:
    return decoder.causal_attend(PLAIN, projection, heads, None, None)[0]


def pairs_of(head: Head, seed: int = 0) -> tuple[np.ndarray, Array, Array, Array]:
    """States, also as an array of the engine, embeddings of the tokens behind them, and positions."""
    h = np.random.default_rng(seed).normal(size=(2, 9, 32))
    embeds = np.stack([head.target.embed(row.tolist()) for row in TOKENS])
    return h, jnp.asarray(h, jnp.float32), jnp.asarray(embeds, jnp.float32), jnp.broadcast_to(jnp.arange(9), (2, 9))


@pytest.mark.parametrize("name", list(CASES))
def test_a_step_over_a_sequence_equals_the_reference_and_leaves_the_keys(name: str):
    config, params, head = head_of(name)
    states, h, embeds, positions = pairs_of(head)

    @jax.jit
    def run(params: MtpParams) -> tuple[Array, list[Array], tuple[Array, Array]]:
        left = []

        def attend(projection: Any, heads: Any) -> Array:
            left.extend(PLAIN.heads(projection, heads)[1:])
            return causal(projection, heads)

        out = mtp.step(config, PLAIN, params, h, embeds, positions, attend)
        return out, left, mtp.keys(config, PLAIN, params, h, embeds, positions)

    out, left, kept = run(params)
    for row in range(2):
        np.testing.assert_allclose(out[row], head.layer(states[row], TOKENS[row].tolist()), rtol=0, atol=5e-4)
    for mine, theirs in zip(left, kept, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", list(CASES))
def test_every_array_matters(name: str):
    config, params, head = head_of(name)
    _, h, embeds, positions = pairs_of(head)

    def loss(params: MtpParams) -> Array:
        return jnp.sum(jnp.sin(mtp.step(config, PLAIN, params, h, embeds, positions, causal)))

    gradients = jax.tree.leaves(jax.jit(jax.grad(loss))(params))
    assert len(gradients) == 15 + (name == "qwen3.5")
    assert all(float(jnp.abs(g).max()) > 1e-4 for g in gradients)


@pytest.mark.skipif(native.kernels().isa is None, reason=native.kernels().reason or "no kernels")
def test_packed_steps_equal_plain_ones():
    config, params, head = head_of("qwen3")
    _, h, embeds, positions = pairs_of(head)
    packed = operations()
    assert packed.name.startswith("cpu")

    def run(ops: Operations, params: MtpParams) -> Any:
        def attend(projection: Any, heads: Any) -> Array:
            return decoder.causal_attend(ops, projection, heads, None, None)[0]

        return jax.jit(lambda params: mtp.step(config, ops, params, h, embeds, positions, attend))(params)

    np.testing.assert_allclose(run(packed, packed.prepare(mtp.declare(config), params)), run(PLAIN, params), rtol=0, atol=1e-3)


@pytest.mark.parametrize("ids", [(), (3, 5, 17)])
def test_a_head_of_its_own_folder_goes_out_as_it_came_in(tmp_path: Path, ids: tuple[int, ...]):
    tensors = random_head(0, PAIR.target_config)
    folder = as_folder(tmp_path / "in", PAIR.target_config, tensors, ids, block_size=6)
    assert kind_of(folder) == "drafter"
    config, params = mtp.load(folder, TARGET, jnp.float32)
    assert (config.block_size, config.draft_vocab_size) == (6, len(ids) or None)
    assert (None if params.vocab is None else params.vocab.ids.tolist()) == (list(ids) or None)
    config = replace(config, expected_acceptance=(0.5, 0.25, 0.125, 0.0, 1.0))
    mtp.save(tmp_path / "out", config, params, jnp.float32)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(stored[name], tensor)
    again = mtp.load(tmp_path / "out", TARGET, jnp.float32)
    assert again[0] == config
    assert jax.tree.all(jax.tree.map(np.array_equal, again[1], params))


@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "qwen3_next", "qwen3_5_text", "gemma2", "gemma3_text", "gpt_oss", "phi3", "mistral"]
)
def test_layers_of_every_family_are_configured_and_declared(tmp_path: Path, family: str):
    """Also those of targets whose other layers have windows or linear attention."""
    fields = {**HYBRID, "model_type": family, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 16}
    fields |= {"sliding_window": 8, "num_hidden_layers": 12, "attention_bias": family in ("qwen2", "gpt_oss"), "num_experts": 0}
    fields |= {"num_local_experts": 4, "experts_per_token": 2, "num_experts_per_tok": 2, "partial_rotary_factor": 1.0}
    target = decoder.config_from_hf(fields)
    config = MtpConfig(layer=mtp.layer_config(target), num_target_layers=12, draft_vocab_size=None)
    assert (config.layer.kind(0).window, config.layer.kind(0).delta, config.layer.kind(0).rotation) == (None, None, "global")
    params = initialise(mtp.declare(config), jax.random.key(0))
    mtp.save(tmp_path, config, params, jnp.float32)
    again = mtp.load(tmp_path, target, jnp.float32)
    assert again[0] == config
    assert jax.tree.all(jax.tree.map(np.array_equal, again[1], params))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"mtp_num_hidden_layers": 2}, r"mtp_num_hidden_layers=2 is not supported \(only 1\)"),
        ({"num_nextn_predict_layers": 3}, r"num_nextn_predict_layers=3 is not supported \(only 1\)"),
        ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings=True is not supported"),
    ],
)
def test_other_heads_of_a_target_are_refused_by_name(tmp_path: Path, change: dict[str, Any], problem: str):
    target, _ = as_folders(tmp_path, replace(PAIR, target_config=PAIR.target_config | change))
    add_head(target, random_head(0, PAIR.target_config))
    with pytest.raises(ValueError, match=problem):
        mtp.load_stored_head(target, TARGET, jnp.float32)


def test_a_targets_folder_with_and_without_a_head(tmp_path: Path):
    target, _ = as_folders(tmp_path, PAIR)
    assert not mtp.is_stored(target)
    with pytest.raises(ValueError, match=r"expected an MTP head \(tensors mtp\.\*\), found none"):
        mtp.load_stored_head(target, TARGET, jnp.float32)
    add_head(target, random_head(0, PAIR.target_config))
    assert mtp.is_stored(target)
    config, params = mtp.load_stored_head(target, TARGET, jnp.float32)
    assert jax.tree.all(jax.tree.map(np.array_equal, params, head_of("qwen3")[1]))
    assert (config.target_layer_ids, config.block_size) == ((4,), 4)
    tensors = load_file(target / "model.safetensors")
    del tensors["mtp.fc.weight"]
    save_file({**tensors, "mtp.lm_head.weight": np.zeros((40, 32), np.float32)}, target / "model.safetensors")
    with pytest.raises(ValueError, match=r"1 missing: mtp\.fc\.weight; 1 unknown: mtp\.lm_head\.weight"):
        mtp.load_stored_head(target, TARGET, jnp.float32)
    with pytest.raises(ValueError, match="found a GGUF file"):
        (tmp_path / "model.gguf").write_bytes(b"GGUF")
        mtp.load_stored_head(tmp_path / "model.gguf", TARGET, jnp.float32)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers must be 1, found 2"),
        ({"mtp_config": None}, "mtp_config must be an object, found None"),
        ({"mtp_config": {"num_target_layers": 5, "heads": 2}}, "mtp_config has unknown fields: heads"),
        ({"mtp_config": {"num_target_layers": 5, "draft_vocab_size": 41}}, "draft_vocab_size 41 exceeds vocab_size 40"),
        ({"mtp_config": {"num_target_layers": 5, "block_size": 1}}, "block_size must be at least 2, found 1"),
        (
            {"mtp_config": {"num_target_layers": 5, "expected_acceptance": [0.5]}},
            "expected_acceptance must have 3 entries, found 1",
        ),
        ({"mtp_config": {"num_target_layers": 4}}, "does not fit the target: num_target_layers is 4 but the target's is 5"),
    ],
)
def test_configurations_that_do_not_fit(tmp_path: Path, change: dict[str, Any], problem: str):
    folder = as_folder(tmp_path, PAIR.target_config, random_head(0, PAIR.target_config))
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | change))
    with pytest.raises(ValueError, match=problem):
        mtp.load(folder, TARGET, jnp.float32)
