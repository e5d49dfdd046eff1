"""Counts what XLA compiles, and traps a compile where none may happen.

JAX announces every program that it asks the compiler for through `jax.monitoring`. One listener for the whole process passes
each announcement to the ledgers that are open at that moment, so ledgers may nest, overlap and run in several threads.
"""

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType

import jax

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
"""Announced once for each program that was not in memory, with its name and the seconds it took."""

DISK_HIT_EVENT = "/jax/compilation_cache/cache_hits"
"""Announced just before, in the same thread, where the program came from JAX's compilation cache on disk."""

GUARD_MODES = ("off", "warn", "fail")


class CompileError(RuntimeError):
    """A program was compiled where every program was declared to be ready."""


class CompileWarning(UserWarning):
    """The same, where the guard only warns."""


@dataclass(frozen=True)
class Program:
    """One program that was not in memory when it was called for.

    Attributes:
        name: as JAX names it, `jit(decode_round)` say.
        seconds: time in the compiler, or to read the program from the disk cache; tracing is not in it.
        from_disk: it came from JAX's compilation cache on disk.
    """

    name: str
    seconds: float
    from_disk: bool = False


class Ledger:
    """Records every program that XLA is asked for while the ledger is open, in any thread of the process.

    A program that JAX's disk cache supplies counts like one that was compiled: whoever waited for it was not served from
    memory, and a count must not depend on what earlier processes left on the disk. `Program.from_disk` tells them apart.

    A ledger may be opened again after it was closed; it then goes on from where it stopped.
    """

    def __init__(self) -> None:
        self.programs: list[Program] = []

    @property
    def compilations(self) -> int:
        """The number of programs recorded so far."""
        return len(self.programs)

    @property
    def seconds(self) -> float:
        """Time spent on all of them."""
        return sum(program.seconds for program in self.programs)

    def __enter__(self) -> "Ledger":
        _announcements.add(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _announcements.remove(self)


class _Announcements:
    """The process's one listener, registered while at least one ledger is open."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.open: tuple[Ledger, ...] = ()
        self.thread = threading.local()

    def add(self, ledger: Ledger) -> None:
        with self.lock:
            if any(other is ledger for other in self.open):
                raise ValueError("this ledger is open already; open a second one to count separately")
            if not self.open:
                jax.monitoring.register_event_listener(self.on_event)
                jax.monitoring.register_event_duration_secs_listener(self.on_duration)
            self.open = (*self.open, ledger)

    def remove(self, ledger: Ledger) -> None:
        with self.lock:
            self.open = tuple(other for other in self.open if other is not ledger)
            if not self.open:
                jax.monitoring.unregister_event_listener(self.on_event)
                jax.monitoring.unregister_event_duration_listener(self.on_duration)

    def on_event(self, event: str, **_: str | int) -> None:
        if event == DISK_HIT_EVENT:
            self.thread.disk_hit = True

    def on_duration(self, event: str, duration_secs: float, **details: str | int) -> None:
        if event != COMPILE_EVENT:
            return
        from_disk, self.thread.disk_hit = getattr(self.thread, "disk_hit", False), False
        program = Program(str(details.get("fun_name", "unnamed")), duration_secs, from_disk)
        with self.lock:
            for ledger in self.open:
                ledger.programs.append(program)


_announcements = _Announcements()


@contextmanager
def no_compile_guard(mode: str, what: str = "this block") -> Iterator[Ledger]:
    """Traps a compile inside the block.

    The verdict falls when the block ends, not in the middle of a compile: JAX's own state stays whole, the work in the block
    is done, and one message names all the programs. An exception that leaves the block goes on as it is.

    Args:
        mode: "off" only counts, "warn" issues one `CompileWarning`, "fail" raises `CompileError`.
        what: how the message calls the block.

    Yields:
        The ledger of the block.

    Raises:
        ValueError: an unknown mode.
        CompileError: in mode "fail", after a block in which something was compiled.
    """
    if mode not in GUARD_MODES:
        raise ValueError(f"the no-compile guard must be one of {', '.join(GUARD_MODES)}, found {mode!r}")
    with Ledger() as ledger:
        yield ledger
    if not ledger.programs or mode == "off":
        return
    told = ", ".join(f"{program.name} ({program.seconds:.2f} s)" for program in ledger.programs)
    message = f"{ledger.compilations} program(s) compiled during {what}, where none may be: {told}"
    if mode == "fail":
        raise CompileError(message)
    warnings.warn(message, CompileWarning, stacklevel=3)
