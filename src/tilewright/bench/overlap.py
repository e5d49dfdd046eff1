"""Exposed communication of a model under each schedule, on absent TPUs.

The layers are compiled as they would run: over a mesh, with sharded parameters and caches, from the residual stream before the
first layer to the stream after the last. `perfmodel/timeline.py` estimates times from the compiled schedule. Only a few layers
are compiled, and the middle layer is reported: the first layer has no earlier compute to hide its first transfers, and the last
has no later compute. See `steady`.
"""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tilewright.bench.ordering import OWN, PROGRAM_ORDER, apply_ordering, jit_units, ordered_name, read_name
from tilewright.compiled.aot import Compiled, compile_for, tpu_topology
from tilewright.hardware.layers import StrategyChoice
from tilewright.hardware.links import HOP_US, Fabric, least_seconds
from tilewright.hardware.tpu import TpuChip, chip_of
from tilewright.kernels.operations import Operations
from tilewright.kernels.select import Kernels, operations
from tilewright.models import decoder
from tilewright.models.decoder import DecoderConfig
from tilewright.models.params import abstract
from tilewright.models.stack import Rows, Strategy
from tilewright.parallel.auto import AUTO, Auto, mesh_fabric, strategy_of
from tilewright.parallel.auto import STRATEGIES as NAMED
from tilewright.parallel.compiling import compile_hiding
from tilewright.parallel.experts import with_local_experts
from tilewright.parallel.mesh import make_mesh
from tilewright.parallel.sharding import GROUPED, GROUPED_AXES, grouped_mesh, grouping, shardings
from tilewright.parallel.strategies import TensorParallel
from tilewright.perfmodel.calibration import Calibration, calibrated, calibrated_chip
from tilewright.perfmodel.schedule import read_schedule
from tilewright.perfmodel.timeline import Timeline, TimelineTotals, busiest_link_s, lane_spans, simulate
from tilewright.perfmodel.timeline_ranges import sweep_timelines
from tilewright.perfmodel.uncertainty import EVENT_DRAWS, Sweep
from tilewright.runtime.cache import allocate
from tilewright.runtime.placement import divided_sizes, exchange_of, layer_shapes
from tilewright.runtime.state import Span, cached_attend

SYNC = "sync"
BOUND = "no communication"
"""Names of the reference schedule, and of the same schedule without collectives."""

LEAST_LAYERS = 3
"""Minimum number of layers to compile: fewer have no middle layer."""

LAYERS: Mapping[str, Sequence[int]] = {"prefill": (5, 7, 9, 11), "decode": (9, 11, 13)}
"""Numbers of layers to compile by phase, tried in order until the middle layer is steady. A decoding step starts with more: the
weights and caches of its last two layers stay in VMEM, and where these are a large part of the program the compiler schedules
all layers differently. On v5e:4x2, while caches were still copied, the middle layer took 347 us of five and of seven layers,
306 us of nine and of 32."""

STEADY = 0.05
"""Maximum relative difference between a steady layer and its neighbours."""


class WithoutCommunication(TensorParallel):
    """Tensor parallelism without its sums: a wrong result in the least time."""

    def reduce(self, x: Array) -> Array:
        return x


SCHEDULES: dict[str, type[TensorParallel]] = {**NAMED, AUTO: Auto}
"""Schedules by their names on the command line."""


class Phase(NamedTuple):
    """Work of the layers: a prefill or a decoding step, with its rows and positions.

    Attributes:
        kind: `prefill` computes all positions of each row; `decode` one more position of each row.
        batch: number of rows.
        positions: positions of each row, including cached positions.
    """

    kind: Literal["prefill", "decode"]
    batch: int
    positions: int

    @property
    def new(self) -> int:
        """Number of computed positions of each row."""
        return self.positions if self.kind == "prefill" else 1

    @property
    def divisible(self) -> bool:
        """True if the work splits into two micro-batches of rows or, over a cache, of positions."""
        return self.batch % 2 == 0 or self.new % 2 == 0

    @property
    def name(self) -> str:
        return f"{self.kind}:{self.batch}x{self.positions}"


def read_phase(text: str) -> Phase:
    """Parses a phase in the format of `Phase.name`.

    Raises:
        ValueError: The text has another format.
    """
    found = re.fullmatch(r"(prefill|decode):([1-9]\d*)x([1-9]\d*)", text)
    if found is None:
        raise ValueError(f"expected a phase as prefill:BATCHxPOSITIONS or decode:BATCHxPOSITIONS, found {text!r}")
    return Phase("prefill" if found[1] == "prefill" else "decode", int(found[2]), int(found[3]))


def slice_of_mesh(mesh: Mesh, hop_us: float) -> Fabric:
    """Returns the links between the devices of an absent TPU's mesh, in the mesh's order."""
    fabric = mesh_fabric(mesh)
    assert fabric is not None, "the devices are a TPU's"
    return replace(fabric, hop_us=hop_us)


@dataclass(frozen=True)
class OverlapSetup:
    """A model to compile for a slice of TPUs.

    Attributes:
        chip: TPU topology; the model is sharded over all its devices.
        model: name of the model for the report.
        layers: number of layers to compile; None compiles until the middle layer is steady, see `steady`.
        kernels: implementation of the operations; see `kernels.select.operations`.
        hop_us: latency of a hop between neighbours, in microseconds.
        compiler_options: compile with the options of `parallel/compiling.py`.
        calibration: source of fitted constants.
    """

    chip: str
    model: str
    config: DecoderConfig
    layers: int | None = None
    kernels: Kernels = "auto"
    hop_us: float = HOP_US
    compiler_options: bool = False
    calibration: Calibration | None = None

    @property
    def spec(self) -> TpuChip:
        return calibrated_chip(chip_of(self.chip), self.calibration)

    @cached_property
    def mesh(self) -> Mesh:
        """All devices of the topology. Several devices share a key/value head if there are more devices than heads."""
        return grouped_mesh(make_mesh({"tp": None}, tpu_topology(self.chip).devices), "tp", **divided_sizes(self.config))

    @property
    def devices(self) -> int:
        return self.mesh.size

    @cached_property
    def fabric(self) -> Fabric:
        return calibrated(slice_of_mesh(self.mesh, self.hop_us), self.calibration)

    @cached_property
    def auto(self) -> Auto:
        return Auto(GROUPED_AXES, layer_shapes(self.config, self.devices), self.fabric)

    def chosen(self, phase: Phase) -> StrategyChoice:
        """Returns the schedule that `AUTO` chooses for a phase, with the reason."""
        return self.auto.choice(phase.batch * phase.new, phase.divisible)

    def resolved(self, phase: Phase, name: str) -> str:
        """Returns a schedule's name (with its ordering), with `AUTO` replaced by its choice for the phase."""
        schedule, ordering = read_name(name)
        return ordered_name(self.chosen(phase).name, ordering) if schedule == AUTO else name

    def exchanges(self, phase: Phase, name: str) -> list[str]:
        """Describes how rows reach their experts under a schedule, with the reason; empty if there is no choice."""
        if name == BOUND or self.config.mixture is None:
            return []
        schedule = self.auto.chosen(read_name(self.resolved(phase, name))[0])
        reason = exchange_of(schedule, self.auto.layer, phase.batch * phase.new)
        return [] if reason is None else [reason]

    def check(self, tensor_parallel: int | None) -> None:
        """Checks that the model can be sharded as requested.

        Args:
            tensor_parallel: number of devices; None for all.

        Raises:
            ValueError: The number of layers, the hop latency or the number of devices does not fit.
        """
        num_layers = self.config.num_layers
        if not LEAST_LAYERS <= (num_layers if self.layers is None else self.layers) <= num_layers:
            found = f"a model of {num_layers}" if self.layers is None else self.layers
            raise ValueError(
                f"expected from {LEAST_LAYERS} to {num_layers} layers, so that {self.model} has them and one is in the middle; "
                f"found {found}"
            )
        if not self.hop_us >= 0 or self.hop_us == float("inf"):
            raise ValueError(f"expected the latency of a hop from 0 us, found {self.hop_us:g}")
        shards = tensor_parallel or self.devices
        grouping(shards, **divided_sizes(self.config))
        if shards != self.devices:
            raise ValueError(
                f"expected a topology of {shards} devices for tensor parallelism over {shards}, "
                f"found {self.chip} of {self.devices}"
            )


@dataclass(frozen=True)
class OverlapRun:
    """A compiled program of `layers` layers with its modelled timeline."""

    setup: OverlapSetup
    phase: Phase
    schedule: str
    layers: int
    timeline: Timeline
    compile_s: float

    @property
    def middle(self) -> int:
        """Index of the reported layer."""
        return self.layers // 2

    @cached_property
    def layer(self) -> TimelineTotals:
        return self.timeline.sums()[self.middle]

    @cached_property
    def unsteady_share(self) -> float:
        """Largest relative difference in time between the reported layer and a neighbour."""
        sums = self.timeline.sums()
        return max(abs(sums[self.middle + offset].total_s / self.layer.total_s - 1) for offset in (-1, 1))

    @property
    def steady(self) -> bool:
        """True if the reported layer represents all layers."""
        return self.unsteady_share <= STEADY

    @property
    def notes(self) -> list[str]:
        """Assumptions behind the figures, and a warning if the reported layer is not steady."""
        notes = list(self.timeline.graph.notes)
        if read_name(self.schedule)[0] == AUTO:
            notes.append(f"{AUTO}: {self.setup.chosen(self.phase).why}")
        notes += self.setup.exchanges(self.phase, self.schedule)
        if self.steady:
            return notes
        differs = f"layer {self.middle} of {self.layers} and a neighbour of it differ by {self.unsteady_share:.0%}"
        return [*notes, f"{self.phase.name} {self.schedule}: not steady, {differs}"]

    def total_ms(self, timeline: Timeline) -> float:
        """Returns the reported layer's milliseconds in another timeline of the program."""
        return 1e3 * timeline.sums()[self.middle].total_s

    @property
    def without_estimate(self) -> int:
        """Number of operations without a cycle estimate by the compiler."""
        return len(self.timeline.graph.without_estimate)

    @cached_property
    def roofline_share(self) -> float:
        return self.timeline.roofline_share((self.middle,))

    @cached_property
    def busiest_link_s(self) -> float:
        """Seconds for which the layer's transfers occupy the busiest link, a lower bound for communication."""
        return busiest_link_s(self.timeline, self.setup.fabric, self.middle)


def layer_number(name: str) -> int | None:
    """Returns the layer of a program argument, given the argument's name."""
    found = re.match(r"(?:held|caches)\[(\d+)\]", name)
    return int(found[1]) if found else None


def program(
    config: DecoderConfig, mesh: Mesh, ops: Operations, phase: Phase, schedule: Strategy, ordering: str = OWN
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns the function to compile and its abstract arguments: layers, caches, residual stream, start position of each
    row."""
    ops = with_local_experts(ops)
    layers = config.num_layers
    ops = jit_units(ops) if ordering == PROGRAM_ORDER else ops
    specs = decoder.declare(config)
    held = abstract(specs, jnp.bfloat16, shardings(specs, mesh, GROUPED)).layers
    whole = PartitionSpec()
    by_heads = PartitionSpec(None, GROUPED_AXES[0])

    def run(held: Any, caches: Any, stream: Array, start: Array) -> tuple[Array, Any]:
        positions = start[:, None] + jnp.arange(phase.new)[None]
        span = Span(start, jnp.full_like(start, phase.new))
        stack = decoder.stack_of(config, ops, held, cached_attend)
        stream, _, new_caches = schedule.run(stack, stream, Rows(config.rope_tables(positions), span), caches, ())
        return stream, new_caches

    def array(shape: tuple[int, ...], dtype: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    sizes = (layers, phase.batch, config.num_kv_heads, phase.positions, config.head_dim, jnp.bfloat16)
    caches = jax.tree.map(lambda x: array(x.shape, x.dtype, by_heads), jax.eval_shape(lambda: allocate(*sizes)))
    stream = array((phase.batch, phase.new, config.hidden_size), jnp.bfloat16, whole)
    start = array((phase.batch,), jnp.int32, whole)
    in_specs = tuple(jax.tree.map(lambda x: x.sharding.spec, tree) for tree in (held, caches, stream, start))
    inside = jax.shard_map(
        apply_ordering(ordering, run),
        mesh=mesh,
        in_specs=in_specs,
        out_specs=(whole, in_specs[1]),
        check_vma=False,
    )
    return inside, (held, caches, stream, start)


def compile_layers(setup: OverlapSetup, phase: Phase, name: str, layers: int) -> Compiled:
    """Compiles this number of layers under a schedule of `SCHEDULES` except `AUTO`, or under `BOUND`.

    Args:
        name: name of the schedule, possibly with an ordering; see `ordering.ordered_name`.

    Raises:
        ValueError: The schedule cannot split the phase's rows, or the installed JAX lacks the ordering.
    """
    base, ordering = read_name(name)
    schedule = WithoutCommunication(GROUPED_AXES) if name == BOUND else strategy_of(base, GROUPED_AXES, None, setup.fabric)
    try:
        config = replace(setup.config, num_layers=layers)
        ops = operations("tpu", kernels=setup.kernels)
        function, arguments = program(config, setup.mesh, ops, phase, schedule, ordering)
        kind = setup.spec.name if setup.compiler_options else None
        return compile_hiding(kind, lambda options: compile_for(setup.chip, function, *arguments, donate=1, options=options))
    except ValueError as error:
        raise ValueError(f"{name}, {phase.name}: {error}") from error


def compiled(setup: OverlapSetup, phase: Phase, name: str, layers: int) -> OverlapRun:
    """Compiles a program and models its time. Raises a `ValueError` as `compile_layers` does."""
    started_at = time.perf_counter()
    found = compile_layers(setup, phase, name, layers)
    graph = read_schedule(found.hlo, setup.spec, layer_number)
    return OverlapRun(setup, phase, name, layers, simulate(graph, setup.fabric), time.perf_counter() - started_at)


def steady(setup: OverlapSetup, phase: Phase, name: str) -> OverlapRun:
    """Compiles more and more layers until the middle layer is steady. The last program is returned even if unsteady, with a
    note.

    Raises:
        ValueError: See `compiled`.
    """
    num_layers = setup.config.num_layers
    counts = (setup.layers,) if setup.layers else tuple(n for n in LAYERS[phase.kind] if n <= num_layers) or (num_layers,)
    run = compiled(setup, phase, name, counts[0])
    for layers in counts[1:]:
        if run.steady:
            break
        run = compiled(setup, phase, name, layers)
    return run


def make_runs(
    setup: OverlapSetup, phase: Phase, names: Sequence[str], on_run: Callable[[str], None] = lambda _: None
) -> list[OverlapRun]:
    """Compiles the programs of a phase under each schedule, each program once; `AUTO` reuses the program of its choice.

    Args:
        on_run: called with a description before each program.
    """
    compiled_runs: dict[str, OverlapRun] = {}
    found = []
    for name in names:
        on_run(f"{setup.chip} {phase.name} {name}")
        program = setup.resolved(phase, name)
        if program not in compiled_runs:
            compiled_runs[program] = steady(setup, phase, program)
        found.append(replace(compiled_runs[program], schedule=name))
    return found


def sweeps(runs: Sequence[OverlapRun], draws: int = EVENT_DRAWS) -> dict[str, Sweep]:
    """Returns ranges of the reported layer's time under the schedules, for each chip and phase."""
    found: dict[str, Sweep] = {}
    for setup, phase in dict.fromkeys((run.setup, run.phase) for run in runs):
        peers = {run.schedule: run for run in runs if (run.setup, run.phase) == (setup, phase) and run.schedule != BOUND}
        share = max(run.roofline_share for run in peers.values())
        timelines = {name: run.timeline for name, run in peers.items()}
        found[f"{setup.chip} {phase.name}"] = sweep_timelines(
            timelines,
            setup.fabric,
            lambda name, timeline, peers=peers: peers[name].total_ms(timeline),
            setup.calibration,
            share,
            draws,
            "ms a layer",
        )
    return found


def ratio(part: float, whole: float | None) -> float | None:
    return None if not whole else part / whole


def records(runs: Sequence[OverlapRun]) -> list[dict[str, Any]]:
    """Returns the figures of each schedule and phase (docs/metrics.md), including those of the bound."""
    return [record(run, runs) for run in runs if run.schedule != BOUND]


def record(run: OverlapRun, runs: Sequence[OverlapRun]) -> dict[str, Any]:
    """Returns the figures of one program, compared with `SYNC` (if compiled) and the bound."""
    peers = {other.schedule: other for other in runs if (other.setup, other.phase) == (run.setup, run.phase)}
    layer = run.layer
    bound = peers[BOUND].layer
    sync = peers[SYNC].layer if SYNC in peers else None
    setup = run.setup
    stream_bytes = 2.0 * run.phase.batch * run.phase.new * run.setup.config.hidden_size
    # Lower bound for two sums of the residual stream over all devices, if every chip used all its links.
    least = 2 * least_seconds(setup.spec, setup.fabric.torus, "all-reduce", stream_bytes)
    return {
        "chip": setup.chip,
        "devices": setup.devices,
        "schedule": run.schedule,
        "phase": run.phase.kind,
        "batch_rows": run.phase.batch,
        "positions": run.phase.positions,
        **layer_figures(layer, setup.spec),
        "exposed_share": ratio(layer.exposed_s, layer.communication_s),
        "exposed_share_of_sync": None if sync is None else ratio(layer.exposed_s, sync.exposed_s),
        "extra_compute_share": None if sync is None else layer.compute_s / sync.compute_s - 1,
        "busiest_link_ms": 1e3 * run.busiest_link_s,
        "least_exposed_ms": 1e3 * max(0.0, run.busiest_link_s - layer.compute_s),
        "all_links_communication_ms": 1e3 * least,
        "all_links_least_exposed_ms": 1e3 * max(0.0, least - bound.compute_s),
        "bound_total_ms": 1e3 * bound.total_s,
        "bound_compute_cycles": round(bound.compute_s * 1e9 * setup.spec.clock_ghz),
        "total_over_bound": layer.total_s / bound.total_s,
        "total_over_larger": layer.total_s / max(layer.compute_s, run.busiest_link_s),
        "model_layers": setup.config.num_layers,
        "model_total_ms": 1e3 * layer.total_s * setup.config.num_layers,
        "model_exposed_ms": 1e3 * layer.exposed_s * setup.config.num_layers,
        "layers_compiled": run.layers,
        "reported_layer": run.middle,
        "layers": [
            {"layer": number, **layer_figures(sums, setup.spec)}
            for number, sums in run.timeline.sums().items()
            if number is not None
        ],
        "compile_s": run.compile_s,
        "without_estimate": run.without_estimate,
        "roofline_share": run.roofline_share,
        "unsteady_share": run.unsteady_share,
        "steady": run.steady,
        "bound_steady": peers[BOUND].steady,
        "notes": [*run.notes, *peers[BOUND].notes],
    }


def layer_figures(sums: TimelineTotals, chip: TpuChip) -> dict[str, Any]:
    """Returns the figures of one layer."""
    times = ("compute", "communication", "hidden", "exposed", "memory_wait", "total")
    return {
        "compute_cycles": round(sums.compute_s * 1e9 * chip.clock_ghz),
        **{f"{name}_ms": 1e3 * getattr(sums, f"{name}_s") for name in times},
        "transfers": round(sums.transfers),
        "sent_bytes": round(sums.sent_bytes),
    }


def lanes(run: OverlapRun) -> dict[str, Any]:
    """Returns spans of the core and of the links for a chart, in milliseconds; adjacent spans of a kind are merged.

    `core` and `links` hold (begin, end, kind), see `perfmodel.timeline.lane_spans`.
    """
    begins: dict[int, float] = {}
    for span in run.timeline.core:
        layer = run.timeline.layer(span)
        if layer is not None and span.track == "compute":
            begins.setdefault(layer, 1e3 * span.begin_s)
    return {"schedule": run.schedule, **lane_spans(run.timeline), "layer_begins_ms": [begins[n] for n in sorted(begins)]}
