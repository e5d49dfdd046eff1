"""Auto-sharded train step (GSPMD) for a small model beside a large frozen one, such as a drafter and its target.

Parameters, optimizer state and target are sharded by their declared axes, matrices along "fsdp" and "tp", and batches along
"fsdp". XLA's partitioner places the collectives; `sharded.py` places them explicitly, for stacks of layers only.
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
from tilewright.train.text import Batches, Loss, TextOptions, cast_loss, make_optimizer, text_task


@dataclass(frozen=True)
class TrainingPlacement:
    """Devices of the training, and the shardings of arrays on them.

    Attributes:
        mesh: mesh of `sharded.data_mesh`; None for one device.
    """

    mesh: Mesh | None = None

    def shardings(self, specs: Any) -> Any:
        """Returns the shardings of declared arrays, None on one device. Raises a `ValueError` if the mesh does not fit."""
        return None if self.mesh is None else shardings(specs, self.mesh, FULLY_SHARDED_TENSOR_PARALLEL)

    def ops(self, options: TextOptions) -> Operations:
        """Returns the operations: over a mesh XLA's own, since the partitioner cannot shard kernels."""
        return options.ops if self.mesh is None else PLAIN

    def place(self, batch: Any) -> Any:
        """Shards a batch by rows."""
        if self.mesh is None:
            return batch
        return jax.tree.map(partial(jax.device_put, device=NamedSharding(self.mesh, PartitionSpec(DATA))), batch)

    def check_batch(self, rows: int) -> None:
        """Raises a `ValueError` if the mesh does not divide `rows`."""
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
    """Builds `text.text_task` over a mesh or on one device; see `text.text_task` for further arguments.

    Args:
        frozen: frozen arrays, sharded already.
        specs: declaration of the trained parameters.
        placement: devices.

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
    step = gradient_step(cast_loss(options, loss), optimizer, frozen, (placed, state, None))

    def start() -> tuple[Any, Any]:
        params = jax.tree.map(jnp.copy, jax.device_put(init(), placed))
        return params, jax.jit(optimizer.init, out_shardings=state)(params)

    def run(params: Any, opt_state: Any, batch: Any, key: Array) -> Any:
        return step(params, opt_state, placement.place(batch), key)

    return replace(task, init=start, step=run, devices=placement.mesh.size)
