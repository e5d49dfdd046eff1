"""Limits of this machine: memory bandwidth for a kernel that streams its weights, dot products for one that has many rows.

Figures are with every core that the process may use; those of memory are over buffers far larger than a last-level cache:

- *copy* counts the bytes read plus the bytes written, as STREAM's copy does (McCalpin 1995). What the hardware reads besides,
  because a store to a line that is not cached first fetches it, is not counted.
- *read* counts the bytes of a sum over integers: there is no store, as in a product with few rows, where nearly all traffic
  is reading weights. It is the limit of such a product. A kernel reads as a product would that computes nothing: from huge
  pages, by the widest loads, in several streams for each thread. Without the kernels NumPy's sum serves, which is slower.
- *dot* counts products of 8-bit numbers that are added up in registers, by the instructions that the kernels have for them
  (AVX-512-VNNI, AVX2's, the tile unit's): two operations each. AVX2 needs fewer instructions for weights of 4 bits.
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
"""Of each of the two buffers."""

PIECES = 16
"""For each thread. Whoever is free takes the next one: a core that is busy elsewhere for a while holds up nobody."""

DOT_PIECES = 128
"""Pieces of dot products for each thread, some milliseconds in all."""


class DotProducts:
    """Products of 8-bit numbers, and how fast they are added up.

    Args:
        pieces: of each thread; whoever is free takes the next one.
    """

    def __init__(self, pieces: int | None = None):
        assert self.possible()
        self.pieces = (pieces or DOT_PIECES) * cores()
        self.count = jax.jit(lambda: count_products(self.pieces)).lower().compile()

    @staticmethod
    def possible() -> bool:
        """True if the kernels run here, on an instruction set that multiplies 8-bit numbers."""
        return native.kernels().isa in ISAS

    def rate(self) -> float:
        """Adds up all products. Returns 1e9 operations in a second."""
        began = time.perf_counter()
        self.count().block_until_ready()
        return 2 * self.pieces * PIECE / (time.perf_counter() - began) / 1e9


class MemoryBuffers:
    """Two buffers, and how fast they can be copied and read.

    Args:
        size: bytes of each, a multiple of 4.
    """

    def __init__(self, size: int | None = None):
        self.source = np.arange((size or BUFFER_BYTES) // 4, dtype=np.int32)
        self.target = np.zeros_like(self.source)  # not `empty`: pages must exist before they are timed
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
        began = time.perf_counter()
        self.sum(self.placed).block_until_ready()
        return self.source.nbytes / (time.perf_counter() - began) / 1e9

    def _rate(self, work: Callable[[np.ndarray, np.ndarray], object], nbytes: int) -> float:
        """Works on all pieces of the buffers with all threads; NumPy lets go of the interpreter's lock meanwhile."""
        pieces = [np.array_split(buffer, PIECES * cores()) for buffer in (self.source, self.target)]
        with ThreadPoolExecutor(cores()) as pool:
            began = time.perf_counter()
            list(pool.map(work, *pieces))
            return nbytes / (time.perf_counter() - began) / 1e9
