"""The HLO parser, checked with hand-written types and programs from the TPU compiler (`hlo/make.py`)."""

from math import prod
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.compiled.hlo import ArrayType, Computation, HloOp, execution, read_arrays, read_module, trip_count

TEXTS = Path(__file__).parent / "hlo"


def tpu(name: str) -> str:
    return (TEXTS / f"{name}.txt").read_text(encoding="utf-8")


def nothing(op: HloOp, computation: Computation) -> float:
    return 0.0


@pytest.mark.parametrize(
    "text, expected",
    [
        ("f32[256,512]{1,0}", [ArrayType("f32", (256, 512), 0, 256 * 512 * 4)]),
        ("bf16[16,2560]{1,0:T(8,128)(2,1)S(1)}", [ArrayType("bf16", (16, 2560), 1, 16 * 2560 * 2)]),
        ("f32[3,130]{1,0:T(8,128)}", [ArrayType("f32", (3, 130), 0, 8 * 256 * 4)]),
        ("f32[3,130]{0,1:T(8,128)}", [ArrayType("f32", (3, 130), 0, 128 * 136 * 4)]),
        ("f32[2,3,5]{2,1,0:T(4,128)}", [ArrayType("f32", (2, 3, 5), 0, 2 * 4 * 128 * 4)]),
        ("s32[]{:T(128)S(6)}", [ArrayType("s32", (), 6, 512)]),
        ("pred[]", [ArrayType("pred", (), 0, 1)]),
        ("s4[10]{0:E(4)}", [ArrayType("s4", (10,), 0, 5)]),
        ("s4[10]{0}", [ArrayType("s4", (10,), 0, 10)]),
        ("f8e4m3fn[7]{0}", [ArrayType("f8e4m3fn", (7,), 0, 7)]),
        ("c64[2]{0}", [ArrayType("c64", (2,), 0, 16)]),
        ("f32[0,4]{1,0}", [ArrayType("f32", (0, 4), 0, 0)]),
        ("token[]", [ArrayType("token", (), 0, 0)]),
        (
            "((bf16[8]{0:T(256)(128)(2,1)}), /*index=1*/f32[2]{0}, u32[]{:S(2)})",
            [ArrayType("bf16", (8,), 0, 512), ArrayType("f32", (2,), 0, 8), ArrayType("u32", (), 2, 4)],
        ),
    ],
)
def test_array_types(text: str, expected: list[ArrayType]):
    assert list(read_arrays(text)) == expected


@given(st.lists(st.integers(1, 300), min_size=2, max_size=4), st.sampled_from([(8, 128), (4, 128), (1, 128)]))
def test_padding_is_less_than_a_tile_in_each_tiled_dim(dims: list[int], tile: tuple[int, int]):
    order = ",".join(str(dim) for dim in reversed(range(len(dims))))
    (array,) = read_arrays(f"f32[{','.join(map(str, dims))}]{{{order}:T({tile[0]},{tile[1]})}}")
    rows = array.bytes // 4 // prod(dims[:-2]) // tile[1] // -(-dims[-1] // tile[1])
    columns = -(-dims[-1] // tile[1]) * tile[1]
    assert array.bytes == 4 * prod(dims[:-2]) * rows * columns
    assert rows % tile[0] == 0
    assert 0 <= rows - dims[-2] < tile[0]
    assert 0 <= columns - dims[-1] < tile[1]


def test_a_program_is_read_whole():
    module = read_module(tpu("matmul"))
    assert [op.opcode for op in module.entry.ops] == ["parameter", "copy-start", "parameter", "copy-done", "fusion"]
    root = module.entry.root
    assert (root.name, root.op_name, root.number("estimated_cycles")) == ("fusion", "jit(<lambda>)/dot_general", 9635)
    assert root.callees("calls") == ("fused_computation",)
    assert root.operands == ("x.1", "copy-done")
    assert module.computations["fused_computation"].root.opcode == "convolution"
    assert module.entry.parameter(0).name == "x.1"


def test_every_text_keeps_its_order_and_names():
    for path in sorted(TEXTS.glob("*.txt")):
        for computation in read_module(path.read_text(encoding="utf-8")).computations.values():
            seen: set[str] = set()
            for op in computation.ops:
                assert set(op.operands) <= seen, f"{path.name}: {op.name} runs before its operands"
                seen.add(op.name)
            assert sum(op.is_root for op in computation.ops) == 1


@pytest.mark.parametrize("text", ["", "HloModule m\n", "def f(x):\n  return x\n"])
def test_other_text_is_refused(text: str):
    with pytest.raises(ValueError, match="expected the HLO text of a compiled program"):
        read_module(text)


def test_a_scan_has_its_trip_count():
    run = execution(read_module(tpu("scan")), nothing)
    assert {step.op.name: step.times for step in run.steps}["fusion.13"] == 8
    assert {step.times for step in run.steps} == {1, 8}
    assert run.notes == ()


def test_a_loop_over_data_counts_once_and_adds_a_note():
    run = execution(read_module(tpu("while")), nothing)
    assert {step.times for step in run.steps} == {1}
    assert run.notes == ("while: trip count unknown, counted as one iteration",)


def test_the_heaviest_branch_counts():
    module = read_module(tpu("conditional"))
    for heavy, opcode in (("reverse", "reverse"), ("multiply", "fusion")):
        branch = next(name for name, inner in module.computations.items() if opcode in [op.opcode for op in inner.ops])
        run = execution(module, lambda op, inner, branch=branch: float(inner.name == branch))
        assert any(step.op.opcode == opcode for step in run.steps if step.computation.name == branch), heavy
        assert run.notes == ("cond.1.clone: the heaviest of 2 branches counted",)


@pytest.mark.parametrize(
    "start, stop, step, expected",
    [(0, 8, 1, 8), (3, 8, 1, 5), (0, 9, 2, 5), (8, 8, 1, 0), (9, 8, 1, 0)],
)
def test_trip_counts_from_the_loop_itself(start: int, stop: int, step: int, expected: int):
    text = f"""
%body (state.1: (s32[], f32[4], s32[])) -> (s32[], f32[4], s32[]) {{
  %state.1 = (s32[], f32[4]{{0}}, s32[]) parameter(0)
  %step.1 = s32[] constant({step})
  %i.1 = s32[] get-tuple-element(%state.1), index=0
  %x.1 = f32[4]{{0}} get-tuple-element(%state.1), index=1
  %n.1 = s32[] get-tuple-element(%state.1), index=2
  %i.2 = s32[] add(%i.1, %step.1)
  %x.2 = f32[4]{{0}} sine(%x.1)
  ROOT %next = (s32[], f32[4]{{0}}, s32[]) tuple(%i.2, %x.2, %n.1)
}}

%condition (state.2: (s32[], f32[4], s32[])) -> pred[] {{
  %state.2 = (s32[], f32[4]{{0}}, s32[]) parameter(0)
  %i.3 = s32[] get-tuple-element(%state.2), index=0
  %n.3 = s32[] get-tuple-element(%state.2), index=2
  ROOT %less = pred[] compare(%i.3, %n.3), direction=LT
}}

ENTRY %main (x: f32[4]) -> (s32[], f32[4], s32[]) {{
  %x = f32[4]{{0}} parameter(0)
  %first = s32[] constant({start})
  %copied = s32[] copy(%first)
  %last = s32[] constant({stop})
  %state = (s32[], f32[4]{{0}}, s32[]) tuple(%copied, %x, %last)
  ROOT %loop = (s32[], f32[4]{{0}}, s32[]) while(%state), condition=%condition, body=%body
}}
"""
    module = read_module(text)
    assert trip_count(module, module.entry, module.entry.root) == expected
    changed = read_module(text.replace("tuple(%i.2, %x.2, %n.1)", "tuple(%i.2, %x.2, %i.2)"))
    assert trip_count(changed, changed.entry, changed.entry.root) is None
    counted_down = read_module(text.replace("direction=LT", "direction=GT"))
    assert trip_count(counted_down, counted_down.entry, counted_down.entry.root) is None


def test_this_machines_programs_are_read_too():
    def power(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 7, lambda _, h: h @ x, x)

    text = jax.jit(power).lower(jax.ShapeDtypeStruct((64, 64), jnp.float32)).compile().as_text()
    assert text is not None
    run = execution(read_module(text), nothing)
    assert run.notes == ()
    assert max(step.times for step in run.steps) == 7


@pytest.mark.parametrize("cycles, expected", [("9102", 9102), (str(2**63 - 1), None)])
def test_the_largest_number_of_cycles_is_no_estimate(cycles: str, expected: int | None):
    """For some fusions with a matmul libtpu writes the largest 64-bit number."""
    module = read_module(
        "HloModule step, is_scheduled=true\n\nENTRY %main (p: f32[8]) -> f32[8] {\n  %p = f32[8]{0} parameter(0)\n"
        f'  ROOT %sum = f32[8]{{0}} add(%p, %p), backend_config={{"estimated_cycles":"{cycles}"}}\n}}\n'
    )
    assert module.entry.root.estimated_cycles == expected
