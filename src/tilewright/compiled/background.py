"""Compilation of declared programs on a background thread, while a process already serves with some of them.

Two parts of a compilation would slow down what runs beside it. JAX traces a program in Python, with Python's lock, for about a
second. While requests run, the thread therefore traces in short slices, with pauses between them. XLA then compiles for some
seconds, on several threads of its own. These get the time that no other thread wants, where the system allows it (Linux).
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Generic

from tilewright.compiled.ledger import declared_program
from tilewright.compiled.store import Key, Store

log = logging.getLogger("tilewright.compiled")

SWITCH_S = 5e-4
"""Seconds after which Python's lock changes threads while programs compile; by default other threads wait for 5 ms."""
SLICE_S = 2e-3
"""Seconds of tracing between two pauses."""
PAUSES = 7.0
"""Length of a pause while requests run, in slices."""
CALLS = 64
"""Python calls and returns between two looks at the clock."""
LEAST_S = 0.01
"""Processor time in seconds above which a thread counts as one that worked."""
REPORTS = 4
"""Number of log lines of the progress."""
TASKS = Path("/proc/self/task")


class BackgroundCompile(Generic[Key]):
    """Compiles missing programs of a store one after another, on a thread of its own.

    Args:
        keys: programs to compile, the most useful first.
        busy: returns True while requests run; tracing pauses then.
        compilers: native ids of XLA's compiler threads (`working_threads`), which are scheduled when nothing else runs.

    Attributes:
        failure: exception of a program that did not compile, which ended the thread; None so far.
    """

    def __init__(
        self,
        store: Store[Key],
        keys: Sequence[Key],
        busy: Callable[[], bool] = lambda: False,
        compilers: Collection[int] = (),
    ):
        self.store = store
        self.busy = busy
        self.compilers = compilers
        self.lock = threading.Lock()
        self.missing = dict.fromkeys(keys)
        self.finished: list[Key] = []
        self.failure: BaseException | None = None
        self.ending = False
        self.thread = threading.Thread(target=self.run, name="compiling", daemon=True)

    def start(self) -> None:
        for thread in self.compilers:
            with suppress(OSError):
                os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
        self.thread.start()

    def stop(self) -> None:
        """Ends the thread after the program that it compiles now."""
        self.ending = True

    @property
    def running(self) -> bool:
        return self.thread.is_alive()

    def prefer(self, keys: Collection[Key]) -> None:
        """Moves programs to the front, in their order, if they are missing."""
        with self.lock:
            first = [key for key in keys if key in self.missing]
            self.missing = dict.fromkeys([*first, *self.missing])

    def collect(self) -> list[Key]:
        """Returns the programs that were finished since the last call. Raises the exception of a program that failed."""
        with self.lock:
            finished, self.finished = self.finished, []
        if self.failure is not None:
            raise RuntimeError("a program did not compile") from self.failure
        return finished

    def run(self) -> None:
        """Compiles until nothing is missing."""
        began = time.perf_counter()
        count = len(self.missing)
        interval = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        try:
            for done in range(1, count + 1):
                with self.lock:
                    key = next(iter(self.missing))
                if self.ending:
                    return
                with declared_program(), pausing(self.busy):
                    self.store.get(key)
                with self.lock:
                    del self.missing[key]
                    self.finished.append(key)
                if REPORTS * done // count > REPORTS * (done - 1) // count:
                    log.info("compiled %d of %d further programs in %.1f s", done, count, time.perf_counter() - began)
        except BaseException as error:
            self.failure = error
        finally:
            sys.setswitchinterval(interval)


@contextmanager
def pausing(busy: Callable[[], bool]) -> Iterator[None]:
    """Runs this thread's Python code in slices of `SLICE_S`, with pauses that release Python's lock while something is busy.

    The lowest priority would not do: a thread that waits for a processor may hold the lock.
    """
    calls = 0
    until = time.thread_time() + SLICE_S

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls, until
        calls += 1
        if calls % CALLS == 0 and time.thread_time() > until:
            if busy():
                time.sleep(PAUSES * SLICE_S)
            until = time.thread_time() + SLICE_S

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(before)


@contextmanager
def working_threads() -> Iterator[set[int]]:
    """Finds the threads that work in a block, by their processor time; none on other systems than Linux.

    Yields:
        A set that holds their native ids after the block. Threads that Python started are left out.
    """
    before = processor_seconds()
    found = set[int]()
    yield found
    python = {thread.native_id for thread in threading.enumerate()}
    found |= {
        thread
        for thread, seconds in processor_seconds().items()
        if thread not in python and seconds - before.get(thread, 0.0) > LEAST_S
    }


def processor_seconds() -> dict[int, float]:
    """Returns the processor time of each thread of this process by native id; empty on other systems than Linux."""
    found = dict[int, float]()
    for task in TASKS.iterdir() if TASKS.is_dir() else ():
        with suppress(OSError, ValueError):  # the thread has ended, or the system keeps no statistics
            found[int(task.name)] = 1e-9 * int((task / "schedstat").read_text().split()[0])
    return found
