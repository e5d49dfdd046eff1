"""Settings of the C library's memory allocator."""

import ctypes
import os

MALLOC_VARIABLES = (
    "GLIBC_TUNABLES",
    "MALLOC_ARENA_MAX",
    "MALLOC_MMAP_MAX_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
)
"""Environment variables that configure glibc's allocator."""
KEEP = {"M_ARENA_MAX": (-8, 1), "M_MMAP_MAX": (-4, 0), "M_TRIM_THRESHOLD": (-1, -1)}
"""Number of each option of `mallopt`, and its value: one heap, no blocks outside of it, and no return of its memory."""


def keep_freed_memory() -> bool:
    """Makes glibc keep freed memory for later allocations, for programs that run again and again on a CPU.

    XLA allocates the intermediate values of a program anew in each run. By default glibc returns such large blocks to the
    operating system, which then clears as many pages in the next run. Call this function before JAX starts its threads. The
    process keeps the memory of its peak.

    Returns:
        True if set. False without glibc, or if an environment variable already configures its allocator.
    """
    if any(name in os.environ for name in MALLOC_VARIABLES):
        return False
    library = ctypes.CDLL(None) if os.name == "posix" else None
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    results = [library.mallopt(number, value) for number, value in KEEP.values()]
    return results == [1] * len(KEEP)
