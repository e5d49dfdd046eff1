"""Differences of two compilations of a program, from texts written by hand."""

from dataclasses import fields
from types import SimpleNamespace

import pytest

from perfmodel.test_schedule import ARRAY, BYTES, GROUPS, compute, done, joined, program
from tilewright.compiled.aot import Compiled, read_compiled, read_record
from tilewright.metrics.diff import DIFF
from tilewright.perfmodel.diff import COMPILER, ExecutionChange, OpChange, ProgramTotals, Site, diff

SUM = Site("all-reduce", "jit(f)/layer/psum")
AT_SUM = 'metadata={op_name="jit(f)/layer/psum"}'
NO_MEMORY = dict.fromkeys((f"{name}_size_in_bytes" for name in ("argument", "output", "alias")), 0)


def made(*lines: str, before: str = "", chip: str = "v5e:2x2", temp: int = 0) -> Compiled:
    memory = SimpleNamespace(**NO_MEMORY, temp_size_in_bytes=temp)
    return read_compiled(chip, program(*lines, joined("c", "d"), before=before), memory, {"flops": 1.0})


SYNCHRONOUS = made(compute("c", "x1"), f"  %d = {ARRAY} all-reduce(%x0), {GROUPS}, {AT_SUM}")
START = f"  %s = {ARRAY} all-reduce-start(%x0), {GROUPS}, {AT_SUM}"
ASYNCHRONOUS = made(START, compute("c", "x1", 2), done("d", "s", "all-reduce-done"), temp=8)
WRAPPED = f"""%wrapped (p: f32[4]) -> f32[4] {{
  %p = {ARRAY} parameter(0)
  ROOT %sum = {ARRAY} all-reduce(%p), {GROUPS}, {AT_SUM}
}}
"""
OFFLOADED = made(
    f'  %s = (({ARRAY}), {ARRAY}, u32[]) async-start(%x0), async_execution_thread="sparsecore", calls=%wrapped, {AT_SUM}',
    compute("c", "x1"),
    done("d", "s", "async-done"),
    before=WRAPPED,
)


def test_each_figure_of_a_program_is_declared():
    assert [metric.name for metric in DIFF] == [one.name for one in fields(ProgramTotals)]


def test_a_program_does_not_differ_from_itself():
    for one in (SYNCHRONOUS, ASYNCHRONOUS, OFFLOADED):
        found = diff("step", one, read_record(one.record()))
        assert (found.before, found.executions, found.ops) == (found.after, (), ())
        assert all(found.rise(name) == 0 for name in vars(found.before))


def test_a_sum_that_became_asynchronous():
    found = diff("step", SYNCHRONOUS, ASYNCHRONOUS)
    assert found.executions == (ExecutionChange(SUM, {"synchronous": 1}, {"asynchronous": 1}),)
    assert (found.executions[0].gained("asynchronous"), found.executions[0].gained("synchronous")) == (1, -1)
    assert found.ops == ()
    assert (found.before.synchronous_bytes, found.after.asynchronous_bytes) == (BYTES, BYTES)
    assert (found.before.asynchronous, found.after.synchronous) == (0, 0)
    assert found.rise("estimated_cycles") == pytest.approx(1, abs=1e-6)
    assert found.rise("temp_bytes") == float("inf")


def test_a_sum_that_went_to_a_sparse_core():
    """And none that is only called so in the Python program."""
    found = diff("step", SYNCHRONOUS, OFFLOADED)
    assert found.executions == (ExecutionChange(SUM, {"synchronous": 1}, {"SparseCore": 1}),)
    assert (found.after.sparse_core, found.after.asynchronous_bytes) == (1, BYTES)
    plain = made(compute("c", "x1"), f"  %d = {ARRAY} all-reduce(%x0), {GROUPS}, {AT_SUM.replace('layer', 'sparsecore')}")
    assert diff("step", plain, plain).after.sparse_core == 0


def test_a_gather_that_went_to_a_sparse_core():
    """As libtpu 0.0.50.1 spells it on v6e, the operands with the update; the core waits for its end, and no copy is counted."""
    gather = Site("call", "jit(f)/take")
    place = 'metadata={op_name="jit(f)/take"}'
    begun = f'  %s = ((), (), (s32[1])) call-start(), async_execution_thread="sparsecore", to_apply=%inner, {place}'
    updated = f"  %u = (({ARRAY}), {ARRAY}) call-update(%s, %x0)"
    offloaded = made(begun, updated, compute("c", "x1"), done("d", "u", "call-done"))
    found = diff("step", made(compute("c", "x1"), compute("d", "x0")), offloaded)
    assert found.executions == (ExecutionChange(gather, {}, {"SparseCore": 1}),)
    assert (found.after.prefetches, found.after.sparse_core, found.before.fusions - found.after.fusions) == (0, 0, 1)


def test_a_copy_that_appeared_and_a_fusion_that_went():
    copied = made(f"  %c = {ARRAY} copy(%x1)", f"  %d = {ARRAY} all-reduce(%x0), {GROUPS}, {AT_SUM}")
    found = diff("step", SYNCHRONOUS, copied)
    assert found.executions == ()
    changes = {change.site.kind: change for change in found.ops}
    assert changes["copy"] == OpChange(Site("copy", COMPILER), 0, 1, 0, 2 * BYTES)
    assert (changes["fusion"].before, changes["fusion"].after) == (1, 0)
    assert (found.after.copies, found.after.copied_bytes, found.before.fusions, found.after.fusions) == (1, 2 * BYTES, 1, 0)
    assert found.after.read_bytes + found.after.written_bytes == found.before.read_bytes + found.before.written_bytes
    assert found.record()["operations"][0]["place"] == COMPILER


def test_programs_that_cannot_be_compared():
    with pytest.raises(ValueError, match="expected step compiled for one chip twice, found v5e:2x2 and v6e:2x2"):
        diff("step", SYNCHRONOUS, made(compute("c", "x1"), compute("d", "x0"), chip="v6e:2x2"))
    with pytest.raises(ValueError, match="expected the record of a compiled program"):
        read_record({"chip": "v5e:2x2"})
