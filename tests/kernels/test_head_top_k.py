"""The most likely tokens: each implementation against NumPy in float64, and what the TPU kernel compiles into."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.compiled.aot import compile_for
from tilewright.kernels import native, select
from tilewright.kernels.head_argmax.cases import ROWS
from tilewright.kernels.head_top_k import cases, pallas_tpu, reference, xla
from tilewright.kernels.linear import cpu
from tilewright.kernels.operations import Transposed

needs_native = pytest.mark.skipif(native.kernels().isa is None, reason=native.kernels().reason or "no kernels")
pytestmark = pytest.mark.usefixtures("quick_compiles")


def tpu_kernel(x: jax.Array, head: jax.Array, k: int, transposed: bool = False) -> tuple[jax.Array, jax.Array]:
    """The kernel as JAX interprets it on any platform."""
    return interpreted(x, Transposed(head) if transposed else head, k)


interpreted = jax.jit(partial(pallas_tpu.head_top_k, interpret=True), static_argnums=2)
compiled_xla = jax.jit(xla.head_top_k, static_argnums=2)


def by_xla(x: jax.Array, head: jax.Array, k: int, transposed: bool = False) -> tuple[jax.Array, jax.Array]:
    return compiled_xla(x, Transposed(head) if transposed else head, k)


def packed(x: jax.Array, head: jax.Array, k: int, transposed: bool = False) -> tuple[jax.Array, jax.Array]:
    ops = select.operations("cpu")
    return ops.head_top_k(x, ops.prepare_matrix(head.T if transposed else head, "head"), k)


IMPLEMENTATIONS = [
    pytest.param(reference.head_top_k, id="reference"),
    pytest.param(by_xla, id="xla"),
    pytest.param(tpu_kernel, id="pallas_tpu"),
    pytest.param(packed, id="cpu", marks=needs_native),
]

SIZES = [
    (1, 16, 1, 1, False, jnp.float32),
    (16, 8, 2048, 16, True, jnp.float32),
    (15, 16, 4097, 5, True, jnp.bfloat16),
    (2, 24, 40, 40, False, jnp.float32),
]
"""Rows, hidden size, vocabulary, how many, transposed, dtype: from fewer than the lanes to several tiles of 2,048."""


@pytest.mark.parametrize("run", IMPLEMENTATIONS)
@settings(max_examples=6)
@given(seed=st.integers(0, 2**31 - 1), sizes=st.sampled_from(SIZES))
def test_the_largest_in_order(run, seed: int, sizes: tuple[int, int, int, int, bool, jnp.dtype]):
    """Small integers: every sum is exact, and many are equal."""
    rows, hidden, vocab, k, transposed, dtype = sizes
    rng = np.random.default_rng(seed)
    x = rng.integers(-1, 2, (rows, hidden))
    head = rng.integers(-1, 2, (hidden, vocab))
    given = jnp.asarray(head.T if transposed else head, dtype)
    index, value = run(jnp.asarray(x, dtype), given, k, transposed)
    assert (index.dtype, value.dtype) == (jnp.int32, jnp.float32)
    logits = x.astype(np.float64) @ head.astype(np.float64)
    order = np.argsort(-logits, axis=-1, kind="stable")[:, :k]
    np.testing.assert_array_equal(index, order)
    np.testing.assert_array_equal(value, np.take_along_axis(logits, order, axis=-1))


@pytest.mark.parametrize("run", IMPLEMENTATIONS)
def test_every_place_can_win(run):
    """The largest logits at the borders of lanes, chunks, tiles and halves; all of one lane; and some that are equal."""
    vocab = 4500
    lane = 128
    rows = [[4499, 4096, 4095, 2049], [0, 1, 127, 128], [2048, 2047, 129, 5], [lane * n + 7 for n in (20, 3, 31, 1)]]
    head = np.zeros((5, vocab), np.float32)
    for row, places in enumerate(rows):
        head[row, places] = [4, 3, 2, 1]
    head[4, [4200, 2050, 2049 + 128, 17]] = 1
    index, value = run(jnp.eye(5), jnp.asarray(head), 4)
    np.testing.assert_array_equal(index, [*rows, [17, 2050, 2177, 4200]])
    np.testing.assert_array_equal(value, [[4, 3, 2, 1]] * 4 + [[1] * 4])


@pytest.mark.parametrize("run", IMPLEMENTATIONS)
def test_infinities(run):
    """If fewer than k are finite, the first of the others follow. Leading dims are kept."""
    low = -np.inf
    head = jnp.asarray([[low, low, 1.0, 2.0, low], [low, -1e30, low, low, low], [low] * 5, [-1.0, np.inf, np.inf, 0.0, low]])
    one = jnp.ones((1, 2, 1))
    places = [run(one, head[row : row + 1], 4)[0] for row in range(4)]
    want = np.array([[3, 2, 0, 1], [1, 0, 2, 3], [0, 1, 2, 3], [1, 2, 3, 0]])
    np.testing.assert_array_equal(jnp.stack(places), np.broadcast_to(want[:, None, None], (4, 1, 2, 4)))


@pytest.mark.parametrize("run", [pytest.param(tpu_kernel, id="pallas_tpu"), pytest.param(packed, id="cpu", marks=needs_native)])
def test_a_nan_counts_as_the_least_in_our_kernels(run):
    head = jnp.asarray([[np.nan, 1.0, 3.0, np.nan, -np.inf, 2.0]])
    np.testing.assert_array_equal(run(jnp.ones((1, 1)), head, 5)[0], [[2, 5, 1, 0, 3]])


def test_what_fits():
    """The heads of the cases for blocks up to 512; nothing without rows, of two dtypes, or with more than there are lanes."""
    shaped = jax.ShapeDtypeStruct
    for case in cases.CASES.values():
        head = shaped((case.hidden, case.vocab), jnp.bfloat16)
        for rows in (*ROWS, 512):
            assert not pallas_tpu.refuses(shaped((1, rows, case.hidden), jnp.bfloat16), head, cases.TOP_K)
    head = shaped((64, 1000), jnp.bfloat16)
    assert not pallas_tpu.refuses(shaped((4, 64), jnp.bfloat16), head, 128)
    assert pallas_tpu.refuses(shaped((4, 64), jnp.bfloat16), head, 129)
    assert pallas_tpu.refuses(shaped((0, 64), jnp.bfloat16), head, 16)
    assert pallas_tpu.refuses(shaped((4, 64), jnp.float32), head, 16)
    assert pallas_tpu.refuses(shaped((4096, 64), jnp.bfloat16), head, 16)


@needs_native
@pytest.mark.parametrize("k", [0, 5])
def test_more_than_there_are_is_refused(k: int):
    with pytest.raises(ValueError, match=f"expected k from 1 to 4, found {k}"):
        cpu.head_top_k(jnp.ones((1, 2)), cpu.pack(jnp.ones((2, 4))), k)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_tied_head_is_read_as_it_lies(transposed: bool):
    x = jnp.asarray([[1.0, 2.0]])
    head = jnp.asarray([[0.0, 3.0, 0.0], [0.0, 0.0, 1.6]])
    index, value = select.PLAIN.head_top_k(x, Transposed(head.T) if transposed else head, 2)
    assert (index.tolist(), value.tolist()) == ([[2, 1]], [[pytest.approx(3.2), 3.0]])


@pytest.mark.tpu
@pytest.mark.parametrize(("chip", "rows"), [("v5e:1x1", 128), ("v5p:1x1x1", 16), ("v6e:1x1", 15)])
@pytest.mark.parametrize("transposed", [False, True])
def test_on_a_tpu_the_kernel_runs_and_no_logits_exist(chip: str, rows: int, transposed: bool):
    case = cases.CASES["qwen3-4b"]
    x = jax.ShapeDtypeStruct((1, rows, case.hidden), jnp.bfloat16)
    shape = (case.vocab, case.hidden) if transposed else (case.hidden, case.vocab)
    head = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    ops = select.operations("tpu")

    def run(x: jax.Array, head: jax.Array) -> tuple[jax.Array, jax.Array]:
        return ops.head_top_k(x, Transposed(head) if transposed else head, cases.TOP_K)

    compiled = compile_for(chip, run, x, head)
    traffic = compiled.traffic()
    assert any("tpu_custom_call" in name for name in compiled.without_cycles)
    assert not traffic.contains_shape((rows, case.vocab))
    head_bytes = 2 * case.hidden * case.vocab
    assert traffic.written + traffic.read < 1.01 * head_bytes  # the head is read once: neither copied nor transposed
