"""Folders of PyTorch Geometric's data sets, read without torch: `processed/*.pt`, and raw files of Planetoid and TUDataset.

Both kinds of files describe Python objects by a program for a stack machine. `models.torch_file` interprets it without calls
of functions: arrays become descriptions, and names of other objects are errors.

Legend: G graphs, N nodes, E edges, F features, D features of an edge.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
from jaxtyping import Float32, Int, Int32

from tilewright.graph.data import (
    ARRAYS,
    NONE,
    Archive,
    GraphData,
    NodeData,
    SparseRows,
    one_hot,
    read_table,
)
from tilewright.models.torch_file import (
    STORAGES,
    Global,
    NotATensor,
    StackMachine,
    TorchTensor,
    described,
    load,
    numbers_of,
)

OTHER_FILES = ("pre_transform.pt", "pre_filter.pt")
"""Files of `processed` that hold no data."""
PLANETOID = ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")
"""Last part of the names of Planetoid's files, `ind.NAME.x` and so on."""
VALIDATION_NODES = 500
"""Number of validation nodes in Planetoid's split, those after the training nodes."""
MOST_BYTES = 1 << 26
"""Maximum size of a description; large ones list a text or a number for each graph."""
ARRAY = "numpy ndarray"
DTYPE = "numpy dtype"
MATRIX = re.compile(r"scipy\.sparse(\.csr|\._csr)? csr_(matrix|array)")
PYG = "torch_geometric."
INTEGER_STORAGES = {
    "torch LongStorage": np.int64,
    "torch IntStorage": np.int32,
    "torch ShortStorage": np.int16,
    "torch CharStorage": np.int8,
    "torch ByteStorage": np.uint8,
    "torch BoolStorage": np.bool_,
}


@dataclass
class Described:
    """Object of a class that is never imported.

    Attributes:
        name: the class, "module name".
        state: state of the object; for a dtype first its code, such as "i4".
    """

    name: str
    state: Any = None


class DatasetMachine(StackMachine):
    """Stack machine that also describes lists, NumPy's arrays, SciPy's matrices in CSR and PyG's objects."""

    storages = STORAGES | INTEGER_STORAGES

    def called(self, function: Any, arguments: Any) -> Any:
        match function, arguments:
            case Global("numpy.core.multiarray _reconstruct" | "numpy._core.multiarray _reconstruct"), (Global(name), *_):
                return self.made(name)
            case Global("copy_reg _reconstructor" | "copyreg _reconstructor"), (Global(name), *_):
                return self.made(name)
            case Global(name), (str(code), *_) if name == DTYPE:
                return Described(DTYPE, code)
            case Global("collections defaultdict"), _:
                return {}
            case Global("_codecs encode"), (str(text), "latin1"):
                return text.encode("latin-1")
        return super().called(function, arguments)

    def made(self, name: str) -> Described:
        """Describes a new object of a class. Raises a `NotATensor` for other classes than those of data sets."""
        if name != ARRAY and not MATRIX.fullmatch(name) and not name.startswith(PYG):
            raise NotATensor(f"an object of {name}")
        return Described(name)

    def step(self, name: str, argument: Any) -> None:
        match name:
            case "BUILD":
                state = self.stack.pop()
                target = self.stack[-1]
                if not isinstance(target, Described):
                    raise NotATensor(f"a state of {target!r}")
                target.state = (target.state, state) if target.name == DTYPE else state
            case "APPENDS":
                values = self.since_mark()
                self.list_on_top().extend(values)
            case "APPEND":
                value = self.stack.pop()
                self.list_on_top().append(value)
            case _:
                super().step(name, argument)

    def list_on_top(self) -> list[Any]:
        if not isinstance(self.stack[-1], list):
            raise NotATensor(f"values in {self.stack[-1]!r}")
        return self.stack[-1]

    def pushed(self, name: str, argument: Any) -> Any:
        match name:
            case "EMPTY_LIST":
                return []
            case "NEWOBJ":
                arguments = self.stack.pop()
                kind = self.stack.pop()
                if not isinstance(kind, Global) or arguments != ():
                    raise NotATensor(f"an object of {kind!r}")
                return self.made(kind.name)
        if isinstance(argument, bytes):
            return argument
        return super().pushed(name, argument)


def numpy_array(found: Any) -> np.ndarray:
    """Returns the array that a pickle describes, with numbers or booleans."""
    match found:
        case Described(name, (_, tuple(shape), Described(_, (str(code), (_, str(order), *_))), bool(columns), data)) if (
            name == ARRAY
        ):
            if re.fullmatch("[biuf][1248]", code) is None or order not in "<>=|":
                raise NotATensor(f"an array of the kind {order}{code}")
            content = data.encode("latin-1") if isinstance(data, str) else data
            values = np.frombuffer(content, np.dtype(order + code))
            return values.reshape(shape, order="F" if columns else "C")
    raise NotATensor(f"{found.name if isinstance(found, Described) else type(found).__name__} in place of an array")


def sparse_rows(found: Any, path: Path) -> SparseRows:
    """Returns the matrix that a pickle describes, dense or in CSR."""
    if not isinstance(found, Described) or not MATRIX.fullmatch(found.name):
        dense = numpy_array(found)
        if dense.ndim != 2:
            raise NotATensor(f"features of the shape {list(dense.shape)}")
        rows, columns = np.nonzero(dense)
        offsets = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(dense)))])
        arrays = {"x_indptr": offsets, "x_indices": columns, "x_data": dense[rows, columns]}
        shape = dense.shape
    else:
        state = found.state
        arrays = {f"x_{name}": numpy_array(state[name]) for name in ("indptr", "indices", "data")}
        shape = state["_shape"]
    checked = Archive(path, arrays | {"x_shape": np.array(shape, np.int64)}).features(int(shape[0]))
    assert isinstance(checked, SparseRows)
    return checked


def read_pickle(path: Path) -> Any:
    """Returns the description of the object in a pickle of Planetoid's. Raises a `ValueError` for other objects than arrays."""
    try:
        return described(path.read_bytes(), DatasetMachine())
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{path}: expected a pickle of arrays, found {error}") from error


def pyg_folder(folder: Path) -> Path | None:
    """Returns the folder with `processed` or `raw` of a PyG data set: `folder`, or the only subfolder that has one; else None.

    Raises:
        ValueError: several subfolders are data sets.
    """
    if is_pyg_folder(folder):
        return folder
    found = sorted(each for each in folder.iterdir() if each.is_dir() and is_pyg_folder(each))
    if len(found) > 1:
        raise ValueError(f"{folder}: expected the folder of one data set, found {', '.join(each.name for each in found)}")
    return found[0] if found else None


def is_pyg_folder(folder: Path) -> bool:
    return bool(processed_files(folder) or raw_names(folder))


def processed_files(folder: Path) -> list[Path]:
    """Returns the files of `processed` with data."""
    return sorted(path for path in folder.glob("processed/*.pt") if path.name not in OTHER_FILES)


def raw_names(folder: Path) -> list[tuple[Path, str, bool]]:
    """Returns folder and name of the data sets with raw files, and True for Planetoid's, False for TUDataset's."""
    found = []
    for place in (folder / "raw", folder):
        found += [(place, path.name[4:-5], True) for path in sorted(place.glob("ind.*.allx"))]
        found += [(place, path.name[:-6], False) for path in sorted(place.glob("*_A.txt"))]
    return [each for each in found if each[2] or (each[0] / f"{each[1]}_graph_indicator.txt").is_file()]


def read_pyg_folder(folder: Path) -> NodeData | GraphData:
    """Reads the folder that a data set of PyG's has made, for nodes or for graphs.

    `processed/data.pt` (or the only other file there) has precedence, as in PyG, so that a `pre_transform` counts. Without it
    the raw files of Planetoid (`ind.NAME.x`, ...) or TUDataset (`NAME_A.txt`, ...) are read. Attributes beside those of
    `read_npz` are left out.

    Raises:
        ValueError: a file is missing or damaged, or holds other objects than arrays, or arrays do not fit; names the file.
    """
    processed = processed_files(folder)
    if processed:
        named = [path for path in processed if path.name == "data.pt"] or processed
        if len(named) != 1:
            raise ValueError(f"{folder / 'processed'}: expected one file, found {', '.join(path.name for path in named)}")
        return read_processed(named[0], folder.resolve().name)
    names = raw_names(folder)
    if len(names) != 1:
        raise ValueError(
            f"{folder}: expected raw files of one data set, found {', '.join(each[1] for each in names) or 'none'}"
        )
    ((place, name, planetoid),) = names
    return read_planetoid(place, name) if planetoid else read_tu(place, name)


def read_processed(path: Path, name: str) -> NodeData | GraphData:
    """Reads the file in which PyG's `InMemoryDataset` keeps a graph, or many graphs."""
    found, slices = load(path, DatasetMachine(), stored_arrays, MOST_BYTES, "arrays of a data set of PyG's")
    if any(isinstance(value, Mapping) for value in found.values()):
        raise ValueError(f"{path}: expected one kind of nodes, found {', '.join(map(str, found))}")
    arrays = {each: value for each, value in found.items() if each in ARRAYS and value is not None}
    if wrong := [each for each, value in arrays.items() if not isinstance(value, np.ndarray)]:
        if wrong != ["num_nodes"]:
            raise ValueError(
                f"{path}: expected an array in {wrong[0]}, found {getattr(found[wrong[0]], 'name', 'another value')}"
            )
        arrays["num_nodes"] = np.asarray(arrays["num_nodes"])
    if missing := [each for each in ("edge_index", "y") if each not in arrays]:
        raise ValueError(f"{path}: expected the arrays {', '.join(missing)}, found only {', '.join(sorted(arrays))}")
    if slices is None:
        if "x" not in arrays:
            raise ValueError(f"{path}: expected features as x, found only {', '.join(sorted(arrays))}")
        return Archive(path, arrays).node_data(name)
    return many_graphs(path, name, arrays, slices)


def stored_arrays(archive: ZipFile, folder: str, found: Any) -> tuple[dict[Any, Any], dict[str, Any] | None]:
    """Returns the attributes of a `Data` object by name, and where those of each graph start (None for one graph)."""
    if not isinstance(found, tuple) or len(found) < 2:
        raise NotATensor("no pair of data and slices")
    data, slices = found[:2]
    if isinstance(data, Described):  # of PyG before 2.4
        data = data.state["_store"].state["_mapping"]
    if not isinstance(data, dict) or not isinstance(slices, dict | None):
        raise NotATensor("no pair of data and slices")
    read = {name: tensor(archive, folder, value) for name, value in data.items()}
    return read, slices and {name: tensor(archive, folder, value) for name, value in slices.items()}


def tensor(archive: ZipFile, folder: str, found: Any) -> Any:
    """Returns a tensor's numbers, of any strides; returns any other value unchanged."""
    if isinstance(found, Described) and found.name == ARRAY:
        return numpy_array(found)
    if not isinstance(found, TorchTensor):
        return found
    numbers = np.frombuffer(archive.read(numbers_of(archive, folder, found.storage)), np.dtype(found.storage.dtype))
    last = found.offset + sum((n - 1) * stride for n, stride in zip(found.shape, found.strides, strict=True))
    size = prod(found.shape)
    if min(found.offset, size, *found.strides, 0) < 0 or size > len(numbers) or (size and last >= len(numbers)):
        raise NotATensor("numbers that are out of range")
    strides = [stride * numbers.itemsize for stride in found.strides]
    return np.lib.stride_tricks.as_strided(numbers[found.offset :], found.shape, strides, writeable=False).copy()


def many_graphs(path: Path, name: str, arrays: dict[str, np.ndarray], slices: dict[str, Any]) -> GraphData:
    """Returns the graphs of a collated `Data` object; without features, their degrees are."""
    file = Archive(path, {**arrays, **{f"{each} of slices": np.asarray(value) for each, value in slices.items()}})
    count = arrays["edge_index"].shape[-1]
    edges = starts_of(file, "edge_index", count)
    if "x" in arrays:
        nodes = starts_of(file, "x", len(arrays["x"]))
    elif "num_nodes" in arrays:
        each = file.integers("num_nodes", (None,), 0, 2**31)
        nodes = np.concatenate([[0], np.cumsum(each)]).astype(np.int32)
    else:
        raise file.fail("expected x or num_nodes of many graphs, found none")
    if len(nodes) != len(edges):
        raise file.fail(f"expected nodes of {len(edges) - 1} graphs, found {len(nodes) - 1}")
    edge_index = file.integers("edge_index", (2, None), 0, max(int(np.diff(nodes).max(initial=0)), 1))
    graph = np.repeat(np.arange(len(edges) - 1), np.diff(edges))
    if (wrong := np.flatnonzero((edge_index >= np.diff(nodes)[graph]).any(0))).size:
        raise file.fail(f"edge_index[:, {wrong[0]}] is {edge_index[:, wrong[0]].tolist()}, beyond the nodes of its graph")
    return graph_data(file, name, graph, nodes, edge_index, file.edge_attr(count))


def starts_of(file: Archive, name: str, count: int) -> Int32[np.ndarray, " G_and_one"]:
    """Returns where the rows of each graph start in an array, from the slices."""
    key = f"{name} of slices"
    if key not in file.arrays:
        raise file.fail(f"expected slices of {name}, found none")
    starts = file.integers(key, (None,), 0, count + 1)
    if len(starts) < 2 or starts[0] != 0 or starts[-1] != count or (np.diff(starts) < 0).any():
        raise file.fail(f"expected slices of {name} that rise from 0 to {count}, found others")
    return starts


def graph_data(
    file: Archive,
    name: str,
    graph: Int[np.ndarray, " E"],
    node_offsets: Int32[np.ndarray, " G_and_one"],
    edge_index: Int32[np.ndarray, "2 E"],
    edge_attr: Float32[np.ndarray, "E D"] | None,
) -> GraphData:
    """Returns graphs with their edges sorted by destination.

    Args:
        file: the arrays: `y` with a class for each graph, and features `x`, if any.
        name: name of the data set.
        graph: graph of each edge.
        node_offsets: where the nodes of each graph start.
        edge_index: edges, numbered from 0 in each graph.
        edge_attr: features of the edges, if any.
    """
    count = len(node_offsets) - 1
    if file.column("y").dtype.kind == "f":
        raise file.fail("expected a class for each graph in y, found numbers")
    labels = file.integers("y", (count,), 0, max(1000, count))
    if "x" in file.arrays:
        features = file.floats("x")
        if features.ndim != 2 or len(features) != node_offsets[-1]:
            raise file.fail(f"x must have the shape [{node_offsets[-1]}, features], found {list(features.shape)}")
    else:
        degrees = np.bincount(edge_index[1] + node_offsets[graph], minlength=int(node_offsets[-1]))
        features = one_hot(degrees)
    order = np.lexsort((edge_index[0], edge_index[1], graph))
    edge_offsets = np.concatenate([[0], np.cumsum(np.bincount(graph, minlength=count))]).astype(np.int32)
    if edge_attr is not None:
        edge_attr = edge_attr[order]
    return GraphData(name, node_offsets, edge_offsets, edge_index[:, order], features, labels, (), edge_attr)


def read_planetoid(folder: Path, name: str) -> NodeData:
    """Reads Planetoid's raw files with the public split.

    Nodes of the graph without a row in the files (CiteSeer has 15) have features of 0 and no label; PyG gives them class 0.

    Raises:
        ValueError: a file is missing or no pickle of arrays, or the files do not fit together.
    """
    paths = {part: folder / f"ind.{name}.{part}" for part in PLANETOID}
    if name.startswith("nell"):
        raise ValueError(f"{folder}: expected Cora, CiteSeer or PubMed, found NELL, which PyG has to process first")
    found = {part: read_pickle(paths[part]) for part in PLANETOID if part != "test.index"}
    tests = read_table(paths["test.index"], np.int64)[:, 0]
    try:
        others, last = (sparse_rows(found[part], paths[part]) for part in ("allx", "tx"))
        classes = [numpy_array(found[part]) for part in ("y", "ally", "ty")]
    except (NotATensor, KeyError, TypeError) as error:
        raise ValueError(f"{folder}: expected arrays in ind.{name}.*, found {error}") from error
    sizes = {"ally": len(classes[1]), "ty": len(classes[2]), "test.index": len(tests)}
    known = len(others.indptr) - 1
    expected = {"ally": known, "ty": len(last.indptr) - 1, "test.index": len(last.indptr) - 1}
    for part, size in expected.items():
        if sizes[part] != size:
            raise ValueError(f"{paths[part]}: expected {size} rows, found {sizes[part]}")
    if others.columns != last.columns or any(each.ndim != 2 or each.shape[1] != classes[0].shape[1] for each in classes):
        raise ValueError(f"{folder}: expected the same columns in ind.{name}.allx and tx, and in y, ally and ty")
    graph = found["graph"]
    nodes = len(graph) if isinstance(graph, dict) else 0
    if len(np.unique(tests)) < len(tests) or not all(known <= test < nodes for test in tests):
        raise ValueError(f"{paths['test.index']}: expected different nodes from {known} to {nodes - 1}, found others")
    place = np.full(nodes, -1)  # row of each node in both parts; the row behind them is empty
    place[:known] = np.arange(known)
    place[tests] = known + np.arange(len(tests))
    rows = stacked(others, last).take(place % (known + len(tests) + 1))
    labels = np.concatenate([classes[1].argmax(1), classes[2].argmax(1), [NONE]])[place].astype(np.int32)
    train = len(classes[0])
    try:
        ends = [(np.full(len(near), node), np.array(near, np.int64)) for node, near in graph.items()]
        pairs = np.concatenate([np.stack(each) for each in ends], axis=1)
        pairs = np.unique(pairs[::-1, pairs[0] != pairs[1]], axis=1)[::-1]  # by destination, once each
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"{paths['graph']}: expected lists of neighbours, found {error}") from error
    arrays = {
        "edge_index": pairs,
        "x_indptr": rows.indptr,
        "x_indices": rows.indices,
        "x_data": rows.data,
        "x_shape": np.array([nodes, rows.columns]),
        "y": labels,
        "train": np.arange(train),
        "val": np.arange(train, min(train + VALIDATION_NODES, known)),
        "test": tests,
    }
    return Archive(folder, arrays).node_data(name)


def stacked(first: SparseRows, second: SparseRows) -> SparseRows:
    """Returns the rows of both matrices, and an empty row."""
    indptr = np.concatenate([first.indptr, second.indptr[1:] + first.indptr[-1], [first.indptr[-1] + second.indptr[-1]]])
    indices, data = (np.concatenate([getattr(first, part), getattr(second, part)]) for part in ("indices", "data"))
    return SparseRows(indptr.astype(np.int32), indices, data, first.columns)


def read_tu(folder: Path, name: str) -> GraphData:
    """Reads the text files of a TUDataset for classification, as PyG does with `use_node_attr` and `use_edge_attr`.

    Features are the attributes, then the labels in one-hot columns from the smallest to the largest; without both, the degrees.
    Self-loops are left out, and features of equal edges are summed.

    Raises:
        ValueError: a file is missing or has no numbers, or the files do not fit together.
    """

    def table(stem: str, dtype: type) -> np.ndarray:
        return read_table(folder / f"{name}_{stem}.txt", dtype)

    def features(kind: str) -> np.ndarray | None:
        parts = []
        if (folder / f"{name}_{kind}_attributes.txt").is_file():
            parts.append(table(f"{kind}_attributes", np.float32))
        if (folder / f"{name}_{kind}_labels.txt").is_file():
            parts += [
                np.eye(int(np.ptp(each)) + 1, dtype=np.float32)[each - each.min()]
                for each in table(f"{kind}_labels", np.int64).T
            ]
        if len({len(part) for part in parts}) > 1:
            raise ValueError(
                f"{folder}: expected as many {kind} attributes as labels, found {len(parts[0])} and {len(parts[1])}"
            )
        return np.concatenate(parts, axis=1) if parts else None

    graphs = table("graph_indicator", np.int64)[:, 0] - 1
    arrays = {"edge_index": table("A", np.int64).T - 1, "graph_indicator": graphs}
    labels = folder / f"{name}_graph_labels.txt"
    if not labels.is_file():
        raise ValueError(f"{labels}: expected a class for each graph, found no file")
    arrays["y"] = np.unique(table("graph_labels", np.int64)[:, 0], return_inverse=True)[1]
    if (x := features("node")) is not None:
        arrays["x"] = x
    if (edge_features := features("edge")) is not None:
        arrays["edge_attr"] = edge_features
    file = Archive(folder, arrays)
    graphs = file.integers("graph_indicator", (None,), 0, max(len(arrays["y"]), 1))
    if (np.diff(graphs) < 0).any():
        raise file.fail("expected nodes in the order of their graphs, found others in graph_indicator")
    edges = file.integers("edge_index", (2, None), 0, len(graphs))
    edge_attr = file.edge_attr(edges.shape[1])
    kept = edges[0] != edges[1]
    edges, place = np.unique(edges[:, kept], axis=1, return_inverse=True)
    if edge_attr is not None:
        total = np.zeros((edges.shape[1], edge_attr.shape[1]), np.float32)
        np.add.at(total, place.reshape(-1), edge_attr[kept])
        edge_attr = total
    if (wrong := np.flatnonzero(graphs[edges[0]] != graphs[edges[1]])).size:
        raise file.fail(f"expected both ends of an edge in one graph, found nodes {(edges[:, wrong[0]] + 1).tolist()}")
    offsets = np.concatenate([[0], np.cumsum(np.bincount(graphs, minlength=len(arrays["y"])))]).astype(np.int32)
    graph = graphs[edges[1]]
    return graph_data(file, name, graph, offsets, edges - offsets[graph], edge_attr)
