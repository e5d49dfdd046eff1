"""Checkpoints of a state that is sharded over devices: a folder that Orbax keeps, of which each process writes its shards.

Nobody gathers anything, and another mesh, or other processes, read of it what they hold. Several machines need a folder that
all of them see. Orbax writes beside what is there and renames: a step's folder is there whole or not at all.
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
"""The two parts of a checkpoint: arrays, and the rest as JSON."""


def manager(folder: Path) -> ocp.CheckpointManager:
    """Of the checkpoints of one run, of which the last one stays."""
    options = ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=False, cleanup_tmp_directories=True)
    handlers = {STATE: ocp.StandardCheckpointHandler(), METADATA: ocp.JsonCheckpointHandler()}
    return ocp.CheckpointManager(folder.absolute(), options=options, item_handlers=handlers)


def save(folder: Path, state: Any, step: int, metrics: Mapping[str, np.ndarray], run_fingerprint: Mapping[str, Any]) -> None:
    """Writes the state after `step` steps and the metrics so far. All processes call this."""
    series = {name: {"dtype": str(values.dtype), "values": values.tolist()} for name, values in metrics.items()}
    metadata = {"identity": json.loads(json.dumps(run_fingerprint)), "figures": series}
    parts = ocp.args.Composite(state=ocp.args.StandardSave(named_leaves(state)), told=ocp.args.JsonSave(metadata))
    with manager(folder) as kept:
        kept.save(step, args=parts, force=True)


def load(folder: Path, step: int, like: Any, run_fingerprint: Mapping[str, Any]) -> Saved:
    """Reads the state after `step` steps; see `checkpoint.load`. All processes call this."""
    wanted = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding) for name, leaf in named_leaves(like).items()
    }
    place = folder / str(step)
    with manager(folder) as kept:
        metadata = read(place, kept, step, told=ocp.args.JsonRestore())[METADATA]
        require_same_run(place, metadata["identity"], json.loads(json.dumps(run_fingerprint)))
        state = read(place, kept, step, state=ocp.args.StandardRestore(wanted))[STATE]
    metrics = {name: np.asarray(each["values"], each["dtype"]) for name, each in metadata["figures"].items()}
    return jax.tree.unflatten(jax.tree.structure(like), [state[name] for name in wanted]), step, metrics


def read(place: Path, kept: ocp.CheckpointManager, step: int, **parts: Any) -> Any:
    """Parts of a checkpoint. Raises a `ValueError` where they cannot be read: Orbax has an error of its own for each damage."""
    try:
        return kept.restore(step, args=ocp.args.Composite(**parts))
    except Exception as error:
        said = str(error).splitlines() or [type(error).__name__]
        raise ValueError(f"{place} is not a readable checkpoint: {said[0]}") from error
