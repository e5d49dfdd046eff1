"""What a train step over a mesh leaves exposed of its communication, on TPUs that are not there.

The step of `train/sharded.py`, optimiser and all, is compiled for a slice with a few layers, under several plans; beside it the
same step without tokens, and the one that is left to XLA (`train/annotated.py`). Their time is the model of
`compiled/timeline.py`, an estimate. Of each pass the middle layer is reported: from its first product to that of the next.
"""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from tilewright.bench.overlap import STEADY, layer_figures, merged, ratio, timeline_lanes
from tilewright.chips.links import HOP_US, Fabric, torus_of
from tilewright.chips.tpu import TpuChip, chip_of
from tilewright.compiled.aot import Compiled, compile_for, tpu_topology
from tilewright.compiled.schedule import read_schedule
from tilewright.compiled.timeline import Interval, Span, Sums, Timeline, busiest_s, lay_out, overlap
from tilewright.kernels.select import PLAIN
from tilewright.models import decoder
from tilewright.models.decoder import DecoderConfig
from tilewright.models.params import abstract
from tilewright.parallel.exchanges import NAMES, Plan
from tilewright.train.annotated import annotated_gradient
from tilewright.train.sharded import Setup, jitted_step, sharded_gradient, state_shardings, training_mesh

FORWARD, BACKWARD = "forward", "backward"
PASSES = (FORWARD, BACKWARD)
PLAIN_STEP, UNTHREADED, ANNOTATED = "no tokens or rings", "no tokens", "left to XLA"
"""Names of the programs that ours are compared with; the first one is what shares are of."""

LEAST_LAYERS = 4
"""How many layers are compiled: of four, the inner two do the same under shifts of one. Every more needs two more."""

ASYNC = {
    "xla_tpu_enable_data_parallel_all_reduce_opt": True, "xla_tpu_data_parallel_opt_different_sized_ops": True,
    "xla_tpu_enable_async_collective_fusion": True, "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
    "xla_tpu_enable_async_collective_fusion_multiple_steps": True, "xla_tpu_overlap_compute_collective_tc": True,
    "xla_enable_async_all_gather": True,
}  # fmt: skip
FLAGS: dict[str, dict[str, bool]] = {
    "v5e": ASYNC,
    "v5p": {
        **ASYNC, "xla_tpu_megacore_fusion_allow_ags": False, "xla_enable_async_collective_permute": True,
        "xla_tpu_enable_ag_backward_pipelining": True,
    },
}  # fmt: skip
"""That MaxText's scripts set for a kind of TPU: MaxText/configs/v5e/llama3/llama3_8b.sh at 74fcbe7b and v5p/llama2_7b.sh at
dcbbec7d, github.com/AI-Hypercomputer/maxtext. Other kinds get v5e's."""


@dataclass(frozen=True)
class Case:
    """What is compiled.

    Attributes:
        chip: topology of a TPU.
        model: its name, for the report.
        config: of the whole model.
        axes: of the mesh, `fsdp` and `tp`.
        layers: how many are compiled.
        batch, length: sequences of a step, over all devices, and the positions of each that are predicted.
        hop_us: latency of a hop between neighbours, in microseconds.
    """

    chip: str
    model: str
    config: DecoderConfig
    axes: Mapping[str, int]
    layers: int
    batch: int
    length: int
    hop_us: float = HOP_US

    def __post_init__(self) -> None:
        if not LEAST_LAYERS <= self.layers <= self.config.num_layers:
            raise ValueError(
                f"expected from {LEAST_LAYERS} to {self.config.num_layers} layers, so that {self.model} has them and two are "
                f"in the middle; found {self.layers}"
            )
        for name, value in (("--batch-size", self.batch), ("--length", self.length)):
            if value < 1:
                raise ValueError(f"expected {name} from 1, found {value}")
        if not 0 <= self.hop_us < float("inf"):
            raise ValueError(f"expected the latency of a hop from 0 us, found {self.hop_us:g}")

    @property
    def spec(self) -> TpuChip:
        return chip_of(self.chip)

    def setup(self, plan: Plan) -> Setup:
        """Raises ValueError where mesh, model, batch and plan do not fit one another or the slice."""
        config = replace(self.config, num_layers=self.layers)
        made = Setup(config, PLAIN, training_mesh(self.axes, config, tpu_topology(self.chip).devices), plan)
        made.check_batch((self.batch, self.length + 1))
        return made

    @cached_property
    def fabric(self) -> Fabric:
        sizes = [int(size) for size in self.chip.partition(":")[2].split("x")]
        devices = self.setup(Plan()).mesh.devices.flat
        places = tuple(tuple(device.coords)[: len(sizes)] for device in devices)
        return Fabric(self.spec, torus_of(self.spec, sizes), places, self.hop_us)

    @property
    def least_compute_s(self) -> float:
        """Of a step of the whole model by its products alone, those of the second forward pass too, at the chip's peak rate."""
        c = self.config
        weights = c.hidden_size * (c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads) + 3 * c.intermediate_size)
        scores = 2 * c.num_heads * c.head_dim * self.length  # of all positions, as the plain attention computes them
        flops = 8 * c.num_layers * (weights + scores) + 6 * c.hidden_size * c.vocab_size
        return self.batch * self.length * flops / (prod(self.axes.values()) * 1e12 * self.spec.bf16_tflop_per_s)


class Turn(NamedTuple):
    """A layer of a pass, from its first product to the next layer's."""

    part: str
    layer: int
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class Program:
    """A compiled step, and the model of its time."""

    case: Case
    name: str
    plan: Plan
    compiled: Compiled
    timeline: Timeline
    compile_s: float

    @cached_property
    def turns(self) -> list[Turn]:
        return turns_of(self.timeline)

    def turn(self, part: str, layer: int) -> Turn:
        return next(each for each in self.turns if (each.part, each.layer) == (part, layer))

    @property
    def middle(self) -> int:
        """The layer that is reported. The one behind it does the same, if enough are compiled."""
        return (self.case.layers - 1) // 2

    def layer(self, part: str, layer: int | None = None) -> Sums:
        """Of a layer, by default the middle one, in a pass."""
        turn = self.turn(part, self.middle if layer is None else layer)
        return self.timeline.within(turn.begin_s, turn.end_s)

    @cached_property
    def unsteady_share(self) -> float:
        """By how much the layer behind the middle one takes longer, or less long; the larger of both passes."""
        behind = self.middle + 1
        return max(abs(self.layer(part, behind).total_s / self.layer(part).total_s - 1) for part in PASSES)

    @property
    def notes(self) -> list[str]:
        notes = list(self.timeline.graph.notes)
        if self.unsteady_share > STEADY:
            differs = f"{self.name}: layers {self.middle} and {self.middle + 1} differ by {self.unsteady_share:.0%}"
            notes.append(f"{differs}: not steady; more layers may say more")
        return notes


def place_of(name: str) -> tuple[str, int, str] | None:
    """The pass, layer and half that an operation belongs to, by where it comes from in the Python program."""
    found = re.search(r"(layer|back)_(\d+)/(\w+)", name)
    if found is None:
        return None
    back = found[1] == "back" or "transpose(" in name or "rematted" in name
    return BACKWARD if back else FORWARD, int(found[2]), found[3]


def turns_of(timeline: Timeline) -> list[Turn]:
    """The layers of both passes, in their order.

    Raises:
        ValueError: the program's operations do not say what layers they belong to.
    """
    begins: dict[tuple[str, int], float] = {}
    for span in timeline.core:
        name = timeline.graph.nodes[span.node].op_name
        place = place_of(name)
        if span.track == "compute" and place is not None and "dot_general" in name:
            begins.setdefault(place[:2], span.begin_s)
    found = []
    for part in PASSES:
        order = sorted((layer for of, layer in begins if of == part), reverse=part == BACKWARD)
        if len(order) < 2:
            raise ValueError(f"expected products of several layers in the {part} pass, found {len(order)}")
        times = [begins[part, layer] for layer in order]
        ends = [*times[1:], last_product_end(timeline, part)]
        found += [Turn(part, layer, begin, end) for layer, begin, end in zip(order, times, ends, strict=True)]
    return found


def last_product_end(timeline: Timeline, part: str) -> float:
    """When the last operation that belongs to a layer of this pass ends."""
    places = ((span, place_of(timeline.graph.nodes[span.node].op_name)) for span in timeline.core)
    return max(span.end_s for span, place in places if place is not None and place[0] == part)


def read_program(case: Case, name: str, plan: Plan, compiled: Compiled, compile_s: float) -> Program:
    graph = read_schedule(compiled.hlo, case.spec)
    return Program(case, name, plan, compiled, lay_out(graph, case.fabric), compile_s)


def optimizer() -> optax.GradientTransformation:
    """That of `tilewright train lm`, but for its rate, which is one number."""
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4, b2=0.95))


def compile_program(case: Case, name: str, plan: Plan) -> Program:
    """Compiles one step; `ANNOTATED` is the one that is left to XLA.

    Raises:
        ValueError: what does not fit; see `Case.setup`.
    """
    setup, began = case.setup(plan), time.perf_counter()
    peer = name == ANNOTATED
    step = jitted_step(setup, optimizer(), annotated_gradient(setup) if peer else sharded_gradient(setup))
    params = abstract(decoder.declare(setup.config), jnp.float32, setup.shardings)
    state = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        jax.eval_shape(optimizer().init, params), state_shardings(setup, optimizer()),
    )  # fmt: skip
    shape = (case.batch, case.length + 1)
    batch = [jax.ShapeDtypeStruct(shape, dtype, sharding=setup.batch_sharding) for dtype in (jnp.int32, jnp.bool_)]
    kind = case.chip.partition(":")[0]
    found = compile_for(case.chip, step, params, state, *batch, options=FLAGS.get(kind, ASYNC) if peer else None)
    return read_program(case, name, plan, found, time.perf_counter() - began)


def programs_of(plans: Mapping[str, Plan], peers: bool = True) -> dict[str, Plan]:
    """All that is compiled, by name: the plans, and beside them the first one without tokens, with rings and without, and the
    step left to XLA."""
    if not peers:
        return dict(plans)
    first = next(iter(plans.values()))
    plain = replace(first, threaded=False, weights="whole", gradients="whole", activations="whole")
    unthreaded = replace(first, threaded=False)
    rings = {} if unthreaded == plain else {UNTHREADED: unthreaded}
    return {**plans, **rings, PLAIN_STEP: plain, ANNOTATED: first}


def compiled_programs(case: Case, plans: Mapping[str, Plan], on_program: Callable[[str], None]) -> list[Program]:
    """Compiles all of `programs_of`; `on_program` is told of each before."""
    found = []
    for name, plan in plans.items():
        on_program(f"{case.chip} {name}")
        found.append(compile_program(case, name, plan))
    return found


def records(programs: Sequence[Program]) -> list[dict[str, Any]]:
    """The figures of each program, as docs/metrics.md defines them."""
    return [record(program, [other for other in programs if other.case == program.case]) for program in programs]


def record(program: Program, same: Sequence[Program]) -> dict[str, Any]:
    """The figures of one program, set against the plain one, if that is there."""
    case, timeline = program.case, program.timeline
    layer, whole = both(program), timeline.whole()
    plain = next((both(other) for other in same if other.name == PLAIN_STEP), None)
    others = case.config.num_layers - case.layers
    total = whole.total_s + others * layer.total_s
    turns = [program.turn(part, program.middle) for part in PASSES]
    begun = [span for span in timeline.transfers if any(turn.begin_s <= span.begin_s < turn.end_s for turn in turns)]
    busiest = busiest_s(timeline, case.fabric, begun)
    return {
        "chip": case.chip,
        "devices": prod(case.axes.values()),
        "mesh": ",".join(f"{name}={size}" for name, size in case.axes.items()),
        "program": program.name,
        "plan": None if program.name == ANNOTATED else asdict(program.plan),
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
        "model_peak_bytes": program.compiled.peak_bytes + others * kept_bytes(program),
        "model_total_ms": 1e3 * total,
        "model_exposed_ms": 1e3 * (whole.exposed_s + others * layer.exposed_s),
        "model_products_share": case.least_compute_s / total,
        "layers_compiled": case.layers,
        "reported_layer": program.middle,
        "layers": [
            {"pass": turn.part, "layer": turn.layer, **layer_figures(timeline.within(turn.begin_s, turn.end_s), case.spec)}
            for turn in program.turns
        ],
        "transfers_of_layer": [each for turn in turns for each in travels(program, turn)],
        "compile_s": program.compile_s,
        "unsteady_share": program.unsteady_share,
        "notes": program.notes,
    }


def both(program: Program) -> Sums:
    """The middle layer in both passes."""
    return program.layer(FORWARD).plus(program.layer(BACKWARD))


def kept_bytes(program: Program) -> int:
    """What one more layer needs on a device: weights, the optimiser's two moments and the gradient, float32, and the stream
    that is kept of it: before each half, or, left to XLA, before the layer."""
    case = program.case
    setup = case.setup(program.plan)
    shapes = jax.tree.leaves(decoder.declare(setup.config).layers[0])
    specs = jax.tree.leaves(setup.specs.layers[0], is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))
    local = [NamedSharding(setup.mesh, spec).shard_shape(of.shape) for of, spec in zip(shapes, specs, strict=True)]
    stream = case.batch * case.length * case.config.hidden_size * jnp.dtype(program.plan.dtype).itemsize
    streams = 1 if program.name == ANNOTATED else len(NAMES)
    return 16 * sum(map(prod, local)) + streams * stream // prod(case.axes.values())


def travels(program: Program, turn: Turn) -> list[dict[str, Any]]:
    """The transfers that begin in a layer's turn, those of one purpose together: when, how long, and what runs meanwhile.

    Times are milliseconds from the turn's begin; `beside` has the compute while they are under way, by pass, layer and half.
    """
    timeline = program.timeline
    groups: dict[tuple[str, str], list[Span]] = {}
    for span in timeline.transfers:
        node = timeline.graph.nodes[span.node]
        if span.track == "ici" and turn.begin_s <= span.begin_s < turn.end_s and node.transfer is not None:
            groups.setdefault((purpose(node.op_name), node.transfer.kind), []).append(span)
    found = []
    for (name, kind), spans in groups.items():
        of = {span.node for span in spans}
        waits = sum(span.seconds for span in timeline.core if span.track == "exposed" and span.node in of)
        first, last = min(span.begin_s for span in spans), max(span.end_s for span in spans)
        asynchronous = sum(timeline.graph.nodes[span.node].role == "start" for span in spans)
        found.append({
            "pass": turn.part, "name": name, "kind": kind, "transfers": len(spans), "asynchronous": asynchronous,
            "begin_ms": 1e3 * (first - turn.begin_s), "end_ms": 1e3 * (last - turn.begin_s),
            "alone_ms": 1e3 * sum(span.alone_s for span in spans), "exposed_ms": 1e3 * waits,
            "beside_ms": compute_beside(timeline, [(span.begin_s, span.end_s) for span in spans]),
        })  # fmt: skip
    return found


def purpose(name: str) -> str:
    """What a transfer is for, by where it comes from in the Python program."""
    found = re.search(r"(?:gather|scatter)_\w+|(?:layer|back)_\d+/\w+", name)
    return found[0] if found else "other"


def compute_beside(timeline: Timeline, under_way: Sequence[Interval]) -> dict[str, float]:
    """Milliseconds of compute while any of these transfers is under way, by pass, layer and half."""
    spans: list[Interval] = [(begin, end) for begin, end, _ in merged([(*each, "") for each in under_way])]
    found: dict[str, float] = {}
    for span in timeline.core:
        seconds = overlap((span.begin_s, span.end_s), spans) if span.track == "compute" else 0.0
        place = place_of(timeline.graph.nodes[span.node].op_name)
        if seconds and place is not None:
            name = "{} {} {}".format(*place)
            found[name] = found.get(name, 0.0) + 1e3 * seconds
    return found


def lanes(program: Program) -> dict[str, Any]:
    """What happens when, for a picture; see `overlap.lanes`."""
    begins = [1e3 * turn.begin_s for turn in program.turns]
    return {"schedule": program.name, **timeline_lanes(program.timeline), "layer_begins_ms": begins}
