"""Compiles for TPUs that are not there.

libtpu, the compiler of the real chips, comes as a wheel and needs no chip. What it says of a program are *compiler estimates*:
cycles by its own cost model, memory by its own assignment. None of it is a measurement.
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
"""libtpu aborts the process where a topology is longer than a pod of its kind; one device is compiled for in any case."""

NO_MACHINE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""Environment for a machine without a TPU. Otherwise libtpu asks the cloud's metadata server what machine it is on, waits where
nobody answers, and lets one process at a time compile, as if there were a chip to share."""

MEMORY = ("argument", "output", "alias", "temp")
"""Kinds of device memory that a compiler counts."""


@dataclass(frozen=True)
class Compiled:
    """A program that the TPU compiler made for one chip. All figures are compiler estimates.

    Attributes:
        chip: the topology that it was compiled for; the figures are those of one of its devices that run the program.
        hlo: the optimised, scheduled HLO.
        argument_bytes, output_bytes, alias_bytes: device memory of arguments and results, and of what both share by donation.
        temp_bytes: device memory for everything in between.
        cycles: the sum of `estimated_cycles` over all operations that run, loops multiplied by their trip counts. Waiting for
            memory is in it only as far as the cost model of each operation has it.
        without_cycles: "name (opcode)" of the operations that carry no estimate and so are not in `cycles`: gathers,
            collectives, and Pallas kernels, whose custom-call target stands in place of the opcode. Copies between HBM and
            VMEM that run beside the compute carry none either, and are not listed.
        notes: what had to be assumed to count cycles.
        cost: XLA's own cost analysis. It counts some things differently from `traffic`: a loop once, say.
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
        """Device memory that the program needs at once: arguments, results and temporaries, what is shared counted once."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes

    def traffic(self) -> Traffic:
        """Bytes moved to and from HBM."""
        return memory_traffic(self.hlo)

    def record(self) -> dict[str, Any]:
        """Everything that the compiler said, as plain data; `read_record` makes the program of it again."""
        memory = {f"{name}_size_in_bytes": getattr(self, f"{name}_bytes") for name in MEMORY}
        return {"chip": self.chip, "hlo": self.hlo, "memory": memory, "cost": dict(self.cost)}


@contextmanager
def _kept_off_disk() -> Iterator[None]:
    """JAX writes programs for absent TPUs to its compilation cache and then cannot read them: nothing is written meanwhile."""
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
    """Compiles a function for a TPU topology, which need not exist: for one device of it, or for those that arguments name.

    Args:
        chip: kind and topology: `v5e:2x2`, `v5p:2x2x1`, `v6e:1x1`.
        fn: the function, jitted or not. Code in it that asks JAX for the platform is told of the machine that compiles.
        args: its arguments, arrays or `jax.ShapeDtypeStruct`s in any pytree; only shapes and dtypes count, and of a
            `ShapeDtypeStruct` the sharding, which must name devices of the topology (`tpu_topology`). Without any, they are
            placed on one of its devices. Static arguments of a jitted function go in as they are.
        donate: positions of arguments whose buffers are given away, where `fn` is not jitted; a jitted one says so itself.
        options: compiler options (`xla_tpu_...`) for this program.

    Raises:
        ValueError: an unknown kind or topology, libtpu is not installed, or `donate` with a jitted function.
        jax.errors.JaxRuntimeError: what the compiler itself refuses, too large a program for the chip's memory for example.
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
    """Compiles a program that was lowered for devices of a TPU topology; arguments and errors as for `compile_for`."""
    with _kept_off_disk():
        compiled = lowered.compile(dict(options) or None)
    return read_compiled(chip, compiled.as_text(), compiled.memory_analysis(), compiled.cost_analysis())


def tpu_topology(chip: str) -> topologies.TopologyDescription:
    """The devices of a TPU topology, as JAX describes them without having them.

    Raises:
        ValueError: an unknown kind or topology, or libtpu is not installed.
    """
    kind, _, dims = chip.partition(":")
    sizes = [int(size) for size in dims.split("x")] if re.fullmatch(r"[1-9]\d?(x[1-9]\d?)*", dims) else []
    if len(sizes) != KINDS.get(kind) or max(sizes) > LARGEST_AXIS:
        raise ValueError(f"expected {known_chips()}; found {chip!r}")
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(f"compiling for {chip} needs the TPU compiler: pip install 'tilewright[tpu]'; found no libtpu")
    if not any(Path(device).exists() for device in ("/dev/accel0", "/dev/vfio/0")):  # there is no TPU here
        for name, value in NO_MACHINE.items():
            os.environ.setdefault(name, value)
    # By default libtpu takes 2x2 chips to a host, and refuses what cannot be divided so.
    hosts = {} if sizes[0] % 2 == sizes[1] % 2 == 0 else {"chips_per_host_bounds": (1, 1, 1)}
    try:
        return topologies.get_topology_desc(chip, "tpu", **hosts)
    except jax.errors.JaxRuntimeError as error:
        if "INVALID_ARGUMENT" not in str(error):
            raise
        raise ValueError(f"expected {known_chips()}; libtpu refuses {chip!r}: {error}") from error


def known_chips() -> str:
    """The topologies to choose from, as a message says it."""
    kinds = ", ".join(f"{kind}:{'x'.join('ABC'[:count])}" for kind, count in KINDS.items())
    return f"a TPU as {kinds} with sizes up to {LARGEST_AXIS}, such as v5e:1x1, v6e:2x2 or v5p:2x2x1"


def read_compiled(chip: str, hlo: str, memory: Any, cost: Mapping[str, float]) -> Compiled:
    """Gathers what a compiled program says of itself.

    Args:
        memory: what `memory_analysis()` of a compiled program returns.
        cost: what its `cost_analysis()` returns.
    """
    cycles, without, notes = estimated_cycles(hlo)
    argument = memory.argument_size_in_bytes
    output = memory.output_size_in_bytes
    alias = memory.alias_size_in_bytes
    temp = memory.temp_size_in_bytes
    return Compiled(chip, hlo, argument, output, alias, temp, cycles, without, notes, cost)


def read_record(record: Mapping[str, Any]) -> Compiled:
    """The program of a `Compiled.record`.

    Raises:
        ValueError: it is none, or its text is no compiled program.
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
    """The compiler's estimate of a scheduled TPU program, in cycles of the chip.

    Returns:
        The sum over all operations that run, what has no estimate, and what had to be assumed; see `Compiled`.
    """
    run: Execution = execution(read_module(hlo), lambda op, _: op.number("estimated_cycles") or 0)
    cycles = sum((step.op.number("estimated_cycles") or 0) * step.times for step in run.steps)
    without = tuple(
        f"{step.op.name} ({step.op.custom_call_target or step.op.opcode})"
        for step in run.steps
        if step.op.number("estimated_cycles") is None and _does_work(step.op, step.computation)
    )
    return cycles, without, run.notes


def _does_work(op: HloOp, computation: Computation) -> bool:
    """Whether an operation takes time that counts: it runs, and on more than single numbers."""
    if op.opcode in FREE or op.custom_call_target in FREE_CALLS or op.opcode.endswith("-start"):
        return False
    if op.opcode in ("copy-done", "slice-done"):
        return False
    read = [array for name in op.operands for array in computation.by_name[name].outputs]
    return any(prod(array.dims) > 1 for array in (*op.outputs, *read))
