"""How much memory can still be had, on the host or on the devices that a model lies on, and whether weights fit into it."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from tilewright.kernels.operations import Operations
from tilewright.kernels.select import Weights
from tilewright.models.decoder import DecoderParams
from tilewright.models.params import DTYPES, ArraySpec, each

Tree = TypeVar("Tree")

GB = 10**9
PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
CGROUP_FILES = (
    ("", "memory.max", "memory.current", ("inactive_file", "active_file")),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
)
"""Of control groups, version 2 and 1: the controller's folder, its limit, what is used, and what of that are files, which go
when memory is needed."""


def amount(count: float) -> str:
    """A number of bytes for people."""
    return f"{count / GB:.1f} GB" if count >= GB / 10 else f"{count / 1e6:.1f} MB"


def free_bytes(devices: Iterable[Any] | None = None) -> int:
    """Bytes that each of these devices (by default the first one) can still give: of the one that has the least.

    CPU devices share the host's.
    """
    every = jax.local_devices()[:1] if devices is None else devices
    local = [device for device in every if device.process_index == jax.process_index()]
    found = [device.memory_stats() for device in local]
    stats = [one for one in found if one and "bytes_limit" in one]
    if stats:
        return max(0, min(one["bytes_limit"] - one.get("bytes_in_use", 0) for one in stats))
    return host_free() // len(local)


def host_free(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Bytes that this process can still get of the host's memory, within its control group; all of it where nobody says.

    Args:
        proc, cgroups: where the kernel says it.
    """
    available = meminfo_bytes(proc, "MemAvailable")
    if available is None:
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([available, *cgroup_free(proc, cgroups)])


def meminfo_bytes(proc: Path, name: str) -> int | None:
    """A line of `/proc/meminfo`; None where there is none."""
    file = proc / "meminfo"
    lines = file.read_text().splitlines() if file.is_file() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)


def cgroup_free(proc: Path, cgroups: Path) -> Iterator[int]:
    """Bytes left of each limit that this process's control group is under: its own, and those of the groups around it."""
    file = proc / "self" / "cgroup"
    groups = [line.split(":", 2) for line in file.read_text().splitlines()] if file.is_file() else []
    for controller, limit, used, files in CGROUP_FILES:
        for _, controllers, path in groups:
            if controller not in controllers.split(","):
                continue
            root = cgroups / controller
            inner = root / path.lstrip("/")
            for folder in (inner, *inner.parents) if inner.is_relative_to(root) else ():
                if folder.is_relative_to(root) and (folder / limit).is_file() and (folder / used).is_file():
                    most = (folder / limit).read_text().strip()
                    if most != "max":
                        yield max(0, int(most) - int((folder / used).read_text()) + stat_bytes(folder / "memory.stat", files))


def stat_bytes(file: Path, names: Sequence[str]) -> int:
    """The sum of these lines of a `memory.stat`."""
    lines = [line.split() for line in file.read_text().splitlines()] if file.is_file() else []
    return sum(int(value) for name, value in lines if name in names)


def held_bytes(arrays: Any) -> int:
    """Bytes of all arrays in a tree, each once, on all devices together."""
    return sum({id(leaf): leaf.nbytes for leaf in jax.tree.leaves(arrays)}.values())


def step_bytes(target: DecoderParams, rows: int = 1) -> int:
    """Bytes that a pass over so many rows reads of a target's weights as they are held.

    All of them; but of an embedding that is not the output head only rows, and of a mixture the experts that so many rows are
    expected to choose. A block has a row for each of its slots.
    """
    whole = held_bytes(target if target.head is None else replace(target, embed=()))
    for layer in target.layers:
        if layer.router is not None:
            mixture = layer.router.mixture
            whole -= held_bytes((layer.gate_up, layer.down)) * (1 - mixture.read(rows) / mixture.experts)
    return round(whole)


def weight_bytes(specs: Any, shardings: Any, matrix: float, other: int, head: float | None = None) -> int:
    """Bytes that declared arrays take on each device.

    Args:
        shardings: a tree like `specs`; None for one device.
        matrix: bytes of an entry of a matrix, and of an output head unless `head` says otherwise.
        other: bytes of an entry of anything else.
    """
    each_entry = {"matrix": matrix, "head": matrix if head is None else head}

    def size(spec: ArraySpec, sharding: Sharding | None) -> int:
        shape = spec.shape if sharding is None else sharding.shard_shape(spec.shape)
        return int(prod(shape) * each_entry.get(spec.kind, other))

    return sum(jax.tree.leaves(each(specs, shardings, size)))


def check_fit(name: str, needed: Mapping[str, int], free: int) -> None:
    """Refuses weights for which there is no memory.

    Args:
        needed: bytes on each device, by the way in which the weights are kept: first the one that was asked for.
        free: bytes that each device can still give.

    Raises:
        ValueError: the first of `needed` is more than `free`; it says what would fit.
    """
    (asked, most), *others = needed.items()
    if most <= free:
        return
    fitting = [f"{amount(least)} {way}" for way, least in others if least <= free]
    instead = f"they would take {' or '.join(fitting)}" if fitting else "no smaller format of them fits"
    more = f"; {-(-most // max(1, free))} such devices could divide them (--tensor-parallel)"
    raise ValueError(
        f"{name}: its weights take {amount(most)} {asked}, and {amount(free)} are free: {instead}"
        + ("" if jax.default_backend() == "cpu" else more)
    )


def check_weights(
    name: str, specs: Tree, shard: Callable[[Tree], Tree] | None, dtype: str, ops: Operations, weights: Weights
) -> None:
    """Refuses weights that do not fit, before any of them is read; see `check_fit`.

    Args:
        specs: the arrays that `ops` compute with.
        shard: from the declaration to the shardings; None for the default device.
    """
    shardings = None if shard is None else shard(specs)
    devices = None if shardings is None else jax.tree.leaves(shardings)[0].mesh.devices.flat
    size = {name: jnp.dtype(one).itemsize for name, one in DTYPES.items()}
    ways = {f"in {one}": weight_bytes(specs, shardings, size[one], size[one]) for one in DTYPES}
    smaller = {"int8": "in 8 bits (--weights int8)", "int4": "in 4 bits (--weights int4)"}
    if ops.prepares:
        ways[smaller["int8"]] = weight_bytes(specs, shardings, 1, size[dtype])
    if ops.prepares and shardings is None:  # a block of 32 has two numbers in half precision besides, of the head one
        ways[smaller["int4"]] = weight_bytes(specs, shardings, 5 / 8, size[dtype], head=17 / 16)
    asked = smaller.get(weights, f"in {dtype}")
    check_fit(name, {asked: ways[asked]} | ways, free_bytes(devices))
