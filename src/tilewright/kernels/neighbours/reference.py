"""Sampling of neighbours in NumPy.

Random numbers are hashes of a key, a row and a draw, so that rows are independent of each other and of their order.

Legend: N rows, V nodes of the graph, E edges of the graph, S slots for drawn edges, K draws of a row.
"""

import numpy as np
from jaxtyping import Int, Int32, Int64, UInt64

GOLDEN = 0x9E3779B97F4A7C15
"""Increment of splitmix64 (Steele et al. 2014, "Fast splittable pseudorandom number generators")."""


def mixed(values: UInt64[np.ndarray, "..."]) -> UInt64[np.ndarray, "..."]:
    """Computes the output function of splitmix64, which spreads each bit over all bits."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def below(bits: UInt64[np.ndarray, "..."], bounds: Int64[np.ndarray, "..."]) -> Int64[np.ndarray, "..."]:
    """Returns the upper 64 bits of `bits * bounds`: uniform numbers below the bounds, which are at most 2^32."""
    wide = bounds.astype(np.uint64)
    low = ((bits & np.uint64(0xFFFFFFFF)) * wide) >> np.uint64(32)
    return (((bits >> np.uint64(32)) * wide + low) >> np.uint64(32)).astype(np.int64)


def draw(
    nodes: Int32[np.ndarray, " N"],
    offsets: Int64[np.ndarray, " V_and_one"],
    sources: Int32[np.ndarray, " E"],
    fan_out: int,
    key: int,
    starts: Int64[np.ndarray, " N"],
    size: int,
) -> tuple[Int64[np.ndarray, " S"], Int32[np.ndarray, " S"]]:
    """Draws at most `fan_out` different edges of each row's node, uniformly: all edges in order if there are no more.

    More edges are drawn by Floyd's algorithm (Bentley & Floyd 1987).

    Args:
        nodes: node of each row; -1 for a row that draws nothing.
        offsets: node v has the edges `offsets[v]` to `offsets[v + 1] - 1`, at most 2^32 of them.
        sources: source of each edge.
        fan_out: most edges drawn for a row.
        key: 64 random bits.
        starts: first slot of each row.
        size: number of slots.

    Returns:
        edge and source of each slot; -1 in slots without an edge.
    """
    edges = np.full(size, -1, np.int64)
    near = np.full(size, -1, np.int32)
    first = np.where(nodes >= 0, offsets[nodes], 0)
    counts = np.where(nodes >= 0, offsets[nodes + 1] - first, 0)
    few = np.flatnonzero((counts > 0) & (counts <= fan_out))
    each = counts[few]
    place = np.arange(each.sum()) - np.repeat(np.cumsum(each) - each, each)
    edges[np.repeat(starts[few], each) + place] = np.repeat(first[few], each) + place
    many = np.flatnonzero(counts > fan_out)
    chosen = np.zeros((len(many), fan_out), np.int64)
    keys = mixed(np.full(len(many), key, np.uint64) + np.uint64(GOLDEN) * (many + 1).astype(np.uint64))
    for step in range(fan_out if len(many) else 0):
        top = counts[many] - fan_out + step
        new = below(mixed(keys + np.full(len(many), GOLDEN, np.uint64) * np.uint64(step + 1)), top + 1)
        repeated = (chosen[:, :step] == new[:, None]).any(1)
        chosen[:, step] = np.where(repeated, top, new)
    edges[starts[many][:, None] + np.arange(fan_out)] = first[many][:, None] + chosen
    filled = edges >= 0
    near[filled] = sources[edges[filled]]
    return edges, near


def relabel(
    nodes: Int32[np.ndarray, " N"], near: Int32[np.ndarray, " S"]
) -> tuple[Int32[np.ndarray, " S"], Int32[np.ndarray, " A"]]:
    """Numbers drawn nodes by rows: the first row of the node, or else a row after the last for each further node.

    Args:
        nodes: node of each row; -1 for none.
        near: drawn nodes, at least 0.

    Returns:
        row of each drawn node, and the nodes of the further rows, in the order in which they are drawn first.
    """
    rows = np.flatnonzero(nodes >= 0)
    listed = np.concatenate([nodes[rows], near])
    _, first, place = np.unique(listed, return_index=True, return_inverse=True)
    added = np.sort(first[first >= len(rows)])
    number = np.empty(len(first), np.int32)
    old = first < len(rows)
    number[old] = rows[first[old]]
    number[~old] = len(nodes) + np.searchsorted(added, first[~old])
    return number[place.reshape(-1)[len(rows) :]], listed[added]


def group(keys: Int32[np.ndarray, " E"], groups: int) -> tuple[Int64[np.ndarray, " G_and_one"], Int[np.ndarray, " E"]]:
    """Sorts places by key, stably.

    Args:
        keys: group of each place, from 0.
        groups: number of groups.

    Returns:
        offsets of the groups in the sorted list, and the list of places.
    """
    offsets = np.zeros(groups + 1, np.int64)
    np.cumsum(np.bincount(keys, minlength=groups), out=offsets[1:])
    return offsets, np.argsort(keys, kind="stable")
