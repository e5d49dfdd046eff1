"""Reads and checks edges from arrays, SciPy, networkx and PyG."""

from dataclasses import dataclass, replace
from operator import index
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

MOST_NODES = 2**31 - 1
"""Most nodes; ids are int32 on the device."""


@dataclass(frozen=True)
class Edges:
    """Directed edges of a graph.

    Attributes:
        sources: source of each edge, in [0, num_sources).
        destinations: destination of each edge, in [0, num_nodes).
        num_nodes: number of destination nodes.
        num_sources: number of source nodes.
        weights: weight of each edge; None if all are 1.
        features: features of each edge; None without.
    """

    sources: Int[np.ndarray, " E"]
    destinations: Int[np.ndarray, " E"]
    num_nodes: int
    num_sources: int
    weights: Float[np.ndarray, " E"] | None = None
    features: Float[np.ndarray, "E D"] | None = None

    @property
    def edge_index(self) -> Int[np.ndarray, "2 E"]:
        """Sources and destinations, `[2, E]`."""
        return np.stack([self.sources, self.destinations])

    @property
    def is_loop(self) -> Bool[np.ndarray, " E"]:
        """Mask of the self-loops."""
        return self.sources == self.destinations

    def weights_or_ones(self) -> Float[np.ndarray, " E"]:
        """Returns the weights, or ones."""
        return np.ones(self.sources.size, np.float32) if self.weights is None else self.weights


def check_ids(ids: np.ndarray, noun: str, bound: int) -> None:
    """Raises a `ValueError` for ids outside [0, bound)."""
    wrong = np.flatnonzero((ids < 0) | (ids >= bound))
    if wrong.size:
        first = int(wrong[0])
        bounds = f"in 0..{bound - 1}" if bound else "none, since there are no nodes"
        raise ValueError(f"expected {noun} ids {bounds}, found {int(ids[first])} at edge {first}")


def check_weights(weights: Any, edges: int) -> Float[np.ndarray, " E"]:
    """Returns the weights in float32. Raises a `ValueError` unless there is one finite number per edge."""
    weights = np.asarray(weights)
    if weights.ndim == 2 and weights.shape[1] == 1:
        weights = weights[:, 0]
    if weights.shape != (edges,):
        raise ValueError(f"expected a weight for each of {edges} edges, found shape {weights.shape}")
    if weights.dtype.kind not in "fiub" and weights.dtype.name != "bfloat16":
        raise ValueError(f"expected weights to be real numbers, found {weights.dtype}")
    found = to_float32(weights)
    wrong = np.flatnonzero(~np.isfinite(found))
    if wrong.size:
        raise ValueError(f"expected finite weights in float32, found {weights[wrong[0]]} at edge {int(wrong[0])}")
    return found


def to_float32(values: np.ndarray) -> Float[np.ndarray, "..."]:
    """Converts to float32, without a copy of float32; numbers beyond its range become infinite, without NumPy's warning."""
    with np.errstate(over="ignore"):
        return values.astype(np.float32, copy=False)


def check_count(noun: str, count: Any) -> int | None:
    """Returns a number of nodes as an `int`, or None. Raises a `ValueError` for other values."""
    if count is None:
        return None
    try:
        number = index(count)
    except TypeError:
        raise ValueError(f"expected {noun} to be a whole number, found {count!r}") from None
    if not 0 <= number <= MOST_NODES:
        raise ValueError(f"expected {noun} from 0 to 2^31 - 1, found {number}")
    return number


def check_edge_features(features: Any, edges: int) -> Float[np.ndarray, "E D"]:
    """Returns the features in float32. Raises a `ValueError` unless there is a row `[D]` of finite numbers per edge."""
    features = np.asarray(features)
    if features.ndim == 1:
        features = features[:, None]
    if features.ndim != 2 or features.shape[0] != edges:
        raise ValueError(f"expected features [{edges}, D] of edges, found shape {list(features.shape)}")
    if features.dtype.kind not in "fiub" and features.dtype.name != "bfloat16":
        raise ValueError(f"expected features of edges to be real numbers, found {features.dtype}")
    found = to_float32(features)
    wrong = np.argwhere(~np.isfinite(found))
    if wrong.size:
        edge, column = map(int, wrong[0])
        raise ValueError(f"expected finite features of edges in float32, found {features[edge, column]} at [{edge}, {column}]")
    return found


def from_edge_index(
    edge_index: Any, num_nodes: int | None, num_sources: int | None = None, weights: Any = None, features: Any = None
) -> Edges:
    """Reads edges from an `edge_index` `[2, E]` of sources and destinations.

    Args:
        edge_index: integer array, or a pair of arrays.
        num_nodes: number of destination nodes; None takes the largest id plus one (of destinations, if `num_sources` is given).
        num_sources: number of source nodes; None takes `num_nodes`.
        weights: weight of each edge.
        features: features of each edge, `[E, D]` or `[E]`.

    Raises:
        ValueError: ids are not integers or out of range, or lengths differ; the message names the first wrong edge.
    """
    if isinstance(edge_index, tuple | list) and len(edge_index) == 2:
        ends = [len(end) if hasattr(end, "__len__") else 1 for end in edge_index]
        if ends[0] != ends[1]:
            raise ValueError(f"expected as many sources as destinations, found {ends[0]} and {ends[1]}")
    ids = np.asarray(edge_index)
    if ids.ndim != 2 or ids.shape[0] != 2:
        raise ValueError(f"expected edge_index of shape [2, edges], found {list(ids.shape)}")
    if ids.dtype.kind not in "iu" and ids.size:
        first = f", the first of them {ids[0, 0]}"
        raise ValueError(f"expected integer node ids in edge_index, found {ids.dtype}{first}")
    ids = ids.astype(np.int64)
    num_nodes = check_count("num_nodes", num_nodes)
    num_sources = check_count("num_sources", num_sources)
    if num_nodes is None:
        check_ids(ids[0], "source", MOST_NODES)
        check_ids(ids[1], "destination", MOST_NODES)
        num_nodes = int((ids if num_sources is None else ids[1]).max(initial=-1)) + 1
    bound = num_nodes if num_sources is None else num_sources
    check_ids(ids[0], "source", bound)
    check_ids(ids[1], "destination", num_nodes)
    checked = None if weights is None else check_weights(weights, ids.shape[1])
    attributes = None if features is None else check_edge_features(features, ids.shape[1])
    return Edges(ids[0], ids[1], num_nodes, bound, checked, attributes)


def from_sparse(matrix: Any) -> Edges:
    """Reads a SciPy adjacency matrix: the entry at row j, column i is an edge j → i with that weight."""
    entries = matrix.tocoo()
    if entries.shape[0] != entries.shape[1]:
        raise ValueError(f"expected a square adjacency matrix, found shape {entries.shape}")
    weights = None if np.all(entries.data == 1) else entries.data
    return from_edge_index(np.stack([entries.row, entries.col]), entries.shape[0], weights=weights)


def from_networkx(graph: Any) -> Edges:
    """Reads a networkx graph, with nodes in its order; undirected edges count in both directions."""
    place = {node: index for index, node in enumerate(graph.nodes)}
    listed = [(place[a], place[b], weight) for a, b, weight in graph.edges(data="weight", default=1.0)]
    if not graph.is_directed():
        listed += [(b, a, weight) for a, b, weight in listed if a != b]
    ids = np.array([(a, b) for a, b, _ in listed], np.int64).reshape(-1, 2).T
    weights = np.array([weight for *_, weight in listed], np.float64)
    return from_edge_index(ids, len(place), weights=None if np.all(weights == 1) else weights)


def read_edges(graph: Any, num_nodes: int | None = None, weights: Any = None) -> Edges:
    """Reads edges from an edge_index array, a SciPy matrix, a networkx graph, or an object with `edge_index` (PyG `Data`).

    Args:
        graph: the graph.
        num_nodes: number of nodes, for an array; other graphs know it.
        weights: weight of each edge, instead of the graph's weights.

    Raises:
        ValueError: the graph is none of these, or its edges are invalid.
    """
    if hasattr(graph, "edge_index"):
        count = num_nodes if num_nodes is not None else getattr(graph, "num_nodes", None)
        found = from_edge_index(graph.edge_index, count, weights=getattr(graph, "edge_weight", None))
    elif hasattr(graph, "tocoo"):
        found = from_sparse(graph)
    elif hasattr(graph, "is_directed") and hasattr(graph, "edges"):
        found = from_networkx(graph)
    elif isinstance(graph, tuple | list) or hasattr(graph, "__array__"):
        return from_edge_index(graph, num_nodes, weights=weights)
    else:
        raise ValueError(
            "expected an edge_index array, a scipy.sparse matrix, a networkx graph or an object with an edge_index, "
            f"found {type(graph).__name__}"
        )
    if num_nodes is not None and num_nodes != found.num_nodes:
        raise ValueError(f"expected {num_nodes} nodes, found a graph of {found.num_nodes}")
    if weights is None:
        return found
    return Edges(
        found.sources, found.destinations, found.num_nodes, found.num_sources, check_weights(weights, found.sources.size)
    )


def with_self_loops(edges: Edges) -> Edges:
    """Returns the edges with exactly one self-loop per node, like PyG's `add_remaining_self_loops`.

    The other edges come first, in their order, followed by the self-loops in order of nodes. A self-loop has the weight of the
    node's last self-loop among the edges, or 1. Its features are the mean of those of the node's other edges, or 0, as in PyG's
    layers with attention (`fill_value="mean"`).
    """
    kept = np.flatnonzero(~edges.is_loop)
    nodes = np.arange(edges.num_nodes)
    weights = None if edges.weights is None else np.concatenate([edges.weights[kept], loop_weights(edges)])
    return replace(
        edges,
        sources=np.concatenate([edges.sources[kept], nodes]),
        destinations=np.concatenate([edges.destinations[kept], nodes]),
        weights=weights,
        features=None if edges.features is None else np.concatenate([edges.features[kept], loop_features(edges, kept)]),
    )


def loop_features(edges: Edges, kept: Int[np.ndarray, " K"]) -> Float[np.ndarray, "N D"]:
    """Returns the mean of the features of each node's edges among `kept`; 0 without any."""
    assert edges.features is not None
    destinations = edges.destinations[kept]
    sums = np.zeros((edges.num_nodes, edges.features.shape[1]), np.float32)
    np.add.at(sums, destinations, edges.features[kept])
    return sums / np.maximum(np.bincount(destinations, minlength=edges.num_nodes), 1).astype(np.float32)[:, None]


def loop_weights(edges: Edges) -> Float[np.ndarray, " N"]:
    """Returns the weight of each node's last self-loop; 1 without one."""
    weights = np.ones(edges.num_nodes, np.float32)
    loops = np.flatnonzero(edges.is_loop)
    last = loops[~repeated_loops(edges)[loops]]
    weights[edges.destinations[last]] = edges.weights_or_ones()[last]
    return weights


def repeated_loops(edges: Edges) -> Bool[np.ndarray, " E"]:
    """Returns the mask of self-loops that a later self-loop of the same node follows."""
    loops = np.flatnonzero(edges.is_loop)
    _, last_places = np.unique(edges.destinations[loops][::-1], return_index=True)
    repeated = edges.is_loop
    repeated[loops[loops.size - 1 - last_places]] = False
    return repeated


def missing_loops(edges: Edges) -> Float[np.ndarray, " N"]:
    """Returns the correction to one self-loop per node: weight of the last minus the sum of all; 1 without self-loop."""
    loops = edges.is_loop
    sums = np.bincount(edges.destinations[loops], edges.weights_or_ones()[loops], edges.num_nodes)
    return (loop_weights(edges) - sums).astype(np.float32)


def find_negative_degree(edges: Edges) -> tuple[int, float] | None:
    """Returns the first node with a negative sum of weights (including one self-loop), and the sum; None without one.

    The symmetric normalisation divides by the square root of these sums.
    """
    if edges.weights is None:
        return None
    looped = with_self_loops(edges)
    sums = np.bincount(looped.destinations, looped.weights, edges.num_nodes)
    wrong = np.flatnonzero(sums < 0)
    return (int(wrong[0]), float(sums[wrong[0]])) if wrong.size else None


def negative_degree(node: int, degree: float) -> ValueError:
    """Builds the error for a node with a negative sum of edge weights."""
    return ValueError(
        "expected a sum of weights over a node's edges and self-loop of at least 0 for the symmetric normalisation, "
        f"found {degree:g} at node {node}"
    )
