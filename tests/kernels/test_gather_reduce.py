"""Gathering and reducing at once: each implementation against NumPy in float64, over rows and over lists."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.kernels import native, select
from tilewright.kernels.gather_reduce import cases, cpu, reference, xla
from tilewright.kernels.gather_reduce.reference import Reduce

needs_native = pytest.mark.skipif(native.kernels().isa is None, reason=native.kernels().reason or "no kernels")

ROWS = [
    pytest.param(jax.jit(reference.gather_reduce, static_argnums=4), id="reference"),
    pytest.param(jax.jit(xla.gather_reduce, static_argnums=4), id="xla"),
    pytest.param(jax.jit(select.gather_reduce, static_argnums=4), id="select"),
]
LISTS = [
    pytest.param(jax.jit(reference.gather_reduce_csr, static_argnums=4), id="reference"),
    pytest.param(jax.jit(cpu.gather_reduce_csr, static_argnums=4), id="cpu", marks=needs_native),
    pytest.param(jax.jit(select.gather_reduce_csr, static_argnums=4), id="select"),
]
REDUCTIONS: list[Reduce] = ["sum", "mean", "max", "min"]


class Sizes(NamedTuple):
    """With `heads` 0 there are no weights, with -1 one for all features."""

    nodes: int
    rows: int
    slots: int
    features: int
    heads: int
    reduce: Reduce
    dtype: Any = jnp.float32


SIZES = [
    Sizes(1, 1, 1, 1, 0, "sum"),
    Sizes(7, 5, 3, 5, -1, "sum", jnp.bfloat16),
    Sizes(4, 9, 6, 6, 3, "mean"),
    Sizes(9, 3, 1, 17, -1, "max"),
    Sizes(6, 4, 5, 33, 0, "min", jnp.bfloat16),
    Sizes(5, 6, 4, 8, 2, "max"),
    Sizes(5, 2, 131, 3, -1, "mean"),
    Sizes(5, 2, 70, 3, 0, "max"),
]


def expected(x: np.ndarray, lists: list[np.ndarray], weights: list[np.ndarray] | None, reduce: Reduce) -> np.ndarray:
    """Computes the result row by row in float64."""
    out = np.zeros((len(lists), x.shape[1]))
    for row, sources in enumerate(lists):
        messages = x[sources].astype(np.float64)
        if weights is not None:
            scale = weights[row].astype(np.float64)
            scale = scale[:, None] if scale.ndim == 1 else scale
            messages = messages * np.repeat(scale, x.shape[1] // scale.shape[1], axis=1)
        if len(sources):
            out[row] = getattr(messages, reduce)(axis=0)
    return out


def draw(seed: int, sizes: Sizes) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
    """Features, sources, degrees (some 0, one the largest) and weights."""
    rng = np.random.default_rng(seed)
    rows = sizes.rows
    slots = sizes.slots
    degrees = rng.integers(0, slots + 1, rows).astype(np.int32)
    degrees[rng.integers(rows)] = slots
    shape = {0: None, -1: (rows, slots)}.get(sizes.heads, (rows, slots, sizes.heads))
    weights = None if shape is None else rng.normal(size=shape).astype(np.float32)
    x = np.asarray(jnp.asarray(rng.normal(size=(sizes.nodes, sizes.features)), sizes.dtype), np.float32)
    return x, rng.integers(0, sizes.nodes, (rows, slots)).astype(np.int32), degrees, weights


def check(actual: jax.Array, x: np.ndarray, lists: list[np.ndarray], weights: list[np.ndarray] | None, sizes: Sizes) -> None:
    """Compares within the rounding error of sums of this length."""
    assert actual.dtype == sizes.dtype
    error = np.abs(np.asarray(actual, np.float64) - expected(x, lists, weights, sizes.reduce))
    size = expected(np.abs(x), lists, None if weights is None else [np.abs(w) for w in weights], "sum")
    bound = float(jnp.finfo(sizes.dtype).eps) + sizes.slots * float(jnp.finfo(jnp.float32).eps)
    assert (error <= bound * size + 1e-12).all()


def short(rows: np.ndarray, degrees: np.ndarray) -> list[np.ndarray]:
    return [row[:degree] for row, degree in zip(rows, degrees, strict=True)]


@pytest.mark.parametrize("run", ROWS)
@pytest.mark.parametrize("sizes", SIZES)
@given(seed=st.integers(0, 2**31 - 1))
def test_rows(run, sizes: Sizes, seed: int):
    x, sources, degrees, weights = draw(seed, sizes)
    scale = None if weights is None else jnp.asarray(weights)
    actual = run(jnp.asarray(x, sizes.dtype), jnp.asarray(sources), jnp.asarray(degrees), scale, sizes.reduce)
    check(actual, x, short(sources, degrees), None if weights is None else short(weights, degrees), sizes)


@pytest.mark.parametrize("run", LISTS)
@pytest.mark.parametrize("sizes", SIZES)
@given(seed=st.integers(0, 2**31 - 1))
def test_lists(run, sizes: Sizes, seed: int):
    """Tests the same rows in compressed form, with further entries that belong to no row."""
    x, sources, degrees, weights = draw(seed, sizes)
    lists = short(sources, degrees)
    spare = sources.size - degrees.sum()
    flat = jnp.asarray(np.concatenate([*lists, np.zeros(spare, np.int32)]))
    offsets = jnp.asarray(np.concatenate([[0], np.cumsum(degrees)]), jnp.int32)
    scales = None
    flat_weights = None
    if weights is not None:
        scales = short(weights, degrees)
        flat_weights = jnp.asarray(np.concatenate([*scales, np.ones((spare, *weights.shape[2:]), np.float32)]))
    check(run(jnp.asarray(x, sizes.dtype), offsets, flat, flat_weights, sizes.reduce), x, lists, scales, sizes)


@pytest.mark.parametrize("run", ROWS)
@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_what_padding_points_at_leaves_no_trace(run, reduce: Reduce):
    bad = jnp.asarray([jnp.nan, jnp.inf])
    x = jnp.stack([bad, jnp.asarray([1.0, -2.0]), jnp.asarray([3.0, 4.0])])
    sources = jnp.asarray([[1, 2, 0, 0], [0, 0, 0, 0], [2, 0, 0, 0]], jnp.int32)
    degrees = jnp.asarray([2, 0, 1], jnp.int32)
    weights = jnp.asarray([[1.0, 1.0, jnp.nan, jnp.inf]] * 3)
    first = {"sum": [4.0, 2.0], "mean": [2.0, 1.0], "max": [3.0, 4.0], "min": [1.0, -2.0]}[reduce]
    for scale in (None, weights):
        np.testing.assert_array_equal(run(x, sources, degrees, scale, reduce), [first, [0.0, 0.0], [3.0, 4.0]])


@pytest.mark.parametrize("run", ROWS)
@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_rows_of_nothing(run, reduce: Reduce):
    none = jnp.zeros(0, jnp.int32)
    assert run(jnp.ones((3, 2)), jnp.zeros((0, 4), jnp.int32), none, None, reduce).shape == (0, 2)
    np.testing.assert_array_equal(
        run(jnp.ones((3, 2)), jnp.zeros((2, 1), jnp.int32), jnp.zeros(2, jnp.int32), None, reduce), jnp.zeros((2, 2))
    )


def test_no_messages_in_memory():
    """XLA's form at a published shape: neither an array of all messages, nor one of a slot's, is in the compiled program."""
    case = cases.CASES["trainium"]
    shaped = (
        jax.ShapeDtypeStruct((case.nodes, case.features), jnp.float32),
        jax.ShapeDtypeStruct((case.nodes, case.slots), jnp.int32),
        jax.ShapeDtypeStruct((case.nodes,), jnp.int32),
    )
    fused = jax.jit(xla.gather_reduce).lower(*shaped).compile().memory_analysis()
    plain = jax.jit(partial(reference.gather_reduce, reduce="sum")).lower(*shaped).compile().memory_analysis()
    assert fused is not None
    assert plain is not None
    features = 4 * case.nodes * case.features
    assert fused.temp_size_in_bytes < features
    assert plain.temp_size_in_bytes >= case.slots * features
