"""Gemma 2 (arXiv 2408.00118) and the text model of Gemma 3 (arXiv 2503.19786).

Norm weights are stored minus one, each sublayer has a second norm after it, and embeddings are scaled by the square root of the
hidden size. Gemma 2 caps scores and logits. Gemma 3 norms queries and keys, and its sliding-window layers have their own rotary
base.
"""

import math
from collections.abc import Mapping
from typing import Any

from tilewright.models.config import ConfigReader
from tilewright.models.family import Family, windows, write_windows

EVERY = {"gemma2": 2, "gemma3_text": 6}
"""Default period of layers without a window: the last layer of every group of this size."""


def read(read: ConfigReader, every: int, has_local_base: bool) -> dict[str, Any]:
    every = read.integer("sliding_window_pattern", default=every)
    read.expect("use_bidirectional_attention", False)
    return {
        **windows(read, lambda layer: (layer + 1) % every != 0, has_local_base),
        "attention_scale": read.number("query_pre_attn_scalar", default=256) ** -0.5,
        "embedding_scale": math.sqrt(read.integer("hidden_size")),
        "score_softcap": cap(read, "attn_logit_softcapping"),
        "logit_softcap": cap(read, "final_logit_softcapping"),
    }


def cap(read: ConfigReader, name: str) -> float | None:
    return None if read.fields.get(name) is None else read.number(name, default=1.0)


def read_gemma2(reader: ConfigReader) -> dict[str, Any]:
    return read(reader, EVERY["gemma2"], has_local_base=False)


def read_gemma3(reader: ConfigReader) -> dict[str, Any]:
    theta = reader.number("rope_local_base_freq", default=1e4)
    sections = reader.fields.get("rope_parameters")
    if isinstance(sections, Mapping) and "sliding_attention" in sections:
        local = reader.rope("sliding_attention")
        reader.require(local.rope_scaling is None, "rope_parameters: scaling of layers with a window is not supported")
        theta = local.rope_theta
    return {**read(reader, EVERY["gemma3_text"], has_local_base=True), "local_rope_theta": theta}


def write(config: Any) -> dict[str, Any]:
    return {
        **write_windows(config),
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": config.attention_scale**-2,
        "attn_logit_softcapping": config.score_softcap,
        "final_logit_softcapping": config.logit_softcap,
    }


def write_gemma3(config: Any) -> dict[str, Any]:
    return {**write(config), "rope_local_base_freq": config.local_rope_theta}


COMMON: dict[str, Any] = {
    "head_dim": 256,
    "norm_offset": 1.0,
    "post_norms": True,
    "activation": "gelu_tanh",
    "windows": True,
}
"""Settings that Gemma 2 and Gemma 3 share."""
SIZES = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
"""Defaults of transformers, which published configurations omit."""

GEMMA2 = Family(
    name="gemma2",
    architecture="Gemma2ForCausalLM",
    gguf="gemma2",
    read=read_gemma2,
    write=write,
    defaults={
        **SIZES,
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    **COMMON,
)
GEMMA3 = Family(
    name="gemma3_text",
    architecture="Gemma3ForCausalLM",
    gguf="gemma3",
    read=read_gemma3,
    write=write_gemma3,
    defaults={**SIZES, "max_position_embeddings": 131072, "rope_theta": 1e6},
    qk_norm=True,
    rope_section="full_attention",
    **COMMON,
)
