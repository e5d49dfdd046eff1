"""Reading `config.json`: both spellings of RoPE, defaults, and one error for all that is wrong."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.sizes import decoder_config
from tilewright.models.config import HeadSizes, MaskedBlocks
from tilewright.models.decoder import DecoderConfig, config_from_hf, config_to_hf
from tilewright.models.delta import DeltaSizes
from tilewright.models.experts import Mixture
from tilewright.models.layers import LinearScaling, Llama3Scaling, ProportionalScaling, YarnScaling
from tilewright.models.quantised import SUPPORTED
from tilewright.models.registry import FAMILIES

GOLDENS = Path(__file__).parents[1] / "golden" / "decoders"

LLAMA31: dict[str, Any] = {
    "model_type": "llama",
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
"""Llama 3.1 8B as published: the older spelling, and no `head_dim`."""

QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "attention_bias": False,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
"""Qwen3 4B as published: heads larger than hidden / heads."""


QWEN25: dict[str, Any] = {
    "model_type": "qwen2",
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
"""Qwen2.5 0.5B as published: no word of its biases, nor of `head_dim`, and a window that it does not use."""


NEMOTRON_3B: dict[str, Any] = {
    "model_type": "nemotron_labs_diffusion",
    "block_size": 32,
    "dlm_paradigm": "bidirectional",
    "dlm_type": "llada",
    "eos_token_id": 11,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 9216,
    "mask_token_id": 100,
    "max_position_embeddings": 262144,
    "num_attention_heads": 32,
    "num_hidden_layers": 26,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 16.0,
        "llama_4_scaling_beta": 0.1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 16384,
        "rope_theta": 1000000.0,
        "rope_type": "yarn",
    },
    "tie_word_embeddings": False,
    "vocab_size": 131072,
}
"""Nemotron-Labs-Diffusion 3B: rotary settings for longer contexts, with a scale of queries that is 1 up to 16,384 positions."""


def problems(fields: dict[str, Any]) -> list[str]:
    """Lists the problems of the error."""
    with pytest.raises(ValueError, match=r"^some/config\.json: ") as caught:
        config_from_hf(fields, where="some/config.json")
    return str(caught.value).partition(": ")[2].split("; ")


def test_published_llama():
    scaling = Llama3Scaling(8.0, 1.0, 4.0, 8192)
    expected = decoder_config(
        "llama",
        128256,
        4096,
        14336,
        32,
        32,
        8,
        128,
        rms_norm_eps=1e-5,
        rope_theta=5e5,
        rope_scaling=scaling,
        max_position_embeddings=131072,
        eos_token_ids=(128001, 128008, 128009),
    )
    assert config_from_hf(LLAMA31) == expected


def test_published_qwen3():
    expected = decoder_config(
        "qwen3",
        151936,
        2560,
        9728,
        36,
        32,
        8,
        128,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        tie_word_embeddings=True,
        max_position_embeddings=40960,
        eos_token_ids=(151645,),
    )
    assert config_from_hf(QWEN3) == expected


def test_published_qwen2():
    sizes = (151936, 896, 4864, 24, 14, 2, 64)
    more = {"tie_word_embeddings": True, "max_position_embeddings": 32768, "eos_token_ids": (151645,)}
    assert config_from_hf(QWEN25) == decoder_config("qwen2", *sizes, **more)
    assert problems({**QWEN25, "attention_bias": False}) == ["attention_bias=False is not supported (only True)"]


def gemma4(**more: Any) -> DecoderConfig:
    return decoder_config(
        "gemma4_text",
        96,
        32,
        56,
        4,
        4,
        2,
        16,
        rope_theta=5e4,
        rope_scaling=ProportionalScaling(0.25),
        tie_word_embeddings=True,
        max_position_embeddings=256,
        eos_token_ids=(5,),
        sliding_window=12,
        sliding_layers=(0, 2),
        local_rope_theta=1e4,
        global_heads=HeadSizes(1, 32, keys_are_values=True),
        attention_scale=1.0,
        balance=0.0,
        embedding_scale=32**0.5,
        logit_softcap=8.0,
        **more,
    )


GOLDEN_CONFIGS = {
    "qwen2-untied": decoder_config("qwen2", 96, 48, 64, 2, 6, 2, 8, max_position_embeddings=256, eos_token_ids=(5,)),
    "llama-scaled": decoder_config(
        "llama",
        96,
        32,
        56,
        3,
        4,
        2,
        16,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 32),
        tie_word_embeddings=True,
        max_position_embeddings=256,
        eos_token_ids=(2,),
    ),
    "llama-untied": decoder_config(
        "llama", 96, 48, 64, 2, 6, 3, 8, rms_norm_eps=1e-5, rope_theta=5e5, max_position_embeddings=256, eos_token_ids=(2,)
    ),
    "qwen3-tied": decoder_config(
        "qwen3",
        96,
        32,
        56,
        3,
        4,
        2,
        16,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        tie_word_embeddings=True,
        max_position_embeddings=256,
        eos_token_ids=(5,),
    ),
    "mistral-linear": decoder_config(
        "mistral",
        96,
        32,
        56,
        2,
        4,
        2,
        16,
        rope_theta=1e4,
        rope_scaling=LinearScaling(3.0),
        max_position_embeddings=256,
        eos_token_ids=(2,),
    ),
    "phi3-partial": decoder_config(
        "phi3",
        96,
        64,
        56,
        2,
        4,
        2,
        16,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        partial_rotary_factor=0.75,
        max_position_embeddings=256,
        eos_token_ids=(5,),
    ),
    "qwen3-yarn": decoder_config(
        "qwen3",
        96,
        32,
        56,
        2,
        4,
        2,
        16,
        rope_theta=1e4,
        tie_word_embeddings=True,
        max_position_embeddings=256,
        eos_token_ids=(5,),
        rope_scaling=YarnScaling(4.0, 64, 0.1 * math.log(4) + 1, beta_fast=8, beta_slow=0.5),
    ),
    "smollm3-tied": decoder_config(
        "smollm3",
        96,
        32,
        56,
        3,
        2,
        1,
        16,
        rope_theta=5e4,
        tie_word_embeddings=True,
        max_position_embeddings=256,
        eos_token_ids=(5,),
        unrotated_layers=(1,),
    ),
    "gemma2-tied": decoder_config(
        "gemma2",
        96,
        32,
        56,
        3,
        4,
        2,
        16,
        rope_theta=1e4,
        tie_word_embeddings=True,
        max_position_embeddings=256,
        eos_token_ids=(5,),
        sliding_window=12,
        sliding_layers=(0, 2),
        attention_scale=24**-0.5,
        embedding_scale=32**0.5,
        score_softcap=5.0,
        logit_softcap=8.0,
    ),
    "gemma3-tied": decoder_config(
        "gemma3_text",
        96,
        32,
        56,
        3,
        4,
        2,
        16,
        rope_theta=5e4,
        rope_scaling=LinearScaling(4.0),
        tie_word_embeddings=True,
        max_position_embeddings=256,
        eos_token_ids=(5,),
        sliding_window=12,
        sliding_layers=(0, 2),
        local_rope_theta=1e4,
        attention_scale=24**-0.5,
        embedding_scale=32**0.5,
    ),
    "gemma4-moe": gemma4(mixture=Mixture(8, 3, 24, activation="gelu_tanh", beside_mlp=True)),
    "gemma4-tied": gemma4(),
    "mistral-window": decoder_config(
        "mistral",
        96,
        32,
        56,
        2,
        4,
        2,
        16,
        rope_theta=1e4,
        max_position_embeddings=256,
        eos_token_ids=(2,),
        sliding_window=9,
        sliding_layers=(0, 1),
    ),
    "qwen3-window": decoder_config(
        "qwen3",
        96,
        32,
        56,
        3,
        4,
        2,
        16,
        rope_theta=1e4,
        max_position_embeddings=256,
        eos_token_ids=(5,),
        sliding_window=20,
        sliding_layers=(1, 2),
    ),
    "qwen3-next": decoder_config(
        "qwen3_next",
        96,
        32,
        56,
        3,
        4,
        2,
        16,
        rope_theta=1e4,
        partial_rotary_factor=0.5,
        max_position_embeddings=256,
        eos_token_ids=(5,),
        delta=DeltaSizes(2, 4, 8, 12, 4),
        delta_layers=(0, 2),
    ),
    "qwen3-next-moe": decoder_config(
        "qwen3_next",
        96,
        32,
        56,
        3,
        4,
        2,
        16,
        rope_theta=1e4,
        partial_rotary_factor=0.5,
        max_position_embeddings=256,
        eos_token_ids=(5,),
        delta=DeltaSizes(2, 4, 8, 12, 4),
        delta_layers=(0, 1),
        mixture=Mixture(6, 2, 16, shared=24),
        dense_layers=(1,),
    ),
    "qwen3.5-moe": decoder_config(
        "qwen3_5_moe_text",
        96,
        32,
        5632,
        2,
        4,
        2,
        16,
        rope_theta=1e4,
        partial_rotary_factor=0.5,
        max_position_embeddings=256,
        eos_token_ids=(5,),
        delta=DeltaSizes(2, 4, 8, 12, 4),
        delta_layers=(0,),
        mixture=Mixture(6, 2, 16, shared=24),
    ),
    "qwen3.5-tied": decoder_config(
        "qwen3_5_text",
        96,
        32,
        56,
        4,
        4,
        2,
        16,
        rope_theta=1e4,
        partial_rotary_factor=0.5,
        tie_word_embeddings=True,
        max_position_embeddings=256,
        eos_token_ids=(5,),
        delta=DeltaSizes(2, 4, 8, 12, 4),
        delta_layers=(0, 1, 2),
    ),
    "qwen3-untied": decoder_config(
        "qwen3", 96, 40, 48, 2, 5, 1, 12, rms_norm_eps=1e-6, rope_theta=5e3, max_position_embeddings=256, eos_token_ids=(2, 5)
    ),
}


@pytest.mark.parametrize("name", sorted(GOLDEN_CONFIGS))
def test_configs_that_transformers_wrote(name: str):
    assert config_from_hf(json.loads((GOLDENS / name / "config.json").read_text())) == GOLDEN_CONFIGS[name]


@pytest.mark.parametrize(("name", "kept"), [("gemma2-tied", False), ("gemma3-tied", True), ("mistral-window", False)])
def test_a_window_that_no_context_comes_to_the_end_of(name: str, kept: bool):
    """A window as long as the context hides nothing, but its layers may have their own rotary base."""
    fields = json.loads((GOLDENS / name / "config.json").read_text())
    whole = GOLDEN_CONFIGS[name]
    context = whole.sliding_window
    assert context is not None
    found = config_from_hf({**fields, "max_position_embeddings": context})
    none: dict[str, Any] = {} if kept else {"sliding_window": None, "sliding_layers": ()}
    assert found == replace(whole, max_position_embeddings=context, **none)
    assert config_from_hf(config_to_hf(found)) == found
    assert [found.kind(layer).rotation for layer in range(2)] == [whole.kind(layer).rotation for layer in range(2)]


@pytest.mark.parametrize(
    "name", sorted(GOLDEN_CONFIGS.keys() - {"gemma3-tied", "gemma4-moe", "gemma4-tied"})
)  # which have two rotations
@pytest.mark.parametrize("type_key", ["rope_type", "type"])
def test_older_spelling_of_the_same(name: str, type_key: str):
    fields = json.loads((GOLDENS / name / "config.json").read_text())
    rope = fields.pop("rope_parameters")
    fields["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    fields["partial_rotary_factor"] = rope.pop("partial_rotary_factor", None)
    fields["rope_scaling"] = None if kind == "default" else {**rope, type_key: kind}
    fields["torch_dtype"] = fields.pop("dtype")
    assert config_from_hf(fields) == GOLDEN_CONFIGS[name]


def test_published_nemotron_labs_diffusion():
    """The context ends where the scale of queries begins."""
    scaling = YarnScaling(16.0, 16384, 1.0, llama_4_scaling_beta=0.1)
    expected = decoder_config(
        "nemotron_labs_diffusion",
        131072,
        3072,
        9216,
        26,
        32,
        8,
        128,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        rope_scaling=scaling,
        max_position_embeddings=16384,
        eos_token_ids=(11,),
    )
    blocks = MaskedBlocks(100, 32, first_token="drawn", plain_confidence=True, threshold=0.9)
    expected = replace(expected, masked_blocks=blocks)
    config = config_from_hf(NEMOTRON_3B)
    assert config == expected
    assert config_from_hf(json.loads(json.dumps(config_to_hf(config)))) == config
    shifted = config_from_hf({**NEMOTRON_3B, "dlm_type": "dream"})
    assert shifted == replace(config, masked_blocks=replace(blocks, shifted=True))
    assert config_from_hf(json.loads(json.dumps(config_to_hf(shifted)))) == shifted


def test_fast_dllm_has_the_layers_of_qwen2():
    """With mask, end and block length of the published code, unless the configuration names them."""
    fields = {name: value for name, value in QWEN25.items() if name != "eos_token_id"}
    config = config_from_hf({**fields, "model_type": "Fast_dLLM_Qwen"})
    found = MaskedBlocks(151665, 32, True, False, first_token="likely", threshold=0.9, small_length=8)
    assert config == replace(config_from_hf(QWEN25), family="Fast_dLLM_Qwen", masked_blocks=found)
    other = config_from_hf({**fields, "model_type": "Fast_dLLM_Qwen", "bd_size": 16, "mask_token_id": 7, "eos_token_id": 8})
    assert other.masked_blocks == replace(found, length=16, mask_token_id=7)
    assert other.eos_token_ids == (8,)


@pytest.mark.parametrize("mask", [None, 131072, [1, 2], "100"])
def test_wrong_fields_of_masked_blocks_are_all_named(mask: object):
    found = problems({**NEMOTRON_3B, "mask_token_id": mask, "dlm_type": "mdlm", "block_size": 0})
    assert f"mask_token_id must be a token id below vocab_size, found {mask!r}" in found
    assert "dlm_type must be one of llada, dream, found 'mdlm'" in found
    assert "block_size must be a positive integer, found 0" in found


def test_defaults():
    """Default fields: a Qwen3 head has 128 entries, a Llama head hidden / heads."""
    short = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    kept = (*short, "max_position_embeddings")
    llama = config_from_hf({name: LLAMA31[name] for name in kept})
    assert llama == decoder_config(
        "llama",
        128256,
        4096,
        14336,
        32,
        32,
        32,
        128,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        max_position_embeddings=131072,
        eos_token_ids=(),
    )
    assert config_from_hf({name: QWEN3[name] for name in kept}).head_dim == 128
    assert config_from_hf({**LLAMA31, "num_attention_heads": 16, "head_dim": None}).head_dim == 256


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"model_type": None}, f"model_type must be one of {', '.join(FAMILIES)}, found None"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported (only 'silu')"),
        ({"attention_bias": True}, "attention_bias=True is not supported (only False)"),
        ({"mlp_bias": True}, "mlp_bias=True is not supported (only False)"),
        ({"use_sliding_window": True, "max_window_layers": -1}, "max_window_layers must be a number of layers, found -1"),
        (
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            f"quantization_config: quant_method='bitsandbytes' of the linear layers is not supported (only {SUPPORTED})",
        ),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types=['full_attention', 'sliding_attention'] is not supported (only 'full_attention')",
        ),
        ({"layer_types": 3}, "layer_types=3 is not supported (only 'full_attention')"),
        ({"hidden_size": 0}, "hidden_size must be a positive integer, found 0"),
        ({"vocab_size": "96"}, "vocab_size must be a positive integer, found '96'"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be a positive integer, found True"),
        ({"intermediate_size": 1.5}, "intermediate_size must be a positive integer, found 1.5"),
        ({"max_position_embeddings": None}, "max_position_embeddings must be a positive integer, found None"),
        ({"num_key_value_heads": 5}, "num_attention_heads is no multiple of num_key_value_heads"),
        ({"head_dim": 17}, "head_dim must be even"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps must be a positive number, found -1e-06"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false, found 'false'"),
        ({"eos_token_id": -1}, "eos_token_id must be a token id or a list of them, found -1"),
        ({"eos_token_id": [1, "</s>"]}, "eos_token_id must be a token id or a list of them, found [1, '</s>']"),
        ({"rope_theta": 0.5}, "rope_theta must be a number above 1, found 0.5"),
        ({"rope_theta": "1e6"}, "rope_theta must be a number above 1, found '1e6'"),
        (
            {"rope_scaling": {"rope_type": "ntk", "factor": 4.0}},
            "rope_scaling type 'ntk' is not supported "
            "(only 'default', 'llama3', 'linear', 'dynamic', 'yarn', 'longrope', 'proportional')",
        ),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 64, "long_factor": [1.0, -1.0]}},
            "rope_scaling: long_factor must be a list of positive numbers, found [1.0, -1.0]",
        ),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 64, "long_factor": [1.0] * 48}},
            "rope_scaling: expected 64 factors in each set, found 64 and 48",
        ),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling lacks factor (positive numbers)"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": "32", "mscale": -1}},
            "rope_scaling: beta_fast, mscale must be positive numbers",
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "truncate": 1.5}}, "rope_scaling: truncate must be true or false"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": None, "high_freq_factor": 4.0}},
            "rope_scaling lacks low_freq_factor, original_max_position_embeddings (positive numbers)",
        ),
        (
            {"rope_scaling": {**LLAMA31["rope_scaling"], "high_freq_factor": 1.0}},
            "rope_scaling: high_freq_factor (1.0) must exceed low_freq_factor (1.0)",
        ),
        ({"rope_scaling": {"rope_type": "default", "base": 3}}, "rope_scaling has unknown fields: base"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}},
            "rope_scaling has unknown fields: full_attention, sliding_attention",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 1.5}},
            "partial_rotary_factor must be a number above 0, at most 1, found 1.5",
        ),
        ({"rope_scaling": "llama3"}, "rope_scaling and rope_parameters must be objects, found 'llama3' and None"),
    ],
)
def test_one_unsupported_value(change: dict[str, Any], expected: str):
    assert problems({**QWEN3, **change}) == [expected]


REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "vocab_size",
)


def test_dynamic_scaling_begins_behind_the_context():
    scaled = {**LLAMA31, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}
    assert config_from_hf(scaled) == config_from_hf({**LLAMA31, "rope_scaling": None})


def test_yarn_needs_no_original_length():
    """Transformers takes that of the configuration."""
    given = {"rope_type": "yarn", "factor": 4.0}
    original = {**given, "original_max_position_embeddings": QWEN3["max_position_embeddings"]}
    read, named = (config_from_hf({**QWEN3, "rope_scaling": scaling}) for scaling in (given, original))
    assert read.rope_scaling == named.rope_scaling
    assert read.max_position_embeddings == QWEN3["max_position_embeddings"], "the scaling may be in it"


@pytest.mark.parametrize(("declared", "original"), [(32768, 32768), (131072, 32768), (40960, 4096)])
def test_yarn_lengthens_a_context_that_was_declared_without_it(declared: int, original: int):
    """Qwen2.5's advice for long texts, as vLLM reads it: the scaling is added, and the context stays unchanged."""
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": original, "finetuned": True}
    read = config_from_hf({**QWEN3, "max_position_embeddings": declared, "rope_scaling": scaling})
    assert read.max_position_embeddings == max(declared, 4 * original)
    assert isinstance(read.rope_scaling, YarnScaling)
    assert read.rope_scaling.original_max_position_embeddings == original


@pytest.mark.parametrize("family", [QWEN3, LLAMA31])
def test_everything_missing_is_listed_at_once(family: dict[str, Any]):
    """And nothing that only follows from it."""
    expected = {f"{name} must be a positive integer, found None" for name in REQUIRED}
    assert set(problems({"model_type": family["model_type"]})) == expected


def test_everything_wrong_is_listed_at_once():
    wrong = {"hidden_act": "relu", "vocab_size": -4, "mlp_bias": True, "rope_scaling": {"type": "ntk"}, "eos_token_id": "x"}
    listed = problems({**LLAMA31, **wrong})
    assert len(listed) == len(wrong)
    assert all(any(name in problem for problem in listed) for name in wrong)


# Fields rather than objects: the annotation checks draw random numbers, which no strategy may do.
scalings = st.one_of(
    st.fixed_dictionaries(
        {
            "factor": st.floats(1.0, 64.0),
            "low_freq_factor": st.floats(0.1, 2.0),
            "high_freq_factor": st.floats(2.5, 16.0),
            "original_max_position_embeddings": st.integers(1, 1 << 20),
        }
    ),
    st.fixed_dictionaries({"factor": st.floats(1.0, 64.0)}),
    st.fixed_dictionaries(
        {
            "factor": st.floats(1.0, 64.0),
            "original_max_position_embeddings": st.integers(1, 1 << 20),
            "attention_factor": st.floats(0.1, 2.0),
            "beta_fast": st.floats(4.0, 64.0),
            "truncate": st.booleans(),
        }
    ),
)


WRITTEN = [
    name for name, family in FAMILIES.items() if not family.post_norms and (family.experts is None or family.delta_in_one)
]
"""Families of which a configuration of sizes alone is one."""


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    kv_heads = draw(st.integers(1, 8))
    return {
        "family": draw(st.sampled_from(WRITTEN)),
        "vocab_size": draw(st.integers(1, 1 << 18)),
        "hidden_size": draw(st.integers(1, 1 << 14)),
        "intermediate_size": draw(st.integers(1, 1 << 16)),
        "num_layers": draw(st.integers(1, 99)),
        "num_heads": kv_heads * draw(st.integers(1, 8)),
        "num_kv_heads": kv_heads,
        "head_dim": 2 * draw(st.integers(1, 128)),
        "rms_norm_eps": draw(st.floats(1e-9, 1e-2)),
        "rope_theta": draw(st.floats(2.0, 1e9)),
        "rope_scaling": draw(st.none() | scalings),
        "partial_rotary_factor": draw(st.sampled_from([1.0, 0.5])),
        "tie_word_embeddings": draw(st.booleans()),
        "max_position_embeddings": draw(st.integers(1, 1 << 20)),
        "eos_token_ids": tuple(draw(st.lists(st.integers(0, 1 << 18), max_size=3))),
    }


def built(fields: dict[str, Any]) -> DecoderConfig:
    scaling = fields["rope_scaling"]
    kinds = {1: LinearScaling, 4: Llama3Scaling, 5: YarnScaling}
    if fields["family"] in ("qwen3_next", "qwen3_5_text"):
        fields = {**fields, "delta": DeltaSizes(2, 4, 8, 12, 4), "delta_layers": tuple(range(fields["num_layers"] - 1))}
    if fields["family"] == "nemotron_labs_diffusion":
        blocks = MaskedBlocks(fields["vocab_size"] - 1, 8, True, first_token="drawn", plain_confidence=True, threshold=0.9)
        fields = {**fields, "masked_blocks": blocks}
    if fields["family"] == "Fast_dLLM_Qwen":
        blocks = MaskedBlocks(fields["vocab_size"] - 1, 8, True, False, first_token="likely", threshold=0.9, small_length=8)
        fields = {**fields, "masked_blocks": blocks}
    if fields["family"].startswith("sdar"):
        fields = {**fields, "masked_blocks": MaskedBlocks(fields["vocab_size"] - 1, 8, causal=False)}
    return DecoderConfig(**{**fields, "rope_scaling": None if scaling is None else kinds[len(scaling)](**scaling)})


@given(configs())
def test_what_is_written_reads_back_the_same(fields: dict[str, Any]):
    config = built(fields)
    if isinstance(scaling := config.rope_scaling, YarnScaling):
        longest = round(scaling.factor * scaling.original_max_position_embeddings)
        config = replace(config, max_position_embeddings=max(config.max_position_embeddings, longest))
    assert config_from_hf(json.loads(json.dumps(config_to_hf(config)))) == config


@given(configs())
def test_a_config_can_be_a_static_argument(fields: dict[str, Any]):
    """Frozen, and equal and of one hash when its fields are."""
    config = built(fields)
    assert (hash(built(fields)), built(fields)) == (hash(config), config)
    with pytest.raises(AttributeError):
        setattr(config, "vocab_size", 3)  # noqa: B010 (a plain assignment is what the type checker refuses)
