"""Compiles a sharded matrix product for TPUs that are not here, and prints what runs when.

    pip install 'tilewright[tpu]'
    JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 python examples/tpu_schedule.py --chip v5e:2x2

The rows of the matrix are sharded over all chips. The program gathers them and multiplies. Times are compiler estimates and a
model of links and memory, not measurements.
"""

import argparse

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tilewright.compiled.aot import compile_for, tpu_topology
from tilewright.parallel.auto import mesh_fabric
from tilewright.parallel.mesh import make_mesh
from tilewright.perfmodel.schedule import read_schedule
from tilewright.perfmodel.timeline import simulate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chip", default="v5e:2x2")
    parser.add_argument("--width", type=int, default=4096)
    options = parser.parse_args()

    mesh = make_mesh({"tp": None}, tpu_topology(options.chip).devices)

    def array(rows: int, *axes: str | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, options.width), jnp.bfloat16, sharding=NamedSharding(mesh, P(*axes)))

    def product(x: Array, w: Array) -> Array:
        gathered = jax.lax.with_sharding_constraint(w, NamedSharding(mesh, P()))
        return jax.nn.silu(x @ gathered)

    compiled = compile_for(options.chip, product, array(1024), array(options.width, "tp"))
    fabric = mesh_fabric(mesh)
    assert fabric is not None, f"{options.chip} has no links"
    timeline = simulate(read_schedule(compiled.hlo, fabric.chip), fabric)
    print(f"{'begin µs':>9} {'end µs':>9}  {'resource':8} operation")
    for span in sorted((*timeline.core, *timeline.transfers), key=lambda span: span.begin_s):
        node = timeline.graph.nodes[span.node]
        print(f"{1e6 * span.begin_s:9.1f} {1e6 * span.end_s:9.1f}  {span.track:8} {node.opcode} {node.name}")
    whole = timeline.whole()
    print(f"compute {1e6 * whole.compute_s:.0f} µs, communication hidden {1e6 * whole.hidden_s:.0f} µs, ", end="")
    print(f"exposed {1e6 * whole.exposed_s:.0f} µs")


if __name__ == "__main__":
    main()
