"""The difference between two compilations of a program: what moves, what is asynchronous, what fusions and copies there are.

Two versions of a compiler name operations otherwise, and in other numbers. So operations are counted by their place in the
Python program (JAX's name stack) and their kind, and two programs are compared by these counts; loops are unrolled. All figures
are read from compiled text: compiler estimates, no measurements.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from tilewright.compiled.aot import Compiled
from tilewright.compiled.hlo import HloOp, Module, read_module
from tilewright.hardware.tpu import chip_of
from tilewright.perfmodel.schedule import COLLECTIVE, COPIES, COPY, Node, read_schedule

Way = Literal["asynchronous", "synchronous", "SparseCore"]
"""Course of an operation: begun at one place and waited for at another, waited for at once, or on a SparseCore."""

COMPILER = "(made by the compiler)"
"""Place of operations that come from no line of the Python program."""

SPARSE_CORE = 'async_execution_thread="sparsecore"'
"""Attribute of what runs on a SparseCore, as libtpu 0.0.50.1 writes it."""


class Site(NamedTuple):
    """A place in the Python program, and a kind of operation there: one of `COLLECTIVE`, or an opcode."""

    kind: str
    place: str

    def __str__(self) -> str:
        return f"{self.kind} at {self.place}"


@dataclass(frozen=True)
class ProgramFigures:
    """Totals of a compiled program. Compiler estimates; loops count as often as they run.

    Attributes:
        read_bytes, written_bytes: of HBM, by `compiled.traffic`.
        estimated_cycles: the sum of the compiler's estimates.
        without_estimate: operations that have none, and so are not in it.
        temp_bytes: device memory between arguments and results.
        asynchronous, synchronous, sparse_core: collectives by their `Way`.
        asynchronous_bytes: that a device gives to those which aren't synchronous.
        synchronous_bytes: and to those which are.
        fusions: operations that are fused ones.
        copies, copied_bytes: copies on the core, to another layout or buffer, and what they read and write of HBM.
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
    """Counts of a compiled program's operations.

    Attributes:
        figures: its totals.
        ways: of each site with collectives, or with operations on a SparseCore, how many go which way.
        ops: how many operations of each site run, collectives left out.
        moved_bytes: of HBM, of each site.
    """

    figures: ProgramFigures
    ways: Mapping[Site, Counter[str]] = field(repr=False)
    ops: Counter[Site] = field(repr=False)
    moved_bytes: Counter[Site] = field(repr=False)


@dataclass(frozen=True)
class WayChange:
    """Collectives of a site, or operations that a SparseCore has or had, that go another way than before."""

    site: Site
    before: Mapping[str, int]
    after: Mapping[str, int]

    def gained(self, way: Way) -> int:
        """How many more of them go this way than did; below 0 for fewer."""
        return self.after.get(way, 0) - self.before.get(way, 0)


@dataclass(frozen=True)
class OpChange:
    """Operations of a site whose number or bytes differ."""

    site: Site
    before: int
    after: int
    before_bytes: int
    after_bytes: int

    @property
    def moved_bytes(self) -> int:
        """Bytes of HBM by which they move more than before."""
        return self.after_bytes - self.before_bytes


@dataclass(frozen=True)
class ProgramDiff:
    """Difference between two compilations of one program.

    Attributes:
        name: of the program.
        ways: sites whose collectives go another way, or which came to a SparseCore or left it.
        ops: other sites whose operations changed, those with the largest change of bytes first.
    """

    name: str
    before: ProgramFigures
    after: ProgramFigures
    ways: tuple[WayChange, ...]
    ops: tuple[OpChange, ...]

    def rise(self, figure: str) -> float:
        """Share by which a figure rose; below 0 where it fell. Infinite where there was none before."""
        before = getattr(self.before, figure)
        after = getattr(self.after, figure)
        if before:
            return after / before - 1
        return 0.0 if after == before else float("inf")

    def record(self) -> dict[str, Any]:
        """Plain data. `changes` of ways and operations each name kind and place."""
        figures = {name: vars(getattr(self, name)) for name in ("before", "after")}
        ways = [{**one.site._asdict(), "before": dict(one.before), "after": dict(one.after)} for one in self.ways]
        ops = [{**one.site._asdict(), **{key: value for key, value in vars(one).items() if key != "site"}} for one in self.ops]
        return {"name": self.name, **figures, "ways": ways, "operations": ops}


def diff(name: str, before: Compiled, after: Compiled) -> ProgramDiff:
    """Compares two compilations of one program for one chip.

    Raises:
        ValueError: they are for different chips, or one has no schedule.
    """
    if before.chip != after.chip:
        raise ValueError(f"expected {name} compiled for one chip twice, found {before.chip} and {after.chip}")
    old = sites_of(before)
    new = sites_of(after)
    ways = [
        WayChange(site, dict(old.ways.get(site, {})), dict(new.ways.get(site, {})))
        for site in ordered(old.ways, new.ways)
        if old.ways.get(site) != new.ways.get(site)
    ]
    ops = [
        OpChange(site, old.ops[site], new.ops[site], old.moved_bytes[site], new.moved_bytes[site])
        for site in ordered(old.ops, new.ops)
        if (old.ops[site], old.moved_bytes[site]) != (new.ops[site], new.moved_bytes[site])
    ]
    ops.sort(key=lambda change: -abs(change.moved_bytes))
    return ProgramDiff(name, old.figures, new.figures, tuple(ways), tuple(ops))


def ordered(before: Mapping[Site, Any], after: Mapping[Site, Any]) -> Sequence[Site]:
    """The sites of either program, each once, those of the first one first."""
    return list(dict.fromkeys((*before, *after)))


def sites_of(program: Compiled) -> ProgramSites:
    """Counts of a program.

    Raises:
        ValueError: its text has no schedule.
    """
    module = read_module(program.hlo)
    by_name = {op.name: op for computation in module.computations.values() for op in computation.ops}
    traffic = program.traffic()
    moved_by = Counter({op.name: op.read + op.written for op in traffic.ops})
    ways: dict[Site, Counter[str]] = {}
    ops: Counter[Site] = Counter()
    moved: Counter[Site] = Counter()
    seen: Counter[str] = Counter()
    sent: Counter[str] = Counter()
    for node in read_schedule(program.hlo, chip_of(program.chip)).nodes:
        way = way_of(module, by_name[node.name], node)
        site = Site(kind_of(node), node.op_name or COMPILER)
        if way is not None:
            ways.setdefault(site, Counter())[way] += 1
        if node.engine == "ici" and node.transfer is not None and way is not None:
            seen[way] += 1
            sent[way] += node.transfer.bytes
        elif way is None and node.role == "start" and node.transfer is not None:
            seen["prefetch"] += 1
            sent["prefetch"] += node.transfer.bytes
        elif node.role == "run":
            seen[node.opcode] += 1
            ops[site] += 1
            moved[site] += moved_by.pop(node.name, 0)  # which is that of all times that it runs
    figures = ProgramFigures(
        traffic.read,
        traffic.written,
        program.cycles,
        len(program.without_cycles),
        program.temp_bytes,
        seen["asynchronous"],
        seen["synchronous"],
        seen["SparseCore"],
        sent["asynchronous"] + sent["SparseCore"],
        sent["synchronous"],
        seen["fusion"],
        seen[COPY],
        sum(size for site, size in moved.items() if site.kind == COPY),
        seen["prefetch"],
        sent["prefetch"],
    )
    return ProgramSites(figures, ways, +ops, +moved)


def kind_of(node: Node) -> str:
    """The kind of a collective or of a copy beside the core, of whatever spelling; else the opcode."""
    base = node.opcode.removesuffix("-start")
    if node.transfer is not None and (node.transfer.kind in COLLECTIVE or base in COPIES):
        return node.transfer.kind
    return base


def way_of(module: Module, op: HloOp, node: Node) -> Way | None:
    """Way of a collective, or of an operation on a SparseCore; None for any other, and for the end of one."""
    if node.role in ("input", "done"):
        return None
    if on_sparse_core(module, op):
        return "SparseCore"
    if node.transfer is None or node.transfer.kind not in COLLECTIVE:
        return None
    return "asynchronous" if node.role == "start" else "synchronous"


def on_sparse_core(module: Module, op: HloOp) -> bool:
    """True if an operation, or what it calls, says that it runs on a SparseCore."""
    return any(SPARSE_CORE in each.attributes for each in with_callees(module, op))


def with_callees(module: Module, op: HloOp) -> Iterator[HloOp]:
    """An operation and those inside it."""
    yield op
    for name in op.callees("calls"):
        for inner in module.computations[name].ops:
            yield from with_callees(module, inner)
