"""What the TPU compiler makes of the rings at Llama 3 8B's sizes: each hop is under way while a tile is multiplied.

Skipped without the compiler. Cycles are compiler estimates.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from tilewright.compiled.aot import Compiled, compile_for, tpu_topology
from tilewright.compiled.hlo import HloOp, Module, read_module
from tilewright.parallel.mesh import make_mesh
from tilewright.parallel.rings import all_gather_matmul, matmul_reduce_scatter

CHIP = "v5e:4x2"
DEVICES = 8
ROWS = 4 * 1024
HIDDEN = 4096
INNER = 14336
pytestmark = pytest.mark.tpu

BY_ROWS = PartitionSpec("tp")
BY_COLUMNS = PartitionSpec(None, "tp")


def gathered(x: Array, w: Array) -> Any:
    """Rows that go into the MLP, by the columns of gate and up."""
    return all_gather_matmul(x, w, "tp")


def scattered(x: Array, w: Array) -> Any:
    """Partial sums that come out of it."""

    def wide(x: Array, w: Array) -> Array:
        return jnp.matmul(x, w, preferred_element_type=jnp.float32)

    return matmul_reduce_scatter(x, w, "tp", wide, dtype=x.dtype)


CASES = {
    "all-gather": (gathered, (BY_ROWS, BY_COLUMNS), BY_COLUMNS, (HIDDEN, 2 * INNER)),
    "reduce-scatter": (scattered, (BY_COLUMNS, BY_ROWS), BY_ROWS, (INNER, HIDDEN)),
}


def compiled(
    inside: Callable[..., Any], in_specs: Any, out_specs: Any, weight: tuple[int, int], backward: bool = False
) -> Compiled:
    mesh = make_mesh({"tp": None}, tpu_topology(CHIP).devices)
    shapes = ((ROWS, weight[0]), weight)
    args = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, in_specs, strict=True)
    ]
    program = jax.shard_map(inside, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def with_gradient(x: Array, w: Array) -> Any:
        y, back = jax.vjp(program, x, w)
        return y, back(y)

    return compile_for(CHIP, with_gradient if backward else program, *args)


def multiplies(module: Module, op: HloOp) -> bool:
    """Whether it is a product of matrices, with whatever was fused to it."""
    if op.opcode == "fusion":
        return any(multiplies(module, inner) for name in op.callees("calls") for inner in module.computations[name].ops)
    return op.opcode in ("convolution", "dot")


def windows(module: Module) -> list[int]:
    """For each hop, how many products are scheduled between its start and its end."""
    ops = module.entry.ops
    ends = {op.operands[0]: at for at, op in enumerate(ops) if op.opcode == "collective-permute-done"}
    starts = {op.name: at for at, op in enumerate(ops) if op.opcode == "collective-permute-start"}
    assert set(starts) == set(ends)
    return [sum(multiplies(module, op) for op in ops[at + 1 : ends[name]]) for name, at in starts.items()]


@pytest.mark.parametrize("backward", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_hop_is_under_way_while_a_tile_is_multiplied(case: Any, backward: bool):
    module = read_module(compiled(*case, backward=backward).hlo)
    found = windows(module)
    assert len(found) == (DEVICES - 1) * (2 if backward else 1)
    assert all(found), found
    opcodes = {op.opcode for each in module.computations.values() for op in each.ops}
    waiting = {"collective-permute", "all-gather", "all-reduce", "reduce-scatter", "all-to-all"}
    assert not opcodes & (waiting | {f"{name}-start" for name in waiting - {"collective-permute"}})


def test_tiles_cost_little_more_than_one_product():
    def whole(x: Array, w: Array) -> Array:
        return jax.lax.all_gather(x, "tp", tiled=True) @ w

    ring = compiled(*CASES["all-gather"])
    plain = compiled(whole, *CASES["all-gather"][1:])
    assert plain.cycles > 0
    assert ring.cycles < 1.05 * plain.cycles
