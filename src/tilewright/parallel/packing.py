"""Preparation (packing) of weights that are sharded over devices."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tilewright.kernels.linear.scaled import ShardedMatrix
from tilewright.kernels.operations import Joined, Operations


def preparing_shards(ops: Operations, mesh: Mesh) -> Operations:
    """Returns operations with a `prepare` that takes sharded parameters and prepares each device's shard separately.

    A prepared matrix is valid under `jax.shard_map` only: its arrays concatenate those of all devices, and its sizes are those
    of one shard. A process prepares the shards of its devices, matrix by matrix.

    8-bit weights with a scale per output are equal on any number of devices: the scale comes from the output's largest weight
    over all devices. Weights in blocks are equal where shards end at block boundaries. With the CPU kernels, a device's share
    of a row decides which blocks of the row are rounded to 8 bits and which to 16.
    """
    whole = NamedSharding(mesh, PartitionSpec())
    largest_of = jax.jit(lambda w: jnp.max(jnp.abs(w), axis=0), out_shardings=whole)

    def matrix(w: Array | ShardedMatrix, name: str, **options: bool) -> Any:
        sharding = w.sharding
        # A device has all inputs of an output unless the first dim is sharded. Stored quantised weights bring their scales.
        divided = isinstance(sharding, NamedSharding) and len(sharding.spec) > 0 and sharding.spec[0] is not None
        local = isinstance(w, ShardedMatrix) or not divided
        largest = None if local else np.asarray(largest_of(w).addressable_data(0), np.float32)
        return by_device(lambda part: ops.prepare_matrix(part, name, largest=largest, **options), w, mesh)

    def joined(w: Joined, name: str) -> Any:
        return by_device(lambda part: ops.prepare_joined(part, name), w, mesh)

    def groups(w: Any, count: int, name: str) -> Any:
        """Prepares the groups of each device; a device has whole matrices."""
        return by_device(lambda part: ops.prepare_groups(part, count // mesh.size, name), w, mesh)

    def table(w: Array | ShardedMatrix, name: str) -> Any:
        return by_device(lambda part: ops.prepare_table(part, name), w, mesh) if ops.scales_tables else w

    return (
        replace(ops, prepare_matrix=matrix, prepare_joined=joined, prepare_groups=groups, prepare_table=table)
        if ops.prepares
        else ops
    )


def shards(array: Array) -> dict[Any, Array]:
    return {shard.device: shard.data for shard in array.addressable_shards}


def by_device(prepare: Callable[[Any], Any], weight: Any, mesh: Mesh) -> Any:
    """Applies `prepare` to each local device's shard of a weight, and joins the results into arrays over the mesh."""
    leaves, structure = jax.tree.flatten(weight)
    held = [leaf.parts if isinstance(leaf, ShardedMatrix) else shards(leaf) for leaf in leaves]
    devices = [device for device in mesh.devices.flat if device in held[0]]
    prepared = [prepare(jax.tree.unflatten(structure, [parts[device] for parts in held])) for device in devices]
    over = NamedSharding(mesh, PartitionSpec(mesh.axis_names))

    def whole(*parts: Array) -> Array:
        shape = (len(parts[0]) * mesh.size, *parts[0].shape[1:])
        placed = [jax.device_put(part, device) for part, device in zip(parts, devices, strict=True)]
        return held_as_compiled(jax.make_array_from_single_device_arrays(shape, over, placed))

    return jax.tree.map(whole, *prepared)


def held_as_compiled(array: Array) -> Array:
    """Returns an array that programs compiled ahead of time accept.

    JAX 0.10 reports no 4-bit layout for 4-bit arrays on CPUs and then refuses them; such arrays are converted to 8 bits.
    """
    if array.dtype not in (jnp.int4, jnp.uint4):
        return array
    layout = cast(Any, array).format.layout  # JAX's stubs do not have it
    return array if layout is None or layout.sub_byte_element_size_in_bits == 4 else array.astype(jnp.int8)
