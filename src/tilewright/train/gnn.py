"""Shared parts of the training of graph networks: options, optimizer, loss and results.

Several runs (seeds or folds) train side by side in one program: all arrays of parameters and optimizer state have a leading
dimension of runs. *Weights* are a pair of parameters and running statistics of batch norm.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import Sharding
from jaxtyping import Bool, Float, Int, Shaped

from tilewright.graph.data import GraphData, Kind, NodeData, SparseRows, label_kind
from tilewright.models import gnn
from tilewright.models.gnn import Config
from tilewright.train.checkpoint import fingerprint
from tilewright.train.log import LogOptions, Metrics
from tilewright.train.loop import Step, Task, TrainOptions, TrainResult, descend

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
        keep: number of checkpoints to keep, the last ones.
        checkpoints: folder or URL of the checkpoints; None for a folder in that of the run.
        log: settings of the log.
    """

    epochs: int = 200
    learning_rate: float = 0.01
    weight_decay: float = 5e-4
    halve_every: int = 0
    seed: int = 0
    batch_size: int = 32
    iterations: int = 50
    save_every: int = 50
    keep: int = 1
    checkpoints: str | None = None
    log: LogOptions = field(default_factory=LogOptions)

    ABOVE_ZERO: ClassVar[tuple[str, ...]] = (*TrainOptions.ABOVE_ZERO, "epochs", "iterations")
    AT_LEAST_ZERO: ClassVar[tuple[str, ...]] = (*TrainOptions.AT_LEAST_ZERO, "halve_every")
    MAY_CHANGE: ClassVar[tuple[str, ...]] = (*TrainOptions.MAY_CHANGE, "epochs")


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
        keep=options.keep,
        checkpoints=options.checkpoints,
        log=options.log,
    )


def descend_rows(
    weights: Weights,
    opt_state: Any,
    optimizer: optax.GradientTransformation,
    scores: Callable[[Any, Any], tuple[Array, Any]],
    labels: Shaped[Array, "N *T"],
    counts: Bool[Array, " N"],
) -> tuple[Weights, Any, Metrics, Array]:
    """Takes one step of one run on `mean_loss`.

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


def mean_loss(scores: Float[Array, "N C"], labels: Shaped[Array, "N *T"], counts: Bool[Array, " N"]) -> Float[Array, ""]:
    """Computes the mean loss of the counted rows; other rows may hold any values.

    The loss is the cross-entropy of classes, the mean binary cross-entropy of several labels, or the mean squared error of
    numbers.
    """
    kind = label_kind(labels)
    chosen = jnp.where(counts.reshape(-1, *[1] * (labels.ndim - 1)), labels, 0)
    values = jnp.where(counts[:, None], scores, 0)
    if kind == "class":
        losses = optax.softmax_cross_entropy_with_integer_labels(values, chosen)
    elif kind == "multilabel":
        losses = optax.sigmoid_binary_cross_entropy(values, chosen.astype(jnp.float32)).mean(1)
    else:
        losses = ((values - chosen) ** 2).mean(1)
    return jnp.where(counts, losses, 0).sum() / jnp.maximum(counts.sum(), 1).astype(jnp.float32)


def is_counted(labels: Shaped[Array, "N *T"]) -> Bool[Array, " N"]:
    """Returns the mask of the rows with labels."""
    kind = label_kind(labels)
    present = labels >= 0 if kind != "regression" else ~jnp.isnan(labels)
    return present if kind == "class" else present.all(1)


def tally(scores: Float[Array, "N C"], labels: Shaped[Array, "N *T"], counts: Bool[Array, " N"]) -> Float[Array, "K ..."]:
    """Computes sums over the counted rows from which `score_of_tally` computes the score of several batches."""
    kind = label_kind(labels)
    if kind == "class":
        right = (scores.argmax(1).astype(labels.dtype) == labels) & counts
        return jnp.stack([right.sum(), counts.sum()]).astype(jnp.float32)
    if kind == "multilabel":
        positive, chosen = (labels > 0) & counts[:, None], (scores > 0) & counts[:, None]
        return jnp.stack([2 * (positive & chosen).sum(), positive.sum() + chosen.sum()]).astype(jnp.float32)
    values = jnp.where(counts[:, None], labels, 0)
    errors = jnp.where(counts[:, None], scores - values, 0)
    number = jnp.full(values.shape[1], counts.sum()).astype(jnp.float32)
    return jnp.stack([number, values.sum(0), (values**2).sum(0), (errors**2).sum(0)])


def score_of_tally(kind: Kind, tally: Any) -> Any:
    """Computes the accuracy, the micro-F1 of several labels, or the mean R² of numbers; NaN if it is undefined."""
    if kind == "regression":
        number, total, squares, errors = tally
        return (1 - errors / (squares - total**2 / number)).mean()
    return tally[0] / tally[1]


def accuracy(scores: Float[Array, "N C"], labels: Shaped[Array, "N *T"], counts: Bool[Array, " N"]) -> Float[Array, ""]:
    """Computes the score of the counted rows, see `score_of_tally`; NaN without counted rows."""
    return score_of_tally(label_kind(labels), tally(scores, labels, counts))


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
