"""Weights prepared for the operations of a device, where each device holds a part of every matrix."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tilewright.kernels.linear.scaled import DividedMatrix
from tilewright.kernels.operations import Joined, Operations


def on_each_device(ops: Operations, mesh: Mesh) -> Operations:
    """Operations whose `prepare` takes parameters that lie over a mesh and prepares each device's part by itself.

    What comes of a matrix has a device's own meaning under `jax.shard_map` alone: its arrays are those of all devices one after
    another, and what it says of sizes is of one part. A process prepares what its own devices hold, matrix by matrix.

    8-bit weights with a scale for each output are the same numbers on any number of devices: the scale goes by the output's
    largest weight on all of them. Weights in blocks are the same where devices' parts end where blocks do. With the CPU
    kernels, which blocks of a row are rounded to 8 bits and which to 16 depends on a device's share of the row.
    """
    whole = NamedSharding(mesh, PartitionSpec())
    largest_of = jax.jit(lambda w: jnp.max(jnp.abs(w), axis=0), out_shardings=whole)

    def matrix(w: Array | DividedMatrix, name: str, **which: bool) -> Any:
        sharding = w.sharding
        # All inputs of an output are here unless the first dim is divided. What a file keeps has its scales.
        divided = isinstance(sharding, NamedSharding) and len(sharding.spec) > 0 and sharding.spec[0] is not None
        known = isinstance(w, DividedMatrix) or not divided
        largest = None if known else np.asarray(largest_of(w).addressable_data(0), np.float32)
        return by_device(lambda part: ops.prepare_matrix(part, name, largest=largest, **which), w, mesh)

    def joined(w: Joined, name: str) -> Any:
        return by_device(lambda part: ops.prepare_joined(part, name), w, mesh)

    def groups(w: Any, count: int, name: str) -> Any:
        """Each device has whole matrices of some of the groups."""
        return by_device(lambda part: ops.prepare_groups(part, count // mesh.size, name), w, mesh)

    def table(w: Array | DividedMatrix, name: str) -> Any:
        return by_device(lambda part: ops.prepare_table(part, name), w, mesh) if ops.scales_tables else w

    return (
        replace(ops, prepare_matrix=matrix, prepare_joined=joined, prepare_groups=groups, prepare_table=table)
        if ops.prepares
        else ops
    )


def shards(array: Array) -> dict[Any, Array]:
    return {shard.device: shard.data for shard in array.addressable_shards}


def by_device(prepare: Callable[[Any], Any], weight: Any, mesh: Mesh) -> Any:
    """`prepare` of what each of this process's devices holds of a weight, each array of the results as one over the mesh."""
    leaves, structure = jax.tree.flatten(weight)
    held = [leaf.parts if isinstance(leaf, DividedMatrix) else shards(leaf) for leaf in leaves]
    devices = [device for device in mesh.devices.flat if device in held[0]]
    made = [prepare(jax.tree.unflatten(structure, [parts[device] for parts in held])) for device in devices]
    over = NamedSharding(mesh, PartitionSpec(mesh.axis_names))

    def whole(*parts: Array) -> Array:
        shape = (len(parts[0]) * mesh.size, *parts[0].shape[1:])
        placed = [jax.device_put(part, device) for part, device in zip(parts, devices, strict=True)]
        return held_as_compiled(jax.make_array_from_single_device_arrays(shape, over, placed))

    return jax.tree.map(whole, *made)


def held_as_compiled(array: Array) -> Array:
    """An array that a program which is compiled ahead of time takes.

    JAX 0.10 says of arrays of 4 bits on CPUs that they have no layout of such, and then refuses them: they become 8 bits there.
    """
    if array.dtype not in (jnp.int4, jnp.uint4):
        return array
    layout = cast(Any, array).format.layout  # JAX's stubs do not have it
    return array if layout is None or layout.sub_byte_element_size_in_bits == 4 else array.astype(jnp.int8)
