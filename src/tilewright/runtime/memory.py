"""Free memory of the host or of a model's devices, and the check that weights fit into it."""

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
from tilewright.models.params import DTYPES, ArraySpec, map_specs

Tree = TypeVar("Tree")

GB = 10**9
FEW_BITS: dict[Weights, str] = {
    "int8": "in 8 bits (--weights int8)",
    "int4": "in 4 bits (--weights int4)",
    "fp8": "in FP8 (--weights fp8)",
}
IN_FILE = "quantised as in the file (--weights auto)"
"""Names of the weight formats in messages."""
PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
CGROUP_FILES = (
    ("", "memory.max", "memory.current", ("inactive_file", "active_file")),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
)
"""Files of control groups, version 2 and 1: the controller's folder, its limit, its usage, and the entries of `memory.stat` for
cached files, which the kernel drops when memory is needed."""


def amount(count: float) -> str:
    """Formats a number of bytes."""
    return f"{count / GB:.1f} GB" if count >= GB / 10 else f"{count / 1e6:.1f} MB"


def free_bytes(devices: Iterable[Any] | None = None) -> int:
    """Returns the free bytes of each of these devices (by default the first one): those of the device with the least.

    CPU devices share the host's memory.
    """
    every = jax.local_devices()[:1] if devices is None else devices
    local = [device for device in every if device.process_index == jax.process_index()]
    found = [device.memory_stats() for device in local]
    stats = [one for one in found if one and "bytes_limit" in one]
    if stats:
        return max(0, min(one["bytes_limit"] - one.get("bytes_in_use", 0) for one in stats))
    return host_free() // len(local)


def host_free(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Returns the bytes of host memory that this process can still get within its control group.

    Without that information of the kernel, it returns the host's whole memory.

    Args:
        proc, cgroups: folders of the kernel's information.
    """
    available = meminfo_bytes(proc, "MemAvailable")
    if available is None:
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([available, *cgroup_free(proc, cgroups)])


def meminfo_bytes(proc: Path, name: str) -> int | None:
    """Returns the bytes in a line of `/proc/meminfo`; None without such a line."""
    file = proc / "meminfo"
    lines = file.read_text().splitlines() if file.is_file() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)


def cgroup_free(proc: Path, cgroups: Path) -> Iterator[int]:
    """Yields the bytes left under each memory limit of this process: its control group's, and those of the groups around it."""
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
    """Returns the sum of these lines of a `memory.stat`."""
    lines = [line.split() for line in file.read_text().splitlines()] if file.is_file() else []
    return sum(int(value) for name, value in lines if name in names)


def held_bytes(arrays: Any) -> int:
    """Returns the bytes of all arrays in a tree, each counted once, on all devices together."""
    return sum({id(leaf): array_bytes(leaf) for leaf in jax.tree.leaves(arrays)}.values())


def array_bytes(array: Any) -> int:
    """Returns the bytes of an array. Two 4-bit integers share a byte, unlike in `nbytes`."""
    return array.nbytes // 2 if array.dtype in (jnp.int4, jnp.uint4) else array.nbytes


def step_bytes(target: DecoderParams, rows: int = 1) -> int:
    """Returns the bytes of a target's weights that a pass over `rows` rows reads.

    These are all weights, except for an embedding that is not the output head, of which it reads only rows, and the experts of
    a mixture, of which it reads the expected number that the rows choose. A block has a row for each of its slots.
    """
    whole = held_bytes(target if target.head is None else replace(target, embed=()))
    for layer in target.layers:
        if layer.router is not None:
            mixture = layer.router.mixture
            whole -= held_bytes((layer.gate_up, layer.down)) * (1 - mixture.expected_experts(rows) / mixture.experts)
    return round(whole)


def is_quantised(params: Any) -> bool:
    """Returns True if some arrays have at most 8 bits per weight, as quantised matrices have."""
    dtypes = {jnp.dtype(array.dtype) for array in jax.tree.leaves(params)}
    return any(dtype.itemsize == 1 for dtype in dtypes - {jnp.dtype(bool)})  # adapters have flags


def weight_bytes(specs: Any, shardings: Any, itemsize: int, ops: Operations, native_formats: Mapping[str, str]) -> int:
    """Returns the bytes that declared arrays take on each device, in the format that operations prepare.

    Args:
        shardings: a tree like `specs`; None for one device.
        itemsize: bytes of an entry of an array that is not converted.
        native_formats: formats of the quantised matrices of the files, by the arrays' names.
    """

    def size(spec: ArraySpec, sharding: Sharding | None) -> int:
        shape = spec.shape if sharding is None else sharding.shard_shape(spec.shape)
        prepared = ops.bytes_of(spec.kind, shape, native_formats.get(spec.name, ""))
        return prod(shape) * itemsize if prepared is None else prepared

    return sum(jax.tree.leaves(map_specs(specs, shardings, size)))


def check_fit(name: str, needed: Mapping[str, int], free: int) -> None:
    """Checks that weights fit into free memory.

    Args:
        needed: bytes on each device by format; the first format is the requested one.
        free: free bytes of each device.

    Raises:
        ValueError: the requested format needs more than `free`. The message names formats that fit.
    """
    (way, most), *other_ways = needed.items()
    if most <= free:
        return
    fitting = [f"{amount(least)} {other}" for other, least in other_ways if least <= free]
    instead = f"they would take {' or '.join(fitting)}" if fitting else "no smaller format of them fits"
    more = f"; {-(-most // max(1, free))} such devices could share them (--tensor-parallel)"
    raise ValueError(
        f"{name}: its weights take {amount(most)} {way}, and {amount(free)} are free: {instead}"
        + ("" if jax.default_backend() == "cpu" else more)
    )


def check_weights(
    name: str,
    declare: Callable[[bool], Tree],
    shard: Callable[[Tree], Tree] | None,
    dtype: str,
    weights: Weights,
    kernels: Kernels,
    native_formats: Mapping[str, str],
) -> None:
    """Checks that weights fit, before any of them is read; see `check_fit`.

    Args:
        declare: returns the model's declared arrays, given whether a tied model has an output head of its own.
        shard: returns the shardings of declared arrays; None for the default device.
        native_formats: see `weight_bytes`.
    """
    few = formats(kernels)
    specs = {kind: declare(ops.separate_head) for kind, ops in few.items()}
    placed = {kind: None if shard is None else shard(each) for kind, each in specs.items()}

    def needed(kind: Weights, dtype: str) -> int:
        return weight_bytes(specs[kind], placed[kind], jnp.dtype(DTYPES[dtype]).itemsize, few[kind], native_formats)

    dense = f"in {dtype}"
    ways = {f"in {one}": needed("dequantised", one) for one in DTYPES}
    in_file = needed("auto", dtype)
    ways |= {IN_FILE: in_file} if in_file < ways[dense] else {}
    ways |= {FEW_BITS[kind]: needed(kind, dtype) for kind in few if kind in FEW_BITS}
    requested = FEW_BITS.get(weights, IN_FILE if weights == "auto" and IN_FILE in ways else dense)
    devices = None if shard is None else jax.tree.leaves(placed["auto"])[0].mesh.devices.flat
    check_fit(name, {requested: ways[requested]} | ways, free_bytes(devices))
