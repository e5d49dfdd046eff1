"""Trains an HGT on a graph with two kinds of nodes and three kinds of edges, and predicts the topic of every author.

    python examples/graph_relations.py [--epochs 60]

The arrays are those of PyG's `HeteroData`: `x_dict` and `edge_index_dict`. Authors have no features that tell their topic, but
their papers do. A quarter of the authors is labelled.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from tilewright.graph import RelationTable
from tilewright.models.gnn import Linear
from tilewright.models.gnn_families import HGTLayer, glorot_linear
from tilewright.models.params import initialise
from tilewright.train.loop import descend

AUTHORS, PAPERS, TOPICS, HIDDEN, HEADS = 200, 600, 4, 32, 4
WRITES, WRITTEN_BY, CITES = ("author", "writes", "paper"), ("paper", "written_by", "author"), ("paper", "cites", "paper")


def make_graph(rng: np.random.Generator) -> tuple[dict[str, np.ndarray], dict[tuple[str, str, str], np.ndarray], np.ndarray]:
    """Returns features, edges, and the topic of each author."""
    topics = rng.integers(0, TOPICS, PAPERS)
    authored = rng.integers(0, TOPICS, AUTHORS)
    fits = rng.random((AUTHORS, PAPERS)) < np.where(authored[:, None] == topics, 0.06, 0.002)
    cites = rng.random((PAPERS, PAPERS)) < np.where(topics[:, None] == topics, 0.01, 0.001)
    x = {"author": np.ones((AUTHORS, 1)), "paper": np.eye(TOPICS)[topics] + rng.normal(size=(PAPERS, TOPICS))}
    writes = np.stack(np.nonzero(fits))
    edges = {WRITES: writes, WRITTEN_BY: writes[::-1], CITES: np.stack(np.nonzero(cites))}
    return {kind: values.astype(np.float32) for kind, values in x.items()}, edges, authored


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=60)
    epochs = parser.parse_args().epochs
    x, edges, labels = make_graph(np.random.default_rng(0))
    table = RelationTable.build(edges, {"author": AUTHORS, "paper": PAPERS})
    trained = jnp.arange(AUTHORS) < AUTHORS // 4

    first = HGTLayer.declare("convs.0", {"author": 1, "paper": TOPICS}, HIDDEN, HEADS, list(edges))
    second = HGTLayer.declare("convs.1", {"author": HIDDEN, "paper": HIDDEN}, HIDDEN, HEADS, list(edges))
    params = initialise((first, second, glorot_linear("lin", HIDDEN, TOPICS)), jax.random.key(0))
    optimizer = optax.adam(0.01)

    def scores(params: tuple[HGTLayer, HGTLayer, Linear]) -> Array:
        hidden = params[1](params[0](x, table), table)["author"]
        return hidden @ params[2].weight + params[2].bias

    @jax.jit
    def step(params: tuple[HGTLayer, HGTLayer, Linear], opt_state: optax.OptState) -> tuple[tuple, optax.OptState]:
        def loss(params: tuple[HGTLayer, HGTLayer, Linear]) -> tuple[Array, None]:
            losses = optax.softmax_cross_entropy_with_integer_labels(scores(params), jnp.asarray(labels))
            return jnp.where(trained, losses, 0).sum() / (AUTHORS // 4), None

        return descend(loss, optimizer, params, opt_state)[:2]

    opt_state = optimizer.init(params)
    for _ in range(epochs):
        params, opt_state = step(params, opt_state)
    right = np.asarray(jax.jit(scores)(params)).argmax(1) == labels
    print(f"accuracy on other authors: {right[AUTHORS // 4 :].mean():.2f}")


if __name__ == "__main__":
    main()
