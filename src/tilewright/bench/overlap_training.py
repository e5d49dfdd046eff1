"""Exposed communication of a train step over a mesh, on absent TPUs.

The step of `train lm`, including the optimiser, is compiled for a slice with a few layers under several plans, beside the same
step without ordering tokens and the auto-sharded step (GSPMD). `perfmodel/timeline.py` estimates times. The middle layer of
each pass is reported, with all operations that carry its name.
"""

import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tilewright.bench.overlap import STEADY, layer_figures, ratio, slice_of_mesh
from tilewright.compiled.aot import Compiled, compile_for, tpu_topology
from tilewright.hardware.links import HOP_US, Fabric
from tilewright.hardware.tpu import TpuChip, chip_of
from tilewright.kernels.operations import Operations
from tilewright.models import decoder
from tilewright.models.decoder import DecoderConfig
from tilewright.models.params import abstract
from tilewright.parallel.exchanges import NAMES, FullyShardedPlan
from tilewright.parallel.sharding import shard_entries
from tilewright.perfmodel.calibration import Calibration, calibrated, calibrated_chip
from tilewright.perfmodel.schedule import Node, ScheduleGraph, read_schedule
from tilewright.perfmodel.timeline import (
    Interval,
    Timeline,
    TimelineSpan,
    TimelineTotals,
    busiest_s,
    lane_spans,
    merged,
    overlap,
    simulate,
)
from tilewright.perfmodel.timeline_ranges import sweep_timelines
from tilewright.perfmodel.uncertainty import EVENT_DRAWS, Sweep
from tilewright.train.balance import balanced
from tilewright.train.lm import language_model
from tilewright.train.predictions import Predictor
from tilewright.train.sharded import prediction_loss
from tilewright.train.step import NOTHING, Loss, TrainingPlacement, cast_loss, compiled_step, state_shardings, training_mesh
from tilewright.train.text import TextOptions

FORWARD = "forward"
BACKWARD = "backward"
PASSES = (FORWARD, BACKWARD)
PLAIN_STEP = "no tokens or rings"
UNTHREADED = "no tokens"
ANNOTATED = "auto-sharded (GSPMD)"
"""Names of the reference programs. Shares refer to the first one."""

LEAST_LAYERS = 4
"""Minimum number of layers to compile: under shifts of one, the inner two of four layers do the same work. Each further shift
needs two more layers."""

ASYNC = {
    "xla_tpu_enable_data_parallel_all_reduce_opt": True,
    "xla_tpu_data_parallel_opt_different_sized_ops": True,
    "xla_tpu_enable_async_collective_fusion": True,
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
    "xla_tpu_enable_async_collective_fusion_multiple_steps": True,
    "xla_tpu_overlap_compute_collective_tc": True,
    "xla_enable_async_all_gather": True,
}
FLAGS: dict[str, dict[str, bool]] = {
    "v5e": ASYNC,
    "v5p": {
        **ASYNC,
        "xla_tpu_megacore_fusion_allow_ags": False,
        "xla_enable_async_collective_permute": True,
        "xla_tpu_enable_ag_backward_pipelining": True,
    },
}
"""Compiler flags from MaxText's scripts for a kind of TPU: MaxText/configs/v5e/llama3/llama3_8b.sh at 74fcbe7b and
v5p/llama2_7b.sh at dcbbec7d, github.com/AI-Hypercomputer/maxtext. Other kinds use v5e's."""


@dataclass(frozen=True)
class TrainingCase:
    """A train step to compile: chip, model, mesh and sizes.

    Attributes:
        chip: TPU topology.
        model: name of the model for the report.
        config: configuration of the whole model.
        axes: sizes of the mesh axes `fsdp` and `tp`.
        layers: number of layers to compile.
        batch, length: sequences of a step over all devices, and predicted positions of each sequence.
        hop_us: latency of a hop between neighbours, in microseconds.
        calibration: source of fitted constants.
    """

    chip: str
    model: str
    config: DecoderConfig
    axes: Mapping[str, int]
    layers: int
    batch: int
    length: int
    hop_us: float = HOP_US
    calibration: Calibration | None = None

    def __post_init__(self) -> None:
        if not LEAST_LAYERS <= self.layers <= self.config.num_layers:
            raise ValueError(
                f"expected from {LEAST_LAYERS} to {self.config.num_layers} layers, so that {self.model} has them and two are "
                f"in the middle; found {self.layers}"
            )
        if self.config.delta is not None or self.config.dense_layers:
            raise ValueError(f"expected layers with the same arrays, of which one stands for all, found others in {self.model}")
        for name, value in (("--batch-size", self.batch), ("--length", self.length)):
            if value < 1:
                raise ValueError(f"expected {name} from 1, found {value}")
        if not 0 <= self.hop_us < float("inf"):
            raise ValueError(f"expected the latency of a hop from 0 us, found {self.hop_us:g}")

    @property
    def spec(self) -> TpuChip:
        return calibrated_chip(chip_of(self.chip), self.calibration)

    @property
    def compiled_config(self) -> DecoderConfig:
        """Configuration of the layers to compile."""
        return replace(self.config, num_layers=self.layers)

    @property
    def mesh(self) -> Mesh:
        return training_mesh(self.axes, self.compiled_config, tpu_topology(self.chip).devices)

    def placement(self, plan: FullyShardedPlan) -> TrainingPlacement:
        """Returns mesh and plan. Raises a `ValueError` if mesh, model, batch, plan and slice do not fit each other."""
        config = self.compiled_config
        plan.check(config.num_layers, balanced(config) is not None)
        placement = TrainingPlacement(self.mesh, plan)
        placement.check_batch(self.batch, self.length)
        return placement

    @cached_property
    def fabric(self) -> Fabric:
        return calibrated(slice_of_mesh(self.mesh, self.hop_us), self.calibration)

    @property
    def least_compute_s(self) -> float:
        """Seconds of the whole model's matmuls in a step at the chip's peak rate, including recomputed forward passes.

        Of a mixture of experts, only the active experts count.
        """
        c = self.config
        columns = c.mlp_columns + (0 if c.mixture is None else c.mixture.shared)
        weights = c.hidden_size * (c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads) + 3 * columns)
        scores = 2 * c.num_heads * c.head_dim * self.length  # all positions, as plain attention computes them
        flops = 8 * c.num_layers * (weights + scores) + 6 * c.hidden_size * c.vocab_size
        return self.batch * self.length * flops / (prod(self.axes.values()) * 1e12 * self.spec.bf16_tflop_per_s)


@dataclass(frozen=True)
class TrainingProgram:
    """A compiled step with its modelled timeline."""

    case: TrainingCase
    name: str
    plan: FullyShardedPlan
    compiled: Compiled
    timeline: Timeline
    compile_s: float

    @cached_property
    def sums(self) -> dict[int | None, TimelineTotals]:
        return self.timeline.sums()

    @property
    def middle(self) -> int:
        """Index of the reported layer. The next layer does the same work if enough layers are compiled."""
        return (self.case.layers - 1) // 2

    def layer(self, part: str, layer: int | None = None) -> TimelineTotals:
        """Returns the sums of a layer, by default the middle one, in a pass.

        Raises:
            ValueError: No operation carries the layer's name.
        """
        number = layer_number(part, self.middle if layer is None else layer)
        if number not in self.sums:
            raise ValueError(f"expected operations of layer {number // 2} in the {part} pass, found none")
        return self.sums[number]

    @cached_property
    def unsteady_share(self) -> float:
        """Largest relative difference in time between the middle layer and the next, over both passes."""
        behind = self.middle + 1
        return max(abs(self.layer(part, behind).total_s / self.layer(part).total_s - 1) for part in PASSES)

    @property
    def notes(self) -> list[str]:
        notes = list(self.timeline.graph.notes)
        if self.unsteady_share > STEADY:
            differs = f"{self.name}: layers {self.middle} and {self.middle + 1} differ by {self.unsteady_share:.0%}"
            notes.append(f"{differs}: not steady; compile more layers")
        return notes


def layer_number(part: str, layer: int) -> int:
    """Returns the number of a layer in a pass, as the graph's nodes have it."""
    return 2 * layer + PASSES.index(part)


def read_place(name: str) -> tuple[str, int, str] | None:
    """Returns pass, layer and sublayer of an operation, from its location in the Python program.

    A layer's weights belong to the pass for which they are gathered, its gradient to the backward pass.
    """
    found = re.search(r"(layer|back|gather|scatter)_(\d+)[/_](attention|mlp)(_again)?", name)
    if found is None:
        return None
    ours = found[1] in ("back", "scatter") or found[4] is not None
    peers = found[1] == "layer" and ("transpose(" in name or "rematted" in name)
    return BACKWARD if ours or peers else FORWARD, int(found[2]), found[3]


def placed(graph: ScheduleGraph) -> ScheduleGraph:
    """Returns the graph with a `layer_number` for each node. Core operations and copies without a name belong to the layer of
    the previous operation."""
    nodes: list[Node] = []
    last: int | None = None
    for node in graph.nodes:
        place = read_place(node.op_name)
        number = None
        if place is not None:
            number = layer_number(*place[:2])
        elif not node.op_name and (node.role == "run" or node.engine == "hbm"):
            number = last
        if node.role == "run" and node.op_name:
            last = number
        nodes.append(replace(node, layer=number))
    return replace(graph, nodes=tuple(nodes))


def optimizer() -> optax.GradientTransformation:
    """Returns the optimiser of `tilewright train lm` with a constant learning rate."""
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4, b2=0.95))


def compile_step(
    chip: str,
    model: Predictor,
    loss: Loss,
    update: optax.GradientTransformation,
    placement: TrainingPlacement,
    batch: tuple[jax.ShapeDtypeStruct, ...],
    parts: int = 1,
    flags: Mapping[str, bool] | None = None,
) -> Compiled:
    """Compiles a train step over a mesh of a topology's devices; DONATES parameters and optimizer state.

    Args:
        chip: TPU topology.
        model: the model, and what it predicts.
        loss: its loss over the mesh.
        update: the optimizer.
        placement: mesh and strategy.
        batch: arguments of `Predictor.predict`, sharded.
        parts: parts of a batch, whose gradients are accumulated.
        flags: compiler options.
    """
    assert placement.mesh is not None, "the devices are in a mesh"
    step = compiled_step(loss, update, lambda _, batch, key: model.predict(batch, key), placement, model.specs, parts)
    params = abstract(model.specs, jnp.float32, placement.shardings(model.specs))
    state = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        jax.eval_shape(update.init, params),
        state_shardings(placement, model.specs, update),
    )
    key = jax.ShapeDtypeStruct((2,), jnp.uint32, sharding=NamedSharding(placement.mesh, PartitionSpec()))
    return compile_for(chip, step, params, state, None, batch, key, options=flags)


def compile_program(case: TrainingCase, name: str, plan: FullyShardedPlan, ops: Operations | None = None) -> TrainingProgram:
    """Compiles one step; `ANNOTATED` is the auto-sharded step.

    Args:
        case: the step to compile.
        name: name of the program.
        plan: schedule of its collectives.
        ops: operations of the loss; by default those of `train lm` on a TPU.

    Raises:
        ValueError: See `TrainingCase.placement`.
    """
    started_at = time.perf_counter()
    peer = name == ANNOTATED
    placement = case.placement(plan)
    if peer:
        placement = replace(placement, plan=None, remat=NOTHING)
    model = language_model(case.compiled_config)
    if ops is None:
        ops = placement.ops(TextOptions(compute_dtype=plan.dtype), "tpu")
    loss = prediction_loss(model, ops, placement)
    if peer:
        loss = cast_loss(TextOptions(compute_dtype=plan.dtype), loss)
    shape = (case.batch, case.length + 1)
    batch = tuple(jax.ShapeDtypeStruct(shape, dtype, sharding=placement.batch_sharding) for dtype in (jnp.int32, jnp.bool_))
    flags = FLAGS.get(case.chip.partition(":")[0], ASYNC) if peer else None
    found = compile_step(case.chip, model, loss, optimizer(), placement, batch, flags=flags)
    compile_s = time.perf_counter() - started_at
    graph = placed(read_schedule(found.hlo, case.spec))
    return TrainingProgram(case, name, plan, found, simulate(graph, case.fabric), compile_s)


def select_programs(plans: Mapping[str, FullyShardedPlan], peers: bool = True) -> dict[str, FullyShardedPlan]:
    """Returns all programs to compile by name: the plans; with `peers` also the first plan without tokens (with and without
    decomposed collectives) and the auto-sharded step."""
    if not peers:
        return dict(plans)
    first = next(iter(plans.values()))
    plain = replace(first, threaded=False, weights="whole", gradients="whole", activations="whole")
    unthreaded = replace(first, threaded=False)
    rings = {} if unthreaded == plain else {UNTHREADED: unthreaded}
    return {**plans, **rings, PLAIN_STEP: plain, ANNOTATED: first}


def compiled_programs(
    case: TrainingCase, plans: Mapping[str, FullyShardedPlan], on_program: Callable[[str], None]
) -> list[TrainingProgram]:
    """Compiles all programs. Calls `on_program` with the name before each."""
    found = []
    for name, plan in plans.items():
        on_program(f"{case.chip} {name}")
        found.append(compile_program(case, name, plan))
    return found


def plan_record(plan: FullyShardedPlan) -> dict[str, Any]:
    """Returns the fields of a plan, under the names of the JSON records."""
    names = {"prefetch_distance": "early", "scatter_delay": "late"}
    return {names.get(name, name): value for name, value in asdict(plan).items()}


def records(programs: Sequence[TrainingProgram]) -> list[dict[str, Any]]:
    """Returns the figures of each program (docs/metrics.md)."""
    return [record(program, [other for other in programs if other.case == program.case]) for program in programs]


def record(program: TrainingProgram, peers: Sequence[TrainingProgram]) -> dict[str, Any]:
    """Returns the figures of one program, compared with the plain one if that was compiled."""
    case = program.case
    timeline = program.timeline
    layer = layer_totals(program)
    whole = timeline.whole()
    plain = next((layer_totals(other) for other in peers if other.name == PLAIN_STEP), None)
    uncompiled = case.config.num_layers - case.layers
    total = whole.total_s + uncompiled * layer.total_s
    numbers = {layer_number(part, program.middle) for part in PASSES}
    busiest = busiest_s(timeline, case.fabric, [span for span in timeline.transfers if timeline.layer(span) in numbers])
    return {
        "chip": case.chip,
        "devices": prod(case.axes.values()),
        "mesh": ",".join(f"{name}={size}" for name, size in case.axes.items()),
        "program": program.name,
        "plan": None if program.name == ANNOTATED else plan_record(program.plan),
        "batch_rows": case.batch,
        "positions": case.length,
        **layer_figures(layer, case.spec),
        **{part: layer_figures(program.layer(part), case.spec) for part in PASSES},
        "exposed_share": ratio(layer.exposed_s, layer.communication_s),
        "exposed_share_of_plain": None if plain is None else ratio(layer.exposed_s, plain.exposed_s),
        "compute_share": layer.compute_s / layer.total_s,
        "bound_total_ms": 1e3 * layer.compute_s,
        "busiest_link_ms": 1e3 * busiest,
        "least_exposed_ms": 1e3 * max(0.0, busiest - layer.compute_s),
        "peak_bytes": program.compiled.peak_bytes,
        "argument_bytes": program.compiled.argument_bytes,
        "temporary_bytes": program.compiled.temp_bytes,
        "model_layers": case.config.num_layers,
        "model_peak_bytes": program.compiled.peak_bytes + uncompiled * kept_bytes(program),
        "model_total_ms": 1e3 * total,
        "model_exposed_ms": 1e3 * (whole.exposed_s + uncompiled * layer.exposed_s),
        "model_products_share": case.least_compute_s / total,
        "layers_compiled": case.layers,
        "reported_layer": program.middle,
        "layers": [
            {"pass": part, "layer": layer, **layer_figures(program.layer(part, layer), case.spec)}
            for part in PASSES
            for layer in range(case.layers)
        ],
        "transfers_of_layer": [each for part in PASSES for each in travels(program, part)],
        "compile_s": program.compile_s,
        "without_estimate": len(timeline.graph.without_estimate),
        "roofline_share": timeline.roofline_share(numbers),
        "unsteady_share": program.unsteady_share,
        "notes": program.notes,
    }


def sweeps(programs: Sequence[TrainingProgram], draws: int = EVENT_DRAWS) -> dict[str, Sweep]:
    """Returns, for each chip, ranges of the reported layer's time in both passes together."""
    found = {}
    for chip in dict.fromkeys(program.case.chip for program in programs):
        peers = {program.name: program for program in programs if program.case.chip == chip}
        case = next(iter(peers.values())).case
        numbers = {layer_number(part, program.middle) for program in peers.values() for part in PASSES}
        share = max(program.timeline.roofline_share(numbers) for program in peers.values())

        def milliseconds(_: str, timeline: Timeline, numbers: Collection[int] = numbers) -> float:
            sums = timeline.sums()
            return 1e3 * sum(sums[number].total_s for number in numbers)

        timelines = {name: program.timeline for name, program in peers.items()}
        found[chip] = sweep_timelines(timelines, case.fabric, milliseconds, case.calibration, share, draws, "ms a layer")
    return found


def layer_totals(program: TrainingProgram) -> TimelineTotals:
    """Returns the middle layer's sums over both passes."""
    return program.layer(FORWARD).plus(program.layer(BACKWARD))


def kept_bytes(program: TrainingProgram) -> int:
    """Returns the bytes that one more layer needs on a device.

    Counts weights, the optimiser's two moments and the gradient in float32, and the saved residual stream: before each
    sublayer, or before the layer in the auto-sharded step. Weights that the backward pass does not gather again are saved
    unsharded.
    """
    case = program.case
    placement = case.placement(program.plan)
    layer = decoder.declare(case.compiled_config).layers[0]
    stream = case.batch * case.length * case.config.hidden_size * jnp.dtype(program.plan.dtype).itemsize
    streams = 1 if program.name == ANNOTATED else len(NAMES)
    shards = shard_entries(layer, placement.shardings(layer))
    whole = 0 if gathers_again(program) else shards * case.axes.get("fsdp", 1) * jnp.dtype(program.plan.dtype).itemsize
    return 16 * shards + whole + streams * stream // prod(case.axes.values())


def gathers_again(program: TrainingProgram) -> bool:
    """Returns True if the backward pass gathers the middle layer's weights again.

    Without tokens, the compiler merges two gathers of the same weights.
    """
    number = layer_number(BACKWARD, program.middle)
    nodes = (node for node in program.timeline.graph.nodes if node.layer == number and node.transfer is not None)
    return program.name == ANNOTATED or any(re.search(r"gather_\d+_\w+_again", node.op_name) for node in nodes)


def travels(program: TrainingProgram, part: str) -> list[dict[str, Any]]:
    """Returns the middle layer's transfers in a pass, grouped by purpose: times, and the compute beside them.

    Times are milliseconds from the layer's first matmul in the pass; earlier times are negative. `beside_ms` is the compute
    during the transfers, by pass, layer and sublayer.
    """
    timeline = program.timeline
    number = layer_number(part, program.middle)
    groups: dict[tuple[str, str], list[TimelineSpan]] = {}
    for span in timeline.transfers:
        node = timeline.graph.nodes[span.node]
        if span.track == "ici" and node.layer == number and node.transfer is not None:
            groups.setdefault((purpose(node.op_name), node.transfer.kind), []).append(span)
    begin = first_product_s(timeline, number)
    found = []
    for (name, kind), spans in groups.items():
        transfers = {span.node for span in spans}
        waits = sum(span.seconds for span in timeline.core if span.track == "exposed" and span.node in transfers)
        first = min(span.begin_s for span in spans)
        last = max(span.end_s for span in spans)
        asynchronous = sum(timeline.graph.nodes[span.node].role == "start" for span in spans)
        found.append(
            {
                "pass": part,
                "name": name,
                "kind": kind,
                "transfers": len(spans),
                "asynchronous": asynchronous,
                "begin_ms": 1e3 * (first - begin),
                "end_ms": 1e3 * (last - begin),
                "alone_ms": 1e3 * sum(span.alone_s for span in spans),
                "exposed_ms": 1e3 * waits,
                "beside_ms": compute_beside(timeline, [(span.begin_s, span.end_s) for span in spans]),
            }
        )
    return found


def first_product_s(timeline: Timeline, number: int) -> float:
    """Returns the start of a layer's first matmul in a pass; 0 if no operation carries the layer's name."""
    products = (
        span.begin_s
        for span in timeline.core
        if span.track == "compute"
        and timeline.layer(span) == number
        and "dot_general" in timeline.graph.nodes[span.node].op_name
    )
    return min(products, default=0.0)


def purpose(name: str) -> str:
    """Returns the purpose of a transfer, from its location in the Python program."""
    found = re.search(r"(?:gather|scatter)_\w+|(?:layer|back)_\d+/\w+", name)
    return found[0] if found else "other"


def compute_beside(timeline: Timeline, under_way: Sequence[Interval]) -> dict[str, float]:
    """Returns the milliseconds of compute during any of these transfers, by pass, layer and sublayer."""
    spans: list[Interval] = [(begin, end) for begin, end, _ in merged([(*each, "") for each in under_way])]
    found: dict[str, float] = {}
    for span in timeline.core:
        seconds = overlap((span.begin_s, span.end_s), spans) if span.track == "compute" else 0.0
        place = read_place(timeline.graph.nodes[span.node].op_name)
        if seconds and place is not None:
            name = "{} {} {}".format(*place)
            found[name] = found.get(name, 0.0) + 1e3 * seconds
    return found


def lanes(program: TrainingProgram) -> dict[str, Any]:
    """Returns spans of the core and of the links for a chart; see `overlap.lanes`."""
    numbers = [layer_number(part, layer) for part in PASSES for layer in range(program.case.layers)]
    begins = sorted(1e3 * first_product_s(program.timeline, number) for number in numbers)
    return {"schedule": program.name, **lane_spans(program.timeline), "layer_begins_ms": begins}
