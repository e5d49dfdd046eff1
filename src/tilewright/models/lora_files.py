"""LoRA adapters in PEFT's format: a folder with `adapter_config.json` and `adapter_model.safetensors`.

An adapter adds `x @ A.T @ B.T * scale` to a matmul, where the scale is `lora_alpha / r`, or `lora_alpha / sqrt(r)` with
`use_rslora` (arXiv 2106.09685, 2312.03732). Other features of PEFT's LoRA are errors, because ignoring them would change the
answers.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.models.checkpoint import read_json
from tilewright.models.config import text_tensor
from tilewright.models.lora import Adapter, Adapters, LowRankPair
from tilewright.models.stored import FLOATS, first_names, open_file

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<which>[AB])\.weight")
UNSUPPORTED: dict[str, str] = {
    "use_dora": "DoRA",
    "modules_to_save": "modules saved whole",
    "lora_bias": "LoRA biases",
    "trainable_token_indices": "token embeddings",
    "target_parameters": "parameters other than weights of modules",
    "rank_pattern": "ranks of single modules",
    "alpha_pattern": "scales of single modules",
    "layer_replication": "repeated layers",
    "fan_in_fan_out": "transposed weights",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal matrices",
    "alora_invocation_tokens": "activation by tokens",
    "arrow_config": "Arrow",
    "megatron_config": "Megatron's layers",
    "monteclora_config": "MonteCLoRA",
}
"""Fields of unsupported features, which must be absent, null, false or empty, and names of the features."""
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of `init_lora_weights` that change the base model's weights."""
KINDS = {"lora_magnitude_vector": "DoRA", "lora_embedding_": "embeddings", "modules_to_save": "modules saved whole"}
"""Unsupported kinds of tensors, by a part of their names."""


def read_adapters(folders: Mapping[str, Path | str], devices: int = 1) -> Adapters | None:
    """Reads the adapters of these folders, by their names; None for no folder.

    Args:
        devices: number of devices of the model.

    Raises:
        ValueError: there are several devices, or see `read_adapter`.
    """
    if not folders:
        return None
    if devices > 1:
        raise ValueError(f"expected one device for low-rank adapters ({', '.join(folders)}), found {devices}")
    return Adapters(tuple(read_adapter(name, Path(folder)) for name, folder in folders.items()))


def read_adapter(name: str, folder: Path) -> Adapter:
    """Reads the adapter in a folder.

    Raises:
        ValueError: the name is empty, files are missing or malformed, or the adapter has unsupported features.
    """
    if not name or name != name.strip():
        raise ValueError(f"expected a name for the adapter in {folder}, found {name!r}")
    if not (folder / CONFIG).is_file():
        raise ValueError(f"adapter {name}: expected {CONFIG} in {folder}, found none")
    rank, scale = rank_and_scale(read_json(folder / CONFIG), folder / CONFIG)
    if not (folder / WEIGHTS).is_file():
        raise ValueError(
            f"adapter {name}: expected {WEIGHTS} in {folder}, found none (.bin files may run code and are not read)"
        )
    pairs = {module: LowRankPair(a, b * np.float32(scale)) for module, (a, b) in read_pairs(folder / WEIGHTS, rank).items()}
    return Adapter(name, rank, pairs)


def rank_and_scale(fields: Mapping[str, Any], where: Path) -> tuple[int, float]:
    """Reads the rank and the scale of a configuration.

    Raises:
        ValueError: fields of unsupported features, or missing or wrong fields; names the file `where`.
    """
    if fields.get("peft_type") != "LORA":
        raise ValueError(f"{where}: expected peft_type LORA, found {fields.get('peft_type')!r}")
    unsupported = [f"{feature} ({field})" for field, feature in UNSUPPORTED.items() if fields.get(field)]
    if fields.get("bias") not in (None, "none"):
        unsupported.append(f"biases (bias {fields['bias']!r})")
    initial = fields.get("init_lora_weights")
    if isinstance(initial, str) and initial.lower().startswith(CHANGES_BASE):
        unsupported.append(f"a base model with other weights (init_lora_weights {initial!r})")
    if unsupported:
        raise ValueError(f"{where}: expected only low-rank matrices, found {', '.join(unsupported)}")
    rank = fields.get("r")
    alpha = fields.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        raise ValueError(f"{where}: expected r of at least 1, found {rank!r}")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not np.isfinite(alpha):
        raise ValueError(f"{where}: expected a number as lora_alpha, found {alpha!r}")
    return rank, alpha / (rank**0.5 if fields.get("use_rslora") else rank)


def read_pairs(path: Path, rank: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Reads A and B of each module, in float32.

    Raises:
        ValueError: other tensors, another rank, numbers that are not finite, or only one of A and B.
    """
    found: dict[str, dict[str, np.ndarray]] = {}
    with open_file(path) as file:
        for stored in sorted(file.keys()):
            match = TENSOR.fullmatch(stored)
            if match is None:
                kind = next((f", part of {feature}" for part, feature in KINDS.items() if part in stored), "")
                raise ValueError(f"{path}: expected tensors lora_A.weight and lora_B.weight, found {stored}{kind}")
            if file.get_slice(stored).get_dtype() not in FLOATS:
                raise ValueError(f"{path}: {stored}: expected {', '.join(FLOATS)}, found {file.get_slice(stored).get_dtype()}")
            value = np.asarray(file.get_tensor(stored), np.float32)
            which = match["which"]
            if value.ndim != 2 or value.shape["AB".index(which)] != rank:
                expected = f"[{rank}, inputs]" if which == "A" else f"[outputs, {rank}]"
                raise ValueError(f"{path}: {stored}: expected {expected}, found {list(value.shape)}")
            if not np.isfinite(value).all():
                raise ValueError(f"{path}: {stored}: expected finite numbers, found infinity or NaN")
            module = match["module"]
            found.setdefault(text_tensor(module) or module, {})[which] = value
    if single := [module for module, each in found.items() if len(each) < 2]:
        raise ValueError(f"{path}: expected A and B of each module, found only one for {first_names(single)}")
    if not found:
        raise ValueError(f"{path}: expected at least one module, found none")
    return {module: (each["A"], each["B"]) for module, each in found.items()}
