"""Parts that all training of graph networks shares: options, optimiser, loss, and what the runs reached.

Several runs (seeds, or folds) train side by side in one program: every array of parameters and optimiser has a leading dim of
runs. Parameters are trained with the running statistics of batch norm beside them, as one pair: *weights*.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
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
from tilewright.models.gnn import Config, GCNConfig
from tilewright.train.checkpoint import fingerprint
from tilewright.train.loop import Metrics, Step, Task, TrainOptions, TrainResult, descend

PARTS = ("train", "val", "test")

Weights = tuple[Any, Any]
"""Parameters, and running statistics of batch norm."""


@dataclass(frozen=True)
class GNNOptions(TrainOptions):
    """Training options of graph networks; the sizes of the model stand in its configuration.

    Attributes:
        epochs: passes over the training nodes; of graph classification, rounds of `iterations` steps.
        learning_rate: of Adam.
        weight_decay: added to the gradient of the matrices (L2), of GCN's first layer only.
        halve_every: epochs after which the learning rate is halved, again and again; 0 for never.
        seed: of the first run; the others follow it.
        batch_size: nodes (sampled) or graphs in a step.
        iterations: steps in an epoch of graph classification.
        save_every: epochs from one checkpoint to the next.
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
    """Digest of all that a run learns from and is measured on: edges, weights, features, labels and the parts."""
    features = data.features
    parts = vars(features) if isinstance(features, SparseRows) else features
    content = {name: value for name, value in vars(data).items() if name != "name" and value is not None}
    return fingerprint({**content, "features": parts})


def run_fingerprint_of(data: NodeData | GraphData, config: Config, options: GNNOptions, **more: object) -> dict[str, Any]:
    """Fingerprint of the runs: what a checkpoint must agree with."""
    same = {**asdict(config), **options.run_fingerprint(), "data": data.name, "content": content_fingerprint(data)}
    return {"family": type(config).__name__, **same, **more}


def over_runs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Maps over the leading dim of all arguments: one run after another on a CPU, whose kernels fill it, else all at once."""
    if jax.default_backend() == "cpu":
        return lambda *arguments: jax.lax.map(lambda each: function(*each), arguments)
    return jax.vmap(function)


def make_optimizer(config: Config, options: GNNOptions, steps_per_epoch: int) -> optax.GradientTransformation:
    """Adam on the gradient plus the decayed weights, as the papers' L2 term is (and not AdamW)."""

    def decayed(params: Any) -> Any:
        mask = jax.tree.map(lambda value: value.ndim >= 2, params)
        off = jax.tree.map(lambda _: False, mask)
        return replace(off, layers=(mask.layers[0], *off.layers[1:])) if isinstance(config, GCNConfig) else mask

    rate: optax.ScalarOrSchedule = options.learning_rate
    if options.halve_every:
        rate = optax.exponential_decay(rate, options.halve_every * steps_per_epoch, 0.5, staircase=True)
    return optax.chain(optax.add_decayed_weights(options.weight_decay, decayed), optax.adam(rate))


def start_runs(
    config: Config, optimizer: optax.GradientTransformation, seeds: Int[np.ndarray, " runs"], sharding: Sharding | None = None
) -> tuple[Weights, Any]:
    """Weights and optimiser of all runs before training."""

    def one(seed: Array) -> tuple[Weights, Any]:
        made: Any = gnn.init(config, jax.random.key(seed))
        return made, optimizer.init(made[0])

    return jax.jit(jax.vmap(one), out_shardings=sharding)(jnp.asarray(seeds))


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
    """The task of several runs side by side, which are evaluated after every epoch; see `Task` for the arguments."""
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
    """One step of one run on the mean cross-entropy of the rows that count.

    Args:
        scores: `scores(params, statistics) -> (scores, statistics)`, in training.

    Returns:
        weights and optimiser afterwards, metrics with the loss, and the scores before.
    """
    params, statistics = weights

    def loss_of(params: Any) -> tuple[Array, tuple[Any, Array]]:
        values, after = scores(params, statistics)
        return mean_loss(values, labels, counts), (after, values)

    params, opt_state, metrics, (statistics, values) = descend(loss_of, optimizer, params, opt_state)
    return (params, statistics), opt_state, metrics, values


def mean_loss(scores: Float[Array, "N C"], labels: Int[Array, " N"], counts: Bool[Array, " N"]) -> Float[Array, ""]:
    """The mean cross-entropy of the rows that count; padding rows may hold anything."""
    chosen = jnp.where(counts, labels, 0)
    losses = optax.softmax_cross_entropy_with_integer_labels(jnp.where(counts[:, None], scores, 0), chosen)
    return jnp.where(counts, losses, 0).sum() / jnp.maximum(counts.sum(), 1).astype(jnp.float32)


def accuracy(scores: Float[Array, "N C"], labels: Int[Array, " N"], counts: Bool[Array, " N"]) -> Float[Array, ""]:
    """The share of the rows that count whose largest score is the label's; NaN where none counts."""
    right = (scores.argmax(1).astype(labels.dtype) == labels) & counts
    return right.sum().astype(jnp.float32) / counts.sum().astype(jnp.float32)


def validates(result: TrainResult) -> bool:
    """True if there was anything to validate on."""
    return "val" in result.curve and not np.isnan(result.curve["val"]).any()


def at_best_validation(result: TrainResult, part: str) -> Float[np.ndarray, " runs"]:
    """Accuracy of each run at its first epoch of the highest validation accuracy, which is that of its weights."""
    best = result.curve["val"].argmax(0)
    return result.curve[part][best, np.arange(len(best))]


def best_run(result: TrainResult) -> Weights:
    """The weights of the run that validates best, from its best epoch; else of the first run, from its last one."""
    n = int(result.curve["val"].max(0).argmax()) if validates(result) else 0
    return jax.tree.map(lambda leaf: leaf[n], result.params)
