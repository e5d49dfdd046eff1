"""Compiles programs for TPUs that this machine does not have.

libtpu, the compiler for real chips, is a wheel and needs no chip. Its figures for a program are *compiler estimates*: cycles by
its own cost model, memory by its own assignment. They are not measurements.
"""

import importlib.util
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf, prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from tilewright.compiled.hlo import FREE, Computation, Execution, HloOp, execution, read_module
from tilewright.compiled.traffic import FREE_CALLS, Traffic, memory_traffic

KINDS = {"v4": 3, "v5e": 2, "v5p": 3, "v6e": 2, "tpu7x": 3}
"""Kinds of TPU and the number of axes of their topologies."""


LARGEST_AXIS = 16
"""Longest topology axis: libtpu aborts the process for a topology that is longer than a pod of its kind."""

NO_MACHINE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""Environment for a machine without a TPU. Without these values libtpu queries the cloud's metadata server, waits for its
answer, and lets only one process compile at a time, as if a chip were shared."""

MEMORY = ("argument", "output", "alias", "temp")
"""Kinds of device memory in the compiler's memory analysis."""


@dataclass(frozen=True)
class Compiled:
    """A program that the TPU compiler produced for one device. All figures are compiler estimates.

    Attributes:
        chip: topology that the program was compiled for; the figures are those of one device that runs the program.
        hlo: optimised, scheduled HLO text.
        argument_bytes, output_bytes: device memory of arguments and results.
        alias_bytes: memory that arguments and results share by donation.
        temp_bytes: device memory of temporaries.
        cycles: sum of `estimated_cycles` over all executed operations, with loops multiplied by their trip counts. Memory
            stalls count only as far as the cost model of each operation includes them.
        without_cycles: "name (opcode)" of operations without an estimate, which `cycles` leaves out: gathers, collectives and
            Pallas kernels (with their custom-call target as opcode). Asynchronous copies between HBM and VMEM have no estimate
            either and are not listed.
        notes: assumptions made to count cycles.
        cost: XLA's own cost analysis. It counts some things differently from `traffic`, for example a loop once.
    """

    chip: str
    hlo: str = field(repr=False)
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    cycles: int
    without_cycles: tuple[str, ...]
    notes: tuple[str, ...]
    cost: Mapping[str, float] = field(repr=False)

    @property
    def peak_bytes(self) -> int:
        """Device memory that the program needs at once: arguments, results and temporaries, with aliased memory counted
        once."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes

    def traffic(self) -> Traffic:
        """Returns the bytes moved to and from HBM, per operation."""
        return memory_traffic(self.hlo)

    def record(self) -> dict[str, Any]:
        """Returns the compiler's output as plain data; `read_record` restores the program from it."""
        memory = {f"{name}_size_in_bytes": getattr(self, f"{name}_bytes") for name in MEMORY}
        return {"chip": self.chip, "hlo": self.hlo, "memory": memory, "cost": dict(self.cost)}


@contextmanager
def _disk_cache_disabled() -> Iterator[None]:
    # JAX writes programs for absent TPUs to its compilation cache and then cannot read them.
    name = "jax_persistent_cache_min_compile_time_secs"
    before = jax.config.values[name]
    jax.config.update(name, inf)
    try:
        yield
    finally:
        jax.config.update(name, before)


def compile_for(
    chip: str,
    fn: Callable[..., Any],
    *args: Any,
    donate: int | Sequence[int] = (),
    options: Mapping[str, str | bool | int | float] | None = None,
) -> Compiled:
    """Compiles a function for a TPU topology, for one of its devices or for the devices in the arguments' shardings.

    Args:
        chip: kind and topology: `v5e:2x2`, `v5p:2x2x1`, `v6e:1x1`.
        fn: the function, jitted or not. Inside it, JAX reports the platform of this machine.
        args: arrays or `jax.ShapeDtypeStruct`s in any pytrees, of which only shapes and dtypes matter. The sharding of a
            `ShapeDtypeStruct` must name devices of the topology (`tpu_topology`); leaves without a sharding are placed on one
            of its devices. Static arguments of a jitted function are passed unchanged.
        donate: positions of donated arguments, if `fn` is not jitted; a jitted function declares its own.
        options: compiler options (`xla_tpu_...`) for this program.

    Raises:
        ValueError: an unknown kind or topology, libtpu is not installed, or `donate` with a jitted function.
        jax.errors.JaxRuntimeError: the compiler refuses the program, for example because it exceeds the chip's memory.
    """
    jitted = hasattr(fn, "trace")
    if jitted and donate != ():
        raise ValueError(f"expected donate only with a function that is not jitted; give {donate!r} to jax.jit(donate_argnums)")
    placement = SingleDeviceSharding(tpu_topology(chip).devices[0])

    def placed(leaf: Any) -> Any:
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            return leaf
        sharding = placement
        if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is not None:
            sharding = leaf.sharding
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=getattr(leaf, "weak_type", False))

    program: Any = fn if jitted else jax.jit(fn, donate_argnums=donate)
    lowered = program.trace(*jax.tree.map(placed, args)).lower(lowering_platforms=("tpu",))
    return compile_lowered(chip, lowered, options or {})


def compile_lowered(chip: str, lowered: Any, options: Mapping[str, Any]) -> Compiled:
    """Compiles a program lowered for devices of a TPU topology; arguments and errors are those of `compile_for`."""
    with _disk_cache_disabled():
        compiled = lowered.compile(dict(options) or None)
    return read_compiled(chip, compiled.as_text(), compiled.memory_analysis(), compiled.cost_analysis())


def tpu_topology(chip: str) -> topologies.TopologyDescription:
    """Returns JAX's description of the devices of a TPU topology, which need not exist.

    Raises:
        ValueError: an unknown kind or topology, or libtpu is not installed.
    """
    kind, _, dims = chip.partition(":")
    sizes = [int(size) for size in dims.split("x")] if re.fullmatch(r"[1-9]\d?(x[1-9]\d?)*", dims) else []
    if len(sizes) != KINDS.get(kind) or max(sizes) > LARGEST_AXIS:
        raise ValueError(f"expected {known_chips()}; found {chip!r}")
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(f"compiling for {chip} needs the TPU compiler: pip install 'tilewright[tpu]'; found no libtpu")
    if not any(Path(device).exists() for device in ("/dev/accel0", "/dev/vfio/0")):  # no TPU on this machine
        for name, value in NO_MACHINE.items():
            os.environ.setdefault(name, value)
    # By default libtpu places 2x2 chips on a host and refuses topologies that this does not divide.
    hosts = {} if sizes[0] % 2 == sizes[1] % 2 == 0 else {"chips_per_host_bounds": (1, 1, 1)}
    try:
        return topologies.get_topology_desc(chip, "tpu", **hosts)
    except jax.errors.JaxRuntimeError as error:
        if "INVALID_ARGUMENT" not in str(error):
            raise
        raise ValueError(f"expected {known_chips()}; libtpu refuses {chip!r}: {error}") from error


def known_chips() -> str:
    """Describes valid topologies for error messages."""
    kinds = ", ".join(f"{kind}:{'x'.join('ABC'[:count])}" for kind, count in KINDS.items())
    return f"a TPU as {kinds} with sizes up to {LARGEST_AXIS}, such as v5e:1x1, v6e:2x2 or v5p:2x2x1"


def read_compiled(chip: str, hlo: str, memory: Any, cost: Mapping[str, float]) -> Compiled:
    """Builds a `Compiled` from a compiled program's text and analyses.

    Args:
        memory: result of the compiled program's `memory_analysis()`.
        cost: result of its `cost_analysis()`.
    """
    cycles, without, notes = estimated_cycles(hlo)
    argument = memory.argument_size_in_bytes
    output = memory.output_size_in_bytes
    alias = memory.alias_size_in_bytes
    temp = memory.temp_size_in_bytes
    return Compiled(chip, hlo, argument, output, alias, temp, cycles, without, notes, cost)


def read_record(record: Mapping[str, Any]) -> Compiled:
    """Restores the program of a `Compiled.record`.

    Raises:
        ValueError: not such a record, or its text is no compiled program.
    """
    memory = record.get("memory")
    sizes = memory if isinstance(memory, Mapping) else {}
    kinds = {"chip": str, "hlo": str, "cost": Mapping, **{f"{name}_size_in_bytes": int for name in MEMORY}}
    if missing := [name for name, kind in kinds.items() if not isinstance({**record, **sizes}.get(name), kind)]:
        raise ValueError(
            "expected the record of a compiled program, with chip and hlo as text, and sizes of memory and cost; found no such "
            f"{', '.join(missing)}"
        )
    return read_compiled(record["chip"], record["hlo"], SimpleNamespace(**sizes), record["cost"])


def estimated_cycles(hlo: str) -> tuple[int, tuple[str, ...], tuple[str, ...]]:
    """Estimates the cycles of a scheduled TPU program from the compiler's annotations.

    Returns:
        The sum over all executed operations, the operations without an estimate, and the assumptions made; see `Compiled`.
    """
    run: Execution = execution(read_module(hlo), lambda op, _: op.estimated_cycles or 0)
    cycles = sum((step.op.estimated_cycles or 0) * step.times for step in run.steps)
    without = tuple(
        f"{step.op.name} ({step.op.custom_call_target or step.op.opcode})"
        for step in run.steps
        if step.op.estimated_cycles is None and _does_work(step.op, step.computation)
    )
    return cycles, without, run.notes


def _does_work(op: HloOp, computation: Computation) -> bool:
    """Returns True for an operation that runs on more than single numbers."""
    if op.opcode in FREE or op.custom_call_target in FREE_CALLS or op.opcode.endswith("-start"):
        return False
    if op.opcode in ("copy-done", "slice-done"):
        return False
    read = [array for name in op.operands for array in computation.by_name[name].outputs]
    return any(prod(array.dims) > 1 for array in (*op.outputs, *read))
