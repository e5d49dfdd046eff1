"""Counts the programs that XLA compiles, and raises an error or warns where no compile is allowed.

JAX announces every program that it compiles through `jax.monitoring`. One listener, registered when this module is imported,
stores the arguments of each program, which explain why a later program of the same name is compiled, and passes each
announcement to all active ledgers. Ledgers may therefore nest, overlap and run in several threads.

A trap runs before the compiler, in the thread that requests the program, and may refuse. JAX keeps the trace and the lowering
of a refused program and can compile it later.
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
"""Announced once for each program that is not in memory: as a scalar with its name before it is compiled or read from disk, and
as a duration in seconds afterwards."""

DISK_HIT_EVENT = "/jax/compilation_cache/cache_hits"
"""Announced just before, in the same thread, if JAX's compilation cache on disk supplies the program."""

LOWERING_EVENT = "/jax/core/compile/jaxpr_to_mlir_module_duration"
"""Announced with a program's name when JAX has lowered it."""

SHOWN_DIFFERENCES = 3
"""Number of differing arguments that a message lists before it counts the rest."""

NEAR_FRAMES = 16
"""Stack frames searched for the announcing function; JAX itself uses four."""

GUARD_MODES = ("off", "warn", "fail")


class CompileError(RuntimeError):
    """Error for a compile where every program was declared ready."""


class CompileWarning(UserWarning):
    """Warning about a compile where every program was declared ready."""


@dataclass(frozen=True)
class Argument:
    """An array argument of a program.

    Attributes:
        name: parameter name, with its path in a pytree: `params['w']`.
        type: dtype and shape, and the placement if the caller fixed one: `float32[2,3]`.
    """

    name: str
    type: str


@dataclass(frozen=True)
class ProgramRecord:
    """A program that was requested while it was not in memory.

    Attributes:
        name: JAX's name, such as `jit(decode_round)`.
        seconds: time in the compiler or to read the program from the disk cache, without tracing.
        from_disk: True if JAX's compilation cache on disk supplied it.
        refused: True if a trap refused it, so that it was not compiled.
        arguments: arrays that it reads, in order, without the arguments that JAX drops as unused.
        cause: arguments in which it differs from the closest earlier program of the same name. Empty, like `arguments`, if JAX
            does not reveal them.
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
    """Records every program that XLA is asked to compile while the ledger is active, in any thread of the process.

    A program from JAX's disk cache counts like a compiled one, because its caller had to wait and because the count must not
    depend on earlier processes. `ProgramRecord.from_disk` marks it. A program that a trap refused counts too
    (`ProgramRecord.refused`).

    A ledger may be entered again after it was left and then continues counting.

    Args:
        only_undeclared: leaves out programs that compile in `declared_program`.
    """

    def __init__(self, only_undeclared: bool = False) -> None:
        self.only_undeclared = only_undeclared
        self.programs: list[ProgramRecord] = []

    @property
    def compilations(self) -> int:
        """Number of recorded programs."""
        return len(self.programs)

    @property
    def loaded(self) -> int:
        """Number of programs loaded from JAX's cache on disk."""
        return sum(program.from_disk for program in self.programs)

    @property
    def seconds(self) -> float:
        """Total seconds of all programs."""
        return sum(program.seconds for program in self.programs)

    def figures(self) -> dict[str, Any]:
        """Returns the counts for `--json`: programs requested, programs loaded from disk, and total seconds."""
        return {"compilations": self.compilations, "programs_loaded": self.loaded, "compile_seconds": self.seconds}

    def __enter__(self) -> "Ledger":
        _announcements.add(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _announcements.remove(self)


class _Announcements:
    """The listener of this process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.active: tuple[Ledger, ...] = ()
        self.traps: tuple[CompileTrap, ...] = ()
        self.thread = threading.local()
        self.lowered: dict[int, tuple[Argument, ...]] = {}
        self.earlier: dict[str, list[tuple[Argument, ...]]] = {}
        jax.monitoring.register_event_listener(self.on_event)
        jax.monitoring.register_scalar_listener(self.on_scalar)
        jax.monitoring.register_event_duration_secs_listener(self.on_duration)

    def add(self, ledger: Ledger, trap: "CompileTrap | None" = None) -> None:
        with self.lock:
            if any(other is ledger for other in self.active):
                raise ValueError("this ledger is active already; use a second one to count separately")
            self.active = (*self.active, ledger)
            if trap is not None and trap.mode != "off":
                self.traps = (*self.traps, trap)

    def remove(self, ledger: Ledger) -> None:
        with self.lock:
            self.active = tuple(other for other in self.active if other is not ledger)
            self.traps = tuple(trap for trap in self.traps if trap.ledger is not ledger)

    @property
    def declared(self) -> bool:
        """True if this thread compiles a declared program (`declared_program`)."""
        return getattr(self.thread, "declared", False)

    def on_event(self, event: str, **_: str | int) -> None:
        if event == DISK_HIT_EVENT:
            self.thread.disk_hit = True

    def on_scalar(self, event: str, value: float, **details: str | int) -> None:
        if event == COMPILE_EVENT and self.traps and not self.declared:
            self.check_traps(str(details.get("fun_name", "unnamed")))

    def on_duration(self, event: str, duration_secs: float, **details: str | int) -> None:
        if event == LOWERING_EVENT:
            self.remember_arguments()
        elif event == COMPILE_EVENT:
            self.record(str(details.get("fun_name", "unnamed")), duration_secs)

    def remember_arguments(self) -> None:
        """Stores the arguments of a program that JAX has just lowered, until any thread compiles it."""
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

    def check_traps(self, name: str) -> None:
        """Warns about a program that is about to be compiled, or refuses it."""
        found = announcer("computation", "compile_options")
        with self.lock:
            arguments = None if found is None else self.lowered.get(id(found["computation"]))
            cause = "" if arguments is None else difference(arguments, self.earlier.get(name, []))
            traps = self.traps
            failing = next((trap for trap in traps if trap.mode == "fail"), None)
            if failing is not None:
                refused = ProgramRecord(name, 0.0, arguments=arguments or (), cause=cause, refused=True)
                for ledger in self.active:
                    ledger.programs.append(refused)
        message = f"{name} had to be compiled during {{}}, where every program should be ready{': ' if cause else ''}{cause}"
        if failing is not None:
            raise CompileError(message.format(failing.phase))
        for trap in traps:
            warnings.warn(message.format(trap.phase), CompileWarning, stacklevel=above_jax(sys._getframe()))

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
            for ledger in self.active:
                if not (self.declared and ledger.only_undeclared):
                    ledger.programs.append(program)


def announcer(*names: str) -> Mapping[str, Any] | None:
    """Returns the local variables of the JAX function that is making an announcement, found by the variables' names.

    An announcement carries only a program's name and seconds, and JAX has no public access to its arguments. If a version of
    JAX names its variables differently, the ledger leaves arguments out.
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
    """Returns the `stacklevel` at which a warning issued in `frame`, below JAX, points at JAX's caller."""
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
    """Formats an argument's type for messages."""
    weak = "weak " if getattr(aval, "weak_type", False) else ""
    placement = f" on {sharding}" if isinstance(sharding, jax.sharding.Sharding) else ""
    if isinstance(sharding, jax.sharding.SingleDeviceSharding):
        placement = f" on {next(iter(sharding.device_set))}"
    return f"{weak}{aval.str_short()}{placement}"


def differing(arguments: tuple[Argument, ...], previous: tuple[Argument, ...]) -> list[str]:
    """Describes each difference between the arguments of two programs."""
    now = {argument.name: argument.type for argument in arguments}
    before = {argument.name: argument.type for argument in previous}
    changed = [f"{name} is {now[name]}, was {before[name]}" for name in now if name in before and now[name] != before[name]]
    added = [f"{name} is new, {now[name]}" for name in now if name not in before]
    return changed + added + [f"{name} is missing, was {before[name]}" for name in before if name not in now]


def difference(arguments: tuple[Argument, ...], earlier: list[tuple[Argument, ...]]) -> str:
    """Describes how a program's arguments differ from the closest earlier ones, the latest of equally close ones."""
    if not earlier:
        return "the first program of this name"
    closest = min((differing(arguments, previous) for previous in reversed(earlier)), key=len)
    if not closest:
        return "the same arguments as before, so a static argument, the function itself or a setting of JAX differs"
    more = len(closest) - SHOWN_DIFFERENCES
    return "; ".join(closest[:SHOWN_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")


class CompileTrap:
    """Refuses every program that would have to be compiled while the trap is open, in any thread of the process.

    A trap may stay open for the lifetime of a server. Programs from JAX's disk cache are trapped too; programs in memory run as
    usual, and a refused program can compile once the trap is closed. Several traps may be open at once: one that fails takes
    precedence over those that warn. A closed trap may be opened again and continues its ledger. `declared_program` exempts a
    program that is compiled in the background.

    Args:
        mode: "fail" raises `CompileError` in the requesting thread; "warn" issues a `CompileWarning` there and compiles the
            program; "off" only counts.
        phase: name for messages of the time in which the trap is open.

    Attributes:
        ledger: programs requested while the trap was open, including refused ones.

    Raises:
        ValueError: an unknown mode.
    """

    def __init__(self, mode: str = "fail", phase: str = "serving"):
        check_mode(mode)
        self.mode = mode
        self.phase = phase
        self.ledger = Ledger(only_undeclared=True)

    def arm(self) -> "CompileTrap":
        """Activates the trap; raises a `ValueError` if it is active already."""
        _announcements.add(self.ledger, self)
        return self

    def disarm(self) -> None:
        """Deactivates the trap if it is active."""
        _announcements.remove(self.ledger)

    def __enter__(self) -> "CompileTrap":
        return self.arm()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.disarm()


_announcements = _Announcements()


@contextmanager
def declared_program() -> Iterator[None]:
    """Exempts the programs that this thread compiles in the block from all traps and from their ledgers."""
    _announcements.thread.declared = True
    try:
        yield
    finally:
        _announcements.thread.declared = False


def check_mode(mode: str) -> None:
    if mode not in GUARD_MODES:
        raise ValueError(f"expected a no-compile guard of {', '.join(GUARD_MODES)}, found {mode!r}")


@contextmanager
def no_compile_guard(mode: str, phase: str = "this block") -> Iterator[Ledger]:
    """Reports at the end of a block what was compiled inside; `CompileTrap` reports at once.

    Reporting at the end keeps JAX's state intact, lets the block finish, and gives one message with all programs and the
    arguments by which each differs from the closest earlier program of its name. Exceptions from the block pass unchanged.

    Args:
        mode: "off" only counts, "warn" issues one `CompileWarning`, "fail" raises `CompileError`.
        phase: name of the block in the message.

    Yields:
        The ledger of the block.

    Raises:
        ValueError: an unknown mode.
        CompileError: something was compiled in mode "fail".
    """
    check_mode(mode)
    with Ledger() as ledger:
        yield ledger
    if not ledger.programs or mode == "off":
        return
    programs = ", ".join(map(str, ledger.programs))
    message = f"{ledger.compilations} program(s) compiled during {phase}, where none should be: {programs}"
    if mode == "fail":
        raise CompileError(message)
    warnings.warn(message, CompileWarning, stacklevel=3)
