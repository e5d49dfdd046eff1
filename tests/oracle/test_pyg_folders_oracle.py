"""Folders of PyG's data sets: raw files and what PyG processes from them, against PyG's own objects."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.sparse import random_array
from torch_geometric.data import Data
from torch_geometric.datasets import Planetoid, TUDataset

from tilewright.graph.data import GraphData, NodeData, read_data

NODES, KNOWN, TRAIN = 700, 600, 20


def planetoid(root: Path, name: str, left_out: int) -> Path:
    """Writes raw files of a random graph, of whose last nodes some have no row."""
    rng = np.random.default_rng(0)
    tests = KNOWN + rng.permutation(NODES - KNOWN)
    tests = tests[(tests == NODES - 1) | (tests == KNOWN) | (rng.permutation(len(tests)) >= left_out)]
    features = random_array((KNOWN + len(tests), 30), density=0.1, rng=rng, format="csr", dtype=np.float32)
    classes = np.eye(4, dtype=np.int32)[rng.integers(0, 4, KNOWN + len(tests))]
    parts: dict[str, Any] = {
        "x": features[:TRAIN],
        "y": classes[:TRAIN],
        "allx": features[:KNOWN],
        "ally": classes[:KNOWN],
        "tx": features[KNOWN:],
        "ty": classes[KNOWN:],
        "graph": {node: rng.integers(0, NODES, rng.integers(0, 6)).tolist() for node in range(NODES)},
    }
    raw = root / name / "raw"
    raw.mkdir(parents=True)
    for part, value in parts.items():
        (raw / f"ind.{name.lower()}.{part}").write_bytes(pickle.dumps(value, 2))
    (raw / f"ind.{name.lower()}.test.index").write_text("\n".join(map(str, tests)) + "\n")
    return root / name


def same_nodes(data: Any, graph: Data, unlabelled: int = 0) -> None:
    assert isinstance(data, NodeData)
    assert graph.x is not None
    assert graph.edge_index is not None
    assert isinstance(graph.y, torch.Tensor)
    np.testing.assert_array_equal(data.rows(np.arange(data.num_nodes)), graph.x.numpy())
    np.testing.assert_array_equal(data.edge_index, graph.edge_index.numpy())
    known = data.labels >= 0
    assert (~known).sum() == unlabelled
    np.testing.assert_array_equal(data.labels[known], graph.y.numpy()[known])
    for part in ("train", "val", "test"):
        np.testing.assert_array_equal(np.sort(getattr(data, part)), np.flatnonzero(graph[f"{part}_mask"].numpy()))


@pytest.mark.parametrize("name, left_out", [("Cora", 0), ("CiteSeer", 15)])
def test_planetoid(tmp_path: Path, name: str, left_out: int):
    folder = planetoid(tmp_path, name, left_out)
    raw = read_data(str(folder))
    graph = Planetoid(str(tmp_path), name)[0]
    assert isinstance(graph, Data)
    unlabelled = int((raw.labels < 0).sum())
    assert (unlabelled > 0) == (left_out > 0)
    same_nodes(raw, graph, unlabelled)
    same_nodes(read_data(str(folder)), graph)
    torch.save((graph, None), folder / "processed" / "data.pt")  # as PyG before 2.4
    same_nodes(read_data(str(folder)), graph)


def test_tu(tmp_path: Path):
    rng = np.random.default_rng(0)
    graphs = np.sort(rng.integers(0, 12, 80))
    graphs[:12] = np.arange(12)
    graphs.sort()
    ends = rng.integers(0, 80, (2, 600))
    ends = ends[:, graphs[ends[0]] == graphs[ends[1]]]
    columns: dict[str, np.ndarray] = {
        "A": ends.T + 1,
        "graph_indicator": graphs + 1,
        "graph_labels": rng.integers(0, 2, 12) * 2 - 1,
        "node_labels": rng.integers(2, 6, 80),
        "node_attributes": rng.integers(0, 9, (80, 2)) / 4,
        "edge_labels": rng.integers(0, 3, ends.shape[1]),
        "edge_attributes": rng.integers(0, 9, ends.shape[1]) / 4,
    }
    raw = tmp_path / "TINY" / "raw"
    raw.mkdir(parents=True)
    for stem, values in columns.items():
        np.savetxt(raw / f"TINY_{stem}.txt", values, "%g", delimiter=", ")
    found = read_data(str(raw.parent))
    dataset = TUDataset(str(tmp_path), "TINY", use_node_attr=True, use_edge_attr=True)
    for data in (found, read_data(str(raw.parent))):
        assert isinstance(data, GraphData)
        assert data.edge_attr is not None
        assert data.num_graphs == len(dataset)
        assert data.labels.tolist() == [int(graph.y) for graph in dataset]
        for n in range(data.num_graphs):
            graph: Any = dataset[n]
            nodes = slice(*data.node_offsets[n : n + 2])
            edges = slice(*data.edge_offsets[n : n + 2])
            np.testing.assert_array_equal(data.features[nodes], graph.x.numpy())
            order = np.lexsort(graph.edge_index.numpy())
            np.testing.assert_array_equal(data.edge_index[:, edges], graph.edge_index.numpy()[:, order])
            np.testing.assert_array_equal(data.edge_attr[edges], graph.edge_attr.numpy()[order])
