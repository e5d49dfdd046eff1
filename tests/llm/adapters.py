"""A small model with two low-rank adapters, and what each of them makes of it by NumPy in float64."""

from pathlib import Path
from typing import Any

import numpy as np

from reference.dflash_numpy import Target, random_pair
from reference.lora_numpy import ALL, config_of, merged, random_adapter, write_adapter
from tilewright.runtime.options import EngineOptions
from tilewright.runtime.shapes import ShapeTable

PAIR = random_pair(5, target_layers=2, taps=[0, 1], block_size=4)
CONFIGS = {"all": config_of(ALL, 4, 8), "few": config_of(["q_proj", "v_proj"], 8, 24, use_rslora=True)}
ENGINE = EngineOptions(ShapeTable(batches=(1,), capacities=(64,), chunks=(32,)), page_size=16, pages=32)
"""Of an engine for one request at a time, with room for prefixes."""


def tensors_of(name: str) -> dict[str, Any]:
    config = CONFIGS[name]
    rng = np.random.default_rng(sorted(CONFIGS).index(name))
    return random_adapter(rng, PAIR.target_tensors, config["target_modules"], config["r"])


def folders_of_adapters(root: Path) -> dict[str, Path]:
    """The adapters as PEFT writes them."""
    return {name: write_adapter(root / name, config, tensors_of(name)) for name, config in CONFIGS.items()}


def merged_target(name: str | None) -> Target:
    """The model with an adapter in its weights; None for without."""
    tensors = PAIR.target_tensors if name is None else merged(PAIR.target_tensors, CONFIGS[name], tensors_of(name))
    return Target(PAIR.target_config, tensors)
