"""Reads and writes graph neural networks: a folder with `config.json` and `model.safetensors`."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from tilewright.models import gnn
from tilewright.models.checkpoint import CONFIG, load_params, read_config, save_params
from tilewright.models.config import ConfigReader
from tilewright.models.gnn import Config, GNNParams, State
from tilewright.models.gnn_families import FAMILIES
from tilewright.models.params import DTYPES, Dtype


def config_to_json(config: Config) -> dict[str, Any]:
    """Returns the fields of `config.json`."""
    (family,) = (name for name, kind in FAMILIES.items() if kind is type(config))
    return {"model_type": family, **asdict(config)}


def config_from_json(found: Mapping[str, Any], where: str = CONFIG) -> Config:
    """Reads the fields of `config.json`.

    Raises:
        ValueError: one message that lists every field that is missing or has a wrong value.
    """
    read = ConfigReader(found, where)
    kind = FAMILIES[read.choice("model_type", tuple(FAMILIES))]
    values = {}
    for field in fields(kind):
        value = found.get(field.name)
        wanted = field.type if isinstance(field.type, type) else str
        right = isinstance(value, int | float) if wanted is float else isinstance(value, wanted)
        right = right and (wanted is bool) == isinstance(value, bool)
        read.require(right, f"{field.name} must be of type {wanted.__name__}, found {value!r}")
        values[field.name] = value
    read.finish()
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def save_gnn(folder: Path, config: Config, params: GNNParams, state: State) -> None:
    """Writes a model and its running statistics, in float32. Creates the folder."""
    specs = (gnn.declare(config), gnn.declare_state(config))
    save_params(folder, config_to_json(config), specs, (params, state), jnp.float32)


def load_gnn(folder: Path, dtype: Dtype = "float32") -> tuple[Config, GNNParams, State]:
    """Reads a model as `dtype`; its running statistics are always float32.

    Raises:
        ValueError: a file is missing or malformed, or the tensors do not match the configuration.
    """
    config = config_from_json(read_config(folder), str(folder / CONFIG))
    specs = (gnn.declare(config), gnn.declare_state(config))
    params, state = load_params(folder, specs, jnp.float32)
    return config, jax.tree.map(lambda value: value.astype(DTYPES[dtype]), params), state
