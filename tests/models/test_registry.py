"""Which families are read: their configurations as published, windows, text halves, and what is said of any other."""

import json
from dataclasses import replace
from typing import Any

import pytest

from models.test_config import LLAMA31, QWEN3, QWEN25, problems
from tilewright.models.decoder import config_from_hf, config_to_hf
from tilewright.models.layers import LinearScaling
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


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "qwen3_moe", "num_experts": 128}, "a mixture of experts (num_experts) is not supported"),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "latent attention (MLA) (kv_lora_rank) is not supported"),
        ({"model_type": "qwen4"}, "the nearest family is qwen3"),
    ],
)
def test_another_family_is_refused_by_what_it_lacks_and_what_is_nearest(change: dict[str, Any], said: str):
    known, *others = problems({**QWEN3, **change})
    assert known == f"model_type must be one of {', '.join(FAMILIES)}, found {change['model_type']!r}"
    assert said in others
    assert others[-1].startswith("the nearest family is ")


def test_the_text_half_of_a_multimodal_configuration():
    """Ends of an answer may stand at the top, where `generation_config.json`'s are put."""
    whole = {"model_type": "llava", "text_config": QWEN3, "vision_config": {"hidden_size": 7}, "eos_token_id": [1, 2]}
    assert config_from_hf(whole) == config_from_hf({**QWEN3, "eos_token_id": [1, 2]})
    assert config_from_hf({**whole, "eos_token_id": None}) == config_from_hf(QWEN3)
