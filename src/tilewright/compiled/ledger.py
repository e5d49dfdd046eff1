"""Counts what XLA compiles, and traps a compile where none may happen.

JAX announces every program that it asks the compiler for through `jax.monitoring`. One listener, registered when this module is
imported, remembers the arguments of each program, which tells why a later one of the same name is needed, and passes each
announcement to the ledgers that are open at that moment. So ledgers may nest, overlap and run in several threads.

A trap is asked before the compiler is, in the thread that wants the program, and may refuse. Of a refused program JAX keeps
what it traced and lowered, and can compile it later.
"""

import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

import jax

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
"""Announced once for each program that was not in memory: before it is compiled or read from disk, with its name, as a scalar;
and afterwards with the seconds that it took."""

DISK_HIT_EVENT = "/jax/compilation_cache/cache_hits"
"""Announced just before, in the same thread, where the program came from JAX's compilation cache on disk."""

LOWERING_EVENT = "/jax/core/compile/jaxpr_to_mlir_module_duration"
"""Announced when JAX has translated a program for the compiler, with its name."""

SHOWN_DIFFERENCES = 3
"""Number of differing arguments that a message names before it counts the rest."""

NEAR_FRAMES = 16
"""Frames up the stack among which the function that announces may be; JAX itself takes four."""

GUARD_MODES = ("off", "warn", "fail")


class CompileError(RuntimeError):
    """A program was compiled where every program was declared to be ready."""


class CompileWarning(UserWarning):
    """Warning of a compile under a guard that only warns."""


@dataclass(frozen=True)
class Argument:
    """One array that a program takes.

    Attributes:
        name: as the function calls it, with its path in a pytree: `params['w']`.
        type: dtype and shape, and the placement where the caller settled one: `float32[2,3]`.
    """

    name: str
    type: str


@dataclass(frozen=True)
class ProgramRecord:
    """One program that was not in memory when it was called for.

    Attributes:
        name: as JAX names it, `jit(decode_round)` say.
        seconds: time in the compiler, or to read the program from the disk cache; tracing is not in it.
        from_disk: it came from JAX's compilation cache on disk.
        refused: a trap was open: it was asked for and not compiled.
        arguments: the arrays that it reads, in order; JAX drops those that a function takes and does not use.
        cause: in which arguments it differs from the closest program of the same name that the process compiled before.
            Empty, like `arguments`, where JAX does not tell.
    """

    name: str
    seconds: float
    from_disk: bool = False
    arguments: tuple[Argument, ...] = ()
    cause: str = ""
    refused: bool = False

    def __str__(self) -> str:
        took = "refused" if self.refused else f"{self.seconds:.2f} s{', from disk' if self.from_disk else ''}"
        return f"{self.name} ({took}{': ' if self.cause else ''}{self.cause})"


class Ledger:
    """Records every program that XLA is asked for while the ledger is open, in any thread of the process.

    A program that JAX's disk cache supplies counts like one that was compiled: whoever waited for it was not served from
    memory, and a count must not depend on what earlier processes left on the disk. `ProgramRecord.from_disk` tells them apart.

    So does one that a trap refused: somebody had to go without it (`ProgramRecord.refused`).

    A ledger may be opened again after it was closed; it then goes on from where it stopped.
    """

    def __init__(self) -> None:
        self.programs: list[ProgramRecord] = []

    @property
    def compilations(self) -> int:
        """The number of programs recorded so far."""
        return len(self.programs)

    @property
    def loaded(self) -> int:
        """The number of those that came from JAX's cache on disk; the others were compiled."""
        return sum(program.from_disk for program in self.programs)

    @property
    def seconds(self) -> float:
        """Time spent on all of them."""
        return sum(program.seconds for program in self.programs)

    def figures(self) -> dict[str, Any]:
        """For `--json`: how many programs were not in memory, how many of these came from the cache, and what all took."""
        return {"compilations": self.compilations, "programs_loaded": self.loaded, "compile_seconds": self.seconds}

    def __enter__(self) -> "Ledger":
        _announcements.add(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _announcements.remove(self)


class _Announcements:
    """The process's one listener."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.open: tuple[Ledger, ...] = ()
        self.traps: tuple[CompileTrap, ...] = ()
        self.thread = threading.local()
        self.lowered: dict[int, tuple[Argument, ...]] = {}
        self.earlier: dict[str, list[tuple[Argument, ...]]] = {}
        jax.monitoring.register_event_listener(self.on_event)
        jax.monitoring.register_scalar_listener(self.on_scalar)
        jax.monitoring.register_event_duration_secs_listener(self.on_duration)

    def add(self, ledger: Ledger, trap: "CompileTrap | None" = None) -> None:
        with self.lock:
            if any(other is ledger for other in self.open):
                raise ValueError("this ledger is open already; open a second one to count separately")
            self.open = (*self.open, ledger)
            if trap is not None and trap.mode != "off":
                self.traps = (*self.traps, trap)

    def remove(self, ledger: Ledger) -> None:
        with self.lock:
            self.open = tuple(other for other in self.open if other is not ledger)
            self.traps = tuple(trap for trap in self.traps if trap.ledger is not ledger)

    def on_event(self, event: str, **_: str | int) -> None:
        if event == DISK_HIT_EVENT:
            self.thread.disk_hit = True

    def on_scalar(self, event: str, value: float, **details: str | int) -> None:
        if event == COMPILE_EVENT and self.traps:
            self.ask_traps(str(details.get("fun_name", "unnamed")))

    def on_duration(self, event: str, duration_secs: float, **details: str | int) -> None:
        if event == LOWERING_EVENT:
            self.remember_arguments()
        elif event == COMPILE_EVENT:
            self.record(str(details.get("fun_name", "unnamed")), duration_secs)

    def remember_arguments(self) -> None:
        """Keeps the arguments of a program that JAX has just lowered, until the compiler gets it, in whatever thread."""
        found = announcer("lowering_result", "arg_names", "in_avals", "in_shardings")
        if found is None:
            return
        names = found["arg_names"]
        avals = found["in_avals"]
        shardings = found["in_shardings"]
        arguments = tuple(
            Argument(name or f"argument {place}", described(aval, sharding))
            for place, (name, aval, sharding) in enumerate(zip(names, avals, shardings, strict=True))
        )
        with self.lock:
            self.lowered[id(found["lowering_result"].module)] = arguments

    def ask_traps(self, name: str) -> None:
        """Warns of a program that is about to be compiled, or refuses it."""
        found = announcer("computation", "compile_options")
        with self.lock:
            arguments = None if found is None else self.lowered.get(id(found["computation"]))
            cause = "" if arguments is None else difference(arguments, self.earlier.get(name, []))
            traps = self.traps
            failing = next((trap for trap in traps if trap.mode == "fail"), None)
            if failing is not None:
                refused = ProgramRecord(name, 0.0, arguments=arguments or (), cause=cause, refused=True)
                for ledger in self.open:
                    ledger.programs.append(refused)
        message = f"{name} had to be compiled during {{}}, where every program was to be ready{': ' if cause else ''}{cause}"
        if failing is not None:
            raise CompileError(message.format(failing.what))
        for trap in traps:
            warnings.warn(message.format(trap.what), CompileWarning, stacklevel=above_jax(sys._getframe()))

    def record(self, name: str, seconds: float) -> None:
        from_disk = getattr(self.thread, "disk_hit", False)
        self.thread.disk_hit = False
        found = announcer("computation", "compile_options")
        with self.lock:
            arguments = None if found is None else self.lowered.pop(id(found["computation"]), None)
            cause = ""
            if arguments is not None:
                earlier = self.earlier.setdefault(name, [])
                cause = difference(arguments, earlier)
                earlier.append(arguments)
            program = ProgramRecord(name, seconds, from_disk, arguments or (), cause)
            for ledger in self.open:
                ledger.programs.append(program)


def announcer(*names: str) -> Mapping[str, Any] | None:
    """The local variables of the function in JAX that is announcing something, known by their names.

    An announcement carries a program's name and seconds only, and nothing public has its arguments. Where a version of JAX
    names its variables otherwise, the ledger does without.
    """
    frame = sys._getframe(1)
    for _ in range(NEAR_FRAMES):
        if frame is None:
            return None
        if all(name in frame.f_locals for name in names):
            return frame.f_locals
        frame = frame.f_back
    return None


def above_jax(frame: FrameType | None) -> int:
    """The `stacklevel` at which a warning that is issued in `frame`, which JAX called, points at whoever called JAX."""
    level = 1
    met = False
    while frame is not None:
        inside = frame.f_globals["__name__"].startswith("jax.")
        if met and not inside:
            break
        frame = frame.f_back
        level = level + 1
        met = met or inside
    return level


def described(aval: Any, sharding: Any) -> str:
    """An argument's type as a message shows it."""
    weak = "weak " if getattr(aval, "weak_type", False) else ""
    placement = f" on {sharding}" if isinstance(sharding, jax.sharding.Sharding) else ""
    if isinstance(sharding, jax.sharding.SingleDeviceSharding):
        placement = f" on {next(iter(sharding.device_set))}"
    return f"{weak}{aval.str_short()}{placement}"


def differing(arguments: tuple[Argument, ...], others: tuple[Argument, ...]) -> list[str]:
    """Differences between the arguments of a program and those of another, each in words."""
    now = {argument.name: argument.type for argument in arguments}
    before = {argument.name: argument.type for argument in others}
    changed = [f"{name} is {now[name]}, was {before[name]}" for name in now if name in before and now[name] != before[name]]
    added = [f"{name} is new, {now[name]}" for name in now if name not in before]
    return changed + added + [f"{name} is gone, was {before[name]}" for name in before if name not in now]


def difference(arguments: tuple[Argument, ...], earlier: list[tuple[Argument, ...]]) -> str:
    """In which arguments a program differs from the closest of some others, the latest of those equally close."""
    if not earlier:
        return "the first program of this name"
    closest = min((differing(arguments, others) for others in reversed(earlier)), key=len)
    if not closest:
        return "the same arguments as before, so a static argument, the function itself or a setting of JAX differs"
    more = len(closest) - SHOWN_DIFFERENCES
    return "; ".join(closest[:SHOWN_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")


class CompileTrap:
    """Stops whoever asks XLA for a program while the trap is open, on any thread of the process, before XLA compiles it.

    It may stay open for the life of a server. A program from JAX's disk cache is trapped like one that is compiled. Programs in
    memory run as ever, and what was refused compiles once the trap is closed. Several may be open at once: one that fails goes
    before those that warn. A trap may be opened again, and goes on with its ledger.

    Args:
        mode: "fail" raises `CompileError` where the program was asked for; "warn" issues a `CompileWarning` there, and it is
            compiled; "off" only counts.
        what: how messages call the time in which it is open.

    Attributes:
        ledger: what was asked for meanwhile, refused programs included.

    Raises:
        ValueError: an unknown mode.
    """

    def __init__(self, mode: str = "fail", what: str = "serving"):
        check_mode(mode)
        self.mode = mode
        self.what = what
        self.ledger = Ledger()

    def open(self) -> "CompileTrap":
        """From now on. An error if it is open already."""
        _announcements.add(self.ledger, self)
        return self

    def close(self) -> None:
        """No longer; without effect on one that is closed."""
        _announcements.remove(self.ledger)

    def __enter__(self) -> "CompileTrap":
        return self.open()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


_announcements = _Announcements()


def check_mode(mode: str) -> None:
    if mode not in GUARD_MODES:
        raise ValueError(f"the no-compile guard must be one of {', '.join(GUARD_MODES)}, found {mode!r}")


@contextmanager
def no_compile_guard(mode: str, what: str = "this block") -> Iterator[Ledger]:
    """Tells at its end of what was compiled inside the block; `CompileTrap` does so at once.

    The verdict falls when the block ends, not in the middle of a compile: JAX's own state stays whole, the work in the block
    is done, and one message names all the programs, and the arguments by which each differs from the closest earlier one of its
    name. An exception that leaves the block goes on as it is.

    Args:
        mode: "off" only counts, "warn" issues one `CompileWarning`, "fail" raises `CompileError`.
        what: how the message calls the block.

    Yields:
        The ledger of the block.

    Raises:
        ValueError: an unknown mode.
        CompileError: in mode "fail", after a block in which something was compiled.
    """
    check_mode(mode)
    with Ledger() as ledger:
        yield ledger
    if not ledger.programs or mode == "off":
        return
    told = ", ".join(map(str, ledger.programs))
    message = f"{ledger.compilations} program(s) compiled during {what}, where none may be: {told}"
    if mode == "fail":
        raise CompileError(message)
    warnings.warn(message, CompileWarning, stacklevel=3)
