"""Graph data sets: one graph with node labels (`.npz`, `.npy`, OGB's files, Zachary's karate club), or many (the GIN text
format).

The readers execute no code: archives with pickled objects are rejected.
"""

import itertools
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Float32, Int, Int32
from numpy.typing import DTypeLike

from tilewright.graph.edges import to_float32

KARATE = "karate"
NONE = -1
"""Label of unlabelled nodes."""
MOST_CLASSES = 1000
"""Bound of the labels of small graphs, and of larger graphs the number of nodes; a model has a score for each class."""
MOST_FEATURES = 2**24
"""Most columns of sparse features; a model's first matrix has a row for each."""
CHECKED_ROWS = 2**16
"""Rows of features that are checked at a time, since a file may be larger than the memory."""
SPARSE_FEATURES = ("x_indptr", "x_indices", "x_data", "x_shape")
PARTS = ("train", "val", "test")
ARRAYS = (
    "edge_index",
    "edge_weight",
    "edge_attr",
    "num_nodes",
    "x",
    *SPARSE_FEATURES,
    "y",
    *PARTS,
    *(f"{part}_mask" for part in PARTS),
)
"""Arrays of an `.npz` file."""

KARATE_NEIGHBOURS = {
    0: "1 2 3 4 5 6 7 8 10 11 12 13 17 19 21 31",
    1: "2 3 7 13 17 19 21 30",
    2: "3 7 8 9 13 27 28 32",
    3: "7 12 13",
    4: "6 10",
    5: "6 10 16",
    6: "16",
    8: "30 32 33",
    9: "33",
    13: "33",
    14: "32 33",
    15: "32 33",
    18: "32 33",
    19: "33",
    20: "32 33",
    22: "32 33",
    23: "25 27 29 32 33",
    24: "25 27 31",
    25: "31",
    26: "29 33",
    27: "33",
    28: "31 33",
    29: "32 33",
    30: "32 33",
    31: "32 33",
    32: "33",
}
"""Friendships: larger neighbours of each member."""
KARATE_INSTRUCTOR = (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13, 16, 17, 19, 21)
"""Members of the instructor's faction after the club split."""


Kind = Literal["class", "multilabel", "regression"]
"""Kind of a label: one class of several, any number of T labels, or T numbers."""


def label_kind(labels: Any) -> Kind:
    """Returns the kind of labels `[N]`, `[N, T]` of integers, or `[N, T]` of floating-point numbers."""
    if labels.ndim == 1:
        return "class"
    return "multilabel" if np.issubdtype(labels.dtype, np.integer) else "regression"


def no_labels(labels: np.ndarray, count: int) -> np.ndarray:
    """Returns rows for `count` unlabelled nodes, as those of `labels`."""
    return np.full((count, *labels.shape[1:]), NONE if labels.dtype.kind == "i" else np.nan, labels.dtype)


def is_labelled(labels: np.ndarray) -> Bool[np.ndarray, " N"]:
    """Returns the mask of the nodes with labels."""
    present = np.asarray(np.isfinite(labels) if labels.dtype.kind == "f" else labels != NONE)
    return present if labels.ndim == 1 else np.all(present, axis=1)


@dataclass(frozen=True)
class SparseRows:
    """Sparse feature matrix in CSR: row i has `data[indptr[i]:indptr[i + 1]]` in the columns `indices[...]` of that range."""

    indptr: Int32[np.ndarray, " rows_and_one"]
    indices: Int32[np.ndarray, " entries"]
    data: Float32[np.ndarray, " entries"]
    columns: int

    def take(self, ids: Int[np.ndarray, " R"]) -> "SparseRows":
        """Returns the rows `ids`, sparse."""
        counts = self.indptr[ids + 1] - self.indptr[ids]
        indptr = np.concatenate([np.zeros(1, np.int32), np.cumsum(counts, dtype=np.int32)])
        entries = np.repeat(self.indptr[ids] - indptr[:-1], counts) + np.arange(indptr[-1])
        return SparseRows(indptr, self.indices[entries], self.data[entries], self.columns)

    def rows(self, ids: Int[np.ndarray, " R"]) -> Float32[np.ndarray, "R F"]:
        """Returns the rows `ids`, dense."""
        sparse = self.take(ids)
        out = np.zeros((len(ids), self.columns), np.float32)
        np.add.at(out, (np.repeat(np.arange(len(ids)), np.diff(sparse.indptr)), sparse.indices), sparse.data)
        return out

    def row_normalised(self) -> "SparseRows":
        """Divides each row by its sum; rows with sum 0 are unchanged."""
        owners = np.repeat(np.arange(len(self.indptr) - 1), np.diff(self.indptr))
        sums = np.bincount(owners, self.data, len(self.indptr) - 1)
        return replace(self, data=(self.data / np.where(sums == 0, 1, sums)[owners]).astype(np.float32))


@dataclass(frozen=True)
class NodeData:
    """Graph with node features and node labels.

    Attributes:
        name: name of the data set.
        edge_index: sources and destinations, `[2, E]`; undirected edges are listed in both directions.
        features: dense features `[N, F]`, or `SparseRows`.
        labels: class of each node from 0, -1 for unlabelled nodes; or for each of T labels of a node 1, 0 or -1 for none; or T
            numbers, NaN for none (see `label_kind`).
        train: ids of the training nodes.
        val: ids of the validation nodes; may be empty.
        test: ids of the test nodes; may be empty.
        weights: edge weights; None if all are 1.
        edge_attr: features of the edges; None without.
    """

    name: str
    edge_index: Int32[np.ndarray, "2 E"]
    features: Float32[np.ndarray, "N F"] | SparseRows
    labels: Int32[np.ndarray, " N"] | Int32[np.ndarray, "N T"] | Float32[np.ndarray, "N T"]
    train: Int32[np.ndarray, " train"]
    val: Int32[np.ndarray, " val"]
    test: Int32[np.ndarray, " test"]
    weights: Float32[np.ndarray, " E"] | None = None
    edge_attr: Float32[np.ndarray, "E D"] | None = None

    @property
    def num_edge_features(self) -> int:
        """Width of the edges' features; 0 without."""
        return 0 if self.edge_attr is None else self.edge_attr.shape[1]

    @property
    def num_nodes(self) -> int:
        return len(self.labels)

    @property
    def num_features(self) -> int:
        return self.features.columns if isinstance(self.features, SparseRows) else self.features.shape[1]

    @property
    def num_classes(self) -> int:
        """Number of a model's scores for a node: one for each class, label or number."""
        return self.labels.shape[1] if self.labels.ndim == 2 else int(self.labels.max()) + 1

    def rows(self, ids: Int[np.ndarray, " R"]) -> Float32[np.ndarray, "R F"]:
        """Returns the features of the nodes `ids`, dense."""
        return self.features.rows(ids) if isinstance(self.features, SparseRows) else np.take(self.features, ids, axis=0)

    def with_edges(self, kept: Bool[np.ndarray, " E"]) -> "NodeData":
        """Returns the graph with some of its edges."""
        weights = None if self.weights is None else self.weights[kept]
        edge_attr = None if self.edge_attr is None else self.edge_attr[kept]
        return replace(self, edge_index=self.edge_index[:, kept], weights=weights, edge_attr=edge_attr)

    @property
    def negative_node(self) -> int | None:
        """First node with a negative feature; None without one."""
        if isinstance(self.features, SparseRows):
            entries = np.flatnonzero(self.features.data < 0)
            return int(np.searchsorted(self.features.indptr, entries[0], side="right")) - 1 if len(entries) else None
        nodes = np.flatnonzero((self.features < 0).any(1))
        return int(nodes[0]) if len(nodes) else None

    def row_normalised(self) -> "NodeData":
        """Divides each node's features by their sum, as GCN and GAT do for bags of words.

        Raises:
            ValueError: a feature is negative.
        """
        if (node := self.negative_node) is not None:
            raise ValueError(f"{self.name}: expected features of at least 0 to normalise, found a negative one of node {node}")
        if isinstance(self.features, SparseRows):
            return replace(self, features=self.features.row_normalised())
        sums = self.features.sum(1, keepdims=True)
        return replace(self, features=self.features / np.where(sums == 0, 1, sums))


@dataclass(frozen=True)
class GraphData:
    """Many graphs with a label each, concatenated.

    Attributes:
        name: name of the data set.
        node_offsets: graph g has the nodes `node_offsets[g]` to `node_offsets[g + 1] - 1`.
        edge_offsets: graph g has the edges `edge_offsets[g]` to `edge_offsets[g + 1] - 1`.
        edge_index: sources and destinations, `[2, E]`, numbered from 0 in each graph, sorted by destination within a graph.
        features: features of all nodes.
        labels: class of each graph, from 0.
        folds: ids of the training graphs and the test graphs of each fold.
        edge_attr: features of the edges; None without.
    """

    name: str
    node_offsets: Int32[np.ndarray, " G_and_one"]
    edge_offsets: Int32[np.ndarray, " G_and_one"]
    edge_index: Int32[np.ndarray, "2 E"]
    features: Float32[np.ndarray, "N F"]
    labels: Int32[np.ndarray, " G"]
    folds: tuple[tuple[Int32[np.ndarray, " _"], Int32[np.ndarray, " _"]], ...]
    edge_attr: Float32[np.ndarray, "E D"] | None = None

    @property
    def num_edge_features(self) -> int:
        """Width of the edges' features; 0 without."""
        return 0 if self.edge_attr is None else self.edge_attr.shape[1]

    @cached_property
    def reverse(self) -> Int32[np.ndarray, " E"]:
        """The edge in the opposite direction of each edge, both numbered in all graphs together; several pair up in order.

        Raises:
            ValueError: an edge has none.
        """
        starts = np.repeat(self.node_offsets[:-1], np.diff(self.edge_offsets)).astype(np.int64)
        sources, destinations = self.edge_index + starts
        by_destination = np.lexsort((sources, destinations))
        by_source = np.lexsort((destinations, sources))
        wrong = (sources[by_destination] != destinations[by_source]) | (destinations[by_destination] != sources[by_source])
        if wrong.any():
            edge = int(by_destination[np.argmax(wrong)])
            raise ValueError(f"{self.name}: expected edges in both directions, found edge {edge} or its opposite in one only")
        reverse = np.empty(len(sources), np.int32)
        reverse[by_destination] = by_source
        return reverse

    @property
    def num_graphs(self) -> int:
        return len(self.labels)

    @property
    def num_nodes(self) -> int:
        """Number of nodes of all graphs."""
        return int(self.node_offsets[-1])

    @property
    def num_features(self) -> int:
        return self.features.shape[1]

    @property
    def num_classes(self) -> int:
        return int(self.labels.max()) + 1


def undirected(pairs: Int[np.ndarray, "P 2"]) -> Int32[np.ndarray, "2 E"]:
    """Returns both directions of each pair without duplicates, sorted by destination and source."""
    both = np.concatenate([pairs, pairs[:, ::-1]]).astype(np.int32)
    return np.ascontiguousarray(np.unique(both, axis=0)[:, ::-1].T)


def karate_club() -> NodeData:
    """Returns Zachary's karate club (1977): 34 members, 78 friendships, and two factions.

    The features are one-hot member numbers. The training nodes are the instructor (node 0) and the president (node 33); all
    other nodes are test nodes.
    """
    pairs = np.array([(a, int(b)) for a, near in KARATE_NEIGHBOURS.items() for b in near.split()])
    labels = np.ones(34, np.int32)
    labels[list(KARATE_INSTRUCTOR)] = 0
    train = np.array([0, 33], np.int32)
    others = np.setdiff1d(np.arange(34), train).astype(np.int32)
    return NodeData(KARATE, undirected(pairs), np.eye(34, dtype=np.float32), labels, train, others[:0], others)


def read_data(source: str) -> NodeData | GraphData:
    """Reads a data set: "karate", an `.npz` file or folder of `.npy` files (`read_npz`), a folder with tables of edges and
    nodes (`edge_lists.read_edge_list`), a folder that OGB has downloaded (`read_ogb_folder`), a folder of a PyG data set
    (`pyg_folders.read_pyg_folder`), or a folder in the GIN text format (`read_gin_folder`).

    Raises:
        ValueError: the source is none of these, or malformed; the message names the file and the place.
    """
    if source == KARATE:
        return karate_club()
    path = Path(source)
    if path.is_dir():
        from tilewright.graph import edge_lists  # imports this module

        if edge_lists.has_edge_list(path):
            return edge_lists.read_edge_list(path)
        if (path / "raw" / "edge.csv.gz").exists():
            return read_ogb_folder(path)
        from tilewright.graph import pyg_folders  # imports this module

        if (found := pyg_folders.pyg_folder(path)) is not None:
            return pyg_folders.read_pyg_folder(found)
        return read_npz(path) if (path / "edge_index.npy").exists() else read_gin_folder(path)
    if not path.is_file():
        raise ValueError(f"{source}: expected {KARATE!r}, an .npz file or a folder of graphs, found no such file")
    return read_npz(path)


def load_arrays(path: Path) -> dict[str, np.ndarray]:
    """Loads all arrays of an `.npz` archive.

    Raises:
        ValueError: the file is not an archive of arrays, or an array has pickled objects.
    """
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path}: expected a readable .npz archive (a zip file of arrays), found another file")
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: read_array(path, archive, name) for name in archive}
    except (OSError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path}: expected a readable .npz archive, found a damaged one: {error}") from error


def map_arrays(folder: Path) -> dict[str, np.ndarray]:
    """Maps all `.npy` files of a folder into memory, without reading them.

    Raises:
        ValueError: a file is not an array, or has pickled objects.
    """
    arrays = {}
    for path in sorted(folder.glob("*.npy")):
        try:
            arrays[path.stem] = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, EOFError, ValueError) as error:
            raise ValueError(f"{path}: expected an array of numbers, found none: {error}") from error
    return arrays


def read_array(path: Path, archive: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    try:
        return archive[name]
    except ValueError as error:
        if "allow_pickle" not in str(error):
            raise
        raise ValueError(f"{path}: expected numbers in array {name!r}, found pickled objects, which are not loaded") from error


class Archive:
    """Arrays of a file, with checks whose errors name the file.

    Args:
        path: the file, or a folder.
        arrays: arrays of the file; None reads them.
    """

    def __init__(self, path: Path, arrays: dict[str, np.ndarray] | None = None):
        self.path = path
        if arrays is None:
            arrays = map_arrays(path) if path.is_dir() else load_arrays(path)
        self.arrays = arrays

    def fail(self, problem: str) -> ValueError:
        return ValueError(f"{self.path}: {problem}")

    def column(self, name: str) -> np.ndarray:
        """Returns an array; squeezes `[N, 1]` to `[N]`, since PyG and OGB store labels, masks and weights so."""
        value = self.arrays[name]
        return value[:, 0] if value.ndim == 2 and value.shape[1] == 1 else value

    def integers(self, name: str, shape: tuple[int | None, ...], low: int, high: int) -> Int32[np.ndarray, "..."]:
        """Returns an array of integers from `low` to `high - 1`; None in `shape` allows any length."""
        value = self.column(name) if len(shape) == 1 else self.arrays[name]
        if not np.issubdtype(value.dtype, np.integer):
            raise self.fail(f"{name} must hold integers, found {value.dtype}")
        if value.ndim != len(shape) or any(size not in (None, found) for size, found in zip(shape, value.shape, strict=True)):
            expected_shape = ", ".join("any" if n is None else str(n) for n in shape)
            raise self.fail(f"{name} must have the shape [{expected_shape}], found {list(value.shape)}")
        if value.size and not (value.min() >= low and value.max() < high):
            place = tuple(int(n) for n in np.argwhere((value < low) | (value >= high))[0])
            index = ", ".join(map(str, place))
            raise self.fail(f"{name}[{index}] is {value[place]}, expected {low} to {high - 1}")
        return value.astype(np.int32, copy=False)

    def floats(self, name: str) -> Float32[np.ndarray, "..."]:
        """Returns an array of finite float32 numbers; booleans become 0 and 1."""
        value = self.arrays[name]
        if value.dtype.kind not in "fiub":
            raise self.fail(f"{name} must hold numbers, found {value.dtype}")
        found = to_float32(value)
        for start in range(0, len(found), CHECKED_ROWS):
            wrong = np.argwhere(~np.isfinite(found[start : start + CHECKED_ROWS]))
            if len(wrong):
                place = tuple(int(n) + start * (axis == 0) for axis, n in enumerate(wrong[0]))
                raise self.fail(f"{name}[{', '.join(map(str, place))}] is {value[place]}, expected a finite number in float32")
        return found

    def features(self, nodes: int) -> Float32[np.ndarray, "N F"] | SparseRows:
        """Returns the features, from `x` or from the four CSR arrays."""
        if "x" in self.arrays:
            x = self.floats("x")
            if x.ndim != 2 or len(x) != nodes:
                raise self.fail(f"x must have the shape [{nodes}, features], found {list(x.shape)}")
            return x
        shape = self.integers("x_shape", (2,), 0, 2**31)
        if shape[0] != nodes:
            raise self.fail(f"x_shape[0] is {shape[0]}, but there are {nodes} nodes")
        if shape[1] > MOST_FEATURES:
            raise self.fail(f"x_shape[1] is {shape[1]}, expected at most {MOST_FEATURES} features")
        data = self.floats("x_data")
        if data.ndim != 1:
            raise self.fail(f"x_data must have the shape [any], found {list(data.shape)}")
        indptr = self.integers("x_indptr", (nodes + 1,), 0, len(data) + 1)
        if indptr[0] != 0 or indptr[-1] != len(data) or (np.diff(indptr) < 0).any():
            raise self.fail(f"x_indptr must rise from 0 to the {len(data)} entries of x_data")
        return SparseRows(indptr, self.integers("x_indices", (len(data),), 0, int(shape[1])), data, int(shape[1]))

    def labels(self) -> np.ndarray:
        """Returns the labels of the nodes from `y` (see `label_kind`), and checks `num_nodes` if present."""
        given = self.arrays["y"]
        if given.ndim not in (1, 2):
            raise self.fail(f"y must have the shape [nodes] or [nodes, labels], found {list(given.shape)}")
        if given.dtype.kind == "f":
            labels = to_float32(given).reshape(len(given), -1)
            if (wrong := np.argwhere(np.isinf(labels))).size:
                raise self.fail(f"y{wrong[0].tolist()} is {labels[tuple(wrong[0])]}, expected a finite number, or NaN for none")
        elif self.column("y").ndim == 1:
            labels = self.integers("y", (None,), NONE, max(MOST_CLASSES, len(given)))
        else:
            self.arrays["y"] = given.astype(np.int32) if given.dtype == bool else given
            labels = self.integers("y", (None, None), NONE, 2)
        if not is_labelled(labels).any():
            raise self.fail("expected labelled nodes in y, found none")
        if "num_nodes" in self.arrays:
            count = self.arrays["num_nodes"]
            if count.size != 1 or count.dtype.kind not in "iu" or count.item() != len(labels):
                raise self.fail(f"num_nodes is {count.tolist()}, but y has labels of {len(labels)} nodes")
        return labels

    def edge_weights(self, edges: int) -> Float32[np.ndarray, " E"] | None:
        """Returns the edge weights from `edge_weight`; None without."""
        if "edge_weight" not in self.arrays:
            return None
        weights = self.floats("edge_weight")
        if weights.shape not in ((edges,), (edges, 1)):
            raise self.fail(f"edge_weight must have the shape [{edges}], a number for each edge, found {list(weights.shape)}")
        return weights.reshape(edges)

    def edge_attr(self, edges: int) -> Float32[np.ndarray, "E D"] | None:
        """Returns the features of the edges from `edge_attr`; None without."""
        if "edge_attr" not in self.arrays:
            return None
        values = self.floats("edge_attr")
        if values.ndim not in (1, 2) or len(values) != edges:
            raise self.fail(f"edge_attr must have the shape [{edges}] or [{edges}, features], found {list(values.shape)}")
        return values.reshape(edges, -1)

    def part(self, part: str, nodes: int) -> Int32[np.ndarray, " ids"] | None:
        """Returns the nodes of a part from ids or mask; None without both."""
        mask = f"{part}_mask"
        if mask not in self.arrays:
            return self.integers(part, (None,), 0, nodes) if part in self.arrays else None
        if part in self.arrays:
            raise self.fail(f"expected {part} or {mask}, found both")
        value = self.column(mask)
        if value.shape != (nodes,):
            raise self.fail(f"{mask} must have the shape [{nodes}], the mask of one split, found {list(value.shape)}")
        if value.dtype.kind not in "biu" or not np.isin(value, (0, 1)).all():
            raise self.fail(f"{mask} must hold booleans, or 0 and 1, found {value.dtype}")
        return np.flatnonzero(value).astype(np.int32)

    def parts(self, labels: np.ndarray) -> dict[str, Int32[np.ndarray, " ids"]]:
        """Returns the training, validation and test nodes; empty arrays without a split."""
        parts = {part: ids for part in PARTS if (ids := self.part(part, len(labels))) is not None}
        if parts and not len(parts.get("train", ())):
            raise self.fail(f"expected training nodes in the split, found none among the parts {', '.join(parts)}")
        for part, ids in parts.items():
            if len(unlabelled := ids[~is_labelled(labels[ids])]):
                raise self.fail(f"expected labels of all nodes in {part}, found none of node {unlabelled[0]}")
        for part, other in itertools.combinations(parts, 2):
            if len(common := np.intersect1d(parts[part], parts[other])):
                raise self.fail(f"expected each node in one part, found node {common[0]} in {part} and {other}")
        return {part: parts.get(part, np.zeros(0, np.int32)) for part in PARTS}

    def node_data(self, name: str) -> NodeData:
        """Returns all arrays as a checked graph."""
        labels = self.labels()
        edges = self.integers("edge_index", (2, None), 0, len(labels))
        weights = self.edge_weights(edges.shape[1])
        edge_attr = self.edge_attr(edges.shape[1])
        parts = self.parts(labels)
        return NodeData(name, edges, self.features(len(labels)), labels, **parts, weights=weights, edge_attr=edge_attr)


def read_npz(path: Path) -> NodeData:
    """Reads one graph from an `.npz` archive without pickles, or from a folder of `.npy` files, with PyG's names.

    Files of a folder are mapped into memory: float32 features and int32 edges stay on disk until they are used.

    Required arrays: `edge_index` [2, E]; the features, dense as `x` [N, F] or in CSR as `x_indptr`, `x_indices`, `x_data`,
    `x_shape`; and `y`: classes [N] or [N, 1] (-1 for none), several labels of 0 and 1 [N, T], or floating-point numbers [N] or
    [N, T] to predict (NaN for none). Optional arrays: a split, as masks `train_mask`, `val_mask`, `test_mask` [N] or as ids
    `train`, `val`, `test`; edge weights `edge_weight` [E]; features of the edges `edge_attr` [E] or [E, D];
    and `num_nodes`, the length of `y`.

    Raises:
        ValueError: an array is missing, wrong or unknown; the message names the array and the first wrong entry.
    """
    file = Archive(path)
    if unknown := sorted(file.arrays.keys() - set(ARRAYS)):
        raise file.fail(f"expected arrays among {', '.join(ARRAYS)}, found {', '.join(unknown)}")
    sparse = [name for name in SPARSE_FEATURES if name in file.arrays]
    if "x" in file.arrays and sparse:
        raise file.fail(f"expected features as x or in CSR, found x and {', '.join(sparse)}")
    if "x" not in file.arrays and "x_data" not in file.arrays:
        raise file.fail("expected features as x, or as x_indptr, x_indices, x_data and x_shape, found none")
    required = ["edge_index", "y", *([] if "x" in file.arrays else SPARSE_FEATURES)]
    if missing := [name for name in required if name not in file.arrays]:
        raise file.fail(f"expected the arrays {', '.join(missing)}, found only {', '.join(sorted(file.arrays))}")
    return file.node_data(path.stem)


OGB_ARRAYS = {"edge_index": "edge", "x": "node-feat", "y": "node-label", "edge_attr": "edge-feat"}
"""Files `raw/NAME.csv.gz` of OGB by the name of their array."""
OGB_PARTS = {"train": "train", "val": "valid", "test": "test"}
OGB_ONE_DIRECTION = ("products", "proteins")
"""Data sets whose files have one direction of each undirected edge; OGB adds the other one as it reads them."""


def read_ogb_folder(folder: Path) -> NodeData:
    """Reads a data set for nodes of the Open Graph Benchmark from the folder that `ogb` has downloaded, such as `ogbn_arxiv`.

    Edges have the directions that OGB's own loader gives them: one in arxiv, whose usual models add the other one, both in
    products and proteins.

    Raises:
        ValueError: a file is missing or has no numbers, or an array is wrong; the message names the file or the array.
    """
    splits = sorted(each for each in folder.glob("split/*") if each.is_dir())
    if len(splits) != 1:
        raise ValueError(f"{folder}: expected one folder in split, found {len(splits)}")
    arrays = {}
    for name, stem in OGB_ARRAYS.items():
        path = folder / "raw" / f"{stem}.csv.gz"
        if path.exists():
            arrays[name] = read_table(path, np.int64 if name == "edge_index" else np.float32)
        elif name != "edge_attr":
            raise ValueError(f"{path}: expected a file, found none")
    for part, stem in OGB_PARTS.items():
        arrays[part] = read_table(splits[0] / f"{stem}.csv.gz", np.int64)[:, 0]
    arrays["edge_index"] = arrays["edge_index"].T
    if (arrays["y"] == np.rint(arrays["y"])).all():
        arrays["y"] = arrays["y"].astype(np.int32)
    name = folder.name.removeprefix("ogbn_").removeprefix("ogbn-")
    if name in OGB_ONE_DIRECTION:
        arrays["edge_index"] = np.concatenate([arrays["edge_index"], arrays["edge_index"][::-1]], axis=1)
        if "edge_attr" in arrays:
            arrays["edge_attr"] = np.concatenate([arrays["edge_attr"], arrays["edge_attr"]])
    return Archive(folder, arrays).node_data(name)


def read_table(path: Path, dtype: DTypeLike) -> np.ndarray:
    """Reads a text file of numbers with commas between them, also compressed by gzip. Raises a `ValueError` for another one."""
    try:
        return np.loadtxt(path, dtype, delimiter=",", ndmin=2)
    except (OSError, EOFError, ValueError) as error:
        raise ValueError(f"{path}: expected numbers with commas between them, found none: {error}") from error


def with_split(data: NodeData, seed: int = 0, per_class: int = 20, val: int = 500) -> NodeData:
    """Adds a random split like Planetoid's: 20 training nodes per class, 500 validation nodes, the rest for tests.

    At most half of the nodes that are not for training are for validation. Without classes, half of the nodes are for training.

    Args:
        data: a graph without a split.
        seed: seed of the split.
        per_class: training nodes per class.
        val: validation nodes.
    """
    rng = np.random.default_rng(seed)
    order = rng.permutation(np.flatnonzero(is_labelled(data.labels))).astype(np.int32)
    train = order[: len(order) // 2]
    if label_kind(data.labels) == "class":
        train = np.concatenate([order[data.labels[order] == c][:per_class] for c in range(data.num_classes)])
    rest = order[~np.isin(order, train)]
    val = min(val, len(rest) // 2)
    return replace(data, train=np.sort(train), val=np.sort(rest[:val]), test=np.sort(rest[val:]))


def with_folds(data: GraphData, seed: int = 0, folds: int = 10) -> GraphData:
    """Splits graphs into folds at random, stratified by label.

    Raises:
        ValueError: there are fewer graphs than folds.
    """
    if data.num_graphs < folds:
        raise ValueError(f"{data.name}: expected at least {folds} graphs for {folds} folds, found {data.num_graphs}")
    order = np.random.default_rng(seed).permutation(data.num_graphs)
    order = order[np.argsort(data.labels[order], kind="stable")].astype(np.int32)
    place = np.arange(len(order)) % folds
    return replace(data, folds=tuple((np.sort(order[place != n]), np.sort(order[place == n])) for n in range(folds)))


class Lines:
    """Lines of a text file, with parsers whose errors name file and line."""

    def __init__(self, path: Path):
        try:
            self.lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: expected a readable UTF-8 file, found an error: {error}") from error
        self.path = path
        self.number = 0

    def fail(self, problem: str) -> ValueError:
        return ValueError(f"{self.path}, line {self.number}: {problem}")

    def next(self, noun: str) -> list[str]:
        if self.number >= len(self.lines):
            self.number += 1
            raise self.fail(f"expected {noun}, found the end of the file")
        self.number += 1
        return self.lines[self.number - 1].split()

    def integers(self, words: list[str], noun: str) -> list[int]:
        try:
            found = [int(word) for word in words]
        except ValueError:
            raise self.fail(f"expected {noun}, found {' '.join(words)!r}") from None
        if any(not -(2**63) <= value < 2**63 for value in found):
            raise self.fail(f"expected {noun} of at most 64 bits, found {' '.join(words)!r}")
        return found


def read_gin_folder(folder: Path) -> GraphData:
    """Reads the GIN paper's text format: `NAME.txt` and `10fold_idx/`; NAME is the folder's name or the only text file.

    The first line has the number of graphs. A graph has a line with its number of nodes and its label, and a line per node:
    tag, number of neighbours, the neighbours, and optional real-valued attributes. Tags become one-hot features; if all tags
    are equal, the degrees do (as in the paper for IMDB). Attributes are appended.

    Raises:
        ValueError: the folder is malformed; the message names file and line.
    """
    named = folder / f"{folder.name}.txt"
    found = [named] if named.exists() else sorted(folder.glob("*.txt"))
    if len(found) != 1:
        raise ValueError(f"{folder}: expected one text file with the graphs, found {len(found)}")
    lines = Lines(found[0])
    (count,) = lines.integers(lines.next("the number of graphs"), "the number of graphs")[:1] or [0]
    if count < 1:
        raise lines.fail(f"expected at least one graph, found {count}")
    graphs = [read_graph(lines) for _ in range(count)]
    if any(line.strip() for line in lines.lines[lines.number :]):
        lines.number += 1
        raise lines.fail(f"expected the end of the file after {count} graphs")
    tags = np.concatenate([tags for _, tags, _, _ in graphs])
    edges = [edges for _, _, edges, _ in graphs]
    degrees = np.concatenate(
        [np.bincount(each[1], minlength=len(tags)) for (_, tags, _, _), each in zip(graphs, edges, strict=True)]
    )
    features = one_hot(degrees if len(np.unique(tags)) == 1 else tags)
    widths = {len(row) for *_, rows in graphs for row in rows}
    if len(widths) != 1:
        raise ValueError(f"{found[0]}: expected the same number of attributes for all nodes, found {sorted(widths)}")
    if widths != {0}:
        features = np.concatenate([features, np.array([row for *_, rows in graphs for row in rows], np.float32)], axis=1)
    _, labels = np.unique([label for label, *_ in graphs], return_inverse=True)
    return GraphData(
        found[0].stem,
        offsets([len(tags) for _, tags, _, _ in graphs]),
        offsets([each.shape[1] for each in edges]),
        np.concatenate(edges, axis=1),
        features,
        labels.astype(np.int32),
        tuple(read_folds(folder, count)),
    )


Graph = tuple[int, np.ndarray, np.ndarray, list[list[float]]]
"""Label, tags of the nodes, edges, and attributes of the nodes."""


def read_graph(lines: Lines) -> Graph:
    """Reads one graph of the text format."""
    head = lines.integers(lines.next("a graph's number of nodes and its label"), "a graph's number of nodes and its label")
    if len(head) != 2 or head[0] < 1:
        raise lines.fail(f"expected a graph's number of nodes and its label, found {' '.join(map(str, head)) or 'nothing'}")
    if head[0] > (left := len(lines.lines) - lines.number):
        raise lines.fail(f"expected the lines of {head[0]} nodes, found {left} more lines")
    tags = np.zeros(head[0], np.int64)
    pairs = []
    attributes = []
    for node in range(head[0]):
        words = lines.next(f"node {node} of {head[0]}")
        start = lines.integers(words[:2], "a node's tag and its number of neighbours")
        if len(start) != 2 or start[1] < 0 or len(words) < 2 + start[1]:
            raise lines.fail(f"expected a node's tag, its number of neighbours and these, found {' '.join(words)!r}")
        near = lines.integers(words[2 : 2 + start[1]], "the numbers of a node's neighbours")
        if wrong := [n for n in near if not 0 <= n < head[0]]:
            raise lines.fail(f"expected neighbours from 0 to {head[0] - 1}, found {wrong[0]}")
        tags[node] = start[0]
        pairs += [(node, n) for n in near]
        attributes.append([real(lines, word) for word in words[2 + start[1] :]])
    return head[1], tags, undirected(np.array(pairs, np.int64).reshape(-1, 2)), attributes


def real(lines: Lines, word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        raise lines.fail(f"expected a node's attribute, found {word!r}") from None
    if not abs(value) <= float(np.finfo(np.float32).max):
        raise lines.fail(f"expected a finite attribute in float32, found {word!r}")
    return value


def read_folds(folder: Path, graphs: int) -> Iterator[tuple[Int32[np.ndarray, " _"], Int32[np.ndarray, " _"]]]:
    """Yields the graph ids of `10fold_idx/train_idx-1.txt`, `test_idx-1.txt` etc.; nothing without that folder."""
    place = folder / "10fold_idx"
    for fold in range(1, 11) if place.is_dir() else ():
        parts = []
        for part in ("train", "test"):
            lines = Lines(place / f"{part}_idx-{fold}.txt")
            ids = []
            while lines.number < len(lines.lines):
                ids += lines.integers(lines.next("a graph's number"), "a graph's number")
                if ids and not 0 <= ids[-1] < graphs:
                    raise lines.fail(f"expected graphs from 0 to {graphs - 1}, found {ids[-1]}")
            if not ids:
                raise lines.fail("expected the numbers of graphs, found none")
            parts.append(np.array(ids, np.int32))
        if len(common := np.intersect1d(*parts)):
            raise ValueError(
                f"{place}: expected disjoint training and test graphs in fold {fold}, found graph {common[0]} in both"
            )
        yield parts[0], parts[1]


def one_hot(values: Int[np.ndarray, " N"]) -> Float32[np.ndarray, "N F"]:
    """Encodes integers as one-hot columns, one per distinct value in ascending order."""
    kinds, place = np.unique(values, return_inverse=True)
    columns = np.zeros((len(values), len(kinds)), np.float32)
    columns[np.arange(len(values)), place] = 1
    return columns


def offsets(sizes: list[int]) -> Int32[np.ndarray, " and_one"]:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
