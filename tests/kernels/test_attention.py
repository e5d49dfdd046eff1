"""Attention: each implementation against NumPy in float64, and the CPU kernel's promise that rows are independent."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels import linear_checks
from kernels.attention_checks import attend_in_rows, by_lengths
from tilewright.kernels import native
from tilewright.kernels.attention import cpu, reference, xla
from tilewright.kernels.attention.xla import KeyValues
from tilewright.kernels.heads.cpu import norm_rotate
from tilewright.kernels.linear.cpu import Joint
from tilewright.kernels.masks import AttentionMask, causal_from, packed
from tilewright.kernels.operations import Heads, KeyValueRows, Norm, Scores
from tilewright.kernels.select import PLAIN, operations

seeds = st.integers(0, 2**31 - 1)
needs_native = pytest.mark.skipif(native.kernels().isa is None, reason=native.kernels().reason or "no kernels")
IMPLEMENTATIONS = [
    pytest.param(by_lengths(reference.attend), id="reference"),
    pytest.param(by_lengths(xla.attend), id="xla"),
    pytest.param(by_lengths(cpu.attend), id="cpu", marks=needs_native),
]


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def attention_float64(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Head by head and query by query, over the visible keys only; zeros where a query sees none."""
    (b, t, n, d), heads = q.shape, k.shape[1]
    mask = np.broadcast_to(mask, (b, t, k.shape[2]))
    out = np.zeros((b, t, n, d))
    for row, at, head in np.ndindex(b, t, n):
        is_visible = mask[row, at]
        if is_visible.any():
            keys = k[row, head // (n // heads)][is_visible].astype(np.float64)
            values = v[row, head // (n // heads)][is_visible].astype(np.float64)
            out[row, at, head] = softmax(keys @ q[row, at, head].astype(np.float64) / math.sqrt(d)) @ values
    return out


@st.composite
def attention_cases(draw: st.DrawFn):
    # Few sizes, so that most examples find their shapes compiled.
    heads, group = draw(st.sampled_from([(3, 1), (1, 4), (2, 3)]))
    b, t, s, half = draw(st.sampled_from([(1, 1, 9, 4), (3, 4, 6, 2)]))
    rng = np.random.default_rng(draw(seeds))
    q = normal(rng, b, t, heads * group, 2 * half) * 3
    k = normal(rng, b, heads, s, 2 * half)
    v = normal(rng, b, heads, s, 2 * half)
    mask = rng.random((draw(st.sampled_from([1, b])), t, s)) < draw(st.sampled_from([0.15, 0.6, 1.0]))
    return q, k, v, mask


@given(attention_cases())
def test_attention(case: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]):
    """Tests all group sizes and masks."""
    q, k, v, mask = (jnp.asarray(a) for a in case)
    actual = np.asarray(xla.attention(q, k, v, mask))
    np.testing.assert_allclose(actual, attention_float64(*case), atol=2e-5, rtol=0)


@given(attention_cases(), st.integers(1, 8))
def test_attention_over_parts_is_attention_over_their_union(
    case: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray], cut: int
):
    q, k, v, mask = (jnp.asarray(a) for a in case)
    cut = min(cut, k.shape[2])
    parts = [KeyValues(k[:, :, part], v[:, :, part], mask[:, :, part]) for part in (slice(cut), slice(cut, None))]
    np.testing.assert_allclose(xla.attention_over(q, parts), xla.attention(q, k, v, mask), atol=2e-6, rtol=0)


@pytest.mark.parametrize("run", [by_lengths(reference.attend), by_lengths(xla.attend)], ids=["reference", "xla"])
def test_a_query_that_sees_nothing_has_no_gradient(run):
    """Other queries keep the gradients that they have alone."""
    q, k, v, _, _ = prefix_case(np.random.default_rng(3), 1, 2, 1, 2, 5, 0, 8)
    grad = jax.jit(jax.grad(lambda q, k, v, lengths: jnp.sum(jnp.square(run(q, k, v, lengths))), argnums=(0, 1, 2)))
    dq, dk, dv = grad(q, k, v, jnp.asarray([[0, 4]]))
    alone = grad(q[:, 1:], k, v, jnp.asarray([[4]]))
    assert (np.asarray(dq)[:, 0] == 0).all()
    for both, one in zip((dq[:, 1:], dk, dv), alone, strict=True):
        np.testing.assert_allclose(both, one, atol=1e-6)


def test_hidden_keys_have_no_influence_at_all():
    rng = np.random.default_rng(1)
    q, k, v = (jnp.asarray(normal(rng, *shape)) for shape in ((1, 2, 4, 8), (1, 2, 5, 8), (1, 2, 5, 8)))
    mask = jnp.asarray([[[True, True, False, True, False]] * 2])
    hidden = ~mask[0, 0][None, None, :, None]
    out = xla.attention(q, k, v, mask)
    changed = xla.attention(q, jnp.where(hidden, 50.0, k), jnp.where(hidden, -1e6, v), mask)
    np.testing.assert_array_equal(out, changed)


def test_attention_of_bfloat16_stays_bfloat16_and_close():
    rng = np.random.default_rng(2)
    q, k, v = (jnp.asarray(normal(rng, *shape), jnp.bfloat16) for shape in ((2, 3, 4, 16), (2, 2, 6, 16), (2, 2, 6, 16)))
    mask = np.ones((1, 3, 6), bool)
    out = xla.attention(q, k, v, jnp.asarray(mask))
    assert out.dtype == jnp.bfloat16
    expected = attention_float64(np.asarray(q, np.float32), np.asarray(k, np.float32), np.asarray(v, np.float32), mask)
    np.testing.assert_allclose(out.astype(jnp.float32), expected, atol=0.03)


def test_group_rows_puts_a_group_beside_its_key_head():
    q = jnp.arange(2 * 3 * 6 * 2, dtype=jnp.float32).reshape(2, 3, 6, 2)
    rows = xla.group_rows(q, 2)
    assert rows.shape == (2, 2, 9, 2)
    for head, at in np.ndindex(6, 3):
        np.testing.assert_array_equal(rows[:, head // 3, head % 3 * 3 + at], q[:, at, head])
    np.testing.assert_array_equal(xla.ungroup_rows(rows, 3), q)


def prefix_case(rng: np.random.Generator, b: int, t: int, heads: int, group: int, s: int, extras: int, d: int):
    """Queries, a cache, lengths that include 0 and the whole cache, and block keys."""
    q = normal(rng, b, t, heads * group, d)
    k = normal(rng, b, heads, s, d)
    v = normal(rng, b, heads, s, d)
    lengths = rng.integers(0, s + 1, (b, t)).astype(np.int32)
    lengths[-1, -1] = 0
    lengths[0, 0] = s
    extra = (normal(rng, b, heads, extras, d), normal(rng, b, heads, extras, d)) if extras else None
    return q, k, v, lengths, extra


def prefix_expected(q, k, v, lengths, extra) -> np.ndarray:
    extras = 0 if extra is None else extra[0].shape[2]
    if extra is not None:
        k = np.concatenate([k, extra[0]], axis=2)
        v = np.concatenate([v, extra[1]], axis=2)
    at = np.arange(k.shape[2])
    mask = (at < lengths[..., None]) | (at >= k.shape[2] - extras)
    return attention_float64(q, k, v, mask)


@pytest.mark.parametrize("run", IMPLEMENTATIONS)
@given(
    seeds,
    st.sampled_from([(1, 1, 2, 2, 40, 0, 64), (3, 5, 1, 3, 17, 5, 16), (2, 16, 2, 2, 33, 16, 32), (1, 3, 3, 1, 1, 1, 48)]),
)
def test_attention_by_lengths(run, seed: int, sizes: tuple[int, ...]):
    q, k, v, lengths, extra = prefix_case(np.random.default_rng(seed), *sizes)
    arrays = None if extra is None else tuple(jnp.asarray(x) for x in extra)
    actual = jax.jit(run)(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), jnp.asarray(lengths), arrays)
    # Sums of up to `keys` products of a softmax's weights: the error grows with the root of their number.
    bound = 3e-6 * math.sqrt(k.shape[2] + sizes[5]) + 3e-6
    np.testing.assert_allclose(np.asarray(actual), prefix_expected(q, k, v, lengths, extra), atol=bound, rtol=0)


@needs_native
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_cpu_kernels_take_and_give_one_dtype_without_converts(dtype):
    case = linear_checks.Appended(dtype, 2, True, (2,)).draw(0)
    assert "stablehlo.convert" not in append.lower(**case).as_text()
    q, k, v = (x.astype(dtype) for x in prefix_case(np.random.default_rng(0), 1, 2, 2, 2, 40, 0, 32)[:3])
    lowered = jax.jit(by_lengths(cpu.attend)).lower(q, k, v, jnp.asarray([[3, 4]]))
    assert "stablehlo.convert" not in lowered.as_text()
    assert lowered.compile()(q, k, v, jnp.asarray([[3, 4]])).dtype == dtype


@needs_native
@given(seeds, st.sampled_from([jnp.float32, jnp.bfloat16]))
def test_a_query_gets_the_same_bits_alone(seed: int, dtype):
    """Compares a query alone, at another place in the block, with longer rows, and with another batch row."""
    q, k, v, lengths, extra = prefix_case(np.random.default_rng(seed), 2, 16, 2, 2, 50, 7, 32)
    assert extra is not None
    cast = [jnp.asarray(x, dtype) for x in (q, k, v, *extra)]
    run = jax.jit(lambda q, k, v, own_k, own_v, lengths: by_lengths(cpu.attend)(q, k, v, lengths, (own_k, own_v)))
    whole = np.asarray(run(*cast, jnp.asarray(lengths)).astype(jnp.float32))
    for row, at in ((0, 0), (0, 3), (1, 15)):
        one = [x[row : row + 1] for x in cast]
        alone = run(one[0][:, at : at + 1], *one[1:], jnp.asarray(lengths[row : row + 1, at : at + 1]))
        np.testing.assert_array_equal(np.asarray(alone.astype(jnp.float32))[0, 0], whole[row, at])


@needs_native
@given(seeds, st.sampled_from([jnp.float32, jnp.bfloat16]))
def test_a_node_of_a_tree_gets_the_bits_of_a_chain(seed: int, dtype):
    """Compares nodes, whose keys are beside the cache, with the last query of a chain of their ancestors, all of it cached."""
    if dtype == jnp.bfloat16 and native.kernels().isa == "amx":
        pytest.skip("tiles sum values in pairs of neighbouring keys")
    rng = np.random.default_rng(seed)
    nodes, d, context, slots = 12, 32, int(rng.integers(1, 60)), 80
    q, k, v = (jnp.asarray(rng.normal(size=shape), dtype) for shape in ((1, nodes, 4, d), *[(1, 2, slots, d)] * 2))
    own = [jnp.asarray(rng.normal(size=(1, 2, nodes, d)), dtype) for _ in range(2)]
    parents = [0, *(int(rng.integers(0, n)) for n in range(1, nodes))]
    above = np.eye(nodes, dtype=bool)
    for n in range(1, nodes):
        above[n] |= above[parents[n]]
    mask = AttentionMask(jnp.full((1, 1), context, jnp.int32), packed(jnp.asarray(above[None])))
    tree = jax.jit(cpu.attend)(q, KeyValueRows(k, v), mask, tuple(own))
    chain = jax.jit(by_lengths(cpu.attend))
    for n in range(nodes):
        path = np.flatnonzero(above[n])
        keys = [
            held.at[:, :, context : context + len(path)].set(new[:, :, path]) for held, new in zip((k, v), own, strict=True)
        ]
        alone = chain(q[:, n : n + 1], *keys, jnp.full((1, 1), context + len(path), jnp.int32))
        np.testing.assert_array_equal(np.asarray(alone[0, 0], np.float32), np.asarray(tree[0, n], np.float32))


@needs_native
def test_stale_entries_beyond_the_lengths_have_no_influence():
    q, k, v, lengths, _ = prefix_case(np.random.default_rng(5), 2, 4, 2, 2, 40, 0, 32)
    lengths = np.minimum(lengths, 21)
    run = jax.jit(by_lengths(cpu.attend))
    clean = run(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), jnp.asarray(lengths))
    k[:, :, 21:] = 1e6
    v[:, :, 21:] = -1e6
    np.testing.assert_array_equal(clean, run(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), jnp.asarray(lengths)))


@needs_native
def test_a_length_beyond_the_cache_is_refused():
    q, k, v, lengths, _ = prefix_case(np.random.default_rng(6), 1, 1, 1, 1, 16, 0, 16)
    with pytest.raises(jax.errors.JaxRuntimeError, match="out of range"):
        jax.block_until_ready(jax.jit(by_lengths(cpu.attend))(q, k, v, lengths + 1))


append = jax.jit(attend_in_rows, static_argnames="heads")


@needs_native
@pytest.mark.parametrize("case", linear_checks.APPENDED, ids=str)
def test_appending_and_attending_is_what_the_plain_operations_give(case: linear_checks.Appended):
    linear_checks.check_append(case)


@needs_native
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("norms", [False, True])
def test_norm_and_rotation_give_what_is_appended(dtype, norms: bool):
    """The drafter's block and the target's cache hold bitwise equal keys, also without queries."""
    case = linear_checks.Appended(dtype, 5, norms, (5, 5)).draw(1) | {"start": jnp.zeros(2, jnp.int32)}
    rest = {name: case[name] for name in ("q_norm", "k_norm", "cos", "sin")}
    run = jax.jit(partial(norm_rotate, kv_heads=2, head_dim=48, eps=1e-5), static_argnames="heads")
    q, k, v = run(case["qkv"], heads=6, **rest)
    out, k_cache, v_cache = append(**case)
    np.testing.assert_array_equal(k, k_cache[:, :, :5])
    np.testing.assert_array_equal(v, v_cache[:, :, :5])
    lengths = jnp.tile(jnp.arange(1, 6), (2, 1))
    np.testing.assert_array_equal(jax.jit(by_lengths(cpu.attend))(q, k, v, lengths).reshape(2, 5, -1), out)
    none, k_only, v_only = run(case["qkv"][..., 6 * 48 :], heads=0, **rest)
    assert none.shape == (2, 5, 0, 48)
    np.testing.assert_array_equal(k_only, k)
    np.testing.assert_array_equal(v_only, v)


@needs_native
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_values_with_a_norm_that_are_keys(dtype):
    """Gemma 4's heads of 512: values are the keys before norm and rotation, divided by their root mean square."""
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(normal(rng, 2, 5, heads * 512), dtype) for heads in (4, 2))
    angles = rng.uniform(0, 6, (2, 5, 256))
    rope = (jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32))
    norms = [Norm(jnp.asarray(normal(rng, 512), dtype), 1e-5) for _ in range(2)]
    spec = Heads(512, norms[0], norms[1], rope, Scores(1 / 64), None, Norm(jnp.ones(512, dtype), 1e-5), keys_are_values=True)
    held = KeyValueRows(*(jnp.zeros((2, 2, 9, 512), dtype) for _ in range(2)))
    mask = causal_from(jnp.asarray([3, 4]), counts=jnp.asarray([5, 2]))
    runs = []
    for ops, projection in ((operations(), Joint(jnp.concatenate([q, k], -1), (2048, 1024))), (PLAIN, (q, k))):
        run = jax.jit(lambda p, cache, ops=ops: (ops.attend_projected(ops, p, spec, cache, mask), ops.heads(p, spec)[2]))
        (out, cache), values = run(projection, held)
        found = [out[0], out[1, :2], cache.k, cache.v, values]
        runs.append([np.asarray(part.astype(jnp.float32)) for part in found])
    for found, expected in zip(*runs, strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 if dtype == jnp.float32 else 0.06)
    keys = np.asarray(k.astype(jnp.float32), np.float64).reshape(2, 5, 2, 512)
    expected = keys / np.sqrt(np.mean(keys**2, axis=-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(runs[0][4].transpose(0, 2, 1, 3), expected, rtol=0, atol=1e-5 if dtype == jnp.float32 else 0.02)
    np.testing.assert_array_equal(runs[0][3][0, :, 3:8], runs[0][4][0])


@needs_native
def test_entries_are_appended_without_queries():
    case = linear_checks.Appended(jnp.bfloat16, 5, True, (5, 2)).draw(2)
    out, *caches = linear_checks.run_append(case | {"qkv": case["qkv"][..., 6 * 48 :]}, heads=0)
    assert out.shape == (2, 5, 0)
    for alone, beside in zip(caches, append(**case)[1:], strict=True):
        np.testing.assert_array_equal(alone, beside)


@needs_native
def test_caches_are_written_in_place():
    """No instruction of a loop over donated caches copies one, and the buffers stay the same."""
    case = linear_checks.Appended(jnp.bfloat16, 1, True, (1, 1)).draw(0) | {"start": jnp.asarray([0, 50])}
    rest = {name: x for name, x in case.items() if not name.endswith("cache")}

    @partial(jax.jit, donate_argnums=(0, 1))
    def run(k: jax.Array, v: jax.Array, rest: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        def body(i: jax.Array, caches: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            place = {"k_cache": caches[0], "v_cache": caches[1], "start": rest["start"] + i}
            return append(**(rest | place))[1:]

        return jax.lax.fori_loop(0, 1 + rest["count"][0], body, (k, v))

    compiled = run.lower(case["k_cache"], case["v_cache"], rest).compile()
    text = compiled.as_text() or ""
    assert "tilewright_attend_projected" in text
    assert not [line for line in text.splitlines() if "copy(" in line and "bf16[2,2,60,48]" in line]
    before = [case[name].unsafe_buffer_pointer() for name in ("k_cache", "v_cache")]
    assert [x.unsafe_buffer_pointer() for x in compiled(case["k_cache"], case["v_cache"], rest)] == before


@needs_native
@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"start": jnp.asarray([58, 0])}, "5 entries from 58 on do not fit a cache of 60"),
        ({"start": jnp.asarray([-1, 0])}, "5 entries from -1 on do not fit"),
        ({"count": jnp.asarray([6, 0])}, "a count is out of range: 6"),
        ({"count": jnp.asarray([0, -1])}, "a count is out of range: -1"),
        ({"k_norm": jnp.ones(48, jnp.bfloat16)}, "in one type"),
    ],
)
def test_what_cannot_be_appended_is_refused(change, complaint: str):
    case = linear_checks.Appended(jnp.float32, 5, True, (5, 5)).draw(0) | change
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=complaint):  # the latter from a program that ran at once
        jax.block_until_ready(append(**case))


@needs_native
def test_a_row_that_keeps_nothing_may_start_anywhere():
    case = linear_checks.Appended(jnp.float32, 5, True, (5, 0)).draw(0)
    expected = append(**case)
    for start in (-7, 60, 2**31 - 1):
        moved = append(**(case | {"start": case["start"].at[1].set(start)}))
        jax.tree.map(np.testing.assert_array_equal, moved, expected)
