"""The devices that a program runs on, and the processes that they belong to."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh


def make_mesh(axis: str, devices: int | Sequence[Any] | None = None) -> Mesh:
    """A mesh of one axis.

    Args:
        axis: its name.
        devices: how many of the devices at hand, those of all processes counted; or which (`jax.Device`s); None takes all. JAX
            orders those of a TPU so that neighbours on the axis are neighbours on the wire.

    Raises:
        ValueError: no name, fewer devices than asked for, none, or one named twice.
    """
    if not axis.isidentifier():
        raise ValueError(f"expected a name for the axis, such as 'nodes', found {axis!r}")
    if devices is None or isinstance(devices, int):
        devices = first_devices(devices)
    if not devices or len(set(devices)) != len(devices):
        raise ValueError(f"expected one device or more, each once, found {[str(device) for device in devices]}")
    return jax.make_mesh((len(devices),), (axis,), axis_types=(AxisType.Auto,), devices=list(devices))


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
