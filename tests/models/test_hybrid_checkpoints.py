"""Hybrids as published: the text half of a multimodal checkpoint, experts in one tensor, layers that predict ahead."""

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models.test_config import problems
from models.test_decoder import GOLDENS, run
from tilewright.models.checkpoint import load_decoder
from tilewright.models.decoder import config_from_hf, config_to_hf

QWEN35_4B: dict[str, Any] = {
    "model_type": "qwen3_5",
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "tie_word_embeddings": True,
    "text_config": {
        "attention_bias": False,
        "attn_output_gate": True,
        "eos_token_id": 248044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1,
        "num_attention_heads": 16,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 1e7,
            "rope_type": "default",
        },
        "vocab_size": 248320,
    },
    "vision_config": {"depth": 24, "hidden_size": 1024, "model_type": "qwen3_5"},
}
"""The form of the published configurations."""
NEXT: dict[str, Any] = {
    "model_type": "qwen3_next",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "max_position_embeddings": 262144,
    "rope_theta": 1e7,
    "linear_num_value_heads": 32,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "norm_topk_prob": True,
}


def test_published_qwen35():
    config = config_from_hf(QWEN35_4B)
    assert (config.rope_theta, config.partial_rotary_factor, config.rope_scaling) == (1e7, 0.25, None)
    assert (config.head_dim, config.tie_word_embeddings, config.eos_token_ids) == (256, True, (248044,))
    assert [n for n in range(32) if n not in config.delta_layers] == list(range(3, 32, 4))
    assert config.delta is not None
    assert config.delta.state_shape == (16, 2, 128, 128)
    assert config_from_hf(json.loads(json.dumps(config_to_hf(config)))) == config


def test_published_qwen3_next():
    config = config_from_hf(NEXT)
    assert config.mixture is not None
    assert (config.mixture.experts, config.mixture.chosen, config.mixture.size, config.mixture.shared) == (512, 10, 512, 512)
    assert (config.mixture.normalised, config.dense_layers, config.partial_rotary_factor) == (True, (), 0.25)
    assert config_from_hf(json.loads(json.dumps(config_to_hf(config)))) == config


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layer_types": ["linear_attention"] * 48}, "layer_types without a layer of full attention are not supported"),
        (
            {"layer_types": ["sliding_attention"]},
            "layer_types must be full_attention or linear_attention for each of 48 layers",
        ),
        ({"linear_num_value_heads": 24}, "linear_num_value_heads is no multiple of linear_num_key_heads"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim must be at least 2"),
        ({"attn_output_gate": False}, "attn_output_gate=False is not supported (only True)"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype='bfloat16' is not supported (only 'float32')"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], said: str):
    assert any(problem.startswith(said) for problem in problems({**NEXT, **change}))


def test_a_published_checkpoint_of_experts(tmp_path: Path):
    """The result equals that of the same tensors under the names of the text model alone."""
    folder = GOLDENS / "qwen3.5-moe"
    stored = load_file(folder / "model.safetensors")
    fields = json.loads((folder / "config.json").read_text())
    whole: dict[str, np.ndarray] = {
        "mtp.fc.weight": np.ones(3, np.float32),
        "model.visual.patch_embed.weight": np.ones(2, np.float32),
    }
    experts: dict[tuple[str, str], dict[int, np.ndarray]] = {}
    for name, value in stored.items():
        if match := re.fullmatch(r"model\.(.*\.experts)\.(\d+)\.(\w+)_proj\.weight", name):
            experts.setdefault((match[1], match[3]), {})[int(match[2])] = value
        else:
            whole[name.replace("model.", "model.language_model.", 1)] = value
    for prefix in {prefix for prefix, _ in experts}:
        gate, up, down = (np.stack([experts[prefix, part][n] for n in range(6)]) for part in ("gate", "up", "down"))
        whole[f"model.language_model.{prefix}.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        whole[f"model.language_model.{prefix}.down_proj"] = down
    save_file(whole, tmp_path / "model.safetensors")
    published = {"model_type": "qwen3_5_moe", "text_config": fields, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(published))
    config, params = load_decoder(tmp_path, jnp.float32)
    plain = load_decoder(folder, jnp.float32)
    assert config == plain[0]
    tokens = jnp.arange(14).reshape(2, 7)
    np.testing.assert_array_equal(run(config, params, tokens)[1], run(*plain, tokens)[1])
    assert jax.tree.structure(params) == jax.tree.structure(plain[1])
