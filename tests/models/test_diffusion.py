"""LLaDA and Dream against NumPy in float64, their configurations as published, and what padding may not do."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models.sizes import decoder_config
from reference.diffusion_model_numpy import predictions, read_model
from tilewright.kernels.select import PLAIN, operations, training_operations
from tilewright.models import decoder, diffusion, hub
from tilewright.models.checkpoint import save_params
from tilewright.models.diffusion import DiffusionConfig, config_from_hf, config_to_hf, declare, load_diffusion
from tilewright.models.params import initialise, spec_leaves

TOLERANCE = 1e-4
LENGTHS = (13, 9)

LLADA_8B: dict[str, Any] = {
    "activation_type": "silu",
    "alibi": False,
    "alibi_bias_max": 8.0,
    "architectures": ["LLaDAModelLM"],
    "attention_dropout": 0.0,
    "attention_layer_norm": False,
    "attention_layer_norm_with_affine": True,
    "auto_map": {"AutoConfig": "configuration_llada.LLaDAConfig"},
    "bias_for_layer_norm": False,
    "block_group_size": 1,
    "block_type": "llama",
    "d_model": 4096,
    "embedding_dropout": 0.0,
    "embedding_size": 126464,
    "eos_token_id": 126081,
    "flash_attention": False,
    "include_bias": False,
    "include_qkv_bias": False,
    "input_emb_norm": False,
    "layer_norm_type": "rms",
    "layer_norm_with_affine": True,
    "mask_token_id": 126336,
    "max_sequence_length": 4096,
    "mlp_hidden_size": 12288,
    "mlp_ratio": 4,
    "model_type": "llada",
    "multi_query_attention": None,
    "n_heads": 32,
    "n_kv_heads": 32,
    "n_layers": 32,
    "pad_token_id": 126081,
    "precision": "amp_bf16",
    "rms_norm_eps": 1e-05,
    "rope": True,
    "rope_full_precision": True,
    "rope_theta": 500000.0,
    "scale_logits": False,
    "vocab_size": 126464,
    "weight_tying": False,
}
"""LLaDA-8B-Instruct as published."""

DREAM_7B: dict[str, Any] = {
    "architectures": ["DreamModel"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "mask_token_id": 151666,
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "model_type": "Dream",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "pad_token_id": 151643,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
"""Dream-v0-Instruct-7B as published."""

SIZES = (60, 32, 48, 3, 4, 2, 8)
CONFIGS = {
    "llada": DiffusionConfig(
        family="llada",
        decoder=decoder_config(
            "llama", *SIZES, rms_norm_eps=1e-5, rope_theta=5e5, max_position_embeddings=64, eos_token_ids=(3,)
        ),
        mask_token_id=59,
        pad_token_id=3,
        eot_token_id=4,
    ),
    "llada-tied": DiffusionConfig(
        family="llada", decoder=decoder_config("llama", *SIZES, rope_theta=1e4, tie_word_embeddings=True), mask_token_id=0
    ),
    "dream": DiffusionConfig(
        family="dream", decoder=decoder_config("qwen2", *SIZES, rope_theta=1e6), mask_token_id=58, pad_token_id=3
    ),
}


def drawn(config: DiffusionConfig, key: int = 0) -> Any:
    """Larger than they are drawn, and norms that are not ones, so that every array shows."""
    params = jax.jit(lambda key: initialise(declare(config), key))(jax.random.key(key))

    def shown(spec: Any, x: jax.Array) -> jax.Array:
        return x + 0.3 * jnp.sin(jnp.arange(x.size, dtype=x.dtype)) if spec.kind == "norm" else 6 * x

    return jax.tree.map(shown, declare(config), params)


@pytest.fixture(params=sorted(CONFIGS))
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A small random checkpoint."""
    config = CONFIGS[request.param]
    save_params(tmp_path, config_to_hf(config), declare(config), drawn(config), jnp.float32)
    return tmp_path


def rows(config: DiffusionConfig) -> tuple[jax.Array, jax.Array]:
    """Tokens of two lengths, with anything behind them."""
    tokens = np.random.default_rng(1).integers(0, config.decoder.vocab_size, (2, 16))
    return jnp.asarray(tokens, jnp.int32), jnp.asarray(LENGTHS, jnp.int32)


def own_logits(config: DiffusionConfig, params: Any, ops: Any = PLAIN, change: int = 0) -> np.ndarray:
    tokens, valid = rows(config)
    behind = jnp.arange(16)[None] >= valid[:, None]
    tokens = jnp.where(behind, (tokens + change) % config.decoder.vocab_size, tokens)

    @jax.jit
    def run(params: Any) -> jax.Array:
        hidden = diffusion.forward_full(config, ops, params, tokens, valid).hidden
        return diffusion.logits(config, ops, params, diffusion.predicting(config, hidden))

    return np.asarray(run(params))


def test_logits_equal_numpy(stored: Path):
    """Each row against its sequence alone; Dream's moved to the positions that they predict."""
    config, params = load_diffusion(stored, jnp.float32)
    fields = config_to_hf(config)
    tensors = load_file(stored / "model.safetensors")
    found, (tokens, _) = own_logits(config, params), rows(config)
    for row, length in enumerate(LENGTHS):
        ids = tokens[row, :length].tolist()
        expected = predictions(read_model(fields, tensors), ids)
        np.testing.assert_allclose(found[row, :length], expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_padding_is_never_seen(name: str):
    config = CONFIGS[name]
    params = drawn(config)
    before = own_logits(config, params)
    after = own_logits(config, params, change=7)
    for row, length in enumerate(LENGTHS):
        np.testing.assert_array_equal(before[row, :length], after[row, :length])
        assert np.isfinite(after).all()


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_every_bundle_gives_the_same(name: str):
    """The kernels of this chip over packed weights, and those of training, biases included."""
    config = CONFIGS[name]
    params = drawn(config)
    expected = own_logits(config, params)
    for ops in (operations(), training_operations("float32")):
        ready = decoder.prepare(config.decoder, ops, params) if ops.prepares else params
        found = own_logits(config, ready, ops)
        for row, length in enumerate(LENGTHS):
            np.testing.assert_allclose(found[row, :length], expected[row, :length], rtol=0, atol=TOLERANCE)


def test_every_array_has_a_gradient():
    """Under the training bundle, whose attention is bidirectional too."""
    for config in CONFIGS.values():
        tokens, valid = rows(config)

        def loss(params: Any, config: DiffusionConfig = config, tokens: Any = tokens, valid: Any = valid) -> jax.Array:
            ops = training_operations("float32")
            hidden = diffusion.forward_full(config, ops, params, tokens, valid).hidden
            return jnp.sum(jnp.square(diffusion.logits(config, ops, params, hidden)[:, :9]))

        params = drawn(config)
        for spec, gradient in zip(spec_leaves(declare(config)), jax.tree.leaves(jax.jit(jax.grad(loss))(params)), strict=True):
            assert float(jnp.max(jnp.abs(gradient))) > 1e-3, spec.name


def test_a_token_sees_those_behind_it():
    config = CONFIGS["llada"]
    params, (tokens, valid) = drawn(config), rows(config)
    out = [diffusion.forward_full(config, PLAIN, params, t, valid).hidden for t in (tokens, tokens.at[0, 12].add(-1))]
    assert float(jnp.min(jnp.max(jnp.abs(out[0] - out[1])[0], axis=-1))) > 1e-4


def test_published_llada():
    expected = decoder_config(
        "llama",
        126464,
        4096,
        12288,
        32,
        32,
        32,
        128,
        rms_norm_eps=1e-5,
        rope_theta=5e5,
        max_position_embeddings=4096,
        eos_token_ids=(126081,),
    )
    config = config_from_hf(LLADA_8B)
    assert config == DiffusionConfig(
        family="llada", decoder=expected, mask_token_id=126336, pad_token_id=126081, eot_token_id=126348
    )
    assert (config.shifted, config.eos_token_ids, hash(config)) == (False, (126081,), hash(replace(config)))
    names = {spec.name: spec.stored_shape for spec in spec_leaves(declare(config))}
    assert names["model.transformer.ff_out.weight"] == (126464, 4096)
    assert names["model.transformer.blocks.31.ff_out.weight"] == (4096, 12288)
    parts = "attn_norm q_proj k_proj v_proj attn_out ff_norm ff_proj up_proj ff_out".split()
    blocks = {f"model.transformer.blocks.{n}.{part}.weight" for n in range(32) for part in parts}
    assert names.keys() == blocks | {f"model.transformer.{part}.weight" for part in ("wte", "ln_f", "ff_out")}


def test_published_dream():
    expected = decoder_config(
        "qwen2",
        152064,
        3584,
        18944,
        28,
        28,
        4,
        128,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        max_position_embeddings=131072,
        eos_token_ids=(151643,),
    )
    config = config_from_hf(DREAM_7B)
    assert config == DiffusionConfig(
        family="dream", decoder=expected, mask_token_id=151666, pad_token_id=151643, eot_token_id=151645
    )
    assert config.shifted
    names = {spec.name for spec in spec_leaves(declare(config))}
    assert {"lm_head.weight", "model.layers.27.self_attn.k_proj.bias", "model.layers.0.mlp.down_proj.weight"} < names
    assert not {"model.layers.0.self_attn.o_proj.bias", "model.layers.0.self_attn.q_norm.weight"} & names


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_a_configuration_comes_back(name: str):
    assert config_from_hf(config_to_hf(CONFIGS[name])) == CONFIGS[name]


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"block_type": "sequential"}, "block_type='sequential' is not supported (only 'llama')"),
    ({"activation_type": "gelu"}, "activation_type='gelu' is not supported (only 'silu')"),
    ({"layer_norm_type": "low_precision"}, "layer_norm_type='low_precision' is not supported (only 'rms')"),
    ({"alibi": True}, "alibi=True is not supported (only False)"),
    ({"include_bias": True}, "include_bias=True is not supported (only False)"),
    ({"attention_layer_norm": True}, "attention_layer_norm=True is not supported (only False)"),
    ({"multi_query_attention": True}, "multi_query_attention=True is not supported (only False)"),
    ({"n_heads": 33}, "d_model must give each of n_heads an even size; n_heads is no multiple of n_kv_heads"),
    ({"d_model": None}, "d_model must be a positive integer, found None"),
    ({"mask_token_id": 126464}, "mask_token_id [126464] lies outside the vocabulary of 126464"),
    ({"mask_token_id": None}, "mask_token_id must be a token id, found None"),
    ({"eos_token_id": 200000}, "eos_token_id [200000] lies outside the vocabulary of 126464"),
]


@pytest.mark.parametrize(("change", "expected"), CHANGES)
def test_one_unsupported_value(change: dict[str, Any], expected: str):
    with pytest.raises(ValueError, match="some/config") as caught:
        config_from_hf({**LLADA_8B, **change}, "some/config.json")
    listed = str(caught.value).removeprefix("some/config.json: ").split("; ")
    assert set(expected.split("; ")) <= set(listed)
    assert len(listed) <= 2


def test_all_that_is_wrong_stands_in_one_error():
    wrong = {"alibi": True, "block_type": "gpt", "mask_token_id": -1}
    with pytest.raises(ValueError, match=r"block_type='gpt'.*alibi=True.*mask_token_id"):
        config_from_hf({**LLADA_8B, **wrong})
    with pytest.raises(ValueError, match=r"hidden_act='gelu'.*mask_token_id \[152064\] lies outside the vocabulary of 152064"):
        config_from_hf({**DREAM_7B, "hidden_act": "gelu", "mask_token_id": 152064})
    with pytest.raises(ValueError, match="model_type must be one of llada, Dream, found 'qwen3'"):
        config_from_hf({**LLADA_8B, "model_type": "qwen3"})


def test_a_configuration_that_a_family_cannot_say():
    llada = CONFIGS["llada"]
    with pytest.raises(ValueError, match="expected the layers of dream, found those of llama"):
        config_to_hf(replace(llada, family="dream"))
    with pytest.raises(ValueError, match="heads that make up the hidden size"):
        config_to_hf(replace(llada, decoder=replace(llada.decoder, head_dim=16)))


def test_a_folder_is_found_and_what_does_not_fit_is_named(tmp_path: Path):
    config = CONFIGS["llada-tied"]
    save_params(tmp_path, config_to_hf(config), declare(config), drawn(config), jnp.float32)
    tensors = load_file(tmp_path / "model.safetensors")
    # A tied model's file may hold its head all the same.
    save_file(
        {**tensors, "model.transformer.ff_out.weight": tensors["model.transformer.wte.weight"]}, tmp_path / "model.safetensors"
    )
    found, params = load_diffusion(hub.resolve(str(tmp_path)), jnp.bfloat16)
    assert (found, params.head, params.embed.dtype) == (config, None, jnp.bfloat16)
    save_file({"model.transformer.wte.weight": tensors["model.transformer.wte.weight"]}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"28 missing: model\.transformer\.blocks\.0\.attn_norm"):
        load_diffusion(tmp_path, jnp.float32)
