"""Pages: each implementation against NumPy, the CPU kernels bit for bit against caches in one block, and what is refused."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental.pallas.ops.tpu import ragged_paged_attention
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from kernels import linear_checks, paged_checks
from kernels.attention_checks import attend_in_pages, over_pages
from kernels.paged_checks import cut, spare, together
from kernels.test_attention import needs_native, prefix_case, prefix_expected, seeds
from tilewright.compiled.aot import compile_for, tpu_topology
from tilewright.kernels.attention import cpu
from tilewright.kernels.attention import reference as attention_reference
from tilewright.kernels.attention import xla as attention_xla
from tilewright.kernels.bundles.tpu import TPU
from tilewright.kernels.masks import causal_from
from tilewright.kernels.operations import PLAIN_SCORES, UNMAPPED, KeyValuePages, KeyValueRows, PagedCache, Scores
from tilewright.kernels.paged import pallas_tpu, reference, xla
from tilewright.kernels.write import cpu as write_cpu

DTYPES = st.sampled_from([jnp.float32, jnp.bfloat16])
ENTRIES = st.sampled_from([16, 32])
xla_attention = over_pages(attention_xla.attend)


def reference_append(pool: KeyValuePages, table: Any, k: Any, v: Any, start: Any, count: Any) -> KeyValuePages:
    return KeyValuePages(*(reference.write(pages, table, new, start, count) for pages, new in zip(pool, (k, v), strict=True)))


def tpu_attention(q: Any, pool: KeyValuePages, *rest: Any) -> Any:
    return over_pages(TPU.attend)(q, paired(pool), *rest)


def cpu_write(pool: KeyValuePages, table: Any, *rest: Any) -> KeyValuePages:
    return write_cpu.write(PagedCache(pool, table), *rest).pool


def paired(pool: KeyValuePages) -> pallas_tpu.PairedPages:
    """The pool in the layout of the TPU's kernel."""
    pages, heads, entries, d = pool.k.shape
    empty = pallas_tpu.pages(pages, heads, entries, d, pool.k.dtype)
    start = jnp.zeros(pages, jnp.int32)
    count = jnp.full(pages, entries, jnp.int32)
    return empty.write(jnp.arange(pages)[:, None], *pool, start, count)


def apart(pool: pallas_tpu.PairedPages) -> KeyValuePages:
    """The pool's keys and values, each for itself."""
    return KeyValuePages(*pallas_tpu.in_rows(pool, jnp.arange(pool.kv.shape[0])[:, None]))


APPENDS = [
    pytest.param(reference_append, id="reference"),
    pytest.param(xla.write, id="xla"),
    pytest.param(cpu_write, id="cpu", marks=needs_native),
    pytest.param(lambda pool, *rest: apart(paired(pool).write(*rest)), id="tpu"),
]
ATTENTIONS = [
    pytest.param(over_pages(attention_reference.attend), id="reference"),
    pytest.param(xla_attention, id="xla"),
    pytest.param(over_pages(cpu.attend), id="cpu", marks=needs_native),
    pytest.param(tpu_attention, id="tpu"),
]


@pytest.mark.parametrize("append", APPENDS)
@given(seeds, ENTRIES, DTYPES)
def test_only_the_counted_entries_are_written(append: Any, seed: int, entries: int, dtype: Any):
    """At each row's own positions, to the end of its last page; rows without any page are left alone wherever they begin."""
    rng = np.random.default_rng(seed)
    caches = [jnp.asarray(rng.standard_normal((4, 2, 2 * entries, 4)), dtype) for _ in range(2)]
    new = [jnp.asarray(rng.standard_normal((4, 2, 7, 4)), dtype) for _ in range(2)]
    count = np.asarray([7, rng.integers(0, 8), rng.integers(1, 8), 0], np.int32)
    start = (rng.random(4) * (2 * entries - count + 1)).astype(np.int32)
    start[0] = rng.choice([0, entries - 3, 2 * entries - 7])
    start[3] = rng.choice([-4, 5, 2 * entries])
    pool, table = cut(seed, (caches[0], caches[1]), entries, np.where(count > 0, start + count, 0))
    after: Any = jax.jit(append)(pool, table, *new, start, count)
    for before, pages, added in zip(pool, after, new, strict=True):
        assert pages.dtype == dtype
        want = together(before, table)
        for row in range(4):
            positions = slice(start[row], start[row] + count[row]) if count[row] else slice(0)
            want[row, :, positions] = np.asarray(added.astype(jnp.float32))[row, :, : count[row]]
        np.testing.assert_array_equal(together(pages, table), want)
        assert np.isnan(spare(pages, table)).all()


@pytest.mark.parametrize("append", [APPENDS[0], APPENDS[1], APPENDS[3]])
def test_without_a_page_nothing_is_written(append: Any):
    """Where nothing can be refused: not before the first position, behind the last one, or where the row has no page."""
    pool = KeyValuePages(*(jnp.zeros((4, 1, 16, 2)) for _ in range(2)))
    table = np.asarray([[2, UNMAPPED], [UNMAPPED, 3], [0, 1]], np.int32)
    new = jnp.ones((3, 1, 20, 2))
    after = jax.jit(append)(pool, table, new, new, np.asarray([10, 4, 20], np.int32), np.asarray([20, 20, 20], np.int32))
    want = np.zeros((4, 16), np.float32)
    want[2, 10:] = 1
    want[3, :8] = 1
    want[1, 4:] = 1
    for pages in after:
        np.testing.assert_array_equal(pages, np.broadcast_to(want[:, None, :, None], pages.shape))


@pytest.mark.parametrize("attend", ATTENTIONS)
@given(seeds, st.sampled_from([(1, 1, 2, 2, 96, 0, 64), (3, 5, 1, 3, 32, 5, 16), (2, 16, 2, 2, 64, 16, 32)]), ENTRIES)
def test_attention_over_pages(attend: Any, seed: int, sizes: tuple[int, ...], entries: int):
    """Rows have no more pages than their queries see; a row may see nothing."""
    q, k, v, lengths, extra = prefix_case(np.random.default_rng(seed), *sizes)
    pool, table = cut(seed, (k, v), entries, lengths.max(axis=1))
    arrays = None if extra is None else tuple(jnp.asarray(x) for x in extra)
    actual = jax.jit(attend)(jnp.asarray(q), pool, table, jnp.asarray(lengths), arrays)
    bound = 3e-6 * math.sqrt(k.shape[2] + sizes[5]) + 3e-6
    np.testing.assert_allclose(np.asarray(actual), prefix_expected(q, k, v, lengths, extra), atol=bound, rtol=0)


BY_BLOCKS = [ATTENTIONS[1], ATTENTIONS[3]]
"""Implementations that read a long table block by block."""


@pytest.mark.parametrize("attend", BY_BLOCKS)
@pytest.mark.parametrize("sizes", [(3, 1, 2, 3, 1280, 0, 64), (3, 5, 2, 2, 1088, 7, 16)])
def test_attention_over_several_blocks(attend: Any, sizes: tuple[int, ...]):
    """Of a table that is no multiple of a block; a row without any entry; what no row sees holds NaN."""
    rng = np.random.default_rng(sum(sizes))
    q, k, v, lengths, extra = prefix_case(rng, *sizes)
    lengths[1] = 0
    pool, table = cut(0, (k, v), 64, lengths.max(axis=1))
    arrays = None if extra is None else tuple(jnp.asarray(x) for x in extra)
    actual = jax.jit(attend)(jnp.asarray(q), pool, table, jnp.asarray(lengths), arrays)
    np.testing.assert_allclose(np.asarray(actual), prefix_expected(q, k, v, lengths, extra), atol=1e-4, rtol=0)


@pytest.mark.parametrize("attend", BY_BLOCKS)
@pytest.mark.parametrize(("longest", "blocks"), [(0, 0), (1, 1), (512, 1), (513, 2), (1500, 3)])
def test_blocks_behind_the_longest_row_are_not_read(monkeypatch: pytest.MonkeyPatch, attend: Any, longest: int, blocks: int):
    """Runs 64 blocks outside of jit, so that loop iterations can be counted."""
    read: list[np.ndarray] = []
    for module in (xla, pallas_tpu):

        def is_visible(pages: Any, table: Any, in_rows: Any = module.in_rows) -> Any:
            read.append(np.asarray(table))
            return in_rows(pages, table)

        monkeypatch.setattr(module, "in_rows", is_visible)
    pool = KeyValuePages(*(jnp.ones((4, 1, 64, 128)) for _ in range(2)))
    table = np.full((2, 512), UNMAPPED, np.int32)
    lengths = np.asarray([[longest], [0]], np.int32)
    table[0, : -(-longest // 64)] = 2
    with jax.disable_jit():
        attend(jnp.ones((2, 1, 2, 128)), pool, jnp.asarray(table), jnp.asarray(lengths))
    of_keys = read[:: 2 if attend is xla_attention else 1]  # XLA's values come in a call of their own
    assert [part.shape for part in of_keys] == [(2, 8)] * blocks
    assert np.concatenate([table[:, :0], *of_keys], axis=1).tolist() == table[:, : 8 * blocks].tolist()


def test_the_program_has_room_for_a_block_and_not_for_the_whole_table():
    """Checks single arrays and their total."""

    def compiled(columns: int) -> Any:
        shapes = ((3, 4, 8, 64), jnp.float32), ((3, columns), jnp.int32), ((3, 4), jnp.int32)
        q, table, lengths = (jax.ShapeDtypeStruct(*each) for each in shapes)
        pool = jax.eval_shape(lambda: xla.pages(9, 2, 64, 64, jnp.float32))
        return jax.jit(xla_attention).lower(q, pool, table, lengths).compile()

    short = compiled(16)
    long = compiled(512)
    assert "[3,2,32768,64]" not in (long.as_text() or "")
    assert long.memory_analysis().temp_size_in_bytes < 1.1 * short.memory_analysis().temp_size_in_bytes


def test_a_row_gets_the_same_bits_beside_longer_ones():
    rng = np.random.default_rng(0)
    q, k, v, _, _ = prefix_case(rng, 2, 3, 2, 2, 2048, 0, 64)
    pool, table = cut(0, (k, v), 64)
    attend = jax.jit(xla_attention)
    found = [
        np.asarray(attend(jnp.asarray(q), pool, table, np.asarray([[90, 91, 92], [other] * 3], np.int32)))[0]
        for other in (1, 600, 2048)
    ]
    assert (found[0] == found[1]).all()
    assert (found[0] == found[2]).all()


@needs_native
@given(seeds, ENTRIES, DTYPES, st.sampled_from([0, 7]))
def test_the_cpu_kernel_gives_the_bits_of_a_cache_in_one_block(seed: int, entries: int, dtype: Any, extras: int):
    paged_checks.check_attention(dtype, entries, extras, seed)


@needs_native
@pytest.mark.parametrize("entries", [16, 32, 96])
@pytest.mark.parametrize("case", linear_checks.APPENDED, ids=str)
def test_appending_and_attending_gives_the_bits_of_a_cache_in_one_block(case: linear_checks.Appended, entries: int):
    for seed in range(3):
        paged_checks.check_appended(replace(case, capacity=96).draw(seed), entries, seed)


@needs_native
def test_pools_are_written_in_place():
    case = replace(linear_checks.Appended(jnp.bfloat16, 1, True, (1, 1)), capacity=64).draw(0)
    pool, table = cut(0, (case["k_cache"], case["v_cache"]), 16)
    rest = {name: x for name, x in case.items() if not name.endswith("cache")} | {"table": jnp.asarray(table)}

    @partial(jax.jit, donate_argnums=0)
    def run(pool: KeyValuePages, rest: dict[str, Any]) -> KeyValuePages:
        fresh = jnp.ones((2, 2, 1, 48), jnp.bfloat16)

        def body(i: Any, pool: KeyValuePages) -> KeyValuePages:
            pool = attend_in_pages(pool=pool, **(rest | {"start": rest["start"] % 32 + i}))[1]
            return cpu_write(pool, rest["table"], fresh, fresh, rest["start"] % 32 + i, rest["count"])

        return jax.lax.fori_loop(0, 1 + rest["count"][0], body, pool)

    compiled = run.lower(pool, rest).compile()
    assert not [line for line in (compiled.as_text() or "").splitlines() if "copy(" in line and "bf16[11,2,16,48]" in line]
    before = [pages.unsafe_buffer_pointer() for pages in pool]
    assert [pages.unsafe_buffer_pointer() for pages in compiled(pool, rest)] == before


@needs_native
@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"start": jnp.asarray([60, 0])}, "5 entries from 60 on do not fit a cache of 64"),
        ({"start": jnp.asarray([-1, 0])}, "5 entries from -1 on do not fit"),
        ({"count": jnp.asarray([6, 0])}, "a count is out of range: 6"),
        ({"table": np.asarray([[0, 1, 2, 3], [4, 5, UNMAPPED, 7]], np.int32)}, "row 1 has no page for its entry 32"),
        ({"table": np.asarray([[UNMAPPED, 1, 2, 3], [4, 5, 6, 7]], np.int32)}, "row 0 has no page for its entry 0"),
        ({"table": np.asarray([[0, 1, 11, 3], [4, 5, 6, 7]], np.int32)}, "row 0 names page 11 of 11"),
        ({"pool": KeyValuePages(*(jnp.zeros((4, 2, 40, 48)) for _ in range(2)))}, "shapes do not fit"),
    ],
)
def test_what_cannot_be_appended_is_refused(change: dict[str, Any], complaint: str):
    case = replace(linear_checks.Appended(jnp.float32, 5, True, (5, 5)), capacity=64).draw(0)
    pool, table = cut(0, (case["k_cache"], case["v_cache"]), 16)
    rest = {name: x for name, x in case.items() if not name.endswith("cache")}
    operands = rest | {"start": jnp.asarray([40, 30]), "pool": pool, "table": table} | change
    run = jax.jit(attend_in_pages)
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=complaint):
        jax.block_until_ready(run(**operands))


@needs_native
def test_what_cannot_be_seen_or_written_is_refused():
    pool = KeyValuePages(*(jnp.zeros((4, 1, 16, 16)) for _ in range(2)))
    table = np.asarray([[2, UNMAPPED]], np.int32)
    q = jnp.ones((1, 1, 1, 16))
    new = jnp.ones((1, 1, 4, 16))
    attend = jax.jit(over_pages(cpu.attend))
    append = jax.jit(cpu_write)
    for length, complaint in ((17, "row 0 has no page for its entry 16"), (33, "a length is out of range: 33")):
        with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=complaint):
            jax.block_until_ready(attend(q, pool, table, np.asarray([[length]], np.int32)))
    for start, complaint in ((14, "row 0 has no page for its entry 16"), (30, "4 entries from 30 on do not fit a cache of 32")):
        with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=complaint):
            jax.block_until_ready(append(pool, table, new, new, np.asarray([start]), np.asarray([4])))


def jax_reference(q: Any, kv_pages: Any, kv_lens: Any, page_indices: Any, cu_q_lens: Any, num_seqs: Any, **rest: Any) -> Any:
    """JAX's reference implementation of its kernel, which interpret mode does not support."""
    operands = q, kv_pages, kv_lens, page_indices, cu_q_lens, num_seqs
    kernel.dynamic_validate_inputs(*operands, **rest)
    meant = {name: rest[name] for name in ("sm_scale", "sliding_window", "soft_cap")}
    out = kernel.ref_ragged_paged_attention(*operands, **meant)
    return jnp.concatenate([out, jnp.full((q.shape[0] - out.shape[0], *out.shape[1:]), jnp.nan, out.dtype)])


@pytest.mark.parametrize(
    ("heads", "counts"),
    [
        *(((4, 2, 128), counts) for counts in ((3, 0, 1), (0, 0, 0), (4, 4, 4))),
        *((heads, (3, 0, 1)) for heads in ((9, 3, 64), (8, 2, 64), (3, 1, 64), (4, 4, 96), (10, 5, 32))),
    ],
    ids=str,
)
@pytest.mark.parametrize("rule", [(PLAIN_SCORES, None), (Scores(scale=0.2, softcap=3.0), 20)], ids=["plain", "window"])
def test_queries_reach_the_ragged_kernel_as_it_takes_them(
    monkeypatch: pytest.MonkeyPatch, heads: tuple[int, int, int], counts: tuple[int, ...], rule: tuple[Scores, int | None]
):
    """Tests heads of the kernel's size, and smaller heads packed evenly or unevenly."""
    monkeypatch.setattr(ragged_paged_attention, "ragged_paged_attention", jax_reference)
    rng, (n, k, d) = np.random.default_rng(0), heads
    q = jnp.asarray(rng.standard_normal((3, 4, n, d)), jnp.bfloat16)
    caches = [jnp.asarray(rng.standard_normal((3, k, 64, d)), jnp.bfloat16) for _ in range(2)]
    count = np.asarray(counts, np.int32)
    start = np.asarray([60, 31, 0], np.int32)
    # The pages of no row hold NaN: with a count of 0 the kernel reads one of the pool's, for a result that is not used.
    pool, table = cut(0, (caches[0], caches[1]), 16, np.where(count > 0, start + count, 0))
    found = pallas_tpu.ragged_attention(q, paired(pool), jnp.asarray(table), jnp.asarray(start), jnp.asarray(count), *rule)
    at = np.arange(4)[None]
    mask = causal_from(jnp.asarray(start), jnp.asarray(count), rule[1])
    want = attention_reference.attend(q, KeyValueRows(*caches), mask, scores=rule[0])
    np.testing.assert_allclose(np.asarray(found, np.float32), np.asarray(want, np.float32), atol=0.03)
    assert (np.asarray(found, np.float32)[at >= count[:, None]] == 0).all()


def test_smaller_heads_share_the_ragged_kernels():
    """Heads to one of the kernel's, lanes of each, and how many the kernel sees."""
    assert [pallas_tpu.packing(heads, 128) for heads in (1, 3, 8, 9)] == [(1, 128, 1), (1, 128, 4), (1, 128, 8), (1, 128, 16)]
    assert [pallas_tpu.packing(heads, 64) for heads in (1, 3, 8)] == [(2, 64, 1), (2, 64, 2), (2, 64, 4)]
    assert [pallas_tpu.packing(8, dim) for dim in (32, 96, 192, 256)] == [(4, 32, 2), (1, 128, 8), (1, 256, 8), (1, 256, 8)]
    assert isinstance(TPU.pages(2, 8, 16, 128, jnp.float32), KeyValuePages)


@pytest.mark.parametrize(("name", "heads", "more"), [("Llama-3.2-1B", (8, 64), 1.0), ("SmolLM2-135M", (3, 64), 4 / 3)])
def test_what_packed_pages_hold(name: str, heads: tuple[int, int], more: float):
    """Compares bytes with those of unpacked keys and values."""
    (count, size), entries = heads, 64
    pool = jax.eval_shape(lambda: TPU.pages(10, count, entries, size, jnp.bfloat16))
    assert sum(math.prod(x.shape) for x in jax.tree.leaves(pool)) == more * 10 * entries * 2 * count * size


@pytest.mark.tpu
@pytest.mark.parametrize(
    ("chip", "heads"), [("v5e:1x1", (32, 8, 128)), ("v5e:1x1", (9, 3, 64)), ("v6e:1x1", (32, 8, 64))], ids=str
)
def test_on_a_tpu_the_ragged_kernel_reads_the_pool_where_it_is(chip: str, heads: tuple[int, int, int]):
    """A decode step's and a block's; and what a drafter's block sees is copied out of the rows' pages, not out of all.

    The heads of a Qwen3, of SmolLM2-135M and of Llama-3.2-1B.
    """
    shaped = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    whole = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    n, k, d = heads
    pool = jax.eval_shape(lambda: TPU.pages(300, k, 64, d, jnp.bfloat16))
    # The kernel asks for the kind of device when it is compiled, and here that is a CPU.
    device = AbstractDevice(tpu_topology(chip).devices[0].device_kind, 1, "tpu")
    for t in (1, 16):
        queries = shaped((4, t, n, d))
        rows = (whole((4, 9)), whole((4,)), whole((4,)))
        with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
            compiled = compile_for(chip, pallas_tpu.ragged_attention, queries, pool, *rows)
        assert any("ragged_paged_attention" in name for name in compiled.without_cycles)
        assert not compiled.traffic().contains_shape((4, 9, *pool.kv.shape[1:]))
    extra = (shaped((4, k, 16, d)),) * 2
    for columns in (8, 128):
        rows = whole((4, columns)), whole((4, 16))
        compiled = compile_for(chip, over_pages(TPU.attend), shaped((4, 16, n, d)), pool, *rows, extra)
        kernel = any("tpu_custom_call" in name for name in compiled.without_cycles)
        assert kernel == (columns == 8 and d == 128), "a table of one block is for the kernel that takes rows of 128 lanes"
        assert compiled.temp_bytes < math.prod(pool.kv.shape) * 2, "less than the pool"
