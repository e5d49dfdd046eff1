"""A language model over several devices: where its arrays lie, and programs in which each device computes with its part.

The target is divided by heads, MLP columns and vocabulary, as are its caches by key/value heads. All else is the same on every
device: what a drafter knows, and the state of the rows. Each device samples and accepts for itself, of the same numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tilewright.hardware.layers import LayerShapes, divided_layer
from tilewright.kernels.operations import Operations
from tilewright.models import decoder
from tilewright.models.decoder import DecoderConfig, DecoderParams
from tilewright.parallel.auto import AUTO, SCHEDULES, Auto, fabric_of, schedule_of
from tilewright.parallel.compiling import compile_over
from tilewright.parallel.exact import Exact, one_after_another
from tilewright.parallel.experts import own_experts
from tilewright.parallel.packing import on_each_device
from tilewright.parallel.schedules import Sequence, TensorParallel
from tilewright.parallel.sharding import GROUPED, GROUPED_AXES, grouped_mesh, shardings
from tilewright.runtime.state import DecodeState, Models, Target

Tree = TypeVar("Tree")

SYNC = "sync"
EXACT = "exact"
WHOLE = PartitionSpec()
"""Of what every device holds."""


@dataclass(frozen=True)
class Placement:
    """Devices that share a model, and how they do.

    Attributes:
        mesh: of `GROUPED_AXES`, made by `placement_over`.
        layer: what each device computes of a layer.
        name: of the schedule, among `SCHEDULES`, or "auto".
        compiler_options: compile with the options of `parallel/compiling.py` where the devices are TPUs.
    """

    mesh: Mesh
    layer: LayerShapes
    name: str = SYNC
    compiler_options: bool = False

    @property
    def schedule(self) -> TensorParallel:
        return schedule_of(self.name, GROUPED_AXES, self.layer, fabric_of(self.mesh))

    def why(self, positions: int) -> str | None:
        """Schedule that "auto" takes for so many positions of one row, and how their rows get to experts, with the reasons.

        None where there is nothing to choose.
        """
        schedule = self.schedule
        found = list[str]()
        if isinstance(schedule, Auto):
            choice = schedule.choice(positions, positions % 2 == 0)
            found.append(choice.why)
            schedule = schedule.chosen(choice.name)
        return "; ".join(filter(None, (*found, exchange_of(schedule, self.layer, positions)))) or None

    def shardings(self, specs: DecoderParams) -> DecoderParams:
        """Of a model's declared arrays."""
        return shardings(specs, self.mesh, GROUPED)

    def operations(self, ops: Operations) -> Operations:
        """Operations that prepare each device's part of a weight."""
        return on_each_device(ops, self.mesh)

    def running(self, ops: Operations) -> Operations:
        """Operations of a program that each device runs with its part of the model."""
        return own_experts(one_after_another(ops) if self.name == EXACT else ops)

    def prepared(self, config: DecoderConfig, ops: Operations, params: DecoderParams) -> DecoderParams:
        """A model's parameters, each device's part as the operations want it."""
        placed = jax.device_put(params, self.shardings(decoder.declare(config)))
        return decoder.prepare(config, self.operations(ops), placed)

    def whole(self, params: Tree) -> Tree:
        """Arrays that every device holds."""
        return jax.device_put(params, NamedSharding(self.mesh, WHOLE))


def check_schedule(mesh: Mesh | None, schedule: str | None, compiler_options: bool = False) -> None:
    """Raises a `ValueError` for a schedule that there is not, for one without a mesh, for a mesh that it cannot run over, and
    for compiler options without a mesh."""
    if schedule is not None and schedule not in (*SCHEDULES, AUTO):
        raise ValueError(f"expected a schedule among {', '.join((*SCHEDULES, AUTO))}, found {schedule!r}")
    if schedule is not None and mesh is None:
        raise ValueError(f"a schedule needs several devices: expected a mesh beside {schedule!r}, found none")
    if compiler_options and mesh is None:
        raise ValueError("compiler options are for several devices: expected a mesh beside them, found none")
    if mesh is not None and len(mesh.axis_names) != 1:
        raise ValueError(f"expected a mesh of one axis, found {len(mesh.axis_names)}: {', '.join(mesh.axis_names)}")


def placement_over(
    config: DecoderConfig, mesh: Mesh | None, schedule: str | None, compiler_options: bool = False
) -> Placement | None:
    """Placement of a model over a mesh of one axis; None without a mesh.

    Args:
        schedule: "sync" by default.
        compiler_options: see `Placement`.

    Raises:
        ValueError: see `check_schedule`; or the devices do not divide the heads, the MLP's columns or the vocabulary, or do not
            go with the key/value heads. It says how many would.
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
    """How so many rows get to their experts under a schedule, and why; None where there are none, or nothing to choose."""
    if not isinstance(schedule, Sequence) or layer is None or layer.experts == 1 or layer.shared:
        return None
    found = schedule.way_to_experts(rows, layer.hidden, layer.experts, layer.chosen)
    return None if found is None else found.why


def divided_sizes(config: DecoderConfig, **more: int) -> dict[str, int]:
    """Sizes of the layers, and more, that devices divide, as arguments of `sharding.grouping`."""
    found = {"heads": config.num_heads, "kv_heads": config.num_kv_heads, **more}
    if any(config.kind(n).mixture is None for n in range(config.num_layers)):
        found["MLP columns"] = config.intermediate_size
    if config.mixture is not None:
        found["experts"] = config.mixture.experts
        found |= {"columns of the shared expert": config.mixture.shared} if config.mixture.shared else {}
    return found if config.delta is None else {**found, "key heads of linear attention": config.delta.key_heads}


def layer_shapes(config: DecoderConfig, devices: int) -> LayerShapes:
    """A device's products in a layer, one with experts where the model has such."""
    sizes = (config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim, config.mlp_columns)
    mixture = config.mixture
    layer = divided_layer(*sizes, devices, *(() if mixture is None else (mixture.experts, mixture.chosen)))
    return replace(layer, shared=mixture is not None and mixture.shared > 0)


def check_family(config: DecoderConfig, schedule: str | None = None) -> None:
    """Raises a `ValueError` for a model whose layers this schedule does not divide."""
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
        found = f"expected sizes that they divide, found {', '.join(wrong)}"
        raise ValueError(f"the schedule {EXACT} sums {Exact.parts} parts: {found}")


Allocate = Callable[[Target], tuple[Any, Any]]
"""Empty caches: the target's and the drafter's."""


def part_of(target: Target) -> Target:
    """A target of one device whose caches are a device's part of this one's: those of fewer heads."""
    if target.mesh is None:
        return target
    config = target.config
    delta = target.config.delta
    heads = config.num_kv_heads // target.mesh.shape[GROUPED_AXES[0]]
    delta = None if delta is None else delta.part(delta.value_heads // target.mesh.size)
    return replace(target, mesh=None, config=replace(config, num_kv_heads=heads, delta=delta))


def cache_specs(target: Target, allocate: Allocate) -> tuple[Any, Any]:
    """Partition specs of caches: along the dim in which those of fewer heads are smaller, whatever their layout."""
    mesh = target.mesh
    part = part_of(target)
    assert mesh is not None
    (whole, drafter), (own, _) = jax.eval_shape(lambda: (allocate(target), allocate(part)))

    def sharded(whole: Any, own: Any) -> PartitionSpec:
        dims = [n for n, (one, other) in enumerate(zip(whole.shape, own.shape, strict=True)) if one != other]
        if not dims:
            return WHOLE
        # Heads of keys and values, which the devices of a group share; or those of linear attention, of which each has its own.
        shares = whole.shape[dims[0]] // own.shape[dims[0]]
        axes = GROUPED_AXES[0] if shares == mesh.shape[GROUPED_AXES[0]] else GROUPED_AXES
        return PartitionSpec(*[None] * dims[0], axes)

    return jax.tree.map(sharded, whole, own), jax.tree.map(lambda _: WHOLE, drafter)


def compile_allocate(target: Target, allocate: Allocate) -> jax.stages.Compiled:
    """The program that gives empty caches."""

    def run() -> tuple[Any, Any]:
        return allocate(target)

    run.__name__ = "allocate"
    places = None if target.mesh is None else on(target.mesh, cache_specs(target, allocate))
    return jax.jit(run, out_shardings=places).lower().compile()


def compile_step(
    target: Target,
    run: Callable[..., tuple[DecodeState, Any]],
    models: Models,
    allocate: Allocate,
    empty: Callable[[Any, Any], DecodeState],
    inputs: tuple[Any, ...],
) -> jax.stages.Compiled:
    """A program `run(models, state, *inputs) -> (state, result)`, to which the state is donated.

    Args:
        empty: the state with caches as `allocate` makes them.
        inputs: abstract; every device gets them whole.
    """
    state = jax.eval_shape(lambda: empty(*allocate(target)))
    if target.mesh is None:
        return jax.jit(run, donate_argnums=1).lower(models, state, *inputs).compile()
    target_cache, _ = cache_specs(target, allocate)
    held = replace(jax.tree.map(lambda _: WHOLE, state), target_cache=target_cache)
    given = (jax.tree.map(lambda x: x.sharding.spec, models), held, *jax.tree.map(lambda _: WHOLE, inputs))
    inside = jax.shard_map(run, mesh=target.mesh, in_specs=given, out_specs=(held, WHOLE), check_vma=False)
    places = {"in_shardings": on(target.mesh, given), "out_shardings": on(target.mesh, (held, WHOLE))}
    lowered = jax.jit(wraps(run)(inside), donate_argnums=1, **places).lower(models, state, *inputs)
    return compile_over(target.mesh, lowered, target.compiler_options)


def on_devices(mesh: Mesh | None) -> Callable[[Any], jax.Array]:
    """The function that gives every device of a mesh the whole of an array; without one, the default device."""
    return partial(jax.device_put, device=None if mesh is None else NamedSharding(mesh, WHOLE))


def on(mesh: Mesh, specs: Any) -> Any:
    """The shardings of a tree of `PartitionSpec`s."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda spec: isinstance(spec, PartitionSpec))
