"""Memory traffic of programs from the TPU compiler (`hlo/make.py`) and from this machine's, against bytes computed by hand.

A scalar takes 512 bytes on a TPU, the padding of its tile; `heavy` leaves scalars out.
"""

from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import Array

from tilewright.compiled.hlo import ArrayType
from tilewright.compiled.traffic import Traffic, memory_traffic

TEXTS = Path(__file__).parent / "hlo"
MIB = 2**20
SCALAR = 512


def tpu(name: str) -> Traffic:
    return memory_traffic((TEXTS / f"{name}.txt").read_text(encoding="utf-8"))


def here(f: Callable[..., Any], *shapes: Any, donate: tuple[int, ...] = ()) -> tuple[Traffic, float]:
    """Returns the traffic of a program compiled for this machine, and the bytes of XLA's own cost analysis."""
    compiled: Any = jax.jit(f, donate_argnums=donate).lower(*shapes).compile()
    return memory_traffic(compiled.as_text()), compiled.cost_analysis()["bytes accessed"]


def shaped(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def heavy(traffic: Traffic) -> tuple[int, int]:
    """Bytes read and written by operations that move more than scalars."""
    rows = [op for op in traffic.ops if op.read + op.written > 4 * SCALAR * op.times]
    return sum(op.read for op in rows), sum(op.written for op in rows)


@pytest.mark.parametrize(
    "name, read, written",
    [
        ("elementwise", 8 * MIB, 4 * MIB),
        ("matmul", (256 * 512 + 512 * 1024) * 2, 256 * 1024 * 2),
        ("reduce", 16 * MIB, 4096),
        ("scan", (128 * 4096 + 8 * 4096 * 4096) * 2, 128 * 4096 * 2),  # the state stays in VMEM, the weights come once each
        ("update_kept", 32 * MIB + 16 * 1024 * 4 + SCALAR, 32 * MIB + 16 * 1024 * 4),  # what is kept has to be copied first
        ("gather", 64 * 512 * 4, 64 * 512 * 4),  # 64 rows of the table, not the table; the indices stay in VMEM
        ("while", 2 * 256 * MIB, 2 * 256 * MIB),  # a copy of what is kept, and one iteration
        ("pallas", 256 * 512 * 4, 256 * 512 * 4),  # what the kernel writes stays in VMEM
        ("mlp", 6 * 2560 * 9728 * 2 + 2 * 16 * 2560 * 2, 16 * 2560 * 2),  # not the prefetch for the next run
    ],
)
def test_tpu_programs_by_hand(name: str, read: int, written: int):
    assert heavy(tpu(name)) == (read, written)


def test_an_update_in_place_on_a_tpu_moves_only_what_changes():
    (row,) = [op for op in tpu("update_donated").ops if op.opcode == "dynamic-update-slice"]
    assert (row.read, row.written, row.times) == (16 * 1024 * 4 + SCALAR, 16 * 1024 * 4, 1)
    assert row.op_name == "jit(update)/dynamic_update_slice"


def test_a_copy_back_for_the_next_run_is_there_and_not_counted():
    text = (TEXTS / "mlp.txt").read_text(encoding="utf-8")
    assert "copy-start.1 =" in text
    assert "copy-done(%copy-start.1)" in text
    assert "copy-start.1" not in [op.name for op in memory_traffic(text).ops]


def test_rows_say_how_often_and_sum_up():
    traffic = tpu("scan")
    (row,) = [op for op in traffic.ops if op.name == "fusion.13"]
    assert (row.read, row.written, row.times) == (8 * 4096 * 4096 * 2, 0, 8)
    assert row.op_name == "jit(layers)/while/body/closed_call/dot_general"
    assert traffic.read == sum(op.read for op in traffic.ops)
    assert traffic.total == traffic.read + traffic.written


def test_what_had_to_be_assumed_is_noted():
    assert tpu("scan").notes == ()
    assert tpu("while").notes == ("while: trip count unknown, counted as one iteration",)
    assert tpu("conditional").notes == ("cond.1.clone: the heaviest of 2 branches counted",)
    assert tpu("pallas").notes == ("kernel.1: a tpu_custom_call kernel, each operand and result counted once",)


def test_the_branch_that_moves_more_counts():
    assert "rev.0" in [op.name for op in tpu("conditional").ops]  # the other branch reads its operand once, this one twice


def scan(x: Array, weights: Array) -> Array:
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, weights)[0]


def update(cache: Array, rows: Array, start: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(cache, rows, start, axis=0)


@pytest.mark.parametrize(
    "f, shapes, donate, read, written",
    [
        (lambda x, y: jnp.tanh(x) * y, (shaped(512, 512), shaped(512, 512)), (), 2 * MIB, MIB),
        (lambda x, w: x @ w, (shaped(256, 512), shaped(512, 1024)), (), (256 * 512 + 512 * 1024) * 4, MIB),
        (lambda x: jnp.sum(jnp.exp(x), -1), (shaped(1024, 256),), (), MIB, 4096),
        (update, (shaped(4096, 64), shaped(16, 64), shaped(dtype=jnp.int32)), (0,), 4096 + 4, 4096),
        (update, (shaped(4096, 64), shaped(16, 64), shaped(dtype=jnp.int32)), (), MIB + 4096 + 4, MIB + 4096),
    ],
    ids=["elementwise", "matmul", "reduce", "donated update", "kept update"],
)
def test_this_machines_programs_by_hand_and_by_xla(f: Any, shapes: Any, donate: Any, read: int, written: int):
    traffic, xla = here(f, *shapes, donate=donate)
    assert (traffic.read, traffic.written, traffic.notes) == (read, written, ())
    assert traffic.total == pytest.approx(xla, abs=8)  # XLA counts the index of an update as it pleases


def test_a_gather_reads_rows_and_not_the_table():
    traffic, xla = here(lambda table, ids: table[ids], shaped(10_000, 64), shaped(32, dtype=jnp.int32))
    assert (traffic.read, traffic.written) == (32 * 64 * 4 + 32 * 4, 32 * 64 * 4)
    assert xla > 10_000 * 64 * 4  # XLA's own analysis has the table here


def test_a_scatter_touches_rows_and_not_the_table():
    def add(table: Array, ids: Array, rows: Array) -> Array:
        return table.at[ids].add(rows, mode="drop")

    traffic, _ = here(add, shaped(10_000, 64), shaped(32, dtype=jnp.int32), shaped(32, 64), donate=(0,))
    rows = 32 * 64 * 4
    assert 2 * rows <= traffic.read <= 2 * rows + 2048  # the new rows, the old ones, indices
    assert rows <= traffic.written <= rows + 1024


def test_a_scan_multiplies_by_its_length():
    once, twice = (here(scan, shaped(8, 256), shaped(length, 256, 256))[0] for length in (4, 8))
    matrix = 256 * 256 * 4
    assert 4 * matrix <= twice.total - once.total <= 4 * (3 * matrix + 10 * 8 * 256 * 4)  # a slice may be copied out first
    assert {op.times for op in twice.ops} == {1, 8}


def body(*lines: str) -> str:
    return "ENTRY %main (x: f32[1024,128]) -> f32[256,128] {\n" + "\n".join(f"  {line}" for line in lines) + "\n}\n"


def test_asynchronous_slices_and_wrapped_operations_count_once():
    whole = "f32[1024,128]{1,0:T(8,128)}"
    part = "f32[256,128]{1,0:T(8,128)S(1)}"
    wrapped = f"""%wrapped (p: f32[1024,128]) -> f32[256,128] {{
  %p = {whole} parameter(0)
  ROOT %slice.1 = {part} slice(%p), slice={{[0:256], [0:128]}}
}}

"""
    sugared = body(
        f"%x = {whole} parameter(0)",
        f"%slice-start = (({whole}), {part}, s32[]{{:S(2)}}) slice-start(%x), slice={{[0:256], [0:128]}}",
        f"ROOT %slice-done = {part} slice-done(%slice-start)",
    )
    generic = wrapped + body(
        f"%x = {whole} parameter(0)",
        f"%s = (({whole}), {part}, s32[]{{:S(2)}}) async-start(%x), calls=%wrapped",
        f"%u = (({whole}), {part}, s32[]{{:S(2)}}) async-update(%s)",
        f"ROOT %d = {part} async-done(%u)",
    )
    for text in (sugared, generic, generic.replace("S(1)}", "}")):
        traffic = memory_traffic(text)
        to_hbm = 0 if "S(1)" in text else 256 * 128 * 4
        assert (traffic.read, traffic.written) == (256 * 128 * 4, to_hbm)


def test_a_fusion_reads_what_its_slices_select_whatever_lies_between():
    def fused(root: str) -> Traffic:
        return memory_traffic(
            f"""%inner (p: f32[1024,128], i: s32[]) -> f32[256,128] {{
  %p = bf16[1024,128]{{1,0}} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %wide = f32[1024,128]{{1,0}} convert(%p)
  %first = f32[256,128]{{1,0}} dynamic-slice(%wide, %i, %zero), dynamic_slice_sizes={{256,128}}
  %second = f32[256,128]{{1,0}} slice(%wide), slice={{[0:256], [0:128]}}
  ROOT %out = {root}
}}

ENTRY %main (x: bf16[1024,128], i: s32[]) -> f32[256,128] {{
  %x = bf16[1024,128]{{1,0}} parameter(0)
  %at = s32[] parameter(1)
  ROOT %fusion = f32[256,128]{{1,0}} fusion(%x, %at), kind=kLoop, calls=%inner
}}
"""
        )

    half = 2 * 256 * 128 * 2
    whole = 1024 * 128 * 2
    assert fused("f32[256,128]{1,0} add(%first, %second)").read == half + 4
    assert fused("f32[1024,128]{1,0} concatenate(%wide, %first, %second), dimensions={0}").read == whole + 4


def test_an_update_of_what_a_fusion_computes_writes_the_whole():
    text = """%inner (p: bf16[1024,128], u: f32[8,128], i: s32[]) -> f32[1024,128] {
  %p = TYPE[1024,128]{1,0} parameter(0)
  %u = f32[8,128]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %base = f32[1024,128]{1,0} OPCODE(%p)
  ROOT %dus = f32[1024,128]{1,0} dynamic-update-slice(%base, %u, %i, %i)
}

ENTRY %main (x: bf16[1024,128], u: f32[8,128], i: s32[]) -> f32[1024,128] {
  %x = TYPE[1024,128]{1,0} parameter(0)
  %new = f32[8,128]{1,0} parameter(1)
  %at = s32[] parameter(2)
  ROOT %fusion = f32[1024,128]{1,0} fusion(%x, %new, %at), kind=kLoop, calls=%inner
}
"""
    converted = memory_traffic(text.replace("TYPE", "bf16").replace("OPCODE", "convert"))
    assert (converted.read, converted.written) == (1024 * 128 * 2 + 8 * 128 * 4 + 4, 1024 * 128 * 4)
    in_place = memory_traffic(text.replace("TYPE", "f32").replace("OPCODE", "bitcast"))
    assert (in_place.read, in_place.written) == (8 * 128 * 4 + 4, 8 * 128 * 4)


def stored_neighbours(x: Array, table: Array) -> Array:
    return jax.lax.optimization_barrier(x[table]).mean(axis=1)


def test_whether_an_array_of_a_shape_is_stored():
    nodes = 101
    degree = 7
    features = 67
    shapes = shaped(nodes, features), shaped(nodes, degree, dtype=jnp.int32)
    assert here(stored_neighbours, *shapes)[0].contains_shape((nodes, degree, features))
    summed, _ = here(lambda x, y: jnp.sum(x[:, None, :] * y[None, :, None]), shaped(nodes, features), shaped(degree))
    assert not summed.contains_shape((nodes, degree, features))
    assert summed.contains_shape((nodes, features))


@given(st.data())
def test_a_shape_is_found_in_any_order_and_merged(data: st.DataObject):
    dims = data.draw(st.lists(st.sampled_from([2, 3, 5, 7, 11, 13]), min_size=1, max_size=5, unique=True))
    groups: dict[int, list[int]] = {}
    for size in data.draw(st.permutations(dims)):
        groups.setdefault(data.draw(st.integers(0, 2)), []).append(size)
    stored = (*(prod(group) for group in groups.values()), 1)
    traffic = Traffic((), frozenset({ArrayType("f32", stored, 0, 4 * prod(stored))}), ())
    assert traffic.contains_shape(tuple(dims))
    assert traffic.contains_shape((*dims, 1))
    assert not traffic.contains_shape((*dims, 17))
    assert not traffic.contains_shape((dims[0] * 17, *dims[1:]))


def test_a_shape_of_the_same_size_is_not_enough():
    traffic = Traffic((), frozenset({ArrayType("f32", (6, 10), 0, 240)}), ())
    assert traffic.contains_shape((2, 3, 10))
    assert traffic.contains_shape((5, 2, 6))
    assert not traffic.contains_shape((4, 15))
    assert not traffic.contains_shape((60,))


def test_other_text_is_refused():
    with pytest.raises(ValueError, match="expected the HLO text of a compiled program"):
        memory_traffic("x + 1")
