"""The train step of decoder language models over a mesh: "fsdp" divides batches and weights, "tp" layers and the stream.

Weights, gradients and the optimiser's state lie divided by the model's declared axes. `parallel/fully_sharded.py` says when
each layer's weights and gradients travel; the optimiser computes on the divided arrays, and the sums of its clipping are XLA's.

Legend: B sequences of a batch, T positions, R rows of a group of "fsdp" (its sequences times T), M a device's part of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float

from tilewright.kernels.operations import Norm, Operations, Transposed
from tilewright.models import decoder, layers
from tilewright.models.decoder import DecoderConfig, DecoderParams
from tilewright.models.params import ArraySpec, abstract
from tilewright.models.stack import Rows
from tilewright.parallel import rings, vocabulary
from tilewright.parallel.exchanges import Exchange, Plan, divided, whole
from tilewright.parallel.fully_sharded import run_layers
from tilewright.parallel.mesh import make_mesh
from tilewright.parallel.sharding import FULLY_SHARDED_GROUPED, GROUPED, GROUPED_AXES, grouped_mesh, partition
from tilewright.train.loop import Figures, Step, Task

DATA, TENSOR = "fsdp", "tp"
Gradient = Callable[[Any, Array, Array], tuple[Array, Any]]
"""`gradient(params, tokens [B, T + 1], in_loss) -> (mean loss in nats, its gradient)`, of divided arrays."""


@dataclass(frozen=True)
class Setup:
    """A model on a mesh.

    Attributes:
        config: of the model.
        ops: what computes.
        mesh: of `training_mesh`.
        plan: when weights and gradients travel.
        accumulate: into how many parts a batch is divided, one after another; their gradients are summed in float32.
    """

    config: DecoderConfig
    ops: Operations
    mesh: Mesh
    plan: Plan = field(default_factory=Plan)
    accumulate: int = 1

    def __post_init__(self) -> None:
        self.plan.check(self.config.num_layers)
        if self.accumulate < 1:
            raise ValueError(f"expected a batch in at least 1 part, found {self.accumulate}")

    @property
    def specs(self) -> DecoderParams:
        """Each array's partition. Matrices are divided by both axes; norms and biases, which are small, by "tp" alone."""

        def of(spec: ArraySpec) -> PartitionSpec:
            return partition(spec, self.mesh.shape, FULLY_SHARDED_GROUPED if len(spec.shape) > 1 else GROUPED)

        return jax.tree.map(of, decoder.declare(self.config))

    @property
    def shardings(self) -> DecoderParams:
        return jax.tree.map(partial(NamedSharding, self.mesh), self.specs, is_leaf=is_partition)

    @property
    def batch_sharding(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(DATA))

    def check_batch(self, shape: tuple[int, ...]) -> None:
        """Raises a `ValueError` where the mesh does not divide a batch of tokens `[B, T + 1]`."""
        parts, tensor = self.mesh.shape[DATA] * self.accumulate, self.mesh.size // self.mesh.shape[DATA]
        if shape[0] % parts:
            raise ValueError(
                f"expected a batch that fsdp={self.mesh.shape[DATA]} × {self.accumulate} parts divide, found {shape[0]}"
            )
        rows = shape[0] // parts * (shape[1] - 1)
        if rows % tensor:
            raise ValueError(f"expected rows (sequences × positions) that tp={tensor} divides, found {rows} of a group of fsdp")


def is_partition(leaf: Any) -> bool:
    return isinstance(leaf, PartitionSpec)


def training_mesh(axes: Mapping[str, int | None], config: DecoderConfig, devices: Any = None) -> Mesh:
    """A mesh of "fsdp" and "tp" for a model; an axis that is not named has one device.

    Raises:
        ValueError: another axis; sizes that do not fit the devices (see `make_mesh`) or the model (see `grouped_mesh`).
    """
    if unknown := sorted(set(axes) - {DATA, TENSOR}):
        raise ValueError(f"expected the axes {DATA} and {TENSOR}, found {', '.join(unknown)}")
    mesh = make_mesh({DATA: axes.get(DATA, 1), TENSOR: axes.get(TENSOR, 1)}, devices)
    if config.hidden_size % mesh.shape[DATA]:
        raise ValueError(f"expected fsdp that divides the hidden size {config.hidden_size}, found {mesh.shape[DATA]}")
    return grouped_mesh(
        mesh, TENSOR, heads=config.num_heads, kv_heads=config.num_kv_heads,
        vocabulary=config.vocab_size, mlp=config.intermediate_size,
    )  # fmt: skip


def sharded_gradient(setup: Setup) -> Gradient:
    """The mean loss of a batch and its gradient, as `lm.next_token_loss` has them on one device.

    Raises:
        ValueError: the mesh does not divide an array of the model; when called, a batch that it does not divide.
    """
    specs = setup.specs

    def gradient(params: Any, tokens: Array, in_loss: Array) -> tuple[Array, Any]:
        setup.check_batch(tokens.shape)
        batch = PartitionSpec(DATA)
        inside = partial(_local_gradient, setup)
        run = jax.shard_map(
            inside, mesh=setup.mesh, in_specs=(specs, batch, batch), out_specs=(PartitionSpec(), specs), check_vma=False
        )
        return run(params, tokens, in_loss)

    return gradient


def sharded_loss(setup: Setup) -> Callable[[Any, Array, Array], Array]:
    """The mean loss of a batch alone, for evaluation; a batch in one part."""
    specs, batch = setup.specs, PartitionSpec(DATA)

    def inside(params: DecoderParams, tokens: Array, in_loss: Array) -> Array:
        weights = _weights(in_loss)
        return jax.lax.psum(_local_loss(setup, params, tokens, weights), tuple(setup.mesh.shape))

    def loss(params: Any, tokens: Array, in_loss: Array) -> Array:
        replace(setup, accumulate=1).check_batch(tokens.shape)
        return jax.shard_map(
            inside, mesh=setup.mesh, in_specs=(specs, batch, batch), out_specs=PartitionSpec(), check_vma=False
        )(params, tokens, in_loss)

    return loss


def _weights(in_loss: Array) -> Float[Array, "B T"]:
    """Of each prediction of this device's sequences, so that all devices' losses add up to the mean."""
    predicted = in_loss[:, 1:].astype(jnp.float32)
    return predicted / jnp.maximum(jax.lax.psum(jnp.sum(predicted), DATA), 1.0)


def _local_gradient(setup: Setup, params: DecoderParams, tokens: Array, in_loss: Array) -> tuple[Array, DecoderParams]:
    """A device's part: the loss of all devices, and the gradient of its shards."""
    axes = tuple(setup.mesh.shape)
    weights = _weights(in_loss)

    def part(tokens: Array, weights: Array) -> tuple[Array, DecoderParams]:
        return jax.value_and_grad(partial(_local_loss, setup))(params, tokens, weights)

    if setup.accumulate == 1:
        value, gradient = part(tokens, weights)
        return jax.lax.psum(value, axes), gradient

    def add(sums: Any, of: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, part(*of)), None

    parts = jax.tree.map(lambda x: x.reshape(setup.accumulate, -1, *x.shape[1:]), (tokens, weights))
    start = (jnp.float32(0), jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), params))
    (value, gradient), _ = jax.lax.scan(add, start, parts)
    return jax.lax.psum(value, axes), gradient


def _local_loss(setup: Setup, params: DecoderParams, tokens: Array, weights: Float[Array, "B T"]) -> Float[Array, ""]:
    """A device's share of the loss: the sum over all devices is the whole."""
    config, ops, plan = setup.config, setup.ops, setup.plan
    exchange = Exchange(plan, DATA, GROUPED_AXES)
    how: DecoderParams = jax.tree.map(
        lambda spec: divided(spec, tuple(setup.mesh.shape), DATA), setup.specs, is_leaf=is_partition
    )
    inputs, labels = tokens[:, :-1], tokens[:, 1:].reshape(-1)
    table = whole(exchange, how.embed, params.embed, "embedding")
    final = whole(exchange, how.norm, params.norm, "final_norm")
    x = _embedded(ops, plan, table, inputs)
    positions = jnp.broadcast_to(jnp.arange(inputs.shape[1]), inputs.shape)
    rows = Rows(layers.rope_tables(positions, config.rope_frequencies), None)
    x, head = run_layers(
        exchange, decoder.stack_of(config, ops, params.layers, decoder.causal_attend), decoder.split_layer, decoder.join_layer,
        how.layers[0], x, rows, (*inputs.shape, config.hidden_size), params.head, how.head,
    )  # fmt: skip
    x = jax.lax.all_gather(ops.rms_norm(x, *Norm(final, config.rms_norm_eps)), GROUPED_AXES, tiled=True)

    def logits(x: Array, head: Any) -> Array:
        return ops.linear(x, Transposed(head) if params.head is None else head, jnp.float32)

    return vocabulary.cross_entropy(
        logits, GROUPED_AXES, x, table if params.head is None else head, labels, weights.reshape(-1)
    )


def _embedded(ops: Operations, plan: Plan, table: Float[Array, "W H"], tokens: Array) -> Float[Array, "M H"]:
    """This device's rows of the stream, of a table of which each has part of the vocabulary."""
    own = tokens.reshape(-1) - jax.lax.axis_index(GROUPED_AXES) * len(table)
    here = (own >= 0) & (own < len(table))
    found = jnp.where(here[:, None], _taken(ops.take, table, jnp.clip(own, 0, len(table) - 1)), 0)
    if plan.activations == "ring":
        return rings.reduce_scatter(found, GROUPED_AXES)
    return jax.lax.psum_scatter(found, GROUPED_AXES, tiled=True)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _taken(take: Callable[[Array, Array], Array], table: Array, index: Array) -> Array:
    """Rows of a table, whose gradient is summed in float32: a frequent token has many summands."""
    return take(table, index)


def _taken_forward(take: Callable[[Array, Array], Array], table: Array, index: Array) -> tuple[Array, tuple[Array, Array]]:
    return take(table, index), (index, table)


def _taken_backward(take: Callable[[Array, Array], Array], kept: tuple[Array, Array], due: Array) -> tuple[Array, None]:
    index, table = kept
    total = jnp.zeros(table.shape, jnp.float32).at[index].add(due.astype(jnp.float32))
    return total.astype(table.dtype), None


_taken.defvjp(_taken_forward, _taken_backward)


def state_shardings(setup: Setup, optimizer: optax.GradientTransformation) -> Any:
    """Where an optimiser's state lies: what belongs to an array as this does, counters everywhere.

    A part of the state belongs to the array whose path its own path ends with: optimisers keep the parameters' structure.
    """
    params = abstract(decoder.declare(setup.config), jnp.float32, setup.shardings)
    known = {path: (param.shape, param.sharding) for path, param in jax.tree_util.tree_leaves_with_path(params)}
    everywhere = NamedSharding(setup.mesh, PartitionSpec())

    def place(path: tuple[Any, ...], part: jax.ShapeDtypeStruct) -> NamedSharding:
        found = next((known[path[n:]] for n in range(len(path)) if path[n:] in known), None)
        return found[1] if found and found[0] == part.shape else everywhere

    return jax.tree_util.tree_map_with_path(place, jax.eval_shape(optimizer.init, params))


def sharded_step(setup: Setup, optimizer: optax.GradientTransformation) -> Step:
    """The step of a task (see `loop.Step`); parameters lie as `Setup.shardings` has them, and state as `state_shardings`.

    Batches come as whole arrays, of which each process gives its devices their parts.
    """
    gradient, state = sharded_gradient(setup), state_shardings(setup, optimizer)

    @partial(jax.jit, donate_argnums=(0, 1), out_shardings=(setup.shardings, state, None))
    def step(params: Any, opt_state: Any, tokens: Array, in_loss: Array) -> tuple[Any, Any, Figures]:
        value, due = gradient(params, tokens, in_loss)
        with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes in places
            update, after = optimizer.update(due, opt_state, params)
        return optax.apply_updates(params, update), after, {"loss": value}

    def run(params: Any, opt_state: Any, batch: Any, key: Array) -> tuple[Any, Any, Figures]:
        return step(params, opt_state, *(on_mesh(setup, each) for each in batch))

    return run


def on_mesh(setup: Setup, batch: Any) -> Array:
    """A batch that every process has whole, divided over the devices."""
    whole_batch = np.asarray(batch)
    return jax.make_array_from_callback(whole_batch.shape, setup.batch_sharding, lambda index: whole_batch[index])


def sharded_init(
    setup: Setup, optimizer: optax.GradientTransformation, params: Callable[[], DecoderParams]
) -> Callable[[], tuple[DecoderParams, Any]]:
    """What gives a task its parameters and the optimiser's state, divided; `params` may give them divided or not."""

    def init() -> tuple[DecoderParams, Any]:
        placed = jax.tree.map(jnp.copy, jax.device_put(params(), setup.shardings))
        return placed, jax.jit(optimizer.init, out_shardings=state_shardings(setup, optimizer))(placed)

    return init


def over_mesh(task: Task, setup: Setup, optimizer: optax.GradientTransformation, params: Callable[[], DecoderParams]) -> Task:
    """The task of training a decoder with this module's step in the place of its own; see `text.text_task` for that.

    The checkpoint says nothing of the mesh or the plan: a run goes on over another one.

    Args:
        optimizer: the task's.
        params: gives those to start from.
    """
    return replace(task, init=sharded_init(setup, optimizer, params), step=sharded_step(setup, optimizer))
