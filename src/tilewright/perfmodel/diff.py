"""Difference between two compilations of a program: bytes moved, asynchronous collectives, fusions and copies.

Two versions of a compiler differ in names and numbers of operations. Operations are therefore counted by kind and by place in
the Python program (JAX's name stack), with loops unrolled, and programs are compared by these counts. All metrics come from
compiled text: they are compiler estimates, no measurements.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from tilewright.compiled.aot import Compiled
from tilewright.compiled.hlo import HloOp, Module, read_module
from tilewright.hardware.tpu import chip_of
from tilewright.perfmodel.schedule import COLLECTIVE, COPIES, COPY, Node, read_schedule

ExecutionKind = Literal["asynchronous", "synchronous", "SparseCore"]
"""Execution of an operation: `asynchronous` (start and wait apart), `synchronous`, or on a `SparseCore`."""

COMPILER = "(made by the compiler)"
"""Place of operations that the compiler added, without a line of the Python program."""

SPARSE_CORE = 'async_execution_thread="sparsecore"'
"""Attribute of operations on a SparseCore, as in libtpu 0.0.50.1."""


class Site(NamedTuple):
    """A place in the Python program and a kind of operation: one of `COLLECTIVE`, or an opcode."""

    kind: str
    place: str

    def __str__(self) -> str:
        return f"{self.kind} at {self.place}"


@dataclass(frozen=True)
class ProgramTotals:
    """Totals of a compiled program, with loops unrolled. Compiler estimates.

    Attributes:
        read_bytes, written_bytes: HBM traffic, by `compiled.traffic`.
        estimated_cycles: sum of the compiler's estimates.
        without_estimate: number of operations without an estimate, which are not in the sum.
        temp_bytes: device memory of temporaries, without arguments and results.
        asynchronous, synchronous, sparse_core: number of collectives by their `ExecutionKind`.
        asynchronous_bytes: bytes that a device gives to asynchronous and SparseCore collectives.
        synchronous_bytes: bytes that a device gives to synchronous collectives.
        fusions: number of fusions.
        copies, copied_bytes: copies on the core, to another layout or buffer, and their HBM traffic.
        prefetches, prefetched_bytes: copies between HBM and VMEM beside the core.
    """

    read_bytes: int
    written_bytes: int
    estimated_cycles: int
    without_estimate: int
    temp_bytes: int
    asynchronous: int
    synchronous: int
    sparse_core: int
    asynchronous_bytes: int
    synchronous_bytes: int
    fusions: int
    copies: int
    copied_bytes: int
    prefetches: int
    prefetched_bytes: int


@dataclass(frozen=True)
class ProgramSites:
    """Counts of a compiled program's operations by site.

    Attributes:
        figures: totals of the program.
        executions: operations by `ExecutionKind`, for each site with collectives or with operations on a SparseCore.
        ops: number of operations of each site, without collectives.
        moved_bytes: HBM traffic of each site.
    """

    figures: ProgramTotals
    executions: Mapping[Site, Counter[str]] = field(repr=False)
    ops: Counter[Site] = field(repr=False)
    moved_bytes: Counter[Site] = field(repr=False)


@dataclass(frozen=True)
class ExecutionChange:
    """A change in the `ExecutionKind` of a site's collectives, or of its operations on a SparseCore."""

    site: Site
    before: Mapping[str, int]
    after: Mapping[str, int]

    def gained(self, execution: ExecutionKind) -> int:
        """Increase in the number of operations of one `ExecutionKind`; negative for a decrease."""
        return self.after.get(execution, 0) - self.before.get(execution, 0)


@dataclass(frozen=True)
class OpChange:
    """A change in the number or the bytes of a site's operations."""

    site: Site
    before: int
    after: int
    before_bytes: int
    after_bytes: int

    @property
    def moved_bytes(self) -> int:
        """Increase in HBM traffic, in bytes."""
        return self.after_bytes - self.before_bytes


@dataclass(frozen=True)
class ProgramDiff:
    """Difference between two compilations of one program.

    Attributes:
        name: name of the program.
        before, after: totals of the compilations.
        executions: sites with a change in the `ExecutionKind` of collectives, or to or from a SparseCore.
        ops: other sites with changed operations, the largest change of bytes first.
    """

    name: str
    before: ProgramTotals
    after: ProgramTotals
    executions: tuple[ExecutionChange, ...]
    ops: tuple[OpChange, ...]

    def rise(self, figure: str) -> float:
        """Relative increase of a total; negative for a decrease, infinite from 0."""
        before = getattr(self.before, figure)
        after = getattr(self.after, figure)
        if before:
            return after / before - 1
        return 0.0 if after == before else float("inf")

    def record(self) -> dict[str, Any]:
        """Returns plain data; changes of executions and operations each have kind and place."""
        figures = {name: vars(getattr(self, name)) for name in ("before", "after")}
        executions = [{**one.site._asdict(), "before": dict(one.before), "after": dict(one.after)} for one in self.executions]
        ops = [{**one.site._asdict(), **{key: value for key, value in vars(one).items() if key != "site"}} for one in self.ops]
        return {"name": self.name, **figures, "ways": executions, "operations": ops}


def diff(name: str, before: Compiled, after: Compiled) -> ProgramDiff:
    """Compares two compilations of one program for one chip.

    Raises:
        ValueError: the compilations are for different chips, or one has no schedule.
    """
    if before.chip != after.chip:
        raise ValueError(f"expected {name} compiled for one chip twice, found {before.chip} and {after.chip}")
    old = sites_of(before)
    new = sites_of(after)
    executions = [
        ExecutionChange(site, dict(old.executions.get(site, {})), dict(new.executions.get(site, {})))
        for site in ordered(old.executions, new.executions)
        if old.executions.get(site) != new.executions.get(site)
    ]
    ops = [
        OpChange(site, old.ops[site], new.ops[site], old.moved_bytes[site], new.moved_bytes[site])
        for site in ordered(old.ops, new.ops)
        if (old.ops[site], old.moved_bytes[site]) != (new.ops[site], new.moved_bytes[site])
    ]
    ops.sort(key=lambda change: -abs(change.moved_bytes))
    return ProgramDiff(name, old.figures, new.figures, tuple(executions), tuple(ops))


def ordered(before: Mapping[Site, Any], after: Mapping[Site, Any]) -> Sequence[Site]:
    """Returns the sites of both programs without duplicates, those of the first program first."""
    return list(dict.fromkeys((*before, *after)))


def sites_of(program: Compiled) -> ProgramSites:
    """Counts the operations of a program by site.

    Raises:
        ValueError: the text has no schedule.
    """
    module = read_module(program.hlo)
    by_name = {op.name: op for computation in module.computations.values() for op in computation.ops}
    traffic = program.traffic()
    moved_by = Counter({op.name: op.read + op.written for op in traffic.ops})
    executions: dict[Site, Counter[str]] = {}
    ops: Counter[Site] = Counter()
    moved: Counter[Site] = Counter()
    counts: Counter[str] = Counter()
    sent: Counter[str] = Counter()
    for node in read_schedule(program.hlo, chip_of(program.chip)).nodes:
        execution = execution_kind(module, by_name[node.name], node)
        site = Site(kind_of(node), node.op_name or COMPILER)
        if execution is not None:
            executions.setdefault(site, Counter())[execution] += 1
        if node.engine == "ici" and node.transfer is not None and execution is not None:
            counts[execution] += 1
            sent[execution] += node.transfer.bytes
        elif execution is None and node.role == "start" and node.transfer is not None:
            counts["prefetch"] += 1
            sent["prefetch"] += node.transfer.bytes
        elif node.role == "run":
            counts[node.opcode] += 1
            ops[site] += 1
            moved[site] += moved_by.pop(node.name, 0)  # traffic of all executions
    figures = ProgramTotals(
        traffic.read,
        traffic.written,
        program.cycles,
        len(program.without_cycles),
        program.temp_bytes,
        counts["asynchronous"],
        counts["synchronous"],
        counts["SparseCore"],
        sent["asynchronous"] + sent["SparseCore"],
        sent["synchronous"],
        counts["fusion"],
        counts[COPY],
        sum(size for site, size in moved.items() if site.kind == COPY),
        counts["prefetch"],
        sent["prefetch"],
    )
    return ProgramSites(figures, executions, +ops, +moved)


def kind_of(node: Node) -> str:
    """Returns the kind of a collective or of a copy beside the core in any spelling; else the opcode."""
    base = node.opcode.removesuffix("-start")
    if node.transfer is not None and (node.transfer.kind in COLLECTIVE or base in COPIES):
        return node.transfer.kind
    return base


def execution_kind(module: Module, op: HloOp, node: Node) -> ExecutionKind | None:
    """Returns the `ExecutionKind` of a collective or a SparseCore operation; None for the wait and for other operations."""
    if node.role in ("input", "done"):
        return None
    if on_sparse_core(module, op):
        return "SparseCore"
    if node.transfer is None or node.transfer.kind not in COLLECTIVE:
        return None
    return "asynchronous" if node.role == "start" else "synchronous"


def on_sparse_core(module: Module, op: HloOp) -> bool:
    """Returns True if an operation, or a computation that it calls, runs on a SparseCore."""
    return any(SPARSE_CORE in each.attributes for each in with_callees(module, op))


def with_callees(module: Module, op: HloOp) -> Iterator[HloOp]:
    """Iterates over an operation and the operations of its called computations."""
    yield op
    for name in op.callees("calls"):
        for inner in module.computations[name].ops:
            yield from with_callees(module, inner)
