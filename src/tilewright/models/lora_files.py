"""LoRA adapters as PEFT publishes them: a folder with `adapter_config.json` and `adapter_model.safetensors`.

What an adapter adds to a matrix is `x @ A.T @ B.T * scale`, the scale being `lora_alpha / r`, or `lora_alpha / sqrt(r)` where
`use_rslora` says so (arXiv 2106.09685, 2312.03732). What else PEFT's LoRA may do is refused by name: ignored it would give
another model's answers.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.models.checkpoint import read_json
from tilewright.models.config import text_tensor
from tilewright.models.lora import Adapter, Adapters, LowRankPair
from tilewright.models.stored import FLOATS, open_file, some

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<which>[AB])\.weight")
REFUSED: dict[str, str] = {
    "use_dora": "DoRA",
    "modules_to_save": "modules that are saved whole",
    "lora_bias": "biases of its own",
    "trainable_token_indices": "embeddings of tokens",
    "target_parameters": "parameters that are no module's weight",
    "rank_pattern": "other ranks for some modules",
    "alpha_pattern": "other scales for some modules",
    "layer_replication": "layers that are repeated",
    "fan_in_fan_out": "weights that lie transposed",
    "use_qalora": "QALoRA",
    "use_bdlora": "blocks on the diagonal",
    "alora_invocation_tokens": "activation by tokens",
    "arrow_config": "Arrow",
    "megatron_config": "Megatron's layers",
    "monteclora_config": "MonteCLoRA",
}
"""Fields of a configuration that must be absent, null, false or empty, and what they ask for."""
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of `init_lora_weights` that leave the base model with other weights than it is published with."""
KINDS = {"lora_magnitude_vector": "DoRA", "lora_embedding_": "embeddings", "modules_to_save": "modules that are saved whole"}
"""What tensors of other names are, by a part of these."""


def read_adapters(folders: Mapping[str, Path | str], devices: int = 1) -> Adapters | None:
    """Adapters of these folders, by the names that they get; None for no folder.

    Args:
        devices: over which the model lies.

    Raises:
        ValueError: these are several, or as `read_adapter` does.
    """
    if not folders:
        return None
    if devices > 1:
        raise ValueError(f"low-rank adapters are for one device, found {devices}")
    return Adapters(tuple(read_adapter(name, Path(folder)) for name, folder in folders.items()))


def read_adapter(name: str, folder: Path) -> Adapter:
    """An adapter of a folder.

    Raises:
        ValueError: the name is empty, files are missing or malformed, or ask for more than low-rank products of linear layers.
    """
    if not name or name != name.strip():
        raise ValueError(f"expected a name for the adapter in {folder}, found {name!r}")
    if not (folder / CONFIG).is_file():
        raise ValueError(f"adapter {name}: {folder} is no folder of an adapter: it has no {CONFIG}")
    rank, scale = rank_and_scale(read_json(folder / CONFIG), folder / CONFIG)
    if not (folder / WEIGHTS).is_file():
        raise ValueError(f"adapter {name}: expected {WEIGHTS} in {folder}; files that are code (.bin) are not read")
    pairs = {module: LowRankPair(a, b * np.float32(scale)) for module, (a, b) in read_pairs(folder / WEIGHTS, rank).items()}
    return Adapter(name, rank, pairs)


def rank_and_scale(fields: Mapping[str, Any], where: Path) -> tuple[int, float]:
    """The rank that a configuration says, and by what the product is multiplied.

    Raises:
        ValueError: what it asks for beyond that, or lacks; `where` it stands.
    """
    if fields.get("peft_type") != "LORA":
        raise ValueError(f"{where}: expected peft_type LORA, found {fields.get('peft_type')!r}")
    asked = [f"{said} ({field})" for field, said in REFUSED.items() if fields.get(field)]
    if fields.get("bias") not in (None, "none"):
        asked.append(f"biases (bias {fields['bias']!r})")
    begun = fields.get("init_lora_weights")
    if isinstance(begun, str) and begun.lower().startswith(CHANGES_BASE):
        asked.append(f"a base model with other weights (init_lora_weights {begun!r})")
    if asked:
        raise ValueError(f"{where}: expected low-rank products alone, found {', '.join(asked)}")
    rank = fields.get("r")
    alpha = fields.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        raise ValueError(f"{where}: expected r of at least 1, found {rank!r}")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not np.isfinite(alpha):
        raise ValueError(f"{where}: expected a number as lora_alpha, found {alpha!r}")
    return rank, alpha / (rank**0.5 if fields.get("use_rslora") else rank)


def read_pairs(path: Path, rank: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """A and B of each module, in float32.

    Raises:
        ValueError: tensors that are none of either, of another rank, not finite, or one without the other.
    """
    found: dict[str, dict[str, np.ndarray]] = {}
    with open_file(path) as file:
        for stored in sorted(file.keys()):
            match = TENSOR.fullmatch(stored)
            if match is None:
                kind = next((f", which is of {said}" for part, said in KINDS.items() if part in stored), "")
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
        raise ValueError(f"{path}: expected A and B of each module, found one alone of {some(single)}")
    if not found:
        raise ValueError(f"{path}: expected at least one module, found none")
    return {module: (each["A"], each["B"]) for module, each in found.items()}
