"""Graphs from two tables, edges and nodes, as CSV or Parquet files in one folder.

Types, quotes and missing values are those of pyarrow. Legend: N nodes, E edges, F features, D features of an edge.
"""

from pathlib import Path
from typing import Any

import numpy as np

from tilewright.graph.data import NONE, PARTS, Archive, NodeData

SUFFIXES = (".csv", ".csv.gz", ".parquet")
ENDS = {
    ("source", "target"): False,
    ("src", "dst"): False,
    ("node_1", "node_2"): True,
    ("id_1", "id_2"): True,
}
"""Columns with the two ends of an edge, and whether each edge has both directions."""
ID = "id"
LABELS = ("label", "y")
SPLIT = "split"
WEIGHT = "weight"


def has_edge_list(folder: Path) -> bool:
    """Returns True for a folder with a table of edges."""
    return any((folder / f"edges{suffix}").is_file() for suffix in SUFFIXES)


def read_edge_list(folder: Path) -> NodeData:
    """Reads one graph from the tables `edges` and `nodes` of a folder.

    Each table is a `.csv`, `.csv.gz` or `.parquet` file with column names.

    `edges` has the ends of an edge as `source` and `target` (or `src` and `dst`), or as `node_1` and `node_2` (or `id_1` and
    `id_2`), which adds the other direction of each edge. `weight` has edge weights. All other columns are features of edges.

    `nodes` has an `id`, a whole number or a text, and a `label` or `y`. Labels that are texts or whole numbers are classes in
    sorted order, other numbers are to be predicted; an empty cell (or -1) is no label. `split` has train, val, test, or
    nothing. All other columns are features of nodes.

    Raises:
        ValueError: a table or column is missing or wrong, or an edge ends at no node; the message names file and column.
        ModuleNotFoundError: pyarrow is missing, which the extra `parquet` brings.
    """
    edges = _Table(folder, "edges")
    nodes = _Table(folder, "nodes")
    ids = nodes.column(ID)
    unique, first = np.unique(ids, return_index=True)
    if len(unique) < len(ids):
        twice = ids[np.setdiff1d(np.arange(len(ids)), first)[0]]
        raise nodes.fail(f"expected each node once in {ID}, found {twice.item()!r} twice")
    ends = next((pair for pair in ENDS if set(pair) <= set(edges.names)), None)
    if ends is None:
        pairs = ", or ".join(" and ".join(pair) for pair in ENDS)
        raise edges.fail(f"expected the columns {pairs}, found {', '.join(edges.names)}")
    edge_index = np.stack([_places(edges, name, unique, first) for name in ends])
    arrays = {"edge_index": edge_index, "y": _labels(nodes), "x": nodes.matrix([ID, *LABELS, SPLIT])}
    if not arrays["x"].shape[1]:
        raise nodes.fail(f"expected columns of features beside {ID}, label and {SPLIT}, found none")
    if WEIGHT in edges.names:
        arrays["edge_weight"] = edges.matrix([name for name in edges.names if name != WEIGHT])
    attributes = edges.matrix([*ends, WEIGHT])
    if attributes.shape[1]:
        arrays["edge_attr"] = attributes
    if ENDS[ends]:
        arrays["edge_index"] = np.concatenate([edge_index, edge_index[::-1]], axis=1)
        for name in {"edge_weight", "edge_attr"} & arrays.keys():
            arrays[name] = np.concatenate([arrays[name]] * 2)
    if SPLIT in nodes.names:
        arrays |= _split(nodes)
    return Archive(folder, arrays).node_data(folder.resolve().name)


class _Table:
    """A table with column names, from the only file of its name in a folder."""

    def __init__(self, folder: Path, stem: str):
        files = [path for suffix in SUFFIXES if (path := folder / f"{stem}{suffix}").is_file()]
        if len(files) != 1:
            names = " or ".join(f"{stem}{suffix}" for suffix in SUFFIXES)
            raise ValueError(f"{folder}: expected one file {names}, found {', '.join(f.name for f in files) or 'none'}")
        self.path = files[0]
        import pyarrow
        import pyarrow.csv
        import pyarrow.parquet

        try:
            read = pyarrow.parquet.read_table if self.path.suffix == ".parquet" else pyarrow.csv.read_csv
            self.table: Any = read(self.path)
        except (OSError, pyarrow.ArrowException) as error:
            raise self.fail(f"expected a table with column names: {error}") from error
        self.names: list[str] = self.table.column_names
        if len(set(self.names)) < len(self.names):
            raise self.fail(f"expected different column names, found {', '.join(self.names)}")

    def fail(self, problem: str) -> ValueError:
        return ValueError(f"{self.path}: {problem}")

    def column(self, name: str) -> np.ndarray:
        """Returns a column of whole numbers or texts without empty cells."""
        if name not in self.names:
            raise self.fail(f"expected a column {name}, found {', '.join(self.names)}")
        column = self.table[name]
        kind = _kind(column)
        if column.null_count or kind not in ("text", "integer"):
            found = f"{column.null_count} empty cells" if column.null_count else str(column.type)
            raise self.fail(f"expected whole numbers or texts in {name}, found {found}")
        return column.to_numpy().astype(str if kind == "text" else np.int64)

    def matrix(self, without: list[str]) -> np.ndarray:
        """Returns the other columns as `[rows, columns]` float32."""
        found = []
        for name in self.names:
            if name in without:
                continue
            column = self.table[name]
            if column.null_count or _kind(column) not in ("integer", "float"):
                problem = f"{column.null_count} empty cells" if column.null_count else str(column.type)
                raise self.fail(f"expected numbers in {name}, found {problem}")
            found.append(column.to_numpy().astype(np.float32))
        return np.stack(found, axis=1) if found else np.zeros((len(self.table), 0), np.float32)


def _kind(column: Any) -> str:
    """Returns the kind of a column: `text`, `integer`, `float`, or an empty text for others."""
    import pyarrow.types as types

    each = column.type.value_type if types.is_dictionary(column.type) else column.type
    if types.is_string(each) or types.is_large_string(each):
        return "text"
    if types.is_integer(each) or types.is_boolean(each):
        return "integer"
    return "float" if types.is_floating(each) else ""


def _places(edges: _Table, name: str, unique: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Returns the row of the node at one end of each edge."""
    values = edges.column(name)
    if values.dtype.kind != unique.dtype.kind:
        raise edges.fail(f"expected {name} to have the type of the nodes' {ID}, found {values.dtype} and {unique.dtype}")
    places = np.minimum(np.searchsorted(unique, values), max(len(unique) - 1, 0))
    unknown = np.flatnonzero(unique[places] != values) if len(unique) else np.arange(len(values))
    if len(unknown):
        raise edges.fail(f"expected the {ID} of a node in {name}, found {values[unknown[0]].item()!r}")
    return first[places].astype(np.int32)


def _labels(nodes: _Table) -> np.ndarray:
    """Returns classes `[N]`, -1 for none, or numbers `[N]`, NaN for none."""
    names = [name for name in LABELS if name in nodes.names]
    if len(names) != 1:
        raise nodes.fail(f"expected one column {' or '.join(LABELS)}, found {', '.join(names) or 'none'}")
    column = nodes.table[names[0]]
    kind = _kind(column)
    if kind == "float":
        return np.asarray(column.to_numpy(), np.float32)
    if not kind:
        raise nodes.fail(f"expected texts or numbers in {names[0]}, found {column.type}")
    values = column.to_pylist()
    classes = sorted({value for value in values if value not in (None, "", NONE)})
    place = {value: at for at, value in enumerate(classes)}
    return np.array([place.get(value, NONE) for value in values], np.int32)


def _split(nodes: _Table) -> dict[str, np.ndarray]:
    """Returns the ids of the nodes in each part of the split."""
    words = [word or "" for word in nodes.table[SPLIT].to_pylist()]
    wrong = next((word for word in words if word and word not in PARTS), None)
    if wrong is not None:
        raise nodes.fail(f"expected {', '.join(PARTS)} or nothing in {SPLIT}, found {wrong!r}")
    return {part: np.flatnonzero([word == part for word in words]).astype(np.int32) for part in PARTS}
