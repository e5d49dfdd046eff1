"""Training checkpoints by Orbax: state, metrics and position in the data, from which a run resumes exactly.

A checkpoint is a folder of a step's number, on a local disk, a disk that all machines share, or an object store. Each process
writes its shards while training goes on, nothing is gathered, and a run can resume with another mesh or on one device. Orbax
is imported where it is used: fingerprints are wanted without it.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from tilewright.models.params import to_host

STATE = "state"
METADATA = "metadata"
"""Names of the parts of a checkpoint: arrays, and metadata as JSON."""

CHECKPOINTS = "checkpoints"
"""Folder of the checkpoints in the folder of a run."""
STORE = "gs://"
"""Object store that Orbax writes to. Of the URLs of S3, Orbax 0.12 loses a slash and then refuses the path as relative."""
EARLIER = ("state.safetensors", "sharded")
"""Names of checkpoints in the folder of a run that are no longer read."""
LAST_READER = "the development version of 2026-11-30 (commit 87b0d253)"


class Checkpoint(NamedTuple):
    """A checkpoint as it was read.

    Attributes:
        state: tree of arrays.
        step: number of steps before the checkpoint.
        metrics: series of metrics by name.
        position: position in the data, of all processes; None for data without one.
    """

    state: Any
    step: int
    metrics: dict[str, np.ndarray]
    position: dict[str, Any] | None


def checkpoint_folder(out: Path, elsewhere: str | None = None) -> str:
    """Returns the folder of a run's checkpoints: `elsewhere`, a path or URL such as `gs://bucket/run`, or a folder in `out`.

    Raises:
        ValueError: Orbax cannot write to such a URL.
    """
    if elsewhere is not None and "://" in elsewhere:
        if not elsewhere.startswith(STORE):
            raise ValueError(f"expected a folder, or a URL that begins with {STORE}, found {elsewhere}")
        return elsewhere
    return str(Path(elsewhere or out / CHECKPOINTS).absolute())


def saved_steps(out: Path, elsewhere: str | None = None) -> list[int]:
    """Lists the steps of a run's checkpoints, in ascending order. Remains of an interrupted save are ignored.

    Args:
        out: folder of the run.
        elsewhere: see `checkpoint_folder`.

    Raises:
        ValueError: the folder has a checkpoint of an earlier version, or checkpoints that cannot be read.
    """
    for name in EARLIER:
        if (out / name).exists():
            raise ValueError(
                f"expected checkpoints of this version, found {out / name}, which {LAST_READER} was the last to read; "
                "name another folder, or finish the run with that version"
            )
    folder = checkpoint_folder(out, elsewhere)
    if elsewhere is None and not Path(folder).is_dir():
        return []
    import orbax.checkpoint as ocp
    from etils import epath

    try:
        return sorted(each.step for each in ocp.path.step.standard_name_format().find_all(epath.Path(folder)))
    except Exception as error:  # of the file system or the object store, each with errors of its own
        raise ValueError(f"{folder}: expected readable checkpoints, found none: {first_line(error)}") from error


class Checkpoints:
    """Checkpoints of a run that is training. All processes must call each method.

    Attributes:
        folder: folder or URL of the checkpoints.
    """

    def __init__(self, folder: str, keep: int = 1):
        """Opens or creates the folder, and removes what a killed process left.

        Args:
            folder: absolute path, or URL of an object store.
            keep: number of checkpoints to keep, the last ones.
        """
        import orbax.checkpoint as ocp
        from etils import epath

        self.folder = folder
        options = ocp.CheckpointManagerOptions(
            preservation_policy=ocp.checkpoint_managers.LatestN(keep), cleanup_tmp_directories=True
        )
        handlers = {STATE: ocp.StandardCheckpointHandler(), METADATA: ocp.JsonCheckpointHandler()}
        self.manager = ocp.CheckpointManager(epath.Path(folder), options=options, item_handlers=handlers)

    def save(
        self,
        state: Any,
        step: int,
        metrics: Mapping[str, np.ndarray],
        run_fingerprint: Mapping[str, Any],
        position: Mapping[str, Any] | None = None,
    ) -> None:
        """Starts to write a checkpoint after `step` steps, and returns when its arrays may be donated.

        The previous save ends first. An earlier checkpoint is removed when this one is complete.

        Args:
            state: tree of arrays.
            step: number of steps so far.
            metrics: series of metrics by name.
            run_fingerprint: plain data that the run that resumes must match.
            position: position in the data of all processes, as JSON-able data that is the same in each.

        Raises:
            OSError, ValueError: the previous checkpoint could not be written.
        """
        from orbax.checkpoint import args

        series = {name: {"dtype": str(values.dtype), "values": values.tolist()} for name, values in metrics.items()}
        metadata = {"run": plain(run_fingerprint), "metrics": series, "position": position}
        parts = {STATE: args.StandardSave(named_leaves(state)), METADATA: args.JsonSave(metadata)}
        self.manager.save(step, args=args.Composite(**parts), force=True)

    def load(self, step: int, like: Any, run_fingerprint: Mapping[str, Any]) -> Checkpoint:
        """Reads the checkpoint of `step`.

        Args:
            step: one of `saved_steps`.
            like: state with the structure, shapes, shardings and dtypes to return.
            run_fingerprint: fingerprint of the run that resumes.

        Raises:
            ValueError: the checkpoint is damaged, or belongs to a run with other options, which the message lists.
        """
        from orbax.checkpoint import args

        place = f"{self.folder}/{step}"
        metadata = self.read(step, METADATA, args.JsonRestore())
        require_same_run(place, metadata["run"], plain(run_fingerprint))
        template = {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
            for name, leaf in named_leaves(like).items()
        }
        state = self.read(step, STATE, args.StandardRestore(template))
        metrics = {name: np.asarray(each["values"], each["dtype"]) for name, each in metadata["metrics"].items()}
        leaves = [state[name] for name in template]
        return Checkpoint(jax.tree.unflatten(jax.tree.structure(like), leaves), step, metrics, metadata["position"])

    def read(self, step: int, part: str, arguments: Any) -> Any:
        """Reads a part of a checkpoint. Raises a `ValueError` for any of Orbax's many errors."""
        from orbax.checkpoint import args

        try:
            return self.manager.restore(step, args=args.Composite(**{part: arguments}))[part]
        except Exception as error:
            place = f"{self.folder}/{step}"
            raise ValueError(f"{place}: expected a readable checkpoint, found none: {first_line(error)}") from error

    def close(self) -> None:
        """Waits until the last checkpoint is written. Raises its error if it could not be written."""
        self.manager.close()


def first_line(error: Exception) -> str:
    """Returns the first line of an error's message, or the error's name."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def plain(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns data as JSON gives it back: with lists for tuples and text for keys."""
    return json.loads(json.dumps(data))


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


def require_same_run(place: str, saved: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raises a `ValueError` that lists the differences between the run of a checkpoint and the run that resumes.

    More steps than the checkpoint's extend its run.
    """
    differs = differing(saved, expected)
    if "steps" in differs and None not in differs["steps"] and differs["steps"][0] < differs["steps"][1]:
        del differs["steps"]
    if differs:
        differences = "; ".join(f"{name}: checkpoint {was!r}, now {now!r}" for name, (was, now) in differs.items())
        raise ValueError(f"{place} belongs to another run ({differences}); name another --out, or pass the same options")


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
