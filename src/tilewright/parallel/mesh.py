"""The devices that a program runs on, and the processes that they belong to."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import jax
from jax.sharding import AxisType, Mesh


def make_mesh(axes: Mapping[str, int | None], devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of one or several axes, say `{"fsdp": None, "tp": 2}`.

    Args:
        axes: the name of each axis and the number of devices along it; one of them may be None, for as many as are left.
        devices: which (`jax.Device`s); by default those at hand, of all processes: all, or the first that the sizes ask for.
            JAX orders those of a TPU so that neighbours on an axis are neighbours on the wire.

    Raises:
        ValueError: no axis, no name, a size below 1, two open sizes, or devices that are too few, that don't divide by the
            sizes given, or that are named twice.
    """
    sizes = [size for size in axes.values() if size is not None]
    if not axes or not all(name.isidentifier() for name in axes):
        raise ValueError(f"expected a name for each axis, such as 'nodes', found {list(axes)}")
    if any(size < 1 for size in sizes) or len(axes) - len(sizes) > 1:
        raise ValueError(f"expected a size of 1 or more for each axis, and None for one at most, found {dict(axes)}")
    known, is_open = prod(sizes), len(sizes) < len(axes)
    if devices is None:
        devices = first_devices(None if is_open else known)
    if not devices or len(set(devices)) != len(devices):
        raise ValueError(f"expected one device or more, each once, found {[str(device) for device in devices]}")
    left = len(devices) // known if is_open else 1
    if left * known != len(devices):
        expected = f"a multiple of {known}" if is_open else str(known)
        raise ValueError(f"expected {expected} devices for the axes {dict(axes)}, found {len(devices)}")
    shape = tuple(left if size is None else size for size in axes.values())
    return jax.make_mesh(shape, tuple(axes), axis_types=(AxisType.Auto,) * len(shape), devices=list(devices))


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


def initialise_processes(
    coordinator: str | None = None, processes: int | None = None, index: int | None = None, timeout: int = 300
) -> None:
    """Joins this process to those that share the work (`jax.distributed.initialize`); afterwards JAX sees the devices of all.

    Every process calls this before anything else touches JAX, and then runs the same program. Nobody starts processes here:
    that is for a shell, Slurm, Kubernetes or a cloud's own tools. CPU processes exchange data by Gloo.

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
