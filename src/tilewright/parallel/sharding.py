"""Shardings of declared arrays, from their logical axes, a mesh and a table of rules.

A model declares a logical axis for each dim of an array ("vocab", "heads", "mlp"). A rule maps a logical axis to the mesh axis
or axes that shard such dims, or to None for replication. Every logical axis needs a rule, so that no array is replicated by
oversight.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd, prod
from types import MappingProxyType
from typing import Protocol, TypeVar, runtime_checkable

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

Tree = TypeVar("Tree")


@runtime_checkable
class Declared(Protocol):
    """Protocol of a declared array, such as `models.params.ArraySpec`.

    Attributes:
        axes: logical axis of each dim.
        units: number of entries of each dim that stay together; empty for 1 each.
    """

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def axes(self) -> tuple[str, ...]: ...
    @property
    def units(self) -> tuple[int, ...]: ...


MeshAxes = str | tuple[str, ...]
"""A mesh axis or several; the first of several is the outermost."""


@dataclass(frozen=True)
class IfDivides:
    """A rule that replicates a dim which does not divide evenly, instead of raising an error."""

    axes: MeshAxes


Rules = Mapping[str, MeshAxes | IfDivides | None]

WHOLE: Rules = MappingProxyType(
    dict.fromkeys(
        (
            "vocab",
            "hidden",
            "heads",
            "kv_heads",
            "head",
            "query_heads",
            "mlp",
            "experts",
            "expert",
            "gate_up",
            "router",
            "taps",
            "conv",
            "rank",
            "lattice",
            "delta_channels",
            "delta_values",
            "delta_heads",
            "delta_head",
            "single",
            "shared_expert",
        )
    )
)
"""Rules that replicate everything."""

DIVIDED = (
    "vocab",
    "heads",
    "query_heads",
    "mlp",
    "experts",
    "shared_expert",
    "delta_channels",
    "delta_values",
    "delta_heads",
)
"""Logical axes that tensor parallelism shards over all devices; key/value heads have rules of their own."""

TENSOR_PARALLEL: Rules = MappingProxyType({**WHOLE, **dict.fromkeys((*DIVIDED, "kv_heads"), "tp")})
"""Rules that shard heads, MLP columns, experts and vocabulary over "tp" (Shoeybi et al., "Megatron-LM", 2019).

With more devices than key/value heads use `GROUPED`: a device must have the key/value heads that its queries read."""

GROUPED_AXES = ("kv", "group")
"""Mesh axes that `grouped_mesh` makes from one axis; together they are the axis of a tensor-parallel strategy."""

GROUPED: Rules = MappingProxyType(
    {
        **WHOLE,
        **dict.fromkeys(DIVIDED, GROUPED_AXES),
        "kv_heads": "kv",
    }
)
"""Rules of tensor parallelism over a `grouped_mesh`: devices of a "group" replicate key/value heads and share their queries.

Weights and caches of key/value heads are sharded over "kv"; nothing else is replicated."""

FULLY_SHARDED_TENSOR_PARALLEL: Rules = MappingProxyType({**TENSOR_PARALLEL, "kv_heads": IfDivides("tp"), "hidden": "fsdp"})
"""Rules of fully sharded training with tensor parallelism, for programs that the compiler shards (GSPMD).

The hidden dim is sharded over "fsdp" (Rajbhandari et al., "ZeRO", 2020, stage 3), other dims as in `TENSOR_PARALLEL`. Norms of
single heads have no hidden dim and are replicated. Key/value heads that "tp" does not divide are replicated over "tp"."""

FULLY_SHARDED_GROUPED: Rules = MappingProxyType({**GROUPED, "hidden": "fsdp"})
"""Rules of `GROUPED` with the hidden dim over "fsdp", for programs that gather weights themselves (`fully_sharded.py`)."""


def grouped_mesh(mesh: Mesh, axis: str, *, heads: int, kv_heads: int, **others: int) -> Mesh:
    """Splits one axis of a mesh into `GROUPED_AXES`, for tensor parallelism over more devices than key/value heads.

    The size of "kv" is the greatest common divisor of devices and key/value heads; devices of a "group" share heads.

    Args:
        axis: mesh axis of tensor parallelism.
        heads, kv_heads: number of query heads and of key/value heads.
        others: further sizes that the devices must divide, by name, such as `vocabulary=128256`.

    Raises:
        ValueError: the mesh lacks the axis; the devices do not divide the heads or another size; or they neither divide the
            key/value heads nor are a multiple of them. The message lists the numbers of devices that fit.
    """
    if axis not in mesh.shape:
        raise ValueError(f"expected a mesh with the axis {axis!r}, found {', '.join(mesh.shape)}")
    sizes = dict(mesh.shape)
    at = list(sizes).index(axis)
    names = list(sizes)
    shape = list(sizes.values())
    names[at : at + 1] = GROUPED_AXES
    shape[at : at + 1] = grouping(sizes[axis], heads=heads, kv_heads=kv_heads, **others)
    return Mesh(mesh.devices.reshape(shape), tuple(names), axis_types=(AxisType.Auto,) * len(shape))


def grouping(size: int, *, heads: int, kv_heads: int, **others: int) -> tuple[int, int]:
    """Sizes of `GROUPED_AXES` for `size` devices.

    Raises:
        ValueError: see `grouped_mesh`.
    """
    whole = {"heads": heads, **others}

    def fits(size: int) -> bool:
        return not any(count % size for count in whole.values()) and (kv_heads % size == 0 or size % kv_heads == 0)

    if not fits(size):
        expected = ", ".join(f"{count} {name}" for name, count in whole.items())
        fitting = [n for n in range(1, gcd(*whole.values()) + 1) if fits(n)]
        raise ValueError(
            f"expected devices that divide {expected}, and that divide {kv_heads} key/value heads or are a multiple of them: "
            f"{', '.join(map(str, fitting))}; found {size}"
        )
    kv = gcd(size, kv_heads)
    return kv, size // kv


def shardings(specs: Tree, mesh: Mesh | AbstractMesh, rules: Rules) -> Tree:
    """Returns a tree with the `NamedSharding` of each declared array.

    Raises:
        ValueError: see `partition`.
    """
    return jax.tree.map(lambda spec: NamedSharding(mesh, partition(spec, mesh.shape, rules)), specs)


def shard_entries(specs: Tree, shardings: Tree) -> int:
    """Number of entries of all declared arrays per device, under a tree of their shardings."""
    sizes = jax.tree.map(lambda spec, sharding: prod(sharding.shard_shape(spec.shape)), specs, shardings)
    return sum(jax.tree.leaves(sizes))


def partition(spec: Declared, mesh_sizes: Mapping[str, int], rules: Rules) -> PartitionSpec:
    """Returns the partition spec of one array, over a mesh with axes of these sizes.

    Raises:
        ValueError: a logical axis has no rule; a rule names an axis missing from the mesh; the units of a dim do not divide
            evenly; or a mesh axis would shard two dims.
    """
    units = spec.units or (1,) * len(spec.shape)
    dims = list(zip(spec.shape, spec.axes, units, strict=True))
    divided = [_axes_of_dim(spec.name, *dim, mesh_sizes, rules) for dim in dims]
    used = [axis for axes in divided for axis in axes]
    if twice := sorted({axis for axis in used if used.count(axis) > 1}):
        found = ", ".join(f"{axis!r} over {' × '.join(axes)}" for axis, axes in zip(spec.axes, divided, strict=True) if axes)
        raise ValueError(f"{spec.name}: expected {' and '.join(twice)} to divide one dim at most, found {found}")
    # Trailing replicated dims are left out, as in the specs that JAX returns. JAX's caches tell equal shardings with different
    # specs apart, and a train step with its own result as input would compile twice.
    while divided and not divided[-1]:
        divided.pop()
    return PartitionSpec(*(axes[0] if len(axes) == 1 else axes or None for axes in divided))


def _axes_of_dim(name: str, size: int, axis: str, unit: int, mesh_sizes: Mapping[str, int], rules: Rules) -> tuple[str, ...]:
    """Returns the mesh axes that shard a dim of `size` entries in units of `unit` entries."""
    if axis not in rules:
        raise ValueError(f"{name}: expected a rule for each logical axis, found none for {axis!r}, only {', '.join(rules)}")
    rule = rules[axis]
    if rule is None:
        return ()
    chosen = rule.axes if isinstance(rule, IfDivides) else rule
    names = (chosen,) if isinstance(chosen, str) else chosen
    if unknown := [mesh_axis for mesh_axis in names if mesh_axis not in mesh_sizes]:
        found = f"{', '.join(unknown)} in the rule for {axis!r}"
        raise ValueError(f"{name}: expected axes of the mesh ({', '.join(mesh_sizes)}), found {found}")
    devices = prod(mesh_sizes[mesh_axis] for mesh_axis in names)
    if size % (unit * devices) == 0:
        return names
    if isinstance(rule, IfDivides):
        return ()
    over = " × ".join(f"{mesh_axis}={mesh_sizes[mesh_axis]}" for mesh_axis in names)
    raise ValueError(f"{name}: expected the dim {axis!r} to divide evenly over {over}, found {size // unit} units of {unit}")
