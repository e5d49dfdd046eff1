"""Compares functions that should compute the same: results, times and memory traffic, on this machine and for absent TPUs.

docs/metrics.md defines the figures.
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
from tilewright.metrics.metric import select_metrics
from tilewright.metrics.programs import ESTIMATED, MEASURED, PROGRAMS
from tilewright.metrics.tables import FigureTable, uncut

RUN_S = 0.05
"""Target duration of a timed run; a longer call makes a run by itself."""

COPY_BYTES = 2**28
"""Size of the buffer that measures a device's memory bandwidth, far above any cache."""

Function = Callable[..., Any]


@dataclass(frozen=True)
class PlacedProgram:
    """A function compiled for one place.

    Attributes:
        name: the function's name.
        place: device that ran it, or topology that it was compiled for.
        compile_s: seconds to trace it and to compile or load it.
        loaded: True if JAX's cache on disk supplied it.
        read_bytes, written_bytes: traffic with device memory, counted from the compiled program (`compiled.traffic`).
        round_trips, round_trip_bytes: number and bytes of intermediate arrays that are written to device memory and read back.
        peak_bytes: peak device memory.
        median_ms, range_ms: time of a call, range from minimum to maximum; None if it did not run.
        speedup: the first function's median over this function's; None if it did not run.
        speedup_range: minimum and maximum of the quotients per repetition.
        share_of_bandwidth: time to move the bytes at full memory bandwidth over the time of a call. Above 1 if caches serve
            some of them.
        estimated_cycles: cycles by the compiler's cost model; None without one.
        without_estimate: number of operations missing from `estimated_cycles`.
        memory_cycles: lower bound on the cycles to move all bytes; None for an unknown chip.
        largest_difference: largest difference of an element from the first function's result; None if it did not run.
        agrees: True if that difference is within the tolerance.
        notes: assumptions of the byte counts.
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
        """True if the program ran; otherwise its figures are compiler estimates."""
        return self.median_ms is not None


@dataclass(frozen=True)
class Comparison:
    """Result of a comparison. Prints as one table per place.

    Attributes:
        programs: programs by place, the functions in the order given.
        tolerance: allowed difference as a fraction of the largest element; None if derived from each dtype.
        repetitions: number of timed runs per median.
        bandwidth_gb_per_s: memory bandwidth of this machine, read plus written; None if nothing ran.
        jax_version: version of JAX that compiled the programs.
    """

    programs: tuple[PlacedProgram, ...]
    tolerance: float | None
    repetitions: int
    bandwidth_gb_per_s: float | None
    jax_version: str

    @property
    def agrees(self) -> bool | None:
        """True if all results are within the tolerance; None if nothing ran."""
        ran = [program.agrees for program in self.programs if program.agrees is not None]
        return all(ran) if ran else None

    def record(self) -> dict[str, Any]:
        """Returns the comparison as JSON-compatible data."""
        fields = {name: value for name, value in vars(self).items() if name != "programs"}
        programs = [{**asdict(program), "measured": program.measured} for program in self.programs]
        finite = [{name: json_value(value) for name, value in program.items()} for program in programs]
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
        """Yields the remarks below the tables."""
        if self.bandwidth_gb_per_s is not None:
            allowed = "the square root of each dtype's epsilon" if self.tolerance is None else f"{self.tolerance:g}"
            timing = f"medians of {self.repetitions} alternating runs; memory {self.bandwidth_gb_per_s:.1f} GB/s; "
            yield Text(f"{timing}tolerance {allowed} times the largest element", style="dim")
        for one in self.programs:
            if one.agrees is False:
                yield Text(f"{one.name} DIFFERS from {self.programs[0].name} by {one.largest_difference:.3g}", style="red")


def json_value(value: Any) -> Any:
    """Replaces infinities and NaN, which JSON lacks, by strings."""
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

    If the arguments are arrays, both functions are compiled, checked against each other and timed in alternating runs on this
    machine. `jax.ShapeDtypeStruct`s run nothing. Both are also compiled for the TPUs in `chip`, which need not exist.

    Args:
        f, g: functions, jitted or not. Bind arguments that are not arrays with `functools.partial`. Nothing is donated.
        args: arrays or shapes in any pytrees.
        names: names of the functions in tables and records.
        repetitions: number of timed runs of each.
        tolerance: allowed difference between elements, as a fraction of the largest element of `f`'s result; by default the
            square root of the coarser dtype's epsilon. Integers must always be equal.
        chip: TPU topologies to compile for, such as "v5e:1x1".

    Raises:
        ValueError: the functions return different shapes or pytrees, shapes are given without a chip, an unknown chip, or an
            option out of range.
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
    """Compares any number of functions with the first; see `compare`.

    Args:
        run: run them on this machine if the arguments are arrays.
        on_run: called after every compile and run.
    """
    if repetitions < 1:
        raise ValueError(f"expected repetitions of at least 1, found {repetitions}")
    if tolerance is not None and not 0 <= tolerance < math.inf:
        raise ValueError(f"expected a tolerance of at least 0, found {tolerance}")
    leaves, tree = jax.tree.flatten(tuple(args))
    abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    if abstract and not chips:
        raise ValueError("expected arrays, or a chip to compile for; found shapes alone, which cannot run")
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
    """Returns the number of times that `compare_all` calls `on_run`."""
    return functions * chips + ((1 + repetitions) * functions + repetitions if run else 0)


def check_shapes(programs: Mapping[str, Function], leaves: Sequence[Any]) -> None:
    """Raises a `ValueError` if programs return different pytrees or shapes."""
    results = {name: jax.eval_shape(program, *leaves) for name, program in programs.items()}
    (first, expected), *rest = results.items()
    for name, found in rest:
        trees = [jax.tree.structure(result) for result in (expected, found)]
        shapes = [[leaf.shape for leaf in jax.tree.leaves(result)] for result in (expected, found)]
        if trees[0] != trees[1] or shapes[0] != shapes[1]:
            types = [jax.tree.map(lambda leaf: f"{leaf.dtype.name}{list(leaf.shape)}", result) for result in (expected, found)]
            raise ValueError(f"expected functions that return the same shapes; {first} returns {types[0]}, {name} {types[1]}")


def program_of(function: Function, tree: Any) -> Any:
    """Wraps a function as a jitted program of the leaves of its arguments.

    The function's own jit options, such as donation, have no effect then. Leaves are passed because JAX fills pytrees with
    objects other than arrays when it lowers a program, and some classes do not accept them.
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
    """Compiles, checks and times the programs on the default device; also returns its memory bandwidth in GB/s."""
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
    times_of = alternate(timers, repetitions, on_run)
    seconds_of = medians(times_of)
    rate = 2 * COPY_BYTES / seconds_of.pop("") / 1e9
    first = accounts[0]["name"]
    done = []
    for fields, result in zip(accounts, results, strict=True):
        name = fields["name"]
        moved = fields["read_bytes"] + fields["written_bytes"]
        seconds = seconds_of[name]
        times = spread([1e3 * each for each in times_of[name]])
        difference, agrees = differences(results[0], result, tolerance)
        done.append(
            PlacedProgram(
                **fields,
                median_ms=times.median,
                range_ms=times.range,
                speedup=seconds_of[first] / seconds,
                speedup_range=quotients(times_of[first], times_of[name]).range,
                share_of_bandwidth=moved / 1e9 / rate / seconds,
                largest_difference=difference,
                agrees=agrees,
            )
        )
    return rate, done


def timer(compiled: Any, args: Sequence[Any]) -> Callable[[], float]:
    """Returns a function that runs for about `RUN_S` and returns the seconds per call."""
    # A CPU may run independent calls in parallel; other devices run calls in order.
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
    """Returns a function that reads and writes every byte of a buffer of `COPY_BYTES` and returns the seconds."""
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
    """Compiles a program for a TPU that need not exist."""
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
    """Returns the fields of `PlacedProgram` that do not depend on running it."""
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
    """Returns the largest difference between two elements, and True if all differences are within the tolerance.

    NaN agrees only with NaN, and an infinity only with itself.
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
        finite = np.isfinite(a) & np.isfinite(b)
        gaps = np.where(same, 0.0, np.where(finite, np.abs(np.where(finite, a, 0) - np.where(finite, b, 0)), np.inf))
        size = np.max(np.abs(a), where=np.isfinite(a), initial=0.0)
        largest = max(largest, float(gaps.max()))
        agrees = agrees and bool(gaps.max() <= allowed * size)
    return largest, agrees


def epsilon(dtype: Any) -> float:
    """Returns the epsilon of a floating-point dtype; 0 for exact dtypes."""
    return float(jnp.finfo(dtype).eps) if jnp.issubdtype(dtype, jnp.inexact) else 0.0


def table(programs: Sequence[PlacedProgram]) -> Table:
    """Returns a table of the programs of one place, one line each."""
    times = f"{MEASURED} largest_difference" if programs[0].measured else ESTIMATED
    metrics = select_metrics(PROGRAMS, f"{times} read_bytes written_bytes round_trips round_trip_bytes peak_bytes compile_s")
    rows = [{**asdict(one), "compile_s": f"{one.compile_s:.2f}{' loaded' if one.loaded else ''}"} for one in programs]
    return FigureTable(programs[0].place, "program", {"": rows}, metrics).terminal()
