"""Limits of this machine: memory bandwidth (for matmuls with few rows) and 8-bit dot products (for matmuls with many rows).

All rates use every core that the process may use. Memory buffers are far larger than a last-level cache.

- *copy* counts bytes read plus bytes written, as STREAM's copy does (McCalpin 1995). The extra read of a line before a store
  (write allocation) is not counted.
- *read* counts the bytes of a sum over integers, without stores. A matmul with few rows does little but read weights, so this
  is its limit. The kernel reads from huge pages, with the widest loads, in several streams per thread. Without the CPU kernels
  NumPy sums instead, more slowly.
- *dot* counts 8-bit products accumulated in registers by the kernels' instructions (AVX-512-VNNI, AVX2, AMX tiles): two
  operations per product. AVX2 needs fewer instructions for 4-bit weights.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np

from tilewright.compiled.machine import cores
from tilewright.kernels import native
from tilewright.kernels.dot.cpu import ISAS, PIECE, count_products
from tilewright.kernels.linear.cpu import on_huge_pages
from tilewright.kernels.read.cpu import read

BUFFER_BYTES = 2**28
"""Bytes of each of the two buffers."""

PIECES = 16
"""Work items per thread. Idle threads take the next item, so that a slow core delays no other."""

DOT_PIECES = 128
"""Work items of dot products per thread, a few milliseconds in total."""


class DotProducts:
    """Rate of 8-bit products accumulated in registers.

    Args:
        pieces: work items per thread, `DOT_PIECES` by default.
    """

    def __init__(self, pieces: int | None = None):
        assert self.possible()
        self.pieces = (pieces or DOT_PIECES) * cores()
        self.count = jax.jit(lambda: count_products(self.pieces)).lower().compile()

    @staticmethod
    def possible() -> bool:
        """Returns True if the CPU kernels run here on an instruction set with 8-bit dot products."""
        return native.kernels().isa in ISAS

    def rate(self) -> float:
        """Accumulates all products and returns 1e9 operations per second."""
        start = time.perf_counter()
        self.count().block_until_ready()
        return 2 * self.pieces * PIECE / (time.perf_counter() - start) / 1e9


class MemoryBuffers:
    """Two buffers, with their copy and read bandwidth.

    Args:
        size: bytes of each buffer, a multiple of 4; `BUFFER_BYTES` by default.
    """

    def __init__(self, size: int | None = None):
        self.source = np.arange((size or BUFFER_BYTES) // 4, dtype=np.int32)
        self.target = np.zeros_like(self.source)  # not `empty`: pages must exist before timing
        self.target[:] = 1
        self.placed = on_huge_pages(self.source) if native.kernels().isa else None
        if self.placed is not None:
            self.source = np.asarray(self.placed)
            self.sum = jax.jit(read).lower(self.placed).compile()

    def copy(self) -> float:
        """Copies one buffer to the other. Returns GB/s, bytes read plus bytes written."""
        return self._rate(lambda source, target: np.copyto(target, source), 2 * self.source.nbytes)

    def read(self) -> float:
        """Sums one buffer. Returns GB/s."""
        if self.placed is None:
            return self._rate(lambda source, _: source.sum(), self.source.nbytes)
        start = time.perf_counter()
        self.sum(self.placed).block_until_ready()
        return self.source.nbytes / (time.perf_counter() - start) / 1e9

    def _rate(self, work: Callable[[np.ndarray, np.ndarray], object], nbytes: int) -> float:
        """Applies `work` to all pieces with all threads (NumPy releases the GIL). Returns GB/s."""
        pieces = [np.array_split(buffer, PIECES * cores()) for buffer in (self.source, self.target)]
        with ThreadPoolExecutor(cores()) as pool:
            start = time.perf_counter()
            list(pool.map(work, *pieces))
            return nbytes / (time.perf_counter() - start) / 1e9
