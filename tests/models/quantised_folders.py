"""Writes folders as checkpoints in few bits are published: of a small model, its layers' matrices in one method's tensors."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from tilewright.models.checkpoint import INDEX
from tilewright.models.quantised import quantised_layout

GROUP = 32
"""Inputs that share a scale, where a method lets a checkpoint choose."""
SIZE = 0.01
"""Approximate scale of a unit of the integers."""


class Method(NamedTuple):
    """One way of publishing.

    Attributes:
        config: its `quantization_config`.
        made: the tensors of a matrix `[O, I]`, by their names behind the layer's. The numbers are drawn: what they mean is
            held against other libraries by the goldens.
    """

    config: dict[str, Any]
    made: Callable[[np.random.Generator, np.ndarray], dict[str, np.ndarray]]


def words(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(-(2**31), 2**31, shape, np.int32)


def scales(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return (2 * SIZE * rng.random(shape)).astype(np.float16)


def gptq(rng: np.random.Generator, w: np.ndarray) -> dict[str, np.ndarray]:
    outputs, inputs = w.shape
    groups = inputs // GROUP
    zeros = words(rng, groups, outputs // 8)
    return {"qweight": words(rng, inputs // 8, outputs), "qzeros": zeros, "scales": scales(rng, groups, outputs)}


def awq(rng: np.random.Generator, w: np.ndarray) -> dict[str, np.ndarray]:
    outputs, inputs = w.shape
    groups = inputs // GROUP
    zeros = words(rng, groups, outputs // 8)
    return {"qweight": words(rng, inputs, outputs // 8), "qzeros": zeros, "scales": scales(rng, groups, outputs)}


def packed(rng: np.random.Generator, w: np.ndarray) -> dict[str, np.ndarray]:
    outputs, inputs = w.shape
    found = {"weight_packed": words(rng, outputs, inputs // 8), "weight_scale": scales(rng, outputs, inputs // GROUP)}
    return {**found, "weight_shape": np.asarray(w.shape, np.int64)}


def integers(rng: np.random.Generator, w: np.ndarray) -> dict[str, np.ndarray]:
    return {"weight": rng.integers(-127, 128, w.shape, np.int8), "weight_scale": scales(rng, len(w), 1) / np.float16(8)}


def floats(rng: np.random.Generator, w: np.ndarray) -> dict[str, np.ndarray]:
    return {"weight": w.astype(ml_dtypes.float8_e4m3fn), "weight_scale": rng.random((len(w), 1), np.float32)}


def floats_in_blocks(rng: np.random.Generator, w: np.ndarray) -> dict[str, np.ndarray]:
    """With the scale of the activations, which is passed over."""
    found = rng.random((-(-len(w) // GROUP), -(-w.shape[1] // GROUP)), np.float32)
    return {"weight": w.astype(ml_dtypes.float8_e4m3fn), "weight_scale_inv": found, "input_scale": found[:1]}


def mxfp4(rng: np.random.Generator, w: np.ndarray) -> dict[str, np.ndarray]:
    outputs, inputs = w.shape
    pairs = rng.integers(0, 256, (outputs, inputs // 2), np.uint8)
    return {"weight_packed": pairs, "weight_scale": rng.integers(119, 123, (outputs, inputs // 32), np.uint8)}


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    """The configuration of compressed-tensors for one way of keeping the weights."""
    groups = {"group_0": {"targets": ["Linear"], "weights": {"symmetric": True, **weights}}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}


FOUR_BITS = {"bits": 4, "group_size": GROUP}
GROUPED = {"strategy": "group", "group_size": GROUP, "num_bits": 4}
CHANNELS = {"strategy": "channel", "num_bits": 8}
METHODS: dict[str, Method] = {
    "gptq": Method({"quant_method": "gptq", "desc_act": False, "sym": False, **FOUR_BITS}, gptq),
    "awq": Method({"quant_method": "awq", "version": "gemm", "zero_point": True, **FOUR_BITS}, awq),
    "packed": Method(compressed("pack-quantized", type="int", **GROUPED), packed),
    "int8": Method(compressed("int-quantized", type="int", **CHANNELS), integers),
    "fp8": Method(compressed("float-quantized", type="float", **CHANNELS), floats),
    "fp8 in blocks": Method({"quant_method": "fp8", "weight_block_size": [GROUP, GROUP]}, floats_in_blocks),
    "mxfp4": Method(compressed("mxfp4-pack-quantized", type="float", **GROUPED), mxfp4),
}
"""Published layouts by name: AutoGPTQ's, AutoAWQ's, compressed-tensors', and FP8 of DeepSeek's and Qwen's checkpoints."""


def quantise_folder(folder: Path, name: str) -> dict[str, np.ndarray]:
    """Puts the layers' matrices of a folder into a method's tensors. Returns the model as it is then, by its plain names."""
    config = json.loads((folder / "config.json").read_text())
    method = METHODS[name]
    rng = np.random.default_rng(0)
    layout = quantised_layout(method.config)
    assert layout is not None
    stored = dict[str, np.ndarray]()
    after = dict[str, np.ndarray]()
    for key, w in load_file(folder / "model.safetensors").items():
        if ".layers." not in key or w.ndim != 2:
            stored[key] = after[key] = w
            continue
        made = method.made(rng, w)
        after[key] = layout.read(made).weights()
        stored |= {f"{key.removesuffix('.weight')}.{tensor}": value for tensor, value in made.items()}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": method.config}))
    (folder / "model.safetensors").unlink()
    write_shards(folder, stored)
    return after


def write_shards(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    """Two files with an index; a layer's tensors may lie in both. Floats of 8 bits go in as bytes, for NumPy has no such."""
    floats = {name for name, value in tensors.items() if value.dtype == ml_dtypes.float8_e4m3fn}
    held = {name: value.view(np.uint8) if name in floats else value for name, value in tensors.items()}
    places = {name: f"model-0000{n % 2 + 1}-of-00002.safetensors" for n, name in enumerate(sorted(held))}
    for file in sorted(set(places.values())):
        save_file({name: held[name] for name in held if places[name] == file}, folder / file)
        data = (folder / file).read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        for name in floats & header.keys():
            header[name]["dtype"] = "F8_E4M3"
        text = json.dumps(header).encode()
        (folder / file).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))
