"""Bytes that a layer of each graph network moves on an absent TPU, against the least bytes: every array read or written once.

    python benchmarks/graph_layers_tpu.py [--chip v5e:1x1] [--graph uniform:169343:13] [--layers sage gcn] [--json FILE]

Compiler estimates, not measurements. Needs the extra `tpu`. *Inference* computes the layer; *training* also its gradients with
respect to features and parameters. The compiler counts an operand of a kernel once; the rows that the kernel's DMAs gather are
counted in its place, by `pallas_tpu.transfers`.
"""

import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from cyclopts import App
from jax import Array

from tilewright.bench.graph import read_graph
from tilewright.cli.outputs import JsonFile, human_console, write_json
from tilewright.compiled.aot import Compiled, compile_for
from tilewright.compiled.hlo import read_module
from tilewright.graph.edges import from_edge_index, with_self_loops
from tilewright.graph.relations import RelationTable
from tilewright.graph.table import NeighborTable, make_table
from tilewright.kernels import select
from tilewright.kernels.gather_reduce import pallas_tpu
from tilewright.models import gnn, gnn_families
from tilewright.models.params import initialise

app = App(help=__doc__)
WIDTH, HEADS, EDGE_FEATURES = 128, 8, 16
FAMILIES: dict[str, tuple[type[gnn.Config], dict[str, int]]] = {
    "sage": (gnn.GraphSAGEConfig, {"hidden": WIDTH}),
    "gcn": (gnn.GCNConfig, {"hidden": WIDTH}),
    "gat": (gnn.GATConfig, {"hidden": WIDTH // HEADS, "heads": HEADS}),
    "gatv2": (gnn_families.GATv2Config, {"hidden": WIDTH // HEADS, "heads": HEADS}),
    "gatv2, edges": (gnn_families.GATv2Config, {"hidden": WIDTH // HEADS, "heads": HEADS, "edge_features": EDGE_FEATURES}),
    "transformer": (gnn_families.GraphTransformerConfig, {"hidden": WIDTH // HEADS, "heads": HEADS}),
    "transformer, edges": (
        gnn_families.GraphTransformerConfig,
        {"hidden": WIDTH // HEADS, "heads": HEADS, "edge_features": EDGE_FEATURES},
    ),
    "gine": (gnn_families.GINEConfig, {"hidden": WIDTH, "edge_features": EDGE_FEATURES}),
    "pna": (gnn_families.PNAConfig, {"hidden": WIDTH}),
    "pna, edges": (gnn_families.PNAConfig, {"hidden": WIDTH, "edge_features": EDGE_FEATURES}),
}
RELATIONAL = ("rgcn", "hgt")
Layer = Callable[[Any, Any, Any, Any], Any]
"""`layer(params, table, x, edge_attr)`."""


def family_layer(name: str, edges: np.ndarray, nodes: int) -> tuple[Layer, tuple[Any, ...]]:
    """Returns the first layer of a family, of `WIDTH` inputs and outputs, and its arguments."""
    kind, sizes = FAMILIES[name]
    config = kind(features=WIDTH, classes=WIDTH, dropout=0.0, **sizes)
    ids = from_edge_index(edges, nodes)
    table = make_table(with_self_loops(ids) if config.self_loops == "table" else ids, "bucketed")
    params = gnn.init(config, jax.random.key(0))[0].layers[0]
    width = sizes.get("edge_features", 0)
    edge_attr = jnp.zeros((table.num_edges, width)) if width else None

    def layer(params: Any, table: NeighborTable, x: Array, edge_attr: Any) -> Array:
        return config.layer(select.PLAIN, params, table, x, edge_attr, False, None)

    return layer, (params, table, jnp.zeros((nodes, WIDTH)), edge_attr)


def relation_layer(name: str, edges: np.ndarray, nodes: int) -> tuple[Layer, tuple[Any, ...]]:
    """Returns an R-GCN layer for four relations of one kind of nodes, or an HGT layer for those of two kinds."""
    if name == "rgcn":
        relation = np.arange(edges.shape[1]) % 4
        listed = {("node", str(r), "node"): edges[:, relation == r] for r in range(4)}
        table = RelationTable.build(listed, {"node": nodes}, layout="bucketed")
        declared: Any = gnn_families.RGCNLayer.declare("conv", WIDTH, WIDTH, 4)
        x: Any = jnp.zeros((nodes, WIDTH))
    else:
        kinds = {"a": -(-nodes // 2), "b": nodes // 2}
        names = np.array(list(kinds))
        kind, place = edges % 2, edges // 2
        listed = {
            (str(names[s]), "to", str(names[d])): place[:, (kind[0] == s) & (kind[1] == d)] for s in range(2) for d in range(2)
        }
        table = RelationTable.build(listed, kinds, layout="bucketed")
        declared = gnn_families.HGTLayer.declare("conv", dict.fromkeys(kinds, WIDTH), WIDTH, HEADS, list(listed))
        x = {kind: jnp.zeros((count, WIDTH)) for kind, count in kinds.items()}
    params = initialise((declared,), jax.random.key(0))[0]
    return lambda params, table, x, edge_attr: params(x, table), (params, table, x, None)


def size_of(*trees: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(trees))


def least_bytes(arguments: tuple[Any, ...], edges: int, nodes: int, training: bool) -> int:
    """Returns the bytes of all inputs and results, once: features, an index of 4 bytes for each edge, parameters, result.

    Training also reads the result's gradient in place of the result, and an index for each edge of the transposed graph, and
    writes the gradients of features and parameters.
    """
    params, _, x, edge_attr = arguments
    read = size_of(params, x, edge_attr) + 4 * edges
    out = nodes * WIDTH * 4
    return read + out + (4 * edges + size_of(params, x) if training else 0)


def counted_bytes(compiled: Compiled, table: NeighborTable) -> tuple[int, int, int]:
    """Returns the bytes read and written, and the number of kernels.

    The compiler's count has one read of each operand and one write of each result. For the kernels of `gather_reduce` the
    transfers of their DMAs stand in for it: a row for each edge, and the rows of the bucket alone in the buffer for the result.
    """
    operands = {
        op.name: [computation.by_name[name].outputs[0].dims for name in op.operands]
        for computation in read_module(compiled.hlo).computations.values()
        for op in computation.ops
        if op.custom_call_target == "tpu_custom_call"
    }
    buckets = [bucket for rows in (table.forward, table.backward) for bucket in stages(rows)]
    read, written, kernels = 0, 0, 0
    for op in compiled.traffic().ops:
        if op.name not in operands:
            read += op.read
            written += op.written
            continue
        degrees, sources, *rest = operands[op.name]
        slots, padded = sources
        features = next(dims for dims in rest if dims != sources)[1]
        fits = [
            bucket
            for bucket in buckets
            if bucket.sources.shape[1] == slots and tiled_rows(bucket.sources.shape, features) == padded == degrees[1]
        ]
        moved = [
            pallas_tpu.transfers(np.asarray(bucket.degrees), slots, features, np.float32, rest[0] == sources) for bucket in fits
        ]
        most = max(moved, key=lambda each: each.read)
        read += most.read
        written += most.written
        kernels += 1
    return read, written, kernels


def stages(rows: Any) -> list[Any]:
    """Returns the buckets of all stages; the stages after the first reduce sums."""
    return [] if rows is None else [*rows.blocks, *stages(rows.rest)]


def tiled_rows(shape: tuple[int, ...], features: int) -> int:
    blocks = pallas_tpu.blocks_for(*shape, features, np.float32)
    return blocks.tiles(shape[0]) * blocks.tile


def figures(chip: str, name: str, edges: np.ndarray, nodes: int, training: bool) -> dict[str, Any]:
    layer, arguments = (relation_layer if name in RELATIONAL else family_layer)(name, edges, nodes)

    def weighed(params: Any, x: Any, table: Any, edge_attr: Any, cotangent: Any) -> Array:
        out = layer(params, table, x, edge_attr)
        return sum((each * due).sum() for each, due in zip(jax.tree.leaves(out), jax.tree.leaves(cotangent), strict=True))

    params, table, x, edge_attr = arguments
    start = time.perf_counter()
    if training:
        due = {"a": x["a"], "b": x["b"]} if isinstance(x, dict) else jnp.zeros((nodes, WIDTH))
        compiled = compile_for(chip, jax.grad(weighed, (0, 1)), params, x, table, edge_attr, due)
    else:
        compiled = compile_for(chip, layer, *arguments)
    read, written, kernels = counted_bytes(compiled, table.table if isinstance(table, RelationTable) else table)
    least = least_bytes(arguments, edges.shape[1], nodes, training)
    return {
        "layer": name,
        "training": training,
        "read_bytes": read,
        "written_bytes": written,
        "compiler_bytes": compiled.traffic().total,
        "kernels": kernels,
        "least_bytes": least,
        "temp_bytes": compiled.temp_bytes,
        "compile_s": time.perf_counter() - start,
    }


@app.default
def main(
    *,
    chip: str = "v5e:1x1",
    graph: str = "uniform:169343:13",
    layers: Sequence[str] = (*FAMILIES, *RELATIONAL),
    json_file: JsonFile = None,
) -> None:
    """Compiles the layers and prints a row for each.

    Args:
        chip: the chip and its topology.
        graph: see `tilewright bench graph --data`.
        layers: names of the layers.
    """
    console = human_console(json_file)
    found = read_graph(graph)
    rows = []
    for name in layers:
        for training in (False, True):
            one = figures(chip, name, found.edge_index, found.num_nodes, training)
            rows.append(one)
            moved = one["read_bytes"] + one["written_bytes"]
            kind = "training" if training else "inference"
            console.print(
                f"{name}, {kind}: {one['read_bytes'] / 1e6:,.0f} MB read, {one['written_bytes'] / 1e6:,.0f} written, "
                f"least {one['least_bytes'] / 1e6:,.0f}, {moved / one['least_bytes']:.2f} times; "
                f"{one['kernels']} kernels, {one['temp_bytes'] / 1e6:,.0f} MB temporary",
                markup=False,
            )
    versions = {name: version(name) for name in ("jax", "libtpu")}
    about = {"chip": chip, "graph": graph, "nodes": found.num_nodes, "edges": found.edge_index.shape[1], "dtype": "float32"}
    write_json(json_file, {**about, **versions, "rows": rows})


if __name__ == "__main__":
    app()
