"""`tilewright train gnn`: with nothing at hand, from files to a model on disk, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from cli.conftest import Run
from tilewright.cli import train_gnn
from tilewright.graph.data import GraphData, karate_club
from tilewright.kernels import native
from tilewright.metrics.tables import UNKNOWN, FigureTable
from tilewright.models.gnn_checkpoint import load_gnn


def test_it_runs_with_nothing_at_hand(run: Run):
    ran = run("train", "gnn", "--epochs", 30, "--seeds", 2, "--json", "-")
    assert ran.status == 0, ran.err
    figures = ran.json
    assert figures["data"] == "karate"
    assert figures["config"] == {
        "model_type": "gcn",
        "features": 34,
        "classes": 2,
        "hidden": 16,
        "layers": 2,
        "dropout": 0.5,
        "readout": "mean",
    }
    last = figures["accuracy"]["after the last epoch"]
    assert last["val"] is None
    assert last["test"]["mean"] == pytest.approx(np.mean(last["test"]["runs"]))
    assert len(last["test"]["runs"]) == len(figures["loss_nats"]["runs"]) == 2
    assert figures["epochs"] == 30
    assert figures["seconds"] > 0 < figures["epochs_per_s"]
    assert "gcn on karate: accuracy in %, mean ± standard deviation of 2 runs" in " ".join(ran.err.split())


def test_several_devices_train_as_one_does(run: Run):
    command = ["train", "gnn", "--epochs", 8, "--dropout", 0, "--json", "-"]
    one = run(*command)
    several = run(*command, "--devices", 3)
    assert several.status == 0, several.err
    figures = [ran.json["accuracy"]["after the last epoch"] for ran in (one, several)]
    for part in ("train", "test"):
        assert figures[1][part]["mean"] == pytest.approx(figures[0][part]["mean"], abs=0.04), "one node of 30 may be a tie"


def test_a_file_becomes_a_model(run: Run, tmp_path: Path):
    data = karate_club()
    path = tmp_path / "club.npz"
    arrays: dict[str, Any] = {"edge_index": data.edge_index, "x": np.eye(34), "y": data.labels, "train": data.train}
    np.savez(path, **arrays, val=data.test[:8], test=data.test[8:])
    options = ["--data", path, "--model", "sage", "--hidden", 4, "--fan-out", "4,3", "--epochs", 2, "--out", tmp_path / "model"]
    ran = run("train", "gnn", *options, "--save", "every=1")
    assert ran.status == 0, ran.err
    assert "at the best validation" in ran.out
    config, params, _ = load_gnn(tmp_path / "model")
    assert (config.features, config.hidden, config.classes) == (34, 4, 2)
    again = run("train", "gnn", *options, "--save", "every=1")
    assert "resuming club at step 2 of 2" in again.out
    np.testing.assert_array_equal(params.layers[0].root, load_gnn(tmp_path / "model")[1].layers[0].root)


def test_parts_that_are_absent(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Without test nodes, and where all of them train; all is written before anything is shown."""
    data = karate_club()
    arrays: dict[str, Any] = {"edge_index": data.edge_index, "x": np.eye(34), "y": data.labels[:, None]}
    masks: dict[str, Any] = {"train_mask": np.arange(34) < 20, "val_mask": np.arange(34) >= 20}
    np.savez(tmp_path / "validated.npz", **arrays, **masks)
    np.savez(tmp_path / "unsplit.npz", **arrays)
    options = ["train", "gnn", "--hidden", 2, "--epochs", 1, "--data"]
    ran = run(*options, tmp_path / "validated.npz", "--out", tmp_path / "model")
    assert ran.status == 0, ran.err
    last = next(line for line in ran.out.splitlines() if "after the last epoch" in line)
    assert last.split()[-1] == UNKNOWN
    assert load_gnn(tmp_path / "model")[0].features == 34
    shown: list[FigureTable] = []

    def stopped(console: Console, table: FigureTable) -> None:
        shown.append(table)
        raise KeyboardInterrupt

    monkeypatch.setattr(train_gnn, "print_table", stopped)
    ran = run(*options, tmp_path / "unsplit.npz", "--out", tmp_path / "other", "--json", tmp_path / "figures.json")
    said = "unsplit: no split in the data, random split: 34 training, 0 validation, 0 test nodes"
    assert said in " ".join(ran.out.split())
    assert load_gnn(tmp_path / "other")[0].features == 34
    last = json.loads((tmp_path / "figures.json").read_text())["accuracy"]["after the last epoch"]
    assert (last["val"], last["test"]) == (None, None)
    (row,) = shown[0].groups[""]
    assert (row["val"], row["test"], float(row["train"]) >= 0) == (None, None, True)


def test_features_with_signs_are_left_as_they_are(run: Run, tmp_path: Path):
    """By default, and with a word; by name they are refused, for their sums are no sizes."""
    data = karate_club()
    x = np.eye(34)
    x[5, 7] = -1
    np.savez(tmp_path / "signs.npz", edge_index=data.edge_index, x=x, y=data.labels, train=data.train, test=data.test)
    command = ["train", "gnn", "--data", tmp_path / "signs.npz", "--hidden", 2, "--epochs", 1]
    ran = run(*command)
    assert ran.status == 0, ran.err
    assert "signs: features are not normalised, since some are negative" in " ".join(ran.out.split())
    refused = run(*command, "--normalise-features")
    assert refused.status == 2
    assert "expected features of at least 0 to normalise, found a negative one of node 5" in " ".join(refused.err.split())


def test_a_slower_sampler_is_named(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(native, "host_library", lambda operation: (None, "there is no C++ compiler"))
    ran = run("train", "gnn", "--model", "sage", "--hidden", 4, "--fan-out", "4,3", "--epochs", 1)
    assert ran.status == 0, ran.err
    assert "neighbours are sampled by NumPy, since there is no C++ compiler" in " ".join(ran.out.split())


def test_folders_of_graphs_are_cross_validated(run: Run, tmp_path: Path):
    ring = "4 0\n0 2 1 3\n0 2 0 2\n0 2 1 3\n0 2 0 2\n"
    star = "4 1\n0 3 1 2 3\n0 1 0\n0 1 0\n0 1 0\n"
    (tmp_path / "shapes").mkdir()
    (tmp_path / "shapes" / "shapes.txt").write_text("20\n" + 10 * (ring + star))
    ran = run(
        "train",
        "gnn",
        "--data",
        tmp_path / "shapes",
        "--model",
        "gin",
        "--hidden",
        4,
        "--layers",
        1,
        "--epochs",
        2,
        "--fold",
        3,
        "--json",
        "-",
    )
    assert ran.status == 0, ran.err
    assert len(ran.json["accuracy"]["after the last epoch"]["test"]["runs"]) == 1
    assert any(name.startswith("at the best epoch of all folds (") for name in ran.json["accuracy"])


def test_a_folder_of_pyg(run: Run, tmp_path: Path):
    """GIN takes no features of edges; PNA does, with other sizes for many graphs than for one."""
    raw = tmp_path / "RINGS" / "raw"
    raw.mkdir(parents=True)
    ends = [(6 * graph + n + 1, 6 * graph + (n + 1) % 6 + 1) for graph in range(20) for n in range(6)]
    ends += [end[::-1] for end in ends]
    columns = {
        "A": ends,
        "graph_indicator": [(node // 6 + 1,) for node in range(120)],
        "graph_labels": [(graph % 2,) for graph in range(20)],
        "node_labels": [(node // 6 % 2,) for node in range(120)],
        "edge_labels": [(n % 3,) for n in range(len(ends))],
    }
    for stem, rows in columns.items():
        (raw / f"RINGS_{stem}.txt").write_text("".join(", ".join(map(str, row)) + "\n" for row in rows))
    options = ["--data", tmp_path / "RINGS", "--epochs", 1, "--fold", 1, "--json", "-"]
    gin = run("train", "gnn", "--model", "gin", "--hidden", 4, "--layers", 1, *options)
    assert gin.status == 0, gin.err
    assert "RINGS: 3 features of edges are left out, since gin takes none" in " ".join(gin.err.split())
    pna = run("train", "gnn", "--model", "pna", "--hidden", 4, "--layers", 1, *options)
    assert pna.status == 0, pna.err
    assert "left out" not in pna.err
    assert (pna.json["config"]["edge_features"], pna.json["config"]["dropout"]) == (3, 0.0)


def test_sizes_of_pna():
    """Nothing is dropped for many graphs, as in PyG's example, but where the caller says so."""
    edges = np.array([[0, 1], [1, 0]], np.int32)
    one = karate_club()
    starts = np.array([0, 2], np.int32)
    many = GraphData("pair", starts, starts, edges, np.eye(2, dtype=np.float32), np.ones(1, np.int32), ())
    sizes = [
        train_gnn.GNNSizes(**given).config("pna", data) for data in (one, many) for given in ({}, {"hidden": 8, "dropout": 0.1})
    ]
    assert [(each.layers, each.hidden, each.dropout) for each in sizes] == [
        (2, 16, 0.5),
        (2, 8, 0.1),
        (2, 16, 0.0),
        (2, 8, 0.1),
    ]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--data", "nowhere.npz"], "nowhere.npz: expected 'karate', an .npz file or a folder of graphs, found no such file"),
        (["--heads", "4"], "expected --heads with --model gat, gatv2, transformer, found --model gcn"),
        (["--fan-out", "3,x"], "--fan-out: expected whole numbers with commas between them, -1 for all neighbours, found"),
        (["--fan-out", "-1"], "expected a fan-out for each of 2 layers, found 1: [-1]"),
        (["--fan-out", "3"], "expected a fan-out for each of 2 layers, found 1"),
        (
            ["--fan-out", "3,3", "--devices", "2"],
            "expected --devices or --fan-out, found both",
        ),
        (["--devices", "99"], "99"),
        (["--fold", "2"], "expected --fold with data of many graphs, found one graph (karate)"),
        (["--batch-size", "2"], "expected --batch-size with --fan-out or data of many graphs"),
        (["--seeds", "0"], "expected seeds of at least 1, found 0"),
        (["--save", "every=5"], "expected --out with --save, found none"),
        (["--epochs", "0"], "expected epochs above 0, found 0"),
        (["--hidden", "0"], "expected hidden of at least 1, found 0"),
        (["--dropout", "1"], "expected a dropout from 0 to below 1, found 1.0"),
        (["--model", "gcnii"], "gcnii"),
    ],
)
def test_what_is_refused(run: Run, arguments: list[str], problem: str):
    ran = run("train", "gnn", *arguments)
    assert ran.status == 2
    assert problem in " ".join(ran.err.split())
    assert "Traceback" not in ran.err
