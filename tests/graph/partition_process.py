"""One of two processes that train on a divided graph together; `test_partition_processes.py` starts both.

Usage: python partition_process.py COORDINATOR INDEX
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from tilewright.graph.partition import PartitionedTable, run
from tilewright.graph.table import NeighborTable
from tilewright.models import gnn
from tilewright.parallel.mesh import initialise_processes, make_mesh

initialise_processes(sys.argv[1], 2, int(sys.argv[2]), timeout=60)
assert (jax.process_count(), jax.local_device_count(), jax.device_count()) == (2, 2, 4)

rng = np.random.default_rng(0)
edges = rng.integers(20, size=(2, 80))
x = rng.normal(size=(20, 4)).astype(np.float32)
due = rng.normal(size=(20, 3)).astype(np.float32)
config = gnn.GCNConfig(4, 3, hidden=5, dropout=0)
params, _ = gnn.init(config, jax.random.key(0))
table = PartitionedTable.build(edges, make_mesh({"nodes": None}), 20)


@jax.jit
def gradient(params: gnn.GNNParams, graph: gnn.Neighbours, x: Array, due: Array) -> gnn.GNNParams:
    return jax.grad(lambda params: jnp.sum(gnn.apply(config, params, graph, x)[0] * due))(params)


scores, _ = run(config, params, table, x)
found = gradient(params, table, table.permute(x), table.permute(due))

single = NeighborTable.from_edges(edges, 20)
wanted, _ = gnn.apply(config, params, single, jnp.asarray(x))
np.testing.assert_allclose(np.asarray(scores), wanted, atol=1e-5)
for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(gradient(params, single, x, due)), strict=True):
    np.testing.assert_allclose(np.asarray(a), b, atol=1e-5)
print("equal to one device")
