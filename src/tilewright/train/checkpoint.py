"""Training checkpoints: state and metrics, from which a run resumes exactly.

A checkpoint is one safetensors file, or a folder if the state is sharded over devices (`sharded_checkpoint.py`).
"""

import hashlib
import json
from collections.abc import Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import Array
from safetensors import SafetensorError, safe_open

from tilewright.models.checkpoint import write_tensors
from tilewright.models.params import from_parts, to_host
from tilewright.models.stored import read_part

METRICS = "figures."
WHOLE = "state.safetensors"
SHARDED = "sharded"
"""Names of the file and the folder. If a run has both, the later checkpoint counts."""

Saved = tuple[Any, int, dict[str, np.ndarray]]
"""State, number of steps, and metrics."""


def is_sharded(state: Any) -> bool:
    """Returns True if an array of the state is sharded over devices."""
    return any(isinstance(leaf, Array) and not leaf.is_fully_replicated for leaf in jax.tree.leaves(state))


def write(folder: Path, state: Any, step: int, metrics: Mapping[str, np.ndarray], run_fingerprint: Mapping[str, Any]) -> None:
    """Writes state and metrics after `step` steps, to a file or a folder. All processes must call this function."""
    if is_sharded(state):
        from tilewright.train import sharded_checkpoint  # the import takes a part of a second, which one device saves

        return sharded_checkpoint.save(folder / SHARDED, state, step, metrics, run_fingerprint)
    return save(folder / WHOLE, state, step, metrics, run_fingerprint)


def saved_steps(folder: Path) -> dict[Path, int]:
    """Lists the checkpoints of a run and their steps. Remains of an interrupted save are ignored.

    Raises:
        ValueError: the file is not a checkpoint.
    """
    file = folder / WHOLE
    sharded = folder / SHARDED
    found = {sharded / name: int(name) for name in [each.name for each in sharded.glob("*")] if name.isdecimal()}
    return {**found, **({file: saved_step(file)} if file.exists() else {})}


def saved_step(path: Path) -> int:
    """Reads the step of a file. Raises a `ValueError` if the file is not a checkpoint."""
    try:
        with safe_open(path, "numpy") as file:
            return int((file.metadata() or {})["step"])
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"{path}: expected a readable checkpoint, found none: {error}") from error


def read(folder: Path, like: Any, run_fingerprint: Mapping[str, Any]) -> Saved:
    """Reads the latest checkpoint of a run that has at least one. All processes must call this function.

    Raises:
        ValueError: see `load`.
    """
    found = saved_steps(folder)
    place = max(found, key=lambda each: found[each])
    if place.name == WHOLE:
        return load(place, like, run_fingerprint)
    from tilewright.train import sharded_checkpoint

    return sharded_checkpoint.load(folder / SHARDED, found[place], like, run_fingerprint)


def named_leaves(tree: Any) -> dict[str, Any]:
    """Returns the arrays of a tree by path."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def fingerprint(tree: Any) -> str:
    """Returns a digest of a tree's arrays: names, shapes, dtypes and all bytes."""
    digest = hashlib.sha256()
    for name, leaf in named_leaves(tree).items():
        array = np.ascontiguousarray(to_host(leaf))
        digest.update(f"{name} {array.shape} {array.dtype} ".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()[:16]


def save(path: Path, state: Any, step: int, metrics: Mapping[str, np.ndarray], run_fingerprint: Mapping[str, Any]) -> None:
    """Writes state and metrics after `step` steps to a file, atomically.

    All processes must call this function; the first one writes.
    """
    arrays = ((name, to_host(leaf)) for name, leaf in named_leaves(state).items())
    named = ((METRICS + name, np.ascontiguousarray(values)) for name, values in metrics.items())
    write_tensors(path, chain(arrays, named), {"step": str(step), "identity": json.dumps(run_fingerprint, sort_keys=True)})
    if jax.process_index() == 0:
        for remains in path.parent.glob(".*tmp*"):  # of a killed process; the names are ours or safetensors'
            remains.unlink()


def load(path: Path, like: Any, run_fingerprint: Mapping[str, Any]) -> Saved:
    """Reads the checkpoint of a run from a file.

    Args:
        path: the file.
        like: state with the structure, shardings and dtypes to return.
        run_fingerprint: fingerprint of the run that resumes.

    Raises:
        ValueError: the file is not a checkpoint, or belongs to a run with other options, which the message lists.
    """
    try:
        with safe_open(path, "numpy") as file:
            metadata = file.metadata() or {}
            require_same_run(path, json.loads(metadata.get("identity", "{}")), json.loads(json.dumps(run_fingerprint)))
            leaves = [
                from_parts(leaf.shape, leaf.sharding, leaf.dtype, partial(read_part, file, name))
                for name, leaf in named_leaves(like).items()
            ]
            metrics = {name.removeprefix(METRICS): file.get_tensor(name) for name in file.keys() if name.startswith(METRICS)}  # noqa: SIM118
    except (SafetensorError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: expected a readable checkpoint, found none: {error}") from error
    return jax.tree.unflatten(jax.tree.structure(like), leaves), int(metadata["step"]), metrics


def require_same_run(path: Path, saved: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raises a `ValueError` that lists the differences between the run of a checkpoint and the run that resumes.

    More steps than the checkpoint's extend its run.
    """
    differs = differing(saved, expected)
    if "steps" in differs and None not in differs["steps"] and differs["steps"][0] < differs["steps"][1]:
        del differs["steps"]
    if differs:
        differences = "; ".join(f"{name}: checkpoint {was!r}, now {now!r}" for name, (was, now) in differs.items())
        raise ValueError(f"{path} belongs to another run ({differences}); name another --out, or pass the same options")


def differing(saved: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Returns both values of each differing setting, None for an absent one; nested settings have dotted names."""
    found: dict[str, tuple[Any, Any]] = {}
    for name in sorted({*saved, *expected}):
        was = saved.get(name)
        now = expected.get(name)
        if isinstance(was, Mapping) and isinstance(now, Mapping):
            found |= {f"{name}.{inner}": both for inner, both in differing(was, now).items()}
        elif was != now:
            found[name] = (was, now)
    return found
