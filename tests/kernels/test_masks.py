"""Attention under masks of any form: each implementation against NumPy in float64, over rows, pages and block keys."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.paged_checks import cut
from kernels.test_attention import needs_native, normal, seeds
from reference import attention_masks_numpy as oracle
from tilewright.compiled.aot import compile_for
from tilewright.kernels import select
from tilewright.kernels.attention import cpu, pallas_tpu, reference, xla
from tilewright.kernels.masks import AttentionMask, depths, packed, unpacked
from tilewright.kernels.operations import KeyValueRows, PagedCache, Quantised
from tilewright.kernels.paged.quantise import dequantise, quantise

TREE = [-1, 0, 0, 1, 1, 2, 4, 4]
"""Parents of the eight nodes of a tree."""
IMPLEMENTATIONS = {
    "reference": reference.attend,
    "xla": xla.attend,
    "cpu": cpu.attend,
    "tpu": partial(pallas_tpu.attend, interpret=True),
}
NAMES = ["reference", "xla", pytest.param("cpu", marks=needs_native), "tpu"]


def tree_bits(rows: int) -> np.ndarray:
    """The tree of `TREE`: each node sees its ancestors and itself."""
    bits = np.zeros((rows, len(TREE), 1), np.uint32)
    for node, parent in enumerate(TREE):
        bits[:, node, 0] = (bits[0, parent, 0] if parent >= 0 else 0) | 1 << node
    return bits


def chosen(form: str, b: int, t: int) -> dict[str, Any]:
    """Blocks, segments, counts and windows of a mask for `b` rows of `t` queries, by name."""
    parts: dict[str, Any] = {"block": None}
    for word in form.split():
        if word in ("causal", "full"):
            parts["block"] = word
        elif word == "tree":
            parts["block"] = tree_bits(b)
        elif word == "segments":
            parts["segment_ids"] = np.asarray([[7] * 3 + [2] * (t - 3)] * (b - 1) + [[4] * t], np.int32)
        elif word == "counts":
            parts["counts"] = np.asarray([t, *np.arange(b - 1)], np.int32)
        elif word == "window":
            parts["window"] = 3
        elif word == "wide":
            parts["window"] = 21
        elif word == "shared":
            parts["shared_window"] = True
        else:
            assert word == "context"
    return parts


CASES = [
    "context",
    "context wide",
    "context counts",
    "causal",
    "causal counts window",
    "causal wide",
    "full",
    "full counts",
    "full window",
    "full window shared",
    "full counts wide shared",
    "tree",
    "tree counts",
    "tree window",
    "tree wide",
    "tree wide shared",
    "causal segments",
    "full segments",
    "causal segments window counts",
    "tree segments",
]


def compare(
    name: str,
    form: dict[str, Any],
    *,
    block_kv: bool = False,
    pages: bool = False,
    shared: int = 1,
    each: bool = False,
    dtype: Any = jnp.float32,
    seed: int = 0,
) -> None:
    """One implementation against the oracle; what no query sees holds NaN.

    Args:
        own: the block has keys and values of its own.
        pages: the cache is in pages of 16 entries.
        shared: rows of queries that share a row of the cache.
        each: every query has a context of its own.
    """
    rng = np.random.default_rng(seed)
    t = 8
    d = 128 if name == "tpu" else 32
    b = 2 * shared
    s = 64
    q = normal(rng, b, t, 4, d)
    q, *cache = (
        np.asarray(jnp.asarray(x, dtype).astype(jnp.float32)) for x in (q, normal(rng, 2, 2, s, d), normal(rng, 2, 2, s, d))
    )
    mine = None
    if block_kv:
        mine = tuple(np.asarray(jnp.asarray(normal(rng, b, 2, t, d), dtype).astype(jnp.float32)) for _ in range(2))
    context = rng.integers(0, s - t + 1, (b, t if each else 1)).astype(np.int32)
    context[0] = s - t
    mask = oracle.Mask(np.broadcast_to(context, (b, t)), **form)
    expected = oracle.attend(q, cache, mask, mine)
    # What no query sees is spoiled: in the cache by row, and among the block keys.
    is_visible = np.zeros((2, s), bool)
    seen_own = np.zeros((b, t), bool)
    for row, query in np.ndindex(b, t):
        cached, block = oracle.seen_keys(mask, row, query, t, t if block_kv else None)
        is_visible[row // shared, cached] = True
        seen_own[row, block] = True
    spoiled = [np.where(is_visible[:, None, :, None], part, np.nan) for part in cache]
    if name == "reference":
        spoiled[0] = cache[0]
    needed = np.asarray([1 + np.max(np.flatnonzero(each), initial=-1) for each in is_visible])
    held: Any = KeyValueRows(*(jnp.asarray(part, dtype) for part in spoiled))
    if pages:
        pool, table = cut(seed, (held.k, held.v), 16, needed)
        held = PagedCache(pool, jnp.asarray(table))
    given = None
    if mine is not None:
        keys, values = (np.where(seen_own[:, None, :, None], part, np.nan) for part in mine)
        given = jnp.asarray(mine[0] if name == "reference" else keys, dtype), jnp.asarray(values, dtype)
    arrays = jax.tree.map(jnp.asarray, AttentionMask(context, **form))
    run = IMPLEMENTATIONS[name]
    actual = jax.jit(run)(jnp.asarray(q, dtype), held, arrays, given)
    assert actual.dtype == dtype
    tolerance = 5e-6 if dtype == jnp.float32 else 0.02
    np.testing.assert_allclose(np.asarray(actual, np.float32), expected, rtol=0, atol=tolerance)


def runs(name: str, form: str) -> bool:
    return not (name == "tpu" and ("window" in form or "wide" in form))  # which are XLA's


@pytest.mark.parametrize("block_kv", [False, True], ids=["cached", "own"])
@pytest.mark.parametrize("form", CASES)
@pytest.mark.parametrize("name", NAMES)
def test_masks_over_rows(name: str, form: str, block_kv: bool):
    if runs(name, form):
        compare(name, chosen(form, 2, 8), block_kv=block_kv)


@pytest.mark.parametrize("block_kv", [False, True], ids=["cached", "own"])
@pytest.mark.parametrize("form", CASES)
@pytest.mark.parametrize("name", NAMES)
def test_masks_over_pages(name: str, form: str, block_kv: bool):
    if runs(name, form):
        compare(name, chosen(form, 2, 8), block_kv=block_kv, pages=True)


@pytest.mark.parametrize("form", ["tree", "causal segments", "tree wide"])
@pytest.mark.parametrize("name", ["xla", pytest.param("cpu", marks=needs_native)])
def test_masks_over_several_blocks_of_pages(name: str, form: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(xla, "BLOCK_ENTRIES", 32)
    compare(name, chosen(form, 2, 8), pages=True)
    compare(name, chosen(form, 2, 8), pages=True, block_kv=True)


@pytest.mark.parametrize("pages", [False, True], ids=["rows", "pages"])
@pytest.mark.parametrize("form", ["full", "tree", "causal segments counts", "full wide"])
@pytest.mark.parametrize("name", NAMES)
def test_rows_of_queries_share_a_cache(name: str, form: str, pages: bool):
    if runs(name, form):
        compare(name, chosen(form, 6, 8), block_kv=True, pages=pages, shared=3)
        compare(name, chosen(form, 6, 8), pages=pages, shared=3)


@pytest.mark.parametrize("form", ["context", "context window", "causal", "tree", "tree window", "full segments"])
@pytest.mark.parametrize("name", NAMES)
def test_every_query_has_a_context_of_its_own(name: str, form: str):
    if runs(name, form):
        compare(name, chosen(form, 2, 8), each=True)
        compare(name, chosen(form, 2, 8), each=True, block_kv=True)


@pytest.mark.parametrize("form", CASES)
@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_stays_close(name: str, form: str):
    if runs(name, form):
        compare(name, chosen(form, 2, 8), block_kv=True, dtype=jnp.bfloat16)
        compare(name, chosen(form, 2, 8), pages=True, dtype=jnp.bfloat16)


@st.composite
def masks(draw: st.DrawFn) -> dict[str, Any]:
    """Any mask of two rows of eight queries."""
    rng = np.random.default_rng(draw(seeds))
    block = draw(st.sampled_from([None, "causal", "full", "bits"]))
    if block == "bits":
        block = rng.integers(0, 256, (2, 8, 1)).astype(np.uint32)
    segments = draw(st.booleans())
    return {
        "block": block,
        "segment_ids": np.sort(rng.integers(0, 3, (2, 8))).astype(np.int32) if segments else None,
        "counts": rng.integers(0, 9, 2).astype(np.int32) if draw(st.booleans()) else None,
        "window": draw(st.sampled_from([None, 2, 20])),
    }


@pytest.mark.parametrize("name", ["xla", pytest.param("cpu", marks=needs_native)])
def test_a_row_whose_queries_see_no_cached_entry(name: str):
    """The window ends behind the context, as every query stands deep in the tree; the cached entries hold NaN."""
    block = np.full((2, 8, 1), 0b111, np.uint32)
    block[0, 0] = 1
    compare(name, {"block": block, "window": 2}, pages=True)


@pytest.mark.parametrize("name", ["xla", pytest.param("cpu", marks=needs_native)])
@given(masks(), st.booleans(), st.booleans(), seeds)
def test_random_masks(name: str, form: dict[str, Any], block_kv: bool, pages: bool, seed: int):
    compare(name, form, block_kv=block_kv, pages=pages, seed=seed)


@given(seeds, st.integers(1, 70))
def test_bits_are_packed_and_unpacked(seed: int, size: int):
    is_visible = jnp.asarray(np.random.default_rng(seed).random((2, 3, size)) < 0.5)
    bits = packed(is_visible)
    assert (bits.dtype, bits.shape) == (jnp.uint32, (2, 3, -(-size // 32)))
    np.testing.assert_array_equal(unpacked(bits, size), is_visible)
    np.testing.assert_array_equal(depths(bits), np.sum(np.asarray(is_visible), axis=-1) - 1)


@needs_native
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_pages_give_the_bits_of_rows(dtype: Any):
    """Tests a tree, and rows of queries that share a row of the cache."""
    rng = np.random.default_rng(1)
    cache = KeyValueRows(*(jnp.asarray(normal(rng, 2, 2, 64, 32), dtype) for _ in range(2)))
    pool, table = cut(0, (cache.k, cache.v), 16)
    q = jnp.asarray(normal(rng, 4, 8, 4, 32), dtype)
    mask = AttentionMask(jnp.asarray([[50], [33], [0], [17]]), jnp.asarray(tree_bits(4)), window=30)
    run = jax.jit(cpu.attend)
    np.testing.assert_array_equal(run(q, cache, mask), run(q, PagedCache(pool, jnp.asarray(table)), mask))
    apart = KeyValueRows(*(jnp.repeat(part, 2, axis=0) for part in cache))
    np.testing.assert_array_equal(run(q, cache, mask), run(q, apart, mask))


def test_a_tree_over_keys_and_values_in_8_bits():
    """The bundle's general path dequantises the entries."""
    rng = np.random.default_rng(2)
    cache = [jnp.asarray(normal(rng, 2, 2, 64, 32)) for _ in range(2)]
    pool, table = cut(0, (cache[0], cache[1]), 16)
    held = jax.tree.map(quantise, pool)
    exact = [np.asarray(dequantise(quantise(part), jnp.float32)) for part in cache]
    context = np.asarray([[50], [9]], np.int32)
    q = normal(rng, 2, 8, 4, 32)
    out = select.operations().attend(
        jnp.asarray(q), PagedCache(held, jnp.asarray(table)), AttentionMask(jnp.asarray(context), jnp.asarray(tree_bits(2)))
    )
    assert isinstance(held.k, Quantised)
    mask = oracle.Mask(np.broadcast_to(context, (2, 8)), tree_bits(2))
    np.testing.assert_allclose(out, oracle.attend(q, exact, mask), rtol=0, atol=5e-6)


@pytest.mark.parametrize("form", ["causal", "causal segments", "full segments counts", "causal window", "full counts", "tree"])
def test_sequences_without_a_cache(form: str, monkeypatch: pytest.MonkeyPatch):
    """All queries at once and in blocks give the same values and gradients."""
    rng = np.random.default_rng(3)
    q, k, v = normal(rng, 2, 8, 4, 32), normal(rng, 2, 2, 8, 32), normal(rng, 2, 2, 8, 32)
    parts = chosen(form, 2, 8)
    expected = oracle.attend(q, None, oracle.Mask(np.zeros((2, 8), np.int32), **parts), (k, v))
    mask = jax.tree.map(jnp.asarray, AttentionMask(np.zeros((2, 1), np.int32), **parts))
    due = jnp.asarray(normal(rng, 2, 8, 4, 32))

    def run(q: Any, k: Any, v: Any) -> Any:
        return jnp.sum(due * xla.attend(q, None, mask, (k, v)))

    np.testing.assert_allclose(
        xla.attend(jnp.asarray(q), None, mask, (jnp.asarray(k), jnp.asarray(v))), expected, rtol=0, atol=5e-6
    )
    whole = jax.value_and_grad(run, (0, 1, 2))(q, k, v)
    monkeypatch.setattr(xla, "WHOLE", 3)
    monkeypatch.setattr(xla, "QUERIES", 3)
    apart = jax.value_and_grad(run, (0, 1, 2))(q, k, v)
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(apart), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


def test_long_sequences_hold_no_scores_of_all_queries():
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, 8192, 2, 16), (1, 1, 8192, 16), (1, 1, 8192, 16))]

    def loss(q: Any, k: Any, v: Any) -> Any:
        return jnp.sum(jnp.square(xla.attend(q, None, AttentionMask(jnp.zeros((1, 1), jnp.int32), "causal"), (k, v))))

    compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*shapes).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 2 * 8192 * 8192 * 4  # of one head's scores, twice


def test_a_window_needs_bits_of_all_keys():
    q = jnp.zeros((1, 2, 2, 16))
    block_kv = jnp.zeros((1, 2, 3, 16))
    mask = AttentionMask(jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 2, 1), jnp.uint32), window=2)
    with pytest.raises(ValueError, match="expected bits for all 3 positions of the block, as the mask has a window; found 2"):
        xla.attend(q, None, mask, (block_kv, block_kv))


@pytest.mark.tpu
@pytest.mark.parametrize("form", ["tree", "full segments"])
def test_masks_compile_for_a_tpu(form: str):
    shaped = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    cache = KeyValueRows(shaped((2, 8, 1152, 128)), shaped((2, 8, 1152, 128)))
    mask = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), AttentionMask(np.zeros((2, 1), np.int32), **chosen(form, 2, 8))
    )
    compiled = compile_for("v5e:1x1", pallas_tpu.attend, shaped((2, 8, 32, 128)), cache, mask)
    assert any("tpu_custom_call" in name for name in compiled.without_cycles)
