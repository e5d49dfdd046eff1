"""Gather-reduce on absent TPUs: this package's kernel, XLA, and tokamax's `ragged_gather_reduce` on SparseCores.

    python benchmarks/gather_reduce_tpu.py [--chips v6e:1x1 tpu7x:1x1x1] [--nodes N] [--slots N] [--features N] [--json FILE]

Compiler estimates, no measurements. Needs the extra `tpu`, and for tokamax Python 3.12 and JAX 0.11.1 or later; without it the
other two are compiled. A kernel's operands count once each in the compiler's account: what its own DMAs gather stands beside.
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
"""Cores of a device as JAX counts them."""


def tokamax_sum(x: Array, sources: Array, degrees: Array) -> Array:
    """The sum over each row's first slots, by tokamax: a route for each slot, masked where there is no neighbour."""
    tokamax = importlib.import_module("tokamax._src.ops.ragged_gather_reduce.api")  # 0.0.17 makes it public for torch alone
    slots = sources.shape[1]
    counts = jnp.arange(slots) < degrees[:, None]
    weights = jnp.ones(sources.size, jnp.float32)
    return tokamax.ragged_gather_reduce(
        x, sources.reshape(-1), weights, counts.reshape(-1), reduce_group_size=slots, implementation="mosaic_tpu"
    )


def gathered_bytes(name: str, slots: int, rows: int, features: int) -> int:
    """Bytes of neighbours' rows that an implementation's DMAs move where every slot is filled, by its structure.

    Ours packs columns in pairs before, so that it moves the row; tokamax packs rows in pairs, and moves both of a pair.
    """
    return rows * slots * features * 2 * {"ours": 1, "tokamax": 2}[name]


def figures(chip: str, name: str, run: Callable[..., Array], how: argparse.Namespace) -> dict[str, Any]:
    shaped = jax.ShapeDtypeStruct
    arrays = (
        shaped((how.nodes, how.features), jnp.bfloat16),
        shaped((how.nodes, how.slots), jnp.int32),
        shaped((how.nodes,), jnp.int32),
    )
    kind = tpu_topology(chip).devices[0].device_kind
    device = AbstractDevice(kind, CORES[chip.partition(":")[0]], "tpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):  # whose kind tokamax asks for
        made = compile_for(chip, run, *arrays)
    moved = made.traffic()
    gathered = None if name == "xla" else gathered_bytes(name, how.slots, how.nodes, how.features)
    return {
        "chip": chip,
        "implementation": name,
        "read_bytes": moved.read,
        "written_bytes": moved.written,
        "gathered_bytes": gathered,
        "estimated_cycles": made.cycles,
        "without_estimate": list(made.without_cycles),
        "temp_bytes": made.temp_bytes,
        "sparse_core": "sparsecore" in made.hlo or "sparse_core" in made.hlo,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", nargs="+", default=["v6e:1x1", "tpu7x:1x1x1"])
    for name, default in (("nodes", 65536), ("slots", 8), ("features", 512)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--implementations", nargs="+", default=["xla", "ours", "tokamax"])
    parser.add_argument("--json", type=Path)
    how = parser.parse_args()
    runs: dict[str, Callable[..., Array]] = {"xla": xla.gather_reduce, "ours": pallas_tpu.gather_reduce}
    if importlib.util.find_spec("tokamax") is not None:
        runs["tokamax"] = tokamax_sum
    columns = ("chip", "implementation", "MB read", "MB written", "MB gathered", "kilocycles", "without estimate", "temp MB")
    table = Table(*columns)
    rows = []
    for chip in how.chips:
        for name, run in ((name, runs[name]) for name in how.implementations if name in runs):
            one = figures(chip, name, run, how)
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
    if how.json is not None:
        about = {name: getattr(how, name) for name in ("nodes", "slots", "features")}
        versions = {name: version(name) for name in ("jax", "libtpu", *(["tokamax"] if "tokamax" in runs else []))}
        how.json.write_text(json.dumps({**about, **versions, "dtype": "bfloat16", "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
