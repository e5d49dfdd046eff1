"""Trains GraphSAGE on an edge list of your own and predicts the class of every node.

    python examples/graph_edges.py
    python examples/graph_edges.py --edges edges.csv --labels labels.csv

`edges.csv` has two node ids per line; `labels.csv` has a node id and its class per line, for the nodes whose class is known.
Without files, the script builds two communities of 100 nodes that are linked mostly among themselves, and labels ten of each.
"""

import argparse
from pathlib import Path

import numpy as np
from rich.console import Console

from tilewright.graph.data import NodeData, undirected
from tilewright.graph.table import NeighborTable
from tilewright.models import gnn
from tilewright.models.gnn import GraphSAGEConfig
from tilewright.train.gnn import GNNOptions, best_run
from tilewright.train.loop import train
from tilewright.train.nodes import full_graph_task


def communities(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Returns the edges `[E, 2]` and the labels `[20, 2]` of two communities."""
    pairs = rng.integers(0, 200, (3000, 2))
    same = pairs[:, 0] // 100 == pairs[:, 1] // 100
    kept = pairs[(pairs[:, 0] < pairs[:, 1]) & (same | (rng.random(3000) < 0.1))]
    labelled = np.concatenate([rng.choice(100, 10, replace=False), 100 + rng.choice(100, 10, replace=False)])
    return np.unique(kept, axis=0), np.stack([labelled, labelled // 100], axis=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--edges", type=Path)
    parser.add_argument("--labels", type=Path)
    parser.add_argument("--epochs", type=int, default=100)
    options = parser.parse_args()

    rng = np.random.default_rng(0)
    if options.edges is None or options.labels is None:
        edges, labelled = communities(rng)
    else:
        edges, labelled = (np.loadtxt(path, dtype=np.int32, delimiter=",") for path in (options.edges, options.labels))
    nodes = int(edges.max()) + 1
    labels = np.full(nodes, -1, np.int32)
    labels[labelled[:, 0]] = labelled[:, 1]
    order = rng.permutation(labelled[:, 0]).astype(np.int32)
    held_out = len(order) // 4
    features = rng.normal(size=(nodes, 32)).astype(np.float32)  # no features of your own: random ones identify the nodes
    edge_index = undirected(edges.astype(np.int32))
    data = NodeData("my graph", edge_index, features, labels, order[held_out:], order[:held_out], order[:0])

    config = GraphSAGEConfig(features=32, classes=data.num_classes, hidden=32)
    result = train(full_graph_task(config, data, GNNOptions(epochs=options.epochs)), console=Console())
    params, statistics = best_run(result)
    table = NeighborTable.build(edge_index, num_nodes=nodes)
    scores, _ = gnn.apply(config, params, table, table.permute(features), statistics)
    classes = np.argmax(np.asarray(table.unpermute(scores)), axis=1)
    print(f"nodes of each class: {np.bincount(classes).tolist()}")


if __name__ == "__main__":
    main()
