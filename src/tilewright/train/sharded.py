"""Train step of language models over a mesh: "fsdp" shards batches and weights, "tp" shards layers and the residual stream.

Weights, gradients and optimizer state are sharded by the model's declared axes. `parallel/fully_sharded.py` schedules the
collectives of each layer's weights and gradients. The optimizer computes on the shards; XLA sums the norms for clipping.

Legend: B sequences of a batch, T positions, R tokens of a group of "fsdp" (its sequences times T), M tokens per device.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Bool, Float, Int

from tilewright.kernels.operations import Norm, Operations, Transposed, softcapped
from tilewright.models import decoder
from tilewright.models.decoder import DecoderConfig, DecoderParams
from tilewright.models.params import ArraySpec, abstract
from tilewright.models.stack import Rows
from tilewright.parallel import rings, vocabulary
from tilewright.parallel.exchanges import Exchange, FullyShardedPlan, array_placement, gathered_weights
from tilewright.parallel.experts import with_local_experts
from tilewright.parallel.fully_sharded import run_layers
from tilewright.parallel.mesh import make_mesh
from tilewright.parallel.sharding import FULLY_SHARDED_GROUPED, GROUPED, GROUPED_AXES, grouped_mesh, partition
from tilewright.runtime.placement import divided_sizes
from tilewright.train.balance import balanced, local_share, watching
from tilewright.train.finite import FINITE, Finite, finite
from tilewright.train.loop import WEIGHT, Metrics, Step, Task

DATA = "fsdp"
TENSOR = "tp"
Gradient = Callable[[Any, Array, Array], tuple[Array, Any]]
"""`gradient(params, tokens [B, T + 1], in_loss) -> (mean loss in nats, gradient)` on sharded arrays."""


@dataclass(frozen=True)
class ShardedSetup:
    """Model, mesh and schedule of sharded training.

    Attributes:
        config: configuration of the model.
        ops: operations.
        mesh: mesh of `training_mesh`.
        plan: schedule of the collectives of weights and gradients.
        accumulate: number of parts of a batch, which run one after another; their gradients are summed in float32.
        attend: attention of the model.
        predicting: maps hidden states `[B, T, H]` to the states that predict each position; None for the identity.
    """

    config: DecoderConfig
    ops: Operations
    mesh: Mesh
    plan: FullyShardedPlan = field(default_factory=FullyShardedPlan)
    accumulate: int = 1
    attend: decoder.Attend = decoder.causal_attend
    predicting: Callable[[Array], Array] | None = None

    def __post_init__(self) -> None:
        self.plan.check(self.config.num_layers, balanced(self.config) is not None)
        if self.accumulate < 1:
            raise ValueError(f"expected a batch in at least 1 part, found {self.accumulate}")

    @property
    def specs(self) -> DecoderParams:
        """Partition of each array."""
        return jax.tree.map(lambda sharding: sharding.spec, self.shardings)

    @property
    def shardings(self) -> DecoderParams:
        return model_shardings(self.mesh, decoder.declare(self.config))

    @property
    def batch_sharding(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(DATA))

    def local_rows(self, batch: int) -> Int[np.ndarray, " R"]:
        """Returns the rows of a batch of `batch` rows that this process's devices compute."""
        parts = self.batch_sharding.addressable_devices_indices_map((batch,)).values()
        return np.concatenate([np.arange(*span) for span in sorted({part[0].indices(batch) for part in parts if part})])

    def check_batch(self, shape: tuple[int, ...]) -> None:
        """Raises a `ValueError` if the mesh does not divide a batch of tokens `[B, T + 1]`."""
        parts = self.mesh.shape[DATA] * self.accumulate
        tensor = self.mesh.size // self.mesh.shape[DATA]
        if shape[0] % parts:
            raise ValueError(
                f"expected a batch that fsdp={self.mesh.shape[DATA]} × {self.accumulate} parts divide, found {shape[0]}"
            )
        rows = shape[0] // parts * (shape[1] - 1)
        if rows % tensor:
            raise ValueError(
                f"expected tokens per group of fsdp (sequences × positions) that tp={tensor} divides, found {rows}"
            )


class Predicted(NamedTuple):
    """Predictions of a batch of sequences.

    Attributes:
        inputs: input tokens, `[B, T]`.
        labels: token to predict at each position, `[B, T]`.
        weights: weight of each prediction, so that the weighted losses sum to the mean, `[B, T]`.
        attn_metadata: metadata of each row for `ShardedSetup.attend`, `[B, ...]`; None without.
        positions: rotary position of each input, `[B, T]`; None for 0 to T - 1.
    """

    inputs: Any
    labels: Any
    weights: Any
    attn_metadata: Any = None
    positions: Any = None

    @property
    def places(self) -> Int[Array, "B T"]:
        """Rotary positions of the inputs."""
        if self.positions is not None:
            return self.positions
        return jnp.broadcast_to(jnp.arange(self.inputs.shape[1]), self.inputs.shape)


def next_tokens(tokens: Int[Array, "B T1"], in_loss: Bool[Array, "B T1"]) -> tuple[Predicted, Float[Array, ""]]:
    """Returns next-token predictions, as in `lm.next_token_loss`, and the number of predicted tokens."""
    weights = in_loss[:, 1:].astype(jnp.float32)
    total = jnp.sum(weights)
    return Predicted(tokens[:, :-1], tokens[:, 1:], weights / jnp.maximum(total, 1.0)), total


def is_partition(leaf: Any) -> bool:
    return isinstance(leaf, PartitionSpec)


def model_shardings(mesh: Mesh, specs: DecoderParams) -> DecoderParams:
    """Returns the shardings of declared arrays: matrices along both axes, norms and biases along "tp" only."""

    def sharding(spec: ArraySpec) -> NamedSharding:
        rules = FULLY_SHARDED_GROUPED if len(spec.shape) > 1 else GROUPED
        return NamedSharding(mesh, partition(spec, mesh.shape, rules))

    return jax.tree.map(sharding, specs)


def data_mesh(axes: Mapping[str, int | None], devices: Any = None) -> Mesh:
    """Builds a mesh of "fsdp" and "tp"; an absent axis has one device.

    Raises:
        ValueError: an unknown axis, or sizes that do not fit the devices (see `make_mesh`).
    """
    if unknown := sorted(set(axes) - {DATA, TENSOR}):
        raise ValueError(f"expected the axes {DATA} and {TENSOR}, found {', '.join(unknown)}")
    return make_mesh({DATA: axes.get(DATA, 1), TENSOR: axes.get(TENSOR, 1)}, devices)


def training_mesh(axes: Mapping[str, int | None], config: DecoderConfig, devices: Any = None) -> Mesh:
    """Builds a mesh of "fsdp" and "tp" for a model; an absent axis has one device.

    Raises:
        ValueError: an unknown axis, or sizes that do not fit the devices (see `make_mesh`) or the model (see `grouped_mesh`).
    """
    mesh = data_mesh(axes, devices)
    if config.hidden_size % mesh.shape[DATA]:
        raise ValueError(f"expected fsdp that divides the hidden size {config.hidden_size}, found {mesh.shape[DATA]}")
    return grouped_mesh(mesh, TENSOR, **divided_sizes(config, vocabulary=config.vocab_size))


def sharded_gradient(setup: ShardedSetup) -> Gradient:
    """Returns a function for the mean loss of a batch and its gradient, equal to `lm.next_token_loss` on one device.

    Raises:
        ValueError: the mesh does not divide an array of the model; when called, the mesh does not divide the batch.
    """
    gradient = predicted_gradient(setup)
    return lambda params, tokens, in_loss: gradient(params, next_tokens(tokens, in_loss)[0])


def predicted_gradient(setup: ShardedSetup) -> Callable[[Any, Predicted], tuple[Array, Any]]:
    """Returns a function for the mean loss and gradient of any predictions, over the mesh."""
    inside = partial(_local_gradient, setup)
    specs = setup.specs

    def gradient(params: Any, predicted: Predicted) -> tuple[Array, Any]:
        return _shard_mapped(setup, inside, (PartitionSpec(), specs))(params, predicted)

    return gradient


def sharded_loss(setup: ShardedSetup) -> Callable[[Any, Predicted], Array]:
    """Returns a function for the loss of a batch, for evaluation; the batch has one part."""
    setup = replace(setup, accumulate=1)

    def inside(params: DecoderParams, predicted: Predicted) -> Array:
        return jax.lax.psum(_local_loss(setup, params, predicted), tuple(setup.mesh.shape))

    return lambda params, predicted: _shard_mapped(setup, inside, PartitionSpec())(params, predicted)


def _shard_mapped(setup: ShardedSetup, inside: Callable[..., Any], results: Any) -> Callable[[Any, Predicted], Any]:
    """Wraps a function of a device's shards of parameters and batch in `shard_map`."""

    def run(params: Any, predicted: Predicted) -> Any:
        rows, length = predicted.inputs.shape
        setup.check_batch((rows, length + 1))
        specs = (setup.specs, PartitionSpec(DATA))
        return jax.shard_map(inside, mesh=setup.mesh, in_specs=specs, out_specs=results, check_vma=False)(params, predicted)

    return run


def _local_gradient(setup: ShardedSetup, params: DecoderParams, predicted: Predicted) -> tuple[Array, DecoderParams]:
    """Computes the loss of all devices, and the gradient of a device's shards."""
    axes = tuple(setup.mesh.shape)

    def part(predicted: Predicted) -> tuple[Array, DecoderParams]:
        return jax.value_and_grad(partial(_local_loss, setup))(params, predicted)

    if setup.accumulate == 1:
        value, gradient = part(predicted)
        return jax.lax.psum(value, axes), gradient

    def add(sums: Any, predicted: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, part(predicted)), None

    parts = jax.tree.map(lambda x: x.reshape(setup.accumulate, -1, *x.shape[1:]), predicted)
    start = (jnp.float32(0), jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), params))
    (value, gradient), _ = jax.lax.scan(add, start, parts)
    return jax.lax.psum(value, axes), gradient


def _local_loss(setup: ShardedSetup, params: DecoderParams, predicted: Predicted) -> Float[Array, ""]:
    """Computes a device's share of the loss; the shares of all devices sum to the loss."""
    config = setup.config
    ops = with_local_experts(setup.ops)
    plan = setup.plan
    exchange = Exchange(plan, DATA, GROUPED_AXES)
    placements: DecoderParams = jax.tree.map(
        lambda spec: array_placement(spec, tuple(setup.mesh.shape), DATA), setup.specs, is_leaf=is_partition
    )
    inputs = predicted.inputs
    table = gathered_weights(exchange, placements.embed, params.embed, "embedding")
    final = gathered_weights(exchange, placements.norm, params.norm, "final_norm")
    x = decoder.scaled(config, _embedded(ops, plan, table, inputs))
    rows = Rows(config.rope_tables(predicted.places), predicted.attn_metadata)
    (x, load), head = run_layers(
        exchange,
        decoder.stack_of(config, ops, params.layers, setup.attend),
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
    if setup.predicting is not None:
        x = setup.predicting(x.reshape(*inputs.shape, -1)).reshape(x.shape)

    def logits(x: Array, head: Any) -> Array:
        logits = ops.linear(x, Transposed(head) if params.head is None else head, jnp.float32)
        return softcapped(logits, config.logit_softcap)

    labels = predicted.labels.reshape(-1)
    weights = predicted.weights.reshape(-1)
    loss = vocabulary.cross_entropy(logits, GROUPED_AXES, x, table if params.head is None else head, labels, weights)
    # The balancing loss of a batch in parts is the mean of the parts'.
    return loss + local_share(config, load, tuple(setup.mesh.shape)) / setup.accumulate


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


def state_shardings(setup: ShardedSetup, optimizer: optax.GradientTransformation) -> Any:
    """Returns the shardings of the optimizer state: an array like its parameter, counters replicated.

    A part of the state belongs to the parameter whose path is a suffix of its path, since optimizers keep the parameters'
    structure.
    """
    return places_of_state(abstract(decoder.declare(setup.config), jnp.float32, setup.shardings), setup.mesh, optimizer)


def places_of_state(params: Any, mesh: Mesh, optimizer: optax.GradientTransformation) -> Any:
    """Returns the shardings of the optimizer state of any sharded parameters; see `state_shardings`."""
    by_path = {path: (param.shape, param.sharding) for path, param in jax.tree_util.tree_leaves_with_path(params)}
    replicated = NamedSharding(mesh, PartitionSpec())

    def place(path: tuple[Any, ...], part: jax.ShapeDtypeStruct) -> NamedSharding:
        found = next((by_path[path[n:]] for n in range(len(path)) if path[n:] in by_path), None)
        return found[1] if found and found[0] == part.shape else replicated

    return jax.tree_util.tree_map_with_path(place, jax.eval_shape(optimizer.init, params))


def sharded_finite(setup: ShardedSetup, value: Array, gradient: DecoderParams) -> Finite:
    """Computes `finite` of sharded arrays: each device checks its shards, and one small reduction combines the flags."""
    axes = tuple(setup.mesh.shape)

    def inside(value: Array, gradient: DecoderParams) -> Finite:
        found = finite(value, gradient)
        return replace(found, flags=jax.lax.pmin(found.flags.astype(jnp.int32), axes) > 0)

    whole = PartitionSpec()
    run = jax.shard_map(inside, mesh=setup.mesh, in_specs=(whole, setup.specs), out_specs=whole, check_vma=False)
    return run(value, gradient)


def jitted_step(
    setup: ShardedSetup,
    optimizer: optax.GradientTransformation,
    gradient: Callable[..., tuple[Array, Any]],
    weight: Callable[..., Array] | None = None,
) -> Any:
    """Compiles `step(params, state, *batch) -> (params, state, metrics)`; DONATES the first two arguments.

    Args:
        setup: model, mesh and schedule.
        optimizer: the optimizer.
        gradient: `gradient(params, *batch)` returns loss and gradient.
        weight: `weight(*batch)` returns the number of tokens in the loss (see `loop.WEIGHT`); None weighs all steps equally.
    """
    state = state_shardings(setup, optimizer)

    @partial(jax.jit, donate_argnums=(0, 1), out_shardings=(setup.shardings, state, None))
    def step(params: Any, opt_state: Any, *batch: Any) -> tuple[Any, Any, Metrics]:
        value, grads = gradient(params, *batch)
        with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes in places
            update, after = optimizer.update(grads, opt_state, params)
        metrics = {"loss": value, FINITE: sharded_finite(setup, value, grads)}
        return optax.apply_updates(params, update), after, metrics if weight is None else {**metrics, WEIGHT: weight(*batch)}

    return step


Predict = Callable[[Any, Array], tuple[Predicted, Array]]
"""`predict(batch, key) -> (predictions, weight of the step)`; the key is the step's."""


def sharded_step(setup: ShardedSetup, optimizer: optax.GradientTransformation, predict: Predict | None = None) -> Step:
    """Builds the step of a task (see `loop.Step`).

    Parameters have the shardings `ShardedSetup.shardings`, the state `state_shardings`. Each process passes the rows of a batch
    that its devices compute (`ShardedSetup.local_rows`). By default the step predicts next tokens.
    """
    gradient = predicted_gradient(setup)

    def predicted(batch: Any, key: Array) -> tuple[Predicted, Array]:
        return next_tokens(*batch) if predict is None else predict(batch, jax.random.wrap_key_data(key))

    step = jitted_step(
        setup,
        optimizer,
        lambda params, batch, key: gradient(params, predicted(batch, key)[0]),
        lambda batch, key: predicted(batch, key)[1],
    )

    def run(params: Any, opt_state: Any, batch: Any, key: Array) -> tuple[Any, Any, Metrics]:
        return step(params, opt_state, place_batch(setup, batch), np.asarray(jax.random.key_data(key)))

    return run


def place_batch(setup: ShardedSetup, batch: Any) -> Any:
    """Shards the arrays of a batch over the devices; each process passes its own rows."""
    groups = setup.mesh.shape[DATA]
    local = len(setup.local_rows(groups))  # groups of "fsdp" with a device of this process

    def place(rows: np.ndarray) -> Array:
        shape = (len(rows) * groups // local, *rows.shape[1:])
        return jax.make_array_from_process_local_data(setup.batch_sharding, rows, shape)

    return jax.tree.map(place, jax.tree.map(np.asarray, batch))


def sharded_init(
    setup: ShardedSetup, optimizer: optax.GradientTransformation, params: Callable[[], DecoderParams]
) -> Callable[[], tuple[DecoderParams, Any]]:
    """Returns a function for the sharded initial parameters and optimizer state of a task.

    `params` may return sharded or unsharded arrays. Arrays with the right sharding are used directly: training DONATES them.
    """

    def init() -> tuple[DecoderParams, Any]:
        used: set[int] = set()

        def place(array: Array, sharding: NamedSharding) -> Array:
            if array.sharding == sharding and id(array) not in used:  # layers of a grown model share arrays
                used.add(id(array))
                return array
            return jnp.copy(jax.device_put(array, sharding))  # `device_put` may share a buffer

        placed = jax.tree.map(place, params(), setup.shardings)
        return placed, jax.jit(optimizer.init, out_shardings=state_shardings(setup, optimizer))(placed)

    return init


def over_mesh(
    task: Task,
    setup: ShardedSetup,
    optimizer: optax.GradientTransformation,
    params: Callable[[], DecoderParams],
    predict: Predict | None = None,
) -> Task:
    """Replaces the step of a task (see `text.text_task`) by this module's sharded step.

    The checkpoint is independent of mesh and plan, so that a run can resume on another mesh.

    Args:
        task: the task.
        setup: model, mesh and schedule.
        optimizer: optimizer of the task.
        params: returns the initial parameters.
        predict: returns the predictions of a batch; by default next tokens.
    """
    step = sharded_step(setup, optimizer, predict)
    return replace(task, init=sharded_init(setup, optimizer, params), step=step, devices=setup.mesh.size)
