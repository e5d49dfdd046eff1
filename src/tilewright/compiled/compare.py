"""Functions that should compute the same, side by side: results, times, memory traffic, here and on TPUs that are not there.

What the figures mean is in docs/metrics.md.
"""

import io
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console, ConsoleOptions
from rich.table import Table
from rich.text import Text

from tilewright.compiled.aot import Compiled, compile_for, read_compiled, tpu_topology
from tilewright.compiled.ledger import Ledger
from tilewright.compiled.machine import chip_name
from tilewright.compiled.round_trips import round_trips
from tilewright.compiled.timing import REPETITIONS, alternate, medians, quotients, spread
from tilewright.hardware.tpu import CHIPS
from tilewright.metrics.metric import chosen
from tilewright.metrics.programs import ESTIMATED, MEASURED, PROGRAMS
from tilewright.metrics.tables import FigureTable, uncut

RUN_S = 0.05
"""Seconds that a timed run should take; one that takes longer consists of a single call."""

COPY_BYTES = 2**28
"""Of the buffer by which a device's memory is measured: far more than a cache holds."""

Function = Callable[..., Any]


@dataclass(frozen=True)
class PlacedProgram:
    """One function as it was compiled for one place.

    Attributes:
        name: of the function.
        place: the device that it ran on, or the topology that it was compiled for.
        compile_s: seconds to trace it, and to compile it or load it.
        loaded: whether it came from JAX's cache on disk, and was not compiled.
        read_bytes, written_bytes: of device memory, by the account of the compiled program (`compiled.traffic`).
        round_trips, round_trip_bytes: intermediate arrays that it writes to device memory and reads back, and their bytes.
        peak_bytes: of device memory, at once.
        median_ms, range_ms: of a call, the range from the least to the most; None where it did not run.
        speedup: the first function's median over this one's; None where they did not run.
        speedup_range: the least and the most of the repetitions' own quotients.
        share_of_bandwidth: the least time in which the memory can move these bytes, over the time of a call. Above 1 where
            caches serve part of them.
        estimated_cycles: by the compiler's cost model; None where there is none.
        without_estimate: operations that are not in `estimated_cycles`.
        memory_cycles: the least number of cycles in which all its bytes can pass; None where the chip is not known.
        largest_difference: from what the first function gives, of any element; None where they did not run.
        agrees: whether that is within the tolerance.
        notes: what the account had to assume.
    """

    name: str
    place: str
    compile_s: float
    loaded: bool
    read_bytes: int
    written_bytes: int
    round_trips: int
    round_trip_bytes: int
    peak_bytes: int
    median_ms: float | None = None
    range_ms: tuple[float, float] | None = None
    speedup: float | None = None
    speedup_range: tuple[float, float] | None = None
    share_of_bandwidth: float | None = None
    estimated_cycles: int | None = None
    without_estimate: int = 0
    memory_cycles: int | None = None
    largest_difference: float | None = None
    agrees: bool | None = None
    notes: tuple[str, ...] = ()

    @property
    def measured(self) -> bool:
        """True if it ran; otherwise its figures are the compiler's estimates."""
        return self.median_ms is not None


@dataclass(frozen=True)
class Comparison:
    """Result of a comparison. Prints as tables, one for each place.

    Attributes:
        programs: place by place, the functions in the order given.
        tolerance: share of the largest element by which results may differ; None where it follows from each dtype.
        repetitions: runs that a median is of.
        bandwidth_gb_per_s: of the memory here, read plus written; None where nothing ran.
        jax_version: that compiled.
    """

    programs: tuple[PlacedProgram, ...]
    tolerance: float | None
    repetitions: int
    bandwidth_gb_per_s: float | None
    jax_version: str

    @property
    def agrees(self) -> bool | None:
        """True if all results are within the tolerance; None where nothing ran."""
        ran = [program.agrees for program in self.programs if program.agrees is not None]
        return all(ran) if ran else None

    def record(self) -> dict[str, Any]:
        """Everything as plain data, JSON-able."""
        fields = {name: value for name, value in vars(self).items() if name != "programs"}
        programs = [{**asdict(program), "measured": program.measured} for program in self.programs]
        finite = [{name: shown(value) for name, value in program.items()} for program in programs]
        return {**fields, "agrees": self.agrees, "programs": finite}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table | Text]:
        places = dict.fromkeys(program.place for program in self.programs)
        for place in places:
            yield uncut(table([program for program in self.programs if program.place == place]), console)
        yield from self.remarks()

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=118, highlight=False, emoji=False)
        with console.capture() as captured:
            console.print(self, crop=False)
        return captured.get()

    def remarks(self) -> Iterator[Text]:
        """Remarks that stand under the tables."""
        if self.bandwidth_gb_per_s is not None:
            allowed = "the square root of each dtype's epsilon" if self.tolerance is None else f"{self.tolerance:g}"
            told = f"medians of {self.repetitions} runs in turns; memory {self.bandwidth_gb_per_s:.1f} GB/s; "
            yield Text(f"{told}tolerance {allowed} times the largest element", style="dim")
        for one in self.programs:
            if one.agrees is False:
                yield Text(f"{one.name} DIFFERS from {self.programs[0].name} by {one.largest_difference:.3g}", style="red")


def shown(value: Any) -> Any:
    """A value as JSON can hold it: it has no infinities and no NaN."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def compare(
    f: Function,
    g: Function,
    *args: Any,
    names: tuple[str, str] = ("baseline", "fused"),
    repetitions: int = REPETITIONS,
    tolerance: float | None = None,
    chip: str | Sequence[str] = (),
) -> Comparison:
    """Compares two functions that should compute the same from the same arguments.

    Both are compiled, checked against each other and timed in turns on this machine, if the arguments are arrays, and compiled
    for the TPUs in `chip`, which need not be there. Where the arguments are `jax.ShapeDtypeStruct`s nothing runs.

    Args:
        f, g: jitted or not. Arguments that are no arrays belong in a `functools.partial`; nothing is donated.
        args: arrays or shapes in any pytrees.
        names: of the functions, in tables and records.
        repetitions: how often each is timed.
        tolerance: by which share of the largest element of `f`'s result an element of `g`'s may differ; by default the square
            root of the coarser dtype's epsilon. Integers have to be equal in any case.
        chip: TPU topologies to compile for, such as "v5e:1x1".

    Raises:
        ValueError: the functions return other shapes or pytrees, arguments are shapes and there is no chip, an unknown chip,
            or an option out of its range.
    """
    if len(names) != 2 or names[0] == names[1]:
        raise ValueError(f"expected two different names, found {names!r}")
    chips = (chip,) if isinstance(chip, str) else tuple(chip)
    return compare_all(dict(zip(names, (f, g), strict=True)), args, repetitions, tolerance, chips)


def compare_all(
    functions: Mapping[str, Function],
    args: Sequence[Any],
    repetitions: int = REPETITIONS,
    tolerance: float | None = None,
    chips: Sequence[str] = (),
    run: bool = True,
    on_run: Callable[[], None] = lambda: None,
) -> Comparison:
    """`compare` for any number of functions, all held against the first.

    Args:
        run: whether to run them here, where the arguments are arrays.
        on_run: called after every compile and run.
    """
    if repetitions < 1:
        raise ValueError(f"expected repetitions of at least 1, found {repetitions}")
    if tolerance is not None and not 0 <= tolerance < math.inf:
        raise ValueError(f"expected a tolerance of at least 0, found {tolerance}")
    leaves, tree = jax.tree.flatten(tuple(args))
    abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    if abstract and not chips:
        raise ValueError("expected arrays, or a chip to compile for; found shapes alone, of which nothing can be run here")
    for chip in chips:
        tpu_topology(chip)
    programs = {name: program_of(function, tree) for name, function in functions.items()}
    check_shapes(programs, leaves)
    done: list[PlacedProgram] = []
    rate = None
    if run and not abstract:
        rate, done = run_here(programs, leaves, repetitions, tolerance, on_run)
    for chip in chips:
        for name, program in programs.items():
            done.append(estimate(name, program, leaves, chip))
            on_run()
    return Comparison(tuple(done), tolerance, repetitions, rate, jax.__version__)


def steps(functions: int, repetitions: int, chips: int, run: bool = True) -> int:
    """Number of times that `compare_all` calls `on_run`."""
    return functions * chips + ((1 + repetitions) * functions + repetitions if run else 0)


def check_shapes(programs: Mapping[str, Function], leaves: Sequence[Any]) -> None:
    """Raises a `ValueError` that shows both, if programs return different pytrees or shapes."""
    results = {name: jax.eval_shape(program, *leaves) for name, program in programs.items()}
    (first, expected), *others = results.items()
    for name, found in others:
        trees = [jax.tree.structure(result) for result in (expected, found)]
        shapes = [[leaf.shape for leaf in jax.tree.leaves(result)] for result in (expected, found)]
        if trees[0] != trees[1] or shapes[0] != shapes[1]:
            told = [jax.tree.map(lambda leaf: f"{leaf.dtype.name}{list(leaf.shape)}", result) for result in (expected, found)]
            raise ValueError(f"expected functions that return the same shapes; {first} returns {told[0]}, {name} {told[1]}")


def program_of(function: Function, tree: Any) -> Any:
    """The function as a jitted program of the leaves of its arguments.

    What it is jitted with itself, donation for one, has no effect then. And when JAX lowers a program, it fills the arguments'
    pytrees with other things than arrays, which not every class takes.
    """

    def run(*leaves: Any) -> Any:
        return function(*tree.unflatten(leaves))

    return jax.jit(run)


def run_here(
    programs: Mapping[str, Any],
    leaves: Sequence[Any],
    repetitions: int,
    tolerance: float | None,
    on_run: Callable[[], None],
) -> tuple[float, list[PlacedProgram]]:
    """Compiles, checks and times the programs on the default device; returns its GB/s too."""
    place = chip_name()
    args = [jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf for leaf in leaves]
    accounts = []
    timers = {"": copy_timer()}
    results = []
    for name, program in programs.items():
        began = time.perf_counter()
        with Ledger() as ledger:
            compiled = program.lower(*args).compile()
        seconds = time.perf_counter() - began
        read = read_compiled(place, compiled.as_text(), compiled.memory_analysis(), compiled.cost_analysis())
        accounts.append(account(name, read, seconds, ledger.loaded > 0))
        results.append(jax.device_get(compiled(*args)))
        timers[name] = timer(compiled, args)
        on_run()
    taken = alternate(timers, repetitions, on_run)
    seconds_of = medians(taken)
    rate = 2 * COPY_BYTES / seconds_of.pop("") / 1e9
    first = accounts[0]["name"]
    done = []
    for fields, result in zip(accounts, results, strict=True):
        name = fields["name"]
        moved = fields["read_bytes"] + fields["written_bytes"]
        seconds = seconds_of[name]
        times = spread([1e3 * each for each in taken[name]])
        difference, agrees = differences(results[0], result, tolerance)
        done.append(
            PlacedProgram(
                **fields,
                median_ms=times.median,
                range_ms=times.range,
                speedup=seconds_of[first] / seconds,
                speedup_range=quotients(taken[first], taken[name]).range,
                share_of_bandwidth=moved / 1e9 / rate / seconds,
                largest_difference=difference,
                agrees=agrees,
            )
        )
    return rate, done


def timer(compiled: Any, args: Sequence[Any]) -> Callable[[], float]:
    """A run of about `RUN_S`, which returns seconds for a call."""
    # A CPU may run calls side by side that do not wait for one another; other devices run them one after another.
    wait = jax.default_backend() == "cpu"

    def timed(calls: int) -> float:
        result: Any = ()
        began = time.perf_counter()
        for _ in range(calls):
            result = compiled(*args)
            if wait:
                jax.block_until_ready(result)
        jax.block_until_ready(result)
        return (time.perf_counter() - began) / calls

    calls = max(1, round(RUN_S / timed(1)))
    return lambda: timed(calls)


def copy_timer() -> Callable[[], float]:
    """A run that reads and writes every byte of a buffer of `COPY_BYTES`, which returns its seconds."""
    buffer = jnp.zeros(COPY_BYTES // 4, jnp.int32)
    add = jax.jit(lambda x: x + 1, donate_argnums=0).lower(buffer).compile()

    def timed() -> float:
        nonlocal buffer
        began = time.perf_counter()
        buffer = jax.block_until_ready(add(buffer))
        return time.perf_counter() - began

    timed()
    return timed


def estimate(name: str, program: Any, leaves: Sequence[Any], chip: str) -> PlacedProgram:
    """Compiles a program for a TPU that need not be there."""
    began = time.perf_counter()
    compiled = compile_for(chip, program, *leaves)
    fields = account(name, compiled, time.perf_counter() - began)
    spec = CHIPS.get(chip.partition(":")[0])
    moved = fields["read_bytes"] + fields["written_bytes"]
    return PlacedProgram(
        **fields,
        estimated_cycles=compiled.cycles,
        without_estimate=len(compiled.without_cycles),
        memory_cycles=None if spec is None else round(spec.roofline_cycles(moved, 0)),
    )


def account(name: str, compiled: Compiled, seconds: float, loaded: bool = False) -> dict[str, Any]:
    """The fields of `PlacedProgram` that a compiled program has in any case."""
    traffic = compiled.traffic()
    trips = round_trips(compiled.hlo)
    return {
        "name": name,
        "place": compiled.chip,
        "compile_s": seconds,
        "loaded": loaded,
        "read_bytes": traffic.read,
        "written_bytes": traffic.written,
        "round_trips": sum(trip.times for trip in trips),
        "round_trip_bytes": sum(trip.bytes * trip.times for trip in trips),
        "peak_bytes": compiled.peak_bytes,
        "notes": traffic.notes,
    }


def differences(expected: Any, found: Any, tolerance: float | None) -> tuple[float, bool]:
    """The largest difference between any two elements, and whether all are within the tolerance.

    NaN agrees with NaN only, an infinity with itself only.
    """
    largest = 0.0
    agrees = True
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        a = np.asarray(a)
        b = np.asarray(b)
        if not a.size:
            continue
        wide = np.complex128 if "c" in (a.dtype.kind, b.dtype.kind) else np.float64
        allowed = max(epsilon(a.dtype), epsilon(b.dtype)) ** 0.5 if tolerance is None else tolerance
        allowed = allowed if epsilon(a.dtype) or epsilon(b.dtype) else 0.0
        a = a.astype(wide)
        b = b.astype(wide)
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        known = np.isfinite(a) & np.isfinite(b)
        apart = np.where(same, 0.0, np.where(known, np.abs(np.where(known, a, 0) - np.where(known, b, 0)), np.inf))
        size = np.max(np.abs(a), where=np.isfinite(a), initial=0.0)
        largest = max(largest, float(apart.max()))
        agrees = agrees and bool(apart.max() <= allowed * size)
    return largest, agrees


def epsilon(dtype: Any) -> float:
    """Of a floating-point dtype; 0 of the others, which are exact."""
    return float(jnp.finfo(dtype).eps) if jnp.issubdtype(dtype, jnp.inexact) else 0.0


def table(programs: Sequence[PlacedProgram]) -> Table:
    """The programs of one place, a line each."""
    times = f"{MEASURED} largest_difference" if programs[0].measured else ESTIMATED
    metrics = chosen(PROGRAMS, f"{times} read_bytes written_bytes round_trips round_trip_bytes peak_bytes compile_s")
    rows = [{**asdict(one), "compile_s": f"{one.compile_s:.2f}{' loaded' if one.loaded else ''}"} for one in programs]
    return FigureTable(programs[0].place, "program", {"": rows}, metrics).terminal()
