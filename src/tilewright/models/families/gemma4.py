"""Text model of Gemma 4, dense or with experts beside the MLP: after `modeling_gemma4.py` of transformers 5.24.

Layers without a window have heads of another size, and fewer of them for keys. Their keys may be their values too, and only the
fastest frequencies turn them. Queries, keys and values have norms, scores have no scale, each sublayer has a second norm after
it, and a stored number multiplies the residual stream after each layer.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tilewright.models.config import ConfigReader, HeadSizes, scaling_fields
from tilewright.models.experts import ExpertNames, Mixture
from tilewright.models.families.gemma import cap
from tilewright.models.family import FULL, SLIDING, Family, windows, write_windows

EVERY = 6
"""Default period of layers without a window: the last layer of every group of this size, and the last layer."""
ROPE = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
"""Rotation of configurations that name none."""
UNSUPPORTED = {
    "hidden_size_per_layer_input": "per-layer embeddings (E2B, E4B)",
    "num_kv_shared_layers": "layers that share keys and values (E2B, E4B)",
    "use_double_wide_mlp": "MLPs of double width (E2B)",
}
"""Fields of parts that are not supported."""


def read(reader: ConfigReader) -> dict[str, Any]:
    for name, part in UNSUPPORTED.items():
        found = reader.fields.get(name)
        reader.require(not found, f"{name}={found!r} is not supported: {part}")
    # Images would see one another; texts are causal.
    reader.expect("use_bidirectional_attention", "vision")
    last = reader.integer("num_hidden_layers") - 1
    found = windows(reader, lambda layer: (layer + 1) % EVERY != 0 and layer != last, keep_long_windows=True)
    sliding = found.get("sliding_layers", ())
    reader.require(last not in sliding, f"expected {FULL} in the last of layer_types, found {SLIDING}")
    kinds = reader.fields.get("layer_types")
    has_window = bool(sliding) or (isinstance(kinds, list) and SLIDING not in kinds)
    reader.require(has_window, "sliding_window must be a positive integer, found None")
    local = reader.rope(SLIDING)
    reader.require(local.rope_scaling is None, "rope_parameters: scaling of layers with a window is not supported")
    reader.require(local.partial_rotary_factor == 1, "rope_parameters: layers with a window must turn whole heads")
    return {
        **found,
        "local_rope_theta": local.rope_theta,
        "global_heads": read_global_heads(reader, [n for n in range(last + 1) if n not in sliding]),
        "attention_scale": 1.0,
        "embedding_scale": math.sqrt(reader.integer("hidden_size")),
        "logit_softcap": cap(reader, "final_logit_softcapping"),
        "mixture": read_mixture(reader) if reader.flag("enable_moe_block", default=False) else None,
        "balance": 0.0,
    }


def read_mixture(reader: ConfigReader) -> Mixture:
    """Reads the experts of all layers."""
    count = reader.integer("num_experts")
    chosen = reader.integer("top_k_experts")
    reader.require(chosen <= count, f"top_k_experts must be at most num_experts ({count}), found {chosen}")
    size = reader.integer("moe_intermediate_size")
    return Mixture(max(count, chosen), chosen, size, activation="gelu_tanh", beside_mlp=True)


def read_global_heads(reader: ConfigReader, layers: list[int]) -> HeadSizes:
    """Reads the heads of these layers, which have no window, from fields of their own or from `per_layer_config`."""
    same = reader.flag("attention_k_eq_v", default=False)
    heads = reader.integer("num_attention_heads")
    key_heads = reader.integer("num_key_value_heads", default=heads)
    given = reader.fields.get("per_layer_config")
    if given is None:
        own = reader.integer("num_global_key_value_heads", default=key_heads)
        sizes = {"num_key_value_heads": own if same else key_heads, "head_dim": reader.integer("global_head_dim", default=512)}
    else:
        entries = list(given.values()) if isinstance(given, Mapping) else []
        good = bool(entries) and set(given) == {str(n) for n in layers} and all(entry == entries[0] for entry in entries)
        reader.require(good, f"per_layer_config must have one and the same entry for each of layers {layers}, found {given!r}")
        sizes = entries[0] if good and isinstance(entries[0], Mapping) else {}
    part = ConfigReader(sizes, reader.where)
    found = HeadSizes(
        part.integer("num_key_value_heads", key_heads), part.integer("head_dim", reader.integer("head_dim")), same
    )
    part.require(heads % found.kv_heads == 0, "num_attention_heads is no multiple of num_global_key_value_heads")
    part.require(found.head_dim % 2 == 0, "global_head_dim must be even")
    reader.problems += part.problems
    return found


def write(config: Any) -> dict[str, Any]:
    rope = {"rope_theta": config.rope_theta, "partial_rotary_factor": config.partial_rotary_factor}
    scaling = {"rope_type": "default"} if config.rope_scaling is None else scaling_fields(config.rope_scaling)
    experts = {}
    if config.mixture is not None:
        experts = {
            "enable_moe_block": True,
            "num_experts": config.mixture.experts,
            "top_k_experts": config.mixture.chosen,
            "moe_intermediate_size": config.mixture.size,
        }
    per_layer = {"hidden_size_per_layer_input": 0} if config.family == "gemma4_text" else {}
    return {
        **write_windows(config),
        **per_layer,
        **experts,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": config.local_rope_theta},
            FULL: rope | scaling,
        },
        "global_head_dim": config.global_heads.head_dim,
        "num_global_key_value_heads": config.global_heads.kv_heads,
        "attention_k_eq_v": config.global_heads.keys_are_values,
        "final_logit_softcapping": config.logit_softcap,
    }


SIZES = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "rope_parameters": ROPE,
}
"""Defaults of transformers, which published configurations omit."""
GEMMA4 = Family(
    name="gemma4_text",
    architecture="Gemma4ForCausalLM",
    read=read,
    write=write,
    defaults={**SIZES, "sliding_window": 512, "max_position_embeddings": 131072, "hidden_size_per_layer_input": 256},
    qk_norm=True,
    value_norm=True,
    post_norms=True,
    layer_scalar=True,
    activation="gelu_tanh",
    windows=True,
    rope_section=FULL,
    experts=ExpertNames("router.proj", ("experts.gate_up_proj",) * 2, "experts.down_proj", scale="router.per_expert_scale"),
)
GEMMA4_UNIFIED = replace(
    GEMMA4,
    name="gemma4_unified_text",
    architecture="Gemma4UnifiedForCausalLM",
    defaults={**SIZES, "sliding_window": 1024, "max_position_embeddings": 262144},
)
"""The text model of 12B, whose other parts differ."""
