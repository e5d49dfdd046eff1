"""Estimates gather-reduce on absent TPUs: Tilewright's kernel, XLA, and tokamax's `ragged_gather_reduce` on SparseCores.

    python benchmarks/gather_reduce_tpu.py [--chips v6e:1x1 tpu7x:1x1x1] [--nodes N] [--slots N] [--features N] [--json FILE]

Compiler estimates, not measurements. Needs the extra `tpu`; tokamax needs Python 3.12 and JAX 0.11.1 or later, and is left
out if it is not installed. The compiler counts each operand of a kernel once; a separate column has the bytes that the
kernel's DMAs gather.
"""

import argparse
import importlib
import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from rich.console import Console
from rich.table import Table

from tilewright.compiled.aot import compile_for, tpu_topology
from tilewright.kernels.gather_reduce import pallas_tpu, xla

CORES = {"v5e": 1, "v5p": 2, "v6e": 1, "tpu7x": 1}
"""Number of cores of a JAX device."""


def tokamax_sum(x: Array, sources: Array, degrees: Array) -> Array:
    """Sums the neighbours of each row with tokamax. Every slot is a route; routes without a neighbour are masked."""
    tokamax = importlib.import_module("tokamax._src.ops.ragged_gather_reduce.api")  # public only for torch in 0.0.17
    slots = sources.shape[1]
    counts = jnp.arange(slots) < degrees[:, None]
    weights = jnp.ones(sources.size, jnp.float32)
    return tokamax.ragged_gather_reduce(
        x, sources.reshape(-1), weights, counts.reshape(-1), reduce_group_size=slots, implementation="mosaic_tpu"
    )


def gathered_bytes(name: str, slots: int, rows: int, features: int) -> int:
    """Returns the bytes of neighbours' rows that the DMAs of an implementation move if every slot is filled.

    Tilewright packs pairs of columns, so a DMA moves one row. tokamax packs pairs of rows, so a DMA moves two.
    """
    return rows * slots * features * 2 * {"ours": 1, "tokamax": 2}[name]


def figures(chip: str, name: str, run: Callable[..., Array], options: argparse.Namespace) -> dict[str, Any]:
    spec = jax.ShapeDtypeStruct
    arrays = (
        spec((options.nodes, options.features), jnp.bfloat16),
        spec((options.nodes, options.slots), jnp.int32),
        spec((options.nodes,), jnp.int32),
    )
    kind = tpu_topology(chip).devices[0].device_kind
    device = AbstractDevice(kind, CORES[chip.partition(":")[0]], "tpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):  # tokamax reads the kind of the device
        compiled = compile_for(chip, run, *arrays)
    traffic = compiled.traffic()
    gathered = None if name == "xla" else gathered_bytes(name, options.slots, options.nodes, options.features)
    return {
        "chip": chip,
        "implementation": name,
        "read_bytes": traffic.read,
        "written_bytes": traffic.written,
        "gathered_bytes": gathered,
        "estimated_cycles": compiled.cycles,
        "without_estimate": list(compiled.without_cycles),
        "temp_bytes": compiled.temp_bytes,
        "sparse_core": "sparsecore" in compiled.hlo or "sparse_core" in compiled.hlo,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", nargs="+", default=["v6e:1x1", "tpu7x:1x1x1"])
    for name, default in (("nodes", 65536), ("slots", 8), ("features", 512)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--implementations", nargs="+", default=["xla", "ours", "tokamax"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    runs: dict[str, Callable[..., Array]] = {"xla": xla.gather_reduce, "ours": pallas_tpu.gather_reduce}
    if importlib.util.find_spec("tokamax") is not None:
        runs["tokamax"] = tokamax_sum
    columns = ("chip", "implementation", "MB read", "MB written", "MB gathered", "kilocycles", "without estimate", "temp MB")
    table = Table(*columns)
    rows = []
    for chip in options.chips:
        for name, run in ((name, runs[name]) for name in options.implementations if name in runs):
            one = figures(chip, name, run, options)
            rows.append(one)
            print(one, flush=True)
            gathered = "" if one["gathered_bytes"] is None else f"{one['gathered_bytes'] / 1e6:.0f}"
            table.add_row(
                chip,
                name,
                f"{one['read_bytes'] / 1e6:.0f}",
                f"{one['written_bytes'] / 1e6:.0f}",
                gathered,
                f"{one['estimated_cycles'] / 1e3:.0f}",
                str(len(one["without_estimate"])),
                f"{one['temp_bytes'] / 1e6:.0f}",
            )
    Console(width=120).print(table)
    if options.json is not None:
        about = {name: getattr(options, name) for name in ("nodes", "slots", "features")}
        versions = {name: version(name) for name in ("jax", "libtpu", *(["tokamax"] if "tokamax" in runs else []))}
        options.json.write_text(json.dumps({**about, **versions, "dtype": "bfloat16", "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
