"""Edges as people have them (arrays, SciPy, networkx, PyG), checked and brought into one form."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int

MOST_NODES = 2**31 - 1
"""On the device, ids are int32."""


@dataclass(frozen=True)
class Edges:
    """Edges from sources to destinations: what a node hears from.

    Attributes:
        sources: of each edge its source, in [0, num_sources).
        destinations: its destination, in [0, num_nodes).
        weights: its weight; None if all are 1.
    """

    sources: Int[np.ndarray, " E"]
    destinations: Int[np.ndarray, " E"]
    num_nodes: int
    num_sources: int
    weights: Float[np.ndarray, " E"] | None = None


def check_ids(ids: np.ndarray, what: str, bound: int) -> None:
    """Refuses ids that are negative, or at least `bound`."""
    wrong = np.flatnonzero((ids < 0) | (ids >= bound))
    if wrong.size:
        first = int(wrong[0])
        wanted = f"in 0..{bound - 1}" if bound else "none, for there are no nodes"
        raise ValueError(f"expected {what} ids {wanted}, found {int(ids[first])} at edge {first}")


def check_weights(weights: Any, edges: int) -> Float[np.ndarray, " E"]:
    """The weights in float32: one finite number for each edge."""
    weights = np.asarray(weights)
    if weights.ndim == 2 and weights.shape[1] == 1:
        weights = weights[:, 0]
    if weights.shape != (edges,):
        raise ValueError(f"expected a weight for each of {edges} edges, found shape {weights.shape}")
    if weights.dtype.kind not in "fiub" and weights.dtype.name != "bfloat16":
        raise ValueError(f"expected weights to be real numbers, found {weights.dtype}")
    weights = weights.astype(np.float32)
    wrong = np.flatnonzero(~np.isfinite(weights))
    if wrong.size:
        raise ValueError(f"expected finite weights, found {weights[wrong[0]]} at edge {int(wrong[0])}")
    return weights


def from_edge_index(edge_index: Any, num_nodes: int | None, num_sources: int | None = None, weights: Any = None) -> Edges:
    """Checks `edge_index` `[2, E]`, sources above destinations.

    Args:
        num_nodes: destinations; None takes the largest id plus one.
        num_sources: None takes `num_nodes`.

    Raises:
        ValueError: ids that are not integers or out of range, or lengths that do not fit; with the first offending place.
    """
    if isinstance(edge_index, tuple | list) and len(edge_index) == 2 and len(edge_index[0]) != len(edge_index[1]):
        raise ValueError(f"expected as many sources as destinations, found {len(edge_index[0])} and {len(edge_index[1])}")
    ids = np.asarray(edge_index)
    if ids.ndim != 2 or ids.shape[0] != 2:
        raise ValueError(f"expected edge_index of shape [2, edges], found {list(ids.shape)}")
    if ids.dtype.kind not in "iu" and ids.size:
        first = f", the first of them {ids[0, 0]}"
        raise ValueError(f"expected integer node ids in edge_index, found {ids.dtype}{first}")
    ids = ids.astype(np.int64)
    for what, count in (("num_nodes", num_nodes), ("num_sources", num_sources)):
        if count is not None and not 0 <= count <= MOST_NODES:
            raise ValueError(f"expected {what} from 0 to 2^31 - 1, found {count}")
    if num_nodes is None:
        check_ids(ids[0], "source", MOST_NODES)
        check_ids(ids[1], "destination", MOST_NODES)
        num_nodes = int(ids.max(initial=-1)) + 1
    bound = num_nodes if num_sources is None else num_sources
    if bound < num_nodes:
        raise ValueError(f"expected num_sources of at least num_nodes ({num_nodes}), found {num_sources}")
    check_ids(ids[0], "source", bound)
    check_ids(ids[1], "destination", num_nodes)
    checked = None if weights is None else check_weights(weights, ids.shape[1])
    return Edges(ids[0], ids[1], num_nodes, bound, checked)


def from_sparse(matrix: Any) -> Edges:
    """An adjacency matrix of SciPy: a stored entry at row j, column i is an edge j → i with that weight."""
    entries = matrix.tocoo()
    if entries.shape[0] != entries.shape[1]:
        raise ValueError(f"expected a square adjacency matrix, found shape {entries.shape}")
    weights = None if np.all(entries.data == 1) else entries.data
    return from_edge_index(np.stack([entries.row, entries.col]), entries.shape[0], weights=weights)


def from_networkx(graph: Any) -> Edges:
    """A graph of networkx, its nodes numbered in its own order; an undirected edge counts in both directions."""
    place = {node: at for at, node in enumerate(graph.nodes)}
    listed = [(place[a], place[b], weight) for a, b, weight in graph.edges(data="weight", default=1.0)]
    if not graph.is_directed():
        listed += [(b, a, weight) for a, b, weight in listed if a != b]
    ids = np.array([(a, b) for a, b, _ in listed], np.int64).reshape(-1, 2).T
    weights = np.array([weight for *_, weight in listed], np.float64)
    return from_edge_index(ids, len(place), weights=None if np.all(weights == 1) else weights)


def read_edges(graph: Any, num_nodes: int | None = None, weights: Any = None) -> Edges:
    """Edges of an edge_index array, a SciPy matrix, a networkx graph, or whatever has an `edge_index` (a PyG `Data`).

    Args:
        num_nodes: for an array, how many nodes there are; the others say it themselves.
        weights: of the edges, in place of those that the graph brings.

    Raises:
        ValueError: it is none of these, or its edges are not right.
    """
    if hasattr(graph, "edge_index"):
        given = num_nodes if num_nodes is not None else getattr(graph, "num_nodes", None)
        found = from_edge_index(graph.edge_index, given, weights=getattr(graph, "edge_weight", None))
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
    """The edges, and behind them one from each node that has none to itself, with weight 1."""
    missing = np.ones(edges.num_nodes, bool)
    missing[edges.destinations[edges.sources == edges.destinations]] = False
    added = np.flatnonzero(missing)
    weights = None if edges.weights is None else np.concatenate([edges.weights, np.ones(added.size, np.float32)])
    return Edges(
        np.concatenate([edges.sources, added]),
        np.concatenate([edges.destinations, added]),
        edges.num_nodes,
        edges.num_sources,
        weights,
    )
