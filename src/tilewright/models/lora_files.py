"""LoRA adapters in PEFT's format: a folder with `adapter_config.json` and `adapter_model.safetensors`.

An adapter adds `x @ A.T @ B.T * scale` to a matmul, where the scale is `lora_alpha / r`, or `lora_alpha / sqrt(r)` with
`use_rslora` (arXiv 2106.09685, 2312.03732). Other features of PEFT's LoRA are errors, because ignoring them would change the
answers.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from tilewright.models import decoder
from tilewright.models.checkpoint import (
    chosen_dtype,
    load_decoder,
    read_config,
    read_json,
    replace_file,
    save_params,
    stored_dtype,
    write_tensors,
)
from tilewright.models.config import text_tensor
from tilewright.models.lora import Adapter, Adapters, LoraSettings, LowRankPair, adapter_scale
from tilewright.models.params import AUTO, DTYPES, to_host
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
    return rank, adapter_scale(rank, alpha, bool(fields.get("use_rslora")))


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


def write_adapter(folder: Path, base: str, model: Path, settings: LoraSettings, pairs: Mapping[str, LowRankPair]) -> None:
    """Writes a float32 adapter in PEFT's format. All processes must call this function; process 0 writes, and
    the others wait.

    Args:
        folder: folder of the two files; created.
        base: name of the base model.
        model: folder of the base model. PEFT finds the text half of a multimodal model below `model.language_model`.
        settings: settings of the adapter.
        pairs: A and B of each module, without the adapter's scale.
    """

    multimodal = "text_config" in read_config(model)

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        for module, pair in pairs.items():
            name = re.sub(r"^model\.", "model.language_model.", module) if multimodal else module
            for which, value in zip("AB", pair, strict=True):
                yield f"base_model.model.{name}.lora_{which}.weight", np.asarray(to_host(value), np.float32, order="C")

    write_tensors(folder / WEIGHTS, tensors(), {"format": "pt"})
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": settings.rank,
        "lora_alpha": int(settings.alpha) if settings.alpha == int(settings.alpha) else settings.alpha,
        "use_rslora": settings.rslora,
        "lora_dropout": 0.0,
        "bias": "none",
        # Paths within a layer: the last part alone may also name experts.
        "target_modules": sorted({re.sub(r".*\.layers\.\d+\.", "", module) for module in pairs}),
        "inference_mode": True,
    }
    if jax.process_index() == 0:
        text = json.dumps(fields, indent=2) + "\n"
        replace_file(folder / CONFIG, lambda path: path.write_text(text, encoding="utf-8"))
    multihost_utils.sync_global_devices(f"saved {folder}")


def merge_adapter(model: Path, adapter: Path, out: Path) -> None:
    """Writes a model with an adapter in its weights: `config.json` and safetensors, without the tokenizer.

    Sums are float32. A checkpoint of 16-bit numbers becomes bfloat16, any other float32. All processes must call this function,
    and each writes a part.

    Args:
        model: folder of the base model.
        adapter: folder of the adapter, in PEFT's format.
        out: folder of the merged model; created.

    Raises:
        ValueError: a folder cannot be read, or the adapter does not match the model.
    """
    adapters = Adapters((read_adapter("merged", adapter),))
    config, params = load_decoder(model, jnp.float32)
    specs = decoder.declare(config)
    dtype = chosen_dtype(AUTO, stored_dtype(model), bfloat16=True)
    save_params(out, decoder.config_to_hf(config), specs, adapters.merge(specs, params), DTYPES[dtype])
