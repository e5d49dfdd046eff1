"""Settings of glibc's allocator, each in a process of its own, because they cannot be undone."""

import os
import platform
import subprocess
import sys

import pytest

from tilewright.compiled.allocator import MALLOC_VARIABLES

SIZE = 2**26

FAULTS = f"""
import ctypes, resource, threading
from tilewright.compiled.allocator import keep_freed_memory
library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
library.malloc.argtypes = [ctypes.c_size_t]
library.free.argtypes = [ctypes.c_void_p]

def run():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = library.malloc({SIZE})
    ctypes.memset(block, 1, {SIZE})
    library.free(block)
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

print(keep_freed_memory())
faults = []
for _ in range(2):
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
print(*faults)
"""
needs_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")


def faults(**variables: str) -> tuple[str, list[int]]:
    """Returns what `keep_freed_memory` returned, and the page faults of a block that two threads allocate after one another."""
    environment = {name: value for name, value in os.environ.items() if name not in MALLOC_VARIABLES}
    result = subprocess.run(
        [sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True, env={**environment, **variables}
    )
    kept, numbers = result.stdout.splitlines()
    return kept, [int(number) for number in numbers.split()]


@needs_glibc
def test_a_freed_block_is_used_again_by_another_thread():
    kept, (first, second) = faults()
    assert kept == "True"
    assert second < first / 4


@needs_glibc
@pytest.mark.parametrize("name", ["MALLOC_ARENA_MAX", "MALLOC_TRIM_THRESHOLD_"])
def test_a_configured_allocator_stays_as_it_is(name: str):
    kept, (first, second) = faults(**{name: "4"})
    assert kept == "False"
    assert second > first / 2
