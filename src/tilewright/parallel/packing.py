"""Weights prepared for the operations of a device, where each device holds a part of every matrix."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tilewright.kernels.operations import Joined, Operations


def on_each_device(ops: Operations, mesh: Mesh) -> Operations:
    """Operations whose `prepare` takes parameters that lie over a mesh and prepares each device's part by itself.

    What comes of a matrix has a device's own meaning under `jax.shard_map` alone: its arrays are those of all devices one after
    another, and what it says of sizes is of one part. A process prepares what its own devices hold, matrix by matrix.

    8-bit weights are the same numbers on any number of devices: an output's scale goes by its largest weight on all of them.
    What they are multiplied with is rounded row by row on each device, whose largest number depends on its share of the row.

    Raises:
        ValueError: the weights are to be in blocks of 4 bits, which nothing here divides.
    """
    if ops.keeps_blocks:
        raise ValueError("4-bit weights lie on one device: expected no mesh beside them, found one (8 bits can be divided)")

    whole = NamedSharding(mesh, PartitionSpec())
    largest_of = jax.jit(lambda w: jnp.max(jnp.abs(w), axis=0), out_shardings=whole)

    def matrix(w: Array, name: str, head: bool = False, exact: bool = False) -> Any:
        sharding = w.sharding
        # All inputs of an output are here unless the first dim is divided.
        divided = isinstance(sharding, NamedSharding) and len(sharding.spec) > 0 and sharding.spec[0] is not None
        largest = np.asarray(largest_of(w).addressable_data(0), np.float32) if divided else None
        return by_device(lambda part: ops.prepare_matrix(part, name, largest=largest, head=head, exact=exact), w, mesh)

    def joined(w: Joined, name: str) -> Any:
        return by_device(lambda part: ops.prepare_joined(part, name), w, mesh)

    def groups(w: Any, count: int, name: str) -> Any:
        """Each device has whole matrices of some of the groups."""
        return by_device(lambda part: ops.prepare_groups(part, count // mesh.size, name), w, mesh)

    return replace(ops, prepare_matrix=matrix, prepare_joined=joined, prepare_groups=groups) if ops.prepares else ops


def by_device(prepare: Callable[[Any], Any], weight: Any, mesh: Mesh) -> Any:
    """`prepare` of what each of this process's devices holds of a weight, each array of the results as one over the mesh."""
    leaves, structure = jax.tree.flatten(weight)
    held = [{shard.device: shard.data for shard in leaf.addressable_shards} for leaf in leaves]
    devices = [device for device in mesh.devices.flat if device in held[0]]
    made = [prepare(jax.tree.unflatten(structure, [parts[device] for parts in held])) for device in devices]
    over = NamedSharding(mesh, PartitionSpec(mesh.axis_names))

    def whole(*parts: Array) -> Array:
        shape = (len(parts[0]) * mesh.size, *parts[0].shape[1:])
        placed = [jax.device_put(part, device) for part, device in zip(parts, devices, strict=True)]
        return jax.make_array_from_single_device_arrays(shape, over, placed)

    return jax.tree.map(whole, *made)
