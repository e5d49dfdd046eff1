"""Readers of graph data: what they read, and what they say about files that are not right."""

import gzip
import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.graph.data import (
    GraphData,
    NodeData,
    SparseRows,
    is_labelled,
    karate_club,
    label_kind,
    read_data,
    read_gin_folder,
    read_npz,
    with_folds,
    with_split,
)

ARRAYS: dict[str, Any] = {
    "edge_index": np.array([[0, 1, 2, 3], [1, 0, 3, 2]]),
    "x_indptr": np.array([0, 2, 2, 3, 4]),
    "x_indices": np.array([0, 2, 1, 2]),
    "x_data": np.array([1.0, 3.0, 2.0, 5.0]),
    "x_shape": np.array([4, 3]),
    "y": np.array([0, 1, -1, 1]),
    "train": np.array([0, 1]),
    "test": np.array([3]),
}
NO_CSR = dict.fromkeys(["x_data", "x_indptr", "x_indices", "x_shape"])
DENSE = np.array([[1, 0, 3], [0, 0, 0], [0, 2, 0], [0, 0, 5]], np.float32)


def write(folder: Path, **changes: Any) -> Path:
    arrays = {name: value for name, value in (ARRAYS | changes).items() if value is not None}
    np.savez(folder / "tiny.npz", **arrays)
    return folder / "tiny.npz"


def test_the_karate_club():
    data = karate_club()
    degrees = np.bincount(data.edge_index[1], minlength=34)
    assert data.edge_index.shape == (2, 2 * 78)
    # Zachary 1977, figure 1: the degrees of all members.
    wanted = [16, 9, 10, 6, 3, 4, 4, 4, 5, 2, 3, 1, 2, 5, 2, 2, 2, 2, 2, 3, 2, 2, 2, 5, 3, 3, 2, 4, 3, 4, 4, 6, 12, 17]
    assert degrees.tolist() == wanted
    assert {tuple(edge) for edge in data.edge_index.T} == {tuple(edge) for edge in data.edge_index[::-1].T}
    assert np.bincount(data.labels).tolist() == [17, 17]
    assert data.labels[data.train].tolist() == [0, 1]
    assert sorted([*data.train, *data.test]) == list(range(34))
    assert read_data("karate").name == "karate"


def test_several_labels_and_numbers(tmp_path: Path):
    """Booleans are labels, floating-point numbers are targets; a node without some of them has none."""
    several = read_npz(write(tmp_path, y=np.array([[1, 0], [1, 1], [-1, 0], [0, 0]])))
    assert (several.num_classes, label_kind(several.labels)) == (2, "multilabel")
    assert read_npz(write(tmp_path, y=np.eye(4, 3) > 0)).labels.dtype == np.int32
    numbers = read_npz(write(tmp_path, y=np.array([0.5, 1.5, np.nan, -2])))
    assert (numbers.labels.shape, label_kind(numbers.labels)) == ((4, 1), "regression")
    for data in (several, numbers):
        assert is_labelled(data.labels).tolist() == [True, True, False, True]
        parts = with_split(replace(data, train=data.train[:0]))
        assert [len(parts.train), len(parts.val), len(parts.test)] == [1, 1, 1]
    with pytest.raises(ValueError, match="expected labels of all nodes in test, found none of node 2"):
        read_npz(write(tmp_path, y=np.array([0.5, 1.5, np.nan, -2]), test=np.array([2])))


def test_files_of_a_folder_stay_on_disk(tmp_path: Path):
    """A row of features is read when it is used; bad numbers are found all the same."""
    arrays = {"edge_index": ARRAYS["edge_index"].astype(np.int32), "x": DENSE, "y": ARRAYS["y"], "train_mask": np.eye(4)[0] > 0}
    for name, values in arrays.items():
        np.save(tmp_path / f"{name}.npy", values)
    data = read_data(str(tmp_path))
    assert isinstance(data, NodeData)
    assert isinstance(data.features, np.memmap)
    assert isinstance(data.edge_index, np.memmap)
    np.testing.assert_array_equal(data.rows(np.array([2, 0])), DENSE[[2, 0]])
    assert data.train.tolist() == [0]
    np.save(tmp_path / "x.npy", np.where(DENSE == 5, np.nan, DENSE))
    with pytest.raises(ValueError, match=r"x\[3, 2\] is nan, expected a finite number in float32"):
        read_data(str(tmp_path))
    (tmp_path / "y.npy").write_bytes(b"labels")
    with pytest.raises(ValueError, match=r"y.npy: expected an array of numbers, found none"):
        read_data(str(tmp_path))


def test_an_archive_with_sparse_features(tmp_path: Path):
    data = read_npz(write(tmp_path))
    assert isinstance(data.features, SparseRows)
    np.testing.assert_array_equal(data.rows(np.array([3, 0, 0, 1])), DENSE[[3, 0, 0, 1]])
    np.testing.assert_array_equal(data.edge_index, ARRAYS["edge_index"])
    assert (data.num_nodes, data.num_features, data.num_classes) == (4, 3, 2)
    assert [part.tolist() for part in (data.train, data.val, data.test)] == [[0, 1], [], [3]]
    sums = DENSE.sum(1, keepdims=True)
    np.testing.assert_allclose(data.row_normalised().rows(np.arange(4)), DENSE / np.where(sums == 0, 1, sums))


def test_the_names_of_pyg(tmp_path: Path):
    """Masks, weights, the number of nodes, labels in a column as OGB has them, boolean features."""
    masks: dict[str, Any] = {
        f"{part}_mask": np.isin(np.arange(4), ids) for part, ids in {"train": [0, 1], "val": [], "test": [3]}.items()
    }
    masks["test_mask"] = masks["test_mask"].astype(np.int64)[:, None]
    absent = NO_CSR | {"train": None, "test": None}
    weights = np.array([[1.0], [0.5], [2.0], [0.0]])
    changes = {"x": DENSE > 0, "y": ARRAYS["y"][:, None], "num_nodes": np.array(4), "edge_weight": weights}
    changes["edge_attr"] = np.arange(4)
    data = read_npz(write(tmp_path, **(absent | masks | changes)))
    assert [part.tolist() for part in (data.train, data.val, data.test)] == [[0, 1], [], [3]]
    np.testing.assert_array_equal(data.weights, weights[:, 0])
    np.testing.assert_array_equal(data.edge_attr, np.arange(4)[:, None])
    np.testing.assert_array_equal(data.rows(np.arange(4)), DENSE > 0)
    assert data.labels.tolist() == [0, 1, -1, 1]
    plain = read_npz(write(tmp_path, train=None, test=None))
    assert plain.weights is None
    assert not len(plain.train)


def test_an_archive_with_dense_features(tmp_path: Path):
    data = read_npz(write(tmp_path, x=DENSE.astype(np.float64), **NO_CSR))
    np.testing.assert_array_equal(data.rows(np.arange(4)), DENSE)
    np.testing.assert_allclose(data.row_normalised().rows(np.array([0])), DENSE[:1] / 4)


@pytest.mark.parametrize("dense", [True, False])
def test_the_first_node_with_a_negative_feature_is_named(tmp_path: Path, dense: bool):
    """In CSR behind a row without entries."""
    signs = {"x": DENSE * [[1], [1], [-1], [-1]], **NO_CSR} if dense else {"x_data": np.array([1.0, 3.0, -2.0, -5.0])}
    data = read_npz(write(tmp_path, **signs))
    assert (data.negative_node, read_npz(write(tmp_path)).negative_node) == (2, None)
    with pytest.raises(ValueError, match=r"tiny: expected features of at least 0 .* a negative one of node 2"):
        data.row_normalised()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"y": None}, r"tiny.npz: expected the arrays y, found only edge_index"),
        ({"x_data": None}, "expected features as x, or as x_indptr"),
        ({"x_shape": None}, "expected the arrays x_shape, found only"),
        ({"edge_index": np.array([[0, 1], [1, 4]])}, r"edge_index\[1, 1\] is 4, expected 0 to 3"),
        ({"edge_index": np.array([[0, -1], [1, 2]])}, r"edge_index\[0, 1\] is -1, expected 0 to 3"),
        ({"edge_index": np.array([[0.0], [1.0]])}, "edge_index must hold integers, found float64"),
        ({"edge_index": np.array([0, 1])}, r"edge_index must have the shape \[2, any\], found \[2\]"),
        ({"x_data": np.array([1, 2, np.nan, 4])}, r"x_data\[2\] is nan, expected a finite number"),
        ({"x_indices": np.array([0, 2, 1, 3])}, r"x_indices\[3\] is 3, expected 0 to 2"),
        ({"x_indptr": np.array([0, 3, 2, 3, 4])}, "x_indptr must rise from 0 to the 4 entries"),
        ({"x_shape": np.array([5, 3])}, r"x_shape\[0\] is 5, but there are 4 nodes"),
        ({"x": np.zeros((4, 2))}, r"expected features as x or in CSR, found x and x_indptr, x_indices, x_data, x_shape"),
        ({"x": np.zeros((3, 2)), **NO_CSR}, r"x must have the shape \[4, features\], found \[3, 2\]"),
        ({"x": np.array(["a"] * 4), **NO_CSR}, "x must hold numbers, found <U1"),
        ({"train": np.array([0, 2])}, "expected labels of all nodes in train, found none of node 2"),
        ({"test": np.array([4])}, r"test\[0\] is 4, expected 0 to 3"),
        ({"test": np.array([3, 1])}, "found node 1 in train and test"),
        ({"val": np.array([3])}, "found node 3 in val and test"),
        ({"y": np.array([-1] * 4)}, "expected labelled nodes in y, found none"),
        ({"y": np.array([0, 1, -2, 1])}, r"y\[2\] is -2"),
        ({"y": np.array([0, 1, 2**31 - 1, 1])}, r"y\[2\] is 2147483647, expected -1 to 999"),
        ({"y": np.zeros((4, 3, 1), int)}, r"y must have the shape \[nodes\] or \[nodes, labels\], found \[4, 3, 1\]"),
        ({"y": np.array([[0, 2], [1, 1], [0, 0], [1, 0]])}, r"y\[0, 1\] is 2, expected -1 to 1"),
        ({"y": np.array([0.5, np.inf, 1, 2])}, r"y\[1, 0\] is inf, expected a finite number, or NaN for none"),
        ({"x_shape": np.array([4, 2**31 - 1])}, r"x_shape\[1\] is 2147483647, expected at most 16777216 features"),
        ({"x_data": np.array([1, 2, 1e300, 4])}, r"x_data\[2\] is 1e\+300, expected a finite number in float32"),
        ({"x_data": np.ones((4, 1))}, r"x_data must have the shape \[any\], found \[4, 1\]"),
        ({"edge_type": np.ones(4), "pos": np.ones(4)}, "expected arrays among edge_index, .*, found edge_type, pos"),
        ({"edge_attr": np.ones((3, 2))}, r"edge_attr must have the shape \[4\] or \[4, features\], found \[3, 2\]"),
        ({"train_mask": np.ones(4, bool)}, "expected train or train_mask, found both"),
        ({"train": None}, "found none among the parts test"),
        ({"train": None, "train_mask": np.zeros(4, bool)}, "found none among the parts train, test"),
        ({"val_mask": np.ones((4, 10), bool)}, r"val_mask must have the shape \[4\], the mask of one split, found \[4, 10\]"),
        ({"val_mask": np.arange(4)}, "val_mask must hold booleans, or 0 and 1, found int64"),
        ({"val_mask": np.arange(4) == 1}, "found node 1 in train and val"),
        ({"num_nodes": np.array(5)}, "num_nodes is 5, but y has labels of 4 nodes"),
        ({"edge_weight": np.ones(3)}, r"edge_weight must have the shape \[4\], a number for each edge, found \[3\]"),
        ({"edge_weight": np.array([1, np.inf, 1, 1])}, r"edge_weight\[1\] is inf, expected a finite number in float32"),
    ],
)
def test_what_is_wrong_with_an_archive(tmp_path: Path, changes: dict[str, Any], problem: str):
    with pytest.raises(ValueError, match=problem):
        read_npz(write(tmp_path, **changes))


class Trap:
    """Would leave a file behind if anything unpickled it."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def test_pickled_objects_are_refused(tmp_path: Path):
    trap = np.empty(1, object)
    trap[0] = Trap(tmp_path / "sprung")
    with pytest.raises(ValueError, match="expected numbers in array 'extra', found pickled objects"):
        read_npz(write(tmp_path, extra=trap))
    bare = tmp_path / "bare.npz"
    bare.write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    with pytest.raises(ValueError, match=r"bare\.npz: expected a readable \.npz archive"):
        read_npz(bare)
    assert not (tmp_path / "sprung").exists()


def test_what_is_no_archive(tmp_path: Path):
    path = write(tmp_path)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ValueError, match=r"expected a readable \.npz archive"):
        read_data(str(path))
    with (tmp_path / "array.npz").open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(ValueError, match=r"array\.npz: expected a readable \.npz archive"):
        read_npz(tmp_path / "array.npz")
    with pytest.raises(ValueError, match=r"expected 'karate', an \.npz file or a folder of graphs"):
        read_data(str(tmp_path / "nowhere"))


GRAPHS = "2\n3 1\n0 1 1\n2 2 0 2\n0 1 1\n2 -1\n5 1 1\n0 1 0\n"


def gin_folder(folder: Path, text: str = GRAPHS, folds: dict[str, str] | None = None) -> Path:
    folder = folder / "TINY"
    (folder / "10fold_idx").mkdir(parents=True)
    (folder / "TINY.txt").write_text(text)
    for n in range(1, 11):
        for part, ids in {"train": "0\n", "test": "1\n"}.items():
            name = f"{part}_idx-{n}.txt"
            (folder / "10fold_idx" / name).write_text((folds or {}).get(name, ids))
    return folder


def test_the_gin_text_format(tmp_path: Path):
    data = read_gin_folder(gin_folder(tmp_path))
    assert data.name == "TINY"
    assert data.node_offsets.tolist() == [0, 3, 5]
    assert data.edge_offsets.tolist() == [0, 4, 6]
    assert data.edge_index.tolist() == [[1, 0, 2, 1, 1, 0], [0, 1, 1, 2, 0, 1]]
    assert data.features.tolist() == [[1, 0, 0], [0, 1, 0], [1, 0, 0], [0, 0, 1], [1, 0, 0]]  # tags 0, 2, 5
    assert data.labels.tolist() == [1, 0]
    assert len(data.folds) == 10
    assert [part.tolist() for part in data.folds[3]] == [[0], [1]]
    assert isinstance(read_data(str(tmp_path / "TINY")), GraphData)


def test_degrees_stand_in_for_tags_that_say_nothing(tmp_path: Path):
    text = "1\n3 0\n7 1 1\n7 2 0 2\n7 1 1\n"
    folds = {f"{part}_idx-{n}.txt": "0\n" for n in range(1, 11) for part in ("train",)}
    folder = gin_folder(tmp_path, text, folds)
    for path in (folder / "10fold_idx").iterdir():
        path.unlink()
    (folder / "10fold_idx").rmdir()
    data = read_gin_folder(folder)
    assert data.features.tolist() == [[1, 0], [0, 1], [1, 0]]
    assert data.folds == ()


def test_attributes_follow_the_tags(tmp_path: Path):
    data = read_gin_folder(gin_folder(tmp_path, GRAPHS.replace("\n5 1 1\n0 1 0\n", "\n5 1 1\n0 1 0 \n")))
    assert data.features.shape == (5, 3)
    lines = [f"{line} 0.5 -2" if n not in (0, 1, 5) else line for n, line in enumerate(GRAPHS.splitlines())]
    other = read_gin_folder(gin_folder(tmp_path / "other", "\n".join(lines)))
    np.testing.assert_array_equal(other.features[:, :3], data.features)
    np.testing.assert_array_equal(other.features[:, 3:], [[0.5, -2]] * 5)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("2\n3 1\n", "none\n3 1\n", r"TINY.txt, line 1: expected the number of graphs, found 'none'"),
        ("2\n3 1\n", "0\n3 1\n", "line 1: expected at least one graph, found 0"),
        ("3 1\n", "3\n", "line 2: expected a graph's number of nodes and its label, found 3"),
        ("2 2 0 2\n", "2 2 0 3\n", "line 4: expected neighbours from 0 to 2, found 3"),
        ("2 2 0 2\n", "2 3 0 2\n", "line 4: expected a node's tag, its number of neighbours and these, found '2 3 0 2'"),
        ("2 2 0 2\n", "2 2 0 x\n", "line 4: expected the numbers of a node's neighbours, found '0 x'"),
        ("2 2 0 2\n", "2 2 0 2 nan\n", "line 4: expected a finite attribute in float32, found 'nan'"),
        ("2 2 0 2\n", "2 2 0 2 1.5\n", "expected the same number of attributes for all nodes"),
        ("0 1 0\n", "", "line 6: expected the lines of 2 nodes, found 1 more lines"),
        ("2 -1\n", "4000000000 -1\n", "line 6: expected the lines of 4000000000 nodes, found 2 more lines"),
        ("5 1 1\n", "9223372036854775808 1 1\n", "line 7: expected a node's tag .* of at most 64 bits"),
        ("2 2 0 2\n", "2 2 0 2 1e39\n", "line 4: expected a finite attribute in float32, found '1e39'"),
        ("0 1 0\n", "0 1 0\n4 2\n", "line 9: expected the end of the file after 2 graphs"),
    ],
)
def test_what_is_wrong_with_a_text_file(tmp_path: Path, old: str, new: str, problem: str):
    with pytest.raises(ValueError, match=problem):
        read_gin_folder(gin_folder(tmp_path, GRAPHS[::-1].replace(old[::-1], new[::-1], 1)[::-1]))


@pytest.mark.parametrize(
    ("ids", "problem"),
    [
        ("0\n2\n", r"train_idx-2.txt, line 2: expected graphs from 0 to 1, found 2"),
        ("0\nx\n", r"train_idx-2.txt, line 2: expected a graph's number, found 'x'"),
        ("", r"train_idx-2.txt, line 0: expected the numbers of graphs, found none"),
        ("1\n", "expected disjoint training and test graphs in fold 2, found graph 1 in both"),
    ],
)
def test_what_is_wrong_with_a_fold(tmp_path: Path, ids: str, problem: str):
    with pytest.raises(ValueError, match=problem):
        read_gin_folder(gin_folder(tmp_path, folds={"train_idx-2.txt": ids}))


def test_a_fold_that_is_missing(tmp_path: Path):
    folder = gin_folder(tmp_path)
    (folder / "10fold_idx" / "test_idx-7.txt").unlink()
    with pytest.raises(ValueError, match=r"test_idx-7.txt: expected a readable UTF-8 file"):
        read_gin_folder(folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty: expected one text file with the graphs, found 0"):
        read_gin_folder(tmp_path / "empty")


@given(st.integers(1, 12), st.integers(1, 4), st.integers(0, 5))
def test_a_split_has_every_class_and_no_node_twice(per_class: int, classes: int, seed: int):
    labels = np.arange(60, dtype=np.int32) % classes
    labels[:5] = -1
    none = np.zeros(0, np.int32)
    data = NodeData("made", np.zeros((2, 0), np.int32), np.zeros((60, 1), np.float32), labels, none, none, none)
    split = with_split(data, seed, per_class, val=20)
    assert np.bincount(labels[split.train], minlength=classes).tolist() == [
        min(per_class, (labels == c).sum()) for c in range(classes)
    ]
    everything = np.concatenate([split.train, split.val, split.test])
    assert sorted(everything) == list(range(5, 60))


def test_folds_test_every_graph_once_and_have_all_labels(tmp_path: Path):
    text = "40\n" + "".join(f"1 {n % 4 == 0:d}\n{n % 3} 0\n" for n in range(40))
    data = with_folds(read_gin_folder(gin_folder(tmp_path, text)))
    assert sorted(np.concatenate([test for _, test in data.folds])) == list(range(40))
    for train, test in data.folds:
        assert sorted([*train, *test]) == list(range(40))
        assert data.labels[test].sum() == 1
    with pytest.raises(ValueError, match="expected at least 10 graphs for 10 folds, found 2"):
        with_folds(read_gin_folder(gin_folder(tmp_path / "few")))


def write_table(path: Path, rows: Sequence[Sequence[float]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress("".join(",".join(map(str, row)) + "\n" for row in rows).encode()))


def write_ogb(folder: Path) -> Path:
    write_table(folder / "raw" / "edge.csv.gz", [[0, 1], [1, 2], [3, 2]])
    write_table(folder / "raw" / "node-feat.csv.gz", [[0.5, -1], [1, 0], [0, 0.25], [2, 2]])
    write_table(folder / "raw" / "node-label.csv.gz", [[1], [0], [2], [0]])
    for part, ids in {"train": [[2], [0]], "valid": [[1]], "test": [[3]]}.items():
        write_table(folder / "split" / "time" / f"{part}.csv.gz", ids)
    return folder


def test_folders_of_ogb(tmp_path: Path):
    data = read_data(str(write_ogb(tmp_path / "ogbn_arxiv")))
    assert isinstance(data, NodeData)
    assert data.name == "arxiv"
    np.testing.assert_array_equal(data.edge_index, [[0, 1, 3], [1, 2, 2]])
    np.testing.assert_array_equal(data.features, np.array([[0.5, -1], [1, 0], [0, 0.25], [2, 2]], np.float32))
    np.testing.assert_array_equal(data.labels, [1, 0, 2, 0])
    assert [part.tolist() for part in (data.train, data.val, data.test)] == [[2, 0], [1], [3]]
    folder = write_ogb(tmp_path / "ogbn_proteins")
    write_table(folder / "raw" / "edge-feat.csv.gz", [[1, 2], [3, 4], [5, 6]])
    write_table(folder / "raw" / "node-label.csv.gz", [[1, 0], [0, 0], [1, 1], [0, 1]])
    both = read_data(str(folder))
    assert isinstance(both, NodeData)
    np.testing.assert_array_equal(both.edge_index, [[0, 1, 3, 1, 2, 2], [1, 2, 2, 0, 1, 3]])
    np.testing.assert_array_equal(both.edge_attr, [[1, 2], [3, 4], [5, 6]] * 2)
    assert label_kind(both.labels) == "multilabel"


@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda folder: write_table(folder / "raw" / "edge.csv.gz", [[0, 4]]), r"edge_index\[1, 0\] is 4, expected 0 to 3"),
        (lambda folder: (folder / "raw" / "edge.csv.gz").write_bytes(b"0,1"), r"edge.csv.gz: expected numbers with commas"),
        (lambda folder: (folder / "raw" / "node-feat.csv.gz").unlink(), r"node-feat.csv.gz: expected a file, found none"),
        (lambda folder: (folder / "split" / "other").mkdir(), "expected one folder in split, found 2"),
    ],
)
def test_wrong_folders_of_ogb(tmp_path: Path, wrong: Any, message: str):
    wrong(write_ogb(tmp_path / "ogbn_arxiv"))
    with pytest.raises(ValueError, match=message):
        read_data(str(tmp_path / "ogbn_arxiv"))
