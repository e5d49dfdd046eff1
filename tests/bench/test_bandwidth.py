"""What the two bandwidths count, and that every byte is touched."""

import itertools
from types import SimpleNamespace

import bandwidth
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bandwidth import DotProducts, MemoryBuffers

from tilewright.kernels import native
from tilewright.kernels.dot.cpu import PIECE, count_products
from tilewright.kernels.read.cpu import read


@pytest.fixture
def _one_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that is a second later whenever it is read."""
    clock = itertools.count()
    monkeypatch.setattr(bandwidth, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))


@pytest.mark.usefixtures("_one_second")
def test_a_copy_counts_both_ways_and_a_read_one():
    memory = MemoryBuffers(8000)
    assert memory.copy() == pytest.approx(16e-6), "8000 bytes read and 8000 written, in a second"
    assert memory.read() == pytest.approx(8e-6)


@pytest.mark.parametrize("threads", [1, 3, 7])
def test_the_threads_share_the_whole_buffer(threads: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bandwidth, "cores", lambda: threads)
    memory = MemoryBuffers(4 * 1001)
    sums = []
    memory.copy()
    np.testing.assert_array_equal(memory.target, np.arange(1001))
    memory._rate(lambda source, _: sums.append(source.sum()), 1)
    assert len(sums) == bandwidth.PIECES * threads
    assert sum(sums) == 1001 * 500


def test_threads_are_the_cores_of_this_process(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 5, 6}, raising=False)
    assert bandwidth.cores() == 3


@pytest.mark.skipif(native.kernels().isa is None, reason=native.kernels().reason or "no kernels")
@pytest.mark.parametrize("count", [1, 2**16, 3 * 2**16 + 77])
def test_the_kernel_reads_every_integer(count: int):
    numbers = np.random.default_rng(0).integers(-(2**31), 2**31, count).astype(np.int32)
    assert np.asarray(jax.jit(read)(jnp.asarray(numbers))) == np.sum(numbers, dtype=np.int32)


needs_dots = pytest.mark.skipif(not DotProducts.possible(), reason="no kernels that multiply 8-bit numbers")


@needs_dots
def test_products_count_themselves():
    assert int(jax.jit(lambda: count_products(3))()) == 3 * PIECE


@needs_dots
@pytest.mark.usefixtures("_one_second")
def test_a_product_is_two_operations(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bandwidth, "cores", lambda: 3)
    assert DotProducts(2).rate() == pytest.approx(2 * 3 * 2 * PIECE / 1e9)


@pytest.mark.usefixtures("_one_second")
def test_without_the_kernels_numpy_reads(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bandwidth.native, "kernels", lambda: native.Native(None, "none"))
    memory = MemoryBuffers(8000)
    assert memory.placed is None
    assert memory.read() == pytest.approx(8e-6)
