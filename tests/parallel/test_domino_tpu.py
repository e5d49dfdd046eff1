"""What the TPU compiler makes of Domino: hops between neighbours, each of them under way while a tile is multiplied.

Skipped without the compiler.
"""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from models.sizes import decoder_config
from parallel.test_collective_matmul_tpu import windows
from tilewright.compiled.aot import compile_for, tpu_topology
from tilewright.compiled.hlo import Module, read_module
from tilewright.kernels.bundles.tpu import TPU
from tilewright.models import decoder
from tilewright.models.params import abstract
from tilewright.models.stack import Rows, Strategy
from tilewright.parallel.domino import Column, Domino
from tilewright.parallel.mesh import make_mesh
from tilewright.parallel.sharding import TENSOR_PARALLEL, shardings

CHIP = "v5e:4x2"
DEVICES = 8
LAYERS = 2
BATCH = 4
LENGTH = 512
CONFIG = decoder_config("llama", 1024, 2048, 4096, LAYERS, 16, 8, 128)
pytestmark = pytest.mark.tpu


def compiled(schedule: Strategy, backward: bool = False) -> Module:
    """The layers of a model, without embedding and head."""
    mesh = make_mesh({"tp": None}, tpu_topology(CHIP).devices)
    specs = decoder.declare(CONFIG).layers
    params: Any = abstract(specs, jnp.bfloat16, shardings(specs, mesh, TENSOR_PARALLEL))
    whole = PartitionSpec()

    def run(params: Any, x: Array) -> Array:
        positions = jnp.broadcast_to(jnp.arange(LENGTH), (BATCH, LENGTH))
        rows = Rows(CONFIG.rope_tables(positions), None)
        return schedule.run(decoder.stack_of(CONFIG, TPU, params, decoder.causal_attend), x, rows, (None,) * LAYERS, ())[0]

    parts = jax.tree.map(lambda array: array.sharding.spec, params)
    program = jax.shard_map(run, mesh=mesh, in_specs=(parts, whole), out_specs=whole, check_vma=False)

    def with_gradient(params: Any, x: Array) -> Any:
        y, back = jax.vjp(program, params, x)
        return back(y)

    x = jax.ShapeDtypeStruct((BATCH, LENGTH, CONFIG.hidden_size), jnp.bfloat16, sharding=NamedSharding(mesh, whole))
    return read_module(compile_for(CHIP, with_gradient if backward else program, params, x).hlo)


def assert_nothing_is_waited_for(module: Module, sums_at_the_end: int = 0) -> None:
    """Every collective is a start and an end, but the gradient's sums of what all devices hold, which come last."""
    opcodes = [op.opcode for each in module.computations.values() for op in each.ops]
    waiting = ("collective-permute", "all-gather", "all-reduce", "reduce-scatter", "all-to-all")
    assert sum(opcodes.count(name) for name in waiting) <= sums_at_the_end


EVERY_TILE = 1.0
"""An intensity by which any tile takes as long as a hop."""
HOPS = 2 * (DEVICES - 1)
"""Of a sum: none was merged with another, and none left out."""
LAST = HOPS
"""Hops that nothing is left to be computed beside: those that make the stream whole again."""
PRODUCTS = 2 * (3 + 1 + 2 + 1) * DEVICES
"""Of a layer, a tile for each device: q, k and v, output, gate and up, down."""


def test_every_hop_but_those_of_the_last_sum_is_under_way_while_a_tile_is_multiplied():
    """Across halves and layers."""
    module = compiled(Domino(least=64, intensity=EVERY_TILE))
    found = windows(module)
    assert_nothing_is_waited_for(module)
    assert len(found) == 2 * 2 * LAYERS * HOPS
    assert sum(products == 0 for products in found) <= LAST, found
    first = found[: len(found) // LAYERS]
    assert max(first) <= PRODUCTS // 7, "tiles are beside their own hops, and not all beside one of them"


@pytest.mark.slow
def test_products_that_are_not_cut_leave_hops_exposed():
    """What the tiles of the attention half are for."""
    found = windows(compiled(Domino(least=10**6)))
    assert len(found) == 2 * 2 * LAYERS * HOPS
    assert sum(products == 0 for products in found) > LAST


@pytest.mark.slow
def test_the_gradients_sums_are_under_way_as_well():
    """As many hops as forwards, the first sum of the gradient having nothing beside it either."""
    module = compiled(Domino(least=64), backward=True)
    found = windows(module)
    assert_nothing_is_waited_for(module, sums_at_the_end=1)
    assert len(found) == 2 * 2 * 2 * LAYERS * HOPS
    assert sum(products == 0 for products in found) <= len(found) // 4, found


@pytest.mark.slow
def test_of_two_parts_of_the_columns_the_first_ones_sum_is_under_way_with_the_second():
    module = compiled(Column(least=64))
    found = windows(module)
    assert_nothing_is_waited_for(module)
    assert len(found) == 2 * 2 * LAYERS * HOPS
    assert sum(products > 0 for products in found) >= len(found) // 2
