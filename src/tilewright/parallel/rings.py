"""Exchanges in which every device sees every shard, within `jax.shard_map`.

`ring` passes the shards round and works on the one at hand while the next is under way; `gathered` brings them all together
first. A visit is the same function for both, so what is computed does not depend on how data travels. `ring_collect` and
`gathered_collect` also bring home what the devices give to the shards that they see, as a gradient or a reduce-scatter does.

A ring is unrolled, for XLA overlaps a transfer with what stands beside it in the same program, and that may differ from hop to
hop. After Wang et al., "Overlap Communication with Dependent Computation via Decomposition" (ASPLOS 2023).
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

Tree = Any
"""A pytree of arrays; a shard is one, and what is computed of it."""


def shift(tree: Tree, axis: str, by: int = 1) -> Tree:
    """Each device takes what the device `by` places behind it on the axis holds; the last stands before the first."""
    size = jax.lax.axis_size(axis)
    if by % size == 0:
        return tree
    pairs = [(device, (device - by) % size) for device in range(size)]
    return jax.tree.map(lambda leaf: jax.lax.ppermute(leaf, axis, pairs), tree)


def checked_hops(hops: Sequence[int] | None, axis: str) -> list[int]:
    """Which hops have a visit, by default all; the first of them needs no transfer."""
    size = jax.lax.axis_size(axis)
    chosen = list(range(size)) if hops is None else list(hops)
    if not chosen or chosen != sorted(set(chosen)) or not 0 <= chosen[0] <= chosen[-1] < size:
        raise ValueError(f"expected ascending hops from 0 to below the {size} devices of {axis!r}, found {chosen}")
    return chosen


def ring(
    visit: Callable[[int, Tree, Tree], Tree], shard: Tree, total: Tree, axis: str, hops: Sequence[int] | None = None
) -> Tree:
    """Every shard visits every device.

    Args:
        visit: `visit(hop, shard, total) -> total`. At hop h, device i is visited by the shard of device `(i + h) % size`.
        shard: this device's.
        total: what the first visit starts from.
        axis: name of the mesh axis.
        hops: those at which there is a visit; the shards skip the others.

    Returns:
        the total after the last visit. It is differentiable, and its gradient is a ring in the other direction.
    """
    chosen = checked_hops(hops, axis)
    shard = shift(shard, axis, chosen[0])
    for hop, after in zip(chosen, [*chosen[1:], None], strict=True):
        arriving = None if after is None else shift(shard, axis, after - hop)  # under way while the visit is computed
        total = visit(hop, shard, total)
        shard = arriving
    return total


def ring_collect(
    visit: Callable[[int, Tree, Tree], tuple[Tree, Tree]],
    shard: Tree,
    total: Tree,
    axis: str,
    hops: Sequence[int] | None = None,
) -> tuple[Tree, Tree]:
    """Every shard visits every device and is given something there, and the sum of it all comes home.

    Args:
        visit: `visit(hop, shard, total) -> (total, given)`, where `given` always has the same shapes. At hop h, device i is
            visited by the shard of device `(i + h) % size`.
        shard, total, axis, hops: see `ring`; nothing is given at a hop without a visit. The shard may be an empty tuple.

    Returns:
        the total after the last visit, and the sum of what all devices gave to this device's shard.
    """
    chosen = checked_hops(hops, axis)
    shard, carried = shift(shard, axis, chosen[0]), None
    for hop, after in zip(chosen, [*chosen[1:], jax.lax.axis_size(axis)], strict=True):
        arriving = None if hop == chosen[-1] else shift(shard, axis, after - hop)
        total, given = visit(hop, shard, total)
        # What was carried here has travelled while this visit was computed.
        carried = given if carried is None else jax.tree.map(lambda a, b: a + b, carried, given)
        carried = shift(carried, axis, after - hop)
        shard = arriving
    return total, carried


def gathered(visit: Callable[[int, Tree, Tree], Tree], shard: Tree, total: Tree, axis: str) -> Tree:
    """One visit, at hop 0, of all shards at once: their leading dims one after another, in the order of the devices."""
    return visit(0, gather(shard, axis), total)


def gathered_collect(
    visit: Callable[[int, Tree, Tree], tuple[Tree, Tree]], shard: Tree, total: Tree, axis: str
) -> tuple[Tree, Tree]:
    """`gathered`, where what is given is for all shards one after another, and each gets its own sum."""
    total, given = visit(0, gather(shard, axis), total)
    return total, jax.tree.map(lambda leaf: jax.lax.psum_scatter(leaf, axis, tiled=True), given)


def gather(shard: Tree, axis: str) -> Tree:
    """The shards of all devices, their leading dims one after another."""
    return jax.tree.map(lambda leaf: jax.lax.all_gather(leaf, axis, tiled=True), shard)
