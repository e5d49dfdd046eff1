"""`tilewright train gnn`: trains graph neural networks on the nodes of a graph or on whole graphs."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from cyclopts import Group, Parameter
from jax.sharding import Mesh
from rich.console import Console

from tilewright.cli.common import keep_programs
from tilewright.cli.options import check_least, option_class
from tilewright.cli.outputs import human_console, write_json
from tilewright.cli.train import (
    COMMON,
    MODEL,
    PERFORMANCE,
    TRAINING,
    JsonOption,
    LogOption,
    SaveOption,
    SaveSettings,
    check_out,
)
from tilewright.compiled.machine import chip_name
from tilewright.graph.data import KARATE, GraphData, Kind, NodeData, label_kind, read_data, with_folds, with_split
from tilewright.graph.sample import ALL
from tilewright.kernels.select import neighbour_sampler
from tilewright.metrics.tables import FigureTable, print_table
from tilewright.metrics.training import ACCURACY
from tilewright.models.gnn import AttentionConfig, Config, GINConfig
from tilewright.models.gnn_checkpoint import config_to_json, save_gnn
from tilewright.models.gnn_families import FAMILIES, PNAConfig
from tilewright.parallel.mesh import make_mesh
from tilewright.train.gnn import PARTS, GNNOptions, best_run, mean_log_degree, metric_at_best_validation, validates
from tilewright.train.graphs import graphs_task
from tilewright.train.links import link_task
from tilewright.train.log import LogOptions
from tilewright.train.loop import Task, TrainResult, train
from tilewright.train.nodes import full_graph_task, sampled_task

Family = Literal["gcn", "sage", "gat", "gin", "gatv2", "transformer", "gine", "pna"]

RATES: dict[Family, float] = {"gat": 0.005, "gatv2": 0.005, "transformer": 0.005, "pna": 0.001}
"""Learning rates of the papers, where they are not GCN's and GIN's 0.01; GraphSAGE's and GINE's papers train on other data."""
SCORES: dict[Kind, tuple[str, str]] = {
    "class": ("accuracy", "accuracy"),
    "multilabel": ("micro_f1", "micro-F1"),
    "regression": ("r2", "R²"),
}
"""Names of the score of labels in JSON and in titles."""
LINK_SIZES = {"hidden": 128, "classes": 64, "dropout": 0.0}
"""Sizes for link prediction, those of PyG's example; `classes` is the width of the embeddings."""
PNA_DROPOUT = 0.0
"""Dropout of PNA for many graphs, as in PyG's example `pna.py` and in the paper's settings for ZINC."""
SAMPLED_BATCH = 64
GRAPH_BATCH = 32
DATA = Group("Data", sort_key=3)


@Parameter(group=MODEL)
@option_class
class GNNSizes:
    """Sizes of a graph network; defaults are those of the model's paper.

    Attributes:
        layers: rounds of message passing (default 2, gin and gine 4; the GIN paper counts the input as a fifth).
        hidden: width of a hidden layer, with attention of one head (default 16, attention 8, gin and gine 32, links 128).
        heads: heads of a hidden layer, for gat, gatv2 and transformer (default 8).
        dropout: dropout rate (default 0.5, attention 0.6, links and pna for many graphs 0).
    """

    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    dropout: float | None = None

    def config(self, family: Family, data: NodeData | GraphData, links: bool = False) -> Config:
        kind = FAMILIES[family]
        if self.heads is not None and not issubclass(kind, AttentionConfig):
            heads = ", ".join(name for name, each in FAMILIES.items() if issubclass(each, AttentionConfig))
            raise ValueError(f"expected --heads with --model {heads}, found --model {family}")
        given = {name: value for name, value in vars(self).items() if value is not None}
        sizes = {"classes": data.num_classes, **given} if not links else {**LINK_SIZES, **given}
        if issubclass(kind, GINConfig):
            sizes.setdefault("hidden", 32)
        if kind.takes_edges:
            sizes["edge_features"] = data.num_edge_features
        if kind is PNAConfig:
            sizes["mean_log_degree"] = mean_log_degree(data)
            if isinstance(data, GraphData):
                sizes.setdefault("dropout", PNA_DROPOUT)
        return kind(features=data.num_features, **sizes)


@Parameter(group=TRAINING)
@option_class
class GNNLoop:
    """Options of the training loop; defaults are those of the model's paper.

    Attributes:
        epochs: number of epochs (default 200, links 100; for data of many graphs 350 epochs of 50 steps).
        learning_rate: learning rate of Adam (default 0.01, attention 0.005, pna 0.001). For data of many graphs it halves every
            50 epochs.
        weight_decay: L2 penalty of the matrices, for gcn of the first layer only (default 5e-4; gin, gine, links and many
            graphs 0).
        batch_size: nodes per step of sampled training (default 64), or graphs per step (default 32).
        fan_out: number of sampled neighbours per layer, from the node outwards, such as 10,10; -1 takes all neighbours. By
            default every step computes the whole graph.
        seeds: number of runs with consecutive seeds, trained side by side.
        seed: seed of the first run.
        inductive: pass messages between training nodes alone in training, and along all edges in evaluations.
        fold: fold of the graphs to test on, from 1, or all folds side by side.
        devices: number of devices that one graph is partitioned over, in a ring; by default one device. On a CPU, set
            XLA_FLAGS=--xla_force_host_platform_device_count=8 first.
    """

    epochs: Annotated[int | None, Parameter(alias="-n", group=COMMON)] = None
    learning_rate: Annotated[float | None, Parameter(group=COMMON)] = None
    weight_decay: float | None = None
    batch_size: Annotated[int | None, Parameter(alias="-b", group=COMMON)] = None
    fan_out: Annotated[str | None, Parameter(allow_leading_hyphen=True, group=COMMON)] = None
    seeds: Annotated[int, Parameter(group=COMMON)] = 1
    seed: int = 0
    inductive: Annotated[bool, Parameter(negative=(), group=DATA)] = False
    fold: Annotated[str, Parameter(group=DATA)] = "all"
    save: SaveOption = SaveSettings()
    log: LogOption = LogOptions()
    devices: Annotated[int | None, Parameter(group=PERFORMANCE)] = None

    def mesh(self) -> Mesh | None:
        return None if self.devices is None else make_mesh({"nodes": self.devices})

    def options(self, family: Family, graphs: bool = False, links: bool = False) -> GNNOptions:
        check_least(self, seeds=1)
        if self.batch_size is not None and self.fan_out is None and not graphs:
            raise ValueError("expected --batch-size with --fan-out or data of many graphs, found one whole graph")
        defaults: dict[str, Any] = {
            "epochs": 350 if graphs else 100 if links else 200,
            "learning_rate": RATES.get(family, 0.01),
            "weight_decay": 0.0 if graphs or links or issubclass(FAMILIES[family], GINConfig) else 5e-4,
            "batch_size": GRAPH_BATCH if graphs else SAMPLED_BATCH,
        }
        changed = {name: value for name in defaults if (value := getattr(self, name)) is not None}
        fixed = {"halve_every": 50 if graphs else 0, "seed": self.seed, "log": self.log, **self.save.options(50)}
        return GNNOptions(**{**defaults, **changed, **fixed})

    def folds(self, data: GraphData) -> list[int]:
        """Returns the folds to test on, counted from 0. Raises a `ValueError` for a fold outside the data."""
        if self.fold == "all":
            return list(range(len(data.folds)))
        if not self.fold.isdecimal() or not 1 <= int(self.fold) <= len(data.folds):
            raise ValueError(f"--fold: expected 1 to {len(data.folds)} or all, found {self.fold!r}")
        return [int(self.fold) - 1]

    def fan_outs(self) -> list[int]:
        words = [word.strip() for word in (self.fan_out or "").split(",")]
        if not all(word.isdecimal() or word == str(ALL) for word in words):
            expected = f"whole numbers with commas between them, {ALL} for all neighbours"
            raise ValueError(f"--fan-out: expected {expected}, found {self.fan_out!r}")
        return [int(word) for word in words]


def divide_features(data: NodeData, normalise: bool | None, console: Console) -> NodeData:
    """Divides the features of each node by their sum.

    Args:
        data: a graph with features.
        normalise: value of `--normalise-features`; None divides unless a feature is negative or the features are mapped files.
        console: console for a notice about features that are not divided.

    Raises:
        ValueError: `normalise` is True and a feature is negative.
    """
    if normalise is None and isinstance(data.features, np.memmap):
        console.print(f"{data.name}: features are not normalised, since they stay in their file", markup=False)
        return data
    if normalise is None and data.negative_node is not None:
        console.print(f"{data.name}: features are not normalised, since some are negative", markup=False)
        return data
    return data if normalise is False else data.row_normalised()


def split(data: NodeData, console: Console) -> NodeData:
    """Splits the nodes at random if the data has no split, and prints the sizes."""
    if len(data.train):
        return data
    data = with_split(data)
    counts = f"{len(data.train)} training, {len(data.val)} validation, {len(data.test)} test nodes"
    console.print(f"{data.name}: no split in the data, random split: {counts}", markup=False)
    return data


def node_task(data: NodeData, family: Family, sizes: GNNSizes, loop: GNNLoop) -> tuple[Config, Task]:
    """Builds the training task for one graph with a split."""
    if loop.fold != "all":
        raise ValueError(f"expected --fold with data of many graphs, found one graph ({data.name})")
    config = sizes.config(family, data)
    options = loop.options(family)
    if loop.fan_out is None:
        return config, full_graph_task(config, data, options, loop.seeds, mesh=loop.mesh(), inductive=loop.inductive)
    if loop.devices is not None:
        raise ValueError("expected --devices or --fan-out, found both: only whole graphs are partitioned over devices")
    return config, sampled_task(config, data, options, loop.fan_outs(), loop.seeds, loop.inductive)


def predict_links(data: NodeData, family: Family, sizes: GNNSizes, loop: GNNLoop) -> tuple[Config, Task]:
    """Builds the training task of link prediction."""
    for name, value in (("--fan-out", loop.fan_out), ("--devices", loop.devices), ("--inductive", loop.inductive or None)):
        if value is not None:
            raise ValueError(f"expected {name} for the labels of nodes, found --task link")
    config = sizes.config(family, data, links=True)
    return config, link_task(config, data, loop.options(family, links=True), loop.seeds)


def usable(data: GraphData, family: Family, console: Console) -> GraphData:
    """Leaves out features of the edges if the model takes none, and prints their number."""
    if not data.num_edge_features or FAMILIES[family].takes_edges:
        return data
    console.print(
        f"{data.name}: {data.num_edge_features} features of edges are left out, since {family} takes none", markup=False
    )
    return replace(data, edge_attr=None)


def graph_task(data: GraphData, family: Family, sizes: GNNSizes, loop: GNNLoop) -> tuple[Config, Task]:
    """Builds the training task for many graphs; splits the graphs into ten folds if the data has none."""
    data = data if data.folds else with_folds(data)
    for name, value in (("--fan-out", loop.fan_out), ("--devices", loop.devices), ("--inductive", loop.inductive or None)):
        if value is not None:
            raise ValueError(f"expected {name} with one graph, found {data.num_graphs} graphs in {data.name}")
    config = sizes.config(family, data)
    options = loop.options(family, graphs=True)
    return config, graphs_task(config, data, options, loop.folds(data), loop.seeds)


def gnn(
    *,
    model: Annotated[Family, Parameter(alias="-m", group=COMMON)] = "gcn",
    data: Annotated[str, Parameter(alias="-d", group=COMMON)] = KARATE,
    task: Annotated[Literal["label", "link"], Parameter(alias="-t", group=COMMON)] = "label",
    sizes: GNNSizes = GNNSizes(),
    loop: GNNLoop = GNNLoop(),
    normalise_features: Annotated[bool | None, Parameter(group=DATA)] = None,
    out: Annotated[Path | None, Parameter(alias="-o", group=COMMON)] = None,
    json_file: JsonOption = None,
) -> None:
    """Trains a graph neural network on the nodes or edges of a graph, or on many graphs by cross-validation.

    Args:
        model: architecture: GCN, GraphSAGE with mean aggregation, GAT, GIN, or one that takes features of edges (`edge_attr`):
            GATv2, a graph transformer, PNA, and GINE, which needs them.
        data: "karate" (Zachary's karate club, built in), an .npz file with one graph, a folder with its arrays as .npy files,
            which are mapped into memory, a folder with tables of edges and nodes (.csv, .csv.gz or .parquet), a folder that OGB
            has downloaded (ogbn_arxiv), a folder of a PyG data set (with `raw` or `processed`), or a folder with graphs in the
            GIN text format.
        task: predict the labels of nodes or graphs, or edges of one graph, of which 5% are for validation and 10% for tests.
        normalise_features: divide the features of each node by their sum, for one graph; by default if no feature is negative
            and the features are no .npy file.
        out: folder for the model: the weights with the best validation accuracy of all epochs and runs; without validation
            nodes, the last weights of the first run. Its subfolder `training` holds the checkpoint that an interrupted run
            resumes from. By default nothing is saved.
    """
    console = human_console(json_file)
    if out is not None:
        check_out(out, loop.save)
    elif loop.save != SaveSettings():
        raise ValueError("expected --out with --save, found none")
    keep_programs()
    loaded = read_data(data)
    links = task == "link"
    if isinstance(loaded, GraphData):
        if links:
            raise ValueError(f"expected --task link with one graph, found {loaded.num_graphs} graphs in {loaded.name}")
        config, made = graph_task(usable(loaded, model, console), model, sizes, loop)
    elif links:
        config, made = predict_links(divide_features(loaded, normalise_features, console), model, sizes, loop)
    else:
        config, made = node_task(split(divide_features(loaded, normalise_features, console), console), model, sizes, loop)
    if loop.fan_out is not None and (reason := neighbour_sampler()[1]):
        console.print(f"neighbours are sampled by NumPy, since {reason}", markup=False)
    result = train(made, console, None if out is None else out / "training")
    figures = (graph_accuracies if isinstance(loaded, GraphData) else node_accuracies)(result)
    if out is not None:
        save_gnn(out, config, *best_run(result))
    more = {"epochs_per_s": result.rate, "seconds": result.seconds, **result.ledger.figures(), "chip": chip_name()}
    metric, noun = ("auc", "area under the ROC curve") if links else SCORES[label_kind(loaded.labels)]
    results = {"config": config_to_json(config), metric: figures, "loss_nats": summary(result.last("loss"))}
    write_json(json_file, {**made.run_fingerprint, "epochs": len(result.curve["step"]), **results, **more})
    print_table(console, accuracy_table(f"{model} on {made.title}", figures, noun))
    if out is not None:
        console.print(f"{out} written", markup=False)


def node_accuracies(result: TrainResult) -> dict[str, dict[str, Any]]:
    """Returns accuracies after the last epoch and at each run's best validation."""
    rows = {"after the last epoch": {part: summary(result.last(part)) for part in PARTS}}
    if validates(result):
        rows["at the best validation"] = {part: summary(metric_at_best_validation(result, part)) for part in PARTS}
    return rows


def graph_accuracies(result: TrainResult) -> dict[str, dict[str, Any]]:
    """Returns accuracies after the last epoch and at the epoch with the best mean over the folds (the GIN protocol)."""
    means = result.curve["test"].mean(1)
    best = int(means.argmax()) + 1
    rows = {"after the last epoch": len(means), f"at the best epoch of all folds ({best})": best}
    return {name: {part: summary(result.curve[part][epoch - 1]) for part in ("train", "test")} for name, epoch in rows.items()}


def summary(values: np.ndarray) -> dict[str, Any] | None:
    """Returns the mean, the standard deviation and the values of all runs; None if a run has no value."""
    if np.isnan(values).any():
        return None
    spread = float(values.std(ddof=1)) if len(values) > 1 else None
    return {"mean": float(values.mean()), "std": spread, "runs": [float(value) for value in values]}


def accuracy_table(title: str, figures: dict[str, dict[str, Any]], noun: str = "accuracy") -> FigureTable:
    """Builds the table of accuracies, or of another metric, with a row per evaluated epoch."""
    rows = [{"name": name, **{part: percent(cell) for part, cell in cells.items()}} for name, cells in figures.items()]
    runs = max(len(cell["runs"]) for cells in figures.values() for cell in cells.values() if cell is not None)
    title = f"{title}: {noun} in %{f', mean ± standard deviation of {runs} runs' if runs > 1 else ''}"
    return FigureTable(title, "epoch", {"": rows}, [metric for metric in ACCURACY if metric.name in rows[0]])


def percent(cell: dict[str, Any] | None) -> str | None:
    """Formats an accuracy in percent; None without a value."""
    if cell is None:
        return None
    return f"{100 * cell['mean']:.2f}" + (f" ± {100 * cell['std']:.2f}" if cell["std"] is not None else "")
