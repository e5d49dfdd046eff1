"""Sampling and training on graphs that are large for this machine.

    python benchmarks/graph_scale.py make FOLDER --nodes 10000000 --edges 100000000   # writes an RMAT graph as .npy files
    python benchmarks/graph_scale.py sample FOLDER --fan-out 10,10 [--json FILE]      # edges sampled per second
    tilewright train gnn --model sage --data FOLDER --fan-out 10,10 --batch-size 1024 --epochs 2

`make` needs little more memory than a part of the edges. `sample` measures the C++ sampler with one and two threads, and its
NumPy reference, in turns.
"""

import resource
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from cyclopts import App

from tilewright.bench.graph import RMAT
from tilewright.cli.outputs import JsonFile, human_console, write_json
from tilewright.compiled.machine import chip_name, cores
from tilewright.compiled.timing import spread
from tilewright.graph.data import NodeData, read_npz
from tilewright.graph.sample import NeighbourSampler
from tilewright.kernels.neighbours import reference

app = App(help=__doc__)
PART = 2**22
"""Edges, and rows of features, that are drawn at a time."""


def rmat_part(rng: np.random.Generator, nodes: int, count: int) -> np.ndarray:
    """Draws at most `count` edges: each falls recursively into a random quarter of the adjacency matrix."""
    ends = np.zeros((2, count), np.int32)
    bounds = np.cumsum(RMAT)[:3].astype(np.float32)
    for _ in range((nodes - 1).bit_length()):
        drawn = rng.random(count, np.float32)
        ends *= 2
        ends[0] += drawn >= bounds[1]
        ends[1] += ((drawn >= bounds[0]) & (drawn < bounds[1])) | (drawn >= bounds[2])
    return ends[:, (ends < nodes).all(0)]


@app.command
def make(
    folder: Path,
    *,
    nodes: int = 10_000_000,
    edges: int = 100_000_000,
    features: int = 32,
    classes: int = 16,
    trained: int = 102_400,
    tested: int = 10_240,
    undirected: bool = False,
    seed: int = 0,
) -> None:
    """Writes an RMAT graph whose features are those of a node's class plus noise.

    Args:
        folder: folder for the files.
        nodes: number of nodes.
        edges: number of directed edges.
        features: width of the features.
        classes: number of classes.
        trained: number of training nodes.
        tested: number of validation nodes, and of test nodes.
        undirected: write the other direction of each of `edges` / 2 edges, too.
        seed: seed of the graph.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    edge_index = np.lib.format.open_memmap(folder / "edge_index.npy", "w+", np.int32, (2, edges))
    names = rng.permutation(nodes).astype(np.int32)  # hubs are spread over the ids
    done = 0
    drawn = edges // 2 if undirected else edges
    while done < drawn:
        part = rmat_part(rng, nodes, PART)[:, : drawn - done]
        edge_index[:, done : done + part.shape[1]] = names[part]
        done += part.shape[1]
    edge_index[:, drawn:] = edge_index[::-1, : edges - drawn]
    labels = rng.integers(0, classes, nodes).astype(np.int32)
    means = rng.normal(size=(classes, features)).astype(np.float32)
    x = np.lib.format.open_memmap(folder / "x.npy", "w+", np.float32, (nodes, features))
    for start in range(0, nodes, PART):
        part = labels[start : start + PART]
        x[start : start + PART] = means[part] + 2 * rng.standard_normal((len(part), features), np.float32)
    ids = rng.permutation(nodes)[: trained + 2 * tested].astype(np.int32)
    split = {"train": ids[:trained], "val": ids[trained : trained + tested], "test": ids[trained + tested :]}
    for name, values in {"y": labels, **split}.items():
        np.save(folder / f"{name}.npy", values)
    edge_index.flush()
    x.flush()


def sampled_edges(sampler: NeighbourSampler, data: NodeData, batches: int, threads: int) -> float:
    """Returns the edges sampled per second in `batches` batches of training nodes, without padding."""

    def draw(n: int) -> int:
        roots = np.random.default_rng(n).choice(data.train, sampler.batch_size, replace=False)
        return sum(int((edges >= 0).sum()) for edges in sampler.samples([roots], [n])[0].edges)

    with ThreadPoolExecutor(threads) as pool:
        start = time.perf_counter()
        found = sum(pool.map(draw, range(batches)))
        return found / (time.perf_counter() - start)


@app.command
def sample(
    folder: Path,
    *,
    fan_out: str = "10,10",
    batch_size: int = 1024,
    batches: int = 20,
    repetitions: int = 5,
    json_file: JsonFile = None,
) -> None:
    """Measures edges sampled per second, in millions, with everything that makes a batch but its features.

    Args:
        folder: a graph that `make` wrote.
        fan_out: see `tilewright train gnn`.
        batch_size: roots per batch.
        batches: batches of a measurement.
        repetitions: measurements of each, in turns.
    """
    console = human_console(json_file)
    data = read_npz(folder)
    start = time.perf_counter()
    fan_outs = [int(word) for word in fan_out.split(",")]
    ways: dict[str, Any] = {}
    for form, deduplicate in (("deduplicated", True), ("forest", False)):
        compiled = NeighbourSampler(
            data.edge_index, data.num_nodes, fan_outs, batch_size, deduplicate=deduplicate, roots=data.train
        )
        built_s = time.perf_counter() - start
        plain = object.__new__(NeighbourSampler)
        plain.__dict__ = {**vars(compiled), "kernels": reference}
        ways |= {f"{form}, C++, {n} threads": partial(sampled_edges, compiled, data, batches, n) for n in (1, 2)}
        ways[f"{form}, NumPy, 1 thread"] = partial(sampled_edges, plain, data, max(1, batches // 4), 1)
        start = time.perf_counter()
        console.print(f"{form}: built in {built_s:.1f} s; capacities {compiled.capacities}", markup=False)
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repetitions):
        for name, way in ways.items():
            rates[name].append(way() / 1e6)
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    found = {name: spread(values) for name, values in rates.items()}
    for name, each in found.items():
        console.print(f"{name}: {each.median:.2f} M edges/s ({each.least:.2f} to {each.most:.2f})", markup=False)
    console.print(f"peak memory: {peak_mb:,.0f} MB", markup=False)
    sizes = {"nodes": data.num_nodes, "edges": data.edge_index.shape[1], "fan_out": fan_out, "batch_size": batch_size}
    machine = {"chip": chip_name(), "cores": cores(), "peak_mb": peak_mb}
    write_json(json_file, {**sizes, **machine, "million_edges_per_s": rates})


if __name__ == "__main__":
    app()
