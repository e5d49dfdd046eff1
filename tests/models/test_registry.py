"""Supported families: published configurations, windows, text models, and the errors for all others."""

import json
from dataclasses import replace
from typing import Any

import pytest

from models.test_config import LLAMA31, QWEN3, QWEN25, problems
from tilewright.kernels.operations import is_batch_invariant
from tilewright.kernels.select import PLAIN
from tilewright.models.config import HeadSizes
from tilewright.models.decoder import DecoderConfig, config_from_hf, config_to_hf
from tilewright.models.experts import ClampedGate, Mixture
from tilewright.models.layers import LinearScaling, ProportionalScaling, YarnScaling
from tilewright.models.registry import FAMILIES

MISTRAL: dict[str, Any] = {**LLAMA31, "model_type": "mistral", "rope_scaling": None, "max_position_embeddings": 32768}
SLIDING = ["full_attention", "sliding_attention"] * 16


@pytest.mark.parametrize(
    ("fields", "window", "layers"),
    [
        ({**MISTRAL, "sliding_window": 4096}, 4096, tuple(range(32))),
        ({**MISTRAL, "sliding_window": None}, None, ()),
        ({**MISTRAL, "sliding_window": 32768}, None, ()),
        ({**MISTRAL, "model_type": "ministral", "sliding_window": 4096, "layer_types": SLIDING}, 4096, tuple(range(1, 32, 2))),
        ({**QWEN25, "use_sliding_window": True, "sliding_window": 4096}, 4096, (21, 22, 23)),
        ({**QWEN3, "use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 34}, 4096, (34, 35)),
    ],
)
def test_windows(fields: dict[str, Any], window: int | None, layers: tuple[int, ...]):
    """A window that no context comes to the end of is none."""
    config = config_from_hf(fields)
    assert (config.sliding_window, config.sliding_layers) == (window, layers)
    assert config_from_hf(config_to_hf(config)) == config


def test_layer_types_that_do_not_fit_are_named():
    given = {**MISTRAL, "sliding_window": 4096, "layer_types": ["sliding_attention", "chunked_attention"]}
    (found,) = problems(given)
    assert found.startswith("layer_types must be full_attention or sliding_attention for each of 32 layers, found [")


GEMMA3_4B = {
    "model_type": "gemma3",
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}
"""Gemma 3 4B as published: what transformers takes for granted is left out."""


def test_published_gemma3():
    config = config_from_hf(GEMMA3_4B)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262208)
    assert [n for n in range(34) if n not in config.sliding_layers] == [5, 11, 17, 23, 29]
    assert (config.sliding_window, config.local_rope_theta, config.rope_theta) == (1024, 1e4, 1e6)
    assert (config.rope_scaling, config.attention_scale) == (LinearScaling(8.0), 1 / 16)
    assert (config.eos_token_ids, config.tie_word_embeddings) == ((1, 106), True)
    assert config.embedding_scale == pytest.approx(2560**0.5)
    again = config_from_hf(json.loads(json.dumps(config_to_hf(config))))
    assert again == replace(config, attention_scale=again.attention_scale)
    assert again.attention_scale == pytest.approx(config.attention_scale)


GEMMA4_31B: dict[str, Any] = {
    "model_type": "gemma4",
    "architectures": ["Gemma4ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "text_config": {
        "attention_k_eq_v": True,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 512,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 5376,
        "hidden_size_per_layer_input": 0,
        "intermediate_size": 21504,
        "max_position_embeddings": 262144,
        "model_type": "gemma4_text",
        "num_attention_heads": 32,
        "num_global_key_value_heads": 4,
        "num_hidden_layers": 60,
        "num_key_value_heads": 16,
        "sliding_window": 1024,
        "use_bidirectional_attention": "vision",
    },
}


def test_published_gemma4():
    config = config_from_hf(GEMMA4_31B)
    assert [n for n in range(60) if n not in config.sliding_layers] == list(range(5, 60, 6))
    local, whole = config.kind(4), config.kind(5)
    assert (local.window, local.rotation, config.heads(local)) == (1024, "local", HeadSizes(16, 256))
    assert (whole.window, whole.rotation, config.heads(whole)) == (None, "global", HeadSizes(4, 512, keys_are_values=True))
    assert (local.scale, whole.scale, local.value_norm, whole.value_norm) == (1.0, 1.0, True, True)
    assert (config.rope_theta, config.local_rope_theta, config.rope_scaling) == (1e6, 1e4, ProportionalScaling(0.25))
    frequencies = config.rope_frequencies
    assert (len(frequencies), frequencies[1], frequencies[64:]) == (256, pytest.approx(1e6 ** (-2 / 512)), [0.0] * 192)
    assert config_from_hf(json.loads(json.dumps(config_to_hf(config)))) == config


def test_gemma4_as_transformers_saves_it():
    """The heads of layers without a window are in an entry for each of them."""
    text = {name: value for name, value in GEMMA4_31B["text_config"].items() if "global" not in name}
    entries = {str(n): {"head_dim": 512, "num_key_value_heads": 4} for n in range(5, 60, 6)}
    assert config_from_hf({**GEMMA4_31B, "text_config": {**text, "per_layer_config": entries}}) == config_from_hf(GEMMA4_31B)
    entries["5"] = {"head_dim": 256, "num_key_value_heads": 4}
    (found,) = problems({**text, "per_layer_config": entries})
    assert found.startswith("per_layer_config must have one and the same entry for each of layers [5, 11, ")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_size_per_layer_input": None}, ""),
        ({"hidden_size_per_layer_input": 256}, "is not supported: per-layer embeddings (E2B, E4B)"),
        ({"num_kv_shared_layers": 20}, "is not supported: layers that share keys and values (E2B, E4B)"),
        ({"use_double_wide_mlp": True}, "is not supported: MLPs of double width (E2B)"),
        (
            {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5, "moe_intermediate_size": 8},
            "top_k_experts must be at most num_experts (4), found 5",
        ),
        ({"use_bidirectional_attention": "all"}, "is not supported (only 'vision')"),
        ({"sliding_window": None}, "sliding_window must be a positive integer"),
        ({"num_global_key_value_heads": 5}, "num_attention_heads is no multiple of num_global_key_value_heads"),
        ({"layer_types": ["sliding_attention"] * 60}, "expected full_attention in the last of layer_types"),
    ],
)
def test_what_gemma4_lacks_is_refused_by_name(change: dict[str, Any], said: str):
    fields = {**GEMMA4_31B["text_config"], **change}
    if not said:
        assert config_from_hf(fields).global_heads == HeadSizes(4, 512, keys_are_values=True)
        return
    (found,) = problems(fields)
    assert said in found


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "qwen2_moe", "num_experts": 128}, "a mixture of experts (num_experts) is not supported"),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "latent attention (MLA) (kv_lora_rank) is not supported"),
        ({"model_type": "qwen4"}, "the nearest family is qwen3"),
    ],
)
def test_another_family_is_refused_by_what_it_lacks_and_what_is_nearest(change: dict[str, Any], said: str):
    known, *others = problems({**QWEN3, **change})
    assert known == f"model_type must be one of {', '.join(FAMILIES)}, found {change['model_type']!r}"
    assert said in others
    assert others[-1].startswith("the nearest family is ")


QWEN3_30B_A3B: dict[str, Any] = {
    **QWEN3,
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "router_aux_loss_coef": 0.001,
    "output_router_logits": False,
    "tie_word_embeddings": False,
}
GPT_OSS_20B = {
    "model_type": "gpt_oss",
    "attention_bias": True,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "quantization_config": {"modules_to_not_convert": ["model.layers.*.self_attn"], "quant_method": "mxfp4"},
    "rms_norm_eps": 1e-05,
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "vocab_size": 201088,
}
MIXTRAL_8X7B = {
    **MISTRAL,
    "model_type": "mixtral",
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "sliding_window": None,
}


@pytest.mark.parametrize(
    ("fields", "mixture", "dense"),
    [
        (QWEN3_30B_A3B, Mixture(128, 8, 768), ()),
        ({**QWEN3_30B_A3B, "norm_topk_prob": False, "mlp_only_layers": [3]}, Mixture(128, 8, 768, normalised=False), (3,)),
        ({**QWEN3_30B_A3B, "decoder_sparse_step": 2}, Mixture(128, 8, 768), tuple(range(0, 48, 2))),
        (GPT_OSS_20B, Mixture(32, 4, 2880, clamped=ClampedGate(1.702, 7.0)), ()),
        (MIXTRAL_8X7B, Mixture(8, 2, 14336), ()),
    ],
)
def test_published_mixtures(fields: dict[str, Any], mixture: Mixture, dense: tuple[int, ...]):
    config = config_from_hf(fields)
    assert (config.mixture, config.dense_layers) == (mixture, dense)
    assert [n for n in range(config.num_layers) if config.kind(n).mixture is None] == list(dense)
    assert config_from_hf(json.loads(json.dumps(config_to_hf(config)))) == config


def test_published_gpt_oss():
    config = config_from_hf(GPT_OSS_20B)
    assert (config.sliding_window, config.sliding_layers) == (128, tuple(range(0, 24, 2)))
    assert config.rope_scaling == YarnScaling(32.0, 4096, YarnScaling.default_attention_factor(32.0), truncate=False)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_experts_per_tok": 129}, "num_experts_per_tok must be at most num_experts (128), found 129"),
        ({"mlp_only_layers": [48]}, "mlp_only_layers must be layers from 0 to 47, found [48]"),
        ({"num_experts": None}, "num_experts must be a positive integer, found None"),
    ],
)
def test_mixtures_that_cannot_be_are_named(change: dict[str, Any], said: str):
    assert said in problems({**QWEN3_30B_A3B, **change})


def test_the_text_half_of_a_multimodal_configuration():
    """Ends of an answer may stand at the top, where `generation_config.json`'s are put."""
    whole = {"model_type": "llava", "text_config": QWEN3, "vision_config": {"hidden_size": 7}, "eos_token_id": [1, 2]}
    assert config_from_hf(whole) == config_from_hf({**QWEN3, "eos_token_id": [1, 2]})
    assert config_from_hf({**whole, "eos_token_id": None}) == config_from_hf(QWEN3)


@pytest.mark.parametrize(
    ("config", "needs_xla"),
    [
        (config_from_hf(QWEN3), False),
        (config_from_hf(QWEN3_30B_A3B), False),
        (config_from_hf(GPT_OSS_20B), True),
        (replace(config_from_hf(QWEN3), score_softcap=50.0), True),
        (replace(config_from_hf(QWEN3), head_dim=72), True),
    ],
    ids=["qwen3", "experts", "sinks", "capped scores", "heads of 72"],
)
def test_layers_that_xla_computes_on_a_cpu_too(config: DecoderConfig, needs_xla: bool):
    """Layers that XLA computes are not batch-invariant in bfloat16, with any kernels."""
    assert config.needs_xla == needs_xla
    kernels = replace(PLAIN, name="cpu avx512")
    assert is_batch_invariant(kernels, "bfloat16", by_xla=config.needs_xla) != needs_xla
    assert is_batch_invariant(kernels, "float32", by_xla=config.needs_xla)
    assert is_batch_invariant(kernels, "float32", by_xla=config.needs_xla, quantised=True) != (needs_xla and kernels.packs)
