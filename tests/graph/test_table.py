"""The neighbour table: what it holds, what it is built from, and what it refuses."""

import inspect
from collections import Counter
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st

from tilewright.graph import build
from tilewright.graph.edges import from_edge_index, with_self_loops
from tilewright.graph.rows import BucketRows, CsrRows, Rows
from tilewright.graph.table import NeighborTable

LAYOUTS = ["padded", "bucketed", "csr"]


def random_edges(seed: int, nodes: int, edges: int) -> np.ndarray:
    """With duplicates and self-loops; some nodes have none, and one has many."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, nodes, (2, edges))
    ids[1, : edges // 3] = nodes // 2
    return ids


def slots_of(rows: Rows) -> list[tuple[int, int, int]]:
    """Row, source and edge of all slots that count, read from the arrays one by one; parts of long rows are followed up."""
    if isinstance(rows, CsrRows):
        offsets, sources, edges = (np.asarray(values) for values in (rows.offsets, rows.sources, rows.edges))
        return [
            (row, int(sources[slot]), int(edges[slot]))
            for row in range(offsets.size - 1)
            for slot in range(offsets[row], offsets[row + 1])
        ]
    found = []
    for bucket in rows.blocks:
        assert bucket.edges is not None
        nodes, sources, edges = (np.asarray(values) for values in (bucket.nodes, bucket.sources, bucket.edges))
        for row, degree in enumerate(np.asarray(bucket.degrees)):
            found += [(int(nodes[row]), int(sources[row, slot]), int(edges[row, slot])) for slot in range(degree)]
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("order", ["given", "rcm"])
@given(seed=st.integers(0, 2**31 - 1), nodes=st.integers(1, 9), edges=st.integers(0, 30))
def test_every_edge_has_its_slot(layout: str, order: Any, seed: int, nodes: int, edges: int):
    ids = random_edges(seed, nodes, edges)
    table = NeighborTable.from_edges(ids, nodes, layout=layout, order=order, limit=4)
    place = np.arange(nodes) if table.places is None else np.asarray(table.places)
    wanted = Counter((int(place[ids[1, e]]), int(place[ids[0, e]]), e) for e in range(edges))
    assert Counter(slots_of(table.forward)) == wanted
    assert Counter((source, row, edge) for row, source, edge in slots_of(table.backward)) == wanted
    np.testing.assert_array_equal(table.forward.degrees, np.bincount(place[ids[1]], minlength=nodes))


@given(seed=st.integers(0, 2**31 - 1), nodes=st.integers(1, 40), edges=st.integers(0, 300))
def test_buckets_are_powers_of_two_and_half_full(seed: int, nodes: int, edges: int):
    table = NeighborTable.from_edges(random_edges(seed, nodes, edges), nodes, layout="bucketed", limit=8)
    stage: BucketRows | None = table.forward if isinstance(table.forward, BucketRows) else None
    assert stage is not None
    assert stage.order is None  # the nodes are numbered so that the buckets' results lie as they come
    while stage is not None:
        for buckets in (stage.buckets, stage.parts):
            widths = [bucket.sources.shape[1] for bucket in buckets]
            assert widths == sorted(set(widths))
            assert set(widths) <= {1, 2, 4, 8}
        for bucket in stage.blocks:
            width = bucket.sources.shape[1]
            assert (2 * np.asarray(bucket.degrees) > width).all() or width == 1
        stage = stage.rest


@given(seed=st.integers(0, 2**31 - 1), bound=st.sampled_from([1, 3, 2**16, 2**16 + 1, 2**31 - 1]))
def test_stable_order(seed: int, bound: int):
    keys = np.random.default_rng(seed).integers(0, bound, 50)
    np.testing.assert_array_equal(build.stable_order(keys, bound), np.argsort(keys, kind="stable"))


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=20), st.sampled_from([2, 8, 64]))
def test_keys_say_how_often_a_row_is_split(degrees: list[int], limit: int):
    for degree, key in zip(degrees, build.bucket_keys(np.array(degrees), limit), strict=True):
        stage = 0
        rest = degree
        while rest > limit:
            stage = stage + 1
            rest = -(-rest // limit)
        assert key == stage * 64 + max(0, rest - 1).bit_length()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_order_there_and_back(layout: str):
    ids = random_edges(1, 12, 50)
    table = NeighborTable.from_edges(ids, 12, layout=layout, order="rcm", limit=4)
    x = jnp.arange(24.0).reshape(12, 2)
    np.testing.assert_array_equal(table.unpermute(table.permute(x)), x)
    plain = NeighborTable.from_edges(ids, 12, layout="padded")
    assert plain.order is None
    assert plain.permute(x) is x
    assert plain.unpermute(x) is x


def test_rcm_brings_neighbours_near():
    """A path whose nodes are numbered at random: in a good order every edge joins nodes that follow each other."""
    place = np.random.default_rng(0).permutation(50)
    ids = np.stack([place[:-1], place[1:]])
    table = NeighborTable.from_edges(np.concatenate([ids, ids[::-1]], 1), 50, layout="padded", order="rcm")
    assert all(abs(row - source) == 1 for row, source, _ in slots_of(table.forward))


def test_what_is_of_another_type_is_refused():
    """Without the tests' type checker, which keeps it out otherwise."""
    with pytest.raises(ValueError, match=r"expected num_nodes to be a whole number, found 3.5"):
        inspect.unwrap(from_edge_index)([[0], [1]], 3.5)
    table = NeighborTable.from_edges([[0, 1], [1, 1]], 2, layout="bucketed")
    for values in (jnp.float32(1), np.float32(1)):
        with pytest.raises(ValueError, match="values of 2 nodes, found a single number"):
            inspect.unwrap(NeighborTable.permute)(table, values)
    np.testing.assert_array_equal(table.permute(np.ones((2, 1), np.float32)), np.ones((2, 1)))


def ring_of_cliques(cliques: int, size: int) -> np.ndarray:
    """Undirected edges of cliques in a ring, numbered at random, with self-loops and repeated edges."""
    inside = [(c * size + a, c * size + b) for c in range(cliques) for a in range(size) for b in range(a)]
    between = [(c * size, (c + 1) % cliques * size + 1) for c in range(cliques)]
    ids = np.random.default_rng(0).permutation(cliques * size)[np.array([*inside, *between, *between, (3, 3)]).T]
    return np.concatenate([ids, ids[::-1]], 1)


def test_metis_keeps_cliques_together(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("pymetis")
    monkeypatch.setattr(build, "PART_NODES", 10)
    ids = ring_of_cliques(8, 10)
    table = NeighborTable.from_edges(ids, 80, layout="padded", order="metis")
    assert sum(row // 10 != source // 10 for row, source, _ in slots_of(table.forward)) == 2 * 2 * 8
    x = jnp.arange(160.0).reshape(80, 2)
    np.testing.assert_array_equal(table.unpermute(table.permute(x)), x)


@given(seed=st.integers(0, 2**31 - 1), nodes=st.integers(0, 30), edges=st.integers(0, 60), parts=st.integers(1, 8))
def test_metis_partitions_any_graph(seed: int, nodes: int, edges: int, parts: int):
    pytest.importorskip("pymetis")
    sources, destinations = random_edges(seed, nodes, edges) if nodes else np.zeros((2, 0), int)
    sizes = 1 + np.bincount(destinations, minlength=nodes)
    part = build.metis_parts(destinations, sources, nodes, parts, sizes)
    assert part.shape == (nodes,)
    assert ((part >= 0) & (part < parts)).all()
    np.testing.assert_array_equal(part, build.metis_parts(destinations, sources, nodes, parts, sizes))


@pytest.mark.parametrize("order, module, extra", [("rcm", "scipy.sparse", "graph"), ("metis", "pymetis", "metis")])
def test_orders_without_their_packages(monkeypatch: pytest.MonkeyPatch, order: Any, module: str, extra: str):
    monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(ImportError, match=rf"expected {module.partition('.')[0]} for order='{order}'.*'tilewright\[{extra}\]'"):
        NeighborTable.from_edges(np.zeros((2, 1), int), 1, order=order)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_symmetric_graph_shares_its_arrays(layout: str):
    ids = random_edges(2, 9, 20)
    table = NeighborTable.from_edges(np.concatenate([ids, ids[::-1]], 1), 9, layout=layout, limit=4)
    if isinstance(table.forward, BucketRows) and isinstance(table.backward, BucketRows):
        pairs = [(a.sources, b.sources) for a, b in zip(table.forward.blocks, table.backward.blocks, strict=True)]
        assert table.backward.order is None
    else:
        assert isinstance(table.forward, CsrRows)
        assert isinstance(table.backward, CsrRows)
        pairs = [(table.forward.sources, table.backward.sources)]
    assert all(a is b for a, b in pairs)


def test_transposed():
    table = NeighborTable.from_edges(random_edges(3, 6, 20), 6, layout="bucketed", limit=4)
    assert Counter(slots_of(table.transposed.forward)) == Counter(slots_of(table.backward))
    for sources in (7, 5):
        with pytest.raises(ValueError, match=f"as many sources as nodes, found {sources} and 6"):
            NeighborTable.from_edges([[0], [0]], 6, num_sources=sources).transposed  # noqa: B018


@pytest.mark.parametrize("layout", ["padded", "csr"])
def test_fixed_shapes_share_a_program(layout: str):
    traced = []

    @jax.jit
    def total(table: NeighborTable, x: jax.Array) -> jax.Array:
        traced.append(1)
        return table.aggregate(x, weights=jnp.ones(table.num_edges))

    x = jnp.arange(5.0)[:, None]
    options: dict[str, Any] = {"widths": (6, 6)} if layout == "padded" else {}
    for edges in ([[0, 1], [1, 2]], [[4, 4, 3, 0, 0], [0, 0, 0, 1, 1]], [[], []]):
        table = NeighborTable.from_edges(edges, 5, layout=layout, capacity=6, **options)
        expected = np.zeros(5)
        np.add.at(expected, np.array(edges[1], int), np.array(edges[0], int))
        np.testing.assert_array_equal(total(table, x)[:, 0], expected)
    assert len(traced) == 1


def test_the_summary_says_shapes_slots_and_bytes():
    ids = np.stack([np.arange(1, 9), np.zeros(8, int)])
    text = str(NeighborTable.from_edges(ids, 9, layout="padded"))
    assert "9 nodes, 8 unweighted edges, layout padded" in text
    assert "rows: 9×8" in text
    assert "9.00 slots per edge" in text
    bucketed = NeighborTable.from_edges(ids, 9, layout="bucketed", limit=4)
    assert "rows: 8×1, 2×4, 1×2" in bucketed.summary()
    assert "2.25 slots per edge" in bucketed.summary()
    assert "8 neighbours in one list" in NeighborTable.from_edges(ids, 9, layout="csr").__rich__()


def directed(nodes: list[Any], edges: list[tuple[Any, Any, dict[str, float]]], is_directed: bool) -> Any:
    """What networkx offers of a graph, as far as it is read."""

    def listed(data: str, default: float) -> list[tuple[Any, Any, float]]:
        return [(a, b, attributes.get(data, default)) for a, b, attributes in edges]

    return SimpleNamespace(nodes=nodes, edges=listed, is_directed=lambda: is_directed)


def test_what_a_table_is_built_from():
    """The same directed graph from everything that can hold one: 0 → 1 with weight 2, 2 → 1 with weight 0.5."""
    ids = np.array([[0, 2], [1, 1]])
    weights = np.array([2, 0.5], np.float32)
    matrix = scipy.sparse.coo_array((weights, (ids[0], ids[1])), shape=(4, 4)).tocsr()
    nodes = ["a", "b", "c", "d"]
    graphs = [
        SimpleNamespace(edge_index=ids, num_nodes=4, edge_weight=weights),
        matrix,
        directed(nodes, [("a", "b", {"weight": 2}), ("c", "b", {"weight": 0.5})], True),
    ]
    x = jnp.asarray([[1.0], [10.0], [100.0], [1000.0]])
    tables = [NeighborTable.build(graph) for graph in graphs] + [NeighborTable.build(ids, 4, weights)]
    for table in tables:
        np.testing.assert_array_equal(table.unpermute(table.aggregate(table.permute(x)))[:, 0], [0, 52, 0, 0])
    both = NeighborTable.build(directed(nodes, [("a", "b", {}), ("c", "c", {})], False), layout="padded")
    assert both.weights is None
    np.testing.assert_array_equal(both.aggregate(x)[:, 0], [10, 1, 100, 0])
    with pytest.raises(ValueError, match="an object with an edge_index, found dict"):
        NeighborTable.build({"edges": []})


def test_self_loops_are_there_once():
    """As PyG 2.8.1's `add_remaining_self_loops` gives them, whose result stands here: of two the last."""
    ids = np.array([[0, 0, 1, 0, 2], [0, 0, 0, 1, 1]])
    weights = [2, 5, 1, 3, 4]
    looped = with_self_loops(from_edge_index(ids, 3, weights=weights))
    np.testing.assert_array_equal(looped.edge_index, [[1, 0, 2, 0, 1, 2], [0, 1, 1, 0, 1, 2]])
    np.testing.assert_array_equal(looped.weights, [1, 3, 4, 5, 1, 1])
    table = NeighborTable.from_edges(ids, 3, weights=weights, self_loops=True, layout="padded")
    np.testing.assert_array_equal(table.aggregate(jnp.ones((3, 1)))[:, 0], [6, 8, 1])
    np.testing.assert_array_equal(table.loops, [0, 0, 0])
    assert (table.num_edges, table.repeated) == (6, None)
    plain = NeighborTable.from_edges(ids, 3, layout="csr", capacity=7)
    np.testing.assert_array_equal(plain.loops, [-1, 1, 1])
    np.testing.assert_array_equal(plain.repeated, [True] + [False] * 6)
    np.testing.assert_array_equal(plain.aggregate(jnp.ones((3, 1)))[:, 0], [3, 2, 0])  # a plain sum takes all


@pytest.mark.parametrize(
    ("edges", "nodes", "options", "message"),
    [
        ([[0, 3], [1, 1]], 3, {}, r"source ids in 0..2, found 3 at edge 1"),
        ([[0, 1], [1, -2]], 3, {}, r"destination ids in 0..2, found -2 at edge 1"),
        ([[0, 1], [1, -1]], None, {}, r"destination ids in 0..2147483646, found -1 at edge 1"),
        ([[0, 2**31 - 1], [1, 1]], None, {}, r"source ids in 0..2147483646, found 2147483647 at edge 1"),
        ([[0], [0]], 0, {}, r"there are no nodes, found 0 at edge 0"),
        ([[0.5, 1], [1, 1]], 3, {}, r"integer node ids in edge_index, found float64, the first of them 0.5"),
        ([[0, 1], [1]], 3, {}, r"as many sources as destinations, found 2 and 1"),
        ([[0], [1], [2]], 3, {}, r"shape \[2, edges\], found \[3, 1\]"),
        ([[0], [1]], 3, {"weights": [1.0, 2.0]}, r"a weight for each of 1 edges, found shape \(2,\)"),
        ([[0, 0], [1, 1]], 3, {"weights": [1.0, np.nan]}, r"finite weights in float32, found nan at edge 1"),
        ([[0], [1]], 3, {"weights": [1e300]}, r"finite weights in float32, found 1e\+300 at edge 0"),
        ([0, 1], 3, {}, r"shape \[2, edges\], found \[2\]"),
        ([[0], [1]], 3, {"weights": ["a"]}, r"real numbers, found <U1"),
        ([[0, 2], [1, 1]], 3, {"num_sources": 2}, r"source ids in 0..1, found 2 at edge 1"),
        ([[0], [1]], 3, {"num_sources": 2, "self_loops": True}, r"as many sources as nodes for self_loops, found 2 and 3"),
        ([[0], [1]], 3, {"num_sources": 2, "order": "rcm"}, r"as many sources as nodes for order='rcm', found 2 and 3"),
        ([[0], [1]], -1, {}, r"num_nodes from 0 to 2\^31 - 1, found -1"),
        ([[0], [1]], 3, {"layout": "coo"}, r"layout to be one of auto, padded, bucketed, csr, found 'coo'"),
        ([[0], [1]], 3, {"order": "degree"}, r"order to be one of given, rcm, metis, found 'degree'"),
        ([[0], [1]], 3, {"num_sources": 2, "order": "metis"}, r"as many sources as nodes for order='metis', found 2 and 3"),
        ([[0], [1]], 3, {"limit": 48}, r"power of two of at least 2, found 48"),
        ([[0], [1]], 3, {"num_sources": 4, "order": "rcm"}, r"as many sources as nodes for order='rcm', found 4 and 3"),
        ([[0, 0], [1, 1]], 3, {"capacity": 1}, r"at most capacity=1 edges, found 2"),
        ([[0, 0], [1, 1]], 3, {"layout": "padded", "widths": (1, 2)}, r"at most 1 neighbours, found 2 in row 1"),
        ([[0], [1]], 3, {"layout": "csr", "widths": (1, 1)}, r"widths for the layout padded only, found 'csr'"),
    ],
)
def test_bad_input(edges: Any, nodes: int | None, options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        NeighborTable.from_edges(edges, nodes, **options)
