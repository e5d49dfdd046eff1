"""Graphs from tables of edges and nodes, against the same graph written by hand."""

import gzip
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.graph.data import NodeData, label_kind, read_data

NODES = "id,size,heavy,label,split\nb,0.5,true,cat,train\na,1.5,false,dog,val\nc,-2,true,cat,\nd,0,false,,\n"
EDGES = "source,target,weight,age\na,b,0.5,3\nc,a,2,4\n"


def folder(path: Path, edges: str = EDGES, nodes: str = NODES) -> Path:
    path.mkdir(exist_ok=True)
    (path / "edges.csv").write_text(edges)
    (path / "nodes.csv").write_text(nodes)
    return path


def read(path: Path) -> NodeData:
    data = read_data(str(path))
    assert isinstance(data, NodeData)
    return data


def test_all_columns(tmp_path: Path):
    data = read(folder(tmp_path / "pets"))
    assert data.name == "pets"
    assert isinstance(data.features, np.ndarray)
    np.testing.assert_array_equal(data.edge_index, [[1, 2], [0, 1]])
    np.testing.assert_array_equal(data.features, np.array([[0.5, 1], [1.5, 0], [-2, 1], [0, 0]], np.float32))
    np.testing.assert_array_equal(data.labels, [0, 1, 0, -1])
    np.testing.assert_array_equal(data.train, [0])
    np.testing.assert_array_equal(data.val, [1])
    np.testing.assert_array_equal(data.test, [])
    np.testing.assert_array_equal(data.weights, np.array([0.5, 2], np.float32))
    np.testing.assert_array_equal(data.edge_attr, np.array([[3], [4]], np.float32))


def test_edges_between_equal_ends_have_both_directions(tmp_path: Path):
    data = read(folder(tmp_path, EDGES.replace("source,target", "node_1,node_2")))
    np.testing.assert_array_equal(data.edge_index, [[1, 2, 0, 1], [0, 1, 1, 2]])
    np.testing.assert_array_equal(data.weights, np.array([0.5, 2, 0.5, 2], np.float32))
    np.testing.assert_array_equal(data.edge_attr, np.array([[3], [4], [3], [4]], np.float32))


def test_csv_gzip_and_parquet_give_the_same(tmp_path: Path):
    plain = read(folder(tmp_path / "plain"))
    packed = tmp_path / "packed"
    packed.mkdir()
    (packed / "edges.csv.gz").write_bytes(gzip.compress(EDGES.encode()))
    (packed / "nodes.csv.gz").write_bytes(gzip.compress(NODES.encode()))
    stored = tmp_path / "stored"
    stored.mkdir()
    nodes = {
        "id": pa.array(["b", "a", "c", "d"]).dictionary_encode(),
        "size": pa.array([0.5, 1.5, -2, 0]),
        "heavy": pa.array([True, False, True, False]),
        "label": pa.array(["cat", "dog", "cat", None]).dictionary_encode(),
        "split": pa.array(["train", "val", None, None]).dictionary_encode(),
    }
    edges = {"source": ["a", "c"], "target": ["b", "a"], "weight": [0.5, 2.0], "age": [3, 4]}
    pyarrow.parquet.write_table(pa.table(nodes), stored / "nodes.parquet")
    pyarrow.parquet.write_table(pa.table(edges), stored / "edges.parquet")
    for path in (packed, stored):
        data = read(path)
        for name in ("edge_index", "features", "labels", "train", "val", "test", "weights", "edge_attr"):
            np.testing.assert_array_equal(getattr(data, name), getattr(plain, name), name)


def test_whole_numbers_are_classes_and_others_are_predicted(tmp_path: Path):
    edges = "src,dst\n7,3\n"
    classes = read(folder(tmp_path / "classes", edges, "id,x,y\n3,1,20\n7,2,10\n9,3,\n11,4,-1\n"))
    np.testing.assert_array_equal(classes.labels, [1, 0, -1, -1])
    np.testing.assert_array_equal(classes.edge_index, [[1], [0]])
    numbers = read(folder(tmp_path / "numbers", edges, "id,x,y\n3,1,0.25\n7,2,\n"))
    assert label_kind(numbers.labels) == "regression"
    np.testing.assert_array_equal(numbers.labels, np.array([[0.25], [np.nan]], np.float32))


@given(st.data())
def test_ids_are_found_in_any_order(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject):
    ids = data.draw(st.lists(st.integers(-(2**62), 2**62), min_size=1, max_size=8, unique=True))
    pairs = data.draw(st.lists(st.tuples(st.sampled_from(ids), st.sampled_from(ids)), min_size=1, max_size=8))
    edges = "".join(f"{a},{b}\n" for a, b in pairs)
    nodes = "".join(f"{each},1,{place}\n" for place, each in enumerate(ids))
    found = read(folder(tmp_path_factory.mktemp("ids"), f"source,target\n{edges}", f"id,x,label\n{nodes}"))
    assert [(ids[a], ids[b]) for a, b in found.edge_index.T] == pairs


@pytest.mark.parametrize(
    "edges, nodes, message",
    [
        ("a,b\n1,2\n", NODES, "edges.csv: expected the columns source and target, or src and dst, or .*found a, b"),
        ("source,target\na,e\n", NODES, "edges.csv: expected the id of a node in target, found 'e'"),
        ("source,target\n1,2\n", NODES, "edges.csv: expected source to have the type of the nodes' id, found int64 and <U1"),
        ("source,target\na,\n", NODES.replace("b,", "1,", 1), "edges.csv: expected .*in target, found"),
        ("source,target,kind\na,b,road\n", NODES, "edges.csv: expected numbers in kind, found string"),
        ("source,target,weight\na,b,\nb,a,1\n", NODES, "edges.csv: expected numbers in weight, found 1 empty cells"),
        (EDGES, NODES.replace("id,", "name,", 1), "nodes.csv: expected a column id, found name, size"),
        (EDGES, NODES.replace("\nc,", "\na,"), "nodes.csv: expected each node once in id, found 'a' twice"),
        (EDGES, NODES.replace("label", "colour"), "nodes.csv: expected one column label or y, found none"),
        (EDGES, NODES.replace("heavy", "y"), "nodes.csv: expected one column label or y, found label, y"),
        (EDGES, NODES.replace("heavy", "size"), "nodes.csv: expected different column names"),
        (
            EDGES,
            NODES.replace("val", "validation"),
            "nodes.csv: expected train, val, test or nothing in split, found 'validation'",
        ),
        (EDGES, "id,label\na,1\nb,2\nc,1\n", "nodes.csv: expected columns of features beside id, label and split, found none"),
        (EDGES, "", "nodes.csv: expected a table with column names"),
    ],
)
def test_wrong_tables_are_refused(tmp_path: Path, edges: str, nodes: str, message: str):
    with pytest.raises(ValueError, match=message):
        read(folder(tmp_path, edges, nodes))


def test_one_table_of_each_kind_is_expected(tmp_path: Path):
    path = folder(tmp_path)
    (path / "nodes.parquet").touch()
    with pytest.raises(
        ValueError, match=re.escape("expected one file nodes.csv or nodes.csv.gz or nodes.parquet, found nodes.csv, ")
    ):
        read(path)
    (path / "nodes.parquet").unlink()
    (path / "nodes.csv").unlink()
    with pytest.raises(ValueError, match=r"nodes.parquet, found none"):
        read(path)
