"""Memory and time of a language model's train step on absent TPUs, and the first change of settings with which it fits.

Steps of two small numbers of layers are compiled; memory and time of all layers are extrapolated from their difference. The
embedding, the head and the loss are in both steps, and layers repeat, so that each further layer adds the same.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from tilewright.bench.overlap import slice_of_mesh
from tilewright.bench.overlap_training import compile_step
from tilewright.compiled.aot import KINDS, LARGEST_AXIS, Compiled, tpu_topology
from tilewright.hardware.links import HOP_US, Fabric
from tilewright.hardware.tpu import TpuChip, chip_of
from tilewright.kernels import registry
from tilewright.kernels.masks import AttentionMask
from tilewright.kernels.select import training_operations
from tilewright.models import decoder
from tilewright.models.decoder import DecoderConfig
from tilewright.parallel.exchanges import FullyShardedPlan
from tilewright.parallel.fully_sharded import period_of
from tilewright.perfmodel.calibration import Calibration, calibrated, calibrated_chip
from tilewright.perfmodel.schedule import read_schedule
from tilewright.perfmodel.timeline import simulate
from tilewright.perfmodel.timeline_ranges import sweep_timelines
from tilewright.perfmodel.uncertainty import Sweep
from tilewright.train.balance import balanced
from tilewright.train.flops import token_flops
from tilewright.train.lm import hidden_matrices, language_model
from tilewright.train.sharded import prediction_loss
from tilewright.train.step import TrainingPlacement, training_mesh
from tilewright.train.text import TextOptions, make_optimizer

STEP = "step"
"""Name of the prediction in the range of a step's time."""
OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"


@dataclass(frozen=True)
class TrainingSetting:
    """Settings of a train step with explicit collectives, in bfloat16 with float32 weights and sums of gradients.

    Attributes:
        chip: TPU topology; the mesh has all of its devices.
        axes: sizes of the mesh axes "dp", "fsdp" and "tp".
        batch: sequences of a step over all devices.
        length: positions of each sequence.
        remat: see `FullyShardedPlan`.
        scan: see `FullyShardedPlan`.
        accumulate: parts of a batch that run one after another.
        state_dtype: dtype of the optimizer's stored moving averages.
    """

    chip: str
    axes: Mapping[str, int]
    batch: int
    length: int
    remat: bool = True
    scan: bool = False
    accumulate: int = 1
    state_dtype: str = "float32"

    @property
    def spec(self) -> TpuChip:
        return chip_of(self.chip)

    @property
    def devices(self) -> int:
        return prod(self.axes.values())

    @property
    def groups(self) -> int:
        """Number of groups of devices that compute different sequences."""
        return self.axes.get("dp", 1) * self.axes.get("fsdp", 1)

    def placement(self, config: DecoderConfig) -> TrainingPlacement:
        """Builds mesh and plan for a model.

        Raises:
            ValueError: an unknown topology, or mesh, model, batch and topology do not fit each other.
        """
        if self.length < 1 or self.batch < 1:
            raise ValueError(f"expected sequences and positions from 1, found {self.batch} and {self.length}")
        plan = FullyShardedPlan(remat=self.remat, scan=self.scan, dtype="bfloat16", reduce_dtype="float32")
        plan.check(config.num_layers, balanced(config) is not None)
        placement = TrainingPlacement(training_mesh(self.axes, config, tpu_topology(self.chip).devices), plan)
        placement.check_batch(self.batch, self.length, self.accumulate)
        return placement

    def record(self) -> dict[str, Any]:
        """Returns the settings as plain data."""
        mesh = ",".join(f"{name}={size}" for name, size in self.axes.items())
        names = {"batch": "batch_rows", "length": "positions"}
        fields = {names.get(name, name): value for name, value in vars(self).items() if name != "axes"}
        return {**fields, "mesh": mesh, "devices": self.devices}


def compile_setting(setting: TrainingSetting, config: DecoderConfig) -> Compiled:
    """Compiles the step of `train lm` with document segments for a setting.

    Raises:
        ValueError: see `TrainingSetting.placement`.
        jax.errors.JaxRuntimeError: the compiler refuses the program, for example because it exceeds the chip's memory.
    """
    placement = setting.placement(config)
    model = language_model(config)
    options = TextOptions(state_dtype=setting.state_dtype)
    loss = prediction_loss(model, training_operations("auto", "bfloat16", "tpu"), placement)
    shape = (setting.batch, setting.length + 1)
    dtypes = (jnp.int32, jnp.bool_, jnp.int32) if config.delta is None else (jnp.int32, jnp.bool_)
    batch = tuple(jax.ShapeDtypeStruct(shape, dtype, sharding=placement.batch_sharding) for dtype in dtypes)
    optimizer = make_optimizer(options, hidden_matrices)
    return compile_step(setting.chip, model, loss, optimizer, placement, batch, setting.accumulate)


def depths_of(config: DecoderConfig) -> tuple[int, ...]:
    """Returns the numbers of layers to compile: two whole numbers of periods of layers, or all layers of a shallow model."""
    period = period_of(decoder.declare(config).layers)
    few = -(-2 // period) * period
    return (few, 2 * few) if 2 * few < config.num_layers else (config.num_layers,)


@dataclass(frozen=True)
class Estimate:
    """Compiled steps of a setting, and the figures of all layers that follow from them.

    Attributes:
        setting: the setting.
        config: configuration of the whole model.
        programs: compiled steps by number of layers, fewest first; None where the step exceeds the chip's memory.
        refusal: the compiler's words where a step exceeds the memory; empty otherwise.
        calibration: source of fitted constants.
        hop_us: latency of a hop between neighbours, in microseconds.
    """

    setting: TrainingSetting
    config: DecoderConfig
    programs: Mapping[int, Compiled | None]
    refusal: str = ""
    calibration: Calibration | None = None
    hop_us: float = HOP_US

    @property
    def is_compiled(self) -> bool:
        """True if a step of all layers was compiled, or refused for its memory, so that nothing is extrapolated."""
        return self.config.num_layers in self.programs

    def of_all_layers(self, values: Mapping[int, Any]) -> Any:
        """Extrapolates values by number of layers to all layers; the value itself where all layers were compiled."""
        if self.config.num_layers in values:
            return values[self.config.num_layers]
        few, more = sorted(values)[-2:]
        return values[more] + (values[more] - values[few]) / (more - few) * (self.config.num_layers - more)

    @property
    def peak_bytes(self) -> int | None:
        """Peak memory per chip of all layers; None where a compiled step exceeds it."""
        if None in self.programs.values():
            return None
        return round(self.of_all_layers({n: one.peak_bytes for n, one in self.programs.items() if one is not None}))

    @property
    def memory_bytes(self) -> float:
        return 1e9 * self.setting.spec.hbm_gb

    @property
    def fits(self) -> bool:
        return self.peak_bytes is not None and self.peak_bytes <= self.memory_bytes

    @cached_property
    def fabric(self) -> Fabric:
        mesh = self.setting.placement(self.config).mesh
        assert mesh is not None, "a setting has a mesh"
        return calibrated(slice_of_mesh(mesh, self.hop_us), self.calibration)

    def time(self, draws: int) -> Sweep:
        """Returns the time of a step of all layers in milliseconds, with its range."""
        chip = calibrated_chip(self.setting.spec, self.calibration)
        hlo = {str(layers): program.hlo for layers, program in self.programs.items() if program is not None}
        timelines = {layers: simulate(read_schedule(text, chip), self.fabric) for layers, text in hlo.items()}
        share = max(timeline.roofline_share(set(timeline.layers)) for timeline in timelines.values())
        basis = (self.calibration, share, draws, "ms a step")
        sweep = sweep_timelines(timelines, self.fabric, lambda _, timeline: 1e3 * timeline.whole().total_s, *basis)

        def whole(values: Mapping[str, Any]) -> dict[str, Any]:
            return {STEP: self.of_all_layers({int(layers): value for layers, value in values.items()})}

        return replace(sweep, predicted=whole(sweep.predicted), outcomes=whole(sweep.outcomes), compared=False)

    def record(self) -> dict[str, Any]:
        """Returns the settings and the memory as plain data (docs/metrics.md)."""
        compiled = [
            {
                "layers_compiled": layers,
                "peak_bytes": program.peak_bytes,
                "argument_bytes": program.argument_bytes,
                "temporary_bytes": program.temp_bytes,
            }
            for layers, program in self.programs.items()
            if program is not None
        ]
        return {
            **self.setting.record(),
            "model_layers": self.config.num_layers,
            "model_peak_bytes": self.peak_bytes,
            "is_extrapolated": not self.is_compiled,
            "memory_bytes": self.memory_bytes,
            "fits": self.fits,
            "refusal": self.refusal,
            "compiled": compiled,
        }


def estimate(
    setting: TrainingSetting,
    config: DecoderConfig,
    depths: Sequence[int],
    on_program: Callable[[str], None] = lambda _: None,
    **model: Any,
) -> Estimate:
    """Compiles the steps of a setting with these numbers of layers, and stops at one that exceeds the memory.

    Args:
        setting: the setting.
        config: configuration of the whole model.
        depths: numbers of layers, fewest first.
        on_program: called before each program with a description.
        model: further fields of `Estimate`.

    Raises:
        ValueError: see `TrainingSetting.placement`.
    """
    programs: dict[int, Compiled | None] = {}
    refusal = ""
    for layers in depths:
        on_program(f"{setting.chip}: {layers} of {config.num_layers} layers")
        try:
            programs[layers] = compile_setting(setting, replace(config, num_layers=layers))
        except jax.errors.JaxRuntimeError as error:
            if OUT_OF_MEMORY not in str(error):
                raise
            programs[layers] = None
            refusal = " ".join(str(error).split(". ")[0].split())
            break
    return Estimate(setting, config, programs, refusal, **model)


def larger_slice(chip: str) -> str | None:
    """Returns the topology with twice the chips, with the shortest axis doubled; None beyond libtpu's limit."""
    kind, _, dims = chip.partition(":")
    sizes = [int(size) for size in dims.split("x")]
    assert len(sizes) == KINDS[kind], "the topology was checked"
    at = min(range(len(sizes)), key=sizes.__getitem__)
    sizes[at] *= 2
    return f"{kind}:{'x'.join(map(str, sizes))}" if sizes[at] <= LARGEST_AXIS else None


def alternatives(setting: TrainingSetting) -> Iterator[tuple[str, TrainingSetting]]:
    """Yields settings with less memory per chip, each with a description, in the order in which they are tried.

    Recomputation comes first, then accumulation, a larger slice, and moving averages in bfloat16, on the given slice and on the
    larger one. Each keeps the ones before it, except that the given slice is tried with bfloat16 first.
    """
    if not setting.remat:
        setting = replace(setting, remat=True)
        yield "recompute activations and gather weights again", setting
    rows = setting.batch // setting.groups
    for parts in range(setting.accumulate + 1, rows + 1):
        if rows % parts == 0 and parts % setting.accumulate == 0:
            setting = replace(setting, accumulate=parts)
            yield f"accumulate gradients over {parts} parts of the batch", setting
    chip = larger_slice(setting.chip)
    larger = None
    if chip is not None and setting.batch % (2 * setting.groups) == 0:
        axes = {**setting.axes, "fsdp": 2 * setting.axes.get("fsdp", 1)}
        rows = setting.batch // (2 * setting.groups)  # a part of the batch needs a sequence for each group
        parts = max(n for n in range(1, setting.accumulate + 1) if rows % n == 0)
        larger = replace(setting, chip=chip, axes=axes, accumulate=parts)
        yield f"shard over {larger.devices} chips, {chip}", larger
    if setting.state_dtype == "float32":
        yield "store the optimizer's moving averages in bfloat16", replace(setting, state_dtype="bfloat16")
        if larger is not None:
            yield f"both: bfloat16 moving averages, and {chip}", replace(larger, state_dtype="bfloat16")


def attention_kernel(config: DecoderConfig, setting: TrainingSetting) -> tuple[str, str]:
    """Returns the name of the implementation of attention in the step, and the reason why a faster one is not used."""
    heads = config.heads(config.kind(config.num_layers - 1))
    rows = jax.ShapeDtypeStruct((1, setting.length, config.num_heads, heads.head_dim), jnp.bfloat16)
    mask = AttentionMask(jax.ShapeDtypeStruct((1, 1), jnp.int32), "causal")
    reasons = []
    for each in registry.for_chip("attend_block", "tpu"):
        if reason := each.refuses("attend_block", rows, mask, (rows, rows)):
            reasons.append(f"{each.name}: {reason}")
            continue
        return each.name, "; ".join(reasons)
    raise AssertionError("the last implementation supports all operands")


def model_flops_share(config: DecoderConfig, setting: TrainingSetting, step_s: float) -> float:
    """Returns the model FLOPs utilisation of a step: useful operations (`token_flops`) over those at the chips' peak."""
    flops = token_flops(config, setting.length) * setting.batch * setting.length
    return flops / (step_s * setting.devices * 1e12 * setting.spec.bf16_tflop_per_s)
