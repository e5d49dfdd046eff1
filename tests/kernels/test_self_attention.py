"""Self-attention of whole sequences: the reference against NumPy in float64, and every implementation against the reference,
gradients included."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.kernels import native, select
from tilewright.kernels.linear.cpu import Joint
from tilewright.kernels.masks import AttentionMask, causal_from
from tilewright.kernels.operations import Heads, Joined, Norm
from tilewright.kernels.self_attention import cpu, reference

needs_native = pytest.mark.skipif(native.kernels().isa is None, reason=native.kernels().reason or "no kernels")
EPS = 1e-5
Case = tuple[int, int, int, int, int, bool]
"""Rows of the batch, positions, key heads, queries to each, head size, whether there are norms."""
CASES: list[Case] = [(2, 1, 1, 1, 16, True), (1, 23, 2, 3, 48, True), (2, 49, 1, 5, 64, False), (1, 130, 1, 2, 32, True)]


def drawn(case: Case, dtype: Any = jnp.float32, seed: int = 0) -> tuple[Any, ...]:
    b, t, heads, group, d, normed = case
    rng = np.random.default_rng(seed)
    qkv = jnp.asarray(rng.standard_normal((b, t, heads * (group + 2) * d)), dtype)
    norms = [jnp.asarray(1 + 0.3 * rng.standard_normal(d), jnp.float32) if normed else None for _ in range(2)]
    angles = rng.uniform(0, 7, (b, t, d // 2))
    return qkv, *norms, jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)


def plain(case: Case, qkv: Any, q_norm: Any, k_norm: Any, cos: Any, sin: Any, first: Any = None) -> Any:
    return reference.self_attention(qkv, case[2], case[4], q_norm, k_norm, EPS, cos, sin, first)


def kernel(case: Case, *operands: Any) -> Any:
    return cpu.self_attention(cpu.ProjectionSizes(case[2] * case[3], case[4], EPS), *operands)


def numpy_attention(case: Case, *operands: Any) -> np.ndarray:
    """Position by position, in float64."""
    b, t, heads, group, d, _ = case
    wide: list[Any] = [None if x is None else np.asarray(x, np.float64) for x in operands]
    qkv, q_norm, k_norm, cos, sin = wide
    n = heads * group
    x = qkv.reshape(b, t, -1, d)

    def turned(x: np.ndarray, norm: np.ndarray | None, row: int, at: int) -> np.ndarray:
        if norm is not None:
            x = norm * x / np.sqrt(np.mean(x**2) + EPS)
        first = x[: d // 2]
        second = x[d // 2 :]
        c = cos[row, at]
        s = sin[row, at]
        return np.concatenate([first * c - second * s, second * c + first * s])

    out = np.zeros((b, t, n, d))
    for row, at, head in np.ndindex(b, t, n):
        key_head = head // group
        q = turned(x[row, at, head], q_norm, row, at)
        scores = np.array([q @ turned(x[row, s, n + key_head], k_norm, row, s) for s in range(at + 1)]) / np.sqrt(d)
        weights = np.exp(scores - scores.max())
        out[row, at, head] = weights @ x[row, : at + 1, n + heads + key_head] / weights.sum()
    return out.reshape(b, t, -1)


@pytest.mark.parametrize("case", CASES[:3])
def test_the_reference_against_numpy(case: Case):
    operands = drawn(case)
    found = jax.jit(partial(plain, case))(*operands)
    np.testing.assert_allclose(found, numpy_attention(case, *operands), rtol=1e-4, atol=1e-5)


def value_and_gradient(function: Any, case: Case, operands: tuple[Any, ...], due: Any) -> tuple[Any, list[Any]]:
    """The result, and what is due to projection and norms."""
    given_to = tuple(x for x in operands[:3] if x is not None)
    angles = operands[3:]

    @jax.jit
    def run(due: Any, *given_to: Any) -> Any:
        def loss(*given_to: Any) -> Any:
            return function(case, given_to[0], *(given_to[1:] or (None, None)), *angles)

        out, back = jax.vjp(loss, *given_to)
        return out, back(due)

    out, gradient = run(due, *given_to)
    return out, list(gradient)


def compare(case: Case, dtype: Any, seed: int) -> None:
    """In units of what each array is made of: sums of T products of numbers about 1 err by some units of sqrt(T)."""
    operands = drawn(case, dtype, seed)
    b, t, heads, group, d, _ = case
    due = jnp.asarray(np.random.default_rng(seed + 1).standard_normal((b, t, heads * group * d)), dtype)
    wide = tuple(None if x is None else x.astype(jnp.float32) for x in operands)
    expected, wanted = value_and_gradient(plain, case, wide, due.astype(jnp.float32))
    out, gradient = value_and_gradient(kernel, case, operands, due)
    unit = 2.0**-22 if dtype == jnp.float32 else 2.0**-7
    assert out.dtype == dtype
    assert [g.dtype for g in gradient] == [x.dtype for x in operands[:3] if x is not None]
    for one, other in zip([out, *gradient], [expected, *wanted], strict=True):
        scale = float(jnp.abs(other).max()) + 1
        np.testing.assert_allclose(one.astype(jnp.float32), other, atol=unit * scale * (4 + t**0.5), rtol=unit)


@needs_native
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_and_its_gradient(case: Case, dtype: Any):
    compare(case, dtype, 0)


@pytest.mark.slow
@needs_native
@given(
    st.integers(0, 2**31 - 1),
    st.tuples(
        st.sampled_from([1, 3]),
        st.integers(1, 60),
        st.sampled_from([1, 2]),
        st.sampled_from([1, 4]),
        st.just(16),
        st.booleans(),
    ),
)
def test_sizes_at_random(seed: int, case: Case):
    compare(case, jnp.float32, seed)


@needs_native
def test_a_later_position_changes_nothing_before_it():
    case = CASES[1]
    qkv, *rest = drawn(case)
    changed = qkv.at[:, 17:].add(1.0)
    one, other = (np.asarray(jax.jit(partial(kernel, case))(x, *rest)) for x in (qkv, changed))
    np.testing.assert_array_equal(one[:, :17], other[:, :17])
    assert (one[:, 17:] != other[:, 17:]).any()


@pytest.mark.parametrize("head_dim", [16, 24])
def test_bundles_agree(head_dim: int):
    """Whatever a bundle's projection is; head sizes that the kernel does not take are XLA's."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((2, 7, 40)), jnp.float32)
    parts = tuple(jnp.asarray(rng.standard_normal((40, n * head_dim)) / 6, jnp.float32) for n in (4, 2, 2))
    angles = rng.uniform(0, 7, (2, 7, head_dim // 2))
    rope = jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)
    norm = Norm(jnp.asarray(1 + 0.1 * rng.standard_normal(head_dim), jnp.float32), EPS)

    def attended(ops: Any) -> Any:
        def run(x: Any, parts: Any) -> Any:
            joined = Joined(parts)
            if ops.prepares:
                joined = ops.prepare_joined(joined, "qkv")
            mask = causal_from(jnp.zeros(2, jnp.int32))
            return ops.attend_projected(ops, ops.project(x, joined), Heads(head_dim, norm, norm, rope), None, mask)[0]

        return run(x, parts) if ops.prepares else jax.jit(run)(x, parts)

    expected = reference.self_attention(
        jnp.concatenate([x @ w for w in parts], -1), 2, head_dim, norm.weight, norm.weight, EPS, *rope
    )
    for ops in {select.PLAIN, select.operations(), select.training_operations("float32")}:
        np.testing.assert_allclose(attended(ops), expected, rtol=1e-4, atol=1e-5, err_msg=ops.name)


@needs_native
def test_the_bundle_decides_which_kernel_is_in_the_program():
    case = CASES[2]
    qkv, _, _, cos, sin = drawn(case)
    spec = Heads(case[4], None, None, (cos, sin))
    sizes = (case[2] * case[3] * case[4], case[2] * case[4], case[2] * case[4])
    ops = select.training_operations("float32")
    mask = causal_from(jnp.zeros(2, jnp.int32))
    program = jax.jit(lambda x: ops.attend_projected(ops, Joint(x, sizes), spec, None, mask)[0])
    assert "tilewright_self_attention" in program.lower(qkv).as_text()
    parts = jnp.split(qkv, [sizes[0], sizes[0] + sizes[1]], axis=-1)
    assert (
        "tilewright"
        not in jax.jit(lambda *x: select.PLAIN.attend_projected(select.PLAIN, x, spec, None, mask)).lower(*parts).as_text()
    )


@needs_native
def test_what_does_not_fit_is_refused():
    operands = drawn(CASES[1])
    with pytest.raises(jax.errors.JaxRuntimeError, match="tilewright_self_attention: shapes do not fit"):
        jax.block_until_ready(jax.jit(partial(cpu.self_attention, cpu.ProjectionSizes(5, 48, EPS)))(*operands))


@needs_native
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("segments", "window"), [(True, None), (False, 5), (True, 9), (False, 200)])
def test_segments_and_windows_and_their_gradient(segments: bool, window: int | None, dtype: Any):
    """Against XLA's gradient of the definition: packed texts of 1 to 90 positions, and windows across their ends."""
    case: Case = (2, 130, 2, 3, 32, True)
    operands = drawn(case, dtype)
    ends = np.asarray([[1, 40, 130], [90, 91, 130]])
    ids = jnp.asarray(np.sum(np.arange(130)[None, :, None] >= ends[:, None], axis=-1), jnp.int32) if segments else None
    first = cpu.first_keys(AttentionMask(jnp.zeros((2, 1), jnp.int32), "causal", ids, window=window), 130)
    at = np.arange(130)
    low = (
        np.zeros((2, 130), int) if ids is None else np.asarray([[np.flatnonzero(row == row[t])[0] for t in at] for row in ids])
    )
    np.testing.assert_array_equal(first, low if window is None else np.maximum(low, np.maximum(at - window + 1, 0)))
    due = jnp.asarray(np.random.default_rng(1).standard_normal((2, 130, 6 * 32)), dtype)
    wide = tuple(None if x is None else x.astype(jnp.float32) for x in operands)
    expected, wanted = value_and_gradient(partial(plain, first=first), case, wide, due.astype(jnp.float32))
    out, gradient = value_and_gradient(lambda case, *x: kernel(case, *x, first), case, operands, due)
    unit = 2.0**-22 if dtype == jnp.float32 else 2.0**-7
    for one, other in zip([out, *gradient], [expected, *wanted], strict=True):
        scale = float(jnp.abs(other).max()) + 1
        np.testing.assert_allclose(one.astype(jnp.float32), other, atol=unit * scale * 16, rtol=unit)


@needs_native
def test_first_keys_of_zero_change_no_bits():
    operands = drawn(CASES[1])
    first = jnp.zeros((1, 23), jnp.int32)
    np.testing.assert_array_equal(
        jax.jit(partial(kernel, CASES[1]))(*operands), jax.jit(partial(kernel, CASES[1]))(*operands, first)
    )


@needs_native
def test_packed_segments_by_the_bundle_that_trains():
    """Through the operation: the kernel is in the program, and a segment has the result that it has alone."""
    case: Case = (1, 40, 2, 2, 16, False)
    qkv, _, _, cos, sin = drawn(case)
    ops = select.training_operations("float32")
    ids = jnp.asarray([[0] * 17 + [5] * 23], jnp.int32)

    def run(qkv: Any, cos: Any, sin: Any, ids: Any) -> Any:
        mask = AttentionMask(jnp.zeros((1, 1), jnp.int32), "causal", ids)
        return ops.attend_projected(ops, Joint(qkv, (64, 32, 32)), Heads(16, None, None, (cos, sin)), None, mask)[0]

    assert "tilewright_self_attention" in jax.jit(run).lower(qkv, cos, sin, ids).as_text()
    whole = run(qkv, cos, sin, ids)
    alone = run(qkv[:, 17:], cos[:, 17:], sin[:, 17:], ids[:, 17:])
    np.testing.assert_allclose(whole[:, 17:], alone, rtol=0, atol=1e-6)
