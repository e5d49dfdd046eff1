"""What the TPU compiler makes of the ring: each hop is under way while neighbours are reduced. Skipped without the compiler."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from tilewright.compiled.aot import compile_for, tpu_topology
from tilewright.compiled.hlo import read_module
from tilewright.graph.partition import PartitionedTable
from tilewright.parallel.mesh import make_mesh

CHIP = "v5e:2x4"
FEATURES = 128
pytestmark = pytest.mark.tpu


def absent_table() -> tuple[PartitionedTable, jax.ShapeDtypeStruct]:
    """A graph divided over eight chips that are not there, and features for it: shapes only."""
    edges = np.random.default_rng(0).integers(512, size=(2, 1024))
    table = PartitionedTable.build(edges, make_mesh({"nodes": 8}), 512, layout="bucketed")
    mesh = make_mesh({"nodes": None}, tpu_topology(CHIP).devices)
    blocks = NamedSharding(mesh, table.spec)
    everywhere = NamedSharding(mesh, PartitionSpec())

    def shaped(array: Array, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    shards = jax.tree.map(lambda leaf: shaped(leaf, blocks), table.shards)
    rows = {name: shaped(getattr(table, name), everywhere) for name in ("order", "places")}
    x = jax.ShapeDtypeStruct((table.num_nodes, FEATURES), jnp.float32, sharding=blocks)
    return replace(table, mesh=mesh, shards=shards, **rows), x


def windows(hlo: str) -> list[list[str]]:
    """For each hop of features, the operations on features that are scheduled between its start and its end."""
    found: list[list[str]] = []
    ops = read_module(hlo).entry.ops
    for at, op in enumerate(ops):
        if op.opcode == "collective-permute-start":
            end = next(n for n, done in enumerate(ops) if done.opcode == "collective-permute-done" and op.name in done.operands)
            inside = [o for o in ops[at + 1 : end] if o.opcode in ("fusion", "custom-call", "concatenate")]
            found.append([o.name for o in inside if o.outputs and o.outputs[0].dims[-1:] == (FEATURES,)])
    return found


@pytest.mark.parametrize("backward", [False, True])
def test_every_hop_is_hidden_behind_a_reduction(backward: bool):
    table, x = absent_table()

    def loss(table: PartitionedTable, x: Array) -> Any:
        return jnp.sum(table.aggregate(x) ** 2)

    program = jax.grad(loss, 1) if backward else PartitionedTable.aggregate
    hlo = compile_for(CHIP, program, table, x).hlo
    hops = windows(hlo)
    assert len(hops) == (14 if backward else 7)
    assert all(hops), hops
    assert "collective-permute(" not in hlo, "a hop that nothing hides"
