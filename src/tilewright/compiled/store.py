"""Compiled programs by their key: built ahead of time, several at once, kept, and never traced again."""

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
    """Compiles and keeps programs; safe to use from several threads. A subclass says how one is compiled.

    Attributes:
        compiled, seconds: of each program that was needed so far: itself, and how long it took to compile or to load.
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
        """The key that a program is kept under, which others may share."""
        return key

    def get(self, key: Key) -> jax.stages.Compiled:
        """The compiled program, compiling it if this is its first use."""
        key = self.shared(key)
        if key not in self.compiled:
            with self.locks.setdefault(key, threading.Lock()):  # whoever else needs it waits for it
                if key not in self.compiled:
                    began = time.perf_counter()
                    compiled = self.compile(key)
                    self.seconds[key] = time.perf_counter() - began
                    self.compiled[key] = compiled
        return self.compiled[key]

    def warm(self, keys: Iterable[Key], console: Console | None = None) -> None:
        """Compiles what is missing of `keys`; see `warm`."""
        warm(((self, key) for key in keys), console)


def warm(programs: Iterable[tuple[Store[Any], Any]], console: Console | None = None) -> None:
    """Compiles what is missing of programs, pairs of (store, key), several at a time, with a progress bar on the console or a
    line in the log for each tenth of them.

    Only XLA's part runs at the same time as another's: tracing holds Python's lock. JAX's settings in a `with` block
    (`jax.default_device` and its like) hold for the calling thread alone and are not seen here.
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
