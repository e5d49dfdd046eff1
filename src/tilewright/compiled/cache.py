"""JAX's compilation cache on disk, in a private folder and with a digest per entry.

JAX writes an entry in place, loads damaged entries, and never replaces an entry that it could not load. Entries are therefore
read and written here, each with a digest; a damaged entry is recompiled once.
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
"""Size limit of the cache over all machines and versions; the oldest entries are evicted first."""
SEAL_BYTES = hashlib.sha256().digest_size


def enable(cache: Path, *dependencies: str) -> Path | None:
    """Stores what this process compiles in a folder `xla/...` of `cache`, and loads programs stored there by earlier processes.

    JAX's keys cover the program, its options and JAX's version; the folder's name covers the machine and `dependencies`. The
    folder is private because the machine code loaded from it is executed.

    Args:
        cache: folder, created with access for its owner only if it does not exist.
        dependencies: further facts that programs depend on, such as the names of kernel libraries that they call.

    Returns:
        The folder; None if the user has configured JAX's own cache (`JAX_COMPILATION_CACHE_DIR`) or disabled caching
        (`JAX_ENABLE_COMPILATION_CACHE`), which stays unchanged.

    Raises:
        ValueError: the folder belongs to another user, or others may write to it.
        OSError: the folder cannot be created or read.
    """
    if jax.config.values["jax_compilation_cache_dir"] or not jax.config.values["jax_enable_compilation_cache"]:
        return None
    internals = sys.modules[compilation_cache.reset_cache.__module__]
    sealed = hasattr(internals, "_cache")  # JAX has no public hook; without this attribute it stores entries in its own format
    folder = cache / "xla" / digest(*(["sealed"] if sealed else []), *dependencies)
    for each in (cache, folder.parent, folder):
        each.mkdir(parents=True, exist_ok=True, mode=0o700)
        require_private(each)
    prune(folder.parent, LARGEST_BYTES)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # The demo's programs compile in 10 ms to 3 s; by default JAX only stores those that take a second or more.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    compilation_cache.reset_cache()  # else JAX stays without a cache if it has compiled something before
    if sealed:
        internals._cache = SealedEntries(folder)  # type: ignore[attr-defined]
    return folder


class SealedEntries:
    """A folder of entries, each prefixed with its SHA-256, with the interface of JAX's compilation cache.

    Attributes:
        warned: True once a warning about damaged entries was logged.
    """

    def __init__(self, folder: Path):
        # JAX reads this attribute.
        self._path = folder
        self.warned = False

    def path(self, key: str) -> Path:
        return self._path / f"{key}-cache"

    def get(self, key: str) -> bytes | None:
        """Returns an entry; None if it does not exist or is damaged."""
        path = self.path(key)
        try:
            raw = path.read_bytes()
        except FileNotFoundError:
            return None
        seal = raw[:SEAL_BYTES]
        entry = raw[SEAL_BYTES:]
        if hashlib.sha256(entry).digest() == seal:
            return entry
        if not self.warned:
            log.warning("compiled programs in %s are damaged; they are recompiled", self._path)
        self.warned = True
        return None

    def put(self, key: str, value: bytes) -> None:
        """Stores or replaces an entry atomically."""
        with tempfile.NamedTemporaryFile(dir=self._path, prefix=".", delete=False) as file:
            file.write(hashlib.sha256(value).digest() + value)
            file.flush()
            os.fsync(file.fileno())
        os.replace(file.name, self.path(key))


def digest(*dependencies: str) -> str:
    """Returns a digest of all that machine code depends on: processor, number of threads, and `dependencies`."""
    processor = cpu_facts("flags", "Features") or platform.processor()
    facts = (sys.platform, platform.machine(), processor, str(cores()), os.environ.get("NPROC", ""), *dependencies)
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def require_private(folder: Path) -> None:
    """Raises a `ValueError` if a folder belongs to another user or if others may write to it."""
    found = folder.stat()
    if found.st_uid != os.getuid():
        raise ValueError(f"{folder} belongs to another user (number {found.st_uid})")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ValueError(f"others may write to {folder} (its mode is {stat.S_IMODE(found.st_mode):03o})")


def prune(parent: Path, most: int) -> None:
    """Removes the oldest files in the subfolders of `parent` until they hold at most `most` bytes."""
    found = [(path, path.stat()) for path in parent.glob("*/*")]
    files = sorted((state.st_mtime, state.st_size, path) for path, state in found)
    excess = sum(size for _, size, _ in files) - most
    for _, size, path in files:
        if excess <= 0:
            break
        path.unlink(missing_ok=True)  # another process may have removed it
        excess -= size
