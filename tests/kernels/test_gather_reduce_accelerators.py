"""The kernels for TPUs and Trainium: interpreted or emulated against the reference, and compiled for absent TPUs."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels import nki_emulation
from tilewright.compiled.aot import compile_for
from tilewright.kernels.gather_reduce import nki as gather_nki
from tilewright.kernels.gather_reduce import pallas_tpu, reference
from tilewright.kernels.gather_reduce.cases import CASES
from tilewright.kernels.scatter_add import nki as scatter_nki
from tilewright.kernels.scatter_add import pallas_tpu as scatter_tpu
from tilewright.kernels.scatter_add import reference as scatter_reference

f32 = jnp.float32
bf16 = jnp.bfloat16

SIZES = [
    (5, 3, 100, f32, False, "sum"),
    (150, 9, 20, f32, True, "mean"),
    (13, 4, 300, bf16, False, "max"),
]
"""Rows, slots, features, dtype, weighted, reduction: part tiles, several parts of slots, words of one and of two columns."""


def case_of(rows: int, slots: int, features: int, dtype: Any, weighted: bool, seed: int = 0) -> tuple[Any, ...]:
    """Some rows are empty; padding names a row of NaN."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((40, features))
    x[0] = np.nan
    degrees = rng.integers(0, slots + 1, rows, dtype=np.int32)
    sources = np.where(np.arange(slots) < degrees[:, None], rng.integers(1, 40, (rows, slots)), 0)
    weights = jnp.asarray(rng.standard_normal((rows, slots)), f32) if weighted else None
    return jnp.asarray(x, dtype), jnp.asarray(sources, jnp.int32), jnp.asarray(degrees), weights


def close(actual: Any, expected: Any, reduce: str = "sum") -> None:
    """Sums of up to nine products of size 1 in float32 in another order, then rounded to the result's dtype alike."""
    at_most = 0 if reduce in ("max", "min") else 8e-6 if expected.dtype == f32 else 0.02
    np.testing.assert_allclose(np.asarray(actual, np.float32), np.asarray(expected, np.float32), atol=at_most, rtol=0)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pallas_tpu, "SLOTS", 4)
    monkeypatch.setattr(pallas_tpu, "IN_FLIGHT", 32)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("rows, slots, features, dtype, weighted, reduce", SIZES)
def test_on_a_tpu(rows: int, slots: int, features: int, dtype: Any, weighted: bool, reduce: Any):
    case = case_of(rows, slots, features, dtype, weighted)
    assert not pallas_tpu.refuses(case[0], case[1], case[3])
    run = jax.jit(partial(pallas_tpu.gather_reduce, reduce=reduce, interpret=True))
    close(run(*case), reference.gather_reduce(*case, reduce=reduce), reduce)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype, rows, first", [(f32, 13, 3), (bf16, 16, 8)])
def test_rows_of_a_buffer_on_a_tpu(dtype: Any, rows: int, first: int):
    """The rows before and behind stay as they are, whether the first one begins a group of eight or not."""
    x, sources, degrees, _ = case_of(rows, 3, 20, dtype, False)
    buffer = jnp.arange(30 * 20).reshape(30, 20).astype(dtype)
    run = jax.jit(lambda buffer: pallas_tpu.gather_reduce(x, sources, degrees, into=(buffer, first), interpret=True))
    expected = buffer.at[first : first + rows].set(reference.gather_reduce(x, sources, degrees))
    close(run(buffer), expected)


def test_rows_that_a_buffer_has_no_place_for():
    x, sources, degrees, _ = case_of(13, 3, 20, f32, False)
    for into in (
        (jnp.zeros((30, 20)), 18),
        (jnp.zeros((30, 20)), -1),
        (jnp.zeros((30, 21)), 0),
        (jnp.zeros((30, 20), bf16), 0),
    ):
        with pytest.raises(ValueError, match="expected a float32 buffer of 20 columns with room for 13 rows"):
            pallas_tpu.gather_reduce(x, sources, degrees, into=into)
    with pytest.raises(ValueError, match="multiples of 8"):
        pallas_tpu.gather_reduce(x.astype(bf16), sources, degrees, into=(jnp.zeros((30, 20), bf16), 8))


def test_what_fits():
    x, sources, _, weights = case_of(13, 3, 20, f32, True)
    assert weights is not None
    assert pallas_tpu.refuses(x, sources, weights[:, :, None])
    assert pallas_tpu.refuses(x, sources[:0], None)
    assert pallas_tpu.refuses(x.astype(jnp.float16), sources, None)
    assert pallas_tpu.refuses(jax.ShapeDtypeStruct((9, pallas_tpu.WORDS + 1), f32), sources, None)
    assert not pallas_tpu.refuses(jax.ShapeDtypeStruct((9, 2 * pallas_tpu.WORDS), bf16), sources, None)


def seed_case() -> tuple[tuple[int, int, int], np.ndarray, tuple[jax.ShapeDtypeStruct, ...]]:
    """The published shape, with as many neighbours as uniform chance gives each node."""
    case = CASES["trainium"]
    degrees = np.random.default_rng(0).integers(0, case.slots + 1, case.nodes)
    shaped = jax.ShapeDtypeStruct
    arrays = (
        shaped((case.nodes, case.features), f32),
        shaped((case.nodes, case.slots), jnp.int32),
        shaped((case.nodes,), jnp.int32),
    )
    return (case.nodes, case.slots, case.features), degrees, arrays


@pytest.mark.tpu
def test_on_a_tpu_only_the_result_is_written():
    """67 times fewer bytes than gathered first and summed then; v5p has too little VMEM to hide what that one writes."""
    shape, _, arrays = seed_case()
    plain = compile_for("v5p:1x1x1", reference.gather_reduce, *arrays).traffic()
    fused = compile_for("v5p:1x1x1", pallas_tpu.gather_reduce, *arrays).traffic()
    assert plain.contains_shape(shape)
    assert not fused.contains_shape(shape)
    assert fused.written == shape[0] * shape[2] * 4
    assert plain.written > 66 * fused.written


def test_on_a_tpu_little_more_than_the_neighbours_is_read():
    shape, degrees, _ = seed_case()
    moved = pallas_tpu.transfers(degrees, shape[1], shape[2], f32)
    assert moved.gathered == degrees.sum() * 512
    assert moved.gathered < moved.read < 1.1 * moved.gathered
    assert moved.written == shape[0] * shape[2] * 4
    assert degrees.sum() < moved.descriptors < 1.01 * degrees.sum()
    wide = pallas_tpu.transfers(degrees, shape[1], 512, bf16)
    assert wide.gathered == degrees.sum() * 1024  # two columns to a word


@pytest.mark.tpu
@pytest.mark.parametrize("chip", ["v5e:1x1", "v6e:1x1"])
@pytest.mark.parametrize("features, dtype, reduce", [(128, f32, "sum"), (300, f32, "max"), (300, bf16, "mean")])
def test_it_compiles_for_tpus(chip: str, features: int, dtype: Any, reduce: Any):
    """With weights, several parts, rows of more words than memory's lanes, and a part tile."""
    shaped = jax.ShapeDtypeStruct
    arrays = (shaped((900, features), dtype), shaped((777, 70), jnp.int32), shaped((777,), jnp.int32), shaped((777, 70), f32))
    compiled = compile_for(chip, partial(pallas_tpu.gather_reduce, reduce=reduce), *arrays)
    assert any("tpu_custom_call" in name for name in compiled.without_cycles)
    assert not compiled.traffic().contains_shape((777, 70, features))


@pytest.mark.tpu
@pytest.mark.parametrize("dtype, first", [(f32, 8), (f32, 3), (bf16, 16)])
def test_a_buffer_that_is_given_away_is_not_copied(dtype: Any, first: int):
    shaped = jax.ShapeDtypeStruct

    def fill(buffer: jax.Array, x: jax.Array, sources: jax.Array, degrees: jax.Array) -> jax.Array:
        return pallas_tpu.gather_reduce(x, sources, degrees, into=(buffer, first))

    arrays = (shaped((90_000, 256), dtype), shaped((900, 256), dtype), shaped((304, 4), jnp.int32), shaped((304,), jnp.int32))
    compiled = compile_for("v5e:1x1", fill, *arrays, donate=0)
    assert compiled.alias_bytes == compiled.output_bytes == 90_000 * 256 * jnp.dtype(dtype).itemsize
    assert compiled.temp_bytes < 2**20


@pytest.mark.parametrize("rows, slots, features, dtype", [(5, 3, 7, f32), (131, 17, 600, bf16)])
def test_sum_of_messages_on_a_tpu(rows: int, slots: int, features: int, dtype: Any):
    messages, degrees = messages_of(rows, slots, features, dtype)
    assert not scatter_tpu.refuses(messages)
    run = jax.jit(partial(scatter_tpu.scatter_add, interpret=True))
    expected = scatter_reference.scatter_add(messages, degrees)
    tolerance = 2e-5 if dtype == f32 else 0.1  # three numbers of size 1; one more rounding of a sum of seventeen
    np.testing.assert_allclose(np.asarray(run(messages, degrees), np.float32), expected.astype(f32), atol=tolerance, rtol=0)


def messages_of(rows: int, slots: int, features: int, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Padding is NaN."""
    rng = np.random.default_rng(1)
    degrees = rng.integers(0, slots + 1, rows, dtype=np.int32)
    messages = np.where((np.arange(slots) < degrees[:, None])[:, :, None], rng.standard_normal((rows, slots, features)), np.nan)
    return jnp.asarray(messages, dtype), jnp.asarray(degrees)


@pytest.mark.tpu
def test_messages_are_read_once_on_a_tpu():
    (nodes, slots, features), _, arrays = seed_case()
    messages = jax.ShapeDtypeStruct((nodes, slots, features), f32)
    moved = compile_for("v5e:1x1", scatter_tpu.scatter_add, messages, arrays[2]).traffic()
    assert moved.written == nodes * features * 4
    assert nodes * slots * features * 4 <= moved.read < 1.01 * nodes * slots * features * 4


def run_nki(module: Any, *operands: Any) -> tuple[np.ndarray, nki_emulation.Counts | None]:
    """Runs in AWS's simulator if installed (without counts), else emulated."""
    if gather_nki.nki is None:
        return nki_emulation.run(module, module.kernel, *operands)
    return np.asarray(gather_nki.nki.simulate(gather_nki.compiled(module.kernel))(*operands)), None


@pytest.mark.parametrize("model", ["sage", "gcn", "gin"])
@given(seed=st.integers(0, 2**31 - 1), sizes=st.sampled_from([(5, 3, 7, f32), (150, 20, 30, f32), (260, 5, 30, bf16)]))
def test_on_trainium(model: str, seed: int, sizes: tuple[int, int, int, Any]):
    """Tests a mean, a weighted sum and a sum with one kernel."""
    rows, slots, features, dtype = sizes
    case = case_of(rows, slots, features, dtype, model == "gcn", seed)
    reduce = "mean" if model == "sage" else "sum"
    x, sources, degrees, weights = (None if each is None else np.asarray(each) for each in case)
    assert x is not None
    assert sources is not None
    assert degrees is not None
    out, counts = run_nki(gather_nki, *gather_nki.operands(x, sources, degrees, weights, reduce))
    tolerance = 2e-5 if dtype == f32 else 0.03
    expected = reference.gather_reduce(*case, reduce=reduce).astype(f32)
    np.testing.assert_allclose(out.astype(np.float32), expected, atol=tolerance, rtol=0)
    moved = gather_nki.transfers(rows, slots, features, x.itemsize, model == "gcn", model == "sage")
    if counts is not None:
        assert (counts.calls, counts.descriptors) == (moved.calls, moved.descriptors)
        assert (counts.read, counts.written) == (moved.read, moved.written)


@pytest.mark.parametrize("rows, slots, features, dtype", [(5, 3, 7, f32), (150, 40, 20, f32), (256, 5, 30, bf16)])
def test_sum_of_messages_on_trainium(rows: int, slots: int, features: int, dtype: Any):
    messages, degrees = messages_of(rows, slots, features, dtype)
    out, counts = run_nki(scatter_nki, *scatter_nki.operands(np.asarray(messages), np.asarray(degrees)))
    expected = scatter_reference.scatter_add(messages, degrees).astype(f32)
    np.testing.assert_allclose(out.astype(np.float32), expected, atol=2e-5 if dtype == f32 else 0.03, rtol=0)
    moved = scatter_nki.transfers(rows, slots, features, messages.dtype.itemsize)
    if counts is not None:
        assert (counts.calls, counts.descriptors) == (moved.calls, moved.descriptors)
        assert (counts.read, counts.written) == (moved.read, moved.written)


def test_on_trainium_only_the_result_is_written():
    (nodes, slots, features), _, _ = seed_case()
    moved = gather_nki.transfers(nodes, slots, features)
    assert moved.written == nodes * features * 4
    assert moved.read < 1.01 * nodes * slots * features * 4


def test_trainium_takes_sums_and_needs_its_compiler():
    x, sources, degrees, _ = (None if each is None else np.asarray(each) for each in case_of(5, 3, 7, f32, False))
    assert x is not None
    assert sources is not None
    assert degrees is not None
    with pytest.raises(ValueError, match="expected 'sum' or 'mean' on Trainium, found 'max'"):
        gather_nki.operands(x, sources, degrees, reduce="max")
    if gather_nki.nki is None:
        with pytest.raises(ValueError, match="expected the package nki"):
            gather_nki.compiled()


def test_what_the_emulation_refuses():
    nl = nki_emulation.Language(nki_emulation.Counts())
    nisa = nki_emulation.Instructions(nki_emulation.Counts())
    tile = nl.ndarray((4, 3, 5), "float32")
    sums = nl.ndarray((4, 5), "float32")
    assert np.isnan(tile.array).all()
    with pytest.raises(nki_emulation.NkiError, match="not the last"):
        nisa.tensor_reduce(dst=sums, op=nl.add, data=tile, axis=(1,))
    with pytest.raises(nki_emulation.NkiError, match="129 partitions"):
        nl.ndarray((129, 1), "float32")
    with pytest.raises(nki_emulation.NkiError, match="bytes of a partition"):
        nl.ndarray((1, 2**16), "float32")
    indices = nl.ndarray((4, 1), "uint32")
    table = nl.ndarray((9, 5), "float32", nl.shared_hbm)
    nisa.memset(dst=indices, value=9)
    with pytest.raises(nki_emulation.NkiError, match="index 9 of 9 rows"):
        table.ap(pattern=[[5, 4], [1, 5]], vector_offset=indices)
    with pytest.raises(nki_emulation.NkiError, match="partition dim stays"):
        tile.permute((1, 0, 2))
    with pytest.raises(nki_emulation.NkiError, match="float32 into bfloat16"):
        nisa.dma_copy(dst=nl.ndarray((4, 5), "bfloat16", nl.shared_hbm), src=sums)
    with pytest.raises(nki_emulation.NkiError, match="body returns nothing"):
        nl.fori_loop(0, 4, lambda first: first)
    after: Any = lambda first: first + 1  # noqa: E731
    with pytest.raises(TypeError):
        nl.fori_loop(0, 4, after)
    with pytest.raises(nki_emulation.NkiError, match="leaves 45 elements"):
        nl.fori_loop(0, 8, lambda first: nisa.dma_copy(sums, table.ap([[5, 4], [1, 5]], scalar_offset=first)), 2)


@pytest.mark.skipif(gather_nki.nki is not None, reason="counts in the emulation")
def test_the_program_for_trainium_does_not_grow_with_the_rows(monkeypatch: pytest.MonkeyPatch):
    """NKI unrolls Python's loops, so a kernel must call as many instructions for 50 full tiles as for one."""
    bodies = []

    def once(self: Any, lower: int, upper: int, body_fun: Any, step: int = 1) -> None:
        bodies.append((upper - lower) // step)
        body_fun(nki_emulation.Register(lower))

    monkeypatch.setattr(nki_emulation.Language, "fori_loop", once)
    calls = []
    for rows in (128, 50 * 128):
        case = case_of(rows, 3, 7, f32, True)
        x, sources, degrees, weights = (np.asarray(each) for each in case)
        counts = run_nki(gather_nki, *gather_nki.operands(x, sources, degrees, weights, "mean"))[1]
        messages = run_nki(scatter_nki, *scatter_nki.operands(*(np.asarray(each) for each in messages_of(rows, 3, 7, f32))))[1]
        assert counts is not None
        assert messages is not None
        calls.append((counts.calls, messages.calls))
    assert calls[0] == calls[1]
    assert bodies == [1, 1, 50, 50]
