"""The devices that a program runs on, and the processes that they belong to."""

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from math import prod
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh

from tilewright.hardware.links import ring_of


def make_mesh(axes: Mapping[str, int | None], devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of one or several axes, say `{"fsdp": None, "tp": 2}`.

    Args:
        axes: the name of each axis and the number of devices along it; one of them may be None, for as many as are left.
        devices: which (`jax.Device`s); by default those at hand, of all processes: all, or the first that the sizes ask for.
            Those of a TPU are put in the order of rings of neighbours, along each axis, where an axis takes whole sides of the
            slice; else it is JAX's order, in which most neighbours on an axis are neighbours on the wire.

    Raises:
        ValueError: no axis, no name, a size below 1, two open sizes, or devices that are too few, that don't divide by the
            sizes given, or that are named twice.
    """
    sizes = [size for size in axes.values() if size is not None]
    if not axes or not all(name.isidentifier() for name in axes):
        raise ValueError(f"expected a name for each axis, such as 'nodes', found {list(axes)}")
    if any(size < 1 for size in sizes) or len(axes) - len(sizes) > 1:
        raise ValueError(f"expected a size of 1 or more for each axis, and None for one at most, found {dict(axes)}")
    known = prod(sizes)
    is_open = len(sizes) < len(axes)
    if devices is None:
        devices = first_devices(None if is_open else known)
    if not devices or len(set(devices)) != len(devices):
        raise ValueError(f"expected one device or more, each once, found {[str(device) for device in devices]}")
    left = len(devices) // known if is_open else 1
    if left * known != len(devices):
        expected = f"a multiple of {known}" if is_open else str(known)
        raise ValueError(f"expected {expected} devices for the axes {dict(axes)}, found {len(devices)}")
    shape = tuple(left if size is None else size for size in axes.values())
    types = (AxisType.Auto,) * len(shape)
    ordered = in_rings(devices, shape)
    if ordered is not None:
        return Mesh(ordered, tuple(axes), axis_types=types)
    return jax.make_mesh(shape, tuple(axes), axis_types=types, devices=list(devices))


def in_rings(devices: Sequence[Any], shape: Sequence[int]) -> np.ndarray | None:
    """Devices as an array of a shape, in which each axis takes whole sides of their box and goes round in a ring.

    JAX's own order over v5p:2x2x2, for one, takes hops of a ring over two and three links.

    Returns:
        None where these are no box of TPUs, where no sides fit, or where every axis has a side of its own, as JAX orders them.
    """
    at = {tuple(device.coords): device for device in devices if hasattr(device, "coords")}
    along = [sorted(set(places)) for places in zip(*at, strict=True)]
    if not at or len(at) != len(devices) or prod(map(len, along)) != len(devices):
        return None
    taken = sides_of(shape, {side: len(places) for side, places in enumerate(along) if len(places) > 1})
    if taken is None or all(len(sides) < 2 for sides in taken):
        return None
    rings = [ring_of(product(*(along[side] for side in sides))) if sides else [()] for sides in taken]
    ordered = np.empty(shape, object)
    for index in np.ndindex(*shape):
        place = [places[0] for places in along]
        for sides, ring, step in zip(taken, rings, index, strict=True):
            for side, coordinate in zip(sides, ring[step], strict=True):
                place[side] = coordinate
        ordered[index] = at[tuple(place)]
    return ordered


def sides_of(shape: Sequence[int], lengths: Mapping[int, int]) -> list[tuple[int, ...]] | None:
    """Sides of a box that each axis of a mesh takes whole, the fewest that do; None where it does not come out.

    Args:
        lengths: of the sides that are left.
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
    """The first devices at hand, by default all.

    Raises:
        ValueError: there are not so many, or a process would be left with none.
    """
    found = jax.devices()
    if count is None or count == len(found):
        return found
    if not 1 <= count <= len(found):
        more = "; XLA_FLAGS=--xla_force_host_platform_device_count=8 makes eight of a CPU" if found[0].platform == "cpu" else ""
        raise ValueError(f"expected from 1 to {len(found)} devices, as many as there are here, found {count}{more}")
    if jax.process_count() > 1:
        raise ValueError(f"expected all {len(found)} devices of the {jax.process_count()} processes, found {count}")
    return found[:count]


def is_first_process() -> bool:
    """True if this process speaks for all: it is the only one, or the first."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def agreed(mesh: Mesh | None, value: np.ndarray) -> np.ndarray:
    """The first process's value, for what every process would find for itself and must be the same: a time, a random number.

    Args:
        mesh: over which the processes work together; without one, and over one process's devices, the value stays as it is.
        value: of at most 32 bits a number; the same shape and dtype everywhere. All processes have to come here.
    """
    if mesh is None or not mesh.is_multi_process:
        return value
    return np.asarray(multihost_utils.broadcast_one_to_all(value))


def agreed_seconds(mesh: Mesh | None, seconds: float) -> float:
    """`agreed`, of a time."""
    alone = mesh is None or not mesh.is_multi_process
    return seconds if alone else float(agreed(mesh, np.asarray(seconds, np.float32)))


def least_bytes(mesh: Mesh | None, count: int) -> int:
    """The least of what each process has found, of a number of bytes, in whole MiB; one process's number stays as it is."""
    if mesh is None or not mesh.is_multi_process:
        return count
    return int(multihost_utils.process_allgather(np.int32(count >> 20)).min()) << 20


def initialise_processes(
    coordinator: str | None = None, processes: int | None = None, index: int | None = None, timeout: int = 300
) -> None:
    """Joins this process to those that share the work (`jax.distributed.initialize`); afterwards JAX sees the devices of all.

    Every process calls this before anything else touches JAX, and then runs the same program. Nobody starts processes here:
    that is for Slurm, Kubernetes, a cloud's own tools, or `tilewright launch`. CPU processes exchange data by Gloo.

    Args:
        coordinator: `host:port` where the first process listens. None, as for the other two, where JAX can ask the cluster:
            Slurm, Open MPI, Cloud TPU, Kubernetes.
        processes: how many there are.
        index: which of them this is, from 0.
        timeout: seconds to wait for the others.

    Raises:
        ValueError: some of the three are missing or don't fit one another.
        RuntimeError: JAX has been used already, or the others don't come in time.
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
