"""`tilewright plan training`: memory and time of a train step on absent TPUs, and what fits if the step does not."""

from importlib.metadata import version
from math import prod
from typing import Annotated, Any, Literal

import jax
from cyclopts import Parameter
from rich.table import Table

from tilewright.bench import training_plan as planning
from tilewright.bench.training_plan import STEP, Estimate, TrainingSetting
from tilewright.cli.calibrate import TpuModelOptions, print_ranges
from tilewright.cli.common import mesh_axes
from tilewright.cli.options import COMMON, Flag, Numbers, option_class
from tilewright.cli.outputs import JsonFile, human_console, progress, working, write_json
from tilewright.compiled.aot import tpu_topology
from tilewright.hardware.tpu import chip_of
from tilewright.metrics.metric import significant
from tilewright.models.decoder import DecoderConfig
from tilewright.models.published_configs import model_config
from tilewright.report.overlap import CAVEATS

GIB = 2**30


@option_class
class PlanOptions(TpuModelOptions):
    """Options of the step to plan.

    Attributes:
        chip: TPU topology, such as v5e:4x4, v5p:2x2x4, v6e:4x4. The mesh has all its devices.
        mesh: devices along "fsdp" and "tp", such as fsdp=8,tp=2, and replicas of these along "dp"; by default all along "fsdp".
        batch_size: sequences of a step, over all devices; by default one for each rank of "dp" and "fsdp".
        sequence_length: positions of each sequence.
        remat: activations that are saved for the backward pass; nothing_saveable also gathers weights again.
        accumulate: parts of a batch that run one after another.
        state_dtype: dtype of the optimizer's moving averages.
        scan_layers: run the layers in a loop, which compiles faster and copies the shards.
        layers: numbers of layers to compile, from which memory and time of all layers are extrapolated. By default two whole
            numbers of periods of layers.
        whole: compile the step of all layers instead of extrapolating. The programs of large models take minutes.
        alternatives: if the step does not fit, try less memory per chip: recomputation, accumulation, a slice of twice the
            chips, moving averages in bfloat16.
    """

    chip: Annotated[str, Parameter(group=COMMON)] = "v5e:4x4"
    mesh: Annotated[str | None, Parameter(group=COMMON)] = None
    batch_size: Annotated[int | None, Parameter(alias="-b", group=COMMON)] = None
    sequence_length: Annotated[int, Parameter(alias="-l", group=COMMON)] = 2048
    remat: Literal["nothing_saveable", "everything_saveable"] = "nothing_saveable"
    accumulate: int = 1
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    scan_layers: Flag = False
    layers: Numbers = ()
    whole: Annotated[Flag, Parameter(group=COMMON)] = False
    alternatives: bool = True

    def setting(self, config: DecoderConfig) -> TrainingSetting:
        """Builds the setting. Raises a `ValueError` if chip, mesh, model and batch do not fit each other."""
        chip_of(self.chip)
        devices = len(tpu_topology(self.chip).devices)
        axes = {"fsdp": devices} if self.mesh is None else mesh_axes(self.mesh, ("dp", "fsdp", "tp"))
        if prod(axes.values()) != devices:
            raise ValueError(f"expected --mesh over the {devices} devices of {self.chip}, found {self.mesh}")
        if self.accumulate < 1:
            raise ValueError(f"expected --accumulate from 1, found {self.accumulate}")
        batch = axes.get("dp", 1) * axes.get("fsdp", 1) * self.accumulate if self.batch_size is None else self.batch_size
        sizes = (self.chip, axes, batch, self.sequence_length, self.remat == "nothing_saveable")
        setting = TrainingSetting(*sizes, self.scan_layers, self.accumulate, self.state_dtype)
        setting.placement(config)
        return setting

    def depths(self, config: DecoderConfig) -> tuple[int, ...]:
        """Returns the numbers of layers to compile. Raises a `ValueError` for numbers out of range."""
        if self.whole:
            if self.layers:
                raise ValueError("expected --layers or --whole, found both")
            return (config.num_layers,)
        depths = tuple(sorted(set(self.layers))) or planning.depths_of(config)
        if depths[0] < 1 or depths[-1] > config.num_layers or (len(depths) < 2 and depths != (config.num_layers,)):
            raise ValueError(
                f"expected two numbers of layers from 1 to {config.num_layers}, found {', '.join(map(str, depths))}"
            )
        return depths


def plan_training(model: str = "llama3-8b", /, *, options: PlanOptions = PlanOptions(), json_file: JsonFile = None) -> None:
    """Compiles the train step of a language model for TPUs that need not exist, and states memory per chip and time per step.

    If a step needs more memory than a chip has, settings with less are tried until one fits. Compiler estimates and a model of
    links and memory, not measurements. docs/metrics.md defines the figures.

    Args:
        model: smollm2-135m, llama3.2-1b, llama3-8b, llama3-70b, qwen3-0.6b, qwen3-4b, qwen3-8b, qwen3-32b, or a folder with a
            config.json.
    """
    console = human_console(json_file)
    config = model_config(model)
    calibration = options.calibrations((options.chip,))[options.chip]
    setting = options.setting(config)
    depths = options.depths(config)
    kernel, reason = planning.attention_kernel(config, setting)
    mesh = setting.record()["mesh"]
    shape = f"{setting.batch} sequences of {setting.length:,} positions"
    title = f"training {model} on {setting.chip}, {mesh}: {shape}, bfloat16 with float32 weights"
    console.print(title, markup=False, soft_wrap=True)
    console.print(f"attention: {kernel}{f' ({reason})' if reason else ''}", markup=False, soft_wrap=True)
    more = {"calibration": calibration, "hop_us": options.hop_us}
    tried: list[tuple[str, Estimate]] = []
    candidates = [("as given", setting), *(planning.alternatives(setting) if options.alternatives else ())]
    with progress(console, len(depths) * len(candidates)) as step:
        for name, candidate in candidates:
            tried.append((name, planning.estimate(candidate, config, depths, step, **more)))
            if tried[-1][1].fits:
                break
    console.print(memory_table(tried))
    name, last = tried[-1]
    ranges: dict[str, Any] = {}
    share = None
    if last.fits:
        if len(tried) > 1:
            console.print(f"the first that fits: {name}", markup=False, soft_wrap=True)
        with working(console, "ranges"):
            sweep = last.time(options.draws)
        ranges = {STEP: sweep.record()}
        share = planning.model_flops_share(config, last.setting, sweep.predicted[STEP] / 1e3)
        print_ranges(console, f"time per step of {config.num_layers} layers, {name}", ranges.values())
        console.print(f"model FLOPs utilisation {significant(100 * share)} %", markup=False)
        console.print(CAVEATS, soft_wrap=True)
    else:
        console.print("nothing that was tried fits", style="yellow")
    figures = {
        "model": model,
        "dtype": "bfloat16",
        "attention": kernel,
        "measured": False,
        "jax_version": jax.__version__,
        "libtpu_version": version("libtpu"),
        "data": [{"setting": each, **one.record()} for each, one in tried],
        "first_that_fits": name if last.fits else None,
        "model_flops_utilization": share,
        "ranges": ranges,
    }
    write_json(json_file, figures)


def memory_table(tried: list[tuple[str, Estimate]]) -> Table:
    """Returns the table of peak memory per chip: compiled steps of few layers, and the whole model."""
    layers = tried[0][1].config.num_layers
    table = Table(title=f"peak memory per chip in GiB; the chip has {tried[0][1].memory_bytes / GIB:.1f}")
    depths = sorted({depth for _, one in tried for depth in one.programs if depth != layers})
    table.add_column("setting")
    for depth in depths:
        table.add_column(f"{depth} layers,\ncompiled", justify="right")
    table.add_column(f"{layers} layers,\n{'compiled' if tried[0][1].is_compiled else 'extrapolated'}", justify="right")
    table.add_column("fits")
    for name, one in tried:
        programs = [one.programs.get(depth) for depth in depths]
        cells = ["too large" if each is None else f"{each.peak_bytes / GIB:.2f}" for each in programs]
        whole = "too large" if one.peak_bytes is None else f"{one.peak_bytes / GIB:.2f}"
        table.add_row(name, *cells, whole, "yes" if one.fits else "no")
    return table
