"""Which part of each array a device holds: shardings derived from declared axes, a mesh and a table of rules.

A model declares what each dim of an array is (its logical axis: "vocab", "heads", "mlp"). A rule maps a logical axis to the
mesh axis, or axes, that divide such dims, or to None where every device holds the whole dim. Every logical axis needs a rule,
so that nothing is replicated by oversight.
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
    """Protocol of a declared array (`models.params.ArraySpec` offers it).

    `axes` holds the logical axis of each dim; `units`, where it is not empty, how many entries of each dim stay together.
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
"""One or several; the first of several cuts a dim into the largest pieces, and the next one cuts those."""


@dataclass(frozen=True)
class IfDivides:
    """A rule under which a dim that does not divide evenly is held whole by every device, instead of being an error."""

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
"""Every device holds everything."""

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
"""Axes that tensor parallelism divides over all devices; key/value heads besides."""

TENSOR_PARALLEL: Rules = MappingProxyType({**WHOLE, **dict.fromkeys((*DIVIDED, "kv_heads"), "tp")})
"""Heads, MLP columns, experts and vocabulary over "tp" (Shoeybi et al., "Megatron-LM", 2019). With more devices than key/value
heads, see `GROUPED`: a device must hold the very head that its queries read."""

GROUPED_AXES = ("kv", "group")
"""Axes that `grouped_mesh` makes of one axis. Together they are the axis of a schedule."""

GROUPED: Rules = MappingProxyType(
    {
        **WHOLE,
        **dict.fromkeys(DIVIDED, GROUPED_AXES),
        "kv_heads": "kv",
    }
)
"""Tensor parallelism over a `grouped_mesh`: the devices of a "group" hold the same key/value heads, and share their queries.
Nothing else is held twice; of weights and caches, "kv" divides what belongs to key/value heads."""

FULLY_SHARDED: Rules = MappingProxyType({**WHOLE, "hidden": "fsdp"})
"""The hidden dim of every array over "fsdp": no array is whole anywhere but the norms of single heads (Rajbhandari et al.,
"ZeRO", 2020, stage 3)."""

FULLY_SHARDED_TENSOR_PARALLEL: Rules = MappingProxyType({**TENSOR_PARALLEL, "kv_heads": IfDivides("tp"), "hidden": "fsdp"})
"""Both, over a mesh of "fsdp" and "tp", for programs that the compiler divides: where there are fewer key/value heads than
devices of "tp", each of these holds all of them."""


FULLY_SHARDED_GROUPED: Rules = MappingProxyType({**GROUPED, "hidden": "fsdp"})
"""`GROUPED`, and the hidden dim over "fsdp": for programs that gather weights themselves (`fully_sharded.py`)."""


def grouped_mesh(mesh: Mesh, axis: str, *, heads: int, kv_heads: int, **others: int) -> Mesh:
    """The mesh with one axis cut in two, `GROUPED_AXES`, for tensor parallelism over any number of devices.

    "kv" is as long as key/value heads can be divided, and "group" has the devices that share one of them.

    Args:
        axis: that divides a model's layers.
        heads, kv_heads: of the model.
        others: whatever else is divided over all devices, under its name: `vocabulary=128256`.

    Raises:
        ValueError: the mesh has no such axis, the devices do not divide the heads or something else, or they neither divide the
            key/value heads nor are a multiple of them. It says how many devices could.
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
    """Sizes of `GROUPED_AXES` over so many devices.

    Raises:
        ValueError: see `grouped_mesh`.
    """
    whole = {"heads": heads, **others}

    def fits(size: int) -> bool:
        return not any(count % size for count in whole.values()) and (kv_heads % size == 0 or size % kv_heads == 0)

    if not fits(size):
        expected = ", ".join(f"{count} {name}" for name, count in whole.items())
        could = [n for n in range(1, gcd(*whole.values()) + 1) if fits(n)]
        raise ValueError(
            f"expected devices that divide {expected}, and that divide {kv_heads} key/value heads or are a multiple of them: "
            f"{', '.join(map(str, could))}; found {size}"
        )
    kv = gcd(size, kv_heads)
    return kv, size // kv


def shardings(specs: Tree, mesh: Mesh | AbstractMesh, rules: Rules) -> Tree:
    """The tree with a `NamedSharding` for each declared array: for loading, initialisation, abstract shapes and `jax.jit`.

    Raises:
        ValueError: see `partition`.
    """
    return jax.tree.map(lambda spec: NamedSharding(mesh, partition(spec, mesh.shape, rules)), specs)


def shard_entries(specs: Tree, shardings: Tree) -> int:
    """Entries of all declared arrays of a tree that each device holds, under a tree of their shardings."""
    sizes = jax.tree.map(lambda spec, sharding: prod(sharding.shard_shape(spec.shape)), specs, shardings)
    return sum(jax.tree.leaves(sizes))


def partition(spec: Declared, mesh_sizes: Mapping[str, int], rules: Rules) -> PartitionSpec:
    """Partition spec of one array over a mesh, whose axes have these sizes.

    Raises:
        ValueError: a logical axis without a rule, a rule that names an axis that the mesh has not, a dim whose units do not
            divide evenly, or a mesh axis that would divide two dims.
    """
    units = spec.units or (1,) * len(spec.shape)
    dims = list(zip(spec.shape, spec.axes, units, strict=True))
    divided = [_axes_of_dim(spec.name, *dim, mesh_sizes, rules) for dim in dims]
    used = [axis for axes in divided for axis in axes]
    if twice := sorted({axis for axis in used if used.count(axis) > 1}):
        found = ", ".join(f"{axis!r} over {' × '.join(axes)}" for axis, axes in zip(spec.axes, divided, strict=True) if axes)
        raise ValueError(f"{spec.name}: expected {' and '.join(twice)} to divide one dim at most, found {found}")
    # Dims at the end that nothing divides are left out, as JAX does in what it returns: written otherwise, an equal sharding
    # would be another one to its caches, and a step whose result goes into the next would compile twice.
    while divided and not divided[-1]:
        divided.pop()
    return PartitionSpec(*(axes[0] if len(axes) == 1 else axes or None for axes in divided))


def _axes_of_dim(name: str, size: int, axis: str, unit: int, mesh_sizes: Mapping[str, int], rules: Rules) -> tuple[str, ...]:
    """The mesh axes that divide a dim of `size` entries, of which each `unit` stay together."""
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
