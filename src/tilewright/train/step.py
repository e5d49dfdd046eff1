"""One train step for language models, diffusion models and drafters, on one device and over a mesh.

An `Objective` says what is learned: it draws what is random over a whole batch, such as masked tokens, and has a loss of drawn
rows. A `TrainingPlacement` says where, and by which strategy: on one device; over a mesh whose collectives XLA's partitioner
places (GSPMD); or over a mesh with the explicit collectives of a `FullyShardedPlan`. A step draws, takes the gradient of each
part of the batch, and updates. It is the same for all strategies, since a loss with explicit collectives (`sharded.py`) has a
gradient of its own, and the optimizer computes on shards.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Int

from tilewright.kernels.linear.scaled import ScaledMatrix
from tilewright.kernels.operations import Operations
from tilewright.kernels.select import PLAIN, Chip, training_operations
from tilewright.models.decoder import DecoderConfig
from tilewright.models.params import ArraySpec, abstract
from tilewright.parallel.attention import with_sharded_attention
from tilewright.parallel.exchanges import FullyShardedPlan
from tilewright.parallel.mesh import gather_texts, make_mesh
from tilewright.parallel.sharding import (
    FULLY_SHARDED_GROUPED,
    FULLY_SHARDED_TENSOR_PARALLEL,
    GROUPED,
    GROUPED_AXES,
    grouped_mesh,
    partition,
)
from tilewright.runtime.placement import divided_sizes
from tilewright.train.checkpoint import differing
from tilewright.train.finite import FINITE, Finite, finite
from tilewright.train.log import WEIGHT, Metrics
from tilewright.train.loop import DataPosition, Step, Task, updated
from tilewright.train.text import Batches, TextOptions, make_optimizer, recorded

DATA = "fsdp"
TENSOR = "tp"
REPLICAS = "dp"
"""Mesh axis of replicas, each of which holds all weights, sharded over "fsdp" and "tp" (HSDP). A mesh may lack it."""

Remat = Literal["everything_saveable", "nothing_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable"]
"""Name in `jax.checkpoint_policies`: what is saved for the backward pass; the rest is computed again."""
EVERYTHING: Remat = "everything_saveable"
NOTHING: Remat = "nothing_saveable"

Loss = Callable[[Any, Any, Any], tuple[Array, Array]]
"""`loss(params, frozen, drawn) -> (mean loss in nats, weight)` of drawn rows."""

Draw = Callable[[Any, Any, Array], Any]
"""`draw(frozen, batch, key) -> drawn`: arrays whose first dim is a multiple of the batch's rows, row by row."""


def drawn_batch(frozen: Any, batch: Any, key: Array) -> Any:
    """Draws nothing: returns the batch."""
    return batch


@dataclass(frozen=True)
class TrainingPlacement:
    """Devices of the training, and the strategy over them.

    Attributes:
        mesh: mesh of `data_mesh` or `training_mesh`; None for one device.
        plan: schedule of explicit collectives, for losses of `predictions.py` over a `training_mesh`; None leaves collectives
            to XLA's partitioner.
        remat: which activations of a layer of `predictions.py` are saved for the backward pass. Those of
            explicit collectives are the plan's.
    """

    mesh: Mesh | None = None
    plan: FullyShardedPlan | None = None
    remat: str = EVERYTHING

    def __post_init__(self) -> None:
        if self.remat not in get_args(Remat):
            raise ValueError(f"expected a policy among {', '.join(get_args(Remat))}, found {self.remat!r}")

    def shardings(self, specs: Any) -> Any:
        """Returns the shardings of declared arrays, None on one device. Raises a `ValueError` if the mesh does not fit."""
        return None if self.mesh is None else model_shardings(self.mesh, specs)

    def ops(self, options: TextOptions, chip: Chip | None = None) -> Operations:
        """Returns the operations of the loss.

        The partitioner shards XLA's own operations only. On TPUs and GPUs each device runs the kernel of attention on its rows
        and heads; on CPUs XLA computes attention, too.

        Args:
            options: options of the training loop.
            chip: chip to run on, which need not be present; by default JAX's default backend.
        """
        if self.mesh is None or self.plan is not None:
            return training_operations(options.matmul_dtype, options.compute_dtype, chip)
        if (chip or jax.default_backend()) == "cpu":
            return PLAIN
        found = training_operations(options.matmul_dtype, options.compute_dtype, chip)
        return with_sharded_attention(found, self.mesh, [axis for axis in (REPLICAS, DATA) if axis in self.mesh.shape])

    @property
    def batch_sharding(self) -> NamedSharding:
        assert self.mesh is not None, "one device has no sharding"
        return NamedSharding(self.mesh, batch_spec(self.mesh))

    @property
    def groups(self) -> int:
        """Number of groups of devices that compute different rows of a batch."""
        return 1 if self.mesh is None else self.mesh.shape[DATA] * self.mesh.shape.get(REPLICAS, 1)

    def local_rows(self, batch: int) -> Int[np.ndarray, " R"] | None:
        """Returns the rows of a batch of `batch` rows that this process's devices compute; None for all on one device."""
        if self.mesh is None:
            return None
        parts = self.batch_sharding.addressable_devices_indices_map((batch,)).values()
        return np.concatenate([np.arange(*span) for span in sorted({part[0].indices(batch) for part in parts if part})])

    def place(self, batch: Any) -> Any:
        """Shards the arrays of a batch by rows; each process passes its `local_rows`. Unchanged on one device."""
        if self.mesh is None:
            return batch
        groups = self.groups
        rows = self.local_rows(groups)
        assert rows is not None
        local = len(rows)  # groups with a device of this process

        def place(rows: np.ndarray) -> Array:
            shape = (len(rows) * groups // local, *rows.shape[1:])
            return jax.make_array_from_process_local_data(self.batch_sharding, rows, shape)

        return jax.tree.map(place, jax.tree.map(np.asarray, batch))

    def check_batch(self, rows: int, length: int | None = None, parts: int = 1) -> None:
        """Raises a `ValueError` if the mesh does not divide a part of a batch.

        Args:
            rows: sequences of a batch.
            length: predicted positions of a sequence; None for losses without explicit collectives.
            parts: parts of a batch, whose gradients are accumulated.
        """
        groups = self.groups
        if rows % (groups * parts):
            shape = {} if self.mesh is None else self.mesh.shape
            divisors = [f"{name}={shape[name]}" for name in (REPLICAS, DATA) if name in shape]
            divisors += [f"{parts} parts"] if parts > 1 else []
            verb = "divides" if len(divisors) == 1 and parts == 1 else "divide"
            raise ValueError(f"expected a batch that {' × '.join(divisors)} {verb}, found {rows}")
        if self.mesh is None or self.plan is None or length is None:
            return
        tokens = rows // (groups * parts) * length
        tensor = self.mesh.size // groups
        if tokens % tensor:
            raise ValueError(
                f"expected tokens per group of fsdp (sequences × positions) that tp={tensor} divides, found {tokens}"
            )


ONE_DEVICE = TrainingPlacement()


def data_mesh(axes: Mapping[str, int | None], devices: Any = None) -> Mesh:
    """Builds a mesh of "fsdp" and "tp", and of "dp" if given; another absent axis has one device.

    Raises:
        ValueError: an unknown axis, or sizes that do not fit the devices (see `make_mesh`).
    """
    if unknown := sorted(set(axes) - {REPLICAS, DATA, TENSOR}):
        raise ValueError(f"expected the axes {REPLICAS}, {DATA} and {TENSOR}, found {', '.join(unknown)}")
    replicas = {REPLICAS: axes[REPLICAS]} if REPLICAS in axes else {}
    return make_mesh({**replicas, DATA: axes.get(DATA, 1), TENSOR: axes.get(TENSOR, 1)}, devices)


def batch_spec(mesh: Mesh, *more: Any) -> PartitionSpec:
    """Returns the partition of an array whose first dim are the rows of a batch; `more` partitions its other dims."""
    return PartitionSpec((REPLICAS, DATA) if REPLICAS in mesh.shape else DATA, *more)


def training_mesh(axes: Mapping[str, int | None], config: DecoderConfig, devices: Any = None) -> Mesh:
    """Builds the mesh of `data_mesh` for a decoder's explicit collectives.

    Raises:
        ValueError: an unknown axis, or sizes that do not fit the devices (see `make_mesh`) or the model (see `grouped_mesh`).
    """
    mesh = data_mesh(axes, devices)
    if config.hidden_size % mesh.shape[DATA]:
        raise ValueError(f"expected fsdp that divides the hidden size {config.hidden_size}, found {mesh.shape[DATA]}")
    return grouped_mesh(mesh, TENSOR, **divided_sizes(config, vocabulary=config.vocab_size))


def model_shardings(mesh: Mesh, specs: Any) -> Any:
    """Returns the shardings of declared arrays: matrices along all axes; over a `training_mesh`, vectors along "tp" only."""
    grouped = set(GROUPED_AXES) <= set(mesh.shape)

    def sharding(spec: ArraySpec) -> NamedSharding:
        rules = FULLY_SHARDED_TENSOR_PARALLEL
        if grouped:
            rules = FULLY_SHARDED_GROUPED if len(spec.shape) > 1 else GROUPED
        return NamedSharding(mesh, partition(spec, mesh.shape, rules))

    return jax.tree.map(sharding, specs)


def state_shardings(placement: TrainingPlacement, specs: Any, optimizer: optax.GradientTransformation) -> Any:
    """Returns the shardings of the optimizer state: an array like its parameter, counters replicated; None on one device.

    A part of the state belongs to the parameter whose path is a suffix of its path, since optimizers keep the parameters'
    structure.
    """
    if placement.mesh is None:
        return None
    params = abstract(specs, jnp.float32, placement.shardings(specs))
    by_path = {path: (param.shape, param.sharding) for path, param in jax.tree_util.tree_leaves_with_path(params)}
    replicated = NamedSharding(placement.mesh, PartitionSpec())

    def place(path: tuple[Any, ...], part: jax.ShapeDtypeStruct) -> NamedSharding:
        found = next((by_path[path[n:]] for n in range(len(path)) if path[n:] in by_path), None)
        return found[1] if found and found[0] == part.shape else replicated

    return jax.tree_util.tree_map_with_path(place, jax.eval_shape(optimizer.init, params))


def sharded_finite(placed: Any, value: Array, gradient: Any) -> Finite:
    """Computes `finite` of arrays with the shardings `placed`: each device checks its shards, and one reduction combines flags.

    `placed` is None on one device.
    """
    if placed is None:
        return finite(value, gradient)
    mesh = jax.tree.leaves(placed)[0].mesh

    def inside(value: Array, gradient: Any) -> Finite:
        found = finite(value, gradient)
        return replace(found, flags=jax.lax.pmin(found.flags.astype(jnp.int32), tuple(mesh.shape)) > 0)

    specs = jax.tree.map(lambda sharding: sharding.spec, placed)
    whole = PartitionSpec()
    return jax.shard_map(inside, mesh=mesh, in_specs=(whole, specs), out_specs=whole, check_vma=False)(value, gradient)


def cast_loss(options: TextOptions, loss: Loss) -> Loss:
    """Wraps a loss to read floating-point parameters in `options.compute_dtype`; gradients have the parameters' dtype.

    Quantised frozen matrices stay as they are.
    """
    if options.compute_dtype == "float32":
        return loss

    def is_quantised(leaf: Any) -> bool:
        return isinstance(leaf, ScaledMatrix)

    def rounded(leaf: Any) -> Any:
        if is_quantised(leaf) or not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        return leaf.astype(options.compute_dtype)

    def computed(params: Any, frozen: Any, drawn: Any) -> tuple[Array, Array]:
        return loss(jax.tree.map(rounded, params), jax.tree.map(rounded, frozen, is_leaf=is_quantised), drawn)

    return computed


def accumulated(loss: Callable[[Any, Any], tuple[Array, Array]], params: Any, drawn: Any, parts: int) -> Any:
    """Returns the loss and the weight of drawn rows, and the gradient, from several parts of the rows one after another.

    The loss is the mean of the parts' losses by weight, hence that of all rows at once, except for terms that are no means
    by this weight, such as the balancing loss of experts. Memory holds the activations of one part.

    Args:
        loss: `loss(params, drawn) -> (mean loss, weight)`.
        params: parameters.
        drawn: arrays whose first dim is a multiple of the rows (see `Draw`).
        parts: number of parts, which divides the rows.
    """
    if parts == 1:
        (value, weight), gradient = jax.value_and_grad(loss, has_aux=True)(params, drawn)
        return value, weight, gradient
    rows = len(jax.tree.leaves(drawn)[0])

    def split(x: Array) -> Array:  # parts take strided rows, so that a batch stays sharded over a mesh
        strided = x.reshape(rows // parts, parts, len(x) // rows, *x.shape[1:]).swapaxes(0, 1)
        return strided.reshape(parts, len(x) // parts, *x.shape[1:])

    def weighted(params: Any, part: Any) -> tuple[Array, Array]:
        value, weight = loss(params, part)
        return value * jax.lax.stop_gradient(weight), weight

    def add(sums: Any, part: Any) -> tuple[Any, None]:
        (value, weight), gradient = jax.value_and_grad(weighted, has_aux=True)(params, part)
        return jax.tree.map(jnp.add, sums, (value, weight, gradient)), None

    start = (jnp.float32(0), jnp.float32(0), jax.tree.map(jnp.zeros_like, params))
    (value, weight, gradient), _ = jax.lax.scan(add, start, jax.tree.map(split, drawn))
    least = jnp.maximum(weight, jnp.finfo(jnp.float32).tiny)
    return value / least, weight, jax.tree.map(lambda total: total / least, gradient)


def compiled_step(
    loss: Loss,
    optimizer: optax.GradientTransformation,
    draw: Draw = drawn_batch,
    placement: TrainingPlacement = ONE_DEVICE,
    specs: Any = None,
    parts: int = 1,
) -> Any:
    """Returns the jitted step `(params, opt_state, frozen, batch, key) -> (params, opt_state, metrics)`; DONATES the first two.

    Args:
        loss: the loss.
        optimizer: the optimizer.
        draw: draws what is random in a batch.
        placement: devices and strategy.
        specs: declaration of the trained arrays, for a mesh.
        parts: parts of a batch, whose gradients are accumulated.
    """
    placed = None if placement.mesh is None else placement.shardings(specs)
    outputs = None if placed is None else (placed, state_shardings(placement, specs, optimizer), None)

    @partial(jax.jit, donate_argnums=(0, 1), out_shardings=outputs)
    def step(params: Any, opt_state: Any, frozen: Any, batch: Any, key: Array) -> tuple[Any, Any, Metrics]:
        drawn = draw(frozen, batch, typed_key(key))
        value, weight, gradient = accumulated(lambda params, drawn: loss(params, frozen, drawn), params, drawn, parts)
        metrics = {"loss": value, FINITE: sharded_finite(placed, value, gradient), WEIGHT: weight}
        params, opt_state = updated(optimizer, gradient, params, opt_state)
        return params, opt_state, {**metrics, **recorded(opt_state)}

    return step


def train_step(
    loss: Loss,
    optimizer: optax.GradientTransformation,
    frozen: Any = None,
    draw: Draw = drawn_batch,
    placement: TrainingPlacement = ONE_DEVICE,
    specs: Any = None,
    parts: int = 1,
) -> Step:
    """Returns the step of a task (see `loop.Step`), on batches of this process; the other arguments are `compiled_step`'s.

    Args:
        frozen: arrays that the loss reads and training does not change, such as a drafter's target.
    """
    step = compiled_step(loss, optimizer, draw, placement, specs, parts)

    def run(params: Any, opt_state: Any, batch: Any, key: Array) -> tuple[Any, Any, Metrics]:
        return step(params, opt_state, frozen, placement.place(batch), portable_key(placement, key))

    return run


def portable_key(placement: TrainingPlacement, key: Array) -> Any:
    """Returns a key as an argument of a program: over a mesh, of which a process has some devices, its bits on the host."""
    return key if placement.mesh is None else np.asarray(jax.random.key_data(key))


def typed_key(key: Array) -> Array:
    """Returns the key of `portable_key` inside of a program."""
    return key if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(key)


@dataclass(frozen=True)
class Objective:
    """Training objective: arrays to train, and the loss.

    Attributes:
        title: title of the progress bar.
        specs: declaration of the trained arrays.
        is_hidden_matrix: see `text.make_optimizer`.
        loss: the loss; over a mesh with a plan, one with explicit collectives.
        draw: draws what is random in a batch.
        frozen: arrays that the loss reads and training does not change, sharded already.
        measured: loss for held-out text; None for `loss`.
        flops: floating-point operations per token; 0 if unknown.
    """

    title: str
    specs: Any
    is_hidden_matrix: Callable[[Any], Any]
    loss: Loss
    draw: Draw = drawn_batch
    frozen: Any = None
    measured: Loss | None = None
    flops: float = 0.0


def make_task(
    objective: Objective,
    init: Callable[[], Any],
    windows: Batches,
    run_fingerprint: dict[str, Any],
    placement: TrainingPlacement = ONE_DEVICE,
) -> Task:
    """Builds the task of an objective. Its checkpoints are independent of the placement.

    Args:
        objective: the objective.
        init: returns the initial parameters. Over a mesh, arrays that are sharded already are used directly, and DONATED;
            others are copied.
        windows: batches of this process.
        run_fingerprint: settings that a checkpoint must match, besides the options and the text.
        placement: devices and strategy.

    Raises:
        ValueError: the mesh does not divide an array or a batch, or processes have different settings or data.
    """
    options = windows.options
    specs = objective.specs
    frozen = objective.frozen
    if placement.plan is not None and placement.plan.dtype != options.compute_dtype:
        raise ValueError(f"expected a plan in {options.compute_dtype}, the compute dtype, found {placement.plan.dtype}")
    placement.check_batch(options.batch_size, parts=options.accumulate)
    optimizer = make_optimizer(options, objective.is_hidden_matrix, options.ops if placement.mesh is None else PLAIN)
    cast = partial(cast_loss, options) if placement.plan is None else lambda loss: loss  # explicit gathers cast the shards
    loss = cast(objective.loss)
    measured = cast(objective.measured or objective.loss)
    settings = {**windows.run_fingerprint(), **run_fingerprint}
    require_one_run(settings)
    held_out = list(map(placement.place, windows.held_out_batches()))
    tokens = windows.tokens_per_step

    @jax.jit
    def measure(params: Any, frozen: Any, batch: Any, key: Array) -> tuple[Array, Array]:
        return measured(params, frozen, objective.draw(frozen, batch, typed_key(key)))

    def evaluate(params: Any, step: int) -> Metrics:
        keys = [portable_key(placement, jax.random.key(n)) for n in range(len(held_out))]
        losses = [measure(params, frozen, batch, key) for batch, key in zip(held_out, keys, strict=True)]
        return {"held_out_loss": sum(loss * n for loss, n in losses) / sum(n for _, n in losses)}

    return Task(
        objective.title,
        settings,
        init=partial(initial_state, placement, specs, optimizer, init, frozen),
        step=train_step(loss, optimizer, frozen, objective.draw, placement, specs, options.accumulate),
        batches=windows.batches,
        evaluate=evaluate,
        steps=options.steps,
        evaluate_every=options.evaluate_every,
        save_every=options.save_every,
        seed=options.seed,
        progress=("tokens", tokens),
        flops=objective.flops * tokens,
        devices=1 if placement.mesh is None else placement.mesh.size,
        position=windows if isinstance(windows, DataPosition) else None,
        keep=options.keep,
        checkpoints=options.checkpoints,
        log=options.log,
    )


def require_one_run(settings: Mapping[str, Any]) -> None:
    """Raises a `ValueError` in all processes if one has other settings or data. All processes must call this function."""
    first, *others = (json.loads(text) for text in gather_texts(json.dumps(settings)))
    for number, other in enumerate(others, 1):
        if differs := differing(first, other):
            found = "; ".join(f"{name}: process 0 {one!r}, process {number} {two!r}" for name, (one, two) in differs.items())
            raise ValueError(f"expected the same options and data in all processes, found others ({found})")


def initial_state(
    placement: TrainingPlacement,
    specs: Any,
    optimizer: optax.GradientTransformation,
    init: Callable[[], Any],
    frozen: Any = None,
) -> tuple[Any, Any]:
    """Returns initial parameters and optimizer state; see `make_task` for the arguments."""
    params = init()
    if placement.mesh is None:
        params = jax.tree.map(jnp.copy, params)  # training donates its arrays
        return params, optimizer.init(params)
    used = {id(leaf) for leaf in jax.tree.leaves(frozen)}

    def place(array: Array, sharding: NamedSharding) -> Array:
        if array.sharding == sharding and id(array) not in used:  # layers of a grown model share arrays
            used.add(id(array))
            return array
        return jnp.copy(jax.device_put(array, sharding))  # `device_put` may share a buffer

    placed = jax.tree.map(place, params, placement.shardings(specs))
    return placed, jax.jit(optimizer.init, out_shardings=state_shardings(placement, specs, optimizer))(placed)
