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
from tilewright.kernels.select import Kernels, Weights, formats
from tilewright.models.decoder import DecoderParams
from tilewright.models.params import DTYPES, ArraySpec, each

Tree = TypeVar("Tree")

GB = 10**9
FEW_BITS: dict[Weights, str] = {
    "int8": "in 8 bits (--weights int8)",
    "int4": "in 4 bits (--weights int4)",
    "fp8": "in FP8 (--weights fp8)",
}
"""How a message speaks of a format."""
PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
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
    return sum({id(leaf): array_bytes(leaf) for leaf in jax.tree.leaves(arrays)}.values())


def array_bytes(array: Any) -> int:
    """Bytes of an array. Of integers of 4 bits two share one, of which `nbytes` knows nothing."""
    return array.nbytes // 2 if array.dtype in (jnp.int4, jnp.uint4) else array.nbytes


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


def weight_bytes(specs: Any, shardings: Any, itemsize: int, ops: Operations, kept: Mapping[str, str]) -> int:
    """Bytes that declared arrays take on each device, as operations prepare them.

    Args:
        shardings: a tree like `specs`; None for one device.
        itemsize: bytes of an entry of an array that stays as it is.
        kept: the formats in which files have matrices in few bits, by the arrays' names.
    """

    def size(spec: ArraySpec, sharding: Sharding | None) -> int:
        shape = spec.shape if sharding is None else sharding.shard_shape(spec.shape)
        prepared = ops.bytes_of(spec.kind, shape, kept.get(spec.name, ""))
        return prod(shape) * itemsize if prepared is None else prepared

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
    name: str,
    declare: Callable[[bool], Tree],
    shard: Callable[[Tree], Tree] | None,
    dtype: str,
    weights: Weights,
    kernels: Kernels,
    kept: Mapping[str, str],
) -> None:
    """Refuses weights that do not fit, before any of them is read; see `check_fit`.

    Args:
        declare: the arrays of the model; of a tied one with a head of its own or without.
        shard: from the declaration to the shardings; None for the default device.
        kept: see `weight_bytes`.
    """
    few = formats(kernels)
    specs = {kind: declare(ops.own_head) for kind, ops in few.items()}
    placed = {kind: None if shard is None else shard(each) for kind, each in specs.items()}

    def needed(kind: Weights, dtype: str) -> int:
        return weight_bytes(specs[kind], placed[kind], jnp.dtype(DTYPES[dtype]).itemsize, few[kind], kept)

    ways = {f"in {one}": needed("auto", one) for one in DTYPES}
    ways |= {FEW_BITS[kind]: needed(kind, dtype) for kind in few if kind in FEW_BITS}
    asked = FEW_BITS.get(weights, f"in {dtype}")
    devices = None if shard is None else jax.tree.leaves(placed["auto"])[0].mesh.devices.flat
    check_fit(name, {asked: ways[asked]} | ways, free_bytes(devices))
