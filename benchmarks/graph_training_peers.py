"""Training epochs of GraphSAGE and GATv2 beside PyTorch Geometric, on the whole graph: seconds and peak memory.

    .venv-oracle/bin/python benchmarks/graph_training_peers.py [--graph rmat:169343:1166243] [--repetitions 5] [--json FILE]

The default graph is an RMAT graph of ogbn-arxiv's size, with 128 features and 40 classes. Two layers of width 128 (GATv2: 8
heads of 16) are trained in float32 by Adam without dropout. Each measurement is a process of its own, so that its peak memory
is known; the ways run in turns, every second time in reverse. PyG runs with `edge_index` and, for GraphSAGE, with the
adjacency as a torch CSR matrix, its fused path.
"""

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from cyclopts import App

from tilewright.bench.graph import read_graph
from tilewright.cli.outputs import JsonFile, human_console, write_json
from tilewright.compiled.machine import chip_name, cores
from tilewright.compiled.timing import spread

app = App(help=__doc__)
FEATURES, CLASSES, HIDDEN, HEADS = 128, 40, 128, 8
WAYS = {"sage": ("tilewright", "pyg csr", "pyg edge_index"), "gatv2": ("tilewright", "pyg edge_index")}
BEFORE = "tilewright before"


def arrays(graph: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Returns edges without self-loops and duplicates, features, labels, and the number of nodes."""
    found = read_graph(graph)
    keys = np.unique(found.edge_index[0].astype(np.int64) * found.num_nodes + found.edge_index[1])
    edges = np.stack([keys // found.num_nodes, keys % found.num_nodes])
    rng = np.random.default_rng(0)
    x = rng.standard_normal((found.num_nodes, FEATURES), np.float32)
    labels = rng.integers(0, CLASSES, found.num_nodes).astype(np.int32)
    return edges[:, edges[0] != edges[1]].astype(np.int32), x, labels, found.num_nodes


def ours(model: str, graph: str) -> Callable[[], float]:
    """Returns a function that trains for an epoch with Tilewright, and returns the loss."""
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

    def epoch() -> float:
        run.advance(batch)
        jax.block_until_ready(run.params)
        return float(run.recent[-1]["loss"][0])

    return epoch


def theirs(model: str, graph: str, csr: bool) -> Callable[[], float]:
    """Returns a function that trains for an epoch with PyG, and returns the loss."""
    import torch
    from torch_geometric.nn import GATv2Conv, SAGEConv

    torch.set_num_threads(cores())
    edges, x, labels, nodes = arrays(graph)
    adjacency = torch.from_numpy(edges.astype(np.int64))
    if csr:  # the transposed adjacency, as PyG's layers expect
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

    def epoch() -> float:
        optimizer.zero_grad()
        scores = convs[1](activation(convs[0](features, adjacency)), adjacency)
        loss = torch.nn.functional.cross_entropy(scores, targets)
        loss.backward()
        optimizer.step()
        return float(loss)

    return epoch


@app.command
def turn(model: str, way: str, graph: str, epochs: int) -> None:
    """Measures one way in this process, and prints the result as JSON.

    Args:
        model: "sage" or "gatv2".
        way: a name of `WAYS`, or `BEFORE`.
        graph: see the module.
        epochs: epochs to time, after two others.
    """
    epoch = ours(model, graph) if way in ("tilewright", BEFORE) else theirs(model, graph, way == "pyg csr")
    first = [epoch() for _ in range(2)]
    seconds = []
    for _ in range(epochs):
        start = time.perf_counter()
        loss = epoch()
        seconds.append(time.perf_counter() - start)
    if not loss < first[0]:
        raise ValueError(f"expected the loss to fall below {first[0]}, found {loss}")
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"seconds": float(np.median(seconds)), "peak_mb": peak_mb, "loss": loss}))


@app.default
def compare(
    *,
    graph: str = "rmat:169343:1166243",
    models: tuple[str, ...] = ("sage", "gatv2"),
    repetitions: int = 5,
    epochs: int = 3,
    before: Path | None = None,
    json_file: JsonFile = None,
) -> None:
    """Compares all ways in turns.

    Args:
        graph: see `tilewright bench graph --data`.
        models: "sage" and "gatv2".
        repetitions: processes of each way.
        epochs: epochs that a process times; their median counts.
        before: another checkout of Tilewright, a further way.
    """
    console = human_console(json_file)
    record: dict[str, Any] = {"graph": graph, "chip": chip_name(), "cores": cores(), "ways": {}}
    for model in models:
        ways = (*WAYS[model], *([] if before is None else [BEFORE]))
        results: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
        for n in range(repetitions):
            for way in ways if n % 2 == 0 else reversed(ways):
                environment = dict(os.environ)
                if way == BEFORE:
                    environment["PYTHONPATH"] = f"{before}/src"
                command = [sys.executable, __file__, "turn", model, way, graph, str(epochs)]
                done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
                if done.returncode:
                    raise RuntimeError(f"{model}, {way} failed: {done.stderr[-2000:]}")
                results[way].append(json.loads(done.stdout.splitlines()[-1]))
                console.print(f"{model}, {way}: {done.stdout.splitlines()[-1]}", markup=False)
        base = [each["seconds"] for each in results["tilewright"]]
        for way, each in results.items():
            seconds = spread([one["seconds"] for one in each])
            ratio = spread([one["seconds"] / mine for one, mine in zip(each, base, strict=True)])
            peak = spread([one["peak_mb"] for one in each])
            console.print(
                f"{model}, {way}: {seconds.median:.2f} s per epoch ({seconds.least:.2f} to {seconds.most:.2f}), "
                f"{ratio.median:.2f} times tilewright's ({ratio.least:.2f} to {ratio.most:.2f}), {peak.median:,.0f} MB",
                markup=False,
            )
        record["ways"][model] = results
    write_json(json_file, record)


if __name__ == "__main__":
    app()
