"""Message passing against PyTorch Geometric and the best that torch has, side by side in one process.

Two comparisons on each graph: the mean over all neighbours, alone; and a whole GraphSAGE of two layers with the same weights.
The ways run in turns, every second time in reverse, with as many threads as XLA's pool has; medians. Needs the `oracle` extra:

    python tests/oracle/bench_graph.py [--data uniform:10000:16 ...] [--features N] [--repetitions N] [--json FILE]
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch_geometric
from cyclopts import App, Parameter
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch_geometric.nn import SAGEConv

from tilewright.bench.graph import BenchGraph, Segments, peers, read_graph
from tilewright.cli.outputs import JsonFile, human_console, write_json
from tilewright.compiled.machine import chip_name, cores
from tilewright.compiled.timing import Spread, alternate, spread
from tilewright.graph.table import NeighborTable
from tilewright.kernels import native
from tilewright.kernels.select import operations
from tilewright.models import gnn

GRAPHS = ("uniform:10000:16", "uniform:10000:64", "rmat:100000:1000000")
AGREES = 1e-3
PAUSE_S = 0.05
WARM_S = 0.05
TIMED_S = 0.1

Way = Callable[[], Any]
SeveralWords = Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative=())]


def torch_csr(graph: BenchGraph) -> tuple[Any, Any, Any]:
    """Offsets, sources and the adjacency with 1 / degree as its values, by destination."""
    order = np.argsort(graph.edge_index[1], kind="stable")
    sources = torch.from_numpy(graph.edge_index[0, order].astype(np.int64))
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(graph.degrees)]).astype(np.int64))
    return offsets, sources, torch.sparse_csr_tensor(offsets, sources, torch.ones(len(sources)), (graph.num_nodes,) * 2)


def aggregations(graph: BenchGraph, x: np.ndarray) -> dict[str, Way]:
    """Ways to take the mean over the neighbours of each node."""
    features = torch.from_numpy(x)
    given = jnp.asarray(x)
    edges = torch.from_numpy(graph.edge_index.astype(np.int64))
    offsets, sources, matrix = torch_csr(graph)
    degrees = torch.from_numpy(graph.degrees.astype(np.float32)).clamp(min=1)[:, None]
    weighted = torch.sparse_csr_tensor(offsets, sources, (1 / degrees[:, 0]).repeat_interleave(offsets.diff()), matrix.shape)

    def scatter() -> Any:
        total = torch.zeros_like(features).index_add_(0, edges[1], features[edges[0]])
        return total / degrees

    ways: dict[str, Way] = {
        "torch index_add": scatter,
        "torch sparse.mm": lambda: torch.sparse.mm(weighted, features),
        "torch embedding_bag": lambda: torch.nn.functional.embedding_bag(sources, features, offsets[:-1], mode="mean"),
    }
    compiled = jax.jit(lambda neighbours, x: neighbours.aggregate(x, reduce="mean"))
    segments: Segments = peers(graph, gathered=False)["segments"]
    ways["JAX segment_sum"] = lambda: compiled(segments, given).block_until_ready()
    for layout in ("bucketed", "csr"):
        table = NeighborTable.from_edges(graph.edge_index, graph.num_nodes, layout=layout)
        permuted = table.permute(given).block_until_ready()
        ways[f"tilewright {layout}"] = lambda table=table, permuted=permuted: compiled(table, permuted).block_until_ready()
        compare(ways["torch embedding_bag"](), table.unpermute(compiled(table, permuted)), layout)
    return ways


def networks(graph: BenchGraph, x: np.ndarray) -> dict[str, Way]:
    """Ways to run GraphSAGE with two layers that keep the width, as published for Trainium2."""
    width = x.shape[1]
    config = gnn.GraphSAGEConfig(width, width, hidden=width)
    params, _ = gnn.init(config, jax.random.key(0))
    ops = operations()
    prepared = ops.prepare(gnn.declare(config), params)
    convs = [SAGEConv(width, width).eval() for _ in params.layers]
    for conv, layer in zip(convs, params.layers, strict=True):
        values = {"lin_l.weight": layer.neighbour.weight.T, "lin_l.bias": layer.neighbour.bias, "lin_r.weight": layer.root.T}
        conv.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in values.items()})
    features = torch.from_numpy(x)
    given = jnp.asarray(x)
    edges = torch.from_numpy(graph.edge_index.astype(np.int64))
    matrix = torch_csr(graph)[2]

    def run(adjacency: Any) -> Any:
        return convs[1](torch.relu(convs[0](features, adjacency)), adjacency)

    ways: dict[str, Way] = {"PyG edge_index": lambda: run(edges), "PyG CSR": lambda: run(matrix)}
    compiled = jax.jit(lambda neighbours, x: gnn.apply(config, prepared, neighbours, x, ops=ops)[0])
    for layout in ("bucketed", "csr"):
        table = NeighborTable.from_edges(graph.edge_index, graph.num_nodes, layout=layout)
        permuted = table.permute(given).block_until_ready()
        ways[f"tilewright {layout}"] = lambda table=table, permuted=permuted: compiled(table, permuted).block_until_ready()
        compare(ways["PyG edge_index"](), table.unpermute(compiled(table, permuted)), layout)
    return ways


def compare(expected: Any, found: Any, what: str) -> None:
    """Raises a `ValueError` where the results differ: a time of something else says nothing."""
    largest = float(np.abs(expected.numpy() - np.asarray(found)).max())
    if not largest < AGREES:
        raise ValueError(f"expected {what} to agree with torch within {AGREES}, found a difference of {largest}")


def turn(run: Way) -> float:
    """Milliseconds of a call, as one sees it who calls this way again and again: the median of `TIMED_S`, three at least.

    Before come a pause, in which the other library's threads stop waiting busily, and `WARM_S` of untimed calls, in which the
    way's own threads wake up and its arrays come into the caches.
    """

    def calls(seconds: float, least: int) -> list[float]:
        times: list[float] = []
        while len(times) < least or sum(times) < 1e3 * seconds:
            began = time.perf_counter()
            run()
            times.append(1e3 * (time.perf_counter() - began))
        return times

    time.sleep(PAUSE_S)
    calls(WARM_S, 1)
    return spread(calls(TIMED_S, 3)).median


def measured(ways: Mapping[str, Way], repetitions: int) -> dict[str, Any]:
    """Milliseconds of a call of each, in turns: medians and ranges."""
    seconds = alternate({name: partial(turn, run) for name, run in ways.items()}, repetitions)
    spreads: dict[str, Spread] = {name: spread(times) for name, times in seconds.items()}
    return {
        "ms": {name: one.median for name, one in spreads.items()},
        "range_ms": {name: one.range for name, one in spreads.items()},
    }


def show(console: Console, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    table = Table(title=title)
    for column in ("graph", "way", "ms", "× of tilewright's best"):
        table.add_column(column, justify="left" if column in ("graph", "way") else "right")
    for row in rows:
        best = min(ms for name, ms in row["ms"].items() if name.startswith("tilewright"))
        for line, (name, ms) in enumerate(row["ms"].items()):
            last = line == len(row["ms"]) - 1
            table.add_row("" if line else row["graph"], name, f"{ms:.2f}", f"{ms / best:.2f}", end_section=last)
    console.print(table)


def main(*, data: SeveralWords = GRAPHS, features: int = 128, repetitions: int = 11, json_file: JsonFile = None) -> None:
    console = human_console(json_file)
    torch.set_num_threads(cores())
    rng = np.random.default_rng(0)
    aggregated = []
    models = []
    with torch.inference_mode():
        for name in track(data, "graphs", console=console, disable=not console.is_terminal):
            graph = read_graph(name)
            x = rng.standard_normal((graph.num_nodes, features)).astype(np.float32)
            aggregated.append({**graph.record(), **measured(aggregations(graph, x), repetitions)})
            models.append({**graph.record(), **measured(networks(graph, x), repetitions)})
    show(console, f"mean over the neighbours, {features} features, float32", aggregated)
    show(console, f"GraphSAGE, two layers of {features}, float32", models)
    versions = {"jax_version": jax.__version__, "torch_version": torch.__version__}
    about = {"chip": chip_name(), "threads": cores(), "kernels": native.kernels().isa or "xla", **versions}
    about |= {"torch_geometric_version": torch_geometric.__version__, "features": features, "repetitions": repetitions}
    write_json(json_file, {**about, "aggregation": aggregated, "graphsage": models})


if __name__ == "__main__":
    app = App(name="bench_graph", help=__doc__)
    app.default(main)
    app()
