"""Training epochs of GraphSAGE and GATv2 beside PyTorch Geometric: seconds and peak memory, and edges sampled per second.

    .venv-oracle/bin/python benchmarks/graph_training_peers.py [--graph rmat:169343:1166243] [--repetitions 5] [--json FILE]
    ... --models sampled --models sampling [--graph FOLDER]    # needs torch-sparse; a FOLDER is from graph_scale.py make

The default graph is an RMAT graph of ogbn-arxiv's size, with 128 features and 40 classes. Two layers of width 128 (GATv2: 8
heads of 16) are trained in float32 by Adam without dropout. Each measurement is a process of its own, so that its peak memory
is known; the ways run in turns, every second time in reverse. PyG runs with `edge_index` and, for GraphSAGE, with the
adjacency as a torch CSR matrix and as torch-sparse's `SparseTensor`, its fused paths.

`sampled` trains GraphSAGE on batches of 1,024 of `--roots` training nodes with 10 and 10 sampled neighbours, and `sampling`
only makes these batches, features included. PyG has its `NeighborLoader`, whose workers are processes and ours threads; peak
memory adds the largest worker to the process.
"""

import gc
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from cyclopts import App

from tilewright.bench.graph import read_graph
from tilewright.cli.outputs import JsonFile, human_console, write_json
from tilewright.compiled.machine import chip_name, cores
from tilewright.compiled.timing import spread
from tilewright.graph.data import read_npz

app = App(help=__doc__)
FEATURES, CLASSES, HIDDEN, HEADS = 128, 40, 128, 8
FAN_OUTS, BATCH = [10, 10], 1024
WAYS = {
    "sage": ("tilewright", "pyg csr", "pyg SparseTensor", "pyg edge_index"),
    "gatv2": ("tilewright", "pyg edge_index"),
    "sampled": ("tilewright", "pyg 0 workers", "pyg 1 worker"),
    "sampling": ("tilewright 1 worker", "tilewright 2 workers", "pyg 0 workers", "pyg 1 worker", "pyg 2 workers"),
}
BEFORE = "tilewright before"
Epoch = Callable[[], tuple[float, int]]
"""An epoch; returns the loss, and the number of sampled edges (0 for a whole graph)."""


def arrays(graph: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Returns edges without self-loops and duplicates, features, labels, and the number of nodes; a folder's edges as given."""
    if Path(graph).is_dir():
        found = read_npz(Path(graph))
        return np.asarray(found.edge_index), np.asarray(found.features), found.labels, found.num_nodes
    found = read_graph(graph)
    keys = np.unique(found.edge_index[0].astype(np.int64) * found.num_nodes + found.edge_index[1])
    edges = np.stack([keys // found.num_nodes, keys % found.num_nodes])
    rng = np.random.default_rng(0)
    x = rng.standard_normal((found.num_nodes, FEATURES), np.float32)
    labels = rng.integers(0, CLASSES, found.num_nodes).astype(np.int32)
    return edges[:, edges[0] != edges[1]].astype(np.int32), x, labels, found.num_nodes


def drawn_roots(nodes: int, count: int) -> np.ndarray:
    """Returns the training nodes of sampled training."""
    return np.sort(np.random.default_rng(1).permutation(nodes)[:count]).astype(np.int32)


def ours(model: str, graph: str) -> Epoch:
    """Returns an epoch of training on the whole graph with Tilewright."""
    import jax

    from tilewright.graph.data import NodeData
    from tilewright.models.gnn import GraphSAGEConfig
    from tilewright.models.gnn_families import GATv2Config
    from tilewright.train.gnn import GNNOptions
    from tilewright.train.loop import TrainingRun
    from tilewright.train.nodes import full_graph_task

    edges, x, labels, nodes = arrays(graph)
    ids = np.arange(nodes, dtype=np.int32)
    data = NodeData("made", edges, x, labels, ids, ids[:0], ids[:0])
    sizes: dict[str, Any] = {"features": FEATURES, "classes": CLASSES, "dropout": 0.0}
    config = (
        GraphSAGEConfig(hidden=HIDDEN, **sizes)
        if model == "sage"
        else GATv2Config(hidden=HIDDEN // HEADS, heads=HEADS, **sizes)
    )
    run = TrainingRun(full_graph_task(config, data, GNNOptions(weight_decay=0.0)), None)
    batch = next(run.task.batches(0))
    del edges, x, labels, data

    def epoch() -> tuple[float, int]:
        run.advance(batch)
        jax.block_until_ready(run.params)
        return float(run.recent[-1]["loss"][0]), 0

    return epoch


def ours_sampled(graph: str, roots: int) -> Epoch:
    """Returns an epoch of training on sampled neighbourhoods with Tilewright, whose one thread samples ahead."""
    import jax

    from tilewright.graph.data import NodeData
    from tilewright.models.gnn import GraphSAGEConfig
    from tilewright.train.gnn import GNNOptions
    from tilewright.train.loop import TrainingRun
    from tilewright.train.nodes import sampled_task

    edges, x, labels, nodes = arrays(graph)
    ids = drawn_roots(nodes, roots)
    data = NodeData("made", edges, x, labels, ids, ids[:0], ids[:0])
    config = GraphSAGEConfig(features=x.shape[1], classes=int(labels.max()) + 1, hidden=HIDDEN, dropout=0.0)
    options = GNNOptions(weight_decay=0.0, batch_size=BATCH)
    run = TrainingRun(sampled_task(config, data, options, FAN_OUTS), None)
    batches = run.task.batches(0)
    del edges, labels

    def epoch() -> tuple[float, int]:
        losses = []
        for _ in range(-(-roots // BATCH)):
            run.advance(next(batches))
            losses.append(run.recent[-1]["loss"])
        jax.block_until_ready(run.params)
        return float(np.mean([np.asarray(loss)[0] for loss in losses])), 0

    return epoch


def ours_sampling(graph: str, roots: int, workers: int) -> Epoch:
    """Returns an epoch that only makes batches with Tilewright."""
    import jax

    from tilewright.graph.data import NodeData
    from tilewright.graph.loader import NeighborLoader

    edges, x, labels, nodes = arrays(graph)
    ids = drawn_roots(nodes, roots)
    data = NodeData("made", edges, x, labels, ids, ids[:0], ids[:0])
    loader = NeighborLoader(data, FAN_OUTS, ids, BATCH, shuffle=True, num_workers=workers)

    def epoch() -> tuple[float, int]:
        for batch in loader:
            jax.block_until_ready(batch.x)
        return 0.0, loader.report.filled_edges

    return epoch


def theirs_sampled(graph: str, roots: int, workers: int, trains: bool) -> Epoch:
    """Returns an epoch on sampled neighbourhoods with PyG; without `trains` it only makes the batches."""
    import torch
    from torch_geometric.data import Data
    from torch_geometric.loader import NeighborLoader
    from torch_geometric.nn import SAGEConv

    torch.set_num_threads(cores())
    edges, x, labels, nodes = arrays(graph)
    ids = torch.from_numpy(drawn_roots(nodes, roots).astype(np.int64))
    data = Data(
        x=torch.from_numpy(x), edge_index=torch.from_numpy(edges.astype(np.int64)), y=torch.from_numpy(labels.astype(np.int64))
    )
    del edges
    loader = NeighborLoader(
        data,
        num_neighbors=FAN_OUTS,
        input_nodes=ids,
        batch_size=BATCH,
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    convs = torch.nn.ModuleList([SAGEConv(x.shape[1], HIDDEN), SAGEConv(HIDDEN, int(labels.max()) + 1)])
    optimizer = torch.optim.Adam(convs.parameters(), lr=0.01)

    def epoch() -> tuple[float, int]:
        losses, sampled = [0.0], 0
        for batch in loader:
            sampled += batch.edge_index.shape[1]
            if not trains:
                continue
            optimizer.zero_grad()
            scores = convs[1](torch.relu(convs[0](batch.x, batch.edge_index)), batch.edge_index)
            loss = torch.nn.functional.cross_entropy(scores[: batch.batch_size], batch.y[: batch.batch_size])
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
        return float(np.mean(losses[1:] or [0.0])), sampled

    return epoch


def theirs(model: str, graph: str, adjacency_kind: str) -> Epoch:
    """Returns an epoch of training on the whole graph with PyG."""
    import torch
    from torch_geometric.nn import GATv2Conv, SAGEConv

    torch.set_num_threads(cores())
    edges, x, labels, nodes = arrays(graph)
    adjacency = torch.from_numpy(edges.astype(np.int64))
    if adjacency_kind == "SparseTensor":
        from torch_sparse import SparseTensor

        sources, destinations = adjacency
        adjacency = SparseTensor(row=destinations, col=sources, sparse_sizes=(nodes, nodes))  # transposed, as PyG expects
    if adjacency_kind == "csr":  # the transposed adjacency, as PyG's layers expect
        order = np.argsort(edges[1], kind="stable")
        offsets = np.concatenate([[0], np.cumsum(np.bincount(edges[1], minlength=nodes))])
        columns = torch.from_numpy(edges[0][order].astype(np.int64))
        ones = torch.ones(len(columns))
        adjacency = torch.sparse_csr_tensor(torch.from_numpy(offsets.astype(np.int64)), columns, ones, (nodes, nodes))
    if model == "sage":
        convs = torch.nn.ModuleList([SAGEConv(FEATURES, HIDDEN), SAGEConv(HIDDEN, CLASSES)])
        activation = torch.relu
    else:
        first = GATv2Conv(FEATURES, HIDDEN // HEADS, heads=HEADS)
        convs = torch.nn.ModuleList([first, GATv2Conv(HIDDEN, CLASSES, heads=1, concat=False)])
        activation = torch.nn.functional.elu
    optimizer = torch.optim.Adam(convs.parameters(), lr=0.01)
    features, targets = torch.from_numpy(x), torch.from_numpy(labels.astype(np.int64))

    def epoch() -> tuple[float, int]:
        optimizer.zero_grad()
        scores = convs[1](activation(convs[0](features, adjacency)), adjacency)
        loss = torch.nn.functional.cross_entropy(scores, targets)
        loss.backward()
        optimizer.step()
        return float(loss), 0

    return epoch


def needs_torch_sparse(model: str, way: str) -> bool:
    """Returns True for ways of PyG that need an extension: its `SparseTensor`, and its sampling."""
    return "SparseTensor" in way or (model in ("sampled", "sampling") and "pyg" in way)


def way_of(model: str, way: str, graph: str, roots: int) -> Epoch:
    """Returns an epoch of one way."""
    who, *rest = way.split()
    if model == "sampling":
        workers = int(rest[0])
        return (
            ours_sampling(graph, roots, workers) if who == "tilewright" else theirs_sampled(graph, roots, workers, trains=False)
        )
    if model == "sampled":
        return ours_sampled(graph, roots) if who == "tilewright" else theirs_sampled(graph, roots, int(rest[0]), trains=True)
    return ours(model, graph) if who == "tilewright" else theirs(model, graph, rest[0])


@app.command
def turn(model: str, way: str, graph: str, epochs: int, roots: int) -> None:
    """Measures one way in this process, and prints the result as JSON.

    Args:
        model: a key of `WAYS`.
        way: a name of `WAYS`, or `BEFORE`.
        graph: see the module.
        epochs: epochs to time, after two others (one for sampled neighbourhoods).
        roots: training nodes of an epoch of sampled neighbourhoods.
    """
    epoch = way_of(model, way, graph, roots)
    whole = model in ("sage", "gatv2")
    first = [epoch()[0] for _ in range(2 if whole else 1)]
    seconds, rates = [], []
    for _ in range(epochs):
        start = time.perf_counter()
        loss, sampled = epoch()
        seconds.append(time.perf_counter() - start)
        rates.append(sampled / seconds[-1])
    if whole and not loss < first[0]:
        raise ValueError(f"expected the loss to fall below {first[0]}, found {loss}")
    found = {"seconds": float(np.median(seconds)), "loss": loss, "edges_per_s": float(np.median(rates))}
    del epoch
    gc.collect()  # ends PyG's workers, whose memory counts only then
    usage = [resource.getrusage(who).ru_maxrss / 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    print(json.dumps({**found, "peak_mb": usage[0], "worker_mb": usage[1]}))


@app.default
def compare(
    *,
    graph: str = "rmat:169343:1166243",
    models: tuple[str, ...] = ("sage", "gatv2"),
    repetitions: int = 5,
    epochs: int = 3,
    roots: int = 20_480,
    before: Path | None = None,
    json_file: JsonFile = None,
) -> None:
    """Compares all ways in turns.

    Args:
        graph: see `tilewright bench graph --data`; or a folder that `graph_scale.py make` wrote.
        models: "sage", "gatv2", "sampled" and "sampling".
        repetitions: processes of each way.
        epochs: epochs that a process times; their median counts.
        roots: training nodes of an epoch of sampled neighbourhoods.
        before: another checkout of Tilewright, a further way for whole graphs.
    """
    console = human_console(json_file)
    record: dict[str, Any] = {"graph": graph, "chip": chip_name(), "cores": cores(), "ways": {}, "ratios": {}}
    for model in models:
        ways = [way for way in WAYS[model] if not needs_torch_sparse(model, way) or find_spec("torch_sparse")]
        for way in set(WAYS[model]) - set(ways):
            console.print(f"{model}, {way}: not measured, since torch-sparse is missing", markup=False)
        if before is not None and model in ("sage", "gatv2"):
            ways.append(BEFORE)
        results: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
        for n in range(repetitions):
            for way in ways if n % 2 == 0 else reversed(ways):
                command = [sys.executable, __file__, "turn", model, way, graph, str(epochs), str(roots)]
                environment = dict(os.environ)
                if way == BEFORE:
                    environment["PYTHONPATH"] = f"{before}/src"
                done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
                if done.returncode:
                    raise RuntimeError(f"{model}, {way} failed: {done.stderr[-2000:]}")
                results[way].append(json.loads(done.stdout.splitlines()[-1]))
        ratios: dict[str, dict[str, float]] = {}
        base = [each["seconds"] for each in results[WAYS[model][0]]]
        for way, each in results.items():
            seconds = spread([one["seconds"] for one in each])
            ratio = spread([one["seconds"] / mine for one, mine in zip(each, base, strict=True)])
            peak = spread([one["peak_mb"] + one["worker_mb"] * ("pyg" in way) for one in each])
            rate = spread([one["edges_per_s"] / 1e6 for one in each])
            sampled = f", {rate.median:.2f} M edges/s ({rate.least:.2f} to {rate.most:.2f})" if rate.most else ""
            console.print(
                f"{model}, {way}: {seconds.median:.2f} s per epoch ({seconds.least:.2f} to {seconds.most:.2f}), "
                f"{ratio.median:.2f} times ours ({ratio.least:.2f} to {ratio.most:.2f}), {peak.median:,.0f} MB{sampled}",
                markup=False,
            )
            ratios[way] = {"median": ratio.median, "least": ratio.least, "most": ratio.most}
        record["ways"][model] = results
        record["ratios"][model] = ratios
    write_json(json_file, record)


if __name__ == "__main__":
    app()
