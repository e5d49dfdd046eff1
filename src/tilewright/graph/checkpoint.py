"""Checkpoints of graph training: state and curves in one safetensors file, from which a run goes on as if never interrupted."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

CURVE = "curve."


def named_leaves(tree: Any) -> dict[str, Any]:
    """Each array of a tree under its path."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def save(path: Path, state: Any, epoch: int, curves: Mapping[str, np.ndarray], identity: Mapping[str, Any]) -> None:
    """Writes the state after `epoch` epochs and the curves so far; the file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {name: np.asarray(leaf) for name, leaf in named_leaves(state).items()}
    arrays |= {CURVE + name: np.ascontiguousarray(values) for name, values in curves.items()}
    partial = path.with_suffix(".partial")
    save_file(arrays, partial, metadata={"epoch": str(epoch), "identity": json.dumps(identity, sort_keys=True)})
    os.replace(partial, path)


def load(path: Path, like: Any, identity: Mapping[str, Any]) -> tuple[Any, int, dict[str, np.ndarray]]:
    """Reads a state of the same run: the state, its epoch and the curves.

    Args:
        like: a state of the same structure, whose arrays give the dtypes.

    Raises:
        ValueError: the file is no checkpoint, or one of a run with other options (each that differs is named).
    """
    try:
        with safe_open(path, "numpy") as file:
            metadata = file.metadata() or {}
            require_same_run(path, json.loads(metadata.get("identity", "{}")), json.loads(json.dumps(identity)))
            leaves = [jnp.asarray(file.get_tensor(name), leaf.dtype) for name, leaf in named_leaves(like).items()]
            curves = {name.removeprefix(CURVE): file.get_tensor(name) for name in file.keys() if name.startswith(CURVE)}  # noqa: SIM118
    except (SafetensorError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a readable checkpoint: {error}") from error
    return jax.tree.unflatten(jax.tree.structure(like), leaves), int(metadata["epoch"]), curves


def require_same_run(path: Path, saved: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    differs = [k for k in sorted({*saved, *expected}) if saved.get(k) != expected.get(k)]
    if differs:
        told = "; ".join(f"{k}: checkpoint {saved.get(k)!r}, now {expected.get(k)!r}" for k in differs)
        raise ValueError(f"{path} belongs to another run ({told}); name another --out, or pass the same options")
