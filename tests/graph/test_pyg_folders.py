"""Folders of PyG's data sets, read without torch: what they hold, what is refused, and that nothing in them runs."""

import os
import pickle
import zipfile
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import csr_matrix

from tilewright.graph.data import GraphData, NodeData, SparseRows, is_labelled, read_data

NEIGHBOURS = defaultdict(list, {0: [1, 5, 5, 0], 1: [0, 2], 2: [1], 3: [], 4: [6], 5: [0], 6: [4]})
"""With an edge twice, a self-loop, and node 3 in no file of features, as in CiteSeer."""
CLASSES = np.eye(3, dtype=np.int32)
FEATURES = np.array([[1, 0, 2], [0, 0, 1], [0, 4, 0]], np.float32)
LAST = np.array([[0, 5, 0], [6, 0, 0], [0, 0, 7]], np.float32)
TESTS = [5, 4, 6]
TINY: dict[str, Any] = {
    "x": csr_matrix(FEATURES[:1]),
    "y": CLASSES[:1],
    "allx": csr_matrix(FEATURES),
    "ally": CLASSES[[0, 1, 2]],
    "tx": csr_matrix(LAST),
    "ty": CLASSES[[2, 1, 0]],
    "graph": NEIGHBOURS,
}


def planetoid(folder: Path, protocol: int = 2, **changes: Any) -> Path:
    """Writes Planetoid's files; bytes are written as they are."""
    raw = folder / "Tiny" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for part, value in (TINY | changes).items():
        (raw / f"ind.tiny.{part}").write_bytes(value if isinstance(value, bytes) else pickle.dumps(value, protocol))
    (raw / "ind.tiny.test.index").write_text("".join(f"{test}\n" for test in TESTS))
    return folder / "Tiny"


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("root", [False, True])
def test_planetoid(tmp_path: Path, protocol: int, root: bool):
    """The folder itself, or PyG's `root` with it alone."""
    folder = planetoid(tmp_path, protocol)
    data = read_data(str(tmp_path if root else folder))
    assert isinstance(data, NodeData)
    assert isinstance(data.features, SparseRows)
    assert data.name == "tiny"
    assert data.edge_index.tolist() == [[1, 5, 0, 2, 1, 6, 0, 4], [0, 0, 1, 1, 2, 4, 5, 6]]
    wanted = np.concatenate([FEATURES, np.zeros((1, 3)), LAST[[1, 0, 2]]])
    np.testing.assert_array_equal(data.rows(np.arange(7)), wanted)
    assert data.labels.tolist() == [0, 1, 2, -1, 1, 2, 0]
    assert is_labelled(data.labels).sum() == 6
    assert [part.tolist() for part in (data.train, data.val, data.test)] == [[0], [1, 2], TESTS]


def test_pickles_of_python_2(tmp_path: Path):
    """Bytes are texts in Latin-1, and modules have their old names."""
    array = (
        (
            b"\x80\x02cnumpy.core.multiarray\n_reconstruct\nq\x01cnumpy\nndarray\nq\x02K\x00\x85U\x01b\x87Rq\x03(K\x01K\x03K\x03\x86"
            b"cnumpy\ndtype\nq\x04U\x02i4K\x00K\x01\x87Rq\x05(K\x03U\x01<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89U\x24"
        )
        + CLASSES.tobytes()
        + b"tb."
    )
    graph = (
        b"\x80\x02ccollections\ndefaultdict\nq\x01c__builtin__\nlist\nq\x02\x85Rq\x03("
        + b"".join(
            b"K" + bytes([node]) + b"]" + (b"(" + b"".join(b"K" + bytes([n]) for n in near) + b"e")
            for node, near in NEIGHBOURS.items()
        )
        + b"u."
    )
    data = read_data(str(planetoid(tmp_path, ally=array, graph=graph)))
    assert isinstance(data, NodeData)
    assert data.labels[:3].tolist() == [0, 1, 2]
    assert data.edge_index.shape == (2, 8)


class Call:
    """Pickled as a call of a function."""

    def __init__(self, function: Any, *arguments: Any):
        self.made = function, arguments

    def __reduce__(self) -> Any:
        return self.made


CALLS = [
    (Call(os.system, "touch ran"), "a call of posix system"),
    (Call(eval, "open('ran', 'w')"), "a call of (__builtin__|builtins) eval"),
    (defaultdict(list, {0: Call(os.mkdir, "ran")}), "a call of posix mkdir"),
    (Path("x"), "a call of pathlib"),
]


@pytest.mark.parametrize(("value", "message"), CALLS)
@pytest.mark.parametrize("protocol", [2, 4])
def test_nothing_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: Any, message: str, protocol: int):
    monkeypatch.chdir(tmp_path)
    folder = planetoid(tmp_path, protocol, tx=value)
    with pytest.raises(ValueError, match=f"ind.tiny.tx: expected a pickle of arrays, found {message}"):
        read_data(str(folder))
    with zipfile.ZipFile(processed_path(tmp_path / "other"), "w") as archive:
        archive.writestr("data/data.pkl", pickle.dumps(({"x": value}, None), protocol))
    with pytest.raises(ValueError, match=f"data.pt: expected arrays of a data set of PyG's, found {message}"):
        read_data(str(tmp_path / "other"))
    assert sorted(os.listdir(tmp_path)) == ["Tiny", "other"]


@given(st.binary(max_size=200), st.integers(0, 400))
def test_damaged_pickles_are_errors(tmp_path_factory: pytest.TempPathFactory, noise: bytes, place: int):
    text = pickle.dumps(TINY["allx"], 2)
    folder = planetoid(tmp_path_factory.mktemp("damaged"), allx=text[:place] + noise + text[place + len(noise) :])
    with suppress(ValueError):  # what is still a matrix is read
        read_data(str(folder))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"ty": CLASSES[:2]}, "ind.tiny.ty: expected 3 rows, found 2"),
        ({"ally": CLASSES[:2]}, "ind.tiny.ally: expected 3 rows, found 2"),
        ({"tx": csr_matrix(LAST[:, :2])}, "expected the same columns in ind.tiny.allx and tx"),
        ({"graph": {0: [1]}}, "test.index: expected different nodes from 3 to 0"),
        ({"graph": [1]}, "test.index: expected different nodes from 3 to -1"),
        ({"graph": {node: [9] for node in range(7)}}, r"edge_index\[\d, \d\] is 9, expected 0 to 6"),
        ({"graph": dict.fromkeys(range(7), 9)}, "ind.tiny.graph: expected lists of neighbours"),
        ({"ally": np.array(["a"] * 3)}, "expected arrays in ind.tiny.*, found an array of the kind <U1"),
        ({"ally": np.array([None] * 3)}, r"an array of the kind \|O8"),
        ({"tx": 1}, "expected arrays in ind.tiny.*, found int in place of an array"),
        ({"tx": csr_matrix(LAST * np.nan)}, r"x_data\[0\] is nan, expected a finite number"),
    ],
)
def test_what_is_wrong_with_planetoid(tmp_path: Path, changes: dict[str, Any], problem: str):
    with pytest.raises(ValueError, match=problem):
        read_data(str(planetoid(tmp_path, **changes)))


def test_several_data_sets_in_a_folder(tmp_path: Path):
    planetoid(tmp_path)
    planetoid(tmp_path / "more").rename(tmp_path / "Other")
    with pytest.raises(ValueError, match="expected the folder of one data set, found Other, Tiny"):
        read_data(str(tmp_path))
    (tmp_path / "Tiny" / "raw" / "ind.tiny.ty").unlink()
    with pytest.raises(ValueError, match=r"ind.tiny.ty: expected a pickle of arrays, found .*No such file"):
        read_data(str(tmp_path / "Tiny"))


TU = {
    "A": "1, 2\n2, 1\n2, 3\n3, 2\n2, 3\n2, 2\n4, 5\n5, 4\n",
    "graph_indicator": "1\n1\n1\n2\n2\n",
    "graph_labels": "1\n-1\n",
    "node_labels": "3\n5\n3\n3\n4\n",
    "node_attributes": "0.5, 1\n0, 1\n0, 2\n0, 3\n0, 4\n",
    "edge_labels": "0\n0\n1\n1\n1\n0\n0\n1\n",
}


def tu(folder: Path, **changes: str | None) -> Path:
    raw = folder / "TINY" / "raw"
    raw.mkdir(parents=True)
    for stem, text in (TU | changes).items():
        if text is not None:
            (raw / f"TINY_{stem}.txt").write_text(text)
    return folder / "TINY"


def test_tu(tmp_path: Path):
    """Labels follow attributes, from the smallest to the largest; the edge that is there twice has both features."""
    data = read_data(str(tu(tmp_path)))
    assert isinstance(data, GraphData)
    assert (data.name, data.folds) == ("TINY", ())
    assert data.node_offsets.tolist() == [0, 3, 5]
    assert data.edge_offsets.tolist() == [0, 4, 6]
    assert data.edge_index.tolist() == [[1, 0, 2, 1, 1, 0], [0, 1, 1, 2, 0, 1]]
    assert data.edge_attr is not None
    assert data.edge_attr.tolist() == [[1, 0], [1, 0], [0, 1], [0, 2], [0, 1], [1, 0]]
    assert data.labels.tolist() == [1, 0]
    assert data.features.tolist() == [[0.5, 1, 1, 0, 0], [0, 1, 0, 0, 1], [0, 2, 1, 0, 0], [0, 3, 1, 0, 0], [0, 4, 0, 1, 0]]
    bare = read_data(str(tu(tmp_path / "bare", node_labels=None, node_attributes=None, edge_labels=None)))
    assert isinstance(bare, GraphData)
    assert bare.features.tolist() == [[1, 0], [0, 1], [1, 0], [1, 0], [1, 0]], "degrees"
    assert bare.edge_attr is None


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"graph_labels": None}, "TINY_graph_labels.txt: expected a class for each graph, found no file"),
        ({"graph_labels": "1\n"}, r"graph_indicator\[3\] is 1, expected 0 to 0"),
        ({"graph_indicator": "1\n2\n1\n2\n2\n"}, "expected nodes in the order of their graphs"),
        ({"A": "1, 6\n" * 8}, r"edge_index\[1, 0\] is 5, expected 0 to 4"),
        ({"A": "1, 4\n" * 8}, r"expected both ends of an edge in one graph, found nodes \[1, 4\]"),
        ({"A": "1, b\n"}, "TINY_A.txt: expected numbers with commas between them"),
        ({"edge_labels": "1\n"}, r"edge_attr must have the shape \[8\]"),
        ({"node_labels": "1\n"}, "expected as many node attributes as labels, found 5 and 1"),
        ({"node_labels": "1\n", "node_attributes": None}, r"x must have the shape \[5, features\], found \[1, 1\]"),
    ],
)
def test_what_is_wrong_with_tu(tmp_path: Path, changes: dict[str, str | None], problem: str):
    with pytest.raises(ValueError, match=problem):
        read_data(str(tu(tmp_path, **changes)))


def processed_path(folder: Path) -> Path:
    (folder / "processed").mkdir(parents=True, exist_ok=True)
    (folder / "processed" / "pre_transform.pt").write_bytes(b"")
    return folder / "processed" / "data.pt"


class Name:
    """Pickled as the name of something that is not here, such as a class of torch."""

    def __init__(self, name: str):
        self.name = name


class Tensor:
    """Pickled as torch pickles a tensor."""

    def __init__(self, values: Any, **changes: Any):
        self.values = np.asarray(values)
        self.changes = changes

    def __reduce__(self) -> Any:
        raise NotImplementedError


KINDS = {"float32": "Float", "int64": "Long", "bool": "Bool", "uint8": "Byte", "float64": "Double"}


def torch_archive(path: Path, value: Any) -> Path:
    """Writes a file as `torch.save` does, with `Tensor` in place of tensors and `Name` of classes."""
    members: dict[str, bytes] = {}

    def text(value: Any) -> bytes:
        if isinstance(value, Name):
            module, _, name = value.name.rpartition(" ")
            return f"c{module}\n{name}\n".encode()
        if isinstance(value, Tensor):
            base = value.values if value.values.base is None else value.values.base
            key = str(len(members))
            members[key] = np.ascontiguousarray(base).tobytes()
            storage = ("storage", Name(f"torch {KINDS[base.dtype.name]}Storage"), key, "cpu", base.size)
            strides = tuple(n // base.itemsize for n in value.values.strides)
            call = {"offset": 0, "shape": value.values.shape, "strides": strides, **value.changes}
            parts = [text(storage) + b"Q", text(call["offset"]), text(call["shape"]), text(call["strides"]), b"\x89"]
            return b"ctorch._utils\n_rebuild_tensor_v2\n(" + b"".join(parts) + b"ccollections\nOrderedDict\n)RtR"
        if isinstance(value, dict):
            return b"}(" + b"".join(text(key) + text(each) for key, each in value.items()) + b"u"
        if isinstance(value, tuple | list):
            body = b"".join(map(text, value))
            return b"(" + body + b"t" if isinstance(value, tuple) else b"](" + body + b"e"
        return pickle.dumps(value, 2)[2:-1]

    description = b"\x80\x02" + text(value) + b"."
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data/data.pkl", description)
        archive.writestr("data/byteorder", "little")
        for key, content in members.items():
            archive.writestr(f"data/data/{key}", content)
    return path


DATA = Name("torch_geometric.data.data Data")
EDGES = np.array([[0, 1, 1, 2], [1, 0, 2, 1]])
ONE: dict[str, Any] = {
    "x": Tensor(np.arange(6, dtype=np.float32).reshape(2, 3).T),  # by columns
    "edge_index": Tensor(EDGES),
    "y": Tensor([0, 1, 0]),
    "train_mask": Tensor([True, False, False]),
    "edge_attr": None,
    "n_id": "left out",
}


def test_a_processed_graph(tmp_path: Path):
    """A processed file has precedence over raw files."""
    folder = planetoid(tmp_path)
    torch_archive(processed_path(folder), (ONE, None, DATA))
    data = read_data(str(folder))
    assert isinstance(data, NodeData)
    assert data.name == "Tiny"
    np.testing.assert_array_equal(data.features, [[0, 3], [1, 4], [2, 5]])
    assert data.edge_index.tolist() == EDGES.tolist()
    assert data.labels.tolist() == [0, 1, 0]
    assert [part.tolist() for part in (data.train, data.val)] == [[0], []]


def collated(**changes: Any) -> tuple[Any, ...]:
    """Two graphs, a path of three nodes and a pair."""
    edges = np.array([[1, 2, 0, 1, 0, 1], [2, 1, 1, 0, 1, 0]])
    data = {"x": Tensor(np.eye(5, 2, dtype=np.float32)), "edge_index": Tensor(edges), "y": Tensor([[1], [0]])}
    slices = {"x": Tensor([0, 3, 5]), "edge_index": Tensor([0, 4, 6]), "y": Tensor([0, 1, 2])}
    data |= {name: value for name, value in changes.items() if not name.endswith("slices")}
    slices |= changes.get("slices", {})
    return ({name: value for name, value in data.items() if value is not None}, slices, {"num_node_labels": 2}, DATA)


def test_many_processed_graphs(tmp_path: Path):
    torch_archive(processed_path(tmp_path), collated())
    data = read_data(str(tmp_path))
    assert isinstance(data, GraphData)
    assert data.node_offsets.tolist() == [0, 3, 5]
    assert data.edge_offsets.tolist() == [0, 4, 6]
    assert data.edge_index.tolist() == [[1, 0, 2, 1, 1, 0], [0, 1, 1, 2, 0, 1]]
    assert data.labels.tolist() == [1, 0]
    np.testing.assert_array_equal(data.features, np.eye(5, 2))
    torch_archive(processed_path(tmp_path), collated(x=None, num_nodes=Tensor([3, 2])))
    bare = read_data(str(tmp_path))
    assert isinstance(bare, GraphData)
    assert bare.features.tolist() == [[1, 0], [0, 1], [1, 0], [1, 0], [1, 0]]


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (lambda: (ONE | {"y": None}, None, DATA), "expected the arrays y, found only edge_index, train_mask, x"),
        (lambda: (ONE | {"x": None}, None, DATA), "expected features as x, found only"),
        (lambda: (ONE | {"y": "text"}, None, DATA), "expected an array in y, found another value"),
        (lambda: ({"paper": ONE}, None, DATA), "expected one kind of nodes, found paper"),
        (lambda: (ONE | {"x": Tensor(np.eye(3), shape=(4, 3))}, None, DATA), "found numbers that are out of range"),
        (lambda: (ONE | {"x": Tensor(np.eye(3), offset=-1)}, None, DATA), "found numbers that are out of range"),
        (lambda: (ONE | {"x": Tensor(np.eye(3), strides=(3, -1))}, None, DATA), "found numbers that are out of range"),
        (lambda: (ONE | {"x": Tensor(np.eye(3), shape=(1 << 40, 3), strides=(0, 0))}, None, DATA), "out of range"),
        (lambda: ONE, "found no pair of data and slices"),
        (lambda: (ONE, 3), "found no pair of data and slices"),
        (lambda: collated(y=Tensor([0.5, 1])), "expected a class for each graph in y, found numbers"),
        (lambda: collated(slices={"x": Tensor([0, 3, 4])}), "expected slices of x that rise from 0 to 5"),
        (lambda: collated(slices={"x": Tensor([0, 5])}), "expected nodes of 2 graphs, found 1"),
        (lambda: collated(slices={"x": Tensor([0, 2, 5])}), r"edge_index\[:, 0\] is \[1, 2\], beyond the nodes of its graph"),
        (lambda: collated(x=None), "expected x or num_nodes of many graphs, found none"),
    ],
)
def test_what_is_wrong_with_a_processed_file(tmp_path: Path, value: Callable[[], Any], problem: str):
    torch_archive(processed_path(tmp_path), value())
    with pytest.raises(ValueError, match=problem):
        read_data(str(tmp_path))


def test_several_processed_files(tmp_path: Path):
    for name in ("train", "val"):
        torch_archive(processed_path(tmp_path).with_stem(name), (ONE, None, DATA))
    with pytest.raises(ValueError, match=r"processed: expected one file, found train.pt, val.pt"):
        read_data(str(tmp_path))
    (tmp_path / "processed" / "val.pt").unlink()
    assert isinstance(read_data(str(tmp_path)), NodeData)
