"""Losses of predictions over a mesh: "fsdp" shards batches and weights, "tp" shards layers and the residual stream, "dp"
shards batches over replicas of the weights.

Weights, gradients and optimizer state are sharded by the model's declared axes. There are two strategies. With a plan,
`parallel/fully_sharded.py` schedules the collectives of each layer's weights and gradients, forwards and backwards, so that the
loss has a gradient of its own. Without a plan, sharding constraints place the residual stream, and XLA's partitioner inserts
the collectives (GSPMD): the baseline for comparisons.

Legend: B sequences of a batch, T positions, R tokens of a group of "fsdp" (its sequences times T), M tokens per device, H
hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float

from tilewright.kernels.operations import Norm, Operations, Transposed, softcapped
from tilewright.models import decoder
from tilewright.models.decoder import DecoderParams
from tilewright.models.stack import Rows, SingleDevice
from tilewright.parallel import rings, vocabulary
from tilewright.parallel.exchanges import Exchange, FullyShardedPlan, array_placement, gathered_weights
from tilewright.parallel.experts import with_local_experts
from tilewright.parallel.fully_sharded import run_layers
from tilewright.parallel.sharding import GROUPED_AXES
from tilewright.train.balance import balanced, local_share, watching
from tilewright.train.predictions import Predicted, Predictor
from tilewright.train.step import DATA, EVERYTHING, Loss, TrainingPlacement, batch_spec


def prediction_loss(model: Predictor, ops: Operations, placement: TrainingPlacement) -> Loss:
    """Returns the loss of a model's predictions by the strategy of the placement; equal to `Predictor.loss`.

    Raises:
        ValueError: the mesh does not divide an array of the model, or the plan cannot run its layers; when called, the mesh
            does not divide the batch.
    """
    if placement.plan is not None:
        return explicit_loss(model, ops, placement, placement.plan)
    if placement.mesh is None and placement.remat == EVERYTHING:
        return lambda params, frozen, predicted: model.loss(ops, params, predicted)
    if balanced(model.sizes) is not None:
        raise ValueError(
            "expected one device that saves all activations, or explicit collectives, where experts have a balance loss; found "
            f"{placement.remat if placement.mesh is None else 'the auto strategy'}"
        )
    layers = CheckpointedLayers(placement.remat, placement.mesh)
    if placement.mesh is None:
        return lambda params, frozen, predicted: model.loss(ops, params, predicted, layers)
    return partial(partitioned_loss, model, ops, layers)


def explicit_loss(model: Predictor, ops: Operations, placement: TrainingPlacement, plan: FullyShardedPlan) -> Loss:
    """Returns the loss of predictions over a mesh with explicit collectives, which is computed together with its gradient."""
    plan.check(model.sizes.num_layers, balanced(model.sizes) is not None)
    mesh = placement.mesh
    assert mesh is not None, "a plan is for a mesh"
    axes = tuple(mesh.shape)
    specs = jax.tree.map(lambda sharding: sharding.spec, placement.shardings(model.specs))
    local = partial(_local_loss, model, ops, plan, mesh, specs)

    def value(params: DecoderParams, predicted: Predicted) -> Array:
        return jax.lax.psum(local(params, predicted), axes)

    def value_and_gradient(params: DecoderParams, predicted: Predicted) -> tuple[Array, DecoderParams]:
        share, gradient = jax.value_and_grad(local)(params, predicted)
        return jax.lax.psum(share, axes), gradient

    def over_mesh(inside: Callable[..., Any], results: Any) -> Callable[[Any, Predicted], Any]:
        inputs = (specs, batch_spec(mesh))
        return jax.shard_map(inside, mesh=mesh, in_specs=inputs, out_specs=results, check_vma=False)

    @jax.custom_vjp
    def mean(params: Any, predicted: Predicted) -> Array:
        return over_mesh(value, PartitionSpec())(params, predicted)

    def forward(params: Any, predicted: Predicted) -> tuple[Array, Any]:
        return over_mesh(value_and_gradient, (PartitionSpec(), specs))(params, predicted)

    def backward(gradient: Any, cotangent: Array) -> tuple[Any, None]:
        return jax.tree.map(lambda g: cotangent * g, gradient), None

    mean.defvjp(forward, backward)

    def loss(params: Any, frozen: Any, predicted: Predicted) -> tuple[Array, Array]:
        placement.check_batch(*predicted.inputs.shape)
        total = jnp.sum(predicted.counts)
        return mean(params, predicted._replace(weights=predicted.weights / jnp.maximum(total, 1.0))), total

    return loss


def _local_loss(
    model: Predictor,
    ops: Operations,
    plan: FullyShardedPlan,
    mesh: Mesh,
    specs: DecoderParams,
    params: DecoderParams,
    predicted: Predicted,
) -> Float[Array, ""]:
    """Computes a device's share of the loss; the shares of all devices sum to the loss."""
    config = model.sizes
    axes = tuple(mesh.shape)
    ops = with_local_experts(ops)
    exchange = Exchange(plan, DATA, GROUPED_AXES)
    placements: DecoderParams = jax.tree.map(
        lambda spec: array_placement(spec, axes, DATA), specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec)
    )
    inputs = predicted.inputs
    table = gathered_weights(exchange, placements.embed, params.embed, "embedding")
    final = gathered_weights(exchange, placements.norm, params.norm, "final_norm")
    x = decoder.scaled(config, _embedded(ops, plan, table, inputs))
    rows = Rows(config.rope_tables(predicted.places), predicted.attn_metadata)
    (x, load), head = run_layers(
        exchange,
        decoder.stack_of(config, ops, params.layers, model.attend),
        decoder.split_layer,
        decoder.join_layer,
        placements.layers,
        x,
        rows,
        (*inputs.shape, config.hidden_size),
        params.head,
        placements.head,
        *watching(config),
    )
    x = jax.lax.all_gather(ops.rms_norm(x, *Norm(final, config.rms_norm_eps)), GROUPED_AXES, tiled=True)
    if model.predicting is not None:
        x = model.predicting(x.reshape(*inputs.shape, -1)).reshape(x.shape)

    def logits(x: Array, head: Any) -> Array:
        logits = ops.linear(x, Transposed(head) if params.head is None else head, jnp.float32)
        return softcapped(logits, config.logit_softcap)

    labels = predicted.labels.reshape(-1)
    weights = predicted.weights.reshape(-1)
    loss = vocabulary.cross_entropy(logits, GROUPED_AXES, x, table if params.head is None else head, labels, weights)
    return loss + local_share(config, load, axes)


def _embedded(ops: Operations, plan: FullyShardedPlan, table: Float[Array, "W H"], tokens: Array) -> Float[Array, "M H"]:
    """Embeds the tokens with a table that is sharded along the vocabulary; returns this device's tokens of the stream."""
    local = tokens.reshape(-1) - jax.lax.axis_index(GROUPED_AXES) * len(table)
    is_local = (local >= 0) & (local < len(table))
    found = jnp.where(is_local[:, None], _gathered(ops.gather_rows, table, jnp.clip(local, 0, len(table) - 1)), 0)
    if plan.activations == "ring":
        return rings.reduce_scatter(found, GROUPED_AXES)
    return jax.lax.psum_scatter(found, GROUPED_AXES, tiled=True)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gathered(gather: Callable[[Array, Array], Array], table: Array, index: Array) -> Array:
    """Gathers rows of a table with a float32 gradient, since a frequent token sums many terms."""
    return gather(table, index)


def _gathered_forward(gather: Callable[[Array, Array], Array], table: Array, index: Array) -> tuple[Array, tuple[Array, Array]]:
    return gather(table, index), (index, table)


def _gathered_backward(
    gather: Callable[[Array, Array], Array], residuals: tuple[Array, Array], cotangent: Array
) -> tuple[Array, None]:
    index, table = residuals
    total = jnp.zeros(table.shape, jnp.float32).at[index].add(cotangent.astype(jnp.float32))
    return total.astype(table.dtype), None


_gathered.defvjp(_gathered_forward, _gathered_backward)


@dataclass(frozen=True)
class CheckpointedLayers(SingleDevice):
    """Schedule of one device or of XLA's partitioner whose layers save some activations and compute the others again.

    Over a mesh the residual stream is sharded along sequences and positions between sublayers.

    Attributes:
        remat: see `TrainingPlacement`.
        mesh: mesh; None for one device.
    """

    remat: str
    mesh: Mesh | None

    def placed(self, x: Float[Array, "B T H"], positions: Any = GROUPED_AXES) -> Float[Array, "B T H"]:
        if self.mesh is None:
            return x
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, batch_spec(self.mesh, positions)))

    def run(
        self, stack: Any, x: Float[Array, "B T H"], rows: Any, caches: tuple[Any, ...], taps: tuple[int, ...]
    ) -> tuple[Array, tuple[Array, ...], tuple[Any, ...]]:
        """Runs the layers; see `models.stack.Strategy.run`. Returns no taps, and `caches` unchanged."""
        policy = getattr(jax.checkpoint_policies, self.remat)

        def run_layer(n: int, layer: Any, x: Array, rows: Any) -> Array:
            ops = stack.ops
            with jax.named_scope(f"layer_{n}/attention"):
                out, _ = stack.attend(ops, layer, stack.project(ops, layer, x), rows, None)
                x = self.placed(stack.output(ops, layer, out, x))
            with jax.named_scope(f"layer_{n}/mlp"):
                return self.placed(stack.mlp(ops, layer, x, x))

        x = self.placed(x)
        for n, layer in enumerate(stack.layers):
            x = jax.checkpoint(partial(run_layer, n), policy=policy)(layer, x, rows)
        return x, (), caches


def partitioned_loss(
    model: Predictor, ops: Operations, layers: CheckpointedLayers, params: DecoderParams, frozen: Any, predicted: Predicted
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Computes the loss of predictions over a mesh whose collectives XLA's partitioner places; see `Predictor.loss`.

    The logits are whole and sharded; the partitioner cannot shard a loss in blocks.
    """
    config = model.sizes
    hidden = model.hidden(ops, params, predicted, layers)
    logits = decoder.logits(config, ops, params, layers.placed(hidden, None))
    is_label = predicted.labels[..., None] == jnp.arange(logits.shape[-1])
    losses = jax.nn.logsumexp(logits, axis=-1) - jnp.sum(jnp.where(is_label, logits, 0.0), axis=-1)
    total = jnp.sum(predicted.counts)
    return jnp.sum(losses * predicted.weights) / jnp.maximum(total, 1.0), total
