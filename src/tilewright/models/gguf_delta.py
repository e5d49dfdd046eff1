"""Layers of linear attention in GGUF files: their sizes, their tensors' names, and the order in which these have the heads.

A file has the inputs of queries, keys and values in one tensor and those of gates in another. Of Qwen3-Next both are one in
checkpoints, where each key head's come together. Of Qwen3.5 a file has the heads of values by turns: the first of each key,
then the second of each, where checkpoints have all heads of a key together. Rates stand as what is multiplied with.

Source: llama.cpp's conversion/qwen.py.
"""

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from tilewright.models.delta import DeltaSizes
from tilewright.models.gguf_head import GGUFTensor
from tilewright.models.gguf_slices import ArrangedSlice

BY_TURNS = {"qwen3next": False, "qwen35": True, "qwen35moe": True}
"""The architectures that have such layers, and whether their files have the heads of values by turns."""
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
"""llama.cpp's, of files that do not say which layers have attention."""
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
"""Of what checkpoints have behind `PREFIX`."""
SHARED_GATE = "shared_expert_gate.weight"


def delta_fields(field: Callable[[str], Any], architecture: str, where: str) -> dict[str, Any]:
    """Fields of a `config.json` for the layers of linear attention.

    Args:
        field: finds a value of the architecture's own; None where there is none.

    Raises:
        ValueError: sizes are missing.
    """
    found = {name: field(own) for name, own in FIELDS.items()}
    inner = field(INNER_SIZE)
    heads = found["linear_num_value_heads"]
    if missing := [own for own in (*FIELDS.values(), INNER_SIZE) if not field(own)]:
        raise ValueError(f"{where}: expected sizes of linear attention, found no {architecture}.{missing[0]}")
    return {**found, "linear_value_head_dim": inner // heads, INTERVAL: field(INTERVAL) or DEFAULT_INTERVAL}


def delta_names(architecture: str, layers: int) -> dict[str, str]:
    """Hugging Face's name of each tensor of linear attention, by the file's; empty for the second of two that are one there."""
    if architecture not in BY_TURNS:
        return {}
    apart = {INPUTS: f"{PREFIX}in_proj_qkv.weight", GATES: f"{PREFIX}in_proj_z.weight"}
    names = apart if BY_TURNS[architecture] else {INPUTS: JOINED, GATES: ""}
    names |= {own: f"{PREFIX}{name}" for name, own in FILE_NAMES.items()}
    return {
        f"blk.{layer}.{own}": f"model.layers.{layer}.{name}" if name else ""
        for layer in range(layers)
        for own, name in names.items()
    }


def by_turns(sizes: DeltaSizes, width: int) -> np.ndarray:
    """Number in the file of each of `width` entries of each value head, where heads come by turns."""
    order = np.arange(sizes.value_heads * width).reshape(sizes.group, sizes.key_heads, width)
    return order.swapaxes(0, 1).reshape(-1)


def by_key_head(sizes: DeltaSizes) -> np.ndarray:
    """Number in the file of each output of joined inputs: a key head's query, key, values and gates, then the next one's."""
    ends = np.cumsum([0, sizes.keys, sizes.keys, sizes.values, sizes.values])
    parts = [np.arange(*bounds).reshape(sizes.key_heads, -1) for bounds in pairwise(ends)]
    return np.concatenate(parts, axis=1).reshape(-1)


def delta_slice(tensors: Mapping[str, GGUFTensor], own: str, name: str, sizes: DeltaSizes, turns: bool) -> ArrangedSlice:
    """A tensor of a layer's linear attention.

    Args:
        own: its name in the file.
        turns: whether the file has the heads of values by turns.

    Raises:
        ValueError: the other tensor of two that are one is missing.
    """
    tensor = tensors[own]
    part = name.partition(PREFIX)[2]
    if name.endswith(JOINED):
        gates = own.replace(INPUTS, GATES)
        if gates not in tensors:
            raise ValueError(f"expected {gates} beside {own}, found none")
        return ArrangedSlice([tensor, tensors[gates]], by_key_head(sizes))
    values = by_turns(sizes, sizes.value_dim) if turns else np.arange(sizes.values)
    heads = by_turns(sizes, 1) if turns else np.arange(sizes.value_heads)
    channels = np.concatenate([np.arange(2 * sizes.keys), 2 * sizes.keys + values])
    if part == "conv1d.weight":
        return ArrangedSlice([tensor], channels, shape=(sizes.channels, 1, sizes.taps))
    if part in ("A_log", "dt_bias"):
        return ArrangedSlice([tensor], heads, shape=(sizes.value_heads,), log_rates=part == "A_log")
    if not turns or part == "norm.weight":
        return ArrangedSlice([tensor])
    if part == "out_proj.weight":
        return ArrangedSlice([tensor], columns=values)
    orders = {"in_proj_qkv.weight": channels, "in_proj_z.weight": values}
    return ArrangedSlice([tensor], orders.get(part, heads))
