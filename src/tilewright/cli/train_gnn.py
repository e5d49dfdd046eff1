"""`tilewright train gnn`: graph neural networks, for the nodes of a graph or for whole graphs."""

from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from cyclopts import Parameter
from jax.sharding import Mesh
from rich.console import Console

from tilewright.cli.common import keep_programs
from tilewright.cli.options import CompileCache, check_least, option_class
from tilewright.cli.outputs import JsonFile, human_console, write_json
from tilewright.cli.train import check_out
from tilewright.compiled.machine import chip_name
from tilewright.graph.data import KARATE, GraphData, NodeData, read_data, with_folds, with_split
from tilewright.graph.sample import ALL
from tilewright.metrics.tables import FigureTable, print_table
from tilewright.metrics.training import ACCURACY
from tilewright.models.gnn import FAMILIES, Config
from tilewright.models.gnn_checkpoint import config_to_json, save_gnn
from tilewright.parallel.mesh import make_mesh
from tilewright.train.gnn import PARTS, GNNOptions, at_best_validation, best_run, validates
from tilewright.train.graphs import graphs_task
from tilewright.train.loop import Task, TrainResult, train
from tilewright.train.nodes import full_graph_task, sampled_task

Family = Literal["gcn", "sage", "gat", "gin"]

RATES: dict[Family, float] = {"gcn": 0.01, "sage": 0.01, "gat": 0.005, "gin": 0.01}
"""The papers' learning rates; GraphSAGE, which the paper trains on other data, takes GCN's recipe."""
SAMPLED_BATCH = 64
GRAPH_BATCH = 32


@option_class
class GNNSizes:
    """Sizes of a graph network; those that are not given are as in the model's paper.

    Attributes:
        layers: rounds of message passing; by default 2, of gin 4 (which its paper counts as 5, with the input).
        hidden: width of a hidden layer, of gat that of one head; by default 16, of gat 8, of gin 32.
        heads: gat: heads of a hidden layer (8 by default).
        dropout: by default 0.5, of gat 0.6.
    """

    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    dropout: float | None = None

    def config(self, family: Family, features: int, classes: int) -> Config:
        if self.heads is not None and family != "gat":
            raise ValueError(f"--heads is for gat, found --model {family}")
        given = {name: value for name, value in vars(self).items() if value is not None}
        if family == "gin":
            given.setdefault("hidden", 32)
        return FAMILIES[family](features=features, classes=classes, **given)


@option_class
class GNNLoop:
    """Options of training; those that are not given are as in the model's paper.

    Attributes:
        epochs: by default 200; for graphs 350, of 50 steps each.
        learning_rate: of Adam; by default 0.01, of gat 0.005. For graphs it is halved every 50 epochs.
        weight_decay: L2 on the matrices, of gcn on those of the first layer; by default 5e-4, of gin and for graphs 0.
        batch_size: nodes of a sampled step (64 by default), or graphs of a step (32).
        fan_out: neighbours to sample in each layer, "10,10" say, from the node outwards, -1 for all of them; without it every
            step takes the whole graph.
        seeds: how many runs, side by side, each with the next seed.
        seed: of the first.
        fold: which fold of the graphs to test on, from 1, or all, side by side.
        save_every: epochs from one checkpoint to the next.
        devices: divide one graph over so many devices, in a ring; without it one device has it whole. For a CPU give XLA
            several first: XLA_FLAGS=--xla_force_host_platform_device_count=8.
    """

    epochs: int | None = None
    learning_rate: float | None = None
    weight_decay: float | None = None
    batch_size: int | None = None
    fan_out: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None
    seeds: int = 1
    seed: int = 0
    fold: str = "all"
    save_every: int = 50
    devices: int | None = None
    compile_cache: CompileCache = True

    def mesh(self) -> Mesh | None:
        return None if self.devices is None else make_mesh({"nodes": self.devices})

    def options(self, family: Family, graphs: bool) -> GNNOptions:
        check_least(self, seeds=1)
        if self.batch_size is not None and self.fan_out is None and not graphs:
            raise ValueError("--batch-size is for sampled training (--fan-out) or for data of many graphs")
        defaults: dict[str, Any] = {
            "epochs": 350 if graphs else 200,
            "learning_rate": RATES[family],
            "weight_decay": 0.0 if graphs or family == "gin" else 5e-4,
            "batch_size": GRAPH_BATCH if graphs else SAMPLED_BATCH,
        }
        given = {name: value for name in defaults if (value := getattr(self, name)) is not None}
        more = {"halve_every": 50 if graphs else 0, "seed": self.seed, "save_every": self.save_every}
        return GNNOptions(**{**defaults, **given, **more})

    def folds(self, data: GraphData) -> list[int]:
        """The folds to run, from 0."""
        if self.fold == "all":
            return list(range(len(data.folds)))
        if not self.fold.isdecimal() or not 1 <= int(self.fold) <= len(data.folds):
            raise ValueError(f"--fold: expected 1 to {len(data.folds)} or all, found {self.fold!r}")
        return [int(self.fold) - 1]

    def fan_outs(self) -> list[int]:
        words = [word.strip() for word in (self.fan_out or "").split(",")]
        if not all(word.isdecimal() or word == str(ALL) for word in words):
            wanted = f"whole numbers with commas between them, {ALL} for all neighbours"
            raise ValueError(f"--fan-out: expected {wanted}, found {self.fan_out!r}")
        return [int(word) for word in words]


def normalised(data: NodeData, asked: bool | None, console: Console) -> NodeData:
    """The data with each node's features divided by their sum, if that is asked for; by default where none is negative.

    Raises:
        ValueError: it is asked for, and a feature is negative.
    """
    if asked is None and data.negative_node is not None:
        console.print(f"{data.name}: features are taken as they are, for some are negative", markup=False)
        return data
    return data if asked is False else data.row_normalised()


def split(data: NodeData, console: Console) -> NodeData:
    """The data with a random split where they have none, of which one line tells."""
    if len(data.train):
        return data
    data = with_split(data)
    counts = f"{len(data.train)} nodes to train on, {len(data.val)} to validate on, {len(data.test)} to test on"
    console.print(f"{data.name}: no split in the data, so a random one: {counts}", markup=False)
    return data


def node_task(data: NodeData, family: Family, sizes: GNNSizes, loop: GNNLoop) -> tuple[Config, Task]:
    """The task for one graph with a split."""
    if loop.fold != "all":
        raise ValueError(f"--fold is for data of many graphs, and {data.name} is one graph")
    config = sizes.config(family, data.num_features, data.num_classes)
    options = loop.options(family, graphs=False)
    if loop.fan_out is None:
        return config, full_graph_task(config, data, options, loop.seeds, mesh=loop.mesh())
    if loop.devices is not None:
        raise ValueError("--devices is for training on a whole graph, found it together with --fan-out")
    return config, sampled_task(config, data, options, loop.fan_outs(), loop.seeds)


def graph_task(data: GraphData, family: Family, sizes: GNNSizes, loop: GNNLoop) -> tuple[Config, Task]:
    """The task for many graphs, which are dealt into ten folds where they have none."""
    data = data if data.folds else with_folds(data)
    for name, given in (("--fan-out", loop.fan_out), ("--devices", loop.devices)):
        if given is not None:
            raise ValueError(f"{name} is for one graph, and {data.name} has {data.num_graphs}")
    config = sizes.config(family, data.num_features, data.num_classes)
    options = loop.options(family, graphs=True)
    return config, graphs_task(config, data, options, loop.folds(data), loop.seeds)


def gnn(
    *,
    model: Family = "gcn",
    data: str = KARATE,
    sizes: GNNSizes = GNNSizes(),
    loop: GNNLoop = GNNLoop(),
    normalise_features: bool | None = None,
    out: Path | None = None,
    json_file: JsonFile = None,
) -> None:
    """Trains a graph neural network on the nodes of a graph, or on many graphs by cross-validation.

    Args:
        model: GCN, GraphSAGE with the mean, GAT, or GIN.
        data: "karate" (Zachary's karate club, built in), an .npz file with one graph, or a folder with graphs in the GIN text
            format.
        normalise_features: divide the features of each node of a single graph by their sum; by default where no feature is
            negative.
        out: folder for the model: the weights that validate best, of all epochs and all runs; where nothing validates, the last
            ones of the first run. Its subfolder `training` holds the checkpoint that an interrupted run resumes from. Without
            it nothing is written.
    """
    console = human_console(json_file)
    if out is not None:
        check_out(out)
    keep_programs(loop.compile_cache)
    found = read_data(data)
    if isinstance(found, GraphData):
        config, task = graph_task(found, model, sizes, loop)
    else:
        config, task = node_task(split(normalised(found, normalise_features, console), console), model, sizes, loop)
    result = train(task, console, None if out is None else out / "training")
    figures = (graph_figures if isinstance(found, GraphData) else node_figures)(result)
    if out is not None:
        save_gnn(out, config, *best_run(result))
    more = {"epochs_per_s": result.rate, "seconds": result.seconds, **result.ledger.figures(), "chip": chip_name()}
    results = {"config": config_to_json(config), "accuracy": figures, "loss_nats": summary(result.last("loss"))}
    write_json(json_file, {**task.run_fingerprint, "epochs": len(result.curve["step"]), **results, **more})
    print_table(console, accuracy_table(f"{model} on {task.title}", figures))
    if out is not None:
        console.print(f"{out} written", markup=False)


def node_figures(result: TrainResult) -> dict[str, dict[str, Any]]:
    """Accuracies after the last epoch, and at each run's best validation."""
    rows = {"after the last epoch": {part: summary(result.last(part)) for part in PARTS}}
    if validates(result):
        rows["at the best validation"] = {part: summary(at_best_validation(result, part)) for part in PARTS}
    return rows


def graph_figures(result: TrainResult) -> dict[str, dict[str, Any]]:
    """Accuracies after the last epoch, and at the epoch whose mean over the folds is best (the GIN paper's protocol)."""
    means = result.curve["test"].mean(1)
    best = int(means.argmax()) + 1
    rows = {"after the last epoch": len(means), f"at the best epoch of all folds ({best})": best}
    return {name: {part: summary(result.curve[part][epoch - 1]) for part in ("train", "test")} for name, epoch in rows.items()}


def summary(values: np.ndarray) -> dict[str, Any] | None:
    """Mean, standard deviation and each run's accuracy; None where nothing was measured."""
    if np.isnan(values).any():
        return None
    spread = float(values.std(ddof=1)) if len(values) > 1 else None
    return {"mean": float(values.mean()), "std": spread, "runs": [float(value) for value in values]}


def accuracy_table(title: str, figures: dict[str, dict[str, Any]]) -> FigureTable:
    """A line for each epoch that accuracies are of."""
    rows = [{"name": name, **{part: percent(cell) for part, cell in cells.items()}} for name, cells in figures.items()]
    runs = max(len(cell["runs"]) for cells in figures.values() for cell in cells.values() if cell is not None)
    title = f"{title}: accuracy in %{f', mean ± standard deviation of {runs} runs' if runs > 1 else ''}"
    return FigureTable(title, "epoch", {"": rows}, [metric for metric in ACCURACY if metric.name in rows[0]])


def percent(cell: dict[str, Any] | None) -> str | None:
    """An accuracy as the table shows it; None where nothing was measured."""
    if cell is None:
        return None
    return f"{100 * cell['mean']:.2f}" + (f" ± {100 * cell['std']:.2f}" if cell["std"] is not None else "")
