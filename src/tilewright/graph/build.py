"""Builds rows of neighbours from edges: sorts, splits, groups and pads, vectorised in NumPy."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int

from tilewright.graph.rows import Bucket, BucketRows, CsrRows

Ids = Int[np.ndarray, "..."]


def int32_array(values: np.ndarray) -> Array:
    return jnp.asarray(values, jnp.int32)


def stable_order(keys: Ids, bound: int) -> Ids:
    """Returns the stable sort order of keys in [0, bound), by NumPy's radix sort of 16-bit integers."""
    order = np.argsort((keys & 0xFFFF).astype(np.uint16), kind="stable")
    if bound > 2**16:
        order = order[np.argsort((keys[order] >> 16).astype(np.uint16), kind="stable")]
    return order


def row_offsets(degrees: Ids) -> Ids:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(degrees, dtype=np.int64)])


def log_width(degrees: Ids) -> Ids:
    """Returns the exponent of the smallest power of two that is at least the degree; 0 for degree 0."""
    return np.ceil(np.log2(np.maximum(degrees, 1))).astype(np.int64)


def bucket_keys(degrees: Ids, limit: int) -> Ids:
    """Returns sort keys of rows: number of splits, then width in the last stage."""
    rest = degrees.astype(np.int64)
    stage = np.zeros(degrees.size, np.int64)
    while (rest > limit).any():
        stage += rest > limit
        rest = np.where(rest > limit, -(-rest // limit), rest)
    return stage * 64 + log_width(rest)


def inverse(order: Ids) -> Ids:
    places = np.empty_like(order)
    places[order] = np.arange(order.size)
    return places


def slot_places(starts: Ids, degrees: Ids, width: int) -> tuple[Ids, np.ndarray]:
    """Returns the entry of each slot `[R, width]` for rows of consecutive entries, and the mask of filled slots."""
    slot = np.arange(width)
    counts = slot < degrees[:, None]
    return np.where(counts, starts[:, None] + slot, 0), counts


def pick(values: Ids, places: Ids, counts: np.ndarray) -> Array:
    return int32_array(np.where(counts, values[places], 0) if values.size else np.zeros_like(places))


def group(
    nodes: Ids, starts: Ids, sizes: Ids, sources: Ids, edges: Ids | None, slots: Ids, filled: int
) -> tuple[tuple[Bucket, ...], Ids, int]:
    """Groups rows by width into buckets.

    Args:
        nodes: result row of each row.
        starts: first entry of each row in `sources` and `edges`.
        sizes: number of entries of each row.
        sources: source of each entry.
        edges: caller's edge of each entry; None for entries that are not edges.
        slots: the slot of each entry is WRITTEN to this array.
        filled: number of slots before these buckets.

    Returns:
        the buckets, each row's place among their rows, and the number of slots after them.
    """
    widths = log_width(sizes)
    buckets = []
    places = np.zeros(nodes.size, np.int64)
    before = 0
    for exponent in range(int(widths.max(initial=-1)) + 1):
        rows = np.flatnonzero(widths == exponent)
        if not rows.size:
            continue
        entries, counts = slot_places(starts[rows], sizes[rows], 1 << exponent)
        slots[entries[counts]] = filled + np.flatnonzero(counts)
        filled += counts.size
        places[rows] = before + np.arange(rows.size)
        before += rows.size
        numbers = None if edges is None else pick(edges, entries, counts)
        buckets.append(Bucket(pick(sources, entries, counts), int32_array(sizes[rows]), int32_array(nodes[rows]), numbers))
    return tuple(buckets), places, filled


def bucket_stage(offsets: Ids, sources: Ids, edges: Ids | None, limit: int) -> tuple[BucketRows, Ids]:
    """Builds bucketed rows from rows sorted by `bucket_keys`; returns the slot of each entry as well."""
    degrees = np.diff(offsets)
    slots = np.zeros(sources.size, np.int64)
    whole = np.flatnonzero(degrees <= limit)
    long = np.flatnonzero(degrees > limit)
    buckets, _, filled = group(whole, offsets[whole], degrees[whole], sources, edges, slots, 0)
    count = -(-degrees[long] // limit)
    node = np.repeat(long, count)
    first = (np.arange(node.size) - np.repeat(row_offsets(count)[:-1], count)) * limit
    sizes = np.minimum(degrees[node] - first, limit)
    parts, places, _ = group(node, offsets[node] + first, sizes, sources, edges, slots, filled)
    rest = bucket_stage(row_offsets(count), places, None, limit)[0] if long.size else None
    return BucketRows(buckets, parts, rest, int32_array(degrees), None, None), slots


def bucket_rows(offsets: Ids, sources: Ids, edges: Ids, limit: int, capacity: int) -> BucketRows:
    """Builds bucketed rows with widths 1, 2, 4, ... up to `limit` from rows in any order.

    Args:
        offsets: row r has the entries `offsets[r]` to `offsets[r + 1] - 1` of `sources` and `edges`.
        sources: source of each entry.
        edges: caller's edge of each entry.
        limit: largest width, a power of two.
        capacity: number of edges in the arrays, including padding.
    """
    degrees = np.diff(offsets)
    if not degrees.size:
        return padded_rows(offsets, sources, edges, None, capacity)
    keys = bucket_keys(degrees, limit)
    order = np.argsort(keys, kind="stable")
    sorted_offsets = row_offsets(degrees[order])
    entries = np.repeat(offsets[order] - sorted_offsets[:-1], degrees[order]) + np.arange(sources.size)
    rows, slots = bucket_stage(sorted_offsets, sources[entries], edges[entries], limit)
    slots_of_edges = np.full(capacity, sum(bucket.sources.size for bucket in rows.blocks))
    slots_of_edges[edges[entries]] = slots
    rows = replace(rows, slots=int32_array(slots_of_edges))
    if (keys[1:] >= keys[:-1]).all():
        return rows

    def renumbered(buckets: tuple[Bucket, ...]) -> tuple[Bucket, ...]:
        return tuple(replace(bucket, nodes=int32_array(order[np.asarray(bucket.nodes)])) for bucket in buckets)

    return replace(
        rows,
        buckets=renumbered(rows.buckets),
        parts=renumbered(rows.parts),
        degrees=int32_array(degrees),
        order=int32_array(inverse(order)),
    )


def padded_rows(offsets: Ids, sources: Ids, edges: Ids, width: int | None, capacity: int) -> BucketRows:
    """Builds rows in one bucket with `width` slots, by default the largest degree; for the arguments see `bucket_rows`."""
    degrees = np.diff(offsets)
    width = max(1, int(degrees.max(initial=0))) if width is None else width
    places, counts = slot_places(offsets[:-1], degrees, width)
    slots = np.full(capacity, counts.size)
    slots[edges[places[counts]]] = np.flatnonzero(counts)
    bucket = Bucket(
        pick(sources, places, counts), int32_array(degrees), int32_array(np.arange(degrees.size)), pick(edges, places, counts)
    )
    return BucketRows((bucket,), (), None, int32_array(degrees), int32_array(slots), None)


def csr_rows(offsets: Ids, sources: Ids, edges: Ids, capacity: int) -> CsrRows:
    """Builds concatenated rows, padded to `capacity` edges; for the arguments see `bucket_rows`."""
    spare = capacity - sources.size
    rows = np.repeat(np.arange(offsets.size - 1), np.diff(offsets))
    slots = np.concatenate([inverse(edges), np.full(spare, capacity)])
    padded = (int32_array(np.pad(values, (0, spare))) for values in (sources, rows, edges))
    return CsrRows(int32_array(offsets), *padded, slots=int32_array(slots))


PART_NODES = 1024
"""Nodes of a part in METIS's order: their features, 512 KB with 128 features in float32, fit a core's cache."""


def locality_order(order: str, destinations: Ids, sources: Ids, nodes: int) -> Ids:
    """Returns an order of the nodes that moves neighbours close to each other.

    Args:
        order: "rcm" for reverse Cuthill-McKee. "metis" for parts of about `PART_NODES` nodes with few edges between them, in
            the order of METIS's bisections: parts that are numbered one after the other share more edges than others.
        destinations: destination of each edge.
        sources: source of each edge.
        nodes: number of nodes.

    Raises:
        ImportError: SciPy or pymetis is not installed.
    """
    if order == "metis":
        return np.argsort(metis_parts(destinations, sources, nodes, -(-nodes // PART_NODES)), kind="stable")
    adjacency = both_directions(order, destinations, sources, nodes)
    from scipy.sparse.csgraph import reverse_cuthill_mckee

    return reverse_cuthill_mckee(adjacency, symmetric_mode=True).astype(np.int64)


def metis_parts(destinations: Ids, sources: Ids, nodes: int, parts: int, sizes: Ids | None = None) -> Ids:
    """Partitions the nodes with METIS, by bisections that cut few edges; returns the part of each node.

    Args:
        destinations: destination of each edge.
        sources: source of each edge.
        nodes: number of nodes.
        parts: number of parts.
        sizes: positive size of each node; the sizes of the parts differ by a few percent. By default all nodes have size 1.

    Raises:
        ImportError: SciPy or pymetis is not installed.
    """
    try:
        import pymetis
    except ImportError as error:
        raise ImportError("expected pymetis for order='metis', found none: pip install 'tilewright[metis]'") from error
    if nodes <= parts:  # METIS does not support it
        return np.arange(nodes)
    differ = destinations != sources  # METIS allows no self-loops
    adjacency = both_directions("metis", destinations[differ], sources[differ], nodes)
    integer = pymetis.zero_copy_dtype()
    graph = pymetis.CSRAdjacency(*(ids.astype(integer) for ids in (adjacency.indptr, adjacency.indices)))
    weights = None if sizes is None else sizes.astype(integer)
    found = pymetis.part_graph(parts, graph, vweights=weights, recursive=True)
    return np.array(found.vertex_part).astype(np.int64)  # of C's long long, which NumPy tells from its int64


def both_directions(order: str, destinations: Ids, sources: Ids, nodes: int) -> Any:
    """Returns the adjacency of the undirected graph as a SciPy matrix in CSR, without duplicates; `order` is for the message.

    Raises:
        ImportError: SciPy is not installed.
    """
    try:
        from scipy.sparse import coo_array
    except ImportError as error:
        raise ImportError(f"expected scipy for order={order!r}, found none: pip install 'tilewright[graph]'") from error
    ends = np.concatenate([destinations, sources]), np.concatenate([sources, destinations])
    return coo_array((np.ones(2 * sources.size, np.int8), ends), shape=(nodes, nodes)).tocsr()
