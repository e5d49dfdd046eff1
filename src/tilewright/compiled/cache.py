"""Compiled programs kept on disk from one process to the next: JAX's compilation cache, in a folder of one's own.

JAX writes an entry in place, loads whatever it finds, and never replaces one that it could not load. So entries are read and
written here, each with a digest; one that is damaged is compiled anew, once.
"""

import hashlib
import logging
import os
import platform
import stat
import sys
import tempfile
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from tilewright.compiled.machine import cores, cpu_facts

log = logging.getLogger("tilewright.compiled")

LARGEST_BYTES = 2**30
"""Most bytes that are kept, over all machines and versions; what was written first goes first."""
SEAL_BYTES = hashlib.sha256().digest_size


def enable(cache: Path, *made_of: str) -> Path | None:
    """From now on keeps what this process compiles, and loads what earlier ones compiled, in a folder `xla/...` of `cache`.

    JAX tells programs apart by what they compute, their options and its own version; the folder's name does so by the machine
    and by `made_of`. It is private, for what is loaded from it is machine code, which runs.

    Args:
        cache: made if it is not there, private to its owner.
        made_of: what else the programs depend on, such as the names of the kernel libraries that they call into.

    Returns:
        The folder. None where the user has a cache of JAX's already (`JAX_COMPILATION_CACHE_DIR`), or has switched it off
        (`JAX_ENABLE_COMPILATION_CACHE`): it stays so.

    Raises:
        ValueError: the folder belongs to somebody else, or others may write to it.
        OSError: it cannot be made, or read.
    """
    if jax.config.values["jax_compilation_cache_dir"] or not jax.config.values["jax_enable_compilation_cache"]:
        return None
    inside = sys.modules[compilation_cache.reset_cache.__module__]
    sealed = hasattr(inside, "_cache")  # no public way in; a JAX without it keeps entries in its own way, in another folder
    folder = cache / "xla" / digest(*(["sealed"] if sealed else []), *made_of)
    for each in (cache, folder.parent, folder):
        each.mkdir(parents=True, exist_ok=True, mode=0o700)
        require_private(each)
    prune(folder.parent, LARGEST_BYTES)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # The demo's programs are small and take 10 ms to 3 s; JAX keeps those of a second and more.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    compilation_cache.reset_cache()  # else JAX, if it has compiled something before, stays without
    if sealed:
        inside._cache = SealedEntries(folder)  # type: ignore[attr-defined]
    return folder


class SealedEntries:
    """A folder of entries that begin with their SHA-256, as JAX's compilation cache asks for them and gives them.

    Attributes:
        said: it was told already that some are damaged.
    """

    def __init__(self, folder: Path):
        # under the name that JAX knows
        self._path = folder
        self.said = False

    def path(self, key: str) -> Path:
        return self._path / f"{key}-cache"

    def get(self, key: str) -> bytes | None:
        """An entry; None where there is none that is undamaged."""
        path = self.path(key)
        try:
            raw = path.read_bytes()
        except FileNotFoundError:
            return None
        seal = raw[:SEAL_BYTES]
        entry = raw[SEAL_BYTES:]
        if hashlib.sha256(entry).digest() == seal:
            return entry
        if not self.said:
            log.warning("compiled programs in %s are damaged; they are compiled anew", self._path)
        self.said = True
        return None

    def put(self, key: str, value: bytes) -> None:
        """Keeps an entry, in the place of one that may be there: as a whole or, where the machine goes down, not at all."""
        with tempfile.NamedTemporaryFile(dir=self._path, prefix=".", delete=False) as file:
            file.write(hashlib.sha256(value).digest() + value)
            file.flush()
            os.fsync(file.fileno())
        os.replace(file.name, self.path(key))


def digest(*made_of: str) -> str:
    """Names what machine code depends on: the processor, the threads that work is cut for, and `made_of`."""
    processor = cpu_facts("flags", "Features") or platform.processor()
    facts = (sys.platform, platform.machine(), processor, str(cores()), os.environ.get("NPROC", ""), *made_of)
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def require_private(folder: Path) -> None:
    """Raises a `ValueError` where a folder belongs to another user, or where others may write to it."""
    found = folder.stat()
    if found.st_uid != os.getuid():
        raise ValueError(f"{folder} belongs to another user (number {found.st_uid})")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ValueError(f"others may write to {folder} (its mode is {stat.S_IMODE(found.st_mode):03o})")


def prune(parent: Path, most: int) -> None:
    """Removes files of the folders below `parent`, the oldest first, until they hold at most `most` bytes."""
    found = [(path, path.stat()) for path in parent.glob("*/*")]
    files = sorted((state.st_mtime, state.st_size, path) for path, state in found)
    excess = sum(size for _, size, _ in files) - most
    for _, size, path in files:
        if excess <= 0:
            break
        path.unlink(missing_ok=True)  # another process may have been faster
        excess -= size
