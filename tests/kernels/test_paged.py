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
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from kernels import linear_checks, paged_checks
from kernels.paged_checks import cut, spare, together
from kernels.test_attention import needs_native, prefix_case, prefix_expected, seeds
from tilewright.compiled.aot import compile_for, tpu_topology
from tilewright.kernels.operations import UNMAPPED, Pages
from tilewright.kernels.paged import cpu, pallas_tpu, reference, xla
from tilewright.kernels.select import TPU

DTYPES = st.sampled_from([jnp.float32, jnp.bfloat16])
ENTRIES = st.sampled_from([16, 32])


def reference_append(pool: Pages, table: Any, k: Any, v: Any, start: Any, count: Any) -> Pages:
    return Pages(*(reference.append(pages, table, new, start, count) for pages, new in zip(pool, (k, v), strict=True)))


APPENDS = [
    pytest.param(reference_append, id="reference"),
    pytest.param(xla.append, id="xla"),
    pytest.param(cpu.append, id="cpu", marks=needs_native),
    pytest.param(lambda pool, *rest: pallas_tpu.apart(pallas_tpu.append(paired(pool), *rest)), id="tpu"),
]
ATTENTIONS = [
    pytest.param(reference.prefix_attention, id="reference"),
    pytest.param(xla.prefix_attention, id="xla"),
    pytest.param(cpu.prefix_attention, id="cpu", marks=needs_native),
    pytest.param(lambda q, pool, *rest: TPU.paged_attention(q, paired(pool), *rest), id="tpu"),
]


def paired(pool: Pages) -> pallas_tpu.PairedPages:
    """The pool in the layout of the TPU's kernel."""
    pages, heads, entries, d = pool.k.shape
    return pallas_tpu.PairedPages(jnp.stack(pool, axis=2).transpose(0, 3, 1, 2, 4).reshape(pages, entries, 2 * heads, d))


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
    pool = Pages(*(jnp.zeros((4, 1, 16, 2)) for _ in range(2)))
    table = np.asarray([[2, UNMAPPED], [UNMAPPED, 3], [0, 1]], np.int32)
    new = jnp.ones((3, 1, 20, 2))
    after = jax.jit(append)(pool, table, new, new, np.asarray([10, 4, 20], np.int32), np.asarray([20, 20, 20], np.int32))
    want = np.zeros((4, 16), np.float32)
    want[2, 10:], want[3, :8], want[1, 4:] = 1, 1, 1
    for pages in after:
        np.testing.assert_array_equal(pages, np.broadcast_to(want[:, None, :, None], pages.shape))


@pytest.mark.parametrize("attend", ATTENTIONS)
@given(seeds, st.sampled_from([(1, 1, 2, 2, 96, 0, 64), (3, 5, 1, 3, 32, 5, 16), (2, 16, 2, 2, 64, 16, 32)]), ENTRIES)
def test_attention_over_pages(attend: Any, seed: int, sizes: tuple[int, ...], entries: int):
    """Of rows that have no more pages than their queries see; one of them may see nothing."""
    q, k, v, lengths, extra = prefix_case(np.random.default_rng(seed), *sizes)
    pool, table = cut(seed, (k, v), entries, lengths.max(axis=1))
    own = None if extra is None else tuple(jnp.asarray(x) for x in extra)
    actual = jax.jit(attend)(jnp.asarray(q), pool, table, jnp.asarray(lengths), own)
    bound = 3e-6 * math.sqrt(k.shape[2] + sizes[5]) + 3e-6
    np.testing.assert_allclose(np.asarray(actual), prefix_expected(q, k, v, lengths, extra), atol=bound, rtol=0)


@needs_native
@given(seeds, ENTRIES, DTYPES, st.sampled_from([0, 7]))
def test_the_cpu_kernel_gives_the_bits_of_a_cache_in_one_block(seed: int, entries: int, dtype: Any, own: int):
    paged_checks.check_attention(dtype, entries, own, seed)


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
    append = partial(cpu.append_attend, heads=6, kv_heads=2, head_dim=48, eps=1e-5)

    @partial(jax.jit, donate_argnums=0)
    def run(pool: Pages, rest: dict[str, Any]) -> Pages:
        fresh = jnp.ones((2, 2, 1, 48), jnp.bfloat16)

        def body(i: Any, pool: Pages) -> Pages:
            pool = append(pool=pool, **(rest | {"start": rest["start"] % 32 + i}))[1]
            return cpu.append(pool, rest["table"], fresh, fresh, rest["start"] % 32 + i, rest["count"])

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
        ({"pool": Pages(*(jnp.zeros((4, 2, 40, 48)) for _ in range(2)))}, "shapes do not fit"),
    ],
)
def test_what_cannot_be_appended_is_refused(change: dict[str, Any], complaint: str):
    case = replace(linear_checks.Appended(jnp.float32, 5, True, (5, 5)), capacity=64).draw(0)
    pool, table = cut(0, (case["k_cache"], case["v_cache"]), 16)
    rest = {name: x for name, x in case.items() if not name.endswith("cache")}
    operands = rest | {"start": jnp.asarray([40, 30]), "pool": pool, "table": table} | change
    run = jax.jit(partial(cpu.append_attend, heads=6, kv_heads=2, head_dim=48, eps=1e-5))
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=complaint):
        jax.block_until_ready(run(**operands))


@needs_native
def test_what_cannot_be_seen_or_written_is_refused():
    pool = Pages(*(jnp.zeros((4, 1, 16, 16)) for _ in range(2)))
    table, q, new = np.asarray([[2, UNMAPPED]], np.int32), jnp.ones((1, 1, 1, 16)), jnp.ones((1, 1, 4, 16))
    attend, append = jax.jit(cpu.prefix_attention), jax.jit(cpu.append)
    for length, complaint in ((17, "row 0 has no page for its entry 16"), (33, "a length is out of range: 33")):
        with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=complaint):
            jax.block_until_ready(attend(q, pool, table, np.asarray([[length]], np.int32)))
    for start, complaint in ((14, "row 0 has no page for its entry 16"), (30, "4 entries from 30 on do not fit a cache of 32")):
        with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=complaint):
            jax.block_until_ready(append(pool, table, new, new, np.asarray([start]), np.asarray([4])))


def jax_reference(q: Any, kv_pages: Any, kv_lens: Any, page_indices: Any, cu_q_lens: Any, num_seqs: Any, **rest: Any) -> Any:
    """What JAX itself says that its kernel means, in the place of the kernel, which no interpreter takes."""
    operands = q, kv_pages, kv_lens, page_indices, cu_q_lens, num_seqs
    kernel.dynamic_validate_inputs(*operands, **rest)
    out = kernel.ref_ragged_paged_attention(*operands, sm_scale=rest["sm_scale"])
    return jnp.concatenate([out, jnp.full((q.shape[0] - out.shape[0], *out.shape[1:]), jnp.nan, out.dtype)])


@pytest.mark.parametrize("counts", [(3, 0, 1), (0, 0, 0), (4, 4, 4)])
def test_queries_reach_the_ragged_kernel_as_it_takes_them(monkeypatch: pytest.MonkeyPatch, counts: tuple[int, ...]):
    monkeypatch.setattr(pallas_tpu, "ragged_paged_attention", jax_reference)
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.standard_normal((3, 4, 4, 128)), jnp.bfloat16)
    caches = [jnp.asarray(rng.standard_normal((3, 2, 64, 128)), jnp.bfloat16) for _ in range(2)]
    count, start = np.asarray(counts, np.int32), np.asarray([60, 31, 0], np.int32)
    # The pages of no row hold NaN: with a count of 0 the kernel reads one of the pool's, for a result that is not used.
    pool, table = cut(0, (caches[0], caches[1]), 16, np.where(count > 0, start + count, 0))
    found = pallas_tpu.causal_attention(q, paired(pool), *(jnp.asarray(x) for x in (table, start, count)))
    at = np.arange(4)[None]
    lengths = np.where(at < count[:, None], start[:, None] + at + 1, 0)
    want = reference.prefix_attention(q, Pages(*caches), jnp.arange(3)[:, None], jnp.asarray(lengths))
    np.testing.assert_allclose(np.asarray(found, np.float32), np.asarray(want, np.float32), atol=0.03)
    assert (np.asarray(found, np.float32)[at >= count[:, None]] == 0).all()


@pytest.mark.tpu
def test_on_a_tpu_the_ragged_kernel_reads_the_pool_where_it_is():
    """A decode step's and a block's; and what a drafter's block sees is copied out of the rows' pages, not out of all."""
    shaped, whole = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16), partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    pool = pallas_tpu.PairedPages(shaped((300, 64, 16, 128)))
    # The kernel asks for the kind of device when it is compiled, and here that is a CPU.
    device = AbstractDevice(tpu_topology("v5e:1x1").devices[0].device_kind, 1, "tpu")
    for t in (1, 16):
        queries, rows = shaped((4, t, 32, 128)), (whole((4, 9)), whole((4,)), whole((4,)))
        with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
            compiled = compile_for("v5e:1x1", pallas_tpu.causal_attention, queries, pool, *rows)
        assert any("tpu_custom_call" in name for name in compiled.without_cycles)
        assert not compiled.traffic().contains_shape((4, 9, 64, 16, 128))
    own = (shaped((4, 8, 16, 128)),) * 2
    compiled = compile_for("v5e:1x1", TPU.paged_attention, shaped((4, 16, 32, 128)), pool, whole((4, 9)), whole((4, 16)), own)
    assert any("tpu_custom_call" in name for name in compiled.without_cycles)
    assert compiled.temp_bytes < 300 * 64 * 16 * 128 * 2, "less than the pool"


def test_which_heads_the_ragged_kernel_takes():
    assert all(pallas_tpu.fits(heads, 128, jnp.bfloat16) for heads in (1, 2, 4, 8, 16, 24))
    assert not any(pallas_tpu.fits(heads, 128, jnp.bfloat16) for heads in (3, 6, 12))
    assert not pallas_tpu.fits(8, 64, jnp.bfloat16)
    assert not pallas_tpu.fits(8, 128, jnp.float32)
    assert isinstance(TPU.pages(2, 8, 16, 128, jnp.float32), Pages)
    assert isinstance(TPU.pages(2, 8, 16, 128, jnp.bfloat16), pallas_tpu.PairedPages)
