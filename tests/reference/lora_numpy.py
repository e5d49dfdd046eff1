"""LoRA adapters as PEFT publishes them, written and merged by NumPy from the description of the method.

A linear layer with the weight W `[O, I]` gives `x @ (W + scale * B @ A).T`, A being `[r, I]` and B `[O, r]`; the scale is
`lora_alpha / r`, with `use_rslora` `lora_alpha / sqrt(r)` (arXiv 2106.09685 §4.1; 2312.03732 §3).
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

Tensors = Mapping[str, NDArray[Any]]
PREFIX = "base_model.model."
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def random_adapter(
    rng: np.random.Generator, tensors: Tensors, targets: Sequence[str], rank: int
) -> dict[str, NDArray[np.float32]]:
    """Tensors of an adapter that changes a model much, for every matrix whose module is named so."""
    made = {}
    for name, weight in tensors.items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in targets:
            outputs, inputs = weight.shape
            a = rng.normal(size=(rank, inputs))
            b = rng.normal(size=(outputs, rank)) / (rank * inputs) ** 0.5
            made[f"{PREFIX}{module}.lora_A.weight"] = a.astype(np.float32)
            made[f"{PREFIX}{module}.lora_B.weight"] = b.astype(np.float32)
    return made


def config_of(targets: Sequence[str], rank: int, alpha: float, **more: Any) -> dict[str, Any]:
    """An `adapter_config.json` with the fields that PEFT writes."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.05,
        "bias": "none",
        "target_modules": list(targets),
        "modules_to_save": None,
        "use_rslora": False,
        "use_dora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        **more,
    }


def write_adapter(folder: Path, config: Mapping[str, Any], tensors: Tensors) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, folder / "adapter_model.safetensors")
    return folder


def merged(model: Tensors, config: Mapping[str, Any], adapter: Tensors) -> dict[str, NDArray[np.float64]]:
    """The model's tensors with an adapter in them."""
    rank = config["r"]
    scale = config["lora_alpha"] / (rank**0.5 if config["use_rslora"] else rank)
    found = {name: value.astype(np.float64) for name, value in model.items()}
    for name, a in adapter.items():
        if name.endswith(".lora_A.weight"):
            module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
            b = adapter[name.replace("lora_A", "lora_B")]
            found[f"{module}.weight"] += scale * b.astype(np.float64) @ a.astype(np.float64)
    return found
