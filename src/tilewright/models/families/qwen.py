"""Qwen3 and its mixtures of experts (arXiv 2505.09388 §2), and Qwen2 and Qwen2.5 (arXiv 2407.10671 §2.2)."""

from typing import Any

from tilewright.models.config import ConfigReader
from tilewright.models.experts import ExpertNames
from tilewright.models.family import Family, full_attention, mixture, windows, write_balance, write_windows

FIRST_WINDOW = 28
"""Default first layer with a window, in configurations that use windows."""


def read(read: ConfigReader) -> dict[str, Any]:
    if not read.flag("use_sliding_window", default=False):
        return full_attention(read)
    first = read.fields.get("max_window_layers", FIRST_WINDOW)
    good = isinstance(first, int) and first >= 0
    read.require(good, f"max_window_layers must be a number of layers, found {first!r}")
    return windows(read, (lambda layer: layer >= first) if good else lambda layer: True)


def write(config: Any) -> dict[str, Any]:
    return {"use_sliding_window": True, **write_windows(config)} if config.sliding_layers else {}


def dense_layers(reader: ConfigReader) -> tuple[int, ...]:
    """Returns the layers with an MLP in a model with experts."""
    layers = reader.integer("num_hidden_layers")
    step = reader.integer("decoder_sparse_step", default=1)
    dense = reader.fields.get("mlp_only_layers") or []
    good = isinstance(dense, list) and all(isinstance(n, int) and 0 <= n < layers for n in dense)
    reader.require(good, f"mlp_only_layers must be layers from 0 to {layers - 1}, found {dense!r}")
    listed = set(dense) if good else set()
    return tuple(n for n in range(layers) if n in listed or (n + 1) % step != 0)


def read_mixture(reader: ConfigReader) -> dict[str, Any]:
    # Newer configurations use the second name.
    experts = "num_experts" if "num_experts" in reader.fields else "num_local_experts"
    return {
        **read(reader),
        **mixture(reader, experts, "moe_intermediate_size", reader.flag("norm_topk_prob", default=False)),
        "dense_layers": dense_layers(reader),
    }


def write_mixture(config: Any) -> dict[str, Any]:
    return {
        **write(config),
        "num_experts": config.mixture.experts,
        "num_experts_per_tok": config.mixture.chosen,
        "moe_intermediate_size": config.mixture.size,
        "norm_topk_prob": config.mixture.normalised,
        "mlp_only_layers": list(config.dense_layers),
        **write_balance(config),
    }


EXPERTS = "mlp.experts.*"
PER_EXPERT_TENSORS = ExpertNames(
    "mlp.gate", (f"{EXPERTS}.gate_proj.weight", f"{EXPERTS}.up_proj.weight"), f"{EXPERTS}.down_proj.weight"
)
"""Tensor names of checkpoints that store each expert's matrices separately."""

# Qwen3's default head size is 128, not the hidden size divided by the heads (Qwen3-4B: 2560 / 32 = 80).
QWEN3 = Family(name="qwen3", architecture="Qwen3ForCausalLM", read=read, write=write, head_dim=128, qk_norm=True, gguf="qwen3")
QWEN2 = Family(name="qwen2", architecture="Qwen2ForCausalLM", read=read, write=write, qkv_bias=True, gguf="qwen2")
QWEN3_MOE = Family(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    read=read_mixture,
    write=write_mixture,
    defaults={"num_experts_per_tok": 8, "moe_intermediate_size": 768},
    head_dim=128,
    qk_norm=True,
    experts=PER_EXPERT_TENSORS,
    gguf="qwen3moe",
)
