"""Qwen3-Next (Qwen 2025) and the text models of Qwen3.5: three layers of linear attention (`delta.py`) to one of attention.

Norm weights are stored minus one, a part of each head is rotated, and the attention output is gated.
"""

from dataclasses import replace
from typing import Any

from tilewright.models.config import ConfigReader
from tilewright.models.delta import DeltaSizes
from tilewright.models.experts import ExpertNames, Mixture
from tilewright.models.families.qwen import PER_EXPERT_TENSORS, dense_layers
from tilewright.models.family import FULL, Family, mixture, write_balance

LINEAR = "linear_attention"
INTERVAL = 4
"""Default period of layers with full attention."""


def read(read: ConfigReader) -> dict[str, Any]:
    count = read.integer("num_hidden_layers")
    given = read.fields.get("layer_types")
    every = read.integer("full_attention_interval", default=INTERVAL)
    kinds = [FULL if (n + 1) % every == 0 else LINEAR for n in range(count)] if given is None else given
    good = isinstance(kinds, list) and len(kinds) == count and all(kind in (FULL, LINEAR) for kind in kinds)
    read.require(good, f"layer_types must be {FULL} or {LINEAR} for each of {count} layers, found {given!r}")
    read.require(not good or FULL in kinds, "layer_types without a layer of full attention are not supported")
    read.expect("attn_output_gate", True)
    read.expect("mamba_ssm_dtype", "float32")
    sizes = DeltaSizes(
        key_heads=read.integer("linear_num_key_heads", default=16),
        value_heads=read.integer("linear_num_value_heads", default=32),
        key_dim=read.integer("linear_key_head_dim", default=128),
        value_dim=read.integer("linear_value_head_dim", default=128),
        taps=read.integer("linear_conv_kernel_dim", default=4),
    )
    read.require(sizes.value_heads % sizes.key_heads == 0, "linear_num_value_heads is no multiple of linear_num_key_heads")
    read.require(sizes.taps > 1, "linear_conv_kernel_dim must be at least 2")
    return {"delta": sizes, "delta_layers": tuple(n for n, kind in enumerate(kinds) if kind == LINEAR) if good else ()}


def read_next(reader: ConfigReader) -> dict[str, Any]:
    """Reads Qwen3-Next's fields: experts in all layers except the listed ones, or no experts."""
    if not reader.fields.get("num_experts"):
        return read(reader)
    found = read_experts(reader)
    normalised = reader.flag("norm_topk_prob", default=True)
    mixture = replace(found["mixture"], normalised=normalised)
    return {**read(reader), **found, "mixture": mixture, "dense_layers": dense_layers(reader)}


def read_moe(reader: ConfigReader) -> dict[str, Any]:
    return {**read(reader), **read_experts(reader)}


def read_experts(reader: ConfigReader) -> dict[str, Any]:
    """Reads the experts, including the shared expert of all rows."""
    found = mixture(reader, "num_experts", "moe_intermediate_size")
    return {**found, "mixture": replace(found["mixture"], shared=reader.integer("shared_expert_intermediate_size"))}


def write(config: Any) -> dict[str, Any]:
    sizes: DeltaSizes = config.delta
    return {
        "layer_types": [LINEAR if n in config.delta_layers else FULL for n in range(config.num_layers)],
        "linear_num_key_heads": sizes.key_heads,
        "linear_num_value_heads": sizes.value_heads,
        "linear_key_head_dim": sizes.key_dim,
        "linear_value_head_dim": sizes.value_dim,
        "linear_conv_kernel_dim": sizes.taps,
        "partial_rotary_factor": config.partial_rotary_factor,
    }


def write_next(config: Any) -> dict[str, Any]:
    if config.mixture is None:
        return {**write(config), "num_experts": 0}
    return {**write_moe(config), "norm_topk_prob": config.mixture.normalised, "mlp_only_layers": list(config.dense_layers)}


def write_moe(config: Any) -> dict[str, Any]:
    experts: Mixture = config.mixture
    return {
        **write(config),
        "num_experts": experts.experts,
        "num_experts_per_tok": experts.chosen,
        "moe_intermediate_size": experts.size,
        "shared_expert_intermediate_size": experts.shared,
        **write_balance(config),
    }


COMMON: dict[str, Any] = {"head_dim": 256, "qk_norm": True, "norm_offset": 1.0, "output_gate": True}
"""Settings that Qwen3-Next and Qwen3.5 share."""
DEFAULTS: dict[str, Any] = {"partial_rotary_factor": 0.25, "max_position_embeddings": 32768}
"""Defaults of transformers, which configurations omit."""

EXPERTS: dict[str, Any] = {
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "intermediate_size": 5632,
}
SHARED = "mlp.shared_expert"

QWEN3_NEXT = Family(
    name="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    read=read_next,
    write=write_next,
    defaults={**DEFAULTS, **EXPERTS, "num_experts": 512},
    delta_in_one=True,
    gguf="qwen3next",
    experts=replace(PER_EXPERT_TENSORS, shared=SHARED),
    **COMMON,
)
QWEN3_5 = Family(
    name="qwen3_5_text", architecture="Qwen3_5ForCausalLM", read=read, write=write, defaults=DEFAULTS, gguf="qwen35", **COMMON
)
QWEN3_5_MOE = Family(
    name="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    read=read_moe,
    write=write_moe,
    gguf="qwen35moe",
    defaults={**DEFAULTS, **EXPERTS, "num_experts": 256, "num_experts_per_tok": 8},
    experts=replace(PER_EXPERT_TENSORS, shared=SHARED),
    experts_in_one=ExpertNames("mlp.gate", ("mlp.experts.gate_up_proj",) * 2, "mlp.experts.down_proj", shared=SHARED),
    **COMMON,
)
