"""Attention of a window of queries: each implementation against NumPy in float64, and what the CPU kernel promises besides."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.sparse_cases import SIZES, Operands, Sizes, check, expected, wide
from tilewright.kernels import native, select
from tilewright.kernels.sparse_attention import cpu, reference, xla
from tilewright.kernels.sparse_attention.reference import CARRIED, EXACT, IDLE, cosine

seeds = st.integers(0, 2**31 - 1)
needs_native = pytest.mark.skipif(native.kernels().isa is None, reason=native.kernels().reason or "no kernels")
IMPLEMENTATIONS = pytest.mark.parametrize(
    "run",
    [
        pytest.param(jax.jit(reference.sparse_attention), id="reference"),
        pytest.param(jax.jit(xla.sparse_attention), id="xla"),
        pytest.param(jax.jit(cpu.sparse_attention), id="cpu", marks=needs_native),
    ],
)
DTYPES = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
on_cpu = jax.jit(cpu.sparse_attention)
STATED = Sizes(2, 9, 40, 2, 2, 32, 2)


def same_bits(found: Any, want: Any) -> None:
    for one, other in zip(found, want, strict=True):
        np.testing.assert_array_equal(wide(one), wide(other))


def of_queries(case: Operands, which: Any) -> Operands:
    return case | {name: case[name][:, which] for name in ("q", "kinds", "before")}


@IMPLEMENTATIONS
@DTYPES
@given(seeds, st.sampled_from(SIZES))
def test_sparse_attention(run: Any, dtype: Any, seed: int, sizes: Sizes):
    check(run, sizes.draw(seed, dtype))


@needs_native
@settings(max_examples=12)
@given(
    seeds,
    st.builds(
        Sizes,
        rows=st.integers(1, 3),
        window=st.integers(1, 60),
        positions=st.integers(1, 90),
        heads=st.integers(1, 3),
        group=st.integers(1, 3),
        d=st.sampled_from([16, 48, 128]),
        changes=st.integers(1, 2),
    ),
    st.sampled_from([jnp.float32, jnp.bfloat16]),
)
def test_the_cpu_kernel_takes_sizes_of_every_kind(seed: int, sizes: Sizes, dtype: Any):
    check(on_cpu, sizes.draw(seed, dtype))


@IMPLEMENTATIONS
@pytest.mark.parametrize("kind", [IDLE, EXACT, CARRIED, CARRIED + 1])
@pytest.mark.parametrize("length", [0, 1, 40])
def test_a_window_of_one_kind(run: Any, kind: int, length: int):
    case = STATED.draw(1)
    check(run, case | {"kinds": jnp.full((2, 9), kind), "lengths": jnp.full(2, length)})


@IMPLEMENTATIONS
def test_what_lies_behind_a_length_has_no_influence(run: Any):
    case = STATED.draw(2) | {"lengths": jnp.asarray([0, 21])}
    hidden = (jnp.arange(40)[None, :] >= case["lengths"][:, None])[:, :, None, None]
    spoilt = {name: jnp.where(hidden, 1e6, case[name]) for name in ("k", "v")}
    spoilt["changes"] = jnp.where(hidden[:, None], -1e6, case["changes"])
    same_bits(run(**(case | spoilt)), run(**case))


@needs_native
@given(seeds, st.sampled_from([jnp.float32, jnp.bfloat16]))
def test_a_query_gets_the_same_bits_alone(seed: int, dtype: Any):
    """Alone, in another order, and with none but its own row in the batch: contexts and statistics."""
    case = STATED.draw(seed, dtype)
    whole = on_cpu(**case)
    turned = on_cpu(**of_queries(case, slice(None, None, -1)))
    same_bits([x[:, ::-1] for x in turned], whole)
    for row, at in ((0, 0), (1, 8)):
        one = {name: x[row : row + 1] for name, x in of_queries(case, slice(at, at + 1)).items()}
        same_bits([x[0, 0] for x in on_cpu(**one)], [x[row, at] for x in whole])


@needs_native
def test_kinds_of_other_queries_change_nothing():
    case = STATED.draw(4)
    whole = on_cpu(**case)
    for kind in (IDLE, EXACT, CARRIED, CARRIED + 1):
        kinds = jnp.where(jnp.arange(9) == 4, case["kinds"], kind)
        same_bits([x[:, 4] for x in on_cpu(**(case | {"kinds": kinds}))], [x[:, 4] for x in whole])


@IMPLEMENTATIONS
def test_carrying_on_all_changes_is_exact(run: Any):
    """Where queries and keys are those of the context so far: `softmax(q K) V + softmax(q K) (V' - V)`."""
    sizes = replace(STATED, changes=1)
    case = sizes.draw(5) | {"kinds": jnp.full((2, 9), EXACT), "lengths": jnp.asarray([33, 40])}
    old = case["v"] - case["changes"][:, 0]
    first = run(**(case | {"v": old}))[0]
    carried = run(**(case | {"before": first, "kinds": jnp.full((2, 9), CARRIED)}))[0]
    np.testing.assert_allclose(carried, run(**case)[0], atol=1e-5)


@IMPLEMENTATIONS
def test_statistics_give_the_cosine_of_contexts(run: Any):
    case = STATED.draw(6) | {"lengths": jnp.asarray([0, 40])}
    case["before"] = case["before"].at[0, :3].set(0)
    turned = np.asarray(cosine(run(**case)[1]))
    old = wide(case["before"])
    new = expected(case)[0]
    norms = np.linalg.norm(old, axis=-1) * np.linalg.norm(new, axis=-1)
    want = np.divide((old * new).sum(-1), norms, out=np.zeros_like(norms), where=norms > 0)
    np.testing.assert_allclose(turned, want, atol=1e-5)
    assert (turned[0, :3] == 0).all()
    np.testing.assert_allclose(turned[np.asarray(case["kinds"]) == IDLE], want[np.asarray(case["kinds"]) == IDLE], atol=1e-6)


def test_the_cosine_of_zeros_is_zero_and_that_of_huge_or_tiny_contexts_is_none_the_less_right():
    found = cosine(jnp.asarray([[0.0, 0, 0], [0, 0, 4], [0, 4, 0], [6, 4, 9], [-6, 4, 9], [1e30, 1e30, 1e30], [1e-30] * 3]))
    np.testing.assert_allclose(found, [0, 0, 0, 1, -1, 1, 1], rtol=1e-6)


@needs_native
@DTYPES
def test_the_bundle_takes_the_kernel_where_it_fits_and_xla_where_it_does_not(dtype: Any):
    ops = select.operations("cpu")
    for size, name in ((32, True), (24, False)):
        case = replace(STATED, d=size).draw(7, dtype)
        run = jax.jit(lambda case: ops.sparse_attention(*(case[name] for name in ORDER)))
        assert ("tilewright_window_attention" in run.lower(case).as_text()) == name
        check(lambda run=run, **case: run(case), case)


ORDER = ("q", "k", "v", "changes", "lengths", "kinds", "before")


@needs_native
@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"lengths": jnp.asarray([41, 0])}, "a length is out of range"),
        ({"lengths": jnp.asarray([-1, 0])}, "a length is out of range"),
        ({"kinds": jnp.full((2, 9), CARRIED + 2)}, "a kind is out of range"),
        ({"kinds": jnp.full((2, 9), IDLE - 1)}, "a kind is out of range"),
        ({"before": jnp.zeros((2, 9, 64))}, "shapes do not fit"),
        ({"q": jnp.zeros((2, 9, 3, 32)), "before": jnp.zeros((2, 9, 96))}, "shapes do not fit"),
        ({"q": jnp.zeros((2, 9, 4, 32), jnp.bfloat16)}, "all in one type"),
        ({"before": jnp.zeros((2, 9, 128), jnp.bfloat16)}, "all in one type"),
    ],
)
def test_what_does_not_fit_the_cpu_kernel_is_refused(change: Operands, complaint: str):
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=complaint):
        jax.block_until_ready(on_cpu(**(STATED.draw(0) | change)))


@needs_native
def test_heads_of_no_multiple_are_refused_by_the_cpu_kernel():
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="shapes do not fit"):
        jax.block_until_ready(on_cpu(**replace(STATED, d=24).draw(0)))
