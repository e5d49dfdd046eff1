"""Scheduling of single collectives beside a matmul (asynchronous, merged or serialised), compiled or run on present devices.

Four programs for each collective and size. `beside`: a matmul and an independent collective. `after`: a collective of the
matmul's result. `before`: a matmul of the collective's result. `two`: a matmul and two independent collectives of one kind.
`after` and `before` allow no overlap unless the compiler splits them into tiles. For absent TPUs the compiled schedule is read
and its time modelled; on present devices the parts are timed.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tilewright.bench.overlap import slice_of_mesh
from tilewright.compiled.aot import compile_for, tpu_topology
from tilewright.compiled.timing import alternate, medians
from tilewright.hardware.links import HOP_US, ring_seconds
from tilewright.hardware.tpu import chip_of
from tilewright.parallel.mesh import make_mesh
from tilewright.parallel.rings import shift
from tilewright.perfmodel.schedule import PERMUTE, ScheduleGraph, read_schedule
from tilewright.perfmodel.timeline import simulate

AXIS = "x"
HIDDEN = 4096
"""Default number of columns of all matrices."""

ROWS = 2048
"""Default number of rows of the matmul's input on each device, unless the collective is of the matmul's input or result."""

COLLECTIVES: dict[str, Callable[[Array], Array]] = {
    "all-reduce": lambda x: jax.lax.psum(x, AXIS),
    "all-gather": lambda x: jax.lax.all_gather(x, AXIS, tiled=True),
    "reduce-scatter": lambda x: jax.lax.psum_scatter(x, AXIS, tiled=True),
    "all-to-all": lambda x: jax.lax.all_to_all(x, AXIS, 0, 0, tiled=True),
    PERMUTE: lambda x: shift(x, AXIS),
}
"""Collectives by their names in HLO."""

EACH = PartitionSpec(AXIS)
SPECS = (EACH, PartitionSpec(), EACH, EACH)
"""Partition specs of the four arguments of a program."""


def programs(collective: Callable[[Array], Array]) -> dict[str, Callable[..., Any]]:
    """Returns the four programs. Each takes a device's `x [rows, hidden]`, `w [hidden, hidden]`, and `y`, `z`, the inputs of
    collectives."""
    return {
        "beside": lambda x, w, y, z: (x @ w, collective(y)),
        "after": lambda x, w, y, z: collective(y @ w),
        "before": lambda x, w, y, z: collective(y) @ w,
        "two": lambda x, w, y, z: (x @ w, collective(y), collective(z)),
    }


@dataclass(frozen=True)
class MicroCase:
    """Program of `programs` with its sizes.

    Attributes:
        size_bytes: bytes that each device gives to a collective, bfloat16.
        hidden: columns of all matrices.
        product_rows: rows of the matmul's input on each device, unless the collective is of the matmul's input or result.
    """

    collective: str
    program: str
    size_bytes: int
    hidden: int = HIDDEN
    product_rows: int = ROWS

    @property
    def rows(self) -> int:
        return self.size_bytes // (2 * self.hidden)

    def product_work(self, devices: int) -> tuple[float, float]:
        """Returns the matmul's operations on a device, and the bytes that the matmul reads and writes."""
        gathered = {"all-gather": devices, "reduce-scatter": 1 / devices}.get(self.collective, 1)
        rows = {"after": self.rows, "before": self.rows * gathered}.get(self.program, self.product_rows)
        return 2.0 * rows * self.hidden**2, 2.0 * self.hidden * (self.hidden + 2 * rows)

    @property
    def expected(self) -> int:
        """Number of collectives in the program's source."""
        return 2 if self.program == "two" else 1


def cases(
    collectives: Sequence[str], sizes_kib: Sequence[int], devices: int, hidden: int = HIDDEN, product_rows: int = ROWS
) -> list[MicroCase]:
    """Returns all combinations.

    Raises:
        ValueError: A collective is unknown, or the devices do not divide a size into rows.
    """
    for name in collectives:
        if name not in COLLECTIVES:
            raise ValueError(f"expected a collective of {', '.join(COLLECTIVES)}, found {name!r}")
    if hidden < 1 or product_rows < 1:
        raise ValueError(f"expected products of at least one row and column, found {product_rows} and {hidden}")
    least = devices * 2 * hidden
    for size in sizes_kib:
        if size < 1 or 1024 * size % least:
            raise ValueError(f"expected multiples of {least / 1024:g} KiB, a row for each of {devices} devices, found {size}")
    shape = (hidden, product_rows)
    return [
        MicroCase(name, program, 1024 * size, *shape) for name in collectives for size in sizes_kib for program in programs(abs)
    ]


def arguments(case: MicroCase, mesh: Mesh) -> tuple[Callable[..., Any], tuple[jax.ShapeDtypeStruct, ...]]:
    """Returns the function over the mesh and its abstract arguments. Every device has its own part of the inputs and
    outputs."""
    run = programs(COLLECTIVES[case.collective])[case.program]
    hidden = case.hidden
    shapes = ((case.product_rows * mesh.size, hidden), (hidden, hidden), *[(case.rows * mesh.size, hidden)] * 2)
    function = jax.shard_map(run, mesh=mesh, in_specs=SPECS, out_specs=EACH, check_vma=False)
    operands = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, SPECS, strict=True)
    ]
    return function, tuple(operands)


def compiled(chip: str, case: MicroCase, hop_us: float = HOP_US) -> dict[str, Any]:
    """Returns the record of a case compiled for an absent TPU."""
    spec = chip_of(chip)
    mesh = make_mesh({AXIS: None}, tpu_topology(chip).devices)
    function, operands = arguments(case, mesh)
    graph = read_schedule(compile_for(chip, function, *operands).hlo, spec)
    whole = simulate(graph, slice_of_mesh(mesh, hop_us)).whole()
    size = case.size_bytes * (mesh.size if case.collective == "all-gather" else 1)
    ring = None if case.collective == PERMUTE else ring_seconds(spec, case.collective, size, (mesh.size,), hop_us=hop_us)
    return {
        "chip": chip,
        "collective": case.collective,
        "program": case.program,
        "size_bytes": case.size_bytes,
        **verdict(graph, case),
        **{f"{name}_us": 1e6 * getattr(whole, f"{name}_s") for name in ("compute", "communication", "hidden", "exposed")},
        "ring_us": None if ring is None else 1e6 * ring,
        "notes": list(graph.notes),
    }


def verdict(graph: ScheduleGraph, case: MicroCase) -> dict[str, Any]:
    """Returns the kinds and numbers of a compiled case's collectives, and a description.

    The description has `synchronous`, `asynchronous` or `partly asynchronous`; then `merged` for fewer collectives than in the
    source, `in parts` for more, and `as KIND` for a replaced kind.
    """
    found = [node for node in graph.nodes if node.engine == "ici"]
    started = sum(node.role == "start" for node in found)
    kinds = sorted({node.transfer.kind for node in found if node.transfer is not None})
    words = ["asynchronous" if started == len(found) else "partly asynchronous" if started else "synchronous"]
    if len(found) < case.expected:
        words = [*words, "merged"] if found else ["left out"]
    if len(found) > case.expected:
        words.append("in parts")
    if found and kinds != [case.collective]:
        words.append(f"as {' and '.join(kinds)}")
    return {"made_of_it": ", ".join(words), "kinds": kinds, "transfers": len(found), "asynchronous": started}


def measured(case: MicroCase, mesh: Mesh, repetitions: int) -> dict[str, Any]:
    """Measures a case and its parts alone on present devices: medians of alternating runs.

    The parts are the matmul, the collectives, and a sum of two arrays of the collective's size, which measures memory.
    """
    function, operands = arguments(case, mesh)
    values = [jax.device_put(jnp.ones(one.shape, one.dtype), one.sharding) for one in operands]
    collective = COLLECTIVES[case.collective]
    over = partial(jax.shard_map, mesh=mesh, in_specs=SPECS, out_specs=EACH, check_vma=False)
    parts = {
        "both": function,
        "product": over(products(case)),
        "collective": over(lambda x, w, y, z: (collective(y), collective(z))[: case.expected]),
        "memory": over(lambda x, w, y, z: y + z),
    }
    jitted = {name: jax.jit(part).lower(*values).compile() for name, part in parts.items()}

    def timed(run: Callable[..., Any]) -> float:
        started_at = time.perf_counter()
        jax.block_until_ready(run(*values))
        return time.perf_counter() - started_at

    medians_s = medians(alternate({name: partial(timed, run) for name, run in jitted.items()}, repetitions, warm=True))
    hidden = medians_s["product"] + medians_s["collective"] - medians_s["both"]
    times = {f"{name}_us": 1e6 * seconds for name, seconds in medians_s.items()}
    flops, moved = case.product_work(mesh.size)
    about = {"collective": case.collective, "program": case.program, "size_bytes": case.size_bytes}
    about |= {"collectives": case.expected, "product_flops": flops, "product_bytes": moved, "memory_bytes": 3 * case.size_bytes}
    return {**about, **times, "hidden_share": hidden / medians_s["collective"]}


def products(case: MicroCase) -> Callable[..., Any]:
    """Returns the matmul of a case alone; after a gather, with the gathered number of rows."""
    if case.program in ("beside", "two"):
        return lambda x, w, y, z: x @ w
    if case.program == "after":
        return lambda x, w, y, z: y @ w

    def before(x: Array, w: Array, y: Array, z: Array) -> Array:
        devices = jax.lax.axis_size(AXIS)
        if case.collective == "all-gather":
            y = jnp.tile(y, (devices, 1))
        return (y[: len(y) // devices] if case.collective == "reduce-scatter" else y) @ w

    return before
