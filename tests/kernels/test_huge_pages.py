"""Arrays that share mappings on huge pages."""

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import jax
import numpy as np
import pytest

from tilewright.kernels.linear.cpu import ALIGNMENT, CHUNK, HugePages


@pytest.mark.parametrize("size", [1, 64, 4097, CHUNK // 2 - 1, CHUNK // 2, CHUNK + 5])
def test_arrays_do_not_overlap_and_are_aligned(size: int):
    pages = HugePages()
    sizes = [size, 100, size + 1]
    arrays = [pages.allocate((each,), np.uint8) for each in sizes]
    for n, array in enumerate(arrays):
        assert array.ctypes.data % ALIGNMENT == 0
        array[:] = n
    for n, array in enumerate(arrays):
        assert array.shape == (sizes[n],)
        assert (array == n).all()


def test_threads_share_a_mapping():
    pages = HugePages()
    with ThreadPoolExecutor(8) as pool:
        arrays = list(pool.map(lambda n: pages.allocate((n, 3), np.float32), range(1, 200)))
    spans = sorted((array.ctypes.data, array.nbytes) for array in arrays)
    assert all(begin + size <= after for (begin, size), (after, _) in pairwise(spans))
    assert spans[-1][0] - spans[0][0] < CHUNK


def test_jax_uses_the_memory_without_a_copy():
    array = HugePages().allocate((1000,), np.float32)
    array[:] = 1
    placed = jax.device_put(array)
    assert placed.unsafe_buffer_pointer() == array.ctypes.data


def test_mappings_consist_of_huge_pages():
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not enabled.exists() or "[never]" in enabled.read_text():
        pytest.skip("this system has no transparent huge pages")
    array = HugePages().allocate((CHUNK,), np.uint8)
    array[:] = 1
    lines = Path("/proc/self/smaps").read_text().split("VmFlags")
    mapping = next(part for part in lines if covers(part, array.ctypes.data))
    huge = next(int(line.split()[1]) for line in mapping.splitlines() if line.startswith("AnonHugePages"))
    assert huge > 0


def covers(mapping: str, address: int) -> bool:
    """True if a mapping in the format of smaps contains an address."""
    line = next((line for line in mapping.splitlines() if "-" in line.split(" ")[0] and ":" not in line.split(" ")[0]), "")
    if not line:
        return False
    begin, end = (int(bound, 16) for bound in line.split(" ")[0].split("-"))
    return begin <= address < end
