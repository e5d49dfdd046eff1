"""The most likely token: each implementation against NumPy in float64, and what the TPU kernel compiles into."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.compiled.aot import compile_for
from tilewright.kernels import native, select
from tilewright.kernels.head_argmax import cases, pallas_tpu, reference, xla
from tilewright.kernels.operations import Transposed

needs_native = pytest.mark.skipif(native.kernels().isa is None, reason=native.kernels().reason or "no kernels")


def tpu_kernel(x: jax.Array, head: jax.Array, transposed: bool = False) -> tuple[jax.Array, jax.Array]:
    """The kernel as JAX interprets it on any platform."""
    return interpreted(x, Transposed(head) if transposed else head)


interpreted = jax.jit(partial(pallas_tpu.head_argmax, interpret=True))


def by_xla(
    x: jax.Array, head: jax.Array, transposed: bool = False, masks: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    return xla.head_argmax(x, Transposed(head) if transposed else head, masks=masks)


def packed(
    x: jax.Array, head: jax.Array, transposed: bool = False, masks: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    ops = select.operations("cpu")
    return ops.head_argmax(x, ops.prepare_matrix(head.T if transposed else head, "head"), masks=masks)


IMPLEMENTATIONS = [
    pytest.param(reference.head_argmax, id="reference"),
    pytest.param(by_xla, id="xla"),
    pytest.param(tpu_kernel, id="pallas_tpu"),
    pytest.param(packed, id="cpu", marks=needs_native),
]

SIZES = [
    (1, 16, 1, False, jnp.float32),
    (3, 32, 300, False, jnp.bfloat16),
    (16, 8, 2048, True, jnp.float32),
    (15, 16, 4097, True, jnp.bfloat16),
    (5, 24, 6200, False, jnp.float32),
]
"""Rows, hidden size, vocabulary, transposed, dtype: from fewer than the lanes to several tiles of 2,048."""


@pytest.mark.parametrize("run", IMPLEMENTATIONS)
@given(seed=st.integers(0, 2**31 - 1), sizes=st.sampled_from(SIZES))
def test_first_of_the_largest(run, seed: int, sizes: tuple[int, int, int, bool, jnp.dtype]):
    """Small integers: every sum is exact, and many are equal."""
    rows, hidden, vocab, transposed, dtype = sizes
    rng = np.random.default_rng(seed)
    x = rng.integers(-1, 2, (rows, hidden))
    head = rng.integers(-1, 2, (hidden, vocab))
    given = jnp.asarray(head.T if transposed else head, dtype)
    index, value = run(jnp.asarray(x, dtype), given, transposed)
    assert (index.dtype, value.dtype) == (jnp.int32, jnp.float32)
    logits = x.astype(np.float64) @ head.astype(np.float64)
    np.testing.assert_array_equal(index, np.argmax(logits, axis=-1))
    np.testing.assert_array_equal(value, np.max(logits, axis=-1))


def bits(may: np.ndarray) -> jax.Array:
    """Masks of 32 tokens to a word."""
    whole = np.zeros((*may.shape[:-1], -(-may.shape[-1] // 32) * 32), np.uint8)
    whole[..., : may.shape[-1]] = may
    return jnp.asarray(np.packbits(whole, axis=-1, bitorder="little").view(np.uint32))


@pytest.mark.parametrize("vocab", [1, 32, 75])
def test_masks_are_bits_by_token(vocab: int):
    rng = np.random.default_rng(vocab)
    may = rng.random((2, 3, vocab)) < 0.5
    logits = rng.normal(size=(2, 3, vocab)).astype(np.float32)
    np.testing.assert_array_equal(xla.allowed(jnp.asarray(logits), bits(may)), np.where(may, logits, -np.inf))


@pytest.mark.parametrize("run", [pytest.param(by_xla, id="xla"), pytest.param(packed, id="cpu", marks=needs_native)])
@given(seed=st.integers(0, 2**31 - 1), sizes=st.sampled_from(SIZES), share=st.sampled_from([0.001, 0.03, 0.5, 1.0]))
def test_first_of_the_largest_that_masks_allow(run, seed: int, sizes: tuple[int, int, int, bool, jnp.dtype], share: float):
    """Masks allow few or many tokens; the first row allows none and gets index 0 with minus infinity."""
    rows, hidden, vocab, transposed, dtype = sizes
    rng = np.random.default_rng(seed)
    x = rng.integers(-1, 2, (rows, hidden))
    head = rng.integers(-1, 2, (hidden, vocab))
    may = rng.random((rows, vocab)) < share
    may[0] = False
    logits = np.where(may, x.astype(np.float64) @ head.astype(np.float64), -np.inf)
    given = jnp.asarray(head.T if transposed else head, dtype)
    index, value = run(jnp.asarray(x, dtype), given, transposed, masks=bits(may))
    np.testing.assert_array_equal(index, np.argmax(logits, axis=-1))
    np.testing.assert_array_equal(value, np.max(logits, axis=-1))


@needs_native
def test_a_mask_of_another_size_is_an_error():
    with pytest.raises(jax.errors.JaxRuntimeError, match="expected a mask for each row"):
        packed(jnp.ones((2, 8)), jnp.ones((8, 40)), masks=jnp.ones((2, 1), jnp.uint32))


@pytest.mark.parametrize("run", IMPLEMENTATIONS)
def test_every_place_can_win(run):
    """The largest logit at the borders of lanes, tiles and halves, and then two that are equal."""
    vocab = 4500
    places = [0, 1, 127, 128, 2047, 2048, 2049, 4095, 4096, 4499]
    rows = jnp.eye(len(places) + 1, 16)
    head = np.zeros((16, vocab), np.float32)
    for row, place in enumerate(places):
        head[row, place] = 1
    head[len(places), [4200, 2050, 2049 + 128]] = 1
    np.testing.assert_array_equal(run(rows, jnp.asarray(head))[0], [*places, 2050])


@pytest.mark.parametrize("run", IMPLEMENTATIONS)
def test_infinities(run):
    """All -inf gives 0; among -inf the only finite logit wins; +inf wins. Leading dims are kept."""
    head = jnp.asarray([[-np.inf, -np.inf, 1.0], [-np.inf, -1e30, -np.inf], [-np.inf] * 3, [-1.0, np.inf, np.inf]]).T
    one = jnp.ones((1, 2, 1))
    places = [run(one, head[None, :, row])[0] for row in range(4)]
    np.testing.assert_array_equal(jnp.stack(places), np.broadcast_to(np.array([2, 1, 0, 1])[:, None, None], (4, 1, 2)))


def test_a_nan_never_wins_in_the_tpu_kernel():
    head = jnp.asarray([[np.nan, 1.0, 3.0, np.nan], [np.nan] * 4])
    assert [int(tpu_kernel(jnp.ones((1, 1)), head[row : row + 1])[0][0]) for row in (0, 1)] == [2, 0]


@given(st.integers(1, 8192), st.sampled_from([2, 4]), st.integers(1, 4096))
def test_a_tile_is_whole_lanes_and_what_fits_is_bounded(hidden: int, itemsize: int, rows: int):
    columns = pallas_tpu.tile_columns(hidden, itemsize)
    assert columns % pallas_tpu.LANES == 0
    assert columns == pallas_tpu.LANES or columns * hidden * itemsize <= pallas_tpu.TILE_BYTES
    dtype = {2: jnp.bfloat16, 4: jnp.float32}[itemsize]
    x = jax.ShapeDtypeStruct((rows, hidden), dtype)
    head = jax.ShapeDtypeStruct((hidden, 1000), dtype)
    held = 2 * (columns + rows) * hidden * itemsize + rows * columns * 4
    assert held <= pallas_tpu.VMEM_BYTES or pallas_tpu.refuses(x, head)


def test_what_fits():
    """The heads of the cases for blocks up to 1,024; nothing without rows, of two dtypes, or of another dtype."""
    shaped = jax.ShapeDtypeStruct
    for case in cases.CASES.values():
        head = shaped((case.hidden, case.vocab), jnp.bfloat16)
        assert not any(pallas_tpu.refuses(shaped((1, rows, case.hidden), jnp.bfloat16), head) for rows in (*cases.ROWS, 1024))
    head = shaped((64, 100), jnp.bfloat16)
    assert pallas_tpu.refuses(shaped((0, 64), jnp.bfloat16), head)
    assert pallas_tpu.refuses(shaped((4, 64), jnp.float32), head)
    assert pallas_tpu.refuses(shaped((4, 64), jnp.float16), shaped((64, 100), jnp.float16))


@pytest.mark.parametrize("transposed", [False, True])
def test_a_tied_head_is_read_as_it_lies(transposed: bool):
    x = jnp.asarray([[1.0, 2.0]])
    head = jnp.asarray([[0.0, 3.0, 0.0], [0.0, 0.0, 1.6]])
    index, value = select.PLAIN.head_argmax(x, Transposed(head.T) if transposed else head)
    assert (int(index[0]), float(value[0])) == (2, pytest.approx(3.2))


@pytest.mark.tpu
@pytest.mark.parametrize(("chip", "rows"), [("v5e:1x1", 128), ("v5p:1x1x1", 16), ("v6e:1x1", 15)])
@pytest.mark.parametrize("transposed", [False, True])
def test_on_a_tpu_the_kernel_runs_and_no_logits_exist(chip: str, rows: int, transposed: bool):
    case = cases.CASES["qwen3-4b"]
    x = jax.ShapeDtypeStruct((1, rows, case.hidden), jnp.bfloat16)
    shape = (case.vocab, case.hidden) if transposed else (case.hidden, case.vocab)
    head = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    ops = select.operations("tpu")
    compiled = compile_for(chip, ops.head_argmax, x, Transposed(head) if transposed else head)
    traffic = compiled.traffic()
    assert any("tpu_custom_call" in name for name in compiled.without_cycles)
    assert not traffic.contains_shape((rows, case.vocab))
    head_bytes = 2 * case.hidden * case.vocab
    assert traffic.written + traffic.read < 1.01 * head_bytes  # the head is read once: neither copied nor transposed
