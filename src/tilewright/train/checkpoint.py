"""Checkpoints of training: state and figures in one safetensors file, from which a run goes on as if never interrupted."""

import hashlib
import json
from collections.abc import Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError, safe_open

from tilewright.models.checkpoint import read_part, write_tensors
from tilewright.models.params import from_parts, to_host

FIGURES = "figures."


def named_leaves(tree: Any) -> dict[str, Any]:
    """Each array of a tree under its path."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def fingerprint(tree: Any) -> str:
    """What tells the arrays of one tree from those of another: names, shapes, dtypes and every byte."""
    digest = hashlib.sha256()
    for name, leaf in named_leaves(tree).items():
        array = np.ascontiguousarray(leaf)
        digest.update(f"{name} {array.shape} {array.dtype} ".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()[:16]


def save(path: Path, state: Any, step: int, figures: Mapping[str, np.ndarray], identity: Mapping[str, Any]) -> None:
    """Writes the state after `step` steps and the figures so far; the file appears whole or not at all.

    Of several processes all must call this; the first one writes.
    """
    arrays = ((name, to_host(leaf)) for name, leaf in named_leaves(state).items())
    named = ((FIGURES + name, np.ascontiguousarray(values)) for name, values in figures.items())
    write_tensors(path, chain(arrays, named), {"step": str(step), "identity": json.dumps(identity, sort_keys=True)})


def load(path: Path, like: Any, identity: Mapping[str, Any]) -> tuple[Any, int, dict[str, np.ndarray]]:
    """Reads a state of the same run: the state, its step and the figures.

    Args:
        like: a state of the same structure; each array is divided over devices as its own, and has its dtype.

    Raises:
        ValueError: the file is no checkpoint, or one of a run with other options (each that differs is named).
    """
    try:
        with safe_open(path, "numpy") as file:
            metadata = file.metadata() or {}
            require_same_run(path, json.loads(metadata.get("identity", "{}")), json.loads(json.dumps(identity)))
            leaves = [
                from_parts(leaf.shape, leaf.sharding, leaf.dtype, partial(read_part, file, name))
                for name, leaf in named_leaves(like).items()
            ]
            figures = {name.removeprefix(FIGURES): file.get_tensor(name) for name in file.keys() if name.startswith(FIGURES)}  # noqa: SIM118
    except (SafetensorError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a readable checkpoint: {error}") from error
    return jax.tree.unflatten(jax.tree.structure(like), leaves), int(metadata["step"]), figures


def require_same_run(path: Path, saved: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    differs = [k for k in sorted({*saved, *expected}) if saved.get(k) != expected.get(k)]
    if differs:
        told = "; ".join(f"{k}: checkpoint {saved.get(k)!r}, now {expected.get(k)!r}" for k in differs)
        raise ValueError(f"{path} belongs to another run ({told}); name another --out, or pass the same options")
