"""Shared parts of the training of graph networks: options, optimizer, loss and results.

Several runs (seeds or folds) train side by side in one program: all arrays of parameters and optimizer state have a leading
dimension of runs. *Weights* are a pair of parameters and running statistics of batch norm.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import Sharding
from jaxtyping import Bool, Float, Int

from tilewright.graph.data import GraphData, NodeData, SparseRows
from tilewright.models import gnn
from tilewright.models.gnn import Config
from tilewright.train.checkpoint import fingerprint
from tilewright.train.loop import Metrics, Step, Task, TrainOptions, TrainResult, descend

PARTS = ("train", "val", "test")

Weights = tuple[Any, Any]
"""Parameters and running statistics of batch norm."""


@dataclass(frozen=True)
class GNNOptions(TrainOptions):
    """Options of the training of graph networks.

    Attributes:
        epochs: passes over the training nodes; for graph classification, rounds of `iterations` steps.
        learning_rate: learning rate of Adam.
        weight_decay: L2 penalty of the matrices, for GCN of the first layer only.
        halve_every: epochs between halvings of the learning rate; 0 for never.
        seed: seed of the first run; later runs have the next seeds.
        batch_size: nodes per step of sampled training, or graphs per step.
        iterations: steps per epoch of graph classification.
        save_every: epochs between checkpoints.
    """

    epochs: int = 200
    learning_rate: float = 0.01
    weight_decay: float = 5e-4
    halve_every: int = 0
    seed: int = 0
    batch_size: int = 32
    iterations: int = 50
    save_every: int = 50

    ABOVE_ZERO: ClassVar[tuple[str, ...]] = (*TrainOptions.ABOVE_ZERO, "epochs", "iterations")
    AT_LEAST_ZERO: ClassVar[tuple[str, ...]] = (*TrainOptions.AT_LEAST_ZERO, "halve_every")
    MAY_CHANGE: ClassVar[tuple[str, ...]] = ("save_every", "epochs")


def content_fingerprint(data: NodeData | GraphData) -> str:
    """Returns a digest of the data: edges with weights and features, features of nodes, labels and split."""
    features = data.features
    parts = vars(features) if isinstance(features, SparseRows) else features
    content = {field.name: getattr(data, field.name) for field in fields(data) if field.name != "name"}
    content = {name: value for name, value in content.items() if value is not None}
    return fingerprint({**content, "features": parts})


def gnn_run_fingerprint(data: NodeData | GraphData, config: Config, options: GNNOptions, **more: object) -> dict[str, Any]:
    """Returns the fingerprint of the runs, which a checkpoint must match."""
    settings = {**asdict(config), **options.run_fingerprint(), "data": data.name, "content": content_fingerprint(data)}
    return {"family": type(config).__name__, **settings, **more}


def check_edge_features(config: Config, data: NodeData | GraphData) -> None:
    """Raises a `ValueError` if the model expects features of edges of another width than the data's, or none."""
    expected = getattr(config, "edge_features", 0)
    if expected != data.num_edge_features:
        name = type(config).__name__
        raise ValueError(f"expected {expected} features of edges for {name}, found {data.num_edge_features} in {data.name}")


def mean_log_degree(data: NodeData | GraphData) -> float:
    """Computes the mean of `log(degree + 1)` over all nodes, by which PNA scales."""
    destinations = data.edge_index[1]
    if isinstance(data, GraphData):
        destinations = destinations + np.repeat(data.node_offsets[:-1], np.diff(data.edge_offsets))
    return float(np.log1p(np.bincount(destinations, minlength=data.num_nodes)).mean()) or 1.0


def over_runs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Maps a function over the leading dimension of all arguments: sequentially on a CPU, else vectorised."""
    if jax.default_backend() == "cpu":
        return lambda *arguments: jax.lax.map(lambda each: function(*each), arguments)
    return jax.vmap(function)


def make_optimizer(config: Config, options: GNNOptions, steps_per_epoch: int) -> optax.GradientTransformation:
    """Returns Adam with an L2 penalty in the gradient, as in the papers (not AdamW)."""

    def decayed(params: Any) -> Any:
        mask = jax.tree.map(lambda value: value.ndim >= 2, params)
        off = jax.tree.map(lambda _: False, mask)
        return replace(off, layers=(mask.layers[0], *off.layers[1:])) if config.decays_first else mask

    rate: optax.ScalarOrSchedule = options.learning_rate
    if options.halve_every:
        rate = optax.exponential_decay(rate, options.halve_every * steps_per_epoch, 0.5, staircase=True)
    return optax.chain(optax.add_decayed_weights(options.weight_decay, decayed), optax.adam(rate))


def start_runs(
    config: Config, optimizer: optax.GradientTransformation, seeds: Int[np.ndarray, " runs"], sharding: Sharding | None = None
) -> tuple[Weights, Any]:
    """Initialises the weights and the optimizer state of all runs."""

    def start_run(seed: Array) -> tuple[Weights, Any]:
        weights: Any = gnn.init(config, jax.random.key(seed))
        return weights, optimizer.init(weights[0])

    return jax.jit(jax.vmap(start_run), out_shardings=sharding)(jnp.asarray(seeds))


def runs_task(
    options: GNNOptions,
    run_fingerprint: dict[str, Any],
    starting: Callable[[], tuple[Weights, Any]],
    seeds: Int[np.ndarray, " runs"],
    step: Step,
    batches: Callable[[int], Iterator[Any]],
    evaluate: Callable[[Any, int], Metrics],
    steps_per_epoch: int = 1,
    score: str | None = "val",
) -> Task:
    """Builds the task of several runs side by side, evaluated after each epoch; see `Task` for the arguments."""
    return Task(
        title=run_fingerprint["data"],
        run_fingerprint=run_fingerprint,
        init=starting,
        step=step,
        batches=batches,
        evaluate=evaluate,
        steps=options.epochs * steps_per_epoch,
        evaluate_every=steps_per_epoch,
        save_every=options.save_every * steps_per_epoch,
        seed=seeds,
        progress=("epochs", 1 / steps_per_epoch),
        score=score,
    )


def descend_rows(
    weights: Weights,
    opt_state: Any,
    optimizer: optax.GradientTransformation,
    scores: Callable[[Any, Any], tuple[Array, Any]],
    labels: Int[Array, " N"],
    counts: Bool[Array, " N"],
) -> tuple[Weights, Any, Metrics, Array]:
    """Takes one step of one run on the mean cross-entropy of the counted rows.

    Args:
        weights: weights before the step.
        opt_state: state of the optimizer before the step.
        optimizer: the optimizer.
        scores: `scores(params, statistics) -> (scores, statistics)`, in training mode.
        labels: label of each row.
        counts: mask of the rows in the loss.

    Returns:
        weights and optimizer state after the step, metrics with the loss, and the scores before the step.
    """
    params, statistics = weights

    def loss(params: Any) -> tuple[Array, tuple[Any, Array]]:
        values, after = scores(params, statistics)
        return mean_loss(values, labels, counts), (after, values)

    params, opt_state, metrics, (statistics, values) = descend(loss, optimizer, params, opt_state)
    return (params, statistics), opt_state, metrics, values


def mean_loss(scores: Float[Array, "N C"], labels: Int[Array, " N"], counts: Bool[Array, " N"]) -> Float[Array, ""]:
    """Computes the mean cross-entropy of the counted rows; other rows may hold any values."""
    chosen = jnp.where(counts, labels, 0)
    losses = optax.softmax_cross_entropy_with_integer_labels(jnp.where(counts[:, None], scores, 0), chosen)
    return jnp.where(counts, losses, 0).sum() / jnp.maximum(counts.sum(), 1).astype(jnp.float32)


def accuracy(scores: Float[Array, "N C"], labels: Int[Array, " N"], counts: Bool[Array, " N"]) -> Float[Array, ""]:
    """Computes the share of the counted rows with the largest score at the label; NaN without counted rows."""
    right = (scores.argmax(1).astype(labels.dtype) == labels) & counts
    return right.sum().astype(jnp.float32) / counts.sum().astype(jnp.float32)


def validates(result: TrainResult) -> bool:
    """Returns True if the data has validation nodes."""
    return "val" in result.curve and not np.isnan(result.curve["val"]).any()


def metric_at_best_validation(result: TrainResult, part: str) -> Float[np.ndarray, " runs"]:
    """Returns the accuracy of each run at its first epoch of highest validation accuracy, the epoch of its weights."""
    best = result.curve["val"].argmax(0)
    return result.curve[part][best, np.arange(len(best))]


def best_run(result: TrainResult) -> Weights:
    """Returns the weights of the run with the best validation accuracy; without validation nodes, of the first run."""
    n = int(result.curve["val"].max(0).argmax()) if validates(result) else 0
    return jax.tree.map(lambda leaf: leaf[n], result.params)
