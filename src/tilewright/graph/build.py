"""Makes rows of edges: sorts, splits, groups and pads, in NumPy without a loop over nodes or edges."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int

from tilewright.graph.rows import Bucket, BucketRows, CsrRows

Ids = Int[np.ndarray, "..."]


def int32_array(values: np.ndarray) -> Array:
    return jnp.asarray(values, jnp.int32)


def stable_order(keys: Ids, bound: int) -> Ids:
    """Sorts keys in [0, bound), equal ones as they come: a radix sort, which NumPy has for 16 bits."""
    order = np.argsort((keys & 0xFFFF).astype(np.uint16), kind="stable")
    if bound > 2**16:
        order = order[np.argsort((keys[order] >> 16).astype(np.uint16), kind="stable")]
    return order


def offsets_of(degrees: Ids) -> Ids:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(degrees, dtype=np.int64)])


def log_width(degrees: Ids) -> Ids:
    """The exponent of the smallest power of two that holds each degree; 0 for none."""
    return np.ceil(np.log2(np.maximum(degrees, 1))).astype(np.int64)


def bucket_keys(degrees: Ids, limit: int) -> Ids:
    """Sort keys of rows: how often a row has to be split, then its width in the last stage."""
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
    """For rows of consecutive entries the entry of each slot, `[R, width]`, and which slots are no padding."""
    slot = np.arange(width)
    counts = slot < degrees[:, None]
    return np.where(counts, starts[:, None] + slot, 0), counts


def pick(values: Ids, places: Ids, counts: np.ndarray) -> Array:
    return int32_array(np.where(counts, values[places], 0) if values.size else np.zeros_like(places))


def group(
    nodes: Ids, starts: Ids, sizes: Ids, sources: Ids, edges: Ids | None, slots: Ids, filled: int
) -> tuple[tuple[Bucket, ...], Ids, int]:
    """Rows by their widths: the buckets, each row's place among them, and how many slots there are then.

    Args:
        nodes: what each row belongs to.
        starts, sizes: its entries of `sources` and `edges`.
        slots: the places of entries' slots are WRITTEN here.
        filled: slots before these.
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
    """Rows that are sorted by `bucket_keys`, and each entry's slot."""
    degrees = np.diff(offsets)
    slots = np.zeros(sources.size, np.int64)
    whole = np.flatnonzero(degrees <= limit)
    long = np.flatnonzero(degrees > limit)
    buckets, _, filled = group(whole, offsets[whole], degrees[whole], sources, edges, slots, 0)
    count = -(-degrees[long] // limit)
    node = np.repeat(long, count)
    first = (np.arange(node.size) - np.repeat(offsets_of(count)[:-1], count)) * limit
    sizes = np.minimum(degrees[node] - first, limit)
    parts, places, _ = group(node, offsets[node] + first, sizes, sources, edges, slots, filled)
    rest = bucket_stage(offsets_of(count), places, None, limit)[0] if long.size else None
    return BucketRows(buckets, parts, rest, int32_array(degrees), None, None), slots


def bucket_rows(offsets: Ids, sources: Ids, edges: Ids, limit: int, capacity: int) -> BucketRows:
    """Rows of any order in buckets of widths 1, 2, 4 up to `limit`, which is a power of two.

    Args:
        offsets: row r has the entries from `offsets[r]` to `offsets[r + 1]` of `sources` and `edges`.
        capacity: how many edges the arrays have room for.
    """
    degrees = np.diff(offsets)
    if not degrees.size:
        return padded_rows(offsets, sources, edges, None, capacity)
    keys = bucket_keys(degrees, limit)
    order = np.argsort(keys, kind="stable")
    sorted_offsets = offsets_of(degrees[order])
    entries = np.repeat(offsets[order] - sorted_offsets[:-1], degrees[order]) + np.arange(sources.size)
    rows, slots = bucket_stage(sorted_offsets, sources[entries], edges[entries], limit)
    slots_of_edges = np.full(capacity, sum(bucket.sources.size for bucket in rows.blocks))
    slots_of_edges[edges[entries]] = slots
    rows = replace(rows, slots=int32_array(slots_of_edges))
    if (keys[1:] >= keys[:-1]).all():
        return rows

    def named(buckets: tuple[Bucket, ...]) -> tuple[Bucket, ...]:
        return tuple(replace(bucket, nodes=int32_array(order[np.asarray(bucket.nodes)])) for bucket in buckets)

    return replace(
        rows,
        buckets=named(rows.buckets),
        parts=named(rows.parts),
        degrees=int32_array(degrees),
        order=int32_array(inverse(order)),
    )


def padded_rows(offsets: Ids, sources: Ids, edges: Ids, width: int | None, capacity: int) -> BucketRows:
    """All rows in one bucket, as wide as the longest or as `width`.

    Args:
        capacity: how many edges the arrays have room for.
    """
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
    """Rows one after another, with room for `capacity` edges."""
    spare = capacity - sources.size
    rows = np.repeat(np.arange(offsets.size - 1), np.diff(offsets))
    slots = np.concatenate([inverse(edges), np.full(spare, capacity)])
    padded = (int32_array(np.pad(values, (0, spare))) for values in (sources, rows, edges))
    return CsrRows(int32_array(offsets), *padded, slots=int32_array(slots))


def locality_order(destinations: Ids, sources: Ids, nodes: int) -> Ids:
    """Reverse Cuthill-McKee: nodes in an order that brings neighbours near each other.

    Raises:
        ImportError: SciPy is not installed.
    """
    try:
        from scipy.sparse import coo_array
        from scipy.sparse.csgraph import reverse_cuthill_mckee
    except ImportError as error:
        raise ImportError("order='rcm' needs scipy: pip install 'tilewright[graph]'") from error
    ends = np.concatenate([destinations, sources]), np.concatenate([sources, destinations])
    both = coo_array((np.ones(2 * sources.size, np.int8), ends), shape=(nodes, nodes))
    return reverse_cuthill_mckee(both.tocsr(), symmetric_mode=True).astype(np.int64)
