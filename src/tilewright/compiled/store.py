"""Stores of programs compiled ahead of time, several in parallel, and never traced again."""

import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, Generic, TypeVar

import jax
from rich.console import Console
from rich.progress import Progress

log = logging.getLogger("tilewright.compiled")

Key = TypeVar("Key", bound=Hashable)


class Store(ABC, Generic[Key]):
    """Compiles programs on first use and stores them by key; thread-safe. Subclasses implement `compile`.

    Attributes:
        compiled: programs compiled so far, by key.
        seconds: time to compile or load each.
    """

    def __init__(self) -> None:
        self.compiled: dict[Key, jax.stages.Compiled] = {}
        self.locks: dict[Key, threading.Lock] = {}
        self.seconds: dict[Key, float] = {}

    @abstractmethod
    def compile(self, key: Key) -> jax.stages.Compiled:
        """Compiles a program."""

    @staticmethod
    def shared(key: Any) -> Any:
        """Returns the key under which a program is stored; several keys may share a program."""
        return key

    def get(self, key: Key) -> jax.stages.Compiled:
        """Returns the compiled program, compiling it on first use."""
        key = self.shared(key)
        if key not in self.compiled:
            with self.locks.setdefault(key, threading.Lock()):  # other threads that need the program wait here
                if key not in self.compiled:
                    began = time.perf_counter()
                    compiled = self.compile(key)
                    self.seconds[key] = time.perf_counter() - began
                    self.compiled[key] = compiled
        return self.compiled[key]

    def warm(self, keys: Iterable[Key], console: Console | None = None) -> None:
        """Compiles the programs of `keys` that are missing; see `warm`."""
        warm(((self, key) for key in keys), console)


def warm(programs: Iterable[tuple[Store[Any], Any]], console: Console | None = None) -> None:
    """Compiles missing programs in parallel, with a progress bar on the console or a log line per tenth of them.

    Only XLA's work runs in parallel, because tracing holds Python's lock. JAX settings in a `with` block, such as
    `jax.default_device`, apply to the calling thread alone and have no effect here.

    Args:
        programs: pairs of store and key.
    """
    wanted = dict.fromkeys((store, store.shared(key)) for store, key in programs)
    missing = [(store, key) for store, key in wanted if key not in store.compiled]
    if not missing:
        return
    bar = Progress(console=console, transient=True, disable=console is None)
    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        with bar:
            row = bar.add_task("compiling", total=len(missing))
            began = time.perf_counter()
            for done, compiled in enumerate(as_completed([pool.submit(store.get, key) for store, key in missing]), 1):
                compiled.result()
                bar.advance(row)
                if console is None and 10 * done // len(missing) > 10 * (done - 1) // len(missing):
                    log.info("compiled %d of %d programs in %.1f s", done, len(missing), time.perf_counter() - began)
    finally:
        pool.shutdown(cancel_futures=True)
