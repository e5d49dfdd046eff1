"""Training of link prediction on one graph: a score for each pair of nodes, the dot product of their embeddings.

The embeddings are the scores that a family's last layer computes. Edges are split at random: those for validation and tests
pass no messages in training. Every step draws as many negative pairs as there are training edges.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jaxtyping import Float, Int, Int32, Int64

from tilewright.graph.data import NodeData
from tilewright.models import gnn
from tilewright.models.gnn import Config
from tilewright.train.gnn import (
    PARTS,
    GNNOptions,
    Weights,
    check_edge_features,
    gnn_run_fingerprint,
    make_optimizer,
    over_runs,
    runs_task,
    start_runs,
)
from tilewright.train.loop import Metrics, Task, descend
from tilewright.train.nodes import WholeGraph, whole_graph

VAL = 0.05
TEST = 0.1
"""Shares of the edges for validation and for tests, those of PyG's example."""


@dataclass(frozen=True)
class LinkSplit:
    """Edges for training, validation and tests, and graphs without the edges to predict.

    Attributes:
        train_graph: graph of the training edges, for training and validation.
        test_graph: graph of the training and validation edges, for tests.
        links: edges of each part, `[2, L]`; of an undirected graph in one direction.
        negatives: as many random pairs without an edge, of each part.
        keys: `source * nodes + destination` of all edges in both directions, sorted.
    """

    train_graph: NodeData
    test_graph: NodeData
    links: dict[str, Int32[np.ndarray, "2 _"]]
    negatives: dict[str, Int32[np.ndarray, "2 _"]]
    keys: Int64[np.ndarray, " K"]


def pair_keys(edges: Int[np.ndarray, "2 E"], nodes: int) -> Int64[np.ndarray, " E"]:
    return edges[0].astype(np.int64) * nodes + edges[1]


def draw_negatives(keys: Int64[np.ndarray, " K"], nodes: int, size: int, rng: np.random.Generator) -> Int32[np.ndarray, "2 L"]:
    """Draws pairs of different nodes without an edge.

    Args:
        keys: sorted `pair_keys` of the edges.
        nodes: number of nodes.
        size: number of pairs.
        rng: random numbers.

    Raises:
        ValueError: all pairs have an edge.
    """
    if 2 * len(keys) >= nodes * (nodes - 1):  # a dense graph has few free pairs, which draws would miss
        free = np.setdiff1d(np.arange(nodes * nodes), keys)
        free = free[free // nodes != free % nodes]
        if size and not len(free):
            raise ValueError(f"expected pairs of nodes without an edge, found edges between all {nodes} nodes")
        return np.stack(np.divmod(rng.choice(free, size), nodes)).astype(np.int32) if size else np.zeros((2, 0), np.int32)
    found = np.zeros((2, 0), np.int32)
    while found.shape[1] < size:
        drawn = rng.integers(0, nodes, (2, size), np.int32)
        drawn_keys = pair_keys(drawn, nodes)
        places = np.minimum(np.searchsorted(keys, drawn_keys), max(len(keys) - 1, 0))
        taken = keys[places] == drawn_keys if len(keys) else np.zeros(size, bool)
        found = np.concatenate([found, drawn[:, ~taken & (drawn[0] != drawn[1])]], axis=1)
    return found[:, :size]


def split_links(data: NodeData, val: float = VAL, test: float = TEST, seed: int = 0) -> LinkSplit:
    """Splits the edges of a graph at random; both directions of an undirected edge go to one part, self-loops to none.

    Args:
        data: the graph.
        val: share of the edges for validation.
        test: share of the edges for tests.
        seed: seed of the split.

    Raises:
        ValueError: a part would have no edges.
    """
    edges = data.edge_index
    nodes = data.num_nodes
    keys = np.unique(np.concatenate([pair_keys(edges, nodes), pair_keys(edges[::-1], nodes)]))
    undirected = len(np.unique(pair_keys(edges, nodes))) == len(keys)
    loops = edges[0] == edges[1]
    low, high = (edges.min(0), edges.max(0)) if undirected else edges
    pairs, owner = np.unique(pair_keys(np.stack([low, high]), nodes), return_inverse=True)
    owner = owner.reshape(-1)  # pair of each edge
    proper = np.flatnonzero(pairs // nodes != pairs % nodes)
    rng = np.random.default_rng(seed)
    order = rng.permutation(proper)
    sizes = round(val * len(order)), round(test * len(order))
    ends = {"val": order[: sizes[0]], "test": order[sizes[0] : sum(sizes)], "train": order[sum(sizes) :]}
    if empty := [part for part in PARTS if not len(ends[part])]:
        raise ValueError(f"{data.name}: expected edges for {', '.join(empty)}, found {len(order)} edges in all")
    part_of = np.full(len(pairs), "train", "U5")
    part_of[ends["val"]] = "val"
    part_of[ends["test"]] = "test"
    part = part_of[owner]
    links = {name: np.stack([pairs[ids] // nodes, pairs[ids] % nodes]).astype(np.int32) for name, ids in ends.items()}
    negatives = {name: draw_negatives(keys, nodes, links[name].shape[1], rng) for name in PARTS}
    train_graph = data.with_edges((part == "train") | loops)
    return LinkSplit(train_graph, data.with_edges((part != "test") | loops), links, negatives, keys)


def area_under_curve(positive: Float[np.ndarray, " P"], negative: Float[np.ndarray, " N"]) -> float:
    """Computes the area under the ROC curve: the share of pairs whose positive score is larger; equal scores count half."""
    values, place, counts = np.unique(np.concatenate([positive, negative]), return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2  # mean rank of equal scores, from 1
    total = ranks[place.reshape(-1)[: len(positive)]].sum() - len(positive) * (len(positive) + 1) / 2
    return float(total / (len(positive) * len(negative))) if len(values) else float("nan")


def link_task(config: Config, data: NodeData, options: GNNOptions, runs: int = 1) -> Task:
    """Builds the task of link prediction on the whole graph; an epoch is one step.

    The loss is the mean binary cross-entropy of the training edges and as many negative pairs, drawn in each step. The metrics
    are areas under the ROC curve of each part. All runs have the same split.

    Args:
        config: a model; `classes` is the width of the embeddings.
        data: the graph; its labels and their split are not used.
        options: options of the training.
        runs: runs with consecutive seeds.

    Raises:
        ValueError: the features of edges do not fit the model, a part of the split would have no edges, or the graph has edge
            weights and the model takes none.
    """
    check_edge_features(config, data)
    if data.weights is not None and not config.takes_weights:
        raise ValueError(f"expected no edge weights for models other than GCN, found some in {data.name}")
    split = split_links(data, seed=options.seed)
    seeds = options.seed + np.arange(runs)
    optimizer = make_optimizer(config, options, 1)
    train_graph, test_graph = (whole_graph(config, graph) for graph in (split.train_graph, split.test_graph))

    def rows(graph: WholeGraph, pairs: Int[np.ndarray, "..."]) -> Int[np.ndarray, "..."]:
        """Numbers nodes by the rows of the table."""
        return pairs if graph.table.places is None else np.asarray(graph.table.places)[pairs]

    def pair_scores(params: Any, state: Any, graph: WholeGraph, pairs: Array, **given: Any) -> tuple[Array, Any]:
        z, state = gnn.apply(config, params, graph.table, graph.x, state, edge_attr=graph.edge_attr, **given)
        return (z[pairs[0]] * z[pairs[1]]).sum(-1), state

    def batches(first: int) -> Iterator[tuple[WholeGraph, Array, Array]]:
        """Yields the graph, the training edges, and negative pairs of each run, `[runs, 2, L]`, from step `first` on."""
        links = split.links["train"]
        positive = jnp.asarray(rows(train_graph, links))
        for n in count(first):
            rngs = (np.random.default_rng((int(seed), n)) for seed in seeds)
            drawn = [draw_negatives(split.keys, data.num_nodes, links.shape[1], rng) for rng in rngs]
            yield train_graph, positive, jnp.asarray(rows(train_graph, np.stack(drawn)))

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(weights: Weights, opt_state: Any, batch: Any, keys: Array) -> tuple[Weights, Any, Metrics]:
        graph, positive, drawn = batch

        def one_run(weights: Weights, opt_state: Any, drawn: Array, key: Array) -> tuple[Weights, Any, Metrics]:
            pairs = jnp.concatenate([positive, drawn], axis=1)
            labels = (jnp.arange(pairs.shape[1]) < positive.shape[1]).astype(jnp.float32)

            def loss(params: Any) -> tuple[Array, Any]:
                scores, state = pair_scores(params, weights[1], graph, pairs, train=True, key=key)
                return optax.sigmoid_binary_cross_entropy(scores, labels).mean(), state

            params, opt_state, metrics, state = descend(loss, optimizer, weights[0], opt_state)
            return (params, state), opt_state, metrics

        return over_runs(one_run)(weights, opt_state, drawn, keys)

    @jax.jit
    def measured(weights: Weights, graph: WholeGraph, pairs: Array) -> Float[Array, "runs L"]:
        return over_runs(lambda params, state: pair_scores(params, state, graph, pairs)[0])(*weights)

    held_out = {}
    for part, graph in (("train", train_graph), ("val", train_graph), ("test", test_graph)):
        held_out[part] = graph, jnp.asarray(rows(graph, np.concatenate([split.links[part], split.negatives[part]], 1)))

    def evaluate(weights: Weights, _: int) -> Metrics:
        found = {}
        for part, (graph, pairs) in held_out.items():
            halves = np.split(np.asarray(measured(weights, graph, pairs)), 2, axis=1)
            found[part] = np.array([area_under_curve(*each) for each in zip(*halves, strict=True)], np.float32)
        return found

    sizes = {"nodes": data.num_nodes, "edges": data.edge_index.shape[1], "predicted": "links"}
    return runs_task(
        options,
        gnn_run_fingerprint(data, config, options, **sizes, runs=runs),
        starting=partial(start_runs, config, optimizer, seeds),
        seeds=seeds,
        step=step,
        batches=batches,
        evaluate=evaluate,
    )
