"""Placement of a language model over several devices: shardings of its arrays, and programs that each device runs on its part.

The target is sharded by heads, MLP columns and vocabulary, and its caches by key/value heads. The drafter and the state of the
rows are replicated. Each device samples and accepts by itself, from the same numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tilewright.hardware.layers import LayerShapes, sharded_layer
from tilewright.kernels.operations import Operations
from tilewright.models import decoder
from tilewright.models.decoder import DecoderConfig, DecoderParams
from tilewright.models.registry import FAMILIES
from tilewright.parallel.auto import AUTO, STRATEGIES, Auto, mesh_fabric, strategy_of
from tilewright.parallel.compiling import compile_over
from tilewright.parallel.exact import Exact, head_by_head_operations
from tilewright.parallel.experts import with_local_experts
from tilewright.parallel.packing import preparing_shards
from tilewright.parallel.sharding import GROUPED, GROUPED_AXES, grouped_mesh, shardings
from tilewright.parallel.strategies import Sequence, TensorParallel
from tilewright.runtime.state import Target

Tree = TypeVar("Tree")

SYNC = "sync"
EXACT = "exact"
WHOLE = PartitionSpec()
"""Partition spec of replicated arrays."""


@dataclass(frozen=True)
class Placement:
    """Devices that share a model, and their schedule.

    Attributes:
        mesh: mesh with the axes `GROUPED_AXES`, made by `placement_over`.
        layer: matrices of a layer on each device.
        name: name of the schedule, among `STRATEGIES`, or "auto".
        compiler_options: compiles with the options of `parallel/compiling.py` if the devices are TPUs.
    """

    mesh: Mesh
    layer: LayerShapes
    name: str = SYNC
    compiler_options: bool = False

    @property
    def schedule(self) -> TensorParallel:
        return strategy_of(self.name, GROUPED_AXES, self.layer, mesh_fabric(self.mesh))

    def why(self, positions: int) -> str | None:
        """Describes the choices of schedule "auto" and of the expert exchange for that many positions of a row, with reasons.

        None if there is nothing to choose.
        """
        schedule = self.schedule
        found = list[str]()
        if isinstance(schedule, Auto):
            choice = schedule.choice(positions, positions % 2 == 0)
            found.append(choice.why)
            schedule = schedule.chosen(choice.name)
        return "; ".join(filter(None, (*found, exchange_of(schedule, self.layer, positions)))) or None

    def shardings(self, specs: DecoderParams) -> DecoderParams:
        """Returns the shardings of a model's declared arrays."""
        return shardings(specs, self.mesh, GROUPED)

    def operations(self, ops: Operations) -> Operations:
        """Returns operations that prepare each device's part of a weight."""
        return preparing_shards(ops, self.mesh)

    def running(self, ops: Operations) -> Operations:
        """Returns operations for a program that each device runs on its part of the model."""
        return with_local_experts(head_by_head_operations(ops) if self.name == EXACT else ops)

    def over(self, target: Target) -> Target:
        """Returns a target whose layers these devices share."""
        return replace(
            target,
            ops=self.running(target.ops),
            schedule=self.schedule,
            mesh=self.mesh,
            compiler_options=self.compiler_options,
        )

    def prepared(self, config: DecoderConfig, ops: Operations, params: DecoderParams) -> DecoderParams:
        """Shards a model's parameters, and prepares each device's part for the operations."""
        placed = jax.device_put(params, self.shardings(decoder.declare(config)))
        return decoder.prepare(config, self.operations(ops), placed)

    def whole(self, params: Tree) -> Tree:
        """Replicates arrays on all devices."""
        return jax.device_put(params, NamedSharding(self.mesh, WHOLE))


def check_schedule(mesh: Mesh | None, schedule: str | None, compiler_options: bool = False) -> None:
    """Raises a `ValueError` for an unknown schedule, a mesh of several axes, or options without a mesh."""
    if schedule is not None and schedule not in (*STRATEGIES, AUTO):
        raise ValueError(f"expected a schedule among {', '.join((*STRATEGIES, AUTO))}, found {schedule!r}")
    if schedule is not None and mesh is None:
        raise ValueError(f"expected a mesh of several devices for the schedule {schedule!r}, found none")
    if compiler_options and mesh is None:
        raise ValueError("expected a mesh of several devices for compiler options, found none")
    if mesh is not None and len(mesh.axis_names) != 1:
        raise ValueError(f"expected a mesh of one axis, found {len(mesh.axis_names)}: {', '.join(mesh.axis_names)}")


def placement_over(
    config: DecoderConfig, mesh: Mesh | None, schedule: str | None, compiler_options: bool = False
) -> Placement | None:
    """Returns the placement of a model over a mesh of one axis; None without a mesh.

    Args:
        schedule: "sync" by default.
        compiler_options: see `Placement`.

    Raises:
        ValueError: see `check_schedule`; or the number of devices does not divide the heads, the MLP's columns or the
            vocabulary, or does not match the key/value heads. The message names numbers that would.
    """
    check_schedule(mesh, schedule, compiler_options)
    if mesh is None:
        return None
    check_family(config, schedule)
    vocabulary = {"tokens of the vocabulary": config.vocab_size}
    grouped = grouped_mesh(mesh, mesh.axis_names[0], **divided_sizes(config, **vocabulary))
    layer = layer_shapes(config, mesh.size)
    return Placement(grouped, layer, schedule or SYNC, compiler_options)


def exchange_of(schedule: TensorParallel, layer: LayerShapes | None, rows: int) -> str | None:
    """Describes how that many rows reach their experts under a schedule; None if there is nothing to choose."""
    if not isinstance(schedule, Sequence) or layer is None or layer.experts == 1 or layer.shared:
        return None
    found = schedule.way_to_experts(rows, layer.hidden, layer.experts, layer.chosen)
    return None if found is None else found.why


def divided_sizes(config: DecoderConfig, **more: int) -> dict[str, int]:
    """Returns the sizes of the layers (and `more`) that devices divide, as arguments of `sharding.grouping`."""
    found = {"heads": config.num_heads, "kv_heads": config.num_kv_heads, **more}
    if any(config.kind(n).mixture is None for n in range(config.num_layers)):
        found["MLP columns"] = config.intermediate_size
    if config.mixture is not None:
        found["experts"] = config.mixture.experts
        found |= {"columns of the shared expert": config.mixture.shared} if config.mixture.shared else {}
    return found if config.delta is None else {**found, "key heads of linear attention": config.delta.key_heads}


def layer_shapes(config: DecoderConfig, devices: int) -> LayerShapes:
    """Returns the shapes of a device's matrices in a layer, with experts if the model has a mixture."""
    sizes = (config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim, config.mlp_columns)
    mixture = config.mixture
    layer = sharded_layer(*sizes, devices, *(() if mixture is None else (mixture.experts, mixture.chosen)))
    return replace(layer, shared=mixture is not None and mixture.shared > 0)


def check_family(config: DecoderConfig, schedule: str | None = None) -> None:
    """Raises a `ValueError` for a model whose layers this schedule cannot shard."""
    if FAMILIES[config.family].layer_scalar:
        raise ValueError(f"expected one device for {config.family}, whose layers scale the residual stream, found several")
    if schedule != EXACT:
        return
    mixture = config.mixture
    sizes = dict[str, int]()
    if config.delta is not None:
        sizes["value heads of linear attention"] = config.delta.value_heads
    if mixture is not None:
        sizes["experts"] = mixture.experts
        sizes["columns of the shared expert"] = mixture.shared
    if wrong := [f"{count} {name}" for name, count in sizes.items() if count % Exact.parts]:
        found = f"expected sizes that are multiples of {Exact.parts}, found {', '.join(wrong)}"
        raise ValueError(f"the schedule {EXACT} sums {Exact.parts} parts: {found}")


Allocate = Callable[[Target], tuple[Any, Any]]
"""Function that makes empty caches: the target's and the drafter's."""


def part_of(target: Target) -> Target:
    """Returns a target of one device whose caches are a device's part of this target's caches, with fewer heads."""
    if target.mesh is None:
        return target
    config = target.config
    delta = target.config.delta
    heads = config.num_kv_heads // target.mesh.shape[GROUPED_AXES[0]]
    queries = config.num_heads // target.mesh.size
    delta = None if delta is None else delta.part(delta.value_heads // target.mesh.size)
    return replace(target, mesh=None, config=replace(config, num_heads=queries, num_kv_heads=heads, delta=delta))


def cache_specs(target: Target, allocate: Allocate) -> tuple[Any, Any]:
    """Returns the partition specs of caches: sharded along the dim that is smaller with fewer heads, in any layout."""
    mesh = target.mesh
    part = part_of(target)
    assert mesh is not None
    (whole, drafter), (local, _) = jax.eval_shape(lambda: (allocate(target), allocate(part)))

    def sharded(whole: Any, local: Any) -> PartitionSpec:
        dims = [n for n, (one, other) in enumerate(zip(whole.shape, local.shape, strict=True)) if one != other]
        if not dims:
            return WHOLE
        # Key/value heads, which the devices of a group share, or heads of linear attention, which every device has its own of.
        shares = whole.shape[dims[0]] // local.shape[dims[0]]
        axes = GROUPED_AXES[0] if shares == mesh.shape[GROUPED_AXES[0]] else GROUPED_AXES
        return PartitionSpec(*[None] * dims[0], axes)

    return jax.tree.map(sharded, whole, local), jax.tree.map(lambda _: WHOLE, drafter)


def compile_allocate(target: Target, allocate: Allocate) -> jax.stages.Compiled:
    """Compiles the program that makes empty caches."""

    def run() -> tuple[Any, Any]:
        return allocate(target)

    run.__name__ = "allocate"
    places = None if target.mesh is None else on(target.mesh, cache_specs(target, allocate))
    return jax.jit(run, out_shardings=places).lower().compile()


def compile_step(
    target: Target,
    run: Callable[..., tuple[Any, Any]],
    models: Any,
    allocate: Allocate,
    empty: Callable[[Any, Any], Any],
    inputs: tuple[Any, ...],
) -> jax.stages.Compiled:
    """Compiles a program `run(models, state, *inputs) -> (state, result)`, which donates the state.

    Args:
        empty: makes the state with the caches of `allocate`.
        inputs: abstract inputs, which are replicated.
    """
    state = jax.eval_shape(lambda: empty(*allocate(target)))
    if target.mesh is None:
        return jax.jit(run, donate_argnums=1).lower(models, state, *inputs).compile()
    target_cache, _ = cache_specs(target, allocate)
    state_specs = replace(jax.tree.map(lambda _: WHOLE, state), target_cache=target_cache)
    in_specs = (jax.tree.map(lambda x: x.sharding.spec, models), state_specs, *jax.tree.map(lambda _: WHOLE, inputs))
    inside = jax.shard_map(run, mesh=target.mesh, in_specs=in_specs, out_specs=(state_specs, WHOLE), check_vma=False)
    places = {"in_shardings": on(target.mesh, in_specs), "out_shardings": on(target.mesh, (state_specs, WHOLE))}
    lowered = jax.jit(wraps(run)(inside), donate_argnums=1, **places).lower(models, state, *inputs)
    return compile_over(target.mesh, lowered, target.compiler_options)


def on_devices(mesh: Mesh | None) -> Callable[[Any], jax.Array]:
    """Returns a function that replicates an array over a mesh, or puts it on the default device without a mesh."""
    return partial(jax.device_put, device=None if mesh is None else NamedSharding(mesh, WHOLE))


def on(mesh: Mesh, specs: Any) -> Any:
    """Returns the shardings of a tree of `PartitionSpec`s."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda spec: isinstance(spec, PartitionSpec))
