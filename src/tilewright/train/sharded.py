"""The train step of language models over a mesh: "fsdp" divides batches and weights, "tp" layers and the stream.

Weights, gradients and the optimiser's state are sharded by the model's declared axes. `parallel/fully_sharded.py` says when
each layer's weights and gradients travel; the optimiser computes on the sharded arrays, and the sums of its clipping are XLA's.

Legend: B sequences of a batch, T positions, R rows of a group of "fsdp" (its sequences times T), M a device's part of them.
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
from tilewright.parallel.exchanges import Exchange, FullyShardedPlan, array_placement, whole
from tilewright.parallel.experts import own_experts
from tilewright.parallel.fully_sharded import run_layers
from tilewright.parallel.mesh import make_mesh
from tilewright.parallel.sharding import FULLY_SHARDED_GROUPED, GROUPED, GROUPED_AXES, grouped_mesh, partition
from tilewright.runtime.placement import divided_sizes
from tilewright.train.balance import balanced, own_share, watching
from tilewright.train.finite import FINITE, Finite, finite
from tilewright.train.loop import WEIGHT, Metrics, Step, Task

DATA = "fsdp"
TENSOR = "tp"
Gradient = Callable[[Any, Array, Array], tuple[Array, Any]]
"""`gradient(params, tokens [B, T + 1], in_loss) -> (mean loss in nats, its gradient)`, of sharded arrays."""


@dataclass(frozen=True)
class ShardedSetup:
    """A model on a mesh.

    Attributes:
        config: of the model.
        ops: what computes.
        mesh: of `training_mesh`.
        plan: when weights and gradients travel.
        accumulate: into how many parts a batch is divided, one after another; their gradients are summed in float32.
        attend: what the positions of a sequence see of each other.
        predicting: from the hidden states `[B, T, H]` to those that predict each position; None where they are the same.
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
        """Each array's partition."""
        return jax.tree.map(lambda sharding: sharding.spec, self.shardings)

    @property
    def shardings(self) -> DecoderParams:
        return model_shardings(self.mesh, decoder.declare(self.config))

    @property
    def batch_sharding(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(DATA))

    def own_rows(self, batch: int) -> Int[np.ndarray, " R"]:
        """Rows of a batch of so many that the devices of this process compute on."""
        parts = self.batch_sharding.addressable_devices_indices_map((batch,)).values()
        return np.concatenate([np.arange(*span) for span in sorted({part[0].indices(batch) for part in parts if part})])

    def check_batch(self, shape: tuple[int, ...]) -> None:
        """Raises a `ValueError` where the mesh does not divide a batch of tokens `[B, T + 1]`."""
        parts = self.mesh.shape[DATA] * self.accumulate
        tensor = self.mesh.size // self.mesh.shape[DATA]
        if shape[0] % parts:
            raise ValueError(
                f"expected a batch that fsdp={self.mesh.shape[DATA]} × {self.accumulate} parts divide, found {shape[0]}"
            )
        rows = shape[0] // parts * (shape[1] - 1)
        if rows % tensor:
            raise ValueError(f"expected rows (sequences × positions) that tp={tensor} divides, found {rows} of a group of fsdp")


class Predicted(NamedTuple):
    """Predictions of a batch of sequences: inputs, labels and weights.

    Attributes:
        inputs, labels: tokens that are read, and those that each position is to predict, `[B, T]`.
        weights: of each prediction, so that their weighted losses make up the mean.
        seen: what `ShardedSetup.attend` needs to know of each row, `[B]`; None for nothing.
    """

    inputs: Any
    labels: Any
    weights: Any
    seen: Any = None


def next_tokens(tokens: Int[Array, "B T1"], in_loss: Bool[Array, "B T1"]) -> tuple[Predicted, Float[Array, ""]]:
    """Predictions of each token given those before it, as `lm.next_token_loss` has them, and the number of tokens."""
    weights = in_loss[:, 1:].astype(jnp.float32)
    total = jnp.sum(weights)
    return Predicted(tokens[:, :-1], tokens[:, 1:], weights / jnp.maximum(total, 1.0)), total


def is_partition(leaf: Any) -> bool:
    return isinstance(leaf, PartitionSpec)


def model_shardings(mesh: Mesh, specs: DecoderParams) -> DecoderParams:
    """Shardings of the declared arrays. Matrices are divided by both axes; norms and biases, which are small, by "tp" alone."""

    def of(spec: ArraySpec) -> NamedSharding:
        rules = FULLY_SHARDED_GROUPED if len(spec.shape) > 1 else GROUPED
        return NamedSharding(mesh, partition(spec, mesh.shape, rules))

    return jax.tree.map(of, specs)


def data_mesh(axes: Mapping[str, int | None], devices: Any = None) -> Mesh:
    """A mesh of "fsdp" and "tp"; an axis that is not named has one device.

    Raises:
        ValueError: another axis, or sizes that do not fit the devices (see `make_mesh`).
    """
    if unknown := sorted(set(axes) - {DATA, TENSOR}):
        raise ValueError(f"expected the axes {DATA} and {TENSOR}, found {', '.join(unknown)}")
    return make_mesh({DATA: axes.get(DATA, 1), TENSOR: axes.get(TENSOR, 1)}, devices)


def training_mesh(axes: Mapping[str, int | None], config: DecoderConfig, devices: Any = None) -> Mesh:
    """A mesh of "fsdp" and "tp" for a model; an axis that is not named has one device.

    Raises:
        ValueError: another axis; sizes that do not fit the devices (see `make_mesh`) or the model (see `grouped_mesh`).
    """
    mesh = data_mesh(axes, devices)
    if config.hidden_size % mesh.shape[DATA]:
        raise ValueError(f"expected fsdp that divides the hidden size {config.hidden_size}, found {mesh.shape[DATA]}")
    return grouped_mesh(mesh, TENSOR, **divided_sizes(config, vocabulary=config.vocab_size))


def sharded_gradient(setup: ShardedSetup) -> Gradient:
    """The mean loss of a batch and its gradient, as `lm.next_token_loss` has them on one device.

    Raises:
        ValueError: the mesh does not divide an array of the model; when called, a batch that it does not divide.
    """
    gradient = predicted_gradient(setup)
    return lambda params, tokens, in_loss: gradient(params, next_tokens(tokens, in_loss)[0])


def predicted_gradient(setup: ShardedSetup) -> Callable[[Any, Predicted], tuple[Array, Any]]:
    """Function that gives the mean loss and gradient of any predictions, over the mesh."""
    inside = partial(_local_gradient, setup)
    specs = setup.specs

    def gradient(params: Any, predicted: Predicted) -> tuple[Array, Any]:
        return _over(setup, inside, (PartitionSpec(), specs))(params, predicted)

    return gradient


def sharded_loss(setup: ShardedSetup) -> Callable[[Any, Predicted], Array]:
    """The loss of a batch alone, for evaluation; a batch in one part."""
    setup = replace(setup, accumulate=1)

    def inside(params: DecoderParams, predicted: Predicted) -> Array:
        return jax.lax.psum(_local_loss(setup, params, predicted), tuple(setup.mesh.shape))

    return lambda params, predicted: _over(setup, inside, PartitionSpec())(params, predicted)


def _over(setup: ShardedSetup, inside: Callable[..., Any], results: Any) -> Callable[[Any, Predicted], Any]:
    """A function of what a device has of the parameters and of a batch, on all devices."""

    def run(params: Any, predicted: Predicted) -> Any:
        rows, length = predicted.inputs.shape
        setup.check_batch((rows, length + 1))
        specs = (setup.specs, PartitionSpec(DATA))
        return jax.shard_map(inside, mesh=setup.mesh, in_specs=specs, out_specs=results, check_vma=False)(params, predicted)

    return run


def _local_gradient(setup: ShardedSetup, params: DecoderParams, predicted: Predicted) -> tuple[Array, DecoderParams]:
    """A device's part: the loss of all devices, and the gradient of its shards."""
    axes = tuple(setup.mesh.shape)

    def part(predicted: Predicted) -> tuple[Array, DecoderParams]:
        return jax.value_and_grad(partial(_local_loss, setup))(params, predicted)

    if setup.accumulate == 1:
        value, gradient = part(predicted)
        return jax.lax.psum(value, axes), gradient

    def add(sums: Any, of: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, part(of)), None

    parts = jax.tree.map(lambda x: x.reshape(setup.accumulate, -1, *x.shape[1:]), predicted)
    start = (jnp.float32(0), jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), params))
    (value, gradient), _ = jax.lax.scan(add, start, parts)
    return jax.lax.psum(value, axes), gradient


def _local_loss(setup: ShardedSetup, params: DecoderParams, predicted: Predicted) -> Float[Array, ""]:
    """A device's share of the loss: the sum over all devices is the whole."""
    config = setup.config
    ops = own_experts(setup.ops)
    plan = setup.plan
    exchange = Exchange(plan, DATA, GROUPED_AXES)
    how: DecoderParams = jax.tree.map(
        lambda spec: array_placement(spec, tuple(setup.mesh.shape), DATA), setup.specs, is_leaf=is_partition
    )
    inputs = predicted.inputs
    table = whole(exchange, how.embed, params.embed, "embedding")
    final = whole(exchange, how.norm, params.norm, "final_norm")
    x = decoder.scaled(config, _embedded(ops, plan, table, inputs))
    positions = jnp.broadcast_to(jnp.arange(inputs.shape[1]), inputs.shape)
    rows = Rows(config.rope_tables(positions), predicted.seen)
    (x, load), head = run_layers(
        exchange,
        decoder.stack_of(config, ops, params.layers, setup.attend),
        decoder.split_layer,
        decoder.join_layer,
        how.layers,
        x,
        rows,
        (*inputs.shape, config.hidden_size),
        params.head,
        how.head,
        *watching(config),
    )
    x = jax.lax.all_gather(ops.rms_norm(x, *Norm(final, config.rms_norm_eps)), GROUPED_AXES, tiled=True)
    if setup.predicting is not None:
        x = setup.predicting(x.reshape(*inputs.shape, -1)).reshape(x.shape)

    def logits(x: Array, head: Any) -> Array:
        found = ops.linear(x, Transposed(head) if params.head is None else head, jnp.float32)
        return softcapped(found, config.logit_softcap)

    labels = predicted.labels.reshape(-1)
    weights = predicted.weights.reshape(-1)
    loss = vocabulary.cross_entropy(logits, GROUPED_AXES, x, table if params.head is None else head, labels, weights)
    # What counts of the parts of a batch is their mean.
    return loss + own_share(config, load, tuple(setup.mesh.shape)) / setup.accumulate


def _embedded(ops: Operations, plan: FullyShardedPlan, table: Float[Array, "W H"], tokens: Array) -> Float[Array, "M H"]:
    """This device's rows of the stream, of a table of which each has part of the vocabulary."""
    own = tokens.reshape(-1) - jax.lax.axis_index(GROUPED_AXES) * len(table)
    here = (own >= 0) & (own < len(table))
    found = jnp.where(here[:, None], _taken(ops.gather_rows, table, jnp.clip(own, 0, len(table) - 1)), 0)
    if plan.activations == "ring":
        return rings.reduce_scatter(found, GROUPED_AXES)
    return jax.lax.psum_scatter(found, GROUPED_AXES, tiled=True)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _taken(take: Callable[[Array, Array], Array], table: Array, index: Array) -> Array:
    """Rows of a table, whose gradient is summed in float32: a frequent token has many summands."""
    return take(table, index)


def _taken_forward(take: Callable[[Array, Array], Array], table: Array, index: Array) -> tuple[Array, tuple[Array, Array]]:
    return take(table, index), (index, table)


def _taken_backward(take: Callable[[Array, Array], Array], kept: tuple[Array, Array], cotangent: Array) -> tuple[Array, None]:
    index, table = kept
    total = jnp.zeros(table.shape, jnp.float32).at[index].add(cotangent.astype(jnp.float32))
    return total.astype(table.dtype), None


_taken.defvjp(_taken_forward, _taken_backward)


def state_shardings(setup: ShardedSetup, optimizer: optax.GradientTransformation) -> Any:
    """Shardings of an optimiser's state: what belongs to an array as this does, counters everywhere.

    A part of the state belongs to the array whose path its own path ends with: optimisers keep the parameters' structure.
    """
    return places_of_state(abstract(decoder.declare(setup.config), jnp.float32, setup.shardings), setup.mesh, optimizer)


def places_of_state(params: Any, mesh: Mesh, optimizer: optax.GradientTransformation) -> Any:
    """Optimiser state of any parameters, as abstract arrays with their shardings."""
    known = {path: (param.shape, param.sharding) for path, param in jax.tree_util.tree_leaves_with_path(params)}
    everywhere = NamedSharding(mesh, PartitionSpec())

    def place(path: tuple[Any, ...], part: jax.ShapeDtypeStruct) -> NamedSharding:
        found = next((known[path[n:]] for n in range(len(path)) if path[n:] in known), None)
        return found[1] if found and found[0] == part.shape else everywhere

    return jax.tree_util.tree_map_with_path(place, jax.eval_shape(optimizer.init, params))


def sharded_finite(setup: ShardedSetup, value: Array, gradient: DecoderParams) -> Finite:
    """`finite`, of sharded arrays: each device looks at its shards, and one small reduction joins what they found."""
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
    """`step(params, state, *batch) -> (params, state, metrics)` down `gradient(params, *batch)`; DONATES the first two.

    Args:
        weight: `weight(*batch)` gives the tokens in the loss (see `loop.WEIGHT`); None weighs all steps alike.
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
"""`predict(batch, key)`: predictions of a batch and how much they count; the key is the step's."""


def sharded_step(setup: ShardedSetup, optimizer: optax.GradientTransformation, predict: Predict | None = None) -> Step:
    """The step of a task (see `loop.Step`).

    Parameters lie as `ShardedSetup.shardings` has them, and state as `state_shardings`. Of each batch a process brings the rows
    that its devices compute on (`ShardedSetup.own_rows`). By default they are of text, whose tokens are predicted one after
    another.
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
        return step(params, opt_state, on_mesh(setup, batch), np.asarray(jax.random.key_data(key)))

    return run


def on_mesh(setup: ShardedSetup, batch: Any) -> Any:
    """The arrays of a batch, of which each process has its rows, divided over the devices."""
    groups = setup.mesh.shape[DATA]
    held = len(setup.own_rows(groups))  # groups of "fsdp" with a device of this process

    def place(own: np.ndarray) -> Array:
        shape = (len(own) * groups // held, *own.shape[1:])
        return jax.make_array_from_process_local_data(setup.batch_sharding, own, shape)

    return jax.tree.map(place, jax.tree.map(np.asarray, batch))


def sharded_init(
    setup: ShardedSetup, optimizer: optax.GradientTransformation, params: Callable[[], DecoderParams]
) -> Callable[[], tuple[DecoderParams, Any]]:
    """Function that gives a task its parameters and the optimiser's state, sharded.

    `params` may give arrays sharded or not. Those that lie in their places are taken as they are: training DONATES them.
    """

    def init() -> tuple[DecoderParams, Any]:
        taken: set[int] = set()

        def place(array: Array, sharding: NamedSharding) -> Array:
            if array.sharding == sharding and id(array) not in taken:  # layers of a grown model have arrays in common
                taken.add(id(array))
                return array
            return jnp.copy(jax.device_put(array, sharding))  # which may share a device's buffer

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
    """The task of training with this module's step in the place of its own; see `text.text_task` for that.

    The checkpoint says nothing of the mesh or the plan: a run goes on over another one.

    Args:
        optimizer: the task's.
        params: gives those to start from.
        predict: what a batch is to predict; by default each token given those before it.
    """
    step = sharded_step(setup, optimizer, predict)
    return replace(task, init=sharded_init(setup, optimizer, params), step=step, devices=setup.mesh.size)
