"""Device meshes, and the processes of a multi-process run."""

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from math import prod
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import AxisType, Mesh

from tilewright.hardware.links import ring_of


def make_mesh(axes: Mapping[str, int | None], devices: Sequence[Any] | None = None) -> Mesh:
    """Makes a mesh of one or several axes, such as `{"fsdp": None, "tp": 2}`.

    Args:
        axes: name of each axis and number of devices along it. One size may be None: all remaining devices.
        devices: `jax.Device`s of the mesh. Default: all devices of all processes, or the first ones where all sizes are given.
            TPU devices are ordered in rings of neighbours along each axis, where axes take whole sides of the slice. Otherwise
            JAX orders the devices, so that most neighbours on an axis share a link.

    Raises:
        ValueError: no axis, an invalid name, a size below 1, two sizes of None, too few devices, devices that the sizes do not
            divide, or a device given twice.
    """
    sizes = [size for size in axes.values() if size is not None]
    if not axes or not all(name.isidentifier() for name in axes):
        raise ValueError(f"expected a name for each axis, such as 'nodes', found {list(axes)}")
    if any(size < 1 for size in sizes) or len(axes) - len(sizes) > 1:
        raise ValueError(f"expected a size of 1 or more for each axis, and None for one at most, found {dict(axes)}")
    given = prod(sizes)
    has_free = len(sizes) < len(axes)
    if devices is None:
        devices = first_devices(None if has_free else given)
    if not devices or len(set(devices)) != len(devices):
        raise ValueError(f"expected one device or more, each once, found {[str(device) for device in devices]}")
    free = len(devices) // given if has_free else 1
    if free * given != len(devices):
        expected = f"a multiple of {given}" if has_free else str(given)
        raise ValueError(f"expected {expected} devices for the axes {dict(axes)}, found {len(devices)}")
    shape = tuple(free if size is None else size for size in axes.values())
    types = (AxisType.Auto,) * len(shape)
    ordered = in_rings(devices, shape)
    if ordered is not None:
        return Mesh(ordered, tuple(axes), axis_types=types)
    try:
        return jax.make_mesh(shape, tuple(axes), axis_types=types, devices=list(devices))
    except NotImplementedError:  # no axes are products of whole sides; JAX splits sides by itself on v5e only
        split = mesh_utils.create_device_mesh(shape, list(devices), allow_split_physical_axes=True)
        return Mesh(split, tuple(axes), axis_types=types)


def in_rings(devices: Sequence[Any], shape: Sequence[int]) -> np.ndarray | None:
    """Arranges devices in an array so that each axis takes whole sides of the slice and follows a ring of neighbours.

    In JAX's order, hops of a ring may take two or three links, for example over v5p:2x2x2.

    Returns:
        the array; None for devices that are no box of TPUs, for a shape that no sides fit, or where every axis is one side, for
        which JAX's order is a ring already.
    """
    at = {tuple(device.coords): device for device in devices if hasattr(device, "coords")}
    along = [sorted(set(places)) for places in zip(*at, strict=True)]
    if not at or len(at) != len(devices) or prod(map(len, along)) != len(devices):
        return None
    axis_sides = sides_of(shape, {side: len(places) for side, places in enumerate(along) if len(places) > 1})
    if axis_sides is None or all(len(sides) < 2 for sides in axis_sides):
        return None
    rings = [ring_of(product(*(along[side] for side in sides))) if sides else [()] for sides in axis_sides]
    ordered = np.empty(shape, object)
    for index in np.ndindex(*shape):
        place = [places[0] for places in along]
        for sides, ring, step in zip(axis_sides, rings, index, strict=True):
            for side, coordinate in zip(sides, ring[step], strict=True):
                place[side] = coordinate
        ordered[index] = at[tuple(place)]
    return ordered


def sides_of(shape: Sequence[int], lengths: Mapping[int, int]) -> list[tuple[int, ...]] | None:
    """Assigns whole sides of a box to each axis of a mesh, as few as possible; None where no assignment fits.

    Args:
        lengths: length of each side that is not assigned yet.
    """
    if not shape:
        return None if lengths else []
    for count in range(len(lengths) + 1):
        for sides in combinations(lengths, count):
            if prod(lengths[side] for side in sides) == shape[0]:
                rest = sides_of(shape[1:], {side: length for side, length in lengths.items() if side not in sides})
                if rest is not None:
                    return [sides, *rest]
    return None


def first_devices(count: int | None) -> Sequence[Any]:
    """Returns the first `count` devices, by default all.

    Raises:
        ValueError: fewer devices exist, or `count` excludes devices of other processes.
    """
    found = jax.devices()
    if count is None or count == len(found):
        return found
    if not 1 <= count <= len(found):
        hint = "; XLA_FLAGS=--xla_force_host_platform_device_count=8 gives 8 CPU devices" if found[0].platform == "cpu" else ""
        raise ValueError(f"expected from 1 to {len(found)} devices, all that are available, found {count}{hint}")
    if jax.process_count() > 1:
        raise ValueError(f"expected all {len(found)} devices of the {jax.process_count()} processes, found {count}")
    return found[:count]


def is_first_process() -> bool:
    """Returns True in the only or the first process, which logs and writes files for all."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def broadcast_from_first(mesh: Mesh | None, value: np.ndarray) -> np.ndarray:
    """Broadcasts the first process's value, such as a time or a random seed, to all processes.

    All processes must call this function.

    Args:
        mesh: mesh of the processes. Without a mesh, and for devices of one process, the value is returned unchanged.
        value: numbers of at most 32 bits; shape and dtype are equal in all processes.
    """
    if mesh is None or not mesh.is_multi_process:
        return value
    return np.asarray(multihost_utils.broadcast_one_to_all(value))


def broadcast_seconds(mesh: Mesh | None, seconds: float) -> float:
    """Broadcasts the first process's time in seconds; see `broadcast_from_first`."""
    alone = mesh is None or not mesh.is_multi_process
    return seconds if alone else float(broadcast_from_first(mesh, np.asarray(seconds, np.float32)))


def min_over_processes(mesh: Mesh | None, count: int) -> int:
    """Returns the minimum over processes of a number of bytes, in whole MiB; unchanged for a single process."""
    if mesh is None or not mesh.is_multi_process:
        return count
    return int(multihost_utils.process_allgather(np.int32(count >> 20)).min()) << 20


def gather_texts(text: str) -> list[str]:
    """Returns the texts of all processes, in their order. All processes must call this function."""
    if jax.process_count() == 1:
        return [text]
    content = np.frombuffer(text.encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(len(content))).reshape(-1)
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: len(content)] = content
    gathered = multihost_utils.process_allgather(padded)
    return [row[:size].tobytes().decode() for row, size in zip(gathered, sizes, strict=True)]


def initialise_processes(
    coordinator: str | None = None, processes: int | None = None, index: int | None = None, timeout: int = 300
) -> None:
    """Joins this process to a multi-process run (`jax.distributed.initialize`); JAX then sees the devices of all processes.

    Every process calls this function before its first use of JAX and then runs the same program. Starting the processes is up
    to Slurm, Kubernetes, a cloud's tools, or a shell (docs/overlap.md). CPU processes exchange data by Gloo.

    Args:
        coordinator: `host:port` of the first process. None, with `processes` and `index`, where JAX detects the cluster: Slurm,
            Open MPI, Cloud TPU, Kubernetes.
        processes: number of processes.
        index: index of this process, from 0.
        timeout: seconds to wait for the other processes.

    Raises:
        ValueError: some of the three arguments are missing, or they contradict each other.
        RuntimeError: JAX was used before, or processes did not join within the timeout.
    """
    given = (coordinator, processes, index)
    if any(value is None for value in given):
        if any(value is not None for value in given):
            raise ValueError(f"expected coordinator, processes and index together or none of them, found {given}")
    elif processes is not None and index is not None and coordinator is not None:
        host, _, port = coordinator.rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(f"expected the coordinator as host:port, found {coordinator!r}")
        if not 0 <= index < processes:
            raise ValueError(f"expected an index from 0 to below {processes} processes, found {index}")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, processes, index, initialization_timeout=timeout)
