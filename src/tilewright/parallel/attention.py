"""Attention without a cache in programs that XLA's partitioner shards, which cannot shard kernels: each device runs the kernel
on its rows and heads.

Legend: B rows of a batch, T positions, N query heads, K key/value heads, D head size.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import jax
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Float

from tilewright.kernels.masks import AttentionMask
from tilewright.kernels.operations import PLAIN_SCORES, Operations, Scores
from tilewright.parallel.sharding import GROUPED_AXES


def with_sharded_attention(ops: Operations, mesh: Mesh, data: Sequence[str]) -> Operations:
    """Returns operations whose attention without a cache runs under `shard_map`, with a gradient.

    Axes that do not divide the rows, or the heads, compute all of them on every device.

    Args:
        ops: operations, of which only attention may have kernels.
        mesh: mesh of the program, perhaps of `sharding.grouped_mesh`.
        data: axes that shard rows; all others shard heads.
    """

    def size_of(axes: Sequence[str]) -> int:
        return prod(mesh.shape[axis] for axis in axes)

    rows_axes = tuple(data)
    rest = tuple(axis for axis in mesh.shape if axis not in rows_axes)
    kv_axes = tuple(axis for axis in rest if axis != GROUPED_AXES[1])
    groups = size_of(rest) // size_of(kv_axes)

    def attend(
        q: Float[Array, "B T N D"], cache: Any, mask: AttentionMask, block_kv: Any = None, scores: Scores = PLAIN_SCORES
    ) -> Float[Array, "B T N D"]:
        if cache is not None:
            return ops.attend(q, cache, mask, block_kv, scores)
        kv_heads = block_kv[0].shape[1]
        rows = None if len(q) % size_of(rows_axes) else rows_axes
        # Devices of a group share the queries of one key/value head.
        shards = kv_heads % size_of(kv_axes) == 0 and (groups == 1 or kv_heads == size_of(kv_axes))
        of_queries, of_keys = (rest, kv_axes) if shards and q.shape[2] % size_of(rest) == 0 else (None, None)

        def inside(q: Array, mask: AttentionMask, block_kv: Any, sinks: Any) -> Array:
            return ops.attend(q, None, mask, block_kv, scores._replace(sinks=sinks))

        queries = P(rows, None, of_queries)
        whole_rows = jax.tree.map(lambda part: P(rows), mask)
        sinks = None if scores.sinks is None else P(of_queries)
        specs = (queries, whole_rows, (P(rows, of_keys),) * 2, sinks)
        run = jax.shard_map(inside, mesh=mesh, in_specs=specs, out_specs=queries, check_vma=False)
        return run(q, mask, tuple(block_kv), scores.sinks)

    return replace(ops, name=f"{ops.name}, sharded attention", attend=attend)
