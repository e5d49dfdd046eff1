"""Writes small GGUF files as llama.cpp's converter writes them, from a model in Hugging Face's layout."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tilewright.models.decoder import DecoderConfig, config_to_hf
from tilewright.models.family import Family
from tilewright.models.layers import LinearScaling, LongRopeScaling, YarnScaling
from tilewright.models.registry import FAMILIES

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.*.gate_proj": "ffn_gate_exps",
    "mlp.experts.*.up_proj": "ffn_up_exps",
    "mlp.experts.*.down_proj": "ffn_down_exps",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.experts.*.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.*.w3": "ffn_up_exps",
    "block_sparse_moe.experts.*.w2": "ffn_down_exps",
    "mlp.router": "ffn_gate_inp",
    "self_attn.sinks": "attn_sinks",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
"""Tensor names of layers with norms after their sublayers."""


def file_name(name: str, family: Family) -> str:
    """llama.cpp's name of a tensor."""
    if family.gguf in ("gpt-oss", "qwen3next", "qwen35", "qwen35moe") and name.endswith("post_attention_layernorm.weight"):
        return f"blk.{name.split('.')[2]}.post_attention_norm.weight"
    stem, _, suffix = name.rpartition(".")
    if stem in NAMES:
        return f"{NAMES[stem]}.{suffix}"
    _, _, layer, part = stem.split(".", 3)
    names = NAMES | GEMMA_NAMES if family.post_norms else NAMES
    return f"blk.{layer}.{names[part]}.{suffix}"


def with_stacked_experts(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors, those of all experts in one whose name has a `*` for an expert's number."""
    found = dict[str, np.ndarray]()
    experts = dict[str, dict[int, np.ndarray]]()
    for name, value in tensors.items():
        if match := re.fullmatch(r"(.*\.experts\.)(\d+)(\..*)", name):
            experts.setdefault(f"{match[1]}*{match[3]}", {})[int(match[2])] = value
        else:
            found[name] = value
    return found | {name: np.stack([each[n] for n in sorted(each)]) for name, each in experts.items()}


def with_gates_apart(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors as the converter of gpt-oss has them: experts' gates and ups apart, and their matrices `[E, out, in]`."""
    found = {}
    for name, value in tensors.items():
        layer, _, part = name.rpartition(".experts.")
        if part not in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"):
            found[f"{name}.weight" if name.endswith(".sinks") else name] = value
            continue
        stem, suffix = (part.removesuffix("_bias"), "bias") if part.endswith("_bias") else (part, "weight")
        turned = value if suffix == "bias" else value.swapaxes(1, 2)
        halves = {"gate_proj": turned[:, ::2], "up_proj": turned[:, 1::2]} if stem == "gate_up_proj" else {stem: turned}
        found |= {f"{layer}.experts.{half}.{suffix}": np.ascontiguousarray(each) for half, each in halves.items()}
    return found


def with_gates_together(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The inverse of `with_gates_apart`."""
    found = {}
    for name, value in tensors.items():
        layer, _, part = name.rpartition(".experts.")
        if not layer:
            found[name.removesuffix(".weight") if ".sinks" in name else name] = value
            continue
        stem, suffix = part.split(".")
        if stem == "up_proj":
            continue
        end = "_bias" if suffix == "bias" else ""
        if stem == "gate_proj":
            stem = "gate_up_proj"
            both = (value, tensors[name.replace("gate_proj", "up_proj")])
            value = np.stack(both, axis=2).reshape(len(value), -1, *value.shape[2:])
        found[f"{layer}.experts.{stem}{end}"] = np.ascontiguousarray(value if end else value.swapaxes(1, 2))
    return found


NAMES |= {
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
DELTA_NAMES = {
    "in_proj_qkv.weight": "attn_qkv.weight",
    "in_proj_z.weight": "attn_gate.weight",
    "in_proj_a.weight": "ssm_alpha.weight",
    "in_proj_b.weight": "ssm_beta.weight",
    "in_proj_ba.weight": "ssm_ba.weight",
    "conv1d.weight": "ssm_conv1d.weight",
    "dt_bias": "ssm_dt.bias",
    "A_log": "ssm_a",
    "norm.weight": "ssm_norm.weight",
    "out_proj.weight": "ssm_out.weight",
}


def delta_parts(part: str, config: DecoderConfig) -> list[tuple[str, np.ndarray | None]]:
    """The tensors that a file has for one of linear attention's, and which rows of it each has; of `out_proj`, columns.

    Qwen3.5's have the heads of values by turns, a head of each key before the next of each.
    """
    sizes = config.delta
    assert sizes is not None
    keys = sizes.key_heads
    group = sizes.group
    key_dim = sizes.key_dim
    value_dim = sizes.value_dim
    if part == "in_proj_qkvz.weight":
        whole = np.arange(keys * 2 * (key_dim + group * value_dim)).reshape(keys, -1)
        q, k, v, z = np.split(whole, [key_dim, 2 * key_dim, 2 * key_dim + group * value_dim], axis=1)
        return [("attn_qkv.weight", np.concatenate([each.ravel() for each in (q, k, v)])), ("attn_gate.weight", z.ravel())]
    if config.family == "qwen3_next" or part == "norm.weight":
        return [(DELTA_NAMES[part], None)]
    values, heads = (np.arange(keys * group * n).reshape(keys, group, n).swapaxes(0, 1).ravel() for n in (value_dim, 1))
    channels = np.concatenate([np.arange(2 * keys * key_dim), 2 * keys * key_dim + values])
    orders = {"in_proj_qkv.weight": channels, "conv1d.weight": channels, "in_proj_z.weight": values, "out_proj.weight": values}
    return [(DELTA_NAMES[part], orders.get(part, heads))]


def write_delta(
    writer: gguf.GGUFWriter, config: DecoderConfig, name: str, value: np.ndarray, kind: gguf.GGMLQuantizationType
) -> np.ndarray:
    """Writes one of linear attention's tensors, and gives what can be read of it, in Hugging Face's order."""
    layer, _, part = name.partition(".linear_attn.")
    found = np.empty_like(value)
    by_columns = part == "out_proj.weight"
    for part_name, order in delta_parts(part, config):
        order = np.arange(value.shape[by_columns]) if order is None else order
        stored = value[:, order] if by_columns else value[order]
        stored = -np.exp(stored) if part == "A_log" else stored.squeeze()
        small = stored.ndim == 1 or part == "conv1d.weight"
        own_kind = gguf.GGMLQuantizationType.F32 if small else kind
        data = gguf.quants.quantize(stored, own_kind)
        writer.add_tensor(f"blk.{layer.split('.')[2]}.{part_name}", data, raw_dtype=own_kind)
        after = gguf.quants.dequantize(data, own_kind)
        if by_columns:
            found[:, order] = after
        else:
            found[order] = np.log(-after) if part == "A_log" else after.reshape(len(order), *value.shape[1:])
    return found


def add_sizes(writer: gguf.GGUFWriter, config: DecoderConfig) -> None:
    """Sizes of linear attention, as llama.cpp's state-space models have them."""
    sizes = config.delta
    if sizes is None:
        return
    writer.add_ssm_conv_kernel(sizes.taps)
    writer.add_ssm_state_size(sizes.key_dim)
    writer.add_ssm_group_count(sizes.key_heads)
    writer.add_ssm_time_step_rank(sizes.value_heads)
    writer.add_ssm_inner_size(sizes.values)
    writer.add_full_attention_interval(config.num_layers)


def pairwise(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys in the order of a rotation of neighbours, as the converter of Llama puts them."""
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def halves_apart(rows: np.ndarray, heads: int) -> np.ndarray:
    """The inverse of `pairwise`."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(
    path: Path,
    config: DecoderConfig,
    tensors: Mapping[str, np.ndarray],
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    fields: Mapping[str, Any] | None = None,
) -> dict[str, np.ndarray]:
    """Writes a model with its matrices quantised.

    Args:
        tensors: by Hugging Face's names.
        fields: further metadata by their names; a list becomes an array.

    Returns:
        the tensors as they are after quantisation, by Hugging Face's names.
    """
    family = FAMILIES[config.family]
    hf = config_to_hf(config)
    arch = str(family.gguf)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(hf["num_hidden_layers"])
    writer.add_context_length(hf["max_position_embeddings"])
    writer.add_embedding_length(hf["hidden_size"])
    writer.add_feed_forward_length(hf["intermediate_size"])
    writer.add_head_count(hf["num_attention_heads"])
    writer.add_head_count_kv(hf["num_key_value_heads"])
    writer.add_key_length(hf["head_dim"])
    writer.add_value_length(hf["head_dim"])
    writer.add_rope_freq_base(hf["rope_theta"])
    writer.add_rope_dimension_count(int(hf["head_dim"] * config.partial_rotary_factor))
    writer.add_layer_norm_rms_eps(hf["rms_norm_eps"])
    writer.add_vocab_size(hf["vocab_size"])
    if config.mixture is not None:
        writer.add_expert_count(config.mixture.experts)
        writer.add_expert_used_count(config.mixture.chosen)
        writer.add_expert_feed_forward_length(config.mixture.size)
        if config.mixture.shared:
            writer.add_expert_shared_feed_forward_length(config.mixture.shared)
    add_sizes(writer, config)
    if config.sliding_window is not None:
        writer.add_sliding_window(config.sliding_window)
    if config.score_softcap is not None:
        writer.add_attn_logit_softcapping(config.score_softcap)
    if config.logit_softcap is not None:
        writer.add_final_logit_softcapping(config.logit_softcap)
    add_fields(writer, fields or {})
    if isinstance(config.rope_scaling, YarnScaling):
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(config.rope_scaling.factor)
        writer.add_rope_scaling_orig_ctx_len(config.rope_scaling.original_max_position_embeddings)
    elif isinstance(config.rope_scaling, LinearScaling):
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope_scaling.factor)
    elif isinstance(scaling := config.rope_scaling, LongRopeScaling):
        writer.add_rope_scaling_orig_ctx_len(scaling.original_max_position_embeddings)
        writer.add_rope_scaling_attn_factors(scaling.attention_factor)
        for name, factors in (("long", scaling.long_factor), ("short", scaling.short_factor)):
            writer.add_tensor(f"rope_factors_{name}.weight", np.asarray(factors, np.float32))
    elif config.rope_scaling is not None:
        plain = np.asarray([config.rope_theta ** (-2 * i / config.head_dim) for i in range(config.head_dim // 2)])
        writer.add_tensor("rope_freqs.weight", (plain / np.asarray(config.rope_frequencies)).astype(np.float32))
    kept = {}
    turned = arch == "gpt-oss"
    for name, value in (with_gates_apart(tensors) if turned else with_stacked_experts(tensors)).items():
        rows = np.asarray(value, np.float32)
        if ".linear_attn." in name:
            kept[name] = write_delta(writer, config, name, rows, kind)
            continue
        if name.endswith("shared_expert_gate.weight"):
            writer.add_tensor(f"blk.{name.split('.')[2]}.ffn_gate_inp_shexp.weight", rows[0])
            kept[name] = rows
            continue
        heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(name.split(".")[-2])
        stored = pairwise(rows, heads) if heads is not None and family.pairwise else rows
        stored_kind = kind if rows.ndim > 1 and not name.endswith("bias") else gguf.GGMLQuantizationType.F32
        offset = np.float32(family.norm_offset)
        offset = offset if name.endswith("norm.weight") else np.float32(0)
        data = gguf.quants.quantize(stored + offset, stored_kind)
        writer.add_tensor(file_name(name, family), data, raw_dtype=stored_kind)
        after = gguf.quants.dequantize(data, stored_kind) - offset
        if "*" in name:
            kept |= {name.replace("*", str(n)): one for n, one in enumerate(after)}
        else:
            kept[name] = after if heads is None or stored is rows else halves_apart(after, heads)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return with_gates_together(kept) if turned else kept


def add_fields(writer: gguf.GGUFWriter, fields: Mapping[str, Any]) -> None:
    """Metadata of the types that llama.cpp's own files have."""
    for name, value in fields.items():
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            writer.add_string(name, value)
