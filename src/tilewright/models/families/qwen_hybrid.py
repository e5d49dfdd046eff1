"""Qwen3-Next (Qwen 2025) and the text half of Qwen3.5: three layers of linear attention (`delta.py`) to one of attention.

Norms' weights are stored as what they are more than one, a part of each head is rotated, and what attention gives is gated.
"""

from typing import Any

from tilewright.models.config import ConfigReader
from tilewright.models.delta import DeltaSizes
from tilewright.models.family import FULL, Family

LINEAR = "linear_attention"
INTERVAL = 4
"""Every so many layers one has attention, where a configuration does not list them."""


def read(read: ConfigReader) -> dict[str, Any]:
    count, given = read.integer("num_hidden_layers"), read.fields.get("layer_types")
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
    count, every = reader.integer("num_hidden_layers"), reader.integer("decoder_sparse_step", default=1)
    dense = reader.fields.get("mlp_only_layers") or []
    experts = reader.fields.get("num_experts", 512)
    mixed = [n for n in range(count) if experts and n not in dense and (n + 1) % every == 0]
    reader.require(
        not mixed, f"a mixture of experts (num_experts={experts!r}) is not supported: expected mlp_only_layers to list all"
    )
    return read(reader)


def write(config: Any) -> dict[str, Any]:
    sizes: DeltaSizes = config.delta
    return {
        "layer_types": [LINEAR if n in config.delta_layers else FULL for n in range(config.num_layers)],
        "linear_num_key_heads": sizes.key_heads,
        "linear_num_value_heads": sizes.value_heads,
        "linear_key_head_dim": sizes.key_dim,
        "linear_value_head_dim": sizes.value_dim,
        "linear_conv_kernel_dim": sizes.taps,
    }


def write_next(config: Any) -> dict[str, Any]:
    return {**write(config), "num_experts": 0, "mlp_only_layers": list(range(config.num_layers))}


COMMON: dict[str, Any] = {"head_dim": 256, "qk_norm": True, "norm_offset": 1.0, "output_gate": True}
"""Settings that both share."""
DEFAULTS: dict[str, Any] = {"partial_rotary_factor": 0.25, "max_position_embeddings": 32768}
"""What configurations leave out where it is what transformers takes."""

QWEN3_NEXT = Family(
    name="qwen3_next", architecture="Qwen3NextForCausalLM", read=read_next, write=write_next, defaults=DEFAULTS,
    delta_in_one=True, **COMMON,
)  # fmt: skip
QWEN3_5 = Family(name="qwen3_5_text", architecture="Qwen3_5ForCausalLM", read=read, write=write, defaults=DEFAULTS, **COMMON)
