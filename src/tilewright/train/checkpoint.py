"""Checkpoints of training: state and metrics, from which a run goes on as if never interrupted.

They are one safetensors file, or, where devices hold parts of the state, a folder (`sharded_checkpoint.py`).
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
"""The names of the file and of the folder. Where a run has both, the later one counts."""

Saved = tuple[Any, int, dict[str, np.ndarray]]
"""The state, after how many steps it stood so, and the metrics."""


def is_sharded(state: Any) -> bool:
    """True if devices hold parts of an array."""
    return any(isinstance(leaf, Array) and not leaf.is_fully_replicated for leaf in jax.tree.leaves(state))


def write(folder: Path, state: Any, step: int, metrics: Mapping[str, np.ndarray], run_fingerprint: Mapping[str, Any]) -> None:
    """Writes the state after `step` steps and the metrics so far, in the one form or the other. All processes call this."""
    if is_sharded(state):
        from tilewright.train import sharded_checkpoint  # a part of a second, which one device need not wait for

        return sharded_checkpoint.save(folder / SHARDED, state, step, metrics, run_fingerprint)
    return save(folder / WHOLE, state, step, metrics, run_fingerprint)


def steps_in(folder: Path) -> dict[Path, int]:
    """The checkpoints of a run, each with its step. What an interrupted save has left is none.

    Raises:
        ValueError: a file that is no checkpoint.
    """
    whole = folder / WHOLE
    sharded = folder / SHARDED
    found = {sharded / name: int(name) for name in ([each.name for each in sharded.glob("*")]) if name.isdecimal()}
    return {**found, **({whole: step_of(whole)} if whole.exists() else {})}


def step_of(path: Path) -> int:
    """The step of a file. Raises a `ValueError` where it is no checkpoint."""
    try:
        with safe_open(path, "numpy") as file:
            return int((file.metadata() or {})["step"])
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"{path} is not a readable checkpoint: {error}") from error


def read(folder: Path, like: Any, run_fingerprint: Mapping[str, Any]) -> Saved:
    """The latest of the checkpoints of a run, of which there is one at least. All processes call this.

    Raises:
        ValueError: see `load`.
    """
    found = steps_in(folder)
    place = max(found, key=lambda each: found[each])
    if place.name == WHOLE:
        return load(place, like, run_fingerprint)
    from tilewright.train import sharded_checkpoint

    return sharded_checkpoint.load(folder / SHARDED, found[place], like, run_fingerprint)


def named_leaves(tree: Any) -> dict[str, Any]:
    """Each array of a tree under its path."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def fingerprint(tree: Any) -> str:
    """Digest of a tree's arrays: names, shapes, dtypes and every byte."""
    digest = hashlib.sha256()
    for name, leaf in named_leaves(tree).items():
        array = np.ascontiguousarray(to_host(leaf))
        digest.update(f"{name} {array.shape} {array.dtype} ".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()[:16]


def save(path: Path, state: Any, step: int, metrics: Mapping[str, np.ndarray], run_fingerprint: Mapping[str, Any]) -> None:
    """Writes the state after `step` steps and the metrics so far; the file appears whole or not at all.

    Of several processes all must call this; the first one writes.
    """
    arrays = ((name, to_host(leaf)) for name, leaf in named_leaves(state).items())
    named = ((METRICS + name, np.ascontiguousarray(values)) for name, values in metrics.items())
    write_tensors(path, chain(arrays, named), {"step": str(step), "identity": json.dumps(run_fingerprint, sort_keys=True)})
    if jax.process_index() == 0:
        for left in path.parent.glob(".*tmp*"):  # by a process that was killed while it wrote: our name or safetensors' own
            left.unlink()


def load(path: Path, like: Any, run_fingerprint: Mapping[str, Any]) -> Saved:
    """Reads a state of the same run.

    Args:
        like: a state of the same structure; each array is divided over devices as its own, and has its dtype.

    Raises:
        ValueError: the file is no checkpoint, or one of a run with other options (each that differs is named).
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
        raise ValueError(f"{path} is not a readable checkpoint: {error}") from error
    return jax.tree.unflatten(jax.tree.structure(like), leaves), int(metadata["step"]), metrics


def require_same_run(path: Path, saved: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raises a `ValueError` that names what differs between the run of a checkpoint and the one that is to go on from it."""
    if differs := differing(saved, expected):
        differences = "; ".join(f"{name}: checkpoint {was!r}, now {now!r}" for name, (was, now) in differs.items())
        raise ValueError(f"{path} belongs to another run ({differences}); name another --out, or pass the same options")


def differing(saved: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Both values of each setting that differs, None where there is none; one inside another is named with a dot."""
    found: dict[str, tuple[Any, Any]] = {}
    for name in sorted({*saved, *expected}):
        was = saved.get(name)
        now = expected.get(name)
        if isinstance(was, Mapping) and isinstance(now, Mapping):
            found |= {f"{name}.{inner}": both for inner, both in differing(was, now).items()}
        elif was != now:
            found[name] = (was, now)
    return found
