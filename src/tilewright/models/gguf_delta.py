"""Linear attention in GGUF files: sizes, names of tensors, and order of heads.

A file has the inputs of queries, keys and values in one tensor, and those of gates in another. In checkpoints of Qwen3-Next
both are one tensor, interleaved by key head. Files of Qwen3.5 have the value heads in strided order: the first of each key
head, then the second of each; checkpoints have all value heads of a key head together. Files store negated exponentials of the
log rates.

Source: llama.cpp's conversion/qwen.py.
"""

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from tilewright.models.delta import DeltaSizes
from tilewright.models.gguf_head import GGUFTensor
from tilewright.models.gguf_slices import ArrangedSlice

STRIDED_VALUE_HEADS = {"qwen3next": False, "qwen35": True, "qwen35moe": True}
"""Architectures with linear attention, and whether their files have value heads in strided order."""
FIELDS = {
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "linear_key_head_dim": "ssm.state_size",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
}
INNER_SIZE = "ssm.inner_size"
"""Channels of all values."""
INTERVAL = "full_attention_interval"
DEFAULT_INTERVAL = 4
"""llama.cpp's default period of layers with full attention."""
PREFIX = "linear_attn."
JOINED = f"{PREFIX}in_proj_qkvz.weight"
INPUTS = "attn_qkv.weight"
GATES = "attn_gate.weight"
FILE_NAMES = {
    "in_proj_a.weight": "ssm_alpha.weight",
    "in_proj_b.weight": "ssm_beta.weight",
    "in_proj_ba.weight": "ssm_ba.weight",
    "conv1d.weight": "ssm_conv1d.weight",
    "dt_bias": "ssm_dt.bias",
    "A_log": "ssm_a",
    "norm.weight": "ssm_norm.weight",
    "out_proj.weight": "ssm_out.weight",
}
"""The file's name of each tensor, by its checkpoint name after `PREFIX`."""
SHARED_GATE = "shared_expert_gate.weight"


def delta_fields(field: Callable[[str], Any], architecture: str, where: str) -> dict[str, Any]:
    """Returns fields of a `config.json` for the layers of linear attention.

    Args:
        field: finds a value of the architecture; None if there is none.

    Raises:
        ValueError: sizes are missing.
    """
    found = {name: field(stored) for name, stored in FIELDS.items()}
    inner = field(INNER_SIZE)
    heads = found["linear_num_value_heads"]
    if missing := [stored for stored in (*FIELDS.values(), INNER_SIZE) if not field(stored)]:
        raise ValueError(f"{where}: expected sizes of linear attention, found no {architecture}.{missing[0]}")
    return {**found, "linear_value_head_dim": inner // heads, INTERVAL: field(INTERVAL) or DEFAULT_INTERVAL}


def delta_names(architecture: str, layers: int) -> dict[str, str]:
    """Returns Hugging Face's name of each tensor of linear attention, by the file's name.

    The name is empty for the second of two tensors that Hugging Face joins.
    """
    if architecture not in STRIDED_VALUE_HEADS:
        return {}
    apart = {INPUTS: f"{PREFIX}in_proj_qkv.weight", GATES: f"{PREFIX}in_proj_z.weight"}
    names = apart if STRIDED_VALUE_HEADS[architecture] else {INPUTS: JOINED, GATES: ""}
    names |= {stored: f"{PREFIX}{name}" for name, stored in FILE_NAMES.items()}
    return {
        f"blk.{layer}.{stored}": f"model.layers.{layer}.{name}" if name else ""
        for layer in range(layers)
        for stored, name in names.items()
    }


def strided_order(sizes: DeltaSizes, width: int) -> np.ndarray:
    """Returns the index in the file of each of `width` entries of each value head, in strided order."""
    order = np.arange(sizes.value_heads * width).reshape(sizes.group, sizes.key_heads, width)
    return order.swapaxes(0, 1).reshape(-1)


def key_head_order(sizes: DeltaSizes) -> np.ndarray:
    """Returns the index in the file of each output of joined inputs.

    The order is a key head's query, key, values and gates, then those of the next key head.
    """
    ends = np.cumsum([0, sizes.keys, sizes.keys, sizes.values, sizes.values])
    parts = [np.arange(*bounds).reshape(sizes.key_heads, -1) for bounds in pairwise(ends)]
    return np.concatenate(parts, axis=1).reshape(-1)


def delta_slice(
    tensors: Mapping[str, GGUFTensor], stored_name: str, name: str, sizes: DeltaSizes, strided: bool
) -> ArrangedSlice:
    """Returns a tensor of a layer's linear attention.

    Args:
        stored_name: its name in the file.
        strided: the file has value heads in strided order.

    Raises:
        ValueError: the second of two joined tensors is missing.
    """
    tensor = tensors[stored_name]
    part = name.partition(PREFIX)[2]
    if name.endswith(JOINED):
        gates = stored_name.replace(INPUTS, GATES)
        if gates not in tensors:
            raise ValueError(f"expected {gates} beside {stored_name}, found none")
        return ArrangedSlice([tensor, tensors[gates]], key_head_order(sizes))
    values = strided_order(sizes, sizes.value_dim) if strided else np.arange(sizes.values)
    heads = strided_order(sizes, 1) if strided else np.arange(sizes.value_heads)
    channels = np.concatenate([np.arange(2 * sizes.keys), 2 * sizes.keys + values])
    if part == "conv1d.weight":
        return ArrangedSlice([tensor], channels, shape=(sizes.channels, 1, sizes.taps))
    if part in ("A_log", "dt_bias"):
        return ArrangedSlice([tensor], heads, shape=(sizes.value_heads,), log_rates=part == "A_log")
    if not strided or part == "norm.weight":
        return ArrangedSlice([tensor])
    if part == "out_proj.weight":
        return ArrangedSlice([tensor], columns=values)
    orders = {"in_proj_qkv.weight": channels, "in_proj_z.weight": values}
    return ArrangedSlice([tensor], orders.get(part, heads))
