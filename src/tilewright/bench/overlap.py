"""Communication of a model that schedules leave exposed, on TPUs that are not there.

The layers of a model are compiled as they would run: over a mesh, with parameters and caches divided, from the residual stream
before the first layer to that after the last. Their time is `perfmodel/timeline.py`'s model of what the compiler scheduled, an
estimate. A few layers are compiled and the middle one is reported: the first has nothing before it under which its first
transfers could hide, the last nothing behind it. See `steady`.
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

from tilewright.bench.ordering import OWN, PROGRAM_ORDER, in_order, in_units, ordered_name, read_name
from tilewright.compiled.aot import Compiled, compile_for, tpu_topology
from tilewright.hardware.layers import StrategyChoice
from tilewright.hardware.links import HOP_US, Fabric, least_seconds
from tilewright.hardware.tpu import TpuChip, chip_of
from tilewright.kernels.operations import Operations
from tilewright.kernels.select import Kernels, operations
from tilewright.models import decoder
from tilewright.models.decoder import DecoderConfig
from tilewright.models.params import abstract
from tilewright.models.stack import Rows, Schedule
from tilewright.parallel.auto import AUTO, Auto, fabric_of, schedule_of
from tilewright.parallel.auto import SCHEDULES as NAMED
from tilewright.parallel.compiling import compile_hiding
from tilewright.parallel.experts import own_experts
from tilewright.parallel.mesh import make_mesh
from tilewright.parallel.schedules import TensorParallel
from tilewright.parallel.sharding import GROUPED, GROUPED_AXES, grouped_mesh, grouping, shardings
from tilewright.perfmodel.calibration import Calibration, calibrated, calibrated_chip
from tilewright.perfmodel.schedule import read_schedule
from tilewright.perfmodel.timeline import Sums, Timeline, busiest_link_s, lane_spans, simulate
from tilewright.perfmodel.timeline_ranges import swept_timelines
from tilewright.perfmodel.uncertainty import EVENT_DRAWS, Sweep
from tilewright.runtime.cache import allocate
from tilewright.runtime.placement import divided_sizes, exchange_of, layer_shapes
from tilewright.runtime.state import Span, cached_attend

SYNC = "sync"
BOUND = "no communication"
"""Names of the schedule that others are compared with, and of the same one without its collectives."""

LEAST_LAYERS = 3
"""Least number of layers to compile: fewer have none in the middle."""

LAYERS: Mapping[str, Sequence[int]] = {"prefill": (5, 7, 9, 11), "decode": (9, 11, 13)}
"""Numbers of layers to compile by phase, in turn until the middle one is steady. A decoding step begins with more: of its
last two layers weights and caches lie in VMEM, and the compiler decides otherwise, for all layers, where these are a large part
of the program. On v5e:4x2, while caches were still copied, the middle layer took 347 us of five and of seven, 306 us of nine
and of 32."""

STEADY = 0.05
"""By how much its neighbours may differ from a steady layer."""


class WithoutCommunication(TensorParallel):
    """Tensor parallelism that leaves out its sums: what it computes is wrong, and takes the least time."""

    def reduce(self, x: Array) -> Array:
        return x


SCHEDULES: dict[str, type[TensorParallel]] = {**NAMED, AUTO: Auto}
"""By the names that commands have for them."""


class Phase(NamedTuple):
    """Work of the layers: a prefill or a decoding step, with its rows and positions.

    Attributes:
        kind: `prefill`, all positions of each row at once, or `decode`, one more position of each row behind the others.
        batch: rows.
        positions: of each row, with those that are cached.
    """

    kind: Literal["prefill", "decode"]
    batch: int
    positions: int

    @property
    def new(self) -> int:
        """Positions of each row that are computed."""
        return self.positions if self.kind == "prefill" else 1

    @property
    def divisible(self) -> bool:
        """True if two micro-batches can take turns: rows, or positions over a cache."""
        return self.batch % 2 == 0 or self.new % 2 == 0

    @property
    def name(self) -> str:
        return f"{self.kind}:{self.batch}x{self.positions}"


def read_phase(text: str) -> Phase:
    """A phase as `Phase.name` spells it.

    Raises:
        ValueError: it is spelled otherwise.
    """
    found = re.fullmatch(r"(prefill|decode):([1-9]\d*)x([1-9]\d*)", text)
    if found is None:
        raise ValueError(f"expected a phase as prefill:BATCHxPOSITIONS or decode:BATCHxPOSITIONS, found {text!r}")
    return Phase("prefill" if found[1] == "prefill" else "decode", int(found[2]), int(found[3]))


def slice_of_mesh(mesh: Mesh, hop_us: float) -> Fabric:
    """The links between a mesh's devices of a TPU that is not here, in its order."""
    fabric = fabric_of(mesh)
    assert fabric is not None, "the devices are a TPU's"
    return replace(fabric, hop_us=hop_us)


@dataclass(frozen=True)
class OverlapSetup:
    """A model on a slice of TPUs, as it is to be compiled.

    Attributes:
        chip: topology of a TPU; all its devices divide the model.
        model: its name, for the report.
        layers: how many are compiled; None stands for as many as it takes, see `steady`.
        kernels: which operations compute; see `kernels.select.operations`.
        hop_us: latency of a hop between neighbours, in microseconds.
        compiler_options: compile with the options of `parallel/compiling.py`.
        calibration: whose fitted constants are taken.
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
        """All devices of the topology; where they are more than the key/value heads, several share one."""
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
        """The schedule that `AUTO` takes for a phase, with the reason."""
        return self.auto.choice(phase.batch * phase.new, phase.divisible)

    def resolved(self, phase: Phase, name: str) -> str:
        """The name of a schedule (and its ordering), with what `AUTO` takes for a phase in its place."""
        schedule, ordering = read_name(name)
        return ordered_name(self.chosen(phase).name, ordering) if schedule == AUTO else name

    def exchanges(self, phase: Phase, name: str) -> list[str]:
        """Way of rows to their experts under a schedule of `SCHEDULES`, with the reason, if there is a choice."""
        if name == BOUND or self.config.mixture is None:
            return []
        schedule = self.auto.chosen(read_name(self.resolved(phase, name))[0])
        why = exchange_of(schedule, self.auto.layer, phase.batch * phase.new)
        return [] if why is None else [why]

    def check(self, tensor_parallel: int | None) -> None:
        """Refuses what cannot be divided.

        Args:
            tensor_parallel: over how many devices it is meant to be; None stands for all.

        Raises:
            ValueError: what it says.
        """
        has = self.config.num_layers
        if not LEAST_LAYERS <= (has if self.layers is None else self.layers) <= has:
            found = f"a model of {has}" if self.layers is None else self.layers
            raise ValueError(
                f"expected from {LEAST_LAYERS} to {has} layers, so that {self.model} has them and one is in the middle; "
                f"found {found}"
            )
        if not self.hop_us >= 0 or self.hop_us == float("inf"):
            raise ValueError(f"expected the latency of a hop from 0 us, found {self.hop_us:g}")
        ways = tensor_parallel or self.devices
        grouping(ways, **divided_sizes(self.config))
        if ways != self.devices:
            raise ValueError(
                f"expected a topology of {ways} devices for tensor parallelism over {ways}, found {self.chip} of {self.devices}"
            )


@dataclass(frozen=True)
class OverlapRun:
    """A compiled program of so many layers, and the model of its time."""

    setup: OverlapSetup
    phase: Phase
    schedule: str
    layers: int
    timeline: Timeline
    compile_s: float

    @property
    def middle(self) -> int:
        """The layer that is reported."""
        return self.layers // 2

    @cached_property
    def layer(self) -> Sums:
        return self.timeline.sums()[self.middle]

    @cached_property
    def unsteady_share(self) -> float:
        """By how much that of its neighbours which differs most takes longer, or less long."""
        sums = self.timeline.sums()
        return max(abs(sums[self.middle + by].total_s / self.layer.total_s - 1) for by in (-1, 1))

    @property
    def steady(self) -> bool:
        """True if the layer may stand for all."""
        return self.unsteady_share <= STEADY

    @property
    def notes(self) -> list[str]:
        """Assumptions behind the figures, and a warning where the layer may not stand for all."""
        notes = list(self.timeline.graph.notes)
        if read_name(self.schedule)[0] == AUTO:
            notes.append(f"{AUTO}: {self.setup.chosen(self.phase).why}")
        notes += self.setup.exchanges(self.phase, self.schedule)
        if self.steady:
            return notes
        differs = f"layer {self.middle} of {self.layers} and a neighbour of it differ by {self.unsteady_share:.0%}"
        return [*notes, f"{self.phase.name} {self.schedule}: not steady, {differs}"]

    def total_ms(self, timeline: Timeline) -> float:
        """Milliseconds of the reported layer in another timeline of the program."""
        return 1e3 * timeline.sums()[self.middle].total_s

    @property
    def without_estimate(self) -> int:
        """Operations of the program that the compiler has no cycles for."""
        return len(self.timeline.graph.without_estimate)

    @cached_property
    def roofline_share(self) -> float:
        return self.timeline.roofline_share((self.middle,))

    @cached_property
    def busiest_link_s(self) -> float:
        """Seconds for which the layer's transfers occupy the busiest link: the least that they need."""
        return busiest_link_s(self.timeline, self.setup.fabric, self.middle)


def layer_of(name: str) -> int | None:
    """The layer of an argument of the compiled program, by its name there."""
    found = re.match(r"(?:held|caches)\[(\d+)\]", name)
    return int(found[1]) if found else None


def program(
    config: DecoderConfig, mesh: Mesh, ops: Operations, phase: Phase, schedule: Schedule, ordering: str = OWN
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function that is compiled, and its abstract arguments: layers, caches, the residual stream, where each row begins."""
    ops = own_experts(ops)
    layers = config.num_layers
    ops = in_units(ops) if ordering == PROGRAM_ORDER else ops
    specs = decoder.declare(config)
    held = abstract(specs, jnp.bfloat16, shardings(specs, mesh, GROUPED)).layers
    whole = PartitionSpec()
    by_heads = PartitionSpec(None, GROUPED_AXES[0])

    def run(held: Any, caches: Any, stream: Array, start: Array) -> tuple[Array, Any]:
        positions = start[:, None] + jnp.arange(phase.new)[None]
        span = Span(start, jnp.full_like(start, phase.new))
        stack = decoder.stack_of(config, ops, held, cached_attend)
        stream, _, kept = schedule.run(stack, stream, Rows(config.rope_tables(positions), span), caches, ())
        return stream, kept

    def array(shape: tuple[int, ...], dtype: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    sizes = (layers, phase.batch, config.num_kv_heads, phase.positions, config.head_dim, jnp.bfloat16)
    caches = jax.tree.map(lambda x: array(x.shape, x.dtype, by_heads), jax.eval_shape(lambda: allocate(*sizes)))
    stream = array((phase.batch, phase.new, config.hidden_size), jnp.bfloat16, whole)
    start = array((phase.batch,), jnp.int32, whole)
    of = tuple(jax.tree.map(lambda x: x.sharding.spec, tree) for tree in (held, caches, stream, start))
    inside = jax.shard_map(in_order(ordering, run), mesh=mesh, in_specs=of, out_specs=(whole, of[1]), check_vma=False)
    return inside, (held, caches, stream, start)


def compile_layers(setup: OverlapSetup, phase: Phase, name: str, layers: int) -> Compiled:
    """Compiles so many layers under a schedule of `SCHEDULES` but for `AUTO`, or under `BOUND`.

    Args:
        name: of the schedule; see `ordering.ordered_name` for one in another ordering than its own.

    Raises:
        ValueError: the schedule cannot divide the phase's rows, or the installed JAX does not have the ordering.
    """
    base, ordering = read_name(name)
    schedule = WithoutCommunication(GROUPED_AXES) if name == BOUND else schedule_of(base, GROUPED_AXES, None, setup.fabric)
    try:
        config = replace(setup.config, num_layers=layers)
        ops = operations("tpu", kernels=setup.kernels)
        function, arguments = program(config, setup.mesh, ops, phase, schedule, ordering)
        kind = setup.spec.name if setup.compiler_options else None
        return compile_hiding(kind, lambda options: compile_for(setup.chip, function, *arguments, donate=1, options=options))
    except ValueError as error:
        raise ValueError(f"{name}, {phase.name}: {error}") from error


def compiled(setup: OverlapSetup, phase: Phase, name: str, layers: int) -> OverlapRun:
    """A program of `compile_layers`, with the model of its time. Raises ValueError as that does."""
    began = time.perf_counter()
    found = compile_layers(setup, phase, name, layers)
    graph = read_schedule(found.hlo, setup.spec, layer_of)
    return OverlapRun(setup, phase, name, layers, simulate(graph, setup.fabric), time.perf_counter() - began)


def steady(setup: OverlapSetup, phase: Phase, name: str) -> OverlapRun:
    """Compiles more and more layers until the middle one is steady; if it never is, the last program says so of itself.

    Raises:
        ValueError: see `compiled`.
    """
    has = setup.config.num_layers
    counts = (setup.layers,) if setup.layers else tuple(n for n in LAYERS[phase.kind] if n <= has) or (has,)
    run = compiled(setup, phase, name, counts[0])
    for layers in counts[1:]:
        if run.steady:
            break
        run = compiled(setup, phase, name, layers)
    return run


def runs_of(
    setup: OverlapSetup, phase: Phase, names: Sequence[str], on_run: Callable[[str], None] = lambda _: None
) -> list[OverlapRun]:
    """The programs of a phase, by the names of their schedules, each compiled once: that of `AUTO` is the one that it chooses.

    `on_run` is told before each what it is.
    """
    made: dict[str, OverlapRun] = {}
    found = []
    for name in names:
        on_run(f"{setup.chip} {phase.name} {name}")
        program = setup.resolved(phase, name)
        if program not in made:
            made[program] = steady(setup, phase, program)
        found.append(replace(made[program], schedule=name))
    return found


def sweeps(runs: Sequence[OverlapRun], draws: int = EVENT_DRAWS) -> dict[str, Sweep]:
    """Ranges of the reported layer's time under the schedules of each chip and phase, by the names of both."""
    found: dict[str, Sweep] = {}
    for setup, phase in dict.fromkeys((run.setup, run.phase) for run in runs):
        same = {run.schedule: run for run in runs if (run.setup, run.phase) == (setup, phase) and run.schedule != BOUND}
        share = max(run.roofline_share for run in same.values())
        timelines = {name: run.timeline for name, run in same.items()}
        found[f"{setup.chip} {phase.name}"] = swept_timelines(
            timelines,
            setup.fabric,
            lambda name, timeline, same=same: same[name].total_ms(timeline),
            setup.calibration,
            share,
            draws,
            "ms a layer",
        )
    return found


def ratio(part: float, whole: float | None) -> float | None:
    return None if not whole else part / whole


def records(runs: Sequence[OverlapRun]) -> list[dict[str, Any]]:
    """The figures of each schedule and phase, as docs/metrics.md defines them; those of the bound stand beside each."""
    return [record(run, runs) for run in runs if run.schedule != BOUND]


def record(run: OverlapRun, runs: Sequence[OverlapRun]) -> dict[str, Any]:
    """The figures of one program, set against `SYNC`'s, if that is there, and the bound's."""
    same = {other.schedule: other for other in runs if (other.setup, other.phase) == (run.setup, run.phase)}
    own = run.layer
    bound = same[BOUND].layer
    sync = same[SYNC].layer if SYNC in same else None
    setup = run.setup
    stream_bytes = 2.0 * run.phase.batch * run.phase.new * run.setup.config.hidden_size
    # The least time for two sums of the residual stream over all devices, if every chip used all its links.
    least = 2 * least_seconds(setup.spec, setup.fabric.torus, "all-reduce", stream_bytes)
    return {
        "chip": setup.chip,
        "devices": setup.devices,
        "schedule": run.schedule,
        "phase": run.phase.kind,
        "batch_rows": run.phase.batch,
        "positions": run.phase.positions,
        **layer_figures(own, setup.spec),
        "exposed_share": ratio(own.exposed_s, own.communication_s),
        "exposed_share_of_sync": None if sync is None else ratio(own.exposed_s, sync.exposed_s),
        "extra_compute_share": None if sync is None else own.compute_s / sync.compute_s - 1,
        "busiest_link_ms": 1e3 * run.busiest_link_s,
        "least_exposed_ms": 1e3 * max(0.0, run.busiest_link_s - own.compute_s),
        "all_links_communication_ms": 1e3 * least,
        "all_links_least_exposed_ms": 1e3 * max(0.0, least - bound.compute_s),
        "bound_total_ms": 1e3 * bound.total_s,
        "bound_compute_cycles": round(bound.compute_s * 1e9 * setup.spec.clock_ghz),
        "total_over_bound": own.total_s / bound.total_s,
        "total_over_larger": own.total_s / max(own.compute_s, run.busiest_link_s),
        "model_layers": setup.config.num_layers,
        "model_total_ms": 1e3 * own.total_s * setup.config.num_layers,
        "model_exposed_ms": 1e3 * own.exposed_s * setup.config.num_layers,
        "layers_compiled": run.layers,
        "reported_layer": run.middle,
        "layers": [
            {"layer": at, **layer_figures(sums, setup.spec)} for at, sums in run.timeline.sums().items() if at is not None
        ],
        "compile_s": run.compile_s,
        "without_estimate": run.without_estimate,
        "roofline_share": run.roofline_share,
        "unsteady_share": run.unsteady_share,
        "steady": run.steady,
        "bound_steady": same[BOUND].steady,
        "notes": [*run.notes, *same[BOUND].notes],
    }


def layer_figures(sums: Sums, chip: TpuChip) -> dict[str, Any]:
    """Those of one layer."""
    times = ("compute", "communication", "hidden", "exposed", "memory_wait", "total")
    return {
        "compute_cycles": round(sums.compute_s * 1e9 * chip.clock_ghz),
        **{f"{name}_ms": 1e3 * getattr(sums, f"{name}_s") for name in times},
        "transfers": round(sums.transfers),
        "sent_bytes": round(sums.sent_bytes),
    }


def lanes(run: OverlapRun) -> dict[str, Any]:
    """Spans of the core and of the links, for a chart; milliseconds, neighbours of a kind put together.

    `core` and `links` hold (begin, end, kind), see `perfmodel.timeline.lane_spans`.
    """
    begins: dict[int, float] = {}
    for span in run.timeline.core:
        layer = run.timeline.layer(span)
        if layer is not None and span.track == "compute":
            begins.setdefault(layer, 1e3 * span.begin_s)
    return {"schedule": run.schedule, **lane_spans(run.timeline), "layer_begins_ms": [begins[n] for n in sorted(begins)]}
