"""A step that XLA's partitioner divides: of a small model that trains beside a large one, which stays as it is.

A drafter, its optimiser's state and its target are sharded by their declared axes, matrices along "fsdp" and "tp", and batches
along "fsdp". When what travels is the compiler's choice; where that matters there is `sharded.py`, for stacks of layers alone.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tilewright.kernels.operations import Operations
from tilewright.kernels.select import PLAIN
from tilewright.models.params import abstract
from tilewright.parallel.sharding import FULLY_SHARDED_TENSOR_PARALLEL, shardings
from tilewright.train.loop import Task, gradient_step
from tilewright.train.sharded import DATA, places_of_state
from tilewright.train.text import Batches, Loss, TextOptions, in_compute_dtype, make_optimizer, text_task


@dataclass(frozen=True)
class TrainingPlacement:
    """Devices that a model is trained over, and how its arrays lie on them.

    Attributes:
        mesh: of `sharded.data_mesh`; None for one device.
    """

    mesh: Mesh | None = None

    def shardings(self, specs: Any) -> Any:
        """Shardings of declared arrays; None on one device. Raises a `ValueError` where the mesh does not divide them."""
        return None if self.mesh is None else shardings(specs, self.mesh, FULLY_SHARDED_TENSOR_PARALLEL)

    def ops(self, options: TextOptions) -> Operations:
        """Operations that compute: the partitioner divides XLA's own operations, and no kernels."""
        return options.ops if self.mesh is None else PLAIN

    def place(self, batch: Any) -> Any:
        """Divides a batch by its rows."""
        if self.mesh is None:
            return batch
        return jax.tree.map(partial(jax.device_put, device=NamedSharding(self.mesh, PartitionSpec(DATA))), batch)

    def check_batch(self, rows: int) -> None:
        """Raises a `ValueError` where the mesh does not divide so many rows."""
        if self.mesh is not None and rows % self.mesh.shape[DATA]:
            raise ValueError(f"expected a batch that fsdp={self.mesh.shape[DATA]} divides, found {rows}")


def partitioned_task(
    title: str,
    windows: Batches,
    run_fingerprint: dict[str, Any],
    loss: Loss,
    frozen: Any,
    init: Callable[[], Any],
    specs: Any,
    is_hidden_matrix: Callable[[Any], Any],
    placement: TrainingPlacement,
) -> Task:
    """`text.text_task` over a mesh, or on one device.

    Args:
        frozen: divided already.
        specs: the declaration of what is trained.

    Raises:
        ValueError: the mesh does not divide an array or a batch.
    """
    options = windows.options
    placed = placement.shardings(specs)
    placement.check_batch(options.batch_size)
    task = text_task(title, loss, init, is_hidden_matrix, windows, run_fingerprint, frozen, placement.place)
    if placement.mesh is None:
        return task
    optimizer = make_optimizer(options, is_hidden_matrix)
    state = places_of_state(abstract(specs, jnp.float32, placed), placement.mesh, optimizer)
    step = gradient_step(in_compute_dtype(options, loss), optimizer, frozen, (placed, state, None))

    def start() -> tuple[Any, Any]:
        params = jax.tree.map(jnp.copy, jax.device_put(init(), placed))
        return params, jax.jit(optimizer.init, out_shardings=state)(params)

    def run(params: Any, opt_state: Any, batch: Any, key: Array) -> Any:
        return step(params, opt_state, placement.place(batch), key)

    return replace(task, init=start, step=run, devices=placement.mesh.size)
