"""Checkpoints of sharded state, written by Orbax: each process writes its shards into a common folder.

Nothing is gathered, and a run can resume with another mesh or other processes. Several machines need a shared folder. Orbax
writes to a temporary folder and renames it, so that a step's folder is always complete.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from tilewright.train.checkpoint import Saved, named_leaves, require_same_run

STATE = "state"
METADATA = "told"
"""Names of the parts of a checkpoint: arrays, and metadata as JSON."""


def manager(folder: Path) -> ocp.CheckpointManager:
    """Opens the checkpoints of a run; only the last one is kept."""
    options = ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=False, cleanup_tmp_directories=True)
    handlers = {STATE: ocp.StandardCheckpointHandler(), METADATA: ocp.JsonCheckpointHandler()}
    return ocp.CheckpointManager(folder.absolute(), options=options, item_handlers=handlers)


def save(folder: Path, state: Any, step: int, metrics: Mapping[str, np.ndarray], run_fingerprint: Mapping[str, Any]) -> None:
    """Writes state and metrics after `step` steps. All processes must call this function."""
    series = {name: {"dtype": str(values.dtype), "values": values.tolist()} for name, values in metrics.items()}
    metadata = {"identity": json.loads(json.dumps(run_fingerprint)), "figures": series}
    parts = ocp.args.Composite(state=ocp.args.StandardSave(named_leaves(state)), told=ocp.args.JsonSave(metadata))
    with manager(folder) as checkpoints:
        checkpoints.save(step, args=parts, force=True)


def load(folder: Path, step: int, like: Any, run_fingerprint: Mapping[str, Any]) -> Saved:
    """Reads the checkpoint of `step`; see `checkpoint.load`. All processes must call this function."""
    template = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding) for name, leaf in named_leaves(like).items()
    }
    place = folder / str(step)
    with manager(folder) as checkpoints:
        metadata = read(place, checkpoints, step, told=ocp.args.JsonRestore())[METADATA]
        require_same_run(place, metadata["identity"], json.loads(json.dumps(run_fingerprint)))
        state = read(place, checkpoints, step, state=ocp.args.StandardRestore(template))[STATE]
    metrics = {name: np.asarray(each["values"], each["dtype"]) for name, each in metadata["figures"].items()}
    return jax.tree.unflatten(jax.tree.structure(like), [state[name] for name in template]), step, metrics


def read(place: Path, checkpoints: ocp.CheckpointManager, step: int, **parts: Any) -> Any:
    """Reads parts of a checkpoint. Raises a `ValueError` for any of Orbax's many errors."""
    try:
        return checkpoints.restore(step, args=ocp.args.Composite(**parts))
    except Exception as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise ValueError(f"{place}: expected a readable checkpoint, found none: {lines[0]}") from error
